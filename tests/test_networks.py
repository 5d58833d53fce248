"""DenseNet-40 and MobileNetV2 as the paper has them: sizes, shapes, dropouts, gates, and what removal makes of them."""

import pytest
import torch
from helpers import spread_gates_
from torch import nn

import narrowgate as ng
from narrowgate.models import DenseNet, MobileNetV2, densenet40, mobilenetv2
from narrowgate.models.densenet import DenseLayer, Transition
from narrowgate.models.mobilenet import InvertedResidual


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def order_of_calls(model, x):
    """Names of the leaves of a model as it calls them."""
    order = []
    for name, module in model.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(lambda *_, name=name: order.append(name))
    model(x)
    return order


def shapes_behind(model, names, x):
    """Channels, height and width of what these modules return."""
    found = {}
    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _, args, out, name=name: found.update({name: tuple(out.shape[1:])}))
    with torch.device("meta"):
        model.to("meta")(x.to("meta"))
    return list(found.values())


@pytest.mark.parametrize(("make", "size", "convolutions"), [(densenet40, 1_100_328, 39), (mobilenetv2, 2_351_872, 52)])
def test_the_papers_sizes(make, size, convolutions):
    with torch.device("meta"):
        model = make()
        assert count(model) == size
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)
        assert make(classes=10)(torch.randn(2, 3, 32, 32)).shape == (2, 10)
        assert make(channels=1)(torch.randn(2, 1, 28, 28)).shape == (2, 100)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(layers) == convolutions
    assert all(layer.bias is None for layer in layers) and model.fc.bias is None


def test_densenet_stages():
    names = ["conv1", *(f"blocks.{i}" for i in range(5)), "bn"]
    shapes = shapes_behind(densenet40(), names, torch.randn(2, 3, 32, 32))
    wide = [(24, 32), (168, 32), (168, 16), (312, 16), (312, 8), (456, 8), (456, 8)]
    assert shapes == [(channels, side, side) for channels, side in wide]


def test_densenet_layers_append_and_drop_out_behind_their_convolution():
    model = densenet40()
    layers = [module for module in model.modules() if isinstance(module, DenseLayer)]
    assert len(layers) == 36 and all(layer.dropout.p == 0.05 for layer in layers)
    assert sum(isinstance(module, nn.Dropout) for module in model.modules()) == 36
    layer, x = layers[1].eval(), torch.randn(2, 36, 8, 8)
    assert order_of_calls(layer, x) == ["bn", "conv", "dropout"]
    out = layer(x)
    assert out.shape == (2, 48, 8, 8) and torch.equal(out[:, :36], x)
    layers[0].train().dropout.p = 1.0
    assert not layers[0](torch.randn(2, 24, 8, 8))[:, 24:].any()
    transition = next(module for module in model.modules() if isinstance(module, Transition))
    assert order_of_calls(transition, torch.randn(2, 168, 8, 8)) == ["bn", "conv"]
    assert transition.conv.kernel_size == (1, 1)


@pytest.mark.parametrize("depth", [4, 39, 41])
def test_a_depth_that_does_not_exist(depth):
    with pytest.raises(ValueError, match=rf"depth must be 3n \+ 4 \(7, 10, 13, ..., 40\), got {depth}"):
        DenseNet(depth)


def test_mobilenet_stages():
    names = ["first", *(f"stages.{i}" for i in range(7)), "last", "dropout"]
    shapes = shapes_behind(mobilenetv2(), names, torch.randn(2, 3, 32, 32))
    wide = [(32, 32), (16, 32), (24, 32), (32, 16), (64, 8), (96, 8), (160, 4), (320, 4), (1280, 4)]
    assert shapes == [*((channels, side, side) for channels, side in wide), (1280,)]


def test_mobilenet_blocks():
    block = InvertedResidual(24, 24, 6, 1).eval()
    x = torch.randn(2, 24, 8, 8)
    order = ["expand.conv", "expand.bn", "depthwise.conv", "depthwise.bn", "project.conv", "project.bn"]
    assert order_of_calls(block, x) == order
    assert block.depthwise.conv.groups == block.expand.conv.out_channels == 144
    assert block.depthwise(100 * torch.randn(2, 144, 8, 8)).max() == 6 and block.project(block.expand(x)).min() < 0
    nn.init.zeros_(block.project.bn.weight)
    assert torch.equal(block(x), x)
    halved = InvertedResidual(24, 24, 6, 2)
    assert halved(x).shape == (2, 24, 4, 4) and not halved.adds


def test_mobilenet_drops_out_before_its_classifier():
    model = mobilenetv2()
    assert [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)] == ["dropout"]
    assert model.dropout.p == 0.3
    assert order_of_calls(model, torch.randn(2, 3, 32, 32))[-4:] == ["last.conv", "last.bn", "dropout", "fc"]


def convolutions(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]


def test_gates_are_where_the_paper_has_them():
    with torch.device("meta"):
        dense, mobile, after = densenet40(), mobilenetv2(), mobilenetv2()
        expected, norms = convolutions(mobile), [name.replace("conv", "bn") for name in convolutions(mobile)]
        dense_layers = convolutions(dense)
        gates = ng.attach_gates_(dense, where=lambda name, _: name != "conv1")
        assert list(gates) == dense_layers[1:] and dense_layers[0] == "conv1" and gates.count == 36 * 12 + 168 + 312
        gates = ng.attach_gates_(mobile)
        assert list(gates) == expected and "stages.3.0.depthwise.conv" in gates
        assert gates.count == sum(mobile.get_submodule(name).out_channels for name in expected)
        assert list(ng.attach_gates_(after, placement="after-norm")) == norms


def test_densenet_has_no_norm_of_its_own_behind_a_convolution():
    with torch.device("meta"):
        model = densenet40()
        layers = convolutions(model)
        assert list(ng.attach_gates_(model, placement="after-norm")) == layers


@torch.no_grad()
def trained_for_a_moment_(model, x):
    """Norms with statistics, scales and shifts of their own."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            module.momentum = None
    model.train()(x)
    model.eval()


@pytest.mark.parametrize("placement", ["before-norm", "after-norm"])
@pytest.mark.parametrize(
    ("make", "first"), [(densenet40, "conv1"), (mobilenetv2, "")], ids=["DenseNet-40", "MobileNetV2"]
)
def test_closed_gates_can_be_removed(make, first, placement):
    model = make(classes=10).double()
    plain = count(model)
    gates = ng.attach_gates_(model, placement=placement, where=lambda name, _: name != first)
    spread_gates_(gates, closed=0.4)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    trained_for_a_moment_(model, x)
    small = ng.compact(model, ng.plan(model, x))
    assert ng.verify(model, small, x).max_error < 1e-9
    assert count(small) < 0.7 * plain
    assert type(small) is type(model) and isinstance(small, (DenseNet, MobileNetV2))
    with torch.no_grad():
        small.fc.weight[0] += 1
    with pytest.raises(ng.VerificationError):
        ng.verify(model, small, x)
