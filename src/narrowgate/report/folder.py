"""A run's folder as ``RunData``: finished or not, with whatever parts it has."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowgate.atomic import surviving_folder
from narrowgate.flow.plan import Plan, walls_by_kind
from narrowgate.measure.timings import Latency
from narrowgate.report.data import (
    COLUMNS,
    Constants,
    DamagedRunError,
    Histograms,
    Layer,
    Numbers,
    ReportError,
    RunData,
    WallKind,
    clean,
    describe,
    facts,
)
from narrowgate.reproduce.record import WHAT
from narrowgate.storage import META, PLAN
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import GATES, METRICS, RECIPE, RESULT, SMALL

_REMEDY = f"copy the run again, or delete its {RESULT} and let narrowgate train ... --resume end it again"


def read_folder(folder: Path) -> RunData:
    """What a run's folder holds; a ReportError for a folder that is none, or names the file that can't be read."""
    if not (folder / RECIPE).is_file():
        raise ReportError(_no_run(folder))
    recipe = Recipe.load(folder / RECIPE).without_places()  # pages are passed on
    result = _read_json(folder / RESULT) if (folder / RESULT).is_file() else None
    rows = list(_lines(folder / METRICS))
    found = surviving_folder((folder / SMALL).resolve())
    plan = _plan(found / PLAN) if result is not None and found is not None else None
    versions = _read_json(found / META) if plan is not None and found is not None else {}
    try:
        seconds = result["seconds"] if result is not None else sum(row.get("seconds") or 0 for row in rows) or None
        before, after = _numbers(result, rows)
        return RunData(
            name=folder.resolve().name,
            finished=result is not None,
            done=int(rows[-1]["epoch"]) if rows else 0,
            epochs=recipe.train.epochs,
            **describe(recipe.tables()),
            before=before,
            after=after,
            facts=facts(
                result, {k: versions[k] for k in ("narrowgate", "torch") if k in versions}, recipe.train.seed, seconds
            ),
            course={key: [clean(row.get(key)) for row in rows] for key in COLUMNS},
            events=[(int(row["epoch"]), str(row["event"])) for row in rows if row.get("event")],
            **plan_parts(plan),
            gates=histograms(list(_lines(folder / GATES))),
            **_extras(folder),
            recipe=recipe.to_toml(),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRunError(
            f"{folder} can't be read as a run ({type(error).__name__}: {error}): {_REMEDY}"
        ) from error


def plan_parts(plan: Plan | None) -> dict[str, Any]:
    """What the page shows of a plan: layers, constants and walls."""
    if plan is None:
        return {"layers": [], "constants": [], "walls": [], "has_plan": False}
    met = [
        Constants(edit.layer, len(edit.folded), len(edit.carried), sum(value != 0 for value in edit.rows.values()))
        for edit in plan.edits.values()
    ]
    return {
        "layers": [Layer(row.layer, row.total, row.kept, row.used, row.why) for row in plan.rows],
        "constants": [entry for entry in met if entry.folded or entry.carried or entry.rows],
        "walls": [WallKind(op, why, tuple(layers)) for (op, why), layers in walls_by_kind(plan.walls).items()],
        "has_plan": True,
    }


def histograms(lines: list[dict[str, Any]]) -> Histograms | None:
    """The lines of ``gates.jsonl`` with the same bins as the last one, without the zeros around each histogram."""
    lines = [line for line in lines if "layers" in line and line.get("edges") == lines[-1].get("edges")]
    if not lines:
        return None
    names = tuple(dict.fromkeys(name for line in lines for name in line["layers"]))
    sums = [[sum(line["layers"].get(name, ())) for name in names] for line in lines]
    return Histograms(
        epochs=tuple(int(line["epoch"]) for line in lines),
        edges=tuple(lines[-1]["edges"]),
        layers=names,
        totals=tuple(max(column) for column in zip(*sums, strict=True)),
        counts=tuple(tuple(_trimmed(line["layers"].get(name, [0])) for name in names) for line in lines),
    )


def _trimmed(counts: list[int]) -> tuple[int, ...]:
    closed, *bins = counts
    used = [i for i, count in enumerate(bins) if count]
    return (closed, used[0], *bins[used[0] : used[-1] + 1]) if used else (closed, 0)


def _numbers(result: dict[str, Any] | None, rows: list[dict[str, Any]]) -> tuple[Numbers, Numbers]:
    """At full size and now; of an unfinished run, the largest and the last that its log knows."""
    if result is not None:
        return (
            Numbers(clean(result["accuracy_gated"]), result["parameters_full"], result["multiply_adds_full"]),
            Numbers(clean(result["accuracy"]), result["parameters"], result["multiply_adds"]),
        )
    if not rows:
        return Numbers(None, None, None), Numbers(None, None, None)
    known = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
    sizes = [(row["parameters"], row["multiply_adds"]) for row in rows]
    return (
        Numbers(None, max(size[0] for size in sizes), max(size[1] for size in sizes)),
        Numbers(clean(known[-1]) if known else None, *sizes[-1]),
    )


def _extras(folder: Path) -> dict[str, Any]:
    """The latest latency and threshold curve among the folder's JSON files, whatever these are called."""
    latency = curve = None
    files = [path for path in folder.glob("*.json") if path.is_file() and path.name != RESULT]
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and "timings" in data:
                latency = _latency(Latency.from_json(json.dumps(data)))
            elif isinstance(data, dict) and data.get("what") == WHAT and data.get("curve"):
                curve = clean(data["curve"])
        except ValueError:
            continue  # somebody else's file
    return {"latency": latency, "curve": curve}


def _latency(measured: Latency) -> dict[str, Any]:
    timings = [{**dataclasses.asdict(timing), "verdict": timing.verdict} for timing in measured.timings]
    found: dict[str, Any] = clean({**dataclasses.asdict(measured), "timings": timings})
    return found


def _plan(path: Path) -> Plan | None:
    if not path.is_file():
        return None
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedRunError(f"{path}: {error}: {_REMEDY}") from error


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines; a last one that was cut off when a run was killed is passed over."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    damaged = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and "epoch" in value:
            yield value
        elif line.strip() and number < len(lines):
            damaged.append(number)
    if damaged:
        which = f"line {damaged[0]}" if len(damaged) == 1 else f"{len(damaged)} lines, the first of them {damaged[0]},"
        warnings.warn(f"{path}: {which} can't be read: the page leaves out what stood there", stacklevel=2)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedRunError(f"{path} is not JSON ({error}): {_REMEDY}") from error
    if not isinstance(value, dict):
        raise DamagedRunError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _no_run(folder: Path) -> str:
    """What is wrong with a folder, and the runs below it if there are some."""
    inside = sorted(path.parent.name for path in folder.glob(f"*/{RECIPE}"))
    if inside:
        return f"{folder} is not a run but holds some ({', '.join(inside[:3])}): give {folder}/*/"
    if any(f'"{WHAT}"' in path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*.json")):
        return f"{folder} is not a run, it has no {RECIPE}: but holds records: give their files, {folder}/*.json"
    return f"{folder} is not a run, it has no {RECIPE}: give a folder that narrowgate train wrote, such as runs/NAME"
