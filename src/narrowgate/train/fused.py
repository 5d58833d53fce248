"""A model's forward in fewer kernels, while a training step is captured: for any model, to the same numbers.

Within ``Fused`` a BatchNorm returns a promise instead of a result. An activation and a dropout that come next add to
it, and what uses the result then gets it from kernels that do all of it; any other operation gets the plain norm. The
promise is a tensor on the meta device, so a use that escapes this module fails loudly instead of reading numbers that
are not there. Besides: what a norm reads and a sum or a concatenation reads too gets its two gradients added up in the
norm's own kernel; convolutions in half precision get their weights all cast together, and even widths (wide.py), and
those of each channel for itself have kernels of their own (depthwise.py), here and in ``Looks``. So has a layer that a
DenseNet grows by (grown.py): its convolution is promised as well, until it is clear that it joins what its norm read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from narrowgate.train import calls
from narrowgate.train.promises import Batch, Layer, Promise
from narrowgate.train.wide import HALVES, Casts, Narrow, Pool, width_for

if TYPE_CHECKING:
    from narrowgate.train.grown import Block

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Fused(TorchFunctionMode):
    """Within this context a model's training step runs in fewer kernels.

    Args:
        notice: is told when a model can't be run so.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__()
        self._notice, self._gave_up = notice, False
        self._before: list[tuple[Tensor, Tensor]] | None = []
        """Running statistics and what they were, until a first forward has ended well."""
        self._promises: dict[int, tuple[Tensor, Promise]] = {}
        self._layers: dict[int, tuple[Tensor, Layer]] = {}
        self._blocks: dict[int, tuple[Tensor, Block]] = {}
        self._counters: dict[int, Tensor] = {}
        self._again: dict[int, tuple[Tensor, Tensor]] = {}
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}
        self._casts = Casts()
        self._seed: Tensor | None = None
        self._salt = 0

    def around(self, forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The same function, run within this context; its result holds no promises."""

        def fused(x: Tensor) -> Any:
            if self._gave_up:
                return forward(x)
            try:
                self._casts.start()
                with self:
                    result = forward(x)
                result, self._before = tree_map(self._real, result), None
                return result
            except Exception as error:  # if it was not a promise that it stumbled over, it will stumble again
                self._gave_up = True
                # The plain run counts for itself, and moves what norms have already moved.
                self._counters.clear()
                with torch.no_grad():
                    for statistics, before in reversed(self._before or []):
                        statistics.copy_(before)
                self._before = None
                reason = str(error).partition("\n")[0]
                self._notice(f"steps run with PyTorch's own kernels, this model can't do with fused ones: {reason}")
                return forward(x)
            finally:
                self._forget()
                self._count()

        return fused

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            args, kwargs = tree_map(self._real, (args, kwargs))
            promise = self._promise(*args, **kwargs)
            return func(*args, **kwargs) if promise is None else self._given(promise)
        if func is Tensor.add_ and calls.counts(*args, **kwargs) and id(args[0]) not in self._counters:
            self._counters[id(args[0])] = args[0]
            return args[0]
        if any(id(value) in self._counters for value in args):
            self._count()
        held = self._promises.get(id(args[0])) if args and self._promises else None
        if held is not None and (later := self._later(held[1], func, args, kwargs)) is not None:
            if not calls.in_place(func, args, kwargs):
                return self._given(later)
            self._promises[id(args[0])] = args[0], later  # this is what everybody sees from now on
            return args[0]
        if held is not None and func is torch.conv2d and (layer := self._layer(held[1], *args, **kwargs)) is not None:
            return self._given_layer(layer, args[0])
        if self._layers and (found := self._with_layer(func, args, kwargs)) is not None:
            return found
        args, kwargs = tree_map(self._real, (args, kwargs))
        if held is not None and func in calls.ADDS_IN_PLACE and len(args) == 2 and not kwargs:
            held[1].result = self._sum(args, kwargs)
            return held[0]
        if func is torch.conv2d:
            return self._convolution(*args, **kwargs)
        if func is F.avg_pool2d and (side := calls.square(*args, **kwargs)):
            return Pool.apply(args[0], side)
        if func in calls.ADDS:
            return self._sum(args, kwargs)
        if func in calls.JOINS:
            args = tree_map(self._own, tree_map(self._once_more, args))
        if func is F.dropout and id(args[0]) in self._wide and not calls.in_place(func, args, kwargs):
            return self._narrowed(func(self._widest(args[0]), *args[1:], **kwargs), args[0].shape[1])
        return func(*args, **kwargs)

    def _promise(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Promise | None:
        """A norm put off, if it is one that the kernels can do."""
        from narrowgate.train.norm_launch import Norm, rows_apart

        if training and self._before is not None:
            self._before += [(moved, moved.clone()) for moved in (running_mean, running_var) if moved is not None]
        batch = self._widest(input)
        fits = (
            training
            and weight is not None
            and bias is not None
            and input.dim() == 4
            and input.device.type == weight.device.type
            and input.dtype in _DTYPES
            and weight.dtype == bias.dtype == torch.float32
            and input.numel() > input.shape[1]
            and rows_apart(batch) is not None
            and (running_mean is None) == (running_var is None)
        )
        if not fits:
            return None
        assert weight is not None and bias is not None
        running = None if running_mean is None or running_var is None else (running_mean, running_var)
        channels = input.shape[1]
        norm = Norm(channels, width_for(channels, input.dtype), momentum, eps)
        return Promise(input, Batch(batch, weight.contiguous(), bias.contiguous(), running), norm)

    def _later(self, promise: Promise, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Promise | None:
        """A promise of more, if this operation is one that the kernels do along with the norm."""
        norm = promise.norm
        if promise.result is not None or norm.drop:
            return None
        activation = calls.activation(func, args, kwargs)
        if activation != calls.NONE and norm.activation == calls.NONE:
            return replace(promise, norm=replace(norm, activation=activation))
        if func is F.dropout and 0 < (share := calls.dropped(*args, **kwargs)) < 1:
            seed, salt = self._luck(promise.source.device)
            return replace(promise, norm=replace(norm, drop=share, seed=seed, salt=salt))
        return None

    def _luck(self, device: torch.device) -> tuple[Tensor, int]:
        """This step's seed, and a number that no other dropout of it has."""
        if self._seed is None:
            self._seed = torch.randint(2**31 - 1, (1,), dtype=torch.int32, device=device)
        self._salt += 1
        return self._seed, self._salt

    def _given(self, promise: Promise) -> Tensor:
        stand_in = promise.stand_in()
        self._promises[id(stand_in)] = stand_in, promise
        return stand_in

    def _layer(
        self,
        promise: Promise,
        stand_in: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Layer | None:
        """A convolution put off, if it may be one that a dense block grows by."""
        from narrowgate.train.grown import fits, works

        source = promise.source
        kind = source.device.type
        fresh = promise.result is None and not promise.norm.drop and promise.batch.with_gradient
        half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == source.dtype in HALVES
        ready = fresh and half and fits(source, weight, bias, stride, padding, dilation, groups)
        return Layer(promise, weight) if ready and works(source.device, source.dtype) else None

    def _given_layer(self, layer: Layer, like: Tensor) -> Tensor:
        n, _, h, w = like.shape
        stand_in = torch.empty((n, layer.weight.shape[0], h, w), dtype=like.dtype, device="meta")
        self._layers[id(stand_in)] = stand_in, layer
        return stand_in

    def _with_layer(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Dropout behind such a convolution, or its maps joined with what its norm read; None for anything else."""
        if func is F.dropout and (held := self._layers.get(id(args[0]))) is not None:
            share, layer = calls.dropped(*args, **kwargs), held[1]
            if share == 0:
                return held[0]
            if share >= 1 or layer.drop or layer.result is not None or calls.in_place(func, args, kwargs):
                return None
            _, salt = self._luck(layer.norm.source.device)
            return self._given_layer(replace(layer, drop=share, salt=salt), args[0])
        if func in calls.JOINS and (pair := calls.joined_pair(*args, **kwargs)) is not None:
            held = self._layers.get(id(pair[1]))
            if held is not None and held[1].norm.source is pair[0]:
                return self._grown(held[1])
        return None

    def _grown(self, layer: Layer) -> Tensor | None:
        """The maps of a block and those that a layer adds, side by side; None if the norm was computed meanwhile."""
        from narrowgate.train import grown

        batch, source, outputs = layer.norm.batch, layer.norm.source, layer.weight.shape[0]
        if layer.result is not None or layer.norm.result is not None or not batch.untouched():
            return None
        running, batch.running = batch.running, None
        _, block = self._blocks.get(id(source), (None, None))
        if block is not None and not block.has_room(source, outputs):
            block = None
        does = grown.Layer(layer.norm.norm, outputs, layer.drop, self._seed if layer.drop else None, layer.salt)
        blocks: list[Block] = []
        result: Tensor = grown.Grown.apply(source, *batch.inputs[1:], layer.weight, running, does, block, blocks)
        self._blocks[id(result)] = result, blocks[0]
        layer.result = result[:, source.shape[1] :]  # for whoever reads these maps by themselves
        return result

    def _real(self, value: Any) -> Any:
        if (known := self._layers.get(id(value))) is not None:
            return self._convolved(known[1])
        held = self._promises.get(id(value))
        return value if held is None else self._computed(held[1])

    def _convolved(self, layer: Layer) -> Tensor:
        """What was put off, by the kernels that all convolutions have."""
        if layer.result is None:
            y = self._convolution(self._computed(layer.norm), layer.weight, None, 1, 1)
            if layer.drop:
                y = self._narrowed(F.dropout(self._widest(y), layer.drop), y.shape[1])
            layer.result = y
        return layer.result

    def _computed(self, promise: Promise) -> Tensor:
        source = promise.source
        if promise.result is None:
            wide, again = promise.batch.compute(promise.norm)
            promise.result = self._narrowed(wide, promise.norm.channels)
            if promise.batch.with_gradient:  # what comes later may need one
                self._again[id(source)] = source, self._narrowed(again, promise.norm.channels)
        return promise.result

    def _once_more(self, value: Any) -> Any:
        """A batch that a norm has read, as the norm gives it on."""
        return self._again[id(value)][1] if id(value) in self._again else value

    def _narrowed(self, wide: Tensor, channels: int) -> Tensor:
        """What the model sees of a batch: its own channels."""
        if wide.shape[1] == channels:
            return wide
        seen = wide[:, :channels]
        self._wide[id(seen)] = seen, wide
        return seen

    def _widest(self, seen: Tensor) -> Tensor:
        return self._wide[id(seen)][1] if id(seen) in self._wide else seen

    def _own(self, seen: Any) -> Any:
        """The model's channels of a wide batch in a place of their own, which joins others in one operation."""
        return Narrow.apply(self._wide[id(seen)][1], seen.shape[1]) if id(seen) in self._wide else seen

    def _sum(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """Of two wide batches the sum is wide."""
        args = tree_map(self._once_more, args)
        if kwargs or len(args) != 2 or any(id(value) not in self._wide for value in args):
            return torch.add(*args, **kwargs)
        a, b = (self._widest(value) for value in args)
        return self._narrowed(a + b, args[0].shape[1]) if args[0].shape == args[1].shape else torch.add(*args)

    def _convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """A convolution in half precision: its weight cast along with all others, and of an even width."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        if dtype not in HALVES or input.dim() != 4 or not weight.requires_grad or not torch.is_grad_enabled():
            return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
        outputs, inputs = weight.shape[:2]
        width, batch = width_for(outputs, dtype), self._widest(input)
        if groups == outputs == input.shape[1] and inputs == 1:
            # Each channel for itself: the result is as wide as the batch.
            width = groups = batch.shape[1]
        elif groups > 1:
            width, batch = outputs, input
        else:
            inputs = batch.shape[1]
        weight = self._casts.of(weight, (width, inputs, *weight.shape[2:]), dtype)
        if bias is not None and width > outputs:
            bias = F.pad(bias, (0, width - outputs))
        return self._narrowed(_conv2d(batch, weight, bias, stride, padding, dilation, groups), outputs)

    def _forget(self) -> None:
        """What was for this step only."""
        for held in (self._promises, self._layers, self._blocks, self._again, self._wide):
            held.clear()
        self._casts.stop()
        self._seed, self._salt = None, 0

    def _count(self) -> None:
        """Count a batch in all norms at once, instead of a kernel in each."""
        if self._counters:
            torch._foreach_add_(list(self._counters.values()), 1)
            self._counters.clear()


class Looks(TorchFunctionMode):
    """Within this context a model under autocast is only looked at, by kernels that any width is the same to."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return _look(*args, **kwargs) if func is torch.conv2d and len(args) == 7 else func(*args, **kwargs)


def _look(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A convolution without gradients."""
    kind, groups = x.device.type, options[-1]
    if groups > 1 and torch.is_autocast_enabled(kind) and not torch.is_grad_enabled():
        dtype = torch.get_autocast_dtype(kind)
        return _conv2d(x.to(dtype), weight.to(dtype), bias, *options)
    return torch.conv2d(x, weight, bias, *options)


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """``torch.conv2d``, by kernels of our own where each channel is for itself and widths may change."""
    from narrowgate.train.depthwise import Depthwise, fits, works

    # Where cuDNN may try its kernels out, widths stay as they are, and it is a little faster.
    ours = bias is None and not torch.backends.cudnn.benchmark
    found = fits(x, weight, *options) if ours else None
    if found is not None and not works(x.device, x.dtype):
        found = None
    result: Tensor = torch.conv2d(x, weight, bias, *options) if found is None else Depthwise.apply(x, weight, *found)
    return result
