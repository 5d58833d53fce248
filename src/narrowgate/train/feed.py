"""Batches: from images that lie on the device, or from a folder, always the same ones for a seed and an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from narrowgate.train.augment import Normalise, crop_flip, draw, draw_warps, seeded, warp
from narrowgate.train.data import Data, DataError, FolderData, ImageSet

# What is drawn for each image, and what is done with it. Digits fill less of their image, and few can be mirrored.
_AUGMENT: dict[str, tuple[Callable[[int, int, int], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "crop-flip": (partial(draw, padding=4), partial(crop_flip, padding=4)),
    "shift": (partial(draw, padding=2, flips=False), partial(crop_flip, padding=2)),
    "warp": (draw_warps, warp),
}
_EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Place:
    """Where this process computes: its device, its rank and how many there are; the images' memory format there."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.device.type == "cuda" else torch.contiguous_format


class ArrayFeed:
    """Training images as uint8 on the device; a batch is picked, augmented and normalised there.

    ``batch`` reads a counter on the device and nothing from the host, so that a captured CUDA graph gives the next
    batch at every replay. The last images of an epoch's order that don't fill a batch are left out.
    """

    def __init__(self, data: Data, batch: int, augment: str, seed: int, place: Place) -> None:
        self._count, self._batch, self._seed, self._place = len(data.train), batch, seed, place
        self.steps = _steps(self._count, batch, place)
        self._images = data.train.images.to(place.device)
        self._labels = data.train.labels.to(place.device)
        self._normalise = Normalise(data.mean, data.std, place.device)
        self._augment = _AUGMENT.get(augment)
        self._order = torch.zeros(self.steps, batch, dtype=torch.long, device=place.device)
        like = torch.empty(0) if self._augment is None else self._augment[0](1, seed, 0)
        self._draws = torch.zeros(self.steps, batch, like.shape[-1], dtype=like.dtype, device=place.device)
        self._step = torch.zeros(1, dtype=torch.long, device=place.device)

    def start(self, epoch: int) -> None:
        """Shuffle for an epoch; every process takes its part of each batch."""
        order = torch.randperm(self._count, generator=seeded("narrowgate order", self._seed, epoch))
        self._order.copy_(self._mine(order))
        if self._augment is not None:
            self._draws.copy_(self._mine(self._augment[0](self._count, self._seed, epoch)))
        self._step.zero_()

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next images, normalised, and their labels."""
        chosen = self._order.index_select(0, self._step)[0]
        images = self._images.index_select(0, chosen)
        if self._augment is not None:
            images = self._augment[1](images, self._draws.index_select(0, self._step)[0])
        labels = self._labels.index_select(0, chosen)
        self._step += 1
        return self._normalise(images).contiguous(memory_format=self._place.memory_format), labels

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch's batches, for a loop on the host."""
        for _ in range(self.steps):
            yield self.batch()

    def _mine(self, rows: Tensor) -> Tensor:
        world = self._place.world
        whole = rows[: self.steps * self._batch * world]
        return whole.view(self.steps, world, self._batch, *rows.shape[1:])[:, self._place.rank]


class FolderFeed:
    """Batches that a ``DataLoader`` reads from image folders."""

    def __init__(self, data: FolderData, batch: int, seed: int, place: Place) -> None:
        self._data, self._batch, self._seed, self._place = data, batch, seed, place
        self.steps = _steps(data.train_size, batch, place)
        self._normalise = Normalise(data.mean, data.std, place.device)
        self._epoch = 0

    def start(self, epoch: int) -> None:
        """The epoch whose order ``batches`` gives."""
        self._epoch = epoch

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch's batches."""
        place = self._place
        loader = self._data.loader("train", self._batch, self._seed, self._epoch, place.rank, place.world)
        for images, labels in loader:
            yield _to_device(images, labels, self._normalise, place)


def _steps(count: int, batch: int, place: Place) -> int:
    """How many batches an epoch has."""
    if count < batch * place.world:
        processes = f" x {place.world} processes" if place.world > 1 else ""
        raise DataError(f"a batch of {batch}{processes} is more than the {count} training images: lower train.batch")
    return count // (batch * place.world)


def held_out_batches(
    data: Data | FolderData, split: str, place: Place, batch: int = _EVALUATION_BATCH
) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's share of the images of a split, ``held-out`` or ``test``: normalised, not augmented."""
    normalise = Normalise(data.mean, data.std, place.device)
    if isinstance(data, FolderData):
        for images, labels in data.loader(split, batch, 0, 0, place.rank, place.world):
            yield _to_device(images, labels, normalise, place)
        return
    images_set = data.test if split == "test" else data.held_out
    yield from _slices(images_set, normalise, place, batch)


def _slices(images: ImageSet, normalise: Normalise, place: Place, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(place.rank * batch, len(images), batch * place.world):
        part = slice(start, start + batch)
        yield _to_device(images.images[part], images.labels[part], normalise, place)


def _to_device(images: Tensor, labels: Tensor, normalise: Normalise, place: Place) -> tuple[Tensor, Tensor]:
    pixels = normalise(images.to(place.device, non_blocking=True))
    return pixels.contiguous(memory_format=place.memory_format), labels.to(place.device, non_blocking=True)
