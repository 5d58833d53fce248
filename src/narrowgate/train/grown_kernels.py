"""Triton kernels of a layer that a DenseNet grows by: norm, activation, 3x3 convolution, dropout, and its place.

A block's maps lie side by side in one matrix of pixels by channels, so that nothing is copied to join them. Forward, a
layer is three kernels. One settles what is known of each channel: statistics are computed once, when a map is made, and
serve all norms that read it. One reads the matrix, normalises, and multiplies each pixel with the weight's numbers for
all its neighbours at once; one adds up, for each pixel, what its neighbours have for it, and writes the few maps into
their place. Backward it is three as well, of which one reads the matrix: the gradients of the weight and of what it was
given come from the same pass. What a norm's backward adds for the batch as a whole is a number and a multiple of the
map itself for each channel; those of all layers are added up and applied once, when a map's gradient is complete.

What belongs to nine neighbours of a few maps lies in rows of K numbers: first all maps of the first neighbour.
"""

# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator,attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from narrowgate.train.norm_kernels import _activate, _kept, _passes

N = tl.constexpr(16)
"""Places for the maps of a layer, a power of two."""
K = tl.constexpr(128)
"""Places for nine neighbours of them: a layer has at most a ninth as many."""

# As in norm_kernels.py: what would otherwise be compiled for anew at every width.
_kernel = triton.jit(
    do_not_specialize=[
        *("pixels", "height", "width", "channels", "apart", "from_apart", "more_apart", "known_before", "outputs"),
        *("tiles", "tile_pixels", "splits", "each", "salt", "room", "all_channels"),
        *("weight_out", "weight_in", "weight_down", "weight_right"),
    ]
)


@triton.jit
def _spread(values, there, count):
    """Mean of a tile's columns over the rows that are there, and their sum of squares about it."""
    mean = tl.sum(tl.where(there, values, 0.0), axis=0) / count
    away = tl.where(there, values - mean[None, :], 0.0)
    return mean, tl.sum(away * away, axis=0)


@triton.jit
def _up(numbers, unit: tl.constexpr):
    """The next multiple: that rows end there lets several numbers be read at once."""
    return (numbers + unit - 1) // unit * unit


@triton.jit
def _within(pixel, pixels, height, width, down, right):
    """Whether a pixel has this neighbour."""
    row, column = pixel // width % height + down, pixel % width + right
    return (pixel < pixels) & (row >= 0) & (row < height) & (column >= 0) & (column < width)


@_kernel
def begin(
    from_at, x_at, spreads, pixels, channels, from_apart, apart, room, U: tl.constexpr, M: tl.constexpr, C: tl.constexpr
):
    """Copy the first maps to their place, and say how each tile of them spreads."""
    tile = tl.program_id(0)
    pixel = tile * M + tl.arange(0, M)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    there = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    x = tl.load(from_at + pixel.to(tl.int64)[:, None] * from_apart + channel[None, :], mask=there, other=0.0)
    tl.store(x_at + pixel.to(tl.int64)[:, None] * (apart * U) + channel[None, :], x, mask=there)
    count = tl.minimum(pixels - tile * M, M)
    mean, square = _spread(x.to(tl.float32), there, count)
    place = spreads + tile * 2 * room + channel
    tl.store(place, mean, mask=channel < channels)
    tl.store(place + room, square, mask=channel < channels)


@_kernel
def settle(
    spreads,
    statistics,
    facts,
    gamma,
    beta,
    running_mean,
    running_var,
    weight,
    taps,
    pixels,
    channels,
    known_before,
    outputs,
    tiles,
    tile_pixels,
    room,
    all_channels,
    weight_out,
    weight_in,
    weight_down,
    weight_right,
    momentum,
    eps,
    track: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """What a layer's norm multiplies each channel with and adds; its weight, in the order that the others read."""
    channel = tl.program_id(0) * C + tl.arange(0, C)
    inside = channel < channels
    new = inside & (channel >= known_before)
    mean = tl.load(statistics + channel, mask=inside & (channel < known_before), other=0.0)
    var = tl.load(statistics + all_channels + channel, mask=inside & (channel < known_before), other=0.0)
    if (tl.program_id(0) + 1) * C > known_before:
        at = spreads + channel - known_before
        origin = tl.load(at, mask=new, other=0.0)
        first = tl.zeros((R, C), tl.float32)
        second = tl.zeros((R, C), tl.float32)
        for start in range(0, tiles, R):
            tile = start + tl.arange(0, R)
            there = (tile < tiles)[:, None] & new[None, :]
            count = tl.minimum(pixels - tile * tile_pixels, tile_pixels).to(tl.float32)[:, None]
            away = tl.load(at[None, :] + tile[:, None] * 2 * room, mask=there, other=0.0) - origin[None, :]
            away = tl.where(there, away, 0.0)
            square = tl.load(at[None, :] + (tile[:, None] * 2 + 1) * room, mask=there, other=0.0)
            first += count * away
            second += count * away * away + square
        offset = tl.sum(first, axis=0) / pixels
        fresh = tl.maximum(tl.sum(second, axis=0) / pixels - offset * offset, 0.0)
        mean = tl.where(new, origin + offset, mean)
        var = tl.where(new, fresh, var)
        tl.store(statistics + channel, mean, mask=new)
        tl.store(statistics + all_channels + channel, var, mask=new)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale = tl.load(gamma + channel, mask=inside, other=0.0) * rstd
    tl.store(facts + channel, mean, mask=inside)
    tl.store(facts + channels + channel, rstd, mask=inside)
    tl.store(facts + 2 * channels + channel, scale, mask=inside)
    shift = tl.load(beta + channel, mask=inside, other=0.0) - mean * scale
    tl.store(facts + 3 * channels + channel, shift, mask=inside)
    if track:
        old = tl.load(running_mean + channel, mask=inside, other=0.0)
        tl.store(running_mean + channel, old + momentum * (mean - old), mask=inside)
        old = tl.load(running_var + channel, mask=inside, other=0.0)
        unbiased = var * (pixels / (pixels - 1.0))
        tl.store(running_var + channel, old + momentum * (unbiased - old), mask=inside)
    k = tl.arange(0, K)
    tap, out = k // outputs, k % outputs
    at = weight + (out * weight_out + tap // 3 * weight_down + tap % 3 * weight_right)[None, :]
    there = inside[:, None] & (k < 9 * outputs)[None, :]
    numbers = tl.load(at + channel[:, None] * weight_in, mask=there, other=0.0)
    tl.store(taps + channel[:, None] * K + k[None, :], numbers.to(taps.dtype.element_ty), mask=inside[:, None])


@_kernel
def multiply(
    x_at,
    taps,
    facts,
    products,
    pixels,
    channels,
    apart,
    outputs,
    activation: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    stages: tl.constexpr,
):
    """What the norm and the activation make of each pixel, times the weight's numbers for all nine neighbours."""
    pixel = tl.program_id(0) * M + tl.arange(0, M)
    there = pixel < pixels
    far = pixel.to(tl.int64)[:, None]
    k = tl.arange(0, K)
    total = tl.zeros((M, K), tl.float32)
    readable = _up(channels, U)
    for start in tl.range(0, channels, C, num_stages=stages):
        channel = start + tl.arange(0, C)
        inside = channel < channels
        at = x_at + far * (apart * U) + channel[None, :]
        x = tl.load(at, mask=there[:, None] & (channel < readable)[None, :], other=0.0).to(tl.float32)
        scale = tl.load(facts + 2 * channels + channel, mask=inside, other=0.0)
        shift = tl.load(facts + 3 * channels + channel, mask=inside, other=0.0)
        z = _activate(x * scale[None, :] + shift[None, :], activation)
        z = tl.where(inside[None, :], z, 0.0).to(taps.dtype.element_ty)
        numbers = tl.load(taps + channel[:, None] * K + k[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(z, numbers, total)
    kept = there[:, None] & (k < _up(9 * outputs, 8))[None, :]
    tl.store(products + far * K + k[None, :], total.to(products.dtype.element_ty), mask=kept)


@_kernel
def gather(
    x_at,
    products,
    spreads,
    seed_at,
    pixels,
    height,
    width,
    channels,
    apart,
    outputs,
    salt,
    drop,
    drops: tl.constexpr,
    M: tl.constexpr,
):
    """A layer's maps, from what its neighbours have for each pixel: into the places behind the other maps."""
    tile = tl.program_id(0)
    pixel = tile * M + tl.arange(0, M)
    far = pixel.to(tl.int64)[:, None]
    out = tl.arange(0, N)
    own = (out < outputs)[None, :]
    total = tl.zeros((M, N), tl.float32)
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        seen = _within(pixel, pixels, height, width, down, right)[:, None] & own
        at = products + (far + down * width + right) * K + tap * outputs + out[None, :]
        total += tl.load(at, mask=seen, other=0.0).to(tl.float32)
    if drops:
        total *= _kept(seed_at, salt, drop, tile * M, out, tl.full((), N, tl.int32), M)
    kept = (pixel < pixels)[:, None] & own
    y = total.to(x_at.dtype.element_ty)
    tl.store(x_at + far * apart + channels + out[None, :], y, mask=kept)
    mean, square = _spread(y.to(tl.float32), kept, tl.minimum(pixels - tile * M, M))
    tl.store(spreads + tile * 2 * N + out, mean)
    tl.store(spreads + (tile * 2 + 1) * N + out, square)


@_kernel
def prepare(
    x_at,
    gradient,
    pending,
    dy_at,
    seed_at,
    pixels,
    height,
    width,
    channels,
    apart,
    from_apart,
    outputs,
    all_channels,
    salt,
    drop,
    drops: tl.constexpr,
    M: tl.constexpr,
):
    """The gradient of a layer's own maps, complete and behind the dropout: for each pixel, those of its neighbours."""
    tile = tl.program_id(0)
    pixel = tile * M + tl.arange(0, M)
    out = tl.arange(0, N)
    own = (out < outputs)[None, :]
    there = (pixel < pixels)[:, None] & own
    far = pixel.to(tl.int64)[:, None]
    dy = tl.load(gradient + far * from_apart + channels + out[None, :], mask=there, other=0.0).to(tl.float32)
    x = tl.load(x_at + far * apart + channels + out[None, :], mask=there, other=0.0).to(tl.float32)
    level = tl.load(pending + channels + out, mask=out < outputs, other=0.0)
    slope = tl.load(pending + all_channels + channels + out, mask=out < outputs, other=0.0)
    dy += level[None, :] + slope[None, :] * x
    if drops:
        dy *= _kept(seed_at, salt, drop, tile * M, out, tl.full((), N, tl.int32), M)
    dy = dy.to(dy_at.dtype.element_ty)
    nothing = tl.zeros((M, N), dy.dtype)
    for tap in tl.static_range(9):
        down, right = tap // 3 - 1, tap % 3 - 1
        place = dy_at + tap * outputs + out[None, :]
        # It is this neighbour of the pixel so far away, if there is one there.
        seen = _within(pixel, pixels, height, width, down, right)
        tl.store(place + (far + down * width + right) * K, dy, mask=seen[:, None] & own)
        none = (pixel < pixels) & (_within(pixel, pixels, height, width, -down, -right) == 0)
        tl.store(place + far * K, nothing, mask=none[:, None] & own)
    behind = (pixel < pixels)[:, None] & (9 * outputs + out < _up(9 * outputs, 8))[None, :]
    tl.store(dy_at + far * K + 9 * outputs + out[None, :], nothing, mask=behind)


@_kernel
def gradients(
    x_at,
    dy_at,
    more_at,
    dx_at,
    taps,
    facts,
    sums,
    d_taps,
    pixels,
    channels,
    apart,
    more_apart,
    outputs,
    each,
    splits,
    activation: tl.constexpr,
    U: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    stages: tl.constexpr,
):
    """One pass for the gradients of what was read, but for what the norm adds in the end, and of the weight."""
    split = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    readable = (channel < _up(channels, U))[None, :]
    k = tl.arange(0, K)
    needed = (k < _up(9 * outputs, 8))[None, :]
    mean = tl.load(facts + channel, mask=inside, other=0.0)
    scale = tl.load(facts + 2 * channels + channel, mask=inside, other=0.0)
    shift = tl.load(facts + 3 * channels + channel, mask=inside, other=0.0)
    numbers = tl.load(taps + channel[None, :] * K + k[:, None], mask=inside[None, :], other=0.0)
    found = tl.zeros((K, C), tl.float32)
    total = tl.zeros((C,), tl.float32)
    along = tl.zeros((C,), tl.float32)
    end = tl.minimum((split + 1) * each, pixels)
    for start in tl.range(split * each, end, M, num_stages=stages):
        pixel = start + tl.arange(0, M)
        there = (pixel < end)[:, None]
        both = there & inside[None, :]
        far = pixel.to(tl.int64)[:, None]
        x = tl.load(x_at + far * (apart * U) + channel[None, :], mask=there & readable, other=0.0).to(tl.float32)
        x = tl.where(both, x, 0.0)
        z = x * scale[None, :] + shift[None, :]
        dy = tl.load(dy_at + far * K + k[None, :], mask=there & needed, other=0.0)
        a = tl.where(both, _activate(z, activation), 0.0).to(dy_at.dtype.element_ty)
        found = tl.dot(tl.trans(dy), a, found)
        g = _passes(z, tl.dot(dy, numbers), activation)
        total += tl.sum(g, axis=0)
        along += tl.sum(g * (x - mean[None, :]), axis=0)
        more_there = there & (channel < _up(channels, V))[None, :]
        more = tl.load(more_at + far * (more_apart * V) + channel[None, :], mask=more_there, other=0.0)
        dx = (more.to(tl.float32) + scale[None, :] * g).to(dx_at.dtype.element_ty)
        # Places behind its channels, which are written too, are those of maps whose gradient was used already.
        tl.store(dx_at + far * (apart * U) + channel[None, :], dx, mask=there & readable)
    tl.store(sums + split * channels + channel, total, mask=inside)
    tl.store(sums + (splits + split) * channels + channel, along, mask=inside)
    kept = (k < 9 * outputs)[:, None] & inside[None, :]
    tl.store(d_taps + (split * K + k)[:, None] * channels + channel[None, :], found, mask=kept)


@triton.jit
def _over_splits(at, apart, splits, inside, R: tl.constexpr, C: tl.constexpr):
    """Column sums of rows that lie ``apart``, always in the same order."""
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, splits, R):
        split = start + tl.arange(0, R)
        there = (split < splits)[:, None] & inside[None, :]
        total += tl.load(at[None, :] + split[:, None] * apart, mask=there, other=0.0)
    return tl.sum(total, axis=0)


@_kernel
def add_up(
    sums,
    d_taps,
    facts,
    pending,
    d_gamma,
    d_beta,
    d_weight,
    pixels,
    channels,
    splits,
    all_channels,
    weight_out,
    weight_in,
    weight_down,
    weight_right,
    outputs,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """What all splits found, as gradients; and what the norm's backward adds to each channel, for later."""
    k = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    tap, out = k // outputs, k % outputs
    found = _over_splits(d_taps + k * channels + channel, K * channels, splits, inside, R, C)
    at = d_weight + out * weight_out + (tap // 3) * weight_down + (tap % 3) * weight_right
    tl.store(at + channel * weight_in, found.to(d_weight.dtype.element_ty), mask=inside)
    if k == 0:
        mean = tl.load(facts + channel, mask=inside, other=0.0)
        rstd = tl.load(facts + channels + channel, mask=inside, other=0.0)
        scale = tl.load(facts + 2 * channels + channel, mask=inside, other=0.0)
        total = _over_splits(sums + channel, channels, splits, inside, R, C)
        along = _over_splits(sums + splits * channels + channel, channels, splits, inside, R, C) * rstd
        tl.store(d_gamma + channel, along, mask=inside)
        tl.store(d_beta + channel, total, mask=inside)
        slope = scale * along * rstd / pixels
        level = scale * total / pixels - slope * mean
        old = tl.load(pending + channel, mask=inside, other=0.0)
        tl.store(pending + channel, old - level, mask=inside)
        old = tl.load(pending + all_channels + channel, mask=inside, other=0.0)
        tl.store(pending + all_channels + channel, old - slope, mask=inside)


@_kernel
def complete(x_at, gradient, pending, dx_at, pixels, channels, apart, all_channels, M: tl.constexpr, C: tl.constexpr):
    """The gradient of a block's first maps, with what all norms add."""
    pixel = tl.program_id(0) * M + tl.arange(0, M)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < channels
    there = (pixel < pixels)[:, None] & inside[None, :]
    row = pixel.to(tl.int64)[:, None]
    x = tl.load(x_at + row * apart + channel[None, :], mask=there, other=0.0).to(tl.float32)
    dx = tl.load(gradient + row * apart + channel[None, :], mask=there, other=0.0).to(tl.float32)
    level = tl.load(pending + channel, mask=inside, other=0.0)
    slope = tl.load(pending + all_channels + channel, mask=inside, other=0.0)
    dx += level[None, :] + slope[None, :] * x
    tl.store(dx_at + row * channels + channel[None, :], dx.to(dx_at.dtype.element_ty), mask=there)
