"""What a report knows of a run, as values; where they come from is not said here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = ("epoch", "accuracy", "train_accuracy", "closed", "parameters", "multiply_adds")
"""Of the course: what the page draws of each epoch."""


class ReportError(ValueError):
    """Something that is no run; says what would do."""


class DamagedRunError(ReportError):
    """A run with a file that can't be read; says which, and what to do."""


@dataclass(frozen=True)
class Numbers:
    """Accuracy as a share, and size; None where it is not known."""

    accuracy: float | None
    parameters: int | None
    multiply_adds: int | None


@dataclass(frozen=True)
class Layer:
    """Channels of a layer: there at the start, kept, and of these doing work in this layer; why others were kept."""

    name: str
    total: int
    kept: int
    used: int
    why: str


@dataclass(frozen=True)
class Constants:
    """How many channels of a layer turned out to be fixed numbers, by what was done about them."""

    layer: str
    folded: int
    """Inputs that went into the bias."""
    carried: int
    """Inputs that one other constant channel stands for."""
    rows: int
    """Outputs that are kept, as a number."""


@dataclass(frozen=True)
class WallKind:
    """Operations that hold their inputs at full width for one reason."""

    op: str
    why: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Histograms:
    """Gate values over time: ``counts[snapshot][layer]`` is closed, the first bin used, and the counts from there."""

    epochs: tuple[int, ...]
    edges: tuple[float, ...]
    layers: tuple[str, ...]
    totals: tuple[int, ...]
    counts: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class RunData:
    """All that the page shows of one run; what is not there is None or empty."""

    name: str
    finished: bool
    done: int
    epochs: int
    network: str
    data: str
    method: str
    held_out: str
    """Which images the accuracies by epoch are of: ``validation``, ``test``, or, of image folders, ``held-out``."""
    before: Numbers
    """The network at full size; its accuracy is that of the trained network before channels were removed."""
    after: Numbers
    facts: Mapping[str, str]
    course: Mapping[str, Sequence[float | None]]
    events: Sequence[tuple[int, str]]
    layers: Sequence[Layer]
    constants: Sequence[Constants]
    walls: Sequence[WallKind]
    has_plan: bool
    """Whether constants and walls are known, so that none of them means that none was met."""
    gates: Histograms | None
    latency: Mapping[str, Any] | None
    curve: Mapping[str, Sequence[float | None]] | None
    recipe: str


def clean(value: Any) -> Any:
    """A value for JSON: what is not a finite number is None, and numbers have ten digits that count."""
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def describe(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Network, data and method of a recipe's tables, in a few words each."""
    model, gates, penalty, budget = tables["model"], tables["gates"], tables["penalty"], tables["budget"]
    options = ", ".join(f"{key} {value}" for key, value in model["options"].items())
    if gates["kind"] == "none":
        method = "no gates"
    elif budget["target"]:
        method = f"{gates['kind']} gates, {penalty['kind']} penalty, budget {budget['target']}"
    else:
        strength = penalty["strength"]
        strength = "scheduled" if isinstance(strength, Mapping) else f"{strength:g}"
        by = f"{penalty['kind']} penalty, strength {strength}" if penalty["strength"] else "no penalty"
        method = f"{gates['kind']} gates, {by}"
        if share := tables["finish"].get("close"):
            method += f", {share:.0%} closed at the end"
    return {
        "network": f"{model['name']} ({options})" if options else str(model["name"]),
        "data": str(tables["data"]["source"]),
        "method": method,
        "held_out": _held_out(tables["data"]),
    }


def _held_out(data: Mapping[str, Any]) -> str:
    if data["validation"]:
        return "validation"
    return "held-out" if data["source"] == "folder" else "test"  # a folder's val are not its test images if it has both


def facts(
    result: Mapping[str, Any] | None, versions: Mapping[str, str], seed: int, seconds: float | None
) -> dict[str, str]:
    """What is said of a run besides its headline numbers, as labels and texts."""
    found: dict[str, str] = {}
    if result is not None:
        found["Gates closed by training"] = _percent(result.get("closed"))
        if result.get("closed_by_threshold"):
            found["Closed at the end, by [finish]"] = f"{result['closed_by_threshold']:,} gates"
        error = result.get("max_error")
        found["Largest difference between the outputs before and after removal"] = (
            "not compared" if error is None else f"{error:.1g}"
        )
        if result.get("finetune_epochs"):
            removed = _percent(result.get("accuracy_removed"))
            found["Fine-tuned after removal"] = f"{result['finetune_epochs']} epochs, from {removed}"
        if result.get("validation_accuracy") is not None:
            found["Accuracy on validation images"] = _percent(result["validation_accuracy"])
        if teacher := result.get("teacher"):
            size = f"{teacher['parameters']:,} parameters, {_percent(teacher['accuracy'])}"
            found["Learned from"] = f"{teacher['model']['name']}, {size}"
    if seconds is not None:
        found["Time"] = f"{seconds / 60:,.1f} min" if seconds >= 120 else f"{seconds:.0f} s"
    if result is not None:
        many = f", {result['processes']} processes" if result.get("processes", 1) != 1 else ""
        found["Trained on"] = f"{result.get('device')}{many}"
    found["Seed"] = str(seed)
    return found | {f"{name} version": str(version) for name, version in versions.items()}


def _percent(share: float | None) -> str:
    return "not known" if share is None or not math.isfinite(share) else f"{share:.2%}"
