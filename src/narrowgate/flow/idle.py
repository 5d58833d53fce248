"""Modules that do nothing any more: blocks that give back what they get, and branches that give zeros.

A block whose branch is dead adds zeros to its input. It is replaced by ``nn.Identity``, launches, norms and all. A
branch that is a module, such as the MLP of a transformer's block, is replaced by one of PyTorch's that gives zeros, and
the norm in front of it goes too. This is proved in the graph, in training mode as far as memory goes, and what no graph
shows is tried (``tried.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import Node
from torch.nn.modules.batchnorm import _NormBase

from narrowgate.flow.analysis import Flow
from narrowgate.flow.copies import copy_structure
from narrowgate.flow.decide import Decision
from narrowgate.flow.layers import Zeros
from narrowgate.flow.mixing import is_patched
from narrowgate.flow.rules import RULES
from narrowgate.flow.state import State
from narrowgate.flow.trace import ExampleInputs, Graph, TraceError, is_in_place, memory_of, writes
from narrowgate.flow.tried import IDENTITY, UNREAD, ZEROS, go_unmissed
from narrowgate.flow.unchanged import alike, is_zero, keeps_size, origin
from narrowgate.flow.unknown import lacks_numbers

if TYPE_CHECKING:
    from narrowgate.flow.plan import Plan

_NORMS = (nn.LayerNorm, nn.GroupNorm, _NormBase, *(getattr(nn, kind) for kind in ("RMSNorm",) if hasattr(nn, kind)))


def idle_modules(
    flow: Flow,
    decision: Decision,
    model: nn.Module,
    example_inputs: ExampleInputs,
    layout: str,
    tracer: Callable[..., Graph],
) -> dict[str, str]:
    """The modules that do nothing, or give zeros, once a decision is carried out: by name, which of the two.

    ``unread`` is what a norm gives that only the latter read.
    """
    if lacks_numbers(model) or not any(is_zero(flow, node) for node in flow.states if node.op == "call_function"):
        return {}
    calls = _calls(flow)
    found = dict.fromkeys(_outermost(_identities(flow, calls), flow), IDENTITY)
    zeros = [name for name in _zeros(flow, decision, calls) if not is_inside(name, found)]
    found |= dict.fromkeys(_outermost(zeros, None), ZEROS)
    training = _in_training(flow, model, example_inputs, tracer) if found else None
    if training is None:
        return {}
    found = {name: kind for name, kind in found.items() if _may_go_from(*training, name, kind)}
    without = partial(shared_without_idle, layout=layout)

    def unmissed(some: Mapping[str, str]) -> bool:
        return go_unmissed(model, some, example_inputs, partial(without, idle=some))

    idle = found
    if found and not unmissed(found):  # what the code around one block does not allow, it allows for none of its class
        kinds: dict[type[nn.Module], dict[str, str]] = {}
        for name, kind in found.items():
            kinds.setdefault(type(flow.modules[name]), {})[name] = kind
        idle = {}
        for several in kinds.values():
            idle |= several if unmissed(idle | several) else {}
    unread = {*_norms_before(flow, calls, idle)} & {*_norms_before(*training, idle)}
    norms = {name: UNREAD for name in calls if name in unread}
    return idle | norms if norms and unmissed(idle | norms) else idle


def _in_training(
    flow: Flow, model: nn.Module, example_inputs: ExampleInputs, tracer: Callable[..., Graph]
) -> tuple[Flow, dict[str, _Call]] | None:
    """What a model does in training mode; None where that can't be traced."""
    try:
        graph = tracer(model, example_inputs, train=True, frozen=flow.frozen_norms)
    except TraceError:
        return None
    other = Flow(graph, model, flow.constants).run(RULES)
    return other, _calls(other)


def _may_go_from(flow: Flow, calls: dict[str, _Call], name: str, kind: str) -> bool:
    """Whether a module has one input and one output in training mode, too, and nobody writes to its memory there."""
    if name not in calls or not alike(calls[name].given, calls[name].result):
        return False
    return _can_go(flow, name, calls[name]) and (kind != IDENTITY or _memory_is_free(flow, calls[name]))


def idle_parts(model: nn.Module, idle: Mapping[str, str], layout: str) -> dict[int, nn.Module]:
    """What takes the place of a model's idle modules, by the ids of those."""
    # Nothing is above infinity, so that a Threshold gives zeros: an ordinary module, which takes one argument.
    zeros = partial(nn.Threshold, math.inf, 0.0) if layout == "aligned" else Zeros
    made = {IDENTITY: nn.Identity, UNREAD: nn.Identity, ZEROS: zeros}
    return {id(model.get_submodule(name)): made[kind]() for name, kind in idle.items()}


def shared_without_idle(model: nn.Module, idle: Mapping[str, str], layout: str) -> nn.Module:
    """A copy of the module tree without its idle modules that shares all tensors with the original."""
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy_structure(model, tensors | idle_parts(model, idle, layout))


def without_idle(plan: Plan, idle: Mapping[str, str], model: nn.Module) -> Plan:
    """The plan with these modules, their layers and their parameters gone."""
    verbs = {IDENTITY: "does nothing any more", ZEROS: "gives zeros", UNREAD: "is not read any more"}
    rows = []
    for row in plan.rows:
        block = next((name for name in idle if is_inside(row.layer, [name])), None)
        if block is not None:
            row = dataclasses.replace(row, kept=0, used=0, why=f"{block} {verbs[idle[block]]}")
        rows.append(row)
    walls = [wall for wall in plan.walls if not is_inside(wall.layer, idle)]
    gone = sum(
        math.prod(plan.cuts[name].new_shape) if name in plan.cuts else parameter.numel()
        for name, parameter in model.named_parameters()
        if is_inside(name, idle)
    )
    for edit in plan.edits.values():
        if edit.new_bias and is_inside(edit.layer, idle):
            how = plan.cuts.get(edit.weight)
            shape = tuple(model.get_parameter(edit.weight).shape) if how is None else how.new_shape
            gone += shape[int(edit.transposed)]
    return dataclasses.replace(
        plan, rows=rows, walls=walls, idle=dict(idle), parameters_after=plan.parameters_after - gone
    )


def beside_idle(plan: Plan) -> Plan:
    """The part of a plan that is about what stays: ``compact_`` cuts idle modules, all else drops them."""
    if not plan.idle:
        return plan
    return dataclasses.replace(
        plan,
        cuts={name: cut for name, cut in plan.cuts.items() if not is_inside(name, plan.idle)},
        edits={name: edit for name, edit in plan.edits.items() if not is_inside(name, plan.idle)},
        widths={name: width for name, width in plan.widths.items() if not is_inside(name, plan.idle)},
    )


@dataclasses.dataclass
class _Call:
    """The only call of a module: all that it did, what it read that is no parameter, and what others read of it."""

    nodes: set[Node]
    given: Node
    result: Node
    readers: dict[Node, set[Node]]  # of every result in the graph


def _calls(flow: Flow) -> dict[str, _Call]:
    """The modules that hold layers, run once and have one input and one output."""
    nodes: dict[str, set[Node]] = {}
    keys: dict[int, set[str]] = {}
    for node in flow.graph.nodes:
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path in flow.modules and node.op == "call_function":
                nodes.setdefault(path, set()).add(node)
                keys.setdefault(id(flow.modules[path]), set()).add(str(key))
    readers: dict[Node, set[Node]] = {}
    reads: dict[Node, list[Node]] = {}
    for node in flow.graph.nodes:
        if node.op == "call_function":
            reads[node] = [flow.reads(node, source) for source in node.all_input_nodes]
            for source in reads[node]:
                readers.setdefault(source, set()).add(node)
    handed_out = {flow.resolve(node) for node in (*flow.graph.outputs, *flow.graph.written)}
    calls = {}
    for name, inside in nodes.items():
        module = flow.modules[name]
        if not name or len(keys[id(module)]) > 1:
            continue
        outer = (source for node in inside for source in reads[node] if source not in inside)
        inputs = list(dict.fromkeys(source for source in outer if source not in flow.graph.tensors))
        outputs = [node for node in inside if node in handed_out or not readers.get(node, set()) <= inside]
        if len(inputs) == len(outputs) == 1:
            calls[name] = _Call(inside, inputs[0], outputs[0], readers)
    return calls


def _identities(flow: Flow, calls: dict[str, _Call]) -> Iterator[str]:
    """Modules with layers that give back what they get."""
    for name, call in calls.items():
        same = alike(call.given, call.result) and origin(flow, call.result) is origin(flow, call.given)
        if same and _has_layers(flow, name) and _can_go(flow, name, call) and _memory_is_free(flow, call):
            yield name


def _zeros(flow: Flow, decision: Decision, calls: dict[str, _Call]) -> Iterator[str]:
    """Modules of several layers that give zeros, in the shape of what they get at any size."""
    for name, call in calls.items():
        if not any(flow.modules[name].children()) or not is_zero(flow, call.result):
            continue
        same = alike(call.given, call.result) and all(keeps_size(node) for node in call.nodes)
        same = same and _width(flow, decision, call.given) == _width(flow, decision, call.result)
        if same and _has_layers(flow, name) and _can_go(flow, name, call):
            yield name


def _norms_before(flow: Flow, calls: dict[str, _Call], idle: Mapping[str, str]) -> Iterator[str]:
    """PyTorch's norms that nothing reads but modules that give zeros."""
    gone = {node for name in idle for node in calls[name].nodes}
    given = {calls[name].given for name, kind in idle.items() if kind == ZEROS}
    for name, call in calls.items():
        if isinstance(flow.modules[name], _NORMS) and call.result in given and alike(call.given, call.result):
            unread = call.readers[call.result] <= gone and call.result not in map(flow.resolve, flow.graph.outputs)
            if unread and _can_go(flow, name, call):
                yield name


def _has_layers(flow: Flow, name: str) -> bool:
    return any(is_inside(mixer.layer, [name]) for mixer in flow.mixers)


def _can_go(flow: Flow, name: str, call: _Call) -> bool:
    """Whether nobody looks at what happens in a module, and its tensors are nothing else's."""
    module = flow.modules[name]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(is_patched(part) or getattr(part, table) for part in module.modules() for table in hooks):
        return False
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for named in (flow.modules[""].named_parameters, flow.modules[""].named_buffers):
        if any(id(t) in own and not is_inside(key, [name]) for key, t in named(remove_duplicate=False)):
            return False
    places = [node for node, tensor in flow.graph.tensors.items() if is_inside(tensor, [name])]
    read_here = all(call.readers.get(node, set()) <= call.nodes for node in places)
    return read_here and not any(is_inside(tensor, [name]) for tensor in flow.graph.written.values())


def _memory_is_free(flow: Flow, call: _Call) -> bool:
    """Whether what goes into a module and what comes out may be one tensor.

    Nobody writes to either of them afterwards, and the model does not hand out both, or what came in from outside.
    """
    graph = flow.graph
    memory = memory_of(graph.nodes)
    given, result = memory[call.given], memory[call.result]
    if given is result:
        return True
    if graph.functionalised:  # who writes where is not to be seen any more
        return False
    start = min(flow.order[node] for node in call.nodes)
    for node in graph.nodes:
        if node.op == "call_function" and writes(node) and flow.order[node] >= start:
            targets = [node.args[0]] if is_in_place(node) else node.all_input_nodes
            touched = {memory[target] for target in targets if isinstance(target, Node)}
            if given in touched or (result in touched and node not in call.nodes):
                return False
    handed_out = {memory[flow.resolve(node)] for node in graph.outputs}
    return result not in handed_out or (given not in handed_out and given.op != "placeholder")


def _width(flow: Flow, decision: Decision, node: Node) -> int | None:
    """How many channels a tensor has left, of those that are labelled."""
    state = flow.states.get(node)
    return len(decision.positions(state.labels)) if isinstance(state, State) and state.axis is not None else None


def is_replaced(module: nn.Module) -> bool:
    """Whether this is what took the place of an idle module."""
    return type(module) in (nn.Identity, nn.Threshold, Zeros)


def is_inside(name: str, blocks: Iterable[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _outermost(names: Iterable[str], flow: Flow | None) -> list[str]:
    """Those that are not inside another; with a flow, no bare lists of modules: each of theirs goes by itself."""
    lists = (nn.Sequential, nn.ModuleList)
    found = [name for name in names if flow is None or type(flow.modules[name]) not in lists]
    return [name for name in found if not is_inside(name, [other for other in found if other != name])]
