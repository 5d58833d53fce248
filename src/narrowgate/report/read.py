"""From paths to runs: folders of ``narrowgate train``, and files of ``narrowgate record``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgate.report.data import (
    COLUMNS,
    DamagedRunError,
    Layer,
    Numbers,
    ReportError,
    RunData,
    clean,
    describe,
    facts,
)
from narrowgate.report.folder import read_folder
from narrowgate.reproduce.record import WHAT
from narrowgate.train.recipe.toml import write_value
from narrowgate.train.run_folder import RECIPE


def read_runs(paths: Iterable[Path]) -> list[RunData]:
    """The runs at these paths, in their order, and those in a folder of runs, such as a sweep's.

    Runs of one name get their folders' names in front.
    """
    paths = [run for path in paths for run in _runs_in(path) or [path]]
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{path.resolve().parent.name}/{run.name}") if names.count(run.name) > 1 else run
        for run, path in zip(runs, paths, strict=True)
    ]


def _runs_in(folder: Path) -> list[Path]:
    """The runs right below a folder that is none itself."""
    return [] if (folder / RECIPE).exists() else sorted(found.parent for found in folder.glob(f"*/{RECIPE}"))


def read_run(path: Path) -> RunData:
    """The run in a folder or a record."""
    if path.is_file():
        return _of_record(path)
    if not path.exists():
        raise ReportError(f"there is no {path}: give the folder of a run, such as runs/NAME")
    return read_folder(path)


def _of_record(path: Path) -> RunData:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is neither a run's folder nor a record of one ({error})") from error
    if not isinstance(record, dict) or record.get("what") != WHAT:
        raise ReportError(f"{path} is neither a run's folder nor a file that narrowgate record wrote")
    try:
        return _from_record(path.stem, record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedRunError(f"{path} can't be read as a record ({type(error).__name__}: {error})") from error


def _from_record(name: str, record: dict[str, Any]) -> RunData:
    """A record knows less than a folder: no histograms of gates, no walls and no times."""
    accuracy, course = record["accuracy"], record["course"]
    length = len(course["parameters"])
    columns = {**course, "epoch": range(1, length + 1)}
    tuned = record["recipe"]["finish"]["finetune_epochs"]
    words = describe(record["recipe"])
    result = {**record, "accuracy_removed": accuracy["after_removal"], "finetune_epochs": tuned}
    result["validation_accuracy"] = accuracy["validation"]
    return RunData(
        name=name,
        finished=True,
        done=length,
        epochs=record["epochs"],
        **{**words, "data": record.get("dataset", words["data"])},  # what an array file held
        before=Numbers(clean(accuracy["gated"]), record["parameters_full"], record["multiply_adds_full"]),
        after=Numbers(clean(accuracy["final"]), record["parameters"], record["multiply_adds"]),
        facts=facts(result, record["versions"], record["seed"], record["seconds"]),
        course={key: clean(list(columns.get(key, [None] * length))) for key in COLUMNS},
        events=[(int(epoch), str(event)) for epoch, event in record["events"].items()],
        layers=[Layer(layer, total, kept, kept, "") for layer, (kept, total) in record["architecture"].items()],
        constants=[],
        walls=[],
        has_plan=False,
        gates=None,
        latency=None,
        curve=clean(record.get("curve")),
        recipe="\n".join(
            f"[{table}]\n" + "".join(f"{key} = {write_value(value)}\n" for key, value in values.items())
            for table, values in record["recipe"].items()
        ),
    )


def fronts(runs: Sequence[RunData], size: str) -> list[list[int]]:
    """For each data set with several finished runs, those that no other beats in both accuracy and size.

    Args:
        size: ``parameters`` or ``multiply_adds``.
    """
    found = []
    for data in dict.fromkeys(run.data for run in runs):
        points = [
            (getattr(run.after, size), -run.after.accuracy, i)
            for i, run in enumerate(runs)
            if run.data == data and run.finished and run.after.accuracy is not None
        ]
        front: list[tuple[int, float, int]] = []
        for point in sorted(points):
            if not front or point[1] < front[-1][1] or point[:2] == front[-1][:2]:
                front.append(point)
        if len(points) > 1:
            found.append([i for _, _, i in front])
    return found
