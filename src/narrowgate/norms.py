"""The penalties' mathematics as pure functions: bounded-lp (Mummadi et al., section 3), l1 and l2.

Each returns the sum over all elements, each times its ``weight``. Half-precision inputs are summed in float32. The
subgradient at 0 is 0.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

# exp(-1000) is 0 in float64 too, so beyond this exponent the bounded norm is exactly 1 and its gradient exactly 0.
SATURATED_EXPONENT = 1000.0


def bounded_lp(x: Tensor, p: float = 1.0, sigma: float | Tensor = 1.0, weight: float | Tensor = 1.0) -> Tensor:
    """Sum of ``1 - exp(-(|x| / sigma)^p)``: between the p-norm (small x) and the count of non-zeros (small sigma)."""
    check_positive("p", p)
    check_positive("sigma", sigma)
    x = at_least_float32(x)
    saturated = (x.detach().abs() / sigma).pow(p) > SATURATED_EXPONENT
    ordinary = (x != 0) & ~saturated
    # At 0 (for p < 1) and in saturation the chain rule would give 0 * inf; the detour through 1.0 makes that 0.
    ratio = torch.where(ordinary, x, torch.ones_like(x)).abs() / sigma
    term = -torch.expm1(-ratio.pow(p))
    return (weight * torch.where(ordinary, term, saturated.to(x.dtype))).sum()


def l1(x: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """Sum of ``|x|``."""
    return (weight * at_least_float32(x).abs()).sum()


def l2(x: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """Sum of ``x^2`` (the squared l2 norm, as in Lemma 1; half of it is what weight decay minimises)."""
    return (weight * at_least_float32(x).square()).sum()


class Relative(torch.autograd.Function):
    """Each layer's elements over the layer's typical size, ``sum x^2 / sum |x|``: a measure that zeros don't change.

    A factor common to a layer's elements cancels, so no gradient shrinks a layer as a whole. The sum of the sizes of
    what this gives is ``(sum |x|)^2 / sum x^2``, how many of the layer's elements count: from 1 to all of them.
    ``layer`` is each element's, from 0 to ``layers``. A layer of zeros stays as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Tensor, layers: int) -> Tensor:
        squares, total = (_by_layer(part, layer, layers) for part in (x.square(), x.abs()))
        inverse = torch.where(squares > 0, total / squares, torch.zeros_like(total)).index_select(0, layer)
        relative = x * inverse
        ctx.save_for_backward(relative, inverse, layer)
        ctx.layers = layers
        return relative

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        relative, inverse, layer = ctx.saved_tensors
        counts, pull = (_by_layer(part, layer, ctx.layers) for part in (relative.abs(), grads[0] * relative))
        pull = torch.where(counts > 0, pull / counts, torch.zeros_like(counts)).index_select(0, layer)
        return inverse * (grads[0] - pull * (2 * relative - relative.sign())), None, None


def _by_layer(x: Tensor, layer: Tensor, layers: int) -> Tensor:
    return x.new_zeros(layers).index_add(0, layer, x)


def check_positive(name: str, value: float | Tensor) -> None:
    """Raise unless a number is finite and above zero; a tensor is trusted, since looking would stall the GPU."""
    if not isinstance(value, Tensor) and not (_is_finite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")


def check_not_negative(name: str, value: float | Tensor) -> None:
    """Raise unless a number is finite and zero or above; a tensor is trusted."""
    if not isinstance(value, Tensor) and not (_is_finite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number, 0 or above, got {value!r}")


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor itself in float64, every other dtype as float32."""
    return x if x.dtype == torch.float64 else x.float()


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
