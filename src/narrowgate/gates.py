"""Gates: tiny modules that hold one trainable number ``g`` per group and turn it into a factor in [0, 1).

Exponential gates are from Mummadi et al., "Group Pruning using a Bounded-lp norm"; linear gates are the scales of
BatchNorm (Liu et al. 2017, "Network Slimming"); hard-concrete gates are from Louizos et al. 2017, "Learning Sparse
Neural Networks through L0 Regularization".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgate.dtensors import put_, whole
from narrowgate.norms import at_least_float32

CLOSING_POINT = 2.0**-12.5
"""An exponential gate is closed where ``|g|`` is below this: where float32 ``1 - exp(-g*g)`` rounds to 0."""

# The smallest float32 above 2**-12.5. No float32 lies between the two, so comparing with it is exact on every backend,
# while 2**-12.5 itself would be rounded *down* to a float32 that is inside the closed range.
_FIRST_OPEN_FLOAT32 = float.fromhex("0x1.6a09e8p-13")

_LEAST_DRAW = 1e-6
_FARTHEST_DRAW = 14.0  # a little more than how far from 0 the logit of a number drawn in [1e-6, 1 - 1e-6] can be


def exponential_gate(g: Tensor) -> Tensor:
    """``1 - exp(-g^2)``, exactly 0 (with gradient 0) where ``|g| < 2**-12.5``; at least float32 whatever g is."""
    g = at_least_float32(g)
    closed = g.detach().abs() < (CLOSING_POINT if g.dtype == torch.float64 else _FIRST_OPEN_FLOAT32)
    return torch.where(closed, torch.zeros_like(g), -torch.expm1(-g * g))


def hard_concrete_gate(
    log_alpha: Tensor,
    *,
    sample: bool,
    temperature: float = 2 / 3,
    stretch: tuple[float, float] = (-0.1, 1.1),
) -> Tensor:
    """A stretched, clamped concrete variable in [0, 1]: sampled for training, its deterministic estimate otherwise.

    The estimate is exactly 0 where ``log_alpha <= log(-low / high)``, defined here and not left to rounding.
    """
    low, high = stretch
    log_alpha = at_least_float32(log_alpha)
    if sample:
        u = torch.empty_like(log_alpha).uniform_(_LEAST_DRAW, 1 - _LEAST_DRAW)
        s = torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / temperature)
        return (s * (high - low) + low).clamp(0.0, 1.0)
    value = (torch.sigmoid(log_alpha) * (high - low) + low).clamp(0.0, 1.0)
    return torch.where(log_alpha.detach() <= math.log(-low / high), torch.zeros_like(value), value)


def expected_l0(log_alpha: Tensor, temperature: float = 2 / 3, stretch: tuple[float, float] = (-0.1, 1.1)) -> Tensor:
    """Each hard-concrete gate's probability of being open, the smooth stand-in for the 0-norm."""
    low, high = stretch
    return torch.sigmoid(at_least_float32(log_alpha) - temperature * math.log(-low / high))


class Gate(nn.Module):
    """One factor per group: ``value()`` is what the layer multiplies by, ``final_value()`` what training leaves."""

    kind: str = ""
    g: Tensor
    init: float = 1.0
    """What each number starts at."""
    names: tuple[str, ...] = ()
    """What each number is called, where it is a group's and not a channel's."""
    divided: bool = False
    """Whether its layer's weights were divided by it, so that the model computed what it did without gates."""

    def value(self) -> Tensor:
        raise NotImplementedError

    def final_value(self) -> Tensor:
        """The deterministic factor, detached."""
        return self.value().detach()

    def close_(self, mask: Tensor) -> None:
        """Close the gates selected by a boolean mask."""
        raise NotImplementedError

    def open_least_closed_(self) -> int:
        """Open the closed gate that is nearest to being open, by a small step; return its position."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """How many groups this gate serves."""
        return self.g.numel()

    @property
    def own(self) -> Gate:
        """The gate whose numbers these are: itself, or the one that several layers share."""
        return self

    @property
    def learns(self) -> bool:
        """Whether training moves it; not where its parameter is frozen."""
        return self.g.requires_grad

    def extra_repr(self) -> str:
        return f"{self.size}, kind={self.kind!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # model.half() and the like leave gates in float32: the steps that close them are too small for fewer digits.
        # model.to_empty() makes memory without numbers, and an ordinary checkpoint has none for gates: they start anew.
        def apply(tensor: Tensor) -> Tensor:
            new = _in_enough_digits(fn(tensor), tensor)
            return self._started(new) if tensor.is_meta and not new.is_meta else new

        return super()._apply(apply, recurse)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _started(self, empty: Tensor) -> Tensor:
        """The numbers of a new gate, written into memory that has none."""
        return empty.fill_(self.init)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # An ordinary checkpoint knows no gates: it loads, and the gates stay as they are.
        if (saved := state_dict.get(prefix + "g")) is not None:
            state_dict = {**state_dict, prefix + "g": _in_enough_digits(saved, saved)}  # for assign=True
            super()._load_from_state_dict(state_dict, prefix, *args)


class ExponentialGate(Gate):
    """The paper's gate: ``1 - exp(-g^2)``, g starts at 1."""

    kind = "exponential"

    def __init__(self, size: int, init: float = 1.0, device: torch.device | None = None) -> None:
        super().__init__()
        self.init = float(init)
        self.g = nn.Parameter(torch.full((size,), self.init, device=device))

    def value(self) -> Tensor:
        return exponential_gate(whole(self.g))

    @torch.no_grad()
    def close_(self, mask: Tensor) -> None:
        put_(self.g, whole(self.g).masked_fill(mask, 0.0))

    @torch.no_grad()
    def open_least_closed_(self) -> int:
        return _lift_(self.g, 8 * CLOSING_POINT)


class HardConcreteGate(Gate):
    """A stochastic gate for L0 regularisation; ``g`` is log alpha, 0 meaning that half of the samples are dropped."""

    kind = "hard-concrete"

    def __init__(
        self,
        size: int,
        init: float = 0.0,
        device: torch.device | None = None,
        temperature: float = 2 / 3,
        stretch: tuple[float, float] = (-0.1, 1.1),
    ) -> None:
        super().__init__()
        if temperature <= 0 or not stretch[0] < 0 < 1 < stretch[1]:
            raise ValueError(
                f"a hard-concrete gate needs temperature > 0 and stretch around [0, 1], got {temperature} and {stretch}"
            )
        self.temperature = temperature
        self.stretch = stretch
        self.init = float(init)
        self.g = nn.Parameter(torch.full((size,), self.init, device=device))

    def value(self) -> Tensor:
        g = whole(self.g)
        return hard_concrete_gate(g, sample=self.training, temperature=self.temperature, stretch=self.stretch)

    @torch.no_grad()
    def final_value(self) -> Tensor:
        return hard_concrete_gate(whole(self.g), sample=False, temperature=self.temperature, stretch=self.stretch)

    def expected_l0(self) -> Tensor:
        return expected_l0(whole(self.g), self.temperature, self.stretch)

    @torch.no_grad()
    def close_(self, mask: Tensor) -> None:
        # So far below the closing point that samples are closed too, whatever is drawn.
        point = math.log(-self.stretch[0] / self.stretch[1])
        put_(self.g, whole(self.g).masked_fill(mask, min(point, self.temperature * point) - _FARTHEST_DRAW))

    @torch.no_grad()
    def open_least_closed_(self) -> int:
        g = whole(self.g).clone()
        position = int(g.argmax())
        g[position] = math.log(-self.stretch[0] / self.stretch[1]) + 0.1
        put_(self.g, g)
        return position


class LinearGate(Gate):
    """A view of a BatchNorm's own scale as a gate: it adds no parameter and changes nothing in the layer."""

    kind = "linear"

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.__dict__["norm"] = norm  # not a submodule: the norm owns this gate, not the other way round

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        weight = self.__dict__["norm"].weight
        assert isinstance(weight, Tensor)
        return weight

    def value(self) -> Tensor:
        return whole(self.g).abs()

    @torch.no_grad()
    def close_(self, mask: Tensor) -> None:
        put_(self.g, whole(self.g).masked_fill(mask, 0.0))

    @torch.no_grad()
    def open_least_closed_(self) -> int:
        return _lift_(self.g, 1e-3)


class GroupGate(Gate):
    """One layer's view of a gate whose numbers serve groups of rows or columns, here and in other layers.

    ``g`` says which number each row or column is multiplied by; it is a buffer, and is cut with the layer. It is in
    floating point, since an average of weights may average buffers too: of whole numbers it would cut off 2.9999 to 2.
    ``shared`` is the gate itself: a submodule of the first view, known to all.
    """

    def __init__(self, label: str, shared: Gate, numbers: list[int], *, owns: bool) -> None:
        super().__init__()
        self.label = label
        if owns:
            self.shared = shared
        else:
            self.__dict__["shared"] = shared
        self._numbers = tuple(numbers)
        self._in_order = self._numbers == tuple(range(shared.size))
        self.register_buffer("g", torch.tensor(numbers, dtype=torch.float32, device=shared.g.device))

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.shared.kind

    @property
    def own(self) -> Gate:
        return self.shared

    @property
    def numbers(self) -> Tensor:
        """The number of each row's or column's group, -1 for one that is in none."""
        return self.g.round().long()

    def value(self) -> Tensor:
        return self.spread(self.shared.value())

    def final_value(self) -> Tensor:
        return self.spread(self.shared.final_value())

    def _started(self, empty: Tensor) -> Tensor:
        # After a cut only a checkpoint of the cut model fits, and it has them.
        return (
            empty.copy_(torch.tensor(self._numbers, device=empty.device)) if len(empty) == len(self._numbers) else empty
        )

    def spread(self, values: Tensor) -> Tensor:
        """A factor for each row or column: its group's, and 1 for one that is in no group."""
        values = values.to(self.g.device)
        if self._in_order and len(self.g) == len(values):  # after a cut, fewer are left
            return values
        return torch.cat([values, values.new_ones(1)])[self.numbers]


def _in_enough_digits(new: Tensor, old: Tensor) -> Tensor:
    """A gate's tensor moved or cast to be like ``new``, but not to less than float32."""
    few = new.is_floating_point() and torch.finfo(new.dtype).bits < 32
    return old.to(new.device, torch.float32) if few else new


def _lift_(g: Tensor, value: float) -> int:
    """Set the largest number by size to a value, keeping its sign; return where it is."""
    new = whole(g).clone()
    position = int(new.abs().argmax())
    new[position] = -value if new[position] < 0 else value
    put_(g, new)
    return position
