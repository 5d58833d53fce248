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

from narrowgate.swap import check_gate_fits, has_lazy_weights, in_channels, out_channels

Where = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Site:
    """One gate to make: its layer, on which side of it, and for how many groups."""

    name: str
    layer: nn.Module
    key: Literal["gate", "gate_in"]
    size: int

    @property
    def label(self) -> str:
        """What the gate is called: its layer's name, with ``.inputs`` for an input gate."""
        return f"{self.name}.inputs" if self.key == "gate_in" else self.name


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every convolution and linear layer of a model, by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, (_ConvNd, nn.Linear))]


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
    refused = _refusals(model)
    followers = _norms_that_follow(model) if after_norm else {}
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
            sites.append(Site(place, module, "gate", out_channels(layer)))
    if blocks is not None:
        sites += _block_sites(model, blocks, refused)
    return sites, skipped


def check_sites(sites: list[Site], keep_function: bool) -> None:
    """Raise if a gate can't go where it should, before anything is touched."""
    seen: set[tuple[nn.Module, str]] = set()
    for site in sites:
        if (site.layer, site.key) in seen:
            raise ValueError(f"layer {site.name!r} was chosen for two gates; leave it out with where=")
        seen.add((site.layer, site.key))
        check_gate_fits(site.name, site.layer, site.key, keep_function)


def _refusals(model: nn.Module) -> dict[str, str]:
    """Layers whose gate would not do what it says: weights used without the layer, or shared with another one."""
    refused: dict[str, str] = {}
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.MultiheadAttention):
            refused[prefix + "out_proj"] = "nn.MultiheadAttention uses its weight directly"
        if isinstance(module, nn.TransformerEncoderLayer):
            for key in ("linear1", "linear2"):
                refused[prefix + key] = "nn.TransformerEncoderLayer's fast path uses its weight directly"
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            others = ", ".join(other for other in names if other != name)
            refused[name] = f"its weight is shared with {others or 'itself'}, which a gate would split"
    return refused


def _norms_that_follow(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
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
            if norm.affine and not has_lazy_weights(norm) and norm.num_features == out_channels(layer):
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
        # What a plain nn.Sequential returns is what its last child returns, and a layer's gate can be merged.
        while type(module).forward is nn.Sequential.forward and len(module._modules):
            last, child = list(module._modules.items())[-1]
            if child is None:
                break
            name, module = f"{name}.{last}", child
        if uses[module] > 1:
            raise ValueError(f"block {name!r} is used in several places, and a gate would act on all of them")
        if name in refused:
            raise ValueError(f"block {name!r} can't have a gate: {refused[name]}")
        sites.append(Site(name, module, "gate", 1))
    if not sites:
        raise ValueError("blocks= chose no module; it is called with each module's name and the module")
    return sites
