"""Runs the kernels of norm_kernels.py: what they are given, and how the work is dealt out among them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from narrowgate.train import norm_kernels

_LAST = torch.channels_last
# Programs of a kernel. Each that writes first adds up the sums of all that read, which takes a while: more of either
# cost more than they bring. Chosen by benchmarks/norm_kernels.py.
_READERS, _WRITERS = 264, 264
_SUMS = 128
_TILE = 4096  # numbers a program holds at once
_WARPS = 4


@dataclass(frozen=True)
class Norm:
    """What a norm does besides its numbers; with ``drop``, ``seed`` is a number on the device."""

    channels: int
    width: int
    """Channels of its result: as many, or some zeros more."""
    momentum: float
    eps: float
    activation: int = 0
    drop: float = 0.0
    seed: Tensor | None = None
    salt: int = 0


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor] | None, norm: Norm
) -> tuple[Tensor, Tensor]:
    """The norm of a channels_last batch, activated and dropped from, and what ``backward`` wants to know of it."""
    pixels, width = _Rows.of(x), norm.width
    reading, writing, partial = _two_passes(pixels.count, width, x.device)
    facts = torch.empty(4 * width, device=x.device)
    y = torch.empty((x.shape[0], width, *x.shape[2:]), dtype=x.dtype, device=x.device, memory_format=_LAST)
    mean, var = (facts, facts) if running is None else running
    unit, size = _sizes(reading, width, pixels)
    at = x, partial, pixels.count, reading.rows_each, reading.splits
    norm_kernels.statistics[reading.grid](*at, *pixels.in_units(unit), width // unit, **size)
    norm_kernels.normalise[writing.grid](
        x,
        y,
        partial,
        weight,
        bias,
        mean,
        var,
        facts,
        facts if norm.seed is None else norm.seed,
        pixels.count,
        writing.rows_each,
        reading.splits,
        norm.channels,
        *pixels.in_units(unit),
        width // unit,
        norm.salt,
        norm.momentum,
        norm.eps,
        norm.drop,
        track=running is not None,
        activation=norm.activation,
        drops=norm.drop > 0,
        S=reading.room,
        **size,
    )
    return y, facts


def backward(x: Tensor, dy: Tensor, more: Tensor | None, facts: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the batch, ``more`` added to it, of the scale and of the shift."""
    pixels, width = _Rows.of(x), norm.width
    dy_rows, more_rows = _Rows.of(dy), pixels if more is None else _Rows.of(more)
    reading, writing, partial = _two_passes(pixels.count, width, x.device)
    d_weight, d_bias = (torch.empty(norm.channels, device=x.device) for _ in range(2))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=_LAST)
    unit, size = _sizes(reading, width, pixels, dy_rows, more_rows)
    rows = *pixels.in_units(unit), *dy_rows.in_units(unit)
    seed = facts if norm.seed is None else norm.seed
    last = width // unit, norm.salt, norm.drop
    size |= {"activation": norm.activation, "drops": norm.drop > 0}
    at = x, dy, partial, facts, seed, pixels.count, reading.rows_each, reading.splits
    norm_kernels.gradient_sums[reading.grid](*at, *rows, *last, **size)
    norm_kernels.gradient[writing.grid](
        x,
        dy,
        dx,
        x if more is None else more,
        partial,
        facts,
        d_weight,
        d_bias,
        seed,
        pixels.count,
        writing.rows_each,
        reading.splits,
        norm.channels,
        *rows,
        *more_rows.in_units(unit),
        *last,
        adds=more is not None,
        S=reading.room,
        **size,
    )
    return dx, d_weight, d_bias


@dataclass(frozen=True)
class _Rows:
    """A batch as a matrix of pixels by channels: how many rows, how far apart they begin, how long they are."""

    count: int
    apart: int
    long: int

    @classmethod
    def of(cls, batch: Tensor) -> _Rows:
        apart = rows_apart(batch)
        assert apart is not None
        return cls(batch.numel() // batch.shape[1], apart, batch.shape[1])

    def in_units(self, unit: int) -> tuple[int, int]:
        return self.apart // unit, self.long // unit


def rows_apart(batch: Tensor) -> int | None:
    """How far apart the pixels of a batch lie, if they lie as in a channels_last one, channels left out at most."""
    _, c, h, w = batch.shape
    if batch.is_contiguous(memory_format=_LAST):
        return c
    apart = batch.stride(3)
    fits = batch.stride() == (h * w * apart, 1, w * apart, apart) and c > 1 and w > 1 and apart >= c
    return apart if fits else None


@dataclass(frozen=True)
class _Deal:
    """How a matrix is dealt out: each program takes ``rows_each`` rows of one column of channels, R by C at a time."""

    R: int
    C: int
    columns: int
    splits: int
    rows_each: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.splits, self.columns

    @property
    def room(self) -> int:
        """Room for the sums of all splits: two sizes only, since each is compiled for itself."""
        return 16 if self.splits <= 16 else _SUMS


def _sizes(deal: _Deal, width: int, *rows: _Rows) -> tuple[int, dict[str, int]]:
    """What all lengths are multiples of, up to 8, and the constants that a kernel is compiled for."""
    unit = unit_of(width, *(number for one in rows for number in (one.apart, one.long)))
    return unit, {"U": unit, "R": deal.R, "C": deal.C, "num_warps": _WARPS}


def unit_of(*lengths: int) -> int:
    """What all lengths are multiples of, up to the eight numbers that are read at once."""
    return math.gcd(8, *lengths)


def _two_passes(rows: int, width: int, device: torch.device) -> tuple[_Deal, _Deal, Tensor]:
    """How the pass that sums and the one that writes are dealt out, and room for two sums of each split."""
    reading, writing = _deal(rows, width, _READERS, _SUMS), _deal(rows, width, _WRITERS, _WRITERS)
    return reading, writing, torch.empty(2 * reading.splits * width, device=device)


def _deal(rows: int, channels: int, programs: int, most_splits: int) -> _Deal:
    """Tiles for about this many programs, at most ``most_splits`` of them on one column."""
    narrow, wide = min(32, triton.next_power_of_2(channels)), 64
    padded = {size: -(-channels // size) * size for size in (narrow, wide)}
    C = wide if padded[wide] <= 1.1 * padded[narrow] else narrow
    R, columns = _TILE // C, -(-channels // C)
    most = min(max(1, programs // columns), -(-rows // R), most_splits)
    rows_each = -(-rows // (most * R)) * R
    return _Deal(R, C, columns, -(-rows // rows_each), rows_each)
