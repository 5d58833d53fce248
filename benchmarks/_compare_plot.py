"""Accuracy over parameters, a line for each method, a panel for each network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgate.reproduce.figures import STYLE, save

_COLOURS = {
    "narrowgate-l1": "#1f6fb4",
    "narrowgate-bounded-l1": "#d1492e",
    "torch-pruning": "#2a9d4a",
    "magnitude": "#555555",
    "slimming": "#8a5fb0",
    "l0": "#c28a00",
    "sparse-selection": "#17a2a8",
    "ista": "#b03a7a",
    "group-lasso": "#7a5230",
    "group-lasso-steps": "#e08214",
}
_MARKERS = dict(zip(_COLOURS, "os^vDPX*<>", strict=True))


def draw(record: dict[str, Any], stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``; the same record gives the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    stem.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        return save(_figure(record), stem)


def _figure(record: dict[str, Any]) -> Any:
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    networks = record["networks"]
    figure, axes = plt.subplots(1, len(networks), figsize=(5 * len(networks), 4.4), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, found in zip(axes[0], networks.values(), strict=True):
        hidden = _panel(axis, found, handles)
        below = f"\n({hidden} more lie below)" if hidden else ""
        axis.set(title=f"{found['title']}{below}", xlabel="parameters left", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g} k"))
        axis.xaxis.set_minor_formatter(NullFormatter())
    axes[0][0].set_ylabel(f"accuracy on {record['judged_on']} images, %")
    columns = min(5, len(handles))
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncol=columns, fontsize=8)
    epochs = record["settings"]["epochs"]
    figure.suptitle(f"{epochs} epochs each from the same weights; bars: deviation between seeds", fontsize=9)
    return figure


def _panel(axis: Any, found: dict[str, Any], handles: dict[str, Any]) -> int:
    """Draw a network's points; how many are too far below to be shown."""
    floor, hidden = found["floor"], 0
    for method in dict.fromkeys(point["method"] for point in found["points"]):
        points = [point for point in found["points"] if point["method"] == method]
        if method == "dense":
            axis.axhline(100 * points[0]["accuracy"], color="#999999", linestyle=":")
            continue
        shown = [point for point in points if floor is None or point["accuracy"] >= floor]
        hidden += len(points) - len(shown)
        shown.sort(key=lambda point: point["parameters"])
        handles[points[0]["label"]] = axis.errorbar(
            [point["parameters"] for point in shown],
            [100 * point["accuracy"] for point in shown],
            yerr=[100 * (point["accuracy_deviation"] or 0.0) for point in shown],
            color=_COLOURS[method],
            marker=_MARKERS[method],
            markersize=6,
            linewidth=2.0 if points[0]["ours"] else 1.0,
            linestyle="-" if points[0]["ours"] else "--",
            capsize=2,
        )
    return hidden
