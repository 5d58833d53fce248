"""From a recipe's [gates] and [penalty] to gates on a network, and to what each of them weighs."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from narrowgate.attach import attach_gates_
from narrowgate.coupling import coupled
from narrowgate.gates import GroupGate
from narrowgate.gateset import Gates
from narrowgate.groups import COUPLED
from narrowgate.rivals.filters import filters_of
from narrowgate.rivals.scaling import use_scaling_gates_
from narrowgate.rivals.wiring import memory_weights, rescale_
from narrowgate.sites import norms_that_follow
from narrowgate.train.recipe import GatesPart, Recipe, RecipeError
from narrowgate.train.recipe.values import did_you_mean

Choice = Callable[[str, nn.Module], bool]


def attach(recipe: Recipe, model: nn.Module, example: Tensor) -> Gates | None:
    """The recipe's gates, put on the network; None without gates."""
    part = recipe.gates
    if part.kind == "none":
        return None
    _check_names(recipe, model)
    try:
        gates = _attached(part, model, example)
    except ValueError as error:
        raise RecipeError(
            f"the gates of the recipe don't fit the network: {error}{_remedy(recipe)}", "gates.kind"
        ) from error
    if part.rescale != 1 and not rescale_(model, example, part.rescale):
        raise RecipeError(
            f"gates.rescale = {part.rescale:g}: behind no BatchNorm of {recipe.model.name} are only ReLU, pooling and "
            "layers, through which a factor passes; leave it at 1",
            "gates.rescale",
        )
    return gates


def _check_names(recipe: Recipe, model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules()]
    for key, patterns in (("skip", recipe.gates.skip), ("inputs", recipe.gates.inputs)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                guess = did_you_mean(pattern, names)
                raise RecipeError(
                    f'gates.{key} has "{pattern}", and {recipe.model.name} has no layer of that name{guess}',
                    f"gates.{key}",
                )


def _attached(part: GatesPart, model: nn.Module, example: Tensor) -> Gates:
    skipped = _named(*part.skip)

    def where(name: str, module: nn.Module) -> bool:
        return not skipped(name, module)

    inputs = _named(*part.inputs) if part.inputs else None
    if part.kind == "linear":
        return attach_gates_(model, "linear", where=where, init=part.init)
    if part.kind.startswith("filter"):
        columns = inputs or (_named() if part.kind == "filter-l1" else None)  # Li et al. prune filters alone
        return filters_of(model, int(part.kind[-1]), where, columns)
    groups = coupled(model, example) if COUPLED in part.groups else part.groups
    options: dict[str, Any] = {"where": where, "placement": part.placement, "inputs": inputs, "groups": groups}
    if part.kind == "scaling":
        attach_gates_(model, **options)
        return use_scaling_gates_(model, 1.0 if part.init is None else part.init)
    return attach_gates_(model, part.kind, init=part.init, **options)


def weights_of(recipe: Recipe, model: nn.Module, gates: Gates, example: Tensor) -> dict[str, float]:
    """What each gate's share of the penalty is multiplied by; empty where all are equal."""
    part = recipe.penalty
    weights: dict[str, float] = {}
    if part.weights == "memory":
        found = memory_weights(model, example)
        weights = {name: found[name] for name in gates}
    elif part.weights == "parameters":
        layers = {norm: layer for layer, (norm, _) in norms_that_follow(model).items()}  # of gates after the norm
        places: dict[str, list[str]] = {}  # of gates that several layers share
        for name, module in model.named_modules():
            if isinstance(module, GroupGate):
                places.setdefault(module.label, []).append(name.rpartition(".")[0])
        for name in gates:
            rules = (
                _parameters(model, layers.get(place, place), gates[name].size) for place in places.get(name, [name])
            )
            weights[name] = sum(rules)
    for pattern, factor in part.factors.items():
        matching = [name for name in gates if fnmatchcase(name, pattern)]
        if not matching:
            raise RecipeError(
                f"penalty.factors has {pattern!r}, where no gate is; gates are on {', '.join(gates)}", "penalty.factors"
            )
        assert isinstance(factor, (int, float))
        weights.update({name: weights.get(name, 1.0) * factor for name in matching})
    return weights


def _parameters(model: nn.Module, name: str, size: int) -> float:
    """How many parameters one gate rules over: a filter with its bias, an input column, a whole module."""
    layer = model.get_submodule(name.removesuffix(".inputs"))
    tensors = {key: tensor for key, tensor in layer.named_parameters() if not key.startswith(("gate.", "gate_in."))}
    if name.endswith(".inputs"):
        return tensors["weight"].numel() / size
    return sum(tensor.numel() for tensor in tensors.values()) / size


def _named(*patterns: str) -> Choice:
    return lambda name, module: any(fnmatchcase(name, pattern) for pattern in patterns)


def _remedy(recipe: Recipe) -> str:
    if recipe.gates.kind == "linear" and recipe.model.name == "lenet5" and not recipe.model.options.get("norm"):
        return " LeNet-5 has BatchNorms with --set model.options.norm=true"
    return ""
