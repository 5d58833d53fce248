"""What the paper does not say about its method: tables of what ``benchmarks/method.py`` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowgate.reproduce.tables import Table, short

METHOD = "method.json"


def tables(folder: Path) -> list[Table]:
    """The closing point, jitter and BatchNorm's invariance; nothing if they were not measured."""
    if not (folder / METHOD).is_file():
        return []
    record = json.loads((folder / METHOD).read_text(encoding="utf-8"))
    return [_closing(record["closing"]), _jitter(record["jitter"]), _invariance(record["invariance"])]


def _closing(record: dict[str, float]) -> Table:
    names = {
        "two_to_the_minus_12_5": "2^-12.5",
        "largest_closed_float32": "largest float32 g with 1 - exp(-g²) = 0",
        "smallest_open_float32": "the next float32",
        "minus_expm1_there": "-expm1(-g²) at the largest closed g",
    }
    return Table("The closing point", ("what", "value"), tuple((names[key], f"{record[key]:.9g}") for key in names))


def _jitter(rows: list[dict[str, Any]]) -> Table:
    cells = tuple(
        (
            short(row["lr"]),
            short(row["strength"]),
            short(row["lr_times_strength_over_one_minus_momentum"]),
            short(row["in_the_loss"]["farthest_from_0"]),
            f"{row['in_the_loss']['closed_at_the_end']:.0%}",
            f"{row['proximal']['closed_at_the_end']:.0%}",
        )
        for row in rows
    )
    head = ("lr", "λ1", "lr λ1 / (1 - momentum)", "farthest from 0", "closed at a moment", "closed, proximal step")
    note = "Gates under an l1 penalty and nothing else, momentum 0.9; closed: |g| below the closing point."
    return Table("Jitter", head, cells, note)


def _invariance(record: dict[str, Any]) -> Table:
    head = ("factor", *(short(value) for value in record["values"]))
    rows = tuple(
        (name, *(short(value) for value in record[key]))
        for name, key in (("before the norm", "before_norm"), ("after the norm", "after_norm"))
    )
    note = f"Mean |dloss/dfactor| of one layer's channels, BatchNorm eps {short(record['eps'])}."
    return Table("BatchNorm's scale invariance", head, rows, note)
