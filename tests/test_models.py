import pytest
import torch
from torch import nn

import narrowgate as ng
from narrowgate.models import LeNet5, PreActResNet, resnet164


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_lenet_has_the_papers_size_and_its_four_groups():
    model = LeNet5()
    assert count(model) == 431_080
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert LeNet5(classes=3)(torch.randn(1, 1, 28, 28)).shape == (1, 3)
    gates = ng.attach_gates_(model)
    sizes = {name: gate.size for name, gate in zip(gates, gates.modules(), strict=True)}
    assert sizes == {"conv1": 20, "conv2": 50, "fc1.inputs": 800, "fc1": 500}


def test_lenet_has_a_batchnorm_behind_its_first_three_layers_if_asked():
    model = LeNet5(bias=False, norm=True)
    assert count(model) == 430_500 + 2 * (20 + 50 + 500)
    gates = ng.attach_gates_(model, "linear")
    assert {name: gates[name].size for name in gates} == {"bn1": 20, "bn2": 50, "bn3": 500}
    x = torch.randn(8, 1, 28, 28)
    assert (model.conv1(x).std((0, 2, 3)) - 1).abs().max() > 0.1
    assert torch.allclose(model.bn1(model.conv1(x)).std((0, 2, 3)), torch.full((20,), 0.5), atol=1e-2)
    plan = ng.plan(model.eval(), x)
    assert plan.parameters_after == plan.parameters_before


def test_resnet_164_has_the_papers_size():
    with torch.device("meta"):
        model = resnet164()
        assert count(model) == 1_726_288
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)
        gates = ng.attach_gates_(model)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(gates) == len(convolutions) == 1 + 3 * 54 + 3


def test_a_resnet_is_pre_activated_with_dropout_behind_its_first_norm():
    block = PreActResNet(11, dropout=0.1).stages[1][0]
    order = []
    for name, module in block.named_children():
        module.register_forward_hook(lambda *_, name=name: order.append(name))
    block.shortcut.register_forward_hook(lambda _, args, output: order.append(args[0].min().item() >= 0))
    assert block(torch.randn(2, 64, 8, 8)).shape == (2, 128, 4, 4)
    assert order == ["bn1", "dropout", "shortcut", True, "conv1", "bn2", "conv2", "bn3", "conv3"]
    assert block.dropout.p == 0.1 and block.shortcut.stride == (2, 2)


@pytest.mark.parametrize("depth", [2, 10, 12, 163])
def test_a_depth_that_does_not_exist(depth):
    with pytest.raises(ValueError, match=rf"depth must be 9n \+ 2 \(11, 20, 29, ..., 164\), got {depth}"):
        PreActResNet(depth)
