"""A BatchNorm and what is done to its result, by the kernels of norm_launch.py, joined with autograd; and a trial."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgate.train import calls

if TYPE_CHECKING:
    from narrowgate.train.norm_launch import Norm


class NormActivation(torch.autograd.Function):
    """A norm with statistics of the batch, what is done to its result, and the batch once more.

    Who reads the batch elsewhere and takes that instead has its gradient added to the norm's own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor] | None, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        from narrowgate.train import norm_launch

        ctx.set_materialize_grads(False)
        y, facts = norm_launch.forward(x, weight, bias, running, norm)
        ctx.save_for_backward(x, facts)
        ctx.norm = norm
        return y, x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        from narrowgate.train import norm_launch

        if dy is None:
            return more, None, None, None, None
        x, facts = ctx.saved_tensors
        found = norm_launch.backward(x, _as_rows(dy), None if more is None else _as_rows(more), facts, ctx.norm)
        return *found, None, None


def _as_rows(gradient: Tensor) -> Tensor:
    """A gradient that the kernels can read: as it is, or a copy."""
    from narrowgate.train.norm_launch import rows_apart

    if rows_apart(gradient) is not None:
        return gradient
    return gradient.contiguous(memory_format=torch.channels_last)


@cache
def why_not(device: torch.device) -> str:
    """Why norms can't be fused on this device, found by trying; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        return _trial(device)
    except Exception as error:  # a compiler of its own: anything may go wrong, and plain kernels do the work as well
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _trial(device: torch.device) -> str:
    """Compare a small norm, forward and backward, with PyTorch's."""
    from narrowgate.train.norm_launch import Norm

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x = (draw(8, 24, 9, 9) * 3 + 1).contiguous(memory_format=torch.channels_last)
    weight, bias, dy = draw(24), draw(24), draw(8, 24, 9, 9)
    seen: list[list[Tensor]] = []
    for fused in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        running = torch.zeros(24, device=device), torch.ones(24, device=device)
        if fused:
            y = NormActivation.apply(*leaves, running, Norm(24, 24, 0.1, 1e-5, calls.RELU6))[0]
        else:
            y = F.relu6(F.batch_norm(leaves[0], *running, leaves[1], leaves[2], True, 0.1, 1e-5))
        seen.append([y.detach(), *torch.autograd.grad(y, leaves, dy), *running])
    for plain, ours in zip(*seen, strict=True):
        if not torch.allclose(plain, ours, rtol=1e-3, atol=1e-3):
            return f"its kernels give other numbers than PyTorch's (by {(plain - ours).abs().max():.1e})"
    return ""
