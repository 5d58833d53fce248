"""Gated layers: ordinary PyTorch layers whose class was swapped, so that a gate multiplies their weight and bias.

Multiplying the weight instead of the feature map is the same function without a pass over the feature map. The
parameters keep their names, so an ordinary checkpoint loads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgate.gates import Gate

Effective = tuple[Tensor, Tensor | None]
PREPARED = "_prepared_by_narrowgate"
"""Key in a layer's ``__dict__`` for a weight and bias that were computed ahead, together with all other layers'; and
the stamp of those they were computed from."""


class GatedLayer(nn.Module):
    """Mixin of all swapped classes: ``gate`` scales output channels, ``gate_in`` input channels; either may be None."""

    gate: Gate | None
    gate_in: Gate | None
    plain_class: type[nn.Module]

    def effective(self) -> Effective:
        """Weight and bias with the gates multiplied in: what the layer computes with."""
        if not torch.compiler.is_compiling():
            prepared: tuple[Effective, object] | None = self.__dict__.pop(PREPARED, None)
            if prepared is not None and prepared[1] == self.stamp() and self._fits_here(prepared[0][0]):
                return prepared[0]
        return self.scaled(
            None if self.gate is None else self.gate.value(),
            None if self.gate_in is None else self.gate_in.value(),
        )

    def stamp(self) -> list[object]:
        """Another one after weight, bias or gates were overwritten, as by a model that normalises a weight in forward.

        Or replaced, as by ``functional_call`` on a part of the model. And in another thread: a graph that two of them
        share can't be gone through backwards by both.
        """
        gates = [each.g for gate in (self.gate, self.gate_in) if gate is not None for each in (gate, gate.own)]
        tensors = [*(tensor for tensor in self._parameters.values() if tensor is not None), *gates]
        return [get_ident(), *(_mark(tensor) for tensor in tensors)]

    def scaled(self, out: Tensor | None, into: Tensor | None) -> Effective:
        """Weight and bias times the given factors of output and input channels."""
        weight, bias = cast(Tensor, self.weight), cast("Tensor | None", self.bias)
        if bias is not None and out is not None:
            bias = bias * out.to(weight.dtype)
        return self.scale_weight(weight, out, into), bias

    def scale_weight(self, weight: Tensor, out: Tensor | None, into: Tensor | None) -> Tensor:
        """A weight for this layer times the given factors of output and input channels."""
        if out is not None:
            weight = self._scale_outputs(weight, out.to(weight.dtype))
        if into is not None:
            weight = self._scale_inputs(weight, into.to(weight.dtype))
        return weight

    def _fits_here(self, prepared: Tensor) -> bool:
        """Whether a weight prepared before the model's forward serves under the modes in force at this layer."""
        weight = cast(Tensor, self.weight)
        if saves_are_watched() or prepared.dtype not in (weight.dtype, autocast_dtype(weight)):
            return False
        if prepared.requires_grad or not torch.is_grad_enabled():
            return True
        gates = [gate for gate in (self.gate, self.gate_in) if gate is not None]
        return not (weight.requires_grad or any(gate.g.requires_grad for gate in gates))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in ("gate", "gate_in"):
            gate = gate_at(self, key)
            if gate is None or not gate.divided or not gate.state_dict():  # what only views another's has no state
                continue
            if prefix + "weight" in state_dict and not any(name.startswith(f"{prefix}{key}.") for name in state_dict):
                warnings.warn(
                    "these weights were saved without gates, which now multiply them: the model does not compute what "
                    "it did when they were saved. Load them first, then attach_gates_(..., keep_function=True)",
                    stacklevel=2,
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or a pickle never holds prepared weights, even one made in the middle of a forward.
        return {key: value for key, value in self.__dict__.items() if key != PREPARED}

    def _scale_outputs(self, weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor.view(-1, *[1] * (weight.dim() - 1))

    def _scale_inputs(self, weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor.view(1, -1, *[1] * (weight.dim() - 2))


class _GatedConv(GatedLayer):
    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, self._conv_forward(input, *self.effective()))  # type: ignore[operator]


class _GatedConvTranspose(GatedLayer):
    groups: int
    function: Callable[..., Tensor]

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        layer: Any = self
        weight, bias = self.effective()
        spatial = weight.dim() - 2
        padding = layer._output_padding(
            input, output_size, layer.stride, layer.padding, layer.kernel_size, spatial, layer.dilation
        )
        return type(self).function(
            input, weight, bias, layer.stride, layer.padding, padding, layer.groups, layer.dilation
        )

    # The weight of a transposed convolution is (in, out / groups, ...), output channels running group by group.
    def _scale_outputs(self, weight: Tensor, factor: Tensor) -> Tensor:
        if factor.numel() == 1:
            return weight * factor
        split = weight.view(self.groups, -1, *weight.shape[1:])
        return (split * factor.view(self.groups, 1, -1, *[1] * (weight.dim() - 2))).flatten(0, 1)

    def _scale_inputs(self, weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor.view(-1, *[1] * (weight.dim() - 1))


class GatedConv1d(_GatedConv, nn.Conv1d):
    plain_class = nn.Conv1d


class GatedConv2d(_GatedConv, nn.Conv2d):
    plain_class = nn.Conv2d


class GatedConv3d(_GatedConv, nn.Conv3d):
    plain_class = nn.Conv3d


class GatedConvTranspose1d(_GatedConvTranspose, nn.ConvTranspose1d):
    plain_class = nn.ConvTranspose1d
    function = staticmethod(F.conv_transpose1d)


class GatedConvTranspose2d(_GatedConvTranspose, nn.ConvTranspose2d):
    plain_class = nn.ConvTranspose2d
    function = staticmethod(F.conv_transpose2d)


class GatedConvTranspose3d(_GatedConvTranspose, nn.ConvTranspose3d):
    plain_class = nn.ConvTranspose3d
    function = staticmethod(F.conv_transpose3d)


class GatedLinear(GatedLayer, nn.Linear):
    plain_class = nn.Linear

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *self.effective())


class GatedOutProjection(GatedLayer, NonDynamicallyQuantizableLinear):
    """The output layer of nn.MultiheadAttention, which reads its weight and seldom calls it (see ``direct.py``)."""

    plain_class = NonDynamicallyQuantizableLinear

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *self.effective())


class GatedLayerNorm(GatedLayer, nn.LayerNorm):
    """Scale and shift are gated together, for a norm that ends a residual branch."""

    plain_class = nn.LayerNorm

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, *self.effective(), self.eps)


class GatedLayerNorm2d(GatedLayerNorm):
    """The same for one that turns pictures, as torchvision's and timm's ``LayerNorm2d`` do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class GatedGroupNorm(GatedLayer, nn.GroupNorm):
    """The same for a norm of groups of channels."""

    plain_class = nn.GroupNorm

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, *self.effective(), self.eps)


class GatedTransposedLinear(GatedLayer):
    """Mixin for linear layers whose weight is (in, out), as GPT-2's is; ``transposed`` tells the remover."""

    transposed = True

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.effective()
        return F.linear(x, weight.t(), bias)

    def _scale_outputs(self, weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor

    def _scale_inputs(self, weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor[:, None]


class _GatedBatchNorm(GatedLayer):
    """Scale and shift are gated together: a closed channel is zero, not the constant beta."""

    def forward(self, input: Tensor) -> Tensor:
        norm = cast(nn.BatchNorm2d, self)
        norm._check_input_dim(input)
        momentum = 0.0 if norm.momentum is None else norm.momentum
        if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if norm.momentum is None:
                momentum = 1.0 / float(norm.num_batches_tracked)
        batch_statistics = norm.training or (norm.running_mean is None and norm.running_var is None)
        keep_running = not norm.training or norm.track_running_stats
        weight, bias = self.effective()
        return F.batch_norm(
            input,
            norm.running_mean if keep_running else None,
            norm.running_var if keep_running else None,
            weight,
            bias,
            batch_statistics,
            momentum,
            norm.eps,
        )


class GatedBatchNorm1d(_GatedBatchNorm, nn.BatchNorm1d):
    plain_class = nn.BatchNorm1d


class GatedBatchNorm2d(_GatedBatchNorm, nn.BatchNorm2d):
    plain_class = nn.BatchNorm2d


class GatedBatchNorm3d(_GatedBatchNorm, nn.BatchNorm3d):
    plain_class = nn.BatchNorm3d


def _mark(tensor: Tensor) -> tuple[int, int | None]:
    """What tells a tensor and the state of its numbers; those of ``torch.func`` have no memory of their own."""
    place = tensor.data_ptr() if type(tensor) is nn.Parameter else id(tensor)
    return place, None if tensor.is_inference() else tensor._version


_top_saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def saves_are_watched() -> bool:
    """Whether activation checkpointing (or the like) follows what autograd saves; unknown in torch before 2.8: True.

    It compares what a forward and its recomputation save, and only the first of the two would find prepared weights.
    """
    return _top_saved_tensor_hooks is None or _top_saved_tensor_hooks(True) is not None


def autocast_dtype(weight: Tensor) -> torch.dtype | None:
    """The dtype autocast would cast this weight to."""
    device = weight.device.type
    if weight.dtype != torch.float32 or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def has_gate(module: nn.Module) -> bool:
    """Whether a layer has a gate of its own, on its outputs or inputs."""
    return any(gate_at(module, key) is not None for key in ("gate", "gate_in"))


def gate_at(module: nn.Module, key: str) -> Gate | None:
    """A layer's own gate under ``gate`` or ``gate_in``; what ``torch.jit`` compiled has none, and no such table."""
    gate = None if isinstance(module, torch.jit.ScriptModule) else module._modules.get(key)
    return gate if isinstance(gate, Gate) else None
