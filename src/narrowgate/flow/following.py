"""Rules through which spreads go: beside the plain state, they take along which channel each element belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch.fx import Node

from narrowgate.flow.analysis import Flow
from narrowgate.flow.geometry import matching_groups, permutation
from narrowgate.flow.movement import arg, reshape, shape_of
from narrowgate.flow.pointwise import POINTWISE, evaluate
from narrowgate.flow.splits import slice_of
from narrowgate.flow.spread import put_moved_spread, put_new_spread, spread_of
from narrowgate.flow.state import Labels, Mask, State, Values
from narrowgate.flow.trace import op_name

Rule = Callable[[Flow, Node], None]


# -- movements -------------------------------------------------------------------------------------------------------
def _reshaped(flow: Flow, node: Node, index: Labels) -> Labels:
    before, after = flow.state(flow.reads(node, node.args[0])).shape, shape_of(node)
    inside, result = list(index.shape), [1] * len(after)
    for old, new in matching_groups(before, after):
        if any(index.shape[axis] > 1 for axis in old):
            for axis in old:
                inside[axis] = before[axis]
            for axis in new:
                result[axis] = after[axis]
    return np.broadcast_to(index, inside).reshape(result)


def _permuted(flow: Flow, node: Node, index: Labels) -> Labels:
    return np.transpose(index, permutation(node, index.ndim))


def _expanded(flow: Flow, node: Node, index: Labels) -> Labels:
    return index.reshape([1] * (len(shape_of(node)) - index.ndim) + list(index.shape))


def _taken(flow: Flow, node: Node, index: Labels) -> Labels | None:
    axis = int(arg(node, 1, "dim", 0)) % index.ndim
    if op_name(node) == "select":
        return np.asarray(index.take(int(arg(node, 2, "index")) if index.shape[axis] > 1 else 0, axis))
    if index.shape[axis] == 1:
        return index
    which = slice_of(node, index.shape[axis])
    return None if which is None else np.moveaxis(np.moveaxis(index, axis, 0)[which], 0, axis)


def _follows(plain: Rule, move: Callable[[Flow, Node, Labels], Labels | None], starts: bool = False) -> Rule:
    """A rule that also moves the spread, or starts one where the channel axis is taken apart."""

    def rule(flow: Flow, node: Node) -> None:
        split = len(flow.splits)
        plain(flow, node)
        read = flow.reads(node, node.args[0])
        begins = starts and read not in flow.spreads and len(flow.splits) > split
        if read in flow.spreads or begins:
            source = spread_of(flow, read)
            index = move(flow, node, source.index)
            if index is not None:
                put_moved_spread(flow, node, index, source, node if begins else None)

    return rule


def _follows_parts(plain: Rule) -> Rule:
    """getitem of a split: the part's spread, straight from what was split."""

    def rule(flow: Flow, node: Node) -> None:
        plain(flow, node)
        parts = flow.reads(node, node.args[0])
        if op_name(parts) not in ("split", "split_with_sizes", "chunk", "unbind"):
            return
        read = flow.reads(parts, parts.args[0])
        if read not in flow.spreads:
            return
        source, which = flow.spreads[read], node.args[1]
        assert isinstance(which, int)
        index = source.index
        unbinds = op_name(parts) == "unbind"
        axis = int(arg(parts, 1 if unbinds else 2, "dim", 0)) % index.ndim
        if unbinds:
            index = np.asarray(index.take(which if index.shape[axis] > 1 else 0, axis))
        elif index.shape[axis] > 1:
            sizes = [int(part.shape[axis]) for part in parts.meta["val"]]
            index = index.take(np.arange(sum(sizes[:which]), sum(sizes[: which + 1])), axis)
        put_moved_spread(flow, node, index, source)

    return rule


# -- computing operations --------------------------------------------------------------------------------------------
def _follows_pointwise(plain: Rule) -> Rule:
    def rule(flow: Flow, node: Node) -> None:
        plain(flow, node)
        reads = {source: flow.reads(node, source) for source in node.all_input_nodes}
        carriers = {source: flow.spreads[read] for source, read in reads.items() if read in flow.spreads}
        if not carriers or not isinstance(flow.states[node], State):
            return
        rank = len(shape_of(node))
        indices = [s.index.reshape([1] * (rank - s.index.ndim) + list(s.index.shape)) for s in carriers.values()]
        counts = {len(spread.values) for spread in carriers.values()}
        if len(counts) > 1 or not all(np.array_equal(indices[0], index) for index in indices[1:]):
            return
        known = {
            source: carriers[source].values if source in carriers else _one_number(flow.state(read))
            for source, read in reads.items()
        }
        values = evaluate(node, known, counts.pop(), flow.closed is None)

        def backward(live: Mask) -> None:
            needed = live & np.isnan(values)
            for source, read in reads.items():
                if source in carriers:
                    carriers[source].mark(needed)
                else:
                    flow.mark(read, bool(needed.any()))

        view = next(iter(carriers.values())).view if len(carriers) == 1 else None
        put_new_spread(flow, node, indices[0], values, backward, view)

    return rule


def _one_number(state: State) -> Values:
    return state.values if len(state.values) == 1 else np.array([np.nan])


def _follows_same_place(plain: Rule, values_of: Callable[[Node, Values], Values]) -> Rule:
    """softmax, dropout: channels keep their places, unless it runs along an axis over which they differ."""

    def rule(flow: Flow, node: Node) -> None:
        plain(flow, node)
        read = flow.reads(node, node.args[0])
        if read not in flow.spreads or not isinstance(flow.states[node], State):
            return
        source = flow.spreads[read]
        along = arg(node, 1, "dim") if "softmax" in op_name(node) or op_name(node) == "cumsum" else None
        if along is not None and source.index.shape[int(along)] > 1:
            return
        values = values_of(node, source.values)
        put_new_spread(flow, node, source.index, values, lambda live: source.mark(live & np.isnan(values)))

    return rule


def _follows_norm(plain: Rule) -> Rule:
    """layer_norm over the last axis: what is read of one channel is read of all that are normalised with it."""

    def rule(flow: Flow, node: Node) -> None:
        plain(flow, node)
        read = flow.reads(node, node.args[0])
        normalised: Any = node.args[1]
        if read not in flow.spreads or len(normalised) != 1:
            return
        source = flow.spreads[read]
        index = source.index

        def backward(live: Mask) -> None:
            needed = np.zeros_like(live)
            needed[index[np.broadcast_to(live[index].any(-1, keepdims=True), index.shape)]] = True
            source.mark(needed)

        put_new_spread(flow, node, index, np.full_like(source.values, np.nan), backward, source.view)

    return rule


def _all_vary(node: Node, values: Values) -> Values:
    return np.full_like(values, np.nan)


def _dropped(node: Node, values: Values) -> Values:
    stays = (values == 0) & ("alpha" not in op_name(node))
    return np.where(stays, 0.0, np.nan) if arg(node, 2, "train", False) else values


def following(rules: dict[str, Rule]) -> dict[str, Rule]:
    """The same table, with the rules that spreads go through."""
    table = dict(rules)
    for name, rule in rules.items():
        if rule is reshape:
            table[name] = _follows(rule, _reshaped, starts=True)
        elif name in POINTWISE:
            table[name] = _follows_pointwise(rule)
    for name in "permute transpose t numpy_T mT movedim swapaxes".split():
        table[name] = _follows(rules[name], _permuted)
    for name in "expand expand_as broadcast_to".split():
        table[name] = _follows(rules[name], _expanded)
    for name in "select slice narrow".split():
        table[name] = _follows(rules[name], _taken)
    for name in "softmax _softmax log_softmax _log_softmax cumsum".split():
        table[name] = _follows_same_place(rules[name], _all_vary)
    for name in "dropout feature_dropout alpha_dropout feature_alpha_dropout".split():
        table[name] = _follows_same_place(rules[name], _dropped)
    table["layer_norm"] = _follows_norm(rules["layer_norm"])
    table["getitem"] = _follows_parts(rules["getitem"])
    return table
