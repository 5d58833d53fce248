"""LeNet-5-Caffe, the paper's network for MNIST."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class LeNet5(nn.Module):
    """20-50-800-500: two 5x5 convolutions and two linear layers for images of 1 x 28 x 28.

    ``gate_inputs`` asks ``attach_gates_`` for gates on the 800 flattened features as well, the paper's third group.
    The paper trains it without biases: ``bias=False``. ``norm=True`` puts a BatchNorm behind each of the first three
    layers, for methods that live on its scales.
    """

    gate_inputs = ("fc1",)

    def __init__(self, classes: int = 10, bias: bool = True, norm: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5, bias=bias)
        self.bn1 = nn.BatchNorm2d(20) if norm else None
        self.conv2 = nn.Conv2d(20, 50, 5, bias=bias)
        self.bn2 = nn.BatchNorm2d(50) if norm else None
        self.fc1 = nn.Linear(800, 500, bias=bias)
        self.bn3 = nn.BatchNorm1d(500) if norm else None
        self.fc2 = nn.Linear(500, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(_normed(self.conv1(x), self.bn1)), 2)
        x = F.max_pool2d(F.relu(_normed(self.conv2(x), self.bn2)), 2)
        x = F.relu(_normed(self.fc1(x.flatten(1)), self.bn3))
        return self.fc2(x)  # type: ignore[no-any-return]


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)
