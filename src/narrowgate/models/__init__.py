"""The paper's networks."""

from narrowgate.models.lenet import LeNet5
from narrowgate.models.resnet import PreActResNet, resnet164

__all__ = ["LeNet5", "PreActResNet", "resnet164"]
