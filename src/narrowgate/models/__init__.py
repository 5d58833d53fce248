"""The paper's networks, and ``build`` for any network by name."""

from narrowgate.models.densenet import DenseNet, densenet40
from narrowgate.models.lenet import LeNet5
from narrowgate.models.mobilenet import MobileNetV2, mobilenetv2
from narrowgate.models.registry import ModelError, build, names
from narrowgate.models.resnet import PreActResNet, resnet164

__all__ = [
    "DenseNet",
    "LeNet5",
    "MobileNetV2",
    "ModelError",
    "PreActResNet",
    "build",
    "densenet40",
    "mobilenetv2",
    "names",
    "resnet164",
]
