"""Values that change with the epoch: plain frozen callables, epoch (from 0) in, value out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

Schedule = Callable[[int], float]
"""Anything that maps an epoch to a value; the classes below print well and compare equal."""


@dataclass(frozen=True)
class Constant:
    """The same value at every epoch."""

    value: float

    def __call__(self, epoch: int) -> float:
        return self.value


@dataclass(frozen=True)
class Stepped:
    """``values[i]`` from epoch ``at[i - 1]`` on: one more value than there are steps."""

    values: tuple[float, ...]
    at: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.at) + 1:
            raise ValueError(f"{len(self.at)} steps need {len(self.at) + 1} values, got {len(self.values)}")
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"steps must be increasing epochs, got {self.at}")

    def __call__(self, epoch: int) -> float:
        return self.values[sum(epoch >= step for step in self.at)]


@dataclass(frozen=True)
class Exponential:
    """``start * rate ** epoch``."""

    start: float
    rate: float

    def __post_init__(self) -> None:
        if self.start <= 0 or self.rate <= 0:
            raise ValueError(f"start and rate must be above 0, got {self.start} and {self.rate}")

    def __call__(self, epoch: int) -> float:
        return self.start * self.rate**epoch


@dataclass(frozen=True)
class LinearThenExponential:
    """``start`` minus ``drop`` an epoch until ``switch`` is reached, then times ``rate`` an epoch."""

    start: float
    drop: float
    switch: float
    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.switch <= self.start or self.drop <= 0 or self.rate <= 0:
            raise ValueError(f"need 0 < switch <= start, drop > 0 and rate > 0, got {self}")

    def __call__(self, epoch: int) -> float:
        linear_epochs = round((self.start - self.switch) / self.drop, 9)
        if epoch <= linear_epochs:
            return self.start - self.drop * epoch
        return self.switch * float(self.rate ** (epoch - linear_epochs))


def as_schedule(name: str, value: float | Schedule) -> Schedule:
    """A number becomes a constant schedule; a schedule stays as it is; ``name`` is for the error message."""
    if callable(value):
        return value
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or a schedule (epoch -> number), got {value!r}")
    return Constant(float(value))


_SIGMA_OF_DEEP_NETS = LinearThenExponential(start=2.0, drop=0.02, switch=0.2, rate=0.99)
_STRENGTH_OF_DEEP_NETS = Stepped(values=(1e-4, 5e-4), at=(120,))

_PAPER: dict[str, dict[str, Schedule]] = {
    "resnet-164": {"strength": _STRENGTH_OF_DEEP_NETS, "sigma": _SIGMA_OF_DEEP_NETS},
    "densenet-40": {"strength": _STRENGTH_OF_DEEP_NETS, "sigma": _SIGMA_OF_DEEP_NETS},
    # The paper gives no strength for MobileNetV2: pass your own beside this.
    "mobilenet-v2": {"sigma": Exponential(start=2.0, rate=0.99)},
}


def paper(network: str) -> dict[str, Schedule]:
    """The paper's CIFAR-100 schedules by network, ready for ``Penalty(gates, "bounded-l1", **paper("resnet-164"))``."""
    if network not in _PAPER:
        raise ValueError(f"the paper has no schedule for {network!r}; it has {', '.join(_PAPER)}")
    return dict(_PAPER[network])
