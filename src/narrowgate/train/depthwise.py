"""3x3 convolutions of each channel for itself, as Triton kernels: one forward, one backward and a sum.

cuDNN takes about half a second to prepare each of these for a shape that it has not seen, three times that for a whole
MobileNetV2's training step in a second, and a cut changes the shapes of all of them: this was most of what a cut cost.
These kernels are compiled once for all widths. A channels_last batch is a matrix of pixels by channels, and a program
goes down some of its rows.
"""

# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator,attr-defined"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.train.norm_launch import deal, unit_of

_PROGRAMS = 1056
_TILE, _TILE_BACK = 4096, 1024  # numbers a program holds at once: backward it holds nine sums of as many
_WARPS = 4

_kernel = triton.jit(
    do_not_specialize=["rows", "rows_each", "splits", "height", "width", "height_out", "width_out", "wide"]
)


class Depthwise(torch.autograd.Function):
    """``F.conv2d(x, weight, stride=stride, padding=padding, groups=channels)`` where ``fits`` says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        taps = taps_of(weight)
        ctx.save_for_backward(x, taps)
        ctx.options = stride, padding
        return convolved(x, taps, stride, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, taps = ctx.saved_tensors
        return *gradients(x, taps, dy.contiguous(memory_format=torch.channels_last), *ctx.options), None, None


def fits(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> tuple[int, int] | None:
    """Stride and padding of a convolution that these kernels can do, given what ``torch.conv2d`` was."""
    side, around, spread = (_same(number) for number in (stride, padding, dilation))
    each = weight.shape == (groups, 1, 3, 3) and x.dim() == 4 and x.shape[1] == groups
    if not each or side not in (1, 2) or around is None or spread != 1 or min(x.shape[2:]) + 2 * around < 3:
        return None
    lies_well = x.is_contiguous(memory_format=torch.channels_last) and weight.is_contiguous()
    return (side, around) if lies_well and x.numel() > 0 and x.dtype == weight.dtype else None


def _same(number: Any) -> int | None:
    """One number for height and width."""
    numbers = set(number) if isinstance(number, (tuple, list)) else {number}
    only = numbers.pop()
    return only if isinstance(only, int) and not numbers else None


def taps_of(weight: Tensor) -> Tensor:
    """The nine numbers of all channels, channels side by side, so that several are read at once."""
    return weight.view(-1, 9).t().contiguous()


def convolved(x: Tensor, taps: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution."""
    images, channels, height, width = x.shape
    out = [(length + 2 * padding - 3) // stride + 1 for length in (height, width)]
    y = torch.empty((images, channels, *out), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    rows, unit = images * out[0] * out[1], unit_of(channels)
    dealt = deal(rows, channels, _PROGRAMS, _PROGRAMS, _TILE)
    facts = rows, dealt.rows_each, height, width, *out, channels // unit
    size = {"U": unit, "R": dealt.R, "C": dealt.C, "num_warps": _WARPS}
    _convolve[dealt.grid](x, taps, y, *facts, stride=stride, padding=padding, **size)
    return y


def gradients(x: Tensor, taps: Tensor, dy: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Those of the batch and of the weight."""
    images, channels, height, width = x.shape
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    d_weight = torch.empty((channels, 1, 3, 3), dtype=taps.dtype, device=x.device)
    rows, unit = images * height * width, unit_of(channels)
    dealt = deal(rows, channels, _PROGRAMS, _PROGRAMS, _TILE_BACK)
    partial = torch.empty(dealt.splits * 9 * channels, device=x.device)
    facts = rows, dealt.rows_each, height, width, *dy.shape[2:], channels // unit
    size = {"U": unit, "R": dealt.R, "C": dealt.C, "num_warps": _WARPS}
    _convolve_back[dealt.grid](x, taps, dy, dx, partial, *facts, stride=stride, padding=padding, **size)
    grid = 9, -(-channels // 32)
    _add_up[grid](partial, d_weight, dealt.splits, channels // unit, U=unit, R=32, C=32, num_warps=_WARPS)
    return dx, d_weight


@triton.jit
def _at(place, channel, long):
    return place.to(tl.int64)[:, None] * long + channel[None, :]


@_kernel
def _convolve(
    x_at,
    taps,
    y_at,
    rows,
    rows_each,
    height,
    width,
    height_out,
    width_out,
    wide,
    stride: tl.constexpr,
    padding: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    long = wide * U
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < long
    first = tl.program_id(0) * rows_each
    end = tl.minimum(first + rows_each, rows)
    for start in range(first, end, R):
        row = start + tl.arange(0, R)
        image = row // (height_out * width_out)
        top = row // width_out % height_out * stride - padding
        left = row % width_out * stride - padding
        y = tl.zeros((R, C), tl.float32)
        for tap in tl.static_range(9):
            h, w = top + tap // 3, left + tap % 3
            there = (row < end) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            place = (image * height + h) * width + w
            x = tl.load(x_at + _at(place, channel, long), mask=there[:, None] & inside[None, :], other=0.0)
            factor = tl.load(taps + tap * long + channel, mask=inside, other=0.0)
            y += x.to(tl.float32) * factor.to(tl.float32)[None, :]
        kept = (row < end)[:, None] & inside[None, :]
        tl.store(y_at + _at(row, channel, long), y.to(y_at.dtype.element_ty), mask=kept)


@triton.jit
def _tap(
    x,
    dx,
    total,
    taps,
    dy_at,
    image,
    bottom,
    right,
    kept,
    channel,
    inside,
    height_out,
    width_out,
    long,
    tap: tl.constexpr,
    stride: tl.constexpr,
):
    """What one of the nine numbers of a weight does to some pixels, and they to it."""
    h, w = bottom - tap // 3, right - tap % 3
    there = kept & (h >= 0) & (w >= 0)
    if stride == 2:
        there = there & (h % 2 == 0) & (w % 2 == 0)
        h, w = h // 2, w // 2
    there = there & (h < height_out) & (w < width_out)
    place = (image * height_out + h) * width_out + w
    dy = tl.load(dy_at + _at(place, channel, long), mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
    factor = tl.load(taps + tap * long + channel, mask=inside, other=0.0).to(tl.float32)
    return dx + dy * factor[None, :], total + dy * x


@_kernel
def _convolve_back(
    x_at,
    taps,
    dy_at,
    dx_at,
    partial,
    rows,
    rows_each,
    height,
    width,
    height_out,
    width_out,
    wide,
    stride: tl.constexpr,
    padding: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    long = wide * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < long
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    t0, t1, t2 = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    t3, t4, t5 = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    t6, t7, t8 = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    for start in range(first, end, R):
        row = start + tl.arange(0, R)
        kept = row < end
        both = kept[:, None] & inside[None, :]
        image = row // (height * width)
        b, r = row // width % height + padding, row % width + padding
        x = tl.load(x_at + _at(row, channel, long), mask=both, other=0.0).to(tl.float32)
        dx = tl.zeros((R, C), tl.float32)
        ho, wo = height_out, width_out
        dx, t0 = _tap(x, dx, t0, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 0, stride)
        dx, t1 = _tap(x, dx, t1, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 1, stride)
        dx, t2 = _tap(x, dx, t2, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 2, stride)
        dx, t3 = _tap(x, dx, t3, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 3, stride)
        dx, t4 = _tap(x, dx, t4, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 4, stride)
        dx, t5 = _tap(x, dx, t5, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 5, stride)
        dx, t6 = _tap(x, dx, t6, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 6, stride)
        dx, t7 = _tap(x, dx, t7, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 7, stride)
        dx, t8 = _tap(x, dx, t8, taps, dy_at, image, b, r, kept, channel, inside, ho, wo, long, 8, stride)
        tl.store(dx_at + _at(row, channel, long), dx.to(dx_at.dtype.element_ty), mask=both)
    mine = partial + block * 9 * long + channel
    tl.store(mine, tl.sum(t0, axis=0), mask=inside)
    tl.store(mine + long, tl.sum(t1, axis=0), mask=inside)
    tl.store(mine + 2 * long, tl.sum(t2, axis=0), mask=inside)
    tl.store(mine + 3 * long, tl.sum(t3, axis=0), mask=inside)
    tl.store(mine + 4 * long, tl.sum(t4, axis=0), mask=inside)
    tl.store(mine + 5 * long, tl.sum(t5, axis=0), mask=inside)
    tl.store(mine + 6 * long, tl.sum(t6, axis=0), mask=inside)
    tl.store(mine + 7 * long, tl.sum(t7, axis=0), mask=inside)
    tl.store(mine + 8 * long, tl.sum(t8, axis=0), mask=inside)


@_kernel
def _add_up(partial, d_weight, splits, wide, U: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """The gradient of one of the nine numbers of some channels: the sum of what all programs found."""
    long = wide * U
    tap = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < long
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, splits, R):
        split = start + tl.arange(0, R)
        place = (split * 9 + tap)[:, None] * long + channel[None, :]
        total += tl.load(partial + place, mask=(split < splits)[:, None] & inside[None, :], other=0.0)
    tl.store(d_weight + channel * 9 + tap, tl.sum(total, axis=0).to(d_weight.dtype.element_ty), mask=inside)
