"""A view of a gated model without its gates: the remover reads effective weights and knows nothing of gates."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgate.batched import forget_prepared_gates_
from narrowgate.direct import forget_reader_
from narrowgate.flow.analysis import ClosedGates
from narrowgate.flow.state import Mask
from narrowgate.flow.trace import TraceError, copy_structure
from narrowgate.gated import GatedLayer, has_gate
from narrowgate.gates import Gate, LinearGate


class FrozenGate(Gate):
    """A gate on a module's output whose values no longer train."""

    kind = "frozen"

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("g", factor)

    def value(self) -> Tensor:
        return self.g


def share_copy(model: nn.Module) -> nn.Module:
    """A copy of the module tree that shares every parameter and buffer with the original."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    try:
        return copy_structure(model, memo)
    except RuntimeError as error:
        raise TraceError(
            f"{type(model).__name__} can't be copied: {str(error).splitlines()[0]}. If torch.nn.utils.prune made a "
            "weight, call prune.remove(layer, 'weight') first; the zeros stay"
        ) from error


def ungated(model: nn.Module) -> nn.Module:
    """A copy with every gate multiplied into fresh weights; all other tensors are shared with the original."""
    plain = share_copy(model)
    for module in plain.modules():
        forget_prepared_gates_(module)
        forget_reader_(module)
        if not has_gate(module):
            continue
        if isinstance(module, GatedLayer):
            _merge_into_fresh_weights_(module)
        elif isinstance(module.gate, LinearGate):
            del module.gate
        else:
            assert isinstance(module.gate, Gate)
            module.gate = FrozenGate(module.gate.final_value())
    return plain


def closed_gates(model: nn.Module) -> ClosedGates:
    """Which outputs and inputs of which weight a closed gate holds at zero, in the order of the weight's axes."""
    closed: ClosedGates = {}
    for name, module in model.named_modules():
        gate = module._modules.get("gate")
        prefix = f"{name}." if name else ""
        if isinstance(module, GatedLayer):
            outputs, inputs = _closed(module.gate, module, 1), _closed(module.gate_in, module, 0)
            swap = bool(getattr(module, "transposed", False))
            closed[f"{prefix}weight"] = (inputs, outputs) if swap else (outputs, inputs)
        elif isinstance(gate, LinearGate):
            closed[f"{prefix}weight"] = (_closed(gate, module, 1), None)
    return closed


def _closed(gate: Gate | None, layer: nn.Module, outputs: int) -> Mask | None:
    if gate is None:
        return None
    mask = (gate.final_value() == 0).cpu().numpy()
    if gate.size == 1 and isinstance(layer.weight, Tensor):  # one gate for the whole layer
        transposed = bool(getattr(layer, "transposed", False))
        return np.full(layer.weight.shape[int(bool(outputs) == transposed)], mask[0])
    return mask


@torch.no_grad()
def _merge_into_fresh_weights_(layer: GatedLayer) -> None:
    weight, bias = layer.scaled(
        None if layer.gate is None else layer.gate.final_value(),
        None if layer.gate_in is None else layer.gate_in.final_value(),
    )
    layer.__class__ = layer.plain_class  # type: ignore[assignment]
    del layer.gate, layer.gate_in
    layer.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone())
