"""BatchNorm and the activation behind it as four Triton kernels: two forward, two backward.

A channels_last batch is a matrix of pixels by channels. Forward: sums of each channel, then one pass that normalises
and activates. Backward: sums again, then one pass. PyTorch's own kernels need about ten passes for the same, and most
of a small network's training step goes into them. The next tile is on its way while one is worked on.
"""

# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator,attr-defined"
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# In kernels, activation is 0 for none, 1 for ReLU and 2 for ReLU6: see fused.py.
# Programs of a kernel. Each that writes adds up the sums of all that read, so there are fewer of these.
_READERS, _WRITERS = 264, 528
_SUMS = 128
_TILE = 4096  # numbers a program holds at once
_WARPS = 8

# Numbers that Triton would otherwise compile anew for, where they happen to be 1 or a multiple of 16. A cut changes the
# channels of every layer, and each kernel takes a while to compile. That channels are U times ``units`` is what lets
# several numbers be read at once.
_kernel = triton.jit(do_not_specialize=["rows", "units", "rows_each", "splits"])


@triton.jit
def _activate(z, activation: tl.constexpr):
    if activation > 0:
        z = tl.where(z > 0, z, tl.where(z != z, z, 0.0))  # a NaN stays one
    if activation == 2:
        z = tl.where(z < 6, z, tl.where(z != z, z, 6.0))
    return z


@triton.jit
def _passes(z, gradient, activation: tl.constexpr):
    """The gradient where the activation lets it through."""
    if activation > 0:
        gradient = tl.where(z > 0, gradient, 0.0)
    if activation == 2:
        gradient = tl.where(z < 6, gradient, 0.0)
    return gradient


@triton.jit
def _load(at, first, rows, channel, channels, inside, R: tl.constexpr):
    """A tile of R rows; zeros outside."""
    row = first + tl.arange(0, R)
    kept = (row < rows)[:, None] & inside[None, :]
    return tl.load(at + row.to(tl.int64)[:, None] * channels + channel[None, :], mask=kept, other=0.0)


@triton.jit
def _store(at, tile, first, rows, channel, channels, inside, R: tl.constexpr):
    row = first + tl.arange(0, R)
    kept = (row < rows)[:, None] & inside[None, :]
    where = row.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(at + where, tile.to(at.dtype.element_ty), mask=kept)


@triton.jit
def _column_sum(partial, splits, channel, channels, inside, S: tl.constexpr):
    """The sum over all programs that shared these channels, always in the same order."""
    split = tl.arange(0, S)
    kept = (split < splits)[:, None] & inside[None, :]
    return tl.sum(tl.load(partial + split[:, None] * channels + channel[None, :], mask=kept, other=0.0), axis=0)


@_kernel
def _statistics(x_at, partial, rows, units, rows_each, splits, U: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    channels = units * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    # Sums are of what exceeds the first pixel: squares of numbers far from zero would lose the variance.
    origin = tl.load(x_at + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((R, C), tl.float32)
    square = tl.zeros((R, C), tl.float32)
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming = _load(x_at, first, end, channel, channels, inside, R)
    for start in range(first, end, R):
        x = coming.to(tl.float32)
        coming = _load(x_at, start + R, end, channel, channels, inside, R)
        x = tl.where((start + tl.arange(0, R) < end)[:, None], x - origin[None, :], 0.0)
        total += x
        square += x * x
    tl.store(partial + block * channels + channel, tl.sum(total, axis=0), mask=inside)
    tl.store(partial + (splits + block) * channels + channel, tl.sum(square, axis=0), mask=inside)


@_kernel
def _normalise(
    x_at,
    y_at,
    partial,
    weight,
    bias,
    running_mean,
    running_var,
    facts,
    rows,
    units,
    rows_each,
    splits,
    momentum,
    eps,
    track: tl.constexpr,
    activation: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    channels = units * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming = _load(x_at, first, end, channel, channels, inside, R)
    origin = tl.load(x_at + channel, mask=inside, other=0.0).to(tl.float32)
    gamma = tl.load(weight + channel, mask=inside, other=0.0)
    beta = tl.load(bias + channel, mask=inside, other=0.0)
    offset = _column_sum(partial, splits, channel, channels, inside, S) / rows
    spread = _column_sum(partial + splits * channels, splits, channel, channels, inside, S) / rows
    mean = origin + offset
    var = tl.maximum(spread - offset * offset, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale = gamma * rstd
    shift = beta - mean * scale
    if block == 0:
        tl.store(facts + channel, mean, mask=inside)
        tl.store(facts + channels + channel, rstd, mask=inside)
        tl.store(facts + 2 * channels + channel, scale, mask=inside)
        tl.store(facts + 3 * channels + channel, shift, mask=inside)
        if track:
            old = tl.load(running_mean + channel, mask=inside, other=0.0)
            tl.store(running_mean + channel, old + momentum * (mean - old), mask=inside)
            old = tl.load(running_var + channel, mask=inside, other=0.0)
            unbiased = var * (rows / (rows - 1.0))
            tl.store(running_var + channel, old + momentum * (unbiased - old), mask=inside)
    for start in range(first, end, R):
        x = coming.to(tl.float32)
        coming = _load(x_at, start + R, end, channel, channels, inside, R)
        y = _activate(x * scale[None, :] + shift[None, :], activation)
        _store(y_at, y, start, end, channel, channels, inside, R)


@_kernel
def _gradient_sums(
    x_at,
    dy_at,
    partial,
    facts,
    rows,
    units,
    rows_each,
    splits,
    activation: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    channels = units * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming_x = _load(x_at, first, end, channel, channels, inside, R)
    coming_dy = _load(dy_at, first, end, channel, channels, inside, R)
    mean = tl.load(facts + channel, mask=inside, other=0.0)
    scale = tl.load(facts + 2 * channels + channel, mask=inside, other=0.0)
    shift = tl.load(facts + 3 * channels + channel, mask=inside, other=0.0)
    total = tl.zeros((R, C), tl.float32)
    along = tl.zeros((R, C), tl.float32)
    for start in range(first, end, R):
        x, dy = coming_x.to(tl.float32), coming_dy.to(tl.float32)
        coming_x = _load(x_at, start + R, end, channel, channels, inside, R)
        coming_dy = _load(dy_at, start + R, end, channel, channels, inside, R)
        dz = _passes(x * scale[None, :] + shift[None, :], dy, activation)
        total += dz
        along += dz * (x - mean[None, :])
    tl.store(partial + block * channels + channel, tl.sum(total, axis=0), mask=inside)
    tl.store(partial + (splits + block) * channels + channel, tl.sum(along, axis=0), mask=inside)


@_kernel
def _gradient(
    x_at,
    dy_at,
    dx_at,
    partial,
    facts,
    d_weight,
    d_bias,
    rows,
    units,
    rows_each,
    splits,
    activation: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    channels = units * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming_x = _load(x_at, first, end, channel, channels, inside, R)
    coming_dy = _load(dy_at, first, end, channel, channels, inside, R)
    mean = tl.load(facts + channel, mask=inside, other=0.0)
    rstd = tl.load(facts + channels + channel, mask=inside, other=0.0)
    scale = tl.load(facts + 2 * channels + channel, mask=inside, other=0.0)
    shift = tl.load(facts + 3 * channels + channel, mask=inside, other=0.0)
    total = _column_sum(partial, splits, channel, channels, inside, S)
    along = _column_sum(partial + splits * channels, splits, channel, channels, inside, S) * rstd
    if block == 0:
        tl.store(d_weight + channel, along, mask=inside)
        tl.store(d_bias + channel, total, mask=inside)
    level, slope = total / rows, along * rstd / rows
    for start in range(first, end, R):
        x, dy = coming_x.to(tl.float32), coming_dy.to(tl.float32)
        coming_x = _load(x_at, start + R, end, channel, channels, inside, R)
        coming_dy = _load(dy_at, start + R, end, channel, channels, inside, R)
        dz = _passes(x * scale[None, :] + shift[None, :], dy, activation)
        dx = scale[None, :] * (dz - level[None, :] - (x - mean[None, :]) * slope[None, :])
        _store(dx_at, dx, start, end, channel, channels, inside, R)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    activation: int,
) -> tuple[Tensor, Tensor]:
    """The activated norm of a channels_last batch, and what ``backward`` wants to know of it."""
    channels = x.shape[1]
    rows = x.numel() // channels
    reading, writing = _deal(rows, channels, _READERS, _SUMS), _deal(rows, channels, _WRITERS, _WRITERS)
    partial = torch.empty(2 * reading.splits * channels, device=x.device)
    facts = torch.empty(4 * channels, device=x.device)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    mean, var = (facts, facts) if running is None else running
    units, size = _sizes(channels, reading)
    _statistics[reading.grid](x, partial, rows, units, reading.rows_each, reading.splits, **size)
    _normalise[writing.grid](
        x,
        y,
        partial,
        weight,
        bias,
        mean,
        var,
        facts,
        rows,
        units,
        writing.rows_each,
        reading.splits,
        momentum,
        eps,
        track=running is not None,
        activation=activation,
        S=reading.room,
        **size,
    )
    return y, facts


def backward(x: Tensor, dy: Tensor, facts: Tensor, activation: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the batch, the scale and the shift."""
    channels = x.shape[1]
    rows = x.numel() // channels
    reading, writing = _deal(rows, channels, _READERS, _SUMS), _deal(rows, channels, _WRITERS, _WRITERS)
    partial = torch.empty(2 * reading.splits * channels, device=x.device)
    d_weight, d_bias = torch.empty(channels, device=x.device), torch.empty(channels, device=x.device)
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    units, size = _sizes(channels, reading)
    size["activation"] = activation
    _gradient_sums[reading.grid](x, dy, partial, facts, rows, units, reading.rows_each, reading.splits, **size)
    _gradient[writing.grid](
        x,
        dy,
        dx,
        partial,
        facts,
        d_weight,
        d_bias,
        rows,
        units,
        writing.rows_each,
        reading.splits,
        S=reading.room,
        **size,
    )
    return dx, d_weight, d_bias


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


def _sizes(channels: int, deal: _Deal) -> tuple[int, dict[str, int]]:
    """Channels in units, and the constants that a kernel is compiled for."""
    unit = math.gcd(channels, 8)
    return channels // unit, {"U": unit, "R": deal.R, "C": deal.C, "num_warps": _WARPS}


def _deal(rows: int, channels: int, programs: int, most_splits: int) -> _Deal:
    """Tiles for about this many programs, at most ``most_splits`` of them on one column."""
    narrow, wide = min(32, triton.next_power_of_2(channels)), 64
    padded = {size: -(-channels // size) * size for size in (narrow, wide)}
    C = wide if padded[wide] <= 1.1 * padded[narrow] else narrow
    R, columns = _TILE // C, -(-channels // C)
    most = min(max(1, programs // columns), -(-rows // R), most_splits)
    rows_each = -(-rows // (most * R)) * R
    return _Deal(R, C, columns, -(-rows // rows_each), rows_each)
