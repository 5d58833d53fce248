"""Plain text tables: the first columns left-aligned, the numbers right-aligned."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str], text_columns: int) -> str:
    """Aligned columns with a line above and below the rows and a last row of totals."""
    widths = [max(len(row[i]) for row in (header, *rows, total)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(header), rule, *map(line, rows), rule, line(total)])


def change(before: int, after: int) -> str:
    """Two numbers as ``64 -> 32``, or one where they are equal."""
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


def share(before: int, after: int) -> str:
    """What is left, in percent."""
    return f"{after / before:.1%} left" if before else "-"


def short(number: int) -> str:
    """A number as people say it: ``4.09 G``."""
    for size, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 0.999995 * size:  # what would be shown as 1000.00 of the unit below
            return f"{number / size:.2f} {letter}"
    return str(number)
