"""Pre-activation bottleneck ResNets for small images (He et al. 2016), with the paper's dropout."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class PreActBottleneck(nn.Module):
    """BN-ReLU-conv three times, 1x1 - 3x3 - 1x1, with dropout after the first BatchNorm."""

    def __init__(self, channels_in: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        channels_out = 4 * width
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.dropout = nn.Dropout(dropout)
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels_out, 1, bias=False)
        # The first block of a stage projects its activated input, the others add their input as it came.
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(F.relu(self.bn1(x)))
        kept = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(F.relu(self.bn2(y)))
        y = self.conv3(F.relu(self.bn3(y)))
        return y + kept  # type: ignore[no-any-return]


class PreActResNet(nn.Module):
    """A pre-activation ResNet of depth 9n + 2: three stages of width, 2 width and 4 width, times four at their ends."""

    def __init__(
        self, depth: int = 164, classes: int = 100, dropout: float = 0.1, channels: int = 3, width: int = 16
    ) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 9)
        if rest or blocks < 1:
            raise ValueError(f"depth must be 9n + 2 (11, 20, 29, ..., 164), got {depth}")
        if width < 1:
            raise ValueError(f"width must be 1 or more, got {width}")
        width_in = 16
        self.conv1 = nn.Conv2d(channels, width_in, 3, padding=1, bias=False)
        self.stages = nn.Sequential()
        for inner, stride in ((width, 1), (2 * width, 2), (4 * width, 2)):
            stage = nn.Sequential()
            for i in range(blocks):
                stage.append(PreActBottleneck(width_in, inner, stride if i == 0 else 1, dropout))
                width_in = 4 * inner
            self.stages.append(stage)
        self.bn = nn.BatchNorm2d(width_in)
        self.fc = nn.Linear(width_in, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stages(self.conv1(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def resnet164(classes: int = 100, dropout: float = 0.1, channels: int = 3) -> PreActResNet:
    """The paper's ResNet-164."""
    return PreActResNet(164, classes, dropout, channels)
