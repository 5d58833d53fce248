"""Run a model on shapes alone, with a log of what it does: operations, the numbers they are given, layers' outputs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from narrowgate.flow.analysis import Mixer
from narrowgate.flow.cuts import Cut
from narrowgate.flow.layers import NORM_SWAPS, IndexedNorm
from narrowgate.flow.multihead import Widen
from narrowgate.flow.pointwise import POINTWISE
from narrowgate.flow.splits import kind_of_split
from narrowgate.flow.trace import ExampleInputs, call_arguments, copy_structure
from narrowgate.flow.unknown import has_numbers

# PyTorch's own layers that keep shapes and make no numbers of them: skipped, which halves the time.
_SHAPE_KEEPING = (
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.GELU,
    nn.Hardswish,
    nn.Sigmoid,
    nn.Hardsigmoid,
    nn.Dropout,
    nn.Identity,
)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
RESHAPES = ("view", "_unsafe_view", "_reshape_alias", "reshape")


@dataclass(frozen=True)
class Event:
    """One operation with the numbers it was given, one layer's output, or how the run ended."""

    what: tuple[object, ...]
    mixer: Mixer | None = None
    shape: tuple[Any, ...] = ()  # of a split, one for each part


def skeleton(model: nn.Module, cuts: dict[str, Cut], device: str) -> nn.Module:
    """A copy of the model's structure whose tensors have the planned shapes but no numbers."""
    memo: dict[int, Any] = {}
    with FakeTensorMode() if device == "fake" else contextlib.nullcontext():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            empty = _empty(parameter, cuts.get(name), device)
            memo.setdefault(id(parameter), nn.Parameter(empty, requires_grad=False))
        for name, buffer in model.named_buffers(remove_duplicate=False):
            memo.setdefault(id(buffer), _empty(buffer, cuts.get(name), device))
    return copy_structure(model, memo)


def run(model: nn.Module, mixers: list[Mixer], example_inputs: ExampleInputs, device: str) -> list[Event]:
    """What a model without numbers does; ``mixers`` are its layers whose outputs are of interest."""
    log = _Log()
    waiting: dict[str, list[Mixer]] = {}
    for mixer in mixers:
        waiting.setdefault(mixer.layer, []).append(mixer)
    hooks: list[RemovableHandle] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name in waiting and not any(module.children()):
            hooks.append(module.register_forward_pre_hook(log.pause))
            hooks.append(module.register_forward_hook(log.resume_after(name, waiting[name])))
        elif isinstance(module, Widen):
            hooks += log.without(module)
        elif type(module) in NORM_SWAPS.values():
            hooks += log.without(module)
            module.forward = _picked_if_it_fits(module)
        elif type(module) in _SHAPE_KEEPING:
            module.forward = _same
        elif type(module) in _NORMS:
            module.forward = _same_if_it_fits(module)
    numberless = torch.device("meta") if device == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    with numberless, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = pytree.tree_map(lambda leaf: _empty_like(leaf, device), call_arguments(example_inputs))
        try:
            with log, _quiet():
                output = model(*args, **kwargs)
        except Exception as error:
            log.events.append(Event((f"{type(error).__name__}: {error}",)))
        else:
            log.events.append(Event(("output", *map(_shape_or_number, pytree.tree_leaves(output)))))
    for hook in hooks:
        hook.remove()
    return log.events


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation and its numbers, for code like ``x / x.shape[1]`` that makes numbers of widths.

    What happens inside a layer of interest is one event: in the scatter layout it holds index operations too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.paused = False

    def pause(self, module: nn.Module, args: Any) -> None:
        self.paused = True

    def resume(self, module: nn.Module, args: Any, output: Any) -> None:
        self.paused = False

    def without(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks on a module whose operations are no part of the model."""
        return [module.register_forward_pre_hook(self.pause), module.register_forward_hook(self.resume)]

    def resume_after(self, name: str, mixers: list[Mixer]) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.paused = False
            mixer = mixers.pop(0) if len(mixers) > 1 else mixers[0]
            shape = tuple(output.shape) if isinstance(output, Tensor) else ()
            self.events.append(Event(("layer", name), mixer, shape))

        return hook

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # A reshape copies or not as memory lies; that may differ for a width of 1.
        name = "view" if name in RESHAPES else name
        if not self.paused and name != "clone":
            numbers = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, float)]
            if name.rstrip("_") in POINTWISE:
                numbers += [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
            self.events.append(Event((name, *numbers), None, _shapes_of_parts(name, args, result)))
        return result


def _shape_or_number(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return leaf if isinstance(leaf, (int, float, str)) else type(leaf)


def _shapes_of_parts(name: str, args: Any, result: Any) -> tuple[Any, ...]:
    """What a view or split made of a tensor; nothing for other operations and for slices that are all of it."""
    if name in RESHAPES:
        return tuple(result.shape)
    kind = kind_of_split(name)
    if kind == "split":
        return tuple(tuple(part.shape) for part in result)
    return tuple(result.shape) if kind == "slice" and result.shape != args[0].shape else ()


def _same(x: Tensor) -> Tensor:
    return x


def _same_if_it_fits(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    assert isinstance(norm, _BatchNorm)

    def forward(x: Tensor) -> Tensor:
        vector = norm.weight if norm.weight is not None else norm.running_mean
        if vector is not None and x.shape[1] != len(vector):
            raise RuntimeError(f"a BatchNorm of {len(vector)} channels was given {x.shape[1]}")
        return x

    return forward


def _picked_if_it_fits(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    assert isinstance(norm, IndexedNorm)

    def forward(x: Tensor) -> Tensor:
        if x.shape[1] != norm.num_features:
            raise RuntimeError(f"a norm that picks from {norm.num_features} channels was given {x.shape[1]}")
        return x if norm.gather is None else x.index_select(1, norm.gather)

    return forward


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs a traceback for every operation that fails on fake tensors; here failing is an answer."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _empty(tensor: Tensor, how: Cut | None, device: str) -> Tensor:
    shape = tensor.shape if how is None else how.new_shape
    return torch.empty(shape, dtype=tensor.dtype, device=_place(tensor, device))


def _empty_like(leaf: Any, device: str) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not has_numbers(leaf):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=_place(leaf, device))
    return torch.empty_like(leaf, device="meta" if device == "meta" else leaf.device)


def _place(tensor: Tensor, device: str) -> torch.device | str:
    if device == "meta":
        return "meta"
    return tensor.device if has_numbers(tensor) else "cpu"
