"""What is swept, as values: ``--over`` options become trials, each a name and the settings that make it differ."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from narrowgate.train.recipe.toml import parse_value, write_value

_SHORT = {"seed": "train.seed"}
_LONGEST = 150  # of a trial's name: file systems take 255 bytes


class SweepError(ValueError):
    """A sweep that can't be run as it was asked for; says what to change."""


class DamagedSweepError(SweepError):
    """A sweep whose file can't be read."""


@dataclass(frozen=True)
class Choices:
    """Every one of some values of a recipe's key, each as TOML writes it."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, to be drawn; whole ones where both ends are."""

    key: str
    low: float
    high: float
    whole: bool

    @property
    def log(self) -> bool:
        """Whether every order of magnitude is as likely as the next: where the range does not touch zero."""
        return self.low > 0

    def fitted(self, number: float) -> int | float:
        """A drawn number as it is used and shown: with four digits, within the range."""
        if self.whole:
            return int(number)
        return min(max(float(f"{number:.4g}"), self.low), self.high)


Axis = Choices | Range
Draw = Callable[[Range], Iterator[float]]
"""Gives the numbers drawn from a range, one after the other, without end."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its folder's name, and the settings added to the recipe."""

    name: str
    settings: tuple[str, ...]


def read_axis(text: str) -> Axis:
    """What ``penalty.strength=1e-5,1e-4`` or ``penalty.strength=1e-5..1e-3`` asks for; keys are checked later."""
    key, _, given = (part.strip() for part in text.partition("="))
    key = _SHORT.get(key, key)
    if not key or not given:
        raise SweepError(f"--over {text}: write table.key=a,b,c, or table.key=low..high with --samples")
    if (found := _read_range(key, given)) is not None:
        if not found.low < found.high:
            raise SweepError(f"--over {text}: the first number must be below the second")
        return found
    values = tuple(_canonical(value, text) for value in _split(given))
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise SweepError(f"--over {text}: {twice[0]} is there twice")
    return Choices(key, values)


def make_trials(axes: Sequence[Axis], samples: int, draw: Draw) -> tuple[Trial, ...]:
    """All trials in order, the last key changing fastest; ``samples`` points drawn from ranges, each with the grid."""
    _check(axes, samples)
    ranges = [axis for axis in axes if isinstance(axis, Range)]
    points = _points(ranges, samples, draw) if ranges else [{}]
    grid = [axis.values for axis in axes if isinstance(axis, Choices)]
    rows = []
    for point in points:
        for chosen in itertools.product(*grid):
            left = iter(chosen)
            rows.append([point[axis.key] if isinstance(axis, Range) else next(left) for axis in axes])
    keys = [axis.key for axis in axes]
    names = _names(keys, rows)
    return tuple(
        Trial(name, tuple(f"{key}={value}" for key, value in zip(keys, row, strict=True)))
        for name, row in zip(names, rows, strict=True)
    )


def _check(axes: Sequence[Axis], samples: int) -> None:
    if not axes:
        raise SweepError("nothing to sweep: add --over table.key=a,b,c")
    keys = [axis.key for axis in axes]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise SweepError(f"--over {twice[0]} is given twice: put all its values into one")
    ranges = [axis.key for axis in axes if isinstance(axis, Range)]
    if ranges and not samples:
        raise SweepError(f"--over {ranges[0]} is a range: say how many points to draw with --samples N")
    if samples and not ranges:
        raise SweepError("--samples is for ranges, such as --over penalty.strength=1e-5..1e-3; a grid is run whole")


def _points(ranges: Sequence[Range], samples: int, draw: Draw) -> list[dict[str, str]]:
    """Different points, one value of every range each."""
    streams = [draw(found) for found in ranges]
    points: dict[tuple[str, ...], None] = {}  # in the order in which they were drawn
    for _ in range(100 * samples):
        drawn = [found.fitted(next(stream)) for found, stream in zip(ranges, streams, strict=True)]
        points[tuple(write_value(value) for value in drawn)] = None
        if len(points) == samples:
            return [dict(zip((found.key for found in ranges), point, strict=True)) for point in points]
    raise SweepError(f"--samples {samples}: there are not so many different points; list the values with commas")


def _names(keys: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Readable names, one for each row, that any file system takes; with a number in front where they need one."""
    last = [key.rpartition(".")[2] for key in keys]
    shown = [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]
    names = [
        ",".join(f"{key}={_plain(value)}" for key, value in zip(shown, row, strict=True))[:_LONGEST] for row in rows
    ]
    if len(set(map(str.lower, names))) == len(names):
        return names
    digits = len(str(len(names)))
    return [f"{number:0{digits}},{name}" for number, name in enumerate(names, 1)]


def _plain(value: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", value).strip("_")


def _read_range(key: str, text: str) -> Range | None:
    low, dots, high = text.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError:
        return None
    if not dots or not all(map(math.isfinite, ends)):
        return None
    return Range(key, *ends, whole=all(re.fullmatch(r"\s*[+-]?\d+\s*", end) for end in (low, high)))


def _canonical(value: str, option: str) -> str:
    """A value as TOML writes it, so that 1e-5 and 0.00001 are the same; texts stay as they are."""
    if not value:
        raise SweepError(f"--over {option}: a value is missing between commas")
    try:
        parsed = parse_value(value)
        return value if isinstance(parsed, str) else write_value(parsed)
    except TypeError:  # a date
        raise SweepError(f"--over {option}: {value} is a value that no key takes") from None
    except ValueError as error:
        raise SweepError(f"--over {option}: {error}") from None


def _split(text: str) -> list[str]:
    """The values between commas, but for commas within brackets, braces or quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            pieces.append("")
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        pieces[-1] += letter
    return [piece.strip() for piece in pieces]
