"""The paper's figures again: ours filled, the paper's numbers hollow. The same data gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowgate import norms
from narrowgate.reproduce.cifar import is_result, is_tested
from narrowgate.reproduce.paper import FIGURE_2, FIGURE_4, NETWORKS, WIDEST_INSENSITIVE, Kind
from narrowgate.reproduce.runs import Run

_SIGMAS = (0.1, 0.3, 1.0, 2.0)
_COLOURS = {"none": "#555555", "l2": "#2a9d4a", "l1": "#1f6fb4", "bounded-l1": "#d1492e"}
_MARKERS = {("none", False): "*", ("lin", False): "s", ("lin", True): "D", ("exp", False): "o", ("exp", True): "^"}
_GATES = {"lin": "#1f6fb4", "exp": "#d1492e"}
# In no way that the paper has, or shorter: without a teacher and with one.
_OWN: dict[bool, Any] = {
    taught: {"marker": marker, "color": "#7b3fa0", "markersize": 9, "linestyle": "none"}
    for taught, marker in ((False, "P"), (True, "X"))
}
STYLE: Any = {
    "svg.hashsalt": "narrowgate",  # else the names inside an SVG are random
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that every machine draws the same
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.dpi": 120,
}


def draw_all(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write ``fig1`` to ``fig4`` as PNG and SVG into a folder; what was written."""
    import matplotlib

    matplotlib.use("Agg")
    drawings: dict[str, Callable[[], Any]] = {
        "fig1-norms": _norms,
        "fig2-cifar100": lambda: _trade_off(runs),
        "fig3-thresholds": lambda: _thresholds(runs),
        "fig4-resnet50": lambda: _resnet50(runs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with matplotlib.rc_context(STYLE):
        for name, draw in drawings.items():
            written += save(draw(), folder / name)
    return written


def save(figure: Any, stem: Path) -> list[Path]:
    """Without dates and versions, which would change with every run."""
    import matplotlib.pyplot as plt

    paths = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    for path, metadata in zip(paths, ({"Software": None}, {"Date": None, "Creator": None}), strict=True):
        figure.savefig(path, metadata=metadata, bbox_inches="tight")
    plt.close(figure)
    return paths


def _subplots(*arguments: Any, **options: Any) -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(*arguments, **options)


def _norms() -> Any:
    figure, axes = _subplots(1, 2, figsize=(8, 3), sharey=True)
    x = torch.linspace(-2, 2, 401, dtype=torch.float64)
    for axis, p in zip(axes, (1, 2), strict=True):
        axis.plot(x, x.abs() ** p, "k--", label=f"|x|{'²' if p == 2 else ''}")
        for sigma in _SIGMAS:
            values = [float(norms.bounded_lp(each, p, sigma)) for each in x]
            axis.plot(x, values, label=f"bounded, σ = {sigma:g}")
        axis.set(title=f"bounded-l{p} norm of one number", xlabel="x", ylim=(-0.05, 2))
    axes[0].legend(fontsize=8)
    return figure


def _trade_off(runs: Sequence[Run]) -> Any:
    figure, axes = _subplots(1, 3, figsize=(9.6, 3.6), layout="constrained")
    handles: dict[Kind, Any] = {}
    for axis, (network, title) in zip(axes, NETWORKS.items(), strict=True):
        for row in FIGURE_2:
            if row.network == network and row.pruned is not None and row.accuracy is not None:
                _mark(axis, row.kind, row.pruned, row.accuracy, hollow=True)
        mine = [run for run in runs if run.network == network and is_tested(run)]
        for run in mine:
            if is_result(run):
                _mark(axis, run.kind, 100 * run.pruned, 100 * run.accuracy)
            else:
                axis.plot([100 * run.pruned], [100 * run.accuracy], **_OWN[run.taught])
        if not mine:
            axis.text(0.5, 0.05, "no run of ours yet", transform=axis.transAxes, ha="center", color="#777777")
        axis.set(title=title, xlabel="parameters pruned, %", xlim=(-4, 100))
        axis.margins(y=0.3)
    axes[0].set_ylabel("test accuracy, %")
    for kind in dict.fromkeys(row.kind for row in FIGURE_2):
        handles[kind] = _mark(axes[0], kind, float("nan"), float("nan"))
    labels = [*map(str, handles), "our own way, or shorter", "the same, with a teacher"]
    own = [axes[0].plot([float("nan")], [float("nan")], **style)[0] for style in _OWN.values()]
    figure.legend([*handles.values(), *own], labels, loc="outside lower center", ncol=4, fontsize=8.5)
    figure.suptitle("CIFAR-100; filled: ours, one marker a run; hollow: the paper's numbers", fontsize=9)
    return figure


def _mark(axis: Any, kind: Kind, x: float, y: float, hollow: bool = False) -> Any:
    colour = _COLOURS[kind.regulariser]
    face = "none" if hollow else colour
    marker = _MARKERS[kind.gate, kind.scheduled]
    (line,) = axis.plot([x], [y], marker, color=colour, markerfacecolor=face, markersize=8, linestyle="none")
    return line


def _thresholds(runs: Sequence[Run]) -> Any:
    figure, axes = _subplots(2, 3, figsize=(9.6, 5), sharex=True, layout="constrained")
    for column, (network, title) in enumerate(NETWORKS.items()):
        mine = [run for run in runs if run.network == network and run.curve is not None and is_tested(run)]
        for run in (run for run in mine if run.kind in (Kind("l1", "lin"), Kind("l1", "exp"))):
            assert run.curve is not None
            label, line = (str(run.kind), "o-") if is_result(run) else (f"{run.kind}, our own way", "P--")
            for axis, key in zip(axes[:, column], ("pruned", "accuracy"), strict=True):
                values = [100 * value for value in run.curve[key]]
                colour = _GATES[run.kind.gate] if line == "o-" else _OWN[False]["color"]
                axis.plot(run.curve["threshold"], values, line, ms=4, color=colour, label=label)
        for axis in axes[:, column]:
            axis.set_xscale("symlog", linthresh=1e-8)
            axis.set(xlim=(0, 0.3), ylim=(0, 102))
            axis.set_xticks([0, 1e-6, 1e-4, 1e-2])
            axis.axvline(WIDEST_INSENSITIVE, color="#999999", linestyle=":")
            if not axis.lines[1:]:
                axis.text(0.5, 0.5, "no run with a curve yet", transform=axis.transAxes, ha="center", color="#777777")
        axes[0, column].set_title(title)
        axes[1, column].set_xlabel("threshold on the gates' values")
    axes[0, 0].set_ylabel("parameters pruned, %")
    axes[1, 0].set_ylabel("test accuracy, %")
    handles = {line.get_label(): line for axis in axes.flat for line in axis.lines if line.get_label()[0] != "_"}
    if handles:
        axes[0, 0].legend(list(handles.values()), list(handles))
    figure.suptitle("CIFAR-100; dotted: 1e-3, up to where the paper finds exponential gates insensitive", fontsize=9)
    return figure


def _resnet50(runs: Sequence[Run]) -> Any:
    figure, axis = _subplots(figsize=(5.5, 3.6))
    for row in FIGURE_4:
        if row.sparsity is not None and row.top1_lost is not None:
            _mark(axis, row.kind, 100 - row.sparsity, -row.top1_lost, hollow=True)
    baseline = [run.accuracy for run in runs if _of_resnet50(run) and run.kind.gate == "none"]
    gated = [run for run in runs if _of_resnet50(run) and run.kind.gate != "none"]
    for run in gated if baseline else ():
        change = 100 * (run.accuracy - sum(baseline) / len(baseline))
        _mark(axis, run.kind, 100 * (1 - run.pruned), change)
    if not (gated and baseline):
        axis.text(0.5, 0.05, "ours: not run, needs ImageNet", transform=axis.transAxes, ha="center", color="#777777")
    axis.axhline(0, color="#999999", linestyle=":")
    axis.set(xlim=(0, 102), ylim=(-7, 1), xlabel="parameters left, %", ylabel="top-1 against the whole network, points")
    axis.set_title("ResNet-50, ImageNet: l1 + exp (hollow: the paper)")
    return figure


def _of_resnet50(run: Run) -> bool:
    known = {row.kind for row in FIGURE_4}
    return run.data == "imagenet" and run.network == "resnet50" and run.validation is None and run.kind in known
