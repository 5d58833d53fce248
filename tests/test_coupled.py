"""Channels that several layers share get one gate, and closing it takes them from all of these, in plain layers."""

import copy

import pytest
import torch
import torchvision
from flow_helpers import Net, settle_, shrink
from helpers import assert_same
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import LeNet5, PreActResNet
from narrowgate.train.engine import run
from narrowgate.train.recipe import Recipe, RecipeError


class Residual(nn.Module):
    """A stem and two blocks that write to one stream, the second with an expansion and a depthwise layer inside."""

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv1, self.norm1 = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.expand, self.norm3 = nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16)
        self.depthwise, self.norm4 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)
        self.project, self.norm5 = nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)
        self.head, self.other = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.stem_norm(self.stem(x)))
        x = x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        y = F.relu(self.norm4(self.depthwise(F.relu(self.norm3(self.expand(x))))))
        x = x + self.norm5(self.project(y))
        x = x.mean((2, 3))
        return self.head(x), self.other(x)


def image(size=8):
    return torch.randn(4, 3, size, size, dtype=torch.float64)


def residual():
    torch.manual_seed(0)
    return settle_(Residual(), image())


def close_odd_(gates):
    for name in gates:
        gates[name].close_(torch.arange(gates[name].size) % 2 == 1)


def test_what_is_coupled_in_a_residual_network():
    model = residual()
    before = copy.deepcopy(model.state_dict())
    found = ng.coupled(model, image())
    assert [(bundle.label, bundle.size, list(bundle.layers)) for bundle in found.bundles] == [
        ("stem", 8, ["stem", "conv2", "project"])
    ]
    assert found.alone == ("conv1", "depthwise")
    assert found.held == {
        "expand": "its channels go with depthwise",
        "head": "its outputs are the model's",
        "other": "its outputs are the model's",
    }
    assert (
        str(found)
        == """\
Coupled: 1 set of shared channels, 2 layers alone
  stem         8  with conv2, project
  expand  no gate: its channels go with depthwise
  head    no gate: its outputs are the model's
  other   no gate: its outputs are the model's"""
    )
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("placement", ["before-norm", "after-norm"])
def test_closed_channels_go_from_all_layers_of_the_stream(placement):
    model = residual()
    gates = ng.attach_gates_(model, groups=ng.coupled(model, image()), placement=placement)
    assert gates.count == 8 + 12 + 16 and len(gates) == 3
    close_odd_(gates)
    plan, small = shrink(model, image(), layout="aligned")
    kept = {row.layer: row.kept for row in plan.rows}
    after = placement == "after-norm"  # a constant in front of a padded layer keeps one channel to carry it
    assert kept["stem"] == kept["conv2"] == kept["project"] <= 4 + (not after)
    assert kept["conv1"] <= 6 + (not after) and kept["depthwise"] == kept["expand"] == 8
    assert not any(type(part).__module__.startswith("narrowgate") for part in small.modules())


def test_gates_of_every_layer_alone_leave_the_stream_wide():
    """Why one gate rules over all: by chance alone a channel is rarely closed in every layer that writes it."""
    wide, narrow = residual(), residual()
    torch.manual_seed(1)
    for model, groups in ((wide, "channels"), (narrow, ng.coupled(narrow, image()))):
        gates = ng.attach_gates_(model, groups=groups, placement="after-norm")
        for gate in gates.modules():
            gate.close_(torch.rand(gate.size) < 0.5)
    widths = [{r.layer: r.kept for r in ng.plan(model, image()).rows}["stem"] for model in (wide, narrow)]
    assert widths[1] < widths[0]


def test_it_trains_and_shrinks_and_resumes():
    torch.manual_seed(0)
    model = Residual()
    x, labels = torch.randn(32, 3, 8, 8), torch.arange(32) % 4
    found = ng.coupled(model, x[:2])
    gates = ng.attach_gates_(model, groups=found, placement="after-norm")
    with torch.no_grad():
        for gate in gates.modules():
            gate.g.uniform_(0.3, 1.2)
    penalty = ng.Penalty(gates, "l1", 0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    shrinker = ng.Shrinker(model, x[:2], optimizer, every=1, share=0.0)
    for epoch in range(12):
        for batch in torch.randperm(32).split(8):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch])[0], labels[batch]).backward()
            optimizer.step()
            penalty.proximal_(0.08)
        shrinker.step(epoch)
    assert shrinker.events and model.stem.out_channels < 8
    model.eval()
    small = ng.compact(model, ng.plan(model, x[:2]))
    ng.verify(model, small, x[:2])
    again = Residual()
    ng.attach_gates_(again, groups=ng.coupled(again, x[:2]), placement="after-norm")
    ng.compact_(again, shrinker.plan)
    again.load_state_dict(model.state_dict())
    assert_same(again.eval()(x)[0], model(x)[0], rtol=0, atol=0)


def test_batched_and_layer_by_layer_agree():
    model = residual()
    x = image()
    plain = copy.deepcopy(model)
    gates = ng.attach_gates_(model, groups=ng.coupled(model, x), keep_function=True)
    assert_same(model(x)[0], plain(x)[0], rtol=0, atol=1e-12)
    with torch.no_grad():
        for gate in gates.modules():
            gate.g.uniform_(0.5, 1.5)
    ahead = torch.autograd.grad(model(x)[0].square().sum(), gates.parameters())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):  # where nothing is computed ahead
        alone = torch.autograd.grad(model(x)[0].square().sum(), gates.parameters())
    for one, other in zip(ahead, alone, strict=True):
        assert_same(one, other, rtol=1e-9, atol=1e-12)


def test_where_leaves_out_the_whole_stream():
    model = residual()
    gates = ng.attach_gates_(model, groups=ng.coupled(model, image()), where=lambda name, _: name != "conv2")
    assert list(gates) == ["conv1", "depthwise"]
    assert gates.skipped["stem"] == "it shares its channels with conv2, which where= leaves out"


def test_inputs_that_a_model_names_get_gates_too():
    model = LeNet5()
    gates = ng.attach_gates_(model, groups=ng.coupled(model, torch.rand(2, 1, 28, 28)))
    assert list(gates) == list(ng.attach_gates_(LeNet5()))


def test_products_and_equal_parts():
    """Of two factors one is enough; halves of a layer that are multiplied go together."""
    model = Net(
        lambda net, x: net.last(F.silu(net.up(x)) * net.gate(x) + F.glu(net.both(x), 1)),
        **{"up": nn.Linear(5, 6), "gate": nn.Linear(5, 6), "both": nn.Linear(5, 12), "last": nn.Linear(6, 3)},
    )
    x = torch.randn(4, 5, dtype=torch.float64)
    settle_(model, x)
    found = ng.coupled(model, x)
    assert [list(bundle.layers) for bundle in found.bundles] == [["gate", "both"]]
    gates = ng.attach_gates_(model, groups=found)
    close_odd_(gates)
    plan, _ = shrink(model, x, layout="aligned")
    assert {row.layer: row.kept for row in plan.rows} == {"up": 3, "gate": 3, "both": 6, "last": 3}


def test_what_stays_has_no_gate_and_says_why():
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(5, 8), nn.LayerNorm(8, elementwise_affine=False)
            self.second, self.last = nn.Linear(8, 6), nn.Linear(12, 3)

        def forward(self, x):
            x = F.relu(self.second(self.norm(self.first(x))))
            return self.last(torch.stack([x, x], 1).view(-1, 12))

    model = settle_(Held(), torch.randn(4, 5))
    found = ng.coupled(model, torch.randn(4, 5, dtype=torch.float64))
    assert not found.bundles and not found.alone
    assert found.held["first"] == "its channels stay: for layer_norm in norm"
    assert "stay" in found.held["second"]
    with pytest.raises(ValueError, match=r"nothing to gate.*second.*stay"):
        ng.attach_gates_(model, groups=found)


def test_wrong_use_is_named():
    model = residual()
    found = ng.coupled(model, image())
    with pytest.raises(ValueError, match=r"pass groups=ng\.coupled\(model, example_inputs\)"):
        ng.attach_gates_(model, groups="coupled")
    with pytest.raises(ValueError, match="no layer 'conv1'"):
        ng.attach_gates_(nn.Sequential(nn.Linear(3, 3)), groups=found)
    with pytest.raises(ValueError, match="last=True"):
        ng.attach_gates_(model, groups=found, last=True)
    with pytest.raises(ValueError, match="linear gates"):
        ng.attach_gates_(model, "linear", groups=found)
    with pytest.raises(TypeError, match="needs a model"):
        ng.coupled(Residual, image())
    with pytest.raises(ng.TraceError):
        ng.coupled(model, torch.rand(2, 5))


MODELS = {
    "resnet18": (torchvision.models.resnet18, 4),
    "resnext50_32x4d": (torchvision.models.resnext50_32x4d, 4),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, 5),
    "mobilenet_v3_small": (torchvision.models.mobilenet_v3_small, 13),  # 9 of them with squeeze-excite
    "efficientnet_b0": (torchvision.models.efficientnet_b0, 21),
    "densenet121": (torchvision.models.densenet121, 0),
    "squeezenet1_1": (torchvision.models.squeezenet1_1, 0),
    "preact": (lambda: PreActResNet(20), 3),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_half_of_every_gate_closed_halves_every_layer(name):
    """With gates after all norms nothing is left over: the small network has plain layers of half the width."""
    torch.manual_seed(0)
    build, bundles = MODELS[name]
    model, x = build().eval(), torch.rand(2, 3, 64, 64)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            nn.init.normal_(norm.bias, 0, 0.1)
    found = ng.coupled(model, x)
    assert len(found.bundles) == bundles
    before = copy.deepcopy(model)  # where closed channels are the norms' shifts
    close_odd_(ng.attach_gates_(before, groups=found))
    plan = ng.plan(before, x)
    ng.verify(before, ng.compact(before, plan), x)
    assert plan.parameters_after < 0.36 * plan.parameters_before
    gates = ng.attach_gates_(model, groups=found, placement="after-norm")
    close_odd_(gates)
    plan = ng.plan(model, x)
    small = ng.compact(model, plan)
    ng.verify(model, small, x)
    gated = {*found.alone, *(layer for bundle in found.bundles for layer in bundle.layers)}
    for row in plan.rows:
        if row.layer in gated:
            assert row.kept == -(-row.total // 2), row
    assert not any(type(part).__module__.startswith("narrowgate.flow") for part in small.modules())


RECIPE = """
[model]
name = "resnet"
options = { depth = 11, dropout = 0.0 }
[data]
source = "digits"
[gates]
placement = "after-norm"
groups = ["coupled"]
[penalty]
weights = "parameters"
strength = 1e-5
[train]
epochs = 4
batch = 64
seed = 0
[budget]
target = "params: 40%"
"""


def test_recipe_takes_it_alone():
    with pytest.raises(RecipeError, match="leave the others out"):
        Recipe.from_toml(RECIPE, ['gates.groups=["coupled", "heads"]'])


def test_recipe_ends_at_its_target_in_plain_layers(tmp_path):
    result = run(Recipe.from_toml(RECIPE), tmp_path / "run", accelerator="cpu")
    assert 0.37 < result.parameters / result.parameters_full <= 0.4
    plan = ng.Plan.from_json((tmp_path / "run" / "small" / "plan.json").read_text())
    widths = {row.layer: row.kept for row in plan.rows}
    assert widths["stages.2.0.shortcut"] == widths["stages.2.0.conv3"] < 256


def test_norms_that_count_where_training_mode_does_something_else():
    """There the training graph is looked at too, and its norms may lose channels just as well."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.norm(self.first(x))
            return self.last(F.relu(x) * (1 + torch.rand(()) if self.training else 1))

    found = ng.coupled(Noisy().double(), torch.randn(4, 5, dtype=torch.float64))
    assert [list(bundle.layers) for bundle in found.bundles] == [["first", "norm"]]


def test_a_factor_whose_norm_has_a_shift():
    """Closed, it is that shift, and what it multiplies still varies: so both factors have the gates."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate, self.norm = nn.Linear(5, 8), nn.Linear(5, 8), nn.BatchNorm1d(8)
            self.last = nn.Linear(8, 3)

        def forward(self, x):
            return self.last(F.relu(self.up(x)) * self.norm(self.gate(x)))

    x = torch.randn(4, 5, dtype=torch.float64)
    model = settle_(Product(), x)
    nn.init.normal_(model.norm.bias)
    close_odd_(ng.attach_gates_(model, groups=ng.coupled(model, x)))
    plan, _ = shrink(model, x, layout="aligned")
    assert {row.layer: row.kept for row in plan.rows} == {"up": 4, "gate": 4, "last": 3}


def test_layers_with_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8))
            self.first, self.norm, self.last = self.all[0], self.all[1], nn.Linear(8, 3)

        def forward(self, x):
            return self.last(F.relu(self.norm(self.first(x))))

    model, x = Twice().double(), torch.randn(4, 5, dtype=torch.float64)
    found = ng.coupled(model, x)
    assert [list(bundle.layers) for bundle in found.bundles] == [["all.0", "all.1"]]
    close_odd_(ng.attach_gates_(model, groups=found))
    plan, _ = shrink(model, x, layout="scatter")
    assert {row.kept for row in plan.rows} == {4, 3}


def test_on_the_meta_device():
    with torch.device("meta"):
        model = Residual()
    there = ng.coupled(model, torch.randn(2, 3, 8, 8))
    assert there == ng.coupled(Residual(), torch.randn(2, 3, 8, 8))


def test_coupled_channels_of_another_width():
    def build(width):
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.GroupNorm(2, width), nn.Flatten(), nn.LazyLinear(3))

    x = torch.randn(2, 3, 8, 8)
    one, other = build(8), build(16)
    one(x), other(x)
    with pytest.raises(ValueError, match="there '0' had 8, here it has 16"):
        ng.attach_gates_(other, groups=ng.coupled(one, x))
    other(x)
