"""The time of each small network beside the dense one, in turns; after the runs, when nothing else computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from _compare_methods import NETWORKS, Job, recipe_of
from _compare_runner import Work
from _record import device_name, write_json

from narrowgate import load
from narrowgate.measure.latency import latency
from narrowgate.train.recipe import Recipe
from narrowgate.train.setup import plain_model

BATCHES = (1, 64)
IMAGES = {"mnist": (10, (1, 28, 28)), "cifar100": (100, (3, 32, 32))}


def time_all(jobs: Sequence[Job], work: Work, threads: int, seconds: float, deadline: float | None) -> list[Job]:
    """Time the networks that were kept and have no times yet; which are left at the deadline."""
    begun = time.monotonic()
    torch.set_num_threads(threads)
    waiting = [job for job in jobs if work.model(job).exists() and not work.latency(job).exists()]
    for place, job in enumerate(waiting):
        if deadline is not None and time.monotonic() - begun >= deadline:
            return waiting[place:]
        dense = Job(job.network, "dense", 0, job.seed)
        if not work.model(dense).exists():
            print(f"{job.name}: not timed, {dense.name} is missing", flush=True)
            continue
        example = torch.rand(1, *_full(job)[2])
        write_json(work.latency(job), time_one(kept(dense, work), kept(job, work), example, seconds))
        print(f"{job.name}: timed", flush=True)
    return []


def kept(job: Job, work: Work) -> torch.nn.Module:
    """The small network of a run."""
    return load(work.model(job), lambda: plain_model(*_full(job))).eval()


def _full(job: Job) -> tuple[Recipe, int, tuple[int, int, int]]:
    """What makes a run's network at full size: recipe, classes and shape of the images."""
    recipe = recipe_of(job, NETWORKS[job.network].epochs)
    return recipe, *IMAGES[recipe.data.source]


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
