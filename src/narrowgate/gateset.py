"""``Gates``: the gates of a model, by the name of the layer they sit on, or of the groups they serve."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from narrowgate.batched import nan_message
from narrowgate.dtensors import is_gathered, is_sharded, put_, whole_each
from narrowgate.gated import gate_at
from narrowgate.gates import Gate, GroupGate


class Gates:
    """The gates of a model by the name of the layer they sit on; printing it lists what was gated and what was not."""

    def __init__(self, kind: str, gates: dict[str, Gate], skipped: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._gates = gates
        self.skipped = skipped or {}

    @property
    def names(self) -> list[str]:
        """Where the gates are; an input gate is named ``layer.inputs``, one for heads ``layer.heads``."""
        return list(self._gates)

    @property
    def count(self) -> int:
        """How many single gates there are in all layers."""
        return sum(gate.size for gate in self._gates.values())

    def modules(self) -> list[Gate]:
        """The gate modules, in the order of their names."""
        return list(self._gates.values())

    def parameters(self) -> list[Tensor]:
        """The gate parameters ``g``, for an optimizer group of their own."""
        return [gate.g for gate in self._gates.values()]

    def __len__(self) -> int:
        return len(self._gates)

    def __iter__(self) -> Iterator[str]:
        return iter(self._gates)

    def __getitem__(self, name: str) -> Gate:
        if name not in self._gates:
            why = f"not gated: {self.skipped[name]}" if name in self.skipped else f"gates are on {', '.join(self)}"
            raise KeyError(f"no gate on {name!r}; {why}")
        return self._gates[name]

    def values(self) -> dict[str, Tensor]:
        """The deterministic gate values by layer name: what is left after training, 0 where a gate is closed."""
        values = {name: gate.final_value() for name, gate in self._gates.items()}
        if bad := [name for name, value in values.items() if value.isnan().any()]:
            raise ValueError(nan_message(bad))
        return values

    def closed_fraction(self) -> float:
        """The share of all gates that are exactly 0."""
        return sum(int((value == 0).sum()) for value in self.values().values()) / self.count

    def close_below_(self, threshold: float) -> int:
        """Close every gate whose value is below the threshold; return how many that closed."""
        if not threshold >= 0:
            raise ValueError(f"threshold must be 0 or above, got {threshold!r}")
        self._check_can_write()
        closed = 0
        for name, value in self.values().items():
            mask = (value < threshold) & (value != 0)
            closed += int(mask.sum())
            self._gates[name].close_(mask)
        return closed

    def reopen_(self, name: str) -> int:
        """Open the least closed gate of a layer whose gates are all closed; return its channel.

        It opens by the smallest step, so what the layer computes is small but no longer constant.
        """
        gate = self[name]
        self._check_can_write()
        if bool((gate.final_value() != 0).any()):
            raise ValueError(f"layer {name!r} has open gates; reopen_ is for a layer whose gates are all closed")
        return gate.open_least_closed_()

    def flat(self) -> Tensor:
        """All gate parameters as one vector, on the first one's device."""
        parameters = whole_each(self.parameters())
        return torch.cat([g.reshape(-1).to(parameters[0].device) for g in parameters])

    @torch.no_grad()
    def assign_(self, flat: Tensor) -> None:
        """Write a vector made by ``flat`` back into the gate parameters."""
        self._check_can_write()
        parameters = self.parameters()
        pieces = torch.split(flat, [g.numel() for g in parameters])
        if any(is_sharded(g) for g in parameters):
            for g, piece in zip(parameters, pieces, strict=True):
                put_(g, piece)
        else:
            torch._foreach_copy_(parameters, list(pieces))

    def _check_can_write(self) -> None:
        """Raise where ``fully_shard`` would throw away what is written."""
        if copies := [name for name, gate in self._gates.items() if is_gathered(gate, gate.g)]:
            raise RuntimeError(
                f"the gates on {', '.join(copies)} are copies that fully_shard gathered, as a forward without a "
                "backward leaves them; what is written there is lost. Call reshard() on every FSDPModule first, and "
                "name no gate in ignored_params"
            )

    def __repr__(self) -> str:
        width = max([len(name) for name in (*self._gates, *self.skipped)], default=0)
        lines = [f"Gates: {self.count} {self.kind} gates on {len(self)} layers"]
        lines += [f"  {name:<{width}}  {gate.size:>6}" for name, gate in self._gates.items()]
        lines += [f"  {name:<{width}}  not gated: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)


def gates_of(model: nn.Module) -> Gates:
    """The gates a model already has, for example a deep copy of a gated one."""
    gates: dict[str, Gate] = {}
    for name, module in model.named_modules():
        for key, suffix in (("gate_in", ".inputs"), ("gate", "")):
            gate = gate_at(module, key)
            if isinstance(gate, GroupGate):
                gates.setdefault(gate.label, gate.shared)
            elif gate is not None:
                gates[name + suffix] = gate
    if not gates:
        raise ValueError("this model has no gates; call attach_gates_ first")
    kinds = {gate.kind for gate in gates.values()}
    return Gates(kinds.pop() if len(kinds) == 1 else "mixed", gates)
