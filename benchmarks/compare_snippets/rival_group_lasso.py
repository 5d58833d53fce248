"""Group lasso, with narrowgate's removal: norms of filters in the loss, small ones removed, then on without it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5
from narrowgate.rivals.filters import filters_of


def train(images: Tensor, labels: Tensor, epochs: int, strength: float = 2e-3, threshold: float = 1e-2) -> nn.Module:
    model = LeNet5()
    filters = filters_of(model, order=2)
    penalty = ng.Penalty(filters, "l1", strength)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        if epoch == epochs // 2:
            filters.close_below_(threshold)
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
