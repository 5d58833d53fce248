"""GPT-2's ``Conv1D``, a linear layer with its weight turned round, with gates. Imported only where one is met."""

from __future__ import annotations

from transformers.pytorch_utils import Conv1D

from narrowgate.gated import GatedTransposedLinear


class GatedConv1D(GatedTransposedLinear, Conv1D):
    plain_class = Conv1D
