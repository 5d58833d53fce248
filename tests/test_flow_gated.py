"""Gated models: compact merges the gates, and the gated model goes on unharmed."""

import copy

import pytest
import torch
from flow_helpers import Net, Residual, assert_untouched, image, kept, settle_, shrink
from helpers import spread_gates_
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate import TraceError


def gated_model(kind="exponential", **options):
    model = settle_(Residual(), image())
    gates = ng.attach_gates_(model, kind, **options)
    spread_gates_(gates, closed=0.5)
    return model, gates


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"placement": "after-norm"},
        {"inputs": lambda name, layer: name == "head"},
        {"kind": "hard-concrete"},
        {"kind": "linear"},
    ],
    ids=["before-norm", "after-norm", "inputs", "hard-concrete", "linear"],
)
def test_gates_are_merged(options):
    model, gates = gated_model(**options)
    if options.get("kind") == "hard-concrete":
        for g in gates.parameters():
            g.data.fill_(2.0)[::2] = -20.0
    gates.close_below_(1e-4)
    assert gates.closed_fraction() > 0.2
    model.eval()
    # A closed linear gate leaves the stream to its other producer.
    _, small = shrink(model, image(), removes=None if options.get("kind") == "linear" else True)
    assert not any(type(m).__module__.startswith("narrowgate") for m in small.modules())
    assert not any("gate" in name for name in small.state_dict())
    assert type(small.stem) is nn.Conv2d


def test_a_closed_gate_is_removed_and_an_open_one_is_not():
    model, gates = gated_model()
    wanted = gates.values()["conv1"].nonzero().flatten().tolist()
    plan = ng.plan(model, image())
    assert kept(plan, "conv1.weight") == wanted


def test_block_gate_that_is_closed():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)

        def forward(self, x):
            return self.b(F.relu(self.a(x)))

    model = Net(
        lambda net, x: net.head(net.stem(x) + net.block(net.stem(x))),
        **{"stem": nn.Conv2d(3, 6, 3), "block": Block(), "head": nn.Conv2d(6, 2, 1)},
    )
    settle_(model, image())
    gates = ng.attach_gates_(model, blocks=lambda name, module: name == "block", where=lambda name, module: False)
    with torch.no_grad():
        gates["block"].g.zero_()
    _, small = shrink(model, image())
    assert small.block.a.out_channels == 1


def test_the_gated_model_goes_on_training():
    model, gates = gated_model()
    before = copy.deepcopy(model)
    ng.compact(model, ng.plan(model, image()))
    assert_untouched(model, before)
    model(image()).sum().backward()
    assert gates["conv1"].g.grad is not None


def test_frozen_layers_stay_frozen():
    model, _ = gated_model()
    model.conv1.weight.requires_grad_(False)
    small = ng.compact(model, ng.plan(model, image()))
    assert not small.conv1.weight.requires_grad and small.conv2.weight.requires_grad


def reads_weight(net, x):
    return net.head(F.relu(F.conv2d(net.conv1(x), net.conv2.weight, net.conv2.bias)))


def reads_weight_and_calls(net, x):
    return net.head(F.relu(net.conv2(net.conv1(x)))) * net.conv2.weight.norm()


def reads_bias(net, x):
    return net.head(net.conv2(net.conv1(x)) + net.conv2.bias[:, None, None])


def reads_weight_under_autocast(net, x):
    x = net.conv1(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = F.conv2d(x, net.conv2.weight)
    return net.head(x.double())


def calls_it_under_autocast(net, x):
    x = net.conv1(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = net.conv2(x)
    return net.head(x) / net.conv2.weight.shape[1]


def three_gated(body):
    model = Net(body, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 6, 1), head=nn.Conv2d(6, 2, 1)).double()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        for gate in gates.modules():
            gate.g[1:3] = 0
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("body", [reads_weight, reads_weight_and_calls, reads_bias, reads_weight_under_autocast])
def test_a_weight_that_is_read_without_its_gate_is_refused(body, training):
    with pytest.raises(TraceError, match=r"gate on 'conv2' .*'conv2\.(weight|bias)' .*where="):
        ng.plan(three_gated(body), image(), training=training)


def test_a_layer_called_under_autocast_has_its_gate():
    model = three_gated(calls_it_under_autocast)
    ng.verify(model, ng.compact(model, ng.plan(model, image())), image())


def test_a_bias_that_no_gate_multiplies_may_be_read():
    model = Net(reads_bias, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 6, 1), head=nn.Conv2d(6, 2, 1)).double()
    inputs = ng.attach_gates_(model, where=lambda name, _: name == "conv1", inputs=lambda name, _: name == "conv2")
    with torch.no_grad():
        inputs["conv2.inputs"].g[1:3] = 0
    small = ng.compact(model, ng.plan(model, image()))
    ng.verify(model, small, image())
    assert len(small.conv1.weight) == 4
