"""What pruning could do to a network, before it is done: what would be gated, what is coupled, what is a wall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from narrowgate.attach import attach_gates_
from narrowgate.flow.analysis import Flow, Mixer, Wall
from narrowgate.flow.copies import copy_structure
from narrowgate.flow.decide import CollapseError, components
from narrowgate.flow.plan import Plan, plan
from narrowgate.flow.rules import swept_by_head
from narrowgate.flow.state import PINNED, Labels
from narrowgate.flow.trace import ExampleInputs, trace, without_gc
from narrowgate.flow.training import pin_training_only
from narrowgate.flow.ungated import closed_gates, ungated
from narrowgate.measure.counts import summarize
from narrowgate.sites import find_sites, layers_of
from narrowgate.swap import in_channels, out_channels
from narrowgate.weights import uncompiled

_BY_CHANCE = "its parts stay equal"
"""A wall of the trial that says which channels were zeroed there, not what the network can lose."""


@dataclass(frozen=True)
class InspectedLayer:
    """One convolution or linear layer.

    ``gates`` is how many gates it would get, and ``why_not`` says why it gets none. ``group`` is the number of the
    group of layers that share their channels, None if the layer is alone. ``parts`` is how many of its channels, or
    bundles of them such as heads, can go by themselves. ``held`` says what keeps all of them. ``was`` is its width at
    full size, where a plan tells.
    """

    name: str
    kind: str
    inputs: int
    outputs: int
    parameters: int
    multiply_adds: int
    gates: int
    input_gates: int
    why_not: str
    group: int | None
    parts: int
    held: str
    was: int | None


@dataclass(frozen=True)
class Group:
    """Layers that share channels, which go from all of them or none: they are added, or one is depthwise."""

    number: int
    parts: int
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Inspection:
    """A network as pruning sees it."""

    model: str
    inputs: str
    parameters: int
    multiply_adds: int
    layers: tuple[InspectedLayer, ...]
    groups: tuple[Group, ...]
    walls: tuple[Wall, ...]
    uncounted: tuple[str, ...]

    @property
    def gates(self) -> int:
        """How many gates there would be."""
        return sum(layer.gates + layer.input_gates for layer in self.layers)


def inspect_model(model: nn.Module, example_inputs: ExampleInputs, *, made_by: Plan | None = None) -> Inspection:
    """What would be gated and what not and why, which layers are coupled, and what is a wall; nothing is changed.

    Some walls, such as a hard-coded size in a view, only show when channels go: half of them are zeroed in a copy, and
    a plan is made for it.

    Args:
        made_by: the plan that made this model from a larger one, for ``was``.
    """
    model = uncompiled(model)
    gates, skipped = _gates(model)
    costs = summarize(model, example_inputs)
    layers = dict(layers_of(ungated(model)))
    with without_gc():
        flow = _flow(model, example_inputs)
    root = components(flow.label_count, flow.edges)
    mixers = [mixer for mixer in flow.mixers if mixer.layer in layers]
    trial = _trial(model, example_inputs, [mixer for mixer in mixers if mixer.layer in gates], root)
    facts = _Facts(
        gates,
        skipped,
        {layer.name: (layer.parameters, layer.multiply_adds) for layer in costs.layers},
        {name: group.number for group in _groups(mixers, root) for name in group.layers},
        {mixer.layer: len(np.unique(root[mixer.output.labels])) for mixer in mixers},
        _held(flow, mixers, root) | _held_in(trial),
        {row.layer: row.total for row in made_by.rows} if made_by is not None else {},
    )
    return Inspection(
        costs.model,
        costs.inputs,
        costs.parameters,
        costs.multiply_adds,
        tuple(_inspected(name, layer, facts) for name, layer in layers.items()),
        _groups(mixers, root),
        tuple(dict.fromkeys([*flow.walls, *(w for w in trial.walls if w.why != _BY_CHANCE)] if trial else flow.walls)),
        tuple(each.op for each in costs.uncounted),
    )


@dataclass(frozen=True)
class _Facts:
    """What was found out, by layer."""

    gates: Mapping[str, int]
    skipped: Mapping[str, str]
    costs: Mapping[str, tuple[int, int]]
    groups: Mapping[str, int]
    parts: Mapping[str, int]
    held: Mapping[str, str]
    was: Mapping[str, int]


def _inspected(name: str, layer: nn.Module, facts: _Facts) -> InspectedLayer:
    parameters, multiply_adds = facts.costs.get(name, (0, 0))
    return InspectedLayer(
        name,
        type(layer).__name__,
        in_channels(layer),
        out_channels(layer),
        parameters,
        multiply_adds,
        facts.gates.get(name, 0),
        facts.gates.get(f"{name}.inputs", 0),
        "" if name in facts.gates else facts.skipped.get(name, "it can't have one"),
        facts.groups.get(name),
        facts.parts.get(name, out_channels(layer)),
        facts.held.get(name, ""),
        facts.was.get(name),
    )


def _gates(model: nn.Module) -> tuple[dict[str, int], Mapping[str, str]]:
    """Gates by layer, and why a layer gets none, from attaching them to a copy."""
    plain = ungated(copy_structure(model, {}))
    try:
        gates = attach_gates_(plain)
    except ValueError as error:
        _, skipped = find_sites(plain, None, False, None, None, False)
        return {}, dict.fromkeys((name for name, _ in layers_of(plain)), str(error).splitlines()[0]) | skipped
    return {name: gates[name].size for name in gates}, gates.skipped


def _flow(model: nn.Module, example_inputs: ExampleInputs) -> Flow:
    """The sweeps as in training, where a zero may yet learn: nothing counts as dead, so all couplings show."""
    plain, closed = ungated(model), closed_gates(model)
    graph = trace(plain, example_inputs)
    flow = swept_by_head(graph, plain, "exact", closed, None, narrow_norms=False)
    pin_training_only(flow, plain, example_inputs)
    return flow


@torch.no_grad()
def _trial(model: nn.Module, example_inputs: ExampleInputs, gated: list[Mixer], root: Labels) -> Plan | None:
    """A plan for a copy in which half of what can go by itself is zero; None if nothing of the network is left."""
    zeroed = copy_structure(ungated(model), {})
    tensors = dict(zeroed.named_parameters(remove_duplicate=False))
    dead: dict[int, bool] = {}
    for mixer in gated:
        roots = root[mixer.output.labels].tolist()
        for i, one in enumerate(dict.fromkeys(roots)):
            dead.setdefault(one, i % 2 == 1)
        rows = torch.tensor([i for i, one in enumerate(roots) if dead[one]], dtype=torch.long, device="cpu")
        for name, axis in ((mixer.weight, mixer.out_axis), (mixer.bias, 0)):
            if name in tensors:
                tensors[name].index_fill_(axis, rows.to(tensors[name].device), 0.0)
    try:
        return plan(zeroed, example_inputs)
    except CollapseError:
        return None


def _groups(mixers: list[Mixer], root: Labels) -> tuple[Group, ...]:
    """Layers whose outputs share classes, put together."""
    found: list[tuple[set[int], list[str]]] = []
    for mixer in mixers:
        classes, names = set(root[mixer.output.labels].tolist()) - {int(root[PINNED])}, [mixer.layer]
        apart = []
        for other_classes, other_names in found:
            if classes & other_classes:
                classes, names = classes | other_classes, [*other_names, *names]
            else:
                apart.append((other_classes, other_names))
        found = [*apart, (classes, list(dict.fromkeys(names)))]
    order = {mixer.layer: i for i, mixer in reversed(list(enumerate(mixers)))}
    shared = sorted((group for group in found if len(group[1]) > 1), key=lambda group: min(order[n] for n in group[1]))
    return tuple(
        Group(number, len(classes), tuple(sorted(layers, key=order.__getitem__)))
        for number, (classes, layers) in enumerate(shared, 1)
    )


def _held(flow: Flow, mixers: list[Mixer], root: Labels) -> dict[str, str]:
    """Layers of which every output channel is pinned, and by what."""
    reason: dict[int, str] = {int(root[PINNED]): "for fixed places"}
    for labels, why in flow.pinned:
        for one in np.unique(root[labels]).tolist():
            reason.setdefault(one, why)
    held = {}
    for mixer in mixers:
        reasons = [reason.get(one, "") for one in root[mixer.output.labels].tolist()]
        if all(reasons):
            held[mixer.layer] = Counter(reasons).most_common(1)[0][0]
    return held


def _held_in(trial: Plan | None) -> dict[str, str]:
    """Layers that kept dead channels in the trial for a wall's sake, and which wall."""
    if trial is None:
        return {}
    walls = {f"for {wall.op} in {wall.layer}" for wall in trial.walls}
    held = {}
    for row in trial.rows:
        reasons = [reason.partition(" ")[2] for reason in row.why.split("; ")]
        if found := [reason for reason in reasons if reason in walls or reason.startswith("for the shape of ")]:
            held[row.layer] = found[0]
    return held
