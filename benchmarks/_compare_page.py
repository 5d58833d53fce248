"""The comparison as Markdown, and the page that holds it between markers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _compare_lines import lines_added
from _compare_methods import FAMILIES, NETWORKS, RATIO
from _record import ROOT

Record = dict[str, Any]
PAGE = ROOT / "docs" / "comparison-methods.md"
_VERDICTS = {"rival": "the rival", "mixed": "mixed: see below"}


def results_of(family: str, folder: Path | None = None) -> Path:
    """Where a family's result lies: in a folder, or where the documentation has it."""
    return (folder or ROOT / "benchmarks") / f"compare_{family}.json"


def markdown(record: Record) -> str:
    """A whole result: what ran, who wins, and every point."""
    made, settings = record["about"], record["settings"]
    devices = " and ".join(f"`--device {device}`" for device in record["devices"])
    parts = [
        f"Made by `{made['command']}` ({made['date'][:10]}, Torch-Pruning {made['torch_pruning'] or 'missing'}): "
        f"{settings['epochs']} epochs for every method, trained with {devices}, "
        f"{_images(settings)} training images, seeds {', '.join(map(str, record['seeds']))}, judged on "
        f"{record['judged_on']} images. {_dates(record)}{_timed_on(record)}",
        *(line for name, found in record["networks"].items() for line in _network(name, found)),
    ]
    if record["missing"]:
        parts.append("Not run: " + ", ".join(f"`{job}`" for job in record["missing"]) + ".")
    for job, why in record["failed"].items():
        parts.append(f"Failed: `{job}`: {why}.")
    return "\n\n".join(parts) + "\n"


def _dates(record: Record) -> str:
    """When the runs were made, where that was not at once."""
    dates = sorted({point["date"] for found in record["networks"].values() for point in found["points"]})
    return f"Runs are of {' and '.join(dates)}. " if len(dates) > 1 else ""


def _timed_on(record: Record) -> str:
    """Where latency was measured, which need not be where the tables were made."""
    points = [point["latency"] for found in record["networks"].values() for point in found["points"]]
    places = sorted({f"{times['device']}, PyTorch {times['torch']}" for times in points if times is not None})
    return f"Latency is of {' and '.join(places)}." if places else "Latency was not measured."


def _images(settings: Record) -> str:
    return "all" if settings["images"] is None else f"{settings['images']:,}"


def _network(name: str, found: Record) -> Iterator[str]:
    yield f"### {found['title']}"
    if found["verdicts"]:
        yield _noise(found)
        yield "\n".join(
            [
                "| rival | its points | narrowgate keeps fewer at | narrowgate's best points "
                "| the rival keeps fewer at | narrowgate's parameters, of the rival's | fewer at equal accuracy |",
                "|---|---|---|---|---|---|---|",
                *(_verdict_row(name, rival, verdict) for rival, verdict in found["verdicts"].items()),
            ]
        )
        losses = list(_losses(name, found))
        if losses:
            yield "Where narrowgate does not keep fewer:"
            yield "\n".join(losses)
    yield "\n".join(
        [
            "| method | setting | accuracy % | after removal | parameters | left | multiply-adds | left "
            "| ms, 1 image | ms, 64 images | outputs change by | predictions changed | by removing zeros alone |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(_point_row(point) for point in found["points"]),
        ]
    )


def _noise(found: Record) -> str:
    if found["noise"] is None:
        noise = "With one seed no noise is known, so that equal accuracy has no tolerance here."
    else:
        noise = f"Equal accuracy: up to {100 * found['noise']:.2f} points, the median deviation between seeds."
    if found["floor"] is None:
        return f"{noise} The dense network has not run."
    return (
        f"{noise} The dense network has {100 * found['dense_accuracy']:.2f} %; points below "
        f"{100 * found['floor']:.2f} % are in the table of all points only."
    )


def _verdict_row(network: str, rival: str, verdict: Record) -> str:
    ratio = "-" if verdict["ratio"] is None else f"{verdict['ratio']:.2f} ×"
    cells = (
        NETWORKS[network].methods[rival].label,
        str(verdict["their_points"]),
        str(verdict["we_keep_fewer_at"]),
        str(verdict["our_front_points"]),
        str(verdict["they_keep_fewer_at"]),
        ratio,
        _VERDICTS.get(verdict["verdict"], str(verdict["verdict"])),
    )
    return f"| {' | '.join(cells)} |"


def _losses(network: str, found: Record) -> Iterator[str]:
    labels = {name: method.label for name, method in NETWORKS[network].methods.items()}

    def shown(point: Record) -> str:
        return f"{labels[point['method']]} {point['value']:g} ({_size(point)})"

    for verdict in found["verdicts"].values():
        for answer in verdict["at_their_accuracy"]:
            if not answer["fewer"]:
                other = "no point of narrowgate is as accurate" if answer["by"] is None else shown(answer["by"])
                yield f"- at the accuracy of {shown(answer['of'])}: {other}"
        for answer in verdict["at_our_accuracy"]:
            if answer["fewer"]:
                yield f"- at the accuracy of {shown(answer['of'])}: {shown(answer['by'])}"


def _size(point: Record) -> str:
    return f"{100 * point['accuracy']:.2f} %, {point['parameters']:,.0f} parameters"


def _point_row(point: Record) -> str:
    spread = "" if point["accuracy_deviation"] is None else f" ± {100 * point['accuracy_deviation']:.2f}"
    cells = (
        point["label"],
        f"{_key(point['key'])} {point['value']:g}" if point["key"] else "",
        f"{100 * point['accuracy']:.2f}{spread}",
        f"{100 * point['accuracy_after_removal']:.2f}",
        f"{point['parameters']:,.0f}",
        f"{point['parameters'] / point['parameters_full']:.2%}",
        f"{point['multiply_adds']:,.0f}",
        f"{point['multiply_adds'] / point['multiply_adds_full']:.2%}",
        _milliseconds(point["latency"], 1),
        _milliseconds(point["latency"], 64),
        f"{point['largest_change']:.1e}",
        f"{point['predictions_changed']:,.0f}",
        _zeros(point),
    )
    return f"| {' | '.join(cells)} |"


def _key(key: str) -> str:
    return {RATIO: "ratio", "budget.target": "share"}.get(key, key.rpartition(".")[2])


def _milliseconds(found: Record | None, batch: int) -> str:
    """The small network's median and its ratio to the dense one's."""
    if found is None:
        return "-"
    timing = found[f"batch {batch}"]
    return f"{timing['small_ms'][1]:.3g} ({timing['ratio'][1]:.2f} ×)"


def _zeros(point: Record) -> str:
    if point["zeros_largest_change"] is None:
        return "-"
    return f"{point['zeros_largest_change']:.1e}, {point['zeros_predictions_changed']}"


def lines_table(counts: dict[str, int], folder: str = "compare_snippets") -> str:
    """Lines of code by script."""
    rows = [f"| [{name}]({folder}/{name}.py) | {count} |" for name, count in counts.items()]
    return "\n".join(["| script | lines beyond plain training |", "|---|---|", *rows]) + "\n"


def blocks(folder: Path = ROOT / "benchmarks") -> dict[str, str]:
    """What stands between the page's markers, from the results that there are."""
    found = {"lines": lines_table(lines_added(), "../benchmarks/compare_snippets")}
    for family in FAMILIES:
        path = results_of(family, folder)
        if not path.exists():
            found[family] = "No run yet.\n"
            continue
        image = f"![Accuracy over parameters](img/compare-{family}.png)\n\n"
        found[family] = image + markdown(json.loads(path.read_text())) + f"\n([numbers](../benchmarks/{path.name}))\n"
    return found
