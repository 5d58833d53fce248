"""What is said of a network before it is pruned: gates, couplings, walls."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.inspect_model import inspect_model
from narrowgate.models import LeNet5

IMAGES = torch.rand(2, 3, 8, 8)


class Net(nn.Module):
    """A residual stream, a depthwise layer, a norm across channels, a hard-coded size."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.free = nn.Conv2d(8, 12, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.normed = nn.Conv2d(12, 4, 1)
        self.norm = nn.GroupNorm(2, 4)
        self.viewed = nn.Conv2d(4, 6, 1)
        self.head = nn.Linear(6 * 64, 10)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.branch(F.relu(x)))
        x = self.depthwise(F.relu(self.free(x)))
        x = F.relu(self.norm(self.normed(x)))
        return self.head(self.viewed(x).view(-1, 6 * 64))


class Attention(nn.Module):
    """Two heads of four channels."""

    def __init__(self):
        super().__init__()
        self.heads = 2
        self.qkv = nn.Linear(6, 24)
        self.out = nn.Linear(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.finish(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def finish(self, x):
        return self.head(self.out(x).mean(1))


class FixedAttention(Attention):
    """The same with the width of all heads written in."""

    def finish(self, x):
        return super().finish(x.reshape(len(x), -1, 8))


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def found(net):
    return inspect_model(net, IMAGES)


def layers(found):
    return {layer.name: layer for layer in found.layers}


def test_gates_and_why_not(found, net):
    gated = {name: layer.gates for name, layer in layers(found).items() if layer.gates}
    assert gated == {"stem": 8, "branch": 8, "free": 12, "depthwise": 12, "normed": 4, "viewed": 6}
    gates = ng.attach_gates_(copy.deepcopy(net))
    assert gated == {name: gates[name].size for name in gates} and found.gates == gates.count
    assert layers(found)["head"].why_not == "the last layer, its outputs are the model's"
    assert all(layer.why_not == "" for layer in found.layers if layer.gates)


def test_couplings(found):
    assert [(group.layers, group.parts) for group in found.groups] == [
        (("stem", "branch"), 8),
        (("free", "depthwise"), 12),
    ]
    number = {name: layer.group for name, layer in layers(found).items()}
    assert number["stem"] == number["branch"] == 1 and number["free"] == number["depthwise"] == 2
    assert number["normed"] is number["viewed"] is number["head"] is None


def test_walls_hold_what_is_before_them(found):
    walls = {(wall.op, wall.layer): wall.why for wall in found.walls}
    assert "a norm across channels" in walls["group_norm", "norm"]
    assert "hard-coded" in next(why for (op, _), why in walls.items() if op == "view")
    held = {name: layer.held for name, layer in layers(found).items()}
    assert held["normed"] == "for group_norm in norm" and held["viewed"].startswith("for view in")
    assert held["head"] == "for the model's output"
    assert held["stem"] == held["branch"] == held["free"] == held["depthwise"] == ""


def test_what_is_said_to_be_held_is_what_a_plan_holds(net, found):
    pruned = copy.deepcopy(net)
    with torch.no_grad():
        for name, layer in layers(found).items():
            if layer.gates:
                pruned.get_submodule(name).weight[::2], pruned.get_submodule(name).bias[::2] = 0, 0
    kept = {row.layer: row.kept == row.total for row in ng.plan(pruned, IMAGES).rows}
    assert kept == {name: bool(layer.held) for name, layer in layers(found).items()}


def test_costs_are_those_of_summarize(found, net):
    costs = ng.summarize(net, IMAGES)
    assert (found.parameters, found.multiply_adds) == (costs.parameters, costs.multiply_adds)
    stem = layers(found)["stem"]
    assert (stem.kind, stem.inputs, stem.outputs) == ("Conv2d", 3, 8)
    assert (stem.parameters, stem.multiply_adds) == (3 * 8 * 9 + 8, 3 * 8 * 9 * 64)


def test_the_model_is_left_as_it_was(net):
    before, training = copy.deepcopy(net.state_dict()), net.training
    inspect_model(net, IMAGES)
    after = net.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    assert net.training == training and type(net.stem) is nn.Conv2d


def test_zeros_of_the_start_do_not_count_as_dead(net):
    started = copy.deepcopy(net)
    nn.init.zeros_(started.branch.weight)
    nn.init.zeros_(started.branch.bias)
    assert inspect_model(started, IMAGES).groups == inspect_model(net, IMAGES).groups


def test_attention_goes_by_whole_heads():
    seen = inspect_model(Attention(), torch.rand(2, 5, 6))
    qkv = layers(seen)["qkv"]
    assert (qkv.outputs, qkv.parts, qkv.held) == (24, 2, "")
    assert seen.walls == ()
    fixed = inspect_model(FixedAttention(), torch.rand(2, 5, 6))
    assert layers(fixed)["qkv"].held and "hard-coded" in fixed.walls[0].why


def test_input_gates_are_counted():
    seen = inspect_model(LeNet5(), torch.rand(2, 1, 28, 28))
    assert layers(seen)["fc1"].input_gates == 800 and seen.gates == 1370


def test_shared_weights_and_networks_without_gates_say_why():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    tied[1].weight = tied[0].weight
    assert "shared with 1" in layers(inspect_model(tied, torch.rand(2, 4)))["0"].why_not
    alone = inspect_model(nn.Sequential(nn.Linear(4, 2)), torch.rand(2, 4))
    assert alone.gates == 0 and layers(alone)["0"].why_not == "the last layer, its outputs are the model's"


def test_a_small_network_tells_what_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight[2:5], model[0].bias[2:5] = 0, 0
    plan = ng.plan(model, torch.rand(2, 4))
    seen = layers(inspect_model(ng.compact(model, plan), torch.rand(2, 4), made_by=plan))
    assert (seen["0"].outputs, seen["0"].was) == (5, 8)
    assert seen["2"].was == 2 and layers(inspect_model(model, torch.rand(2, 4)))["0"].was is None


def test_the_page(found):
    rich = pytest.importorskip("rich.console")
    from narrowgate.printing import print_inspection

    page = io.StringIO()
    print_inspection(found, rich.Console(file=page, width=100))
    text = page.getvalue()
    assert "Net, inputs 1 x 3 x 8 x 8" in text and "50 gates" in text
    assert "stem  Conv2d 3 -> 8; 224; 13.82 k; 8 gates; group 1" in text
    assert "no gates: the last layer" in text and "stays whole for group_norm in norm" in text
    assert "group 1, 8 channels: stem, branch" in text
    assert "group_norm (a norm across channels counts every one of them): norm" in text
    seen = inspect_model(Attention(), torch.rand(2, 5, 6))
    page = io.StringIO()
    print_inspection(seen, rich.Console(file=page, width=100))
    assert "24 gates; goes in 2 parts" in page.getvalue() and "at full width: none" in page.getvalue()


def test_a_compiled_network_is_inspected_as_what_was_compiled():
    """The wrapper's names are not those that costs are found by: all layers would have no parameters."""
    model = Net()
    assert inspect_model(torch.compile(model), IMAGES) == inspect_model(model, IMAGES)
    assert inspect_model(model, IMAGES).layers[0].parameters == 8 * 3 * 9 + 8
