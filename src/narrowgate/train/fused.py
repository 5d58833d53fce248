"""Norms fused with the activation behind them, for any model, while a training step is captured.

Under ``FusedNorms`` a BatchNorm returns a promise instead of a result. An activation that comes next makes good on it
with kernels that do both; any other operation gets the plain norm. The promise is a tensor on the meta device, so a
use that escapes this module fails loudly instead of reading numbers that are not there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NONE, _RELU, _RELU6 = 0, 1, 2
_RELUS = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


class _NormActivation(torch.autograd.Function):
    """``activation(batch_norm(x))`` with statistics of the batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        activation: int,
    ) -> Tensor:
        from narrowgate.train import norm_kernels

        y, facts = norm_kernels.forward(x, weight, bias, running, momentum, eps, activation)
        ctx.save_for_backward(x, facts)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from narrowgate.train import norm_kernels

        x, facts = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        return *norm_kernels.backward(x, dy, facts, ctx.activation), None, None, None, None


class _Promise:
    """A norm that has not been computed: once, with or without its activation."""

    def __init__(
        self,
        x: Tensor,
        running: tuple[Tensor, Tensor] | None,
        weight: Tensor,
        bias: Tensor,
        momentum: float,
        eps: float,
    ) -> None:
        self._inputs = x, weight, bias
        self._with_gradient = torch.is_grad_enabled()
        self._running, self._numbers = running, (momentum, eps)
        self._plain: Tensor | None = None

    def stand_in(self) -> Tensor:
        """What goes round in its place: of its shape, without numbers."""
        x = self._inputs[0]
        return torch.empty(x.shape, dtype=x.dtype, device="meta")

    def activated(self, activation: int) -> Tensor:
        if self._plain is not None:
            return self._plain.clamp(0, 6) if activation == _RELU6 else self._plain.relu()
        return self._compute(activation)

    def plain(self) -> Tensor:
        if self._plain is None:
            self._plain = self._compute(_NONE)
        return self._plain

    def becomes(self, result: Tensor) -> None:
        """After an activation in place, this is what everybody sees."""
        self._plain = result

    def _compute(self, activation: int) -> Tensor:
        if torch.is_grad_enabled() != self._with_gradient:
            # Inside a custom autograd function, say, that would lose the gradient without a word.
            raise RuntimeError("a norm's result was first used where gradients are switched another way")
        running, self._running = self._running, None  # the running statistics move once
        result: Tensor = _NormActivation.apply(*self._inputs, running, *self._numbers, activation)
        return result


class FusedNorms(TorchFunctionMode):
    """Within this context, BatchNorms in training run fused with a ReLU or ReLU6 behind them.

    Args:
        notice: is told when a model can't be run so.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__()
        self._notice, self._gave_up = notice, False
        self._promises: dict[int, tuple[Tensor, _Promise]] = {}
        self._counters: dict[int, Tensor] = {}

    def around(self, forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The same function, run within this context; its result holds no promises."""

        def fused(x: Tensor) -> Any:
            if self._gave_up:
                return forward(x)
            try:
                with self:
                    result = forward(x)
                return tree_map(self._real, result)
            except Exception as error:  # if it was not a promise that it stumbled over, it will stumble again
                self._gave_up = True
                self._counters.clear()  # the plain run counts for itself
                reason = str(error).partition("\n")[0]
                self._notice(
                    f"BatchNorm runs with PyTorch's own kernels, this model can't do with fused ones: {reason}"
                )
                return forward(x)
            finally:
                self._promises.clear()
                self._count()

        return fused

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            args, kwargs = tree_map(self._real, (args, kwargs))
            if (promise := _promise(*args, **kwargs)) is None:
                return func(*args, **kwargs)
            stand_in = promise.stand_in()
            self._promises[id(stand_in)] = stand_in, promise
            return stand_in
        if func is Tensor.add_ and _counts(*args, **kwargs) and id(args[0]) not in self._counters:
            self._counters[id(args[0])] = args[0]
            return args[0]
        if any(id(value) in self._counters for value in args):
            self._count()
        if not self._promises:
            return func(*args, **kwargs)
        held = self._promises.get(id(args[0])) if args else None
        if held is not None and (activation := _activation(func, args, kwargs)) != _NONE:
            result = held[1].activated(activation)
            if _in_place(func, args, kwargs):
                held[1].becomes(result)
            return result
        return func(*tree_map(self._real, args), **tree_map(self._real, kwargs))

    def _count(self) -> None:
        """Count a batch in all norms at once, instead of a kernel in each."""
        if self._counters:
            torch._foreach_add_(list(self._counters.values()), 1)
            self._counters.clear()

    def _real(self, value: Any) -> Any:
        held = self._promises.get(id(value))
        return value if held is None else held[1].plain()


def _promise(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> _Promise | None:
    """A norm put off, if it is one that the kernels can do."""
    fits = (
        training
        and weight is not None
        and bias is not None
        and input.dim() == 4
        and input.device.type == weight.device.type
        and input.dtype in _DTYPES
        and weight.dtype == bias.dtype == torch.float32
        and input.numel() > input.shape[1]
        and input.is_contiguous(memory_format=torch.channels_last)
        and (running_mean is None) == (running_var is None)
    )
    if not fits:
        return None
    assert weight is not None and bias is not None
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    return _Promise(input, running, weight.contiguous(), bias.contiguous(), momentum, eps)


def _counts(counter: Tensor, by: Any = None, **kwargs: Any) -> bool:
    """Whether this is a norm counting its batches."""
    return isinstance(by, int) and by == 1 and not kwargs and counter.dtype == torch.long and counter.dim() == 0


def _activation(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> int:
    if func in _RELUS:
        return _RELU
    if func is F.relu6:
        return _RELU6
    if func is F.hardtanh:  # nn.ReLU6 is one
        low, high = _argument(args, kwargs, 1, "min_val", -1.0), _argument(args, kwargs, 2, "max_val", 1.0)
        return _RELU6 if (low, high) == (0.0, 6.0) else _NONE
    return _NONE


def _in_place(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    if func in (torch.relu_, Tensor.relu_):
        return True
    position = {F.relu: 1, F.relu6: 1, F.hardtanh: 3}.get(func)
    return position is not None and bool(_argument(args, kwargs, position, "inplace", False))


def _argument(args: Any, kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


@cache
def why_not(device: torch.device) -> str:
    """Why norms can't be fused on this device, found by trying; empty if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        return _trial(device)
    except Exception as error:  # a compiler of its own: anything may go wrong, and plain kernels do the work as well
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _trial(device: torch.device) -> str:
    """Compare a small norm, forward and backward, with PyTorch's."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    x = (draw(8, 24, 9, 9) * 3 + 1).contiguous(memory_format=torch.channels_last)
    weight, bias, dy = draw(24), draw(24), draw(8, 24, 9, 9)
    seen: list[list[Tensor]] = []
    for fused in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        running = torch.zeros(24, device=device), torch.ones(24, device=device)
        if fused:
            y = _NormActivation.apply(*leaves, running, 0.1, 1e-5, _RELU6)
        else:
            y = F.relu6(F.batch_norm(leaves[0], *running, leaves[1], leaves[2], True, 0.1, 1e-5))
        seen.append([y.detach(), *torch.autograd.grad(y, leaves, dy), *running])
    for plain, ours in zip(*seen, strict=True):
        if not torch.allclose(plain, ours, rtol=1e-3, atol=1e-3):
            return f"its kernels give other numbers than PyTorch's (by {(plain - ours).abs().max():.1e})"
    return ""
