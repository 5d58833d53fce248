"""What a value in a recipe may be: one small class a kind, which checks, names itself in errors and in the docs."""

from __future__ import annotations

import difflib
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import cast

from narrowgate.schedules import Constant, Exponential, LinearThenExponential, Schedule, Stepped
from narrowgate.train.recipe.toml import write_value

NONE = "none"
"""How a recipe writes that an optional number is absent; TOML itself has no such value."""

_LARGEST = sys.float_info.max

SCHEDULES: dict[str, type[Constant | Stepped | Exponential | LinearThenExponential]] = {
    "constant": Constant,
    "stepped": Stepped,
    "exponential": Exponential,
    "linear-then-exponential": LinearThenExponential,
}


class Kind(ABC):
    """A kind of value: ``read`` gives it in its stored form, or a ``ValueError`` that says what is allowed."""

    type_name: str

    @property
    def allowed(self) -> str:
        """The limits in words, for the reference; empty if every value of the type will do."""
        return ""

    @property
    def expected(self) -> str:
        """Type and limits in words, for errors."""
        return f"a {self.type_name}{', ' * bool(self.allowed)}{self.allowed}"

    @abstractmethod
    def read(self, value: object) -> object:
        """The value as the recipe stores it."""

    def write(self, value: object) -> object:
        """The stored value as TOML knows it."""
        return value

    def unfit(self, value: object) -> ValueError:
        """The error for a value that this kind does not take."""
        return ValueError(f"must be {self.expected}")


@dataclass(frozen=True)
class Text(Kind):
    """A string, perhaps one of a few."""

    choices: tuple[str, ...] = ()
    filled: bool = False
    type_name = "text"

    @property
    def allowed(self) -> str:
        return _join(map(write_value, self.choices), "or") or ("not empty" if self.filled else "")

    def read(self, value: object) -> str:
        if not isinstance(value, str) or (self.filled and not value):
            raise self.unfit(value)
        if self.choices and value not in self.choices:
            raise ValueError(f"must be {self.allowed}{did_you_mean(value, self.choices)}")
        return value


@dataclass(frozen=True)
class Flag(Kind):
    """true or false."""

    type_name = "true or false"
    expected = "true or false"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.unfit(value)
        return value


@dataclass(frozen=True)
class Number(Kind):
    """A finite number within limits; ``above`` leaves the limit itself out, ``below`` too."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    whole: bool = False
    optional: bool = False

    @property
    def type_name(self) -> str:  # type: ignore[override]
        return ("whole number" if self.whole else "number") + f' or "{NONE}"' * self.optional

    @property
    def allowed(self) -> str:
        limits = (
            ("{} or more", self.low),
            ("above {}", self.above),
            ("at most {}", self.high),
            ("below {}", self.below),
        )
        return ", ".join(words.format(limit) for words, limit in limits if limit is not None)

    def read(self, value: object) -> int | float | None:
        if self.optional and (value is None or value == NONE):
            return None
        if isinstance(value, bool) or not isinstance(value, int if self.whole else Real):
            raise self.unfit(value)
        try:
            number = cast(int, value) if self.whole else float(value)
        except OverflowError:
            raise self.unfit(value) from None
        if not self.takes(number):
            raise self.unfit(value)
        return number

    def takes(self, number: float) -> bool:
        """Whether a number is finite and within the limits."""
        return (
            -_LARGEST <= number <= _LARGEST  # math.isfinite can't be asked of a whole number beyond all floats
            and (self.low is None or number >= self.low)
            and (self.above is None or number > self.above)
            and (self.high is None or number <= self.high)
            and (self.below is None or number < self.below)
        )

    def write(self, value: object) -> object:
        return NONE if value is None else value


@dataclass(frozen=True)
class Many(Kind):
    """A list of values of one kind."""

    item: Kind

    @property
    def type_name(self) -> str:  # type: ignore[override]
        return f"list of {self.item.type_name}s"

    @property
    def allowed(self) -> str:
        return f"each {self.item.allowed}" if self.item.allowed else ""

    def read(self, value: object) -> tuple[object, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"must be {self.expected}, in brackets: [{write_value(value)}]")
        try:
            return tuple(self.item.read(item) for item in value)
        except ValueError:
            raise self.unfit(value) from None


@dataclass(frozen=True)
class Table(Kind):
    """A table of anything that TOML can hold but dates."""

    type_name = "table"

    def read(self, value: object) -> dict[str, object]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError("must be a table, as in { depth = 20 }")
        try:
            write_value(value)
        except TypeError as error:
            raise ValueError(f"must be a table of texts, numbers, true, false, lists and tables; {error}") from None
        return dict(value)


@dataclass(frozen=True)
class Target(Kind):
    """What a budget aims at, as in ``params: 30%``."""

    type_name = "text"
    allowed = 'empty, "params: N%" or "flops: N%" with N above 0 and below 100'

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise self.unfit(value)
        if value:
            found = re.fullmatch(r"(params|flops):\s*(\d+(?:\.\d+)?)\s*%", value.strip())
            if found is None or not 0 < float(found[2]) < 100:
                raise self.unfit(value)
        return value


@dataclass(frozen=True)
class Scheduled(Kind):
    """A number, or a table that names one of narrowgate.schedules and its arguments."""

    number: Number
    type_name = "number or schedule"

    @property
    def allowed(self) -> str:
        return self.number.allowed

    def read(self, value: object) -> float | Schedule | None:
        if callable(value) and isinstance(value, tuple(SCHEDULES.values())):
            return value
        if isinstance(value, Mapping):
            return _read_schedule(value)
        if callable(value):
            raise ValueError(f"must be a number or one of narrowgate.schedules ({', '.join(SCHEDULES)})")
        try:
            return self.number.read(value)
        except ValueError:
            raise self.unfit(value) from None

    def write(self, value: object) -> object:
        if isinstance(value, (int, float)):
            return value
        name = next(name for name, schedule in SCHEDULES.items() if isinstance(value, schedule))
        return {"schedule": name} | vars(value)


def _read_schedule(table: Mapping[str, object]) -> Schedule:
    """The schedule that a table describes; the table's keys are the schedule's arguments."""
    name = table.get("schedule")
    if not isinstance(name, str) or name not in SCHEDULES:
        guess = did_you_mean(str(name), SCHEDULES)
        raise ValueError(f"needs schedule = {_join(map(write_value, SCHEDULES), 'or')}{guess}")
    kinds = {"float": Number(), "tuple[float, ...]": Many(Number()), "tuple[int, ...]": Many(Number(0, whole=True))}
    arguments = {field.name: kinds[str(field.type)] for field in fields(SCHEDULES[name])}
    given = {key: value for key, value in table.items() if key != "schedule"}
    if given.keys() != arguments.keys():
        raise ValueError(
            f'a "{name}" schedule takes {_join(arguments, "and")}, got {_join(given, "and") or "none of them"}'
        )
    read: dict[str, object] = {}
    for key, kind in arguments.items():
        try:
            read[key] = kind.read(given[key])
        except ValueError as error:
            raise ValueError(f"its {key} {error}") from None
    return SCHEDULES[name](**read)  # type: ignore[arg-type]


def did_you_mean(word: str, known: Iterable[str], quoted: bool = True) -> str:
    """The nearest known spelling as the end of an error message; empty if none is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {write_value(near[0]) if quoted else near[0]}?" if near else ""


def _join(words: Iterable[str], last_join: str) -> str:
    *head, last = [*words] or [""]
    return f"{', '.join(head)} {last_join} {last}" if head else last
