"""compose: several plans as one, for the model that the first was made for."""

import copy
import random

import pytest
import torch
from flow_helpers import Net, assert_same_function, close_, count, image, kept, settle_
from flow_networks import close_some_, random_network
from helpers import spread_gates_
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.flow.compose import compose
from narrowgate.flow.plan import Plan
from narrowgate.flow.surgery import cut, tensors_of


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def numbers(model):
    """The layers' own numbers of channels and groups, which no state dict holds."""
    return [
        {key: value for key, value in vars(module).items() if isinstance(value, int)} | {"class": type(module)}
        for module in model.modules()
    ]


def plan_or_none(model, inputs, **options):
    try:
        return ng.plan(model, inputs, **options)
    except ng.CollapseError:
        return None


def all_of(plans):
    whole = plans[0]
    for each in plans[1:]:
        whole = compose(whole, each)
    return Plan.from_json(whole.to_json())


def assert_same_channels(original, plans, whole):
    """Numbered elements end up in the same places, one cut after another or all at once."""
    for name, tensor in tensors_of(original).items():
        ids = torch.arange(tensor.numel()).reshape(tensor.shape)
        step_by_step = ids
        for plan in plans:
            if name in plan.cuts:
                step_by_step = cut(step_by_step, plan.cuts[name])
        at_once = cut(ids, whole.cuts[name]) if name in whole.cuts else ids
        assert torch.equal(step_by_step, at_once), name


def check_copies(rng):
    """Rounds on a random network, constants and all, the last in any layout; how many cut, and is there a new bias?"""
    original, inputs = random_network(rng)
    small, plans = original, []
    for layout in ("aligned", "aligned", rng.choice(["aligned", "scatter"])):
        plan = plan_or_none(small, inputs, layout=layout, round_to=rng.choice([1, 1, 2]))
        if plan is None:
            break
        small = ng.compact(small, plan)
        plans.append(plan)
        if len(plans) < 3:
            close_some_(small, rng)
    if len(plans) < 2:
        return 0, False
    whole = all_of(plans)
    again = ng.compact(original, whole)
    assert shapes(again) == shapes(small)
    assert numbers(again) == numbers(small)
    assert_same_channels(original, plans, whole)
    again.load_state_dict(small.state_dict())
    for ours, theirs in zip(again(inputs), small(inputs), strict=True):
        assert torch.equal(ours, theirs)
    assert whole.parameters_before == count(original) and whole.parameters_after == count(small)
    return sum(bool(plan.cuts) for plan in plans), any(edit.new_bias or edit.mean for edit in plans[0].edits.values())


def test_random_networks_in_rounds():
    results = [check_copies(random.Random(seed)) for seed in (*range(8), 33, 91, 119, 146)]
    assert sum(rounds > 1 for rounds, _ in results) > 5, "hardly any second round cut something: the test is blind"
    assert sum(moved for _, moved in results) > 3, "hardly any first round moved a constant: the test is blind"


def check_in_place(rng):
    """The same while training: gates close in rounds, and a fresh gated model takes all cuts at once; how many?"""
    model, inputs = random_network(rng)
    gates = ng.attach_gates_(model, where=lambda name, module: not isinstance(module, nn.ConvTranspose2d))
    spread_gates_(gates, closed=0.0)
    fresh, plans = copy.deepcopy(model), []
    for _ in range(3):
        for gate in gates.modules():
            closed = torch.rand(gate.size) < rng.choice([0.0, 0.3, 0.6])
            closed[torch.randint(gate.size, ())] = False
            gate.close_(closed)
        plan = plan_or_none(model, inputs, training=True)
        if plan is not None:
            ng.compact_(model, plan)
            plans.append(plan)
    if not plans:
        return 0
    ng.compact_(fresh, all_of(plans))
    assert shapes(fresh) == shapes(model)
    assert numbers(fresh) == numbers(model)
    fresh.load_state_dict(model.state_dict())
    for ours, theirs in zip(fresh(inputs), model(inputs), strict=True):
        assert torch.equal(ours, theirs)
    return sum(bool(plan.cuts) for plan in plans)


def test_random_gated_networks_in_rounds():
    cuts = [check_in_place(random.Random(seed)) for seed in range(12)]
    assert sum(number > 1 for number in cuts) > 3, "hardly any second round removed something: the test is blind"


def grouped():
    def body(net, x):
        x = F.relu(net.first(x))
        x = F.relu(net.pairs(x))
        x = F.relu(net.up(F.relu(net.depthwise(x))))
        return net.last(F.relu(net.bn(net.thin(x))).mean((2, 3)))

    return Net(
        body,
        first=nn.Conv2d(3, 12, 3, padding=1),
        pairs=nn.Conv2d(12, 12, 3, padding=1, groups=3),
        depthwise=nn.Conv2d(12, 24, 3, groups=12),
        up=nn.ConvTranspose2d(24, 6, 2, stride=2),
        thin=nn.Conv2d(6, 8, 1, bias=False),
        bn=nn.BatchNorm2d(8),
        last=nn.Linear(8, 3),
    )


def close_both_(model, original, whole):
    """Close the same channels of a model that was cut and of the original it came from."""
    for name, gate in ng.gates_of(model)._gates.items():
        closed = torch.arange(gate.size) % 3 == 1
        gate.close_(closed)
        axis = int(isinstance(model.get_submodule(name), nn.ConvTranspose2d))
        places = None if whole is None else kept(whole, f"{name}.weight", axis)
        first = ng.gates_of(original)[name]
        places = torch.arange(first.size) if places is None else torch.tensor(places)
        first.close_(torch.zeros(first.size, dtype=torch.bool).index_fill(0, places[closed], True))


@pytest.mark.parametrize("rounds", [2, 3])
def test_with_zeros_alone_one_plan_gives_the_same_function(rounds):
    original = settle_(grouped(), image())
    spread_gates_(ng.attach_gates_(original, placement="after-norm"), closed=0.0)
    model, plans = copy.deepcopy(original), []
    for _ in range(rounds):
        close_both_(model, original, all_of(plans) if plans else None)
        plans.append(ng.plan(model, image(), training=True))
        ng.compact_(model, plans[-1])
    whole = all_of(plans)
    sizes = [plan.parameters_after for plan in plans]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == rounds
    at_once = ng.compact(original, whole)
    assert_same_function(model, at_once, image())
    assert_same_function(original, at_once, image())
    assert whole.rows[0].total == 12 and whole.rows[0].kept == len(kept(whole, "first.weight"))


def test_a_bias_of_the_first_plan_is_cut_by_the_second_and_saved(tmp_path):
    """The original has no such bias, so no plan for it may name one."""

    def build():
        parts = {"first": nn.Linear(3, 6), "middle": nn.Linear(6, 5, bias=False), "last": nn.Linear(5, 2)}
        return Net(lambda net, x: net.last(net.middle(torch.sigmoid(net.first(x))).relu()), **parts).double()

    original, x = build(), torch.randn(4, 3, dtype=torch.float64)
    close_(original.first, [0, 1], 0.5)
    first = ng.plan(original, x)
    small = ng.compact(original, first)
    assert small.middle.bias is not None
    close_(small.middle, [1, 3])
    second = ng.plan(small, x)
    assert "middle.bias" in second.cuts
    small = ng.compact(small, second)
    whole = compose(first, second)
    assert "middle.bias" not in whole.cuts and whole.edits["middle.weight"].new_bias
    ng.save(small, whole, tmp_path / "small")
    assert torch.equal(ng.load(tmp_path / "small", build)(x), small(x))


def test_plans_that_do_not_follow_one_another_are_refused():
    model = settle_(grouped(), image())
    close_(model.thin, [0, 1])
    close_(model.first, [0, 4, 8])
    aligned, scatter = (ng.plan(model, image(), layout=layout) for layout in ("aligned", "scatter"))
    with pytest.raises(ng.PlanError, match=r"'first\.weight' of shape"):
        compose(aligned, aligned)
    residual = settle_(Net(lambda n, x: n.b(x) + n.a(x), a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(3, 6, 1)), image())
    close_(residual.a, [0, 1])
    scatter = ng.plan(residual, image(), layout="scatter")
    assert scatter.edits["a.weight"].scatter is not None
    with pytest.raises(ValueError, match="aligned"):
        compose(scatter, ng.plan(ng.compact(residual, scatter), image()))


def test_biases_keep_the_order_in_which_an_optimizer_met_them():
    rng = random.Random(3)
    parts = {f"layer{i}": nn.Linear(6, 6, bias=i == 0) for i in range(4)} | {"last": nn.Linear(6, 2)}

    def body(net, x):
        for i in range(4):
            x = torch.sigmoid(getattr(net, f"layer{i}")(x))
        return net.last(x)

    original = Net(body, **parts).double()
    gates = ng.attach_gates_(original)
    spread_gates_(gates, closed=0.0)
    x = torch.randn(4, 6, dtype=torch.float64)
    names = {}
    fresh = copy.deepcopy(original)
    orders = []
    model, plans = original, []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for layer in ("layer2", "layer0"):
        ng.gates_of(model)[layer].close_(torch.arange(6) == rng.randrange(6))
        plans.append(ng.plan(model, x, training=True))
        ng.compact_(model, plans[-1], optimizer=optimizer)
    again = torch.optim.SGD(fresh.parameters(), 0.1)
    ng.compact_(fresh, all_of(plans), optimizer=again)
    for which, parameters in ((model, optimizer), (fresh, again)):
        names = {id(parameter): name for name, parameter in which.named_parameters()}
        orders.append([names[id(parameter)] for parameter in parameters.param_groups[0]["params"]])
    assert orders[0] == orders[1]
    assert orders[0][-2:] == ["layer3.bias", "layer1.bias"]


def test_numbers_that_a_block_holds_itself_end_where_two_cuts_left_them():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.width = 6
            self.first, self.last = nn.Conv2d(3, 12, 1), nn.Conv2d(6, 2, 1)

        def forward(self, x):
            left, right = self.first(x).split(self.width, 1)
            return self.last(F.relu(left) * F.relu(right))

    original = Halves().double()
    small, plans = original, []
    for _ in range(2):
        close_(small.first, [0, small.width])
        plans.append(ng.plan(small, image()))
        small = ng.compact(small, plans[-1])
    whole = all_of(plans)
    again = ng.compact(original, whole)
    assert small.width == again.width == 4
    again.load_state_dict(small.state_dict())
    assert_same_function(small, again, image())
