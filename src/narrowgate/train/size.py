"""``Size``: how small a network is to be, and how many of its gates have to close for that."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import nn

from narrowgate.flow.decide import CollapseError
from narrowgate.flow.plan import plan_traced
from narrowgate.flow.surgery import compact
from narrowgate.flow.trace import ExampleInputs, Tracer
from narrowgate.measure.counts import summarize
from narrowgate.train.ranking import Ranking, gates_given_back, nearest
from narrowgate.train.shrink import own_forward

KINDS = ("params", "flops")
_NEAR = 0.005, 0.05  # a search ends this far below the target at the most, as a share of the network and of the target
_ROUGH = 0.02, 0.2  # near enough on the way
# No layer loses more than the other half of its open gates at one look, if the target can be met like that: sizes of
# gates compare badly between layers, whose weights make up for small gates, and one channel is a bottleneck.
SPARED = 0.5
_TRIES = 12  # to come nearer to the target than the order of the gates allows


def parse_target(text: str) -> tuple[str, float]:
    """``"params: 30%"`` as ``("params", 0.3)``; ValueError says what is allowed."""
    found = re.fullmatch(r"\s*(\w+)\s*:\s*([0-9.]+)\s*%\s*", text) if isinstance(text, str) else None
    kind, number = (found[1], found[2]) if found else ("", "")
    share = float(number) / 100 if re.fullmatch(r"\d*\.?\d+|\d+\.", number) else math.nan
    if kind not in KINDS or not 0 < share < 1:
        raise ValueError(
            f"can't read the target {text!r}; write 'params: 30%' or 'flops: 50%': what is to be left of the network "
            "without gates, above 0% and below 100%"
        )
    return kind, share


class Size:
    """A target, and what a model would be without the gates that are closed.

    Args:
        text: the target, as ``Budget`` takes it; so are all others.
    """

    def __init__(
        self, text: str, model: nn.Module, example_inputs: ExampleInputs, layout: str, constants: str, round_to: int
    ) -> None:
        self.kind, self.target = parse_target(text)
        self.near, self.rough = (min(share, of_target * self.target) for share, of_target in (_NEAR, _ROUGH))
        self.middle, self.slack = self.target - self.near / 2, self.near / 2  # what is asked for is not to be exceeded
        self.training = True
        """Whether a zero other than a gate's counts as one that is about to learn."""
        self._model, self.example_inputs = model, example_inputs
        counted = "aligned" if layout == "auto" else layout
        self._options: dict[str, Any] = {"layout": counted, "constants": constants, "round_to": round_to}
        self._tracer = Tracer()
        with own_forward(model):
            full = summarize(model, example_inputs)
        self.original: int = full.parameters if self.kind == "params" else full.multiply_adds

    def __getstate__(self) -> dict[str, Any]:
        # Graphs hold tensors without numbers, which can't be copied: a copy traces the model again.
        return {**vars(self), "_tracer": Tracer()}

    def gently(
        self, ranks: Ranking, known: dict[int, float], closed: int, left: float
    ) -> tuple[Ranking, dict[int, float], int]:
        """Meet the target without taking more than half of any layer, where that can be."""
        if closed <= ranks.closed:  # nothing is to be closed
            return ranks, known, closed
        gentle = ranks.sparing(SPARED)
        if (least := self.left(gentle, gentle.most)) > self.target:
            return ranks, known, closed
        known = {gentle.closed: left, gentle.most: least}
        return gentle, known, self.meet(gentle, known)

    def meet(self, ranks: Ranking, known: dict[int, float]) -> int:
        """How many have to close for the target, and hardly more."""
        self.search(ranks, known, self.middle, self.slack)
        return min(known, key=lambda closed: self._miss(known[closed]))

    def search(self, ranks: Ranking, known: dict[int, float], target: float, tolerance: float) -> int:
        """How many have to close to come this near to a share; what is found out on the way is kept in ``known``."""
        return nearest(lambda closed: self.left(ranks, closed), target, known, ranks.most, tolerance)

    def come_nearer(self, ranks: Ranking, known: dict[int, float], closed: int) -> int:
        """One gate may be worth several points: pass over those that lead past the target, then take longer steps."""
        best, order, step = closed, ranks.order, 1
        place = max((count for count, left in known.items() if left > self.target), default=ranks.most)
        for _ in range(_TRIES):
            if self._miss(known[best]) <= self.near or place >= ranks.most:
                break
            count = min(place + step, ranks.most)
            left = self.left(ranks, count)
            if self._miss(left) < self._miss(known[best]):
                best, order, known[count] = count, ranks.order, left
            if left > self.target:
                place, step = count, 2 * step
            elif count > place + 1:
                step //= 2
            else:
                ranks.postpone(place)
        ranks.order = order
        return best

    def _miss(self, left: float) -> float:
        """How far below the target this is; what exceeds it is worse than all that does not."""
        return self.target - left if left <= self.target else 1 + left

    def left(self, ranks: Ranking, closed: int) -> float:
        """The share of the network that this many closed gates leave; the gates stay as they are."""
        with gates_given_back(ranks.gates):
            ranks.close_(closed)
            return self.cost() / self.original

    def cost(self) -> float:
        """Parameters or multiply-adds of the model without its closed channels; 0 for one that has collapsed."""
        with own_forward(self._model):
            try:
                made = plan_traced(
                    self._model, self.example_inputs, self._tracer, training=self.training, **self._options
                )
            except CollapseError:
                return 0.0
            if self.kind == "params":
                return float(made.parameters_after)
            return float(summarize(compact(self._model, made), self.example_inputs).multiply_adds)
