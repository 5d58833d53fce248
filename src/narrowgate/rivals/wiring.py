"""What lies before and behind each BatchNorm, for Ye et al. 2018: costs of a channel, and the rescaling of scales."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import Node

from narrowgate.flow.trace import Graph, op_name, trace
from narrowgate.flow.ungated import ungated

_NORMS = frozenset(("batch_norm", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit"))
_LAYERS = frozenset(("conv1d", "conv2d", "conv3d", "convolution", "linear"))
# f(a * x) = a * f(x) for every a > 0.
_SCALE_PASSES = frozenset(
    "relu relu_ leaky_relu leaky_relu_ max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d mean flatten view reshape "
    "squeeze dropout dropout_ feature_dropout contiguous clone identity getitem".split()
)


@dataclass(frozen=True)
class Wire:
    """A BatchNorm between layers, all by name."""

    before: str | None
    """The layer whose outputs it normalises; None where that is a sum or the like."""
    behind: tuple[str, ...]
    """The layers that its outputs reach through operations of one input."""
    passes_scale: bool
    """Whether a factor on its outputs reaches these layers, and nothing else, as that factor."""
    pixels: int
    """Of an output channel."""


def wires_of(model: nn.Module, example: Tensor) -> dict[str, Wire]:
    """Each BatchNorm of a model, by name, with what lies before and behind it."""
    plain = ungated(model)
    graph = trace(plain, example)
    found: dict[str, Wire] = {}
    uses: Counter[str] = Counter()
    for node, tensor in graph.tensors.items():
        uses[tensor] += len(node.users)
    norms = Counter(_weight_of(node, graph) for node in graph.nodes if _is(node, _NORMS))
    for node in graph.nodes:
        if not _is(node, _NORMS) or _weight_of(node, graph) is None:
            continue
        source = node.args[0]
        assert isinstance(source, Node)
        behind, passes = _follow(node, graph)
        before = _weight_of(source, graph) if _is(source, _LAYERS) else None
        name = str(_weight_of(node, graph))
        own = [graph.tensors[each] for each in node.args[1:3] if isinstance(each, Node) and each in graph.tensors]
        alone = all(uses[each] == norms[name] for each in own) and all(uses[f"{layer}.weight"] == 1 for layer in behind)
        wire = Wire(before, tuple(behind), passes and bool(behind) and alone, source.meta["val"][0, 0].numel())
        found[name] = _both(found[name], wire) if name in found else wire
    return found


def _both(one: Wire, other: Wire) -> Wire:
    """A BatchNorm that is used twice: its parameters serve both places, and a factor on them reaches both."""
    before = one.before if one.before == other.before else None
    behind = tuple(dict.fromkeys((*one.behind, *other.behind)))
    passes = one.passes_scale and other.passes_scale and not set(one.behind) & set(other.behind)
    return Wire(before, behind, passes, one.pixels + other.pixels)


def memory_weights(model: nn.Module, example: Tensor) -> dict[str, float]:
    """Ye et al.'s cost of a channel by BatchNorm: its weights before and behind, and its map, in input images."""
    weights = {}
    for name, wire in wires_of(model, example).items():
        channels = _tensor(model, name).numel()
        before = 0 if wire.before is None else _tensor(model, wire.before)[0].numel()
        behind = sum(_tensor(model, layer).numel() for layer in wire.behind) / channels
        weights[name] = (before + behind + wire.pixels) / example[0, 0].numel()
    return weights


@torch.no_grad()
def rescale_(model: nn.Module, example: Tensor, factor: float) -> list[str]:
    """Multiply scale and shift of BatchNorms by a factor and divide the weights behind them by it; which were.

    The network computes what it did. A BatchNorm is left alone where the factor would not arrive: behind it is a sum,
    an activation such as ReLU6, or a layer that is used elsewhere too; or scale, shift or weight are read otherwise.
    """
    if not factor > 0:
        raise ValueError(f"scales can be multiplied by a number above 0, got {factor!r}")
    wires = {name: wire for name, wire in wires_of(model, example).items() if wire.passes_scale}
    for name, wire in wires.items():
        norm = model.get_submodule(name)
        _tensor(model, name).mul_(factor)
        if isinstance(norm.bias, Tensor):
            norm.bias.mul_(factor)
        for layer in wire.behind:
            _tensor(model, layer).div_(factor)
    return list(wires)


def _follow(norm: Node, graph: Graph) -> tuple[list[str], bool]:
    """The layers that a result reaches through operations of one input, and whether a factor reaches all of them."""
    behind: list[str] = []
    passes, waiting = True, [norm]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            layer = _weight_of(user, graph) if _is(user, _LAYERS) and user.args[0] is node else None
            if layer is not None:
                behind.append(layer)
            elif user.op == "call_function" and len(user.all_input_nodes) == 1:
                passes = passes and op_name(user) in _SCALE_PASSES
                waiting.append(user)
            else:
                passes = False
    return behind, passes


def _is(node: Node, names: frozenset[str]) -> bool:
    return node.op == "call_function" and op_name(node) in names


def _weight_of(node: Node, graph: Graph) -> str | None:
    """The layer whose weight an operation reads."""
    weight = node.args[1] if len(node.args) > 1 else None
    name = graph.tensors.get(weight) if isinstance(weight, Node) else None
    return name.removesuffix(".weight") if name is not None and name.endswith(".weight") else None


def _tensor(model: nn.Module, layer: str) -> Tensor:
    weight = model.get_submodule(layer).weight
    assert isinstance(weight, Tensor)
    return weight
