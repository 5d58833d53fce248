"""A log of what a model does when it runs: operations, the numbers they are given, layers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.hooks import RemovableHandle

from narrowgate.flow.analysis import Mixer
from narrowgate.flow.splits import asked_for, kind_of_split, sliced
from narrowgate.flow.trace import name_of
from narrowgate.flow.unknown import has_numbers

RESHAPES = ("view", "_unsafe_view", "_reshape_alias", "reshape")
# Operations whose numbers are sizes, which change with the width: what they make of a tensor is compared instead.
_SIZED = frozenset([*RESHAPES, "expand", "slice", "split", "split_with_sizes", "new_empty"])
_COND = torch.ops.higher_order.cond
_WHILE = torch.ops.higher_order.while_loop
_FLEX = torch.ops.higher_order.flex_attention
_FROM_DATA = frozenset([torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor, Tensor.new])


@dataclass(frozen=True)
class Event:
    """One operation with the numbers it was given, one layer's output, or how the run ended.

    ``shape`` is what a layer, view or split gave: of a split one for each part, of a slice with its first position.
    ``taken`` is of a split or slice: how long the axis was, what was taken of it, and what was asked for, which may be
    more than there is at this image size. ``viewed`` is the shape of what a view was taken of.
    """

    what: tuple[object, ...]
    mixer: Mixer | None = None
    shape: tuple[Any, ...] = ()
    taken: tuple[int, object, object] | None = None
    viewed: tuple[int, ...] = ()


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation and its numbers, for code like ``x / x.shape[1]`` that makes numbers of widths.

    What happens inside a layer of PyTorch's is one event: in the scatter layout it holds index operations too.
    """

    supports_higher_order_operators = True  # torch.cond, while_loop, flex_attention

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.paused = False
        self.names = names  # of parameters and buffers, by id: code may choose one by a width
        self.origins: dict[int, object] = {}  # of each tensor, by id: which event made it
        self.alive: list[Tensor] = []  # so that no id is given twice

    def pause(self, module: nn.Module, args: Any) -> None:
        self.paused = True

    def resume(self, module: nn.Module, args: Any, output: Any) -> None:
        self.paused = False

    def without(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks on a module whose operations are no part of the model."""
        return [
            module.register_forward_pre_hook(self.pause),
            module.register_forward_hook(self.resume, prepend=True),
        ]

    def called(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """Records that a module ran whose operations are left out; gives back what it gives."""

        def passes(given: Tensor, result: Tensor) -> Tensor:
            if result is given:  # an object of its own: code may choose between the two
                self.paused = True
                result = given.detach()
                self.paused = False
            self.add(Event(("module", name, *self.origins_of(given))), result)
            return result

        return passes

    def resume_after(self, name: str, mixers: list[Mixer]) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.paused = False
            mixer = mixers.pop(0) if len(mixers) > 1 else mixers[0]
            shape = tuple(output.shape) if isinstance(output, Tensor) else ()
            self.add(Event(("layer", name, *self.origins_of((args, kwargs))), mixer, shape), output)

        return hook

    def add(self, event: Event, results: Any) -> None:
        """Record an event, and that it made these tensors."""
        for place, one in enumerate(pytree.tree_leaves(results)):
            if isinstance(one, Tensor):
                self.origins[id(one)] = len(self.events), place
                self.alive.append(one)
        self.events.append(event)

    def origins_of(self, given: Any) -> list[object]:
        """What made each of these tensors: code may choose one by a width, or how many."""
        return [self.origins.get(id(leaf)) for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_COND, _WHILE):
            with self:
                return _run_inside(func, args)
        if func is _FLEX:
            with self:
                _run_scores(*args[:5])
        if _moves_nothing(func, args):
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = name_of(func)
        # A reshape copies or not as memory lies; that may differ for a width of 1.
        name = "view" if name in RESHAPES else name
        if name == "clone":
            self.origins[id(result)] = self.origins.get(id(args[0]))
            self.alive.append(result)
        elif not self.paused:
            given = (*args, *(kwargs or {}).values())
            numbers: list[object] = [*(_expansions(args[0], result) if name == "expand" else _numbers(given, name))]
            numbers += [self.names[id(one)] for one in given if id(one) in self.names]
            numbers += [*_contents(given), *self.origins_of(given)]
            if name in ("fill_", "zero_"):  # of what new_empty made, as wide as it may be
                numbers += result.shape
            viewed = tuple(args[0].shape) if name in RESHAPES else ()
            self.add(Event((name, *numbers), None, *_parts(name, args, result), viewed), result)
        return result


if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):  # PyTorch 2.6

    @_COND.py_impl(Log)
    def _cond(log: Log, *args: Any) -> Any:
        return log.__torch_dispatch__(_COND, (), args)

    @_WHILE.py_impl(Log)
    def _while(log: Log, *args: Any) -> Any:
        return log.__torch_dispatch__(_WHILE, (), args)


class Data(TorchFunctionMode):
    """Records what is handed to no operation: what tensors are made of, as in ``torch.tensor(x.shape[1])``, and slices
    or chunks of more than there is at this image size."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and not self.log.paused:
            self.log.events += [Event(("slices",), None, (), asked) for asked in asked_for(*args[:2])]
            self.log.events.append(Event(("places", repr(_beside_slices(args[1])))))
        if func in (torch.chunk, Tensor.chunk) and not self.log.paused:
            self.log.events.append(Event(("chunks",), None, (), _chunks(*args, **(kwargs or {}))))
        whole = func is F.normalize  # it repeats lengths along the channels, as many as there are
        if self.log.paused or not (whole or func in _FROM_DATA):
            return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        names = [self.log.names[id(leaf)] for leaf in leaves if id(leaf) in self.log.names]
        data = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        event = Event((func.__name__, repr(data), *names, *self.log.origins_of((args, kwargs))))
        self.log.paused = whole
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            self.log.paused = False
        self.log.add(event, result)
        return result


def _run_inside(func: Any, args: Any) -> Any:
    """What is inside a branch or a loop, once: without numbers nobody knows which is taken, and how often."""
    if func is _COND:
        _, *branches, operands = args
        results = [branch(*operands) for branch in branches]
        return results[0]
    test, body, *operands = args
    carried = [operand for several in operands for operand in several]
    test(*carried)
    return body(*carried)


def _run_scores(query: Tensor, key: Tensor, value: Tensor, score: Any, mask: Any) -> None:
    """What flex_attention does to each score, for one of them: the operation itself hides it."""
    place = torch.zeros((), dtype=torch.int32, device=query.device)
    score(query.new_empty(()), place, place, place, place)
    mask[-1](place, place, place, place)


def _moves_nothing(func: Any, args: Any) -> bool:
    """Whether only axes of length 1 get other strides: PyTorch 2.6 writes that down behind a global pool."""
    if func is not torch.ops.aten.as_strided_.default or len(args) != 3 or tuple(args[0].shape) != tuple(args[1]):
        return False
    return all(size == 1 or old == new for size, old, new in zip(args[1], args[0].stride(), args[2], strict=True))


def _beside_slices(index: Any) -> list[Any]:
    """What an index picks by number: a list of places would be handed to its operation as a tensor without numbers."""
    return [leaf for leaf in pytree.tree_leaves(index) if not isinstance(leaf, (slice, Tensor))]


def _chunks(input: Tensor, chunks: int, dim: int = 0) -> tuple[int, object, object]:
    return input.shape[dim], None, chunks


def _numbers(given: Iterable[Any], name: str) -> Iterator[object]:
    """The numbers an operation was given, but for sizes, and what else it was told to do."""
    kinds = (*(() if name in _SIZED else (int,)), float, complex, str, torch.dtype)
    if name == "convolution":
        *given, _ = given  # as many groups as channels, for a depthwise one
    for one in given:
        if isinstance(one, kinds):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from (number for number in one if isinstance(number, kinds))


def _contents(given: Iterable[Any]) -> list[int]:
    """What tensors hold that have numbers all the same, as ``torch.FloatTensor([x.shape[1]])``, or one chosen by it."""
    found = [leaf for leaf in pytree.tree_leaves(tuple(given)) if isinstance(leaf, Tensor) and has_numbers(leaf)]
    with _disable_current_modes():
        return [hash(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for one in found]


def _expansions(before: Tensor, after: Tensor) -> list[tuple[int, int]]:
    """Axes, counted from the last, along which a tensor is repeated, and how often."""
    sizes = [1] * (after.dim() - before.dim()) + list(before.shape)
    return [
        (after.dim() - i, new) for i, (old, new) in enumerate(zip(sizes, after.shape, strict=True)) if old == 1 != new
    ]


def _parts(name: str, args: Any, result: Any) -> tuple[tuple[Any, ...], tuple[int, object, object] | None]:
    """What a view or split made of a tensor, and of which positions; nothing for other operations."""
    if name in RESHAPES:
        return tuple(result.shape), None
    kind = kind_of_split(name)
    if kind == "split":
        dim = args[2] if len(args) > 2 else 0
        shapes = tuple(tuple(part.shape) for part in result)
        return shapes, (args[0].shape[dim], tuple(shape[dim] for shape in shapes), args[1])
    if kind == "slice":
        dim, start, end, step = (args[1:] + (0, None, None, 1)[len(args) - 1 :])[:4]
        size = args[0].shape[dim]
        which = range(*slice(start, end, step).indices(size))
        return sliced(tuple(result.shape), which.start, size == len(which)), (size, which, (start, end))
    return (), None
