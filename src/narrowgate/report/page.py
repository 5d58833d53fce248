"""From runs to one HTML page: the data as JSON, and a script that draws it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from narrowgate.atomic import replace_file
from narrowgate.report.data import ReportError, RunData
from narrowgate.report.read import fronts, read_runs

_SCRIPTS = ("base.js", "plot.js", "widths.js", "gates.js", "course.js", "latency.js", "run.js", "compare.js", "main.js")


def write_report(paths: Iterable[str | Path], out: str | Path) -> Path:
    """Write the page of one run or several, whole or not at all; where it is."""
    out = Path(out)
    if out.is_dir():
        raise ReportError(f"{out} is a folder: say what the page is to be called, such as --out {out}/report.html")
    page = render(read_runs(Path(path) for path in paths))
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, page.encode(errors="replace"))  # a folder's name may hold any bytes
    return out


def render(runs: Sequence[RunData]) -> str:
    """The page as text; it asks for nothing from outside."""
    if not runs:
        raise ReportError("give at least one run")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    content = {
        "runs": [asdict(run) for run in runs],
        "fronts": {size: fronts(runs, size) for size in ("parameters", "multiply_adds")},
    }
    script = "\n" + "\n".join(_part(name) for name in _SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _fill(
        _part("page.html"),
        TITLE=html.escape(f"{title} · narrowgate"),
        POLICY=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        STYLE=_part("style.css"),
        DATA=_json_in_html(content),
        SCRIPT=script,
    )


def _fill(template: str, **values: str) -> str:
    """Put each value where the template has its name; values are not searched for names."""
    pieces = template.split("@@")
    return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _json_in_html(value: object) -> str:
    """JSON that can't end the element it stands in, nor open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _part(name: str) -> str:
    return (resources.files(__package__) / "parts" / name).read_text(encoding="utf-8")
