"""How large are ResNet-50 and MobileNetV2 on ImageNet, and what did the paper count?

Parameters and multiply-adds as ``ng.summarize`` counts them, and the sizes of what it leaves out: BatchNorm's channels
and elements, and the elements that pass a ReLU. Nothing is trained; the weights are random.

    python benchmarks/imagenet_sizes.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchvision
from _record import ROOT, about, write_json
from torch import nn

import narrowgate as ng

NETWORKS = ("resnet50", "mobilenet_v2")
OUT = ROOT / "results" / "imagenet" / "accounting.json"


def main(out: Path = OUT) -> None:
    networks = {name: sizes(getattr(torchvision.models, name)(weights=None)) for name in NETWORKS}
    what = "sizes of torchvision's networks at 224 x 224, 1000 classes"
    write_json(out, {"what": what, **about(), "networks": networks})
    print(networks)


def sizes(model: nn.Module) -> dict[str, int]:
    """What one image costs, and how much there is of what multiply-adds leave out."""
    image = torch.zeros(1, 3, 224, 224)
    summary = ng.summarize(model, image)
    counts = {"norm_channels": 0, "norm_elements": 0, "activation_elements": 0}

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, nn.BatchNorm2d):
            counts["norm_channels"] += module.num_features
            counts["norm_elements"] += output.numel()
        elif isinstance(module, (nn.ReLU, nn.ReLU6)):
            counts["activation_elements"] += output.numel()

    for module in model.modules():
        module.register_forward_hook(look)
    with torch.no_grad():
        model.eval()(image)
    return {"parameters": summary.parameters, "multiply_adds": summary.multiply_adds, **counts}


if __name__ == "__main__":
    main()
