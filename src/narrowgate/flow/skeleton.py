"""Run a model on shapes alone, with a log of what it does."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from narrowgate.flow.analysis import Across, Mixer
from narrowgate.flow.copies import copy_structure
from narrowgate.flow.cuts import Cut
from narrowgate.flow.events import Data, Event, Log
from narrowgate.flow.keepsakes import nothing_kept
from narrowgate.flow.layers import NORM_SWAPS, SWAPS, IndexedNorm
from narrowgate.flow.mixing import is_patched
from narrowgate.flow.multihead import Widen
from narrowgate.flow.trace import ExampleInputs, call_arguments
from narrowgate.flow.unknown import has_numbers, named_tensors

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
_LAYERS = (*SWAPS, *SWAPS.values())


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


def run(
    model: nn.Module, mixers: list[Mixer], example_inputs: ExampleInputs, device: str, across: Mapping[str, Across]
) -> list[Event]:
    """What a model without numbers does; ``mixers`` are its layers whose outputs are of interest.

    ``across`` are norms that may be narrower than they were, and then compute otherwise.
    """
    widened = {id(t) for m in model.modules() if isinstance(m, nn.MultiheadAttention) for t in m.parameters()}
    log = Log({id(tensor): name for name, tensor in named_tensors(model) if id(tensor) not in widened})
    waiting: dict[str, list[Mixer]] = {}
    for mixer in mixers:
        waiting.setdefault(mixer.layer, []).append(mixer)
    hooks: list[RemovableHandle] = []
    shortened: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name in waiting and not any(module.children()):
            if _is_own(module, _LAYERS):
                hooks.append(module.register_forward_pre_hook(log.pause))
            # Ours come next to the layer: what the user's hooks do is no part of it.
            after = log.resume_after(name, waiting[name])
            hooks.append(module.register_forward_hook(after, prepend=True, with_kwargs=True))
        elif isinstance(module, Widen):
            hooks += log.without(module)
        elif type(module) in NORM_SWAPS.values():
            hooks += log.without(module)
            shortened[module] = _picked_if_it_fits(module, log.called(name))
        elif name in across and "weight" in module._parameters:  # an idle one is an identity now
            shortened[module] = _same_along(module, across[name].axis, log.called(name))
        elif _is_own(module, _SHAPE_KEEPING):
            shortened[module] = _same(log.called(name))
        elif _is_own(module, _NORMS):
            shortened[module] = _same_if_it_fits(module, log.called(name))
    for module, forward in shortened.items():
        module.forward = forward
    numberless = torch.device("meta") if device == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    with numberless, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = pytree.tree_map(lambda leaf: _empty_like(leaf, device), call_arguments(example_inputs))
        try:
            log.add(Event(("inputs",)), (args, kwargs))
            with nothing_kept(model), _same_luck(), _plain_flex_attention(), log, Data(log), quiet():
                output = model(*args, **kwargs)
        except Exception as error:
            log.events.append(Event((f"{type(error).__name__}: {error}",)))
        else:
            leaves = pytree.tree_leaves(output)
            log.events.append(Event(("output", *map(_shape_or_number, leaves), *log.origins_of(leaves))))
    for hook in hooks:
        hook.remove()
    for module in shortened:
        del module.forward
    return log.events


def _shape_or_number(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return leaf if isinstance(leaf, (int, float, str)) else type(leaf)


def _is_own(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module runs the code of one of these classes, not some of the user's."""
    return type(module) in kinds and not is_patched(module)


def _same(called: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        return called(input, input)

    return forward


def _same_if_it_fits(norm: nn.Module, called: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    assert isinstance(norm, _BatchNorm)

    def forward(input: Tensor) -> Tensor:
        vector = norm.weight if norm.weight is not None else norm.running_mean
        if vector is not None and input.shape[1] != len(vector):
            raise RuntimeError(f"a BatchNorm of {len(vector)} channels was given {input.shape[1]}")
        return called(input, input)

    return forward


def _same_along(norm: nn.Module, axis: int, called: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    size = len(norm.get_parameter("weight"))

    def forward(input: Tensor) -> Tensor:
        if input.shape[axis] != size:
            raise RuntimeError(f"a norm of {size} channels was given {input.shape[axis]}")
        return called(input, input)

    return forward


def _picked_if_it_fits(norm: nn.Module, called: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    assert isinstance(norm, IndexedNorm)

    def forward(input: Tensor) -> Tensor:
        if input.shape[1] != norm.num_features:
            raise RuntimeError(f"a norm that picks from {norm.num_features} channels was given {input.shape[1]}")
        return called(input, input if norm.gather is None else input.index_select(1, norm.gather))

    return forward


@contextlib.contextmanager
def _same_luck() -> Iterator[None]:
    """What Python and NumPy draw is the same in every run: by it LayerDrop chooses the layers, and mixup its share."""
    python, array = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


@contextlib.contextmanager
def _plain_flex_attention() -> Iterator[None]:
    """Without torch.compile, which it starts by itself and which does not go with a log of operations."""
    module, switch = sys.modules.get("torch.nn.attention.flex_attention"), "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    before = getattr(module, switch, None)
    if before is None:
        yield
        return
    setattr(module, switch, True)
    try:
        yield
    finally:
        setattr(module, switch, before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
