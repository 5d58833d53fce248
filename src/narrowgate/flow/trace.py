"""From a model to a graph of ATen operations whose parameters are known by name."""

from __future__ import annotations

import gc
import io
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from narrowgate.flow.copies import copy_structure
from narrowgate.flow.keepsakes import nothing_kept
from narrowgate.flow.regions import inlined, readers
from narrowgate.flow.unknown import fake_tensors, lacks_numbers

ExampleInputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]

# Operations that may hand back their input itself though their schema does not say so.
_MAY_ALIAS = frozenset("getitem type_as dropout feature_dropout alpha_dropout feature_alpha_dropout".split())


class TraceError(RuntimeError):
    """torch.export could not trace the model."""


@dataclass(frozen=True)
class Graph:
    """The operations of one forward pass in order, the names of its parameters and buffers, and its outputs."""

    nodes: tuple[Node, ...]
    tensors: dict[Node, str]
    outputs: tuple[Node, ...]
    functionalised: bool = False  # whether operations that overwrite tensors were replaced by ordinary ones
    written: dict[Node, str] = field(default_factory=dict)  # results that stay: for the next forward pass
    readers: dict[str, list[Node]] = field(default_factory=dict)  # of parameters and buffers, wherever they are
    train: bool = False

    def uses(self) -> dict[str, int]:
        """How many times each parameter or buffer is read, being handed out as an output included."""
        counts: dict[str, int] = {}
        for node, name in self.tensors.items():
            counts[name] = counts.get(name, 0) + len(node.users)
        return counts


def op_name(node: Node) -> str:
    """The operation without overload; in-place ones keep their underscore: ``relu_``."""
    return name_of(node.target)


def name_of(target: Any) -> str:
    """What an operation is called: PyTorch's own without namespace, as nobody else's is what its name says."""
    if target is torch.ops.aten.view.dtype:  # no other shape, but other numbers from the same bits
        return "view_as_dtype"
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return str(getattr(target, "__name__", target))
    return str(packet.__name__) if target.namespace == "aten" else f"{target.namespace}.{packet.__name__}"


def layer_of(node: Node) -> str:
    """The name of the innermost module that ran this operation, or the operation's own where there is none."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return str(path).removeprefix("L['self'].").removeprefix("L['self']") or "the model itself"


def trace(
    model: nn.Module, example_inputs: ExampleInputs, *, train: bool = False, frozen: Collection[str] = ()
) -> Graph:
    """Trace an ungated model with torch.export; the model is left in the mode it was in.

    Args:
        frozen: layers that are in eval mode whatever the rest is in.
    """
    args, kwargs = call_arguments(example_inputs)
    if lacks_numbers(model):
        fakes, args, kwargs = fake_tensors(model, args, kwargs)
        model = copy_structure(model, fakes)
    with in_mode(model, train, frozen), _batches_not_counted(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _no_stack_traces(), exporting(model):
                program = torch.export.export(model, args, kwargs, strict=False)
            graph = inlined(program.graph_module)
            _refuse_unknown_sizes(graph)
            functionalised = _mutates_through_views(list(graph.nodes)) or (
                not train and _writes_to_tensors(graph, program)
            )
            if functionalised:
                program = program.run_decompositions({})
                graph = inlined(program.graph_module)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TraceError(
                f"torch.export cannot trace {type(model).__name__} with these inputs: {type(error).__name__}: "
                f"{reason}. {_remedy(model, reason)}"
            ) from error
    _slice_instead_(graph)
    signature = program.graph_signature
    by_placeholder = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    nodes = tuple(graph.nodes)
    first = first_names(model)
    tensors = {node: first.get(name, name) for node in nodes if (name := by_placeholder.get(node.name)) is not None}
    mutated = {**signature.buffers_to_mutate, **getattr(signature, "parameters_to_mutate", {})}
    results = zip(_results(program.graph), _results(graph), strict=True)
    named = [(before.name, node) for before, node in results if isinstance(before, Node)]
    outputs = tuple(node for name, node in named if name not in mutated)
    written = {node: first[mutated[name]] for name, node in named if name in mutated}
    read_by: dict[str, list[Node]] = {}
    for node in program.graph.nodes:
        if (name := by_placeholder.get(node.name)) is not None:
            read_by.setdefault(first.get(name, name), []).extend(readers(program.graph_module, node))
    return Graph(nodes, tensors, outputs, functionalised, {} if train else written, read_by, train)


def _refuse_unknown_sizes(graph: fx.Graph) -> None:
    """Raise where the size of a tensor depends on numbers, as that of ``x[x > 0]`` does: nobody could replay it."""
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
                raise ValueError(f"the size of what {op_name(node)} gives depends on the numbers that it is given")


def _slice_instead_(graph: fx.Graph) -> None:
    """Replace each ``tensor_split`` by the slices that it is when it runs, for rules and replay to see the same."""
    for node in [node for node in graph.nodes if op_name(node) == "tensor_split"]:
        axis = int(node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0))
        ends = np.cumsum([int(part.shape[axis]) for part in node.meta["val"]]).tolist()
        for part in list(node.users):
            which = int(part.args[1])
            with graph.inserting_before(part):
                bounds = (axis, ends[which - 1] if which else 0, ends[which])
                piece = graph.call_function(torch.ops.aten.slice.Tensor, (node.args[0], *bounds))
            piece.meta = dict(part.meta)
            part.replace_all_uses_with(piece)
            graph.erase_node(part)
        graph.erase_node(node)


def _results(graph: fx.Graph) -> Any:
    (result,) = next(node for node in graph.nodes if node.op == "output").args
    assert isinstance(result, (tuple, list))
    return result


def _remedy(model: nn.Module, reason: str) -> str:
    if isinstance(model, DistributedDataParallel):
        return "Give the model inside it, model.module"
    if "is not a known type" in reason:
        return "If that is a dataclass, call torch.export.register_dataclass(it) once, before ng.plan"
    if "uninitialized parameter" in reason:
        return "Run the model once on the example inputs, so that its lazy layers get their weights"
    if "constant's list" in reason:
        return (
            "Something hides a tensor from it: .data (write .detach()), gradients that the forward itself takes, or "
            "torch.vmap"
        )
    return "Check that model(*example_inputs) runs and that its forward has no branch on tensor values"


class Tracer:
    """``trace`` for a model that is planned again and again as its gates close: anew only when it has changed shape."""

    def __init__(self) -> None:
        self._found: dict[bool, tuple[object, Graph]] = {}

    def __call__(
        self, model: nn.Module, example_inputs: ExampleInputs, *, train: bool = False, frozen: Collection[str] = ()
    ) -> Graph:
        """The model's graph."""
        tensors = [*model.named_parameters(), *model.named_buffers()]
        shapes = tuple((name, tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors)
        key = id(example_inputs), shapes, tuple(map(_settings, model.modules())), frozenset(frozen)
        if train not in self._found or self._found[train][0] != key:
            self._found[train] = key, trace(model, example_inputs, train=train, frozen=frozen)
        return self._found[train][1]


def _settings(module: nn.Module) -> tuple[object, ...]:
    """What a module is, and the numbers and switches that it holds: its forward may go another way by them."""
    held = ((key, value) for key, value in vars(module).items() if key != "training")
    return type(module), *(item for item in held if isinstance(item[1], (bool, int, float, str)))


def first_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer, mapped to the first name of the same tensor (tied weights)."""
    seen: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: seen.setdefault(id(tensor), name) for name, tensor in named}


def call_arguments(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments: a tensor, a tuple of arguments, or a dict of keywords."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise TypeError(
        "example_inputs must be a tensor, a tuple of arguments or a dict of keywords, "
        f"got {type(example_inputs).__name__}"
    )


@contextmanager
def _no_stack_traces() -> Iterator[None]:
    """Nobody reads where in the source each operation came from, and finding out takes a quarter of the time."""
    config = torch.fx.config
    before = getattr(config, "do_not_emit_stack_traces", None)  # PyTorch 2.9 and newer
    if before is not None:
        config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        if before is not None:
            config.do_not_emit_stack_traces = before


@contextmanager
def exporting(model: nn.Module) -> Iterator[None]:
    """For calls of torch.export: nothing is printed or left behind, and parts in torch.compile are traced plainly."""
    compiler = sys.modules.get("torch._dynamo.config")
    plainly = nullcontext() if compiler is None else compiler.patch(error_on_nested_fx_trace=False)  # PyTorch 2.6
    with _no_partial_graph(), nothing_kept(model), plainly:
        yield


@contextmanager
def _no_partial_graph() -> Iterator[None]:
    """Where torch.export fails, it prints the graph so far, hundreds of lines, before an error that says enough."""
    printed = io.StringIO()
    with redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())  # it did not fail: this is the model's own


@contextmanager
def without_gc() -> Iterator[None]:
    """Planning makes many small objects and frees few: collecting garbage on the way costs a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def in_mode(model: nn.Module, train: bool, frozen: Collection[str] = ()) -> Iterator[None]:
    """Put a model in training or eval mode, all but some layers, and every module back as it was."""
    before = [(module, module.training) for module in model.modules()]
    model.train(train)
    for name in frozen:
        model.get_submodule(name).eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _batches_not_counted(model: nn.Module) -> Iterator[None]:
    """A BatchNorm that averages over all batches reads their number, which can't be traced, for a factor alone."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.momentum is None]
    for norm in norms:
        norm.momentum = 0.1
    try:
        yield
    finally:
        for norm in norms:
            norm.momentum = None


@contextmanager
def buffers_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What happens to modules' own buffers in between is undone, in place where it was done so."""
    kept = [(owner, key, b, b.clone()) for owner in modules for key, b in owner._buffers.items() if b is not None]
    try:
        yield
    finally:
        for owner, key, buffer, before in kept:
            owner._buffers[key] = buffer
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def is_in_place(node: Node) -> bool:
    """Whether an operation overwrites its first argument, and that alone: not a list of them, as ``_foreach_add_``."""
    name = op_name(node)
    if node.op != "call_function" or not name.endswith("_") or name.startswith("__") or not writes(node):
        return False
    if not node.args or not isinstance(node.args[0], Node):
        return False
    first = node.target._schema.arguments[0].alias_info  # type: ignore[union-attr]
    return first is not None and bool(first.is_write)


def overwritten(node: Node, graph: Graph) -> bool:
    """Whether an operation may write to the memory of this result or go through it by itself, or it is handed out."""
    if graph.functionalised:
        return True
    waiting = [node]
    while waiting:
        at = waiting.pop()
        for user in at.users:
            if user.op == "output" or (writes(user) and (user.args[0] is at or not is_in_place(user))):
                return True
            if user.target is torch.ops.aten.as_strided.default:
                return True
            if user.args and user.args[0] is at and _shares_memory(user):
                waiting.append(user)
    return False


def memory_of(nodes: Iterable[Node]) -> dict[Node, Node]:
    """For each result, the first one that has the memory which it may share."""
    memory: dict[Node, Node] = {}
    for node in nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        memory[node] = memory[source] if source is not None and _shares_memory(node) else node
    return memory


def _mutates_through_views(nodes: list[Node]) -> bool:
    """Whether a tensor is overwritten while another one that shares its memory is read afterwards.

    Simple in-place operations (``relu_``) need no functionalisation; that pass would double the tracing time.
    """
    order = {node: i for i, node in enumerate(nodes)}
    memory = memory_of(nodes)
    sharing: dict[Node, list[Node]] = {}
    for node in nodes:
        if writes(node) and not is_in_place(node):
            return True
        if is_in_place(node):
            others = [other for other in sharing.get(memory[node], []) if other is not node.args[0]]
            if any(order[user] > order[node] for other in others for user in other.users):
                return True
        sharing.setdefault(memory[node], []).append(node)
    return False


def _writes_to_tensors(graph: fx.Graph, program: ExportedProgram) -> bool:
    """Whether a forward pass leaves something in a buffer or parameter: a count, a running average."""
    signature = program.graph_signature
    tensors = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    return any(writes(node) and first.name in tensors for node, first in memory_of(graph.nodes).items())


def writes(node: Node) -> bool:
    """Whether an operation overwrites something that it is given."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _shares_memory(node: Node) -> bool:
    """Whether the result may be a view of the first argument, by the operation's own declaration."""
    schema = getattr(node.target, "_schema", None)
    declared = schema is not None and any(argument.alias_info is not None for argument in schema.arguments)
    return declared or op_name(node) in _MAY_ALIAS
