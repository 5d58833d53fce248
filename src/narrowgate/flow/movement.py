"""Rules for operations that move data without computing: views, permutations, concatenation, slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.fx import Node

from narrowgate.flow.analysis import Flow, wall_rule
from narrowgate.flow.geometry import Sources, follow, permutation
from narrowgate.flow.state import PINNED, Mask, State, labelled, unlabelled
from narrowgate.flow.trace import op_name


def arg(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def shape_of(node: Node) -> tuple[int, ...]:
    """The shape of a node's result."""
    return tuple(int(size) for size in node.meta["val"].shape)


def moved(flow: Flow, node: Node, read: Node, axis: int | None, sources: Sources | None, *, pin: bool = False) -> State:
    """The state of a result whose channel axis is ``axis``, made from input positions ``sources``; identity if None."""
    state = flow.state(read)
    shape = shape_of(node)
    if axis is None or state.axis is None:
        if state.axis is not None and len(state.labels) > 1:
            flow.wall(node, [read], "it takes the channel axis apart")
        return unlabelled(shape, float(state.values[0]) if len(state.values) == 1 else float("nan"))
    if sources is None:
        return labelled(shape, axis, state.labels, state.values)
    if pin:
        flow.wall(node, [read], "it counts on the number of channels")
        labels = np.full(len(sources), PINNED)
    else:
        labels = state.labels[sources[:, 0]]
        for column in range(1, sources.shape[1]):
            flow.tie(labels, state.labels[sources[:, column]])
    picked = state.values[sources]
    same = (picked == picked[:, :1]).all(1)
    return labelled(shape, axis, labels, np.where(same, picked[:, 0], np.nan))


def back_to(flow: Flow, read: Node, state: State, sources: Sources | None) -> Callable[[Mask], None]:
    """Liveness through a movement: what a result position was made of is read if that position is."""

    def backward(live: Mask) -> None:
        before = flow.states[read]
        if not isinstance(before, State) or state.axis is None or before.axis is None:
            flow.mark(read, bool(live.any()))
        elif sources is None:
            flow.mark(read, live)
        else:
            mask = np.zeros(len(before.labels), bool)
            mask[sources[live]] = True
            flow.mark(read, mask)

    return backward


def put_moved(flow: Flow, node: Node, axis: int | None, sources: Sources | None, *, pin: bool = False) -> None:
    read = flow.reads(node, node.args[0])
    state = moved(flow, node, read, axis, sources, pin=pin)
    flow.put(node, state, back_to(flow, read, state, sources))


def reshape(flow: Flow, node: Node) -> None:
    """View, flatten, squeeze, …: anything that keeps the elements in order."""
    state = flow.state(flow.reads(node, node.args[0]))
    if state.axis is None:
        put_moved(flow, node, None, None)
        return
    axis, sources = follow(state.shape, state.axis, shape_of(node), flow.by_head.get(node))
    put_moved(flow, node, axis, sources)
    if sources is not None and sources.shape[1] > 1:
        flow.splits.append((node, flow.state(node)))


def permute(flow: Flow, node: Node) -> None:
    state = flow.state(flow.reads(node, node.args[0]))
    order = permutation(node, len(state.shape))
    put_moved(flow, node, None if state.axis is None else order.index(state.axis), None)


def expand(flow: Flow, node: Node) -> None:
    state = flow.state(flow.reads(node, node.args[0]))
    shape = shape_of(node)
    axis = None if state.axis is None else state.axis + len(shape) - len(state.shape)
    if axis is not None and shape[axis] != len(state.labels):
        axis = None
    put_moved(flow, node, axis, None)


def expand_as(flow: Flow, node: Node) -> None:
    """What is repeated along another tensor's channels has channels like those: each is all that there was."""
    read, other = (flow.reads(node, source) for source in node.args[:2])
    state, like = flow.state(read), flow.state(other)
    shape = shape_of(node)
    axis = like.axis
    if axis is None or state.axis is not None or read in flow.spreads or _covers(state.shape, shape, axis):
        expand(flow, node)
        return
    result = labelled(shape, axis, like.labels, np.full(len(like.labels), state.values[0]))
    flow.put(node, result, lambda live: flow.mark(read, bool((live & result.varies).any())))


def _covers(before: tuple[int, ...], after: tuple[int, ...], axis: int) -> bool:
    """Whether a tensor already had its full size along an axis of what it is expanded to."""
    own = axis - (len(after) - len(before))
    return own >= 0 and before[own] == after[axis]


def repeat(flow: Flow, node: Node) -> None:
    state = flow.state(flow.reads(node, node.args[0]))
    shape = shape_of(node)
    if state.axis is None:
        put_moved(flow, node, None, None)
        return
    axis = state.axis + len(shape) - len(state.shape)
    times = shape[axis] // len(state.labels)
    sources = np.tile(np.arange(len(state.labels)), times)[:, None]
    put_moved(flow, node, axis, None if times == 1 else sources)


def getitem(flow: Flow, node: Node) -> None:
    read = flow.reads(node, node.args[0])
    index = node.args[1]
    parts = flow.states[read]
    assert isinstance(parts, list) and isinstance(index, int)
    if not isinstance(node.meta["val"], Tensor):  # a list in a list
        wall_rule(flow, node)
        return

    def backward(live: Mask) -> None:
        flow.live[read][index] |= live

    flow.put(node, parts[index], backward)


def cat(flow: Flow, node: Node) -> None:
    """Along the channel axis the parts' channels stand side by side; along another axis they are coupled."""
    parts: Any = node.args[0]
    shape = shape_of(node)
    dim = int(arg(node, 1, "dim", 0)) % len(shape)
    reads = [flow.reads(node, part) for part in parts if part.meta["val"].numel()]
    states = [flow.state(read) for read in reads]
    if any(len(state.shape) != len(shape) for state in states):
        wall_rule(flow, node)
        return
    if all(state.axis in (dim, None) for state in states):
        _cat_channels(flow, node, reads, states, dim)
        return
    axes = {state.axis for state in states}
    if len(axes) > 1:
        wall_rule(flow, node, "its parts carry channels along different axes")
        return
    axis = states[0].axis
    assert axis is not None
    values = states[0].values
    for state in states[1:]:
        flow.tie(states[0].labels, state.labels)
        values = np.where(values == state.values, values, np.nan)
    result = labelled(shape, axis, states[0].labels, values)

    def backward(live: Mask) -> None:
        for read in reads:
            flow.mark(read, live & result.varies)

    flow.put(node, result, backward)


def _cat_channels(flow: Flow, node: Node, reads: list[Node], states: list[State], dim: int) -> None:
    sizes = [state.shape[dim] for state in states]
    labels = [s.labels if s.axis == dim else np.full(n, PINNED) for s, n in zip(states, sizes, strict=True)]
    values = [state.along(dim) for state in states]
    result = labelled(shape_of(node), dim, np.concatenate(labels), np.concatenate(values))

    def backward(live: Mask) -> None:
        for read, state, part in zip(reads, states, np.split(live, np.cumsum(sizes)[:-1]), strict=True):
            flow.mark(read, part if state.axis == dim else bool(part.any()))

    flow.put(node, result, backward)


def stack(flow: Flow, node: Node) -> None:
    """A new axis; the parts' channels are coupled."""
    parts: Any = node.args[0]
    shape = shape_of(node)
    dim = int(arg(node, 1, "dim", 0)) % len(shape)
    reads = [flow.reads(node, part) for part in parts]
    states = [flow.state(read) for read in reads]
    first = states[0]
    if any(state.axis != first.axis for state in states):
        wall_rule(flow, node, "its parts carry channels along different axes")
        return
    values = first.values
    for state in states[1:]:
        flow.tie(first.labels, state.labels)
        values = np.where(values == state.values, values, np.nan)
    if first.axis is None:
        result = unlabelled(shape, float(values[0]))
    else:
        result = labelled(shape, first.axis + (dim <= first.axis), first.labels, values)

    def backward(live: Mask) -> None:
        for read in reads:
            flow.mark(read, live & result.varies)

    flow.put(node, result, backward)


def pixel_shuffle(flow: Flow, node: Node) -> None:
    """Groups of r * r channels become one and stay or go together; unshuffling makes r * r of each."""
    state = flow.state(flow.reads(node, node.args[0]))
    axis = len(state.shape) - 3
    if state.axis != axis:
        wall_rule(flow, node)
        return
    area = int(node.args[1]) ** 2  # type: ignore[arg-type]
    channels = np.arange(len(state.labels))
    shuffles = op_name(node) == "pixel_shuffle"
    put_moved(flow, node, axis, channels.reshape(-1, area) if shuffles else np.repeat(channels, area)[:, None])


def channel_shuffle(flow: Flow, node: Node) -> None:
    """Channels change places by their number in their group, so that all groups keep the same ones."""
    state = flow.state(flow.reads(node, node.args[0]))
    if state.axis not in (1, None):
        wall_rule(flow, node)
        return
    if state.axis is None:
        put_moved(flow, node, None, None)
        return
    groups = int(arg(node, 1, "groups"))
    first, *others = state.labels.reshape(groups, -1)
    for other in others:
        flow.tie(first, other)
    put_moved(flow, node, 1, np.arange(len(state.labels)).reshape(groups, -1).T.reshape(-1, 1))


RULES: dict[str, Callable[[Flow, Node], None]] = {
    **dict.fromkeys("view view_as reshape reshape_as _unsafe_view _reshape_alias".split(), reshape),
    **dict.fromkeys("flatten unflatten squeeze unsqueeze".split(), reshape),
    **dict.fromkeys("permute transpose t numpy_T mT movedim swapaxes".split(), permute),
    **dict.fromkeys(("expand", "broadcast_to"), expand),
    "expand_as": expand_as,
    **dict.fromkeys("cat concat concatenate".split(), cat),
    "stack": stack,
    "repeat": repeat,
    "getitem": getitem,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_shuffle,
    "channel_shuffle": channel_shuffle,
}
