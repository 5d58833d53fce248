"""How far outputs are apart, as a whole and channel by channel: relative to their spread, beside what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Relative to the spread of outputs: what rounding explains in each precision, or this many times the measured noise.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
NOISE_FACTOR = 100.0
WEIGHTS_NOISE_FACTOR = 3.0  # where the noise is that of all weights, not of one rounding in the inputs
_LARGEST_TOLERANCE = 0.5  # more would pass another function
# Of thousands of channels some have a spread that is small by chance: for one alone more is allowed, by this factor,
# and at least so many roundings of its numbers. A channel of fewer numbers than these is not judged alone.
_CHANNEL_FACTOR, _CHANNEL_ROUNDINGS = 10.0, 100.0
_ENOUGH_NUMBERS = 16


@dataclass(frozen=True)
class Difference:
    """The part of an output that is nearest to what is allowed, or furthest beyond."""

    relative: float
    noise: float
    allowed: float
    where: str = ""

    @property
    def excess(self) -> float:
        """The error in units of what is allowed."""
        return ratio(self.relative, self.allowed)


@dataclass(frozen=True)
class Limits:
    """What is allowed: a caller's own tolerance, or what rounding explains; ``half_floor`` for half precision."""

    tolerance: float | None = None
    half_floor: float | None = None
    of_weights: bool = False
    """Whether the noise is that of all weights and not of the inputs."""

    def allowed(self, noise: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
        """Relative to the spread, for each part; ``factor`` times what a whole output may."""
        if self.tolerance is not None:
            return torch.full_like(noise, self.tolerance)
        floor = self.half_floor or TOLERANCE.get(dtype, 1e-4)
        times = WEIGHTS_NOISE_FACTOR if self.half_floor or self.of_weights else NOISE_FACTOR
        return (factor * times * noise).clamp(max=_LARGEST_TOLERANCE).clamp(min=factor * floor)


def ratio(error: float, allowed: float) -> float:
    """An error in units of what is allowed, which may be nothing."""
    return error / allowed if allowed else math.inf if error else 0.0


def worst_part(want: Tensor, got: Tensor, others: Sequence[Tensor], limits: Limits, dtype: torch.dtype) -> Difference:
    """The worst of the whole output and of its channels; all tensors are finite and in float64.

    A detector's scores lie beside coordinates that are a thousand times larger: relative to these, an error in them
    could not be seen. So each channel is judged by its own spread as well, along the second axis and along the last,
    but where a caller has a tolerance of his own or numbers are in half precision.

    Args:
        others: what the first model gives out when rounding is otherwise.
        dtype: the precision that the outputs had.
    """
    parts = [_judged(want, got, others, None, limits, dtype)]
    if limits.tolerance is None and limits.half_floor is None:
        parts += [_judged(want, got, others, axis, limits, dtype) for axis in _channel_axes(want)]
    return max(parts, key=lambda part: part.excess)


def _channel_axes(output: Tensor) -> Iterator[int]:
    """Axes whose places have enough numbers to tell their spread."""
    if output.dim() > 1 and output.shape[0] > 1:
        for axis in sorted({1, output.dim() - 1}):
            if output.shape[axis] > 1 and output.numel() // output.shape[axis] >= _ENOUGH_NUMBERS:
                yield axis


def _judged(
    want: Tensor, got: Tensor, others: Sequence[Tensor], axis: int | None, limits: Limits, dtype: torch.dtype
) -> Difference:
    eps = torch.finfo(dtype).eps
    size, error = _largest(want, axis), _largest(want - got, axis)
    spread = _spread(want, size, axis, eps)
    noise = torch.stack([_largest(want - other, axis) for other in others]).amax(0).nan_to_num(torch.inf) / spread
    rounding = 4 * eps * size * (1.0 if axis is None else _CHANNEL_ROUNDINGS)  # of the output itself
    relative = torch.where(error > rounding, error / spread, torch.zeros_like(error))
    allowed = limits.allowed(noise, dtype, 1.0 if axis is None else _CHANNEL_FACTOR)
    place = int(torch.where(relative > 0, relative / allowed, torch.zeros_like(relative)).argmax())
    where = "" if axis is None else f"number {place} of axis {axis}"
    return Difference(float(relative[place]), float(noise[place]), float(allowed[place]), where)


def _spread(output: Tensor, size: Tensor, axis: int | None, eps: float) -> Tensor:
    """How much outputs differ from one input to another; their size where that is rounding or there is one input."""
    fallback = torch.where(size > 0, size, torch.ones_like(size))
    if not output.dim() or output.shape[0] < 2:
        return fallback
    spread = _largest(output - output.mean(0, keepdim=True), axis)
    return torch.where(spread > 8 * eps * size, spread, fallback)


def _largest(tensor: Tensor, axis: int | None) -> Tensor:
    """The largest size of a tensor's numbers, or of those at each place of an axis."""
    rows = tensor.reshape(1, -1) if axis is None else tensor.movedim(axis, 0).flatten(1)
    return rows.abs().amax(1) if tensor.numel() else rows.new_zeros(1)
