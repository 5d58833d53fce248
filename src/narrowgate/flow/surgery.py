"""Apply a plan: slice parameters, edit the few numbers that constants changed, and update the layers' sizes."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowgate.flow.copies import copy_structure
from narrowgate.flow.cuts import Cut, Edit
from narrowgate.flow.idle import beside_idle, idle_parts
from narrowgate.flow.plan import Plan
from narrowgate.flow.resize import resize_
from narrowgate.flow.trace import first_names
from narrowgate.flow.ungated import ungated


class PlanError(ValueError):
    """The plan does not fit the model."""


class TiesError(PlanError):
    """The plan cuts two tensors that are one in this model."""


@torch.inference_mode(False)  # a tensor made in that mode could never train
def compact(model: nn.Module, plan: Plan) -> nn.Module:
    """A smaller copy of the model that computes the same function; gates are merged, the original is untouched."""
    check_fits(model, plan)
    small = ungated(model)
    check_ties(small, plan)
    replaced: dict[int, Any] = {}
    tensors = tensors_of(small)
    edited = edited_tensors(small, plan)
    for name, tensor in tensors.items():
        if id(tensor) in replaced:
            continue
        new = edited.get(name, tensor.detach())
        new = cut(new, plan.cuts[name]) if name in plan.cuts else new.clone()
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new.contiguous(memory_format=format_of(tensor)), requires_grad=tensor.requires_grad)
        replaced[id(tensor)] = new
    replaced |= idle_parts(small, plan.idle, plan.layout)
    small = copy_structure(small, replaced)  # not in the modules' tables alone: a list may hold parameters, too
    left = beside_idle(plan)
    _add_biases(small, left, edited)
    resize_(small, left.edits, left.widths)
    return small


def cut(tensor: Tensor, how: Cut) -> Tensor:
    """The kept part of a parameter, or of anything with its shape."""
    if how.grouped is not None:
        tensor = _cut_groups(tensor, how.grouped)
    for axis, positions in how.keep.items():
        tensor = tensor.index_select(axis, torch.tensor(positions, dtype=torch.long, device=tensor.device))
    return tensor


def format_of(tensor: Tensor) -> torch.memory_format:
    """channels_last, or contiguous, which is what a cut alone makes of anything."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = tensor.dim() in formats and tensor.stride(1) == 1 and tensor.stride(2) != 1
    return formats[tensor.dim()] if last else torch.contiguous_format


def _cut_groups(weight: Tensor, grouped: list[list[int]]) -> Tensor:
    parts = weight.chunk(len(grouped), 0)
    picked = [
        part.index_select(1, torch.tensor(columns, dtype=torch.long, device=weight.device))
        for part, columns in zip(parts, grouped, strict=True)
    ]
    return torch.cat(picked)


@torch.no_grad()
def edited_tensors(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """New full-size values of weights, biases and running means that constants change; a new bias is ``layer.bias``."""
    tensors = tensors_of(model)
    edited: dict[str, Tensor] = {}
    for edit in plan.edits.values():
        if not (edit.rows or edit.folded or edit.carried):
            continue
        weight = tensors[edit.weight].detach()
        axis = 0 if edit.transposed else 1
        bias = tensors[edit.bias].detach().double() if edit.bias else weight.new_zeros(weight.shape[1 - axis]).double()
        if edit.folded:
            bias = bias + _contribution(weight, edit)
        if edit.carrier is not None or edit.rows or edit.merged:
            edited[edit.weight] = weight = weight.clone()
        if edit.carrier is not None:
            part, ratios = _columns(weight, axis, edit.carried)
            target = weight.select(axis, edit.carrier)
            target.copy_(target.double() + part.movedim(axis, -1) @ ratios)
        if edit.merged:
            _merge_(weight, edit.merged)
        if edit.rows:
            rows = torch.tensor(list(edit.rows), dtype=torch.long, device=weight.device)
            weight.index_fill_(1 - axis, rows, 0.0)
            bias = bias.index_copy(0, rows, bias.new_tensor(list(edit.rows.values())))
        if edit.mean:
            edited[edit.mean] = _mean_without(bias, tensors[edit.mean].detach(), plan, edit)
        elif edit.bias or edit.new_bias:
            edited[edit.bias or f"{edit.layer}.bias"] = bias.to(weight.dtype)
    return edited


def _mean_without(bias: Tensor, mean: Tensor, plan: Plan, edit: Edit) -> Tensor:
    """A norm's running mean less what would be the bias of the layer in front, for the channels that it computes."""
    if edit.scatter is not None:  # the others are filled in, and are what they were
        own = torch.tensor(plan.cuts[edit.weight].keep[1 if edit.transposed else 0], device=bias.device)
        bias = torch.zeros_like(bias).index_copy_(0, own, bias[own])
    return (mean.double() - bias).to(mean.dtype)


def _columns(weight: Tensor, axis: int, numbers: dict[int, float]) -> tuple[Tensor, Tensor]:
    """Some input channels of a weight in double precision, and the number that belongs to each."""
    places = torch.tensor(list(numbers), dtype=torch.long, device=weight.device)
    part = weight.index_select(axis, places).double()
    return part, part.new_tensor(list(numbers.values()))


def _merge_(weight: Tensor, merged: dict[int, dict[int, float]]) -> None:
    """Add the weights of input channels that are sums of others to those others' and set them to zero."""
    gone = torch.tensor(list(merged), device=weight.device)
    others = sorted({other for factors in merged.values() for other in factors})
    table = [[factors.get(other, 0.0) for other in others] for factors in merged.values()]
    share = weight.index_select(1, gone).double().movedim(1, -1) @ weight.new_tensor(table, dtype=torch.float64)
    places = torch.tensor(others, device=weight.device)
    weight.index_copy_(1, places, (weight.index_select(1, places).double() + share.movedim(-1, 1)).to(weight.dtype))
    weight.index_fill_(1, gone, 0.0)


def _contribution(weight: Tensor, edit: Edit) -> Tensor:
    """What the folded constants add to each output channel."""
    if edit.groups == 1:
        part, constants = _columns(weight.transpose(0, 1) if edit.transposed else weight, 1, edit.folded)
        return part.flatten(2).sum(2) @ constants if part.dim() > 2 else part @ constants
    taps = weight.double().reshape(edit.groups, -1, weight.shape[1], weight[0, 0].numel()).sum(3)
    constants = taps.new_zeros(edit.groups * weight.shape[1])
    constants[torch.tensor(list(edit.folded), device=weight.device)] = taps.new_tensor(list(edit.folded.values()))
    return (taps @ constants.reshape(edit.groups, -1, 1)).reshape(-1)


def _add_biases(model: nn.Module, plan: Plan, edited: dict[str, Tensor]) -> None:
    for edit in plan.edits.values():
        if edit.new_bias:
            bias = edited[f"{edit.layer}.bias"]
            weight_cut = plan.cuts.get(edit.weight)
            rows = weight_cut.keep.get(1 if edit.transposed else 0) if weight_cut else None
            if rows is not None:
                bias = bias[torch.tensor(rows, device=bias.device)]
            layer = model.get_submodule(edit.layer)
            layer.bias = nn.Parameter(bias.clone(), cast(Tensor, layer.weight).requires_grad)  # a frozen layer stays so


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def check_fits(model: nn.Module, plan: Plan) -> None:
    """Refuse a plan made for another model, or one that was applied already; nothing is changed before this passes."""
    _check_kinds(model, plan)
    tensors = tensors_of(model)
    kind = type(model).__name__
    modules = dict(model.named_modules(remove_duplicate=False))
    gone = {name for name in plan.cuts if name not in tensors and _is_gate_of(modules, name)}
    others = (name for edit in plan.edits.values() for name in (edit.bias, edit.mean) if name)
    for name in (*plan.cuts, *plan.edits, *others):
        if name not in tensors and name not in gone:
            raise PlanError(
                f"this plan is for another model: it names {name!r}, which {kind} lacks; {_inside(model, name)}"
            )
    for name, how in plan.cuts.items():
        shape = how.shape if name in gone else tuple(tensors[name].shape)
        if shape != how.shape:
            hint = "it was applied already" if shape == how.new_shape else "it was made for another model"
            raise PlanError(f"the plan expects {name!r} of shape {how.shape}, found {shape}: {hint}; plan again")
    for name in plan.widths:
        owner, _, attribute = name.rpartition(".")
        module = modules.get(owner)
        if module is None or type(vars(module).get(attribute)) is not int:
            raise PlanError(f"this plan changes the number {name!r}, which {kind} lacks; plan again")
    for name in plan.idle:
        if name not in modules:
            raise PlanError(f"this plan is for another model: it names the module {name!r}, which {kind} lacks")
    for name, edit in plan.edits.items():
        first, second = (*tensors[name].shape, 1)[:2]  # a norm's weight has one axis
        rows, columns = (second, first) if edit.transposed else (first, second)
        reach = [*edit.folded, *edit.carried, *([] if edit.carrier is None else [edit.carrier])]
        reach += [other for factors in edit.merged.values() for other in factors]
        if max(edit.rows, default=0) >= rows or max(reach, default=0) >= columns * edit.groups:
            raise PlanError(f"the plan edits channels that {name!r} of {kind} does not have; plan again")


def check_ties(plain: nn.Module, plan: Plan) -> None:
    """Refuse a plan for a model in which one of these tensors was two: each could be cut in its own way there."""
    first = first_names(plain)
    others = (name for edit in plan.edits.values() for name in (edit.bias, edit.mean) if name)
    for name in (*plan.cuts, *plan.edits, *others):
        if first.get(name, name) != name:
            raise TiesError(
                f"this plan is for a model in which {first[name]!r} and {name!r} are two tensors, here they are one; "
                'plan again with tied weights. model.to("meta") makes two of one, building it on that device does not'
            )


def _check_kinds(model: nn.Module, plan: Plan) -> None:
    """Refuse what is no model, and what is no plan though it may hold one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a plan is applied to a model, an nn.Module that was built, got {type(model).__name__}")
    if not isinstance(plan, Plan):
        remedy = "what ng.plan returned"
        if isinstance(plan, str):
            remedy = "ng.Plan.from_json(text)"
        elif isinstance(getattr(plan, "plan", None), Plan):  # what a Shrinker's step gives, for an average of weights
            remedy = f"the plan in this {type(plan).__name__}, its .plan"
        raise TypeError(f"a plan is needed, got {type(plan).__name__}; give {remedy}")


def _inside(model: nn.Module, name: str) -> str:
    """What to do about a name that a model lacks: wrappers put a word before every name."""
    wrapped = (key for key, inner in model.named_children() if name in tensors_of(inner))
    key = next(wrapped, None)
    return "plan again" if key is None else f"if it is for the model inside, give that one, .{key}"


def _is_gate_of(modules: dict[str, nn.Module], name: str) -> bool:
    """Whether this names a gate on the output of a layer that has none here: the plan was made with gates attached."""
    layer = modules.get(name.removesuffix(".gate.g"))
    return name.endswith(".gate.g") and layer is not None and not hasattr(layer, "gate")
