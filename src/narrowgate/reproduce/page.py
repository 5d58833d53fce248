"""All tables of a folder of results, and a page that holds them between markers."""

from __future__ import annotations

import re
from pathlib import Path

from narrowgate.atomic import replace_file
from narrowgate.reproduce import cifar, imagenet, method, mnist
from narrowgate.reproduce.record import RecordError
from narrowgate.reproduce.runs import load_runs
from narrowgate.reproduce.tables import Table

SECTIONS = ("mnist", "cifar100", "imagenet", "method")


def sections(folder: Path) -> dict[str, list[Table]]:
    """The tables by section, from the result files in a folder."""
    if not folder.is_dir():
        raise RecordError(
            f"there is no folder {folder}; run this in the checkout of narrowgate, or give its folder of result files "
            "with --results"
        )
    runs = load_runs(folder)
    return {
        "mnist": mnist.tables(runs),
        "cifar100": cifar.tables(runs),
        "imagenet": imagenet.tables(runs, folder),
        "method": method.tables(folder),
    }


def with_tables(page: str, tables: dict[str, list[Table]]) -> str:
    """A page with the tables of each section between the markers of that name."""
    return between_markers(page, {k: "\n".join(table.to_markdown() for table in v) for k, v in tables.items()})


def between_markers(page: str, texts: dict[str, str]) -> str:
    """A page whose text between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` is the one of that name."""
    for name, text in texts.items():
        pattern = rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)"
        places = list(re.finditer(pattern, page, flags=re.DOTALL))
        if len(places) != 1:
            raise RecordError(
                f"the page has {len(places)} places for {name!r}; it needs one: the lines <!-- {name}: begin --> and "
                f"<!-- {name}: end -->"
            )
        page = page[: places[0].end(1)] + text + page[places[0].start(2) :]
    return page


def check_page(path: Path) -> str:
    """The text of a page that has a place for each section; a RecordError for a file that is none."""
    if not path.is_file():
        raise RecordError(
            f"there is no page {path}; give one that has the tables' markers, such as docs/reproduction.md"
        )
    text = path.read_text(encoding="utf-8")
    try:
        between_markers(text, dict.fromkeys(SECTIONS, ""))
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    return text


def write_page(path: Path, folder: Path) -> bool:
    """Put the tables of a folder into a page; whether that changed it."""
    before = check_page(path)
    after = with_tables(before, sections(folder))
    if after != before:
        replace_file(path, after.encode())
    return after != before
