"""``load_data``: the images that a recipe names, in memory or from folders; a clear message when they are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgate.train.arrays import NAMES, DataError, ImageSet, MissingReaderError, check_labels, image_set, read_npz
from narrowgate.train.augment import seeded
from narrowgate.train.folders import FolderData, load_folder

if TYPE_CHECKING:
    from narrowgate.train.recipe import DataPart

__all__ = ["SOURCES", "Data", "DataError", "FolderData", "ImageSet", "load_data"]

_MANY_CLASSES = 1000
SOURCES = ("npz", "mnist", "cifar10", "cifar100", "folder", "digits")


@dataclass(frozen=True)
class Data:
    """A data set in memory: images to train on, to choose by (if held out), and to test on."""

    train: ImageSet
    validation: ImageSet | None
    test: ImageSet
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]

    @property
    def held_out(self) -> ImageSet:
        """What is evaluated during a run: the validation images if there are any, else the test images."""
        return self.test if self.validation is None else self.validation


@dataclass(frozen=True)
class _Known:
    """What is published of a data set that torchvision reads, and the name of its class there."""

    reader: str
    classes: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


_KNOWN = {
    "mnist": _Known("MNIST", 10, (1, 28, 28), (0.1307,), (0.3081,)),
    "cifar10": _Known("CIFAR10", 10, (3, 32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Known("CIFAR100", 100, (3, 32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def load_data(part: DataPart, path: str | None = None, download: bool = False, seed: int = 0) -> Data | FolderData:
    """The data set of a recipe; ``path`` is taken before the recipe's own, and nothing is downloaded unless asked."""
    source = part.source
    if source not in SOURCES:
        raise DataError(f"unknown data source {source!r}; choose one of {', '.join(SOURCES)}")
    if part.validation < 0:
        raise DataError(f"data.validation must be 0 or more, got {part.validation}")
    place = _existing_path(source, path or part.path, download)
    if source == "folder":
        _need("torchvision", source)
        hold_out = _holding_out(part.validation, seed) if part.validation else None
        return load_folder(place, part.augment, part.size, part.workers, hold_out)
    if part.augment == "imagenet":
        remedy = "for images in memory choose 'crop-flip', 'shift', 'warp' or 'none'"
        raise DataError(f"augment = 'imagenet' is for image folders; {remedy}")
    train, test, named = _read(source, place, download)
    classes = _check(source, train, test, named, str(place))
    validation = None
    if part.validation:
        left, held = _holding_out(part.validation, seed)(train.labels)
        train, validation = train.pick(left), train.pick(held)
    mean, std = (_KNOWN[source].mean, _KNOWN[source].std) if source in _KNOWN else _statistics(train.images)
    channels, height, width = train.images.shape[1:]
    return Data(train, validation, test, classes, mean, std, (channels, height, width))


def _existing_path(source: str, path: str, download: bool) -> Path:
    place = Path(path).expanduser()
    if source == "digits" and path:
        raise DataError(
            f"source 'digits' comes with scikit-learn and reads no file: leave out {path}, or set data.source for it"
        )
    if source == "digits" or (path and (place.exists() or (download and source in _KNOWN))):
        return place
    problem = (
        f"{place} does not exist" if path else f"source {source!r} needs a path: set data.path or pass --data PATH"
    )
    if source == "npz":
        raise DataError(f"{problem}. It is a file that numpy.savez wrote, with x_train, y_train, x_test and y_test")
    if source == "folder":
        raise DataError(f"{problem}. It is a folder with train/CLASS/*.jpg, and val or test like it")
    raise DataError(f"{problem}. {_how_to_get(source)}")


def _how_to_get(source: str) -> str:
    reader = _KNOWN[source].reader
    return (
        f"It is the folder that torchvision.datasets.{reader} has as root, or an .npz file with x_train, y_train, "
        "x_test and y_test; --download fetches the data into that folder"
    )


def _read(source: str, place: Path, download: bool) -> tuple[ImageSet, ImageSet, int]:
    """Training and test images, and how many classes have names; 0 where none are given."""
    if source == "digits":
        return *_read_digits(), 0
    if source == "npz" or place.suffix == ".npz":
        found = read_npz(place)
        train, test = (
            image_set(found[f"x_{part}"], found[f"y_{part}"], str(place), part) for part in ("train", "test")
        )
        return train, test, _count_names(found.get(NAMES))
    return *_read_torchvision(source, place, download), 0


def _count_names(names: Any) -> int:
    is_row_of_texts = names is not None and names.ndim == 1 and names.dtype.kind in "US"
    return len(names) if is_row_of_texts else 0


def _read_torchvision(source: str, root: Path, download: bool) -> tuple[ImageSet, ImageSet]:
    _need("torchvision", source)
    from torchvision import datasets

    reader = getattr(datasets, _KNOWN[source].reader)
    sets = []
    for part in ("train", "test"):
        try:
            # CIFAR's files are pickles; torchvision compares their checksums with the published ones first.
            found = reader(str(root), train=part == "train", download=download)
            sets.append(image_set(found.data, found.targets, str(root), part))
        except DataError:
            raise
        except Exception as error:  # a damaged file makes torchvision's parsers raise anything, assertions included
            reason = str(error).partition(" You can use download=True")[0].strip(" .") or type(error).__name__
            raise DataError(f"{root} gives no {source}: {reason}. {_how_to_get(source)}") from error
    return sets[0], sets[1]


def _read_digits() -> tuple[ImageSet, ImageSet]:
    """scikit-learn's digits, a third of them to test; the same split every time, as in ``narrowgate demo``."""
    _need("scikit-learn", "digits")
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    whole = image_set(digits.images / 16, digits.target, "scikit-learn's digits", "train")
    train, test = train_test_split(range(len(whole)), test_size=1 / 3, random_state=0, stratify=whole.labels.numpy())
    return whole.pick(torch.tensor(train)), whole.pick(torch.tensor(test))


def _need(package: str, source: str) -> None:
    try:
        __import__("sklearn" if package == "scikit-learn" else package)
    except ImportError as error:
        raise MissingReaderError(
            f"source {source!r} needs {package}: pip install '.[train]' in the checkout of narrowgate"
        ) from error


def _check(source: str, train: ImageSet, test: ImageSet, named: int, where: str) -> int:
    """The number of classes, once shapes and labels of both sets agree with each other and with the source."""
    shape, other = tuple(train.images.shape[1:]), tuple(test.images.shape[1:])
    known = _KNOWN.get(source)
    if known is not None and shape != known.image_shape:
        raise DataError(
            f"{where}: images are {_times(shape)}, but {source}'s are {_times(known.image_shape)}; "
            'for other images set data.source = "npz"'
        )
    if shape != other:
        raise DataError(f"{where}: training images are {_times(shape)} but test images {_times(other)}")
    classes = known.classes if known is not None else named or int(train.labels.max()) + 1
    # One wrong label would make a network of as many outputs, which may not fit in memory.
    if known is None and not named and classes > max(_MANY_CLASSES, len(train)):
        raise DataError(
            f"{where}: y_train holds the label {classes - 1}, but there are {len(train)} training images; count "
            f"classes from 0, or give the names of all as an array {NAMES!r}"
        )
    check_labels(train.labels, classes, f"{where}: y_train")
    check_labels(test.labels, classes, f"{where}: y_test")
    # A small part of a data set may lack class 0; both parts starting at 1 is another way to count.
    if known is None and not named and int(train.labels.min()) == int(test.labels.min()) == 1:
        raise DataError(f"{where}: y_train and y_test start at 1; count classes from 0")
    return classes


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _holding_out(count: int, seed: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from labels to the places that stay and the ``count`` held out, an equal share of every class."""

    def split(labels: Tensor) -> tuple[Tensor, Tensor]:
        if count >= len(labels):
            raise DataError(
                f"data.validation = {count} leaves nothing of {len(labels)} training images; hold out fewer"
            )
        shuffled = torch.randperm(len(labels), generator=seeded("narrowgate validation", seed))
        by_class = shuffled[labels[shuffled].argsort(stable=True)]
        sizes = labels.bincount()
        within = torch.arange(len(labels)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        # How far down its class an image is, from 0 to 1: the first of all classes are held out alike.
        depth = (within + 0.5) / sizes.repeat_interleave(sizes)
        ranked = by_class[depth.argsort(stable=True)]
        return ranked[count:].sort().values, ranked[:count].sort().values

    return split


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, from 0 to 1, exactly: by counting how often each of the 256 values occurs."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean, std = [], []
    for channel in range(images.shape[1]):
        share = images[:, channel].flatten().bincount(minlength=256).double()
        share /= share.sum()
        centre = float((share * levels).sum())
        mean.append(centre)
        std.append(float((share * (levels - centre) ** 2).sum().sqrt()))
        if not std[-1]:
            raise DataError(f"channel {channel} of the training images has the same value everywhere; leave it out")
    return tuple(mean), tuple(std)
