"""What a person sees of a run: progress in a terminal, about twenty lines elsewhere, and a table at the end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from narrowgate.measure.tables import short
from narrowgate.train.log import EpochRow

if TYPE_CHECKING:
    from narrowgate.train.finish import Result

_LINES = 20  # of a run, where there is no terminal
_RECENT = 5  # epochs that the time left is reckoned from: they get cheaper as the network shrinks
_SLOW = 5.0  # seconds of an epoch after which its steps are shown
_FEW_LAYERS = 16  # that the last table lists one by one


class Show:
    """Shows a run while the context lasts; ``quiet``, for all processes but the first, shows nothing."""

    def __init__(self, console: Console | None, epochs: int, *, quiet: bool = False) -> None:
        self._console = Console(quiet=True) if quiet else console or Console()
        self._epochs = epochs
        self._done = 0
        self._step = self._steps = 0
        self._row: EpochRow | None = None
        self._accuracy = "-"
        self._recent: tuple[float, ...] = ()
        self._epoch_began = time.perf_counter()
        self._told: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> Show:
        if self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.quiet:
            self._live = Live(self, console=self._console, refresh_per_second=4)
            self._live.start()
        self._epoch_began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def begin(self, epoch: int) -> None:
        """Say how many epochs were done before, for a run that goes on."""
        self._done = epoch

    def step(self, step: int, steps: int) -> None:
        """Note a step within an epoch; costs next to nothing."""
        self._step, self._steps = step, steps

    def epoch(self, row: EpochRow) -> None:
        """Show an epoch that is done."""
        self._row, self._done = row, row.epoch
        self._step = 0
        self._epoch_began = time.perf_counter()
        self._recent = (*self._recent, row.seconds)[-_RECENT:]
        if row.accuracy is not None:
            self._accuracy = f"{row.accuracy:.2%}"
        if row.event:
            self._print(f"{_epoch_of(row.epoch, self._epochs)}  {row.event}")
        every = math.ceil(self._epochs / _LINES)
        if self._live is None and (row.epoch in (1, self._epochs) or row.epoch % every == 0):
            self._print(
                "  ".join([_epoch_of(row.epoch, self._epochs), *self._numbers(row), self._time_left()]).rstrip()
            )

    def notice(self, text: str) -> None:
        """Print a text above the progress, the first time it comes."""
        if text not in self._told:
            self._told.add(text)
            self._print(text, "yellow")

    def summary(self, result: Result, widths: Mapping[str, tuple[int, int]], folder: Path | None = None) -> None:
        """Print what the run ended with; ``widths`` are the channels of each layer, before and after."""
        self._stop()
        self._console.print()
        self._console.print(_table(result, widths))
        for line in _remarks(result):
            self._print(line)
        if folder is not None:
            self._print(f"All of it     {folder}; to look at it: narrowgate report {shlex.quote(str(folder))}")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The progress as it stands: a bar, and below it the numbers of the last epoch."""
        within = self._step / self._steps if self._steps else 0.0
        slow = time.perf_counter() - self._epoch_began > _SLOW or (self._recent and self._recent[-1] > _SLOW)
        line = Table.grid(padding=(0, 2))
        line.add_row(
            _epoch_of(min(self._done + 1, self._epochs), self._epochs),
            ProgressBar(total=self._epochs, completed=min(self._done + within, self._epochs), width=30),
            f"step {self._step}/{self._steps}" if slow and self._step else "",
            self._time_left(),
        )
        yield line
        if self._row is not None:
            numbers = self._numbers(self._row)
            parts = [numbers] if len("  ".join(numbers)) <= options.max_width else [numbers[:3], numbers[3:]]
            yield from (Text("  ".join(part)) for part in parts)

    def _numbers(self, row: EpochRow) -> list[str]:
        return [
            f"loss {row.train_loss:.4f}",
            f"accuracy {self._accuracy:>6}",  # the last one known, where not every epoch is evaluated
            f"closed {row.closed:>5.1%}",
            f"parameters {short(row.parameters)}",
            f"multiply-adds {short(row.multiply_adds)}",
        ]

    def _time_left(self) -> str:
        gone = time.perf_counter() - self._epoch_began
        if self._done >= self._epochs:
            return ""
        if self._recent:
            each = max(sum(self._recent) / len(self._recent), gone)
        elif self._steps and self._step / self._steps > 0.02:
            each = gone * self._steps / self._step
        else:
            return ""
        return f"{duration(each * (self._epochs - self._done) - gone)} left"

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=not self._console.is_terminal)  # a terminal cuts words

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def duration(seconds: float) -> str:
    """A time as people say it: ``45 s``, ``12 min``, ``3 h 05 min``."""
    seconds = max(0.0, seconds)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _epoch_of(epoch: int, epochs: int) -> str:
    return f"epoch {epoch:>{len(str(epochs))}}/{epochs}"


def _table(result: Result, widths: Mapping[str, tuple[int, int]]) -> Table:
    table = Table("", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("before", "after", ""):
        table.add_column(title, justify="right")
    counts = {
        "parameters": (result.parameters_full, result.parameters),
        "multiply-adds": (result.multiply_adds_full, result.multiply_adds),
    }
    if len(widths) <= _FEW_LAYERS:
        counts |= {f"channels of {name}": pair for name, pair in widths.items()}
    else:
        counts["channels"] = (sum(old for old, _ in widths.values()), sum(new for _, new in widths.values()))
    for name, (old, new) in counts.items():
        table.add_row(Text(name), f"{old:,}", f"{new:,}", f"{new / old:.1%} left" if old else "")
    change = 100 * (result.accuracy - result.accuracy_gated)
    same = abs(change) < 0.005
    table.add_row(
        "test accuracy",
        f"{result.accuracy_gated:.2%}",
        f"{result.accuracy:.2%}",
        "the same" if same else f"{change:+.2f} points",
    )
    return table


def _remarks(result: Result) -> list[str]:
    """What the table has no room for."""
    lines = [f"\nGates closed  {result.closed:.1%}"]
    if result.closed_by_threshold:
        lines[0] += f", and {result.closed_by_threshold:,} more at the end, by [finish]"
    if result.max_error is not None:
        error = f"{result.max_error:.0e}" if result.max_error else "0"
        lines.append(f"Exactness     max difference {error} between the outputs before and after removal")
    if result.finetune_epochs:
        plural = "s" if result.finetune_epochs > 1 else ""
        change = f"test accuracy {result.accuracy_removed:.2%} -> {result.accuracy:.2%}"
        lines.append(f"Fine-tuning   {result.finetune_epochs} epoch{plural} after the removal, {change}")
    processes = f", {result.processes} processes" if result.processes > 1 else ""
    epochs = "1 epoch" if result.epochs == 1 else f"{result.epochs} epochs"
    lines.append(f"Training      {epochs} in {duration(result.seconds)} on {result.device}{processes}")
    return lines
