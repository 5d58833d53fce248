"""Figure 2 as tables: accuracy and share of parameters pruned on CIFAR-100, ours beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from narrowgate.reproduce.paper import EPOCHS, FIGURE_2, NETWORKS, CifarRow
from narrowgate.reproduce.runs import Run, count, groups, mean_and_spread
from narrowgate.reproduce.tables import NO_NUMBER, NO_RUN, Table, judge

_HEAD = ("kind", "paper pruned %", "accuracy %", "ours pruned %", "accuracy %", "runs", "reached", "settings or recipe")
_NOTE = (
    "Pruned: share of the parameters of the ungated network. Accuracy: of the small network on the test images. "
    "A dash: the paper has this one in a plot only. Reached: what is not worse than in the paper."
)


def tables(runs: Sequence[Run]) -> list[Table]:
    """A table a network; then what the paper has no row for, shorter runs, and tries on held-out images."""
    ours = [run for run in runs if run.data == "cifar100" and run.network in NETWORKS]
    full = [run for run in ours if is_result(run)]
    found = [_network(network, [run for run in full if run.network == network]) for network in NETWORKS]
    others = [run for run in ours if not is_result(run) and run.validation is None]
    tries = [run for run in ours if run.validation is not None]
    if others:
        found.append(_others(others))
    if tries:
        found.append(_tries(tries))
    return found


def is_result(run: Run) -> bool:
    """Whether a run stands beside a row of the paper: full length, all training images, a kind that it has."""
    whole = is_tested(run) and run.epochs >= EPOCHS.get(run.network, 0)
    return whole and not run.our_own and run.kind in {row.kind for row in FIGURE_2}


def is_tested(run: Run) -> bool:
    """Whether a run had all training images and was judged on the test images, in whatever way it prunes."""
    return run.data == "cifar100" and run.validation is None


def _network(network: str, runs: Sequence[Run]) -> Table:
    rows: list[tuple[str, ...]] = []
    for kind in dict.fromkeys(row.kind for row in FIGURE_2):
        points = [row for row in FIGURE_2 if row.network == network and row.kind == kind]
        mine = [(group, _nearest(points, group)) for group in groups(run for run in runs if run.kind == kind)]
        for point in points:
            paired = [group for group, nearest in mine if nearest is point]
            rows += [(str(kind), *_paper(point), *_ours(group, point)) for group in paired]
            if not paired:
                rows.append((str(kind), *_paper(point), NO_RUN, *[""] * 3, f"`{point.recipe}`"))
    return Table(f"Figure 2: {NETWORKS[network]} on CIFAR-100, {EPOCHS[network]} epochs", _HEAD, tuple(rows), _NOTE)


def _nearest(points: Sequence[CifarRow], group: Sequence[Run]) -> CifarRow:
    """Of several markers of one kind, the one that prunes most nearly as much."""
    pruned = 100 * statistics.fmean(run.pruned for run in group)
    return min(points, key=lambda point: abs((point.pruned or 0) - pruned))


def _paper(point: CifarRow) -> tuple[str, str]:
    return tuple(NO_NUMBER if value is None else f"{value:.2f}" for value in (point.pruned, point.accuracy))  # type: ignore[return-value]


def _ours(group: Sequence[Run], point: CifarRow) -> tuple[str, ...]:
    pruned, accuracy = [100 * run.pruned for run in group], [100 * run.accuracy for run in group]
    reached = ""
    if point.pruned is not None and point.accuracy is not None:
        means = [round(statistics.fmean(values), 4) for values in (pruned, accuracy)]
        reached = judge(means[0] >= point.pruned, means[1] >= point.accuracy)
    return mean_and_spread(pruned), mean_and_spread(accuracy), count(group), reached, group[0].settings


def _others(runs: Sequence[Run]) -> Table:
    rows = []
    for group in groups(runs):
        run = group[0]
        why = _why_apart(run)
        pruned, accuracy = [100 * each.pruned for each in group], [100 * each.accuracy for each in group]
        numbers = (mean_and_spread(pruned), mean_and_spread(accuracy), count(group))
        kind = f"{run.kind}, {run.epochs} epochs ({why})"
        rows.append((NETWORKS[run.network], kind, *numbers, run.settings))
    head = ("network", "kind", "pruned %", "accuracy %", "runs", "settings")
    return Table(
        "CIFAR-100: runs that are not the paper's", head, tuple(rows), "None of them fills a row of the paper's."
    )


def _why_apart(run: Run) -> str:
    short = [f"short: {EPOCHS[run.network]} in the paper"] if run.epochs < EPOCHS[run.network] else []
    given = ["given size"] if run.steered else []
    given += ["taught"] if run.taught else []
    given += ["other images"] if run.augmented else []
    given += run.unlike
    return ", ".join(given + short) or "not in the paper"


def _tries(runs: Sequence[Run]) -> Table:
    rows = []
    for group in groups(runs):
        run = group[0]
        accuracy = [100 * (each.validation or 0) for each in group]
        numbers = (mean_and_spread([100 * each.pruned for each in group]), mean_and_spread(accuracy), count(group))
        rows.append((NETWORKS[run.network], f"{run.kind}, {run.epochs} epochs", *numbers, run.settings))
    head = ("network", "kind", "pruned %", "held-out accuracy %", "runs", "settings")
    note = "Trained without the held-out images and judged on them: these choose settings, and the test set does not."
    return Table("CIFAR-100: settings tried on held-out training images", head, tuple(rows), note)
