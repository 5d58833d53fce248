"""Scaling factors of Huang & Wang 2018, "Data-Driven Sparse Structure Selection": numbers that multiply outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgate.gates import Gate, GroupGate, LinearGate
from narrowgate.gateset import Gates, gates_of


class ScalingGate(Gate):
    """The factor is ``g`` itself, 1 at the start; what trains it must keep it from going below 0."""

    kind = "scaling"

    def __init__(self, size: int, init: float = 1.0) -> None:
        super().__init__()
        self.init = init
        self.g = nn.Parameter(torch.full((size,), float(init)))

    def value(self) -> Tensor:
        return self.g

    def final_value(self) -> Tensor:
        """The factor as it is now, which later steps leave alone."""
        return self.g.detach().clone()

    @torch.no_grad()
    def close_(self, mask: Tensor) -> None:
        self.g.masked_fill_(mask, 0.0)

    @torch.no_grad()
    def open_least_closed_(self) -> int:
        position = int(self.g.argmax())
        self.g[position] = 1e-3
        return position


def use_scaling_gates_(model: nn.Module, init: float = 1.0) -> Gates:
    """Put a scaling factor in the place of every gate that a model has, and return them."""
    if not init > 0:
        raise ValueError(f"scaling factors start above 0, got init={init!r}")
    present = gates_of(model)
    if linear := [name for name in present if isinstance(present[name], LinearGate)]:
        raise ValueError(
            f"the gates on {', '.join(linear)} are BatchNorm's own scales, and a factor in their place would multiply "
            "nothing; attach gates of kind='exponential' instead"
        )
    made: dict[int, ScalingGate] = {}  # by the gate that each replaces: several layers may share one

    def instead_of(old: Gate) -> ScalingGate:
        if id(old) not in made:
            new = ScalingGate(old.size, init).to(old.g.device, old.g.dtype)
            new.names = old.names
            made[id(old)] = new.train(old.training)
        return made[id(old)]

    for layer in list(model.modules()):
        for key in ("gate", "gate_in"):
            gate = layer._modules.get(key)
            if isinstance(gate, GroupGate):
                home = gate._modules if "shared" in gate._modules else gate.__dict__
                home["shared"] = instead_of(gate.shared)
            elif isinstance(gate, Gate):
                layer.register_module(key, instead_of(gate))
    return gates_of(model)
