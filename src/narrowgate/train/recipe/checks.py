"""Combinations of values that can't work, each found before a run starts and named with a remedy."""

from __future__ import annotations

from narrowgate.schedules import Schedule
from narrowgate.train.recipe.gating import GatesPart, PenaltyPart
from narrowgate.train.recipe.part import Part, RecipeError, kind_of, shown
from narrowgate.train.recipe.parts import (
    BudgetPart,
    DataPart,
    FinishPart,
    LrPart,
    OptimizerPart,
    ShrinkPart,
    TrainPart,
)
from narrowgate.train.recipe.values import Scheduled


def refuse(remedy: str, *keys: tuple[Part, str]) -> RecipeError:
    """The error for values that don't go together: what they are, then why or what to do."""
    names = [f"{part.TABLE}.{name}" for part, name in keys]
    values = [shown(part.values()[name]) for part, name in keys]
    pairs = " with ".join(f"{name} = {value}" for name, value in zip(names, values, strict=True))
    return RecipeError(f"{pairs}: {remedy}", *names)


def check_data(data: DataPart) -> None:
    """Augmentation and size must fit the source."""
    if (data.augment == "imagenet") and data.source != "folder":
        in_memory = 'use "crop-flip", "shift", "warp" or "none"'
        raise refuse(f"is for image folders; {in_memory}", (data, "augment"), (data, "source"))
    if data.augment not in ("imagenet", "none") and data.source == "folder":
        raise refuse('is for small images in memory; use "imagenet" or "none"', (data, "augment"), (data, "source"))
    if data.size and data.source != "folder":
        raise refuse("only image folders can be resized; leave size at 0", (data, "size"), (data, "source"))


def check_gates(gates: GatesPart, penalty: PenaltyPart, budget: BudgetPart) -> None:
    """Gates, penalty and budget must fit each other."""
    if gates.kind == "linear" and gates.placement != "before-norm":
        raise refuse(
            "linear gates are BatchNorm scales, so they have no placement; leave it out",
            (gates, "placement"),
            (gates, "kind"),
        )
    if gates.kind == "none":
        if penalty.strength != 0:
            raise refuse("there are no gates to close; leave the strength at 0", (penalty, "strength"), (gates, "kind"))
        if budget.target:
            raise refuse("there are no gates to close; leave the target out", (budget, "target"), (gates, "kind"))
    if (gates.kind == "hard-concrete") != (penalty.kind == "l0"):
        raise refuse(
            'the "l0" penalty and "hard-concrete" gates go together, and with nothing else',
            (penalty, "kind"),
            (gates, "kind"),
        )
    if budget.target and not budget.steer and penalty.strength == 0:
        raise refuse(
            "nothing would close a gate until all that is missing closes at once; give a strength, best one that rises",
            (budget, "steer"),
            (penalty, "strength"),
        )
    if budget.target and budget.steer and not isinstance(penalty.strength, float):
        raise refuse(
            "a budget moves the strength by itself; give a number to start from, or 0, or budget.steer = false",
            (budget, "target"),
            (penalty, "strength"),
        )


def check_penalty(penalty: PenaltyPart, epochs: int) -> None:
    """A penalty's own values must fit each other, at every epoch of the run."""
    if penalty.kind == "bounded-lp" and penalty.p is None:
        raise refuse("needs penalty.p, its exponent, for example p = 0.5", (penalty, "kind"))
    if penalty.kind != "bounded-lp" and penalty.p is not None:
        raise refuse('only "bounded-lp" takes an exponent', (penalty, "p"), (penalty, "kind"))
    if penalty.kind in ("l2", "l0") and penalty.sigma != 1.0:
        raise refuse("has no sigma; leave it out and change the strength", (penalty, "sigma"), (penalty, "kind"))
    if penalty.kind == "l0" and penalty.proximal:
        raise refuse("l0 has no proximal step; leave it out", (penalty, "proximal"), (penalty, "kind"))
    if penalty.relative and penalty.kind in ("l2", "l0"):
        raise refuse('is for "l1" and bounded norms', (penalty, "relative"), (penalty, "kind"))
    for name, value in (("strength", penalty.strength), ("sigma", penalty.sigma)):
        if not isinstance(value, float):
            _check_schedule(penalty, name, value, epochs)


def _check_schedule(penalty: PenaltyPart, name: str, schedule: Schedule, epochs: int) -> None:
    kind = kind_of(type(penalty).__dataclass_fields__[name])
    assert isinstance(kind, Scheduled)
    for epoch in range(epochs):
        try:
            value = schedule(epoch)
        except OverflowError:
            value = float("inf")
        if not kind.number.takes(value):
            raise refuse(f"is {value:g} at epoch {epoch}; must be {kind.number.expected}", (penalty, name))


def check_rate(optimizer: OptimizerPart, lr: LrPart, train: TrainPart) -> None:
    """The learning rate's schedule must fit the run and the optimizer's switches the optimizer."""
    if optimizer.nesterov and optimizer.kind != "sgd":
        raise refuse('only "sgd" has it', (optimizer, "nesterov"), (optimizer, "kind"))
    if optimizer.nesterov and optimizer.momentum == 0:
        raise refuse("needs a momentum above 0", (optimizer, "nesterov"), (optimizer, "momentum"))
    if lr.drops and lr.schedule != "step":
        raise refuse('drops belong to the "step" schedule; leave them out', (lr, "drops"), (lr, "schedule"))
    if list(lr.drops) != sorted(set(lr.drops)):
        raise refuse("must be increasing epochs", (lr, "drops"))
    if lr.drops and lr.drops[-1] >= train.epochs:
        raise refuse(
            f"every drop must come before the end, so below {train.epochs}; set lr.drops as well ([] for none)",
            (lr, "drops"),
            (train, "epochs"),
        )
    if lr.warmup >= train.epochs:
        raise refuse("the warm-up must end before the run does", (lr, "warmup"), (train, "epochs"))


def check_finish(finish: FinishPart, gates: GatesPart, budget: BudgetPart) -> None:
    """What closes gates at the end needs some, and must not go below a budget."""
    if finish.close and budget.target:
        raise refuse("both say how much is left; leave one of them out", (finish, "close"), (budget, "target"))
    for name in ("threshold", "close"):
        if gates.kind == "none" and getattr(finish, name):
            raise refuse("there are no gates to close; leave it out", (finish, name), (gates, "kind"))


def check_shrink(shrink: ShrinkPart, optimizer: OptimizerPart, train: TrainPart, budget: BudgetPart) -> None:
    """A size needs a removal; batches grow with a network that shrinks, under sgd, whose rate can grow along."""
    if budget.target and shrink.when == "off":
        raise refuse(
            'nothing is removed, so no size can be met; set shrink.when to "end" or "during"',
            (shrink, "when"),
            (budget, "target"),
        )
    if not shrink.batch:
        return
    if shrink.when != "during":
        raise refuse("batches grow while the network shrinks; leave it at 0", (shrink, "batch"), (shrink, "when"))
    if shrink.batch < train.batch:
        raise refuse("is the largest batch, so at least train.batch; 0 is off", (shrink, "batch"), (train, "batch"))
    if optimizer.kind != "sgd":
        raise refuse(
            'the learning rate grows with the batch, which fits "sgd" alone; leave it at 0',
            (shrink, "batch"),
            (optimizer, "kind"),
        )


def check_together(
    data: DataPart,
    gates: GatesPart,
    penalty: PenaltyPart,
    optimizer: OptimizerPart,
    lr: LrPart,
    train: TrainPart,
    budget: BudgetPart,
) -> None:
    """Raise for the first combination that can't work."""
    check_data(data)
    check_gates(gates, penalty, budget)
    check_penalty(penalty, train.epochs)
    check_rate(optimizer, lr, train)
