"""The runs that the paper's tables still lack: which these are, and training them one after the other."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgate.flow import CollapseError, ReplayError, VerificationError
from narrowgate.reproduce import command
from narrowgate.reproduce.paper import FIGURE_2, FIGURE_4, TABLE_1, TABLE_2
from narrowgate.reproduce.record import RecordError
from narrowgate.train.engine import launch, run
from narrowgate.train.recipe import Recipe
from narrowgate.train.watch import TrainingError

if TYPE_CHECKING:
    from rich.console import Console

RECIPES = {
    "mnist": [row.recipe for row in TABLE_1 if row.recipe],
    "cifar100": [row.recipe for row in FIGURE_2],
    "imagenet": [*(row.recipe for row in TABLE_2), *(row.recipe for row in FIGURE_4)],
}
_OF_ONE_RUN = (TrainingError, CollapseError, ReplayError, VerificationError)
"""What may go wrong in a run and says nothing about the others."""


@dataclass(frozen=True)
class Options:
    """How the runs are made, but for what their recipes say."""

    data: str | None = None
    recipes: Path = Path("recipes")
    runs: Path = Path("runs/reproduce")
    seeds: int = 1
    only: Sequence[str] = ()
    settings: Sequence[str] = ()
    curve: bool = False
    download: bool = False
    accelerator: str = "auto"


@dataclass(frozen=True)
class Missing:
    """A run that a row has no record of."""

    base: Path
    recipe: Recipe
    folder: Path
    record: Path


def missing(what: str, results: Path, options: Options) -> list[Missing]:
    """What is to be trained for the rows of ``mnist``, ``cifar100`` or ``imagenet``: all of one seed, then the next.

    A run has its record if a file such as ``results/cifar100/mobilenetv2-l1-exp-seed0.json`` is there.
    """
    found = []
    for seed in range(options.seeds):
        for name in _names(what, options.only):
            place = f"{_short(what, name)}-seed{seed}"
            record, base = results / what / f"{place}.json", options.recipes / f"{name}.toml"
            if record.exists():
                continue
            if not base.is_file():
                raise RecordError(f"there is no recipe {base}; give the folder of the paper's recipes with --recipes")
            recipe = Recipe.load(base, [*options.settings, f"train.seed={seed}"])
            found.append(Missing(base, recipe, options.runs / what / place, record))
    return found


def train_missing(what: str, results: Path, options: Options, console: Console) -> list[str]:
    """Train, go on with what was begun, and keep a record of each run; the names of those that failed."""
    jobs, failed = missing(what, results, options), []
    console.print(f"{_runs(len(jobs))} to make for {what}" if jobs else f"no run of {what} is missing")
    device = launch(options.accelerator, 1, 1).device.type if jobs else ""  # or an error that is none of one run's
    for place, job in enumerate(jobs, 1):
        where = f"{job.base.stem}, seed {job.recipe.train.seed}, in {job.folder}"
        console.print(f"\n{place} of {len(jobs)}: {where}", markup=False)
        gc.collect()  # a run refers to itself in circles, and would hold a GPU's memory beside the next one
        try:
            run(
                job.recipe,
                job.folder,
                data_path=options.data,
                resume=True,
                download=options.download,
                accelerator=options.accelerator,
                console=console,
            )
        except _OF_ONE_RUN as error:
            failed.append(job.folder.name)
            console.print(f"{job.folder.name} failed: {error}", style="red", markup=False)
            continue
        curve = options.curve and job.recipe.gates.kind != "none"
        kept = command.record(job.folder, job.record, job.base, "", curve, options.data, device)
        console.print(kept, markup=False)
    return failed


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"


def _names(what: str, only: Sequence[str]) -> list[str]:
    """The recipes of the rows, or those of some names in the order in which they were asked for."""
    names = RECIPES[what]
    chosen: dict[str, None] = {}
    for pattern in only or ["*"]:
        matching = [name for name in names if fnmatchcase(_short(what, name), pattern)]
        if not matching:
            raise RecordError(f"{what} has no row {pattern!r}; its rows: {', '.join(_short(what, n) for n in names)}")
        chosen |= dict.fromkeys(matching)
    return list(chosen)


def _short(what: str, name: str) -> str:
    """A recipe's name without what all of its section have in common."""
    return name.removeprefix(f"{what}-").removeprefix("lenet5-")
