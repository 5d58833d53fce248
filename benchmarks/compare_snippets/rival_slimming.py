"""Network slimming, by narrowgate: l1 on BatchNorm's scales, the smallest of all layers removed, then on without it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5
from narrowgate.train.ranking import close_smallest_


def train(images: Tensor, labels: Tensor, epochs: int, share: float = 0.8) -> nn.Module:
    model = LeNet5(norm=True)
    gates = ng.attach_gates_(model, "linear", init=0.5)
    penalty = ng.Penalty(gates, "l1", 1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        if epoch == epochs // 2:
            close_smallest_(gates, share)
            model = ng.compact(model, ng.plan(model, images[:2]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for x, y in zip(images.split(128), labels.split(128), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            if epoch < epochs // 2:
                loss = loss + penalty()
            loss.backward()
            optimizer.step()
    return model.eval()
