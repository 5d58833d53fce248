"""Rules for pooling, padding, reductions and others that keep channels apart but not positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Node

from narrowgate.flow.analysis import Flow, wall_rule
from narrowgate.flow.movement import arg, shape_of
from narrowgate.flow.pointwise import pointwise
from narrowgate.flow.state import PINNED, Mask, State, Values, labelled, rounded, unlabelled
from narrowgate.flow.trace import layer_of, op_name


def spatial(flow: Flow, node: Node) -> None:
    """Pooling and resizing: channels pass; a constant stays one unless a zero border or a ceiling mixes in."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    name = op_name(node)
    kept = len(state.shape) - _spatial_dims(name)
    if state.axis is not None and state.axis >= kept:
        wall_rule(flow, node, "its channels are among the pooled axes")
        return
    values = state.values
    if name.startswith("avg_pool"):
        ceiling, counts_padding = bool(arg(node, 4, "ceil_mode", False)), bool(arg(node, 5, "count_include_pad", True))
        divisor = arg(node, 6, "divisor_override")
        if ceiling or divisor is not None or (counts_padding and np.any(arg(node, 3, "padding", 0))):
            values = np.where(values == 0, 0.0, np.nan)
    shapes = node.meta["val"]
    if isinstance(shapes, (tuple, list)):  # max_pool with indices
        parts = [like(state, tuple(int(s) for s in v.shape), values) for v in shapes]
        parts[1] = like(state, parts[1].shape, np.full_like(values, np.nan))

        def backward(live: Any) -> None:
            for one in live:
                flow.mark(read, one)

        flow.put(node, parts, backward)
        return
    put_per_channel(flow, node, read, like(state, shape_of(node), values))


def grid_sample(flow: Flow, node: Node) -> None:
    """Each channel is read at places that another tensor tells; beyond the border is zero, so zero alone stays."""
    read, grid = (flow.reads(node, source) for source in node.args[:2])
    state = flow.state(read)
    if state.axis not in (1, None):
        wall_rule(flow, node, "its channels are elsewhere")
        return
    flow.wall(node, [grid], "its last axis is the places")
    result = like(state, shape_of(node), np.where(state.values == 0, 0.0, np.nan))

    def backward(live: Mask) -> None:
        needed = live & result.varies
        flow.mark(read, needed)
        flow.mark(grid, bool(needed.any()))

    flow.put(node, result, backward)


def pad(flow: Flow, node: Node) -> None:
    """A constant survives if the border has the same value; on the channel axis, more channels stand beside them."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    amounts: Any = node.args[1]
    axes = [len(state.shape) - 1 - i // 2 for i in range(len(amounts))]
    padded = {axis for axis, amount in zip(axes, amounts, strict=True) if amount}
    mode = arg(node, 2, "mode", "constant") if op_name(node) == "pad" else "constant"
    fill = arg(node, 3, "value", 0.0) if op_name(node) == "pad" else arg(node, 2, "value", 0.0)
    fill = float(rounded(np.array([float(fill or 0.0)]), node.meta["val"].dtype)[0])
    values = state.values
    # Nobody writes zeros alone: they were computed, and may be more at another image size, as where sizes become even.
    if mode == "constant" and (padded or set(axes)) - {state.axis}:
        values = np.where(values == fill, values, np.nan)
    if state.axis in padded:
        first = 2 * (len(state.shape) - 1 - state.axis)
        _pad_channels(flow, node, read, values, amounts[first : first + 2], fill, mode == "constant")
    else:
        put_per_channel(flow, node, read, like(state, shape_of(node), values))


def _pad_channels(
    flow: Flow, node: Node, read: Node, values: Values, amounts: list[int], fill: float, constant: bool
) -> None:
    """Channels of one known number before and behind the others, as in a ResNet's shortcut without weights."""
    state = flow.state(read)
    if not constant or min(amounts) < 0 or state.axis is None:
        wall_rule(flow, node, "it pads the channel axis")
        return
    before, after = amounts
    labels = np.pad(state.labels, (before, after), constant_values=PINNED)
    result = labelled(shape_of(node), state.axis, labels, np.pad(values, (before, after), constant_values=fill))

    def backward(live: Mask) -> None:
        flow.mark(read, (live & result.varies)[before : before + len(values)])

    flow.put(node, result, backward)


def extreme(flow: Flow, node: Node) -> None:
    """max and min, of one tensor or of two."""
    two = len(node.args) > 1 and isinstance(node.args[1], Node)
    (pointwise if two else reduction)(flow, node)


def reduction(flow: Flow, node: Node) -> None:
    """mean, sum, amax, …: free over other axes; over the channel axis a wall, unless some channels add nothing."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    rank = len(state.shape)
    dims = arg(node, 2 if "norm" in op_name(node) else 1, "dim")
    dims = None if isinstance(dims, bool) else dims  # var(x, unbiased)
    dims = list(range(rank)) if not dims and dims != 0 else [dims] if isinstance(dims, int) else list(dims)
    dims = [int(d) % rank for d in dims] if rank else []
    name = op_name(node)
    if state.axis in dims:
        _over_channels(flow, node, read, state)
        return
    value = node.meta["val"]
    several = not isinstance(value, Tensor)
    results = [
        _reduced(state, tuple(int(size) for size in one.shape), dims, _reduced_values(name, state.values, i))
        for i, one in enumerate(value if several else [value])
    ]

    def backward(live: Any) -> None:
        for one, result in zip(live if several else [live], results, strict=True):
            flow.mark(read, one & result.varies)

    flow.put(node, results if several else results[0], backward)


def _over_channels(flow: Flow, node: Node, read: Node, state: State) -> None:
    """Some constants can go without being missed; not while training, when any of them may become the largest."""
    told = _told_of_constants(node, state) if flow.closed is None else None
    if told is None:
        counts = any(word in op_name(node) for word in ("mean", "var", "std"))
        wall_rule(flow, node, "it divides by the number of channels" if counts else "it reduces over channels")
        return
    flow.pin(state.labels[told], f"for constants that {op_name(node)} in {layer_of(node)} reads")
    value = node.meta["val"]
    shapes = [tuple(int(size) for size in one.shape) for one in ([value] if isinstance(value, Tensor) else value)]
    results = [unlabelled(shape) for shape in shapes]

    def backward(live: Any) -> None:
        flow.mark(read, state.varies & any(np.any(one) for one in live))

    flow.put(node, results[0] if isinstance(value, Tensor) else results, backward)


def _told_of_constants(node: Node, state: State) -> Mask | None:
    """Constants that the result tells of: in a sum or norm all but zeros, of a maximum the largest; None for others."""
    name, known = op_name(node), ~state.varies
    if name == "sum" or (name in ("norm", "linalg_vector_norm") and _ignores_zeros(arg(node, 1, "ord", 2))):
        told: Mask = known & (state.values != 0)
        return told
    if name not in ("amax", "amin", "max", "min") or _tells_where(node):
        return None
    heights = np.where(known, -state.values if name in ("amin", "min") else state.values, -np.inf)
    told = known & (np.arange(len(known)) == heights.argmax())
    return told


def _ignores_zeros(order: Any) -> bool:
    """Whether a norm of this order is the same without channels of zeros; None is the second."""
    return order is None or (isinstance(order, (int, float)) and order > 0)


def _tells_where(node: Node) -> bool:
    """Whether someone asks which channel the largest is."""
    return any(user.args[1] != 0 and user.users for user in node.users if op_name(user) == "getitem")


def _reduced(state: State, shape: tuple[int, ...], dims: list[int], values: Values) -> State:
    if state.axis is None:
        return unlabelled(shape, float(values[0]))
    axis = state.axis if len(shape) == len(state.shape) else state.axis - sum(d < state.axis for d in dims)
    return labelled(shape, axis, state.labels, values)


def _reduced_values(name: str, values: Values, part: int) -> Values:
    """What is left of constants: in the first result of an operation, or in another one."""
    if name in ("mean", "amax", "amin") or (name, part) in _KEEPS_CONSTANTS:
        return values
    if name == "sum":  # of a constant, it depends on the size of the image or the batch
        return np.where(values == 0, 0.0, np.nan)
    return np.full_like(values, np.nan)


def along_one_axis(flow: Flow, node: Node) -> None:
    """softmax, cumsum: positions along one axis depend on each other; channels along another pass."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    rank = len(state.shape)
    if state.axis is not None and int(arg(node, 1, "dim")) % rank == state.axis:
        wall_rule(flow, node, "it runs along the channel axis")
        return
    put_per_channel(flow, node, read, like(state, shape_of(node), np.full_like(state.values, np.nan)))


def dropout(flow: Flow, node: Node) -> None:
    """The identity in eval mode; in training a zero stays zero, but not in alpha dropout, and all else is random.

    A constant that a model in training has is what it is on average: cut, the run is alike, as with a norm's shift.
    """
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    alpha = "alpha" in op_name(node)
    if not arg(node, 2, "train", False) or (flow.closed is not None and not alpha):
        values = state.values
    else:
        values = np.where((state.values == 0) & (not alpha), 0.0, np.nan)
    put_per_channel(flow, node, read, like(state, shape_of(node), values))


def fresh(flow: Flow, node: Node) -> None:
    """zeros, ones, full, arange, …: no channels, and one known number where it is one."""
    name = op_name(node)
    fill = {"zeros": 0.0, "new_zeros": 0.0, "ones": 1.0, "new_ones": 1.0}.get(name)
    flow.put(node, unlabelled(shape_of(node), float("nan") if fill is None else fill), lambda live: None)


def fresh_like(flow: Flow, node: Node) -> None:
    """zeros_like, ones_like: one known number, in as many channels as there are in what it is like."""
    state = flow.state(flow.reads(node, node.args[0]))
    fill = 0.0 if op_name(node) == "zeros_like" else 1.0
    flow.put(node, like(state, shape_of(node), np.full_like(state.values, fill)), lambda live: None)


def random_like(flow: Flow, node: Node) -> None:
    """rand_like, bernoulli_, …: what training draws may be drawn for fewer channels; in eval mode it stays the same."""
    if flow.closed is None or node.all_input_nodes != [node.args[0]]:  # torch.normal(mean, deviation) reads both
        wall_rule(flow, node)
        return
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    put_per_channel(flow, node, read, like(state, shape_of(node), np.full_like(state.values, np.nan)))


def nothing(flow: Flow, node: Node) -> None:
    """Assertions: they compute nothing."""
    flow.put(node, unlabelled(()), lambda live: None)


def put_per_channel(flow: Flow, node: Node, read: Node, result: State) -> None:
    """Record a result whose channels are made of one channel each."""

    def backward(live: Mask) -> None:
        flow.mark(read, live & result.varies)

    flow.put(node, result, backward)


def like(state: State, shape: tuple[int, ...], values: Values) -> State:
    """A state of another shape and other values with the same channels along the same axis."""
    if state.axis is None:
        return unlabelled(shape, float(values[0]))
    return labelled(shape, state.axis, state.labels, values)


def _spatial_dims(name: str) -> int:
    return next((dims for dims in (1, 2, 3) if f"{dims}d" in name), 1 if "linear1d" in name else 2)


_KEEPS_CONSTANTS = {("max", 0), ("min", 0), ("var_mean", 1), ("std_mean", 1)}
_POOLING = [f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for d in (1, 2, 3)]
_POOLING += [f"{name}_with_indices" for name in _POOLING if name.startswith("max")]
_RESIZING = "nearest1d nearest2d nearest3d linear1d bilinear2d bicubic2d trilinear3d".split()
_NEWER_RESIZING = "nearest_exact1d nearest_exact2d nearest_exact3d bilinear2d_aa bicubic2d_aa".split()

RULES: dict[str, Callable[[Flow, Node], None]] = {
    **dict.fromkeys(_POOLING, spatial),
    **dict.fromkeys((f"upsample_{name}" for name in _RESIZING), spatial),
    **dict.fromkeys((f"_upsample_{name}" for name in _NEWER_RESIZING), spatial),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), grid_sample),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys("mean sum amax amin var std var_mean std_mean".split(), reduction),
    **dict.fromkeys("logsumexp norm linalg_vector_norm".split(), reduction),
    **dict.fromkeys(("max", "min"), extreme),
    **dict.fromkeys("softmax _softmax log_softmax _log_softmax cumsum".split(), along_one_axis),
    **dict.fromkeys("dropout feature_dropout alpha_dropout feature_alpha_dropout".split(), dropout),
    **dict.fromkeys("zeros new_zeros ones new_ones new_empty arange full eye linspace".split(), fresh),
    **dict.fromkeys(("zeros_like", "ones_like"), fresh_like),
    **dict.fromkeys("rand_like randn_like empty_like full_like bernoulli uniform normal".split(), random_like),
    **dict.fromkeys("_assert_tensor_metadata _assert_async sym_size".split(), nothing),
}
