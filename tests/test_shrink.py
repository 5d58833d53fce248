"""Shrinker: a model that gets narrower while it trains, and a run that goes on as if it had not."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from flow_helpers import Net, assert_same_function, assert_untouched, count, image
from helpers import spread_gates_
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.flow.compose import compose
from narrowgate.train import shrink
from narrowgate.train.shrink import Shrinker, ShrinkWarning

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def build():
    """A residual stream, a 1x1 convolution and Dropout; double precision, so that two runs can be compared."""

    def body(net, x):
        x = F.relu(net.bn(net.stem(x)))
        x = F.relu(x + net.bn2(net.conv2(F.relu(net.bn1(net.conv1(x))))))
        return net.head(F.relu(net.bn3(net.point(net.drop(x)))).mean((2, 3)))

    return Net(
        body,
        **{"stem": nn.Conv2d(3, 8, 3, bias=False), "bn": nn.BatchNorm2d(8)},
        **{"conv1": nn.Conv2d(8, 8, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(8)},
        **{"conv2": nn.Conv2d(8, 8, 3, padding=1, bias=False), "bn2": nn.BatchNorm2d(8)},
        **{"point": nn.Conv2d(8, 8, 1, bias=False), "bn3": nn.BatchNorm2d(8), "drop": nn.Dropout(0.0)},
        head=nn.Linear(8, 4),
    ).double()


def gated(kind="exponential", **options):
    model = build()
    if kind == "exponential":
        options.setdefault("placement", "after-norm")
    gates = ng.attach_gates_(model, kind, **options)
    return model, gates


def close_(gates, count=3):
    for name in gates:
        gates[name].close_(torch.arange(gates[name].size, device=gates[name].g.device) < count)


def data(steps, device="cpu"):
    return [(image(batch=6).to(device), torch.randint(0, 4, (6,), device=device)) for _ in range(steps)]


def train(model, optimizer, batches):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.0),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.0, fused=True),
}


def without_gates(model):
    """Closed gates stay closed: nothing moves them."""
    return [p for name, p in model.named_parameters() if not name.endswith(".g")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_that_shrinks_is_the_run_that_does_not(optimizer, device):
    large, gates = gated()
    large.to(device)
    spread_gates_(gates, closed=0.0)
    first = OPTIMIZERS[optimizer](without_gates(large))
    train(large, first, data(2, device))
    close_(gates)
    small, second = copy.deepcopy((large, first))
    shrinker = Shrinker(small, image().to(device), second, every=1)
    event = shrinker.step(0)
    assert event.parameters_after == count(small) - sum(g.numel() for g in ng.gates_of(small).parameters())
    assert event.parameters_after < event.parameters_before and event.seconds > 0
    more = data(3, device)
    train(large, first, more)
    train(small, second, more)
    assert_same_function(large.cpu(), small.cpu(), image())


def test_several_optimizers_are_cut_along():
    large, gates = gated()
    spread_gates_(gates, closed=0.0)

    def two(model):
        """SGD for convolutions, AdamW for the rest."""
        matrices, others = ([p for p in without_gates(model) if (p.dim() > 1) is many] for many in (True, False))
        return [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.AdamW(others, 0.01, weight_decay=0.0)]

    def steps(model, optimizers, batches):
        for x, y in batches:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()

    first = two(large.train())
    steps(large, first, data(2))
    close_(gates)
    small, second = copy.deepcopy((large, first))
    assert Shrinker(small, image(), second, every=1).step(0) is not None
    more = data(3)
    steps(large, first, more)
    steps(small, second, more)
    assert_same_function(large, small, image())
    fresh = gated()[0]
    with pytest.raises(ValueError, match="AdamW holds no parameter"):
        Shrinker(fresh, image(), [two(fresh)[0], second[1]])
    with pytest.raises(TypeError, match="got StepLR"):
        Shrinker(fresh, image(), [torch.optim.lr_scheduler.StepLR(two(fresh)[0], 1)])


def test_it_looks_every_few_epochs_and_cuts_when_enough_has_closed():
    model, gates = gated()
    shrinker = Shrinker(model, image(), every=3, share=0.2)
    close_(gates, 1)  # one of eight
    assert [shrinker.step(epoch) for epoch in range(6)] == [None] * 6
    close_(gates, 3)
    events = [shrinker.step(epoch) for epoch in range(6, 12)]
    assert [event is not None for event in events] == [False, False, True, False, False, False]
    assert events[2].epoch == 8 and shrinker.events == [events[2]]
    assert f"-> {events[2].parameters_after:,} parameters" in str(events[2])


def test_with_every_0_only_the_share_decides():
    model, gates = gated()
    shrinker = Shrinker(model, image(), every=0, share=0.2)
    assert shrinker.step(0) is None
    close_(gates)
    assert shrinker.step(1) is not None


def test_gates_that_have_to_stay_are_not_planned_again_and_again(monkeypatch):
    model, gates = gated()
    gates["bn2"].close_(torch.arange(8) < 4)  # the stream needs these channels
    planned = []
    monkeypatch.setattr(shrink, "plan", lambda *args, **options: planned.append(1) or ng.plan(*args, **options))
    shrinker = Shrinker(model, image(), every=1)
    assert [shrinker.step(epoch) for epoch in range(3)] == [None] * 3
    assert len(planned) == 1
    close_(gates)
    assert shrinker.step(3) is not None and len(planned) == 2


def test_gates_that_opened_again_are_not_counted_against_others_that_close():
    model, gates = gated()
    shrinker = Shrinker(model, image(), every=2, share=0.1)
    gates["bn2"].close_(torch.arange(8) < 6)  # the stream needs these channels
    assert [shrinker.step(epoch) for epoch in range(2)] == [None, None]
    with torch.no_grad():
        gates["bn2"].g.fill_(1.0)
    assert shrinker.step(2) is None
    gates["bn1"].close_(torch.arange(8) < 4)  # an eighth of all gates
    assert shrinker.step(3) is not None and shrinker.removed == 4


def test_gates_and_penalty_stay_valid_and_the_counts_are_of_the_original():
    model, gates = gated()
    penalty = ng.Penalty(gates, "l1", 1.0)
    close_(gates)
    gates["bn2"].close_(torch.arange(8) < 5)
    fraction, value, size = gates.closed_fraction(), penalty().item(), gates.count
    shrinker = Shrinker(model, image())
    assert shrinker.closed_fraction() == fraction and shrinker.removed == 0
    shrinker.shrink(0)
    assert gates.count < size and shrinker.removed == size - gates.count
    assert shrinker.closed_fraction() == pytest.approx(fraction)
    assert gates.closed_fraction() == 2 / gates.count  # the two of bn2 that the stream needs
    assert penalty().item() == pytest.approx(value)  # closed gates added nothing
    penalty().backward()
    assert all(gate.g.grad.shape == gate.g.shape for gate in gates.modules())


@pytest.mark.parametrize("kind", ["linear", "hard-concrete"])
def test_other_kinds_of_gates(kind):
    model, gates = gated(kind, **({} if kind == "linear" else {"placement": "before-norm"}))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    train(model, optimizer, data(2))
    shrinker = Shrinker(model, image(), optimizer, every=1)
    assert shrinker.step(0) is None  # nothing is exactly closed
    close_(gates)
    if kind == "linear":
        with torch.no_grad():
            for norm in (model.bn, model.bn1, model.bn2, model.bn3):
                norm.bias[:3] = 0.25  # a closed linear gate leaves its shift behind
    reference = copy.deepcopy(model).eval()
    event = shrinker.step(1)
    assert event.parameters_after < event.parameters_before
    if kind == "linear":
        assert_same_function(reference, model.eval(), image())
    train(model, optimizer, data(2))


def test_a_collapsed_model_goes_on_at_its_width():
    model, gates = gated()
    close_(gates, 8)
    before = count(model)
    shrinker = Shrinker(model, image(), every=1)
    with pytest.warns(ShrinkWarning, match=r"CollapseError: .*every channel of conv1 is constant"):
        assert shrinker.step(0) is None
    assert count(model) == before and shrinker.plan is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shrinker.step(1) is None  # said once, until more closes


def test_a_model_that_cannot_be_traced_goes_on():
    model = Net(
        lambda net, x: net.b(net.a(x)) if x.sum() > 0 else net.b(-net.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
    )
    ng.attach_gates_(model)["a"].close_(torch.arange(4) < 2)
    with pytest.warns(ShrinkWarning, match="TraceError"):
        assert Shrinker(model, torch.randn(2, 3)).shrink(0) is None


def test_mode_random_numbers_and_gradients_are_given_back():
    def noisy(net, x):
        if net.training:
            random.random(), np.random.rand(), torch.rand(1)
        return net.last(F.dropout(F.relu(net.first(x)), 0.5, net.training))

    model = Net(noisy, first=nn.Linear(6, 6), last=nn.Linear(6, 2), frozen=nn.BatchNorm1d(2)).double()
    gates = ng.attach_gates_(model)
    model.train()
    model.frozen.eval()
    x = torch.randn(4, 6, dtype=torch.float64)
    model(x).sum().backward()
    gates["first"].close_(torch.arange(6) < 2)
    wanted = {"first.weight": model.first.weight.grad[2:].clone(), "last.bias": model.last.bias.grad.clone()}
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    assert Shrinker(model, x).shrink(0) is not None
    assert model.training and model.first.training and not model.frozen.training
    assert random.getstate() == states[0] and (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    for name, grad in wanted.items():
        assert torch.equal(model.get_parameter(name).grad, grad)


def test_a_default_device_that_is_not_the_models():
    """As after torch.set_default_device("cuda"), which what is computed on the CPU must not follow."""
    model, gates = gated()
    gates["bn3"].g.requires_grad_(False)
    x = image()
    with torch.device("meta"):
        penalty = ng.Penalty(gates, "l1", 1e-4, relative=True)
        penalty().backward()
        penalty.proximal_(0.01)
        budget = ng.Budget("params: 60%", model, x, penalty, epochs=1)
        budget.step(0)
        shrinker = Shrinker(model, x)
        assert shrinker.shrink(0) is not None and budget.left <= 0.6
        last = ng.plan(model, x)
        small = ng.compact(model, last)
        ng.verify(model, small, x)
    assert {tensor.device.type for tensor in (*small.parameters(), *model.parameters())} == {"cpu"}


@pytest.mark.parametrize("device", DEVICES)
def test_memory_formats_stay(device):
    model, gates = gated()
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    train(model, optimizer, [(x.contiguous(memory_format=torch.channels_last), y) for x, y in data(1, device)])
    close_(gates)
    Shrinker(model, image().to(device), optimizer).shrink(0)
    for layer in (model.stem, model.conv1, model.conv2, model.point):
        wanted = torch.empty(layer.weight.shape).to(memory_format=torch.channels_last)
        wanted = torch.empty_like(wanted.clone(memory_format=torch.channels_last))
        assert layer.weight.stride() == wanted.stride()
        assert optimizer.state[layer.weight]["momentum_buffer"].is_contiguous(memory_format=torch.channels_last)
        assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert model.conv1.weight.shape == (5, 5, 3, 3)


def run(epochs, resume=None):
    """Train with gates closing on the way; ``resume`` is (epoch, shrinker's state, weights, optimizer's state)."""
    torch.manual_seed(1)
    model, gates = gated()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    shrinker = Shrinker(model, image(), optimizer, every=2)
    start = 0
    if resume:
        start, state, weights, moments = resume
        shrinker.load_state_dict(state)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    saved = []
    for epoch in range(start, epochs):
        torch.manual_seed(100 + epoch)
        train(model, optimizer, data(1))
        for name in ("bn1", "bn3"):
            gates[name].close_(gates[name].g < gates[name].g.sort().values[1])  # the smallest
        shrinker.step(epoch)
        saved.append(copy.deepcopy((epoch + 1, shrinker.state_dict(), model.state_dict(), optimizer.state_dict())))
    return model, shrinker, saved


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_a_resumed_run_ends_at_the_same_bits(at):
    whole, shrinker, saved = run(6)
    assert len(shrinker.events) > 1
    again, resumed, _ = run(6, saved[at])
    assert resumed.digest() == shrinker.digest() and resumed.state_dict() == shrinker.state_dict()
    assert resumed.removed == shrinker.removed and resumed.closed_fraction() == shrinker.closed_fraction()
    ours, theirs = again.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_composed_plan_saves_the_final_model(tmp_path):
    model, shrinker, _ = run(6)
    model.eval()
    final = ng.plan(model, image(), layout="scatter")
    small = ng.compact(model, final)
    ng.save(small, compose(shrinker.plan, final), tmp_path / "small")
    loaded = ng.load(tmp_path / "small", build).eval()
    x = image()
    assert torch.equal(loaded(x), small(x))
    assert shrinker.plan.parameters_before == count(build())


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x)


def test_what_was_gated_at_its_output_is_loaded_as_the_documentation_says(tmp_path):
    """The shrinker's plan names gates that the model lacks before ``attach_gates_``."""

    def fresh():
        torch.manual_seed(0)
        layers = OwnForward(3, 8, 3), nn.ReLU(), OwnForward(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
        return nn.Sequential(*layers).double()

    model = fresh()
    gates = ng.attach_gates_(model)
    close_(gates, 2)
    shrinker = Shrinker(model, image())
    assert shrinker.shrink(0) is not None and "0.gate.g" in shrinker.plan.cuts
    close_(gates, 1)
    last = ng.plan(model, image())
    small = ng.compact(model, last)
    ng.save(small, last, tmp_path / "small")
    again = ng.load(tmp_path / "small", lambda: ng.compact(fresh(), shrinker.plan))
    x = image()
    assert torch.equal(again(x), small(x)) and again[0].out_channels == 5
    other = nn.Sequential(nn.Linear(3, 8)).double()
    with pytest.raises(ng.PlanError, match="another model"):
        ng.compact(other, shrinker.plan)


def test_lbfgs_is_refused_before_the_run():
    model, _ = gated()
    with pytest.raises(ValueError, match="LBFGS keeps"):
        Shrinker(model, image(), torch.optim.LBFGS(model.parameters()))


def test_adafactor_is_refused_before_the_run():
    model, _ = gated()
    with pytest.raises(ValueError, match=r"Adafactor keeps sums over rows and columns.* with another optimizer"):
        Shrinker(model, image(), torch.optim.Adafactor(model.parameters()))


class OfRows(torch.optim.SGD):
    """Remembers something of rows, from its first step on."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.ones(2, len(parameter))


def test_an_optimizer_whose_state_turns_out_not_to_follow_does_not_end_the_run():
    model, gates = gated()
    optimizer = OfRows(model.parameters(), 0.01)
    shrinker = Shrinker(model, image(), optimizer, every=1)
    train(model, optimizer, data(1))
    close_(gates)
    before = copy.deepcopy(model)
    with pytest.warns(ShrinkWarning, match=r"not cut.* OfRows keeps 'rows' of 'stem.weight'.* or remove at the end"):
        assert shrinker.step(0) is None
    assert_untouched(model, before)
    assert shrinker.plan is None and not shrinker.events
    train(model, optimizer, data(1))


def test_digests_tell_structures_apart():
    shrinkers = []
    for closed in (0, 3, 3, 4):
        model, gates = gated()
        close_(gates, closed)
        shrinkers.append(Shrinker(model, image()))
        shrinkers[-1].shrink(0)
    first, second, third, fourth = (shrinker.digest() for shrinker in shrinkers)
    assert second == third and len({first, second, fourth}) == 3


def test_restoring_needs_a_fresh_model_and_a_fresh_optimizer():
    _, shrinker, _ = run(6)
    model, gates = gated()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    train(model, optimizer, data(1))
    with pytest.raises(ValueError, match="state already"):
        Shrinker(model, image(), optimizer).restore_(shrinker.plan)
    with pytest.raises(ValueError, match="cut already"):
        shrinker.restore_(shrinker.plan)
    fresh = Shrinker(model, image())
    fresh.restore_(shrinker.plan)
    assert fresh.removed == shrinker.removed > 0 and gates.count == fresh._original - fresh.removed


@pytest.mark.parametrize(
    "options, match",
    [
        ({"every": -1}, "every"),
        ({"share": 1.5}, "share"),
        ({"constants": "no"}, "exact"),
        ({"round_to": 0}, "round_to"),
        ({"round_to": 2.5}, "round_to must be a whole number"),
    ],
)
def test_wrong_options_are_named(options, match):
    model, _ = gated()
    with pytest.raises(ValueError, match=match):
        Shrinker(model, image(), **options)


def test_an_optimizer_that_has_state_from_the_start_is_fresh():
    _, shrinker, _ = run(6)
    model, _ = gated()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    assert optimizer.state  # made by its constructor
    other = Shrinker(model, image(), optimizer)
    other.load_state_dict(shrinker.state_dict())
    for group in optimizer.param_groups:
        assert all(optimizer.state[p]["sum"].shape == p.shape for p in group["params"] if p in optimizer.state)
    train(model, optimizer, data(1))


def test_a_compiled_model_is_cut_under_its_own_names(tmp_path):
    model, gates = gated()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), 0.01, momentum=0.9)
    close_(gates)
    shrinker = Shrinker(compiled, image(), optimizer)
    assert shrinker.shrink(0) is not None and "stem.weight" in shrinker.plan.cuts
    train(compiled, optimizer, data(2))
    last = ng.plan(model, image())
    small = ng.compact(model, last)
    ng.save(small, compose(shrinker.plan, last), tmp_path / "small")
    assert_same_function(model.eval(), ng.load(tmp_path / "small", build).eval(), image())
    other, _ = gated()
    Shrinker(other, image()).load_state_dict(shrinker.state_dict())
    assert count(other) == count(model)


def test_a_state_of_something_else_is_refused():
    model, _ = gated()
    with pytest.raises(ValueError, match=r"not the state of a Shrinker; give what shrinker\.state_dict\(\) returned"):
        Shrinker(model, image()).load_state_dict({"seen": 3})


def test_an_optimizer_of_another_model_is_refused():
    model, _ = gated()
    with pytest.raises(ValueError, match=r"SGD holds no parameter of this Net.*model\.parameters\(\)"):
        Shrinker(model, image(), torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1))


def test_a_model_without_gates_and_a_wrapped_one_are_refused():
    with pytest.raises(ValueError, match="attach_gates_"):
        Shrinker(build(), image())
    with pytest.raises(TypeError, match=r"model\.module"):
        Shrinker(nn.DataParallel(gated()[0]), image())


def test_a_model_that_accelerate_put_mixed_precision_over_is_cut():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test may have chosen otherwise
    model, gates = gated()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    prepared, optimizer = accelerator.prepare(model.float(), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    x = image().float()
    budget = ng.Budget("params: 40%", prepared, x, ng.Penalty(gates, "l1", 1e-3), 10)
    over = prepared.forward
    train(prepared, optimizer, [(x, torch.zeros(len(x), dtype=torch.long))])
    close_(gates)
    assert Shrinker(prepared, x, optimizer).shrink(0) is not None
    assert model.conv1.out_channels < 8 and budget.size.cost() < budget.size.original
    assert prepared.forward == over and prepared(x).dtype == torch.float32
    train(prepared, optimizer, [(x, torch.zeros(len(x), dtype=torch.long))])
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    close_(gates, 2)
    last = ng.plan(plain, x)
    assert last.parameters_after < last.parameters_before
    ng.verify(plain, ng.compact(plain, last), x)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_what_is_no_plan_or_wraps_the_model_is_told_what_to_give_instead():
    model, gates = gated()
    average = torch.optim.swa_utils.AveragedModel(model)
    close_(gates)
    cut = Shrinker(model, image()).shrink(0)
    for apply in (ng.compact, ng.compact_):
        with pytest.raises(TypeError, match=r"got Shrunk; give the plan in this Shrunk, its \.plan$"):
            apply(average.module, cut)
        with pytest.raises(TypeError, match=r"got str; give ng\.Plan\.from_json\(text\)$"):
            apply(average.module, cut.plan.to_json())
        with pytest.raises(TypeError, match=r"got Gates; give what ng\.plan returned"):
            apply(average.module, gates)
        with pytest.raises(TypeError, match=r"to a model, an nn\.Module that was built, got Plan"):
            apply(cut.plan, model)
        with pytest.raises(ng.PlanError, match=r"AveragedModel lacks; .* the model inside, give that one, \.module$"):
            apply(average, cut.plan)
    ng.compact_(average.module, cut.plan)
    assert count(average.module) == count(model)


def test_an_optimizer_that_was_made_before_the_gates_is_refused():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gates = ng.attach_gates_(model)
    with pytest.raises(ValueError, match=r"SGD trains none of the gates.*add_param_group"):
        Shrinker(model, image(), optimizer)
    for g in gates.parameters():
        g.requires_grad_(False)
    Shrinker(model, image(), optimizer)  # who froze the gates closes them by hand
