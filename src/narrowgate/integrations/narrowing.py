"""What callbacks of any trainer share: a penalty or a budget, cuts at epoch ends, and the removal at the end."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from narrowgate.flow import Plan, Verification
from narrowgate.flow.inplace import compact_, held_by
from narrowgate.flow.plan import check_choices
from narrowgate.flow.trace import ExampleInputs
from narrowgate.gateset import gates_of
from narrowgate.measure import summarize
from narrowgate.norms import check_not_negative
from narrowgate.penalties import Penalty
from narrowgate.schedules import Schedule
from narrowgate.storage import save
from narrowgate.train.budget import Budget
from narrowgate.train.finish import remove
from narrowgate.train.shrink import Shrinker, Shrunk, random_numbers_kept
from narrowgate.train.shrink import check_optimizer as check_can_be_cut
from narrowgate.train.size import parse_target
from narrowgate.train.state import names_in_groups

SHRINK = ("during", "end")


@dataclass(frozen=True)
class Settings:
    """How a callback closes gates and when it removes channels; the gates are yours to attach.

    Args:
        kind: the norm, as for ``ng.Penalty``.
        strength: as for ``ng.Penalty``: a number, or a schedule of the epoch.
        sigma: as for ``ng.Penalty``: a number, or a schedule of the epoch.
        p: as for ``ng.Penalty``.
        relative: as for ``ng.Penalty``.
        budget: a size to end at, such as ``"params: 30%"``; a strength is then only where the search begins.
        proximal: shrink the gates after each step of the optimizer instead of adding to their gradient.
        shrink: ``during`` cuts the network at epoch ends, its optimizer's state along; ``end`` only makes a small copy.
        every: look for something to cut after each so many epochs, as for ``ng.Shrinker``.
        share: cut when this share of the gates that are left has closed, as for ``ng.Shrinker``.
        threshold: gates below this are closed at the end; linear gates need it.
        layout: how the small network is planned, as for ``ng.plan``.
        constants: as for ``ng.plan``.
        round_to: as for ``ng.plan``.
    """

    kind: str = "bounded-l1"
    strength: float | Schedule | None = None
    sigma: float | Schedule = 1.0
    p: float | None = None
    relative: bool = False
    budget: str = ""
    proximal: bool = False
    shrink: str = "during"
    every: int = 5
    share: float = 0.05
    threshold: float = 0.0
    layout: str = "aligned"
    constants: str = "exact"
    round_to: int = 1

    def __post_init__(self) -> None:
        if self.strength is None and not self.budget:
            raise ValueError("no gate would close: give strength=, for example 3e-3, or budget='params: 30%'")
        if self.shrink not in SHRINK:
            raise ValueError(f"unknown shrink {self.shrink!r}; choose one of {', '.join(SHRINK)}")
        check_choices(self.constants, self.round_to, self.layout)
        check_not_negative("threshold", self.threshold)
        if self.budget:
            parse_target(self.budget)


@dataclass(frozen=True)
class Narrowed:
    """The small network, the plan that leads to it from the full-size one, and the proof."""

    small: nn.Module
    plan: Plan
    verification: Verification | None
    """None where the removal is not meant to be exact (``constants`` is fold or drop)."""
    parameters_full: int
    closed: float
    """The share of all gates that ended closed."""

    def save(self, folder: str | Path) -> None:
        """Write the small network for ``ng.load``."""
        save(self.small, self.plan, folder)

    def __str__(self) -> str:
        left = self.plan.parameters_after / self.parameters_full
        sizes = f"{self.parameters_full:,} -> {self.plan.parameters_after:,} parameters ({left:.1%} left)"
        return f"{sizes}, {self.closed:.1%} of the gates closed; {self.verification or 'not verified'}"


class Narrowing:
    """A gated network at full size and what narrows it, for a trainer that says when epochs begin and end."""

    def __init__(self, network: nn.Module, example_inputs: ExampleInputs, settings: Settings, epochs: int) -> None:
        self.network = network
        self.settings = settings
        self.example_inputs = on_device_of(network, example_inputs)
        part = settings
        strength = 0.0 if part.strength is None else part.strength
        self.penalty = Penalty(gates_of(network), part.kind, strength, part.sigma, part.p, relative=part.relative)
        if part.proximal and part.kind == "l0":
            raise ValueError("the l0 penalty has no proximal step; leave proximal=False")
        self.parameters_full = summarize(network, self.example_inputs).parameters
        self.shrinker = Shrinker(
            network,
            self.example_inputs,
            every=part.every,
            share=part.share,
            constants=part.constants,
            round_to=part.round_to,
        )
        self.budget: Budget | None = None
        if part.budget:
            self.budget = Budget(
                part.budget, network, self.example_inputs, self.penalty, epochs, threshold=part.threshold, **self._how
            )
        self._begun = -1  # the last epoch that began
        self._ended = 0  # epochs that came to their end

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "layout": self.settings.layout,
            "constants": self.settings.constants,
            "round_to": self.settings.round_to,
        }

    def use_(self, optimizer: torch.optim.Optimizer, cast: Callable[[Any], Any] = lambda inputs: inputs) -> None:
        """Take the optimizer that trains the network, once the network is on its device; ``cast`` is for its inputs."""
        check_optimizer(optimizer, self.network)
        if not self.gates:
            raise ValueError("no gate would close: all are frozen; set requires_grad on some of gates.parameters()")
        if self.settings.shrink == "during":
            check_can_be_cut(self.network, optimizer)
        self.optimizer = optimizer
        self.example_inputs = cast(on_device_of(self.network, self.example_inputs))
        self.shrinker.example_inputs, self.shrinker.optimizer = self.example_inputs, optimizer
        if self.budget is not None:
            self.budget.size.example_inputs, self.budget.optimizer = self.example_inputs, optimizer

    @property
    def gates(self) -> list[Tensor]:
        """The gate parameters that train."""
        return [g for g in self.penalty.gates.parameters() if g.requires_grad]

    def begin_epoch(self, epoch: int) -> None:
        """Move schedules on, once an epoch; make up for the end of one that a resumed trainer passed over."""
        if epoch == self._begun:
            return
        self._begun = epoch
        if self._ended < epoch:
            self.end_epoch(epoch - 1)
        self.penalty.set_epoch(epoch)

    def before_step_(self) -> None:
        """Add the penalty's gradient to the gates', once an optimizer step: the same as adding it to the loss."""
        if self.settings.proximal or not self.penalty.strength:
            return
        gates = self.gates
        with torch.enable_grad():
            gradients = torch.autograd.grad(self.penalty(), gates)
        for g, gradient in zip(gates, gradients, strict=True):
            g.grad = gradient if g.grad is None else g.grad.add_(gradient)

    def after_step_(self) -> None:
        """The proximal step, as fast as a penalty in the loss is under the optimizer's momentum."""
        if not self.settings.proximal:
            return
        speeds = {id(p): speed_of(group) for group in self.optimizer.param_groups for p in group["params"]}
        gates = self.gates
        speed, *others = dict.fromkeys(speeds[id(g)] for g in gates)
        if others:  # gates in groups of their own learning rates; one that no group has is frozen, and stays
            each = [(g.numel(), float(speeds.get(id(g), 0.0))) for g in self.penalty.gates.parameters()]
            speed = torch.cat([torch.full((size,), own, dtype=torch.float32) for size, own in each])
            speed = speed.to(gates[0].device)
        self.penalty.proximal_(speed)

    def end_epoch(self, epoch: int) -> Shrunk | None:
        """Steer towards the budget and cut if it is time; what was cut."""
        self._ended = epoch + 1
        if self.budget is not None:
            self.budget.step(epoch)
        shrunk = self.shrinker.step(epoch) if self.settings.shrink == "during" else None
        if shrunk is not None and self.budget is not None:
            self.budget.remember()
        return shrunk

    def metrics(self) -> dict[str, float]:
        """The share of closed gates, the network's parameters as it is now, and the penalty's strength."""
        cut = self.shrinker.plan
        parameters = self.parameters_full if cut is None else cut.parameters_after
        return {
            "narrowgate/closed": self.shrinker.closed_fraction(),
            "narrowgate/parameters": float(parameters),
            "narrowgate/strength": self.penalty.strength,
        }

    def finish(self) -> Narrowed:
        """A small copy of the trained network, with its plan and proof; the network keeps its gates."""
        if self.budget is not None and not self.budget.holding:
            warnings.warn(
                f"training ended before the budget {self.settings.budget!r} was met: after {self._ended} of "
                f"{self.budget.epochs} epochs. Give the trainer as many epochs as it will run",
                stacklevel=2,
            )
        if self.settings.threshold > 0:
            self.penalty.gates.close_below_(self.settings.threshold)
        with random_numbers_kept(self.network):
            self._warn_of_other_weights()
            removed = remove(self.network, self.example_inputs, self.shrinker.plan, **self._how)
        return Narrowed(*removed, self.parameters_full, self.shrinker.closed_fraction())

    def _warn_of_other_weights(self) -> None:
        """Say so if the gates are not those with which the budget was met."""
        if self.budget is None or not self.budget.holding:
            return
        size = self.budget.size
        left = size.cost() / size.original
        if left > self.budget.left + size.rough:
            warnings.warn(
                f"the budget {self.settings.budget!r} was met with {self.budget.left:.1%}, but {left:.1%} is left of "
                "the network that training ended with: it has weights of an earlier epoch, as load_best_model_at_end "
                "loads, or averages. Choose among the epochs in which the budget is met, or leave that out",
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on alike, as plain JSON values."""
        return {
            "shrinker": self.shrinker.state_dict(),
            "budget": None if self.budget is None else self.budget.state_dict(),
            "ended": self._ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave: cuts the network, whose weights are to be loaded afterwards."""
        cut = self.shrinker.plan
        if cut is None:
            self.shrinker.load_state_dict(state["shrinker"])
        elif cut.to_json() != state["shrinker"]["plan"]:
            raise ValueError(
                "the network was cut since this checkpoint was written, and its weights no longer fit; "
                "load the checkpoint into a freshly built network"
            )
        if self.budget is not None:
            if state["budget"] is None:
                raise ValueError("the checkpoint is of a run without a budget; go on with the settings it had")
            self.budget.load_state_dict(state["budget"])
        self._ended = state["ended"]


def cut_to_state_(network: nn.Module, state: dict[str, Any]) -> None:
    """Cut a fresh gated network to the widths of a checkpoint, to load its weights outside of training."""
    if state["shrinker"]["plan"] is not None:
        compact_(network, Plan.from_json(state["shrinker"]["plan"]))


def speed_of(group: dict[str, Any]) -> Any:
    """By how much a constant gradient of 1 moves the parameters of an optimizer's group, in the long run."""
    momentum = group.get("momentum", 0.0)
    damped = 1 - group.get("dampening", 0.0) if momentum else 1.0  # SGD's, which has none without momentum
    return group["lr"] * damped / (1 - momentum)


def on_device_of(network: nn.Module, example_inputs: ExampleInputs) -> ExampleInputs:
    """The example on the device where the network's parameters are."""
    device = next(network.parameters()).device
    moved: ExampleInputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), example_inputs)
    return moved


def check_optimizer(optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
    """Refuse an optimizer that does not train all of the network's gates and weights."""
    held = held_by(optimizer)
    missing = [name for name, p in network.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ValueError(
            f"the optimizer does not train {missing[0]!r} ({len(missing)} such parameters): attach the gates before it "
            "is made, and give it all parameters of the network"
        )


def reorder_(optimizer: torch.optim.Optimizer, model: nn.Module, order: Sequence[Sequence[str]]) -> None:
    """Put an optimizer's parameters in the order of a checkpoint: a cut may have added biases at the end of a group."""
    parameters = dict(model.named_parameters())
    have, want = (sorted(chain.from_iterable(groups)) for groups in (names_in_groups(optimizer, model), order))
    if have != want or len(order) != len(optimizer.param_groups):
        raise ValueError(
            "the optimizer of the checkpoint held other parameters or groups than this one; make it as it was made then"
        )
    called = {  # an optimizer that was made from named_parameters keeps the names beside
        id(parameter): name
        for group in optimizer.param_groups
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False)
    }
    for group, names in zip(optimizer.param_groups, order, strict=True):
        group["params"][:] = [parameters[name] for name in names]
        if "param_names" in group:
            group["param_names"][:] = [called.get(id(parameters[name]), name) for name in names]
