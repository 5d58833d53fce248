"""Layers of the scatter layout: they pick their inputs from, and place their outputs in, a wider stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class IndexedLayer(nn.Module):
    """Mixin of all swapped classes: gather before, scatter after; constant output channels come from ``fill``."""

    gather: Tensor | None
    scatter: Tensor | None
    fill: Tensor | None
    weight: Tensor
    spatial_dims: int

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        axis = x.dim() - 1 - self.spatial_dims
        if self.gather is not None:
            x = x.index_select(axis, self.gather)
        y: Tensor = super().forward(x, *args)
        if self.scatter is None or self.fill is None:
            return y
        shape = [1] * y.dim()
        shape[axis] = -1
        sizes = list(y.shape)
        sizes[axis] = len(self.fill)
        return torch.index_copy(self.fill.to(y.dtype).view(shape).expand(sizes), axis, self.scatter, y)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight={tuple(self.weight.shape)}"


class IndexedConv1d(IndexedLayer, nn.Conv1d):
    spatial_dims = 1


class IndexedConv2d(IndexedLayer, nn.Conv2d):
    spatial_dims = 2


class IndexedConv3d(IndexedLayer, nn.Conv3d):
    spatial_dims = 3


class IndexedConvTranspose1d(IndexedLayer, nn.ConvTranspose1d):
    spatial_dims = 1


class IndexedConvTranspose2d(IndexedLayer, nn.ConvTranspose2d):
    spatial_dims = 2


class IndexedConvTranspose3d(IndexedLayer, nn.ConvTranspose3d):
    spatial_dims = 3


class IndexedLinear(IndexedLayer, nn.Linear):
    spatial_dims = 0


SWAPS: dict[type[nn.Module], type[IndexedLayer]] = {
    cls.__mro__[2]: cls  # the ordinary class behind the mixin
    for cls in (
        IndexedConv1d,
        IndexedConv2d,
        IndexedConv3d,
        IndexedConvTranspose1d,
        IndexedConvTranspose2d,
        IndexedConvTranspose3d,
        IndexedLinear,
    )
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
