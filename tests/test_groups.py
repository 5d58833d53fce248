"""Heads, neurons, residual branches and listed groups: what gets a gate, and what a closed one does."""

import copy
import pickle

import pytest
import timm
import torch
from group_networks import HEADS, MLP, RESIDUAL, TRANSFORMERS, WIDTH, bert, gated, output, vit
from helpers import assert_same, named, spread_gates_
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import narrowgate as ng
from narrowgate.gated import GatedLayer
from narrowgate.groups import branch_ends_of

PROJECTIONS = {
    "vit": "blocks.{}.attn.proj",
    "deit": "blocks.{}.attn.proj",
    "swin": "layers.0.blocks.{}.attn.proj",
    "torchvision-vit": "encoder.layers.encoder_layer_{}.self_attention.out_proj",
    "bert": "encoder.layer.{}.attention.output.dense",
    "gpt2": "h.{}.attn.c_proj",
}
ENDS = {
    "vit": ("blocks.0.attn.proj", "blocks.0.mlp.fc2", "blocks.1.attn.proj", "blocks.1.mlp.fc2"),
    "bert": (
        "encoder.layer.0.attention.output.dense",
        "encoder.layer.0.output.dense",
        "encoder.layer.1.attention.output.dense",
        "encoder.layer.1.output.dense",
    ),
}


def only(i, size):
    return torch.arange(size) == i


class TestHeads:
    @pytest.mark.parametrize("name", TRANSFORMERS)
    def test_a_closed_head_is_one_whose_columns_are_zero(self, name):
        model, gates, x = gated(name, "heads")
        assert gates.names == [PROJECTIONS[name].format(i) + ".heads" for i in range(2)]
        assert [gate.size for gate in gates.modules()] == [HEADS, HEADS]
        plain = ng.merge_gates_(copy.deepcopy(model))
        assert not any(isinstance(module, GatedLayer) for module in plain.modules())
        assert_same(output(plain, x), output(model, x), rtol=1e-12, atol=1e-12)
        gates.modules()[1].close_(only(2, HEADS))
        before = output(plain, x)
        weight = plain.get_submodule(PROJECTIONS[name].format(1)).weight
        with torch.no_grad():
            columns = slice(2 * WIDTH // HEADS, 3 * WIDTH // HEADS)
            (weight.T if name != "gpt2" else weight)[columns] = 0
        assert (output(plain, x) - before).abs().max() > 1e-4
        assert_same(output(model, x), output(plain, x), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize(("name", "layer"), [("DistilBert", "out_lin"), ("ViT", "o_proj"), ("Roberta", "dense")])
    def test_other_spellings(self, name, layer):
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": MLP}
        if name == "DistilBert":
            sizes = {"dim": WIDTH, "n_layers": 1, "n_heads": HEADS, "hidden_dim": MLP}
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes))
        gates = ng.attach_gates_(model, groups=("heads", "neurons"))
        assert [gate.size for gate in gates.modules()] == [MLP, HEADS]
        assert gates.names[1].endswith(f".{layer}.heads")

    @pytest.mark.parametrize("name", ["vit", "torchvision-vit"])
    def test_keep_function(self, name):
        model, _, x = gated(name, "heads", where=lambda *_: True)
        ng.merge_gates_(model)
        before = output(model, x)
        gates = ng.attach_gates_(model, groups=("heads", "blocks"), keep_function=True, init=0.7)
        assert gates.count == 2 * HEADS + 4
        assert_same(output(model, x), before, rtol=1e-12, atol=1e-12)

    def test_attention_that_reads_the_weight_trains_the_gates_and_forgets_after_a_failure(self):
        model, gates, x = gated("torchvision-vit", "heads")
        model(x).square().sum().backward()
        assert all((g.grad != 0).all() for g in gates.parameters())
        layer = model.encoder.layers[0].self_attention.out_proj
        with pytest.raises(AssertionError, match="query should be"):
            model.encoder.layers[0].self_attention(x, x, x)
        assert layer.weight is layer._parameters["weight"]
        merged = ng.merge_gates_(copy.deepcopy(model))
        assert not any(module._forward_pre_hooks for module in merged.modules())

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_pytorchs_own_encoder_layer(self, mode):
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, MLP, dropout=0.0, batch_first=True).double()
        gates = ng.attach_gates_(layer, groups="heads").modules()
        gates[0].close_(only(1, HEADS))
        plain = ng.merge_gates_(copy.deepcopy(layer))
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
        with torch.no_grad():  # where the fast path would read the weights
            assert_same(getattr(layer, mode)()(x), getattr(plain, mode)()(x), rtol=1e-12, atol=1e-12)

    def test_attention_whose_function_gets_the_weight_is_left_out_by_name(self):
        import torchvision

        model = torchvision.models.swin_transformer.SwinTransformer([4, 4], 8, [2], [2], [2, 2], num_classes=3)
        with pytest.raises(ValueError, match="ShiftedWindowAttention hands its weight to a function"):
            ng.attach_gates_(model, groups="heads")


class TestNeurons:
    @pytest.mark.parametrize("name", TRANSFORMERS)
    def test_the_first_layer_of_each_mlp(self, name):
        _, gates, _ = gated(name, "neurons")
        hidden = 4 * WIDTH if name == "swin" else MLP
        assert [gate.size for gate in gates.modules()] == [hidden, hidden]

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_pytorchs_own_encoder_layer(self, mode):
        """Its fast path would read the weight past the gate; a network of such layers had no gates but on heads."""
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, MLP, dropout=0.0, batch_first=True).double()
        before = copy.deepcopy(layer)
        gates = ng.attach_gates_(layer, groups="neurons")
        assert gates.names == ["linear1"]
        gates["linear1"].close_(torch.arange(MLP) % 2 == 0)
        plain = ng.merge_gates_(copy.deepcopy(layer))
        assert not any(module._forward_pre_hooks for module in plain.modules())
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
        with torch.no_grad():  # where the fast path would read the weights
            assert_same(getattr(layer, mode)()(x), getattr(plain, mode)()(x), rtol=1e-12, atol=1e-12)
            assert not torch.allclose(layer(x), before(x))
        small = ng.compact(layer, ng.plan(layer, x))
        assert small.linear1.out_features == MLP // 2
        ng.verify(layer, small, x)

    def test_an_encoder_layer_with_a_forward_of_its_own_is_left_out_by_name(self):
        class Own(nn.TransformerEncoderLayer):
            def forward(self, x):
                return super().forward(x)

        with pytest.raises(ValueError, match=r"Left out: linear1: nn\.TransformerEncoderLayer's fast path"):
            ng.attach_gates_(Own(WIDTH, HEADS, MLP, batch_first=True), groups="neurons")

    def test_a_layer_that_one_kind_leaves_out_and_another_gates_is_not_called_left_out(self):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, HEADS, MLP, batch_first=True))
        assert "groups='neurons'" in ng.attach_gates_(copy.deepcopy(model)).skipped["1.linear1"]
        gates = ng.attach_gates_(model, groups=("channels", "neurons"))
        assert gates.names == ["0", "1.linear1"] and "1.linear1" not in gates.skipped

    def test_every_kind_that_is_asked_for_has_to_be_there(self):
        with pytest.raises(ValueError, match="no heads to gate in Mlp: none of a known kind"):
            ng.attach_gates_(timm.layers.Mlp(4, 8), groups=("neurons", "heads"))

    def test_a_gated_unit_has_no_single_neurons(self):
        with pytest.raises(ValueError, match="no neurons to gate in ModuleDict: none of a known kind was chosen"):
            ng.attach_gates_(nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(4, 4)}), groups="neurons")


class TestBlocks:
    @pytest.mark.parametrize("name", RESIDUAL)
    def test_a_closed_branch_leaves_the_block_as_a_shortcut(self, name):
        torch.manual_seed(0)
        model = RESIDUAL[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        gates = ng.attach_gates_(model, groups="blocks")
        (block, x) = a_block(model)
        with torch.no_grad():
            assert (first(block(x)) - x).abs().max() > 1e-6
            gates["blocks"].close_(torch.ones(gates.count, dtype=torch.bool))
            assert_same(first(block(x)), x)

    def test_bert_adds_nothing_to_what_it_normalises(self):
        model, gates, x = gated("bert", "blocks")
        assert gates["blocks"].names == ENDS["bert"]
        gates["blocks"].close_(only(0, 4))
        attention = model.encoder.layer[0].attention
        x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
        assert_same(attention(x)[0], attention.output.LayerNorm(x))

    def test_blocks_that_add_nothing_have_no_gate(self):
        model = RESIDUAL["inverted"]()
        ends = dict(branch_ends_of(model))
        adding = [name for name, module in model.named_modules() if getattr(module, "adds", False)]
        assert list(ends) == [f"{name}.project.bn" for name in adding] and len(adding) == 10

    def test_a_class_that_is_not_known_says_what_to_do(self):
        with pytest.raises(
            ValueError,
            match=r"no blocks to gate in Sequential: none .* name the layers in which branches end with blocks=",
        ):
            ng.attach_gates_(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), groups="blocks")

    def test_a_branch_has_one_gate_where_channels_have_theirs(self):
        model = vit()
        gates = ng.attach_gates_(model, groups=("channels", "heads", "blocks"))
        assert gates["blocks"].names == ENDS["vit"]
        assert gates.skipped["blocks.1.mlp.fc2"] == "it ends a residual branch, which has one gate"
        assert {"blocks.0.attn.qkv", "blocks.0.attn.proj.heads", "patch_embed.proj"} <= set(gates.names)


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


def a_block(model):
    """A residual block without a layer in its shortcut, and a positive input for it (a ReLU may follow)."""
    for name in dict.fromkeys(end.rpartition(".")[0] for end, _ in branch_ends_of(model)):
        for parent in (name, name.rpartition(".")[0]):
            block, inputs = model.get_submodule(parent), shape_for(model.get_submodule(parent))
            if inputs is not None:
                return block, torch.rand(inputs)
    raise AssertionError("no block")


def shape_for(block):
    kind = type(block).__name__
    if kind in ("Block", "EncoderBlock", "GPT2Block"):
        return (2, 5, WIDTH)
    if kind.startswith("SwinTransformer"):
        return (2, 4, 4, WIDTH)
    if kind in ("BasicBlock", "Bottleneck") and block.downsample is None:
        return (2, block.conv1.in_channels, 4, 4)
    if kind == "PreActBottleneck" and block.shortcut is None:
        return (2, block.conv1.in_channels, 4, 4)
    if kind == "InvertedResidual":
        return (2, next(m.in_channels for m in block.modules() if isinstance(m, nn.Conv2d)), 4, 4)
    return None


class TestListed:
    def groups(self):
        rows = {i: [("0.weight", 0, [2 * i, 2 * i + 1]), ("0.bias", 0, [2 * i, 2 * i + 1])] for i in range(2)}
        return {"first": [*rows[0], ("2.weight", 1, [5])], "second": rows[1]}

    def network(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 2)).double()

    def test_one_number_multiplies_all_its_slices(self):
        model = self.network()
        raw = copy.deepcopy(model)
        gates = ng.attach_gates_(model, groups=self.groups())
        assert gates.names == ["groups"] and gates["groups"].names == ("first", "second")
        with torch.no_grad():
            gates["groups"].g.copy_(torch.tensor([0.0, 0.8]))
            a, b = gates.values()["groups"]
            assert a == 0 and 0 < b < 1
            for tensor in (raw[0].weight, raw[0].bias):
                tensor[:2] *= a
                tensor[2:4] *= b
            raw[2].weight[:, 5] *= a
        x = torch.randn(4, 3, dtype=torch.float64)
        assert_same(model(x), raw(x), rtol=1e-14, atol=1e-14)
        plan = ng.plan(model, x)
        small = ng.compact(model, plan)
        assert small[0].weight.shape == (3, 3)  # two rows of the group, and the one that nothing reads
        ng.verify(model, small, x)

    def test_transposed_weights_have_their_axes_the_other_way_round(self):
        model = nn.Sequential(nn.ConvTranspose2d(2, 4, 2), nn.Conv2d(4, 2, 1))
        gates = ng.attach_gates_(model, groups={"a": [("0.weight", 1, [3]), ("0.bias", 0, [3])]})
        gates["groups"].close_(only(0, 1))
        y = model[0](torch.randn(1, 2, 3, 3))
        assert (y[:, 3] == 0).all() and (y[:, :3] != 0).any()

    @pytest.mark.parametrize(
        ("groups", "error", "match"),
        [
            ({}, ValueError, "lists no group"),
            ({"a": []}, ValueError, "group 'a' is empty"),
            ({"a": [("0.weight", 1, [])]}, ValueError, "group 'a' is empty"),
            ({"a": None}, TypeError, r"group 'a' is None; give a list of \(parameter name, axis, positions\)"),
            ({"a": [("0.weight", 1, [1.5])]}, TypeError, r"a slice is \(parameter name, axis, positions\)"),
            ({"a": [("2.weight", 1, [True, False])]}, TypeError, "positions being whole numbers"),
            ({"a": [("2.weight", 1, torch.tensor([False, True]))]}, TypeError, "positions being whole numbers"),
            ({"a": [(0, 1, [1])]}, TypeError, r"a slice is \(parameter name, axis, positions\)"),
            ({"a": [("0.weight", 0)]}, TypeError, r"a slice is \(parameter name, axis, positions\)"),
            ({"a": [("9.weight", 0, [0])]}, ValueError, "has no '9.weight'"),
            ({"a": [("0.scale", 0, [0])]}, ValueError, "has no parameter '0.scale'"),
            ({"a": [("0.weight", 2, [0])]}, ValueError, "axis 2 of '0.weight' is neither"),
            ({"a": [("0.weight", 0, [6]), ("0.bias", 0, [6])]}, ValueError, "has 6 positions along axis 0, got 6"),
            ({"a": [("0.weight", 0, [1])]}, ValueError, "output 1 of layer '0' without its bias"),
            ({"a": [("0.bias", 0, [1])]}, ValueError, "output 1 of layer '0' without its weight"),
            ({"a": [("2.weight", 1, [1])], "b": [("2.weight", 1, [1])]}, ValueError, "group 'b': .* is listed twice"),
        ],
    )
    def test_what_cannot_be_a_group_is_named_and_nothing_changes(self, groups, error, match):
        model = self.network()
        with pytest.raises(error, match=match):
            ng.attach_gates_(model, groups=groups)
        assert not any(isinstance(module, GatedLayer) for module in model.modules())

    def test_parameters_that_no_gate_can_multiply(self):
        with pytest.raises(ValueError, match="'cls_token' is of a VisionTransformer"):
            ng.attach_gates_(vit(), groups={"a": [("cls_token", 2, [0])]})
        model = nn.Sequential(nn.Conv2d(2, 4, 1), nn.LayerNorm([4, 3, 3]))
        with pytest.raises(ValueError, match=r"'1.weight' is of a LayerNorm over several axes, \(4, 3, 3\)"):
            ng.attach_gates_(model, groups={"a": [("1.weight", 0, [0]), ("1.bias", 0, [0])]})

    def test_shared_weights(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        with pytest.raises(ValueError, match="layer '0' can't have a gate: its weight is shared with 1"):
            ng.attach_gates_(model, groups={"a": [("0.weight", 1, [0])]})


class TestChoices:
    def test_unknown_names_list_the_choices(self):
        with pytest.raises(ValueError, match="unknown groups 'head'; choose from channels, neurons, heads, blocks"):
            ng.attach_gates_(vit(), groups="head")
        with pytest.raises(ValueError, match="unknown groups ''"):
            ng.attach_gates_(vit(), groups=())
        with pytest.raises(ValueError, match="unknown groups None; choose from channels"):
            ng.attach_gates_(vit(), groups=None)

    def test_linear_gates_are_for_channels(self):
        with pytest.raises(ValueError, match="linear gates are BatchNorm scales: groups"):
            ng.attach_gates_(vit(), "linear", groups="heads")

    def test_no_layer_has_two_gates_on_one_side(self):
        model = vit()
        ng.attach_gates_(model, groups="heads")
        with pytest.raises(ValueError, match=r"has gates called .* already"):
            ng.attach_gates_(model, groups="heads")
        groups = {"a": [("blocks.0.attn.proj.weight", 1, [0])]}
        with pytest.raises(ValueError, match=r"layer 'blocks\.0\.attn\.proj' already has a gate"):
            ng.attach_gates_(model, groups=groups)
        assert ng.attach_gates_(model, groups="neurons").count == 2 * MLP
        assert ng.gates_of(model).count == 2 * MLP + 2 * HEADS

    def test_where_sees_the_layer_that_holds_the_gate(self):
        gates = ng.attach_gates_(vit(), groups=("heads", "blocks"), where=lambda name, _: name.startswith("blocks.1."))
        assert gates.names == ["blocks.1.attn.proj.heads", "blocks"]
        assert gates["blocks"].names == ENDS["vit"][2:]

    def test_inputs_and_single_blocks_go_with_groups(self):
        gates = ng.attach_gates_(vit(), groups="heads", inputs=named("head"), blocks=named("blocks.1.mlp.fc2"))
        assert gates.names == [
            "head.inputs",
            "blocks.1.mlp.fc2",
            "blocks.0.attn.proj.heads",
            "blocks.1.attn.proj.heads",
        ]

    def test_hard_concrete_gates_are_drawn_once_for_a_group(self):
        assert ng.attach_gates_(vit(), "hard-concrete", groups=("heads", "blocks")).count == 2 * HEADS + 4
        groups = {"a": [("blocks.0.mlp.fc1.weight", 1, [0]), ("blocks.1.mlp.fc1.weight", 1, [0])]}
        with pytest.raises(ValueError, match="group 'a' has parts in several places"):
            ng.attach_gates_(vit(), "hard-concrete", groups=groups)


class TestState:
    @pytest.mark.parametrize("name", ["vit", "torchvision-vit", "gpt2"])
    def test_copies_pickles_and_checkpoints(self, name):
        model, gates, x = gated(name, ("heads", "neurons", "blocks"))
        expected = output(model, x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            theirs = ng.gates_of(twin)
            assert sorted(theirs.names) == sorted(gates.names)
            assert_same(output(twin, x), expected)
            theirs["blocks"].close_(torch.ones(4, dtype=torch.bool))
            assert not torch.equal(output(twin, x), expected)
            assert_same(output(model, x), expected)
            twin.load_state_dict(model.state_dict())
            assert_same(output(twin, x), expected)

    def test_an_average_of_weights_and_buffers_keeps_the_groups(self):
        """What an average makes of 3 may be 2.9999999, of which whole numbers would keep the 2."""
        net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2)).double()
        groups = {f"{i}": [("0.weight", 0, [i]), ("0.bias", 0, [i])] for i in range(11)}
        spread_gates_(ng.attach_gates_(net, groups=groups))
        for decay in (0.9, 0.99, 0.999):
            average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
            for _ in range(20):
                average.update_parameters(net)
            x = torch.randn(4, 8).double()
            assert_same(average(x), net(x), rtol=1e-12, atol=1e-12)

    def test_an_ordinary_checkpoint_loads_and_a_plain_one_comes_out(self):
        plain = bert().double().eval()
        model, gates, x = gated("bert", ("heads", "blocks"))
        model.load_state_dict(plain.state_dict())
        gates.modules()[0].close_(only(0, HEADS))
        assert ng.plain_state_dict(model).keys() == plain.state_dict().keys()
        plain.load_state_dict(ng.plain_state_dict(model))
        assert_same(output(plain, x), output(model, x), rtol=1e-12, atol=1e-12)


def test_groups_on_a_model_without_numbers_start_as_new_ones_when_it_gets_memory():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=3)
    gates = ng.attach_gates_(model, groups=("heads", "blocks"))
    model.to_empty(device="cpu")
    model.load_state_dict({key: torch.zeros_like(t) for key, t in model.state_dict().items() if "gate" not in key})
    assert all((g == 1).all() for g in gates.parameters())
    assert model.blocks[0].attn.proj.gate_in.g.tolist() == [i // 8 for i in range(24)]
    assert set(model.blocks[1].mlp.fc2.gate.g.tolist()) == {3}
