"""All gates of a model in a few large operations instead of several small ones a layer.

A forward pre-hook on the model computes every gated weight ahead and leaves it with its layer; a layer that is called
by itself, compiled, exported, checkpointed or sharded computes its own. Both ways do the same multiplications.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgate.dtensors import is_gathered
from narrowgate.gated import (
    PREPARED,
    GatedConv1d,
    GatedConv2d,
    GatedConv3d,
    GatedLayer,
    GatedLinear,
    _GatedBatchNorm,
    autocast_dtype,
    saves_are_watched,
)
from narrowgate.gates import ExponentialGate, Gate, GroupGate, exponential_gate

_ATTRIBUTE = "_narrowgate_layers"
_ALIGNMENT = 16
_CASTS_UNDER_AUTOCAST = (GatedConv1d, GatedConv2d, GatedConv3d, GatedLinear)


def prepare_gates_together_(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Make this model's forward compute the weights of all these layers at once."""
    if _ATTRIBUTE not in model.__dict__:
        model.__dict__[_ATTRIBUTE] = {}
        model.register_forward_pre_hook(_before)
        model.register_forward_hook(_after, always_call=True)
    model.__dict__[_ATTRIBUTE].update(layers)


def forget_prepared_gates_(module: nn.Module) -> None:
    """Undo ``prepare_gates_together_``."""
    if module.__dict__.pop(_ATTRIBUTE, None) is None:
        return
    pre_hooks, hooks = cast(dict[int, Any], module._forward_pre_hooks), cast(dict[int, Any], module._forward_hooks)
    for registered, ours in ((pre_hooks, _before), (hooks, _after)):
        for key in [key for key, hook in registered.items() if hook is ours]:
            del registered[key]
            module._forward_hooks_always_called.pop(key, None)


def nan_message(layers: list[str]) -> str:
    """What to say when gate parameters are NaN."""
    return (
        f"gate parameters of {', '.join(layers)} contain NaN: training diverged. Go back to the last good checkpoint "
        "and lower the learning rate or the penalty's strength"
    )


def _before(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling() or getattr(model, "_is_replica", False) or saves_are_watched():
        return
    layers: dict[str, nn.Module] = model.__dict__[_ATTRIBUTE]
    ready = {name: cast(GatedLayer, layer) for name, layer in list(layers.items()) if _is_simple(layer)}
    if ready:
        _prepare(ready)


def _after(model: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    layers: dict[str, nn.Module] = model.__dict__[_ATTRIBUTE]
    idle = {name: layer for name, layer in list(layers.items()) if _is_ours(layer.__dict__.pop(PREPARED, None))}
    # output is None after an exception, and auxiliary heads idle in eval mode: neither means anything.
    if not idle or output is None or not model.training:
        return
    for name in idle:  # from now on they compute their own, and get no gradient when they are not called
        layers.pop(name, None)
    _warn_of_replaced(model, idle)
    eager = set(_modules_outside_compiled_ones(model))
    if unused := [name for name, layer in idle.items() if layer in eager]:
        warnings.warn(
            f"the gates on {', '.join(unused)} have no effect: the model did not call these layers in this training "
            "step. If it uses their weights directly, leave them out with where=",
            stacklevel=2,
        )


def _is_ours(prepared: Any) -> bool:
    """Whether a weight was prepared, and by this thread: another's model may not have come to the layer yet."""
    return prepared is not None and prepared[1][0] == get_ident()


def _warn_of_replaced(model: nn.Module, idle: dict[str, nn.Module]) -> None:
    """Name layers that were replaced by others which hold their gate but do not know it."""
    present = set(model.modules())
    if lost := [
        name for name, layer in idle.items() if layer not in present and _only_gate(cast(GatedLayer, layer)) in present
    ]:
        warnings.warn(
            f"the gates on {', '.join(lost)} have no effect: other layers stand in the place of those that had them, "
            "as after nn.SyncBatchNorm.convert_sync_batchnorm. Replace layers first, then call attach_gates_",
            stacklevel=3,
        )


def _modules_outside_compiled_ones(module: nn.Module) -> Iterator[nn.Module]:
    forward = module.__dict__.get("forward")
    if module._compiled_call_impl is None and not hasattr(forward, "_torchdynamo_orig_callable"):
        yield module
        for name, child in module._modules.items():
            if child is not None and name != "_orig_mod":  # torch.compile's wrapper keeps the module under that name
                yield from _modules_outside_compiled_ones(child)


def _is_simple(layer: nn.Module) -> bool:
    """One exponential gate on an axis of a plain parameter, its own or shared: what the batched computation covers."""
    if not isinstance(layer, (*_CASTS_UNDER_AUTOCAST, _GatedBatchNorm)) or (layer.gate is None) == (
        layer.gate_in is None
    ):
        return False
    weight, gate = layer._parameters.get("weight"), _only_gate(layer)
    return (
        weight is not None
        and type(gate.own) is ExponentialGate
        and gate.size == weight.shape[0 if layer.gate_in is None else 1]
        and type(weight) is nn.Parameter
        and type(gate.own.g) is nn.Parameter
        and not layer._forward_pre_hooks
        and not is_gathered(layer, weight)  # fully_shard reduces a block's gradients when the block's own backward ends
    )


def _only_gate(layer: GatedLayer) -> Gate:
    """The gate of a layer that has one."""
    return cast(Gate, layer.gate_in if layer.gate is None else layer.gate)


def _prepare(layers: dict[str, GatedLayer]) -> None:
    values = _Values(layers)
    for layer in layers.values():
        if (
            layer.gate is None
        ):  # columns of different layers can't be stacked; their gates' values come together at least
            layer.__dict__[PREPARED] = layer.scaled(None, values.of([layer])), layer.stamp()
    _prepare_rows({name: layer for name, layer in layers.items() if layer.gate is not None}, values)


def _prepare_rows(layers: dict[str, GatedLayer], values: _Values) -> None:
    # Rows (output channels) of equal length are stacked, so that one multiplication serves many layers. Frozen ones lie
    # apart: beside others their outputs would call for gradients, which then go through layers that need none.
    stacks: dict[Any, list[tuple[GatedLayer, Tensor]]] = {}
    for layer in layers.values():
        for key in ("weight", "bias"):
            tensor = layer._parameters.get(key)
            if tensor is not None:
                half = autocast_dtype(tensor) if isinstance(layer, _CASTS_UNDER_AUTOCAST) else None
                rows = _rows(tensor)
                trains = tensor.requires_grad or _only_gate(layer).own.learns
                alike = (key, rows.shape[1], tensor.dtype, tensor.device, half, trains)
                stacks.setdefault(alike, []).append((layer, rows))
    made: dict[int, dict[str, Tensor]] = {id(layer): {} for layer in layers.values()}
    for (key, _, dtype, _, half, _), members in stacks.items():
        factor = values.of([layer for layer, _ in members]).to(dtype)
        scaled = torch.cat([rows for _, rows in members]) * factor[:, None]
        if half is not None:  # casting the whole stack saves autocast a kernel a layer
            scaled = scaled.to(half)
        pieces = torch.split(scaled, [rows.shape[0] for _, rows in members])
        for (layer, _), piece in zip(members, pieces, strict=True):
            made[id(layer)][key] = _unrows(_aligned(piece), cast(Tensor, layer._parameters[key]))
    for layer in layers.values():
        layer.__dict__[PREPARED] = (made[id(layer)]["weight"], made[id(layer)].get("bias")), layer.stamp()


def _aligned(piece: Tensor) -> Tensor:
    """A piece that starts where a tensor of its own could: cuDNN's norms read 16 bytes at once, wherever it starts."""
    if piece.device.type == "cuda" and piece.storage_offset() * piece.element_size() % _ALIGNMENT:
        return piece.clone()
    return piece


class _Values:
    """The gate values of layers, computed in one go per device and dtype, and those of frozen gates apart."""

    def __init__(self, layers: dict[str, GatedLayer]) -> None:
        groups: dict[Any, dict[str, GatedLayer]] = {}
        for name, layer in layers.items():
            gate = _only_gate(layer)
            g = gate.own.g
            groups.setdefault((g.device, g.dtype, g.requires_grad, gate.own is gate), {})[name] = layer
        self._whole: dict[tuple[int, ...], Tensor] = {}
        self._pieces: dict[int, Tensor] = {}
        for members in groups.values():
            self._compute(members)

    def of(self, layers: list[GatedLayer]) -> Tensor:
        """The values of these layers, one after the other."""
        # The whole in its own order needs no pieces, each of which costs an operation more in the backward pass.
        whole = self._whole.get(tuple(id(layer) for layer in layers))
        if whole is not None or len(layers) == 1:
            return self._pieces[id(layers[0])] if whole is None else whole
        return torch.cat([self._pieces[id(layer)] for layer in layers])

    def _compute(self, members: dict[str, GatedLayer]) -> None:
        gates = {id(layer): _only_gate(layer) for layer in members.values()}
        numbers = {id(gate.own): gate.own.g for gate in gates.values()}
        flat = torch.cat(list(numbers.values()))
        if flat.device.type == "cpu" and bool(flat.detach().sum().isnan()):
            raise ValueError(
                nan_message([name for name, each in members.items() if gates[id(each)].own.g.isnan().any()])
            )
        whole = exponential_gate(flat)
        values = dict(zip(numbers, torch.split(whole, [g.numel() for g in numbers.values()]), strict=True))
        for layer, gate in gates.items():
            value = values[id(gate.own)]
            self._pieces[layer] = gate.spread(value) if isinstance(gate, GroupGate) else value
        if not any(isinstance(gate, GroupGate) for gate in gates.values()):
            self._whole[tuple(gates)] = whole


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() > 2 and tensor.stride(1) == 1 and tensor.stride(2) != 1


def _rows(tensor: Tensor) -> Tensor:
    """A parameter as (output channels, the rest), without a copy for channels_last weights too."""
    if _is_channels_last(tensor):
        tensor = tensor.movedim(1, -1)
    return tensor.reshape(tensor.shape[0], -1)


def _unrows(rows: Tensor, like: Tensor) -> Tensor:
    if _is_channels_last(like):
        return rows.view(like.shape[0], *like.shape[2:], like.shape[1]).movedim(-1, 1)
    return rows.view(like.shape)
