"""Table 1: LeNet-5 on MNIST, ours beside the paper's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from narrowgate.reproduce.paper import TABLE_1, LeNetRow, lenet_weights
from narrowgate.reproduce.runs import Run, count, groups, mean_and_spread
from narrowgate.reproduce.tables import NO_RUN, Table, judge

_NOTE = (
    "Kept: channels of the two convolutions, flattened features, neurons, of 20-50-800-500. Weights: those of a "
    "network of these widths, biases not counted, since the paper's has none. Spread: the standard deviation of "
    "several runs. Reached: what is not worse than in the paper."
)
_WORDS = {
    ", chosen": " Chosen: the best of its kind and strength on held-out training images.",
    "with biases": " With biases: made by `benchmarks/mnist_table1.py`.",
}  # of the settings, told where a table has them


def tables(runs: Sequence[Run]) -> list[Table]:
    """Table 1, runs that belong to none of its rows, and the tries on held-out images that led to its settings."""
    ours = [run for run in runs if run.data == "mnist" and run.widths is not None]
    tries = [run for run in ours if run.validation is not None]
    tested = [run for run in ours if run.validation is None]
    others = [run for run in tested if row_of(run) is None]
    found = [_results(tested, _chosen(tries))]
    found += [_others(others)] if others else []
    return [*found, _tries(tries)] if tries else found


def row_of(run: Run) -> LeNetRow | None:
    """The row of Table 1 that a run belongs to, of the nearest strength; None for other kinds and for shorter runs."""
    kinds = [row for row in TABLE_1 if row.regulariser == run.kind.regulariser and row.recipe]
    rows = [row for row in kinds if run.epochs >= row.epochs]
    if not rows or run.strength is None or run.our_own or run.kind.scheduled or run.kind.gate != "exp":
        return None
    strength = run.strength
    return min(rows, key=lambda row: abs(math.log(row.strength) - math.log(max(strength, 1e-12))))


def _chosen(tries: Sequence[Run]) -> set[str]:
    """The settings with the lowest held-out error of their regulariser, strength and length."""
    best: dict[tuple[str, float | None, int], tuple[float, str]] = {}
    for group in groups(tries):
        error = statistics.fmean(1 - (run.validation or 0) for run in group)
        key = (group[0].kind.regulariser, group[0].strength, group[0].epochs)
        best[key] = min(best.get(key, (error, group[0].config)), (error, group[0].config))
    return {config for _, config in best.values()}


def _results(runs: Sequence[Run], chosen: set[str]) -> Table:
    rows = []
    for row in TABLE_1:
        paper = (row.method, _dashed(row.kept), f"{lenet_weights(row.kept):,.0f}", f"{row.error:.2f}")
        mine = groups(run for run in runs if row_of(run) is row) if row.recipe else []
        if not mine:
            rows.append((*paper, NO_RUN if row.recipe else "cited there", *[""] * 5))
        rows += [(*paper, *_ours(row, group, chosen)) for group in mine]
    head = ("row", "paper kept", "weights", "error %", "ours kept", "weights", "error %", "runs", "reached", "settings")
    words = [told for word, told in _WORDS.items() if any(word in row[-1] for row in rows)]
    return Table("Table 1: LeNet-5 on MNIST", head, tuple(rows), _NOTE + "".join(words))


def _ours(row: LeNetRow, group: Sequence[Run], chosen: set[str]) -> tuple[str, ...]:
    kept = _mean_widths(group)
    weights, errors = statistics.fmean(map(_weights, group)), [_error(run) for run in group]
    smaller, better = weights <= lenet_weights(row.kept), round(statistics.fmean(errors), 4) <= row.error
    settings = f"{group[0].settings}, {group[0].epochs} epochs{', chosen' if group[0].config in chosen else ''}"
    reached = judge(smaller, better)
    return _dashed(kept), f"{weights:,.0f}", mean_and_spread(errors), count(group), reached, settings


def _others(runs: Sequence[Run]) -> Table:
    rows = []
    for group in sorted(groups(runs), key=lambda group: statistics.fmean(map(_weights, group))):
        weights, errors = [_weights(run) for run in group], [_error(run) for run in group]
        best = min(group, key=lambda run: (_error(run), _weights(run)))
        numbers = (f"{statistics.fmean(weights):,.0f}", mean_and_spread(errors), count(group))
        beaten = _beaten(statistics.fmean(weights), statistics.fmean(errors))
        single = f"{_dashed(best.widths or ())}: {_weights(best):,.0f}, {_error(best):.2f} %"
        also = "; ".join(name for name in _beaten(_weights(best), _error(best)) if name not in beaten)
        settings = f"{group[0].settings}, {group[0].epochs} epochs"
        kept = _dashed(_mean_widths(group))
        rows.append((str(group[0].kind), kept, *numbers, "; ".join(beaten), single, also, settings))
    head = ("kind", "kept", "weights", "error %", "runs", "beats", "its best run", "which beats also", "settings")
    note = (
        "None of them fills a row of the paper's. Beats: rows of Table 1 that have more weights and a higher error "
        "than the mean of these runs; the best run is the one with the lowest error."
    )
    return Table("MNIST: runs that are not the paper's", head, tuple(rows), note)


def _weights(run: Run) -> float:
    return lenet_weights(run.widths or ())


def _error(run: Run) -> float:
    return 100 * (1 - run.accuracy)


def _beaten(weights: float, error: float) -> list[str]:
    """Rows of the paper that are larger and worse."""
    return [row.method for row in TABLE_1 if row.recipe and weights < lenet_weights(row.kept) and error < row.error]


def _tries(runs: Sequence[Run]) -> Table:
    rows = []
    for group in sorted(groups(runs), key=lambda group: (str(group[0].kind), -(group[0].strength or 0), group[0].file)):
        errors = [100 * (1 - (run.validation or 0)) for run in group]
        weights = statistics.fmean(map(_weights, group))
        run = group[0]
        kept = _dashed(_mean_widths(group))
        settings = f"{run.settings}, {run.epochs} epochs"
        rows.append((str(run.kind), settings, kept, f"{weights:,.0f}", mean_and_spread(errors), count(group)))
    head = ("kind", "settings", "kept", "weights", "held-out error %", "runs")
    note = "Trained without the held-out images and judged on them: these choose settings, and the test set does not."
    return Table("Table 1: settings tried on held-out training images", head, tuple(rows), note)


def _mean_widths(group: Sequence[Run]) -> tuple[float, ...]:
    return tuple(statistics.fmean(widths) for widths in zip(*(run.widths or () for run in group), strict=True))


def _dashed(widths: Sequence[float]) -> str:
    return "-".join(f"{width:.1f}".removesuffix(".0") for width in widths)
