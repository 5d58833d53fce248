"""Rules for products of two tensors: queries times keys and weights times values, head by head; cosines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.fx import Node

from narrowgate.flow.analysis import Flow, wall_rule
from narrowgate.flow.movement import arg, shape_of
from narrowgate.flow.spread import put_new_spread, spread_of
from narrowgate.flow.state import Labels, Mask, Spread, unlabelled
from narrowgate.flow.trace import layer_of, op_name

WHY = "the code counts on the number of heads and their width"


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
    order = list(range(len(shape_of(node))))
    if right.index.shape[-1] == 1:
        _scores(flow, node, left, right, added, order)
    elif right.index.shape[-2] == 1 and left.index.shape[-1] == 1:
        _weighted_values(flow, node, left, right, added, order)
    else:
        wall_rule(flow, node)


def einsum(flow: Flow, node: Node) -> None:
    """The same products, written with letters: one is summed over, one is the first's alone, one the second's."""
    operands: Any = node.args[1]
    terms, result = _terms(str(node.args[0]))
    spreads = [spread_of(flow, flow.reads(node, operand)) for operand in operands]
    for first, second in ((0, 1), (1, 0)):  # whichever of the two holds the channels comes second
        letters = _roles(terms, result, first, second)
        if letters is None or any(len(terms[i]) != spreads[i].index.ndim for i in (0, 1)):
            break
        batch, row, summed, column = letters
        left = _arranged(spreads[first], terms[first], [*batch, row, summed])
        right = _arranged(spreads[second], terms[second], [*batch, summed, column])
        order = [[*batch, row, column].index(letter) for letter in result]
        if left.index.shape[-2] == 1 and right.index.shape[-1] == 1:
            _scores(flow, node, left, right, None, order)
            return
        if left.index.shape[-2] == left.index.shape[-1] == right.index.shape[-2] == 1:
            _weighted_values(flow, node, left, right, None, order)
            return
    wall_rule(flow, node)


def cosine_similarity(flow: Flow, node: Node) -> None:
    """A channel that is zero in both adds nothing to their product or their lengths; a sum in training is a wall."""
    reads = [flow.reads(node, source) for source in node.args[:2]]
    states = [flow.state(read) for read in reads]
    rank = max(len(state.shape) for state in states)
    axis = int(arg(node, 2, "dim", 1)) % rank
    along = [state.axis is not None and state.axis + rank - len(state.shape) == axis for state in states]
    if flow.closed is not None or not all(along) or len(states[0].labels) != len(states[1].labels):
        wall_rule(flow, node, "it reduces over channels")
        return
    flow.tie(states[0].labels, states[1].labels)
    for state in states:
        told = ~state.varies & (state.values != 0)
        flow.pin(state.labels[told], f"for constants that {op_name(node)} in {layer_of(node)} reads")

    def backward(live: Mask) -> None:
        for read, state in zip(reads, states, strict=True):
            flow.mark(read, state.varies & live.any())

    flow.put(node, unlabelled(shape_of(node)), backward)


def _terms(equation: str) -> tuple[list[str], str]:
    """The letters of the operands and of the result; nothing for an equation without an arrow."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    return (operands.split(",") if arrow else []), result


def _roles(terms: list[str], result: str, first: int, second: int) -> tuple[list[str], str, str, str] | None:
    """Letters of a product of matrices: those of the batch, the rows, the one summed over, the columns."""
    if len(terms) != 2 or any(not t.isalpha() or len(set(t)) != len(t) for t in (*terms, result)):
        return None
    left, right = set(terms[first]), set(terms[second])
    batch = [letter for letter in result if letter in left & right]
    rows, columns, summed = left - right, right - left, (left & right) - set(result)
    if not len(rows) == len(columns) == len(summed) == 1 or set(result) != {*batch, *rows, *columns}:
        return None
    return batch, rows.pop(), summed.pop(), columns.pop()


def _arranged(spread: Spread, letters: str, wanted: list[str]) -> Spread:
    index = np.transpose(spread.index, [letters.index(letter) for letter in wanted])
    return Spread(index, spread.values, spread.mark)


def _scores(flow: Flow, node: Node, query: Spread, key: Spread, added: Node | None, order: list[int]) -> None:
    """Channels are summed over; what is left to tell apart is the heads."""
    flow.wall(node, [flow.reads(node, source) for source in node.all_input_nodes], WHY)
    rank = len(shape_of(node))
    batch = np.broadcast_shapes(batch_of(query, rank), batch_of(key, rank))
    heads = head_numbers(query, key, batch)

    def backward(live: Mask) -> None:
        mark_scores(query, key, live[heads])
        if added is not None:
            flow.mark(added, bool(live.any()))

    flow.put(node, unlabelled(shape_of(node)), lambda live: None)
    index = np.transpose(heads[..., None, None], order)
    put_new_spread(flow, node, index, np.full(heads.max() + 1, np.nan), backward)


def _weighted_values(
    flow: Flow, node: Node, weights: Spread, value: Spread, added: Node | None, order: list[int]
) -> None:
    """Sums over tokens: a zero channel stays zero; another constant is multiplied by a sum that may vary."""
    flow.wall(node, [flow.reads(node, source) for source in node.all_input_nodes], WHY)
    rank = len(shape_of(node))
    batch = np.broadcast_shapes(batch_of(weights, rank), batch_of(value, rank))
    cells = np.broadcast_to(value.index, (*batch, 1, value.index.shape[-1]))
    heads = np.broadcast_to(weights.index, (*batch, 1, 1))
    index, first = numbered(cells, heads)
    values = np.where(value.values[cells.reshape(-1)[first]] == 0, 0.0, np.nan)
    if added is not None:
        values = np.full_like(values, np.nan)

    def backward(live: Mask) -> None:
        needed = (live & np.isnan(values))[index]
        mark_channels(value, cells[needed])
        mark_channels(weights, heads[needed.any((-1, -2))])
        if added is not None:
            flow.mark(added, bool(needed.any()))

    flow.put(node, unlabelled(shape_of(node)), lambda live: None)
    put_new_spread(flow, node, np.transpose(index, order), values, backward)


def numbered(cells: Labels, heads: Labels) -> tuple[Labels, Labels]:
    """A number for each channel of each head, the same wherever both are the same (in every sample of a batch)."""
    pairs = np.stack([cells.reshape(-1), np.broadcast_to(heads, cells.shape).reshape(-1)], 1)
    _, first, number = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    return number.reshape(cells.shape), first


def head_numbers(query: Spread, key: Spread, batch: tuple[int, ...]) -> Labels:
    """A number for each head: for queries and keys of the same channels, the same one."""
    sides = (query.index[..., 0, :], key.index[..., 0])
    rows = [np.broadcast_to(ids, (*batch, ids.shape[-1])).reshape(-1, ids.shape[-1]) for ids in sides]
    return np.unique(np.concatenate(rows, 1), axis=0, return_inverse=True)[1].reshape(batch)


def mark_scores(query: Spread, key: Spread, heads: Mask) -> None:
    """In the heads that are read, a query channel counts if its key channel is not zero, and the other way round."""
    width = max(query.index.shape[-1], key.index.shape[-2])
    queries = np.broadcast_to(query.index[..., 0, :], (*heads.shape, width))[heads]
    keys = np.broadcast_to(key.index[..., 0], (*heads.shape, width))[heads]
    mark_channels(query, queries[key.values[keys] != 0])
    mark_channels(key, keys[query.values[queries] != 0])


def mark_channels(spread: Spread, channels: Labels) -> None:
    """Say that these channels are read."""
    mask = np.zeros(len(spread.values), bool)
    mask[channels.reshape(-1)] = True
    spread.mark(mask)


def batch_of(spread: Spread, rank: int) -> tuple[int, ...]:
    """What a spread tells apart beside the last two axes of a tensor of this rank."""
    shape = spread.index.shape[:-2]
    return (1,) * (rank - 2 - len(shape)) + shape


def turned(spread: Spread) -> Spread:
    """The last two axes the other way round."""
    return Spread(np.swapaxes(spread.index, -1, -2), spread.values, spread.mark)


RULES: dict[str, Callable[[Flow, Node], None]] = {
    **dict.fromkeys("matmul bmm baddbmm".split(), product),
    "einsum": einsum,
    "cosine_similarity": cosine_similarity,
}
