"""Replay: run the small architecture without numbers, and hold in place what a hard-coded size breaks.

``x.view(-1, 800)`` looks like ``x.flatten(1)`` in the graph, but raises, or merges two samples, once there are fewer
features, and ``x / x.shape[1]`` divides by another number. So the cut model is run on shapes alone: it must do the same
operations with the same numbers, and every layer's output must have the predicted shape. What does not agree is pinned.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.fx import Node

from narrowgate.flow.analysis import Flow, Wall
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.decide import Decision
from narrowgate.flow.events import RESHAPES, Event
from narrowgate.flow.geometry import matching_groups
from narrowgate.flow.movement import RULES as MOVEMENTS
from narrowgate.flow.movement import arg, reshape, shape_of
from narrowgate.flow.resize import resize_
from narrowgate.flow.skeleton import run, skeleton
from narrowgate.flow.splits import RULES as SPLITS
from narrowgate.flow.splits import kind_of_split, slice_of, sliced
from narrowgate.flow.state import State
from narrowgate.flow.trace import ExampleInputs, op_name


class Planned(Protocol):
    """The part of a plan that the replay looks at."""

    @property
    def layout(self) -> str: ...
    @property
    def cuts(self) -> dict[str, Cut]: ...
    @property
    def edits(self) -> dict[str, Edit]: ...
    @property
    def widths(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Trouble:
    """Where the small model does something else than the large one, if that is known, what, and in which splits."""

    node: Node | None
    message: str
    splits: tuple[Node, ...] = ()


class ReplayError(RuntimeError):
    """The small model would not run, and nothing in the graph says why."""


def pin_what_breaks(
    flow: Flow, decision: Decision, plan: Planned, model: nn.Module, example_inputs: ExampleInputs
) -> bool:
    """Run the planned architecture on shapes; pin what does not fit and return True if the plan must be made again."""
    trouble = find_trouble(flow, decision, plan, model, example_inputs)
    if trouble is None:
        return False
    for node in trouble.splits:
        flow.wall(node, [flow.reads(node, source) for source in node.all_input_nodes], "it splits channels")
    if plan.layout != "aligned":  # it runs with the same streams and whole layers: leave the layers whole
        return _keep_whole(flow, plan, trouble.node)
    return _pin(flow, decision, type(model).__name__, trouble)


def find_trouble(
    flow: Flow, decision: Decision, plan: Planned, model: nn.Module, example_inputs: ExampleInputs
) -> Trouble | None:
    """Run the planned architecture on shapes and say where it is not what was planned; nothing is pinned."""
    if not plan.cuts:
        return None
    large, device = _reference(flow, model, example_inputs)
    small = skeleton(model, plan.cuts, device)
    resize_(small, plan.edits, plan.widths)
    _give_biases_(small, plan)
    for training, wanted in large.items():
        got = run(small.train(training), flow.mixers, example_inputs, device, flow.across)
        trouble = _first_trouble(flow, decision, wanted, got)
        if trouble is None and not training:
            trouble = _wrong_split(flow, decision, wanted, got)
        if trouble is not None:
            return trouble
    return None


def _give_biases_(small: nn.Module, plan: Planned) -> None:
    """Those that layers get for their constants: code around a layer may ask whether it has one."""
    for edit in plan.edits.values():
        if edit.new_bias:
            layer = small.get_submodule(edit.layer)
            weight = layer.get_parameter("weight")
            layer.bias = nn.Parameter(weight.new_empty(weight.shape[int(edit.transposed)]), requires_grad=False)


def _flattened(got: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a layer gives its operation's result with the axes before the channels apart, as GPT-2's Conv1D does."""
    return len(got) > len(wanted) == 2 and got[-1] == wanted[-1] and math.prod(got) == math.prod(wanted)


def _keep_whole(flow: Flow, plan: Planned, node: Node | None) -> bool:
    """Give up narrowing layers to their own channels, first around the trouble, then everywhere."""
    narrowed = {edit.layer for edit in plan.edits.values() if edit.gather is not None or edit.scatter is not None}
    before = [m.layer for m in flow.mixers if node is None or flow.order[m.node] <= flow.order[node]]
    block = before[-1].rpartition(".")[0] if before else ""
    near = {layer for layer in narrowed if layer.rpartition(".")[0] == block}
    flow.whole |= near or narrowed
    return bool(narrowed)


def _pin(flow: Flow, decision: Decision, kind: str, trouble: Trouble) -> bool:
    """Hold what caused the trouble in place: the last hard-coded sizes before it, else everything around it."""
    node = trouble.node
    suspects = [s for s in _suspects(flow, decision) if node is None or flow.order[s] < flow.order[node]]
    if suspects:
        # Blocks of one class repeat the same line: hold all of them at once.
        for suspect in suspects:
            if _signature(suspect) == _signature(suspects[-1]):
                flow.wall(suspect, [flow.reads(suspect, s) for s in suspect.all_input_nodes], "its size is hard-coded")
        return True
    if _pin_neighbourhood(flow, decision, node):
        return True
    raise ReplayError(f"the smaller {kind} would not run: {trouble.message}")


def _pin_neighbourhood(flow: Flow, decision: Decision, node: Node | None) -> bool:
    """Hold the inputs of all layers around the trouble, going up the module tree until something is held."""
    mixers = flow.mixers if node is None else [m for m in flow.mixers if flow.order[m.node] <= flow.order[node]]
    where = mixers[-1].layer if mixers else ""
    while True:
        where = where.rpartition(".")[0]
        inside = [m for m in flow.mixers if not where or m.layer == where or m.layer.startswith(where + ".")]
        cut = [m for m in inside if not decision.kept[m.inputs.labels].all()]
        for mixer in cut:
            flow.pin(mixer.inputs.labels, f"for the shape of {where or 'the model'}")
            flow.walls.append(Wall(mixer.layer, op_name(mixer.node), "a size near it is hard-coded"))
        if cut or not where:
            return bool(cut)


def _first_trouble(flow: Flow, decision: Decision, large: list[Event], small: list[Event]) -> Trouble | None:
    """The first layer around which the small model does something else than the large one; None if all is well."""
    last: Node | None = None
    for wanted, got in itertools.zip_longest(large, small):
        if wanted is None or got is None or wanted.what != got.what or _differs_beside_channels(wanted, got):
            return Trouble(_next_mixer(flow, last), str(got or "it stops early"))
        if wanted.mixer is not None:
            last = wanted.mixer.node
            shape = _predicted(decision, wanted.mixer.output)
            if got.shape != shape and not _flattened(got.shape, shape):
                return Trouble(last, f"{wanted.mixer.layer} gives {got.shape}, not {shape}")
    return None


def _differs_beside_channels(large: Event, small: Event) -> bool:
    """Whether a view, split or slice counts on a number of channels that are not along its axis."""
    if large.taken is not None and small.taken is not None:
        return large.taken[0] == small.taken[0] and large.taken != small.taken
    if large.mixer is not None:
        return False
    after = _differing(large.shape, small.shape)
    return len(after) > 1 or _takes_another_axis(large, small, after)


def _differing(large: tuple[Any, ...], small: tuple[Any, ...]) -> list[int]:
    """The axes along which two shapes differ."""
    return [i for i, (a, b) in enumerate(itertools.zip_longest(large, small)) if a != b]


def _takes_another_axis(large: Event, small: Event, after: list[int]) -> bool:
    """Whether a view takes channels for something of which there were as many: ``x.reshape(batch, tokens, -1)``."""
    before = _differing(large.viewed, small.viewed)
    if len(before) != 1 or math.prod(large.viewed) != math.prod(large.shape):
        return False
    return any(
        before[0] in old and not set(after) <= set(new) for old, new in matching_groups(large.viewed, large.shape)
    )


def _wrong_split(flow: Flow, decision: Decision, large: list[Event], small: list[Event]) -> Trouble | None:
    """A view that takes the channel axis apart may let another part shrink than predicted, and permute channels."""
    left = [node for node in flow.graph.nodes if not flow.idle or not _is_idle(flow, node)]
    apart = [node for node, state in flow.splits if not decision.kept[state.labels].all()]
    apart += [node for node, labels, _ in flow.parts if not decision.kept[labels].all()]
    for kind, shape in dict.fromkeys(map(_kind_and_shape, apart)):
        alike = [node for node in left if node in flow.states and _kind_and_shape(node) == (kind, shape)]
        wanted = [_predicted_parts(flow, decision, node) for node in alike]
        got = [b.shape for a, b in zip(large, small, strict=True) if _kind(str(a.what[0])) == kind and a.shape == shape]
        if wanted != got:
            splits = tuple(node for node in apart if _kind_and_shape(node) == (kind, shape))
            return Trouble(None, f"a {kind} to {shape} became {got}, not {wanted}", splits)
    return None


def _is_idle(flow: Flow, node: Node) -> bool:
    """Whether an operation is in a module that is left out."""
    return any(path in flow.idle for path, _ in (node.meta.get("nn_module_stack") or {}).values())


def _kind(name: str) -> str | None:
    return "view" if name in RESHAPES or MOVEMENTS.get(name) is reshape else kind_of_split(name)


def _kind_and_shape(node: Node) -> tuple[str | None, tuple[Any, ...]]:
    """What replays look for to find the same operation: a view or split, and what it made of the large tensor."""
    kind, value = _kind(op_name(node)) if node.op == "call_function" else None, node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return kind, tuple(tuple(part.shape) for part in value if isinstance(part, Tensor))
    if kind == "slice":
        _, which, size = _slice(node)
        made = sliced(shape_of(node), which.start, size == len(which))
        return kind if made else None, made
    return kind, tuple(value.shape) if isinstance(value, Tensor) else ()


def _slice(node: Node) -> tuple[int, range, int]:
    """The axis of a slice, the positions that it takes, and of how many."""
    source: Any = node.args[0]
    shape = source.meta["val"].shape
    axis = int(arg(node, 1, "dim", 0)) % len(shape)
    size = int(shape[axis])
    which = slice_of(node, size)
    return axis, range(*(which or slice(None)).indices(size)), size


def _predicted_parts(flow: Flow, decision: Decision, node: Node) -> tuple[Any, ...]:
    state = flow.states[node]
    if not isinstance(state, State):
        return tuple(_predicted(decision, part) for part in state)
    shape = _predicted(decision, state)
    if _kind(op_name(node)) != "slice":
        return shape
    before = flow.state(flow.reads(node, node.args[0]))
    axis, which, _ = _slice(node)
    start = which.start if axis != before.axis else int(decision.kept[before.labels[: which.start]].sum())
    return sliced(shape, start, False)


def _predicted(decision: Decision, state: State) -> tuple[int, ...]:
    shape = list(state.shape)
    if state.axis is not None:
        shape[state.axis] = len(decision.positions(state.labels))
    return tuple(shape)


def modes_of(flow: Flow, model: nn.Module, example_inputs: ExampleInputs) -> set[bool]:
    """Whether a model runs on shapes in eval mode, and in training mode: a set of these."""
    return set(_reference(flow, model, example_inputs)[0])


def _reference(flow: Flow, model: nn.Module, example_inputs: ExampleInputs) -> tuple[dict[bool, list[Event]], str]:
    """What the large model does in eval mode and, if it runs there, in training; and the device of the skeletons.

    It runs once, on the meta device if it can, else on fake tensors, which are slower.
    """
    if flow.replayed is None:
        for device in ("meta", "fake"):
            large = skeleton(model, {}, device)
            events = {
                mode: run(large.train(mode), flow.mixers, example_inputs, device, flow.across) for mode in (False, True)
            }
            if events[False][-1].what[0] == "output":
                break
        if events[False][-1].what[0] != "output":
            raise ReplayError(f"{type(model).__name__} does not run on shapes alone: {events[False][-1].what[0]}")
        # A model may not run in training here, for example with one sample in a BatchNorm.
        flow.replayed = ({mode: log for mode, log in events.items() if log[-1].what[0] == "output"}, device)
    return flow.replayed


def _next_mixer(flow: Flow, at: Node | None) -> Node | None:
    """The layer after the one that started last: what raised lies between them, or in the first."""
    nodes = [mixer.node for mixer in flow.mixers]
    if at is None:
        return nodes[0] if nodes else None
    later = [node for node in nodes if flow.order[node] > flow.order[at]]
    return later[0] if later else None


def _suspects(flow: Flow, decision: Decision) -> list[Node]:
    """Operations that may count on a number of channels which is about to change."""
    found = []
    for node in flow.graph.nodes:
        if node.op != "call_function" or op_name(node).rstrip("_") not in {**MOVEMENTS, **SPLITS}:
            continue
        reads = [flow.reads(node, source) for source in node.all_input_nodes]
        states = [flow.states[read] for read in reads if read in flow.states]
        if any(isinstance(s, State) and s.axis is not None and not decision.kept[s.labels].all() for s in states):
            found.append(node)
    return found


def _signature(node: Node) -> tuple[str, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    return (op_name(node), *(str(kind) for _, kind in list(stack.values())[-1:]))
