"""The reference of every key as markdown, made from the parts themselves, so that docs and code can't differ."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from narrowgate.train.recipe.part import Part, kind_of
from narrowgate.train.recipe.parts import PARTS
from narrowgate.train.recipe.toml import write_value


def reference() -> str:
    """One section for each table: its keys with type, default, allowed values and meaning."""
    return "\n".join(_section(part) for part in PARTS)


def _section(part: type[Part]) -> str:
    rows = "".join(_row(spec) for spec in fields(part))  # type: ignore[arg-type]
    head = "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
    return f"### [{part.TABLE}]: {part.MEANING}\n\n{head}{rows}"


def _row(spec: Field[Any]) -> str:
    kind = kind_of(spec)
    cells = (f"`{spec.name}`", kind.type_name, _default(spec), kind.allowed, spec.metadata["doc"])
    return "".join(f"| {cell} ".replace("|  ", "| ") for cell in cells) + "|\n"


def _default(spec: Field[Any]) -> str:
    if spec.default_factory is not MISSING:
        return f"`{write_value(spec.default_factory())}`"
    if spec.default is MISSING:
        return "required"
    return f"`{write_value(kind_of(spec).write(spec.default))}`"
