"""The plan: a frozen, serialisable value that says which channels of which parameter stay, and what is edited."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from narrowgate.flow.analysis import Flow, Mixer, Wall
from narrowgate.flow.auto import faster_whole
from narrowgate.flow.bypassed import refuse_bypassed_gates
from narrowgate.flow.cuts import Counted, Cut, Edit
from narrowgate.flow.decide import EQUAL_GROUPS, Decision, decide
from narrowgate.flow.editing import counted_norms, edit_of, left_by_group
from narrowgate.flow.idle import beside_idle, idle_modules, shared_without_idle, without_idle
from narrowgate.flow.numbers import needed_numbers
from narrowgate.flow.replay import find_trouble, modes_of, pin_what_breaks
from narrowgate.flow.rules import swept
from narrowgate.flow.scatter import gather_before_norms, narrow_to_own_channels
from narrowgate.flow.trace import ExampleInputs, Graph, layer_of, op_name, trace, without_gc
from narrowgate.flow.training import pin_training_only
from narrowgate.flow.ungated import closed_gates, ungated
from narrowgate.flow.unknown import Weights, lacks_numbers
from narrowgate.flow.unproven import fill_vectors_, known_numbers, unknown_constants

LAYOUTS = ("aligned", "scatter", "auto")
CONSTANTS = ("exact", "fold", "drop")


@dataclass(frozen=True)
class Row:
    """One line of the printed plan."""

    layer: str
    kept: int
    total: int
    used: int
    why: str


@dataclass(frozen=True)
class Plan:
    """Everything ``compact`` needs, as a value; nothing is decided after this. Print it for a table.

    Attributes:
        layout: as it was planned: ``aligned``, ``scatter`` or ``auto``.
        constants: as it was planned: ``exact``, ``fold`` or ``drop``.
        cuts: for each parameter that shrinks, the positions that stay along each axis.
        edits: for each layer that constants change, the new numbers.
        rows: the lines of the table, one for each use of a layer: its channels in all, used and kept, and why.
        walls: the operations that hold channels in place: where, which, and why.
        widths: attributes of blocks that get another number, such as a number of heads.
        parameters_before: of the model without gates.
        parameters_after: of the small model.
        idle: modules that ``compact`` replaces by one that does as much: ``identity``, ``zeros``, or for a norm that
            only those read, ``unread``.
    """

    layout: str
    constants: str
    cuts: dict[str, Cut]
    edits: dict[str, Edit]
    rows: list[Row]
    walls: list[Wall]
    widths: dict[str, int]
    parameters_before: int
    parameters_after: int
    idle: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"format": 1, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back; raises ValueError for anything that is not one."""
        try:
            data = json.loads(text)
            if data.pop("format") != 1:
                raise ValueError("unknown format")
            data["cuts"] = {
                name: Cut(tuple(cut["shape"]), _int_keys(cut["keep"]), cut["grouped"])
                for name, cut in data["cuts"].items()
            }
            data["edits"] = {name: Edit(**_edit_fields(edit)) for name, edit in data["edits"].items()}
            data["rows"] = [Row(**row) for row in data["rows"]]
            data["walls"] = [Wall(**wall) for wall in data["walls"]]
            return cls(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"not a narrowgate plan: {error}") from error

    def __str__(self) -> str:
        width = max([len(row.layer) for row in self.rows] + [5])
        share = self.parameters_after / max(1, self.parameters_before)
        lines = [
            f"Plan ({self.layout}, constants {self.constants}): {self.parameters_before:,} -> "
            f"{self.parameters_after:,} parameters ({share:.1%} left)",
            f"  {'layer':<{width}}  channels   used   kept   unused but kept",
        ]
        for row in self.rows:
            lines.append(f"  {row.layer:<{width}}  {row.total:>8} {row.used:>6} {row.kept:>6}   {row.why}".rstrip())
        gone = [name for name in self.idle if not any(row.why.startswith(f"{name} ") for row in self.rows)]
        lines += [f"  replaced as well, as nothing reads it: {', '.join(gone)}"] if gone else []
        return "\n".join([*lines, *_wall_lines(self.walls)])


def walls_by_kind(walls: Iterable[Wall]) -> dict[tuple[str, str], list[str]]:
    """The layers of the walls of each kind, a kind being an operation and why it holds channels in place."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for wall in walls:
        kinds.setdefault((wall.op, wall.why), []).append(wall.layer)
    return kinds


def _wall_lines(walls: list[Wall]) -> list[str]:
    """Walls of one kind in one line, with the first few places."""
    kinds = walls_by_kind(walls)
    lines = ["  walls, where channels stay at full width:"] if kinds else []
    for (op, why), layers in kinds.items():
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        lines.append(f"    {op} ({why}): {', '.join(layers[:3])}{more}")
    return lines


def _edit_fields(edit: dict[str, Any]) -> dict[str, Any]:
    if edit.get("counted") is not None:
        edit = {**edit, "counted": Counted(**edit["counted"])}
    return {key: _int_keys(value) if isinstance(value, dict) else value for key, value in edit.items()}


def _int_keys(mapping: dict[str, Any]) -> dict[int, Any]:
    return {int(key): _int_keys(value) if isinstance(value, dict) else value for key, value in mapping.items()}


def plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    layout: str = "aligned",
    constants: str = "exact",
    round_to: int = 1,
    training: bool = False,
    weights: Weights | None = None,
) -> Plan:
    """Find every channel that is provably constant or unused; the model is not changed.

    Args:
        layout: ``aligned`` cuts a residual stream only where every producer is dead; ``scatter`` also gives layers
            their own narrower inputs and outputs through index operations: fewest parameters; ``auto`` does so only
            for layers that measure faster that way, where the model is and at the size of the example inputs.
        constants: ``exact`` keeps a channel where a non-zero constant can't become a bias; ``fold`` folds anyway (wrong
            at padded borders); ``drop`` ignores constants, as the paper does before fine-tuning.
        round_to: keep dead channels so that widths are multiples of this.
        training: the model goes on training: only closed gates count as dead (a zero-initialised filter is about to
            learn), and a dead channel's constant is what it is in training. A BatchNorm that is in eval mode while
            the model is in training mode is taken for frozen. For ``compact_``.
        weights: the numbers of a model whose parameters are on the meta device or fake, by name; a
            ``narrowgate.streamed.Checkpoint`` reads them one at a time. Without them, the plan is what its gates prove.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan needs a model, an nn.Module that was built, got {model!r}")
    check_choices(constants, round_to, layout)
    if layout == "auto" and lacks_numbers(model):
        raise ValueError('layout="auto" runs layers to time them, and some are on the meta device; use another layout')
    return plan_traced(model, example_inputs, trace, layout, constants, round_to, training, weights, to_cut=True)


def check_choices(constants: str, round_to: int, layout: str = "aligned") -> None:
    """Raise for options that ``plan`` does not take; a run that plans at its end asks when it begins."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if constants not in CONSTANTS:
        raise ValueError(f"unknown constants {constants!r}; choose one of {', '.join(CONSTANTS)}")
    if not isinstance(round_to, int) or round_to < 1:
        raise ValueError(f"round_to must be a whole number, 1 or above, got {round_to!r}")


@without_gc()
def plan_traced(
    model: nn.Module,
    example_inputs: ExampleInputs,
    tracer: Callable[..., Graph],
    layout: str,
    constants: str,
    round_to: int,
    training: bool,
    weights: Weights | None = None,
    *,
    to_cut: bool = False,
) -> Plan:
    """``plan`` with a way to trace that may remember; ``to_cut``: for more than to count what would be left."""
    model, numbers = known_numbers(model, weights)
    plain = ungated(model)
    closed = closed_gates(model) if training else None
    graph = tracer(plain, example_inputs)
    refuse_bypassed_gates(model, plain, graph)
    fill_vectors_(plain, numbers, graph, constants)
    flow = swept(graph, plain, constants, closed, numbers, narrow_norms=layout != "aligned" and not training)
    flow.walls += unknown_constants(flow)
    pin_training_only(flow, plain, example_inputs, tracer, refuse=to_cut)
    decision, made = _settled(flow, plain, example_inputs, layout, round_to)
    if training or not to_cut:
        return made
    return _with_idle(flow, decision, made, plain, example_inputs, tracer)


def _settled(
    flow: Flow, plain: nn.Module, example_inputs: ExampleInputs, layout: str, round_to: int
) -> tuple[Decision, Plan]:
    """A decision, and the plan of it, that the model runs with: what breaks is pinned, and all is decided again."""
    while True:
        decision = decide(flow, round_to)
        counts = needed_numbers(flow, decision, partial(_works, flow, decision, plain, example_inputs))
        made = build(flow, decision, plain, layout, counts)
        if layout == "scatter" and find_trouble(flow, decision, made, plain, example_inputs) is None:
            return decision, made  # so the aligned layout, with the same streams, would be well too
        aligned = made if layout == "aligned" else build(flow, decision, plain, "aligned", counts)
        if pin_what_breaks(flow, decision, aligned, plain, example_inputs):
            continue
        if layout != "aligned" and pin_what_breaks(flow, decision, made, plain, example_inputs):
            continue
        if layout == "auto":
            own = build(flow, decision, plain, layout, counts, norms=False)  # each with its own gather, to be timed
            flow.whole |= faster_whole(flow, decision, aligned.cuts, own.cuts, own.edits)
            made = build(flow, decision, plain, layout, counts)
        return decision, made


def _with_idle(
    flow: Flow,
    decision: Decision,
    made: Plan,
    plain: nn.Module,
    example_inputs: ExampleInputs,
    tracer: Callable[..., Graph],
) -> Plan:
    """The plan with modules that do nothing any more taken out, if what is left runs as planned in the same modes."""
    idle = idle_modules(flow, decision, plain, example_inputs, made.layout, tracer)
    if not idle:
        return made
    modes = modes_of(flow, plain, example_inputs)
    left, found = shared_without_idle(plain, idle, made.layout), without_idle(made, idle, plain)
    flow.replayed, flow.idle = None, set(idle)
    runs = modes_of(flow, left, example_inputs) == modes
    trouble = find_trouble(flow, decision, beside_idle(found), left, example_inputs)
    return found if runs and trouble is None else made


def _works(
    flow: Flow, decision: Decision, model: nn.Module, example_inputs: ExampleInputs, counts: dict[str, int]
) -> bool:
    """Whether the smaller model does what the large one does, with these numbers in its blocks."""
    aligned = build(flow, decision, model, "aligned", counts)
    return find_trouble(flow, decision, aligned, model, example_inputs) is None


def build(
    flow: Flow, decision: Decision, model: nn.Module, layout: str, counts: dict[str, int], norms: bool = True
) -> Plan:
    """Write a decision down as a plan, with new numbers for its blocks.

    ``norms`` says whether they may gather in place of the layers behind them.
    """
    cuts: dict[str, Cut] = {}
    for name, tensor in flow.tensors.items():
        keep = {}
        for axis in range(tensor.dim()):
            labels = flow.axis_labels.get((name, axis))
            if labels is not None and not decision.kept[labels].all():
                keep[axis] = decision.positions(labels).tolist()
        grouped = left_by_group(flow, decision, name)
        if keep or grouped:
            cuts[name] = Cut(tuple(tensor.shape), keep, grouped)
    edits: dict[str, Edit] = {}
    for i, mixer in enumerate(flow.mixers):
        edit = edit_of(flow, decision, mixer, decision.carriers.get(i))
        if layout != "aligned":
            edit = narrow_to_own_channels(flow, decision, mixer, edit, cuts)
        edits.setdefault(mixer.weight, edit)
    if layout != "aligned" and norms:
        gather_before_norms(flow, decision, cuts, edits, layout)
    edits |= counted_norms(flow, decision)
    before = sum(p.numel() for p in model.parameters())
    after = sum(
        int(np.prod(cuts[name].new_shape)) if name in cuts else p.numel() for name, p in model.named_parameters()
    )
    after += sum(_outputs_after(cuts, flow, edit) for edit in edits.values() if edit.new_bias)
    rows = [_row(decision, mixer) for mixer in flow.mixers]
    widths = {f"{layer}.num_features": len(decision.positions(labels)) for layer, labels in flow.bare_norms.items()}
    widths |= counts
    walls = list(dict.fromkeys([*flow.walls, *_equal_parts(flow, decision)]))
    return Plan(layout, flow.constants, cuts, edits, rows, walls, widths, before, after)


def _equal_parts(flow: Flow, decision: Decision) -> list[Wall]:
    """Splits that hold all of their channels because the parts must be of one size."""
    return [
        Wall(layer_of(node), op_name(node), "its parts stay equal")
        for node, labels, _ in flow.parts
        if decision.kept[labels].all() and (decision.why[labels] == EQUAL_GROUPS).any()
    ]


def _outputs_after(cuts: dict[str, Cut], flow: Flow, edit: Edit) -> int:
    how = cuts.get(edit.weight)
    shape = flow.tensors[edit.weight].shape if how is None else how.new_shape
    return int(shape[1 if edit.transposed else 0])


def _row(decision: Decision, mixer: Mixer) -> Row:
    labels = mixer.output.labels
    kept = decision.kept[labels]
    idle = kept & ~mixer.needed_rows
    reasons: dict[str, int] = {}
    for why in decision.why[labels[idle]]:
        text = "for other layers of the stream" if why == "used" else str(why)
        reasons[text] = reasons.get(text, 0) + 1
    text = "; ".join(f"{count} {why}" for why, count in reasons.items())
    return Row(mixer.weight.removesuffix(".weight"), int(kept.sum()), len(labels), int(mixer.needed_rows.sum()), text)
