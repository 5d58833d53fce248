"""A share of every layer's channels set to zero, for a look at what pruning would buy before anything is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from narrowgate.sites import find_sites
from narrowgate.swap import is_conv1d


@torch.no_grad()
def zero_channels_(model: nn.Module, share: float) -> None:
    """Zero this share of the output channels of every layer that would get a gate, in place.

    The same places, evenly spread, in layers of the same width: channels of a residual stream go as a whole, and the
    groups of a grouped convolution keep equal sizes. The others grow, so that signals keep their size: vanishing ones
    would become denormal numbers, with which a CPU is slow.
    """
    if not 0 <= share < 1:
        raise ValueError(f"the share of channels to zero must be at least 0 and below 1, got {share}")
    sites, _ = find_sites(model, None, False, None, None, False)
    for site in sites:
        if site.key != "gate":
            continue
        weight, bias = site.layer.weight, site.layer.bias
        assert isinstance(weight, Tensor)
        dead = _evenly(site.size, share).to(weight.device)
        weight.mul_((1 - share) ** -0.5)
        if isinstance(site.layer, _ConvTransposeNd):  # (in, out / groups, ...), output channels group by group
            width = weight.shape[1]
            weight.view(site.layer.groups, -1, *weight.shape[1:])[dead // width, :, dead % width] = 0.0
        else:
            weight.index_fill_(int(is_conv1d(site.layer)), dead, 0.0)
        if isinstance(bias, Tensor):
            bias.index_fill_(0, dead, 0.0)


def _evenly(size: int, share: float) -> Tensor:
    """Positions, evenly spread; the first never is one of them, so that no layer is empty."""
    steps = (torch.arange(size + 1, dtype=torch.float64) * share + 1e-9).floor()
    return torch.nonzero(steps.diff() > 0).reshape(-1)
