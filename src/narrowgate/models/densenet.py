"""DenseNets for small images (Huang et al. 2017), without bottlenecks or compression, with the paper's dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DenseLayer(nn.Module):
    """BN-ReLU-conv 3x3 and dropout; its output is appended to its input."""

    def __init__(self, channels_in: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels_in)
        self.conv = nn.Conv2d(channels_in, growth, 3, padding=1, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.dropout(self.conv(F.relu(self.bn(x))))], 1)


class Transition(nn.Module):
    """BN-ReLU-conv 1x1 as wide as its input, and average pooling that halves the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """A DenseNet of depth 3n + 4: three dense blocks of n layers, two transitions between them."""

    def __init__(
        self, depth: int = 40, growth: int = 12, classes: int = 100, dropout: float = 0.05, channels: int = 3
    ) -> None:
        super().__init__()
        layers, rest = divmod(depth - 4, 3)
        if rest or layers < 1:
            raise ValueError(f"depth must be 3n + 4 (7, 10, 13, ..., 40), got {depth}")
        width = 2 * growth
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        for number in range(3):
            if number:
                self.blocks.append(Transition(width))
            block = nn.Sequential()
            for _ in range(layers):
                block.append(DenseLayer(width, growth, dropout))
                width += growth
            self.blocks.append(block)
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def densenet40(classes: int = 100, dropout: float = 0.05, channels: int = 3) -> DenseNet:
    """The paper's DenseNet-40 with a growth of 12; it gates every convolution but ``conv1``."""
    return DenseNet(40, 12, classes, dropout, channels)
