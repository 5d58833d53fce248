"""Checkpoints of a training run: written whole or not at all, the last few and the best kept, damage noticed.

Each is a folder with ``tensors.safetensors``, ``meta.json`` and ``SHA256SUMS`` (``sha256sum -c SHA256SUMS`` checks it).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgate._version import __version__
from narrowgate.atomic import replace_folder, surviving_folder
from narrowgate.weights import StorageError, serialise, unpack

FORMAT = 1
TENSORS, META, SUMS = "tensors.safetensors", "meta.json", "SHA256SUMS"
_EPOCH = re.compile(r"\.?epoch-(\d+)(?:\.previous)?")
_LEFTOVER = re.compile(r"\.(?:epoch-\d+|best)\.(?:[0-9a-f]{8}\.new|old)")
_PREVIOUS = re.compile(r"\.(epoch-\d+|best)\.previous")


class CheckpointError(RuntimeError):
    """A checkpoint can't be written, or none can be read."""


class _Damaged(Exception):
    """Why a checkpoint can't be used."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read: its tensors on the CPU, and what the caller of ``save`` gave as ``meta``."""

    epoch: int
    tensors: dict[str, Tensor] = field(repr=False)
    meta: dict[str, Any] = field(repr=False)
    path: Path


class Checkpoints:
    """The checkpoints in a folder: the newest ``keep`` by epoch, and beside them the best one.

    Only one process may save; any number may read.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, got {keep}")
        self.folder = folder
        self.keep = keep
        self._damaged: set[Path] = set()

    def save(self, epoch: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write the checkpoint of an epoch, then remove the oldest ones beyond ``keep``; return its folder."""
        self._tidy()
        later = [n for n in self.epochs() if n > epoch and self._path(n) not in self._damaged]
        if later:
            raise CheckpointError(
                f"{self.folder} already holds a checkpoint of epoch {later[0]}, after epoch {epoch} that is to be "
                "saved; resume that run, or choose another folder"
            )
        path = self._path(epoch)
        self._write(path, epoch, tensors, meta)
        self._damaged.discard(path)
        for old in [*self._damaged, *(self._path(n) for n in self._sound_epochs()[self.keep :])]:
            _remove(old)
        self._damaged.clear()
        return path

    def save_best(self, epoch: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> Path:
        """Write the best checkpoint so far in place of the one before; return its folder."""
        self._tidy()
        self._write(self.folder / "best", epoch, tensors, meta)
        return self.folder / "best"

    def latest(self) -> Saved | None:
        """The newest checkpoint that is whole, or None if there is none at all; warns of newer ones that are damaged.

        Raises CheckpointError if there are checkpoints and all are damaged.
        """
        reasons: list[str] = []
        for epoch in self.epochs():
            path = surviving_folder(self._path(epoch)) or self._path(epoch)
            try:
                saved = _read(path)
            except _Damaged as damage:
                self._damaged.add(self._path(epoch))
                reasons.append(f"{path} ({damage})")
                continue
            if reasons:
                warnings.warn(f"damaged: {'; '.join(reasons)}; going back to {path}", stacklevel=2)
            return saved
        if reasons:
            raise CheckpointError(
                f"no checkpoint is whole: {'; '.join(reasons)}; bring back copies of them, or delete {self.folder} "
                "to start from the beginning"
            )
        return None

    def best(self) -> Saved | None:
        """The best checkpoint, or None if there is none; raises CheckpointError if it is damaged."""
        path = surviving_folder(self.folder / "best")
        if path is None:
            return None
        try:
            return _read(path)
        except _Damaged as damage:
            raise CheckpointError(
                f"the best checkpoint is damaged: {path} ({damage}); delete it, and the run goes on without"
            ) from damage

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:06d}"

    def epochs(self) -> list[int]:
        """The epochs that have a checkpoint, whole or not, newest first."""
        if not self.folder.is_dir():
            return []
        matches = (_EPOCH.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def _sound_epochs(self) -> list[int]:
        return [epoch for epoch in self.epochs() if self._path(epoch) not in self._damaged]

    def _write(self, path: Path, epoch: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        description = {"format": FORMAT, "narrowgate": __version__, "torch": torch.__version__, "epoch": epoch}
        files = {TENSORS: serialise(tensors), META: json.dumps({**description, "meta": meta}, indent=1).encode()}
        sums = "".join(f"{_sha256(content)}  {name}\n" for name, content in files.items())
        try:
            replace_folder(path, {**files, SUMS: sums.encode()})
        except OSError as error:
            size = math.ceil(sum(map(len, files.values())) / 1e6)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = f"free {size} MB or lower checkpoint.keep" if full else "make the folder writable"
            raise CheckpointError(
                f"can't write the checkpoint {path}: {error}; the earlier ones are whole: {remedy}, then resume the run"
            ) from error

    def _tidy(self) -> None:
        """Remove what killed processes left behind, and put back what one had moved aside."""
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            aside = _PREVIOUS.fullmatch(path.name)
            if aside and not (self.folder / aside[1]).exists():
                os.replace(path, self.folder / aside[1])
            elif aside or _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that it is never seen half removed; one that can't be removed stays."""
    with contextlib.suppress(OSError):
        hidden = path.with_name(f".{path.name}.old")
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _read(path: Path) -> Saved:
    try:
        content = {name: (path / name).read_bytes() for name in (TENSORS, META, SUMS)}
        sums = content[SUMS].decode(errors="replace").splitlines()
        wrong = [name for name in (TENSORS, META) if f"{_sha256(content[name])}  {name}" not in sums]
        if wrong:
            raise _Damaged(f"the checksum of {wrong[0]} is not the one in {SUMS}")
        described = json.loads(content[META])
        if described["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {described['format']}, this narrowgate ({__version__}) reads format {FORMAT}; "
                f"use the version that wrote it: {described['narrowgate']}"
            )
        return Saved(described["epoch"], unpack(content[TENSORS], path / TENSORS), described["meta"], path)
    except FileNotFoundError as error:
        raise _Damaged(f"it lacks {Path(error.filename).name}") from error
    except (OSError, StorageError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{type(error).__name__}: {error}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
