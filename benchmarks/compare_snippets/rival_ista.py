"""ISTA on BatchNorm's scales, by narrowgate: a soft threshold after each step, weighted by what a channel costs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5
from narrowgate.rivals.wiring import memory_weights


def train(images: Tensor, labels: Tensor, epochs: int, strength: float = 1e-3) -> nn.Module:
    model = LeNet5(norm=True)
    weights = memory_weights(model, images[:2])
    gates = ng.attach_gates_(model, "linear", init=1.0)
    penalty = ng.Penalty(gates, "l1", strength, weights=weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for x, y in zip(images.split(128), labels.split(128), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            penalty.proximal_(0.05 / (1 - 0.9))
    return ng.compact(model.eval(), ng.plan(model, images[:2]))
