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
from narrowgate.flow.spread import put_new_spread, spread_of
from narrowgate.flow.state import Labels, Mask, Spread, State, labelled, unlabelled
from narrowgate.flow.trace import op_name

_WHY = "the code counts on the number of heads and their width"


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
    batch = np.broadcast_shapes(*(_batch_of(spread, rank) for spread in (query, key, value)))
    cells = np.broadcast_to(value.index, (*batch, 1, value.index.shape[-1]))
    index, first = _numbered(cells, _head_numbers(query, _turned(key), batch)[..., None, None])
    values = value.values[cells.reshape(-1)[first]]
    # The weights of a row sum to 1, so a constant stays one; not after dropout, nor in a row that is masked out.
    if mask is not None or arg(node, 4, "dropout_p", 0.0) or flow.closed is not None:
        values = np.where(values == 0, 0.0, np.nan)
    heads = Heads(node, _views(flow, query, key, value), _labels(plain), value.index.shape[-1], np.ones(batch, bool))
    flow.heads.append(heads)

    def backward(live: Mask) -> None:
        needed = (live & np.isnan(values))[index]
        heads.needed = np.asarray(needed.any((-1, -2)))
        _mark(value, cells[needed])
        _mark_scores(query, _turned(key), heads.needed)
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
        flow.wall(node, [flow.reads(node, source) for source in node.all_input_nodes], _WHY)
        return unlabelled(shape)
    for state in states[1:]:
        flow.tie(states[0].labels, state.labels)
    return labelled(shape, axis, states[0].labels, np.where(states[2].values == 0, 0.0, np.nan))


def _labels(state: State) -> Labels | None:
    return None if state.axis is None else state.labels


def views_by_head(flow: Flow) -> dict[Node, int]:
    """For each view that made heads of which some are dead: the axis along which they lie."""
    views: dict[Node, int] = {}
    for heads in flow.heads:
        if not heads.needed.all() and heads.needed.any():
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


def product(flow: Flow, node: Node) -> None:
    """matmul, bmm, baddbmm: queries times keys, or weights times values; anything else is a wall."""
    first = 1 if op_name(node) == "baddbmm" else 0
    names = ("batch1", "batch2") if first else ("self", "mat2" if op_name(node) == "bmm" else "other")
    sources = [flow.reads(node, arg(node, first + i, name)) for i, name in enumerate(names)]
    left, right = (spread_of(flow, source) for source in sources)
    if min(left.index.ndim, right.index.ndim) < 2 or left.index.shape[-2] > 1:
        wall_rule(flow, node)
        return
    added = flow.reads(node, node.args[0]) if first else None
    if right.index.shape[-1] == 1:
        _scores(flow, node, left, right, added)
    elif right.index.shape[-2] == 1 and left.index.shape[-1] == 1:
        _weighted_values(flow, node, left, right, added)
    else:
        wall_rule(flow, node)


def _scores(flow: Flow, node: Node, query: Spread, key: Spread, added: Node | None) -> None:
    """Channels are summed over; what is left to tell apart is the heads."""
    flow.wall(node, [flow.reads(node, source) for source in node.all_input_nodes], _WHY)
    rank = len(shape_of(node))
    batch = np.broadcast_shapes(_batch_of(query, rank), _batch_of(key, rank))
    heads = _head_numbers(query, key, batch)

    def backward(live: Mask) -> None:
        _mark_scores(query, key, live[heads])
        if added is not None:
            flow.mark(added, bool(live.any()))

    flow.put(node, unlabelled(shape_of(node)), lambda live: None)
    put_new_spread(flow, node, heads[..., None, None], np.full(heads.max() + 1, np.nan), backward)


def _weighted_values(flow: Flow, node: Node, weights: Spread, value: Spread, added: Node | None) -> None:
    """Sums over tokens: a zero channel stays zero; another constant is multiplied by a sum that may vary."""
    flow.wall(node, [flow.reads(node, source) for source in node.all_input_nodes], _WHY)
    rank = len(shape_of(node))
    batch = np.broadcast_shapes(_batch_of(weights, rank), _batch_of(value, rank))
    cells = np.broadcast_to(value.index, (*batch, 1, value.index.shape[-1]))
    heads = np.broadcast_to(weights.index, (*batch, 1, 1))
    index, first = _numbered(cells, heads)
    values = np.where(value.values[cells.reshape(-1)[first]] == 0, 0.0, np.nan)
    if added is not None:
        values = np.full_like(values, np.nan)

    def backward(live: Mask) -> None:
        needed = (live & np.isnan(values))[index]
        _mark(value, cells[needed])
        _mark(weights, heads[needed.any((-1, -2))])
        if added is not None:
            flow.mark(added, bool(needed.any()))

    flow.put(node, unlabelled(shape_of(node)), lambda live: None)
    put_new_spread(flow, node, index, values, backward)


def _numbered(cells: Labels, heads: Labels) -> tuple[Labels, Labels]:
    """A number for each channel of each head, the same wherever both are the same (in every sample of a batch)."""
    pairs = np.stack([cells.reshape(-1), np.broadcast_to(heads, cells.shape).reshape(-1)], 1)
    _, first, number = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    return number.reshape(cells.shape), first


def _head_numbers(query: Spread, key: Spread, batch: tuple[int, ...]) -> Labels:
    """A number for each head: for queries and keys of the same channels, the same one."""
    sides = (query.index[..., 0, :], key.index[..., 0])
    rows = [np.broadcast_to(ids, (*batch, ids.shape[-1])).reshape(-1, ids.shape[-1]) for ids in sides]
    return np.unique(np.concatenate(rows, 1), axis=0, return_inverse=True)[1].reshape(batch)


def _mark_scores(query: Spread, key: Spread, heads: Mask) -> None:
    """In the heads that are read, a query channel counts if its key channel is not zero, and the other way round."""
    width = max(query.index.shape[-1], key.index.shape[-2])
    queries = np.broadcast_to(query.index[..., 0, :], (*heads.shape, width))[heads]
    keys = np.broadcast_to(key.index[..., 0], (*heads.shape, width))[heads]
    _mark(query, queries[key.values[keys] != 0])
    _mark(key, keys[query.values[queries] != 0])


def _mark(spread: Spread, channels: Labels) -> None:
    mask = np.zeros(len(spread.values), bool)
    mask[channels.reshape(-1)] = True
    spread.mark(mask)


def _batch_of(spread: Spread, rank: int) -> tuple[int, ...]:
    shape = spread.index.shape[:-2]
    return (1,) * (rank - 2 - len(shape)) + shape


def _turned(spread: Spread) -> Spread:
    return Spread(np.swapaxes(spread.index, -1, -2), spread.values, spread.mark)


def _repeated(spread: Spread, times: int) -> Spread:
    """Keys and values of fewer heads than queries: each serves several."""
    index = spread.index if spread.index.shape[-3] == 1 else spread.index.repeat(times, -3)
    return Spread(index, spread.values, spread.mark)


RULES: dict[str, Callable[[Flow, Node], None]] = {
    "scaled_dot_product_attention": attention,
    **dict.fromkeys("matmul bmm baddbmm".split(), product),
}
