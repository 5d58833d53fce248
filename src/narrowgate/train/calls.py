"""What a call of a PyTorch function asks for, in the terms of the kernels that do it instead (see fused.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

NONE, RELU, RELU6 = 0, 1, 2
ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
ADDS_IN_PLACE = (Tensor.add_, Tensor.__iadd__)
JOINS = (torch.cat, torch.concat, torch.concatenate)
_RELUS = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)


def counts(counter: Tensor, by: Any = None, **kwargs: Any) -> bool:
    """Whether this is a norm counting its batches."""
    return isinstance(by, int) and by == 1 and not kwargs and counter.dtype == torch.long and counter.dim() == 0


def square(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> int:
    """The side of the squares that an average is taken over, if they cover the image and don't overlap; else 0."""
    side = kernel_size if isinstance(kernel_size, int) else kernel_size[0]
    whole = (
        input.dim() == 4
        and _both(kernel_size) == _both(kernel_size if stride is None or stride == [] else stride) == (side, side)
        and _both(padding) == (0, 0)
        and divisor_override is None
        and input.shape[2] % side == input.shape[3] % side == 0
        and input.is_contiguous(memory_format=torch.channels_last)
    )
    return side if whole else 0


def _both(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def activation(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> int:
    if func in _RELUS:
        return RELU
    if func is F.relu6:
        return RELU6
    if func is F.hardtanh:  # nn.ReLU6 is one
        low, high = _argument(args, kwargs, 1, "min_val", -1.0), _argument(args, kwargs, 2, "max_val", 1.0)
        return RELU6 if (low, high) == (0.0, 6.0) else NONE
    return NONE


def joined_pair(tensors: Any, dim: Any = 0, **kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """Two batches that are joined along their channels."""
    two = isinstance(tensors, (list, tuple)) and len(tensors) == 2 and not kwargs
    return (tensors[0], tensors[1]) if two and dim in (1, -3) else None


def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> float:
    return p if training else 0.0


def in_place(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    if func in (torch.relu_, Tensor.relu_):
        return True
    position = {F.relu: 1, F.relu6: 1, F.hardtanh: 3, F.dropout: 3}.get(func)
    return position is not None and bool(_argument(args, kwargs, position, "inplace", False))


def _argument(args: Any, kwargs: dict[str, Any], position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)
