"""Gated weights for a module that reads a layer's weight instead of calling the layer, as nn.MultiheadAttention does.

For the time of the module's call, its layer's ``weight`` and ``bias`` *are* the gated ones: they stand in the layer's
``__dict__``, where Python looks before PyTorch's table of parameters, which stays as it is.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from narrowgate.gated import GatedLayer

_TENSORS = ("weight", "bias")


def gate_for_reader_(reader: nn.Module) -> None:
    """Let this module read gated weights from its output layer."""
    if not reads_gated(reader):
        reader.register_forward_pre_hook(_before)
        reader.register_forward_hook(_after, always_call=True)


def reads_gated(reader: nn.Module) -> bool:
    """Whether ``gate_for_reader_`` serves this module."""
    return _before in reader._forward_pre_hooks.values()


def forget_reader_(reader: nn.Module) -> None:
    """Undo ``gate_for_reader_`` and ``keep_called_``."""
    pre_hooks, hooks = cast(dict[int, Any], reader._forward_pre_hooks), cast(dict[int, Any], reader._forward_hooks)
    for registered, ours in ((pre_hooks, _before), (hooks, _after), (pre_hooks, _nothing)):
        for key in [key for key, hook in registered.items() if hook is ours]:
            del registered[key]
            reader._forward_hooks_always_called.pop(key, None)


def keep_called_(layer: nn.Module) -> None:
    """Let nn.TransformerEncoderLayer call this layer of it, in eval mode too: its fast path is not for hooks."""
    layer.register_forward_pre_hook(_nothing)


def _nothing(layer: nn.Module, args: Any) -> None:
    pass


def _before(reader: nn.Module, args: Any) -> None:
    layer = reader._modules["out_proj"]
    if isinstance(layer, GatedLayer):
        layer.__dict__.update(zip(_TENSORS, layer.effective(), strict=True))
    else:
        forget_reader_(reader)  # the gate was merged into a copy of the layer, and this is that copy's module


def _after(reader: nn.Module, args: Any, output: Any) -> None:
    layer = cast(nn.Module, reader._modules["out_proj"])
    for key in _TENSORS:
        layer.__dict__.pop(key, None)
