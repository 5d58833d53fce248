"""``soundness.json`` as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ABOUT = ("command", "date", "device", "threads", "versions")
"""What all records say about themselves; the rest are versions of the packages whose models were run."""


def write_table(record: dict[str, Any], path: Path) -> None:
    """Write the page: what was asked, the counts, one row a model, then what did not pass and why."""
    models: dict[str, dict[str, Any]] = record["models"]
    done = {key: model for key, model in models.items() if "error" in model}
    others = {key: model for key, model in models.items() if model["verdict"] != "same"}
    packages = ", ".join(f"{name} {version}" for name, version in record["about"].items() if name not in ABOUT)
    lines = [
        "# Soundness: compacted models compare with their originals",
        "",
        f"Made by `{record['about']['command']}` ({record['about']['date'][:10]}, PyTorch "
        f"{record['about']['versions']['torch']}, torchvision {record['about']['versions']['torchvision']}, "
        f"{packages}). Numbers in full: `{path.stem}.json`.",
        "",
        f"Random weights, random BatchNorm statistics and shifts, {record['settings']['zeroed']} "
        "zeroed at random, layer by layer; float64; batches of 2 and 3. *Error*: the largest difference between "
        "original and compacted outputs, over the spread of outputs across inputs, the worst of all four. "
        "*Noise*: what one unit in the last place of the inputs does, on the same scale. Same: error at most 1e-9 or "
        "100 times the noise. Walls: places where channels stay because an operation has no exact rule or counts them.",
        "",
        *counts(models),
        "",
        "| model | input | parameters, M | aligned, M | scatter, M | walls | plan s | compact s | error | noise | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row(key, model) for key, model in done.items()),
    ]
    if others:
        lines += ["", "## Not compared, or different", "", "| model | what happened |", "|---|---|"]
        lines += [f"| {key} | {escape(model['verdict'])} |" for key, model in others.items()]
    path.write_text("\n".join(lines) + "\n")


def counts(models: dict[str, dict[str, Any]]) -> list[str]:
    """One line a source: how many are the same, failed, were not traced, were not run."""
    lines = ["| source | models | same | failed | not traced | not run |", "|---|---|---|---|---|---|"]
    sources = list(dict.fromkeys(key.rpartition("/")[0] for key in models))
    for source in [*sources, "all"]:
        verdicts = [m["verdict"] for key, m in models.items() if source in ("all", key.rpartition("/")[0])]
        kinds = [sum(v.startswith(kind) for v in verdicts) for kind in ("same", "FAILED", "not traced", "not run")]
        lines.append(f"| {source} | {len(verdicts)} | " + " | ".join(map(str, kinds)) + " |")
    return lines


def row(key: str, model: dict[str, Any]) -> str:
    aligned, scatter = model["aligned"], model["scatter"]
    ops = ", ".join(scatter["wall_ops"])
    cells = [
        key,
        "x".join(map(str, model["input"][1:])),
        millions(model["parameters"]),
        f"{millions(aligned['parameters'])} ({aligned['parameters'] / model['parameters']:.0%})",
        f"{millions(scatter['parameters'])} ({scatter['parameters'] / model['parameters']:.0%})",
        f"{scatter['walls']}: {escape(ops)}" if scatter["walls"] else "0",
        f"{aligned['plan_s']:.1f} / {scatter['plan_s']:.1f}",
        f"{aligned['compact_s']:.1f} / {scatter['compact_s']:.1f}",
        f"{model['error']:.0e}",
        f"{model['noise']:.0e}",
        "same" if model["verdict"] == "same" else "**different**",
    ]
    return "| " + " | ".join(cells) + " |"


def millions(count: int) -> str:
    return f"{count / 1e6:.2f}"


def escape(text: str) -> str:
    return text.replace("|", "\\|")
