"""Torch-Pruning with a rule of ours: a channel goes if its filters are zero in every layer coupled with it."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import torch
from _zeroed import mixers
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

try:
    import torch_pruning as tp
except ImportError:
    tp = None


def require(otherwise: str) -> None:
    """End with an explanation if the package is missing."""
    if tp is None:
        sys.exit(f"this benchmark compares with Torch-Pruning: pip install torch-pruning, or give {otherwise}")


def version() -> str | None:
    """Torch-Pruning's version, None without it; a folder of it on the path knows less exactly than a package."""
    import importlib.metadata

    try:
        return None if tp is None else importlib.metadata.version("torch-pruning")
    except importlib.metadata.PackageNotFoundError:
        return str(tp.__version__)


def graph_of(model: nn.Module, example: Tensor) -> Any:
    """Its dependency graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tp.DependencyGraph().build_dependency(model, example_inputs=example, verbose=False)


def without_dead_channels(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy without the channels whose filters are zero in every coupled layer; at least one of each group stays."""
    small = copy.deepcopy(model)
    for parameter in small.parameters():
        parameter.requires_grad_(True)
    graph = graph_of(small, example)
    last = list(mixers(small).values())[-1]
    groups = list(graph.get_all_groups(ignored_layers=[last]))
    doomed = [(group[0].dep.target.module, group[0].dep.handler, _dead_channels(graph, group)) for group in groups]
    for module, function, channels in doomed:
        if channels:
            graph.get_pruning_group(module, function, channels).prune()
    return small.eval()


def _dead_channels(graph: Any, group: Any) -> list[int]:
    """Channels of a group's root that are zero in all layers which write to them."""
    alive: dict[int, bool] = {}
    for item in group.items:
        layer = item.dep.target.module
        if not isinstance(layer, (_ConvNd, nn.Linear)) or not graph.is_out_channel_pruning_fn(item.dep.handler):
            continue
        rows = layer.weight.detach().flatten(1).ne(0).any(1)
        if layer.bias is not None:
            rows = rows | layer.bias.detach().ne(0)
        for index, root in zip(item.idxs, item.root_idxs, strict=True):
            alive[root] = alive.get(root, False) or bool(rows[index])
    dead = [root for root, living in sorted(alive.items()) if not living]
    return dead[1:] if len(dead) == len(alive) else dead


def prune_by_magnitude(model: nn.Module, example: Tensor) -> nn.Module:
    """Half of all channels gone, with the settings of its own example for torchvision; in place."""
    from torchvision.models.vision_transformer import VisionTransformer

    ignored = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == 1000]
    vit = isinstance(model, VisionTransformer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner = tp.pruner.MagnitudePruner(
            model,
            example_inputs=example,
            importance=tp.importance.MagnitudeImportance(p=1),
            iterative_steps=1,
            pruning_ratio=0.5,
            global_pruning=False,
            round_to=model.encoder.layers[0].num_heads if vit else None,
            ignored_layers=ignored,
        )
        pruner.step()
    if vit:  # its forward reads this number
        model.hidden_dim = model.conv_proj.out_channels
    return model


@torch.no_grad()
def relative_l2(wanted: Tensor, got: Tensor) -> float:
    """The length of the difference over the length of what was wanted."""
    return float((wanted - got).norm() / wanted.norm())
