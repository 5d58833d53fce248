"""Rules for layers whose weight is (in, out): transposed convolutions, and linear layers as GPT-2 has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.fx import Node

from narrowgate.flow.analysis import Flow, Mixer, wall_rule
from narrowgate.flow.mixing import backward_of, editable, outputs, parameter_names, pin_inputs, why_not
from narrowgate.flow.movement import arg, shape_of
from narrowgate.flow.state import Mask, State, labelled
from narrowgate.flow.trace import layer_of


def transposed_convolution(flow: Flow, node: Node) -> None:
    """Its borders overlap fewer kernels, so a non-zero constant never stays one; otherwise like a convolution."""
    names = parameter_names(flow, node)
    if names is None:
        wall_rule(flow, node, why_not(node))
        return
    groups = int(arg(node, 6, "groups", 1))
    weight = flow.tensors[names[0]]
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    axis = len(state.shape) - (weight.dim() - 1)
    if groups == 1:
        _turned(flow, node, names, read, axis, foldable=False)
    elif state.axis == axis and weight.shape[:2] == (groups, 1):
        _transposed_depthwise(flow, node, names, read)
    elif state.axis == axis and flow.closed is None and names[0] not in flow.numbers.missing:
        _transposed_groups(flow, node, names, read, groups)
    else:
        wall_rule(flow, node, "it has groups" if flow.closed is None else "it has groups, and the model trains")


def _transposed_depthwise(flow: Flow, node: Node, names: tuple[str, str | None], read: Node) -> None:
    """Each channel by itself, as in a norm: zero, or a weight of zero, leaves the bias."""
    weight, bias = names
    state = flow.state(read)
    for name in names:
        if name is not None:
            flow.tie(state.labels, flow.labels_of(name, 0))
    known = state.values == 0
    if flow.closed is None and weight not in flow.numbers.missing:
        known = known | ~flow.nonzero(weight).any(1)
    shift = 0.0 if bias is None else flow.tensors[bias].detach().double().cpu().numpy()
    result = State(shape_of(node), state.axis, state.labels, np.where(known, shift, np.nan))
    flow.put(node, result, lambda live: flow.mark(read, live & result.varies))


def _transposed_groups(flow: Flow, node: Node, names: tuple[str, str | None], read: Node, groups: int) -> None:
    """Each group reads its own inputs: where they or their weights are zero the bias is left, other constants stay."""
    weight, bias = names
    state, shape = flow.state(read), shape_of(node)
    assert state.axis is not None
    labels = flow.grouped_labels_of(weight, shape[state.axis])
    flow.tie(state.labels, flow.labels_of(weight, 0))
    if bias is not None:
        flow.tie(labels, flow.labels_of(bias, 0))
    flow.equal_counts += [state.labels.reshape(groups, -1), labels.reshape(groups, -1)]
    nonzero = flow.nonzero(weight).reshape(groups, -1, len(labels) // groups).transpose(0, 2, 1)
    values = outputs(flow, weight, bias, nonzero, state.values, foldable=False, shared=True, transposed=True)
    result = labelled(shape, state.axis, labels, values)
    constants = ~state.varies & (state.values != 0)

    def backward(live: Mask) -> None:
        columns = (nonzero & (live & result.varies).reshape(groups, -1, 1)).any(1).reshape(-1)
        flow.pin(state.labels[columns & constants], f"for a constant that {layer_of(node)} reads")
        flow.mark(read, columns)

    flow.put(node, result, backward)


def turned_linear(flow: Flow, node: Node) -> None:
    """addmm(bias, x, weight): a linear layer whose weight is (in, out), as GPT-2's Conv1D has it."""
    sources: Any = node.args
    bias, weight = (flow.graph.tensors.get(sources[i]) for i in (0, 2))
    written = {bias, weight} & set(flow.graph.written.values())
    if bias is None or weight is None or written or node.kwargs or flow.resolve(sources[2]) is not sources[2]:
        wall_rule(flow, node, "its weight is computed, not a parameter")
        return
    if flow.tensors[bias].shape != flow.tensors[weight].shape[1:]:
        wall_rule(flow, node, "what it adds is no bias")
        return
    _turned(flow, node, (weight, bias), flow.reads(node, sources[1]), 1, foldable=True)


def _turned(flow: Flow, node: Node, names: tuple[str, str | None], read: Node, axis: int, foldable: bool) -> None:
    """A layer whose weight is (in, out, ...); constants can become its bias if ``foldable``."""
    weight_name, bias_name = names
    state = flow.state(read)
    if state.axis == axis:
        flow.tie(state.labels, flow.labels_of(weight_name, 0))
    else:
        pin_inputs(flow, node, read, weight_name, 0)
    nonzero = flow.nonzero(weight_name).T[None]
    inputs = state.along(axis)
    shared = not editable(flow, node, weight_name, bias_name)
    values = outputs(flow, weight_name, bias_name, nonzero, inputs, foldable, shared, transposed=True)
    result = labelled(shape_of(node), axis, flow.labels_of(weight_name, 1), values)
    if bias_name is not None:
        flow.tie(flow.labels_of(bias_name, 0), result.labels)
    seen_as = state if state.axis == axis else State(state.shape, axis, np.zeros(len(inputs), np.int64), inputs)
    zero, folds = ~nonzero.any(2).reshape(-1), foldable and not shared
    mixer = Mixer(node, layer_of(node), weight_name, bias_name, 1, 1, seen_as, result, folds, shared, zero, values)
    flow.mixers.append(mixer)
    flow.put(node, result, backward_of(flow, mixer, read, nonzero))


RULES: dict[str, Callable[[Flow, Node], None]] = {
    **dict.fromkeys("conv_transpose1d conv_transpose2d conv_transpose3d".split(), transposed_convolution),
    "addmm": turned_linear,
}
