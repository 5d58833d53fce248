"""TOML for recipes: read with the standard library, written by a few lines, overridden by ``table.key=value``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TOMLDecodeError", "parse_toml", "parse_value", "told", "write_value"]

TOMLDecodeError = tomllib.TOMLDecodeError
_SHOWN = 80  # characters of a line


def parse_toml(text: str) -> dict[str, object]:
    """The tables of a TOML document; ``TOMLDecodeError`` says where it is wrong."""
    return tomllib.loads(text)


def told(error: TOMLDecodeError, text: str) -> str:
    """What is wrong with a TOML document and where, with the line itself."""
    place = re.search(r"at line (\d+)", str(error))
    lines = text.replace("\r\n", "\n").split("\n")
    line = lines[int(place[1]) - 1].strip() if place else ""
    return f"{error}{': ' * bool(line)}{line[:_SHOWN]}{'...' * (len(line) > _SHOWN)}"


def parse_value(text: str) -> object:
    """A value from a command line: TOML, or the text itself where that is a bare word such as ``off``."""
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except TOMLDecodeError as error:
        if text[:1] not in ("[", "{", '"', "'"):
            return text
        why = str(error).partition(" (at ")[0]  # where it is counts from a line that nobody wrote
        remedy = "; in brackets, texts need quotes" if text[0] in "[{" else ""
        raise ValueError(f"{text} is not a value of TOML: {why}{remedy}") from None
    return parsed["value"] if len(parsed) == 1 else text


def write_value(value: object) -> str:
    """A value as TOML, tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but JSON leaves DEL as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(write_value, value))}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_write_key(str(key))} = {write_value(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    raise TypeError(f"a {type(value).__name__} can't be written")


def _write_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else write_value(key)
