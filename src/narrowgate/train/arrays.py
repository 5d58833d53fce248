"""Images and labels from arrays: read from an ``.npz`` file, checked, and turned into tensors."""

from __future__ import annotations

import contextlib
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEYS = ("x_train", "y_train", "x_test", "y_test")
NAMES = "classes"
"""Where a file may have the names of the classes, in the order of their numbers."""
_MOST_CHANNELS = 4
# What reading a damaged archive has been seen to raise.
_UNREADABLE = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, tokenize.TokenError)


class DataError(ValueError):
    """Data that is missing or can't be used; says which, and what to do."""


class MissingReaderError(DataError):
    """The package that reads the data is not installed."""


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Images as uint8 [N, C, H, W] and their labels as int64 [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"ImageSet({len(self)} images of {' x '.join(map(str, self.images.shape[1:]))})"

    def pick(self, places: Tensor) -> ImageSet:
        """A set of the images at these places."""
        return ImageSet(self.images[places], self.labels[places])


def read_npz(path: Path) -> dict[str, Any]:
    """The four arrays of an ``.npz`` file and its classes' names, by key; pickled objects are never loaded."""
    try:
        # Opened here, because numpy leaves a file open that turns out to be damaged.
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path} holds one array, not four; save them with numpy.savez(path, {_wanted()})")
            if missing := [key for key in KEYS if key not in file.files]:
                found = ", ".join(file.files) or "nothing"
                raise DataError(
                    f"{path} has no {', '.join(missing)} (found: {found}); save it with numpy.savez(path, {_wanted()})"
                )
            arrays = {key: file[key] for key in KEYS}
            with contextlib.suppress(KeyError, ValueError):  # there are none, or they are pickled: labels will do
                arrays[NAMES] = file[NAMES]
            return arrays
    except DataError:
        raise
    except _UNREADABLE as error:
        # NumPy takes what it does not know for a pickle, and tells how to load one: nobody should.
        why = "it holds pickled objects, or is no such file at all" if "pickle" in str(error) else error
        raise DataError(
            f"{path} can't be read as an .npz file of plain arrays ({why}); get it again, or save it anew with "
            f"numpy.savez(path, {_wanted()}) from arrays of numbers"
        ) from error


def image_set(images: Any, labels: Any, where: str, part: str) -> ImageSet:
    """One part of a data set, ``train`` or ``test``, from arrays as they were found at ``where``."""
    pixels, numbers = _as_images(np.asarray(images), f"{where}: x_{part}"), _as_labels(labels, f"{where}: y_{part}")
    if len(pixels) != len(numbers):
        raise DataError(
            f"{where}: x_{part} holds {len(pixels)} images but y_{part} {len(numbers)} labels; each image needs one"
        )
    return ImageSet(pixels, numbers)


def check_labels(labels: Tensor, classes: int, name: str) -> None:
    """Raise unless all labels are classes, counted from 0."""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{name} holds labels from {low} to {high}, but there are {classes} classes; "
            f"count them from 0 to {classes - 1}"
        )


def _as_images(images: Any, name: str) -> Tensor:
    shape = " x ".join(map(str, images.shape)) or "a single number"
    if images.ndim not in (3, 4) or (images.size == 0 and len(images)):
        raise DataError(f"{name} has shape {shape}; it must be N x H x W, N x H x W x C or N x C x H x W")
    if not len(images):
        raise DataError(f"{name} is empty; it needs at least one image")
    first, last = True, False
    if images.ndim == 4:
        first, last = images.shape[1] <= _MOST_CHANNELS, images.shape[3] <= _MOST_CHANNELS
    if first == last:
        why = "could be read with channels first or last" if first else "has no axis of channels"
        raise DataError(
            f"{name} has shape {shape}, which {why}; it must be N x H x W, or hold 1 to 4 channels of images "
            "that are larger than that"
        )
    tensor = torch.from_numpy(np.ascontiguousarray(_as_bytes(images, name)))
    if images.ndim == 3:
        return tensor.unsqueeze(1)
    return tensor.permute(0, 3, 1, 2).contiguous() if last else tensor


def _as_bytes(images: Any, name: str) -> Any:
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise DataError(f"{name} is {images.dtype}; it must be uint8, or floating point from 0 to 1")
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 1):
        raise DataError(
            f"{name} is {images.dtype} from {low:g} to {high:g}; floating point images must be from 0 to 1. "
            "Save them as uint8 from 0 to 255, without normalisation"
        )
    return (images * 255).round().astype(np.uint8)


def _as_labels(labels: Any, name: str) -> Tensor:
    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        shape = " x ".join(map(str, labels.shape)) or "a single number"
        raise DataError(f"{name} is {labels.dtype} of shape {shape}; it must be a row of integers, one class an image")
    return torch.from_numpy(labels.astype(np.int64))


def _wanted() -> str:
    return ", ".join(f"{key}=..." for key in KEYS)
