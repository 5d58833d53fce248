"""Plan without numbers: what is known of a model on the meta device, and which constants stay for lack of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Node

from narrowgate.flow.analysis import Flow, Wall
from narrowgate.flow.movement import arg
from narrowgate.flow.state import State
from narrowgate.flow.trace import Graph, layer_of, op_name
from narrowgate.flow.ungated import gatings, with_vectors
from narrowgate.flow.unknown import Numbers, Weights, has_numbers, lacks_numbers, named_tensors, put_tensor

_WHY = "what is closed before it becomes a constant, and its numbers are not there"
_NORMS = ("batch_norm", "instance_norm")
_SOME_NUMBER = 0.7390851332151607
# Operations that make a positive number of positive ones, each channel for itself.
_KEEP_POSITIVE = frozenset(
    """
    relu relu6 leaky_relu elu selu celu gelu silu hardtanh hardswish hardsigmoid sigmoid tanh softplus
    conv1d conv2d conv3d linear max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d mean dropout batch_norm instance_norm
    clone contiguous detach alias flatten squeeze unsqueeze permute transpose cat concat concatenate getitem
    """.split()
)


def known_numbers(model: nn.Module, weights: Weights | None) -> tuple[nn.Module, Numbers | None]:
    """The model, if need be as a copy with numbers for its gates, and what is known of tensors that have none."""
    if not lacks_numbers(model):
        return model, None
    filled = with_vectors(model, weights or {})
    numbers = Numbers(filled, gatings(filled), weights)
    lacking = sorted(numbers.missing & {name for name, _ in filled.named_parameters()})
    if weights is not None and lacking:
        raise ValueError(f"the weights lack {lacking[0]!r}: they are of another model, or some files are missing")
    return filled, numbers


def fill_vectors_(model: nn.Module, numbers: Numbers | None, graph: Graph, constants: str) -> None:
    """Give every vector without numbers what is known of it; they are small, and most rules read some."""
    if numbers is None:
        return
    made: dict[int, Tensor] = {}
    for name, tensor in list(named_tensors(model)):
        if tensor.dim() > 1 or has_numbers(tensor) or not tensor.is_floating_point():
            continue
        if id(tensor) not in made:
            vector = numbers.read(name, tensor)
            made[id(tensor)] = nn.Parameter(vector, False) if isinstance(tensor, nn.Parameter) else vector
        put_tensor(model, name, made[id(tensor)])
    if constants == "drop" and _only_numbers_differ(graph):
        _stand_in_for_norms_(graph, model, numbers)


def unknown_constants(flow: Flow) -> list[Wall]:
    """The norms that would pass a constant on, were their scale, shift and statistics known."""
    found = []
    for node, names in _norms(flow.graph):
        before, after = flow.states[flow.reads(node, node.args[0])], flow.states[node]
        if not flow.numbers.missing.intersection(names) or not isinstance(before, State):
            continue
        result = after[0] if isinstance(after, list) else after
        lost = ~np.isnan(before.along(1)) & np.isnan(result.along(1))
        if lost.any():
            found.append(Wall(layer_of(node), op_name(node), _WHY))
    return found


def _only_numbers_differ(graph: Graph) -> bool:
    """Whether nothing in a graph asks which constant a constant is.

    A product with a varying tensor does: zero or not? So does a view that makes one channel of several: are they equal?
    """
    return all(_never_asks(node) for node in graph.nodes if node.op == "call_function")


def _never_asks(node: Node) -> bool:
    name = op_name(node).rstrip("_")
    if name == "add":
        return all(isinstance(operand, Node) for operand in node.args) and not node.kwargs
    if name in ("view", "reshape"):
        (batch, *_), shape = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
        return len(shape) == 2 and shape[0] == batch
    return name in _KEEP_POSITIVE


def _stand_in_for_norms_(graph: Graph, model: nn.Module, numbers: Numbers) -> None:
    """Give norms that lack numbers some that turn every constant into one, for a plan that ignores which one it is.

    Nothing writes it down: layers behind take such a constant for 0. What a scale of zero makes known stays known.
    """
    tensors = dict(named_tensors(model))
    for _, names in _norms(graph):
        scale = tensors.get(names[0] or "")
        if scale is None or not numbers.missing.intersection(names):
            continue
        for name, number in zip(names, (1.0, _SOME_NUMBER, 0.0, torch.inf), strict=True):
            if name is not None:
                known = (scale == 0) & ~tensors[name].isnan()
                filled = torch.where(known, tensors[name].detach(), number)
                put_tensor(model, name, nn.Parameter(filled, False) if name in names[:2] else filled)


def _norms(graph: Graph) -> Iterator[tuple[Node, list[str | None]]]:
    """Norms of one channel each, with the names of scale, shift, mean and variance."""
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node) in (*_NORMS, "_native_batch_norm_legit_no_training"):
            sources = (arg(node, i, "") for i in range(1, 5))
            yield node, [graph.tensors.get(source) if isinstance(source, Node) else None for source in sources]
