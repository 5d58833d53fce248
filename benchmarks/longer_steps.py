"""Does a network end alike when batches and steps are larger? Penalty in the loss, and as a proximal step.

``narrowgate train`` on scikit-learn's digits with gates before the norm, once with batches of 32 and once with three
times the images, the learning rate and so the length of a step: what ``shrink.batch`` does to a run as it shrinks. For
both ways to apply the same penalty: the share of gates that are closed at six moments, and what is left at the end.

    python benchmarks/longer_steps.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from _record import ROOT, about, table, write_json
from rich.console import Console

from narrowgate.train.engine import run
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import METRICS

EPOCHS, BATCH, LR, STRENGTH, LONGER = 60, 32, 0.1, 0.003, 3
MOMENTS = [10, 20, 30, 40, 50, 60]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "longer_steps.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for proximal, times in itertools.product((False, True), (1, LONGER)):
        rows.append(measure(proximal, times, arguments.seeds))
        print(rows[-1], flush=True)
        facts = {"seeds": arguments.seeds, "epochs": EPOCHS, "strength": STRENGTH, "moments": MOMENTS, "rows": rows}
        write_json(arguments.out, {"what": "closed gates and size by length of step", **about(), **facts})
    cells = [
        [
            row["penalty"],
            str(row["batch"]),
            *(f"{share:.1f}" for share in row["closed_percent"]),
            str(row["parameters"]),
        ]
        for row in rows
    ]
    print(table(["penalty", "batch", *(f"closed % at {epoch}" for epoch in MOMENTS), "parameters"], cells))


def measure(proximal: bool, times: int, seeds: list[int]) -> dict[str, Any]:
    """Means over the seeds of one way to step."""
    found = [measure_one(proximal, times, seed) for seed in seeds]
    closed = torch.tensor([one["closed"] for one in found]).mean(0)
    return {
        "penalty": "proximal" if proximal else "in the loss",
        "batch": BATCH * times,
        "lr": round(LR * times, 6),
        "closed_percent": [round(100 * float(share), 1) for share in closed],
        "parameters": round(sum(one["parameters"] for one in found) / len(found)),
        "parameters_each": [one["parameters"] for one in found],
        "accuracy": round(sum(one["accuracy"] for one in found) / len(found), 4),
    }


def measure_one(proximal: bool, times: int, seed: int) -> dict[str, Any]:
    """One run: the share of closed gates at some moments, and what it ended with."""
    settings = [
        "gates.placement=before-norm",
        f"penalty.strength={STRENGTH}",
        f"penalty.proximal={str(proximal).lower()}",
        f"optimizer.lr={LR * times:g}",
        f"train.batch={BATCH * times}",
        f"train.epochs={EPOCHS}",
        f"train.seed={seed}",
        "shrink.when=end",
        "checkpoint.every=1000",
    ]
    recipe = Recipe.load(ROOT / "recipes" / "digits-small.toml", settings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        result = run(recipe, folder, accelerator="cpu", console=Console(quiet=True))
        epochs = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    closed = [epochs[moment - 1]["closed"] for moment in MOMENTS]
    return {"closed": closed, "parameters": result.parameters, "accuracy": result.accuracy}


if __name__ == "__main__":
    main()
