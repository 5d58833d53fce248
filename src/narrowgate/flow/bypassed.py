"""Gates that a model goes round: it reads a gated layer's weight itself, where the gate does not multiply it."""

from __future__ import annotations

from torch import nn

from narrowgate.direct import reads_gated
from narrowgate.flow.trace import Graph, TraceError, layer_of, op_name
from narrowgate.gated import GatedLayer


def refuse_bypassed_gates(model: nn.Module, plain: nn.Module, graph: Graph) -> None:
    """Raise if a gated layer's weight or bias is read by anything but the layer: no one weight would serve both."""
    plain_modules = dict(plain.named_modules(remove_duplicate=False))
    for name, layer in model.named_modules():
        if not isinstance(layer, GatedLayer):
            continue
        owner = plain_modules[name]
        parent = name.rpartition(".")[0]
        for key in ("weight", "bias") if layer.gate is not None else ("weight",):
            tensor = f"{name}.{key}".removeprefix(".")
            for node in graph.readers.get(tensor, ()):
                where = layer_of(node)
                inside = plain_modules.get("" if where == "the model itself" else where)
                served = inside is plain_modules[parent] and reads_gated(model.get_submodule(parent))
                if inside is not owner and not served:
                    raise TraceError(_message(name, tensor, where, op_name(node)))


def _message(layer: str, tensor: str, where: str, op: str) -> str:
    if layer.endswith("_orig_mod"):
        wrapper = layer.rpartition(".")[0]
        return (
            f"torch.compile wraps {wrapper!r}, a single layer with a gate: its call can't be told from {where} reading "
            "its weight, which would go round the gate. Put the layer itself there to plan, or compile the module that "
            "it is in"
        )
    return (
        f"the gate on {layer!r} does not reach {where}, which reads {tensor!r} itself ({op}): with the gate multiplied "
        "into the weight it would compute something else. Let it call the layer (not in a branch of torch.cond, where "
        "calls can't be told from reads), or leave the layer without a gate: attach_gates_(..., where=...)"
    )
