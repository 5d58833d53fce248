"""Groups that a user lists: slices of parameters that one number multiplies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Literal

from torch import Tensor, nn

from narrowgate.groups import Family, Part
from narrowgate.swap import NORMS, has_gated_class, in_channels, is_turned, out_channels

Slice = tuple[str, int, Sequence[int]]
"""A parameter's name, an axis of it, and positions along that axis."""

Listed = Mapping[str, Iterable[Slice]]
Side = Literal["gate", "gate_in", "bias"]
Sides = dict[tuple[str, Side], dict[int, int]]
"""By layer and side of it, the number of the group of each position."""


def listed_groups(model: nn.Module, groups: Listed) -> Family:
    """The groups as one family, or an error that names what can't be multiplied or removed."""
    if not groups:
        raise ValueError("groups= lists no group; give each a name and a list of (parameter name, axis, positions)")
    sides: Sides = {}
    for number, (name, slices) in enumerate(groups.items()):
        for one in _slices(name, slices):
            _add(model, name, number, one, sides)
        if not any(number in taken.values() for taken in sides.values()):
            raise ValueError(f"group {name!r} is empty; list its (parameter name, axis, positions)")
    _check_biases(model, list(groups), sides)
    parts = [_part(model, layer, key, numbers) for (layer, key), numbers in sides.items() if key != "bias"]
    return Family("groups", tuple(groups), tuple(parts))


def _slices(name: str, slices: object) -> list[Slice]:
    if not isinstance(slices, Iterable) or isinstance(slices, str):
        raise TypeError(f"group {name!r} is {slices!r}; give a list of (parameter name, axis, positions)")
    return list(slices)


def _add(model: nn.Module, name: str, number: int, one: Slice, sides: Sides) -> None:
    try:
        parameter, axis, positions = one
        positions = list(positions)
        if any(_is_bool(position) for position in positions):
            raise TypeError("a mask is no list of positions")
        positions = [index(position) for position in positions]
        if not isinstance(parameter, str):
            raise TypeError(f"{parameter!r} is not a parameter's name")
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"group {name!r} lists {one!r}; a slice is (parameter name, axis, positions), positions being whole numbers"
        ) from error
    layer_name, _, key = parameter.rpartition(".")
    layer = _owner(model, name, parameter)
    side: Side = "bias" if key == "bias" else _side(name, layer, parameter, axis)
    if side == "bias" and axis != 0:
        raise ValueError(f"group {name!r}: {parameter!r} has the axis 0 only, got {axis}")
    size = in_channels(layer) if side == "gate_in" else out_channels(layer)
    taken = sides.setdefault((layer_name, side), {})
    for position in positions:
        if not 0 <= position < size:
            raise ValueError(f"group {name!r}: {parameter!r} has {size} positions along axis {axis}, got {position}")
        if position in taken:
            raise ValueError(f"group {name!r}: position {position} of {parameter!r}, axis {axis}, is listed twice")
        taken[position] = number


def _is_bool(position: object) -> bool:
    return isinstance(position, bool) or str(getattr(position, "dtype", "")).endswith("bool")


def _owner(model: nn.Module, group: str, parameter: str) -> nn.Module:
    """The layer that holds a parameter, if a gate can multiply it."""
    layer_name, _, key = parameter.rpartition(".")
    try:
        layer = model.get_submodule(layer_name)
    except AttributeError as error:
        raise ValueError(f"group {group!r}: {type(model).__name__} has no {parameter!r}") from error
    if not isinstance(layer._parameters.get(key), Tensor):
        raise ValueError(f"group {group!r}: {type(model).__name__} has no parameter {parameter!r}")
    if key not in ("weight", "bias") or not has_gated_class(layer):
        raise ValueError(
            f"group {group!r}: {parameter!r} is of a {type(layer).__name__}. Gates multiply the weight and bias of "
            "PyTorch's own convolutions, linear layers, BatchNorm, LayerNorm and GroupNorm; list those of a layer that "
            "writes or reads it"
        )
    if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) > 1:
        shape = tuple(layer.normalized_shape)
        raise ValueError(
            f"group {group!r}: {parameter!r} is of a LayerNorm over several axes, {shape}, which a gate multiplies as "
            "a whole only: choose it with blocks=, or list a layer that writes or reads it"
        )
    return layer


def _side(group: str, layer: nn.Module, parameter: str, axis: int) -> Side:
    """Whether an axis of a weight is the layer's outputs or inputs."""
    axes: dict[int, Side] = {0: "gate", 1: "gate_in"}
    if isinstance(layer, NORMS):
        axes = {0: "gate"}
    elif is_turned(layer):
        axes = {0: "gate_in", 1: "gate"}
    if axis not in axes:
        raise ValueError(f"group {group!r}: axis {axis} of {parameter!r} is neither its outputs nor its inputs")
    return axes[axis]


def _check_biases(model: nn.Module, names: list[str], sides: Sides) -> None:
    """Weight and bias of an output are multiplied together: a bias left out would stay when its group is closed."""
    for layer in dict.fromkeys(layer for layer, side in sides if side != "gate_in"):
        rows, biases = sides.get((layer, "gate"), {}), sides.get((layer, "bias"), {})
        if model.get_submodule(layer)._parameters.get("bias") is None or rows == biases:
            continue
        position, number = next(iter((rows.items() - biases.items()) or (biases.items() - rows.items())))
        missing = "bias" if (position, number) in rows.items() else "weight"
        raise ValueError(
            f"group {names[number]!r} has output {position} of layer {layer!r} without its {missing}; an output is "
            f"zero with both only: list {layer + '.' + missing!r} too"
        )


def _part(model: nn.Module, name: str, key: Literal["gate", "gate_in"], numbers: dict[int, int]) -> Part:
    layer = model.get_submodule(name)
    size = in_channels(layer) if key == "gate_in" else out_channels(layer)
    return Part(name, layer, key, tuple(numbers.get(i, -1) for i in range(size)))
