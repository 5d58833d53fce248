"""Two plans, one after the other, as one plan for the model that the first was made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.plan import Plan, Row
from narrowgate.flow.surgery import PlanError


def compose(first: Plan, second: Plan) -> Plan:
    """One plan for the full-size model that leaves the structure which ``first`` and then ``second`` leave.

    ``compact(model, composed)`` gives the same layers, the same shapes, the same channels of every weight, and index
    maps where ``second`` has them. Its values are right where every removed channel was zero. Constants that the first
    plan moved, and training between the two, are in the weights only: load those afterwards, as ``ng.load`` does.
    """
    if any(edit.gather is not None or edit.scatter is not None for edit in first.edits.values()):
        raise ValueError(f"the first plan must be of layout 'aligned', got {first.layout!r}: nothing can follow it")
    added = {f"{edit.layer}.bias" for edit in first.edits.values() if edit.new_bias}
    cuts = dict(first.cuts)
    for name, then in second.cuts.items():
        if name not in added:  # a bias that the original lacks is cut with its weight
            cuts[name] = _cut(name, first.cuts.get(name), then)
    totals = {row.layer: row.total for row in first.rows}
    return Plan(
        second.layout,
        second.constants,
        cuts,
        _edits(first, second),
        [dataclasses.replace(row, total=_total(totals, row)) for row in second.rows],
        list(dict.fromkeys([*first.walls, *second.walls])),
        {**first.widths, **second.widths},
        first.parameters_before,
        second.parameters_after,
        {**first.idle, **second.idle},
    )


def _total(totals: dict[str, int], row: Row) -> int:
    return totals.get(row.layer, row.total)


def _cut(name: str, first: Cut | None, then: Cut) -> Cut:
    """What stays of one tensor after both cuts, in positions of the original."""
    if first is None:
        return then
    groups = first.grouped, then.grouped
    if first.new_shape != then.shape or (groups[0] and groups[1] and len(groups[0]) != len(groups[1])):
        raise PlanError(
            f"the second plan is not for what the first leaves: it expects {name!r} of shape {then.shape}, the first "
            f"leaves {first.new_shape}; plan the model again after compact_"
        )
    keep = dict(first.keep)
    for axis, positions in then.keep.items():
        keep[axis] = _pick(first.keep.get(axis), positions)
    grouped = first.grouped if then.grouped is None else then.grouped
    if first.grouped is not None and then.grouped is not None:
        grouped = [_pick(columns, picked) for columns, picked in zip(first.grouped, then.grouped, strict=True)]
    return Cut(first.shape, keep, grouped)


def _pick(left: Sequence[int] | None, positions: Sequence[int]) -> list[int]:
    """Positions among those that were left, as positions of the original; None: all were left."""
    return list(positions) if left is None else [left[position] for position in positions]


def _edits(first: Plan, second: Plan) -> dict[str, Edit]:
    """Biases come in the order in which they were added, so that an optimizer's parameters keep theirs."""
    early = [weight for weight, edit in first.edits.items() if edit.new_bias]
    order = dict.fromkeys([*early, *second.edits, *first.edits])
    edits = {}
    for weight in order:
        before, after = first.edits.get(weight), second.edits.get(weight)
        if after is not None:
            edits[weight] = _edit(before, after, first.cuts.get(weight))
        elif before is not None:
            edits[weight] = before
    return edits


def _edit(first: Edit | None, then: Edit, cut: Cut | None) -> Edit:
    """Both edits of a layer at once; where both carry constants, only the second's are."""
    base = first or then
    inputs = None if cut is None or len(cut.shape) == 1 else _inputs_left(cut, base)  # a norm's edit names none
    outputs = None if cut is None else cut.keep.get(1 if base.transposed else 0)
    rows = dict(zip(_pick(outputs, list(then.rows)), then.rows.values(), strict=True))
    folded = dict(zip(_pick(inputs, list(then.folded)), then.folded.values(), strict=True))
    carried = dict(zip(_pick(inputs, list(then.carried)), then.carried.values(), strict=True))
    carrier = None if then.carrier is None else _pick(inputs, [then.carrier])[0]
    merged = {
        _pick(inputs, [column])[0]: dict(zip(_pick(inputs, list(factors)), factors.values(), strict=True))
        for column, factors in then.merged.items()
    }
    if first is not None:
        rows, folded = {**first.rows, **rows}, {**first.folded, **folded}
        carried, carrier = (carried, carrier) if carried else (first.carried, first.carrier)
        merged = merged or first.merged
    new_bias = base.bias is None and (base.new_bias or then.new_bias)
    return dataclasses.replace(
        then,
        bias=base.bias,
        groups=base.groups,
        rows=rows,
        folded=folded,
        carried=carried,
        carrier=carrier,
        merged=merged,
        new_bias=new_bias,
        mean=None if new_bias else then.mean or base.mean,
    )


def _inputs_left(cut: Cut, edit: Edit) -> list[int]:
    """The input channels of a layer that a cut of its weight leaves, as positions of the original."""
    if edit.transposed:
        return list(cut.keep.get(0, range(cut.shape[0])))
    height, width = cut.shape[0] // edit.groups, cut.shape[1]
    groups = sorted({row // height for row in cut.keep.get(0, range(cut.shape[0]))})  # depthwise: some groups go
    columns = [cut.keep.get(1, range(width))] * edit.groups if cut.grouped is None else cut.grouped
    return [group * width + column for group in groups for column in columns[group]]
