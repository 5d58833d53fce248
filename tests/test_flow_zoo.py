"""Models that people use: half of all filters closed at random, random statistics, and still the same function."""

import pytest
import torch
from flow_helpers import assert_alive, count, mixing_layers, prepare_, relative_error
from torch import nn

import narrowgate as ng
from narrowgate.flow.plan import LAYOUTS

torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

# Name, image size, and the share of parameters that at most may be left in the aligned layout.
TORCHVISION = [
    ("resnet18", 64, 0.8),
    ("mobilenet_v2", 64, 0.6),
    ("densenet121", 64, 0.5),
    ("shufflenet_v2_x0_5", 64, 0.9),
    ("efficientnet_b0", 64, 0.7),
    ("googlenet", 96, 0.9),
    ("convnext_tiny", 64, 0.9),
    ("swin_t", 64, 0.9),
    ("squeezenet1_1", 64, 0.6),
    ("regnet_y_400mf", 64, 0.9),
]
TIMM = [
    ("ghostnet_050", 64, 0.9),
    ("hrnet_w18_small", 64, 0.9),
    ("vit_tiny_patch16_224", 224, 0.9),
]


def build(name, library):
    if library == "timm":
        return timm.create_model(name, num_classes=10)
    options = {"init_weights": False, "aux_logits": True} if name == "googlenet" else {}
    return torchvision.models.get_model(name, num_classes=10, **options)


@torch.no_grad()
def prepared(name, library, size):
    """The model with live statistics; heads and layer scales that start at zero get numbers."""
    model = build(name, library)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
        elif "layer_scale" in key or key.endswith("gamma"):
            nn.init.uniform_(parameter, 0.5, 1)
    last = list(mixing_layers(model))[-1]
    return prepare_(model, torch.randn(4, 3, size, size, dtype=torch.float64), share=0.5, keep=[last])


CASES = [(*case, "torchvision") for case in TORCHVISION] + [(*case, "timm") for case in TIMM]


@pytest.mark.parametrize(("name", "size", "share", "library"), CASES, ids=[case[0] for case in CASES])
def test_same_function(name, size, share, library):
    model = prepared(name, library, size)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    assert_alive(model, x)
    sizes = {}
    for layout in LAYOUTS:
        plan = ng.plan(model, x, layout=layout)
        small = ng.compact(model, plan)
        error, noise = relative_error(model, small, x)
        assert error <= max(1e-9, 100 * noise), f"{layout}: off by {error:.1e}, noise {noise:.1e}"
        sizes[layout] = count(small)
    assert sizes["scatter"] <= sizes["aligned"] < share * count(model)
