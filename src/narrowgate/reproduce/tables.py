"""A table that knows how to be Markdown for a page and a rich table for a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NO_RUN = "no run yet"
NO_IMAGENET = "not run: needs ImageNet"
NO_NUMBER = "-"


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

    def to_rich(self) -> RichTable:
        """The same for ``Console.print``."""
        from rich.markup import escape
        from rich.table import Table as RichTable

        made = RichTable(title=self.title, caption=escape(self.note.replace("`", "")) or None, title_justify="left")
        for name in self.head:
            made.add_column(name)
        for row in self.rows:
            made.add_row(*(escape(cell.replace("`", "")) for cell in row))
        return made


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
