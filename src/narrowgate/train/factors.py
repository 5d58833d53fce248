"""Fine-tuning with the gates' values as fixed factors.

A gate of value v that is multiplied into a filter leaves a filter v times as small, and to that a step is as long as
one 1 / v² times as long was while the gate was there: learning rates that served the gated network ruin the small one.
With the values beside the weights a step does what it did, and what a closed gate holds at zero stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from narrowgate.flow import Plan
from narrowgate.flow.surgery import cut
from narrowgate.gated import GatedLayer
from narrowgate.swap import is_turned, out_channels


@torch.no_grad()
def gate_factors(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """What the gates of a model multiply each parameter by that a plan leaves of it; 0 where a gate is closed."""
    factors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, GatedLayer):
            continue
        prefix = f"{name}." if name else ""
        out, into = (None if gate is None else gate.final_value() for gate in (layer.gate, layer.gate_in))
        weight = layer.get_parameter("weight")
        factors[f"{prefix}weight"] = layer.scale_weight(torch.ones_like(weight), out, into)
        if out is not None and out.dim():
            bias = out.to(weight.dtype).expand(out_channels(layer)).clone()
            how = plan.cuts.get(f"{prefix}weight")
            if layer._parameters.get("bias") is None and how is not None:  # a new one, for constants
                bias = bias[how.keep.get(int(is_turned(layer)), ...)]
            factors[f"{prefix}bias"] = bias
    for name, factor in factors.items():
        if name in plan.cuts and plan.cuts[name].shape == factor.shape:
            factors[name] = cut(factor, plan.cuts[name])
    return factors


@contextmanager
def kept_apart(small: nn.Module, factors: Mapping[str, Tensor]) -> Iterator[None]:
    """While it lasts, these factors stand beside the parameters, which are as large as before they were multiplied."""
    own = dict(small.named_parameters())
    apart = [name for name, factor in factors.items() if name in own and own[name].shape == factor.shape]
    places = [(small.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name) for name in apart]
    for layer, key, name in places:
        parametrize.register_parametrization(layer, key, _Times(factors[name], own[name]))
    try:
        yield
    finally:
        for layer, key, _ in places:
            parametrize.remove_parametrizations(layer, key, leave_parametrized=True)


class _Times(nn.Module):
    factor: Tensor
    fixed: Tensor

    def __init__(self, factor: Tensor, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)
        self.register_buffer("fixed", torch.where(factor == 0, value.detach(), torch.zeros_like(factor)))

    def forward(self, raw: Tensor) -> Tensor:
        return raw * self.factor + self.fixed

    def right_inverse(self, value: Tensor) -> Tensor:
        return torch.where(self.factor == 0, torch.zeros_like(value), value / self.factor)
