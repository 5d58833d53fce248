"""Penalties on gates: in the loss (``loss + penalty()``) or as a proximal step after the optimizer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from narrowgate import norms
from narrowgate.dtensors import whole_each
from narrowgate.gates import HardConcreteGate, expected_l0
from narrowgate.gateset import Gates
from narrowgate.schedules import Schedule, as_schedule

KINDS = ("l1", "l2", "bounded-l1", "bounded-lp", "l0")


class Penalty:
    """``strength`` times a norm of all gate parameters.

    ``l1`` is ``sum |g| / sigma``, ``l2`` is ``sum g^2 / 2`` (so that strength is a weight decay), ``bounded-l1`` and
    ``bounded-lp`` are ``sum 1 - exp(-(|g| / sigma)^p)``, ``l0`` is the expected number of open hard-concrete gates.
    ``strength`` and ``sigma`` are numbers or schedules; ``set_epoch`` moves the schedules on. ``weights`` are factors
    by the gates' names, for layers whose channels cost more than others'; those not named have 1.

    ``relative`` takes each layer's gates over their typical size, ``sum g^2 / sum |g|``, so that nothing is won by
    making all gates of a layer smaller. That is for layers with a norm behind them, which would undo it: there a
    plain penalty shrinks all gates alike, and the weights behind learn ever faster. ``l1`` is then the number of
    channels that count, ``(sum |g|)^2 / sum g^2``.
    """

    def __init__(
        self,
        gates: Gates,
        kind: str,
        strength: float | Schedule,
        sigma: float | Schedule = 1.0,
        p: float | None = None,
        weights: Mapping[str, float] | None = None,
        relative: bool = False,
    ) -> None:
        self.gates = gates
        self.kind = kind
        if relative and kind in ("l2", "l0"):
            raise ValueError(f"the {kind} penalty can't be relative: it closes no gate by its size; use l1 or bounded")
        self.relative = relative
        self.p = _check_kind(kind, p, gates)
        self.weights = _check_weights(weights or {}, gates)
        self._strength_schedule = as_schedule("strength", strength)
        self._sigma_schedule = as_schedule("sigma", sigma)
        # On the gates' device and changed in place, so that a captured CUDA graph sees a new epoch's values.
        self._strength_tensor: Tensor | None = None
        self._sigma_tensor: Tensor | None = None
        self._weight_tensor: Tensor | None = None
        self._layers: Tensor | None = None
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Take strength and sigma from their schedules at this epoch (counted from 0)."""
        self.strength = self._strength_schedule(epoch)
        self.sigma = self._sigma_schedule(epoch)

    def follow(self, strength: float | Schedule) -> None:
        """From the next ``set_epoch`` on, take the strength from here; the schedule of sigma stays."""
        self._strength_schedule = as_schedule("strength", strength)

    @property
    def strength(self) -> float:
        """The factor before the norm."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        norms.check_not_negative("strength", value)
        self._strength = float(value)
        if self._strength_tensor is not None:
            self._strength_tensor.fill_(self._strength)

    @property
    def sigma(self) -> float:
        """The width of the bounded norm; for l1 a plain divisor."""
        return self._sigma

    @sigma.setter
    def sigma(self, value: float) -> None:
        norms.check_positive("sigma", value)
        if self.kind in ("l2", "l0") and value != 1.0:
            raise ValueError(f"the {self.kind} penalty has no sigma; leave it at 1.0 and change strength instead")
        self._sigma = float(value)
        if self._sigma_tensor is not None:
            self._sigma_tensor.fill_(self._sigma)

    def __call__(self) -> Tensor:
        """The penalty as a scalar to add to the loss."""
        g = self._expected_open() if self.kind == "l0" else self.gates.flat()
        strength, sigma = self._scalars(g)
        return (strength * self._norm(g, sigma)).to(norms.at_least_float32(g).dtype)

    def _norm(self, g: Tensor, sigma: Tensor) -> Tensor:
        weight = self._weight_of_each(g)
        if self.relative:
            g = cast(Tensor, norms.Relative.apply(norms.at_least_float32(g), self._layer_of_each(g), len(self.gates)))
        if self.kind == "l0":
            return (weight * g).sum()
        if self.kind == "l1":
            return norms.l1(g, weight) / sigma
        if self.kind == "l2":
            return norms.l2(g, weight) / 2
        return norms.bounded_lp(g, self.p, sigma, weight)

    @torch.no_grad()
    def proximal_(self, lr: float | Tensor) -> None:
        """Shrink the gates in place by one proximal step of size ``lr``; small ones stop at exactly 0.

        Call it after ``optimizer.step()`` and leave ``penalty()`` out of the loss. Under momentum m a penalty in the
        loss moves a gate by ``lr * strength / (1 - m)`` a step; pass ``lr / (1 - m)`` to shrink at that speed. Gates
        that are frozen (``requires_grad=False``) stay, as they would under a penalty in the loss.
        """
        flat = self.gates.flat()
        shrunk = self.shrunk(flat, lr)
        if not all(gate.learns for gate in self.gates.modules()):
            learns = [torch.full((gate.size,), gate.learns, device=flat.device) for gate in self.gates.modules()]
            shrunk = torch.where(torch.cat(learns), shrunk, flat)
        self.gates.assign_(shrunk)

    @torch.no_grad()
    def shrunk(self, flat: Tensor, lr: float | Tensor) -> Tensor:
        """What one proximal step of size ``lr`` makes of gate parameters in the order of ``gates.flat()``."""
        norms.check_not_negative("lr", lr)
        if self.kind == "l0":
            raise ValueError("the l0 penalty has no proximal step; add penalty() to the loss instead")
        strength, sigma = self._scalars(flat)
        g = flat.to(strength.dtype)
        step = lr * strength
        if self.kind == "l2":
            return (g / (1 + step * self._weight_of_each(g))).to(flat.dtype)
        if self.relative:
            pull = step * self._relative_slope(g, sigma)
        else:
            pull = step * self._weight_of_each(g) * self._slope(g.abs(), sigma)
        return (torch.sign(g) * (g.abs() - pull).clamp(min=0)).to(flat.dtype)

    def _slope(self, size: Tensor, sigma: Tensor) -> Tensor:
        """The norm's derivative at ``size`` > 0.

        The norm is concave in ``|g|`` for p <= 1, so its tangent lies above it and a soft-threshold with that slope
        is a step that never raises the objective (majorise, then minimise).
        """
        if self.kind == "l1":
            return 1 / sigma
        limits = torch.finfo(size.dtype)
        ratio = size.clamp(min=limits.tiny) / sigma
        exponent = ratio**self.p
        slope = self.p / sigma * ratio ** (self.p - 1) * torch.exp(-exponent)
        # Never inf or NaN, so that a strength of 0 shrinks nothing.
        return torch.where(exponent > norms.SATURATED_EXPONENT, torch.zeros_like(size), slope.clamp(max=limits.max))

    def _relative_slope(self, g: Tensor, sigma: Tensor) -> Tensor:
        """By how much the norm grows with each ``|g|``; below 0 for gates that are larger than is typical."""
        with torch.enable_grad():
            point = g.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self._norm(point, sigma), point)
        return slope * torch.sign(g)

    def _expected_open(self) -> Tensor:
        """Each hard-concrete gate's probability of being open, as one vector on the first gate's device."""
        gates = [cast(HardConcreteGate, gate) for gate in self.gates.modules()]
        each = zip(gates, whole_each(self.gates.parameters()), strict=True)
        return torch.cat([expected_l0(g, gate.temperature, gate.stretch).to(gates[0].g.device) for gate, g in each])

    def _sizes(self) -> list[int]:
        return [gate.size for gate in self.gates.modules()]

    def _weight_of_each(self, like: Tensor) -> Tensor | float:
        """The weight of each single gate; made anew when gates were cut."""
        if not self.weights:
            return 1.0
        kept = self._weight_tensor
        if kept is None or kept.device != like.device or len(kept) != len(like):
            each = [
                self.weights.get(name, 1.0)
                for name, size in zip(self.gates, self._sizes(), strict=True)
                for _ in range(size)
            ]
            with torch.inference_mode(False):
                self._weight_tensor = kept = torch.tensor(each, dtype=like.dtype, device=like.device)
        return kept

    def _layer_of_each(self, like: Tensor) -> Tensor:
        """The layer of each single gate; made anew when gates were cut."""
        if self._layers is None or self._layers.device != like.device or len(self._layers) != len(like):
            with torch.inference_mode(False):
                sizes = torch.tensor(self._sizes(), device="cpu")
                self._layers = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes).to(like.device)
        return self._layers

    def _scalars(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._strength_tensor is None or self._sigma_tensor is None or self._strength_tensor.device != like.device:
            dtype = torch.float32 if like.device.type == "mps" else torch.float64
            with torch.inference_mode(False):  # they outlive this call
                self._strength_tensor = torch.tensor(self._strength, dtype=dtype, device=like.device)
                self._sigma_tensor = torch.tensor(self._sigma, dtype=dtype, device=like.device)
        return self._strength_tensor, self._sigma_tensor

    def __repr__(self) -> str:
        sigma = "" if self.kind in ("l2", "l0") else f", sigma={self.sigma:g}"
        p = f", p={self.p:g}" if self.kind == "bounded-lp" else ""
        relative = ", relative=True" if self.relative else ""
        return f"Penalty({self.kind!r}, strength={self.strength:g}{sigma}{p}{relative}, gates={self.gates.count})"


def _check_weights(weights: Mapping[str, float], gates: Gates) -> dict[str, float]:
    for name, weight in weights.items():
        if name not in gates.names:
            raise ValueError(f"a weight for {name!r}, where no gate is; gates are on {', '.join(gates)}")
        norms.check_not_negative(f"the weight of {name!r}", weight)
    return dict(weights)


def _check_kind(kind: str, p: float | None, gates: Gates) -> float:
    """The exponent to use, or an error for a penalty that does not exist or does not fit these gates."""
    if kind not in KINDS:
        raise ValueError(f"unknown penalty {kind!r}; choose one of {', '.join(KINDS)}")
    if not isinstance(gates, Gates):
        raise TypeError(f"Penalty needs the Gates that attach_gates_ returned, got a {type(gates).__name__}")
    if unfit := [name for name in gates if (gates[name].kind == "hard-concrete") != (kind == "l0")]:
        remedy = "use 'l0' for hard-concrete gates" if kind != "l0" else "it is for kind='hard-concrete'"
        raise ValueError(
            f"the {kind} penalty does not fit the {gates[unfit[0]].kind} gates on {', '.join(unfit)}; {remedy}"
        )
    if kind == "bounded-lp":
        if p is None:
            raise ValueError("the bounded-lp penalty needs its exponent: pass p=, for example p=0.5")
        norms.check_positive("p", p)
        return float(p)
    if p is not None:
        raise ValueError(f"the {kind} penalty takes no p; use 'bounded-lp' to choose the exponent")
    return 1.0
