"""Auxiliary heads: parts of a model that run in training only must still fit what feeds them."""

from __future__ import annotations

import numpy as np
from torch import nn
from torch.fx import Node

from narrowgate.flow.analysis import Flow, Wall
from narrowgate.flow.rules import RULES
from narrowgate.flow.state import Labels
from narrowgate.flow.trace import ExampleInputs, TraceError, layer_of, trace

_WHY = "it runs in training only"
_NONE = np.zeros(0, np.int64)


def pin_training_only(flow: Flow, model: nn.Module, example_inputs: ExampleInputs) -> None:
    """Keep the inputs of every layer that the eval graph does not show at full width."""
    unseen = {name for name, _ in model.named_parameters()} - {name for name, uses in flow.uses.items() if uses}
    if not unseen:
        return
    try:
        graph = trace(model, example_inputs, train=True)
    except TraceError:
        names = ", ".join(sorted({name.rpartition(".")[0] for name in unseen})[:3])
        flow.walls.append(Wall(names, "not traced", "it does not run in eval mode; it may no longer fit in training"))
        return
    other = Flow(graph, model, flow.constants).run(RULES)
    owner = {(name, axis): labels for (name, axis), labels in other.axis_labels.items()}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reads = node.all_input_nodes
        if not any(graph.tensors.get(source) in unseen for source in reads):
            continue
        wanted = np.concatenate([_NONE, *(_labels(other, source) for source in reads if source not in graph.tensors)])
        for (name, axis), labels in owner.items():
            hit = np.isin(labels, wanted)
            if hit.any() and (name, axis) in flow.axis_labels:
                flow.pin(flow.axis_labels[name, axis][hit], f"for {layer_of(node)}, {_WHY}")
        flow.walls.append(Wall(layer_of(node), "training only", _WHY))


def _labels(flow: Flow, source: Node) -> Labels:
    state = flow.states.get(flow.resolve(source))
    states = state if isinstance(state, list) else [state]
    return np.concatenate([_NONE, *(one.labels for one in states if one is not None and one.axis is not None)])
