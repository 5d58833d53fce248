"""Results that are put off until it is clear what is done to them: norms, and layers that a DenseNet grows by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgate.train.norm_activation import NormActivation

if TYPE_CHECKING:
    from narrowgate.train.norm_launch import Norm


class Batch:
    """What one norm reads: its running statistics move once, however often its result is computed."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, Tensor] | None) -> None:
        self.inputs, self.running = (x, weight, bias), running
        self.with_gradient, self._version = torch.is_grad_enabled(), x._version

    def untouched(self) -> bool:
        """Whether all is as when the model called the norm."""
        return torch.is_grad_enabled() == self.with_gradient and self.inputs[0]._version == self._version

    def compute(self, norm: Norm) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() != self.with_gradient:
            # Inside a custom autograd function, say, that would lose the gradient without a word.
            raise RuntimeError("a norm's result was first used where gradients are switched another way")
        if not self.untouched():
            raise RuntimeError("what a norm read was changed in place before its result was used")
        running, self.running = self.running, None
        found: tuple[Tensor, Tensor] = NormActivation.apply(*self.inputs, running, norm)
        return found


@dataclass
class Promise:
    """A norm that has not been computed, and what is to be done to its result."""

    source: Tensor
    """What the model gave the norm; the batch itself may be wider."""
    batch: Batch
    norm: Norm
    result: Tensor | None = None

    def stand_in(self) -> Tensor:
        """What goes round in its place: of its shape, without numbers."""
        return torch.empty(self.source.shape, dtype=self.source.dtype, device="meta")


@dataclass
class Layer:
    """A 3x3 convolution of a norm that has not been computed, and dropout behind it."""

    norm: Promise
    weight: Tensor
    drop: float = 0.0
    salt: int = 0
    result: Tensor | None = None
