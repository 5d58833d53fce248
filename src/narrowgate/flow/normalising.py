"""Rules for norms, and for PReLU, whose slopes are a vector over channels like a norm's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn.modules.instancenorm import _InstanceNorm

from narrowgate.flow.analysis import Across, Flow, wall_rule
from narrowgate.flow.borders import through
from narrowgate.flow.mixing import is_patched
from narrowgate.flow.movement import arg, shape_of
from narrowgate.flow.pooling import like, put_per_channel
from narrowgate.flow.state import PINNED, Mask, State, Values, labelled, unlabelled
from narrowgate.flow.trace import layer_of, op_name
from narrowgate.swap import KNOWN_NORMS, full_name

# Norms of which it is known that they do no more, in training mode too.
_NARROWED = {*KNOWN_NORMS, *map(full_name, (nn.LayerNorm, nn.GroupNorm))}
_COMPUTED = "its scale or shift is computed, not a parameter"


def batch_norm(flow: Flow, node: Node) -> None:
    """One affine map a channel; a constant goes through it, and a scale of 0 leaves the shift alone."""
    result = _batch_norm(flow, node, node.meta["val"], bool(arg(node, 5, "training")), float(arg(node, 7, "eps")))
    if result is not None:
        put_per_channel(flow, node, flow.reads(node, node.args[0]), result)


def batch_norm_functional(flow: Flow, node: Node) -> None:
    """BatchNorm in eval mode as functionalised graphs have it: a tuple whose first part is the result."""
    parts = [tuple(int(s) for s in v.shape) for v in node.meta["val"]]
    result = _batch_norm(flow, node, node.meta["val"][0], False, float(arg(node, 6, "eps")))
    if result is None:
        return
    read, varies = flow.reads(node, node.args[0]), result.varies

    def backward(live: Any) -> None:
        flow.mark(read, live[0] & varies)

    flow.put(node, [result, *(unlabelled(shape) for shape in parts[1:])], backward)


def _batch_norm(flow: Flow, node: Node, out: Tensor, training: bool, eps: float) -> State | None:
    """The result of a BatchNorm, or None where it is a wall; couples its four vectors with the channels."""
    state = flow.state(flow.reads(node, node.args[0]))
    names = [_name(flow, arg(node, i, "")) for i in range(1, 5)]
    if state.axis not in (1, None) or _computed(flow, node, range(1, 5)):
        wall_rule(flow, node, "its statistics are computed, or its channels are elsewhere")
        return None
    labels = state.labels if state.axis == 1 else np.full(state.shape[1], PINNED)
    for name in names:
        if name is not None and state.axis == 1:
            flow.tie(labels, flow.labels_of(name, 0))
        elif name is not None:
            flow.pin(flow.labels_of(name, 0), f"for the input of {layer_of(node)}")
    scale = _scale(flow, names[0], state.shape[1])
    shift, mean, variance = (_vector(flow, name, state.shape[1]) for name in names[1:])
    values = state.along(1)
    frozen = layer_of(node) in flow.frozen_norms or flow.graph.train  # there, the operation itself says so
    kinds = out.dtype, next((flow.tensors[name].dtype for name in names if name is not None), out.dtype)
    if training or (flow.closed is not None and not frozen) or mean is None or variance is None:
        values = _affine(np.where(np.isnan(values), np.nan, 0.0), scale, shift)  # a constant minus its own mean
    elif flow.closed is not None:  # what varies may learn a scale of 0 away; a constant is what it is now
        now = _vector(flow, names[0], state.shape[1])
        now = None if now is None or scale is None else np.where(np.isnan(values), scale, now)
        values = _standardise(values, (mean, variance, now, shift), eps, kinds)
    else:
        vectors = (mean, variance, scale, shift)
        values = _standardise(values, vectors, eps, kinds)
        read = flow.reads(node, node.args[0])
        values = through(flow, node, read, values, lambda table: _standardise(table, vectors, eps, kinds))
    return labelled(tuple(int(size) for size in out.shape), 1, labels, values)


def instance_norm(flow: Flow, node: Node) -> None:
    """Like BatchNorm in training: each channel minus its own mean."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    names = [_name(flow, arg(node, i, "")) for i in range(1, 5)]
    if _computed(flow, node, range(1, 5)):
        wall_rule(flow, node, _COMPUTED)
        return
    if state.axis != 1 or not arg(node, 5, "use_input_stats"):
        wall_rule(flow, node)
        return
    for name in names:
        if name is not None:
            flow.tie(state.labels, flow.labels_of(name, 0))
    if not any(names) and isinstance(flow.modules.get(layer_of(node)), _InstanceNorm):
        flow.bare_norms[layer_of(node)] = state.labels
    values = np.where(np.isnan(state.values), np.nan, 0.0)
    values = _affine(values, _scale(flow, names[0], len(values)), _vector(flow, names[1], len(values)))
    put_per_channel(flow, node, read, labelled(shape_of(node), 1, state.labels, values))


def norm_across_channels(flow: Flow, node: Node) -> None:
    """LayerNorm, GroupNorm: every channel is part of the mean, so none can go; a scale of 0 still stops one."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    shape = shape_of(node)
    layer = op_name(node) in ("layer_norm", "rms_norm")
    axis = len(shape) - 1 if layer else 1
    normalised: Any = node.args[1]
    if _computed(flow, node, (2, 3)):
        wall_rule(flow, node, _COMPUTED)
        return
    if layer and state.axis is not None and state.axis < len(shape) - len(normalised):
        _norm_beside_channels(flow, node, read, state)
        return
    if layer and len(normalised) != 1:
        wall_rule(flow, node)
        return
    names = [_name(flow, arg(node, i, "")) for i in (2, 3)]
    if state.axis == axis and (place := _place_of_channels(flow, node, names, axis)) is not None:
        _norm_that_counts(flow, node, read, names, place)
        return
    flow.wall(node, [read], "a norm across channels counts every one of them")
    for name in names:
        if name is not None:
            flow.pin(flow.labels_of(name, 0), f"for the channels of {layer_of(node)}")
    size = shape[axis]
    values = _affine(np.full(size, np.nan), _scale(flow, names[0], size), _vector(flow, names[1], size))
    result = labelled(shape, axis, np.full(size, PINNED), values)

    def backward(live: Mask) -> None:
        flow.mark(read, bool((live & result.varies).any()))

    flow.put(node, result, backward)


def _norm_that_counts(flow: Flow, node: Node, read: Node, names: list[str | None], place: int) -> None:
    """Every channel is part of the mean; one that is zero, or a constant, may be counted without being there."""
    state, weight = flow.state(read), str(names[0])
    for name in names:
        if name is not None:
            flow.tie(state.labels, flow.labels_of(name, 0))
    size = len(state.labels)
    groups = int(arg(node, 1, "num_groups")) if op_name(node) == "group_norm" else 1
    flow.across[layer_of(node)] = Across(node, weight, state.labels, state.values, place, groups)
    values = _affine(np.full(size, np.nan), _scale(flow, names[0], size), _vector(flow, names[1], size))
    result = labelled(shape_of(node), int(state.axis or 0), state.labels, values)

    def backward(live: Mask) -> None:
        flow.mark(read, bool((live & result.varies).any()))

    flow.put(node, result, backward)


def _place_of_channels(flow: Flow, node: Node, names: list[str | None], axis: int) -> int | None:
    """Where a norm's module has its channels, if it may be narrowed: a module that does this and no more."""
    layer = layer_of(node)
    owner = flow.modules.get(layer)
    if not flow.narrow_norms or not isinstance(owner, nn.Module) or full_name(type(owner)) not in _NARROWED:
        return None
    vectors = [owner._parameters.get("weight"), owner._parameters.get("bias")]
    own = [None if name is None else flow.tensors[name] for name in names]
    alone = all(name is None or flow.uses[name] == 1 for name in names) and layer not in flow.across
    if (
        is_patched(owner)
        or vectors[0] is None
        or not alone
        or any(a is not b for a, b in zip(vectors, own, strict=True))
    ):
        return None
    inside = [other for other in flow.graph.nodes if other.op == "call_function" and layer_of(other) == layer]
    turns = [other for other in inside if op_name(other) == "permute"]
    if len(inside) == 1:
        return axis if op_name(node) == "group_norm" else -1
    if len(inside) != 3 or len(turns) != 2 or inside[1] is not node:
        return None
    first, last = ([int(i) % len(shape_of(node)) for i in arg(turn, 1, "dims")] for turn in turns)
    back = [first[i] for i in last] == list(range(len(first)))
    return first[-1] if back else None


def _norm_beside_channels(flow: Flow, node: Node, read: Node, state: State) -> None:
    """LayerNorm over other axes than that of the channels, as over the width of each head: every one is by itself."""
    for name in (_name(flow, arg(node, i, "")) for i in (2, 3)):
        if name is not None:
            for axis in range(flow.tensors[name].dim()):
                flow.pin(flow.labels_of(name, axis), f"for {layer_of(node)}")
    put_per_channel(flow, node, read, like(state, shape_of(node), np.full_like(state.values, np.nan)))


def prelu(flow: Flow, node: Node) -> None:
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    name = _name(flow, node.args[1])
    if name is None or (state.axis is not None and state.axis != 1):
        wall_rule(flow, node)
        return
    slopes = flow.tensors[name].detach().double().cpu().numpy().reshape(-1)  # F.prelu takes a bare number, too
    if name in flow.graph.written.values():
        slopes = np.full_like(slopes, np.nan)
    if state.axis is None:
        if len(slopes) > 1:
            flow.pin(flow.labels_of(name, 0), f"for the input of {layer_of(node)}")
        put_per_channel(flow, node, read, unlabelled(shape_of(node)))
        return
    if len(slopes) > 1:
        flow.tie(state.labels, flow.labels_of(name, 0))
    values = np.where(state.values < 0, state.values * slopes, state.values)
    put_per_channel(flow, node, read, labelled(shape_of(node), 1, state.labels, values))


def _name(flow: Flow, source: Any) -> str | None:
    return flow.graph.tensors.get(source) if isinstance(source, Node) else None


def _computed(flow: Flow, node: Node, places: Iterable[int]) -> bool:
    """Whether one of a norm's vectors is no parameter or buffer of the model itself."""
    vectors = [arg(node, i, "") for i in places]
    return any(isinstance(vector, Node) and vector not in flow.graph.tensors for vector in vectors)


def _scale(flow: Flow, name: str | None, size: int) -> Values | None:
    """A norm's scale; while training, one that is zero is about to learn, unless a gate says that it is final."""
    scale = _vector(flow, name, size)
    rows, _ = (flow.closed or {}).get(str(name), (None, None))
    if scale is not None and rows is not None:
        scale = np.where(rows, 0.0, scale)
    if scale is None or flow.can_be_zero(str(name)):
        return scale
    return np.where(scale == 0, 1.0, scale)


def _vector(flow: Flow, name: str | None, size: int) -> Values | None:
    if name is None:
        return None
    vector = flow.tensors[name].detach().to(torch.float64).cpu().numpy()
    assert vector.shape == (size,), (name, vector.shape, size)
    return np.full(size, np.nan) if name in flow.graph.written.values() else vector


def _standardise(
    values: Values, vectors: tuple[Values | None, ...], eps: float, kinds: tuple[torch.dtype, torch.dtype]
) -> Values:
    """BatchNorm of constants, by PyTorch's own kernel in the model's precision; a scale of 0 leaves the shift.

    ``kinds`` are the precisions of what it norms and of its vectors, which may be single where that is half.
    """
    dtype, own = kinds
    mean, variance, scale, shift = (None if v is None else torch.from_numpy(v).to(own) for v in vectors)
    x = torch.from_numpy(np.ascontiguousarray(values)).to(dtype).reshape(-1, values.shape[-1])
    result = torch.nn.functional.batch_norm(x, mean, variance, scale, shift, eps=eps).double().numpy()
    result = result.reshape(values.shape)
    result = np.where(np.isnan(values), np.nan, result)
    if vectors[2] is None:
        return result
    return np.where(vectors[2] == 0, 0.0 if vectors[3] is None else vectors[3], result)


def _affine(values: Values, scale: Values | None, shift: Values | None) -> Values:
    if scale is not None:
        values = np.where(scale == 0, 0.0, values * scale)
    return values if shift is None else values + shift


RULES: dict[str, Callable[[Flow, Node], None]] = {
    "batch_norm": batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm_functional,
    "instance_norm": instance_norm,
    **dict.fromkeys(("layer_norm", "group_norm", "rms_norm"), norm_across_channels),
    "prelu": prelu,
}
