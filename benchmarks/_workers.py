"""Many measurements at once: each in a process of its own, with limits on time and memory."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing here needs a GPU, and a forked process could not use it

Job = Callable[[], Any]


@dataclass(frozen=True)
class Limits:
    """How many processes at a time, and what each of them may use."""

    workers: int
    seconds: float
    gigabytes: float

    @classmethod
    def of(cls, options: argparse.Namespace) -> Limits:
        return cls(options.workers, options.seconds, options.gigabytes)


@dataclass(frozen=True)
class Outcome:
    """What a job returned, or in ``failure`` why it returned nothing; ``value`` is plain data, never tensors."""

    value: Any = None
    failure: str = ""
    where: str = ""
    seconds: float = 0.0
    peak_gb: float = 0.0


@dataclass
class _Running:
    key: str
    process: BaseProcess
    answer: Connection
    start: float
    peak: float = 0.0


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """``--workers``, ``--seconds`` and ``--gigabytes``, the fields of ``Limits``."""
    parser.add_argument("--workers", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"time limit for each (default {seconds:g})")
    parser.add_argument("--gigabytes", type=float, default=16.0, help="memory limit for each (default 16)")


def outcomes(jobs: Mapping[str, Job], limits: Limits) -> Iterator[tuple[str, Outcome]]:
    """Run jobs in the order given, as many at a time as there are workers; each outcome as soon as it is there."""
    _warm_up()
    waiting = list(jobs.items())[::-1]
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < limits.workers:
                running.append(_start(*waiting.pop()))
            wait([one.answer for one in running], timeout=0.2)
            for one in list(running):
                outcome = _look(one, limits)
                if outcome is not None:
                    running.remove(one)
                    _end(one)
                    yield one.key, outcome
    finally:
        for one in running:
            _end(one)


def _warm_up() -> None:
    """Plan a small network here, so that what ``torch.export`` imports need not be imported in every process."""
    import torch

    import narrowgate as ng

    torch.set_num_threads(1)
    ng.plan(torch.nn.Linear(2, 2), torch.rand(2, 2))


def _start(key: str, job: Job) -> _Running:
    context = multiprocessing.get_context("fork")  # what is imported here need not be imported again
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job, theirs))
    process.start()
    theirs.close()
    return _Running(key, process, ours, time.monotonic())


def _end(one: _Running) -> None:
    one.process.kill()
    one.process.join()
    one.answer.close()


def _look(one: _Running, limits: Limits) -> Outcome | None:
    """The outcome, if there is one by now."""
    one.peak = max(one.peak, _gigabytes_of(one.process.pid))
    seconds = time.monotonic() - one.start
    spent = {"seconds": round(seconds, 1), "peak_gb": round(one.peak, 1)}
    if one.answer.poll():
        try:
            return Outcome(**one.answer.recv(), **spent)
        except EOFError:
            one.process.join()
            return Outcome(failure=f"the process died with exit code {one.process.exitcode}", **spent)
    if seconds > limits.seconds:
        return Outcome(failure=f"more than {limits.seconds:.0f} s", **spent)
    if one.peak > limits.gigabytes:
        return Outcome(failure=f"more than {limits.gigabytes:.0f} GB of memory", **spent)
    return None


def _gigabytes_of(process: int | None) -> float:
    """The memory a process has in use, where the system says."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    kilobytes = [line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")]
    return int(kilobytes[0]) / 2**20 if kilobytes else 0.0


def _work(job: Job, answer: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:  # torch.export prints whole graphs where it gives up
        os.dup2(nowhere.fileno(), 2)
    try:
        result = {"value": job()}
    except Exception as error:  # anything at all is a finding, and the other jobs still count
        place = traceback.extract_tb(error.__traceback__)[-1]
        result = {
            "failure": f"{type(error).__name__}: {first_line(error)}",
            "where": f"{Path(place.filename).name}:{place.lineno} {place.name}",
        }
    answer.send(result)


def first_line(error: Exception) -> str:
    """The first line of an error's message, cut to a length that fits a table."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
