"""MobileNetV2 (Sandler et al. 2018) for images of 32 x 32, as the paper has changed it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

# Expansion, channels, blocks and stride of each stage; for ImageNet the second one has stride 2.
_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_LAST = 1280


class ConvNorm(nn.Module):
    """A convolution, its BatchNorm, and ReLU6 if ``active``."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1, active: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(channels_out)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        return F.relu6(x) if self.active else x


class InvertedResidual(nn.Module):
    """1x1 to widen, depthwise 3x3, 1x1 to narrow without activation; added to the input where shapes allow."""

    def __init__(self, channels_in: int, channels_out: int, expansion: int, stride: int) -> None:
        super().__init__()
        width = channels_in * expansion
        self.expand: nn.Module = nn.Identity()
        if expansion != 1:
            self.expand = ConvNorm(channels_in, width, 1)
        self.depthwise = ConvNorm(width, width, 3, stride, groups=width)
        self.project = ConvNorm(width, channels_out, 1, active=False)
        self.adds = stride == 1 and channels_in == channels_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return x + y if self.adds else y


class MobileNetV2(nn.Module):
    """The paper's MobileNetV2 for CIFAR: images of 32 x 32 end as 4 x 4, are averaged, dropped out and classified."""

    def __init__(self, classes: int = 100, dropout: float = 0.3, channels: int = 3) -> None:
        super().__init__()
        width = 32
        self.first = ConvNorm(channels, width, 3)
        self.stages = nn.Sequential()
        for expansion, channels_out, blocks, stride in _STAGES:
            stage = nn.Sequential()
            for i in range(blocks):
                stage.append(InvertedResidual(width, channels_out, expansion, stride if i == 0 else 1))
                width = channels_out
            self.stages.append(stage)
        self.last = ConvNorm(width, _LAST, 1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(_LAST, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.stages(self.first(x)))
        return self.fc(self.dropout(x.mean((2, 3))))  # type: ignore[no-any-return]


def mobilenetv2(classes: int = 100, dropout: float = 0.3, channels: int = 3) -> MobileNetV2:
    """The paper's MobileNetV2 for CIFAR."""
    return MobileNetV2(classes, dropout, channels)
