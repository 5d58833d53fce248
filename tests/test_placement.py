import copy

import pytest
import timm.layers
import torch
import torchvision
from helpers import ConvNet, OwnLinear, Residual, assert_same, images, named, spread_gates_
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import narrowgate as ng
from narrowgate.gated import GatedLayer
from narrowgate.models import LeNet5, PreActResNet


class TestInputs:
    def test_a_model_may_name_its_own_also_as_a_part_of_another(self):
        assert ng.attach_gates_(LeNet5()).names == ["conv1", "conv2", "fc1.inputs", "fc1"]
        assert "net.fc1.inputs" in ng.attach_gates_(nn.ModuleDict({"net": LeNet5()})).names

    def test_the_caller_overrules_the_model(self):
        assert ng.attach_gates_(LeNet5(), inputs=lambda n, m: False).names == ["conv1", "conv2", "fc1"]

    def test_a_closed_input_feature_has_no_effect(self):
        model = ConvNet()
        gates = ng.attach_gates_(model, where=lambda n, m: False, inputs=named("fc2"))
        assert gates.names == ["fc2.inputs"]
        x = torch.randn(2, 7)
        before = model.fc2(x)
        gates["fc2.inputs"].close_(torch.arange(7) == 3)
        x[:, 3] = 1e6
        assert not torch.equal(model.fc2(x), before)
        assert_same(model.fc2(x), model.fc2(x * (torch.arange(7) != 3)))


class TestBlocks:
    def branch_of_sequential(self):
        return nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Sequential(nn.Conv2d(5, 3, 1), nn.BatchNorm2d(3)))

    @pytest.mark.parametrize("hooked", [True, False], ids=["a-module-with-its-own-forward", "a-sequential"])
    def test_a_closed_residual_branch_is_dropped_exactly(self, hooked):
        branch = Residual(self.branch_of_sequential()) if hooked else self.branch_of_sequential()
        model = nn.Sequential(Residual(branch), nn.Flatten(), nn.Linear(3 * 64, 2))
        nn.init.normal_(branch.branch[2][1].bias if hooked else branch[2][1].bias)
        gates = ng.attach_gates_(model, where=lambda n, m: False, blocks=named("0.branch"))
        assert gates.names == (["0.branch"] if hooked else ["0.branch.2.1"])
        assert gates.count == 1
        x = images()
        value = gates[gates.names[0]].value()
        plain = copy.deepcopy(branch)
        with torch.no_grad():
            plain_branch = plain(x) / value
        assert_same(model[0](x), x + value * plain_branch, rtol=1e-4, atol=1e-5)
        assert not torch.equal(model[0](x), x)
        gates.close_below_(1.0)
        assert_same(model[0](x), x)

    def test_gates_of_a_sequential_can_be_merged(self):
        model = nn.Sequential(Residual(self.branch_of_sequential()), nn.Flatten(), nn.Linear(3 * 64, 2)).double().eval()
        ng.attach_gates_(model, blocks=named("0.branch"))
        x = images(dtype=torch.float64)
        expected = model(x)
        assert_same(ng.merge_gates_(model)(x), expected, rtol=1e-12, atol=1e-12)

    def test_blocks_that_cannot_have_a_gate(self):
        class Walks(nn.Sequential):
            def forward(self, x):
                return sum(layer(x) for layer in self)

        with pytest.raises(ValueError, match="blocks= chose no module"):
            ng.attach_gates_(ConvNet(), blocks=named("convl"))
        with pytest.raises(ValueError, match="'0' is a Walks, which goes through its own children"):
            ng.attach_gates_(nn.Sequential(Walks(nn.Linear(2, 2)), nn.Linear(2, 2)), blocks=named("0"))
        with pytest.raises(ValueError, match="layer 'fc1' was chosen for two gates"):
            ng.attach_gates_(ConvNet(), blocks=named("fc1"))
        with pytest.raises(ValueError, match=r"block '1\.self_attn\.out_proj' can't have a gate"):
            model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, batch_first=True))
            ng.attach_gates_(model, blocks=named("1.self_attn.out_proj"))
        relu = nn.ReLU()
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), relu), nn.Sequential(nn.Linear(2, 2), relu))
        with pytest.raises(ValueError, match=r"block '0\.1' is used in several places"):
            ng.attach_gates_(model, blocks=named("0"))

    def test_a_norm_is_left_out_by_the_layer_in_front_of_it(self):
        def attach(leaving="", **options):
            model = nn.Sequential(
                nn.Sequential(nn.Conv2d(3, 4, 3), OwnNorm(4)),
                nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
                nn.Conv2d(4, 2, 1),
            )
            return ng.attach_gates_(model, placement="after-norm", where=lambda n, m: n != leaving, **options)

        with pytest.raises(ValueError, match=r"'1\.1' was chosen for two gates; leave '1\.0', in front of it, out"):
            attach(blocks=named("1"))
        assert attach("1.0", blocks=named("1")).names == ["0.1", "1.1"]
        with pytest.raises(ValueError, match=r"keep_function can't serve it; leave '0\.0', in front of it, out with"):
            attach(keep_function=True)
        assert attach("0.0", keep_function=True).names == ["1.1"]
        with pytest.raises(ValueError, match=r"keep_function can't serve it; leave it out with blocks="):
            attach("0.0", keep_function=True, blocks=named("0.1"))

    def test_a_block_without_parameters_has_a_gate_of_the_models_dtype(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)).double()
        gates = ng.attach_gates_(model, where=lambda n, m: False, blocks=named("1"))
        assert gates["1"].g.dtype == torch.float64


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class TestAfterNorm:
    def test_a_closed_channel_is_exactly_zero_behind_the_norm(self):
        model = torchvision.models.resnet18(num_classes=3).layer1.eval()
        for norm in [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]:
            nn.init.normal_(norm.bias)
        gates = ng.attach_gates_(model, placement="after-norm", last=True)
        assert gates.names == ["0.bn1", "0.bn2", "1.bn1", "1.bn2"]
        spread_gates_(gates)
        outputs = {}
        for name in gates:
            model.get_submodule(name).register_forward_hook(
                lambda m, a, y, name=name: outputs.update({name: y.clone()})
            )
        model(torch.randn(2, 64, 4, 4))
        for name, value in gates.values().items():
            assert 5 < (value == 0).sum() < 60
            assert torch.equal(outputs[name].abs().amax((0, 2, 3)) == 0, value == 0)

    def test_a_norm_of_another_module_is_not_taken(self):
        """In a pre-activation net the norm registered next belongs to a sum."""
        gates = ng.attach_gates_(PreActResNet(20), placement="after-norm")
        assert "conv1" in gates.names and "stages.0.0.bn2" in gates.names and "stages.0.0.conv3" in gates.names
        assert not any(name.endswith("bn1") for name in gates)

    def test_a_layer_without_a_norm_is_gated_itself(self):
        model = nn.Sequential(
            *[nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False)],
            *[nn.Conv2d(4, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)],
            *[nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2)],
        )
        assert ng.attach_gates_(model, placement="after-norm", last=True).names == ["0", "2", "6"]

    @pytest.mark.parametrize("norm", [timm.layers.BatchNormAct2d, nn.SyncBatchNorm])
    def test_norms_with_a_forward_of_their_own_are_gated_along_their_channels(self, norm):
        model = nn.Sequential(nn.Conv2d(3, 5, 1), norm(5), nn.Conv2d(5, 2, 1)).eval()
        nn.init.normal_(model[1].bias)
        plain = copy.deepcopy(model)
        gates = ng.attach_gates_(model, placement="after-norm")
        assert gates.names == ["1"]
        spread_gates_(gates)
        x = images()
        value = gates["1"].value().view(-1, 1, 1)
        assert_same(model(x), plain[2](plain[1](plain[0](x)) * value))


class OwnConv(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.tanh(), self.bias) + 1


def instance_forward():
    layer = nn.Conv2d(3, 6, 3)
    layer.forward = lambda x: F.conv2d(x, layer.weight, layer.bias).abs()
    return layer


class TestLayersWithTheirOwnForward:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: timm.layers.StdConv2d(3, 6, 3),
            lambda: timm.layers.Conv2dSame(3, 6, 3, stride=2),
            lambda: OwnConv(3, 6, 3),
            lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 6, 3)),
            lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3)),
            instance_forward,
        ],
    )
    def test_convolutions_are_gated_through_their_output_exactly(self, make):
        layer = make().eval()
        model = nn.Sequential(layer, nn.Flatten())
        x = images()
        expected = model[0](x)
        gates = ng.attach_gates_(model, last=True)
        spread_gates_(gates)
        assert not isinstance(model[0], GatedLayer)
        assert_same(model[0](x), expected * gates["0"].value().view(-1, 1, 1))
        model(x).sum().backward()
        assert gates["0"].g.grad is not None

    def test_linear_layers_are_gated_along_their_last_axis(self):
        model = nn.Sequential(OwnLinear(3, 4))
        x = torch.randn(2, 5, 3)
        expected = model(x)
        gates = ng.attach_gates_(model, last=True)
        spread_gates_(gates)
        assert_same(model(x), expected * gates["0"].value())

    def test_pruned_layers_keep_their_mask(self):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        x = torch.randn(3, 4)
        expected = model[0](x)
        gates = ng.attach_gates_(model)
        spread_gates_(gates)
        assert_same(model[0](x), expected * gates["0"].value())
        with pytest.raises(ValueError, match="the gates on 0 multiply an output"):
            ng.merge_gates_(model)
