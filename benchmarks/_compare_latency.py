"""The time of each small network beside the dense one, in turns; after the runs, when nothing else computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from _compare_methods import Job
from _compare_runner import Work
from _record import device_name, write_json

from narrowgate.measure.latency import latency

BATCHES = (1, 64)


def time_all(jobs: Sequence[Job], work: Work, threads: int, seconds: float, deadline: float | None) -> list[Job]:
    """Time the networks that were kept and have no times yet; which are left at the deadline."""
    begun = time.monotonic()
    torch.set_num_threads(threads)
    waiting = [job for job in jobs if work.model(job).exists() and not work.latency(job).exists()]
    for place, job in enumerate(waiting):
        if deadline is not None and time.monotonic() - begun >= deadline:
            return waiting[place:]
        dense = work.model(Job(job.network, "dense", 0, job.seed))
        if not dense.exists():
            print(f"{job.name}: not timed, {dense.name} is missing", flush=True)
            continue
        write_json(work.latency(job), time_one(*_both(dense, work.model(job)), seconds))
        print(f"{job.name}: timed", flush=True)
    return []


def _both(*paths: Any) -> tuple[Any, Any, Any]:
    """Two networks and an example for them. They are files of this benchmark's own, from its work folder."""
    dense, small = (torch.load(path, weights_only=False) for path in paths)
    return dense["model"], small["model"], dense["example"]


def time_one(dense: torch.nn.Module, small: torch.nn.Module, example: torch.Tensor, seconds: float) -> dict[str, Any]:
    """Milliseconds by batch size, medians and quartiles, and the ratio of the two networks round by round."""
    with torch.random.fork_rng():
        found = latency(dense, small, example, devices=("cpu",), modes=("eager",), batches=BATCHES, seconds=seconds)
    rows: dict[str, Any] = {"threads": found.threads, "device": device_name("cpu"), "torch": found.torch}
    for timing in found.timings:
        spreads = {"dense_ms": timing.before, "small_ms": timing.after}
        rows[f"batch {timing.batch}"] = {
            **{name: [round(1e3 * v, 5) for v in (s.q1, s.median, s.q3)] for name, s in spreads.items()},
            "ratio": [round(v, 4) for v in (timing.ratio.q1, timing.ratio.median, timing.ratio.q3)],
            "rounds": timing.rounds,
        }
    return rows
