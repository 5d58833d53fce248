"""Torch-Pruning: train, cut a share of every layer's channels, train on."""

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgate.models import LeNet5


def train(images: Tensor, labels: Tensor, epochs: int, ratio: float = 0.8) -> nn.Module:
    model = LeNet5()
    pruner = tp.pruner.BasePruner(
        model,
        images[:2],
        importance=tp.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=ratio,
        ignored_layers=[model.fc2],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(epochs):
        if epoch == epochs // 2:
            pruner.step()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for x, y in zip(images.split(128), labels.split(128), strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return model.eval()
