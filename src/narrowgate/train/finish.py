"""The end of a run: close by threshold, remove, prove, and say what came out."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from narrowgate.atomic import replace_file
from narrowgate.attach import merge_gates_
from narrowgate.flow import CollapseError, Plan, Verification, compact, plan, verify
from narrowgate.flow.compose import compose
from narrowgate.flow.trace import ExampleInputs
from narrowgate.gateset import Gates
from narrowgate.rivals.wiring import rescale_
from narrowgate.train.factors import gate_factors
from narrowgate.train.ranking import close_smallest_
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import RESULT
from narrowgate.weights import StorageError

_LINEAR_THRESHOLD = 1e-4


@dataclass(frozen=True)
class Pruned:
    """The small network, the plan that leads to it from the full-size one, and the proof."""

    small: nn.Module
    plan: Plan
    verification: Verification | None
    """None where the removal is not meant to be exact (``shrink.constants`` is fold or drop)."""
    closed_by_threshold: int
    factors: Mapping[str, Tensor] = field(default_factory=dict)
    """What the gates were that were multiplied into the small network's parameters, where it is to be fine-tuned."""


@dataclass(frozen=True)
class Result:
    """What a run ended with; ``result.json`` in its folder. Accuracies are shares of the test images, in float32."""

    accuracy: float
    accuracy_gated: float
    accuracy_removed: float
    """After removal, before any fine-tuning."""
    validation_accuracy: float | None
    parameters: int
    parameters_full: int
    multiply_adds: int
    multiply_adds_full: int
    closed: float
    max_error: float | None
    closed_by_threshold: int
    finetune_epochs: int
    epochs: int
    seconds: float
    device: str
    processes: int
    recipe_digest: str
    classes: int | None = None
    """None in files written before this was kept, as is the next."""
    image_shape: tuple[int, int, int] | None = None
    teacher: dict[str, Any] | None = None
    """The network, parameters, accuracy and recipe's digest of what it learned from beside the labels."""

    @property
    def pruned(self) -> float:
        """The share of the full-size network's parameters that is gone."""
        return 1 - self.parameters / self.parameters_full

    def save(self, folder: Path) -> None:
        """Write ``result.json``, whole or not at all."""
        text = json.dumps({**asdict(self), "pruned": round(self.pruned, 6)}, indent=1)
        replace_file(folder / RESULT, text.encode())

    @classmethod
    def load(cls, folder: Path) -> Result:
        """The result of a finished run."""
        path = folder / RESULT
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data.pop("pruned")
            shape = data.pop("image_shape", None)
            return cls(**data, image_shape=None if shape is None else tuple(shape))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{path} is damaged ({error}): delete it, and narrowgate train ... --resume writes it again"
            ) from error


def threshold_of(recipe: Recipe) -> float:
    """Below which a gate is closed at the end: as the recipe says, else the paper's 1e-4 for linear gates and 0."""
    if recipe.finish.threshold is not None:
        return recipe.finish.threshold
    return _LINEAR_THRESHOLD if recipe.gates.kind == "linear" else 0.0


def prune(
    model: nn.Module,
    gates: Gates | None,
    recipe: Recipe,
    example: Tensor,
    full_size: int,
    began: Mapping[str, int],
    earlier: Plan | None,
    agree: Callable[[Plan], Plan],
) -> Pruned:
    """A smaller copy of the trained model as the recipe's ``[shrink]`` and ``[finish]`` say.

    ``full_size`` and ``began`` are the parameters, and each layer's gates, of the network before any removal.
    ``earlier`` is what was removed during training; the plan that comes back is for the full-size network. ``agree``
    gives all processes the plan of one: the auto layout goes by times that each of them measures.
    """
    if recipe.gates.rescale != 1:
        rescale_(model, example, 1 / recipe.gates.rescale)
    closed, threshold = 0, threshold_of(recipe)
    if gates is not None and threshold > 0:
        closed = gates.close_below_(threshold)
    if gates is not None and recipe.finish.close > 0:
        closed += close_smallest_(gates, recipe.finish.close, recipe.finish.per_layer, began)
    if recipe.shrink.when == "off":
        return Pruned(*_whole(model, full_size), None, closed)
    part = recipe.shrink
    how = {"layout": part.layout, "constants": part.constants, "round_to": part.round_to}
    try:
        small, last, proof = _removed(model, example, agree, **how)
        factors = gate_factors(model, last) if recipe.finish.finetune_epochs else {}
        return Pruned(small, _composed(earlier, last), proof, closed, factors)
    except CollapseError as error:
        if not closed:
            raise
        what = str(error).partition(". ")[0]
        raise CollapseError(
            f"{what}. That is after finish.threshold = {threshold:g} and finish.close = {recipe.finish.close:g} closed "
            f"{closed} more gates: lower them"
        ) from error


def remove(
    model: nn.Module,
    example_inputs: ExampleInputs,
    earlier: Plan | None,
    agree: Callable[[Plan], Plan] = lambda mine: mine,
    **how: Any,
) -> tuple[nn.Module, Plan, Verification | None]:
    """A small copy of a gated model, the plan that leads to it from the full-size one, and the proof.

    Args:
        earlier: what was removed during training.
        agree: gives all processes the plan of one.
        how: layout, constants and round_to, as for ``ng.plan``; the proof is None where constants are not exact.
    """
    small, last, proof = _removed(model, example_inputs, agree, **how)
    return small, _composed(earlier, last), proof


def _removed(
    model: nn.Module, example_inputs: ExampleInputs, agree: Callable[[Plan], Plan], **how: Any
) -> tuple[nn.Module, Plan, Verification | None]:
    last = agree(plan(model, example_inputs, **how))
    small = compact(model, last)
    proof = verify(model, small, example_inputs, other_sizes=False) if last.constants == "exact" else None
    return small, last, proof


def _composed(earlier: Plan | None, last: Plan) -> Plan:
    return last if earlier is None else compose(earlier, last)


def _whole(model: nn.Module, full_size: int) -> tuple[nn.Module, Plan]:
    small = merge_gates_(copy.deepcopy(model))
    return small, Plan("aligned", "exact", {}, {}, [], [], {}, full_size, full_size)
