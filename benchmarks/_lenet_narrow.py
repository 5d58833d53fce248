"""Cutting a trained LeNet-5 down to what its gates kept.

Where a gate is closed, weight and bias are zero and so is the channel after ReLU and pooling: nothing but zeros goes.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5

GROUPS = ("conv1", "conv2", "features", "fc1")
FEATURES_PER_CHANNEL = 16


def open_gates(gates: ng.Gates) -> dict[str, Tensor]:
    """Which gates are open, by group."""
    values = gates.values()
    return {group: values["fc1.inputs" if group == "features" else group] != 0 for group in GROUPS}


def kept(gates: ng.Gates) -> dict[str, Tensor]:
    """Which groups stay: a feature needs its own gate and its channel's, a conv2 channel at least one such feature."""
    groups = open_gates(gates)
    features = groups["features"].view(-1, FEATURES_PER_CHANNEL) & groups["conv2"][:, None]
    return groups | {"conv2": features.any(1), "features": features.flatten()}


def parameters_left(conv1: int, conv2: int, features: int, fc1: int) -> int:
    """Weights and biases of a LeNet-5 of these widths; gates are merged into them and don't count."""
    return (25 * conv1 + conv1) + (25 * conv1 * conv2 + conv2) + (features * fc1 + fc1) + (10 * fc1 + 10)


class NarrowLeNet5(nn.Module):
    """A LeNet-5 without gates, cut to the groups that stay: an ordinary network but for the picking of features."""

    def __init__(self, model: LeNet5, groups: dict[str, Tensor]) -> None:
        super().__init__()
        whole = ng.merge_gates_(copy.deepcopy(model))
        conv1, conv2, features, fc1 = (groups[name].nonzero().flatten() for name in GROUPS)
        self.conv1 = _like(whole.conv1, whole.conv1.weight[conv1], whole.conv1.bias[conv1])
        self.conv2 = _like(whole.conv2, whole.conv2.weight[conv2][:, conv1], whole.conv2.bias[conv2])
        self.fc1 = _like(whole.fc1, whole.fc1.weight[fc1][:, features], whole.fc1.bias[fc1])
        self.fc2 = _like(whole.fc2, whole.fc2.weight[:, fc1], whole.fc2.bias)
        in_kept_channels = groups["features"].view(-1, FEATURES_PER_CHANNEL)[conv2].flatten()
        self.register_buffer("picked", in_kept_channels.nonzero().flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1).index_select(1, self.picked)))
        return self.fc2(x)


def _like(layer: nn.Module, weight: Tensor, bias: Tensor) -> nn.Module:
    """A new layer of the same type that holds these weights."""
    if isinstance(layer, nn.Conv2d):
        new: nn.Module = nn.Conv2d(weight.shape[1], weight.shape[0], layer.kernel_size)
    else:
        new = nn.Linear(weight.shape[1], weight.shape[0])
    new.weight, new.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    return new
