"""What is known of a tensor in the graph: which axis holds channels, who they are, and which of them are constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

Labels = NDArray[np.int64]
Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

PINNED = 0
"""The label of every channel that must stay where it is."""


@dataclass(frozen=True)
class State:
    """One tensor.

    ``labels[i]`` names position i of axis ``axis``; positions with the same label, in whichever tensor, stay or go
    together. ``values[i]`` is the number that fills the whole slice at i, or NaN where it varies. Without a labelled
    axis every position is pinned and ``values`` has one element for the whole tensor.
    """

    shape: tuple[int, ...]
    axis: int | None
    labels: Labels
    values: Values

    @property
    def varies(self) -> Mask:
        return np.isnan(self.values)

    def along(self, axis: int) -> Values:
        """The values along an axis: a vector of its length, filled if this state knows one number only."""
        if self.axis == axis:
            return self.values
        size = self.shape[axis]
        return np.full(size, self.values[0] if self.axis is None else np.nan)


@dataclass(frozen=True)
class Spread:
    """Channels over several axes of a tensor, such as heads and their width; see ``spread.py``.

    ``index`` says which channel each element belongs to: as large as the tensor along axes over which that differs, of
    size 1 along the others. ``values`` are the channels' constants, and ``mark`` says which of them are read.
    """

    index: Labels
    values: Values
    mark: Callable[[Mask], None]
    view: Node | None = None  # that took the channel axis apart

    def touched(self, axis: int | None, mask: Mask | bool) -> Mask:
        """The channels at some positions of an axis, or all of them."""
        if isinstance(mask, bool) or np.ndim(mask) == 0 or axis is None or self.index.shape[axis] == 1:
            at = self.index if np.any(mask) else self.index[:0]
        else:
            at = self.index.take(np.flatnonzero(mask), axis)
        channels = np.zeros(len(self.values), bool)
        channels[at.reshape(-1)] = True
        return channels


def rounded(values: Values, dtype: torch.dtype) -> Values:
    """Numbers as a tensor of this dtype would hold them: a threshold may fall between the two."""
    if dtype == torch.float64:
        return values
    return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).double().numpy()


def unlabelled(shape: tuple[int, ...], value: float = float("nan")) -> State:
    """A tensor without removable channels, all of it one constant or varying."""
    return State(shape, None, np.zeros(1, np.int64), np.array([value]))


def labelled(shape: tuple[int, ...], axis: int, labels: Labels, values: Values) -> State:
    """A tensor with one label and one value for each position of an axis."""
    assert labels.shape == values.shape == (shape[axis],), (shape, axis, labels.shape, values.shape)
    return State(shape, axis, labels, values)
