"""The console that commands print tables to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 200


def table_console() -> Console:
    """As wide as the terminal; a file or a pipe has no width, and cells cut in pieces can't be searched."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)
