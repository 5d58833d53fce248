"""Lines of code that each method asks of its user: what a script has beyond the plain training script beside it."""

from __future__ import annotations

import ast
import difflib
import io
import tokenize
from pathlib import Path

FOLDER = Path(__file__).with_name("compare_snippets")
PLAIN = "plain"
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def names() -> list[str]:
    """The methods that have a script, the plain one apart."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != PLAIN)


def lines_added() -> dict[str, int]:
    """Code lines of each script that the plain one lacks or has otherwise."""
    plain = code_lines((FOLDER / f"{PLAIN}.py").read_text())
    found = {}
    for name in names():
        matched = difflib.SequenceMatcher(None, plain, mine := code_lines((FOLDER / f"{name}.py").read_text()), False)
        found[name] = len(mine) - sum(block.size for block in matched.get_matching_blocks())
    return found


def code_lines(source: str) -> list[str]:
    """The lines that hold code: no blank ones, comments or docstrings."""
    tokens, words = tokenize.generate_tokens(io.StringIO(source).readline), _docstrings(source)
    kept = [
        t
        for t in tokens
        if t.type not in (*_LAYOUT, tokenize.COMMENT) and not any(t.start[0] in place for place in words)
    ]
    numbers = {row for token in kept for row in range(token.start[0], token.end[0] + 1)}
    lines = source.splitlines()
    return [lines[number - 1].partition("  #")[0].rstrip() for number in sorted(numbers)]


def _docstrings(source: str) -> list[range]:
    places = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            text = node.body[0]
            places.append(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return places
