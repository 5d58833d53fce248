"""Replay: run the small architecture without numbers, and hold in place what a hard-coded size breaks.

``x.view(-1, 800)`` looks like ``x.flatten(1)`` in the graph, but raises, or merges two samples, once there are fewer
features, and ``x / x.shape[1]`` divides by another number. So the cut model is run on shapes alone: it must do the same
operations with the same numbers, and every layer's output must have the predicted shape. What does not agree is pinned.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgate.flow.analysis import Flow, Mixer, Wall
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.decide import Decision
from narrowgate.flow.movement import RULES as MOVEMENTS
from narrowgate.flow.pointwise import POINTWISE
from narrowgate.flow.resize import resize_
from narrowgate.flow.state import State
from narrowgate.flow.trace import ExampleInputs, call_arguments, op_name


class AlignedPlan(Protocol):
    """The part of a plan that the replay looks at."""

    @property
    def cuts(self) -> dict[str, Cut]: ...
    @property
    def edits(self) -> dict[str, Edit]: ...
    @property
    def widths(self) -> dict[str, int]: ...


class ReplayError(RuntimeError):
    """The small model would not run, and nothing in the graph says why."""


def pin_what_breaks(
    flow: Flow, decision: Decision, plan: AlignedPlan, model: nn.Module, example_inputs: ExampleInputs
) -> bool:
    """Run the planned architecture on shapes; pin what does not fit and return True if the plan must be made again."""
    if not plan.cuts:
        return False
    trouble = _first_trouble(flow, decision, plan, model, example_inputs)
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
    flow: Flow, decision: Decision, plan: AlignedPlan, model: nn.Module, example_inputs: ExampleInputs
) -> tuple[Node | None, str] | None:
    """The first layer around which the small model does something else than the large one; None if all is well."""
    large = _run(flow, _skeleton(model, {}), example_inputs)
    skeleton = _skeleton(model, plan.cuts)
    resize_(skeleton, plan.edits, plan.widths)
    small = _run(flow, skeleton, example_inputs)
    last: Node | None = None
    for wanted, got in itertools.zip_longest(large, small):
        if wanted is None or got is None or wanted.what != got.what:
            return _next_mixer(flow, last), str(got or "it stops early")
        if wanted.mixer is not None:
            last = wanted.mixer.node
            shape = list(wanted.mixer.output.shape)
            shape[wanted.mixer.output.axis or 0] = len(decision.positions(wanted.mixer.output.labels))
            if got.shape != tuple(shape):
                return last, f"{wanted.mixer.layer} gives {got.shape}, not {tuple(shape)}"
    return None


@dataclass(frozen=True)
class _Event:
    """One operation with the numbers it was given, one layer's output, or how the run ended."""

    what: tuple[object, ...]
    mixer: Mixer | None = None
    shape: tuple[int, ...] = ()


def _run(flow: Flow, model: nn.Module, example_inputs: ExampleInputs) -> list[_Event]:
    """What a model without numbers does, operation by operation."""
    log = _Log()
    waiting: dict[str, list[Mixer]] = {}
    for mixer in flow.mixers:
        waiting.setdefault(mixer.layer, []).append(mixer)

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            mixers = waiting[name]
            mixer = mixers.pop(0) if len(mixers) > 1 else mixers[0]
            if isinstance(output, Tensor):
                log.events.append(_Event(("layer", name), mixer, tuple(output.shape)))

        return hook

    for name, module in model.named_modules(remove_duplicate=False):
        if name in waiting and not any(module.children()):
            module.register_forward_hook(after(name))
    model.eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), warnings.catch_warnings(), log:
        warnings.simplefilter("ignore")
        args, kwargs = pytree.tree_map(_empty_like, call_arguments(example_inputs))
        try:
            output = model(*args, **kwargs)
        except Exception as error:
            log.events.append(_Event((f"{type(error).__name__}: {error}",)))
        else:
            shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            log.events.append(_Event(("output", *shapes)))
    return log.events


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation and its numbers, for code like ``x / x.shape[1]`` that makes numbers of widths."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[_Event] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        numbers = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, float)]
        if name.rstrip("_") in POINTWISE:
            numbers += [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
        self.events.append(_Event((name, *numbers)))
        return func(*args, **(kwargs or {}))


def _skeleton(model: nn.Module, cuts: dict[str, Cut]) -> nn.Module:
    """A copy of the model's structure whose tensors have the planned shapes but no numbers."""
    memo: dict[int, Any] = {}
    with FakeTensorMode():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            memo.setdefault(id(parameter), nn.Parameter(_empty(parameter, cuts.get(name)), requires_grad=False))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            memo.setdefault(id(buffer), _empty(buffer, cuts.get(name)))
    return copy.deepcopy(model, memo)


def _empty(tensor: Tensor, how: Cut | None) -> Tensor:
    return torch.empty(tensor.shape if how is None else how.new_shape, dtype=tensor.dtype, device=tensor.device)


def _empty_like(leaf: Any) -> Any:
    return torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf


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
