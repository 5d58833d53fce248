import copy

import pytest
import torch
from helpers import ConvNet, Residual, assert_same, images, named, spread_gates_, unchanged
from torch import nn

import narrowgate as ng
from narrowgate.gates import Gate


class TestMerging:
    @pytest.mark.parametrize(
        "options", [{}, {"placement": "after-norm"}, {"kind": "hard-concrete"}, {"kind": "linear"}]
    )
    def test_merged_gates_compute_the_same_and_leave_nothing(self, options):
        plain = ConvNet().double().eval()
        model = copy.deepcopy(plain)
        spread_gates_(ng.attach_gates_(model, **options))
        x = images(dtype=torch.float64)
        expected = model(x)
        assert ng.merge_gates_(model) is model
        assert_same(model(x), expected, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(plain(x), expected)
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        assert list(model.state_dict()) == list(plain.state_dict())
        with pytest.raises(ValueError, match="this model has no gates; call attach_gates_ first"):
            ng.gates_of(model)
        ng.attach_gates_(model, **options)  # and it can begin again

    def test_a_gate_without_a_weight_to_go_into_is_refused_by_name_and_nothing_changes(self):
        model = nn.Sequential(nn.Linear(3, 3), Residual(nn.Linear(3, 3)), nn.Linear(3, 2))
        ng.attach_gates_(model, blocks=named("1"))
        message = "the gates on 1 multiply an output and have no weight to go into"
        with unchanged(model), pytest.raises(ValueError, match=message):
            ng.merge_gates_(model)

    def test_a_weight_that_is_computed_is_refused_by_name_and_merged_once_it_is_not(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        spread_gates_(ng.attach_gates_(model))
        nn.utils.parametrizations.weight_norm(model[1])
        expected = model(torch.ones(1, 3))
        message = r"the weight of 1 is computed.*remove_parametrizations"
        with unchanged(model), pytest.raises(ValueError, match=message):
            ng.merge_gates_(model)
        with unchanged(model), pytest.raises(ValueError, match=message):
            ng.plan(model, torch.ones(1, 3))
        nn.utils.parametrize.remove_parametrizations(model[1], "weight")
        assert_same(ng.merge_gates_(model)(torch.ones(1, 3)), expected, rtol=1e-6, atol=1e-6)

    def test_a_model_without_gates_is_left_as_it_is(self):
        model = ConvNet()
        with unchanged(model):
            ng.merge_gates_(model)


class TestGates:
    def test_closing_counting_and_looking_up(self):
        gates = ng.attach_gates_(ConvNet())
        assert gates.count == 6 + 6 + 4 + 5 + 7 == len(gates.flat())
        assert len(gates) == 5 == len(list(gates)) == len(gates.modules())
        assert gates.closed_fraction() == 0 and gates.close_below_(0.5) == 0
        with torch.no_grad():
            gates["fc1"].g[:3] = torch.tensor([0.1, 0.2, 1e-5])
        assert gates.closed_fraction() == 1 / 28
        assert gates.close_below_(0.015) == 1  # 1 - exp(-0.1^2) = 0.00995
        assert gates.closed_fraction() == 2 / 28
        assert (gates.values()["fc1"] == 0).tolist() == [True, False, True, False, False, False, False]
        with pytest.raises(ValueError, match="threshold must be 0 or above"):
            gates.close_below_(-1.0)

    def test_threshold_pruning_of_linear_gates(self):
        model = ConvNet()
        gates = ng.attach_gates_(model, "linear")
        with torch.no_grad():
            model.bn1.weight.copy_(torch.tensor([1e-5, -1e-5, 2e-4, -0.3, 0.0, 0.5]))
        assert gates.close_below_(1e-4) == 2 and gates.closed_fraction() == 0.5
        assert (model.bn1.weight == 0).tolist() == [True, True, False, False, True, False]

    def test_an_unknown_name_says_why(self):
        gates = ng.attach_gates_(ConvNet())
        with pytest.raises(KeyError, match="no gate on 'fc2'; not gated: the last layer"):
            gates["fc2"]
        with pytest.raises(KeyError, match="no gate on 'fcl'; gates are on conv1, depthwise"):
            gates["fcl"]

    def test_values_written_flat_come_back(self):
        gates = ng.attach_gates_(ConvNet())
        flat = torch.randn(28)
        gates.assign_(flat)
        assert_same(gates.flat().detach(), flat)
        assert_same(gates["depthwise"].g.detach(), flat[6:12])

    def test_nan_is_named(self):
        gates = ng.attach_gates_(ConvNet())
        with torch.no_grad():
            gates["up"].g[0] = float("nan")
        for look in (gates.values, gates.closed_fraction, lambda: gates.close_below_(0.1)):
            with pytest.raises(ValueError, match="gate parameters of up contain NaN: training diverged"):
                look()

    def test_merging_nan_is_refused_by_name(self):
        model = ConvNet()
        gates = ng.attach_gates_(model)
        with torch.no_grad():
            gates["up"].g[0] = float("nan")
        with pytest.raises(ValueError, match="gate parameters of up contain NaN"):
            ng.merge_gates_(model)

    def test_merging_into_a_weight_that_was_tied_since_is_refused(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        ng.attach_gates_(model, where=named("0"))
        model[2].weight = model[0].weight
        x = torch.randn(3, 4)
        before = model(x)
        for merge in (ng.merge_gates_, ng.plain_state_dict):
            with pytest.raises(ValueError, match=r"can't be merged: 0\.weight, 2\.weight are one parameter"):
                merge(model)
        assert torch.equal(model(x), before)

    def test_printing_lists_what_was_gated_and_what_was_not(self):
        text = repr(ng.attach_gates_(ConvNet()))
        assert text.splitlines()[0] == "Gates: 28 exponential gates on 5 layers"
        assert text.splitlines()[2] == "  depthwise       6"
        assert text.splitlines()[-1] == "  fc2        not gated: the last layer, its outputs are the model's"

    def test_gates_of_several_kinds(self):
        model = ConvNet()
        ng.attach_gates_(model, where=named("conv2"))
        ng.attach_gates_(model, "hard-concrete", where=named("fc1"))
        gates = ng.gates_of(model)
        assert gates.kind == "mixed" and [gate.kind for gate in gates.modules()] == ["exponential", "hard-concrete"]
        assert all(isinstance(gate, Gate) for gate in gates.modules())


@pytest.mark.parametrize("kind", ["exponential", "linear", "hard-concrete"])
def test_reopen_opens_the_least_closed_gate_and_no_other(kind):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    gates = ng.attach_gates_(model, kind)
    name = gates.names[0]
    gates[name].close_(torch.ones(4, dtype=torch.bool))
    if kind == "exponential":
        with torch.no_grad():
            gates[name].g.copy_(torch.tensor([1e-5, -1e-4, 0.0, 5e-5]))
    assert gates.closed_fraction() == 1.0
    channel = gates.reopen_(name)
    assert (gates.values()[name] != 0).nonzero().flatten().tolist() == [channel]
    if kind == "exponential":
        assert channel == 1 and gates[name].g[1] < 0
    with pytest.raises(ValueError, match="open gates"):
        gates.reopen_(name)
