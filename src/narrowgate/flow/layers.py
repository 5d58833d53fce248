"""Layers of the scatter layout: they pick their inputs from, and place their outputs in, a wider stream.

A layer that has no outputs of its own left (its whole result is constant, or nothing reads it) computes nothing: it
hands out its constants, expanded, which starts no kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from narrowgate.flow.cuts import Counted


class Zeros(nn.Module):
    """In place of a module that gave nothing else, in the shape of its first argument."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(input)


class IndexedLayer(nn.Module):
    """Mixin of all swapped classes: gather before, scatter after; constant output channels come from ``fill``."""

    gather: Tensor | None
    scatter: Tensor | None
    fill: Tensor | None
    spatial_dims: int

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axis = self._channel_axis(input)
        if self.scatter is not None and self.fill is not None and not len(self.scatter):
            return self._constant(input, axis, self.fill)
        if self.gather is not None:
            input = input.index_select(axis, self.gather)
        y: Tensor = super().forward(input, *args, **kwargs)
        if self.scatter is None or self.fill is None:
            return y
        shape = [1] * y.dim()
        shape[axis] = -1
        sizes = list(y.shape)
        sizes[axis] = len(self.fill)
        return torch.index_copy(self.fill.to(y.dtype).view(shape).expand(sizes), axis, self.scatter, y)

    def _channel_axis(self, x: Tensor) -> int:
        return x.dim() - 1 - self.spatial_dims

    def _constant(self, x: Tensor, axis: int, fill: Tensor) -> Tensor:
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            fill = fill.to(torch.get_autocast_dtype(device))
        shape = [len(fill), *([1] * self.spatial_dims)]
        sizes = [*x.shape[:axis], len(fill), *self._spatial_sizes(x.shape[axis + 1 :])]
        result = fill.view(shape).expand(sizes)
        # In training something may write to it (an in-place dropout), which shared memory does not allow.
        return result.clone() if self.training else result

    def _spatial_sizes(self, sizes: torch.Size) -> list[int]:
        """The size of the result in space: nothing for a linear layer."""
        return []

    def extra_repr(self) -> str:
        assert isinstance(self.weight, Tensor)
        return f"{super().extra_repr()}, weight={tuple(self.weight.shape)}"


class _IndexedConv(IndexedLayer):
    def _spatial_sizes(self, sizes: torch.Size) -> list[int]:
        assert isinstance(self, _ConvNd)
        if self.padding == "same":
            return list(sizes)
        padding = [0] * self.spatial_dims if isinstance(self.padding, str) else self.padding
        numbers = zip(sizes, self.kernel_size, self.stride, padding, self.dilation, strict=True)
        return [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, gap in numbers]


class IndexedConv1d(_IndexedConv, nn.Conv1d):
    spatial_dims = 1


class IndexedConv2d(_IndexedConv, nn.Conv2d):
    spatial_dims = 2


class IndexedConv3d(_IndexedConv, nn.Conv3d):
    spatial_dims = 3


class IndexedConvTranspose1d(IndexedLayer, nn.ConvTranspose1d):
    spatial_dims = 1


class IndexedConvTranspose2d(IndexedLayer, nn.ConvTranspose2d):
    spatial_dims = 2


class IndexedConvTranspose3d(IndexedLayer, nn.ConvTranspose3d):
    spatial_dims = 3


class IndexedLinear(IndexedLayer, nn.Linear):
    spatial_dims = 0


class IndexedNorm(IndexedLayer):
    """A norm that gives out only the channels that are read behind it; ``num_features`` is how many come in."""

    num_features: int

    def _channel_axis(self, x: Tensor) -> int:
        return 1


class IndexedBatchNorm1d(IndexedNorm, nn.BatchNorm1d):
    pass


class IndexedBatchNorm2d(IndexedNorm, nn.BatchNorm2d):
    pass


class IndexedBatchNorm3d(IndexedNorm, nn.BatchNorm3d):
    pass


class NarrowNorm(nn.Module):
    """Mixin of norms across channels that lost some: their part of the mean and variance is counted all the same."""

    weight: Any
    bias: Any
    eps: float
    members: Tensor
    table: Tensor
    gone: Tensor | None

    def count_(self, counted: Counted) -> None:
        """Say what is gone."""
        self.axis, self.size = counted.axis, counted.size
        device, numbers = self.weight.device, [counted.means, counted.spreads]
        members = torch.tensor(counted.members, dtype=torch.long, device=device)
        table = nn.functional.one_hot(members, len(counted.means))  # in which group each channel is
        gone = torch.tensor(numbers, dtype=self.weight.dtype, device=device) if any(map(any, numbers)) else None
        for key, tensor in (("members", members), ("table", table), ("gone", gone)):
            self.register_buffer(key, tensor, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        x = self._apart(input).to(torch.promote_types(input.dtype, torch.float32))
        table, places = self.table.to(x.dtype), x.shape[2]
        count, missing = self.size * places, places * (self.size - table.sum(0))
        means, spreads = (x.new_zeros(1), x.new_zeros(1)) if self.gone is None else self.gone.to(x.dtype)
        mean = ((x.sum(2)[:, :, None] * table).sum(1) + missing * means) / count
        x = x - mean[:, self.members, None]
        others = places * spreads + missing * (mean - means).square()
        variance = ((x.square().sum(2)[:, :, None] * table).sum(1) + others) / count
        x = x * (variance + self.eps).rsqrt()[:, self.members, None] * self.weight[:, None]
        return self._together(x if self.bias is None else x + self.bias[:, None], input).to(self._dtype(input))

    def _apart(self, x: Tensor) -> Tensor:
        """What is normed together as (number, channel, place)."""
        return x.flatten(2) if x.dim() > 2 else x[:, :, None]

    def _together(self, x: Tensor, like: Tensor) -> Tensor:
        return x.reshape(like.shape)

    def _dtype(self, input: Tensor) -> torch.dtype:
        device = input.device.type  # autocast lets PyTorch's norms give out float32, but not on a CPU
        casts = device != "cpu" and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return torch.promote_types(input.dtype, torch.float32) if casts else input.dtype

    def extra_repr(self) -> str:
        return f"{len(self.weight)} of {self.size * self.table.shape[1]} channels, eps={self.eps}"


class NarrowGroupNorm(NarrowNorm, nn.GroupNorm):
    pass


class NarrowLayerNorm(NarrowNorm, nn.LayerNorm):
    """Each place has a mean of its own."""

    def _apart(self, x: Tensor) -> Tensor:
        return x.movedim(self.axis, -1).reshape(-1, x.shape[self.axis], 1)

    def _together(self, x: Tensor, like: Tensor) -> Tensor:
        return x.reshape(like.movedim(self.axis, -1).shape).movedim(-1, self.axis)


def narrow_norm_(layer: nn.Module, counted: Counted) -> None:
    """Swap a norm's class for the one that counts what is gone, in place."""
    layer.__class__ = NarrowGroupNorm if isinstance(layer, nn.GroupNorm) else NarrowLayerNorm
    assert isinstance(layer, NarrowNorm)
    layer.count_(counted)


NORM_SWAPS: dict[type[nn.Module], type[IndexedNorm]] = {
    nn.BatchNorm1d: IndexedBatchNorm1d,
    nn.BatchNorm2d: IndexedBatchNorm2d,
    nn.BatchNorm3d: IndexedBatchNorm3d,
}
SWAPS: dict[type[nn.Module], type[IndexedLayer]] = {
    nn.Conv1d: IndexedConv1d,
    nn.Conv2d: IndexedConv2d,
    nn.Conv3d: IndexedConv3d,
    nn.ConvTranspose1d: IndexedConvTranspose1d,
    nn.ConvTranspose2d: IndexedConvTranspose2d,
    nn.ConvTranspose3d: IndexedConvTranspose3d,
    nn.Linear: IndexedLinear,
    **NORM_SWAPS,
}


def index_(layer: nn.Module, gather: list[int] | None, scatter: list[int] | None, fill: list[float] | None) -> None:
    """Swap a layer's class for the one that gathers and scatters, in place."""
    layer.__class__ = SWAPS[type(layer)]
    weight = layer.weight
    assert isinstance(weight, Tensor)
    device = weight.device
    for key, values, dtype in (("gather", gather, torch.long), ("scatter", scatter, torch.long)):
        tensor = None if values is None else torch.tensor(values, dtype=dtype, device=device)
        layer.register_buffer(key, tensor, persistent=False)
    numbers = None if fill is None else torch.tensor(fill, dtype=weight.dtype, device=device)
    layer.register_buffer("fill", numbers, persistent=False)
    if scatter == []:
        layer.requires_grad_(False)  # nothing reads its weights: an optimizer, or DDP, would wait for their gradients
