"""Filters as groups by their norm, for group lasso (Wen et al. 2016) and pruning by magnitude (Li et al. 2017).

They are no layers of their own: a group is a part of a layer's weight, and its norm stands where a gate's number would.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgate.gates import Gate
from narrowgate.gateset import Gates
from narrowgate.sites import Site, Where, find_sites
from narrowgate.swap import MAKE_ORDINARY, has_lazy_weights, is_conv1d


class FilterGate(Gate):
    """The norms of a layer's filters, or of its input columns; closing one sets its weights to zero.

    With a filter goes its bias, and scale and shift of the BatchNorm that ``follows`` directly: its map is zero then.
    """

    def __init__(self, site: Site, order: int, follows: nn.Module | None) -> None:
        super().__init__()
        self.kind = f"filter-l{order}"
        self._order = order
        # Not submodules: the model owns its layers.
        self.__dict__["layer"], self.__dict__["follows"] = site.layer, follows
        transposed = bool(getattr(site.layer, "transposed", False)) or is_conv1d(site.layer)
        self._axis = int(transposed) if site.key == "gate" else int(not transposed)
        self._outputs = site.key == "gate"
        # Of a transposed convolution, output channels run group by group: each group's inputs make their own.
        self._groups = int(getattr(site.layer, "groups", 1)) if transposed and self._outputs else 1

    @property
    def weight(self) -> Tensor:
        """The weight whose parts are the groups."""
        return cast(Tensor, self.__dict__["layer"].weight)

    @property
    def g(self) -> Tensor:  # type: ignore[override]
        split = self._split(self.weight)
        others = [axis for axis in range(split.dim()) if axis not in (0, self._axis + 1)]
        norms: Tensor = torch.linalg.vector_norm(split, self._order, dim=others)
        return norms.reshape(-1)

    @property
    def learns(self) -> bool:
        return self.weight.requires_grad

    @property
    def size(self) -> int:
        return self._groups * self.weight.shape[self._axis]

    def value(self) -> Tensor:
        return self.g

    @torch.no_grad()
    def scale_(self, factor: Tensor) -> None:
        """Multiply each group's weights by its factor."""
        split = self._split(self.weight)
        shape = [-1 if axis == self._axis + 1 else 1 for axis in range(split.dim())]
        split.mul_(factor.to(split).view(self._groups, *shape[1:]))

    def _split(self, weight: Tensor) -> Tensor:
        """A weight with an axis of its groups before the others; a view."""
        return weight.view(self._groups, -1, *weight.shape[1:])

    @torch.no_grad()
    def close_(self, mask: Tensor) -> None:
        self.scale_((~mask).to(self.weight.dtype))
        if not self._outputs:
            return
        with_it = [self.__dict__["layer"].bias]
        if (norm := self.__dict__["follows"]) is not None:
            with_it += [norm.weight, norm.bias]
        for tensor in with_it:
            if tensor is not None:
                tensor.masked_fill_(mask, 0.0)

    def open_least_closed_(self) -> int:
        raise ValueError("a filter that was set to zero can't be opened again: its weights are gone")


class Filters(Gates):
    """The filters of a model as gates that are not in it; ``parameters()`` are the weights they are made of."""

    def parameters(self) -> list[Tensor]:
        """The weights, each once, for an optimizer group of their own."""
        return list({id(gate.weight): gate.weight for gate in self._filters()}.values())

    def flat(self) -> Tensor:
        """All norms as one vector, on the first one's device."""
        return torch.cat([gate.g.to(self._filters()[0].weight.device) for gate in self._filters()])

    @torch.no_grad()
    def assign_(self, flat: Tensor) -> None:
        """Scale every group by the ratio of the norm given to the one it has; one of norm 0 stays 0.

        A weight that is both in a filter and in an input column is multiplied by both ratios.
        """
        pieces = torch.split(flat, [gate.size for gate in self.modules()])
        factors = [_ratio(new, gate.g) for gate, new in zip(self._filters(), pieces, strict=True)]  # before any changes
        for gate, factor in zip(self._filters(), factors, strict=True):
            gate.scale_(factor)

    def _filters(self) -> list[FilterGate]:
        return cast("list[FilterGate]", self.modules())


def _ratio(new: Tensor, old: Tensor) -> Tensor:
    return torch.where(old > 0, new.to(old) / old, torch.zeros_like(old))


def filters_of(model: nn.Module, order: int, where: Where | None = None, inputs: Where | None = None) -> Filters:
    """The filters of every convolution and linear layer but the last, measured by their l1 or l2 norm.

    Args:
        order: 1 or 2.
        where: ``(name, layer) -> bool`` narrows the choice.
        inputs: layers whose input columns are groups as well. By default those a model names in ``gate_inputs``.
    """
    if order not in (1, 2):
        raise ValueError(f"filters are measured by their l1 or l2 norm: order is 1 or 2, got {order!r}")
    sites, skipped = find_sites(model, where, False, inputs, None, False)
    behind, _ = find_sites(model, where, True, inputs, None, False)  # the same, but for the norms that follow
    if not sites:
        raise ValueError(f"{type(model).__name__} has no convolution or linear layer whose filters could be pruned")
    uses = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    gates: dict[str, Gate] = {}
    for site, other in zip(sites, behind, strict=True):
        _check_fits(site)
        # A norm that has two names may follow other filters too, which stay.
        norm = other.layer if isinstance(other.layer, _BatchNorm) and uses[other.layer] == 1 else None
        gates[site.label] = FilterGate(site, order, norm)
    return Filters(f"filter-l{order}", gates, skipped)


def _check_fits(site: Site) -> None:
    """Raise if a layer's filters or input columns can't be set to zero where they are."""
    if has_lazy_weights(site.layer):
        raise ValueError(f"layer {site.name!r} has no weights yet; run the model once on an example before")
    if "weight" not in site.layer._parameters:
        raise ValueError(
            f"the weight of layer {site.name!r} is computed, as by weight_norm, spectral_norm or prune, and would be "
            f"computed anew after filters were set to zero: {MAKE_ORDINARY}, or leave the layer out with where="
        )
    if site.key == "gate_in" and getattr(site.layer, "groups", 1) != 1:
        raise ValueError(
            f"layer {site.name!r} has groups={site.layer.groups}: its columns serve several inputs each; leave it out "
            "with inputs=, its inputs are the filters of the layer before"
        )
