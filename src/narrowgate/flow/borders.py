"""Constants beside a zero border: a channel that depends on the place only, and may be constant again behind a ReLU.

A padded convolution of constants puts out one number inside and others within reach of the border: one for each part of
the kernel that can lie inside the image. All of them are known, whatever the size of the image, and go through norms
and activations like constants. Where they end as one number, as below a ReLU, the channel is a constant after all. The
others are vectors with as many numbers as the kernel has parts, so a few of them express the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Node

from narrowgate.flow.analysis import Flow, Sums
from narrowgate.flow.state import Mask, Values, rounded

# Continuous, so that rounding can't decide between two results.
_CARRY = frozenset(
    """
    relu relu6 leaky_relu elu selu celu gelu silu mish hardtanh hardswish hardsigmoid softshrink sigmoid tanh softplus
    clamp clamp_min clamp_max add sub mul neg abs clone contiguous detach alias
    """.split()
)
_MOST_PARTS = 4096  # of a kernel
_LARGEST_FACTOR = 32.0  # of a sum: larger ones would lose digits
_ROUNDING = 1e-13


def padded_constants(weight: Tensor, bias: Tensor | None, inputs: Values, rows: Mask, geometry: Any) -> Values | None:
    """What a padded convolution makes of constant inputs: (part of the kernel, output channel), the whole kernel first.

    ``rows`` are the output channels that read constants only; the others are NaN. None where there is nothing to know.
    """
    kernel = weight.shape[2:]
    padding, dilation = geometry
    if not rows.any():
        return None
    dilation = _per_dimension(dilation, len(kernel))
    if padding == "same":
        padding = [-(-d * (size - 1) // 2) for size, d in zip(kernel, dilation, strict=True)]
    padding = _per_dimension(padding, len(kernel))
    ranges = [_ranges(size, p, d) for size, p, d in zip(kernel, padding, dilation, strict=True)]
    if np.prod([len(one) for one in ranges]) > _MOST_PARTS:
        return None
    numbers = weight.double().cpu().numpy()[rows]
    groups = len(inputs) // weight.shape[1]
    group = np.flatnonzero(rows) // (len(rows) // groups)
    constants = np.nan_to_num(inputs.reshape(groups, -1))[group]
    taps = np.einsum("oi...,oi->o...", numbers, constants)
    found = np.full((int(np.prod([len(one) for one in ranges])), len(rows)), np.nan)
    for part, place in enumerate(product(*ranges)):
        found[part, rows] = taps[(slice(None), *place)].reshape(len(taps), -1).sum(1)
    if bias is not None:
        found = found + bias.double().cpu().numpy()
    return rounded(found, weight.dtype)


def _per_dimension(number: Any, dimensions: int) -> list[int]:
    numbers = [number] * dimensions if isinstance(number, int) else list(number)
    return numbers * dimensions if len(numbers) == 1 else numbers


def _ranges(kernel: int, padding: int, dilation: int) -> list[slice]:
    """Which taps of a kernel can be inside, along one axis: all but some of the first and some of the last."""
    most = min(kernel, -(-padding // dilation))
    return [slice(first, max(first, kernel - last)) for first in range(most + 1) for last in range(most + 1)]


def through(flow: Flow, node: Node, read: Node, values: Values, function: Callable[[Values], Values]) -> Values:
    """The constants of a result, with those channels that an operation on each number by itself makes constant."""
    before = flow.borders.get(read)
    if before is None:
        return values
    after = function(before)
    known = ~np.isnan(after).any(0)
    same = known & (after == after[:1]).all(0)
    if (known & ~same).any():
        flow.borders[node] = np.where(same | ~known, np.nan, after)
    return np.where(same & np.isnan(values), after[0], values)


def sums_of_others(table: Values, columns: Mask) -> Sums:
    """Channels that depend on the place only, as sums of a few of them and a constant; empty where none is one.

    There are no more independent ones than parts of the kernel, however many channels there are. Each of those that
    stay is the largest of what the ones before it leave open, so factors are small.
    """
    where = np.flatnonzero(columns & ~np.isnan(table).any(0))
    if len(where) < len(table):
        return {}
    inside, beside = table[0, where], table[1:, where] - table[0, where]
    basis = _largest_independent(beside)
    rest = np.setdiff1d(np.arange(len(where)), basis)
    factors = np.linalg.lstsq(beside[:, basis], beside[:, rest], rcond=None)[0]
    error = np.abs(beside[:, basis] @ factors - beside[:, rest]).max(initial=0.0)
    if np.abs(factors).max(initial=0.0) > _LARGEST_FACTOR or error > _ROUNDING * np.abs(table[:, where]).max():
        return {}
    constants = inside[rest] - inside[basis] @ factors
    return {
        int(where[column]): ({int(where[b]): float(f) for b, f in zip(basis, factor, strict=True)}, float(constant))
        for column, factor, constant in zip(rest, factors.T, constants, strict=True)
    }


def _largest_independent(vectors: Values) -> list[int]:
    """Columns that span all others, found by taking the longest remainder each time."""
    left = vectors.copy()
    smallest = _ROUNDING / 10 * np.abs(vectors).max()
    chosen: list[int] = []
    while len(chosen) < len(vectors):
        lengths = np.linalg.norm(left, axis=0)
        longest = int(lengths.argmax())
        if lengths[longest] <= smallest:
            break
        chosen.append(longest)
        direction = left[:, longest] / lengths[longest]
        left -= np.outer(direction, direction @ left)
        left[:, longest] = 0.0
    return chosen


def carries(name: str) -> bool:
    """Whether an operation with one operand lets such channels through."""
    return name in _CARRY
