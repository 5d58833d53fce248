"""What all tables of a recipe share: fields that know their kind and their documentation, and the error."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any, ClassVar

from narrowgate.train.recipe.toml import write_value
from narrowgate.train.recipe.values import Kind


class RecipeError(ValueError):
    """A recipe that can't be run; the message names the file, the key, the value and what is allowed."""

    def __init__(self, problem: str, *keys: str) -> None:
        super().__init__(problem)
        self.keys = keys
        """The keys that the problem is about, as ``table.key``."""


def key(kind: Kind, doc: str) -> dict[str, object]:
    """The metadata of a field: what it may hold, and one line of documentation."""
    return {"kind": kind, "doc": doc}


def kind_of(spec: Field[Any]) -> Kind:
    """What a field may hold."""
    kind: Kind = spec.metadata["kind"]
    return kind


def shown(value: object) -> str:
    """A value as it would stand in a recipe, for an error message."""
    try:
        return write_value(value)
    except TypeError:
        return repr(value)


class Part:
    """One table: reads every value through its kind, however the part was made."""

    TABLE: ClassVar[str]
    MEANING: ClassVar[str]

    def __post_init__(self) -> None:
        for spec in fields(self):  # type: ignore[arg-type]
            value = getattr(self, spec.name)
            try:
                object.__setattr__(self, spec.name, kind_of(spec).read(value))
            except ValueError as error:
                name = f"{self.TABLE}.{spec.name}"
                raise RecipeError(f"{name} = {shown(value)}: {error}", name) from None

    def values(self) -> dict[str, object]:
        """Every key with its value, in the form that TOML knows."""
        return {spec.name: kind_of(spec).write(getattr(self, spec.name)) for spec in fields(self)}  # type: ignore[arg-type]
