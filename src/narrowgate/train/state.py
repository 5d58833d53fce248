"""The state of a training run as tensors by name and a JSON-able dictionary, and back; never pickle.

The names start with ``model/``, ``optimizer/`` or ``optimizer-group/``, so one dictionary holds them all and each
``load`` function takes its own out of it. There is no random state: an epoch's numbers belong to the epoch. The tensors
share memory with what they were taken from: write them before training goes on, or copy them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowgate.weights import tensors_of, ties_of

# How the steps are computed, not what: a run that goes on elsewhere keeps the choice made there.
_IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))
_NOT_OPTIONS = _IMPLEMENTATION | {"params", "param_names"}
_GROUP = "optimizer-group"


class StateError(ValueError):
    """A saved training state does not fit the model or the optimizer, or can't be saved without pickle."""


def pack_model(model: nn.Module) -> dict[str, Tensor]:
    """All parameters (gates are some of them) and persistent buffers; tied ones once, under their first name."""
    tied = ties_of(model)
    return {f"model/{name}": t.detach() for name, t in tensors_of(model, persistent=True) if name not in tied}


@torch.no_grad()
def load_model_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy the packed numbers into the model's own tensors, which keep their device, precision and memory format."""
    places, found = pack_model(model), {name: t for name, t in tensors.items() if name.startswith("model/")}
    if places.keys() != found.keys():
        odd = sorted(places.keys() ^ found.keys())[0]
        side = "the model" if odd in places else "the saved state"
        raise StateError(f"the saved state is of another model: only {side} has {odd.removeprefix('model/')!r}")
    for name, place in places.items():
        if place.shape != found[name].shape or place.dtype != found[name].dtype:
            raise StateError(
                f"the saved state is of another model: {name.removeprefix('model/')!r} is "
                f"{_describe(found[name])} there and {_describe(place)} in the model; cut the model by the saved plan "
                "before loading"
            )
    for name, place in places.items():
        place.copy_(found[name])


def pack_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state by the names of the model's parameters, and the options of its groups."""
    names = names_in_groups(optimizer, model)
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for group, members in zip(optimizer.param_groups, names, strict=True):
        for name, parameter in zip(members, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{name}/{key}"] = value.detach()
                else:
                    values.setdefault(name, {})[key] = _plain(value, f"the state {key!r} of {name!r}")
    groups = []
    for position, (group, members) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        options = {key: v for key, v in group.items() if key not in _NOT_OPTIONS}
        for key in [key for key, value in options.items() if isinstance(value, Tensor)]:
            tensors[f"{_GROUP}/{position}/{key}"] = options.pop(key).detach()
        shapes = {name: list(p.shape) for name, p in zip(members, group["params"], strict=True)}
        plain = {key: _plain(value, f"the option {key!r}") for key, value in options.items()}
        groups.append({"parameters": shapes, "options": plain})
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": values}


@torch.no_grad()
def load_optimizer_(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Give an optimizer of the same kind and groups the packed state and options.

    Options that are tensors (a learning rate in a captured CUDA graph) are filled in place. State lies on its
    parameter's device in its memory format; step counters lie where this optimizer keeps them.
    """
    names = names_in_groups(optimizer, model)
    _check_optimizer(optimizer, names, meta)
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in meta["state"].items()}
    for full, tensor in tensors.items():
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        if full.startswith("optimizer/"):
            state.setdefault(name, {})[key] = tensor
    for position, (group, saved) in enumerate(zip(optimizer.param_groups, meta["groups"], strict=True)):
        options = dict(saved["options"])
        prefix = f"{_GROUP}/{position}/"
        options.update({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        for key, value in options.items():
            _set_option_(group, key, value)
        for name, parameter in zip(names[position], group["params"], strict=True):
            optimizer.state.pop(parameter, None)
            if name in state:
                optimizer.state[parameter] = {
                    key: _placed(value, key, parameter, group) for key, value in state[name].items()
                }


def names_in_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group; raises for one that the model does not have."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise StateError(
            f"the optimizer has a parameter that is not the model's: it is not in {type(model).__name__}; make the "
            "optimizer from model.parameters()"
        )
    return [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _check_optimizer(optimizer: torch.optim.Optimizer, names: list[list[str]], meta: Mapping[str, Any]) -> None:
    """Refuse state of another optimizer before anything is changed."""
    if meta["class"] != type(optimizer).__name__:
        raise StateError(f"the saved state is of {meta['class']}, the optimizer is {type(optimizer).__name__}")
    if len(meta["groups"]) != len(names):
        raise StateError(f"the saved optimizer had {len(meta['groups'])} groups, this one has {len(names)}")
    for position, (group, saved) in enumerate(zip(optimizer.param_groups, meta["groups"], strict=True)):
        if list(saved["parameters"]) != names[position]:
            odd = sorted(set(saved["parameters"]) ^ set(names[position]))
            what = f"only one of them has {odd[0]!r}" if odd else "they are in another order"
            raise StateError(f"group {position} of the saved optimizer has other parameters: {what}")
        for (name, shape), parameter in zip(saved["parameters"].items(), group["params"], strict=True):
            if tuple(shape) != tuple(parameter.shape):
                raise StateError(
                    f"the saved optimizer knows {name!r} with shape {tuple(shape)}, the model has "
                    f"{tuple(parameter.shape)}; cut the model by the saved plan before loading"
                )


def _set_option_(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, Tensor):
        current.copy_(torch.as_tensor(value))
    elif isinstance(value, Tensor):
        group[key] = value.item() if isinstance(current, float) else value.clone()
    else:
        group[key] = tuple(value) if isinstance(current, tuple) else value


def _placed(value: Any, key: str, parameter: Tensor, group: dict[str, Any]) -> Any:
    """A state value as the optimizer would hold it for this parameter."""
    if not isinstance(value, Tensor):
        return value
    if key == "step":  # torch keeps it on the CPU unless the step is computed on the device
        on_device = group.get("capturable") or group.get("fused")
        return value.to(parameter.device if on_device else "cpu", copy=True)
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value.to(parameter.device, copy=True)


def _plain(value: Any, what: str) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise StateError(f"{what} of the optimizer is a {type(value).__name__}, which JSON can't hold") from error
    return value


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
