"""What a run writes down every epoch: ``metrics.jsonl``, one line an epoch, and TensorBoard."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from narrowgate.atomic import replace_file
from narrowgate.gateset import Gates

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
_HISTOGRAMS = 20  # of each layer's gates, over a run


@dataclass(frozen=True)
class EpochRow:
    """How a run stands after an epoch (counted from 1); shares and accuracies are between 0 and 1."""

    epoch: int
    epochs: int
    lr: float
    strength: float
    sigma: float
    train_loss: float
    train_accuracy: float
    accuracy: float | None
    """On held-out images; None in an epoch without an evaluation."""
    closed: float
    """The share of all gates the network began with, removed ones included."""
    parameters: int
    multiply_adds: int
    seconds: float
    images_per_second: float
    event: str = ""

    def to_json(self) -> str:
        """One line of JSON; numbers that JSON doesn't have (NaN, infinity) are null."""
        row = {key: None if _is_not_finite(value) else value for key, value in asdict(self).items()}
        return json.dumps(row, allow_nan=False)


class RunLog:
    """Appends to the logs in a run's folder; nothing is opened before the first epoch is written."""

    def __init__(self, folder: Path, tensorboard: bool = True) -> None:
        self.folder = folder
        self._tensorboard = tensorboard
        self._file: IO[str] | None = None
        self._writer: SummaryWriter | None = None
        self._first_step: int | None = None

    def epoch(self, row: EpochRow, gates: Gates | None) -> None:
        """Write down an epoch; the line is in the file when this returns."""
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = (self.folder / METRICS).open("a", encoding="utf-8")
        self._file.write(row.to_json() + "\n")
        self._file.flush()
        if self._tensorboard and self._writer is None:
            self._writer = self._open_writer()
        if self._writer is not None:
            _add_scalars(self._writer, row)
            if gates is not None and (row.epoch == row.epochs or row.epoch % max(1, row.epochs // _HISTOGRAMS) == 0):
                _add_histograms(self._writer, row.epoch, gates)

    def rewind(self, epoch: int) -> None:
        """Drop everything after an epoch, for a run that goes on from there; 0 drops all."""
        self.close()
        self._first_step = epoch + 1
        path = self.folder / METRICS
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if (number := _epoch_of(line)) is not None and number <= epoch]
        replace_file(path, "".join(f"{line}\n" for line in kept).encode())

    def close(self) -> None:
        """Close the files; another epoch opens them again."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()
        self._file = self._writer = None

    def _open_writer(self) -> SummaryWriter | None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._tensorboard = False
            warnings.warn(
                f"tensorboard is not installed: only {METRICS} is written; pip install tensorboard", stacklevel=3
            )
            return None
        # TensorBoard then forgets what a killed run wrote of these steps.
        return SummaryWriter(str(self.folder / TENSORBOARD), purge_step=self._first_step)


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _epoch_of(line: str) -> int | None:
    """The epoch of a line; None for one that was cut off when a run was killed."""
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return None


def _add_scalars(writer: SummaryWriter, row: EpochRow) -> None:
    scalars = {
        "loss/train": row.train_loss,
        "accuracy/train": row.train_accuracy,
        "accuracy/held_out": row.accuracy,
        "gates/closed": row.closed,
        "size/parameters": row.parameters,
        "size/multiply_adds": row.multiply_adds,
        "schedule/lr": row.lr,
        "schedule/strength": row.strength,
        "schedule/sigma": row.sigma,
        "speed/images_per_second": row.images_per_second,
        "speed/seconds": row.seconds,
    }
    for name, value in scalars.items():
        if value is not None:
            writer.add_scalar(name, value, row.epoch)
    if row.event:
        writer.add_text("events", row.event, row.epoch)


def _add_histograms(writer: SummaryWriter, epoch: int, gates: Gates) -> None:
    values: dict[str, Any] = {name: value.float().cpu().numpy() for name, value in gates.values().items()}
    for name, value in values.items():
        if value.size:
            writer.add_histogram(f"gates/{name}", value, epoch)
