"""Group lasso by proximal steps, with narrowgate's removal: filters shrink to zero, these go, then on without it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5
from narrowgate.rivals.filters import filters_of


def train(images: Tensor, labels: Tensor, epochs: int, strength: float = 2e-3) -> nn.Module:
    model = LeNet5()
    penalty = ng.Penalty(filters_of(model, order=2), "l1", strength)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        if epoch == epochs // 2:
            model = ng.compact(model, ng.plan(model, images[:2]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for x, y in zip(images.split(128), labels.split(128), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if epoch < epochs // 2:
                penalty.proximal_(0.05 / (1 - 0.9))
    return model.eval()
