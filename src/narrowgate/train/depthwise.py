"""3x3 convolutions of each channel for itself, as Triton kernels: one forward, one backward and a sum.

cuDNN takes about half a second to prepare one of these, forward and backward, for a width that it has not seen, and a
cut changes the widths of all of them: that was most of what a cut cost. These kernels are compiled once for all widths.
A program has some columns of pixels and goes down the rows of their images. It reads a row once, and carries along what
the row adds to results that are not finished.
"""

# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator,attr-defined"
from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowgate.train.norm_launch import unit_of

_PROGRAMS = 528
_FEWEST_ROWS = 8  # for a program, since it begins two rows early
_COLUMNS = 16
_CHANNELS, _CHANNELS_BACK = 64, 32  # backward a program holds nine sums of as many numbers
_WARPS = 4

# What Triton would otherwise compile anew for, where it happens to be 1 or a multiple of 16: see norm_kernels.py.
_kernel = triton.jit(
    do_not_specialize=["columns", "rows_each", "splits", "height", "width", "height_out", "width_out", "wide"]
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


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels run here and agree with PyTorch's on something small, found by trying."""
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            return all(_agrees(stride, generator, device, dtype) for stride in (1, 2))
    except Exception:  # a compiler of its own: anything may go wrong, and cuDNN does the work as well
        return False


def _agrees(stride: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> bool:
    shapes = (8, 24, 9, 9), (24, 1, 3, 3)
    x, weight = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    ours = [x.contiguous(memory_format=torch.channels_last).requires_grad_(), weight.requires_grad_()]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    wanted = torch.conv2d(exact[0], exact[1], None, stride, 1, 1, 24)
    found = Depthwise.apply(*ours, stride, 1)
    dy = torch.randn(found.shape, generator=generator).to(device, dtype)
    pairs = zip(
        (wanted, *torch.autograd.grad(wanted, exact, dy.double())),
        (found, *torch.autograd.grad(found, ours, dy)),
        strict=True,
    )
    return all(torch.allclose(a, b.double(), rtol=1e-2, atol=1e-2) for a, b in pairs)


def taps_of(weight: Tensor) -> Tensor:
    """The nine numbers of all channels, channels side by side, so that several are read at once."""
    return weight.view(-1, 9).t().contiguous()


def convolved(x: Tensor, taps: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution."""
    images, channels, height, width = x.shape
    out = [(length + 2 * padding - 3) // stride + 1 for length in (height, width)]
    y = torch.empty((images, channels, *out), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    grid, rows_each = _dealt(images * out[1], channels, out[0], _CHANNELS)
    facts = images * out[1], rows_each, height, width, *out
    _convolve[grid](x, taps, y, *facts, **_sizes(channels, _CHANNELS), stride=stride, padding=padding)
    return y


def gradients(x: Tensor, taps: Tensor, dy: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """Those of the batch and of the weight."""
    images, channels, height, width = x.shape
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    d_weight = torch.empty((channels, 1, 3, 3), dtype=taps.dtype, device=x.device)
    grid, rows_each = _dealt(images * width, channels, height, _CHANNELS_BACK)
    splits = grid[0] * grid[2]
    partial = torch.empty(splits * 9 * channels, device=x.device)
    facts = images * width, rows_each, height, width, *dy.shape[2:]
    sizes = _sizes(channels, _CHANNELS_BACK)
    _convolve_back[grid](x, taps, dy, dx, partial, *facts, **sizes, stride=stride, padding=padding)
    sizes |= {"R": 64, "C": 32}
    _add_up[(9, -(-channels // 32))](partial, d_weight, splits, **sizes)
    return dx, d_weight


def _dealt(columns: int, channels: int, rows: int, channels_each: int) -> tuple[tuple[int, int, int], int]:
    """Programs for columns of pixels, channels and rows, and how many rows each of them goes down."""
    grid = -(-columns // _COLUMNS), -(-channels // channels_each)
    parts = max(1, min(_PROGRAMS // (grid[0] * grid[1]), rows // _FEWEST_ROWS))
    rows_each = -(-rows // parts)
    return (*grid, -(-rows // rows_each)), rows_each


def _sizes(channels: int, channels_each: int) -> dict[str, int]:
    unit = unit_of(channels)
    return {"wide": channels // unit, "U": unit, "R": _COLUMNS, "C": channels_each, "num_warps": _WARPS}


@triton.jit
def _numbers(taps, i: tl.constexpr, channel, long):
    """A row of the weight: three numbers of each channel."""
    at, inside = taps + 3 * i * long + channel, channel < long
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
    b = tl.load(at + long, mask=inside, other=0.0).to(tl.float32)[None, :]
    c = tl.load(at + 2 * long, mask=inside, other=0.0).to(tl.float32)[None, :]
    return a, b, c


@triton.jit
def _places(at, pixel, kept, channel, long):
    """Where the numbers of some pixels of a row lie, and which of them there are."""
    return at + pixel.to(tl.int64)[:, None] * long + channel[None, :], kept[:, None] & (channel < long)[None, :]


@triton.jit
def _read(place, there, row, first, end, row_long):
    """The numbers of a row, zeros if it is outside."""
    return tl.load(place + row * row_long, mask=there & (row >= first) & (row < end), other=0.0)


@triton.jit
def _write(place, there, values, row, first, end, row_long):
    values = values.to(place.dtype.element_ty)
    tl.store(place + row * row_long, values, mask=there & (row >= first) & (row < end))


@triton.jit
def _times(a, b, c, u, v, w):
    return a.to(tl.float32) * u + b.to(tl.float32) * v + c.to(tl.float32) * w


@_kernel
def _convolve(
    x_at,
    taps,
    y_at,
    columns,
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
    u0, v0, w0 = _numbers(taps, 0, channel, long)
    u1, v1, w1 = _numbers(taps, 1, channel, long)
    u2, v2, w2 = _numbers(taps, 2, channel, long)
    column = tl.program_id(0) * R + tl.arange(0, R)
    kept, image, left = column < columns, column // width_out, column % width_out * stride - padding
    pixel = image * height * width + left
    a_at, a_there = _places(x_at, pixel, kept & (left >= 0) & (left < width), channel, long)
    b_at, b_there = _places(x_at, pixel + 1, kept & (left + 1 >= 0) & (left + 1 < width), channel, long)
    c_at, c_there = _places(x_at, pixel + 2, kept & (left + 2 >= 0) & (left + 2 < width), channel, long)
    y_place, y_there = _places(y_at, image * height_out * width_out + column % width_out, kept, channel, long)
    x_row, y_row = (width * long).to(tl.int64), (width_out * long).to(tl.int64)
    first = tl.program_id(2) * rows_each
    end = tl.minimum(first + rows_each, height_out)
    row = first * stride - padding
    a = _read(a_at, a_there, row, 0, height, x_row)
    b = _read(b_at, b_there, row, 0, height, x_row)
    c = _read(c_at, c_there, row, 0, height, x_row)
    older = _times(a, b, c, u0, v0, w0)
    a = _read(a_at, a_there, row + 1, 0, height, x_row)
    b = _read(b_at, b_there, row + 1, 0, height, x_row)
    c = _read(c_at, c_there, row + 1, 0, height, x_row)
    if stride == 1:
        newer = _times(a, b, c, u0, v0, w0)
        older += _times(a, b, c, u1, v1, w1)
        a = _read(a_at, a_there, row + 2, 0, height, x_row)
        b = _read(b_at, b_there, row + 2, 0, height, x_row)
        c = _read(c_at, c_there, row + 2, 0, height, x_row)
        for y in range(first, end):
            next_a = _read(a_at, a_there, y - padding + 3, 0, height, x_row)
            next_b = _read(b_at, b_there, y - padding + 3, 0, height, x_row)
            next_c = _read(c_at, c_there, y - padding + 3, 0, height, x_row)
            _write(y_place, y_there, older + _times(a, b, c, u2, v2, w2), y, first, end, y_row)
            older = newer + _times(a, b, c, u1, v1, w1)
            newer = _times(a, b, c, u0, v0, w0)
            a, b, c = next_a, next_b, next_c
    else:
        for y in range(first, end):
            low = y * 2 - padding + 2
            low_a = _read(a_at, a_there, low, 0, height, x_row)
            low_b = _read(b_at, b_there, low, 0, height, x_row)
            low_c = _read(c_at, c_there, low, 0, height, x_row)
            next_a = _read(a_at, a_there, low + 1, 0, height, x_row)
            next_b = _read(b_at, b_there, low + 1, 0, height, x_row)
            next_c = _read(c_at, c_there, low + 1, 0, height, x_row)
            older += _times(a, b, c, u1, v1, w1) + _times(low_a, low_b, low_c, u2, v2, w2)
            _write(y_place, y_there, older, y, first, end, y_row)
            older = _times(low_a, low_b, low_c, u0, v0, w0)
            a, b, c = next_a, next_b, next_c


@_kernel
def _convolve_back(
    x_at,
    taps,
    dy_at,
    dx_at,
    partial,
    columns,
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
    u0, v0, w0 = _numbers(taps, 0, channel, long)
    u1, v1, w1 = _numbers(taps, 1, channel, long)
    u2, v2, w2 = _numbers(taps, 2, channel, long)
    column = tl.program_id(0) * R + tl.arange(0, R)
    kept, image, right = column < columns, column // width, column % width + padding
    pixel = image * height * width + column % width
    x_place, own = _places(x_at, pixel, kept, channel, long)
    dx_place, own = _places(dx_at, pixel, kept, channel, long)
    start = image * height_out * width_out
    if stride == 1:
        a, b, c = right, right - 1, right - 2
        a_kept, b_kept, c_kept = kept & (a >= 0), kept & (b >= 0), kept & (c >= 0)
    else:
        a, b, c = right // 2, (right - 1) // 2, right // 2 - 1
        even = right % 2 == 0
        a_kept, b_kept, c_kept = kept & even, kept & (right % 2 == 1), kept & even & (c >= 0)
    a_at, a_there = _places(dy_at, start + a, a_kept & (a < width_out), channel, long)
    b_at, b_there = _places(dy_at, start + b, b_kept & (b < width_out), channel, long)
    c_at, c_there = _places(dy_at, start + c, c_kept & (c < width_out), channel, long)
    x_row, y_row = (width * long).to(tl.int64), (width_out * long).to(tl.int64)
    first = tl.program_id(2) * rows_each
    end = tl.minimum(first + rows_each, height)
    zeros = tl.zeros((R, C), tl.float32)
    p0, q0, r0, p1, q1, r1, p2, q2, r2 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    older, newer = zeros, zeros
    if stride == 1:
        begin, stop = first + padding - 2, end + padding
    else:
        begin, stop = (first + padding) // 2 - 1, (end - 1 + padding) // 2 + 1
    x_0 = _read(x_place, own, begin * stride - padding, first, end, x_row).to(tl.float32)
    x_1 = _read(x_place, own, begin * stride - padding + 1, first, end, x_row).to(tl.float32)
    a = _read(a_at, a_there, begin, 0, height_out, y_row)
    b = _read(b_at, b_there, begin, 0, height_out, y_row)
    c = _read(c_at, c_there, begin, 0, height_out, y_row)
    for y in range(begin, stop):
        row = y * stride - padding
        next_a = _read(a_at, a_there, y + 1, 0, height_out, y_row)
        next_b = _read(b_at, b_there, y + 1, 0, height_out, y_row)
        next_c = _read(c_at, c_there, y + 1, 0, height_out, y_row)
        x_2 = _read(x_place, own, row + 2, first, end, x_row).to(tl.float32)
        a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        _write(dx_place, own, older + _times(a, b, c, u0, v0, w0), row, first, end, x_row)
        if stride == 1:
            older = newer + _times(a, b, c, u1, v1, w1)
            newer = _times(a, b, c, u2, v2, w2)
        else:
            _write(dx_place, own, _times(a, b, c, u1, v1, w1), row + 1, first, end, x_row)
            older = _times(a, b, c, u2, v2, w2)
        p0, q0, r0 = p0 + a * x_0, q0 + b * x_0, r0 + c * x_0
        p1, q1, r1 = p1 + a * x_1, q1 + b * x_1, r1 + c * x_1
        p2, q2, r2 = p2 + a * x_2, q2 + b * x_2, r2 + c * x_2
        if stride == 1:
            x_0, x_1 = x_1, x_2
        else:
            x_0, x_1 = x_2, _read(x_place, own, row + 3, first, end, x_row).to(tl.float32)
        a, b, c = next_a, next_b, next_c
    split = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    mine, inside = partial + split * 9 * long + channel, channel < long
    tl.store(mine, tl.sum(p0, axis=0), mask=inside)
    tl.store(mine + long, tl.sum(q0, axis=0), mask=inside)
    tl.store(mine + 2 * long, tl.sum(r0, axis=0), mask=inside)
    tl.store(mine + 3 * long, tl.sum(p1, axis=0), mask=inside)
    tl.store(mine + 4 * long, tl.sum(q1, axis=0), mask=inside)
    tl.store(mine + 5 * long, tl.sum(r1, axis=0), mask=inside)
    tl.store(mine + 6 * long, tl.sum(p2, axis=0), mask=inside)
    tl.store(mine + 7 * long, tl.sum(q2, axis=0), mask=inside)
    tl.store(mine + 8 * long, tl.sum(r2, axis=0), mask=inside)


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
