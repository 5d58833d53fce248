"""The same networks pruned from the same start by narrowgate, Torch-Pruning and the rival methods, for as many epochs.

    python benchmarks/compare.py --network lenet5 --data mnist.npz --workers 12 --deadline 540      # again until done
    python benchmarks/compare.py --network lenet5 --collect
    python benchmarks/compare.py --network mobilenetv2 --data cifar100.npz --device cuda --workers 3 --deadline 540
    python benchmarks/compare.py --network mobilenetv2 --collect

Each run is a process of its own and ends as a file in the work folder, so that a second call does only what is left.
When all runs are done the networks of the first seed are timed, one by one; with ``--untimed``, by a later call.
``--collect`` makes
``benchmarks/compare_NETWORK.json`` and ``.md`` and ``docs/img/compare-NETWORK.png`` and ``.svg`` of what there is,
names what is missing, and brings ``docs/comparison-methods.md`` up to date; with ``--keep``, points of the last table
that have no runs in the work folder stay, so that one method can be run again. Settings are chosen with
``--validation 5000``: such runs hold out training images and never see the test set.

Needs the package with its ``train`` and ``report`` extras, and torch-pruning. What is compared, and how:
``docs/comparison-methods.md``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from _compare_methods import FAMILIES, NETWORKS, Job, jobs_of
from _compare_runner import Work, WorkError, run_all, short
from _record import ROOT, about, write_json


def main() -> None:
    options = _options()
    work = Work(options.work or ROOT / "runs" / f"compare-{options.network}")
    jobs = [
        job
        for job in jobs_of(options.network, options.seeds, options.sizes, options.methods)
        if options.part in (None, job.network)
    ]
    if options.collect:
        collect(options, jobs, work)
        return
    if options.data is None:
        sys.exit("give the images with --data FILE.npz")
    if options.only:
        one(options, work, next(job for job in jobs if job.name == options.only))
        return
    _require_torch_pruning(jobs)
    begun = time.monotonic()
    try:
        work.settings(_settings(options))
    except WorkError as error:
        sys.exit(str(error))
    done, left = run_all(jobs, work, sys.argv[1:], options.workers, options.threads, options.deadline)
    print(f"{done} runs done now, {len(jobs) - len(left)} of {len(jobs)} in all", flush=True)
    if not left and not options.untimed:
        from _compare_latency import time_all

        rest = None if options.deadline is None else options.deadline - (time.monotonic() - begun)
        first = [job for job in jobs if job.seed == options.seeds[0]]
        left = time_all(first, work, options.threads, options.seconds, rest)
    print(f"{len(left)} left: call again" if left else "all done: --collect makes the table", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=list(FAMILIES), required=True)
    parser.add_argument("--data", help="an .npz file with x_train, y_train, x_test and y_test")
    parser.add_argument("--device", default="cpu", help="where runs train: cpu (default) or cuda")
    parser.add_argument("--work", type=Path, help="folder of the runs (default runs/compare-NETWORK)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sizes", type=int, help="how many sizes of each method, the middle ones first (default all)")
    parser.add_argument("--part", choices=list(NETWORKS), help="only this one of its networks, such as lenet5-norm")
    parser.add_argument("--methods", nargs="+", help="only these, and the dense network")
    parser.add_argument("--epochs", type=int, help="for every method (default: the network's own)")
    parser.add_argument("--images", type=int, help="how many training images (default all)")
    parser.add_argument("--validation", type=int, default=0, help="training images to judge by instead of the test set")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="of each run, and of the timing")
    parser.add_argument("--deadline", type=float, help="seconds after which runs are stopped and nothing starts")
    parser.add_argument("--untimed", action="store_true", help="leave the timing to another call, or machine")
    parser.add_argument("--seconds", type=float, default=2.0, help="for timing a network at one batch size")
    parser.add_argument("--collect", action="store_true", help="make table and plot from the runs that there are")
    parser.add_argument("--keep", action="store_true", help="with --collect: points without runs stay as they are")
    parser.add_argument("--out", type=Path, help="folder for them, and no page (default benchmarks/ and docs/)")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.methods or ()) - {name for n in FAMILIES[options.network] for name in NETWORKS[n].methods}
    if unknown:
        parser.error(f"{options.network} has no method {', '.join(sorted(unknown))}")
    if options.part and options.part not in FAMILIES[options.network]:
        parser.error(f"{options.network} has only {', '.join(FAMILIES[options.network])}")
    options.epochs = options.epochs or NETWORKS[options.network].epochs
    return options


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a work folder share."""
    return {key: getattr(options, key) for key in ("network", "epochs", "images", "validation", "device")}


def _require_torch_pruning(jobs: list[Job]) -> None:
    if any(job.method == "torch-pruning" for job in jobs):
        from _torch_pruning import require

        require("--methods without torch-pruning")


def one(options: argparse.Namespace, work: Work, job: Job) -> None:
    """Run a single job and write its result; what is wrong with a method at a size is a result too."""
    import torch
    from _compare_job import Budget, run_job

    import narrowgate as ng
    from narrowgate.flow import CollapseError, ReplayError
    from narrowgate.train.watch import TrainingError

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)  # weights on their way to zero would slow a CPU down
    budget = Budget(options.epochs, options.images, options.validation, options.device)
    try:
        record, small, plan = run_job(job, budget, options.data, work.folder / "engine" / f"{job.name}-{os.getpid()}")
    except (CollapseError, ReplayError, TrainingError) as error:
        write_json(work.result(job), {"failure": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})
        return
    if job.seed == options.seeds[0]:
        ng.save(small, plan, work.model(job))
    write_json(work.result(job), {**record, "device": options.device})
    print(short(record))


def collect(options: argparse.Namespace, jobs: list[Job], work: Work) -> None:
    """Write the result, its tables and its plot."""
    from _compare_collect import gather, write_all
    from _compare_page import results_of

    last = results_of(options.network, options.out) if options.keep else None
    try:
        found = gather(jobs, work, about(), last)
    except WorkError as error:
        sys.exit(str(error))
    for line in write_all(found, options.network, options.out):
        print(line)


if __name__ == "__main__":
    main()
