"""From a recipe to what trains: the network, its gates, the penalty and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgate import models
from narrowgate.gateset import Gates
from narrowgate.penalties import Penalty
from narrowgate.rivals.apg import ApgSgd
from narrowgate.rivals.filters import Filters
from narrowgate.train.budget import Budget
from narrowgate.train.data import Data, FolderData
from narrowgate.train.feed import ArrayFeed, FolderFeed, Place
from narrowgate.train.finish import threshold_of
from narrowgate.train.gating import attach, weights_of
from narrowgate.train.recipe import Recipe, RecipeError
from narrowgate.train.shrink import Shrinker


@dataclass(frozen=True)
class Parts:
    """A network at full size and everything that trains it."""

    model: nn.Module
    gates: Gates | None
    penalty: Penalty | None
    optimizer: torch.optim.Optimizer
    began: Mapping[str, int] = field(default_factory=dict)
    """How many gates each layer has before any cut."""


def plain_model(recipe: Recipe, classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    """The recipe's network without gates, with random weights."""
    return models.build(recipe.model.name, classes, image_shape=image_shape, **recipe.model.options)


def build(recipe: Recipe, classes: int, image_shape: tuple[int, int, int], device: torch.device) -> Parts:
    """Everything at its start; seed PyTorch before."""
    model = plain_model(recipe, classes, image_shape).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    model.train()
    example = torch.zeros(2, *image_shape, device=device)
    gates = attach(recipe, model, example)
    penalty = None
    # Accelerated steps keep factors at 0 or above, whatever the strength.
    if gates is not None and (recipe.penalty.strength or recipe.budget.target or recipe.penalty.accelerated):
        penalty = Penalty(
            gates,
            recipe.penalty.kind,
            recipe.strength_schedule(),
            recipe.sigma_schedule(),
            recipe.penalty.p,
            weights_of(recipe, model, gates, example),
            recipe.penalty.relative,
        )
    began = {} if gates is None else {name: gates[name].size for name in gates}
    return Parts(model, gates, penalty, make_optimizer(recipe, model, gates, device, penalty), began)


def make_optimizer(
    recipe: Recipe, model: nn.Module, gates: Gates | None, device: torch.device, penalty: Penalty | None = None
) -> torch.optim.Optimizer:
    """Weights in one group and gates in the last, which may have a weight decay and a speed of their own.

    ``penalty`` is for gates whose steps it is a part of (``penalty.accelerated``).
    """
    part = recipe.optimizer
    of_gates = {id(g) for g in gates.parameters()} if gates is not None else set()
    weights = [p for p in model.parameters() if id(p) not in of_gates]
    groups: list[dict[str, Any]] = [{"params": weights, "weight_decay": part.weight_decay, "lr_factor": 1.0}]
    if gates is not None:
        decay = part.weight_decay if recipe.gates.weight_decay is None else recipe.gates.weight_decay
        groups.append({"params": gates.parameters(), "weight_decay": decay, "lr_factor": recipe.gates.lr_factor})
    # A captured graph reads the learning rate anew at every replay, so there it has to be a tensor.
    cuda = device.type == "cuda"
    for group in groups:
        group["lr"] = torch.tensor(part.lr, device=device) if cuda else part.lr
    rate: float | Tensor = torch.tensor(part.lr, device=device) if cuda else part.lr
    if part.kind == "adamw":
        return torch.optim.AdamW(groups, lr=rate, capturable=cuda, fused=True)
    if penalty is not None and recipe.penalty.accelerated:
        return ApgSgd(groups, penalty, lr=rate, momentum=part.momentum, nesterov=part.nesterov, fused=True)
    return torch.optim.SGD(groups, lr=rate, momentum=part.momentum, nesterov=part.nesterov, fused=True)


def make_feed(recipe: Recipe, data: Data | FolderData, place: Place, batch: int) -> ArrayFeed | FolderFeed:
    """Where training batches come from."""
    seed = recipe.train.seed
    if isinstance(data, FolderData):
        return FolderFeed(data, batch, seed, place)
    return ArrayFeed(data, batch, recipe.data.augment, seed, place)


def make_shrinker(recipe: Recipe, parts: Parts, example: Tensor) -> Shrinker | None:
    """What cuts the network; None without gates, or where these are the filters' own norms."""
    if parts.gates is None or isinstance(parts.gates, Filters):
        return None
    part = recipe.shrink
    return Shrinker(
        parts.model,
        example,
        parts.optimizer,
        every=part.every,
        share=part.share,
        constants=part.constants,
        # GPUs are at their best with channels in eights; the final removal has no need of them.
        round_to=max(part.round_to, 8) if example.is_cuda else part.round_to,
    )


def make_budget(recipe: Recipe, parts: Parts, example: Tensor) -> Budget | None:
    """What steers the penalty's strength; None without a target."""
    if not recipe.budget.target or parts.penalty is None:
        return None
    part = recipe.shrink
    try:
        return Budget(
            recipe.budget.target,
            parts.model,
            example,
            parts.penalty,
            recipe.train.epochs,
            optimizer=parts.optimizer,
            threshold=threshold_of(recipe),
            arrive=recipe.budget.arrive,
            steer=recipe.budget.steer,
            layout=part.layout,
            constants=part.constants,
            round_to=part.round_to,
        )
    except ValueError as error:
        raise RecipeError(f"budget.target: {error}", "budget.target") from error
