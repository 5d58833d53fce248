"""What runs in training only: auxiliary heads must still fit what feeds them, and noise keeps dead channels alive."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from torch import Tensor, nn
from torch.fx import Node

from narrowgate.flow.analysis import Flow, Wall
from narrowgate.flow.movement import arg
from narrowgate.flow.rules import RULES, swept
from narrowgate.flow.state import Labels, Values
from narrowgate.flow.trace import ExampleInputs, Graph, TraceError, layer_of, op_name, trace

_WHY = "it runs in training only"
_NOT_RUN = "with these inputs; with others that use it, it may no longer fit"
_NOT_SEEN = "torch.export can't trace it in training mode, and what it does there alone is not seen"
_REMEDY = "Give example inputs that it takes in training mode too, or cut it when training is over"
_IN_BOTH_MODES = frozenset("instance_norm dropout feature_dropout".split())
_NONE = np.zeros(0, np.int64)


def pin_training_only(
    flow: Flow,
    model: nn.Module,
    example_inputs: ExampleInputs,
    tracer: Callable[..., Graph] = trace,
    *,
    refuse: bool = False,
) -> None:
    """Keep what only training mode needs: the inputs of layers that the eval graph does not show, at full width.

    And for a model that goes on training, channels that are dead in eval mode only: noise or a shift may be added to
    them in training. ``refuse`` raises where such a model can't be traced in training mode: a cut might break it.
    """
    unseen = {name for name, _ in model.named_parameters()} - {name for name, uses in flow.uses.items() if uses}
    if not unseen and flow.closed is None:
        return
    try:
        graph = tracer(model, example_inputs, train=True, frozen=flow.frozen_norms)
    except TraceError as error:
        flow.seen_in_training = False
        if refuse and flow.closed is not None:
            raise TraceError(f"what it does in training mode is not seen: {error}. {_REMEDY}") from error
        names = ", ".join(sorted({name.rpartition(".")[0] for name in unseen})[:3])
        what = "it does not run in eval mode; it may no longer fit in training" if unseen else _NOT_SEEN
        flow.walls.append(Wall(names or type(model).__name__, "not traced", what))
        return
    flow.seen_in_training = _same_operations(flow.graph, graph, flow.frozen_norms)
    if unseen:
        flow.walls += _not_run(graph, model, unseen)
        _pin_what_they_read(flow, Flow(graph, model, flow.constants).run(RULES), unseen)
    if flow.closed is not None and not flow.seen_in_training:
        other = swept(graph, model, flow.constants, flow.closed, flow.numbers, flow.narrow_norms)
        flow.join(other)
        flow.walls += [wall for wall in other.walls if wall not in flow.walls]
        _pin_what_differs(flow, other)


def _not_run(graph: Graph, model: nn.Module, unseen: set[str]) -> list[Wall]:
    """Layers through which these inputs lead in neither mode: what would feed them is not known, and may be cut."""
    used = {name for name, uses in graph.uses().items() if uses}
    never = [name for name, _ in model.named_parameters() if name in unseen - used]
    layers = dict.fromkeys(name.rpartition(".")[0] or name for name in never)
    return [Wall(layer, "not run", _NOT_RUN) for layer in layers]


def _pin_what_they_read(flow: Flow, other: Flow, unseen: set[str]) -> None:
    """``other`` is the training graph's."""
    for node in other.graph.nodes:
        if node.op != "call_function":
            continue
        reads = node.all_input_nodes
        if not any(other.graph.tensors.get(source) in unseen for source in reads):
            continue
        streams = [source for source in reads if source not in other.graph.tensors]
        wanted = np.concatenate([_NONE, *(_labels(other, source) for source in streams)])
        for (name, axis), labels in other.axis_labels.items():
            hit = np.isin(labels, wanted)
            if hit.any() and (name, axis) in flow.axis_labels:
                flow.pin(flow.axis_labels[name, axis][hit], f"for {layer_of(node)}, {_WHY}")
        flow.walls.append(Wall(layer_of(node), "training only", _WHY))


def _same_operations(one: Graph, other: Graph, frozen: Collection[str]) -> bool:
    """Whether training does the same with the same numbers, but for norms and dropout, which have rules for both."""
    nodes, others = (
        [node for node in graph.nodes if node.op == "call_function" and not _counts(graph, node)]
        for graph in (one, other)
    )
    alike = len(nodes) == len(others) and all(_same(a, b, frozen) for a, b in zip(nodes, others, strict=True))
    return alike and _wires(one, nodes) == _wires(other, others)


def _wires(graph: Graph, nodes: list[Node]) -> list[list[object]]:
    """What each operation reads, and what the model returns: parameters by name, results by their number."""
    names = {**graph.tensors, **{node: i for i, node in enumerate(nodes)}}
    read = [node.all_input_nodes for node in nodes]
    return [[names.get(source, source.name) for source in sources] for sources in (*read, graph.outputs)]


def _counts(graph: Graph, node: Node) -> bool:
    """Whether it is a norm's number of batches, counted up."""
    value = node.meta.get("val")
    whole = isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()
    return whole and all(source in graph.tensors for source in node.all_input_nodes)


def _same(one: Node, other: Node, frozen: Collection[str]) -> bool:
    name = op_name(one)
    if name != op_name(other) or "alpha" in name:
        return False
    if name == "batch_norm":  # a function may have been told to use running statistics in both modes
        return bool(arg(other, 5, "training")) == (bool(arg(one, 5, "training")) or layer_of(one) not in frozen)
    numbers = [
        [each for each in (*node.args, *node.kwargs.values()) if not isinstance(each, Node)] for node in (one, other)
    ]
    return name in _IN_BOTH_MODES or repr(numbers[0]) == repr(numbers[1])


def _pin_what_differs(flow: Flow, other: Flow) -> None:
    """Keep what a layer reads as one number in eval mode, and in training as another or as one that varies."""
    in_training: dict[str, list[Values]] = {}
    for mixer in other.mixers:
        in_training.setdefault(mixer.weight, []).append(mixer.inputs.values)
    for mixer in flow.mixers:
        now, then = mixer.inputs.values, in_training.get(mixer.weight)
        if then is None:  # it does not run in training
            continue
        same = then.pop(0) if len(then) > 1 else then[0]
        differs = ~np.isnan(now) & ~(now == same) if len(now) == len(same) else ~np.isnan(now)
        if differs.any():
            flow.pin(mixer.inputs.labels[differs], f"for {mixer.layer}, which reads something else in training")
            flow.walls.append(Wall(mixer.layer, "differs", "some of what it reads is dead in eval mode only"))


def _labels(flow: Flow, source: Node) -> Labels:
    state = flow.states.get(flow.resolve(source))
    states = state if isinstance(state, list) else [state]
    return np.concatenate([_NONE, *(one.labels for one in states if one is not None and one.axis is not None)])
