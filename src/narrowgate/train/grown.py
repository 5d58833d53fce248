"""Dense blocks without copies: runs the kernels of grown_kernels.py, and joins them with autograd."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowgate.train import grown_kernels
from narrowgate.train.norm_launch import Norm, rows_apart, unit_of

PLACES, _MAPS = grown_kernels.K.value, grown_kernels.N.value
MOST = PLACES // 9
"""The most maps that a layer may add."""
_UNIT = 8
_ROOM = 16  # layers that fit into a block's place, before its maps are copied to another
_LAST = torch.channels_last


@dataclass(frozen=True)
class Tile:
    """How a kernel works: pixels and channels at a time, and what the compiler is told."""

    M: int
    C: int
    warps: int = 4
    stages: int = 2
    programs: int = 264
    """That share the pass of the gradients; each has sums of its own, which have to be added up."""


# For many pixels, fewer, and few: the best of seven, and of eight, on an H200 with the three blocks of a DenseNet-40.
MULTIPLY = [Tile(128, 32, 4, 3), Tile(128, 32, 4, 3), Tile(64, 64, 4, 3)]
GRADIENTS = [Tile(64, 32, 4, 3), Tile(64, 32, 4, 3), Tile(64, 64, 8, 3, programs=132)]
# Kernels that move a few numbers of each pixel are the faster the fewer a thread has of them; but each tile that is
# gathered has statistics, and the next layer reads them all.
GATHER, PREPARE = Tile(64, _MAPS, 8), Tile(16, _MAPS, 4)
_MANY, _FEWER = 65536, 16384


def _of(tiles: list[Tile], pixels: int) -> Tile:
    return tiles[0 if pixels >= _MANY else 1 if pixels >= _FEWER else 2]


@dataclass
class Block:
    """The maps of a dense block, side by side: pixels by channels, with room for those to come."""

    maps: Tensor
    width: int
    """How many there are."""
    known: int = 0
    """Of how many the statistics are known; those of the others lie in ``spreads``."""
    statistics: Tensor = field(init=False)
    spreads: Tensor | None = None
    tile: int = 0
    gradient: Tensor | None = None
    pending: Tensor | None = None
    """A number and a multiple of the map itself, to be added to each map's gradient."""

    def __post_init__(self) -> None:
        self.statistics = torch.empty(2 * self.apart, device=self.maps.device)

    @classmethod
    def begun(cls, x: Tensor, growth: int) -> Block:
        """A copy of a batch, with room behind its channels."""
        n, channels, h, w = x.shape
        apart = -(-(channels + _ROOM * growth) // _UNIT) * _UNIT
        block = cls(torch.empty((n, h, w, apart), dtype=x.dtype, device=x.device), channels)
        M, C = 128, 32
        block.tile, tiles = M, -(-block.pixels // M)
        block.spreads = torch.empty(tiles * 2 * channels, device=x.device)
        grown_kernels.begin[(tiles, -(-channels // C))](
            *(x, block.maps, block.spreads, block.pixels, channels, rows_apart(x), apart // _UNIT, channels),
            **{"U": _UNIT, "M": M, "C": C},
        )
        return block

    @property
    def apart(self) -> int:
        return self.maps.shape[3]

    @property
    def pixels(self) -> int:
        return self.maps.numel() // self.apart

    def first(self, width: int) -> Tensor:
        """Its first maps, as a batch."""
        return self.maps[..., :width].permute(0, 3, 1, 2)

    def has_room(self, x: Tensor, more: int) -> bool:
        """Whether this batch is all its maps, as they were made, and so many more fit behind them."""
        return x.shape[1] == self.width and self.width + more <= self.apart and self.maps._version == 0


@dataclass(frozen=True)
class Layer:
    """What a layer does besides its numbers."""

    norm: Norm
    outputs: int
    drop: float = 0.0
    seed: Tensor | None = None
    salt: int = 0


class Grown(torch.autograd.Function):
    """A batch with the maps behind it that norm, activation, 3x3 convolution and dropout make of it.

    Args:
        block: the block whose maps the batch is, or None where it begins one.
        blocks: a list that gets the block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        weight: Tensor,
        running: tuple[Tensor, Tensor] | None,
        layer: Layer,
        block: Block | None,
        blocks: list[Block],
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.begins = block is None
        block = Block.begun(x, layer.outputs) if block is None else block
        ctx.taps, ctx.facts = _forward(block, gamma, beta, weight, running, layer)
        ctx.weight_like = weight.shape, weight.stride(), weight.dtype
        ctx.block, ctx.layer, ctx.channels = block, layer, x.shape[1]
        blocks.append(block)
        return block.first(block.width)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        if ctx.block.maps._version or ctx.taps is None:
            raise RuntimeError("the maps of a dense block were changed in place, or went backward twice")
        if rows_apart(dy) is None:
            dy = dy.contiguous(memory_format=_LAST)
        shape, stride, dtype = ctx.weight_like
        d_weight = torch.empty_strided(shape, stride, dtype=dtype, device=dy.device)
        found = _backward(ctx.block, ctx.channels, dy, ctx.taps, ctx.facts, d_weight, ctx.layer)
        ctx.taps = None
        dx = _complete(ctx.block, ctx.channels) if ctx.begins else _rows(ctx.block.gradient, ctx.channels)
        return dx, *found, d_weight, None, None, None, None


def fits(x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: Any) -> bool:
    """Whether these kernels can do a convolution, given what ``torch.conv2d`` was."""
    ones = all(number in (1, (1, 1), [1, 1]) for number in (stride, padding, dilation))
    plain = bias is None and ones and groups == 1 and weight.shape == (weight.shape[0], x.shape[1], 3, 3)
    return plain and 0 < weight.shape[0] <= MOST and x.dim() == 4 and x.numel() > x.shape[1]


def _rows(gradient: Tensor | None, channels: int) -> Tensor:
    assert gradient is not None
    return gradient[..., :channels].permute(0, 3, 1, 2)


def _forward(
    block: Block, gamma: Tensor, beta: Tensor, weight: Tensor, running: tuple[Tensor, Tensor] | None, layer: Layer
) -> tuple[Tensor, Tensor]:
    channels, pixels, maps = block.width, block.pixels, block.maps
    device = maps.device
    taps = torch.empty(channels * PLACES, dtype=maps.dtype, device=device)
    facts = torch.empty(4 * channels, device=device)
    spreads, fresh = block.spreads, channels - block.known
    assert spreads is not None
    room = fresh if block.known == 0 else _MAPS
    mean, var = (facts, facts) if running is None else running
    C = 16
    grown_kernels.settle[(-(-channels // C),)](
        *(spreads, block.statistics, facts, gamma, beta, mean, var, weight, taps),
        *(pixels, channels, block.known, layer.outputs, spreads.numel() // (2 * room), block.tile, room, block.apart),
        *weight.stride(),
        layer.norm.momentum,
        layer.norm.eps,
        **{"track": running is not None, "R": 256, "C": C, "num_warps": 8},
    )
    height, width = maps.shape[1:3]
    tile = _of(MULTIPLY, pixels)
    products = torch.empty(pixels * PLACES, dtype=maps.dtype, device=device)
    grown_kernels.multiply[(-(-pixels // tile.M),)](
        *(maps, taps, facts, products, pixels, channels, block.apart // _UNIT, layer.outputs),
        **{"activation": layer.norm.activation, "U": _UNIT, "M": tile.M, "C": tile.C},
        **{"stages": tile.stages, "num_warps": tile.warps},
    )
    tiles = -(-pixels // GATHER.M)
    block.spreads, block.known, block.tile = torch.empty(tiles * 2 * _MAPS, device=device), channels, GATHER.M
    grown_kernels.gather[(tiles,)](
        *(maps, products, block.spreads, facts if layer.seed is None else layer.seed),
        *(pixels, height, width, channels, block.apart, layer.outputs, layer.salt, layer.drop),
        **{"drops": layer.drop > 0, "M": GATHER.M, "num_warps": GATHER.warps},
    )
    block.width += layer.outputs
    return taps, facts


def _backward(
    block: Block, channels: int, dy: Tensor, taps: Tensor, facts: Tensor, d_weight: Tensor, layer: Layer
) -> tuple[Tensor, Tensor]:
    maps, pixels, outputs = block.maps, block.pixels, layer.outputs
    device = maps.device
    if block.gradient is None or block.pending is None:
        block.gradient = torch.empty_like(maps)
        block.pending = torch.zeros(2 * block.apart, device=device)
    height, width = maps.shape[1:3]
    own = torch.empty(pixels * PLACES, dtype=maps.dtype, device=device)
    dy_apart = rows_apart(dy)
    assert dy_apart is not None
    grown_kernels.prepare[(-(-pixels // PREPARE.M),)](
        *(maps, dy, block.pending, own, facts if layer.seed is None else layer.seed),
        *(pixels, height, width, channels, block.apart, dy_apart, outputs, block.apart, layer.salt, layer.drop),
        **{"drops": layer.drop > 0, "M": PREPARE.M, "num_warps": PREPARE.warps},
    )
    more_unit = unit_of(dy_apart)
    tile = _of(GRADIENTS, pixels)
    columns, tiles = -(-channels // tile.C), -(-pixels // tile.M)
    each = -(-tiles // min(max(1, tile.programs // columns), tiles)) * tile.M
    splits = -(-pixels // each)
    sums = torch.empty(splits * 2 * channels, device=device)
    d_taps = torch.empty(splits * PLACES * channels, device=device)
    grown_kernels.gradients[(splits, columns)](
        *(maps, own, dy, block.gradient, taps, facts, sums, d_taps),
        *(pixels, channels, block.apart // _UNIT, dy_apart // more_unit, outputs, each, splits),
        **{"activation": layer.norm.activation, "U": _UNIT, "V": more_unit, "M": tile.M, "C": tile.C},
        **{"stages": tile.stages, "num_warps": tile.warps},
    )
    d_gamma, d_beta = (torch.empty(channels, device=device) for _ in range(2))
    C = 64
    grown_kernels.add_up[(9 * outputs, -(-channels // C))](
        *(sums, d_taps, facts, block.pending, d_gamma, d_beta, d_weight),
        *(pixels, channels, splits, block.apart, *d_weight.stride(), outputs),
        **{"R": 32, "C": C},
    )
    return d_gamma, d_beta


def _complete(block: Block, channels: int) -> Tensor:
    n, h, w, apart = block.maps.shape
    dx = torch.empty((n, channels, h, w), dtype=block.maps.dtype, device=block.maps.device, memory_format=_LAST)
    M, C = 64, 32
    grown_kernels.complete[(-(-block.pixels // M), -(-channels // C))](
        *(block.maps, block.gradient, block.pending, dx, block.pixels, channels, apart, apart), **{"M": M, "C": C}
    )
    return dx


@cache
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels run here and agree with PyTorch's on something small, found by trying."""
    try:
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            return _agrees(device, dtype)
    except Exception:  # a compiler of its own: anything may go wrong, and PyTorch's kernels do the work as well
        return False


def _agrees(device: torch.device, dtype: torch.dtype) -> bool:
    """Two layers of a block, forward and backward: about as near to float64 as PyTorch's kernels are."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    numbers = [draw(channels) for channels in (10, 10, 15, 15)]
    weights = [draw(5, 10, 3, 3) / 9, draw(6, 15, 3, 3) / 9]
    x = draw(6, 10, 7, 9).to(dtype).contiguous(memory_format=_LAST)
    dy = draw(6, 21, 7, 9).to(dtype)

    def grow(leaves: list[Tensor], ours: bool) -> list[Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        y, blocks = leaves[0], []  # type: Tensor, list[Block]
        for i in range(2):
            gamma, beta, weight = leaves[1 + 2 * i], leaves[2 + 2 * i], leaves[5 + i]
            if ours:
                layer = Layer(Norm(y.shape[1], y.shape[1], 0.1, 1e-5, 1), weight.shape[0])
                y = Grown.apply(y, gamma, beta, weight, None, layer, blocks[-1] if blocks else None, blocks)
            else:
                z = torch.batch_norm(y, gamma, beta, None, None, True, 0.1, 1e-5, False).relu()
                y = torch.cat([y, torch.conv2d(z, weight.to(y.dtype), None, 1, 1)], 1)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    leaves = [x, *numbers, *weights]
    exact = grow([leaf.double() for leaf in leaves], ours=False)
    plain, ours = ([_apart(a, b) for a, b in zip(exact, grow(leaves, own), strict=True)] for own in (False, True))
    # Numbers near zero that rounding puts on the other side of it let a gradient through, or don't: either is right.
    return all(us <= 0.01 + 3 * them for us, them in zip(ours, plain, strict=True))


def _apart(exact: Tensor, other: Tensor) -> float:
    return float((exact - other.double()).norm() / exact.norm())
