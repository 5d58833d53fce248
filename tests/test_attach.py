import copy

import pytest
import torch
import torchvision
from helpers import ConvNet, OwnLinear, assert_same, named, spread_gates_, unchanged
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.gates import HardConcreteGate
from narrowgate.models import LeNet5, PreActResNet


def tied_norms():
    """Three convolutions with norms, of which the first two have one scale and shift."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm2d(3)]
    convs = [nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 3, 3)]
    model = nn.Sequential(*(each for pair in zip(convs, norms, strict=True) for each in (*pair, nn.ReLU())))
    model.append(nn.Conv2d(3, 2, 1))
    norms[1].weight, norms[1].bias = norms[0].weight, norms[0].bias
    return model.double().eval()


class TestWhichLayers:
    @pytest.mark.parametrize(("build", "layers"), [("resnet18", 20), ("mobilenet_v2", 52), ("vit_b_16", 25)])
    def test_every_convolution_and_linear_layer_but_the_last(self, build, layers):
        with torch.device("meta"):
            model = getattr(torchvision.models, build)()
            gates = ng.attach_gates_(model)
        assert len(gates) == layers
        every = [n for n, m in model.named_modules() if isinstance(m, (nn.modules.conv._ConvNd, nn.Linear))]
        assert sorted([*gates.names, *gates.skipped]) == sorted(every)
        assert gates.skipped[every[-1]] == "the last layer, its outputs are the model's"
        attention = {name for name in gates.skipped if name.endswith("out_proj")}
        assert len(attention) == (12 if build == "vit_b_16" else 0)
        assert all("MultiheadAttention uses its weight directly" in gates.skipped[name] for name in attention)

    def test_where_narrows_the_choice(self):
        model = ConvNet()
        seen = {}
        gates = ng.attach_gates_(model, where=lambda n, m: seen.setdefault(n, m) is m and isinstance(m, nn.Linear))
        assert gates.names == ["fc1"]
        assert {name: model.get_submodule(name) for name in seen} == seen

    def test_last_gates_the_last_layer_too(self):
        gates = ng.attach_gates_(ConvNet(), last=True)
        assert gates.names[-1] == "fc2" and not gates.skipped

    def test_tied_weights_are_skipped_by_name(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        model[1].weight = model[0].weight
        model[3].weight = model[2].weight
        with pytest.raises(ValueError, match=r"0: its weight is shared with 1.*1: its weight is shared with 0.*3: "):
            ng.attach_gates_(model)
        gates = ng.attach_gates_(model, last=True, inputs=named("3"))
        assert gates.names == ["4"]
        assert gates.skipped["3"] == "its weight is shared with 2, which a gate would split"

    @pytest.mark.parametrize("keep_function", [True, False])
    def test_a_norm_whose_scale_is_anothers_too_leaves_the_gate_to_its_layer(self, keep_function):
        model, x = tied_norms(), torch.randn(2, 1, 9, 9, dtype=torch.float64)
        before, plain = model(x).detach(), tied_norms()
        gates = ng.attach_gates_(model, placement="after-norm", keep_function=keep_function)
        assert gates.names == ["0", "3", "7"]  # and not 6, whose norm has a scale of its own
        assert not keep_function or torch.allclose(model(x), before, rtol=1e-9)
        spread_gates_(gates)
        plain.load_state_dict(ng.plain_state_dict(model))
        assert_same(plain(x), model(x), rtol=1e-9, atol=1e-12)

    def test_a_scale_that_two_norms_share_has_linear_gates_once(self):
        model = tied_norms()
        gates = ng.attach_gates_(model, "linear")
        assert gates.names == ["1", "7"] and gates.skipped == {"4": "its scale is that of 1, which has gates"}
        assert gates.count == 7 and ng.Penalty(gates, "l1", 2.0)().item() == pytest.approx(2.0 * 7 * 0.5)

    def test_a_module_used_under_two_names_has_one_gate(self):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(4, 4)
                self.b = self.a

            def forward(self, x):
                return self.b(torch.relu(self.a(x)))

        model = Shared()
        gates = ng.attach_gates_(model, last=True)
        spread_gates_(gates)
        assert gates.names == ["a"]
        weight, bias = model.a.scaled(gates["a"].value(), None)
        x = torch.randn(3, 4)
        assert_same(model(x), F.linear(torch.relu(F.linear(x, weight, bias)), weight, bias))

    def test_layers_that_pytorch_bypasses_are_skipped_by_name(self):
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.Sequential(nn.Linear(8, 8), encoder, nn.Linear(8, 2))
        gates = ng.attach_gates_(model)
        assert gates.names == ["0"]
        assert "fast path" in gates.skipped["1.linear1"] and "fast path" in gates.skipped["1.linear2"]
        assert "uses its weight directly" in gates.skipped["1.self_attn.out_proj"]

    def test_lazy_layers_are_an_error(self):
        with pytest.raises(ValueError, match="layer '0' has no weights yet; run the model once"):
            ng.attach_gates_(nn.Sequential(nn.LazyConv2d(4, 3), nn.Linear(4, 2)))
        with pytest.raises(ValueError, match="layer '0' has no weights yet"):
            ng.attach_gates_(nn.Sequential(nn.LazyBatchNorm2d()), "linear")

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
    def test_a_model_compiled_by_torch_jit_is_refused(self):
        with pytest.raises(TypeError, match=r"compiled by torch\.jit, which hides its layers; gate the model itself"):
            ng.attach_gates_(torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))))

    def test_nothing_matched_says_what_there_was(self):
        with pytest.raises(
            ValueError, match="nothing to gate in ConvNet: it has 6 x convolution or linear layer and none"
        ):
            ng.attach_gates_(ConvNet(), where=lambda name, module: False)
        with pytest.raises(ValueError, match="Left out: the model itself: the last layer"):
            ng.attach_gates_(nn.Linear(3, 4))
        with pytest.raises(ValueError, match="it has 0 x convolution or linear layer"):
            ng.attach_gates_(nn.Sequential(nn.ReLU()))
        with pytest.raises(ValueError, match=r"0 x BatchNorm .* use kind='exponential'"):
            ng.attach_gates_(nn.Sequential(nn.Linear(3, 3)), "linear")


class TestWrongCalls:
    def test_unknown_names_list_the_choices(self):
        with pytest.raises(
            ValueError, match="unknown gate kind 'l0'; choose one of exponential, linear, hard-concrete"
        ):
            ng.attach_gates_(ConvNet(), "l0")
        with pytest.raises(ValueError, match="unknown placement 'after'; choose one of before-norm, after-norm"):
            ng.attach_gates_(ConvNet(), placement="after")

    @pytest.mark.parametrize("name", ["where", "inputs", "blocks"])
    def test_a_filter_must_be_a_function(self, name):
        with pytest.raises(TypeError, match=rf"{name} must be a function \(name, module\) -> bool, got 'conv1'"):
            ng.attach_gates_(ConvNet(), **{name: "conv1"})

    def test_options_that_linear_gates_have_no_use_for(self):
        for option in ({"inputs": named("fc1")}, {"keep_function": True}, {"placement": "after-norm"}, {"last": True}):
            with pytest.raises(ValueError, match="linear gates are BatchNorm scales"):
                ng.attach_gates_(ConvNet(), "linear", **option)

    @pytest.mark.parametrize("init", [0.0, 1e-4, float("nan")])
    def test_gates_that_would_start_closed_are_refused(self, init):
        with pytest.raises(ValueError, match="exponential gates closed"):
            ng.attach_gates_(ConvNet(), init=init)
        with pytest.raises(ValueError, match="finite number other than 0"):
            ng.attach_gates_(ConvNet(), "linear", init=0.0)

    @pytest.mark.parametrize("kind", ["exponential", "hard-concrete", "linear"])
    def test_gates_that_could_not_learn_are_refused(self, kind):
        with pytest.raises(ValueError, match="init must be a finite number"):
            ng.attach_gates_(ConvNet(), kind, init=float("inf"))

    def test_gating_twice_is_refused_and_changes_nothing(self):
        model = ConvNet()
        ng.attach_gates_(model, where=named("fc1"))
        with unchanged(model), pytest.raises(ValueError, match="layer 'fc1' already has a gate"):
            ng.attach_gates_(model)
        ng.attach_gates_(model, where=named("conv1", "conv2"))
        assert ng.gates_of(model).names == ["conv1", "conv2", "fc1"]
        linear = ConvNet()
        ng.attach_gates_(linear, "linear")
        with pytest.raises(ValueError, match="layer 'bn1' already has a gate"):
            ng.attach_gates_(linear, "linear")

    def test_input_gates_can_be_added_later(self):
        model = ConvNet()
        ng.attach_gates_(model)
        ng.attach_gates_(model, where=lambda n, m: False, inputs=named("fc1"))
        assert ng.gates_of(model).names[-2:] == ["fc1.inputs", "fc1"]
        with pytest.raises(ValueError, match="layer 'fc1' already has a gate"):
            ng.attach_gates_(model, where=lambda n, m: False, inputs=named("fc1"))

    def test_an_error_late_in_the_model_changes_nothing_before_it(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), OwnLinear(3, 3), nn.Linear(3, 2))
        message = "layer '2' is a OwnLinear, gated at its output: keep_function can't"
        with unchanged(model), pytest.raises(ValueError, match=message):
            ng.attach_gates_(model, keep_function=True)
        with unchanged(model), pytest.raises(ValueError, match="layer '2' is a OwnLinear: input gates serve plain"):
            ng.attach_gates_(model, inputs=named("2"))

    def test_an_attribute_called_gate_is_not_overwritten(self):
        model = ConvNet()
        model.conv1.gate = "mine"
        with pytest.raises(ValueError, match=r"layer 'conv1' already has a gate \(or an attribute 'gate'\)"):
            ng.attach_gates_(model)
        assert model.conv1.gate == "mine"


class TestStart:
    @pytest.mark.parametrize("kind", ["exponential", "hard-concrete"])
    @pytest.mark.parametrize("placement", ["before-norm", "after-norm"])
    @pytest.mark.parametrize(
        ("model", "shape"), [(PreActResNet(11), (2, 3, 8, 8)), (LeNet5(), (2, 1, 28, 28)), (ConvNet(), (2, 3, 8, 8))]
    )
    def test_keep_function_leaves_the_outputs_as_they_were(self, model, shape, placement, kind):
        model = copy.deepcopy(model).double().eval()
        for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]:
            nn.init.normal_(norm.bias)
        x = torch.randn(shape, dtype=torch.float64)
        expected, changed = model(x), copy.deepcopy(model)
        ng.attach_gates_(model, kind, placement=placement, keep_function=True)
        assert_same(model(x), expected, rtol=1e-12, atol=1e-12)
        ng.attach_gates_(changed, kind, placement=placement)
        assert not torch.allclose(changed(x), expected)

    @pytest.mark.parametrize("groups", ["channels", "blocks"])
    def test_weights_that_come_without_gates_after_they_were_divided_by_them_are_warned_of(self, groups):
        ordinary = PreActResNet(11)
        model, plain = copy.deepcopy(ordinary), copy.deepcopy(ordinary)
        ng.attach_gates_(model, groups=groups, keep_function=True)
        with pytest.warns(UserWarning, match=r"saved without gates.*Load them first"):
            model.load_state_dict(ordinary.state_dict())
        model.load_state_dict(model.state_dict())  # no warning: these have gates
        model.load_state_dict({"fc.bias": ordinary.fc.bias}, strict=False)  # nor here: nothing that a gate divides
        ng.attach_gates_(plain, groups=groups)
        plain.load_state_dict(ordinary.state_dict())

    def test_exponential_gates_start_at_one_or_at_init(self):
        assert all((g == 1).all() for g in ng.attach_gates_(ConvNet()).parameters())
        assert all((g == 0.3).all() for g in ng.attach_gates_(ConvNet(), init=0.3).parameters())

    def test_hard_concrete_gates(self):
        gates = ng.attach_gates_(ConvNet(), "hard-concrete", init=0.3)
        assert all(isinstance(gate, HardConcreteGate) and (gate.g == 0.3).all() for gate in gates.modules())

    def test_linear_gates_start_at_a_half_unless_the_norm_was_trained(self):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
        nn.init.constant_(model[1].bias, 0.1)
        nn.init.constant_(model[2].weight, 0.9)
        gates = ng.attach_gates_(model, "linear")
        assert [gate.g[0].item() for gate in gates.modules()] == pytest.approx([0.5, 1.0, 0.9])
        assert gates.skipped == {"3": "it has no scale (affine=False)"}

    def test_linear_gates_with_init_where_and_frozen_scales(self):
        model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        model[0].requires_grad_(False)
        gates = ng.attach_gates_(model, "linear", init=0.2, where=named("0", "1"))
        assert gates.names == ["1"] and (model[1].weight == 0.2).all() and (model[2].weight == 1).all()
        assert gates.skipped == {"0": "its scale is frozen (requires_grad=False)"}
        with pytest.raises(ValueError, match="Left out: 0: its scale is frozen"):
            ng.attach_gates_(model, "linear", where=named("0"))


@pytest.mark.parametrize("model", [None, LeNet5, [nn.Linear(2, 2)]])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TypeError, match=r"attach_gates_ needs a model, an nn\.Module that was built, got"):
        ng.attach_gates_(model)
