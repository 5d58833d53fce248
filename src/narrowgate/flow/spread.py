"""Channels spread over several axes, as heads are: which channel each element of a tensor belongs to.

A view such as ``(batch, tokens, 3, heads, size)`` takes the channel axis apart. The plain rules then know one axis, the
innermost, with the others coupled: safe, and coarse. A spread knows every channel by itself. It is kept beside the
plain state and followed where it is cheap to; a rule that does not look at it stays right, only coarse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.fx import Node

from narrowgate.flow.analysis import Flow
from narrowgate.flow.state import PINNED, Labels, Mask, Spread, State, Values, labelled, unlabelled


def spread_of(flow: Flow, read: Node) -> Spread:
    """What is known of a tensor, channel by channel; one channel for all of it where there are none."""
    if read in flow.spreads:
        return flow.spreads[read]
    state = flow.state(read)
    shape = [1] * len(state.shape)
    if state.axis is not None:
        shape[state.axis] = len(state.labels)
    index = np.arange(len(state.values)).reshape(shape)
    return Spread(index, state.values, lambda mask: flow.mark(read, mask))


def put_moved_spread(flow: Flow, node: Node, index: Labels, source: Spread, view: Node | None = None) -> None:
    """Record where a movement took the channels; what is read of the result is read of its source."""
    if not index.size:  # what a rotation of whole heads leaves over
        return
    moved = Spread(_compressed(index), source.values, source.mark, view or source.view)
    _put(flow, node, moved, lambda live: None)


def put_new_spread(
    flow: Flow,
    node: Node,
    index: Labels,
    values: Values,
    backward: Callable[[Mask], None],
    view: Node | None = None,
) -> None:
    """Record a computed tensor: ``backward`` gets which of its channels are read."""
    live = np.zeros(len(values), bool)

    def mark(mask: Mask) -> None:
        live[mask] = True

    _put(flow, node, Spread(index, values, mark, view), lambda _: backward(live))


def _put(flow: Flow, node: Node, spread: Spread, backward: Callable[[Any], None]) -> None:
    state = flow.states[node]
    assert isinstance(state, State)
    flow.spreads[node] = spread
    flow.put(node, _refined(state, spread), backward)


def _refined(state: State, spread: Spread) -> State:
    """The plain state with what the spread knows, where all of its channels are along one axis again."""
    axes = [axis for axis, size in enumerate(spread.index.shape) if size > 1]
    if not axes:
        value = float(spread.values[spread.index.reshape(-1)[0]])
        return unlabelled(state.shape, value) if state.axis is None and np.isnan(state.values[0]) else state
    if len(axes) > 1 or state.axis not in (axes[0], None):
        return state
    values = spread.values[spread.index.reshape(-1)]
    labels = np.full(len(values), PINNED) if state.axis is None else state.labels
    return labelled(state.shape, axes[0], labels, np.where(np.isnan(values), state.along(axes[0]), values))


def _compressed(index: Labels) -> Labels:
    """The index with size 1 along axes over which it does not change."""
    for axis, size in enumerate(index.shape):
        first = index.take([0], axis)
        if size > 1 and (index == first).all():
            index = first
    return index
