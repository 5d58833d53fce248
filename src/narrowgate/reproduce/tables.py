"""A table that knows how to be Markdown for a page and a rich table for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

NO_RUN = "no run yet"
NO_IMAGENET = "not run: needs ImageNet"
NO_NUMBER = "-"
_SHORT = 20  # characters


@dataclass(frozen=True)
class Table:
    """A title, a line of heads, rows of text, and a note below."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def to_markdown(self, level: int = 3) -> str:
        """Title, table and note as a page has them."""
        lines = [f"{'#' * level} {self.title}", ""]
        lines += ["| " + " | ".join(self.head) + " |", "|" + "---|" * len(self.head)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"

    def to_fit(self, width: int) -> RenderableType:
        """The same for ``Console.print``; its rows one below the other where a console would cut words and numbers."""
        from rich.console import Group

        needed = [least for _, least in map(_widths, self._columns())]
        if sum(needed) + 3 * len(needed) + 1 <= width:
            return self._as_grid()
        return Group(f"[italic]{self.title}[/]", "", self._as_list(), _plain(self.note))

    def _columns(self) -> list[tuple[str, ...]]:
        return list(zip(self.head, *self.rows, strict=True))

    def _as_grid(self) -> RichTable:
        from rich.table import Table as RichTable

        made = RichTable(title=self.title, caption=_plain(self.note) or None, title_justify="left")
        for column in self._columns():
            longest, least = _widths(column)
            made.add_column(column[0], no_wrap=longest == least, min_width=least)
        for row in self.rows:
            made.add_row(*map(_plain, row))
        return made

    def _as_list(self) -> RichTable:
        from rich.table import Table as RichTable

        made = RichTable.grid(padding=(0, 2))
        made.add_column(no_wrap=True, style="dim")
        made.add_column(overflow="fold")
        for row in self.rows:
            for name, cell in zip(self.head, row, strict=True):
                if cell:
                    made.add_row(name, _plain(cell))
            made.add_row()
        return made


def _widths(column: tuple[str, ...]) -> tuple[int, int]:
    """The length of a column's longest cell, and the width that it can do with: short cells stay in one line."""
    longest = max(map(len, column))
    return longest, longest if longest <= _SHORT else max(len(word) for cell in column for word in cell.split())


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text.replace("`", ""))


def short(value: float) -> str:
    """A strength or a rate as people write it: 5e-4, not 0.0005."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:g}"
    digits, _, power = f"{value:e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def judge(smaller: bool, better: bool) -> str:
    """How a run stands beside the paper's numbers, each counted as reached if it is not worse."""
    return {(True, True): "both", (True, False): "size", (False, True): "accuracy", (False, False): "neither"}[
        smaller, better
    ]
