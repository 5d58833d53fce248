"""Rules for attention: products of queries and keys, and of their weights with values, head by head.

A value channel passes by itself: zero stays zero, and what is not read of the result is not read of the value. A query
channel matters where the key channel it is multiplied with is not zero, and the other way round. How many heads there
are and how wide they are is the code's own count, so widths stay. Where a head is dead, a second look couples the
channels of each head instead (``by_head``): then it can go as a whole, if the replay finds that the code lets it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch.fx import Node

from narrowgate.flow.analysis import Flow, Heads, wall_rule
from narrowgate.flow.movement import arg, shape_of
from narrowgate.flow.products import WHY, batch_of, head_numbers, mark_channels, mark_scores, numbered, turned
from narrowgate.flow.spread import put_new_spread, spread_of
from narrowgate.flow.state import Labels, Mask, Spread, State, labelled, unlabelled


def attention(flow: Flow, node: Node) -> None:
    """scaled_dot_product_attention."""
    sources = [flow.reads(node, arg(node, i, name)) for i, name in enumerate(("query", "key", "value"))]
    query, key, value = (spread_of(flow, source) for source in sources)
    if arg(node, 7, "enable_gqa", False):
        count = flow.state(sources[0]).shape[-3]
        key, value = (
            _repeated(s, count // flow.state(r).shape[-3]) for s, r in ((key, sources[1]), (value, sources[2]))
        )
    if any(spread.index.shape[-2] > 1 for spread in (query, key, value)):
        wall_rule(flow, node, "its tokens are channels")
        return
    mask = arg(node, 3, "attn_mask")
    plain = _plain_result(flow, node, sources, mask)
    rank = len(shape_of(node))
    batch = np.broadcast_shapes(*(batch_of(spread, rank) for spread in (query, key, value)))
    cells = np.broadcast_to(value.index, (*batch, 1, value.index.shape[-1]))
    index, first = numbered(cells, head_numbers(query, turned(key), batch)[..., None, None])
    values = value.values[cells.reshape(-1)[first]]
    # The weights of a row sum to 1, so a constant stays one; not after dropout, nor in a row that is masked out.
    if mask is not None or arg(node, 4, "dropout_p", 0.0) or flow.closed is not None:
        values = np.where(values == 0, 0.0, np.nan)
    heads = Heads(node, _views(flow, query, key, value), _labels(plain), value.index.shape[-1], np.ones(batch, bool))
    flow.heads.append(heads)

    def backward(live: Mask) -> None:
        needed = (live & np.isnan(values))[index]
        heads.needed = np.asarray(needed.any((-1, -2)))
        mark_channels(value, cells[needed])
        mark_scores(query, turned(key), heads.needed)
        if mask is not None:
            flow.mark(flow.reads(node, mask), bool(needed.any()))

    flow.put(node, plain, lambda live: None)
    put_new_spread(flow, node, index, values, backward)


def _plain_result(flow: Flow, node: Node, sources: list[Node], mask: Node | None) -> State:
    """With a channel for each head if queries, keys and values have those; else all inputs keep their width."""
    states = [flow.state(source) for source in sources]
    shape = shape_of(node)
    axis = len(shape) - 3
    alike = all(state.axis == axis and len(state.labels) == shape[axis] for state in states)
    if not alike or (mask is not None and flow.state(flow.reads(node, mask)).shape[-3:-2] not in ((), (1,))):
        flow.wall(node, [flow.reads(node, source) for source in node.all_input_nodes], WHY)
        return unlabelled(shape)
    for state in states[1:]:
        flow.tie(states[0].labels, state.labels)
    if mask is not None:
        flow.wall(node, [flow.reads(node, mask)], "its mask is for all tokens")
    return labelled(shape, axis, states[0].labels, np.where(states[2].values == 0, 0.0, np.nan))


def _labels(state: State) -> Labels | None:
    return None if state.axis is None else state.labels


def views_by_head(flow: Flow) -> dict[Node, int]:
    """For each view that made heads of which some are dead: the axis along which they lie."""
    views: dict[Node, int] = {}
    for heads in flow.heads:
        if not heads.needed.all():
            views |= heads.views
    return views


def _views(flow: Flow, *spreads: Spread) -> dict[Node, int]:
    """The views that made the heads of attention's inputs and the axis of each; empty unless all are known."""
    found: dict[Node, int] = {}
    for spread in spreads:
        axis = None if spread.view is None or spread.index.ndim < 3 else _head_axis(flow.spreads[spread.view], spread)
        if axis is None or spread.view is None:
            return {}
        found[spread.view] = axis
    return found


def _head_axis(view: Spread, spread: Spread) -> int | None:
    """The axis of a view whose positions are the heads of what became of it."""
    heads = spread.index.shape[-3]
    for axis, size in enumerate(view.index.shape):
        if size != heads or heads == 1:
            continue
        place = np.broadcast_to(
            np.arange(size).reshape([-1 if i == axis else 1 for i in range(view.index.ndim)]), view.index.shape
        )
        where = np.full(len(view.values), -1)
        where[view.index] = place
        wanted = np.arange(heads).reshape(heads, 1, 1)
        if (where[view.index] == place).all() and (where[spread.index] == wanted).all():
            return axis
    return None


def _repeated(spread: Spread, times: int) -> Spread:
    """Keys and values of fewer heads than queries: each serves several."""
    index = spread.index if spread.index.shape[-3] == 1 else spread.index.repeat(times, -3)
    return Spread(index, spread.values, spread.mark)


RULES: dict[str, Callable[[Flow, Node], None]] = {"scaled_dot_product_attention": attention}
