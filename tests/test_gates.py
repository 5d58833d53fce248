import math

import numpy as np
import pytest
import torch
from helpers import assert_same, compiles, needs_cpp_compiler
from torch import nn

import narrowgate as ng
from narrowgate.gates import (
    CLOSING_POINT,
    ExponentialGate,
    HardConcreteGate,
    LinearGate,
    expected_l0,
    exponential_gate,
    hard_concrete_gate,
)


@pytest.fixture(scope="module")
def around_the_closing_point():
    """Every float32 within 100,000 steps of 2**-12.5, with both signs."""
    middle = int(np.float32(2**-12.5).view(np.int32))
    positive = np.arange(middle - 100_000, middle + 100_001, dtype=np.int32).view(np.float32)
    return torch.from_numpy(np.concatenate([positive, -positive]))


@pytest.fixture(scope="module")
def closed(around_the_closing_point):
    """Which of them are closed, by definition."""
    closed = around_the_closing_point.double().abs() < 2**-12.5
    assert 0.49 < closed.double().mean() < 0.51
    return closed


def test_a_gate_closes_where_float32_rounds_the_formula_to_zero(around_the_closing_point, closed):
    g = around_the_closing_point
    assert torch.equal(exponential_gate(g) == 0, closed)
    exp = torch.exp((-g * g).double()).float()  # float32 exp, correctly rounded; a CPU's own may be one bit off
    assert torch.equal(1 - exp == 0, closed)


def test_the_closing_point_is_the_same_in_float64(around_the_closing_point, closed):
    assert torch.equal(exponential_gate(around_the_closing_point.double()) == 0, closed)
    edge = torch.tensor([CLOSING_POINT, math.nextafter(CLOSING_POINT, 0)], dtype=torch.float64)
    assert (exponential_gate(edge) == 0).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_closing_point_is_the_same_in_half_precision(dtype):
    g = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    g = g[g.isfinite()]
    value = exponential_gate(g)
    assert value.dtype == torch.float32
    assert torch.equal(value == 0, g.double().abs() < 2**-12.5)


def test_the_closing_point_is_the_same_under_autocast(around_the_closing_point, closed):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = exponential_gate(around_the_closing_point)
    assert value.dtype == torch.float32
    assert torch.equal(value == 0, closed)


@compiles
@needs_cpp_compiler
@pytest.mark.slow
def test_the_closing_point_is_the_same_when_compiled(around_the_closing_point, closed):
    compiled = torch.compile(exponential_gate, fullgraph=True)
    assert torch.equal(compiled(around_the_closing_point) == 0, closed)


def test_the_value_is_the_formula_to_float32_precision():
    g = torch.logspace(math.log10(2e-4), 1, 5000)
    exact = -torch.expm1(-g.double() * g.double())
    value = exponential_gate(torch.cat([g, -g])).double()
    torch.testing.assert_close(value, torch.cat([exact, exact]), rtol=2**-22, atol=0)
    assert exponential_gate(torch.tensor([0.0, math.inf, math.nan])).tolist()[:2] == [0, 1]
    assert exponential_gate(torch.tensor(math.nan)).isnan()


def test_the_gradient_is_the_formula_and_zero_where_closed():
    g = torch.tensor([-2.0, -1.0, -1e-3, -1.7e-4, 0.0, 1e-4, 1.8e-4, 0.3, 3.0], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(exponential_gate(g).sum(), g)
    formula = 2 * g * torch.exp(-g * g) * (g.abs() >= CLOSING_POINT)
    assert (formula == 0).sum() == 3
    torch.testing.assert_close(gradient, formula.detach(), rtol=1e-11, atol=0)
    assert torch.equal(gradient == 0, formula == 0)
    open_gates = torch.tensor([-1.5, -0.2, 0.4, 1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exponential_gate, open_gates)


def test_an_exponential_gate_starts_open_and_can_be_closed():
    gate = ExponentialGate(3)
    assert gate.value().tolist() == pytest.approx([1 - math.exp(-1)] * 3)
    gate.close_(torch.tensor([True, False, True]))
    assert (gate.final_value() == 0).tolist() == [True, False, True]
    assert not gate.final_value().requires_grad and gate.value().requires_grad


def numpy_hard_concrete(log_alpha, u, temperature, low, high):
    """Louizos et al. 2017, equations 10 and 11, by hand."""
    s = 1 / (1 + np.exp(-(np.log(u) - np.log(1 - u) + log_alpha) / temperature))
    return np.minimum(1, np.maximum(0, s * (high - low) + low))


@pytest.mark.parametrize(("temperature", "stretch"), [(2 / 3, (-0.1, 1.1)), (0.5, (-0.3, 1.2))])
def test_a_sampled_hard_concrete_gate_is_the_formula_at_the_drawn_number(monkeypatch, temperature, stretch):
    u = torch.linspace(0.001, 0.999, 41, dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: self.copy_(u))
    log_alpha = torch.linspace(-3, 3, 41, dtype=torch.float64).flip(0) * 0.7
    value = hard_concrete_gate(log_alpha, sample=True, temperature=temperature, stretch=stretch)
    expected = numpy_hard_concrete(log_alpha.numpy(), u.numpy(), temperature, *stretch)
    assert 0 < (value == 0).sum() < 41 and 0 < (value == 1).sum() < 41
    np.testing.assert_allclose(value.numpy(), expected, rtol=1e-12, atol=1e-13)


def test_the_share_of_open_samples_is_the_expected_l0():
    log_alpha = torch.tensor([-4.0, -1.0, 0.0, 0.7, 3.0])
    n = 100_000
    opened = (hard_concrete_gate(log_alpha.expand(n, 5), sample=True) > 0).double().mean(0)
    probability = expected_l0(log_alpha).double()
    error = (probability * (1 - probability) / n).sqrt()
    assert ((opened - probability).abs() < 4.5 * error + 2e-6).all()  # u stops 1e-6 short of 0 and 1
    assert HardConcreteGate(2, 0.7).expected_l0().tolist() == pytest.approx([probability[3].item()] * 2)


def test_a_hard_concrete_gate_is_random_in_training_and_settled_in_eval():
    gate = HardConcreteGate(50, init=0.5)
    assert not torch.equal(gate.value(), gate.value())
    assert torch.equal(gate.final_value(), gate.final_value())
    settled = 1.2 / (1 + math.exp(-0.5)) - 0.1
    assert gate.final_value().tolist() == pytest.approx([settled] * 50)
    assert torch.equal(gate.eval().value(), gate.final_value())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stretch", [(-0.1, 1.1), (-0.2, 1.3)])  # with the second, rounding alone would leave it open
def test_a_hard_concrete_gate_is_closed_at_and_below_its_closing_point(stretch, dtype):
    at = torch.tensor(math.log(-stretch[0] / stretch[1]), dtype=dtype)
    below = [at]
    for _ in range(50):
        below.append(torch.nextafter(below[-1], torch.tensor(-math.inf, dtype=dtype)))
    assert (hard_concrete_gate(torch.stack([*below, at - 5]), sample=False, stretch=stretch) == 0).all()
    above = at + torch.tensor([1e-5, 1.0], dtype=dtype)
    assert (hard_concrete_gate(above, sample=False, stretch=stretch) > 0).all()


def test_a_closed_hard_concrete_gate_stays_closed_when_sampled():
    gate = HardConcreteGate(4)
    gate.close_(torch.tensor([True, False, False, True]))
    assert (gate.final_value() == 0).tolist() == [True, False, False, True]
    samples = torch.stack([gate.value() for _ in range(1000)])
    assert (samples[:, [0, 3]] == 0).all() and (samples[:, [1, 2]] > 0).any(0).all()


@pytest.mark.parametrize("temperature", [0.1, 2 / 3, 3.0])
@pytest.mark.parametrize("stretch", [(-0.1, 1.1), (-1e-6, 1.1), (-0.5, 1.1)])
def test_no_draw_opens_a_closed_hard_concrete_gate(monkeypatch, temperature, stretch):
    gate = HardConcreteGate(3, temperature=temperature, stretch=stretch)
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda self, low, high: self.fill_(high))
    assert (gate.value() > 0).all()
    gate.close_(torch.tensor([True, False, True]))
    assert (gate.value() == 0).tolist() == (gate.final_value() == 0).tolist() == [True, False, True]


@pytest.mark.parametrize(("temperature", "stretch"), [(0.0, (-0.1, 1.1)), (0.5, (0.0, 1.1)), (0.5, (-0.1, 1.0))])
def test_a_hard_concrete_gate_that_could_not_close_or_open_is_refused(temperature, stretch):
    with pytest.raises(ValueError, match="temperature > 0 and stretch around"):
        HardConcreteGate(3, temperature=temperature, stretch=stretch)


def test_a_linear_gate_is_the_norms_own_scale():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    keys, parameters = list(model.state_dict()), list(model.parameters())
    gates = ng.attach_gates_(model, "linear")
    assert list(model.state_dict()) == keys
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    gate = gates["1"]
    assert isinstance(gate, LinearGate) and gate.g is model[1].weight
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -0.25, 0.0, 2.0]))
    assert gate.value().tolist() == [0.5, 0.25, 0, 2]
    gate.close_(torch.tensor([True, False, False, False]))
    assert_same(model[1].weight.detach(), torch.tensor([0, -0.25, 0, 2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_cast_to_half_keeps_its_gates_in_float32(dtype):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    gates = ng.attach_gates_(model)
    g = gates["0"].g
    with torch.no_grad():
        g.copy_(torch.tensor([0.1234567, 1e-5, 0.7654321, 1.0]))
    before = g.detach().clone()
    model.to(dtype)
    assert model[0].weight.dtype == dtype and gates["0"].g is g and torch.equal(g, before)
    assert model(torch.ones(1, 4, dtype=dtype)).dtype == dtype
    ng.Penalty(gates, "l1", 1e-3).proximal_(0.1)
    assert (g < before).all()  # a step that half precision would round away
    assert model.double()[0].gate.g.dtype == torch.float64


@pytest.mark.parametrize("groups", ["channels", {"pair": [("0.weight", 0, [0, 1]), ("0.bias", 0, [0, 1])]}])
def test_gates_are_in_float32_whatever_a_checkpoint_that_is_assigned_has(groups):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    gates = ng.attach_gates_(model, groups=groups)
    numbers = [g.dtype for g in model.buffers()]
    saved = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)
    assert model[0].weight.dtype == torch.bfloat16 and [g.dtype for g in model.buffers()] == numbers
    assert [g.dtype for g in gates.parameters()] == [torch.float32]
    assert all(g.requires_grad for g in gates.parameters()) and saved.keys() == model.state_dict().keys()


@pytest.mark.parametrize(("kind", "init"), [("exponential", None), ("exponential", 0.7), ("hard-concrete", 2.0)])
def test_gates_of_a_model_without_numbers_start_as_new_ones_when_it_gets_memory(kind, init):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2))
    gates = ng.attach_gates_(model, kind, init=init)
    for _ in range(3):  # memory that held other numbers
        torch.full((300,), 5.0)
    model.half().to_empty(device="cpu")
    assert (gates["0"].g == (1.0 if init is None else init)).all() and gates["0"].g.dtype == torch.float32
    with torch.no_grad():
        gates["0"].g.fill_(0.25)
    assert (model.float()[0].gate.g == 0.25).all()
