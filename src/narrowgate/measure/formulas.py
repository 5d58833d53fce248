"""What one operation costs: a formula an operation that multiplies and adds, and the operations that count as free.

Adding an operation is one short function (or none) and one row. What stands in neither table is reported as not
counted, never guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

Formula = Callable[[tuple[Any, ...], Tensor], int]


def _convolution(args: tuple[Any, ...], out: Tensor) -> int:
    # One kernel a result or, transposed, one kernel an input element; weight is (..., channels of a group, *kernel).
    inputs, weight, transposed = args[0], args[1], args[6]
    return int((inputs if transposed else out).numel() * prod(weight.shape[1:]))


def _product(first: int) -> Formula:
    """A matrix product, possibly batched, whose left matrix is this argument."""
    return lambda args, out: int(out.numel() * args[first].shape[-1])


def _every_element(which: int) -> Formula:
    """One multiply-add for each element of this argument: matrix times vector, vector times vector."""
    return lambda args, out: int(args[which].numel())


def _summed_batch(args: tuple[Any, ...], out: Tensor) -> int:
    return int(args[1].numel() * args[2].shape[-1])


def _attention(args: tuple[Any, ...], out: Tensor) -> int:
    # Queries by keys, then weights by values; a causal mask saves nothing here.
    query, key, value = args[:3]
    return int(prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _recurrent(args: tuple[Any, ...], out: Tensor) -> int:
    # Every weight matrix once a step and sample. The weights come as four arguments or as a list.
    steps = args[0].numel() // args[0].shape[-1]
    candidates = [each for arg in args[1:5] for each in (arg if isinstance(arg, (list, tuple)) else [arg])]
    return int(steps * sum(each.numel() for each in candidates if isinstance(each, Tensor) and each.dim() == 2))


def _bilinear(args: tuple[Any, ...], out: Tensor) -> int:
    # Every weight once a sample: as many as the three factors, with the axes they lack put in, have places together.
    shapes = []
    for factor, lacking in zip(args[:3], args[3:6], strict=True):
        shape = list(factor.shape)
        for axis in sorted(lacking):
            shape.insert(axis, 1)
        shapes.append(shape)
    return prod(np.broadcast_shapes(*shapes))


FORMULAS: dict[str, Formula] = {
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::mm": _product(0),
    "aten::_int_mm": _product(0),
    "aten::_scaled_mm": _product(0),
    "aten::bmm": _product(0),
    "aten::addmm": _product(1),
    "aten::_addmm_activation": _product(1),
    "aten::baddbmm": _product(1),
    "aten::addbmm": _summed_batch,
    "aten::mv": _every_element(0),
    "aten::addmv": _every_element(1),
    "aten::dot": _every_element(0),
    "aten::vdot": _every_element(0),
    "aten::_trilinear": _bilinear,
    "aten::addr": lambda args, out: out.numel(),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::_cudnn_rnn": _recurrent,
}

# No multiply-adds in the usual counting. Pointwise operations and views are known by PyTorch's own tags.
_FREE_BY_KIND = {
    "normalise": """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
        _batch_norm_no_update _batch_norm_with_update native_layer_norm native_group_norm _fused_rms_norm
        _weight_norm_interface linalg_vector_norm _softmax _log_softmax _safe_softmax logsumexp""",
    "pool": """max_pool2d max_pool2d_with_indices max_pool3d_with_indices mkldnn_max_pool2d fractional_max_pool2d
        avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d""",
    "resize": """upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""",
    "reduce": "sum mean amax amin max min prod any all argmax argmin var std var_mean cumsum cumprod topk sort",
    "activate": "hardswish prelu _prelu_kernel rrelu_with_noise glu native_dropout bernoulli where masked_fill",
    "look up": """embedding _embedding_bag _embedding_bag_forward_only index index_select index_put index_copy
        index_add index_fill gather scatter scatter_add scatter_reduce masked_select nonzero one_hot _unique2""",
    "move": """cat stack roll flip repeat repeat_interleave tril triu rot90 pixel_shuffle pixel_unshuffle
        channel_shuffle im2col col2im constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d clone copy _to_copy contiguous resize as_strided set
        lift lift_fresh _unsafe_view _reshape_alias unsafe_split unsafe_split_with_sizes split_with_sizes_copy
        transpose t squeeze unsqueeze swapaxes detach _pack_padded_sequence""",
    "make": """empty empty_like empty_strided empty_permuted zeros zeros_like ones ones_like full full_like new_empty
        new_zeros new_ones new_full new_empty_strided arange linspace scalar_tensor eye rand randn randint randperm
        rand_like randn_like uniform normal fill zero""",
    "ask": "_local_scalar_dense is_same_size equal _assert_async",
}
FREE = frozenset(f"aten::{name}" for names in _FREE_BY_KIND.values() for name in names.split())


def op_name(op: OpOverload) -> str:
    """An operation without overload; one that works in place is called like the one that does not."""
    name = str(op.name()).split(".")[0]  # type: ignore[no-untyped-call]
    return name if name.endswith("__") else name.removesuffix("_")


def is_free(op: OpOverload) -> bool:
    """Whether an operation is known to hold no multiply-adds."""
    name = op_name(op)
    return name in FREE or name.startswith(("prim::", "profiler::")) or torch.Tag.pointwise in op.tags or op.is_view
