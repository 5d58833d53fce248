import math

import numpy as np
import pytest
import torch
from helpers import ConvNet, assert_same, compiles, gates_at, parameters_of, value_and_gradient
from torch import nn

import narrowgate as ng
from narrowgate.gates import ExponentialGate, HardConcreteGate
from narrowgate.norms import Relative
from narrowgate.schedules import Stepped

START = (-1.5, -0.4, -1e-6, 0.0, 0.02, 0.7, 2.0)


CLOSED_FORMS = {
    "l1": lambda g: (abs(g), np.sign(g)),
    "l1 sigma": lambda g: (abs(g) / 0.4, np.sign(g) / 0.4),
    "l2": lambda g: (g * g / 2, g),
    "bounded-l1": lambda g: (1 - math.exp(-abs(g)), np.sign(g) * math.exp(-abs(g))),
    "bounded-l1 sigma": lambda g: (1 - math.exp(-abs(g) / 0.4), np.sign(g) * math.exp(-abs(g) / 0.4) / 0.4),
    "bounded-lp p": lambda g: (1 - math.exp(-((abs(g) / 0.4) ** 2)), 2 * g / 0.16 * math.exp(-((abs(g) / 0.4) ** 2))),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_value_and_gradient_are_the_closed_forms(name):
    gates = gates_at(*START)
    options = {"sigma": 0.4} if " " in name else {}
    options |= {"p": 2.0} if "p" in name.split()[1:] else {}
    penalty = ng.Penalty(gates, name.split()[0], 0.3, **options)
    value, gradient = value_and_gradient(gates, penalty)
    terms, slopes = zip(*[CLOSED_FORMS[name](g) for g in START], strict=True)
    assert value == pytest.approx(0.3 * sum(terms), rel=1e-13)
    assert gradient == pytest.approx([0.3 * slope for slope in slopes], rel=1e-12, abs=1e-14)


def gated_layers(*rows):
    """Gates of several layers, one row of numbers each."""
    gates = ng.attach_gates_(nn.Sequential(*[nn.Linear(2, len(row), dtype=torch.float64) for row in rows]), last=True)
    gates.assign_(torch.tensor([g for row in rows for g in row], dtype=torch.float64))
    return gates


LAYERS = ((-1.5, 0.4, 1e-3), (0.02, 0.7, 2.0, 0.0), (3.0,))


def test_a_relative_l1_counts_the_channels_that_matter():
    gates = gated_layers(*LAYERS)
    expected = sum(sum(map(abs, row)) ** 2 / sum(g * g for g in row) for row in LAYERS)
    assert ng.Penalty(gates, "l1", 0.3, relative=True)().item() == pytest.approx(0.3 * expected, rel=1e-12)
    even = gated_layers((0.2, -0.2, 0.2, 0.0), (7.0, 7.0))
    assert ng.Penalty(even, "l1", 1.0, relative=True)().item() == pytest.approx(5.0)


@pytest.mark.parametrize("kind, options", [("l1", {}), ("bounded-l1", {"sigma": 0.4}), ("bounded-lp", {"p": 0.5})])
def test_a_relative_penalty_does_not_pull_at_a_layer_as_a_whole(kind, options):
    gates = gated_layers(*LAYERS)
    weights = {gates.names[1]: 2.5}
    value, _ = value_and_gradient(
        gates, penalty := ng.Penalty(gates, kind, 0.3, weights=weights, relative=True, **options)
    )
    for gate in gates.modules():
        assert gate.g.grad.abs().sum() > 0 or gate.size == 1
        assert (gate.g.grad * gate.g).sum().item() == pytest.approx(0.0, abs=1e-12)
    with torch.no_grad():
        gates.modules()[0].g.mul_(0.01)
        gates.modules()[1].g.mul_(-30.0)
    assert penalty().item() == pytest.approx(value, rel=1e-12)


def test_a_relative_gradient_is_the_one_by_differences():
    x = torch.tensor([0.5, -1.5, 0.1, 2.0, 0.3, -0.7], dtype=torch.float64, requires_grad=True)
    layer = torch.tensor([0, 0, 1, 1, 1, 2])
    assert torch.autograd.gradcheck(lambda g: Relative.apply(g, layer, 3), (x,))


def test_removing_closed_gates_leaves_a_relative_penalty_as_it_was():
    whole, cut = gated_layers((0.5, 0.0, 0.2, 0.0), (1.0, 0.0)), gated_layers((0.5, 0.2), (1.0,))
    values = [ng.Penalty(gates, "bounded-l1", 1.0, sigma=0.3, relative=True)().item() for gates in (whole, cut)]
    assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_a_relative_penalty_of_closed_layers_is_zero_with_no_gradient():
    gates = gated_layers((0.0, 0.0), (1.0, 2.0))
    penalty = ng.Penalty(gates, "l1", 1.0, relative=True)
    penalty().backward()
    assert gates.modules()[0].g.grad.tolist() == [0.0, 0.0]
    assert torch.isfinite(gates.modules()[1].g.grad).all()


def test_what_can_not_be_relative_says_so():
    gates = gates_at(*START)
    with pytest.raises(ValueError, match="l2 penalty can't be relative"):
        ng.Penalty(gates, "l2", 0.1, relative=True)


@pytest.mark.parametrize("kind, options", [("l1", {}), ("bounded-l1", {"sigma": 0.4}), ("bounded-lp", {"p": 0.5})])
def test_a_relative_proximal_step_is_a_gradient_step_that_stops_at_zero(kind, options):
    gates = gated_layers(*LAYERS)
    penalty = ng.Penalty(gates, kind, 0.3, weights={gates.names[1]: 2.5}, relative=True, **options)
    value_and_gradient(gates, penalty)
    moved = [gate.g.detach() - 0.05 * gate.g.grad for gate in gates.modules()]
    before = parameters_of(gates)
    expected = torch.cat(moved) * (torch.cat(moved).sign() == before.sign())
    penalty.proximal_(0.05)
    assert_same(parameters_of(gates), expected)
    assert (parameters_of(gates) == 0).sum() > (before == 0).sum()


def test_l0_is_the_expected_number_of_open_gates():
    gates = gates_at(*START, kind="hard-concrete")
    value, gradient = value_and_gradient(gates, ng.Penalty(gates, "l0", 0.3))
    shift = 2 / 3 * math.log(0.1 / 1.1)
    probability = [1 / (1 + math.exp(shift - g)) for g in START]
    assert value == pytest.approx(0.3 * sum(probability), rel=1e-13)
    assert gradient == pytest.approx([0.3 * p * (1 - p) for p in probability], rel=1e-12)


def test_sigma_only_rescales_l1():
    gates = gates_at(*START)
    wide = value_and_gradient(gates, ng.Penalty(gates, "l1", 0.3, sigma=2.0))
    weak = value_and_gradient(gates, ng.Penalty(gates, "l1", 0.15))
    assert wide == (pytest.approx(weak[0], rel=1e-15), pytest.approx(weak[1], rel=1e-15))


def test_the_penalty_covers_every_layer_and_keeps_the_gates_dtype():
    gates = ng.attach_gates_(ConvNet())
    assert ng.Penalty(gates, "l1", 0.5)().item() == 0.5 * 28
    assert ng.Penalty(gates, "l1", 0.5)().dtype == torch.float32
    assert ng.Penalty(gates_at(1.0), "l1", 0.5)().dtype == torch.float64
    assert ng.Penalty(gates_at(1.0, dtype=torch.float32), "l2", 0.5).kind == "l2"


def tiny_problem(l2_in_loss, momentum):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    gates = ng.attach_gates_(model)
    penalty = ng.Penalty(gates, "l2", 0.05)
    decay = 0.0 if l2_in_loss else 0.05
    groups = [{"params": gates.parameters(), "weight_decay": decay}, {"params": [*model[0].parameters(recurse=False)]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=momentum)
    x = torch.randn(8, 3, dtype=torch.float64)
    path = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(x).square().mean() + (penalty() if l2_in_loss else 0)
        loss.backward()
        optimizer.step()
        path.append(parameters_of(gates))
    return torch.stack(path)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_l2_is_the_weight_decay_of_sgd(momentum):
    path = tiny_problem(l2_in_loss=False, momentum=momentum)
    assert_same(tiny_problem(l2_in_loss=True, momentum=momentum), path, rtol=1e-13, atol=1e-15)
    assert path[-1].max() < 0.99


def test_schedules_move_with_the_epoch_and_the_tensor_stays_the_same():
    gates = gates_at(1.0, -2.0)
    penalty = ng.Penalty(gates, "bounded-l1", Stepped((1.0, 5.0), (3,)), sigma=lambda epoch: 2.0 / (epoch + 1))
    first = penalty().item()
    tensors = penalty._strength_tensor, penalty._sigma_tensor
    penalty.set_epoch(3)
    assert (penalty.strength, penalty.sigma) == (5.0, 0.5)
    assert penalty._strength_tensor is tensors[0] and penalty._sigma_tensor is tensors[1]
    assert [t.item() for t in tensors] == [5.0, 0.5]
    assert first == pytest.approx(2 - math.exp(-0.5) - math.exp(-1), rel=1e-14)
    assert penalty().item() == pytest.approx(5 * (2 - math.exp(-2) - math.exp(-4)), rel=1e-14)
    penalty.strength = 0.1
    assert tensors[0].item() == 0.1


@compiles
def test_a_compiled_penalty_follows_its_schedule_without_being_compiled_again():
    gates = gates_at(1.0, -2.0)
    penalty = ng.Penalty(gates, "bounded-l1", lambda epoch: 1.0 + epoch, sigma=lambda epoch: 2.0 / (epoch + 1))
    penalty()
    graphs = []
    compiled = torch.compile(lambda: penalty(), backend=lambda g, _: graphs.append(g) or g.forward, fullgraph=True)
    for epoch in range(3):
        penalty.set_epoch(epoch)
        assert compiled().item() == pytest.approx(penalty().item(), rel=1e-14)
    assert len(graphs) == 1


def test_a_penalty_first_looked_at_in_inference_mode_still_trains():
    gates = gates_at(1.0, -2.0)
    penalty = ng.Penalty(gates, "bounded-l1", 0.1)
    with torch.inference_mode():
        looked = penalty().item()
    assert value_and_gradient(gates, penalty)[0] == looked


def test_an_unknown_penalty_lists_the_choices():
    with pytest.raises(ValueError, match="unknown penalty 'l3'; choose one of l1, l2, bounded-l1, bounded-lp, l0"):
        ng.Penalty(gates_at(1.0), "l3", 0.1)


@pytest.mark.parametrize("strength", [-1e-4, math.nan, math.inf])
def test_a_bad_strength_is_named(strength):
    with pytest.raises(ValueError, match="strength must be a finite number, 0 or above, got"):
        ng.Penalty(gates_at(1.0), "l1", strength)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", ["l1", "bounded-l1"])
def test_a_bad_sigma_is_named(kind, sigma):
    with pytest.raises(ValueError, match="sigma must be a finite number above 0, got"):
        ng.Penalty(gates_at(1.0), kind, 0.1, sigma=sigma)


def test_a_schedule_that_goes_wrong_says_so_at_its_epoch():
    penalty = ng.Penalty(gates_at(1.0), "bounded-l1", 0.1, sigma=lambda epoch: 1.0 - epoch)
    with pytest.raises(ValueError, match=r"sigma must be a finite number above 0, got 0\.0"):
        penalty.set_epoch(1)


def test_what_is_no_number_and_no_schedule_is_named():
    with pytest.raises(TypeError, match=r"strength must be a number or a schedule \(epoch -> number\), got '0.1'"):
        ng.Penalty(gates_at(1.0), "l1", "0.1")
    with pytest.raises(TypeError, match="sigma must be a number or a schedule"):
        ng.Penalty(gates_at(1.0), "l1", 0.1, sigma=None)


def test_p_is_for_bounded_lp_and_sigma_not_for_l2():
    with pytest.raises(ValueError, match="the bounded-lp penalty needs its exponent: pass p="):
        ng.Penalty(gates_at(1.0), "bounded-lp", 0.1)
    with pytest.raises(ValueError, match="p must be a finite number above 0, got 0"):
        ng.Penalty(gates_at(1.0), "bounded-lp", 0.1, p=0)
    with pytest.raises(ValueError, match="the l1 penalty takes no p"):
        ng.Penalty(gates_at(1.0), "l1", 0.1, p=1.0)
    with pytest.raises(ValueError, match="the l2 penalty has no sigma"):
        ng.Penalty(gates_at(1.0), "l2", 0.1, sigma=2.0)


def test_l0_is_for_hard_concrete_gates_and_they_are_for_l0():
    with pytest.raises(ValueError, match="the l0 penalty does not fit the exponential gates on 0"):
        ng.Penalty(gates_at(1.0), "l0", 0.1)
    with pytest.raises(ValueError, match="the l1 penalty does not fit the hard-concrete gates on 0; use 'l0'"):
        ng.Penalty(gates_at(1.0, kind="hard-concrete"), "l1", 0.1)
    mixed = ng.Gates("mixed", {"a": ExponentialGate(2), "b": HardConcreteGate(2)})
    with pytest.raises(ValueError, match="the bounded-l1 penalty does not fit the hard-concrete gates on b"):
        ng.Penalty(mixed, "bounded-l1", 0.1)
    with pytest.raises(ValueError, match="the l0 penalty does not fit the exponential gates on a"):
        ng.Penalty(mixed, "l0", 0.1)


def test_exponential_and_linear_gates_can_share_a_penalty():
    model = ConvNet()
    ng.attach_gates_(model, where=lambda name, _: name == "fc1")
    ng.attach_gates_(model, "linear")
    assert ng.Penalty(ng.gates_of(model), "l1", 1.0)().item() == 7 + 6 * 0.5


def test_a_penalty_needs_gates_and_not_a_model():
    with pytest.raises(TypeError, match="Penalty needs the Gates that attach_gates_ returned, got a ConvNet"):
        ng.Penalty(ConvNet(), "l1", 0.1)


def test_printing():
    gates = gates_at(1.0, 2.0)
    assert repr(ng.Penalty(gates, "l2", 5e-4)) == "Penalty('l2', strength=0.0005, gates=2)"
    text = repr(ng.Penalty(gates, "bounded-lp", 1e-3, 0.5, p=0.5))
    assert text == "Penalty('bounded-lp', strength=0.001, sigma=0.5, p=0.5, gates=2)"
