"""Parameters, multiply-adds and activations of any model, counted while it runs once without computing anything."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from narrowgate.dtensors import check_whole
from narrowgate.flow.copies import copy_structure
from narrowgate.flow.skeleton import quiet
from narrowgate.flow.trace import ExampleInputs, call_arguments
from narrowgate.gated import GatedLayer
from narrowgate.gates import Gate
from narrowgate.measure.formulas import FORMULAS, is_free, op_name
from narrowgate.measure.summary import Layer, Summary, Uncounted, compare
from narrowgate.weights import uncompiled

__all__ = ["CountError", "Layer", "Summary", "Uncounted", "compare", "summarize"]


class CountError(RuntimeError):
    """A model that can't be counted, since it does not run on its example."""


def summarize(model: nn.Module, example_inputs: ExampleInputs, *, batch_axis: int | None = 0) -> Summary:
    """Count what one sample costs in eval mode, layer by layer; the model is not changed and nothing is computed.

    Multiply-adds are those of convolutions, linear layers, matrix products, attention and recurrent layers; norms,
    pooling and pointwise operations are free, as in published figures. Work done in a module without a layer
    (``torch.matmul``, ``F.linear``) is the innermost module's. Gates are counted as they are: a closed one saves
    nothing before ``compact``. Activations are the results of multiply-adds and the outputs of other layers with
    parameters.

    Args:
        batch_axis: where the samples lie in the inputs; only the first is run. None runs the inputs as they are.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"summarize needs an nn.Module, got {type(model).__name__}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError(
            f"{type(model).__name__} is compiled by torch.jit, which hides its code; summarize the model itself"
        )
    model = uncompiled(model)
    _refuse_lazy(model)
    check_whole(model)
    args, kwargs = call_arguments(example_inputs)
    if batch_axis is not None:
        args, kwargs = _first_sample(args, kwargs, batch_axis)
    shapes = [" x ".join(map(str, leaf.shape)) for leaf in _tensors((args, kwargs))]
    records = _run(model, args, kwargs, batch_axis)
    return Summary(type(model).__name__, "; ".join(shapes), _layers(model, records), _uncounted(records))


@dataclass
class _Record:
    """What happened in one module."""

    calls: int = 0
    output_shape: tuple[int, ...] | None = None
    output_elements: int = 0
    multiply_adds: int = 0
    results: int = 0
    unknown: dict[str, int] = field(default_factory=lambda: defaultdict(int))


_Records = dict[str, _Record]


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every operation to the record of the innermost module that is running."""

    def __init__(self, record: Callable[[], _Record]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        formula = FORMULAS.get(op_name(func))
        if formula is None and not is_free(func):
            with self:  # under inference_mode, composite operations come whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            out = _tensors(result)[0]
            self.record().multiply_adds += formula(args, out)
            self.record().results += out.numel()
        elif not is_free(func):
            self.record().unknown[op_name(func)] += 1
        return result


@contextmanager
def _following(model: nn.Module) -> Iterator[tuple[_Records, Callable[[], _Record]]]:
    """Records by module name, and the record of the module that runs at the moment."""
    names = {module: name for name, module in model.named_modules()}
    records: _Records = {name: _Record() for name in names.values()}
    running = [""]

    def enter(module: nn.Module, args: Any) -> None:
        if module in names:
            running.append(names[module])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if module not in names:
            return
        running.pop()
        record = records[names[module]]
        record.calls += 1
        if tensors := _tensors(output):
            record.output_shape = tuple(tensors[0].shape)
            record.output_elements += tensors[0].numel()

    # Hooks for all modules, not on these: a layer may behave differently with a hook on it.
    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield records, lambda: records[running[-1]]
    finally:
        for handle in handles:
            handle.remove()


def _run(model: nn.Module, args: Any, kwargs: Any, batch_axis: int | None) -> _Records:
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        fake_args, fake_kwargs = pytree.tree_map_only(Tensor, fake.from_tensor, (args, kwargs))
        with _borrowed(model) as copied, _following(copied) as (records, current), fake, _Counter(current), quiet():
            copied(*fake_args, **fake_kwargs)
        return records
    except Exception:  # a forward that reads the values of tensors, or calls foreign code, has to run for real
        pass
    args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))  # a forward may overwrite its inputs
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with (
            torch.random.fork_rng(devices=devices),
            _borrowed(model) as copied,
            _following(copied) as (records, current),
            _Counter(current),
        ):
            copied(*args, **kwargs)
        return records
    except Exception as error:
        hint = "" if batch_axis is None else "; batch_axis says where samples lie (None: run the inputs as they are)"
        raise CountError(
            f"{type(model).__name__} fails on one sample of the example inputs: {type(error).__name__}: {error}. "
            f"Check that model(*example_inputs) runs in eval mode{hint}"
        ) from error


@contextmanager
def _borrowed(model: nn.Module) -> Iterator[nn.Module]:
    """A copy in eval mode that shares the parameters; no gradients, no compiled code, attention step by step.

    A copy, because a forward may leave things behind on its module, and here they would hold no numbers.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    for module in model.modules():  # results that hang on a module (the old weight_norm's weight) can't be copied
        memo |= {id(each): each for each in vars(module).values() if isinstance(each, Tensor) and not each.is_leaf}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield copy_structure(model, memo).eval()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _layers(model: nn.Module, records: _Records) -> tuple[Layer, ...]:
    """A row for every module that has parameters of its own or multiplied something."""
    seen: set[nn.Parameter] = set()
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, Gate):
            continue
        parameters = _count_new(module, seen)
        owned = [part for child in module.children() if isinstance(child, Gate) for part in child.modules()]
        gates = sum(_count_new(part, seen) for part in owned)  # a group's numbers lie in a gate within the layer's
        record = records[name]
        has_own = any(parameter is not None for parameter in module._parameters.values())
        if not (has_own or gates or record.multiply_adds or record.results):
            continue
        kind = module.plain_class.__name__ if isinstance(module, GatedLayer) else type(module).__name__
        leaf = all(isinstance(child, Gate) for child in module.children())
        activations = record.results or (record.output_elements if leaf else 0)
        rows.append(
            Layer(name, kind, record.output_shape, parameters, gates, record.multiply_adds, activations, record.calls)
        )
    return tuple(rows)


def _count_new(module: nn.Module, seen: set[nn.Parameter]) -> int:
    """Elements of a module's own parameters that were not seen yet; they are from now on."""
    new = {parameter for parameter in module.parameters(recurse=False) if parameter not in seen}
    seen |= new
    return sum(parameter.numel() for parameter in new)


def _uncounted(records: _Records) -> tuple[Uncounted, ...]:
    calls: dict[str, int] = defaultdict(int)
    layers: dict[str, list[str]] = defaultdict(list)
    for name, record in records.items():
        for op, times in record.unknown.items():
            calls[op] += times
            layers[op].append(name or "the model itself")
    return tuple(Uncounted(op, calls[op], tuple(layers[op])) for op in calls)


def _first_sample(args: tuple[Any, ...], kwargs: dict[str, Any], axis: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with one sample left of each tensor that is as long as the first one along this axis.

    Tensors within a dict or tuple too; a list may be one of samples, as detectors take them, and stays as it is.
    """

    def is_list(tree: Any) -> bool:
        return isinstance(tree, list)

    leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_list)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > axis]
    if not found:
        return args, kwargs
    batch = found[0].shape[axis]

    def first(arg: Any) -> Any:
        fits = isinstance(arg, Tensor) and arg.dim() > axis and arg.shape[axis] == batch
        return arg.narrow(axis, 0, 1) if fits and batch else arg

    one: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(first, (args, kwargs), is_leaf=is_list)
    return one


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _refuse_lazy(model: nn.Module) -> None:
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise ValueError(f"{', '.join(lazy)} have no shape yet; run the model once on an example before counting")
