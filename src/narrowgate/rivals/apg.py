"""The accelerated proximal gradient of Huang & Wang 2018, for scaling factors; all other parameters move by SGD.

With ``f`` the loss at the factors ``x`` that the network holds, ``S`` the soft threshold and ``m`` the momentum::

    z = x - lr * f'(x)          s = S(z, lr * strength)
    v = s - x + m * v           x = max(s + m * v, 0)

which is their equations 10 to 12 and, as in their program, never below zero. A factor whose ``s`` is 0 is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

from narrowgate.penalties import Penalty


class ApgSgd(torch.optim.SGD):
    """SGD with momentum for all groups but the last, which holds the penalty's gates and moves by the steps above.

    The momentum ``v`` is the factors' ``momentum_buffer``: checkpoints and cuts treat it as they treat SGD's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        penalty: Penalty,
        lr: float | Tensor,
        momentum: float,
        nesterov: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=fused)
        if {id(g) for g in self.param_groups[-1]["params"]} != {id(g) for g in penalty.gates.parameters()}:
            raise ValueError("the last group of parameters has to be that of the penalty's gates, and nothing else")
        self._penalty = penalty

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of both kinds."""
        factors = self._penalty.gates.parameters()
        if closure is not None:
            raise ValueError("this optimizer takes no closure: the factors need the gradient where they are")
        gradients = [torch.zeros_like(g) if g.grad is None else g.grad for g in factors]
        held = [g.grad for g in factors]
        for g in factors:
            g.grad = None  # SGD leaves parameters without a gradient alone
        super().step()
        for g, gradient in zip(factors, held, strict=True):
            g.grad = gradient
        self._move(factors, gradients)
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_penalty": self._penalty}  # a copy or a pickle needs it too

    def _move(self, factors: list[Tensor], gradients: list[Tensor]) -> None:
        group = self.param_groups[-1]
        momenta = [self.state[g].setdefault("momentum_buffer", torch.zeros_like(g)) for g in factors]
        lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
        x, v = self._penalty.gates.flat(), torch.cat(momenta)
        s = self._penalty.shrunk(x - lr * (torch.cat(gradients) + decay * x), lr)
        v = s - x + momentum * v
        if not all(g.requires_grad for g in factors):  # frozen ones stay
            moves = torch.cat([torch.full_like(g, g.requires_grad) for g in factors])
            s, v = torch.where(moves > 0, s, x), v * moves
        self._penalty.gates.assign_((s + momentum * v).clamp(min=0))
        torch._foreach_copy_(momenta, list(torch.split(v, [g.numel() for g in factors])))
