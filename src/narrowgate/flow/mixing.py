"""Rules for layers with weights across channels: convolutions, linear layers, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd

from narrowgate.flow.analysis import Flow, Mixer, wall_rule
from narrowgate.flow.borders import padded_constants, sums_of_others
from narrowgate.flow.movement import arg, shape_of
from narrowgate.flow.state import Mask, State, Values, labelled, rounded
from narrowgate.flow.trace import layer_of, op_name

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
_CODE = ("forward", "_conv_forward")  # the methods that say what a layer computes
_METHODS = [[getattr(layer, name, None) for name in _CODE] for layer in _LAYERS]


def convolution(flow: Flow, node: Node) -> None:
    """conv1d/2d/3d and linear: y = W x + b over channels, whatever the kernel does in space."""
    linear = op_name(node) == "linear"
    names = parameter_names(flow, node)
    if names is None:
        wall_rule(flow, node, why_not(node))
        return
    weight_name, bias_name = names
    weight = flow.tensors[weight_name].detach()
    groups = 1 if linear else int(arg(node, 6, "groups", 1))
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    shape = shape_of(node)
    axis = len(state.shape) - 1 if linear else len(state.shape) - (weight.dim() - 1)
    out_axis = len(shape) - 1 if linear else axis
    _tie_inputs(flow, node, read, state, axis, weight_name, groups)

    nonzero = flow.nonzero(weight_name).reshape(groups, -1, weight.shape[1])  # group, output, input
    inputs = state.along(axis)
    foldable = linear or _unpadded(arg(node, 4, "padding", 0), weight.shape[2:])
    shared = not editable(flow, node, weight_name, bias_name)
    values = outputs(flow, weight_name, bias_name, nonzero, inputs, foldable, shared)
    result = labelled(shape, out_axis, flow.labels_of(weight_name, 0), values)
    if bias_name is not None:
        flow.tie(flow.labels_of(bias_name, 0), result.labels)
    seen_as = state if state.axis == axis else State(state.shape, axis, np.zeros(len(inputs), np.int64), inputs)
    zero = ~nonzero.any(2).reshape(-1)
    stand_in = values if foldable or shared else _beside_borders(flow, node, names, nonzero, inputs, values)
    foldable = foldable and not shared
    mixer = Mixer(
        node, layer_of(node), weight_name, bias_name, groups, 0, seen_as, result, foldable, shared, zero, stand_in
    )
    flow.mixers.append(mixer)
    merges = foldable and groups == 1 and state.axis == axis and weight.dtype in (torch.float32, torch.float64)
    flow.put(node, result, backward_of(flow, mixer, read, nonzero, flow.borders.get(read) if merges else None))


def embedding(flow: Flow, node: Node) -> None:
    """Rows are looked up, columns are channels."""
    source: Any = node.args[0]
    name = flow.graph.tensors.get(source)
    if name is None:
        wall_rule(flow, node)
        return
    table = flow.tensors[name].detach()
    same = (table == table[:1]).all(0).cpu().numpy()
    stays = flow.closed is None and name not in flow.graph.written.values()
    values = np.where(same & stays, table[0].double().cpu().numpy(), np.nan)
    shape = shape_of(node)
    flow.pin(flow.labels_of(name, 0), f"for the rows of {layer_of(node)}")
    places = flow.reads(node, node.args[1])
    flow.wall(node, [places], "it looks up all that it is given")
    result = labelled(shape, len(shape) - 1, flow.labels_of(name, 1), values)
    flow.put(node, result, lambda live: flow.mark(places, bool((live & result.varies).any())))


def why_not(node: Node) -> str:
    if _is_empty(node):
        return "its weight has no numbers"
    if _is_vector(node):
        return "its weight is a vector"
    if _is_complex(node):
        return "its numbers are complex"
    return "what it adds is no bias" if _adds_other(node) else "its weight is computed, not a parameter"


def _is_vector(node: Node) -> bool:
    """Whether it is F.linear with one weight for each input channel, which leaves no axis for its result."""
    return bool(arg(node, 1, "weight").meta["val"].dim() < 2)


def _is_empty(node: Node) -> bool:
    return not arg(node, 1, "weight").meta["val"].numel()


def _is_complex(node: Node) -> bool:
    return bool(node.meta["val"].is_complex())


def _adds_other(node: Node) -> bool:
    """Whether it is F.linear with anything but one number for each output channel."""
    weight, bias = arg(node, 1, "weight"), arg(node, 2, "bias")
    return bias is not None and op_name(node) == "linear" and bias.meta["val"].shape != weight.meta["val"].shape[:1]


def parameter_names(flow: Flow, node: Node) -> tuple[str, str | None] | None:
    """The names of weight and bias, or None where one is not a parameter of the model itself, or is of an odd kind."""
    if _is_empty(node) or _is_complex(node) or _is_vector(node) or _adds_other(node):
        return None
    weight, bias = arg(node, 1, "weight"), arg(node, 2, "bias")
    names: list[str | None] = []
    for source in (weight, bias):
        if source is None:
            names.append(None)
            continue
        name = flow.graph.tensors.get(source)
        if name is None or flow.resolve(source) is not source or name in flow.graph.written.values():
            return None
        names.append(name)
    assert names[0] is not None
    if flow.uses[names[0]] > 1:  # what else reads it may find a zero in all of a kernel's places
        for axis in range(2, flow.tensors[names[0]].dim()):
            flow.pin(flow.labels_of(names[0], axis), f"for the kernel of {layer_of(node)}")
    return names[0], names[1]


def editable(flow: Flow, node: Node, weight: str, bias: str | None) -> bool:
    """Whether this operation alone reads its weights, they are saved, and a bias is there or can be added."""
    if any(flow.uses[name] > 1 or not is_saved(flow, name) for name in (weight, bias) if name is not None):
        return False
    owner = flow.modules.get(layer_of(node))
    if bias is not None:
        return True
    if not isinstance(owner, (_ConvNd, nn.Linear)) or owner.weight is not flow.tensors[weight]:
        return False
    # Code of the user's own may not read the bias that would be added.
    return [getattr(type(owner), name, None) for name in _CODE] in _METHODS and not is_patched(owner)


def is_patched(layer: nn.Module) -> bool:
    """Whether code of the user's was put on a layer in place of its class's."""
    return not vars(layer).keys().isdisjoint(_CODE)


def is_saved(flow: Flow, name: str) -> bool:
    """Whether a tensor belongs in a file: an edit of one that is made anew when the model is loaded would be lost."""
    owner, _, key = name.rpartition(".")
    return key not in flow.modules[owner]._non_persistent_buffers_set


def _tie_inputs(flow: Flow, node: Node, read: Node, state: State, axis: int, weight: str, groups: int) -> None:
    """Couple the input's channels with the weight's input axis; with groups, also with its outputs."""
    layer = layer_of(node)
    rows = flow.labels_of(weight, 0)
    if state.axis != axis:
        pin_inputs(flow, node, read, weight, 1)
        if groups > 1:
            flow.pin(rows, f"for the groups of {layer}")
    elif groups == 1:
        flow.tie(state.labels, flow.labels_of(weight, 1))
    elif groups == len(state.labels):  # depthwise: each input channel has output channels of its own
        flow.tie(np.repeat(state.labels, len(rows) // groups), rows)
    else:
        flow.tie(state.labels, flow.grouped_labels_of(weight, len(state.labels)))
        flow.equal_counts.append(state.labels.reshape(groups, -1))
        flow.equal_counts.append(rows.reshape(groups, -1))


def pin_inputs(flow: Flow, node: Node, read: Node, weight: str, axis: int) -> None:
    """Hold a layer whose input has no channels, or has them along another axis."""
    flow.wall(node, [read], "its input carries channels along another axis")
    flow.pin(flow.labels_of(weight, axis), f"for the input of {layer_of(node)}")


def _unpadded(padding: Any, kernel: tuple[int, ...]) -> bool:
    if isinstance(padding, str):
        return padding == "valid" or all(size == 1 for size in kernel)
    return not np.any(padding)


def outputs(
    flow: Flow,
    weight_name: str,
    bias_name: str | None,
    nonzero: Mask,
    inputs: Values,
    foldable: bool,
    shared: bool,
    transposed: bool = False,
) -> Values:
    """Each output channel's constant, or NaN where it varies.

    A layer used twice sees two inputs and has one weight, and another's bias can't be changed: there, only zeros that
    come in are known, since they leave nothing to add.
    Padding is decided by rule: a non-zero constant next to a zero border varies, at any image size.
    """
    groups, rows, columns = nonzero.shape
    if shared:
        inputs = np.where(inputs == 0, 0.0, np.nan)
    grouped = inputs.reshape(groups, 1, columns)
    varying = np.isnan(grouped)
    if not foldable and (transposed or flow.constants == "exact"):
        varying = varying | (grouped != 0)
    depends = nonzero.any(2) if varying.all() else (nonzero & varying).any(2)
    constants = np.where(varying, 0.0, grouped)
    if flow.constants == "drop":
        constants = np.zeros_like(constants)
    values = np.zeros((groups, rows))
    if constants.any():
        weight = flow.tensors[weight_name].detach().double()
        weight = (weight.transpose(0, 1) if transposed else weight).reshape(groups * rows, columns, -1).sum(2)
        values = (weight.cpu().numpy().reshape(groups, rows, columns) * constants).sum(2)
    result: Values = values.reshape(-1)
    if bias_name is not None:
        result = result + flow.tensors[bias_name].detach().double().cpu().numpy()
    return np.where(depends.reshape(-1), np.nan, rounded(result, flow.tensors[weight_name].dtype))


def _beside_borders(
    flow: Flow, node: Node, names: tuple[str, str | None], nonzero: Mask, inputs: Values, values: Values
) -> Values:
    """The constants of a padded convolution, with the number inside for outputs that read constants only."""
    if flow.constants != "exact" or flow.closed is not None:
        return values
    groups, _, columns = nonzero.shape
    reads_varying = (nonzero & np.isnan(inputs).reshape(groups, 1, columns)).any(2).reshape(-1)
    weight, bias = (None if name is None else flow.tensors[name].detach() for name in names)
    assert weight is not None
    geometry = arg(node, 4, "padding", 0), arg(node, 5, "dilation", 1)
    found = padded_constants(weight, bias, inputs, np.isnan(values) & ~reads_varying, geometry)
    if found is None:
        return values
    flow.borders[node] = found
    return np.where(np.isnan(values), found[0], values)


def backward_of(
    flow: Flow, mixer: Mixer, read: Node, nonzero: Mask, table: Values | None = None
) -> Callable[[Mask], None]:
    groups, rows, _ = nonzero.shape
    along = flow.state(read).axis == mixer.inputs.axis  # else no column of the weight is one of its channels

    def backward(live: Mask) -> None:
        needed = live & mixer.output.varies
        mixer.needed_rows = needed
        columns = nonzero.any(1) if needed.all() else (nonzero & needed.reshape(groups, rows, 1)).any(1)
        mixer.live_columns = columns.reshape(-1).copy()
        if table is not None:
            mixer.merged = sums_of_others(table, mixer.live_columns)
            mixer.live_columns[list(mixer.merged)] = False
        flow.mark(read, mixer.live_columns if along else bool(mixer.live_columns.any()))

    return backward


RULES: dict[str, Callable[[Flow, Node], None]] = {
    **dict.fromkeys("conv1d conv2d conv3d linear".split(), convolution),
    "embedding": embedding,
}
