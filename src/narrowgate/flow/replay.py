"""Replay: run the small architecture without numbers, and hold in place what a hard-coded size breaks.

``x.view(-1, 800)`` looks like ``x.flatten(1)`` in the graph, but raises, or merges two samples, once there are fewer
features. So the cut model is run on shapes alone, every layer's output is compared with the prediction, and the last
operation on the way that counted on a number of channels is pinned until all agree.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from narrowgate.flow.analysis import Flow, Wall
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.decide import Decision
from narrowgate.flow.movement import RULES as MOVEMENTS
from narrowgate.flow.resize import resize_
from narrowgate.flow.state import State
from narrowgate.flow.trace import ExampleInputs, call_arguments, op_name


class ReplayError(RuntimeError):
    """The small model would not run, and nothing in the graph says why."""


def pin_what_breaks(
    flow: Flow,
    decision: Decision,
    cuts: dict[str, Cut],
    edits: dict[str, Edit],
    model: nn.Module,
    example_inputs: ExampleInputs,
) -> bool:
    """Run the planned architecture on shapes; pin what does not fit and return True if the plan must be made again."""
    if not cuts:
        return False
    trouble = _first_trouble(flow, decision, cuts, edits, model, example_inputs)
    if trouble is None:
        return False
    node, message = trouble
    suspects = [s for s in _suspects(flow, decision) if node is None or _order(flow, s) < _order(flow, node)]
    if suspects:
        # Blocks of one class repeat the same line: hold all of them at once.
        for suspect in suspects:
            if _signature(suspect) == _signature(suspects[-1]):
                flow.wall(suspect, [flow.reads(suspect, s) for s in suspect.all_input_nodes], "its size is hard-coded")
        return True
    if _pin_neighbourhood(flow, decision, node):
        return True
    raise ReplayError(f"the smaller {type(model).__name__} would not run: {message}")


def _pin_neighbourhood(flow: Flow, decision: Decision, node: Node | None) -> bool:
    """Hold the inputs of all layers around the trouble, going up the module tree until something is held."""
    mixers = flow.mixers if node is None else [m for m in flow.mixers if _order(flow, m.node) <= _order(flow, node)]
    where = mixers[-1].layer if mixers else ""
    while True:
        where = where.rpartition(".")[0]
        inside = [m for m in flow.mixers if not where or m.layer == where or m.layer.startswith(where + ".")]
        cut = [m for m in inside if not decision.kept[m.inputs.labels].all()]
        for mixer in cut:
            flow.pin(mixer.inputs.labels, f"the shape of {where or 'the model'}")
            flow.walls.append(Wall(mixer.layer, op_name(mixer.node), "a size near it is hard-coded"))
        if cut or not where:
            return bool(cut)


def _first_trouble(
    flow: Flow,
    decision: Decision,
    cuts: dict[str, Cut],
    edits: dict[str, Edit],
    model: nn.Module,
    example_inputs: ExampleInputs,
) -> tuple[Node | None, str] | None:
    """The first layer whose output has another shape than predicted, or that raised; None if all is well."""
    skeleton = _skeleton(model, cuts)
    resize_(skeleton, edits)
    expected: dict[str, list[tuple[Node, tuple[int, ...]]]] = {}
    for mixer in flow.mixers:
        size = len(decision.positions(mixer.output.labels))
        shape = list(mixer.output.shape)
        shape[mixer.output.axis or 0] = size
        expected.setdefault(mixer.layer, []).append((mixer.node, tuple(shape)))
    wrong: list[tuple[Node, str]] = []
    started: list[str] = []

    def before(name: str) -> Any:
        return lambda module, args: started.append(name)

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            node, shape = expected[name].pop(0) if len(expected[name]) > 1 else expected[name][0]
            if isinstance(output, Tensor) and tuple(output.shape) != shape and not wrong:
                wrong.append((node, f"{name} gives {tuple(output.shape)}, not {shape}"))

        return hook

    modules = dict(skeleton.named_modules())
    for name in expected:
        if name in modules and not any(modules[name].children()):
            modules[name].register_forward_pre_hook(before(name))
            modules[name].register_forward_hook(after(name))
    args, kwargs = pytree.tree_map(_to_meta, call_arguments(example_inputs))
    skeleton.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = skeleton(*args, **kwargs)
    except Exception as error:
        if wrong:
            return wrong[0]
        at = expected[started[-1]][0][0] if started else None
        return _next_mixer(flow, at), f"{type(error).__name__}: {error}"
    if wrong:
        return wrong[0]
    shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    wanted = [tuple(node.meta["val"].shape) for node in flow.graph.outputs]
    return None if shapes == wanted or not wanted else (None, f"its outputs would be {shapes}, not {wanted}")


def _skeleton(model: nn.Module, cuts: dict[str, Cut]) -> nn.Module:
    """The small architecture with tensors that have shapes but no numbers."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        memo.setdefault(id(parameter), nn.Parameter(_empty(parameter, cuts.get(name)), requires_grad=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        memo.setdefault(id(buffer), _empty(buffer, cuts.get(name)))
    return copy.deepcopy(model, memo)


def _empty(tensor: Tensor, how: Cut | None) -> Tensor:
    return torch.empty(tensor.shape if how is None else how.new_shape, dtype=tensor.dtype, device="meta")


def _to_meta(leaf: Any) -> Any:
    return leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf


def _next_mixer(flow: Flow, at: Node | None) -> Node | None:
    """The layer after the one that started last: what raised lies between them, or in the first."""
    nodes = [mixer.node for mixer in flow.mixers]
    if at is None:
        return nodes[0] if nodes else None
    later = [node for node in nodes if _order(flow, node) > _order(flow, at)]
    return later[0] if later else None


def _suspects(flow: Flow, decision: Decision) -> list[Node]:
    """Operations that may count on a number of channels which is about to change."""
    found = []
    for node in flow.graph.nodes:
        if node.op != "call_function" or op_name(node).rstrip("_") not in MOVEMENTS:
            continue
        reads = [flow.reads(node, source) for source in node.all_input_nodes]
        states = [flow.states[read] for read in reads if read in flow.states]
        if any(isinstance(s, State) and s.axis is not None and not decision.kept[s.labels].all() for s in states):
            found.append(node)
    return found


def _signature(node: Node) -> tuple[str, ...]:
    stack = node.meta.get("nn_module_stack") or {}
    return (op_name(node), *(str(kind) for _, kind in list(stack.values())[-1:]))


def _order(flow: Flow, node: Node) -> int:
    if not hasattr(flow, "_node_order"):
        flow._node_order = {n: i for i, n in enumerate(flow.graph.nodes)}  # type: ignore[attr-defined]
    return int(flow._node_order[node])  # type: ignore[attr-defined]
