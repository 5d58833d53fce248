"""``compact_``: cut a model in place while it trains; gates stay on the channels that live, optimizer state follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.plan import Plan
from narrowgate.flow.resize import resize_
from narrowgate.flow.surgery import PlanError, check_fits, check_ties, cut, edited_tensors, format_of, tensors_of
from narrowgate.flow.ungated import ungated
from narrowgate.gated import GatedLayer
from narrowgate.gates import Gate, GroupGate
from narrowgate.swap import tied_to_gated, why_tied

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""What trains a model: one, several that share its parameters, or unknown."""


class OptimizerError(ValueError):
    """An optimizer's state can't be cut along; nothing was changed."""


@torch.inference_mode(False)  # a tensor made in that mode could never train
def compact_(model: nn.Module, plan: Plan, *, optimizer: Optimizers = None) -> nn.Module:
    """Apply a plan to the model itself: parameters keep their identity, so optimizers and param groups stay valid.

    Gradients, and state tensors of the optimizer that have their parameter's shape (momentum, Adam's moments), are cut
    along, and memory formats stay; several optimizers are handed over as a list. Use a plan made with
    ``training=True``, which trusts closed gates only. Exponential moving averages are models of their own: call this on
    them with the same plan.
    """
    check_fits(model, plan)
    if plan.layout != "aligned":
        raise ValueError(f"compact_ needs a plan of layout 'aligned', got {plan.layout!r}; use compact for the others")
    cuts = {**plan.cuts, **_gate_cuts(model, plan)}
    optimizers = optimizers_of(optimizer)
    plain = ungated(model)
    check_ties(plain, plan)
    for each in optimizers if cuts else ():
        check_can_follow(each)
        _check_state(model, cuts, each)
        _check_new_biases(model, plan, each)
    edited = _without_gates(model, edited_tensors(plain, plan))
    _check_gated_ties(model, cuts, edited)
    done: set[int] = set()
    for name, tensor in tensors_of(model).items():
        if id(tensor) in done or not (name in cuts or name in edited):
            continue
        done.add(id(tensor))
        _replace_(tensor, edited.get(name, tensor.detach()), cuts.get(name), optimizers)
    for edit in plan.edits.values():
        if edit.new_bias:
            _add_bias_(model, plan, edit, edited[f"{edit.layer}.bias"], optimizers)
    resize_(model, plan.edits, plan.widths)
    _close_removed_groups_(model, optimizers)
    return model


def optimizers_of(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """All that were handed over."""
    if optimizer is None:
        return []
    found = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for each in found:
        if not hasattr(each, "param_groups") or not hasattr(each, "state"):
            raise TypeError(f"optimizer must be an optimizer or a list of them, got {type(each).__name__}")
    return found


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of all parameters that an optimizer trains."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_can_follow(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of a kind whose state can't be cut along, or is another's."""
    if isinstance(optimizer, torch.optim.LBFGS):  # what it remembers of all parameters hangs on the first
        raise OptimizerError(
            "LBFGS keeps what it knows of all parameters in one vector, which can't be cut along. Make a new optimizer "
            "after compact_, and leave optimizer= out"
        )
    for key, inner in vars(optimizer).items():
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:  # Accelerate's shares it
            raise OptimizerError(
                f"{type(optimizer).__name__} steps another optimizer, {type(inner).__name__}, whose state would not be "
                f"cut along: hand over that one, optimizer.{key}"
            )


def _check_gated_ties(model: nn.Module, cuts: dict[str, Cut], edited: dict[str, Tensor]) -> None:
    """Refuse a weight of which a gated layer and another have different channels left."""
    for names in tied_to_gated(model):
        if any(name in edited or cuts.get(name) != cuts.get(names[0]) for name in names):
            raise PlanError(f"{why_tied(names)}. It can't be cut in place")


def _check_state(model: nn.Module, cuts: dict[str, Cut], optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state does not have its parameters' shapes, before anything is changed."""
    # Of a square weight, a statistic of its rows may have the weight's shape: other parameters' tell that it is none.
    odd = {
        key
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(parameter, Tensor) and not _goes_along(value, parameter)
    }
    tensors = tensors_of(model)
    for name in [name for name in cuts if name in tensors]:
        for key in optimizer.state.get(tensors[name], {}):
            if key in odd:
                raise OptimizerError(
                    f"{type(optimizer).__name__} keeps {key!r} of {name!r} in another shape than the parameter: its "
                    "state can't be cut along. Make a new optimizer after compact_, and leave optimizer= out"
                )


def _goes_along(value: object, parameter: Tensor) -> bool:
    """Whether state can be cut as its parameter is, or stays as it is: a number has nothing to cut."""
    if isinstance(value, Tensor):
        return value.numel() <= 1 or value.shape == parameter.shape
    return not any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in pytree.tree_leaves(value))


def _check_new_biases(model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a bias for a layer whose optimizer takes matrices only."""
    if not isinstance(optimizer, getattr(torch.optim, "Muon", ())):  # PyTorch 2.9 and newer
        return
    held = held_by(optimizer)
    for edit in plan.edits.values():
        if edit.new_bias and id(model.get_submodule(edit.layer).weight) in held:
            raise OptimizerError(
                f"a constant has to become a bias of {edit.layer!r}, which has none, and {type(optimizer).__name__}, "
                "which trains its weight, takes matrices only: make the layer with a bias, for another optimizer"
            )


@torch.no_grad()
def _replace_(tensor: Tensor, values: Tensor, how: Cut | None, optimizers: list[torch.optim.Optimizer]) -> None:
    shape, grad = tensor.shape, tensor.grad
    new = _like(values if how is None else cut(values, how), tensor)
    # A change of dtype makes autograd forget the old shape, which a loss that is still alive would hold it to.
    tensor.data = new.new_empty(0, dtype=torch.float64 if tensor.dtype == torch.float32 else torch.float32)
    tensor.data = new
    tensor.grad = grad if grad is None or how is None else _like(cut(grad, how), grad)
    if how is None:
        return
    for optimizer in optimizers:
        state: dict[str, Any] = optimizer.state.get(tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape:
                state[key] = _like(cut(value, how), value)


def _like(values: Tensor, old: Tensor) -> Tensor:
    """A copy in the memory format of what it replaces; the gradient of an embedding may be sparse and have none."""
    return values.clone() if values.is_sparse else values.clone(memory_format=format_of(old))


def _gate_cuts(model: nn.Module, plan: Plan) -> dict[str, Cut]:
    """Gate parameters go with the axis they sit on; a gate for a whole block stays."""
    cuts = {}
    for name, layer in model.named_modules():
        how = plan.cuts.get(f"{name}.weight")
        if not isinstance(layer, GatedLayer) or how is None:
            continue
        for key in ("gate", "gate_in"):
            gate, left = layer._modules.get(key), _left(layer, how, outputs=key == "gate")
            if isinstance(gate, Gate) and left is not None and gate.size == left[0]:
                cuts[f"{name}.{key}.g"] = Cut((gate.size,), {0: left[1]})
    return cuts


def _left(layer: nn.Module, how: Cut, outputs: bool) -> tuple[int, list[int]] | None:
    """How many channels a layer has on one side, and which of them a cut of its weight leaves; None if all stay."""
    transposed, groups = bool(getattr(layer, "transposed", False)), int(getattr(layer, "groups", 1))
    if outputs and transposed and groups > 1 and how.shape[:2] != (groups, 1):
        width, by_group = how.shape[1], enumerate(how.grouped or [])
        left = [width * i + place for i, places in by_group for place in places]
        return (groups * width, left) if left else None
    axis = 0 if transposed and groups > 1 else int(outputs == transposed)
    return (how.shape[axis], how.keep[axis]) if axis in how.keep else None


@torch.no_grad()
def _close_removed_groups_(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    """Keep the numbers of groups that were cut away closed.

    A group's number stays in its gate when its last row or column goes; momentum would open it again, and the group
    would count as one that is there.
    """
    left: dict[Gate, set[int]] = {}
    for module in model.modules():
        if isinstance(module, GroupGate) and not module.g.is_meta:
            left.setdefault(module.shared, set()).update(module.numbers.tolist())
    for gate, numbers in left.items():
        gone = torch.tensor([number not in numbers for number in range(gate.size)], device=gate.g.device)
        gate.close_(gone)
        states = [each.state.get(gate.g, {}) for each in optimizers]
        for value in (gate.g.grad, *(value for state in states for value in state.values())):
            if isinstance(value, Tensor) and value.shape == gate.g.shape:
                value[gone] = 0.0


@torch.no_grad()
def _without_gates(model: nn.Module, edited: dict[str, Tensor]) -> dict[str, Tensor]:
    """Edits were computed on effective weights; divide the changed numbers by the gates that will multiply them."""
    result = dict(edited)
    for name, layer in model.named_modules():
        if not isinstance(layer, GatedLayer):
            continue
        out = None if layer.gate is None else layer.gate.final_value()
        into = None if layer.gate_in is None else layer.gate_in.final_value()
        effective_weight, effective_bias = layer.scaled(out, into)
        weight, bias = cast(Tensor, layer.weight), cast("Tensor | None", layer.bias)
        key = f"{name}.weight"
        if key in result:
            factor = layer.scale_weight(torch.ones_like(weight), out, into)
            result[key] = _divide(weight, effective_weight, result[key], factor)
        key = f"{name}.bias"
        if key in result and out is not None:
            zeros = torch.zeros_like(result[key])  # a layer without bias gets one
            raw, before = (zeros, zeros) if bias is None or effective_bias is None else (bias, effective_bias)
            result[key] = _divide(raw, before, result[key], out.to(raw.dtype).expand_as(raw))
    return result


def _divide(raw: Tensor, effective: Tensor, wanted: Tensor, factor: Tensor) -> Tensor:
    """``raw`` changed so that raw times factor is ``wanted`` wherever that differs from before."""
    changed = (wanted != effective) & (factor != 0)
    return torch.where(changed, wanted / factor, raw)


def _add_bias_(model: nn.Module, plan: Plan, edit: Edit, bias: Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
    layer = model.get_submodule(edit.layer)
    how = plan.cuts.get(edit.weight)
    rows = how.keep.get(1 if edit.transposed else 0) if how is not None else None
    kept = bias if rows is None else bias[torch.tensor(rows, device=bias.device)]
    layer.bias = nn.Parameter(kept.clone(), cast(Tensor, layer.weight).requires_grad)  # a frozen layer stays so
    for optimizer in optimizers:
        _train_bias_(optimizer, edit.layer, cast(Tensor, layer.weight), layer.bias)


def _train_bias_(optimizer: torch.optim.Optimizer, layer: str, weight: Tensor, bias: Tensor) -> None:
    """Put a new bias into its weight's group, with the state that the next step wants to find."""
    for group in optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            group["params"].append(bias)
            group.get("param_names", []).append(f"{layer}.bias")
    # Fused SGD takes momentum for all parameters or for none; zero is what the first step would start from. Others
    # with such a buffer, as RMSprop, keep more beside it, and make all of it for a parameter without state.
    state = optimizer.state.get(weight, {})
    if state.keys() == {"momentum_buffer"} and isinstance(state["momentum_buffer"], Tensor):
        optimizer.state[bias] = {"momentum_buffer": torch.zeros_like(bias)}
    if isinstance(optimizer, torch.optim.Adagrad) and state:  # its constructor makes state; older ones' step none
        total = torch.full_like(bias, optimizer.defaults["initial_accumulator_value"])
        optimizer.state[bias] = {"step": torch.zeros_like(state["step"]), "sum": total}
