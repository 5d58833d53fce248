"""Put gates on one layer, and take them off again.

A layer whose ``forward`` is PyTorch's own gets a gated class. A subclass with a ``forward`` of its own, or a whole
block, gets a forward hook that multiplies its output instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from narrowgate import gated
from narrowgate.dtensors import is_sharded
from narrowgate.gated import GatedLayer
from narrowgate.gates import Gate, LinearGate

_SWAPS: dict[type[nn.Module], type[GatedLayer]] = {
    cls.plain_class: cls
    for cls in (
        gated.GatedConv1d,
        gated.GatedConv2d,
        gated.GatedConv3d,
        gated.GatedConvTranspose1d,
        gated.GatedConvTranspose2d,
        gated.GatedConvTranspose3d,
        gated.GatedLinear,
        gated.GatedOutProjection,
        gated.GatedLayerNorm,
        gated.GatedGroupNorm,
        gated.GatedBatchNorm1d,
        gated.GatedBatchNorm2d,
        gated.GatedBatchNorm3d,
    )
}

# Other libraries' norms that do what PyTorch's do, in training mode too, and the class that gates each.
KNOWN_NORMS: dict[str, type[GatedLayer]] = {
    "torchvision.models.convnext.LayerNorm2d": gated.GatedLayerNorm2d,
    "timm.layers.norm.LayerNorm": gated.GatedLayerNorm,
    "timm.layers.norm.LayerNorm2d": gated.GatedLayerNorm2d,
    "timm.layers.norm.GroupNorm": gated.GatedGroupNorm,
}
_GATED_NORMS: dict[type[nn.Module], type[GatedLayer]] = {}
NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)
_CONV1D = "transformers.pytorch_utils.Conv1D"


LEAVE_OUT = "leave it out with where="


def check_gate_fits(
    name: str, layer: nn.Module, key: str, keep_function: bool = False, remedy: str = LEAVE_OUT
) -> None:
    """Raise unless ``gate_layer_`` can put a gate on this layer; ``key`` is "gate" or "gate_in"."""
    if getattr(layer, key, None) is not None:
        raise ValueError(f"layer {name!r} already has a gate (or an attribute {key!r}); {remedy}")
    if has_lazy_weights(layer):
        raise ValueError(f"layer {name!r} has no weights yet; run the model once on an example before gating it")
    if any(is_sharded(parameter) for parameter in layer.parameters(recurse=False)):
        raise ValueError(f"layer {name!r} is sharded already; attach gates before fully_shard")
    swapped = _gated_class(layer)
    if swapped is None and keep_function:
        raise ValueError(
            f"layer {name!r} is a {type(layer).__name__}, gated at its output: keep_function can't serve it; {remedy}"
        )
    if key == "gate_in":
        if swapped is None or isinstance(layer, NORMS):
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}: input gates serve plain convolutions and nn.Linear only"
            )
        if getattr(layer, "groups", 1) != 1:
            raise ValueError(f"layer {name!r} has groups={layer.groups}: input gates need groups=1; gate its producer")
    elif swapped is None and isinstance(layer, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"layer {name!r} is a {type(layer).__name__}, which goes through its own children and would meet the gate "
            "there; put the gate on a layer inside it"
        )


def gate_layer_(layer: nn.Module, key: str, gate: Gate) -> None:
    """Put a gate on a layer in place; ``check_gate_fits`` must have passed."""
    swapped = _gated_class(layer)
    if swapped is None:
        layer.register_module("gate", gate)
        layer.register_forward_hook(_scale_output)
        return
    layer.__class__ = swapped
    for each in ("gate", "gate_in"):
        if each not in layer._modules:
            layer.register_module(each, None)
    layer.register_module(key, gate)


def _gated_class(layer: nn.Module) -> type[GatedLayer] | None:
    """The class that gates this layer's weight, or None where that would not reach what it computes."""
    if isinstance(layer, GatedLayer):
        return type(layer)
    if "forward" in layer.__dict__ or not isinstance(layer._parameters.get("weight"), nn.Parameter):
        return None  # a forward put on the instance, or a weight made anew for every call (weight_norm, prune)
    name = full_name(type(layer))
    if name in KNOWN_NORMS:
        return _gated_norm(type(layer))
    return _gated_conv1d() if name == _CONV1D else _SWAPS.get(type(layer))


def _gated_norm(plain: type[nn.Module]) -> type[GatedLayer]:
    """A class of its own for another library's norm, which merging makes it again."""
    if plain not in _GATED_NORMS:
        gives = KNOWN_NORMS[full_name(plain)]
        _GATED_NORMS[plain] = type(f"Gated{plain.__name__}", (gives, plain), {"plain_class": plain})
    return _GATED_NORMS[plain]


def _gated_conv1d() -> type[GatedLayer]:
    from narrowgate.gated_conv1d import GatedConv1D

    return GatedConv1D


def is_conv1d(layer: nn.Module) -> bool:
    """Whether this is GPT-2's Conv1D, gated or not; transformers need not be there to ask."""
    return any(full_name(cls) == _CONV1D for cls in type(layer).__mro__)


def is_turned(layer: nn.Module) -> bool:
    """Whether a layer's weight is (in, out)."""
    return bool(getattr(layer, "transposed", False)) or is_conv1d(layer)


def full_name(cls: type) -> str:
    """A class by module and name, which tells it from its namesakes."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _scale_output(module: nn.Module, args: Any, output: Any) -> Tensor:
    gate = cast(Gate, module.gate)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"a gate sits on the output of a {type(module).__name__}, which returned {type(output).__name__}, not a "
            "tensor; put the gate on a layer inside it"
        )
    return output * gate.value().to(output.dtype).view(-1, *[1] * _dims_after_channels(module, output))


def _dims_after_channels(module: nn.Module, output: Tensor) -> int:
    if isinstance(module, _ConvNd):
        return len(module.kernel_size)
    return output.dim() - 2 if isinstance(module, _BatchNorm) else 0


def has_lazy_weights(layer: nn.Module) -> bool:
    """Whether a layer waits for its first input to make its weights."""
    return any(isinstance(parameter, UninitializedParameter) for parameter in layer.parameters(recurse=False))


def out_channels(layer: nn.Module) -> int:
    """A layer's number of output channels."""
    if isinstance(layer, NORMS):
        return cast(Tensor, layer.weight).numel()
    if is_conv1d(layer):
        return cast(int, layer.nf)
    return cast(int, layer.out_channels if hasattr(layer, "out_channels") else layer.out_features)


def in_channels(layer: nn.Module) -> int:
    """A layer's number of input channels."""
    if is_conv1d(layer):
        return cast(int, layer.nx)
    return cast(int, layer.in_channels if hasattr(layer, "in_channels") else layer.in_features)


def has_gated_class(layer: nn.Module) -> bool:
    """Whether a gate on this layer multiplies its weight and bias, and not its output."""
    return _gated_class(layer) is not None


def can_merge(module: nn.Module) -> bool:
    """Whether a gated layer's gates can go into its weights."""
    return isinstance(module, GatedLayer) or isinstance(module._modules.get("gate"), LinearGate)


MAKE_ORDINARY = (
    "make it an ordinary one first, with torch.nn.utils.parametrize.remove_parametrizations or the remove function of "
    "what computes it"
)


def check_weights(gated: Mapping[str, nn.Module]) -> None:
    """Raise if something put over a layer since computes the weight that its gate is to be multiplied into."""
    if computed := [name for name, layer in gated.items() if can_merge(layer) and "weight" not in layer._parameters]:
        raise ValueError(
            f"the weight of {', '.join(computed)} is computed, as by weight_norm, spectral_norm or prune, and can't "
            f"take a gate in: {MAKE_ORDINARY}"
        )


def tied_to_gated(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that a gated layer shares with another: they were tied after it got its gates."""
    names: dict[int, list[str]] = {}
    gated: set[int] = set()
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{prefix}.{key}" if prefix else key)
                gated |= {id(parameter)} if isinstance(module, GatedLayer) else set()
    return [found for each, found in names.items() if each in gated and len(found) > 1]


def why_tied(names: list[str]) -> str:
    """What to say of a parameter with these names."""
    return (
        f"{', '.join(names)} are one parameter, which the gates of one layer multiply alone: tie weights "
        "before attach_gates_, which leaves such layers out"
    )


def merge_layer_(layer: nn.Module) -> None:
    """Multiply a layer's final gate values into its weight and bias, and make it an ordinary layer again."""
    if not isinstance(layer, GatedLayer):  # a linear gate is the weight already
        del layer.gate
        return
    out = None if layer.gate is None else layer.gate.final_value()
    into = None if layer.gate_in is None else layer.gate_in.final_value()
    _rescale_(layer, out, into)
    del layer.gate, layer.gate_in
    cast(nn.Module, layer).__class__ = layer.plain_class


def divide_by_gate_(layer: nn.Module, gate: Gate) -> None:
    """Divide a layer's weight by one of its gates, so that gating it did not change what it computes."""
    assert isinstance(layer, GatedLayer)
    inverse = 1 / gate.final_value()
    _rescale_(layer, inverse if gate is layer.gate else None, inverse if gate is layer.gate_in else None)


@torch.no_grad()
def _rescale_(layer: GatedLayer, out: Tensor | None, into: Tensor | None) -> None:
    scaled = layer.scaled(out, into)
    for old, new in zip((layer._parameters["weight"], layer._parameters["bias"]), scaled, strict=True):
        if old is not None and new is not None:
            old.copy_(new)
