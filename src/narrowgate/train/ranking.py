"""The order in which gates would close, and how many of them have to for a given size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from narrowgate.gates import ExponentialGate, Gate, HardConcreteGate, exponential_gate, hard_concrete_gate
from narrowgate.gateset import Gates


class Ranking:
    """The gates in the order in which they would close: closed ones first, by what they were an epoch ago.

    The largest gates of each layer come last of all and are never closed, unless they were closed an epoch ago already:
    the largest one, or ``spared_share`` of those that are open. Neither are frozen ones. ``relative`` counts sizes as a
    relative penalty does, over what is typical of the layer.
    """

    def __init__(
        self,
        gates: list[Gate],
        before: list[list[float]],
        threshold: float,
        spared_share: float = 0.0,
        relative: bool = False,
    ) -> None:
        self.gates, self._threshold, self._relative = gates, threshold, relative
        self.open: list[Tensor] = []  # what each gate is set to if it stays, or is opened again
        sizes, keys, spared, shut = [], [], [], []
        for gate, numbers in zip(gates, before, strict=True):
            now = gate.g.detach().flatten().double().cpu()
            past = torch.tensor(numbers, dtype=torch.float64, device="cpu")
            past = past if len(past) == len(now) else now  # it was cut in between
            closed = (gate.final_value() <= threshold).flatten().cpu()
            size = _size(gate, now).masked_fill(closed, 0.0)
            if relative and size.any():
                size = size * (size.sum() / size.square().sum())
            # One that was closed before as well would only go back to its number near 0: no layer is to keep that.
            was = _size(gate, past).masked_fill(_value(gate, past) <= threshold, 0.0)
            key = torch.where(closed, was * 1e-9, size)
            self.open.append(torch.where(closed, past, now))
            sizes.append(size)
            keys.append(key)
            count = max(1, math.ceil(spared_share * int((size > 0).sum())))
            spared.append(_largest(key, count) if gate.learns else ~closed)
            shut.append(closed)
        self.size = torch.cat(sizes)
        self.count = len(self.size)
        self.closed = int(torch.cat(shut).sum())
        self.digest = hashlib.sha256(torch.cat(shut).numpy().tobytes()).hexdigest()
        self.most = self.count - int(torch.cat(spared).sum())
        self.order = torch.argsort(torch.cat(keys).masked_fill(torch.cat(spared), math.inf), stable=True)

    def sparing(self, share: float) -> Ranking:
        """The same gates, of which this share of each layer's open ones can't be closed."""
        return Ranking(self.gates, [g.tolist() for g in self.open], self._threshold, share, self._relative)

    def nth_largest(self, number: int) -> float:
        """The size of the smallest gate among this many of the largest; 0 where it is closed."""
        return float(self.size.sort(descending=True).values[min(max(number, 1), self.count) - 1])

    def postpone(self, place: int) -> None:
        """Let the gate at this place of the order be the last that may close."""
        order = self.order.tolist()
        order.insert(self.most - 1, order.pop(place))
        self.order = torch.tensor(order, device="cpu")

    @torch.no_grad()
    def close_(self, count: int) -> None:
        """Close this many of the smallest and open all others."""
        closing = torch.zeros(self.count, dtype=torch.bool, device="cpu")
        closing[self.order[:count]] = True
        sizes = [len(g) for g in self.open]
        for gate, mask, open_ in zip(self.gates, torch.split(closing, sizes), self.open, strict=True):
            gate.g.copy_(open_.to(gate.g).view_as(gate.g))
            gate.close_(mask.to(gate.g.device).view_as(gate.g))


def _largest(key: Tensor, count: int) -> Tensor:
    """Which of a layer's keys are among this many of the largest, those at 0 left out."""
    chosen = torch.zeros_like(key, dtype=torch.bool)
    chosen[torch.argsort(key, descending=True, stable=True)[:count]] = True
    return chosen & (key > 0)


def close_smallest_(gates: Gates, share: float, per_layer: bool = False, began: Mapping[str, int] | None = None) -> int:
    """Close the smallest gates until this share of all is closed, or of each layer's; return how many that closed.

    Closed gates count, and each layer keeps its largest. After cuts, ``began`` says how many gates each layer had
    before: those that are gone count as closed.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share of gates to close must be 0 or more and below 1, got {share!r}")
    modules = gates.modules()
    whole = {name: gates[name].size for name in gates} | dict(began or {})
    before = sum(int((gate.final_value() == 0).sum()) for gate in modules)
    for names in [[name] for name in gates] if per_layer else [gates.names]:
        members = [gates[name] for name in names]
        ranks = Ranking(members, [gate.g.detach().flatten().tolist() for gate in members], 0.0)
        count = sum(whole[name] for name in names)
        ranks.close_(min(max(round(share * count) - (count - ranks.count), ranks.closed), ranks.most))
    return sum(int((gate.final_value() == 0).sum()) for gate in modules) - before


def _size(gate: Gate, g: Tensor) -> Tensor:
    """How far gates are from closing."""
    if isinstance(gate, HardConcreteGate):
        return (g - math.log(-gate.stretch[0] / gate.stretch[1])).clamp(min=0.0)
    return g.abs()


def _value(gate: Gate, g: Tensor) -> Tensor:
    """The factors that these numbers stand for."""
    if isinstance(gate, ExponentialGate):
        return exponential_gate(g)
    if isinstance(gate, HardConcreteGate):
        return hard_concrete_gate(g, sample=False, stretch=gate.stretch)
    return g.abs()


def nearest(left: Callable[[int], float], target: float, known: dict[int, float], most: int, tolerance: float) -> int:
    """The number up to ``most`` at which a falling function comes nearest to the target.

    Every second guess is where the square root would be if it fell in a straight line: costs go with the product of a
    layer's inputs and outputs. Each evaluation makes a plan, so all of them are kept in ``known``.
    """
    if max(known.values()) < target - tolerance:  # too many are closed: some have to open again
        known[0] = left(0)
    turn = 0
    while True:
        best = min(known, key=lambda count: abs(known[count] - target))
        larger = [count for count, value in known.items() if value > target]
        if not larger or abs(known[best] - target) <= tolerance:
            return best
        low = max(larger)
        high = min((count for count, value in known.items() if value <= target and count > low), default=most + 1)
        if high - low <= 1:
            return best
        above, below, goal = (math.sqrt(value) for value in (known[low], known.get(high, 0.0), target))
        line = low + round((high - low) * (above - goal) / (above - below))
        middle = min(max((low + high) // 2 if turn % 2 else line, low + 1), high - 1)
        known[middle] = left(middle)
        turn += 1


@contextmanager
def gates_given_back(gates: list[Gate]) -> Iterator[None]:
    """Gates that are closed for a try are afterwards as before."""
    before = [gate.g.detach().clone() for gate in gates]
    try:
        yield
    finally:
        with torch.no_grad():
            for gate, g in zip(gates, before, strict=True):
                gate.g.copy_(g)
