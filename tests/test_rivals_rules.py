"""The update rule of each rival method, against a reference written by hand from its paper, in float64."""

import copy
import math
import pickle

import pytest
import torch
from helpers import assert_same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import narrowgate as ng
from narrowgate.models import LeNet5, PreActResNet
from narrowgate.rivals.apg import ApgSgd
from narrowgate.rivals.filters import filters_of
from narrowgate.rivals.methods import METHODS
from narrowgate.rivals.scaling import use_scaling_gates_
from narrowgate.rivals.wiring import memory_weights, rescale_, wires_of
from narrowgate.train.gating import attach, weights_of
from narrowgate.train.ranking import close_smallest_
from narrowgate.train.recipe import Recipe
from narrowgate.train.setup import make_optimizer

CPU = torch.device("cpu")
STEPS = 6
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


class Small(nn.Module):
    """conv - norm - ReLU - conv - norm - ReLU - linear, in float64, for images of 1 x 6 x 6."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
        self.fc = nn.Linear(20, 3)
        self.double()

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(F.relu(self.bn2(self.conv2(x))).flatten(1))


def recipe_for(method, *settings):
    text = '[model]\nname = "lenet5"\n[data]\nsource = "mnist"\n[train]\nepochs = 1\n[optimizer]\nlr = 0.05\n'
    return Recipe.from_toml(text, [f"method.name={method}", *settings])


def batches(steps=STEPS):
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(8, 1, 6, 6, generator=draw, dtype=torch.float64), torch.randint(3, (8,), generator=draw)


def train_by(recipe, model, loss_of=F.cross_entropy):
    """What the engine's step does, with a recipe's gates, penalty and optimizer."""
    gates = attach(recipe, model, torch.zeros(2, 1, 6, 6, dtype=torch.float64))
    part = recipe.penalty
    weights = weights_of(recipe, model, gates, torch.zeros(2, 1, 6, 6, dtype=torch.float64))
    penalty = ng.Penalty(gates, part.kind, recipe.strength_schedule(), weights=weights)
    optimizer = make_optimizer(recipe, model, gates, CPU, penalty)
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        (loss if part.proximal else loss + penalty()).backward()
        optimizer.step()
        if part.proximal and not part.accelerated:
            penalty.proximal_(recipe.optimizer.lr)
    return gates, optimizer


def gradients_of(model, x, y):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(F.cross_entropy(model(x), y), parameters), strict=True))


@torch.no_grad()
def descend_(model, moved, lr):
    for name, parameter in model.named_parameters():
        parameter.sub_(lr * moved[name])


def soft(x, threshold):
    return x.sign() * (x.abs() - threshold).clamp(min=0)


def test_slimming_adds_the_sign_of_the_scales_to_their_gradient():
    ours, theirs = Small(), Small()
    train_by(recipe_for("slimming", "penalty.strength=0.03", "optimizer.weight_decay=0.01"), ours)
    for norm in (theirs.bn1, theirs.bn2):
        nn.init.constant_(norm.weight, 0.5)
    velocity = None
    for x, y in batches():
        gradient = gradients_of(theirs, x, y)
        for name, parameter in theirs.named_parameters():
            gradient[name] = gradient[name] + 0.01 * parameter.detach()
            if name in ("bn1.weight", "bn2.weight"):
                gradient[name] = gradient[name] + 0.03 * parameter.detach().sign()
        velocity = gradient if velocity is None else {k: 0.9 * velocity[k] + gradient[k] for k in gradient}
        descend_(theirs, velocity, 0.05)
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()), **CLOSE)


def test_slimming_prunes_a_share_of_all_scales_by_size():
    model = Small()
    gates = ng.attach_gates_(model, "linear")
    with torch.no_grad():
        model.bn1.weight.copy_(torch.tensor([0.5, -0.01, 0.9, 0.02]))
        model.bn2.weight.copy_(torch.tensor([-0.03, 0.04, 0.05, -0.8, 0.7]))
    assert close_smallest_(gates, 4 / 9) == 4
    assert model.bn1.weight.tolist() == pytest.approx([0.5, 0, 0.9, 0])
    assert model.bn2.weight.tolist() == pytest.approx([0, 0, 0.05, -0.8, 0.7])
    assert close_smallest_(gates, 0.5) == 0  # 4.5 rounds to the four that are closed
    assert close_smallest_(gates, 0.99) == 3  # each layer keeps its largest
    assert gates.closed_fraction() == 7 / 9 and model.bn1.weight[2] != 0 and model.bn2.weight[3] != 0
    for share in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="must be 0 or more and below 1"):
            close_smallest_(gates, share)


def test_a_layer_that_training_closed_has_no_largest_gate_that_another_closes_for():
    """Penalties leave closed gates beside zero, not at it: these are closed all the same, and count."""
    model = Small()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        gates["conv1"].g.copy_(torch.tensor([1e-4, -5e-5, 2e-5, 0.0]))
        gates["conv2"].g.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    assert gates.closed_fraction() == 4 / 9
    assert close_smallest_(gates, 4 / 9) == 0 and gates.closed_fraction() == 4 / 9
    assert close_smallest_(gates, 6 / 9) == 2 and gates["conv2"].g.count_nonzero() == 3


@pytest.mark.parametrize(("per_layer", "closes"), [(False, [2, 2]), (True, [1, 3])])
def test_a_share_to_close_is_of_the_gates_that_there_were(per_layer, closes):
    model = Small()
    gates = ng.attach_gates_(model, "linear")
    with torch.no_grad():
        model.bn1.weight.copy_(torch.tensor([0.1, 0.2, 0.8, 0.9]))
        model.bn2.weight.copy_(torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7]))
    # Of 17 gates, 8 are gone: 12 are to be closed. Of the first layer's 10, 6 are gone, and 7 are to be closed.
    assert close_smallest_(gates, 0.7, per_layer, began={"bn1": 10, "bn2": 7}) == 4
    assert [int((gate.g == 0).sum()) for gate in gates.modules()] == closes


def test_l0_is_the_papers_estimate_of_the_gradient_with_a_strength_by_parameters():
    """One gated layer: the gradient through the sampled gate by its closed form, the penalty's by hand."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    theirs = copy.deepcopy(ours)
    recipe = recipe_for("l0", "penalty.strength=2e-3", "penalty.factors={ '1' = 3.0 }", "optimizer.momentum=0.0")
    torch.manual_seed(7)
    gates, _ = train_by(recipe, ours)
    log_alpha = torch.zeros(6, dtype=torch.float64)
    temperature, low, high = 2 / 3, -0.1, 1.1
    shift = temperature * math.log(-low / high)
    torch.manual_seed(7)
    for x, y in batches():
        u = torch.empty_like(log_alpha).uniform_(1e-6, 1 - 1e-6)
        s = torch.sigmoid((u.log() - (1 - u).log() + log_alpha) / temperature)
        z = (s * (high - low) + low).clamp(0, 1).requires_grad_()
        first, last = theirs[1], theirs[3]
        hidden = F.relu(F.linear(x.flatten(1), first.weight * z[:, None], first.bias * z))
        loss = F.cross_entropy(F.linear(hidden, last.weight, last.bias), y)
        through_z, *rest = torch.autograd.grad(loss, [z, *theirs.parameters()])
        inside = ((z > 0) & (z < 1)).double()
        open_ = torch.sigmoid(log_alpha - shift)
        gradient = through_z * inside * (high - low) * s * (1 - s) / temperature
        gradient += 2e-3 * 3.0 * (36 + 1) * open_ * (1 - open_)
        log_alpha = log_alpha - 0.05 * gradient
        descend_(theirs, dict(zip(dict(theirs.named_parameters()), rest, strict=True)), 0.05)
    assert_same(gates["1"].g.detach(), log_alpha, rtol=1e-9, atol=1e-12)  # log1p(-u) there, log(1 - u) here
    assert_same(ours[3].weight, theirs[3].weight, rtol=1e-9, atol=1e-12)


def scaled_forward(model, x, factors):
    """``Small`` with a factor on every output of the convolutions."""
    one, two = (factor[:, None, None] for factor in factors)
    x = F.relu(model.bn1(model.conv1(x) * one))
    return model.fc(F.relu(model.bn2(model.conv2(x) * two)).flatten(1))


def selected(strength, reference):
    """Factors after some steps: by the engine, and by a reference for one step of the factors."""
    ours, theirs = Small(), Small()
    settings = (f"penalty.strength={strength}", "optimizer.nesterov=true", "optimizer.weight_decay=0.01")
    gates, optimizer = train_by(recipe_for("sparse-selection", *settings), ours)
    at = [torch.ones(4, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    state = [{}, {}]
    velocity = {}
    for x, y in batches():
        at = [factor.requires_grad_() for factor in at]
        names, parameters = zip(*theirs.named_parameters(), strict=True)
        found = torch.autograd.grad(F.cross_entropy(scaled_forward(theirs, x, at), y), [*at, *parameters])
        gradient = {n: g + 0.01 * p.detach() for n, g, p in zip(names, found[2:], parameters, strict=True)}
        velocity = {n: 0.9 * velocity[n] + g if n in velocity else g for n, g in gradient.items()}
        at = [reference(f.detach(), g, own) for f, g, own in zip(at, found[:2], state, strict=True)]
        descend_(theirs, {n: gradient[n] + 0.9 * velocity[n] for n in gradient}, 0.05)  # Nesterov's
    assert_same(ours.fc.weight, theirs.fc.weight, rtol=1e-11, atol=1e-13)
    return gates, optimizer, at


def test_sparse_selection_is_accelerated_proximal_gradient():
    """In the papers' first form: factors and their last change apart, the gradient taken ahead of the factors."""
    strength, lr, momentum = 0.3, 0.05, 0.9

    def reference(ahead, gradient, own):
        factors, change = own.get("factors", ahead), own.get("change", torch.zeros_like(ahead))
        new = soft(factors + momentum * change - lr * gradient, lr * strength)
        own.update(factors=new, change=new - factors)
        return new + momentum * own["change"]

    gates, optimizer, at = selected(strength, reference)
    assert min(factor.min() for factor in at) > 0.2  # nothing was held at zero
    for name, factor in zip(("conv1", "conv2"), at, strict=True):
        assert_same(gates[name].g.detach(), factor, rtol=1e-11, atol=1e-13)
        assert set(optimizer.state[gates[name].g]) == {"momentum_buffer"}


def test_sparse_selection_holds_factors_at_zero():
    strength, lr, momentum = 4.0, 0.05, 0.9

    def reference(at, gradient, own):
        shrunk = soft(at - lr * gradient, lr * strength)
        own["v"] = shrunk - at + momentum * own.get("v", torch.zeros_like(at))
        return (shrunk + momentum * own["v"]).clamp(min=0)

    gates, _, at = selected(strength, reference)
    assert sum(int((factor == 0).sum()) for factor in at) > 2
    for name, factor in zip(("conv1", "conv2"), at, strict=True):
        assert_same(gates[name].g.detach(), factor, rtol=1e-11, atol=1e-13)
        assert_same(gates[name].g == 0, factor == 0)


def test_ista_soft_thresholds_the_scales_by_the_memory_of_a_channel():
    ours, theirs = Small(), Small()
    gates, _ = train_by(recipe_for("ista", "penalty.strength=0.3", "optimizer.momentum=0.0"), ours)
    # Weights into a channel, out of it, and its own map, in input images of 36.
    cost = {"bn1.weight": (9 + 5 * 9 + 16) / 36, "bn2.weight": (4 * 9 + 3 * 4 + 4) / 36}
    for x, y in batches():
        descend_(theirs, gradients_of(theirs, x, y), 0.05)
        for name, weight in cost.items():
            scale = theirs.get_parameter(name)
            scale.data = soft(scale.data, 0.05 * 0.3 * weight)
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()), **CLOSE)
    assert gates.closed_fraction() < 1
    assert ours.bn1.weight.min() < 0.9


def test_memory_weights_are_the_papers_formula():
    weights = memory_weights(LeNet5(norm=True), torch.zeros(2, 1, 28, 28))
    assert weights == pytest.approx(
        {
            "bn1": (25 + 25 * 50 + 24 * 24) / 784,
            "bn2": (25 * 20 + 16 * 500 + 8 * 8) / 784,
            "bn3": (800 + 10 + 1) / 784,
        }
    )
    wires = wires_of(PreActResNet(11, classes=10, channels=1), torch.zeros(2, 1, 8, 8))
    assert (wires["stages.1.0.bn1"].before, sorted(wires["stages.1.0.bn1"].behind)) == (
        None,
        ["stages.1.0.conv1", "stages.1.0.shortcut"],
    )
    assert wires["bn"].behind == ("fc",) and all(wire.passes_scale for wire in wires.values())


def test_rescaling_keeps_the_function_and_trades_gradients():
    plain, scaled = Small().train(), Small().train()
    x, y = next(batches())
    assert rescale_(scaled, x, 0.01) == ["bn1", "bn2"]
    assert_same(scaled.bn1.weight, plain.bn1.weight * 0.01)
    before, after = gradients_of(plain, x, y), gradients_of(scaled, x, y)
    assert_same(scaled(x), plain(x), **CLOSE)
    assert_same(after["bn2.weight"], before["bn2.weight"] * 100, rtol=1e-11, atol=1e-12)
    assert_same(after["fc.weight"], before["fc.weight"] / 100, rtol=1e-11, atol=1e-14)
    rescale_(scaled, x, 100)
    assert_same(dict(scaled.named_parameters()), dict(plain.named_parameters()), rtol=1e-12, atol=1e-15)


def test_rescaling_leaves_alone_what_a_factor_does_not_pass():
    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.conv3, self.bn3 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            x = F.relu6(self.bn1(self.conv1(x)))
            x = x + self.bn2(self.conv2(x))
            return self.fc(F.leaky_relu(self.bn3(self.conv3(x))).mean((2, 3)))

    model, x = Awkward().double().eval(), torch.randn(2, 1, 6, 6, dtype=torch.float64)
    before = model(x)
    assert rescale_(model, x, 0.1) == ["bn3"]
    assert_same(model(x), before, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="by a number above 0"):
        rescale_(model, x, 0.0)


@pytest.mark.parametrize("read", ["bn.weight", "bn.bias", "fc.weight"])
def test_rescaling_leaves_alone_what_is_read_by_itself(read):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

        def forward(self, x):
            found = self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))
            return found if read is None else found + self.get_parameter(read).sum()

    model, x = Reads().double().eval(), torch.randn(2, 1, 6, 6, dtype=torch.float64)
    nn.init.normal_(model.bn.bias)
    before = model(x)
    assert rescale_(model, x, 0.1) == []
    assert_same(model(x), before, rtol=0, atol=0)
    read = None
    assert rescale_(model, x, 0.1) == ["bn"]


@pytest.mark.parametrize("proximal", [False, True])
def test_group_lasso_moves_filters_by_their_norm(proximal):
    ours, theirs = Small(), Small()
    settings = ("penalty.strength=0.4", f"penalty.proximal={str(proximal).lower()}", "optimizer.momentum=0.0")
    train_by(recipe_for("group-lasso", *settings), ours)
    for x, y in batches():
        gradient = gradients_of(theirs, x, y)
        for name in ("conv1.weight", "conv2.weight"):
            filters = theirs.get_parameter(name).detach()
            norms = filters.flatten(1).norm(dim=1)[:, None, None, None]
            if not proximal:
                gradient[name] = gradient[name] + 0.4 * torch.where(norms > 0, filters / norms, 0.0)
        descend_(theirs, gradient, 0.05)
        for name in ("conv1.weight", "conv2.weight") if proximal else ():
            filters = theirs.get_parameter(name)
            norms = filters.data.flatten(1).norm(dim=1)[:, None, None, None]
            filters.data = filters.data * (1 - 0.05 * 0.4 / norms).clamp(min=0)
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()), **CLOSE)


def test_a_filter_at_zero_stays_there():
    model = LeNet5(bias=False).double()
    filters = filters_of(model, 2)
    assert {name: filters[name].size for name in filters} == {"conv1": 20, "conv2": 50, "fc1.inputs": 800, "fc1": 500}
    with torch.no_grad():
        model.conv1.weight[3] = 0
    ng.Penalty(filters, "l1", 0.5)().backward()
    assert model.conv1.weight.grad.isfinite().all() and (model.conv1.weight.grad[3] == 0).all()
    column, row = model.fc1.weight[:, 5], model.fc1.weight[7]
    assert_same(
        model.fc1.weight.grad[7, 5], 0.5 * model.fc1.weight[7, 5] * (1 / column.norm() + 1 / row.norm()), **CLOSE
    )
    with pytest.raises(ValueError, match="its weights are gone"):
        filters["conv1"].open_least_closed_()
    with pytest.raises(ValueError, match="order is 1 or 2, got 3"):
        filters_of(model, 3)


def test_a_weight_in_two_groups_is_shrunk_by_both_and_small_groups_reach_zero():
    model = LeNet5(bias=False).double()
    with torch.no_grad():
        model.fc1.weight[7] *= 1e-3
        model.fc1.weight[:, 5] *= 1e-3
    before = model.fc1.weight.detach().clone()
    ng.Penalty(filters_of(model, 2), "l1", 0.5).proximal_(0.1)
    rows, columns = ((1 - 0.05 / before.norm(dim=axis)).clamp(min=0) for axis in (1, 0))
    assert_same(model.fc1.weight.detach(), before * rows[:, None] * columns, **CLOSE)
    assert (rows == 0).nonzero().tolist() == [[7]] and (columns == 0).nonzero().tolist() == [[5]]


def test_filters_of_gpt_2s_layers_are_columns():
    layers = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    model = nn.Sequential(layers.Conv1D(6, 4), nn.ReLU(), layers.Conv1D(3, 6)).double().eval()
    filters = filters_of(model, 2, inputs=lambda name, layer: name == "2")
    assert_same(filters["0"].g, model[0].weight.norm(dim=0), **CLOSE)
    assert_same(filters["2.inputs"].g, model[2].weight.norm(dim=1), **CLOSE)
    gone = torch.tensor([True, False, False, True, False, False])
    filters["0"].close_(gone)
    x = torch.randn(5, 4, dtype=torch.float64)
    assert_same((model[0](x) == 0).all(0), gone)
    small = ng.compact(model, ng.plan(model, x))
    assert small[0].weight.shape == (4, 4) and small[2].weight.shape == (4, 3)


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_of_a_transposed_convolution_run_group_by_group(groups):
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 6, 2, groups=groups)
    model = nn.Sequential(nn.Conv2d(1, 4, 1), up, nn.Conv2d(6, 3, 1)).double().eval()
    x = torch.randn(3, 1, 5, 5, dtype=torch.float64)
    filters = filters_of(model, 2)
    per_group = up.weight.view(groups, 4 // groups, 6 // groups, 2, 2)
    assert_same(filters["1"].g, per_group.square().sum((1, 3, 4)).sqrt().flatten(), **CLOSE)
    ng.Penalty(filters, "l1", 0.1).proximal_(0.5)
    gone = torch.tensor([True, False, False, True, False, False])
    filters["1"].close_(gone)
    assert_same((up(torch.randn(1, 4, 5, 5, dtype=torch.float64)) == 0).all((0, 2, 3)), gone)
    small = ng.compact(model, ng.plan(model, x))
    assert small[1].out_channels == 4
    ng.verify(model, small, x)


def test_filters_that_can_not_be_set_to_zero_are_named():
    def net(groups=1):
        return nn.Sequential(nn.Linear(3, 4), nn.Conv1d(4, 4, 1, groups=groups), nn.Conv1d(4, 2, 1))

    normed = net()
    nn.utils.parametrizations.weight_norm(normed[1])
    pruned = net()
    prune.l1_unstructured(pruned[1], "weight", 0.5)
    for model in (normed, pruned):
        with pytest.raises(ValueError, match=r"the weight of layer '1' is computed.*leave the layer out with where="):
            filters_of(model, 1)
        assert list(filters_of(model, 1, lambda name, layer: name != "1")) == ["0"]
    with pytest.raises(ValueError, match="layer '1' has groups=2: its columns serve several inputs"):
        filters_of(net(2), 2, inputs=lambda name, layer: name == "1")


def test_frozen_filters_take_no_proximal_step():
    model = Small()
    model.conv1.weight.requires_grad_(False)
    before = copy.deepcopy(model)
    ng.Penalty(filters_of(model, 2), "l1", 0.5).proximal_(0.1)
    assert_same(model.conv1.weight, before.conv1.weight)
    assert (model.conv2.weight.abs().sum((1, 2, 3)) < before.conv2.weight.abs().sum((1, 2, 3))).all()


@pytest.mark.parametrize("how", ["one norm", "one scale", "two norms"])
def test_a_closed_filter_takes_no_norm_along_that_others_need(how):
    model = nn.Module()
    model.a, model.norm, model.b = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(1, 4, 3)
    model.again = model.norm if how == "one norm" else nn.BatchNorm2d(4)
    if how == "one scale":
        model.again.weight, model.again.bias = model.norm.weight, model.norm.bias
    model.last = nn.Conv2d(4, 2, 1)
    nn.init.constant_(model.norm.bias, 0.5)
    filters_of(model, 2)["a"].close_(torch.tensor([True, False, False, False]))
    assert (model.a.weight[0] == 0).all() and model.a.bias[0] == 0
    assert bool(model.norm.weight[0] == model.norm.bias[0] == 0) == (how == "two norms")


def test_magnitude_pruning_takes_the_smallest_filters_of_each_layer():
    model = Small()
    recipe = recipe_for("magnitude", "finish.close=0.5")
    filters = attach(recipe, model, torch.zeros(2, 1, 6, 6))
    before = copy.deepcopy(model)
    assert close_smallest_(filters, recipe.finish.close, recipe.finish.per_layer) == 2 + 2
    for conv, norm, old in ((model.conv1, model.bn1, before.conv1), (model.conv2, model.bn2, before.conv2)):
        sums = old.weight.abs().sum((1, 2, 3))
        gone = sums.argsort()[:2]
        kept = sums.argsort()[2:]
        assert (conv.weight[gone] == 0).all() and (conv.bias[gone] == 0).all()
        assert (norm.weight[gone] == 0).all() and (norm.bias[gone] == 0).all()
        assert_same(conv.weight[kept], old.weight[kept])
        assert_same(conv.bias[kept], old.bias[kept])
    assert_same(model.fc.weight, before.fc.weight)
    x = torch.randn(3, 1, 6, 6, dtype=torch.float64)
    plan = ng.plan(model.eval(), x)
    small = ng.compact(model, plan)
    assert (small.conv1.out_channels, small.conv2.out_channels) == (2, 3)
    ng.verify(model, small, x)


class Twice(nn.Module):
    """A BatchNorm that is used twice, as in a head that several levels share."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2, self.fc = (
            nn.Conv2d(1, 4, 1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 1),
            nn.Conv2d(4, 2, 1),
        )

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv2(F.relu(self.bn(self.conv1(x)))))))


def test_a_norm_that_is_used_twice_has_both_places_behind_it():
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(3, 1, 4, 4, dtype=torch.float64)
    model(x)
    before = model.eval()(x)
    assert memory_weights(model, x) == {"bn": (16 / 4 + 8 / 4 + 2 * 16) / 16}
    assert rescale_(model, x, 0.1) == ["bn"]
    assert_same(model(x), before, rtol=1e-10, atol=1e-12)


def test_weights_multiply_each_layers_share_of_a_penalty():
    gates = ng.attach_gates_(Small())
    even, uneven = ng.Penalty(gates, "bounded-l1", 0.2), ng.Penalty(gates, "bounded-l1", 0.2, weights={"conv2": 3.0})
    one = 0.2 * (1 - math.exp(-1))
    assert even().item() == pytest.approx(9 * one) and uneven().item() == pytest.approx((4 + 3 * 5) * one)
    ng.Penalty(gates, "l1", 0.2, weights={"conv2": 3.0}).proximal_(0.5)
    assert_same(gates["conv1"].g.detach(), torch.full((4,), 0.9, dtype=torch.float64), **CLOSE)
    assert_same(gates["conv2"].g.detach(), torch.full((5,), 0.7, dtype=torch.float64), **CLOSE)
    with pytest.raises(ValueError, match="a weight for 'conv9', where no gate is; gates are on conv1, conv2"):
        ng.Penalty(gates, "l1", 0.2, weights={"conv9": 1.0})
    with pytest.raises(ValueError, match="the weight of 'conv1' must be a finite number, 0 or above"):
        ng.Penalty(gates, "l1", 0.2, weights={"conv1": -1.0})


def test_scaling_factors_drop_channels_and_whole_blocks_exactly():
    torch.manual_seed(0)
    model = PreActResNet(20, classes=4, channels=1, dropout=0.0).double()
    settings = ("gates.groups=['channels', 'blocks']", "gates.skip=['conv1']")
    gates = attach(recipe_for("sparse-selection", *settings), model, torch.zeros(2, 1, 8, 8))
    assert gates["blocks"].size == 6 and gates["stages.1.1.conv1"].size == 32
    assert not {"conv1", "stages.1.1.conv3"} & set(gates)
    assert {gate.kind for gate in gates.modules()} == {"scaling"}
    assert sum(p.numel() for name, p in model.named_parameters() if name.endswith("g")) == gates.count
    with torch.no_grad():
        gates["blocks"].g[gates["blocks"].names.index("stages.1.1.conv3")] = 0
        gates["stages.0.0.conv1"].g[:5] = 0
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    small = ng.compact(model.eval(), ng.plan(model, x))
    assert type(small.stages[1][1]) is torch.nn.Identity and small.stages[0][0].conv1.out_channels == 11
    ng.verify(model, small, x)


def apg_of(model, gates):
    factors = {id(g) for g in gates.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in factors]
    groups = [{"params": others}, {"params": gates.parameters()}]
    return ApgSgd(groups, ng.Penalty(gates, "l1", 0.5), lr=0.1, momentum=0.9)


def step_(model, optimizer):
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 72, dtype=torch.float64).view(2, 1, 6, 6)).square().sum().backward()
    optimizer.step()


def test_a_copy_of_a_model_and_its_accelerated_steps_goes_the_same_way():
    model = Small()
    ng.attach_gates_(model)
    optimizer = apg_of(model, use_scaling_gates_(model))
    step_(model, optimizer)
    for twin, its_optimizer in (copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))):
        before = twin.conv1.gate.g.detach().clone()
        step_(twin, its_optimizer)
        assert not torch.equal(twin.conv1.gate.g, before) and torch.equal(model.conv1.gate.g, before)


@pytest.mark.parametrize("kind", ["exponential", "linear", "hard-concrete", "scaling", "filters"])
def test_values_are_those_of_the_moment(kind):
    model = Small()
    if kind == "filters":
        gates = filters_of(model, 2)
    else:
        gates = ng.attach_gates_(model, "exponential" if kind == "scaling" else kind)
        gates = use_scaling_gates_(model) if kind == "scaling" else gates
    then = gates.values()
    kept = copy.deepcopy(then)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.1)
    assert_same(then, kept)
    assert not any(torch.equal(now, then[name]) for name, now in gates.values().items())


def test_frozen_scaling_factors_take_no_accelerated_step():
    model = Small()
    ng.attach_gates_(model)
    gates = use_scaling_gates_(model)
    gates["conv1"].g.requires_grad_(False)
    optimizer = apg_of(model, gates)
    for _ in range(3):
        step_(model, optimizer)
    assert (gates["conv1"].g == 1).all() and (gates["conv2"].g < 1).all()


def test_scaling_factors_do_not_stand_for_linear_gates():
    model = Small()
    ng.attach_gates_(model, "linear")
    with pytest.raises(ValueError, match=r"the gates on bn1, bn2 are BatchNorm's own scales.*kind='exponential'"):
        use_scaling_gates_(model)
    assert ng.gates_of(model).kind == "linear"


def test_every_method_has_a_paper_and_keys_that_recipes_have():
    assert len(METHODS) == 7
    for name, method in METHODS.items():
        tables = recipe_for(name).tables()
        assert len(method.paper) > 20
        for key, value in method.keys.items():
            table, _, own = key.partition(".")
            assert tables[table][own] == value, f"{name}: {key}"
