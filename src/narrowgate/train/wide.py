"""Widths that a GPU's matrix units like: batches and weights with channels of zeros up to the next multiple of eight.

cuDNN copies what has an odd width into a wider place and back, at every convolution and again for its gradients; what a
cut leaves, and a DenseNet from the start, is of odd widths. Here a batch is made wide once, and stays so from layer to
layer; the model sees a view of its own channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

UNIT = 8
HALVES = [torch.bfloat16, torch.float16]
"""The types whose widths matter."""
_LAST = torch.channels_last


def width_for(channels: int, dtype: torch.dtype) -> int:
    """How wide a batch of this many channels is to be."""
    return -(-channels // UNIT) * UNIT if dtype in HALVES else channels


class Narrow(torch.autograd.Function):
    """A copy of the first channels of a wide batch; its gradient is a wide batch again, in the same memory format."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, channels: int) -> Tensor:
        ctx.width = wide.shape[1]
        return wide[:, :channels].contiguous(memory_format=_LAST)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return widened(dy, ctx.width), None


class Widen(torch.autograd.Function):
    """A weight of another type and with zeros behind its outputs and inputs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        place = torch.empty(tuple(shape), dtype=dtype, device=weight.device, memory_format=_LAST).zero_()
        inner(place, weight.shape).copy_(weight)
        return place

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return inner(dy, ctx.shape).to(ctx.dtype), None, None


def widened(batch: Tensor, width: int) -> Tensor:
    """A batch with channels of zeros behind its own."""
    n, channels, h, w = batch.shape
    wide = torch.empty((n, width, h, w), dtype=batch.dtype, device=batch.device, memory_format=_LAST)
    wide[:, :channels].copy_(batch)
    wide[:, channels:].zero_()
    return wide


def inner(wide: Tensor, shape: Sequence[int]) -> Tensor:
    """The part of a widened weight that is its own."""
    return wide[: shape[0], : shape[1]]


class Casts:
    """Weights in half precision, all of a model's in one operation, and their gradients back in one.

    Which weights these are is found out as the model runs: those of the step before are cast together.
    """

    def __init__(self) -> None:
        self._places: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._ready: dict[int, tuple[Tensor, int]] = {}

    def start(self) -> None:
        """Cast what the step before needed."""
        self._ready = {}
        if self._places and torch.is_grad_enabled():
            keys, pairs = list(self._places), list(self._places.values())
            cast = _CastTogether.apply([place for _, place in pairs], *[weight for weight, _ in pairs])
            versions = [weight._version for weight, _ in pairs]
            self._ready = dict(zip(keys, zip(cast, versions, strict=True), strict=True))

    def stop(self) -> None:
        """Let go of this step's."""
        self._ready = {}

    def of(self, weight: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A weight in this type and, with zeros, of this shape."""
        ready, version = self._ready.get(id(weight), (None, 0))
        if ready is not None and (ready.shape, ready.dtype, version) == (torch.Size(shape), dtype, weight._version):
            return ready
        if type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.requires_grad:
            place = torch.zeros(shape, dtype=dtype, device=weight.device)
            if weight.is_contiguous(memory_format=_LAST):
                place = place.contiguous(memory_format=_LAST)
            self._places[id(weight)] = weight, place
        if tuple(shape) == tuple(weight.shape):
            return weight.to(dtype)
        widened_weight: Tensor = Widen.apply(weight, shape, dtype)
        return widened_weight


class _CastTogether(torch.autograd.Function):
    """Copies of parameters in places that are kept from step to step, whose zeros stay zeros."""

    @staticmethod
    def forward(ctx: Any, places: list[Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like = [(weight.shape, weight.dtype, weight.stride()) for weight in weights]
        _copy_all(places, weights)
        return tuple(place.detach() for place in places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        found: list[Tensor | None] = []
        for gradient, (shape, dtype, stride) in zip(gradients, ctx.like, strict=True):
            made = None if gradient is None else torch.empty_strided(shape, stride, dtype=dtype, device=gradient.device)
            found.append(made)
        pairs = [(a, b) for a, b in zip(found, gradients, strict=True) if a is not None and b is not None]
        _copy_all([a for a, _ in pairs], [inner(b, a.shape) for a, b in pairs])
        return None, *found


def _copy_all(places: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each into its place; those that lie alike in one operation."""
    alike, others = [], []
    for place, source in zip(places, sources, strict=True):
        if place.shape == source.shape and _lie_alike(place, source):
            alike.append((place, source.as_strided(place.shape, place.stride())))
        else:
            others.append((place, source))
    if alike:
        torch._foreach_copy_([place for place, _ in alike], [source for _, source in alike])
    for place, source in others:
        inner(place, source.shape).copy_(source)


def _lie_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have their numbers in the same order; a stride along one number says nothing."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


class Pool(torch.autograd.Function):
    """``F.avg_pool2d`` over squares that don't overlap. PyTorch's gradient of it is slow for channels_last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int) -> Tensor:
        ctx.side, ctx.shape = side, x.shape
        return nn.functional.avg_pool2d(x, side)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        side, (n, c, h, w) = ctx.side, ctx.shape
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=_LAST)
        squares = dx.permute(0, 2, 3, 1).view(n, h // side, side, w // side, side, c)
        squares.copy_((dy / side**2).permute(0, 2, 3, 1)[:, :, None, :, None, :])
        return dx, None
