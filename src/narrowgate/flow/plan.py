"""The plan: a frozen, serialisable value that says which channels of which parameter stay, and what is edited."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from narrowgate.flow.analysis import Flow, Mixer, Wall
from narrowgate.flow.attention import views_by_head
from narrowgate.flow.auto import faster_whole
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.decide import EQUAL_GROUPS, Decision, decide, folds, wanted_constants
from narrowgate.flow.numbers import own_numbers
from narrowgate.flow.replay import pin_what_breaks
from narrowgate.flow.rules import RULES
from narrowgate.flow.scatter import narrow_to_own_channels
from narrowgate.flow.trace import ExampleInputs, layer_of, op_name, trace, without_gc
from narrowgate.flow.training import pin_training_only
from narrowgate.flow.ungated import closed_gates, ungated

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
    """Everything ``compact`` needs; nothing is decided after this."""

    layout: str
    constants: str
    cuts: dict[str, Cut]
    edits: dict[str, Edit]
    rows: list[Row]
    walls: list[Wall]
    widths: dict[str, int]
    parameters_before: int
    parameters_after: int

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
        return "\n".join([*lines, *_wall_lines(self.walls)])


def _wall_lines(walls: list[Wall]) -> list[str]:
    """Walls of one kind in one line, with the first few places."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for wall in walls:
        kinds.setdefault((wall.op, wall.why), []).append(wall.layer)
    lines = ["  walls, where channels stay at full width:"] if kinds else []
    for (op, why), layers in kinds.items():
        more = f" and {len(layers) - 3} more" if len(layers) > 3 else ""
        lines.append(f"    {op} ({why}): {', '.join(layers[:3])}{more}")
    return lines


def _edit_fields(edit: dict[str, Any]) -> dict[str, Any]:
    return {key: _int_keys(value) if isinstance(value, dict) else value for key, value in edit.items()}


def _int_keys(mapping: dict[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in mapping.items()}


def plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    layout: str = "aligned",
    constants: str = "exact",
    round_to: int = 1,
    training: bool = False,
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
            learn), and a dead channel's constant is what it is in training. For ``compact_``.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
    if constants not in CONSTANTS:
        raise ValueError(f"unknown constants {constants!r}; choose one of {', '.join(CONSTANTS)}")
    if round_to < 1:
        raise ValueError(f"round_to must be 1 or above, got {round_to}")
    with without_gc():
        return _plan(model, example_inputs, layout, constants, round_to, training)


def _plan(
    model: nn.Module, example_inputs: ExampleInputs, layout: str, constants: str, round_to: int, training: bool
) -> Plan:
    plain = ungated(model)
    closed = closed_gates(model) if training else None
    graph = trace(plain, example_inputs)
    flow = Flow(graph, plain, constants, closed).run(RULES)
    by_head = views_by_head(flow)
    if by_head:
        flow = Flow(graph, plain, constants, closed, by_head).run(RULES)
    pin_training_only(flow, plain, example_inputs)
    while True:
        decision = decide(flow, round_to)
        made = build(flow, decision, plain, layout)
        aligned = made if layout == "aligned" else build(flow, decision, plain, "aligned")
        again = pin_what_breaks(flow, decision, aligned, plain, example_inputs)
        if layout != "aligned" and not again:
            again = pin_what_breaks(flow, decision, made, plain, example_inputs)
        if again:
            continue
        if layout == "auto":
            flow.whole |= faster_whole(flow, decision, aligned.cuts, made.cuts, made.edits)
            made = build(flow, decision, plain, layout)
        return made


def build(flow: Flow, decision: Decision, model: nn.Module, layout: str) -> Plan:
    """Write a decision down as a plan."""
    cuts: dict[str, Cut] = {}
    for name, tensor in flow.tensors.items():
        keep = {}
        for axis in range(tensor.dim()):
            labels = flow.axis_labels.get((name, axis))
            if labels is not None and not decision.kept[labels].all():
                keep[axis] = decision.positions(labels).tolist()
        if keep:
            cuts[name] = Cut(tuple(tensor.shape), keep)
    edits: dict[str, Edit] = {}
    for i, mixer in enumerate(flow.mixers):
        edit = _edit(flow, decision, mixer, decision.carriers.get(i))
        grouped = _grouped_columns(decision, mixer)
        if grouped is not None:
            old = cuts.get(mixer.weight, Cut(tuple(flow.tensors[mixer.weight].shape), {}))
            cuts[mixer.weight] = Cut(old.shape, old.keep, grouped)
        if layout != "aligned":
            edit = narrow_to_own_channels(flow, decision, mixer, edit, cuts)
        edits.setdefault(mixer.weight, edit)
    before = sum(p.numel() for p in model.parameters())
    after = sum(
        int(np.prod(cuts[name].new_shape)) if name in cuts else p.numel() for name, p in model.named_parameters()
    )
    after += sum(_outputs_after(cuts, flow, edit) for edit in edits.values() if edit.new_bias)
    rows = [_row(decision, mixer) for mixer in flow.mixers]
    widths = {f"{layer}.num_features": len(decision.positions(labels)) for layer, labels in flow.bare_norms.items()}
    widths |= own_numbers(flow, decision)
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


def _edit(flow: Flow, decision: Decision, mixer: Mixer, carrier: int | None) -> Edit:
    values, labels = mixer.output.values, mixer.output.labels
    transposed = mixer.out_axis == 1
    columns = mixer.inputs.labels
    gone = ~decision.kept[columns] & wanted_constants(mixer) if len(mixer.live_columns) else np.zeros(0, bool)
    lost = {int(i): float(mixer.inputs.values[i]) for i in np.flatnonzero(gone)}
    folded = lost if folds(flow, mixer) and flow.constants != "drop" else {}
    carried: dict[int, float] = {}
    if carrier is not None and not folded:
        carried = {i: value / float(mixer.inputs.values[carrier]) for i, value in lost.items()}
    rows: dict[int, float] = {}
    if not mixer.shared:
        bias = 0.0 if mixer.bias is None else flow.tensors[mixer.bias].detach().double().cpu().numpy()
        so_already = mixer.zero_rows & (values == bias)
        constant = np.flatnonzero(decision.kept[labels] & ~np.isnan(values) & ~so_already)
        rows = {int(i): float(values[i]) for i in constant}
    new_bias = mixer.bias is None and (bool(folded) or any(value != 0 for value in rows.values()))
    new_groups = mixer.groups
    if mixer.groups > 1 and mixer.groups == len(columns):
        new_groups = len(decision.positions(columns))
    return Edit(
        mixer.layer,
        mixer.weight,
        mixer.bias,
        mixer.groups,
        transposed,
        rows,
        folded,
        carried,
        carrier if carried else None,
        new_bias,
        new_groups,
    )


def _grouped_columns(decision: Decision, mixer: Mixer) -> list[list[int]] | None:
    """For a grouped convolution, the kept inputs of each group, counted within the group."""
    columns = mixer.inputs.labels
    if mixer.groups == 1 or mixer.groups == len(columns) or decision.kept[columns].all():
        return None
    return [np.flatnonzero(group).tolist() for group in decision.kept[columns].reshape(mixer.groups, -1)]


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
