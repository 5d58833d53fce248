"""What ``narrowgate reproduce`` and ``narrowgate record`` do once their options are read."""

from __future__ import annotations

from pathlib import Path

from narrowgate.console import table_console
from narrowgate.reproduce.page import SECTIONS, sections, write_page
from narrowgate.reproduce.record import collect, write_record
from narrowgate.reproduce.runs import load_runs


def record(folder: Path, out: Path, base: Path | None, dataset: str, curve: bool, data: str | None, device: str) -> str:
    """Write a run's record; a line that says where and what it holds."""
    made = collect(folder, base, dataset)
    if curve:
        from rich.progress import track

        from narrowgate.reproduce.curve import curve_of_run

        made["curve"] = curve_of_run(folder, data, device=device, show=lambda each: track(each, "thresholds"))
    write_record(out, made)
    share = f"{made['parameters']:,} of {made['parameters_full']:,} parameters"
    return f"{out}: test accuracy {made['accuracy']['final']:.2%}, {share}"


def reproduce(what: str, results: Path, out: Path | None, page: Path | None) -> None:
    """Print tables, draw figures and bring a page up to date, as far as each was asked for."""
    console = table_console()
    tables = sections(results)
    for name in SECTIONS:
        if what in (name, "all"):
            for table in tables[name]:
                console.print(table.to_fit(console.width), highlight=False)
                console.print()
    if what in ("figures", "all") and out is not None:
        from narrowgate.reproduce.figures import draw_all

        for path in draw_all(load_runs(results), out):
            console.print(f"drawn: {path}", markup=False)
    if page is not None:
        state = "brought up to date" if write_page(page, results) else "is up to date"
        console.print(f"{page}: {state}", markup=False)
