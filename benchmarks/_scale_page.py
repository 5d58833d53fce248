"""The tables and the figure of ``docs/scale.md``, from ``scale.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _record import ROOT
from _scale_model import GPUS, Network, Phase, link, saved

from narrowgate.reproduce.figures import STYLE, save
from narrowgate.reproduce.page import between_markers

PAGE = ROOT / "docs" / "scale.md"
FIGURE = ROOT / "docs" / "img" / "scale"
SGD, ADAM = 12, 16  # bytes a parameter: weight and gradient, and one or two numbers of the optimizer
_COLOURS = ("#1f6fb4", "#d1492e", "#2a9d4a")


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Every table of the page, by the name of its markers."""
    makers = {"memory": _memory, "sizes": _sizes, "full": _full, "steps": _steps, "runs": _runs, "links": _links}
    makers |= {"forwards": _forwards, "cuts": _cuts}
    return {name: _table(*make(found)) for name, make in makers.items()}


def fill(text: str, found: dict[str, Any]) -> str:
    """The page's text with its tables as they are now."""
    return between_markers(text, tables(found))


def write(found: dict[str, Any]) -> list[Path]:
    """Put the tables into the page and draw the figure; what was written."""
    PAGE.write_text(fill(PAGE.read_text(), found))
    return [PAGE, *draw(found, FIGURE)]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _memory(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    titles = {
        "without_weights": "planned from its gates, on the meta device",
        "from_disk": "planned with weights from disk, and cut",
    }
    rows = []
    for key, title in titles.items():
        row = found["memory"][key]
        sizes = f"{row['parameters'] / 1e6:,.0f} → {row['parameters_small'] / 1e6:,.0f} M"
        memory = f"{row['grown_bytes'] / 1e9:.2f} GB"
        rows.append([title, f"{row['model_bytes'] / 1e9:.1f} GB", sizes, memory, f"{row['seconds']:.0f} s"])
    return ["what", "size of the model", "parameters", "memory it took", "time, one core"], rows


def _sizes(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["network", "parameters, M", "step, ms", "gradients, MB", "with SGD, MB", "with Adam, MB"]
    rows = []
    for name, one in found["networks"].items():
        first, last = one["phases"][0], one["phases"][-1]
        cells = [_change(first["parameters"] / 1e6, last["parameters"] / 1e6, ".2f")]
        cells.append(_change(1e3 * first["step"], 1e3 * last["step"], ".2f"))
        for size in (found["assumed"]["bytes_per_gradient"], SGD, ADAM):
            cells.append(_change(size * first["parameters"] / 1e6, size * last["parameters"] / 1e6, ".1f"))
        rows.append([name, *cells])
    return head, rows


def _cuts(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    log = found["log"]
    cuts = len(log["cuts_at_epochs"])
    times = [log["cut_seconds"], log["cut_seconds"] / cuts, log["planning_seconds"] / cuts]
    return ["cuts", "seconds in all", "for each", "of these, planning and cutting"], [
        [str(cuts), *(f"{t:.1f}" for t in times)]
    ]


def _full(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [name, f"{one['parameters'] / 1e6:.2f}", f"{one['step_ms']:.1f}", f"{one['all_reduce_ms']:.2f}"]
        for name, one in found["full_size"].items()
    ]
    return ["network, CIFAR", "parameters, M", "step, ms (measured)", "all-reduce on 64 GPUs, ms (simulated)"], rows


def _steps(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["GPUs", "all-reduce, ms", "sent by each, MB", "step, 128 images each, ms", "step, 8192 images in all, ms"]
    rows = []
    for row in found["networks"]["ResNet-50, ImageNet"]["scaling"]:
        cells = [str(int(row["gpus"]))]
        for key, form in (("all_reduce_ms", ".2f"), ("sent_mb", ".0f"), ("step_ms", ".1f"), ("global_step_ms", ".1f")):
            cells.append(_change(row[f"whole_{key}"], row[f"small_{key}"], form))
        rows.append(cells)
    return head, rows


def _runs(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, one in found["networks"].items():
        for row in one["scaling"]:
            if row["gpus"] in (1, 8, 64):
                whole, small = row["whole_run_h"], row["small_run_h"]
                sent = _change(*one["sent_gb"], ",.0f") if row["gpus"] == GPUS[-1] else ""
                times = _change(60 * whole, 60 * small, ",.1f")
                rows.append([name, str(int(row["gpus"])), times, f"{1 - small / whole:.0%}", sent])
    return ["network", "GPUs", "run, minutes", "saved", "sent by each GPU, GB"], rows


def _links(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    networks = {name: one for name, one in found["networks"].items() if name.endswith("ImageNet")}
    rows = []
    for i, row in enumerate(next(iter(networks.values()))["links"]):
        cells = [f"{row['beta_gb_per_s']:g}", f"{row['alpha_us']:g}"]
        for one in networks.values():
            bounds = [one["links"][i][key] for key in ("saved_overlapped", "saved")]
            cells.append(" to ".join(f"{bound:.0%}" for bound in bounds))
        rows.append(cells)
    return ["GB/s", "µs", *networks], rows


def _forwards(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    by_forwards = found["saved_by_forwards_per_step"]
    names = list(next(iter(by_forwards.values())))
    rows = [[f"{float(key):g}", *(f"{row[name]:.0%}" for name in names)] for key, row in by_forwards.items()]
    return ["forward passes a step", *names], rows


def _change(before: float, after: float, form: str) -> str:
    return f"{before:{form}} → {after:{form}}"


def draw(found: dict[str, Any], stem: Path) -> list[Path]:
    """The figure as PNG and SVG; the same numbers give the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
        _draw_steps(left, found)
        _draw_saved(right, found)
        figure.suptitle("simulated: measured steps on one GPU, assumed links", fontsize=9, y=0.99)
        return save(figure, stem)


def _draw_steps(axis: Any, found: dict[str, Any]) -> None:
    from _scale_model import step_time

    name = "ResNet-50, ImageNet"
    whole, *_, small = networks(found)[name].phases
    for colour, beta in zip(_COLOURS, (1.25, 12.5, 50.0), strict=True):
        for phase, style, what in ((whole, "-", "whole"), (small, "--", "shrunk")):
            times = [1e3 * step_time(phase, gpus, link(beta=beta), overlap=False) for gpus in GPUS]
            axis.plot(GPUS, times, style, marker="o", ms=3, color=colour, label=f"{beta:g} GB/s, {what}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xticks=GPUS, xticklabels=GPUS, xlabel="GPUs, 128 images each", ylabel="step, ms", ylim=(15, 400))
    ticks = (20, 50, 100, 200)
    axis.set_yticks(ticks, ticks)
    axis.minorticks_off()
    axis.set_title(f"{name}: one step, nothing overlapped", fontsize=9)
    axis.legend(fontsize=7, ncol=2, loc="upper left")


def _draw_saved(axis: Any, found: dict[str, Any]) -> None:
    betas = [10 ** (i / 20) for i in range(54)]
    # The CIFAR run is left out, as in the table: its cuts take longer than a run on 64 GPUs.
    shown = [(name, network) for name, network in networks(found).items() if name.endswith("ImageNet")]
    for colour, (name, network) in zip(_COLOURS, shown, strict=False):
        bounds = [[100 * saved(network, GPUS[-1], link(beta=b), overlap) for b in betas] for overlap in (True, False)]
        axis.fill_between(betas, *bounds, color=colour, alpha=0.2)
        axis.plot(betas, bounds[1], color=colour, label=f"{name}, nothing overlapped")
        axis.plot(betas, bounds[0], ":", color=colour, label=f"{name}, all overlapped")
    axis.set_xscale("log")
    axis.set(xlabel="each GPU's link, GB/s", ylabel="of the run's time saved, %", ylim=(0, None))
    axis.set_title("64 GPUs: what shrinking saves of a run", fontsize=9)
    axis.legend(fontsize=7)


def networks(found: dict[str, Any]) -> dict[str, Network]:
    """The networks of the file."""
    from scale import IMAGES

    return {
        name: Network(
            name,
            IMAGES["imagenet" if name.endswith("ImageNet") else "cifar100"],
            tuple(Phase(**phase) for phase in one["phases"]),
            one["cut_seconds"],
        )
        for name, one in found["networks"].items()
    }
