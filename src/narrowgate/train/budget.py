"""``Budget``: instead of a strength, a size to end at; the strength follows from how the gates move."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from narrowgate.dtensors import is_sharded
from narrowgate.flow.inplace import Optimizers, optimizers_of
from narrowgate.flow.plan import check_choices
from narrowgate.flow.trace import ExampleInputs
from narrowgate.gates import Gate, HardConcreteGate
from narrowgate.norms import check_not_negative
from narrowgate.penalties import Penalty
from narrowgate.rivals.filters import Filters
from narrowgate.train.ranking import Ranking
from narrowgate.train.shrink import WRAPPERS, check_gates_train, random_numbers_kept
from narrowgate.train.size import SPARED, Size

_BEGIN = 3 / 7  # from when on the smallest gates are closed, as a share of the time to the target
BOUNDS = (1e-7, 10.0)  # of the strength
_RISES, _FALL = (10.0, 1.5), 1 / 3  # the most by which one epoch changes the strength; it rises fast until gates move
_LOOKS = (10, 30)  # how often to plan in a run that is as long: while no gates are closed by hand, and while some are
_MANY = 0.02  # which share of gates closing by themselves calls for a plan at once
_MANY_AT_ONCE = 0.1  # of the open gates, closed by hand in one epoch
_WIDE_OPEN = 3.0  # log alpha of a hard-concrete gate that is open in almost every sample
_STATE = {name.lstrip("_"): name for name in "_strength _goal _open _start _last _held _before".split()}
_STATE |= {"holding": "holding", "left": "left", "original": "_original"}
_MOMENTA = {"momentum_buffer", "exp_avg"}  # what torch's optimizers keep of earlier gradients' directions


def _check_gates(model: nn.Module, penalty: Penalty) -> None:
    if isinstance(model, WRAPPERS):
        raise TypeError(f"Budget needs the model inside {type(model).__name__}: pass model.module")
    _check_whole(penalty)
    if isinstance(penalty.gates, Filters):
        raise ValueError(
            "filters have no budget, which steers a penalty on gates: close a share of them with close_smallest_, or "
            "use attach_gates_"
        )
    held = {id(parameter) for parameter in model.parameters()}
    if foreign := [name for name in penalty.gates if id(penalty.gates[name].g) not in held]:
        raise ValueError(
            f"the penalty's gates, such as {foreign[0]!r}, are not those of this {type(model).__name__}: give the "
            "model that attach_gates_ returned them for, not a copy"
        )


def _check_whole(penalty: Penalty) -> None:
    if sharded := [name for name in penalty.gates if is_sharded(penalty.gates[name].g)]:
        raise RuntimeError(
            f"the gates on {', '.join(sharded)} are sharded by fully_shard: make and step a Budget inside `with "
            "ng.gathered(model, optimizer, shard=...):`"
        )


class Budget:
    """Moves a penalty's strength during training so that the run ends with a given share of the network left.

    The gate that decides is the *marginal* one: closing it and all smaller ones would meet the target. The strength is
    moved so that it comes to zero when ``arrive`` of the epochs are done. Before that, from three sevenths of that time
    on, the smallest gates are closed in steps as well, at first many and then few, so that the network gets used to its
    size. Then the target is met whatever the gates are, the penalty ends, and the target is held: gates that close are
    opened again, gates that open are closed. Each layer keeps its largest gate, and the larger half of its open ones at
    any one time if the target can be met like that.

    Without ``steer`` the strength stays the penalty's own, and gates close by themselves until the target is met, which
    then is held in the same way. Only if it isn't met when ``arrive`` of the epochs are done are the smallest closed.

    Args:
        target: ``"params: 30%"`` or ``"flops: 50%"`` (multiply-adds) of the network without gates, left at the end, or
            up to half a point less; one channel of a small network may be worth more than that.
        model: the gated model at full size.
        example_inputs: what the model is traced with, as for ``ng.plan``.
        penalty: the one whose strength is moved; a schedule that it had ends, with ``steer`` now, else at the target.
        epochs: how long the run is.
        optimizer: the gates' momentum is cleared when the penalty ends; a list where there are several.
        arrive: when the target is met, as a share of the epochs; without ``steer``, by when at the latest.
        steer: move the strength, and close gates on the way; without, leave the penalty its strength or schedule.
        threshold: gates below this count as closed, for linear gates that never are exactly.
        layout: as the final model will be planned; ``auto`` is counted as ``aligned``.
        constants: as the final model will be planned.
        round_to: as the final model will be planned.
    """

    def __init__(
        self,
        target: str,
        model: nn.Module,
        example_inputs: ExampleInputs,
        penalty: Penalty,
        epochs: int,
        *,
        optimizer: Optimizers = None,
        threshold: float = 0.0,
        arrive: float = 0.7,
        steer: bool = True,
        layout: str = "aligned",
        constants: str = "exact",
        round_to: int = 1,
    ) -> None:
        if epochs < 1:
            raise ValueError(f"epochs must be 1 or above, got {epochs}")
        check_choices(constants, round_to, layout)
        check_not_negative("threshold", threshold)
        _check_gates(model, penalty)
        check_gates_train(penalty.gates, optimizer)
        self.model = model
        self.penalty = penalty
        if not 0 < arrive <= 1:
            raise ValueError(f"arrive is a share of the epochs, above 0 and at most 1, got {arrive!r}")
        self.epochs = epochs
        self.arrive = arrive
        self.steer = steer
        self.optimizer = optimizer
        self.threshold = threshold
        self.size = Size(target, model, example_inputs, layout, constants, round_to)
        self.kind, self.target = self.size.kind, self.size.target
        self.holding = False
        self.left = 1.0
        self._strength = penalty.strength or 1e-4
        self._goal = self._open = penalty.gates.count  # open gates at the target, and at the last look
        self._start = 0.0  # the marginal gate's size at first
        self._last: float | None = None  # and an epoch ago
        self._held = ""  # which gates were closed when the target was last met
        self._before: list[list[float]] = []
        self.remember()
        self._check_reach(target)
        if steer:
            self._take_over()

    def _check_reach(self, target: str) -> None:
        ranks = self._ranks()
        least = self.size.left(ranks, ranks.most)
        if least > self.target + self.size.rough:
            raise ValueError(
                f"the target {target!r} is out of reach: with one open gate left in each layer, {100 * least:.3g}% "
                "remain. Gate more layers, or raise the target"
            )

    @property
    def _original(self) -> int:
        return self.size.original

    @_original.setter
    def _original(self, size: int) -> None:  # of a resumed run, whose model may be cut already
        self.size.original = size

    @property
    def _modules(self) -> list[Gate]:
        return self.penalty.gates.modules()

    def _ranks(self) -> Ranking:
        return Ranking(self._modules, self._before, self.threshold, relative=self.penalty.relative)

    def step(self, epoch: int) -> float:
        """Call after each epoch (counted from 0), before a ``Shrinker``: sets the penalty's strength and returns it."""
        _check_whole(self.penalty)
        self.penalty.gates.values()  # raises if one is NaN
        ranks = self._ranks()
        last = epoch + 1 >= min(self.epochs, math.ceil(round(self.arrive * self.epochs, 9)))
        with random_numbers_kept(self.model):
            if self._looks(epoch, ranks, last or self.holding):
                self._look_(epoch, ranks, last or self.holding)
        if self.steer and not self.holding:
            self._steer(epoch, ranks)
        self.remember()
        if self.steer or self.holding:
            self._take_over()
        return self.penalty.strength

    def _take_over(self) -> None:
        self.penalty.strength = self._strength
        self.penalty.follow(self._strength_at)  # so that set_epoch, for sigma, leaves it alone

    def _strength_at(self, epoch: int) -> float:
        return self._strength

    def remember(self) -> None:
        """Call after a cut: gates that close in the next epoch can be opened again, if it knows what they were."""
        self._before = [gate.g.detach().flatten().tolist() for gate in self._modules]

    def state_dict(self) -> dict[str, Any]:
        """Where the controller stands, as plain JSON values."""
        return {key: getattr(self, name) for key, name in _STATE.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        if not isinstance(state, dict) or not _STATE.keys() <= state.keys():
            raise ValueError("this is not the state of a Budget; give what budget.state_dict() returned")
        if len(state["before"]) != len(self._modules):
            raise ValueError(
                f"the saved budget steered the gates of {len(state['before'])} layers, this one has "
                f"{len(self._modules)}: gate the model as it was gated then"
            )
        for key, name in _STATE.items():
            setattr(self, name, state[key])
        if self.steer or self.holding:
            self._take_over()

    def _looks(self, epoch: int, ranks: Ranking, meet: bool) -> bool:
        """Whether to plan, which costs seconds: now and then, after many closings, and to meet the target.

        What is left depends on more than the gates (a constant may need a channel), so the last epoch always counts.
        """
        if meet and (epoch + 1 >= self.epochs or ranks.digest != self._held):
            return True
        # Without steering the target is met when enough have closed by themselves, which is not to be missed.
        many_are = _MANY if self.steer else min(_MANY, max(0.0, self.left - self.target) / 5)
        many = not meet and ranks.count - ranks.closed < (1 - many_are) * self._open
        closing = not meet and epoch + 1 > _BEGIN * self.arrive * self.epochs
        return epoch % max(1, self.epochs // _LOOKS[closing]) == 0 or many

    def _look_(self, epoch: int, ranks: Ranking, meet: bool) -> None:
        """See how many gates are open at the target, and close what is due."""
        self.size.training = not meet  # to meet the target, count as the final removal will: every zero
        before, self.left = self.left, self.size.left(ranks, ranks.closed)
        if not meet and self.left <= self.target + self.size.near:
            meet, self.size.training = True, False
            self.left = self.size.left(ranks, ranks.closed)
        if not meet and not self.steer:
            self._open = ranks.count - ranks.closed
            return
        if ranks.digest == self._held and self.left == before:  # nothing has changed since it was met
            return
        known = {ranks.closed: self.left}
        closed = self.size.meet(ranks, known) if meet else self.size.search(ranks, known, self.target, self.size.rough)
        self._goal = ranks.count - closed
        if meet:
            ranks, known, closed = self.size.gently(ranks, known, closed, self.left)
            closed = self.size.come_nearer(ranks, known, closed)
            self._warn_of_many(closed - ranks.closed, ranks.count - ranks.closed)
            self._warn_of_miss(known[closed])
        elif self.left < (due := self._due(epoch)) + self.size.rough:
            closed = ranks.closed
        else:
            ranks, known = ranks.sparing(SPARED), {ranks.closed: self.left}
            closed = self.size.search(ranks, known, due, self.size.rough)
        ranks.close_(closed)
        self.left, self._open = known[closed], ranks.count - closed
        if meet:
            self._held = self._ranks().digest
            self._rest_()

    def _warn_of_many(self, closing: int, open_: int) -> None:
        """Without steering, few gates should be left to close by hand; many at once can undo what was learned."""
        if not self.steer and not self.holding and closing > _MANY_AT_ONCE * open_:
            warnings.warn(
                f"the penalty left {self.left:.1%} and the target is {self.target:.1%}, so {closing} of {open_} open "
                "gates are closed at once, which the network may not get over: let the strength rise faster, or higher",
                stacklevel=2,
            )

    def _warn_of_miss(self, left: float) -> None:
        """What seemed in reach at the start depends on which gate of a layer, or of all branches, becomes largest."""
        if not self.holding and left > self.target:
            warnings.warn(
                f"{left:.1%} are left, above the target of {self.target:.1%}: each layer, and all branches or groups "
                "together, keep their largest gate, and no other is left to close. Gate more, as the channels beside "
                "blocks, or raise the target",
                stacklevel=2,
            )

    def _due(self, epoch: int) -> float:
        """What should be left by now: at first it falls fast, then slowly."""
        stage = min(1.0, max(0.0, ((epoch + 1) / (self.arrive * self.epochs) - _BEGIN) / (1 - _BEGIN)))
        return 1 - (1 - self.target) * (1 - (1 - stage) ** 3)

    def _steer(self, epoch: int, ranks: Ranking) -> None:
        """Raise or lower the strength so that the marginal gate is on time."""
        marginal = ranks.nth_largest(self._goal)
        if self._last is None:
            self._start = self._last = marginal
            return
        moved, self._last = self._last - marginal, marginal
        wanted = marginal / max(1.0, self.arrive * self.epochs - epoch - 1)
        rise = _RISES[marginal < 0.95 * self._start]
        factor = wanted / moved if moved * rise > wanted else rise
        factor = max(factor, _FALL) if marginal > 0 else _FALL
        self._strength = min(max(self._strength * factor, BOUNDS[0]), BOUNDS[1])

    def _rest_(self) -> None:
        """The penalty ends; momentum would go on pulling the gates down."""
        if self.holding:
            return
        self.holding, self._strength = True, 0.0
        for gate in self._modules:
            if isinstance(gate, HardConcreteGate) and gate.learns:  # its samples would go on closing it
                with torch.no_grad():
                    gate.g.copy_(torch.where(gate.final_value() > 0, gate.g.clamp(min=_WIDE_OPEN), gate.g))
            for optimizer in optimizers_of(self.optimizer):
                state = optimizer.state.get(gate.g, {})
                for momentum in _MOMENTA & state.keys():
                    if isinstance(state[momentum], Tensor):  # SGD's is None without momentum
                        state[momentum].zero_()
