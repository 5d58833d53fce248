"""From TOML and overrides to the parts of a recipe, with errors that know what was probably meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from narrowgate.train.recipe.part import Part, RecipeError, kind_of, shown
from narrowgate.train.recipe.parts import PARTS
from narrowgate.train.recipe.toml import TOMLDecodeError, parse_toml, parse_value, told
from narrowgate.train.recipe.values import Table, Text, did_you_mean

Tables = dict[str, dict[str, object]]

SPECS: dict[str, dict[str, Field[Any]]] = {
    part.TABLE: {spec.name: spec for spec in fields(part)}  # type: ignore[arg-type]
    for part in PARTS
}
"""Every table with its keys."""


def read_text(path: Path) -> str:
    """The text of a recipe file, or an error that names files with similar names beside it."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows' editors may put a mark in front
    except FileNotFoundError:
        others = [file.name for file in sorted(path.parent.glob("*.toml")) if file.name != "pyproject.toml"]
        near = did_you_mean(path.name, others, quoted=False)
        if not near and others:
            others.sort(key=lambda name: path.stem not in name)
            near = f"; {path.parent} has {', '.join(others[:4])}{' and others' if len(others) > 4 else ''}"
        raise RecipeError(f"{path}: no such recipe{near or '; give a TOML file, see docs/recipes.md'}") from None
    except IsADirectoryError:
        raise RecipeError(f"{path}: can't be read as a recipe: it is a folder; give a file in it") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}: can't be read as a recipe: line {line} is not UTF-8; save it as UTF-8") from error
    except OSError as error:
        raise RecipeError(f"{path}: can't be read as a recipe: {error}") from error


def tables_from(text: str, source: str) -> Tables:
    """The tables of a TOML text; nothing but tables that recipes have, keys not looked at yet."""
    try:
        document = parse_toml(text)
    except TOMLDecodeError as error:
        raise RecipeError(f"{source}: not valid TOML: {told(error, text)}") from None
    tables: Tables = {}
    for name, table in document.items():
        if isinstance(table, dict) and name in SPECS:
            tables[name] = dict(table)
            continue
        if name in SPECS:
            raise RecipeError(f"{source}: {name} = {shown(table)}: must be a table, [{name}]", name)
        if isinstance(table, dict):
            raise RecipeError(f"{source}: unknown table [{name}]; {_known_tables(name)}", name)
        homes = [home for home, specs in SPECS.items() if name in specs]
        remedy = f"put it under [{'] or ['.join(homes)}]" if homes else "recipes have tables only"
        raise RecipeError(f"{source}: {name} = {shown(table)} stands outside a table; {remedy}", name)
    return tables


def apply_overrides(tables: Tables, overrides: Sequence[str]) -> dict[str, str]:
    """Put ``table.key=value`` overrides into the tables; gives the override of each key that had one."""
    overridden: dict[str, str] = {}
    for override in overrides:
        path, equals, text = override.partition("=")
        table, *keys = (word.strip() for word in path.split(".", 2))  # a layer's name has points of its own
        if not equals or not keys:
            homes = [f"{home}.{table}" for home, specs in SPECS.items() if table in specs]
            guess = f"; did you mean {' or '.join(homes)}?" if homes else ""
            raise RecipeError(f"--set {override}: write table.key=value, for example --set train.epochs=3{guess}")
        try:
            _set(tables, table, keys, text)
        except ValueError as error:  # of ours, or of a value that is no TOML
            raise RecipeError(f"--set {override}: {error}", f"{table}.{keys[0]}") from None
        overridden[f"{table}.{keys[0]}"] = override
    return overridden


def _set(tables: Tables, table: str, keys: list[str], text: str) -> None:
    """Set one key, or one entry of a table: ``model.options.depth``, ``penalty.factors.fc1.inputs``."""
    if table not in SPECS:
        raise RecipeError(f"unknown table [{table}]; {_known_tables(table)}")
    spec = SPECS[table].get(keys[0])
    if spec is None:
        raise RecipeError(_unknown_key(table, keys[0]))
    kind = kind_of(spec)
    value = parse_value(text)
    if len(keys) == 1:
        # So that precision=32 and path=2024 need no quotes within quotes.
        plain = isinstance(kind, Text) and not isinstance(value, str)
        tables.setdefault(table, {})[keys[0]] = text.strip() if plain else value
        return
    if not isinstance(kind, Table):
        raise RecipeError(f"{table}.{keys[0]} has no entries to set; write --set {table}.{keys[0]}=value")
    entries = tables.setdefault(table, {}).get(keys[0], {})
    if not isinstance(entries, Mapping):
        raise RecipeError(f"{table}.{keys[0]} = {shown(entries)}: must be {kind.expected}")
    tables[table][keys[0]] = {**entries, keys[1].strip("\"'"): value}


def parts_from(tables: Tables) -> dict[str, Part]:
    """The parts of a recipe by their names; defaults where a table or a key is left out."""
    return {part.TABLE: _part_from(part, tables.get(part.TABLE, {})) for part in PARTS}


def _part_from(part: type[Part], values: dict[str, object]) -> Part:
    specs = SPECS[part.TABLE]
    for name in values:
        if name not in specs:
            raise RecipeError(_unknown_key(part.TABLE, name), f"{part.TABLE}.{name}")
    for name, spec in specs.items():
        if name not in values and spec.default is MISSING and spec.default_factory is MISSING:
            full = f"{part.TABLE}.{name}"
            raise RecipeError(f"{full} is missing: {spec.metadata['doc']} ({kind_of(spec).expected})", full)
    return part(**values)


def _unknown_key(table: str, name: str) -> str:
    """The message for a key that a table does not have: near spellings first, then the same key elsewhere."""
    homes = [f"{home}.{name}" for home, specs in SPECS.items() if name in specs]
    elsewhere = f"; did you mean {' or '.join(homes)}?" if homes else ""
    guess = did_you_mean(name, SPECS[table], quoted=False) or elsewhere
    return f"unknown key {table}.{name}; [{table}] takes {', '.join(SPECS[table])}{guess}"


def _known_tables(name: str) -> str:
    return f"tables are {', '.join(SPECS)}{did_you_mean(name, SPECS, quoted=False)}"
