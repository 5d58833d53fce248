"""What a person sees of a sweep: trials as they come and go, and a table at the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from narrowgate.measure.tables import short
from narrowgate.sweep.folder import Outcome, last_row, outcomes
from narrowgate.sweep.space import Trial
from narrowgate.sweep.trial import note_failure
from narrowgate.train.run_folder import METRICS
from narrowgate.train.show import duration

_STYLES = {"done": "green", "failed": "red", "unfinished": "yellow"}


class Show:
    """Shows a sweep while the context lasts: a line for each trial that ends, and in a terminal those that run."""

    def __init__(self, console: Console, folder: Path, trials: Sequence[Trial], finished: int) -> None:
        self._console = console
        self._folder = folder
        self._trials = {trial.name: trial for trial in trials}
        self._ended = finished
        self._running: dict[str, None] = {}  # in the order in which they began
        self._live: Live | None = None

    def __enter__(self) -> Show:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._now, console=self._console, refresh_per_second=1, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, name: str) -> None:
        """Note a trial that begins or goes on."""
        self._running[name] = None

    def ended(self, name: str) -> None:
        """Say how a trial ended."""
        self._running.pop(name, None)
        self._ended += 1
        (outcome,) = outcomes(self._folder, [self._trials[name]])
        if outcome.result is None:
            self._say(f"{self._count()}  {name}  failed: {outcome.error}", "red")
        else:
            found = outcome.result
            numbers = f"accuracy {found.accuracy:.2%}  parameters {short(found.parameters)}  {duration(found.seconds)}"
            self._say(f"{self._count()}  {name}  {numbers}")

    def died(self, name: str, again: bool) -> None:
        """Say that a trial's process is gone, and leave a note in its folder if that is the end of it."""
        if again:
            self._running.pop(name, None)
            self._say(f"{name}  its process died; it is started again, from its last checkpoint", "yellow")
        else:
            note_failure(self._folder / name, "its process died again and again: was it killed, or out of memory?")
            self.ended(name)

    def _count(self) -> str:
        return f"{self._ended:>{len(str(len(self._trials)))}}/{len(self._trials)}"

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def _now(self) -> RenderableType:
        """The trials that run, and how far each is by its own log."""
        table = Table.grid(padding=(0, 2))
        for name in list(self._running):
            row = last_row(self._folder / name, METRICS)
            if row is None:
                table.add_row(Text(name), "starting")
                continue
            accuracy = row.get("accuracy")
            table.add_row(
                Text(name),
                f"epoch {row.get('epoch')}/{row.get('epochs')}",
                "" if accuracy is None else f"accuracy {accuracy:.2%}",
                f"closed {row.get('closed') or 0:.1%}",
            )
        table.add_row(Text(f"{self._count()} trials have ended", "dim"))
        return table


def print_outcomes(found: Sequence[Outcome], console: Console) -> None:
    """A table of all trials, then where to look for those that failed."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("trial", overflow="fold")
    for title in ("accuracy", "parameters", "multiply-adds", "seconds"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for outcome in found:
        result, state = outcome.result, Text(outcome.state, _STYLES[outcome.state])
        if result is None:
            table.add_row(Text(outcome.trial.name), "-", "-", "-", "-", state)
        else:
            sizes = f"{result.parameters:,}", f"{result.multiply_adds:,}"
            table.add_row(Text(outcome.trial.name), f"{result.accuracy:.2%}", *sizes, f"{result.seconds:,.1f}", state)
    console.print()
    console.print(table)
    for outcome in found:
        if outcome.state == "failed":
            console.print(Text(f"{outcome.trial.name} failed: {outcome.error}", "red"), soft_wrap=True)
            console.print(Text(f"  in {outcome.folder}"), soft_wrap=True)
