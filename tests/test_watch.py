"""Trouble is named once, with the epoch, the layer and what to change; a healthy run hears nothing."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from helpers import ConvNet, gates_at
from test_log import row
from torch import nn

import narrowgate as ng
from narrowgate.train.checkpoint import Checkpoints
from narrowgate.train.recipe import Recipe
from narrowgate.train.watch import TrainingError, Watch, _jitter, reach_of

BASE = """
[model]
name = "lenet-5"
[data]
source = "digits"
[penalty]
strength = 1e-3
[train]
epochs = 30
"""


def recipe(*overrides):
    return Recipe.from_toml(BASE, overrides)


def watch(tmp_path, *overrides, steps=100):
    return Watch(recipe(*overrides), tmp_path, steps)


def test_a_finite_loss_is_fine(tmp_path):
    watch(tmp_path).check(row(train_loss=1e30))


@pytest.mark.parametrize("loss", [nan, inf, -inf])
def test_a_loss_that_is_no_number(tmp_path, loss):
    with pytest.raises(TrainingError, match=rf"loss of epoch 7 is {loss}; nothing is saved"):
        watch(tmp_path).check(row(7, train_loss=loss))
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    for epoch in (5, 6):
        checkpoints.save(epoch, {}, {})
    with pytest.raises(TrainingError, match=r"of epoch 6, is in .*checkpoints") as caught:
        watch(tmp_path).check(row(7, train_loss=loss))
    assert "lower optimizer.lr (it is 0.1, try 0.033) or lr.warmup = 5" in str(caught.value)
    assert "precision" not in str(caught.value)
    with pytest.raises(TrainingError) as caught:
        watch(tmp_path, "train.epochs=3").check(row(1, train_loss=loss))
    assert str(caught.value).endswith("or lr.warmup = 2")  # it has to end before the run does
    with pytest.raises(TrainingError) as caught:
        watch(tmp_path, "train.precision=bf16", "lr.warmup=2").check(row(7, train_loss=loss))
    assert 'train.precision = "32" (it is "bf16")' in str(caught.value) and "warmup" not in str(caught.value)


def gated():
    model = ConvNet()
    return ng.attach_gates_(model)


def close_(gates, *names):
    for name in names:
        gates[name].close_(torch.ones(gates[name].size, dtype=torch.bool))


def test_a_closed_layer_is_named_once(tmp_path):
    gates, looks = gated(), watch(tmp_path)
    assert looks.notices(row(1, 30, closed=0.1), gates) == []
    gates["conv1"].close_(torch.tensor([True] * 5 + [False]))
    assert looks.notices(row(2, 30, closed=0.1), gates) == []
    close_(gates, "conv1")
    (notice,) = looks.notices(row(3, 30, closed=0.1, strength=2e-4), gates)
    assert notice.startswith("epoch 3: all gates are closed on conv1.")
    for remedy in ("lower penalty.strength (it is 0.0002)", 'gates.skip = ["conv1"]', 'gates.reopen_("conv1")'):
        assert remedy in notice
    assert looks.notices(row(4, 30, closed=0.1), gates) == []
    close_(gates, "conv2")
    assert looks.notices(row(5, 30, closed=0.1), gates) == ["epoch 5: all gates are closed on conv2"]


def test_many_closed_layers_are_one_notice(tmp_path):
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])
    gates = ng.attach_gates_(model, last=True)
    close_(gates, *gates.names)
    (notice,) = watch(tmp_path).notices(row(3, 30, closed=1.0), gates)
    assert "closed on 0, 1, 2 and 3 more." in notice


def test_no_progress_is_told_after_a_third_and_once(tmp_path):
    gates, looks = gates_at(1.0, 0.9, dtype=torch.float32), watch(tmp_path)
    assert looks.notices(row(9, 30, closed=0.0), gates) == []
    (notice,) = looks.notices(row(10, 30, closed=0.0, strength=1e-3), gates)
    assert "epoch 10 of 30: no gate has closed yet, the smallest value is 0.56" in notice
    assert looks.notices(row(11, 30, closed=0.0), gates) == []


@pytest.mark.parametrize("changes", [{"strength": 0.0}, {"closed": 0.01}])
def test_where_there_is_progress_or_no_penalty(tmp_path, changes):
    assert watch(tmp_path).notices(row(20, 30, **{"closed": 0.0, **changes}), gates_at(1.0, 0.9)) == []


ENDS = "penalty.strength={ schedule = 'stepped', values = [1e-3, 0.0], at = [20] }"


def test_gates_that_hover_when_the_penalty_ends(tmp_path):
    gates = gates_at(1.0, 5e-4, -5e-4, 0.0, dtype=torch.float32)
    last = row(20, 30, closed=0.25, strength=1e-3, sigma=1.0, lr=0.1)
    (notice,) = watch(tmp_path, ENDS).notices(last, gates)
    assert "epoch 20: the penalty ends here, while 2 gates hover around zero" in notice and "by 0.001 a step" in notice
    assert "penalty.proximal = true" in notice
    for change in ({"epoch": 19}, {"lr": 1e-4}):
        assert watch(tmp_path, ENDS).notices(replace(last, **change), gates) == []
    budget = ("budget.target=params: 30%", "budget.steer=false")
    for changes in (("penalty.proximal=true",), budget, ("optimizer.kind=adamw",)):
        assert watch(tmp_path, ENDS, *changes).notices(last, gates) == []


def test_a_budget_steers_by_itself(tmp_path):
    looks = watch(tmp_path, "budget.target=params: 30%")
    assert looks.notices(row(20, 30, closed=0.0), gates_at(1.0)) == []


def test_linear_gates_close_by_threshold(tmp_path):
    norm = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    gates = ng.attach_gates_(norm, "linear")
    (notice,) = watch(tmp_path, "gates.kind=linear").notices(row(20, 30, closed=0.0), gates)
    assert "From 0.5 to closed is 0.5" in notice
    with torch.no_grad():
        norm[1].weight[1] = 5e-5
    assert watch(tmp_path, "gates.kind=linear").notices(row(20, 30, closed=0.0), gates) == []


def test_the_reach_of_the_penalty_by_hand():
    # 100 steps of 0.1 * 1e-3 / (1 - 0.9) = 1e-3 each, for 30 epochs, 10 of them at a tenth of the rate.
    assert reach_of(recipe("lr.drops=[20]"), 100, 1.0, 30) == pytest.approx(2.0 + 0.1)
    assert reach_of(recipe("lr.drops=[20]", "penalty.sigma=2.0", "gates.lr_factor=3.0"), 100, 1.0, 30) == pytest.approx(
        3.15
    )


@pytest.mark.parametrize(
    "kind, options", [("l1", {}), ("l2", {}), ("bounded-l1", {"sigma": 0.5}), ("bounded-lp", {"sigma": 0.5, "p": 0.5})]
)
def test_the_reach_is_what_the_penalty_does(kind, options):
    gates = gates_at(0.8)
    penalty = ng.Penalty(gates, kind, 1e-3, **options)
    penalty().backward()
    overrides = [f"penalty.{key}={value}" for key, value in options.items()]
    reach = reach_of(recipe(f"penalty.kind={kind}", *overrides), 100, 0.8, 30)
    assert reach == pytest.approx(30 * 100 * 0.1 / (1 - 0.9) * gates.parameters()[0].grad.item())


@pytest.mark.parametrize(
    "overrides, remedy",
    [
        (
            [],
            "2 until now and 3 over the whole run. So the loss holds them open: a higher penalty.strength (it",
        ),
        (
            ["penalty.strength=1.0"],
            "gates up to 0.5 past zero and back, where they count as open: lower penalty.strength",
        ),
        (["penalty.strength=1.0", "penalty.proximal=true"], "So the loss holds them open"),
        (["penalty.strength=6e-4"], "1.2 until now and 1.8 over the whole run. They may close later: a higher"),
        (["penalty.strength=1e-5"], "0.03 over the whole run. Multiply penalty.strength (it is 1e-05) by 67, or train"),
        (
            ["penalty.kind=bounded-l1", "penalty.sigma=0.1"],
            "hardly feel a norm so narrow: raise penalty.sigma (it is 0.1)",
        ),
        (["optimizer.kind=adamw"], "no gate has closed yet, the smallest value is 0.63. Raise penalty.strength"),
        (["penalty.weights=parameters"], "the smallest value is 0.63. Raise penalty.strength"),
        (["penalty.factors={ conv1 = 9.0 }"], "the smallest value is 0.63. Raise penalty.strength"),
        (["penalty.relative=true"], "the smallest value is 0.63. Raise penalty.strength"),
        (["gates.placement=after-norm"], 'With gates.placement = "before-norm" the norm undoes'),
    ],
)
def test_the_remedy_fits_the_recipe(tmp_path, overrides, remedy):
    looks = watch(tmp_path, *overrides)
    settings = recipe(*overrides)
    now = row(20, 30, closed=0.0, strength=settings.strength_schedule()(19), sigma=settings.sigma_schedule()(19))
    (notice,) = looks.notices(now, gates_at(1.0, dtype=torch.float32))
    assert remedy in notice
    assert ("before-norm" in notice) == (overrides == ["gates.placement=after-norm"])


def test_a_penalty_that_ends_with_the_warm_up_moves_nothing(tmp_path):
    steps = 'penalty.strength={ schedule = "stepped", values = [1e-3, 0.0], at = [1] }'
    looks = watch(tmp_path, "lr.warmup=1", "train.epochs=2", steps, steps=1)
    (notice,) = looks.notices(row(1, 2, closed=0.0, strength=1e-3), gates_at(1.0, dtype=torch.float32))
    assert "Its strength is 0 wherever the learning rate is not" in notice


GROWING = ("train.batch=64", "shrink.when=during", "shrink.batch=512", "penalty.strength=3e-4")


def test_longer_steps_that_carry_gates_past_the_closing_point_are_told_once(tmp_path):
    looks = watch(tmp_path, *GROWING)
    assert looks.longer_steps(4, 64, 3e-4, 1.0) == ""  # 1.5e-4 to and fro: closed at every moment
    notice = looks.longer_steps(5, 128, 3e-4, 1.0)
    assert notice.startswith("epoch 5: batches of 128 take longer steps")
    assert "up to 0.0003 past zero and back (before: 0.00015)" in notice and "penalty.proximal = true" in notice
    assert looks.longer_steps(6, 256, 3e-4, 1.0) == ""


@pytest.mark.parametrize(
    "settings",
    [("penalty.proximal=true",), ("optimizer.nesterov=true",), ("optimizer.lr=0.01",), ("penalty.sigma=3.0",)],
    ids=" ".join,
)
def test_longer_steps_that_close_gates_as_before_are_not_told(tmp_path, settings):
    sigma = 3.0 if "sigma" in settings[0] else 1.0
    assert watch(tmp_path, *GROWING, *settings).longer_steps(5, 128, 3e-4, sigma) == ""


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.5, 0.8, 0.9, 0.95])
def test_how_far_gates_go_to_and_fro(momentum, nesterov):
    gates = torch.linspace(0.05, 0.1, 500).requires_grad_()
    optimizer = torch.optim.SGD([gates], lr=0.01, momentum=momentum, nesterov=nesterov)
    farthest = 0.0
    for step in range(3000):
        optimizer.zero_grad()
        (0.01 * gates.abs().sum()).backward()
        optimizer.step()
        if step >= 2500:
            farthest = max(farthest, float(gates.detach().abs().max()))
    settings = f"optimizer.momentum={momentum}", f"optimizer.nesterov={str(nesterov).lower()}"
    assert 0.7 < farthest / _jitter(recipe(*settings), 0.01, 0.01, 1.0) < 1.6
