"""compact_: narrow a model while it trains, gates and optimizer state included."""

import copy

import pytest
import torch
from flow_helpers import Net, assert_same_function, assert_untouched, close_, count, image, kept, settle_
from helpers import spread_gates_
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import narrowgate as ng
from narrowgate import PlanError
from narrowgate.train.shrink import ShrinkWarning


class Residual(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, bias=not norm)
        self.bn = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=not norm)
        self.bn1 = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = x + self.conv2(F.relu(self.bn1(self.conv1(x))))
        return self.head(x.mean((2, 3)))


def gated(norm=True, **options):
    model = settle_(Residual(norm), image())
    gates = ng.attach_gates_(model, **options)
    spread_gates_(gates, closed=0.0)
    return model, gates


@torch.no_grad()
def close_gates_(model):
    """Every gated layer loses its first three channels."""
    for gate in ng.gates_of(model).modules():
        gate.g[:3] = 0


def steps(model, optimizer, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


def batches(n):
    return [(image(batch=6), torch.randint(0, 4, (6,))) for _ in range(n)]


def weights(model):
    return [p for name, p in model.named_parameters() if not name.endswith(".g")]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options", [{"norm": False}, {"placement": "after-norm"}], ids=str)
def test_training_goes_on_as_if_nothing_had_been_cut(options, optimizer):
    """Where dead channels are zero, the narrowed run is the same run."""
    large, _ = gated(**options)
    first = OPTIMIZERS[optimizer](weights(large))
    steps(large, first, batches(2))
    close_gates_(large)
    small, second = copy.deepcopy((large, first))
    ng.compact_(small, ng.plan(small, image(), training=True), optimizer=second)
    assert count(small) < count(large)
    assert_same_function(large, small, image())
    data = batches(3)
    steps(large, first, data)
    steps(small, second, data)
    assert_same_function(large, small, image())


def test_parameters_keep_their_identity_and_state_its_shape():
    model, _ = gated()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    steps(model, optimizer, batches(1))
    close_gates_(model)
    before = {name: id(p) for name, p in model.named_parameters()}
    assert ng.compact_(model, ng.plan(model, image(), training=True), optimizer=optimizer) is model
    after = dict(model.named_parameters())
    assert all(id(after[name]) == number for name, number in before.items())
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert listed == {id(p) for p in model.parameters()}
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
    steps(model, optimizer, batches(1))


@pytest.mark.parametrize("options", [{}, {"placement": "after-norm"}, {"norm": False}], ids=str)
def test_gates_stay_on_the_channels_that_live(options):
    model, gates = gated(**options)
    before = {name: value.clone() for name, value in gates.values().items()}
    close_gates_(model)
    for bn in (model.bn, model.bn1):
        if isinstance(bn, nn.BatchNorm2d):  # where a run ends up: the mean of a dead channel is the zero it reads
            bn.running_mean[:3] = 0
    reference = copy.deepcopy(model).eval()
    ng.compact_(model, ng.plan(model, image(), training=True))
    after = ng.gates_of(model).values()
    assert after.keys() == before.keys()
    assert any(len(after[name]) < len(before[name]) for name in before)
    assert_same_function(reference, model.eval(), image())


def test_it_equals_compact():
    model, _ = gated()
    close_gates_(model)
    plan = ng.plan(model.eval(), image(), training=True)
    small = ng.compact(model, plan)
    ng.compact_(model, plan)
    assert_same_function(small, model, image())


def test_gates_of_a_transposed_depthwise_convolution():
    up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), up, nn.Conv2d(8, 4, 1)).double()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        for gate in gates.modules():
            gate.g[:3] = 0
    reference = copy.deepcopy(model)
    ng.compact_(model, ng.plan(model, image(), training=True))
    assert model[2].groups == len(model[2].gate.g) == 5
    assert_same_function(reference, model, image())


@pytest.mark.parametrize("outputs", [8, 4])
def test_gates_of_a_transposed_convolution_with_groups(outputs):
    """Its outputs' gates go group by group; while the model trains, it is a wall."""
    up = nn.ConvTranspose2d(8, outputs, 2, stride=2, groups=2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), up, nn.Conv2d(outputs, 4, 1)).double()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        gates["0"].g[[0, 2, 5, 7]] = 0
        gates["2"].g[[1, outputs - 1]] = 0
    reference = copy.deepcopy(model)
    assert [wall.op for wall in ng.plan(model, image(), training=True).walls] == ["conv_transpose2d"]
    ng.compact_(model, ng.plan(model, image()))
    left = [i for i in range(outputs) if i not in (1, outputs - 1)]
    assert model[2].in_channels == 4 and torch.equal(model[2].gate.g, reference[2].gate.g[left])
    assert_same_function(reference, model, image())


def test_in_place_without_gates():
    model = settle_(Residual(), image())
    close_(model.conv1, [0, 1])
    reference = copy.deepcopy(model)
    plan = ng.plan(model, image())
    ng.compact_(model, plan)
    assert count(model) == plan.parameters_after < count(reference)
    assert_same_function(reference, model, image())


def test_a_zero_filter_without_a_closed_gate_goes_on_learning():
    model, gates = gated()
    close_(model.conv1, [5, 6])
    with torch.no_grad():
        gates["conv1"].g[:3] = 0
    learning, final = (kept(ng.plan(model, image(), training=how), "conv1.weight") for how in (True, False))
    assert {3, 4, 5, 6, 7} <= set(learning) and len(learning) < 8
    assert len(final) < len(learning)


def test_again_and_again():
    model, _ = gated(norm=False)
    optimizer = torch.optim.SGD(weights(model), 0.05, momentum=0.9)
    widths = []
    for _ in range(2):
        steps(model, optimizer, batches(1))
        close_gates_(model)
        reference = copy.deepcopy(model)
        ng.compact_(model, ng.plan(model, image(), training=True), optimizer=optimizer)
        assert_same_function(reference, model, image())
        widths.append(model.conv1.out_channels)
    assert widths == [5, 2]


def test_a_new_bias_is_trained_too():
    """A constant in front of a layer without bias becomes one, and the optimizer learns of it."""
    model = Net(
        lambda net, x: net.last(torch.sigmoid(net.first(x))),
        **{"first": nn.Linear(3, 6), "last": nn.Linear(6, 2, bias=False)},
    ).double()
    close_(model.first, [0, 1], 0.5)
    x = torch.randn(4, 3, dtype=torch.float64)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)
    ng.compact_(model, ng.plan(model, x), optimizer=optimizer)
    assert_same_function(reference, model, x)
    assert any(p is model.last.bias for group in optimizer.param_groups for p in group["params"])
    assert optimizer.param_groups[0].get("param_names", ["last.bias"])[-1] == "last.bias"  # since torch 2.6


@pytest.mark.parametrize("kind", ["SGD", "RMSprop", "AdamW", "Adagrad"])
def test_a_new_bias_takes_its_first_step_with_any_optimizer(kind):
    """RMSprop has a momentum buffer too, beside state that it makes only for a parameter without any."""
    model = Net(
        lambda net, x: net.last(torch.sigmoid(net.first(x))),
        **{"first": nn.Linear(3, 6), "last": nn.Linear(6, 2, bias=False)},
    ).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    options = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.01, **options)
    model(x).square().sum().backward()
    optimizer.step()
    close_(model.first, [0, 1], 0.5)
    ng.compact_(model, ng.plan(model, x), optimizer=optimizer)
    if kind == "Adagrad":  # in older versions of torch it makes state in its constructor only
        assert optimizer.state[model.last.bias]["sum"].shape == model.last.bias.shape
    before = model.last.bias.detach().clone()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    assert (model.last.bias != before).all()


class KeepsItsStatistics(Residual):
    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        self.bn1.eval()
        return self


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_frozen_norm_gives_what_its_running_statistics_say(by_hand):
    """A BatchNorm that stays in eval mode while the rest trains makes another constant than its shift."""
    model = settle_(Residual() if by_hand else KeepsItsStatistics(), image())
    ng.attach_gates_(model)
    close_gates_(model)
    if by_hand:
        model.train()
        model.bn.eval()
        model.bn1.eval()
    with torch.no_grad():
        model.bn1.weight[3:5] = 0  # about to learn, so these channels vary
        model.bn1.weight[0] = 0
        model.bn1.bias[0] = 0.5
    large, x = copy.deepcopy(model), image()
    plan = ng.plan(model, image(), training=True)
    ng.compact_(model, plan)
    assert {3, 4} <= set(kept(plan, "conv1.weight")) and model.conv1.out_channels < 8
    for one in (large, model):
        one.train()
        one.bn.eval()
        one.bn1.eval()
    assert torch.allclose(model(x), large(x), rtol=1e-10, atol=1e-12)
    assert_same_function(large, model, image())


@pytest.mark.parametrize("by_batch", [True, False])
def test_a_norm_as_a_function_says_itself_what_it_does_in_training(by_batch):
    """With its running statistics, as detectron2's frozen norm, a dead channel is another constant than the shift."""

    def body(net, x):
        norm = net.norm
        x = F.batch_norm(net.first(x), norm.mean, norm.var, norm.scale, norm.shift, net.training and by_batch)
        return net.last(F.relu(x))

    numbers = {"mean": nn.Buffer(torch.randn(6)), "var": nn.Buffer(torch.rand(6) + 0.5)}
    vectors = {"scale": nn.Parameter(torch.rand(6) + 0.5), "shift": nn.Parameter(torch.rand(6) + 0.5)}
    norm = Net(None, **numbers, **vectors)
    model = Net(body, first=nn.Conv2d(3, 6, 1, bias=False), norm=norm, last=nn.Conv2d(6, 4, 1)).double()
    gates = ng.attach_gates_(model, where=lambda name, _: name == "first")
    gates["first"].close_(torch.arange(6) < 2)
    cut, x = copy.deepcopy(model), image()
    plan = ng.plan(cut, x, training=True)
    assert bool(plan.cuts) == by_batch and ng.plan(cut, x).cuts
    ng.compact_(cut, plan)
    assert torch.allclose(model.train()(x), cut.train()(x), rtol=1e-9, atol=1e-12)


class Noisy(nn.Module):
    """Something happens between two layers, in training or in general."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 1, bias=False), nn.Conv2d(6, 2, 1)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self.first(x)))


class Shift(nn.Module):
    def forward(self, x):
        return x + torch.ones_like(x) if self.training else x


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


@pytest.mark.parametrize(
    "between, cut",
    [(Shift(), False), (Noise(), False), (nn.AlphaDropout(0.5), False), (nn.Dropout(0.5), True), (nn.ReLU(), True)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_dead_in_eval_mode_only_stays_while_training(between, cut):
    model = Noisy(between).double()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        gates["first"].g[:4] = 0
    plan = ng.plan(model, image(channels=3), training=True)
    assert ("first.weight" in plan.cuts) == cut
    assert cut or "dead in eval mode only" in str(plan)
    assert len(kept(ng.plan(model, image(channels=3)), "first.weight")) == 2  # not if training is over


def test_layers_that_read_something_else_in_training():
    """The same operations in the same order in both modes, of other tensors."""

    def body(net, x):
        y = net.first(x)
        z = net.second(y)
        return net.one(y if net.training else z), net.other(z if net.training else y)

    parts = {name: nn.Conv2d(6, 2, 1) for name in ("one", "other")}
    model = Net(body, first=nn.Conv2d(3, 6, 1), second=nn.Conv2d(6, 6, 1), **parts).double()
    gates = ng.attach_gates_(model, where=lambda name, _: name in ("first", "second"))
    gates["first"].close_(torch.arange(6) < 2)
    gates["second"].close_(torch.arange(6) > 3)
    cut, x = copy.deepcopy(model), image()
    plan = ng.plan(cut, x, training=True)
    assert "dead in eval mode only" in str(plan) and ng.plan(cut, x).cuts
    ng.compact_(cut, plan)
    for mode in (True, False):
        for one, other in zip(model.train(mode)(x), cut.train(mode)(x), strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def mean_square_of_channels(net, y):
    return y.square().mean(1)


def deviation_of_channels(net, y):
    return y.mean((2, 3)).std(1)


def weights_against_each_other(net, y):
    w = net.last.weight.flatten(1)
    return w @ w.T


@pytest.mark.parametrize("more", [mean_square_of_channels, deviation_of_channels, weights_against_each_other])
def test_a_part_of_the_loss_that_the_forward_computes_in_training(more):
    def body(net, x):
        y = net.first(x)
        z = net.last(y)
        return (z, more(net, y)) if net.training else z

    model = Net(body, first=nn.Conv2d(3, 6, 1), last=nn.Conv2d(6, 4, 1)).double()
    ng.attach_gates_(model)["first"].close_(torch.arange(6) < 2)
    cut, x = copy.deepcopy(model), image()
    plan = ng.plan(cut, x, training=True)
    assert plan.walls and ng.plan(cut, x).cuts
    ng.compact_(cut, plan)
    for one, other in zip(model.train()(x), cut.train()(x), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def multiplied_by_noise(x):
    return x * (1 + torch.randn_like(x))


def some_samples_without(x):
    return x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.5)


def some_places_without(x):
    return x * torch.empty_like(x).bernoulli_(0.5) * torch.bernoulli(torch.full_like(x, 0.5))


@pytest.mark.parametrize("noise", [multiplied_by_noise, some_samples_without, some_places_without])
def test_noise_that_leaves_zeros_alone_holds_nothing(noise):
    between = Net(lambda net, x: noise(x) if net.training else x)
    model = Noisy(between).double()
    ng.attach_gates_(model)["first"].close_(torch.arange(6) < 4)
    assert kept(ng.plan(model, image(), training=True), "first.weight") == [4, 5]


def test_numbers_drawn_in_training_need_the_deviations_that_they_are_drawn_with():
    def body(net, x):
        mean, deviation = net.mean(x), net.deviation(x).exp()
        return net.last(torch.normal(mean, deviation) if net.training else mean)

    layers = {name: nn.Conv2d(3, 6, 1) for name in ("mean", "deviation")}
    model = Net(body, **layers, last=nn.Conv2d(6, 4, 1)).double()
    gates = ng.attach_gates_(model, where=lambda name, _: name == "deviation")
    gates["deviation"].close_(torch.arange(6) < 4)
    cut, x = copy.deepcopy(model), image()
    assert ng.plan(cut, x).cuts
    ng.compact_(cut, ng.plan(cut, x, training=True))
    assert cut.deviation.out_channels == 6
    torch.manual_seed(0)
    wanted = model.train()(x)
    torch.manual_seed(0)
    assert torch.equal(cut.train()(x), wanted)


class Crossed(nn.Module):
    """In training mode it does the same operations, with each layer's result in the other's place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(3, 6, 3)
        self.last, self.other = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x):
        results = self.first(x), self.second(x)
        one, two = results[::-1] if self.training else results
        return self.last(one) + 2 * self.other(two)


def test_what_a_layer_reads_in_training_is_another_layers():
    model = Crossed().double().train()
    gates = ng.attach_gates_(model, where=lambda name, module: name in ("first", "second"))
    with torch.no_grad():
        gates["first"].g[[1, 2, 5]] = 0
        gates["second"].g[[3, 4, 5]] = 0
    large, x = copy.deepcopy(model), image()
    ng.compact_(model, ng.plan(model, image(), training=True))
    assert model.first.out_channels == model.second.out_channels == 5
    assert torch.allclose(model(x), large(x), rtol=1e-10, atol=1e-12)
    assert_same_function(large, model, image())


class LossInside(nn.Module):
    """In training mode it wants labels, hands out a loss, and has one layer more."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.aux = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 2, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x, labels=None):
        x = F.relu(self.first(x))
        y = self.last(x).mean((2, 3))
        return F.cross_entropy(y + self.aux(x).mean((2, 3)), labels) if self.training else y


def test_a_model_that_cannot_be_traced_in_training_mode_is_not_cut_for_training():
    model, x, labels = LossInside().double(), image(), torch.randint(0, 2, (4,))
    gates = ng.attach_gates_(model, where=lambda name, layer: name == "first")
    gates["first"].close_(torch.arange(6) < 3)
    with pytest.raises(ng.TraceError, match=r"in training mode is not seen: .* Give example inputs"):
        ng.plan(model, x, training=True)
    assert kept(ng.plan(model, x), "first.weight") == [3, 4, 5]  # when training is over
    ng.Budget("params: 70%", model, x, ng.Penalty(gates, "l1", 1e-3), 10)  # it counts only
    plan = ng.plan(model, (x, labels), training=True)
    assert "first.weight" not in plan.cuts and "training only" in str(plan)
    with pytest.warns(ShrinkWarning, match="training mode"):
        assert ng.Shrinker(model, x).shrink(0) is None
    model.train()(x, labels).backward()


def test_a_norm_that_averages_over_all_batches_is_traced_in_training_mode():
    model = Noisy(nn.Sequential(nn.BatchNorm2d(6, momentum=None), Noise())).double()
    gates = ng.attach_gates_(model, placement="before-norm")
    gates["first"].close_(torch.arange(6) < 4)
    plan = ng.plan(model, image(), training=True)
    assert not plan.cuts and "dead in eval mode only" in str(plan)
    assert model.between[0].momentum is None


def test_constants_behind_dropout_go_while_training():
    """They are random in training, and on average what they are in eval mode: as before, the run is alike."""
    model = Noisy(nn.Sequential(nn.BatchNorm2d(6), nn.Dropout(0.5))).double()
    with torch.no_grad():
        model.between[0].bias.fill_(0.5)
        ng.attach_gates_(model)["first"].g[:4] = 0
    assert len(kept(ng.plan(model, image(), training=True), "first.weight")) == 2


def test_refusals_touch_nothing():
    model = settle_(Residual(), image())
    close_(model.conv1, [0, 1])
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match="aligned"):
        ng.compact_(model, ng.plan(model, image(), layout="scatter"))
    assert_untouched(model, before)
    plan = ng.plan(model, image())
    other = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(PlanError):
        ng.compact_(other, plan)
    ng.compact_(model, plan)
    with pytest.raises(PlanError, match="already"):
        ng.compact_(model, plan)


def test_a_weight_that_was_tied_to_a_gated_one_since_is_not_cut_in_place():
    """Each of the two layers has other channels left: there is no one cut of their weight."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    gates, x = ng.attach_gates_(model), torch.randn(4, 6, dtype=torch.float64)
    model[2].weight = model[0].weight
    gates["0"].close_(torch.arange(6) < 2)
    gates["2"].close_(torch.arange(6) > 3)
    before, plan = copy.deepcopy(model), ng.plan(model, x, training=True)
    with pytest.raises(PlanError, match=r"0\.weight, 2\.weight are one parameter.* It can't be cut in place"):
        ng.compact_(model, plan)
    assert_untouched(model, before)
    with pytest.warns(ShrinkWarning, match="are one parameter"):
        assert ng.Shrinker(model, x, every=1).shrink(0) is None
    ng.verify(model, ng.compact(model, plan), x)  # a copy has a weight for each


def test_a_loss_that_is_still_alive_does_not_hold_the_old_shapes():
    model, gates = gated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x = image()
    loss = model.train()(x).square().sum()
    loss.backward()
    optimizer.step()
    gates["conv1"].close_(torch.arange(8) < 4)
    ng.compact_(model, ng.plan(model, x, training=True), optimizer=optimizer)
    optimizer.zero_grad()
    model(x).square().sum().backward()  # ``loss`` of the step before is alive
    optimizer.step()
    assert model.conv1.out_channels < 8 and loss.isfinite()


def test_an_optimizer_whose_state_has_other_shapes_is_refused_by_name():
    model, gates = gated()
    optimizer = torch.optim.Adafactor(model.parameters())
    model.train()(image()).square().sum().backward()
    optimizer.step()
    gates["conv1"].close_(torch.arange(8) < 4)
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"Adafactor keeps .* of 'conv1\.weight'"):
        ng.compact_(model, ng.plan(model, image(), training=True), optimizer=optimizer)
    assert_untouched(model, before)


class OfRowsAndColumns(torch.optim.SGD):
    """An optimizer that remembers something of a weight's two sides, as Shampoo, SOAP and Kron do."""

    def __init__(self, parameters, keep):
        super().__init__(parameters, 0.01)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = keep(parameter)


@pytest.mark.parametrize(
    "keep",
    [lambda p: {"sides": [torch.eye(size) for size in p.shape]}, lambda p: {"left": torch.eye(len(p))}],
    ids=["list", "a square one, as the weight is"],
)
def test_an_optimizer_that_remembers_sides_of_weights_is_refused_by_name(keep):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    ng.attach_gates_(model)["0"].close_(torch.arange(6) < 3)
    optimizer = OfRowsAndColumns([layer.weight for layer in (model[0], model[2], model[4])], keep)
    x, before = torch.randn(4, 6, dtype=torch.float64), copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"OfRowsAndColumns keeps '(sides|left)' of '0\.weight'"):
        ng.compact_(model, ng.plan(model, x, training=True), optimizer=optimizer)
    assert_untouched(model, before)


class StepsAnother(torch.optim.Optimizer):
    """As SAM and Lookahead do; the state is the inner one's."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, 0.01, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups


def test_an_optimizer_that_steps_another_is_refused_and_the_other_is_cut_along():
    model, _ = gated(norm=False)
    optimizer = StepsAnother(model.parameters())
    steps(model, optimizer.base_optimizer, batches(1))
    close_gates_(model)
    plan, before = ng.plan(model, image(), training=True), copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"StepsAnother steps another optimizer, SGD, .* optimizer\.base_optimizer"):
        ng.compact_(model, plan, optimizer=optimizer)
    assert_untouched(model, before)
    with pytest.raises(ValueError, match=r"optimizer\.base_optimizer"):
        ng.Shrinker(model, image(), optimizer)
    ng.compact_(model, plan, optimizer=optimizer.base_optimizer)
    steps(model, optimizer.base_optimizer, batches(1))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_bias_for_muon_which_takes_matrices_only_is_refused():
    model = Net(
        lambda net, x: net.last(torch.sigmoid(net.first(x))),
        **{"first": nn.Linear(3, 6), "last": nn.Linear(6, 2, bias=False)},
    ).double()
    ng.attach_gates_(model)["first"].close_(torch.arange(6) < 2)
    optimizer = torch.optim.Muon([model.first.weight, model.last.weight])
    x, before = torch.randn(4, 3, dtype=torch.float64), copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"a bias of 'last', .* Muon, .* matrices only"):
        ng.compact_(model, ng.plan(model, x, training=True), optimizer=optimizer)
    assert_untouched(model, before)


def test_a_sparse_gradient_is_cut_along():
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    gates = ng.attach_gates_(model, inputs=lambda name, layer: name == "1")
    words = torch.randint(0, 9, (2, 5))
    gates["1.inputs"].close_(torch.arange(6) < 2)
    model(words).sum().backward()
    reference = copy.deepcopy(model)
    full = model[0].weight.grad.to_dense()
    ng.compact_(model, ng.plan(model, words, training=True), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert torch.equal(model[0].weight.grad.to_dense(), full[:, 2:])
    assert torch.allclose(model(words), reference(words), rtol=1e-12)


def test_a_computed_weight_is_not_computed_by_a_cut():
    """In training mode spectral_norm moves its vectors each time that its weight is read."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 6, 3))
    model = nn.Sequential(spectral, nn.Conv2d(6, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)).double().train()
    ng.attach_gates_(model, where=lambda name, layer: name == "1")["1"].close_(torch.arange(6) < 3)
    before = {name: buffer.clone() for name, buffer in spectral.named_buffers()}
    ng.compact_(model, ng.plan(model, image(), training=True))
    assert model[1].out_channels == 3
    assert all(torch.equal(buffer, before[name]) for name, buffer in spectral.named_buffers())


def test_weights_that_prune_computes_are_named_with_the_remedy():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)).double()
    prune.ln_structured(model[0], "weight", 0.5, n=2, dim=0)
    model(image())
    with pytest.raises(ng.TraceError, match=r"prune\.remove"):
        ng.plan(model, image())
    prune.remove(model[0], "weight")
    plan = ng.plan(model, image())
    assert len(kept(plan, "0.weight")) == 3


@pytest.mark.parametrize("functionalised", [False, True])
def test_a_zero_scale_that_is_about_to_learn_stays(functionalised):
    """A write through a view makes the trace functional, where BatchNorm is another operation."""

    def body(net, x):
        if functionalised:
            x = x.clone()
            x[:, :, 0] += 1
        return net.last(F.relu(net.bn(net.conv(x))))

    model = settle_(Net(body, conv=nn.Conv2d(3, 6, 3), bn=nn.BatchNorm2d(6), last=nn.Conv2d(6, 2, 1)), image())
    gates = ng.attach_gates_(model)
    gates["conv"].close_(torch.arange(6) == 0)
    with torch.no_grad():
        model.bn.weight[3:] = 0
        model.bn.bias.zero_()
    assert kept(ng.plan(model, image()), "conv.weight") == [1, 2]
    assert set(kept(ng.plan(model, image(), training=True), "conv.weight") or range(6)) >= {1, 2, 3, 4, 5}


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)], ids=["group", "instance"])
def test_a_zero_scale_of_another_norm_that_is_about_to_learn(norm):
    def body(net, x):
        x = net.conv(x)
        return net.last(F.relu(x + net.norm(net.inner(x))))

    inner = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 1))
    model = Net(body, conv=nn.Conv2d(3, 6, 3), inner=inner, norm=norm, last=nn.Conv2d(6, 2, 1)).double()
    nn.init.zeros_(model.norm.weight)
    ng.attach_gates_(model)
    assert ng.plan(model, image()).parameters_after < ng.plan(model, image(), training=True).parameters_after
    assert not ng.plan(model, image(), training=True).cuts


@pytest.mark.parametrize("shape", [None, (), (1, 6, 1, 1)], ids=["number", "buffer", "buffer of channels"])
def test_a_branch_that_is_faded_in_stays_while_training(shape):
    def body(net, x):
        x = net.conv(x)
        return net.last(F.relu(x + net.factor * net.inner(x)))

    inner = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 1))
    factor = 0.0 if shape is None else nn.Buffer(torch.zeros(shape))
    model = Net(body, conv=nn.Conv2d(3, 6, 3), inner=inner, factor=factor, last=nn.Conv2d(6, 2, 1)).double()
    ng.attach_gates_(model)
    assert ng.plan(model, image()).parameters_after < ng.plan(model, image(), training=True).parameters_after
    assert not ng.plan(model, image(), training=True).cuts


@pytest.mark.parametrize("first", [True, False])
def test_lbfgs_is_refused_whichever_parameter_comes_first(first):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)).double()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        gates["0"].g[1:3] = 0
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(parameters if first else parameters[::-1])
    x = image()

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = copy.deepcopy(model)
    plan = ng.plan(model, x, training=True)
    assert plan.cuts
    with pytest.raises(ValueError, match=r"LBFGS .* new optimizer"):
        ng.compact_(model, plan, optimizer=optimizer)
    assert_untouched(model, before)


def test_a_model_cut_in_inference_mode_goes_on_training():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1)).double()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        gates["0"].g[1:3] = 0
    with torch.inference_mode():
        ng.compact_(model, ng.plan(model, image(), training=True))
    model(image()).sum().backward()
    assert len(model[0].weight) == len(model[0].weight.grad) == 4
