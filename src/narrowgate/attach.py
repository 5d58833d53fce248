"""``attach_gates_``: put gates on the layers of any model, in place; ``merge_gates_``: take them off again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgate.batched import forget_prepared_gates_, prepare_gates_together_
from narrowgate.direct import forget_reader_, gate_for_reader_, keep_called_
from narrowgate.dtensors import check_whole
from narrowgate.gated import has_gate
from narrowgate.gates import ExponentialGate, Gate, GroupGate, HardConcreteGate, LinearGate
from narrowgate.gateset import Gates, gates_of
from narrowgate.groups import COUPLED, NAMES, Coupled, Family, Part
from narrowgate.listed import Listed, listed_groups
from narrowgate.sites import (
    Site,
    Where,
    check_families,
    check_sites,
    find_groups,
    find_sites,
    layers_of,
    may_be_kept_called,
    norms_to_gate,
    reader_of,
)
from narrowgate.swap import (
    can_merge,
    check_gate_fits,
    check_weights,
    divide_by_gate_,
    gate_layer_,
    merge_layer_,
    out_channels,
    tied_to_gated,
    why_tied,
)

__all__ = ["KINDS", "PLACEMENTS", "Gates", "Where", "attach_gates_", "gates_of", "merge_gates_", "plain_state_dict"]

KINDS = ("exponential", "linear", "hard-concrete")
PLACEMENTS = ("before-norm", "after-norm")


def attach_gates_(
    model: nn.Module,
    kind: str = "exponential",
    *,
    groups: str | Sequence[str] | Listed | Coupled = "channels",
    where: Where | None = None,
    placement: str = "before-norm",
    inputs: Where | None = None,
    blocks: Where | None = None,
    last: bool = False,
    init: float | None = None,
    keep_function: bool = False,
) -> Gates:
    """Gate every convolution and linear layer but the last, or other groups, in place, and return the gates.

    Args:
        kind: ``exponential`` (the paper's), ``linear`` (BatchNorm's own scale) or ``hard-concrete`` (L0).
        groups: what one number stands for: ``channels``, the ``neurons`` of MLPs, attention ``heads``, the branches of
            residual ``blocks``, or several of these; what ``ng.coupled(model, example_inputs)`` found, for a channel of
            a stream, whoever writes it; or a mapping of names to lists of ``(parameter name, axis, positions)``, each
            a group of your own.
        where: ``(name, module) -> bool`` narrows the choice; for linear gates it sees the BatchNorms, for other groups
            the layer that would hold the gate.
        placement: ``before-norm`` gates the layer; ``after-norm`` gates the BatchNorm registered directly behind it,
            scale and shift together, so that a closed channel is zero and not the constant beta. A layer without one
            is gated itself.
        inputs: layers whose input features get gates as well, whatever ``where`` says. By default those a model names
            in ``gate_inputs``.
        blocks: modules that get a single gate for their whole output, to drop for example a residual branch.
        last: gate the last layer too, for a model without an output layer.
        init: what ``g`` starts at. By default 1 for exponential gates and 0 for hard-concrete ones; a linear gate
            whose BatchNorm is untouched (scale 1, shift 0) starts at 0.5, a trained one is left alone.
        keep_function: divide the weights by the gates' first values, so that a trained model computes what it did.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"attach_gates_ needs a model, an nn.Module that was built, got {model!r}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(model).__name__} is compiled by torch.jit, which hides its layers; gate the model itself"
        )
    _check_choices(kind, placement, where=where, inputs=inputs, blocks=blocks)
    if kind == "linear":
        if inputs or blocks or placement == "after-norm" or keep_function or last or groups != "channels":
            raise ValueError(
                "linear gates are BatchNorm scales: groups, inputs, blocks, placement, last and keep_function don't "
                "apply"
            )
        return _attach_linear_(model, where, init)
    make = ExponentialGate if kind == "exponential" else HardConcreteGate
    if init is not None and math.isinf(init):
        raise ValueError(f"init must be a finite number, got {init!r}")
    if init is not None and not make(1, init).final_value().item() > 0:
        raise ValueError(f"init={init!r} starts {kind} gates closed; a closed gate can't learn to open")
    sites, families, skipped = _chosen(model, groups, where, placement == "after-norm", inputs, blocks, last)
    check_sites(sites, keep_function)
    check_families(model, families, sites, kind, keep_function)
    gates: dict[str, Gate] = {}
    for site in sites:
        gate = make(site.size) if init is None else make(site.size, init)
        _like_weights_of(site.layer, model, gate)
        _put_(site.layer, site.key, gate, keep_function)
        if may_be_kept_called(model, site.name):
            keep_called_(site.layer)
        gates[site.label] = gate
    for family in families:
        shared = make(len(family.names)) if init is None else make(len(family.names), init)
        _put_family_(model, family, shared, keep_function)
        gates[family.label] = shared
    several = {part.name: part.layer for family in families for part in family.parts}
    prepare_gates_together_(model, {site.name: site.layer for site in sites} | several)
    return Gates(kind, gates, skipped)


def _chosen(
    model: nn.Module,
    groups: str | Sequence[str] | Listed | Coupled,
    where: Where | None,
    after_norm: bool,
    inputs: Where | None,
    blocks: Where | None,
    last: bool,
) -> tuple[list[Site], list[Family], dict[str, str]]:
    """The gates to make for single layers, those for families of groups, and why a layer was skipped."""
    names = _group_names(groups)
    sites: list[Site] = []
    skipped: dict[str, str] = {}
    if isinstance(groups, Coupled):
        if last:
            raise ValueError("last=True does not go with coupled channels, which leave out what the model gives out")
        return _chosen_of_coupled(model, groups, where, after_norm, inputs, blocks)
    if "channels" in names:
        sites, skipped = find_sites(model, where, after_norm, inputs, blocks, last)
    elif inputs is not None or blocks is not None:
        sites, _ = find_sites(model, _never, after_norm, inputs or _never, blocks, last)
    more, families, why_not = find_groups(model, names, where)
    if isinstance(groups, Mapping):
        families.append(listed_groups(model, groups))
    sites, skipped = _together(sites, more, families, skipped | why_not)
    if not sites and not families:
        raise ValueError(_nothing_to_gate(model, "convolution or linear layer", len(layers_of(model)), skipped))
    return sites, families, skipped


def _chosen_of_coupled(
    model: nn.Module,
    groups: Coupled,
    where: Where | None,
    after_norm: bool,
    inputs: Where | None,
    blocks: Where | None,
) -> tuple[list[Site], list[Family], dict[str, str]]:
    """The same for channels that several layers may share: those of a bundle are gated in all of its layers or none."""
    layers = dict(model.named_modules())
    for name in (*groups.alone, *(name for bundle in groups.bundles for name in bundle.layers)):
        if name not in layers:
            raise ValueError(
                f"these coupled channels are of another model: {type(model).__name__} has no layer {name!r}"
            )
    out = {name for name in layers if where is not None and not where(name, layers[name])}
    sites, skipped = find_sites(model, lambda name, _: name in {*groups.alone} - out, after_norm, inputs, blocks, True)
    norms = norms_to_gate(model) if after_norm else {}
    families = []
    for bundle in groups.bundles:
        if left_out := sorted(out & bundle.layers.keys()):
            others = bundle.layers.keys() - out
            skipped |= dict.fromkeys(others, f"it shares its channels with {left_out[0]}, which where= leaves out")
            continue
        places = [(norms.get(name, (name, layers[name])), numbers) for name, numbers in bundle.layers.items()]
        for (name, layer), numbers in places:
            if out_channels(layer) != len(numbers):
                raise ValueError(
                    f"these coupled channels are of another model: there {name!r} had {len(numbers)}, here it has "
                    f"{out_channels(layer)}"
                )
        parts = tuple(Part(name, layer, "gate", numbers) for (name, layer), numbers in places)
        families.append(Family(parts[0].name, tuple(f"{parts[0].name}.{i}" for i in range(bundle.size)), parts))
    if not sites and not families:
        raise ValueError(
            _nothing_to_gate(model, "convolution or linear layer", len(layers_of(model)), groups.held | skipped)
        )
    return sites, families, groups.held | skipped


def _put_family_(model: nn.Module, family: Family, shared: Gate, keep_function: bool) -> None:
    _like_weights_of(family.parts[0].layer, model, shared)
    shared.names = family.names
    for part in family.parts:
        view = GroupGate(family.label, shared, list(part.numbers), owns=part is family.parts[0])
        _put_(part.layer, part.key, view.to(next(part.layer.parameters()).device), keep_function)
        reader = reader_of(model, part.name)
        if reader is not None:
            gate_for_reader_(reader)


def _put_(layer: nn.Module, key: str, gate: Gate, keep_function: bool) -> None:
    gate.train(layer.training)
    gate.divided = keep_function
    gate_layer_(layer, key, gate)
    if keep_function:
        divide_by_gate_(layer, gate)


def merge_gates_(model: nn.Module) -> nn.Module:
    """Multiply every gate into its layer's weights and make all layers ordinary again, in place."""
    check_whole(model)
    gated = {name: module for name, module in model.named_modules() if has_gate(module)}
    if stuck := [name for name, module in gated.items() if not can_merge(module)]:
        raise ValueError(
            f"the gates on {', '.join(stuck)} multiply an output and have no weight to go into; "
            "keep them, or gate a layer inside"
        )
    check_weights(gated)
    for names in tied_to_gated(model):
        raise ValueError(f"gates can't be merged: {why_tied(names)}")
    if gated:
        gates_of(model).values()  # raises if one is NaN
    for module in gated.values():
        merge_layer_(module)
    for module in model.modules():
        forget_prepared_gates_(module)
        forget_reader_(module)
    return model


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """A gated model's weights with the gates multiplied in, under the keys of the ordinary model."""
    check_whole(model)
    return merge_gates_(copy.deepcopy(model)).state_dict()


def _check_choices(kind: str, placement: str, **filters: Where | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown gate kind {kind!r}; choose one of {', '.join(KINDS)}")
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}; choose one of {', '.join(PLACEMENTS)}")
    for name, choose in filters.items():
        if choose is not None and not callable(choose):
            raise TypeError(f"{name} must be a function (name, module) -> bool, got {choose!r}")


def _attach_linear_(model: nn.Module, where: Where | None, init: float | None) -> Gates:
    if init is not None and not (math.isfinite(init) and init != 0):
        raise ValueError(f"init must be a finite number other than 0, got {init!r}")
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    chosen: dict[str, _BatchNorm] = {}
    skipped: dict[str, str] = {}
    owner: dict[int, str] = {}
    for name, norm in norms.items():
        if where is not None and not where(name, norm):
            continue
        if not norm.affine:
            skipped[name] = "it has no scale (affine=False)"
        elif not norm.weight.requires_grad:
            skipped[name] = "its scale is frozen (requires_grad=False)"
        elif owner.setdefault(id(norm.weight), name) != name:
            skipped[name] = f"its scale is that of {owner[id(norm.weight)]}, which has gates"
        else:
            check_gate_fits(name, norm, "gate")
            chosen[name] = norm
    if not chosen:
        message = _nothing_to_gate(model, "BatchNorm", len(norms), skipped)
        raise ValueError(f"{message} Linear gates are BatchNorm scales: use kind='exponential' for a model without.")
    gates: dict[str, Gate] = {}
    for name, norm in chosen.items():
        untouched = bool((norm.weight == 1).all() and (norm.bias == 0).all())
        if init is not None or untouched:
            nn.init.constant_(norm.weight, 0.5 if init is None else init)
        gates[name] = LinearGate(norm)
        norm.register_module("gate", gates[name])
    return Gates("linear", gates, skipped)


def _group_names(groups: str | Sequence[str] | Listed | Coupled) -> tuple[str, ...]:
    """The kinds of groups that were asked for by name; none for groups of the user's own."""
    if isinstance(groups, (Mapping, Coupled)):
        return ()
    names = tuple(groups) if isinstance(groups, Iterable) and not isinstance(groups, str) else (groups,)
    for name in names or ("",):
        if name == COUPLED:
            raise ValueError("what is coupled shows when the model runs: pass groups=ng.coupled(model, example_inputs)")
        if name not in NAMES:
            raise ValueError(
                f"unknown groups {name!r}; choose from {', '.join(NAMES)}, or give a mapping of names to lists of "
                "(parameter name, axis, positions)"
            )
    return names


def _never(name: str, module: nn.Module) -> bool:
    return False


def _together(
    sites: list[Site], more: list[Site], families: list[Family], skipped: dict[str, str]
) -> tuple[list[Site], dict[str, str]]:
    """Channels and neurons without those that another choice has: neurons are channels, a branch has one gate."""
    skipped = {name: why for name, why in skipped.items() if name not in {site.name for site in more}}
    taken = {(site.layer, site.key) for site in sites}
    sites = [*sites, *(site for site in more if (site.layer, site.key) not in taken)]
    ends = {part.layer for family in families if family.label == "blocks" for part in family.parts}
    for site in sites:
        if site.key == "gate" and site.layer in ends:
            skipped = {**skipped, site.name: "it ends a residual branch, which has one gate"}
    return [site for site in sites if site.key != "gate" or site.layer not in ends], skipped


def _nothing_to_gate(model: nn.Module, what: str, found: int, skipped: dict[str, str]) -> str:
    reasons = "; ".join(f"{name or 'the model itself'}: {why}" for name, why in skipped.items())
    rest = f" Left out: {reasons}." if reasons else ""
    return f"nothing to gate in {type(model).__name__}: it has {found} x {what} and none was chosen.{rest}"


def _like_weights_of(layer: nn.Module, model: nn.Module, gate: Gate) -> None:
    """Put a gate where its layer is; float64 for a float64 layer, float32 for every other."""
    parameter = next(layer.parameters(), next(model.parameters(), None))
    if parameter is not None:
        gate.to(parameter.device, torch.float64 if parameter.dtype == torch.float64 else torch.float32)
