"""Trouble that a run can name: a loss that is no number, closed layers, open gates, norms that are used wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgate.flow.trace import TraceError, buffers_kept
from narrowgate.gates import CLOSING_POINT
from narrowgate.gateset import Gates
from narrowgate.models.registry import options_of
from narrowgate.train.checkpoint import Checkpoints
from narrowgate.train.finish import threshold_of
from narrowgate.train.log import EpochRow
from narrowgate.train.recipe import Recipe
from narrowgate.train.recipe.toml import write_value
from narrowgate.train.run_folder import CHECKPOINTS
from narrowgate.train.shrink import random_numbers_kept
from narrowgate.train.variance import dropouts_before_norms

_NAMED = 3  # layers that a notice lists
_FAR_BELOW = 0.15  # of the training accuracy, for a held-out accuracy to be looked into
_LOST = 0.6  # the share of the training accuracy below which more than overfitting must be at work
_TOO_FAR = 100 * CLOSING_POINT  # a gate that goes to and fro so far is hardly ever at zero
_STEPS_TO_SETTLE = 200  # at first, running statistics are behind in every network


class TrainingError(RuntimeError):
    """Training can't go on; the message says what to change."""


class Watch:
    """Looks at the numbers of each epoch; it says each thing once.

    Args:
        steps: of the optimizer in an epoch.
    """

    def __init__(self, recipe: Recipe, folder: Path, steps: int) -> None:
        self._recipe = recipe
        self._folder = folder
        self._steps = steps
        self._collapsed: set[str] = set()
        self._told_no_progress = False
        self._dropouts: dict[str, str] | None = None  # in front of a norm, to be told; None: not looked for
        self._told_lag = False
        self._told_longer_steps = False

    def check(self, row: EpochRow) -> None:
        """Raise TrainingError if the epoch's loss is NaN or infinite."""
        if math.isfinite(row.train_loss):
            return
        recipe, folder = self._recipe, self._folder / CHECKPOINTS
        epochs = Checkpoints(folder, keep=1).epochs()
        kept = (
            f"the last checkpoint before that, of epoch {epochs[0]}, is in {folder}" if epochs else "nothing is saved"
        )
        remedies = [f"a lower optimizer.lr (it is {recipe.optimizer.lr:g}, try {recipe.optimizer.lr / 3:.2g})"]
        if recipe.lr.warmup == 0 and recipe.train.epochs > 1:
            remedies.append(f"lr.warmup = {min(5, recipe.train.epochs - 1)}")
        if recipe.train.precision != "32":
            remedies.append(f'train.precision = "32" (it is "{recipe.train.precision}")')
        raise TrainingError(
            f"the training loss of epoch {row.epoch} is {row.train_loss}; {kept}. Start again in another folder with "
            + " or ".join(remedies)
        )

    def notices(self, row: EpochRow, gates: Gates) -> list[str]:
        """What a person should know after this epoch and was not told yet."""
        sizes = [gate.size for gate in gates.modules()]
        with torch.no_grad():
            device = gates.parameters()[0].device
            flat = torch.cat([gate.final_value().reshape(-1).to(device) for gate in gates.modules()])
        values = dict(zip(gates, torch.split(flat.float().cpu(), sizes), strict=True))  # one transfer for all layers
        found = [self._collapse(row, values), self._no_progress(row, values), self._let_go(row, values)]
        return [notice for notice in found if notice]

    def variance_shift(
        self, row: EpochRow, model: nn.Module, example: torch.Tensor, judge: Callable[[Sequence[nn.Module]], float]
    ) -> list[str]:
        """Name dropout in front of a BatchNorm, once, where held-out accuracy suffers from it.

        Of what could keep it below training accuracy, only this goes away when the dropout is left on.

        Args:
            judge: the held-out accuracy with some layers in training mode.
        """
        if row.accuracy is None or row.train_accuracy - row.accuracy < _FAR_BELOW or self._dropouts == {}:
            return []
        with random_numbers_kept(model):
            if self._dropouts is None:
                self._dropouts = _dropouts(model, example)
            if not self._dropouts:
                return []
            layers = dict(model.named_modules(remove_duplicate=False))
            # A dropout that runs in no layer is the model's own.
            left_on = judge([layers.get(name, model) for name in self._dropouts])
        if left_on < (row.accuracy + row.train_accuracy) / 2:
            return []
        (dropout, norm), more = next(iter(self._dropouts.items())), len(self._dropouts) - 1
        self._dropouts = {}
        return [
            f"epoch {row.epoch}: held-out accuracy is {row.accuracy:.1%}, training accuracy {row.train_accuracy:.1%}; "
            f"with dropout left on, the former is {left_on:.1%}. The dropout in {dropout}"
            f"{f' (and {more} more)' if more else ''} is in front of a BatchNorm, {norm}: its running variance counts "
            f"the noise, which is gone when the network is used. {self._without_dropout()}"
        ]

    def lagging_statistics(
        self, row: EpochRow, model: nn.Module, judge: Callable[[Sequence[nn.Module]], float]
    ) -> list[str]:
        """Name running statistics that weights leave behind, once, where held-out accuracy is lost by it.

        Args:
            judge: as for ``variance_shift``; a BatchNorm in training mode takes the statistics of its batch.
        """
        early = row.epoch * self._steps < _STEPS_TO_SETTLE
        if self._told_lag or early or row.accuracy is None or row.accuracy > _LOST * row.train_accuracy:
            return []
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        if row.train_accuracy - row.accuracy < _FAR_BELOW or not norms:
            return []
        with random_numbers_kept(model), buffers_kept(norms):
            by_batch = judge(norms)
        if not by_batch >= (row.accuracy + row.train_accuracy) / 2:  # NaN where there was one image in all
            return []
        self._told_lag = True
        return [
            f"epoch {row.epoch}: held-out accuracy is {row.accuracy:.1%}, training accuracy {row.train_accuracy:.1%}; "
            f"with each batch's own statistics in the BatchNorms the former is {by_batch:.1%}: what comes to them "
            f"changes faster than their running statistics. {self._slower()}"
        ]

    def longer_steps(self, epoch: int, batch: int, strength: float, sigma: float) -> str:
        """Say, once, that the steps of larger batches carry gates past the closing point; empty where they do not."""
        recipe = self._recipe
        if self._told_longer_steps or not _jitters(recipe):
            return ""
        usual = _jitter(recipe, recipe.lr_at(epoch), strength, sigma)
        longer = usual * batch / recipe.train.batch
        if longer <= CLOSING_POINT:
            return ""
        self._told_longer_steps = True
        return (
            f"epoch {epoch}: batches of {batch} take longer steps, in which the penalty carries gates up to "
            f"{longer:.2g} past zero and back (before: {usual:.2g}). Beyond {CLOSING_POINT:.2g} they count as open and "
            "may grow again, so other gates close than at the usual length. penalty.proximal = true stops them at zero"
        )

    def _slower(self) -> str:
        recipe = self._recipe
        pulled = recipe.penalty.strength or recipe.budget.target
        if pulled and recipe.penalty.kind != "l0" and not recipe.penalty.relative:
            return (
                "A penalty makes all gates of a layer smaller where a norm behind it undoes that, and their weights "
                "turn faster for it: lower penalty.strength, or set penalty.relative = true, which takes a higher one"
            )
        return "Lower optimizer.lr or optimizer.weight_decay"

    def _without_dropout(self) -> str:
        part = self._recipe.model
        if "dropout" in options_of(part.name):
            return f"Set model.options = {write_value({**part.options, 'dropout': 0.0})}"
        return "Take the dropout out, or put it behind the last norm"

    def _collapse(self, row: EpochRow, values: dict[str, torch.Tensor]) -> str:
        closed = [name for name, value in values.items() if name not in self._collapsed and not value.any()]
        first = not self._collapsed
        self._collapsed.update(closed)
        if not closed:
            return ""
        more = f" and {len(closed) - _NAMED} more" if len(closed) > _NAMED else ""
        what = f"epoch {row.epoch}: all gates are closed on {', '.join(closed[:_NAMED])}{more}"
        if not first:
            return what
        return (
            f"{what}. A residual branch may go like that; in a layer that everything passes through, nothing is left "
            f"to learn from. Then lower penalty.strength (it is {row.strength:g}), leave the layer out with "
            f'gates.skip = ["{closed[0]}"], or in a loop of your own call gates.reopen_("{closed[0]}")'
        )

    def _no_progress(self, row: EpochRow, values: dict[str, torch.Tensor]) -> str:
        recipe, early = self._recipe, 3 * row.epoch < row.epochs
        steered = bool(recipe.budget.target) or recipe.finish.close > 0 or recipe.gates.kind.startswith("filter")
        if self._told_no_progress or early or steered or row.strength == 0 or row.closed > 0:
            return ""
        threshold = threshold_of(self._recipe)
        if any(bool((value <= threshold).any()) for value in values.values()):
            return ""
        self._told_no_progress = True
        smallest = min(float(value.min()) for value in values.values() if value.numel())
        return (
            f"epoch {row.epoch} of {row.epochs}: no gate has closed yet, the smallest value is {smallest:.2g}. "
            f"{self._estimate(row)}{self._placement()}"
        )

    def _let_go(self, row: EpochRow, values: dict[str, torch.Tensor]) -> str:
        """A penalty that ends while its gates still jitter around zero: what is not closed then opens again."""
        recipe = self._recipe
        ends = row.strength > 0 and row.epoch < row.epochs and recipe.strength_schedule()(row.epoch) == 0
        if not ends or not _jitters(recipe) or recipe.budget.target:
            return ""
        reach = _pull(recipe, row.lr, row.strength, row.sigma)
        hovering = sum(int(((value > 0) & (value <= reach**2)).sum()) for value in values.values())
        if not hovering:
            return ""
        return (
            f"epoch {row.epoch}: the penalty ends here, while {hovering} gates hover around zero (lr * strength / (1 - "
            f"momentum), times its slope, moves them by {reach:.2g} a step); without it they open again. "
            "penalty.proximal = true stops gates at zero, or let the penalty last until the learning rate is low"
        )

    def _estimate(self, row: EpochRow) -> str:
        """How far the penalty can move a gate in this run, and what strength would do."""
        recipe = self._recipe
        part = recipe.penalty
        uneven = part.weights != "equal" or part.factors or part.relative  # gates move at speeds of their own
        if recipe.optimizer.kind != "sgd" or part.kind == "l0" or uneven:
            return f"Raise penalty.strength (it is {row.strength:g}), for example to {3 * row.strength:.2g}"
        usual = 0.5 if recipe.gates.kind == "linear" else 1.0
        start = usual if recipe.gates.init is None else recipe.gates.init
        need = abs(start) - (CLOSING_POINT if recipe.gates.kind == "exponential" else 0.0)
        so_far, whole = (reach_of(recipe, self._steps, start, epochs) for epochs in (row.epoch, row.epochs))
        text = (
            f"From {start:g} to closed is {need:.2g}; at lr * strength / (1 - momentum) a step, times its slope, the "
            f"penalty moves a gate by {so_far:.2g} until now and {whole:.2g} over the whole run. "
        )
        if whole == 0:
            return text + "Its strength is 0 wherever the learning rate is not: let it last longer"
        if recipe.penalty.kind.startswith("bounded") and abs(start) > 4 * row.sigma:
            return text + f"Open gates hardly feel a norm so narrow: raise penalty.sigma (it is {row.sigma:g})"
        if whole < 1.5 * need:
            return (
                text + f"Multiply penalty.strength (it is {row.strength:g}) by {2 * need / whole:.2g}, or train longer"
            )
        jitter = _jitter(recipe, row.lr, row.strength, row.sigma)
        if _jitters(recipe) and so_far > 1.5 * need and jitter > _TOO_FAR:
            return (
                f"{text}But a step carries gates up to {jitter:.2g} past zero and back, where they count as open: "
                f"lower penalty.strength (it is {row.strength:g}) or optimizer.lr (it is {recipe.optimizer.lr:g}), "
                "or set penalty.proximal = true, which stops gates at zero"
            )
        why = "So the loss holds them open" if so_far > 1.5 * need else "They may close later"
        return text + f"{why}: a higher penalty.strength (it is {row.strength:g}) closes more, and sooner"

    def _placement(self) -> str:
        if self._recipe.gates.kind == "linear" or self._recipe.gates.placement != "after-norm":
            return ""
        return '. With gates.placement = "before-norm" the norm undoes a gate\'s scale, and only the penalty moves it'


def _dropouts(model: nn.Module, example: torch.Tensor) -> dict[str, str]:
    try:
        return dropouts_before_norms(model, example)
    except TraceError:
        return {}  # nothing is known, so nothing is said


def reach_of(recipe: Recipe, steps: int, size: float, epochs: int) -> float:
    """How far the penalty alone moves a gate in the first epochs under SGD, were its slope that at ``size`` all along.

    The sum over all steps of ``lr * strength / (1 - momentum)`` times the slope of the penalty at ``size``.
    """
    strength, sigma = recipe.strength_schedule(), recipe.sigma_schedule()
    speed = steps * recipe.gates.lr_factor / (1 - recipe.optimizer.momentum)
    return speed * sum(
        recipe.lr_at(epoch) * strength(epoch) * _slope(recipe, abs(size), sigma(epoch)) for epoch in range(epochs)
    )


def _jitters(recipe: Recipe) -> bool:
    """Whether gates go to and fro around zero, since the penalty is a part of the loss."""
    return recipe.gates.kind == "exponential" and recipe.optimizer.kind == "sgd" and not recipe.penalty.proximal


def _pull(recipe: Recipe, lr: float, strength: float, sigma: float) -> float:
    """How far the penalty moves a gate beside zero in one step, once momentum has built up."""
    speed = lr * recipe.gates.lr_factor / (1 - recipe.optimizer.momentum)
    return speed * strength * _slope(recipe, CLOSING_POINT, sigma)


def _jitter(recipe: Recipe, lr: float, strength: float, sigma: float) -> float:
    """About how far from zero a gate gets that the penalty alone moves to and fro; ``benchmarks/method.py`` tells."""
    rest = 1 - recipe.optimizer.momentum
    share = min(1.0, 2.5 * rest) if recipe.optimizer.nesterov else max(0.5, rest)
    return share * _pull(recipe, lr, strength, sigma)


def _slope(recipe: Recipe, size: float, sigma: float) -> float:
    """The derivative of the recipe's norm at a gate's size."""
    kind = recipe.penalty.kind
    if kind == "l1":
        return 1 / sigma
    if kind == "l2":
        return size
    p = recipe.penalty.p or 1.0
    ratio = max(size, CLOSING_POINT) / sigma
    return float(p / sigma * ratio ** (p - 1) * math.exp(-(ratio**p)))
