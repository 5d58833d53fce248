"""Plans of models that are only shapes, on the meta device or fake: what gates prove, and weights read from disk."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import spread_gates_
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import narrowgate as ng
from narrowgate.gates import Gate
from narrowgate.models import LeNet5, build
from narrowgate.streamed import Checkpoint, compact_to, load
from narrowgate.weights import StorageError, serialise

torchvision = pytest.importorskip("torchvision")


class Block(nn.Module):
    """A block of a transformer that counts its heads as most of them do."""

    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_width = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n = x.shape[:2]
        q, k, v = (
            self.qkv(self.norm1(x)).reshape(b, n, 3, self.num_heads, self.head_width).permute(2, 0, 3, 1, 4).unbind(0)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, -1))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


def transformer(width, heads, depth):
    return nn.Sequential(*(Block(width, heads) for _ in range(depth)), nn.Linear(width, 10)).eval()


def vit():
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5
    )


NETWORKS = {
    "lenet5": (LeNet5, (2, 1, 28, 28)),
    "resnet18": (lambda: torchvision.models.resnet18(num_classes=10), (2, 3, 32, 32)),
    "mobilenetv2": (lambda: build("mobilenetv2", 10), (2, 3, 32, 32)),
    "vit": (vit, (2, 3, 32, 32)),
    "transformer": (lambda: transformer(32, 4, 2), (2, 6, 32)),
}


def gated(name, closed=0.5, **options):
    """A gated network with random numbers everywhere, half of its gates closed, and an input."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.1, 0.2)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    gates = ng.attach_gates_(model, **options)
    spread_gates_(gates, closed)
    gates.close_below_(1e-4)
    return model.double().eval(), x.double()


def shapes_only(model, leave=lambda name: False):
    """A copy whose tensors are on the meta device, but for gates and what ``leave`` says; ties stay."""
    model, made = copy.deepcopy(model), {}
    gates = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Gate))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None or (gates and name.startswith(gates)) or leave(name):
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device="meta")
                    made[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
                store[key] = made[id(tensor)]
    return model


def assert_same_small(model, one, other):
    first, second = (ng.compact(model, plan).state_dict() for plan in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def assert_keeps_all_of(plan, smaller):
    """Whatever ``plan`` cuts, the other one cuts too."""
    for name, how in plan.cuts.items():
        for axis, kept in how.keep.items():
            assert set(kept) >= set(smaller.cuts[name].keep.get(axis, range(how.shape[axis]))), name


ZERO_CONSTANTS = [
    ("lenet5", {}),
    ("resnet18", {"placement": "after-norm"}),
    ("vit", {}),
    ("vit", {"groups": ["heads", "neurons"]}),
    ("transformer", {"groups": ["heads", "neurons"]}),
]


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize(("name", "options"), ZERO_CONSTANTS, ids=str)
def test_where_closed_channels_are_zero_gates_alone_give_the_whole_plan(name, options, layout):
    model, x = gated(name, **options)
    wanted, found = ng.plan(model, x, layout=layout), ng.plan(shapes_only(model), x, layout=layout)
    assert found.cuts and found == wanted
    assert found.parameters_before == sum(p.numel() for n, p in model.named_parameters() if "gate" not in n)
    assert found.parameters_after < 0.9 * found.parameters_before
    assert_same_small(model, found, wanted)


def test_gates_of_heads_remove_whole_heads():
    model, x = gated("transformer", groups=["heads"])
    with torch.no_grad():
        for gate in ng.gates_of(model).parameters():
            gate.copy_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
    found = ng.plan(shapes_only(model), x)
    assert found == ng.plan(model, x)
    assert found.widths == {"0.num_heads": 2, "1.num_heads": 2}


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_gates_before_norms_with_constants_dropped(name):
    model, x = gated(name)
    wanted, found = ng.plan(model, x, constants="drop"), ng.plan(shapes_only(model), x, constants="drop")
    assert found == wanted and found.parameters_after < 0.6 * found.parameters_before
    assert_same_small(model, found, wanted)


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {}),
        ("mobilenetv2", {}),
        ("mobilenetv2", {"placement": "after-norm"}),
        ("resnet18", {"kind": "linear"}),
    ],
    ids=str,
)
def test_constants_that_need_numbers_stay_and_are_named(name, options, layout):
    model, x = gated(name, **options)
    linear = options.get("kind") == "linear"  # then the gates are the norms' own scales
    small = {n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)} if linear else ()
    shapes = shapes_only(model, lambda key: key.endswith(".weight") and key.removesuffix(".weight") in small)
    wanted, found = ng.plan(model, x, layout=layout), ng.plan(shapes, x, layout=layout)
    assert_keeps_all_of(found, wanted)
    assert wanted.parameters_after < found.parameters_after <= found.parameters_before
    named = {wall.layer for wall in found.walls if "numbers are not there" in wall.why}
    assert bool(named) != linear and named <= {n for n, _ in model.named_modules()}
    assert not any("numbers are not there" in wall.why for wall in wanted.walls)
    ng.verify(model, ng.compact(model, found), x)


def test_constants_are_not_ignored_where_a_product_could_tell_zero_from_them():
    class Excited(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
            self.scale, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 2)

        def forward(self, x):
            return self.head((torch.relu(-self.bn(self.conv(x))) * self.scale(x)).mean((2, 3)))

    model = Excited().eval()
    gates = ng.attach_gates_(model, where=lambda name, layer: name == "conv")
    gates.parameters()[0].data[:4] = 0.0
    with torch.no_grad():
        model.bn.bias.fill_(-1.0)  # so the closed channels are a constant 1 times what varies
    x = torch.randn(2, 3, 8, 8)
    assert not ng.plan(model, x, constants="drop").cuts
    assert not ng.plan(shapes_only(model), x, constants="drop").cuts


def test_dropped_constants_of_which_only_a_part_is_known():
    """A known shift of zero is no proof of a zero: the mean is unknown. A pooled border would tell the two apart."""
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(3, padding=1), nn.Conv2d(8, 2, 1)
    model = nn.Sequential(*parts).eval()
    gates = ng.attach_gates_(model)
    gates["0"].g.data[:4] = 0
    model[1].running_mean.fill_(-1.0)
    x = torch.randn(2, 3, 8, 8)
    wanted = ng.plan(model, x, constants="drop")
    shapes = shapes_only(model, lambda name: name in ("1.weight", "1.bias"))
    found = ng.plan(shapes, x, constants="drop")
    assert not wanted.cuts and found == wanted
    assert (shapes[1].weight == 1).all() and (shapes[1].bias == 0).all() and shapes[1].running_mean.is_meta


def test_vectors_alone_tell_most_constants():
    model, x = gated("resnet18")
    vectors = {name for name, tensor in model.state_dict().items() if tensor.dim() < 2}
    without, found = ng.plan(shapes_only(model), x), ng.plan(shapes_only(model, vectors.__contains__), x)
    assert found.parameters_after < 0.6 * without.parameters_after
    assert_keeps_all_of(found, ng.plan(model, x))
    ng.verify(model, ng.compact(model, found), x)


@pytest.mark.parametrize("padding", [0, 1])
def test_known_constants_through_unknown_weights_are_unknown(padding):
    class Branched(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.a, self.bn = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6)
            self.b, self.head = nn.Conv2d(6, 8, 1 + 2 * padding, padding=padding), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            x = self.stem(x)
            return self.head(x + self.b(torch.relu(self.bn(self.a(x)))))

    torch.manual_seed(0)
    model = Branched().double().eval()
    gates = ng.attach_gates_(model, where=lambda name, layer: name == "a")
    gates["a"].g.data[:] = 0  # the whole branch is a constant then
    with torch.no_grad():
        model.bn.bias.copy_(torch.tensor([0.5, -0.5, 1.0, 0.0, 2.0, 0.1]))
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    vectors = {name for name, tensor in model.state_dict().items() if tensor.dim() < 2}
    found = ng.plan(shapes_only(model, vectors.__contains__), x)
    assert found.parameters_after < found.parameters_before  # what is zero behind the ReLU goes all the same
    assert ng.plan(model, x).parameters_after <= found.parameters_after
    ng.verify(model, ng.compact(model, found), x)


def test_zero_filters_without_gates_in_a_layer_that_has_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(96, 4)).eval()
    with torch.no_grad():
        model[0].weight[[1, 4]] = 0
        model[0].bias[[1, 4]] = 0
    x = torch.randn(1, 3, 8, 8)
    shapes = shapes_only(model, lambda name: name.startswith("0."))
    assert ng.plan(shapes, x) == ng.plan(model, x)
    assert ng.plan(shapes, x).cuts["2.weight"].keep == {1: [0, 2, 3, 5, 6, 7]}
    assert not ng.plan(shapes_only(model), x).cuts


def test_inputs_may_be_shapes_too_and_nothing_is_touched():
    model, x = gated("resnet18", placement="after-norm")
    shapes = shapes_only(model)
    before = {name: (id(t), t.device) for name, t in shapes.state_dict(keep_vars=True).items()}
    classes = [type(m) for m in shapes.modules()]
    assert ng.plan(shapes, x.to("meta")) == ng.plan(model, x)
    assert {name: (id(t), t.device) for name, t in shapes.state_dict(keep_vars=True).items()} == before
    assert [type(m) for m in shapes.modules()] == classes
    assert ng.compact(shapes, ng.plan(shapes, x)).conv1.weight.is_meta


def test_fake_tensors():
    model, x = gated("resnet18", placement="after-norm")
    shapes = shapes_only(model)
    with FakeTensorMode():
        for module in shapes.modules():
            for store in (module._parameters, module._buffers):
                for key, tensor in store.items():
                    if tensor is not None and tensor.is_meta:
                        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                        store[key] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
    assert ng.plan(shapes, x) == ng.plan(model, x)


def test_training_plans_need_gates_only():
    model, x = gated("resnet18", placement="after-norm")
    assert ng.plan(shapes_only(model), x, training=True) == ng.plan(model, x, training=True)


# -- weights from disk ---------------------------------------------------------------------------------------------


def sharded(model, folder, shards=3):
    """Save a model as several safetensors files with an index, tied weights once."""
    state, seen, files = {}, set(), {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            state[name] = tensor
        seen.add(tensor.data_ptr())
    folder.mkdir()
    for i in range(shards):
        part = dict(list(state.items())[i::shards])
        (folder / f"model-{i}.safetensors").write_bytes(serialise(part))
        files.update(dict.fromkeys(part, f"model-{i}.safetensors"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return Checkpoint(folder)


def on_meta(model):
    return copy.deepcopy(model).to("meta")


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {}),
        (
            "resnet18",
            {"blocks": lambda name, module: name in ("layer1.0", "layer3.1")},
        ),  # a gate that no weight takes in
        ("mobilenetv2", {}),
        ("vit", {"groups": ["heads", "neurons"]}),
        ("lenet5", {}),
    ],
    ids=["resnet18", "resnet18-blocks", "mobilenetv2", "vit", "lenet5"],
)
def test_with_weights_from_disk_the_plan_and_the_small_model_are_the_same(name, options, layout, tmp_path):
    model, x = gated(name, **options)
    weights, shapes = sharded(model, tmp_path / "big"), on_meta(model)
    wanted, found = ng.plan(model, x, layout=layout), ng.plan(shapes, x, layout=layout, weights=weights)
    assert found == wanted and found.cuts
    compact_to(tmp_path / "small", shapes, found, weights)
    ng.save(ng.compact(model, wanted), wanted, tmp_path / "usual")
    assert json.loads((tmp_path / "small/meta.json").read_text())["tied"] == {}
    for read in (ng.load, load):
        one, other = (
            read(tmp_path / folder, lambda: NETWORKS[name][0]().double().eval()).state_dict()
            for folder in ("small", "usual")
        )
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_small_model_is_read_without_building_the_large_one(tmp_path):
    model, x = gated("resnet18")
    plan = ng.plan(model, x, layout="scatter")
    small = ng.compact(model, plan)
    ng.save(small, plan, tmp_path / "small")

    def builder():
        with torch.device("meta"):
            return torchvision.models.resnet18(num_classes=10).double().eval()

    again = load(tmp_path / "small", builder)
    assert torch.equal(again(x), small(x))
    assert all(p.requires_grad == q.requires_grad for p, q in zip(again.parameters(), small.parameters(), strict=True))


def test_tied_weights_are_found_under_either_name(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc1, self.fc2 = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 16)
            self.head = nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            h = self.embed(x)
            return self.head(h + self.fc2(torch.relu(self.fc1(h))))

    torch.manual_seed(0)
    model = Tied().eval()
    spread_gates_(ng.attach_gates_(model, groups="neurons"), 0.5)
    x = torch.randint(0, 20, (2, 5))
    state = {name: t for name, t in model.state_dict().items() if name != "embed.weight"}
    shapes = shapes_only(model)
    plan = ng.plan(shapes, x, weights=state)
    assert plan == ng.plan(model, x) and plan.cuts
    compact_to(tmp_path / "small", shapes, plan, state)
    small = ng.load(tmp_path / "small", lambda: Tied().eval())
    assert small.head.weight is small.embed.weight and torch.equal(small(x), ng.compact(model, plan)(x))


@pytest.mark.parametrize("left_out", [None, "a.bias", "b.bias"])
def test_tied_vectors_stay_one(left_out, tmp_path):
    """Half of what ``a`` computes is zero, but its bias is also that of ``b``, which needs all of it."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(8, 2)
            self.e = nn.Linear(6, 2)
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.e(torch.relu(self.c(torch.relu(self.a(x))))) + self.d(torch.relu(self.b(x)))

    torch.manual_seed(0)
    model, x = Tied().double().eval(), torch.randn(3, 4, dtype=torch.double)
    for parameter in (model.a.weight, model.a.bias, model.c.weight, model.c.bias):
        parameter.data[:4] = 0
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != left_out}
    shapes = shapes_only(model)
    plan = ng.plan(shapes, x, weights=weights)
    assert plan == ng.plan(model, x) and plan.cuts and "a.bias" not in plan.cuts
    compact_to(tmp_path / "small", shapes, plan, weights)
    small = load(tmp_path / "small", Tied)
    assert small.a.bias is small.b.bias and torch.allclose(small(x), model(x), rtol=0, atol=1e-14)


def test_a_plan_for_a_model_that_lost_its_ties_is_refused():
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).eval(), torch.randn(2, 4)
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[2].weight[:, 0] = 0
    separate, tied = copy.deepcopy(model).to("meta"), shapes_only(model)
    plans = {shapes: ng.plan(shapes, x, weights=model.state_dict()) for shapes in (separate, tied)}
    assert plans[separate].cuts and plans[tied] == ng.plan(model, x)
    ng.compact(model, plans[tied])
    for cut in (ng.compact, ng.compact_):
        with pytest.raises(ng.PlanError, match=r"'0\.weight' and '1\.weight' are two tensors.*plan again"):
            cut(model, plans[separate])


def test_single_zeros_in_weights_count():
    """Output 0 of the second layer reads one input only, and that one is closed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    gates = ng.attach_gates_(model, where=lambda name, layer: name == "0")
    gates["0"].g.data[3] = 0
    with torch.no_grad():
        model[2].weight[0, [0, 1, 2, 4, 5, 6, 7]] = 0
        model[2].bias[0] = 0
    x = torch.randn(2, 4)
    plan = ng.plan(on_meta(model), x, weights=model.state_dict())
    assert plan == ng.plan(model, x) and plan.cuts["4.weight"].keep == {1: [1, 2, 3, 4, 5]}


class Indexed(nn.Module):
    """A table of whole numbers picks from another one, as in Swin's windows; some weights no rule is written for."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.pair = nn.Linear(4, 8), nn.Linear(8, 6), nn.Bilinear(6, 6, 3)
        self.table, self.scale = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(2, 3))
        self.register_buffer("index", torch.tensor([[0, 1], [4, 2]]))
        self.register_buffer("steps", torch.tensor([[1, 2, 1, 2, 1, 2, 1, 2], [0, 1, 0, 1, 0, 1, 0, 1]]))

    def forward(self, x):
        y = torch.relu(self.b(torch.relu(self.a(x)) * self.steps.sum(0)))
        return self.pair(y, y + self.table[self.index.view(-1)].sum(0)), self.scale


def test_tensors_of_any_kind_are_read_from_weights():
    model, x = Indexed().eval(), torch.randn(2, 4)
    ng.attach_gates_(model, where=lambda name, layer: name == "a")["a"].g.data[:3] = 0
    plan = ng.plan(on_meta(model), x, weights=model.state_dict())
    assert plan == ng.plan(model, x) and plan.cuts["steps"].keep == {1: [3, 4, 5, 6, 7]}


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.bool],
)
def test_all_types_that_a_file_can_hold(dtype, tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
            self.register_buffer("scales", torch.arange(3.0).to(dtype))

        def forward(self, x):
            return self.b(torch.relu(self.a(x)))

    model, x = Scaled().eval(), torch.randn(2, 4)
    ng.attach_gates_(model)["a"].g.data[:3] = 0
    shapes = on_meta(model)
    plan = ng.plan(shapes, x, weights=model.state_dict())
    compact_to(tmp_path / "small", shapes, plan, model.state_dict())
    small = load(tmp_path / "small", Scaled)
    assert small.scales.dtype == dtype and small.a.out_features == 5
    assert torch.equal(small.scales.to(torch.complex128), model.scales.to(torch.complex128))


def test_a_failure_leaves_what_was_there(tmp_path):
    model, x = gated("lenet5")
    weights, shapes = dict(model.state_dict()), on_meta(model)
    plan = ng.plan(shapes, x, weights=weights)
    compact_to(tmp_path / "small", shapes, plan, weights)
    before = (tmp_path / "small/model.safetensors").read_bytes()
    last = [name for name, tensor in weights.items() if tensor.dim() > 1][-1]  # read when others are written already
    with pytest.raises(ValueError, match="of another model"):
        compact_to(tmp_path / "small", shapes, plan, {**weights, last: torch.zeros(3)})
    assert (tmp_path / "small/model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


# -- what can't be done, by name -----------------------------------------------------------------------------------


def test_gates_without_numbers_are_an_error_that_says_what_to_do():
    model, x = gated("lenet5")
    with pytest.raises(ValueError, match=r"gate 'conv1\.gate' has no numbers.*load_state_dict"):
        ng.plan(on_meta(model), x)
    shapes = on_meta(model)
    shapes.load_state_dict({n: t for n, t in model.state_dict().items() if "gate" in n}, strict=False, assign=True)
    assert ng.plan(shapes, x) == ng.plan(model, x)


def test_an_index_is_utf_8_whatever_the_system_uses(tmp_path):
    (tmp_path / "größe.safetensors").write_bytes(serialise({"a": torch.ones(2)}))
    text = json.dumps({"weight_map": {"a": "größe.safetensors"}}, ensure_ascii=False)
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("utf-8-sig"))  # as some editors write it
    assert torch.equal(Checkpoint(tmp_path)["a"], torch.ones(2))


def test_other_mistakes_are_named(tmp_path):
    model, x = gated("lenet5")
    state = model.state_dict()
    with pytest.raises(ValueError, match="to time them"):
        ng.plan(shapes_only(model), x, layout="auto")
    with pytest.raises(ValueError, match=r"weights lack 'conv2\.weight'"):
        ng.plan(shapes_only(model), x, weights={n: t for n, t in state.items() if n != "conv2.weight"})
    with pytest.raises(ValueError, match=r"'conv2\.weight' has shape \(3,\) there"):
        ng.plan(shapes_only(model), x, weights={**state, "conv2.weight": torch.zeros(3)})
    with pytest.raises(StorageError, match="there is no"):
        Checkpoint(tmp_path / "nothing")
    with pytest.raises(StorageError, match="holds no safetensors"):
        Checkpoint(tmp_path)
    big, cut_off = sharded(model, tmp_path / "big"), tmp_path / "big/model-1.safetensors"
    cut_off.write_bytes(cut_off.read_bytes()[:-8])
    with pytest.raises(StorageError, match=r"can't be read from .*model-1\.safetensors: .*; copy the file again"):
        dict(big)
    (tmp_path / "big/model-1.safetensors").unlink()
    with pytest.raises(StorageError, match=r"lacks model-1\.safetensors"):
        Checkpoint(tmp_path / "big")
    (tmp_path / "big/model.safetensors.index.json").write_text("{}")
    with pytest.raises(StorageError, match="can't be read"):
        Checkpoint(tmp_path / "big")


def test_a_buffer_that_is_in_no_file_can_not_be_made_up(tmp_path):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
            self.register_buffer("shift", torch.arange(2.0), persistent=False)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))) + self.shift

    model = Shifted().eval()
    gates = ng.attach_gates_(model)
    gates["a"].g.data[:3] = 0
    x = torch.randn(2, 4)
    plan = ng.plan(model, x)
    ng.save(ng.compact(model, plan), plan, tmp_path / "small")
    with pytest.raises(StorageError, match="'shift' is in no file"), torch.device("meta"):
        load(tmp_path / "small", Shifted)
    assert torch.equal(load(tmp_path / "small", Shifted)(x), ng.compact(model, plan)(x))
    ng.save(ng.compact(model, plan).double(), plan, tmp_path / "double")
    assert load(tmp_path / "double", Shifted).shift.dtype == ng.load(tmp_path / "double", Shifted).shift.dtype
    assert load(tmp_path / "double", Shifted).shift.dtype == torch.double


# -- memory --------------------------------------------------------------------------------------------------------

PREPARE = """
import json, resource, sys
from pathlib import Path
import torch
from torch import nn
import narrowgate as ng
from test_meta_plan import transformer

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

small = transformer(16, 2, 1)  # so that everything is imported before memory is measured
ng.attach_gates_(small, groups="neurons").parameters()[0].data[0] = 0
ng.plan(small, torch.randn(1, 4, 16))
"""


def in_a_process(code, *arguments):
    command = [sys.executable, "-c", PREPARE + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_of_20_gigabytes_is_planned_in_less_than_one():
    found = in_a_process(
        """
before = peak()
with torch.device("meta"):
    model = transformer(8192, 64, 7)
ng.attach_gates_(model, groups=["heads", "neurons"])
for block in model[:-1]:
    block.proj.gate_in.g = torch.arange(8192) // 128
    for gate, size, step in ((block.proj.gate_in.shared, 64, 4), (block.fc1.gate, 4 * 8192, 2)):
        gate.g = nn.Parameter(torch.ones(size))
        gate.g.data[::step] = 0
plan = ng.plan(model, torch.empty(1, 16, 8192, device="meta"))
size = 4 * sum(p.numel() for p in model.parameters())
print(json.dumps([size, peak() - before, plan.parameters_before, plan.parameters_after, len(plan.cuts)]))
"""
    )
    size, grown, before, after, cuts = found
    assert size > 20e9 and grown < 1e9
    assert cuts == 7 * 6
    width, mlp = 8192, 4 * 8192
    removed = 7 * (2 * width * mlp // 2 + mlp // 2 + 4 * width * width // 4 + 3 * width // 4)
    assert before - after == removed


def test_compacting_from_disk_holds_one_layer_at_a_time(tmp_path):
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = transformer(1024, 16, 12)
    ng.attach_gates_(model, groups="neurons")
    (tmp_path / "big").mkdir()
    for name, tensor in model.state_dict().items():
        real = torch.zeros(tensor.shape).uniform_(0.5, 1.0)
        if "gate" in name:
            real[::2] = 0
        save_file({name: real}, tmp_path / "big" / f"{name}.safetensors")
    found = in_a_process(
        """
from narrowgate.streamed import Checkpoint, compact_to
with torch.device("meta"):
    model = transformer(1024, 16, 12)
ng.attach_gates_(model, groups="neurons")
before = peak()
weights = Checkpoint(Path(sys.argv[1]) / "big")
plan = ng.plan(model, torch.empty(1, 4, 1024, device="meta"), weights=weights)
compact_to(Path(sys.argv[1]) / "small", model, plan, weights)
print(json.dumps([peak() - before, plan.parameters_before, plan.parameters_after]))
""",
        str(tmp_path),
    )
    grown, before, after = found
    small = (tmp_path / "small" / "model.safetensors").stat().st_size
    assert 4 * before > 600e6 and small == pytest.approx(4 * after, rel=0.01) and after < 0.7 * before
    assert grown < 120e6  # the largest layer has 17 MB, as much again with its gates, and its file is in memory too
