"""A view of a gated model without its gates: the remover reads effective weights and knows nothing of gates."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from narrowgate.batched import forget_prepared_gates_
from narrowgate.direct import forget_reader_
from narrowgate.dtensors import check_whole
from narrowgate.flow.analysis import ClosedGates
from narrowgate.flow.copies import copy_structure
from narrowgate.flow.state import Mask
from narrowgate.flow.trace import TraceError
from narrowgate.flow.unknown import Gating, Weights, has_numbers, named_tensors, put_tensor, raw
from narrowgate.gated import GatedLayer, has_gate
from narrowgate.gates import Gate, LinearGate
from narrowgate.swap import check_weights


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
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TraceError(
            f"{type(model).__name__} is compiled by torch.jit, which hides its code; pass the model itself"
        )
    check_whole(model, TraceError, ", or cut the model while it trains with ng.shrink_sharded_")
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = tensor
    try:
        return copy_structure(model, memo)
    except (RuntimeError, TypeError) as error:
        raise TraceError(f"{type(model).__name__} can't be copied: {_why_not_copied(model, error)}") from error


def _why_not_copied(model: nn.Module, error: Exception) -> str:
    for name, module in model.named_modules():
        for key, held in vars(module).items():
            leaves = pytree.tree_leaves(held) if isinstance(held, (Tensor, list, tuple, dict)) else ()
            if any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in leaves):
                path = f"{name}.{key}".removeprefix(".")
                if any(parameter.startswith(f"{key}_") for parameter in module._parameters):
                    return f"the weight {path!r} is computed. {_how_to_make_ordinary(module, key)}"
                return (
                    f"the attribute {path!r} holds a result of an earlier forward pass, with its gradient. Set it to "
                    f"None first (model.{path} = None), or keep it as .detach()"
                )
            if isinstance(error, TypeError) and not _can_be_copied(held):
                path = f"{name}.{key}".removeprefix(".")
                return (
                    f"the attribute {path!r} is a {type(held).__name__}, which copy.deepcopy refuses. Keep it outside "
                    "the model, or give its class a __deepcopy__"
                )
    return str(error).splitlines()[0]


def _can_be_copied(held: Any) -> bool:
    if isinstance(held, (Tensor, nn.Module)) or (isinstance(held, dict) and any(map(_is_part, held.values()))):
        return True  # parts of the model, which are looked through by themselves
    try:
        copy.deepcopy(held)
    except Exception:
        return False
    return True


def _is_part(held: Any) -> bool:
    return isinstance(held, (Tensor, nn.Module))


def _how_to_make_ordinary(module: nn.Module, key: str) -> str:
    """Each of PyTorch's functions that compute a weight keeps something of its own beside it."""
    if f"{key}_g" in module._parameters:
        return f"Call torch.nn.utils.remove_weight_norm(layer, {key!r}) first"
    if f"{key}_u" in module._buffers:
        return f"Call torch.nn.utils.remove_spectral_norm(layer, {key!r}) first"
    if f"{key}_mask" in module._buffers:
        return f"Call torch.nn.utils.prune.remove(layer, {key!r}) first; the zeros stay"
    return "Make it an ordinary parameter first, with the remove function of what computes it"


def ungated(model: nn.Module) -> nn.Module:
    """A copy with every gate multiplied into fresh weights; all other tensors are shared with the original."""
    plain = share_copy(model)
    check_weights({name: module for name, module in plain.named_modules() if has_gate(module)})
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


def with_vectors(model: nn.Module, weights: Weights) -> nn.Module:
    """A copy whose vectors, gates among them, have numbers if the weights have them; everything else is shared."""
    copied = share_copy(model)
    vectors = [(name, each) for name, each in named_tensors(copied) if each.dim() < 2 and not has_numbers(each)]
    made: dict[int, Tensor] = {}  # tied ones stay one tensor, and may be among the weights under one of their names
    for name, tensor in vectors:
        if name in weights and id(tensor) not in made:
            number = raw(weights, name, tensor)
            made[id(tensor)] = nn.Parameter(number) if isinstance(tensor, nn.Parameter) else number
    for name, tensor in vectors:
        if id(tensor) in made:
            put_tensor(copied, name, made[id(tensor)])
    _check_gates(copied)
    return copied


def gatings(model: nn.Module) -> dict[str, Gating]:
    """What the gates of a model do to its weights and biases, by name."""
    closed = closed_gates(model)
    found: dict[str, Gating] = {}
    for name, module in model.named_modules():
        if isinstance(module, GatedLayer):
            prefix = f"{name}." if name else ""
            rows, columns = closed[f"{prefix}weight"]
            outputs = columns if getattr(module, "transposed", False) else rows
            out, into = (None if gate is None else gate.final_value() for gate in (module.gate, module.gate_in))
            found[f"{prefix}weight"] = Gating(partial(module.scale_weight, out=out, into=into), (rows, columns))
            found[f"{prefix}bias"] = Gating(partial(_multiply_bias, module), (outputs, None))
    return found


def _multiply_bias(layer: GatedLayer, bias: Tensor) -> Tensor:
    return bias if layer.gate is None else bias * layer.gate.final_value().to(bias.dtype)


def _check_gates(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, Gate) and not has_numbers(module.final_value()):
            raise ValueError(
                f"the gate {name!r} has no numbers: it is on the meta device. Load the gates first "
                "(model.load_state_dict(gates, strict=False, assign=True)), or hand plan the weights that hold them"
            )


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
    out = None if layer.gate is None else layer.gate.final_value()
    into = None if layer.gate_in is None else layer.gate_in.final_value()
    if isinstance(layer.weight, Tensor) and not has_numbers(layer.weight):
        _merge_without_numbers_(layer, out)
        return
    weight, bias = layer.scaled(out, into)
    layer.__class__ = layer.plain_class  # type: ignore[assignment]
    del layer.gate, layer.gate_in
    for key, new in (("weight", weight), ("bias", bias)):
        old = layer._parameters.get(key)
        if old is not None and new is not None:
            layer._parameters[key] = nn.Parameter(new.detach().clone(), old.requires_grad)


def _merge_without_numbers_(layer: GatedLayer, out: Tensor | None) -> None:
    """The weight stays as it is, to be multiplied by whoever reads its numbers (``unknown.py``)."""
    layer.__class__ = layer.plain_class  # type: ignore[assignment]
    del layer.gate, layer.gate_in
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    layer.weight = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
    if bias is not None and out is not None and has_numbers(bias):
        layer.bias = nn.Parameter(bias.detach() * out.to(bias.dtype))
