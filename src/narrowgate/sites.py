"""Where gates go: which layers of a model can be narrowed, which are left alone and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from narrowgate.gates import GroupGate
from narrowgate.groups import Family, blocks_of, branch_ends_of, heads_of, last_of, neurons_of
from narrowgate.swap import (
    LEAVE_OUT,
    check_gate_fits,
    full_name,
    has_gated_class,
    has_lazy_weights,
    in_channels,
    is_conv1d,
    out_channels,
)

Where = Callable[[str, nn.Module], bool]
_BY_ATTENTION = "nn.MultiheadAttention uses its weight directly"
_FAST_PATH = "nn.TransformerEncoderLayer's fast path uses its weight directly"
_REMEDIES = {
    "neurons": "none of a known kind was chosen; name the layers that make them with groups='channels' and where=",
    "heads": "none of a known kind was chosen; list them as groups={name: [(parameter name, axis, positions), ...]}",
    "blocks": "none of a known kind was chosen; name the layers in which branches end with blocks=",
}
_TORCHVISIONS_SWIN = "torchvision.models.swin_transformer.ShiftedWindowAttention"


@dataclass(frozen=True)
class Site:
    """One gate to make: its layer, on which side of it, and for how many groups."""

    name: str
    layer: nn.Module
    key: Literal["gate", "gate_in"]
    size: int
    remedy: str = LEAVE_OUT
    """How to go without this gate."""

    @property
    def label(self) -> str:
        """What the gate is called: its layer's name, with ``.inputs`` for an input gate."""
        return f"{self.name}.inputs" if self.key == "gate_in" else self.name


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every convolution and linear layer of a model, by name; GPT-2's Conv1D is a linear one."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (_ConvNd, nn.Linear)) or is_conv1d(module)
    ]


def find_sites(
    model: nn.Module,
    where: Where | None,
    after_norm: bool,
    inputs: Where | None,
    blocks: Where | None,
    last: bool,
) -> tuple[list[Site], dict[str, str]]:
    """The gates to make, in the model's order, and why a layer was skipped; nothing is changed."""
    skipped: dict[str, str] = {}
    refused = refusals(model)
    followers = norms_to_gate(model) if after_norm else {}
    inputs = inputs or _inputs_named_in(model)
    layers = layers_of(model)
    sites: list[Site] = []
    for name, layer in layers:
        wants_inputs = inputs(name, layer)
        wants_outputs = where is None or where(name, layer)
        if name == layers[-1][0] and not last:
            skipped[name] = "the last layer, its outputs are the model's"
            wants_outputs = False
        if name in refused and (wants_inputs or wants_outputs):
            skipped[name] = refused[name]
            continue
        if wants_inputs:
            sites.append(Site(name, layer, "gate_in", in_channels(layer)))
        if wants_outputs:
            place, module = followers.get(name, (name, layer))
            remedy = LEAVE_OUT if module is layer else f"leave {name!r}, in front of it, out with where="
            sites.append(Site(place, module, "gate", out_channels(layer), remedy))
    if blocks is not None:
        sites += _block_sites(model, blocks, refused)
    return sites, skipped


def find_groups(
    model: nn.Module, names: tuple[str, ...], where: Where | None
) -> tuple[list[Site], list[Family], dict[str, str]]:
    """The gates to make for neurons, and the families of heads and blocks; why a layer was skipped."""
    skipped: dict[str, str] = {}
    refused = refusals(model)

    def chosen(name: str, layer: nn.Module) -> bool:
        if where is not None and not where(name, layer):
            return False
        why = refused.get(name, "")
        served = why.startswith(_FAST_PATH) and may_be_kept_called(model, name)
        if served or (why == _BY_ATTENTION and reader_of(model, name) is not None):
            why = ""
        elif not why and not has_gated_class(layer):
            why = f"a gate can't go into the weight of a {type(layer).__name__}"
        if why:
            skipped[name] = why
        return not why

    neurons = dict(neurons_of(model)) if "neurons" in names else {}
    sites = [Site(name, layer, "gate", out_channels(layer)) for name, layer in neurons.items() if chosen(name, layer)]
    found_heads = heads_of(model) if "heads" in names else ()
    heads = [family for family in found_heads if chosen(family.parts[0].name, family.parts[0].layer)]
    ends = [end for end in branch_ends_of(model) if chosen(*end)] if "blocks" in names else []
    for kind, found in (("neurons", sites), ("heads", heads), ("blocks", ends)):
        if kind in names and not found:
            reasons = "; ".join(f"{name}: {why}" for name, why in skipped.items())
            rest = f" Left out: {reasons}." if reasons else ""
            raise ValueError(f"no {kind} to gate in {type(model).__name__}: {_REMEDIES[kind]}.{rest}")
    return sites, [*heads, *([blocks_of(ends)] if ends else [])], skipped


def reader_of(model: nn.Module, name: str) -> nn.MultiheadAttention | None:
    """The attention that reads the weight of this layer instead of calling it, if gates can serve that."""
    parent, _, key = name.rpartition(".")
    module = model.get_submodule(parent)
    if key != "out_proj" or not isinstance(module, nn.MultiheadAttention):
        return None
    return module if type(module).forward is nn.MultiheadAttention.forward else None


def may_be_kept_called(model: nn.Module, name: str) -> bool:
    """Whether this layer makes the neurons of an nn.TransformerEncoderLayer that a hook keeps from its fast path."""
    parent, _, key = name.rpartition(".")
    return key == "linear1" and is_own_encoder_layer(model.get_submodule(parent))


def is_own_encoder_layer(module: nn.Module) -> bool:
    """Whether this is an nn.TransformerEncoderLayer with PyTorch's own forward."""
    return getattr(type(module), "forward", None) is nn.TransformerEncoderLayer.forward


def check_families(model: nn.Module, families: list[Family], sites: list[Site], kind: str, keep_function: bool) -> None:
    """Raise if a family's gate can't go where it should, before anything is touched."""
    seen = {(site.layer, site.key) for site in sites}
    refused = refusals(model) if families else {}
    labels = {module.label for module in model.modules() if isinstance(module, GroupGate)}
    for family in families:
        if family.label in labels:
            raise ValueError(f"this model has gates called {family.label!r} already; choose all of them in one call")
        for part in family.parts:
            if part.name in refused and reader_of(model, part.name) is None:
                raise ValueError(f"layer {part.name!r} can't have a gate: {refused[part.name]}")
            if (part.layer, part.key) in seen:
                raise ValueError(f"layer {part.name!r} was chosen for two gates; leave it out with where=")
            seen.add((part.layer, part.key))
            check_gate_fits(part.name, part.layer, part.key, keep_function)
        uses = Counter(number for part in family.parts for number in set(part.numbers) - {-1})
        if kind == "hard-concrete" and (several := [number for number, count in uses.items() if count > 1]):
            raise ValueError(
                f"group {family.names[several[0]]!r} has parts in several places, each of which would draw a "
                "hard-concrete gate of its own; use kind='exponential'"
            )


def check_sites(sites: list[Site], keep_function: bool) -> None:
    """Raise if a gate can't go where it should, before anything is touched."""
    seen: set[tuple[nn.Module, str]] = set()
    for site in sites:
        if (site.layer, site.key) in seen:
            remedy = next(other.remedy for other in sites if (other.layer, other.key) == (site.layer, site.key))
            raise ValueError(f"layer {site.name!r} was chosen for two gates; {remedy}")
        seen.add((site.layer, site.key))
        check_gate_fits(site.name, site.layer, site.key, keep_function, site.remedy)


def refusals(model: nn.Module) -> dict[str, str]:
    """Layers whose gate would not do what it says: weights used without the layer, or shared with another one."""
    refused: dict[str, str] = {}
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.MultiheadAttention):
            refused[prefix + "out_proj"] = _BY_ATTENTION
        if full_name(type(module)) == _TORCHVISIONS_SWIN:
            for key in ("qkv", "proj"):
                refused[prefix + key] = f"{type(module).__name__} hands its weight to a function"
        if isinstance(module, nn.TransformerEncoderLayer):
            for key in ("linear1", "linear2"):
                refused[prefix + key] = _FAST_PATH
            if is_own_encoder_layer(module):
                refused[prefix + "linear1"] = f"{_FAST_PATH}; groups='neurons' does without that path"
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            others = ", ".join(other for other in names if other != name)
            refused[name] = f"its weight is shared with {others or 'itself'}, which a gate would split"
    return refused


def norms_to_gate(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """The norms that take the gates of the layers in front of them, by those layers' names.

    Not one whose scale is another's too, which would take that one's gate into both: its layer is gated itself.
    """
    refused = refusals(model)
    return {name: norm for name, norm in norms_that_follow(model).items() if norm[0] not in refused}


def norms_that_follow(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """The BatchNorm registered directly behind a layer, in the same module and of the same width, by the layer's name.

    Not across modules: in a pre-activation network the norm of the next block normalises a sum, not this layer.
    """
    pairs: dict[str, tuple[str, nn.Module]] = {}
    for parent_name, parent in model.named_modules():
        prefix = f"{parent_name}." if parent_name else ""
        children = list(parent.named_children())
        for (name, layer), (norm_name, norm) in pairwise(children):
            if not isinstance(layer, (_ConvNd, nn.Linear)) or not isinstance(norm, _BatchNorm):
                continue
            if not norm.affine or has_lazy_weights(norm):
                continue
            # One that picks, of a small model in the scatter layout, gives out fewer channels than it reads.
            if len(norm.weight) == norm.num_features == out_channels(layer):
                pairs[prefix + name] = (prefix + norm_name, norm)
    return pairs


def _inputs_named_in(model: nn.Module) -> Where:
    """The choice a model makes itself: the layers it (or a part of it) names in ``gate_inputs``."""
    chosen = {
        f"{name}.{layer}" if name else layer
        for name, module in model.named_modules()
        for layer in getattr(module, "gate_inputs", ())
    }
    return lambda name, layer: name in chosen


def _block_sites(model: nn.Module, blocks: Where, refused: dict[str, str]) -> list[Site]:
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    sites: list[Site] = []
    for name, module in model.named_modules():
        if not name or not blocks(name, module):
            continue
        name, module = last_of(name, module)  # a layer's gate can be merged
        if uses[module] > 1:
            raise ValueError(f"block {name!r} is used in several places, and a gate would act on all of them")
        if name in refused:
            raise ValueError(f"block {name!r} can't have a gate: {refused[name]}")
        sites.append(Site(name, module, "gate", 1, "leave it out with blocks="))
    if not sites:
        raise ValueError("blocks= chose no module; it is called with each module's name and the module")
    return sites
