"""What ``narrowgate sweep`` does once its options are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgate.console import table_console
from narrowgate.sweep.folder import REPORT, Outcome, Swept, begin, check_is_ours, held, outcomes
from narrowgate.sweep.space import Axis, Range, Trial, make_trials, read_axis
from narrowgate.sweep.trial import Job
from narrowgate.train.recipe import Recipe, RecipeError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Options:
    """How a sweep is run: nothing here changes a number of it."""

    data: str = ""
    resume: bool = False
    download: bool = False
    workers: int = 0
    cpus_per_trial: float = 1.0
    gpus_per_trial: float | None = None
    address: str = ""


def sweep(
    recipe: Path,
    over: Sequence[str],
    folder: Path,
    *,
    samples: int = 0,
    settings: Sequence[str] = (),
    options: Options | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Run a recipe over all values asked for, each in a folder of its own; how every trial ended, in order.

    Args:
        over: ``table.key=a,b,c`` or ``table.key=low..high``; ``seed`` is short for ``train.seed``.
        samples: how many points are drawn from ranges.
        settings: as for ``narrowgate train --set``, for all trials.
    """
    from narrowgate.sweep.tuning import drawing

    options = options or Options()
    console = console or table_console()
    axes = [read_axis(text) for text in over]
    base = Recipe.load(recipe, settings)
    _check_ends(recipe, settings, axes)
    trials = make_trials(axes, samples, drawing(base.train.seed))
    recipes = _recipes(recipe, settings, trials)
    check_is_ours(folder)
    with held(folder, 0.0):
        swept = begin(folder, Swept(base.to_toml(), tuple(over), samples, trials), options.resume)
        if swept.trials != trials:  # another release of Ray draws other points: those of the beginning count
            recipes = _recipes(recipe, settings, swept.trials)
        left = [outcome.trial.name for outcome in outcomes(folder, swept.trials) if outcome.result is None]
        counts = f"{len(swept.trials)} trials, {len(swept.trials) - len(left)} of them done before"
        console.print(f"{folder}: {counts}", markup=False)
        if left:
            if options.download:
                _fetch(recipes.values(), options.data)
            _run(folder, swept.trials, {name: recipes[name] for name in left}, options, console)
        found = outcomes(folder, swept.trials)
        _tell(folder, found, console)
    return found


def _run(folder: Path, trials: Sequence[Trial], recipes: dict[str, Recipe], options: Options, console: Console) -> None:
    """Have Ray run what is left."""
    from narrowgate.sweep.show import Show
    from narrowgate.sweep.tuning import fitting, ray_running, run_trials

    with ray_running(options.address):
        resources = fitting(options.cpus_per_trial, options.gpus_per_trial, options.workers)
        accelerator, devices = "cuda" if resources.gpus else "cpu", max(1, int(resources.gpus))
        jobs = {
            name: Job(
                _anywhere(recipe).to_toml(),
                str((folder / name).resolve()),
                _absolute(options.data or recipe.data.path),
                accelerator,
                devices,
            )
            for name, recipe in recipes.items()
        }
        with Show(console, folder, trials, len(trials) - len(jobs)) as show:
            run_trials(jobs, resources, show)


def _tell(folder: Path, found: Sequence[Outcome], console: Console) -> None:
    """The table, and one page that compares all finished runs."""
    from rich.text import Text

    from narrowgate.report import ReportError, write_report
    from narrowgate.sweep.show import print_outcomes

    print_outcomes(found, console)
    done = [outcome.folder for outcome in found if outcome.result is not None]
    if not done:
        return
    try:
        page = write_report(done, folder / REPORT)
    except (ReportError, RecipeError) as error:
        console.print(Text(f"no report: {error}"))
    else:
        which = "all of them" if len(done) == len(found) else "those that are done"
        console.print(Text(f"{page}: {which} on one page, open it in a browser"), soft_wrap=True)


def _recipes(path: Path, settings: Sequence[str], trials: Sequence[Trial]) -> dict[str, Recipe]:
    """The recipe of each trial, checked."""
    return {trial.name: _recipe(path, settings, trial.settings) for trial in trials}


def _recipe(path: Path, settings: Sequence[str], added: Sequence[str]) -> Recipe:
    try:
        return Recipe.load(path, [*settings, *added])
    except RecipeError as error:
        message = str(error)
        for setting in added:
            message = message.replace(f"--set {setting}", f"--over {setting}")
        message = message.replace("for example --set", "for example --over")
        raise RecipeError(message, *error.keys) from None


def _check_ends(path: Path, settings: Sequence[str], axes: Sequence[Axis]) -> None:
    """Refuse a range that the recipe's key does not take, whatever would be drawn from it."""
    for axis in axes:
        if isinstance(axis, Range):
            for end in (axis.low, axis.high):
                _recipe(path, settings, [f"{axis.key}={int(end) if axis.whole else end!r}"])


def _fetch(recipes: Iterable[Recipe], data: str) -> None:
    """Download each data set once, before many trials would."""
    from narrowgate.train.data import load_data

    for part in {(recipe.data.source, recipe.data.path): recipe.data for recipe in recipes}.values():
        load_data(part, data or None, download=True)


def _anywhere(recipe: Recipe) -> Recipe:
    """The recipe with a teacher that every worker's process finds."""
    return replace(recipe, teacher=replace(recipe.teacher, run=_absolute(recipe.teacher.run) or ""))


def _absolute(path: str) -> str | None:
    """A path that means the same in a worker's process; None for none."""
    return str(Path(path).expanduser().resolve()) if path else None
