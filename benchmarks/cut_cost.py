"""What does a cut cost while a network trains? Seconds of each thing that it makes the engine do anew.

    python benchmarks/cut_cost.py --device cuda

Random images, gates closed at random, so that no data is needed. A run pays for planning and cutting, then for the
first steps at the new widths (kernels are chosen, loaded and compiled) with the capture of a graph, and for the first
evaluation. ``--cudnn`` leaves convolutions of each channel for itself to cuDNN, as ``narrowgate train`` does without
Triton.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _record import ROOT, about, table, write_json
from step_profile import cut_
from train_speed import GPU_RECIPE, Engine

from narrowgate.train.training import Training

STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--placement", default="before-norm", choices=("before-norm", "after-norm"))
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.2, help="of the open gates that each cut removes")
    parser.add_argument("--round-to", type=int, default=1, help="as shrink.round_to")
    parser.add_argument("--cudnn", action="store_true", help="not our own kernels for depthwise convolutions")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = cuts(arguments, Path(folder))
    out = arguments.out or ROOT / "benchmarks" / f"cut_cost_{arguments.device}.json"
    facts = {name: getattr(arguments, name) for name in ("model", "placement", "share", "round_to", "cudnn")}
    write_json(out, {"what": "seconds that a cut costs", **about(arguments.device), **facts, "cuts": found})
    print(table(list(found[0]), [[str(value) for value in row.values()] for row in found]))


def cuts(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The costs at full size, then of each cut."""
    text = GPU_RECIPE.format(model=arguments.model, placement=arguments.placement, compile="false")
    during = f'when = "during"\nevery = 1\nround_to = {arguments.round_to}'
    engine = Engine(text.replace('when = "off"', during), images(folder), folder / "run", arguments.device)
    training, found = engine.training, []
    torch.backends.cudnn.benchmark = False  # as in a run that shrinks
    if arguments.cudnn:
        from narrowgate.train import depthwise

        depthwise.fits = lambda *_: None  # type: ignore[assignment]
    for cut in range(arguments.cuts + 1):
        seconds = 0.0 if cut == 0 else timed(lambda: cut_(training, arguments.share))
        found.append({"parameters": sum(p.numel() for p in training.parts.model.parameters()), "cut": seconds})
        found[-1].update(costs(training))
    engine.close()
    return found


def costs(training: Training) -> dict[str, float]:
    """Seconds of the first epoch at these widths, of later ones, and of evaluations."""
    loop = training.loop_for(training.parts)
    first, second = (timed(lambda: training.run_epoch(loop, 0, training.recipe.lr_at)) for _ in range(2))
    looks = [timed(lambda: training.accuracy(training.parts.model, "held-out", True)) for _ in range(2)]
    ms = round(second * 1000 / training.feed.steps, 2)
    return {"first steps": first, "ms a step": ms, "first look": looks[0], "second look": looks[1]}


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work took, on the GPU too."""
    start = perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return round(perf_counter() - start, 2)


def images(folder: Path) -> Path:
    """Random images of CIFAR-100's size: enough for a few steps, and as many to look at as there are in a test."""
    generator = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", STEPS * 128), ("test", 10_000 if torch.cuda.is_available() else 500)):
        arrays[f"x_{split}"] = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 100
    np.savez(folder / "images.npz", **arrays)
    return folder / "images.npz"


if __name__ == "__main__":
    main()
