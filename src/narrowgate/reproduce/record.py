"""``collect``: everything worth keeping of a finished run, from its folder, as one small JSON file."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgate.atomic import replace_file
from narrowgate.storage import META, PLAN
from narrowgate.train.recipe import Recipe, RecipeError
from narrowgate.train.recipe.toml import write_value
from narrowgate.train.run_folder import METRICS, RECIPE, RESULT, SMALL

WHAT = "a run of narrowgate train"
_COLUMNS = {  # of metrics.jsonl, each with its digits after the point; None: significant digits
    "train_loss": 5,
    "accuracy": 6,
    "closed": 5,
    "parameters": 0,
    "multiply_adds": 0,
    "seconds": 2,
    "strength": None,
}


class RecordError(ValueError):
    """Something that is no finished run, no page, or no row of the paper's; says what would do."""


class DamagedRecordError(RecordError):
    """A file of a run, or a result file, that can't be read."""


def collect(folder: str | Path, base: Path | None = None, dataset: str = "") -> dict[str, Any]:
    """The record of a finished run: recipe, versions, course by epoch, architecture, sizes and accuracies.

    Args:
        base: the recipe file that was given to ``narrowgate train``; the command in the record then names it, and
            every key in which the run differs from it.
        dataset: what an array file held, such as ``mnist``; needed where the recipe does not name the data set.
    """
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise RecordError(
            f"{folder} is not the folder of a run: give one that narrowgate train wrote, such as runs/NAME"
        )
    missing = [name for name in (METRICS, RESULT, f"{SMALL}/{PLAN}") if not (folder / name).is_file()]
    if missing:
        raise RecordError(f"{folder} is not a finished run, it lacks {', '.join(missing)}: go on with --resume")
    try:
        return _record(folder, base, dataset)
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedRecordError(
            f"{folder} can't be read as a run ({type(error).__name__}: {error}): copy the run again"
        ) from error


def _record(folder: Path, base: Path | None, dataset: str) -> dict[str, Any]:
    recipe = Recipe.load(folder / RECIPE).without_places()
    (result,) = _objects(folder / RESULT, lines=False)
    rows = _objects(folder / METRICS, lines=True)
    if len(rows) != result["epochs"]:
        raise DamagedRecordError(
            f"{folder / METRICS} has {len(rows)} lines for {result['epochs']} epochs: it is damaged, copy the run again"
        )
    tables = recipe.tables()
    finished = datetime.datetime.fromtimestamp((folder / RESULT).stat().st_mtime, datetime.timezone.utc)
    return {
        "what": WHAT,
        "command": command(recipe, base),
        "date": finished.isoformat(timespec="seconds"),
        "device": result["device"],
        "processes": result["processes"],
        "versions": _versions(folder / SMALL / META),
        "seed": recipe.train.seed,
        "dataset": dataset or tables["data"]["source"],
        "recipe": tables,
        "recipe_digest": result["recipe_digest"],
        **_outcome(result),
        **({"teacher": result["teacher"]} if result.get("teacher") else {}),
        **_architecture(folder / SMALL / PLAN),
        "events": {row["epoch"]: row["event"] for row in rows if row["event"]},
        "course": {key: [_rounded(row[key], digits) for row in rows] for key, digits in _COLUMNS.items()},
    }


def command(recipe: Recipe, base: Path | None) -> str:
    """What makes a run of this recipe again, from a file of recipes."""
    if base is None:
        return "narrowgate train recipe.toml  # with the tables of `recipe`"
    words = ["narrowgate", "train", f"recipes/{base.name}"]
    start = Recipe.load(base).without_places().tables()
    if start["method"]["name"] != recipe.method.name:  # which takes the place of what the file says
        method = f"method.name={recipe.method.name}"
        with contextlib.suppress(RecipeError):  # the two may need other changes to go together
            start = Recipe.load(base, [method]).without_places().tables()
            words += ["--set", method]
    for table, values in recipe.tables().items():
        for key, value in values.items():
            if value != start[table].get(key):
                words += ["--set", f"{table}.{key}={write_value(value)}"]
    return shlex.join(words)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, whole or not at all; lists of numbers share a line."""
    text = json.dumps(record, indent=1)
    text = re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (text + "\n").encode())


def _outcome(result: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and accuracies; what ``finish.finetune_epochs`` did is apart from what removal did."""
    tuned = bool(result["finetune_epochs"])
    return {
        "accuracy": {
            "gated": _rounded(result["accuracy_gated"], 10),
            "after_removal": _rounded(result["accuracy_removed"], 10),
            "after_fine_tuning": _rounded(result["accuracy"], 10) if tuned else None,
            "final": _rounded(result["accuracy"], 10),
            "validation": _rounded(result["validation_accuracy"], 10),
        },
        "parameters": result["parameters"],
        "parameters_full": result["parameters_full"],
        "pruned": _rounded(1 - result["parameters"] / result["parameters_full"], 10),
        "multiply_adds": result["multiply_adds"],
        "multiply_adds_full": result["multiply_adds_full"],
        "closed": _rounded(result["closed"], 10),
        "closed_by_threshold": result["closed_by_threshold"],
        "max_error": _rounded(result["max_error"], None),
        "epochs": result["epochs"],
        "seconds": _rounded(result["seconds"], 1),
    }


def _architecture(path: Path) -> dict[str, Any]:
    """Channels kept and there before, by layer; the same for the inputs of linear layers that lost some."""
    (plan,) = _objects(path, lines=False)
    inputs = {
        name.removesuffix(".weight"): [len(cut["keep"]["1"]), cut["shape"][1]]
        for name, cut in plan["cuts"].items()
        if len(cut["shape"]) == 2 and "1" in cut["keep"]
    }
    return {"architecture": {row["layer"]: [row["kept"], row["total"]] for row in plan["rows"]}, "inputs": inputs}


def _versions(path: Path) -> dict[str, str]:
    """Of the process that trained, which wrote them beside the small network."""
    (meta,) = _objects(path, lines=False)
    return {name: meta[name] for name in ("narrowgate", "torch")}


def _objects(path: Path, *, lines: bool) -> list[dict[str, Any]]:
    """The JSON object in a file, or those on its lines."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return [dict(json.loads(part)) for part in (text.splitlines() if lines else [text])]
    except (ValueError, TypeError) as error:
        raise DamagedRecordError(f"{path} is damaged ({error}): copy the run again") from error


def _rounded(value: float | None, digits: int | None) -> float | int | None:
    """A number with so many digits after the point, or with five significant ones."""
    if value is None or isinstance(value, int) or not math.isfinite(value):
        return value
    return float(f"{value:.5g}") if digits is None else round(value, digits)
