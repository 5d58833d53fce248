"""Tensors without numbers, on the meta device or fake: what is known of them all the same.

The sweeps take NaN for "varies", so a number that is not there is NaN: what needs it is not proven, and stays. Closed
gates prove zeros without any weight. Where weights are given, matrices are read one at a time, while a rule needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from narrowgate.flow.state import Mask

Weights = Mapping[str, Tensor]
"""Tensors by the names they have in the model; one that reads them from a file holds none in memory."""

Zeros = tuple[Mask | None, Mask | None]
"""Positions along a tensor's first and second axis that closed gates hold at zero."""


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor is more than a shape: neither on the meta device nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def lacks_numbers(model: nn.Module) -> bool:
    """Whether any parameter or buffer of a model is only a shape."""
    return not all(map(has_numbers, (*model.parameters(), *model.buffers())))


@dataclass(frozen=True)
class Gating:
    """What gates do to one tensor: how they multiply it, and where they hold it at zero."""

    multiply: Callable[[Tensor], Tensor]
    zeros: Zeros


class Numbers:
    """What is known of those tensors of a model that are only shapes: from weights, if given, and from its gates."""

    def __init__(
        self, model: nn.Module, gatings: dict[str, Gating] | None = None, weights: Weights | None = None
    ) -> None:
        self.gatings, self.weights = gatings or {}, weights or {}
        self.found: dict[str, str] = {}
        """By name in the model, the name among the weights; tied tensors may be there under one of their names."""
        self.missing: set[str] = set()
        names: dict[int, list[str]] = {}
        for name, tensor in named_tensors(model):
            if not has_numbers(tensor):
                names.setdefault(id(tensor), []).append(name)
        for tied in names.values():
            source = next((name for name in tied if name in self.weights), None)
            if source is None:
                self.missing.update(tied)
            else:
                self.found.update(dict.fromkeys(tied, source))

    def zeros(self, name: str) -> Zeros:
        """Where closed gates hold a tensor at zero."""
        return self.gatings[name].zeros if name in self.gatings else (None, None)

    def read(self, name: str, like: Tensor) -> Tensor:
        """A tensor with its gates multiplied in: zero where those are closed, NaN where nothing else is known."""
        if name not in self.found:
            return _nothing(like, *self.zeros(name))
        number = raw(self.weights, self.found[name], like)
        return self.gatings[name].multiply(number) if name in self.gatings else number

    @contextmanager
    def lent(self, names: set[str], tensors: dict[str, Tensor], model: nn.Module) -> Iterator[None]:
        """For a while, let these matrices have numbers, or NaN where there are none."""
        before = {
            name: tensor
            for name in names
            if not has_numbers(tensor := tensors[name])
            and (tensor.is_floating_point() or name in self.found)
            and tensor.dim() > 1
        }
        try:
            for name, tensor in before.items():
                tensors[name] = self.read(name, tensor)
                put_tensor(model, name, tensors[name])
            yield
        finally:
            for name, tensor in before.items():
                tensors[name] = tensor
                put_tensor(model, name, tensor)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by every name they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def put_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or buffer into its place."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    store: dict[str, Any] = module._parameters if key in module._parameters else module._buffers
    store[key] = tensor


def raw(weights: Weights, name: str, like: Tensor) -> Tensor:
    """One of the weights, in the precision that the model has; raises if it is of another shape."""
    tensor = weights[name]
    if tensor.shape != like.shape:
        raise ValueError(
            f"the weights are of another model: {name!r} has shape {tuple(tensor.shape)} there and "
            f"{tuple(like.shape)} in the model"
        )
    return tensor.to(like.dtype)


def open_parts(shape: tuple[int, ...], rows: Mask | None, columns: Mask | None) -> Mask:
    """A matrix of what is not closed; it takes no memory of its own along an axis where nothing is."""
    if columns is None or not columns.any():
        open_rows = np.ones(shape[0], bool) if rows is None else ~rows
        return np.broadcast_to(open_rows[:, None], shape)
    if rows is None or not rows.any():
        return np.broadcast_to(~columns, shape)
    pattern: Mask = ~rows[:, None] & ~columns
    return pattern


def slim(pattern: Mask) -> Mask:
    """The same matrix in less memory if it is zero in whole rows or whole columns only."""
    rows: Mask = np.any(pattern, 1)
    columns: Mask = np.any(pattern, 0)
    whole = int(pattern.sum()) == int(rows.sum()) * int(columns.sum())
    return open_parts(pattern.shape, ~rows, ~columns) if whole else pattern


def fake_tensors(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[int, Any], Any, Any]:
    """A stand-in for each tensor of a model, by id, and for the inputs: as if on the CPU, without numbers."""

    def fake(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = {id(tensor): nn.Parameter(fake(tensor), False) for tensor in model.parameters()}
        fakes |= {id(tensor): fake(tensor) for tensor in model.buffers()}
        args, kwargs = pytree.tree_map(fake, (args, kwargs))
    return fakes, args, kwargs


def _nothing(like: Tensor, rows: Mask | None, columns: Mask | None) -> Tensor:
    """NaN, zero where closed, of a tensor's shape; expanded, so that it takes no memory where nothing is closed."""
    if like.dim() < 2:
        vector = torch.full(like.shape, float("nan"), dtype=like.dtype, device="cpu")
        return vector if rows is None else vector.masked_fill(torch.from_numpy(rows), 0.0)
    shape = tuple(like.shape[:2])
    closed = torch.zeros(1, 1, dtype=torch.bool, device="cpu")
    for axis, mask in enumerate((rows, columns)):
        if mask is not None and mask.any() and len(mask) == shape[axis]:
            closed = closed | torch.from_numpy(mask).unsqueeze(1 - axis)
    parts = torch.full_like(closed, float("nan"), dtype=like.dtype).masked_fill(closed, 0.0)
    return parts.reshape(*closed.shape, *[1] * (like.dim() - 2)).expand(like.shape)
