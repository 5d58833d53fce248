"""nn.MultiheadAttention in the scatter layout: narrow weights, made whole again for each call.

It hands its weights to one function that wants them whole. Zero rows and columns are put back just before, which saves
parameters, not time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Widen(nn.Module):
    """Puts back the rows and columns that were cut from a weight, as zeros, and its bias' as constants."""

    rows: Tensor | None
    columns: Tensor | None
    fill: Tensor | None

    def __init__(self, gather: list[int] | None, scatter: list[int] | None, fill: list[float] | None, reads: int):
        super().__init__()
        self.reads = reads
        for key, positions in (("rows", scatter), ("columns", gather)):
            self.register_buffer(key, None if positions is None else torch.tensor(positions), persistent=False)
        numbers = None if fill is None else torch.tensor(fill, dtype=torch.float64)
        self.register_buffer("fill", numbers, persistent=False)

    def forward(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.columns is not None:
            weight = weight.new_zeros(len(weight), self.reads).index_copy(1, self.columns, weight)
        if self.rows is not None and self.fill is not None:
            weight = weight.new_zeros(len(self.fill), weight.shape[1]).index_copy(0, self.rows, weight)
            bias = None if bias is None else self.fill.to(bias.dtype).index_copy(0, self.rows, bias)
        return weight, bias


class IndexedMultiheadAttention(nn.MultiheadAttention):
    """The same arguments and results as nn.MultiheadAttention; its weights are narrower."""

    widen_in: Widen | None
    widen_out: Widen | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        kind = None if attn_mask is None else attn_mask.dtype
        padding = F._canonical_mask(key_padding_mask, "key_padding_mask", kind, "attn_mask", query.dtype)
        mask = F._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, False)
        turns = self.batch_first and query.dim() == 3
        if turns:  # one tensor that is all three must stay one: then it is projected at once
            turned = {id(x): x for x in (query, key, value)}
            turned = {one: x.transpose(1, 0) for one, x in turned.items()}
            query, key, value = (turned[id(x)] for x in (query, key, value))
        in_weight, in_bias, out_weight, out_bias = self.whole_weights()
        out, weights = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            in_weight,
            in_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            out_weight,
            out_bias,
            training=self.training,
            key_padding_mask=padding,
            need_weights=need_weights,
            attn_mask=mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return (out.transpose(1, 0) if turns else out), weights

    def whole_weights(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Weight and bias before the heads and behind them, as wide as they were."""
        inside: tuple[Tensor, Tensor | None] = self.in_proj_weight, self.in_proj_bias
        outside: tuple[Tensor, Tensor | None] = self.out_proj.weight, self.out_proj.bias
        if self.widen_in is not None:
            inside = self.widen_in(*inside)
        if self.widen_out is not None:
            outside = self.widen_out(*outside)
        return *inside, *outside


def is_attention(layer: nn.Module | None) -> bool:
    """Whether a layer can be swapped for one with narrow weights; separate projections are left alone."""
    return type(layer) is nn.MultiheadAttention and layer._qkv_same_embed_dim


def index_attention_(layer: nn.Module, inside: bool, widen: Widen) -> None:
    """Swap the class of an attention layer, in place, and widen its weights before or behind the heads."""
    assert isinstance(layer, nn.MultiheadAttention) and isinstance(layer.out_proj.weight, Tensor)
    if type(layer) is nn.MultiheadAttention:
        layer.__class__ = IndexedMultiheadAttention
        layer.add_module("widen_in", None)
        layer.add_module("widen_out", None)
        layer._qkv_same_embed_dim = False  # what reads its weights past it, for speed, must not
    layer.add_module("widen_in" if inside else "widen_out", widen.to(layer.out_proj.weight.device))
