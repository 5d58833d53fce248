"""Inputs to compare two models on: as given, of another batch size, of another image size, and moved a little."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Shapes = tuple[tuple[int, ...], ...]
_LARGE = 64
_STRIDE = 32  # a size that a network divides by two five times grows by a multiple of this


def trials(args: tuple[Any, ...], kwargs: dict[str, Any], other_sizes: bool) -> Iterator[list[Inputs]]:
    """Alternatives, of each of which the first that the model takes counts: as given; other batches; larger images."""
    given: Inputs = args, kwargs
    yield [given]
    leaves = _tensors_in(given)
    if not leaves or any(leaf.dim() < 2 or not leaf.is_floating_point() for leaf in leaves):
        return
    if len({leaf.shape[0] for leaf in leaves}) != 1:
        return
    batch, rank = leaves[0].shape[0], max(leaf.dim() for leaf in leaves)
    generator = torch.Generator().manual_seed(0)
    yield [_drawn(given, generator, size, ()) for size in (2 * batch + 1, 2 * batch)]
    if other_sizes and rank > 2:
        axes: list[tuple[int, ...]] = [tuple(range(2, rank))] if rank > 3 else [(2,), (1,)]  # (N, C, L), or (N, L, C)
        yield [
            _drawn(given, generator, size, grown) for grown in axes for size in dict.fromkeys((max(2, batch), batch))
        ]


def _tensors_in(inputs: Any) -> list[Tensor]:
    """All tensors among a model's inputs."""
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _drawn(given: Inputs, generator: torch.Generator, batch: int, grown: tuple[int, ...]) -> Inputs:
    """Random inputs like those given, of another batch size, larger along some axes."""

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape = [_larger(size) if axis in grown else size for axis, size in enumerate(leaf.shape)]
        drawn = torch.randn([batch, *shape[1:]], generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(leaf)

    drawn: Inputs = pytree.tree_map(draw, given)
    return drawn


def _larger(size: int) -> int:
    return 2 * size if size < _LARGE else size + _STRIDE


def nudge(leaf: Any) -> Any:
    """One unit in the last place up, for half of the elements."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    moved = torch.nextafter(leaf, torch.full_like(leaf, math.inf)) if leaf.dtype.itemsize > 2 else leaf * (1 + 2**-8)
    odd = torch.arange(leaf.numel(), device=leaf.device).reshape(leaf.shape) % 2 == 0
    return torch.where(odd, moved, leaf)


def shapes_of(inputs: Inputs) -> Shapes:
    """The shapes of all tensors among a model's inputs."""
    return tuple(tuple(leaf.shape) for leaf in _tensors_in(inputs))


def elsewhere(shapes: Shapes, given: Shapes) -> str:
    """Where that was, unless it was for the inputs as given; and what to do where it was another size of images."""
    if shapes == given:
        return ""
    found = f" (for inputs of shape {', '.join(map(str, shapes))})"
    if [shape[1:] for shape in shapes] == [shape[1:] for shape in given]:
        return found
    return (
        f"{found}. At the size given it is the same: a forward that goes another way for larger images, or takes a "
        "number from their size, was planned at one size. For a network that will only see that one, "
        "pass other_sizes=False"
    )
