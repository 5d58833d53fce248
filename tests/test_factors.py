"""Fine-tuning the small network is what training the gated one on would be, with its gates as they are."""

import copy

import pytest
import torch
from helpers import assert_same
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import PreActResNet
from narrowgate.train.factors import gate_factors, kept_apart


def gated(placement):
    torch.manual_seed(0)
    model = PreActResNet(11, classes=4, dropout=0.0).double()
    gates = ng.attach_gates_(model, placement=placement)
    with torch.no_grad():
        for gate in gates.modules():
            gate.g.uniform_(0.05, 0.3)
            gate.close_(torch.rand(gate.size) < 0.4)
    return model


def trained(model, x, labels, lr=0.05, steps=4):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize("placement", ["after-norm", "before-norm"])
def test_the_same_steps_as_with_the_gates(placement, layout):
    model = gated(placement)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # statistics of the batch alone, so that both modes agree on constants
    x, labels = torch.randn(16, 3, 8, 8).double(), torch.arange(16) % 4
    plan = ng.plan(model.eval(), x[:2], layout=layout)
    small = ng.compact(model, plan)
    factors = gate_factors(model, plan)
    alone = trained(copy.deepcopy(small), x, labels)
    before = small.eval()(x)
    with kept_apart(small, factors):
        assert_same(small(x), before, rtol=0, atol=1e-12)
        losses = trained(small, x, labels)
    for gate in ng.gates_of(model).parameters():
        gate.requires_grad_(False)
    wanted = trained(model, x, labels)
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert alone != pytest.approx(wanted, rel=1e-2)
    assert not any("parametrizations" in name for name, _ in small.named_parameters())
    assert not any("parametrizations" in name for name, _ in small.named_modules())


def test_what_is_closed_stays_closed():
    """A channel that other layers of the stream need is kept, and this layer goes on writing nothing to it."""
    model = gated("after-norm")
    x, labels = torch.randn(8, 3, 8, 8).double(), torch.arange(8) % 4
    plan = ng.plan(model.eval(), x[:2])
    small = ng.compact(model, plan)
    dead = (small.stages[0][0].conv3.weight == 0).flatten(1).all(1)
    assert dead.any()
    with kept_apart(small, gate_factors(model, plan)):
        trained(small, x, labels)
    assert torch.equal((small.stages[0][0].conv3.weight == 0).flatten(1).all(1), dead)


def test_nothing_is_kept_apart_where_there_were_no_gates():
    model = PreActResNet(11, classes=4).eval()
    x = torch.randn(2, 3, 8, 8)
    plan = ng.plan(model, x, layout="scatter")
    assert gate_factors(model, plan) == {}


def test_one_gate_for_a_transposed_layer_with_groups():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3, groups=2), nn.Flatten())
    model = model.append(nn.Linear(512, 3)).double().eval()
    ng.attach_gates_(model, where=lambda name, _: name == "0", blocks=lambda name, _: name == "2")
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plan = ng.plan(model, x)
    assert gate_factors(model, plan)["2.bias"].shape == (8,)
