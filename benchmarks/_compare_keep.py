"""Points of an earlier table, for methods that were not run again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _compare_methods import NETWORKS, Job
from _compare_runner import WorkError

Record = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """Points by network, each with its date, and where they were made."""

    points: dict[str, list[Record]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    torch_pruning: str | None = None

    @property
    def runs(self) -> list[Record]:
        """What is known of each single run."""
        return [run for points in self.points.values() for point in points for run in point["runs"]]

    def holds(self, job: Job) -> bool:
        """Whether a run is part of a point."""
        value = NETWORKS[job.network].methods[job.method].values[job.size]
        return any(
            (point["method"], point["value"]) == (job.method, value) and job.seed in point["seeds"]
            for point in self.points.get(job.network, ())
        )


def keep(path: Path, settings: Record, new: Iterable[Job]) -> Kept:
    """The points of a result in ``path`` that none of the new runs belongs to."""
    if not path.exists():
        raise WorkError(f"there is no {path} to keep points of: leave --keep out")
    last = json.loads(path.read_text())
    for key in ("network", "epochs", "images", "validation"):
        if last["settings"][key] != settings[key]:
            raise WorkError(
                f"{path} has {key} = {last['settings'][key]}, the new runs {settings[key]}: nothing is kept"
            )
    again = {(job.network, job.method, NETWORKS[job.network].methods[job.method].values[job.size]) for job in new}
    points = {
        network: [
            {"date": last["about"]["date"][:10]} | point  # a point that was kept before has its own
            for point in found["points"]
            if (network, point["method"], point["value"]) not in again
        ]
        for network, found in last["networks"].items()
    }
    return Kept(points, tuple(last["devices"]), last["about"]["torch_pruning"])


def in_order(network: str, points: list[Record]) -> list[Record]:
    """Points in the order of the network's methods and sizes, without those of settings that are no more."""
    methods = NETWORKS[network].methods
    by_place = {(point["method"], point["value"]): point for point in points}
    places = [(name, value) for name, method in methods.items() for value in method.values]
    return [by_place[place] for place in places if place in by_place]
