"""What was timed, as values: spreads, one timing, and all of a measurement."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_NOTABLE = 0.05
"""One network against itself can be off by less than this, by where its weights happen to lie."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least two numbers."""
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Timing:
    """Seconds for one batch, before and after; ``ratio`` is after over before, by rounds."""

    device: str
    mode: str
    batch: int
    rounds: int
    before: Spread
    after: Spread
    ratio: Spread

    @property
    def verdict(self) -> str:
        """``faster`` or ``slower`` by 5 % or more in three quarters of the rounds, else ``no clear difference``."""
        if self.ratio.q3 <= 1 - _NOTABLE:
            return "faster"
        return "slower" if self.ratio.q1 >= 1 + _NOTABLE else "no clear difference"


@dataclass(frozen=True)
class Missing:
    """A way of running that could not be timed, and why."""

    device: str
    mode: str
    why: str


@dataclass(frozen=True)
class Latency:
    """What was timed, of which networks, on what, and what could not be."""

    model: str
    inputs: str
    precisions: dict[str, str]
    devices: dict[str, str]
    threads: int
    torch: str
    multiply_adds: tuple[int, int]
    parameters: tuple[int, int]
    indexed_layers: int
    odd_widths: int
    timings: tuple[Timing, ...]
    missing: tuple[Missing, ...]
    activations: tuple[int, int] = (0, 0)
    """Zeros where an older measurement did not count them."""

    @property
    def multiply_adds_left(self) -> float:
        """The share of the multiply-adds that is left."""
        return self.multiply_adds[1] / self.multiply_adds[0] if self.multiply_adds[0] else 1.0

    def to_json(self) -> str:
        """Everything as JSON text."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Latency:
        """What ``to_json`` wrote; ValueError for anything else."""
        try:
            data = json.loads(text)
            if data.pop("format") != 1:
                raise ValueError("unknown format")
            for key in ("multiply_adds", "parameters", "activations"):
                data[key] = tuple(data.get(key, (0, 0)))
            data["timings"] = tuple(Timing(**_spreads(row)) for row in data["timings"])
            data["missing"] = tuple(Missing(**row) for row in data["missing"])
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a latency measurement of narrowgate: {error}") from error


def _spreads(row: dict[str, Any]) -> dict[str, Any]:
    return {key: Spread(**value) if isinstance(value, dict) else value for key, value in row.items()}
