"""Models under FSDP2 (``torch.distributed.fsdp.fully_shard``): put together on every process, cut, and shard again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from narrowgate.dtensors import is_sharded, part_of
from narrowgate.flow.inplace import Optimizers, compact_, held_by, optimizers_of
from narrowgate.flow.plan import Plan, plan
from narrowgate.flow.trace import ExampleInputs
from narrowgate.train.shrink import random_numbers_kept
from narrowgate.undo_fsdp import forget_fsdp_, fsdp, reshard_

Shard = Callable[[nn.Module], object]


@contextmanager
def gathered(model: nn.Module, optimizer: Optimizers = None, *, shard: Shard | None = None) -> Iterator[nn.Module]:
    """Inside, a model under ``fully_shard`` is an ordinary one, whole on every process; afterwards it is sharded again.

    All processes must come here together, between two steps. Modules, gates, the optimizer and its groups keep their
    identity, and the optimizer's state and the gradients come along; parameters are new objects, inside and
    afterwards. Each process needs memory for the whole model, and for the whole state of the optimizer.

    Args:
        optimizer: the one that was made of the sharded model's parameters; a list where there are several.
        shard: calls ``fully_shard`` on the model's parts and on the model, as you did at first; without it the model
            stays whole.
    """
    fsdp()
    reshard_(model)
    optimizers = optimizers_of(optimizer)
    _check(model, optimizers)
    _exchange_(model, optimizers, {p: _gather(p) for p in model.parameters() if is_sharded(p)})
    forget_fsdp_(model)
    try:
        yield model
    finally:
        if shard is not None:
            _shard_again_(model, optimizers, shard)


def shrink_sharded_(
    model: nn.Module,
    optimizer: Optimizers,
    example_inputs: ExampleInputs,
    *,
    shard: Shard,
    constants: str = "exact",
    round_to: int = 1,
) -> Plan | None:
    """Remove the channels of closed gates from a model under ``fully_shard`` while it trains, in place.

    ``gathered``, ``plan(training=True)`` on the first process, and ``compact_`` with its plan on all. All processes
    must come here together, between two steps. ``optimizer`` and ``shard`` are as for ``gathered``; the rest as for
    ``plan``.

    Returns:
        The plan that was applied, or None where nothing could go.
    """
    reshard_(model)
    mesh = next(iter(_sharded(model).values())).device_mesh
    with gathered(model, optimizer, shard=shard):
        made: Plan | None = None
        failed: Exception | None = None
        if not any(mesh.get_local_rank(axis) for axis in range(mesh.ndim)):
            try:
                with random_numbers_kept(model):
                    made = plan(model, example_inputs, constants=constants, round_to=round_to, training=True)
            except Exception as error:  # the others wait for an answer
                failed = error
        text, why = _from_the_first(mesh, (made and made.to_json(), failed and f"{type(failed).__name__}: {failed}"))
        if failed is not None:
            raise failed
        if text is None:
            raise RuntimeError(f"the first process could not plan: {why}")
        made = Plan.from_json(text)
        if made.cuts:
            compact_(model, made, optimizer=optimizer)
    return made if made.cuts else None


def _sharded(model: nn.Module) -> dict[str, Any]:
    found = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    if not found:
        raise ValueError(f"no parameter of {type(model).__name__} is sharded; call fully_shard on it first")
    return found


def _check(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Refuse, before anything is changed, what can't be put together, and an optimizer of other parameters."""
    for name, p in _sharded(model).items():
        if sum(not placement.is_replicate() for placement in p.placements) > 1:
            raise ValueError(
                f"{name!r} is sharded over several axes of its mesh ({p.placements}); fully_shard alone can be "
                "undone, tensor parallelism can't"
            )
    for optimizer in optimizers:
        if held_by(optimizer).isdisjoint(id(p) for p in model.parameters()):
            raise ValueError(
                f"{type(optimizer).__name__} holds no parameter of this model; make the optimizer after fully_shard, "
                "and hand over the one that you step"
            )


def _gather(parameter: Any) -> nn.Parameter:
    full = parameter.detach().full_tensor()
    return nn.Parameter(full.clone(), requires_grad=parameter.requires_grad)


def _shard_again_(model: nn.Module, optimizers: list[torch.optim.Optimizer], shard: Shard) -> None:
    plain = dict(model.named_parameters(remove_duplicate=False))
    shard(model)
    now = dict(model.named_parameters(remove_duplicate=False))
    if plain.keys() != now.keys() or not any(is_sharded(p) for p in now.values()):
        raise ValueError(
            "shard= left the model without sharded parameters, or renamed some; it has to call fully_shard on the "
            "model that it is given"
        )
    _exchange_(model, optimizers, {p: now[name] for name, p in plain.items() if now[name] is not p})


@torch.no_grad()
def _exchange_(model: nn.Module, optimizers: list[torch.optim.Optimizer], new: dict[Tensor, nn.Parameter]) -> None:
    """Put new parameters in the places of old ones, with their gradients and the optimizer's state."""
    for module in model.modules():
        store = module._parameters
        for key, old in store.items():
            store[key] = old if old is None else new.get(old, old)
    for before, parameter in new.items():
        if before.grad is not None:
            parameter.grad = _as(before.grad, parameter)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [new.get(p, p) for p in group["params"]]
        for before in [p for p in optimizer.state if p in new]:
            optimizer.state[new[before]] = {
                key: _as(value, new[before]) if _belongs(value, before) else value
                for key, value in optimizer.state.pop(before).items()
            }


def _belongs(value: object, parameter: Tensor) -> bool:
    """Whether a number of the optimizer's is one for each of the parameter's."""
    return is_sharded(value) or (isinstance(value, Tensor) and value.shape == parameter.shape)


def _as(values: Any, parameter: Tensor) -> Tensor:
    """A gradient or state tensor, sharded or whole as its parameter is."""
    values = values.full_tensor() if is_sharded(values) else values
    return part_of(values, parameter) if is_sharded(parameter) else values.clone()


def _from_the_first(mesh: Any, mine: Any) -> Any:
    """What the first process of a mesh has, on all of them."""
    box = [mine]
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        torch.distributed.broadcast_object_list(box, torch.distributed.get_global_rank(group, 0), group=group)
    return box[0]
