"""What does shrinking while training save? One recipe twice in one go: removal during the run, and only at its end.

Both runs are ``narrowgate train`` with the same recipe and seed but for ``shrink.when``, and what ``--during`` says:
when to cut, and whether batches grow. A run that was stopped goes on where it was, so the command can be given again
until it ends; the seconds are those of all parts.

    python benchmarks/shrinking.py --data cifar100.npz --runs runs/shrinking --during shrink.batch=1024
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _record import ROOT, about, table, write_json

from narrowgate.reproduce.record import collect
from narrowgate.train.engine import run
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import RESULT

KINDS = ("during", "end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "ours-cifar100-mobilenetv2.toml")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="as for narrowgate train")
    parser.add_argument("--during", action="append", default=[], help="a --set for the run that shrinks alone")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--runs", type=Path, required=True, help="where the run folders go")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        own = arguments.during if kind == "during" else []
        recipe = Recipe.load(arguments.recipe, [*arguments.settings, f'shrink.when="{kind}"', *own])
        run(recipe, arguments.runs / kind, data_path=str(arguments.data), resume=True)
    rows = {
        kind: collect(arguments.runs / kind, arguments.recipe)
        for kind in KINDS
        if (arguments.runs / kind / RESULT).exists()
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ratio = rows["during"]["seconds"] / rows["end"]["seconds"] if len(rows) == len(KINDS) else None
    out = arguments.out or ROOT / "results" / "cifar100" / f"shrinking-{arguments.recipe.stem}.json"
    facts = {
        "recipe": arguments.recipe.name,
        "settings": arguments.settings,
        "during": arguments.during,
        "time_ratio": ratio,
        "runs": rows,
    }
    write_json(out, {"what": "the same recipe, removing during training and at its end", **about(device), **facts})
    keys = ("seconds", "parameters", "multiply_adds")
    cells = [[kind, str(row["accuracy"]["final"]), *(str(row[key]) for key in keys)] for kind, row in rows.items()]
    print(table(["removal", "accuracy", *keys], cells))
    print(f"time during / end: {ratio}")


if __name__ == "__main__":
    main()
