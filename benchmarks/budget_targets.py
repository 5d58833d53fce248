"""Does a run with a budget end at its size? ``narrowgate train`` on scikit-learn's digits for many targets.

Every target with gates before and after the norm, removal during the run and at its end, and linear gates. Counted is
what the final plan leaves of the network without gates; the target is missed where that is more than 2 points off.

    python benchmarks/budget_targets.py
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

from _record import ROOT, about, table, write_json
from rich.console import Console

from narrowgate.train.engine import run
from narrowgate.train.recipe import Recipe

TARGETS = [f"{kind}: {share}%" for kind in ("params", "flops") for share in (50, 30, 10)]
EPOCHS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "budget_targets.json")
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for target, when in itertools.product(arguments.targets, ("during", "end")):
        for gates in ("before-norm", "after-norm", "linear"):
            rows.append(measure(target, when, gates))
            print(rows[-1], flush=True)
            missed = sum(abs(row["off_by_points"]) > 2 for row in rows)
            facts = {"runs": len(rows), "missed_by_more_than_2_points": missed, "rows": rows}
            write_json(arguments.out, {"what": "sizes that runs with a budget end at", **about(), **facts})
    keys = ("target", "gates", "removal", "left_percent", "off_by_points", "accuracy")
    print(table(list(keys), [[str(row[key]) for key in keys] for row in rows]))


def measure(target: str, when: str, gates: str) -> dict[str, Any]:
    """One run: what it was told and what it ended with."""
    settings = [f'budget.target="{target}"', f"shrink.when={when}", f"train.epochs={EPOCHS}", "penalty.strength=0.001"]
    if gates == "linear":
        settings += ["gates.kind=linear", "gates.placement=before-norm"]
    else:
        settings += [f"gates.placement={gates}"]
    recipe = Recipe.load(ROOT / "recipes" / "digits-small.toml", [*settings, "checkpoint.every=1000"])
    with tempfile.TemporaryDirectory() as folder:
        result = run(recipe, Path(folder) / "run", accelerator="cpu", console=Console(quiet=True))
    kind, share = target.rstrip("%").split(": ")
    left, full = (
        (result.parameters, result.parameters_full)
        if kind == "params"
        else (result.multiply_adds, result.multiply_adds_full)
    )
    percent = 100 * left / full
    return {
        "target": target,
        "gates": gates,
        "removal": when,
        "left_percent": round(percent, 2),
        "off_by_points": round(percent - float(share), 2),
        "accuracy": round(result.accuracy, 4),
    }


if __name__ == "__main__":
    main()
