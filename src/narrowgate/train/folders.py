"""Image folders too large for memory: ``path/train/CLASS/*.jpg``, and ``path/val`` or ``path/test`` alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from narrowgate.train.arrays import DataError
from narrowgate.train.augment import seeded

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SPLITS = ("train", "held-out", "test")
_SIZE = 224
_DEEP = ("I", "F")  # PIL's modes of 16 and 32 bits


class DamagedImageError(DataError):
    """An image that can't be read."""


@dataclass(frozen=True)
class _Files:
    """Paths and classes of the images of one split."""

    paths: list[str]
    labels: list[int]

    def pick(self, places: Tensor) -> _Files:
        return _Files([self.paths[i] for i in places.tolist()], [self.labels[i] for i in places.tolist()])


@dataclass(frozen=True)
class FolderData:
    """Images that are read from folders as they are needed; ``loader`` gives their batches as uint8."""

    classes: int
    image_shape: tuple[int, int, int]
    splits: dict[str, _Files] = field(repr=False)
    augment: bool
    workers: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    @property
    def train_size(self) -> int:
        """How many images there are to train on."""
        return len(self.splits["train"].paths)

    @property
    def held_out_size(self) -> int:
        """How many images are evaluated during a run."""
        return len(self.splits["held-out"].paths)

    def loader(
        self, split: str, batch: int, seed: int = 0, epoch: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of images, uint8 [B, 3, size, size], and labels, for one of ``world`` processes.

        For ``train`` the order and the crops depend on seed and epoch alone, whatever the number of workers or
        processes; the last images that don't fill a batch in every process are left out. ``held-out`` and ``test`` give
        every image once, in order, so that the last process may get fewer batches.
        """
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
        training = split == "train"
        files = self.splits[split]
        order = (
            self._train_order(batch, seed, epoch, rank, world)
            if training
            else _parts(len(files.paths), batch, rank, world)
        )
        loader: DataLoader[tuple[Tensor, int]] = DataLoader(
            _Images(files, _transform(self.image_shape[1], training and self.augment), seed, epoch),
            batch_size=batch,
            sampler=order,
            num_workers=min(self.workers, _cores()),
            pin_memory=torch.cuda.is_available(),
            # Without one of its own, a loader would take a number from the global generator.
            generator=seeded("narrowgate loader", seed, epoch),
        )
        return _batches(loader)

    def _train_order(self, batch: int, seed: int, epoch: int, rank: int, world: int) -> list[int]:
        steps = self.train_size // (batch * world)
        if not steps:
            raise DataError(
                f"a batch of {batch} x {world} processes is more than the {self.train_size} training images: "
                "lower train.batch"
            )
        order = torch.randperm(self.train_size, generator=seeded("narrowgate order", seed, epoch))
        mine: list[int] = order[: steps * batch * world].view(steps, world, batch)[:, rank].flatten().tolist()
        return mine


def load_folder(
    path: Path, augment: str, size: int, workers: int, hold_out: Callable[[Tensor], tuple[Tensor, Tensor]] | None
) -> FolderData:
    """Image folders by split; ``hold_out`` parts the training images, by their labels, into those left and held out.

    Without it ``path/val`` is held out. The test images are in ``path/test`` if that has classes, else in ``path/val``.
    """
    if augment not in ("none", "imagenet"):
        raise DataError(f"augment = {augment!r} is for images in memory; for folders choose 'imagenet' or 'none'")
    names, train = _scan(path / "train")
    # ImageNet's own test folder has no classes: nobody outside knows its labels.
    present = [path / name for name in ("val", "test") if any(each.is_dir() for each in _entries(path / name))]
    if not present:
        raise DataError(f"{path} has neither val nor test with one folder a class; evaluation needs one of them")
    scanned = [_scan(folder, names)[1] for folder in present]
    splits = {"train": train, "held-out": scanned[0], "test": scanned[-1]}
    if hold_out is not None:
        left, held = hold_out(torch.tensor(train.labels))
        splits |= {"train": train.pick(left), "held-out": train.pick(held)}
    size = size or _SIZE
    return FolderData(len(names), (3, size, size), splits, augment == "imagenet", workers)


def _scan(folder: Path, expected: list[str] | None = None) -> tuple[list[str], _Files]:
    """The names of the classes in a folder, and its images; ``expected`` are the names that have to be there."""
    from torchvision.datasets import ImageFolder

    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; images must lie in {folder}/CLASS/*.jpg")
    try:
        found = ImageFolder(str(folder))
    except OSError as error:
        raise DataError(f"{folder} can't be used ({error}); images must lie in {folder}/CLASS/*.jpg") from error
    if expected is not None and found.classes != expected:
        differ = sorted(set(found.classes) ^ set(expected))
        raise DataError(
            f"{folder} and its train folder differ in {len(differ)} classes ({', '.join(differ[:5])}); "
            "labels are the folders' places in alphabetical order, so both must have the same"
        )
    return found.classes, _Files([name for name, _ in found.samples], list(found.targets))


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _batches(loader: DataLoader[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """What a loader gives; of an error in one of its workers, whose text is a traceback, the last line is kept."""
    try:
        yield from loader
    except DataError as error:
        last = str(error).strip().splitlines()[-1]
        raise type(error)(last.partition(f"{type(error).__name__}: ")[2] or last) from None


def _parts(count: int, batch: int, rank: int, world: int) -> list[int]:
    """The places of every ``world``-th batch."""
    return [i for start in range(rank * batch, count, batch * world) for i in range(start, min(start + batch, count))]


class _Images(Dataset[tuple[Tensor, int]]):
    """Reads and transforms one image; what is random in that depends on seed, epoch and the image alone."""

    def __init__(self, files: _Files, transform: Callable[[Any], Tensor], seed: int, epoch: int) -> None:
        self._files, self._transform, self._seed, self._epoch = files, transform, seed, epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = _read_image(self._files.paths[index])
        # torchvision draws from the global generator: borrow it. torch.manual_seed would reset the GPU's as well.
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seeded("narrowgate crop", self._seed, self._epoch, index).initial_seed())
        try:
            return self._transform(image), self._files.labels[index]
        finally:
            torch.default_generator.set_state(before)


def _read_image(path: str) -> Any:
    """An image in red, green and blue of 8 bits each; DataError names a file that is damaged or has more."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            mode, colours = image.mode, image.convert("RGB")
    except Exception as error:  # PIL's readers of damaged files raise nearly anything
        why = " ".join(str(error).split()) or type(error).__name__
        why = "it is of no known kind" if "cannot identify" in why else why  # PIL names an object
        raise DamagedImageError(f"{path} can't be read as an image ({why}); replace or remove it") from error
    if mode.partition(";")[0] in _DEEP:  # PIL does not scale them: nearly all of it would be white
        raise DamagedImageError(
            f"{path} has grey values of more than 8 bits (PIL's mode {mode!r}); save such images with 8"
        )
    return colours


def _transform(size: int, augmented: bool) -> Callable[[Any], Tensor]:
    from torchvision import transforms

    if augmented:
        steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    else:
        steps = [transforms.Resize(round(size * 256 / 224)), transforms.CenterCrop(size)]
    composed: Callable[[Any], Tensor] = transforms.Compose([*steps, transforms.PILToTensor()])
    return composed


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
