"""Do modules go unmissed? A copy of the model is run with and without them, and has to give the same bits.

Removal by proof knows the graph, which does not show all: code around a module may ask it for an attribute, call it
with more than it reads, unpack what it returns, or count on how that lies in memory. Sizes are tried that a model may
meet: other batches, and each other axis twice as long, or one long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from narrowgate.flow.copies import copy_structure
from narrowgate.flow.trace import ExampleInputs, call_arguments, in_mode
from narrowgate.flow.trials import Inputs, trials
from narrowgate.flow.verify import outputs_of

IDENTITY, ZEROS, UNREAD = "identity", "zeros", "unread"
_MOST_AXES = 5
Without = Callable[[nn.Module], nn.Module]


def go_unmissed(model: nn.Module, idle: Mapping[str, str], example_inputs: ExampleInputs, without: Without) -> bool:
    """Whether a model gives the same without these modules, which give what they got, zeros, or something unread.

    ``without`` makes the model that lacks them, which may share tensors with the one that it is given.
    """
    try:
        whole = copy_structure(model, {})  # a forward may write to its own parameters
        inputs = list(_alternatives(example_inputs))
        with in_mode(whole, False), torch.random.fork_rng(devices=[]):
            with torch.enable_grad(), _watched(whole, idle, gradients=True):
                _run(whole, inputs[0])
            with torch.no_grad(), _watched(whole, idle):
                expected = [_run(whole, one, may_fail=i > 0) for i, one in enumerate(inputs)]
            if not _unchanged(model, whole):
                return False
            small = without(whole).eval()
            with torch.no_grad():
                alike = all(
                    _same(want, _run(small, one))
                    for one, want in zip(inputs, expected, strict=True)
                    if want is not None
                )
            return alike and _unchanged(model, whole)
    except Exception:  # whatever it is, something would miss them
        return False


class _watched:
    """While it lasts, each module has to be called once a run, with one tensor, and do what it is said to do."""

    def __init__(self, model: nn.Module, idle: Mapping[str, str], gradients: bool = False) -> None:
        self.modules = {name: model.get_submodule(name) for name in idle}
        self.idle, self.gradients, self.model = idle, gradients, model

    def __enter__(self) -> None:
        self.calls = dict.fromkeys(self.idle, 0)
        self.hooks = [
            module.register_forward_hook(self._look_at(name), with_kwargs=True) for name, module in self.modules.items()
        ]
        self.hooks.append(self.model.register_forward_pre_hook(self._begin))
        self.hooks.append(self.model.register_forward_hook(self._end))

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.calls = dict.fromkeys(self.idle, 0)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if any(count != 1 for count in self.calls.values()):
            raise _MissedError("a module runs twice, or not at all")

    def _look_at(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        kind = self.idle[name]

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.calls[name] += 1
            given = args[0] if args else None
            if not isinstance(given, Tensor) or not isinstance(output, Tensor) or _looks(given) != _looks(output):
                raise _MissedError("another kind of thing goes in than comes out")
            if kind != ZEROS and (len(args) > 1 or kwargs):
                raise _MissedError("it is called with more than one argument")
            same = not output.any() if kind == ZEROS else kind == UNREAD or torch.equal(given, output)
            if not same or (self.gradients and kind != ZEROS and given.requires_grad and not output.requires_grad):
                raise _MissedError("it does something")

        return hook


class _MissedError(RuntimeError):
    pass


def _looks(tensor: Tensor) -> tuple[object, ...]:
    """Size, precision, and how it lies in memory, on which a view of it may count."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.shape, tensor.dtype, tensor.device, steps


def _alternatives(example_inputs: ExampleInputs) -> Iterator[Inputs]:
    """Inputs as given, then others that the model may take: random numbers, one sample, and that at other sizes."""
    groups = list(trials(*call_arguments(example_inputs), other_sizes=False))
    yield from (several[0] for several in groups)
    first = groups[-1][0]
    several = all(len(leaf) > 1 for leaf in pytree.tree_leaves(first) if isinstance(leaf, Tensor) and leaf.dim())
    one = _along(first, 0, _first if several else _twice)
    yield one
    for axis in range(1, _MOST_AXES):
        yield _along(one, axis, _twice)
        yield _along(one, axis, _first)


def _first(leaf: Tensor, axis: int) -> Tensor:
    return leaf.narrow(axis, 0, 1)


def _twice(leaf: Tensor, axis: int) -> Tensor:
    return torch.cat([leaf, leaf], axis)


def _along(given: Inputs, axis: int, change: Callable[[Tensor, int], Tensor]) -> Inputs:
    """All tensors that have an axis, changed along it."""

    def changed(leaf: Any) -> Any:
        return change(leaf, axis) if isinstance(leaf, Tensor) and leaf.dim() > axis else leaf

    made: Inputs = pytree.tree_map(changed, given)
    return made


def _run(model: nn.Module, inputs: Inputs, *, may_fail: bool = False) -> list[Tensor] | None:
    """What a model gives out; None where it does not take such inputs."""
    torch.manual_seed(0)
    try:
        return outputs_of(model, *inputs)
    except _MissedError:
        raise
    except Exception:
        if may_fail:
            return None
        raise


def _same(one: list[Tensor] | None, other: list[Tensor] | None) -> bool:
    if not one or not other or len(one) != len(other):
        return False  # with nothing to compare, nothing is known
    return all(map(torch.equal, one, other))


def _unchanged(model: nn.Module, copied: nn.Module) -> bool:
    """Whether running a copy left its parameters as they were."""
    return all(map(torch.equal, model.parameters(), copied.parameters()))
