"""Rules for code that takes parts of a tensor: chunk, split, slices, and the gated linear unit.

Equal parts may shrink as long as they stay equal: ``x.chunk(2, 1)`` cuts wherever the middle is. Whether the code says
"half" or "64" is not in the graph; the replay finds out, and what is written as a number stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from narrowgate.flow.analysis import Flow, wall_rule
from narrowgate.flow.movement import arg, put_moved, shape_of
from narrowgate.flow.state import PINNED, Labels, Mask, State, labelled, unlabelled
from narrowgate.flow.trace import op_name

_NAMES = {"split_with_sizes": "split", "chunk": "split", "split": "split", "slice": "slice", "narrow": "slice"}


def kind_of_split(name: str) -> str | None:
    """Which operations do the same to shapes, whatever they are called in a graph and in a run; None for others."""
    return _NAMES.get(name)


def sliced(shape: tuple[int, ...], start: int, whole: bool) -> tuple[Any, ...]:
    """What a slice made of a tensor: its shape and its first position; nothing if it is all of it."""
    return () if whole else (*shape, f"from {start}")


def asked_for(tensor: Tensor, index: Any) -> Iterator[tuple[int, object, object]]:
    """The slices of an index: how long each axis is, and which numbers stand there, be they more than there is."""
    items = index if isinstance(index, tuple) else (index,)
    axis = 0
    for i, item in enumerate(items):
        if item is Ellipsis:
            axis = tensor.dim() - sum(map(_axes_of, items[i + 1 :]))
        elif isinstance(item, slice) and axis < tensor.dim():
            numbers = (item.start, item.stop, item.step)
            yield tensor.shape[axis], None, tuple(n if isinstance(n, int) else None for n in numbers)
        if item is not Ellipsis:
            axis += _axes_of(item)


def _axes_of(item: Any) -> int:
    """How many axes of a tensor an item of an index stands for."""
    if isinstance(item, Tensor) and item.dtype == torch.bool:
        return item.dim()
    return 0 if item is None or isinstance(item, bool) else 1


def turn(flow: Flow, node: Node) -> None:
    """flip and roll: free beside the channel axis, a wall on it."""
    state = flow.state(flow.reads(node, node.args[0]))
    rank = len(state.shape)
    flips = op_name(node) == "flip"
    dims = [int(d) % rank for d in (arg(node, 1, "dims") if flips else arg(node, 2, "dims", []))]
    if state.axis is None or ((dims or flips) and state.axis not in dims):
        put_moved(flow, node, state.axis, None)
    elif flips:
        positions = np.arange(len(state.labels))[::-1, None].copy()
        put_moved(flow, node, state.axis, positions, pin=True)
    else:
        wall_rule(flow, node, "it moves channels around")


def take(flow: Flow, node: Node) -> None:
    """Slices and selections: free beside the channel axis; on it, equal parts may shrink and the rest is a wall."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    if state.axis is None:
        put_moved(flow, node, None, None)
        return
    selects = op_name(node) == "select"
    dim = int(arg(node, 1, "dim", 0)) % len(state.shape)
    if dim != state.axis:
        put_moved(flow, node, state.axis - (selects and dim < state.axis), None)
        return
    if not selects:
        which = slice_of(node, len(state.labels))
        if which is None:
            wall_rule(flow, node, "it picks channels by number")
        else:
            _slice_channels(flow, node, state, np.arange(len(state.labels))[which])
        return
    position = int(arg(node, 2, "index"))
    flow.wall(node, [read], "it picks one channel by number")
    picked = unlabelled(shape_of(node), float(state.values[position]))
    mask = np.zeros(len(state.labels), bool)
    mask[position] = True
    flow.put(node, picked, lambda live: flow.mark(read, mask & bool(live.any())))


def slice_of(node: Node, size: int) -> slice | None:
    """What slice and narrow take of an axis of this size, or None where a tensor says so."""
    start, end, step = arg(node, 2, "start"), arg(node, 3, "end"), arg(node, 4, "step", 1)
    if op_name(node) == "narrow":
        length = arg(node, 3, "length")
        if not isinstance(start, int) or not isinstance(length, int):
            return None
        return slice(start % size, start % size + length)
    if not all(number is None or isinstance(number, int) for number in (start, end, step)):
        return None
    return slice(start, end, step)


def split(flow: Flow, node: Node) -> None:
    """split, chunk, unbind: a list of parts, each like a slice."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    shapes = [tuple(int(s) for s in v.shape) for v in node.meta["val"]]
    unbinds = op_name(node) == "unbind"
    dim = int(arg(node, 1 if unbinds else 2, "dim", 0)) % len(state.shape)
    if state.axis is None:
        parts = [unlabelled(shape, float(state.values[0])) for shape in shapes]
    elif dim != state.axis:
        axis = state.axis - (unbinds and dim < state.axis)
        parts = [labelled(shape, axis, state.labels, state.values) for shape in shapes]
    else:
        _split_channels(flow, node, read, state, shapes)
        return

    def backward(live: Any) -> None:
        for one in live:
            flow.mark(read, one)

    flow.put(node, parts, backward)


def _split_channels(flow: Flow, node: Node, read: Node, state: State, shapes: list[tuple[int, ...]]) -> None:
    assert state.axis is not None
    unbinds = op_name(node) == "unbind"
    sizes = [1 if unbinds else shape[state.axis] for shape in shapes]
    equal = not unbinds and len(set(sizes)) == 1
    if equal:
        _parts_shrink_alike(flow, node, state.labels, sizes[0])
    else:
        flow.wall(node, [read], "it splits the channels by number")
    parts: list[State] = []
    starts = np.cumsum([0, *sizes])
    for shape, start, end in zip(shapes, starts, starts[1:], strict=False):
        values = state.values[start:end]
        labels = state.labels[start:end] if equal else np.full(end - start, PINNED)
        parts.append(unlabelled(shape, float(values[0])) if unbinds else labelled(shape, state.axis, labels, values))

    def backward(live: Any) -> None:
        flow.mark(read, np.concatenate(live))

    flow.put(node, parts, backward)


def _slice_channels(flow: Flow, node: Node, state: State, positions: Labels) -> None:
    """A slice of the channel axis: one of equal parts, all of it, or a wall."""
    assert state.axis is not None
    whole, count = len(state.labels), len(positions)
    if count == whole:
        put_moved(flow, node, state.axis, None)
    elif count and whole % count == 0 and positions[0] % count == 0 and positions[-1] - positions[0] == count - 1:
        _parts_shrink_alike(flow, node, state.labels, count)
        put_moved(flow, node, state.axis, positions[:, None])
    else:
        put_moved(flow, node, state.axis, positions[:, None], pin=True)


def glu(flow: Flow, node: Node) -> None:
    """The first half times the sigmoid of the second: channel i is made of two, which stay or go together."""
    read = flow.reads(node, node.args[0])
    state = flow.state(read)
    dim = int(arg(node, 1, "dim", -1)) % len(state.shape)
    on_channels = state.axis == dim
    count = len(state.labels) // 2 if on_channels else len(state.labels)
    first, second = (state.values[:count], state.values[-count:])
    known = torch.from_numpy(np.concatenate([first, second])).to(node.meta["val"].dtype)
    values = np.where(first == 0, 0.0, torch.nn.functional.glu(known, 0).double().numpy())
    if on_channels:
        flow.tie(state.labels[:count], state.labels[count:])
    result = State(shape_of(node), state.axis, state.labels[:count], values)

    def backward(live: Mask) -> None:
        needed = live & result.varies
        flow.mark(read, np.concatenate([needed, needed]) if on_channels else needed)

    flow.put(node, result, backward)


def _parts_shrink_alike(flow: Flow, node: Node, labels: Labels, size: int) -> None:
    if (labels != PINNED).any():
        flow.equal_counts.append(labels.reshape(-1, size))
        flow.parts.append((node, labels, size))


RULES: dict[str, Callable[[Flow, Node], None]] = {
    **dict.fromkeys("split split_with_sizes chunk unbind".split(), split),
    **dict.fromkeys("select slice narrow".split(), take),
    **dict.fromkeys("flip roll".split(), turn),
    "glu": glu,
}
