"""What a run writes down: ``metrics.jsonl``, a line an epoch; ``gates.jsonl``, some histograms; and TensorBoard."""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from narrowgate.atomic import replace_file
from narrowgate.gateset import Gates
from narrowgate.train.run_folder import GATES, METRICS, TENSORBOARD

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_HISTOGRAMS = 20  # of each layer's gates, over a run, for TensorBoard
_SNAPSHOTS = 30  # the same in gates.jsonl
# Three bins a decade from 1e-8, just below the smallest value of an open exponential gate in float32, to 1, and one
# for what is larger: what decides about a gate is its order of magnitude.
_EDGES = tuple(float(f"{10 ** (-8 + i / 3):.4g}") for i in range(25))


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
        self._files: dict[str, IO[str]] = {}
        self._writer: SummaryWriter | None = None
        self._first_step: int | None = None

    def epoch(self, row: EpochRow, gates: Gates | None) -> None:
        """Write down an epoch; the line is in the file when this returns."""
        self._append(METRICS, row.to_json())
        if gates is not None and _is_time(row, -(-row.epochs // _SNAPSHOTS), first=True):
            self._append(GATES, snapshot(row.epoch, gates))
        if self._tensorboard and self._writer is None:
            self._writer = self._open_writer()
        if self._writer is not None:
            with _named(self.folder / TENSORBOARD):
                _add_scalars(self._writer, row)
                if gates is not None and _is_time(row, max(1, row.epochs // _HISTOGRAMS)):
                    _add_histograms(self._writer, row.epoch, gates)

    def rewind(self, epoch: int) -> None:
        """Drop everything after an epoch, for a run that goes on from there; 0 drops all."""
        self.close()
        self._first_step = epoch + 1
        for path in (self.folder / METRICS, self.folder / GATES):
            if path.exists():
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                kept = [line for line in lines if (number := _epoch_of(line)) is not None and number <= epoch]
                replace_file(path, "".join(f"{line}\n" for line in kept).encode())

    def close(self) -> None:
        """Close the files; another epoch opens them again."""
        for file in self._files.values():
            file.close()
        writer = self._writer
        self._files, self._writer = {}, None
        if writer is not None:
            with _named(self.folder / TENSORBOARD):
                writer.close()

    def _append(self, name: str, line: str) -> None:
        if name not in self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files[name] = (self.folder / name).open("a", encoding="utf-8")
        try:
            with _named(self.folder / name):
                self._files[name].write(line + "\n")
                self._files[name].flush()
        except OSError:
            with contextlib.suppress(OSError):  # closing tries to write again
                self._files.pop(name).close()
            raise

    def _open_writer(self) -> SummaryWriter | None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._tensorboard = False
            warnings.warn(
                f"tensorboard is not installed: only {METRICS} is written; pip install tensorboard", stacklevel=3
            )
            return None
        place = str(self.folder / TENSORBOARD)
        if os.fsencode(place) != place.encode("utf-8", errors="replace"):  # as which it would write, elsewhere
            self._tensorboard = False
            warnings.warn(
                f"TensorBoard can't write to a path with letters like those of {self.folder.name!r} in this locale: "
                f"only {METRICS} is written; set LC_ALL=C.UTF-8, or name the folder in plain letters",
                stacklevel=3,
            )
            return None
        # TensorBoard then forgets what a killed run wrote of these steps.
        return SummaryWriter(place, purge_step=self._first_step)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Of a full disk the system does not say which file it is."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def snapshot(epoch: int, gates: Gates) -> str:
    """A line of ``gates.jsonl``: for each layer how many gates are closed, then how many are in each bin.

    The first bin has everything open below the second edge, the last one everything from the last edge on.
    """
    edges = torch.tensor(_EDGES[1:], device="cpu")
    layers = {}
    for name, value in gates.values().items():
        value = value.flatten().float().cpu()
        bins = torch.bucketize(value[value != 0], edges, right=True)
        layers[name] = [int((value == 0).sum()), *torch.bincount(bins, minlength=len(_EDGES)).tolist()]
    return json.dumps({"epoch": epoch, "edges": _EDGES, "layers": layers}, separators=(",", ":"))


def _is_time(row: EpochRow, every: int, first: bool = False) -> bool:
    return row.epoch % every == 0 or row.epoch == row.epochs or (first and row.epoch == 1)


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
