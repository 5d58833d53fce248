"""Where axes go when a tensor is reshaped or transposed: sizes and positions only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from narrowgate.flow.trace import op_name

Sources = NDArray[np.int64]
"""``sources[k]`` are the input positions that position k of the result was made of."""


def follow(
    before: tuple[int, ...], axis: int, after: tuple[int, ...], along: int | None = None
) -> tuple[int | None, Sources | None]:
    """Where an axis goes in a reshape, and which of its positions make up each new one.

    An axis split in two stays removable along the inner part, with the outer parts coupled (a channel shuffle), or
    along another part if asked for.
    """
    for old, new in matching_groups(before, after):
        if axis not in old:
            continue
        sizes = [before[i] for i in old]
        index = np.arange(before[axis]).reshape([before[i] if i == axis else 1 for i in old])
        index = np.broadcast_to(index, sizes).reshape([after[i] for i in new])
        varying = [i for i in range(len(new)) if (index != index.take([0], axis=i)).any()]
        if not varying:
            return None, None
        inner = varying[-1] if along is None else new.index(along)
        outer = tuple(i for i in varying if i != inner)
        first = index[tuple(slice(None) if i in varying else slice(0, 1) for i in range(len(new)))]
        sources = np.moveaxis(first, inner, 0).reshape(after[new[inner]], -1)
        if not outer and sources.shape[0] == before[axis] and (sources[:, 0] == np.arange(before[axis])).all():
            return new[inner], None
        return new[inner], sources
    return None, None


def matching_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Split two shapes of the same number of elements into the shortest runs of equal products."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [], []
        left = right = 1
        while True:
            if left <= right and i < len(before):
                left *= before[i]
                old.append(i)
                i += 1
            elif j < len(after):
                right *= after[j]
                new.append(j)
                j += 1
            else:
                break
            if left == right and old and new:
                break
        groups.append((old, new))
    return groups


def permutation(node: Node, rank: int) -> list[int]:
    """Which axis of its input each axis of a transposed tensor was."""
    name = op_name(node).rstrip("_")
    order = list(range(rank))
    if name == "numpy_T":
        return order[::-1]
    if name in ("t", "mT", "mH", "adjoint"):
        return [*order[:-2], rank - 1, rank - 2] if rank > 1 else order
    if name in ("transpose", "swapaxes"):
        first, second = (int(d) % rank for d in node.args[1:3])  # type: ignore[arg-type]
        order[first], order[second] = order[second], order[first]
        return order
    if name == "movedim":
        source, target = node.args[1], node.args[2]
        old = [d % rank for d in (source if isinstance(source, (list, tuple)) else [source])]  # type: ignore
        new = [d % rank for d in (target if isinstance(target, (list, tuple)) else [target])]  # type: ignore
        rest = iter([d for d in range(rank) if d not in old])
        return [int(old[new.index(d)]) if d in new else next(rest) for d in range(rank)]
    dims: Any = node.args[1]
    return [int(d) % rank for d in dims]
