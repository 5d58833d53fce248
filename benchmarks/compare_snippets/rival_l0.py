"""L0 with hard-concrete gates, by narrowgate."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5


def train(images: Tensor, labels: Tensor, epochs: int, strength: float = 1e-3) -> nn.Module:
    model = LeNet5()
    gates = ng.attach_gates_(model, "hard-concrete")
    penalty = ng.Penalty(gates, "l0", strength)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(epochs):
        for x, y in zip(images.split(128), labels.split(128), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + penalty()
            loss.backward()
            optimizer.step()
    return ng.compact(model.eval(), ng.plan(model, images[:2]))
