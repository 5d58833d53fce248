"""``Shrinker``: cut a model in place while it trains, gates and optimizer state included, and remember what went."""

from __future__ import annotations

import hashlib
import json
import random
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from narrowgate.flow.compose import compose
from narrowgate.flow.decide import CollapseError
from narrowgate.flow.inplace import (
    OptimizerError,
    Optimizers,
    check_can_follow,
    compact_,
    held_by,
    optimizers_of,
)
from narrowgate.flow.plan import Plan, check_choices, plan
from narrowgate.flow.replay import ReplayError
from narrowgate.flow.surgery import PlanError
from narrowgate.flow.trace import ExampleInputs, TraceError
from narrowgate.gateset import Gates, gates_of
from narrowgate.weights import uncompiled

WRAPPERS = (DataParallel, DistributedDataParallel)


class ShrinkWarning(UserWarning):
    """The model could not be cut now; training goes on at the width it has."""


@dataclass(frozen=True)
class Shrunk:
    """What one cut did: parameters without gates before and after, the seconds it took, and its plan."""

    epoch: int
    parameters_before: int
    parameters_after: int
    seconds: float
    plan: Plan

    def __str__(self) -> str:
        left = self.parameters_after / max(1, self.parameters_before)
        sizes = f"{self.parameters_before:,} -> {self.parameters_after:,} parameters"
        return f"shrunk: {sizes} ({left:.1%} left) in {self.seconds:.1f} s"


class Shrinker:
    """Removes the channels of closed gates from a model while it trains.

    Parameters, gates and optimizer groups keep their identity; ``Gates`` and ``Penalty`` stay valid. A captured CUDA
    graph or a ``DistributedDataParallel`` wrapper has to be made anew after each cut.

    Args:
        example_inputs: what the model is traced with, as for ``ng.plan``.
        optimizer: what trains the model; a list where several share its parameters.
        every: look after each so many epochs; 0 looks at every call.
        share: cut when this share of the gates that are left has closed since the last look that led to a plan.
        constants: as for ``ng.plan``.
        round_to: as for ``ng.plan``.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        optimizer: Optimizers = None,
        *,
        every: int = 5,
        share: float = 0.05,
        constants: str = "exact",
        round_to: int = 1,
    ) -> None:
        _check(model, optimizer, every, share)
        check_choices(constants, round_to)
        self.model = model = uncompiled(model)
        self.example_inputs = example_inputs
        self.optimizer = optimizer
        self.every = every
        self.share = share
        self.constants = constants
        self.round_to = round_to
        self.events: list[Shrunk] = []
        self._gates = gates_of(model)
        if not self._closed():  # else somebody closes them by hand
            check_gates_train(self._gates, optimizer)
        self._original = self._gates.count
        self._plan: Plan | None = None
        self._seen = 0

    @property
    def plan(self) -> Plan | None:
        """All cuts so far as one plan for the full-size model, for ``ng.save``; None where nothing was cut yet."""
        return self._plan

    @property
    def removed(self) -> int:
        """How many gates are gone with their channels."""
        return self._original - self._gates.count

    def closed_fraction(self) -> float:
        """The share of the gates the model began with that are closed or gone."""
        return (self._closed() + self.removed) / self._original

    def step(self, epoch: int) -> Shrunk | None:
        """Call after each epoch (counted from 0): cut if it is time and enough gates have closed; what was done."""
        closed = self._closed()
        self._seen = min(self._seen, closed)  # those that opened again are news when they close
        if self.every and (epoch + 1) % self.every:
            return None
        if closed - self._seen < max(1, self.share * self._gates.count):
            return None
        return self.shrink(epoch)

    def shrink(self, epoch: int) -> Shrunk | None:
        """Cut now, however few gates are closed; None where nothing can go."""
        started = time.perf_counter()
        self._seen = self._closed()
        with random_numbers_kept(self.model), own_forward(self.model):
            made = self._make_plan()
        if made is None or not made.cuts:
            return None
        try:
            compact_(self.model, made, optimizer=self.optimizer)
        except (OptimizerError, PlanError) as error:  # an optimizer's state shows when it has stepped: too late to end
            _warn(f"{error}, or remove at the end with ng.compact")
            return None
        self._plan = made if self._plan is None else compose(self._plan, made)
        self._seen = self._closed()
        seconds = time.perf_counter() - started
        self.events.append(Shrunk(epoch, made.parameters_before, made.parameters_after, seconds, made))
        return self.events[-1]

    def restore_(self, plan: Plan) -> None:
        """Cut a fresh full-size model as an earlier run was, to resume it; then load the weights and the state."""
        if self._plan is not None:
            raise ValueError("this model was cut already; restore_ is for a fresh one at full size")
        if any(_has_stepped(optimizer) for optimizer in optimizers_of(self.optimizer)):
            raise ValueError("the optimizer has state already; restore the plan first, then load the optimizer's state")
        compact_(self.model, plan, optimizer=self.optimizer)
        self._plan = plan

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on alike, as plain JSON values."""
        return {"plan": None if self._plan is None else self._plan.to_json(), "seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave: cuts the fresh model; the caller loads its weights afterwards."""
        if not isinstance(state, dict) or not {"plan", "seen"} <= state.keys():
            raise ValueError("this is not the state of a Shrinker; give what shrinker.state_dict() returned")
        if state["plan"] is not None:
            self.restore_(Plan.from_json(state["plan"]))
        self._seen = int(state["seen"])

    def digest(self) -> str:
        """A checksum of the structure that all cuts left: processes that train one model together must agree on it."""
        edits = {} if self._plan is None else self._plan.edits
        cuts = {} if self._plan is None else self._plan.cuts
        structure = {
            "cuts": {name: [cut.shape, sorted(cut.keep.items()), cut.grouped] for name, cut in cuts.items()},
            "layers": {name: [edit.new_bias, edit.new_groups] for name, edit in edits.items()},
        }
        return hashlib.sha256(json.dumps(structure, sort_keys=True).encode()).hexdigest()

    def _closed(self) -> int:
        if not self._gates:
            return 0
        values = torch.cat([gate.final_value().flatten().cpu() for gate in self._gates.modules()])
        return int((values == 0).sum())

    def _make_plan(self) -> Plan | None:
        try:
            return plan(
                self.model, self.example_inputs, constants=self.constants, round_to=self.round_to, training=True
            )
        except (CollapseError, ReplayError, TraceError) as error:
            _warn(f"{type(error).__name__}: {error}")
            return None


def _warn(why: str) -> None:
    message = f"the model was not cut, training goes on at its present width: {why}"
    warnings.warn(message, ShrinkWarning, stacklevel=4)


@contextmanager
def random_numbers_kept(model: nn.Module) -> Iterator[None]:
    """Planning runs the model's own forward, which may draw numbers: training goes on as if it had not."""
    devices = sorted({tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda})
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """The model without the mixed precision that Accelerate puts over its ``forward``: no plan sees through that."""
    own = vars(model)
    over, original = own.get("forward"), own.get("_original_forward")
    if over is None or original is None:
        yield
        return
    del own["forward"]
    if getattr(original, "__func__", None) is not type(model).forward:
        own["forward"] = original  # the user's own, put on the instance
    try:
        yield
    finally:
        own["forward"] = over


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has state that a new one of its kind would not have; Adagrad makes some at once."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _check(model: nn.Module, optimizer: Optimizers, every: int, share: float) -> None:
    if isinstance(model, WRAPPERS):
        raise TypeError(
            f"Shrinker needs the model inside {type(model).__name__}: pass model.module, and wrap it again after each "
            "cut, since the wrapper holds on to the old shapes"
        )
    if every < 0:
        raise ValueError(f"every must be 0 or above, got {every}")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    for each in optimizers_of(optimizer):
        check_optimizer(model, each)


def check_gates_train(gates: Gates, optimizer: Optimizers) -> None:
    """Refuse optimizers that have none of the gates, though these are to learn."""
    optimizers, learning = optimizers_of(optimizer), {id(gate.g) for gate in gates.modules() if gate.learns}
    held = {each for one in optimizers for each in held_by(one)}
    if optimizers and learning and held.isdisjoint(learning):
        raise ValueError(
            f"{type(optimizers[0]).__name__} trains none of the gates, which would never move: attach the gates before "
            "the optimizer is made, or add them to it with optimizer.add_param_group({'params': gates.parameters()}). "
            "If it trains copies of them, leave optimizer= out; if they are closed by hand, freeze them"
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer, before a run, of which it is known that it can't be cut along with this model."""
    check_can_follow(optimizer)
    stepped = getattr(optimizer, "optimizer", optimizer)  # the one inside Accelerate's
    if type(stepped).__name__ == "Adafactor":  # PyTorch's and transformers'; with others it shows at the first cut
        raise OptimizerError(
            "Adafactor keeps sums over rows and columns, which can't be cut along: remove after training with "
            "ng.compact, or train with another optimizer"
        )
    if held_by(optimizer).isdisjoint(id(parameter) for parameter in model.parameters()):
        raise ValueError(
            f"{type(optimizer).__name__} holds no parameter of this {type(model).__name__}, so its state could not be "
            "cut along: make it from model.parameters(), and hand over the one that you step"
        )
