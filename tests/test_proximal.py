import math

import pytest
import torch
from helpers import assert_same, gates_at, parameters_of, value_and_gradient
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import narrowgate as ng
from narrowgate.norms import bounded_lp


def test_a_proximal_step_is_a_soft_threshold():
    gates = gates_at(-1.5, -0.06, 0.0, 0.02, 0.05, 0.7)
    ng.Penalty(gates, "l1", 0.5).proximal_(0.1)
    assert parameters_of(gates).tolist() == pytest.approx([-1.45, -0.01, 0, 0, 0, 0.65], abs=1e-15)
    assert (parameters_of(gates)[2:5] == 0).all()
    gates = gates_at(-1.5, 0.02, 0.0)
    ng.Penalty(gates, "bounded-l1", 0.5, sigma=0.4).proximal_(0.1)
    hand = 1.5 - 0.05 / 0.4 * math.exp(-1.5 / 0.4)
    assert parameters_of(gates).tolist() == pytest.approx([-hand, 0, 0], rel=1e-14)
    gates = gates_at(-1.5, 0.02)
    ng.Penalty(gates, "l2", 0.5).proximal_(torch.tensor(0.1))
    assert parameters_of(gates).tolist() == pytest.approx([-1.5 / 1.05, 0.02 / 1.05], rel=1e-7)


@pytest.mark.parametrize("relative", [False, True])
def test_a_frozen_gate_stays_as_it_does_under_a_penalty_in_the_loss(relative):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    gates = ng.attach_gates_(model)
    gates["0"].g.requires_grad_(False)
    with torch.no_grad():
        for g in gates.parameters():
            g.copy_(torch.linspace(0.2, 1.0, len(g)))
    before = [g.detach().clone() for g in gates.parameters()]
    ng.Penalty(gates, "l1", 0.5, relative=relative).proximal_(0.1)
    assert torch.equal(gates["0"].g, before[0]) and not torch.equal(gates["2"].g, before[1])


OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05), 0.05),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), 0.1),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.02), 0.02),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.01), 0.02),
}


@pytest.mark.parametrize("kind", ["l1", "bounded-l1"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_proximal_steps_close_useless_gates_exactly_under_any_optimizer(name, kind):
    """Least squares where only the first two of four features matter."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)).double()
    nn.init.eye_(model[0].weight)
    nn.init.ones_(model[1].weight)
    gates = ng.attach_gates_(model)
    penalty = ng.Penalty(gates, kind, 0.3)
    make, step = OPTIMIZERS[name]
    optimizer = make(gates.parameters())
    x = torch.randn(64, 4, dtype=torch.float64)
    y = x[:, :2].sum(1, keepdim=True)
    for _ in range(400):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        penalty.proximal_(step)
    g = parameters_of(gates)
    assert (g[2:] == 0).all() and (g[:2] > 0.5).all()
    assert gates.closed_fraction() == 0.5


@given(
    g=st.floats(-3, 3),
    p=st.floats(0.05, 1),
    sigma=st.floats(0.05, 3),
    strength=st.floats(0, 5),
)
def test_a_proximal_step_never_raises_the_proximal_objective(g, p, sigma, strength):
    gates = gates_at(g, 1.0)

    def objective(z):
        return (z - g) ** 2 / 2 + strength * bounded_lp(torch.tensor([z], dtype=torch.float64), p, sigma).item()

    ng.Penalty(gates, "bounded-lp", strength, sigma, p=p).proximal_(1.0)
    z = parameters_of(gates)[0].item()
    assert objective(z) <= objective(g) * (1 + 1e-12) + 1e-14
    assert z * g >= 0 and abs(z) <= abs(g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma", [1e-300, 1e-40, 1.0, 1e3])
@pytest.mark.parametrize("p", [0.01, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_extreme_settings_never_make_a_nan(p, sigma, strength, dtype):
    start = (0.0, 1e-30, 1e-5, 1.0, 100.0)
    gates = gates_at(*start, dtype=dtype)
    penalty = ng.Penalty(gates, "bounded-lp", strength, sigma, p=p)
    _, gradient = value_and_gradient(gates, penalty)
    assert all(map(math.isfinite, gradient)) and gradient[0] == 0
    penalty.proximal_(0.1)
    after = parameters_of(gates)
    assert after.isfinite().all() and (after >= 0).all()
    if strength == 0:
        assert_same(after, torch.tensor(start, dtype=dtype))


@pytest.mark.parametrize("p", [0.01, 0.5, 1.0, 2.0])
def test_a_strength_of_zero_shrinks_nothing_whatever_sigma_is(p):
    gates = gates_at(0.0, 1e-30, 0.5)
    ng.Penalty(gates, "bounded-lp", 0.0, sigma=1e300, p=p).proximal_(0.1)
    assert parameters_of(gates).tolist() == [0.0, 1e-30, 0.5]


def test_a_proximal_step_that_does_not_exist():
    penalty = ng.Penalty(gates_at(1.0, kind="hard-concrete"), "l0", 0.1)
    with pytest.raises(ValueError, match="the l0 penalty has no proximal step; add penalty"):
        penalty.proximal_(0.1)
    for lr in (-0.1, math.nan):
        with pytest.raises(ValueError, match="lr must be a finite number, 0 or above"):
            ng.Penalty(gates_at(1.0), "l1", 0.1).proximal_(lr)
