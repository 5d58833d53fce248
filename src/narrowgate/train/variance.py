"""Dropout in front of a BatchNorm: the running variance holds its noise, which is gone when the network is used.

Li et al. 2019, "Understanding the Disharmony between Dropout and Batch Normalization by Variance Shift".
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.fx import Node

from narrowgate.flow.trace import layer_of, op_name, trace
from narrowgate.flow.ungated import ungated

_DROPOUTS = frozenset("dropout feature_dropout alpha_dropout feature_alpha_dropout".split())


def dropouts_before_norms(model: nn.Module, example: Tensor) -> dict[str, str]:
    """Each layer with a dropout whose noise reaches a BatchNorm, and the first such norm, both by name.

    Raises ``TraceError`` where the model can't be traced.
    """
    found: dict[str, str] = {}
    noise: dict[Node, dict[str, None]] = {}  # the dropouts that each result depends on, in order
    for node in trace(ungated(model), example).nodes:  # as in use, where both are operations like any other
        noise[node] = {layer: None for source in node.all_input_nodes for layer in noise[source]}
        if _is_off(node):
            noise[node][layer_of(node)] = None
        elif _reads_running_variance(node):
            for layer in noise[node]:
                found.setdefault(layer, layer_of(node))
    return found


def _is_off(node: Node) -> bool:
    """Whether this is a dropout that does something in training only."""
    if op_name(node).rstrip("_") not in _DROPOUTS:
        return False
    _, share, on = node.args
    return bool(share) and not on


def _reads_running_variance(node: Node) -> bool:
    return op_name(node) == "batch_norm" and node.args[4] is not None and not node.args[5]
