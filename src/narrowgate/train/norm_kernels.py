"""BatchNorm with the activation and the dropout behind it as four Triton kernels: two forward, two backward.

A channels_last batch is a matrix of pixels by channels. Forward: sums of each channel, then one pass that normalises,
activates and drops. Backward: sums again, then one pass, which also adds the gradient that the batch gets from
elsewhere. PyTorch's own kernels need about ten passes for the same, and most of a small network's training step goes
into them. The next tile is on its way while one is worked on.

Rows may lie further apart than they are long, and may end in channels of zeros that a convolution likes better than an
odd width (see wide.py): their scale and shift count as zero, so that they stay zeros.
"""

# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator,attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

# In kernels, activation is 0 for none, 1 for ReLU and 2 for ReLU6: see fused.py.

# Numbers that Triton would otherwise compile anew for, where they happen to be 1 or a multiple of 16. A cut changes the
# channels of every layer, and each kernel takes a while to compile. That lengths are U times so many is what lets
# several numbers be read at once.
_kernel = triton.jit(
    do_not_specialize=[
        *("rows", "rows_each", "splits", "channels", "wide", "salt"),
        *("x_apart", "x_long", "dy_apart", "dy_long", "more_apart", "more_long"),
    ]
)


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
def _mix(h):
    """A number of 32 bits that looks nothing like this one (Wellons' lowbias32)."""
    h = (h ^ (h >> 16)).to(tl.uint32)
    h = (h * 0x7FEB352D).to(tl.uint32)
    h = (h ^ (h >> 15)).to(tl.uint32)
    h = (h * 0x846CA68B).to(tl.uint32)
    return (h ^ (h >> 16)).to(tl.uint32)


@triton.jit
def _kept(seed_at, salt, drop, first, channel, width, R: tl.constexpr):
    """What dropout multiplies a tile with: the same for a seed and a salt, forward and backward."""
    key = _mix(_mix(tl.load(seed_at).to(tl.uint32)) + salt.to(tl.uint32))
    place = (first + tl.arange(0, R)).to(tl.uint32)[:, None] * width.to(tl.uint32) + channel.to(tl.uint32)[None, :]
    luck = _mix(place.to(tl.uint32) + key) >> 8
    return tl.where(luck.to(tl.float32) * (1.0 / 16777216.0) < drop, 0.0, 1.0 / (1.0 - drop))


@triton.jit
def _load(at, first, rows, channel, apart, long, R: tl.constexpr):
    """A tile of R rows that are ``long`` numbers, ``apart`` from one another; zeros outside."""
    row = first + tl.arange(0, R)
    kept = (row < rows)[:, None] & (channel < long)[None, :]
    return tl.load(at + row.to(tl.int64)[:, None] * apart + channel[None, :], mask=kept, other=0.0)


@triton.jit
def _store(at, tile, first, rows, channel, long, R: tl.constexpr):
    row = first + tl.arange(0, R)
    kept = (row < rows)[:, None] & (channel < long)[None, :]
    tl.store(at + row.to(tl.int64)[:, None] * long + channel[None, :], tile.to(at.dtype.element_ty), mask=kept)


@triton.jit
def _column_sum(partial, splits, channel, width, S: tl.constexpr):
    """The sum over all programs that shared these channels, always in the same order."""
    split = tl.arange(0, S)
    kept = (split < splits)[:, None] & (channel < width)[None, :]
    return tl.sum(tl.load(partial + split[:, None] * width + channel[None, :], mask=kept, other=0.0), axis=0)


@_kernel
def statistics(
    x_at, partial, rows, rows_each, splits, x_apart, x_long, wide, U: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    width = wide * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    # Sums are of what exceeds the first pixel: squares of numbers far from zero would lose the variance.
    origin = tl.load(x_at + channel, mask=channel < x_long * U, other=0.0).to(tl.float32)
    total = tl.zeros((R, C), tl.float32)
    square = tl.zeros((R, C), tl.float32)
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming = _load(x_at, first, end, channel, x_apart * U, x_long * U, R)
    for start in range(first, end, R):
        x = coming.to(tl.float32)
        coming = _load(x_at, start + R, end, channel, x_apart * U, x_long * U, R)
        x = tl.where((start + tl.arange(0, R) < end)[:, None], x - origin[None, :], 0.0)
        total += x
        square += x * x
    tl.store(partial + block * width + channel, tl.sum(total, axis=0), mask=channel < width)
    tl.store(partial + (splits + block) * width + channel, tl.sum(square, axis=0), mask=channel < width)


@_kernel
def normalise(
    x_at,
    y_at,
    partial,
    weight,
    bias,
    running_mean,
    running_var,
    facts,
    seed_at,
    rows,
    rows_each,
    splits,
    channels,
    x_apart,
    x_long,
    wide,
    salt,
    momentum,
    eps,
    drop,
    track: tl.constexpr,
    activation: tl.constexpr,
    drops: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    width = wide * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside, known = channel < width, channel < channels
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming = _load(x_at, first, end, channel, x_apart * U, x_long * U, R)
    origin = tl.load(x_at + channel, mask=channel < x_long * U, other=0.0).to(tl.float32)
    gamma = tl.load(weight + channel, mask=known, other=0.0)
    beta = tl.load(bias + channel, mask=known, other=0.0)
    offset = _column_sum(partial, splits, channel, width, S) / rows
    spread = _column_sum(partial + splits * width, splits, channel, width, S) / rows
    mean = origin + offset
    var = tl.maximum(spread - offset * offset, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale = gamma * rstd
    shift = beta - mean * scale
    if block == 0:
        tl.store(facts + channel, mean, mask=inside)
        tl.store(facts + width + channel, rstd, mask=inside)
        tl.store(facts + 2 * width + channel, scale, mask=inside)
        tl.store(facts + 3 * width + channel, shift, mask=inside)
        if track:
            old = tl.load(running_mean + channel, mask=known, other=0.0)
            tl.store(running_mean + channel, old + momentum * (mean - old), mask=known)
            old = tl.load(running_var + channel, mask=known, other=0.0)
            unbiased = var * (rows / (rows - 1.0))
            tl.store(running_var + channel, old + momentum * (unbiased - old), mask=known)
    for start in range(first, end, R):
        x = coming.to(tl.float32)
        coming = _load(x_at, start + R, end, channel, x_apart * U, x_long * U, R)
        y = _activate(x * scale[None, :] + shift[None, :], activation)
        if drops:
            y *= _kept(seed_at, salt, drop, start, channel, width, R)
        _store(y_at, y, start, end, channel, width, R)


@_kernel
def gradient_sums(
    x_at,
    dy_at,
    partial,
    facts,
    seed_at,
    rows,
    rows_each,
    splits,
    x_apart,
    x_long,
    dy_apart,
    dy_long,
    wide,
    salt,
    drop,
    activation: tl.constexpr,
    drops: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    width = wide * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = channel < width
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming_x = _load(x_at, first, end, channel, x_apart * U, x_long * U, R)
    coming_dy = _load(dy_at, first, end, channel, dy_apart * U, dy_long * U, R)
    mean = tl.load(facts + channel, mask=inside, other=0.0)
    scale = tl.load(facts + 2 * width + channel, mask=inside, other=0.0)
    shift = tl.load(facts + 3 * width + channel, mask=inside, other=0.0)
    total = tl.zeros((R, C), tl.float32)
    along = tl.zeros((R, C), tl.float32)
    for start in range(first, end, R):
        x, dy = coming_x.to(tl.float32), coming_dy.to(tl.float32)
        coming_x = _load(x_at, start + R, end, channel, x_apart * U, x_long * U, R)
        coming_dy = _load(dy_at, start + R, end, channel, dy_apart * U, dy_long * U, R)
        dz = _passes(x * scale[None, :] + shift[None, :], dy, activation)
        if drops:
            dz *= _kept(seed_at, salt, drop, start, channel, width, R)
        total += dz
        along += dz * (x - mean[None, :])
    tl.store(partial + block * width + channel, tl.sum(total, axis=0), mask=inside)
    tl.store(partial + (splits + block) * width + channel, tl.sum(along, axis=0), mask=inside)


@_kernel
def gradient(
    x_at,
    dy_at,
    dx_at,
    more_at,
    partial,
    facts,
    d_weight,
    d_bias,
    seed_at,
    rows,
    rows_each,
    splits,
    channels,
    x_apart,
    x_long,
    dy_apart,
    dy_long,
    more_apart,
    more_long,
    wide,
    salt,
    drop,
    activation: tl.constexpr,
    drops: tl.constexpr,
    adds: tl.constexpr,
    U: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
):
    width = wide * U
    block = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside, known = channel < width, channel < channels
    first = block * rows_each
    end = tl.minimum(first + rows_each, rows)
    coming_x = _load(x_at, first, end, channel, x_apart * U, x_long * U, R)
    coming_dy = _load(dy_at, first, end, channel, dy_apart * U, dy_long * U, R)
    mean = tl.load(facts + channel, mask=inside, other=0.0)
    rstd = tl.load(facts + width + channel, mask=inside, other=0.0)
    scale = tl.load(facts + 2 * width + channel, mask=inside, other=0.0)
    shift = tl.load(facts + 3 * width + channel, mask=inside, other=0.0)
    total = _column_sum(partial, splits, channel, width, S)
    along = _column_sum(partial + splits * width, splits, channel, width, S) * rstd
    if block == 0:
        tl.store(d_weight + channel, along, mask=known)
        tl.store(d_bias + channel, total, mask=known)
    level, slope = total / rows, along * rstd / rows
    for start in range(first, end, R):
        x, dy = coming_x.to(tl.float32), coming_dy.to(tl.float32)
        coming_x = _load(x_at, start + R, end, channel, x_apart * U, x_long * U, R)
        coming_dy = _load(dy_at, start + R, end, channel, dy_apart * U, dy_long * U, R)
        dz = _passes(x * scale[None, :] + shift[None, :], dy, activation)
        if drops:
            dz *= _kept(seed_at, salt, drop, start, channel, width, R)
        dx = scale[None, :] * (dz - level[None, :] - (x - mean[None, :]) * slope[None, :])
        if adds:
            dx += _load(more_at, start, end, channel, more_apart * U, more_long * U, R).to(tl.float32)
        _store(dx_at, dx, start, end, channel, x_long * U, R)
