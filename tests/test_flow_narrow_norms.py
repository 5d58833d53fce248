"""LayerNorm and GroupNorm lose channels in the scatter layout, and count them all the same."""

import copy

import pytest
import torch
import torchvision
from flow_helpers import Net, assert_same_function, assert_trains, close_, image, shrink
from helpers import assert_same
from torch import nn
from torch.nn import functional as F
from torchvision.models.convnext import CNBlockConfig, ConvNeXt, LayerNorm2d

import narrowgate as ng
from narrowgate import streamed
from narrowgate.flow.layers import NarrowGroupNorm, NarrowLayerNorm, NarrowNorm
from narrowgate.models import PreActResNet


@torch.no_grad()
def randomise_(model):
    """Double precision, and numbers in every scale and shift."""
    model.double().eval()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) and module.weight is not None:
            module.weight.normal_()
            module.bias.normal_()
    return model


def conv_net(norm, body=None, **more):
    body = body or (lambda net, x: net.last(F.silu(net.norm(net.first(x)))))
    return randomise_(Net(body, first=nn.Conv2d(3, 8, 3, padding=1), norm=norm, last=nn.Conv2d(8, 4, 3), **more))


def words(width=5, length=7):
    return torch.randn(4, length, width, dtype=torch.float64)


def assert_narrow(model, inputs, left, **sizes):
    """Exact in the scatter and auto layouts, with so many channels left in ``model.norm``; untouched in ``aligned``."""
    for layout in ("scatter", "auto"):
        plan, small = shrink(model, inputs, layout=layout, **sizes)
        assert isinstance(small.norm, NarrowNorm) and len(small.norm.weight) == left
        assert not any(wall.layer == "norm" for wall in plan.walls)
    plan = ng.plan(model, inputs)
    assert type(ng.compact(model, plan).norm) is type(model.norm)
    assert any(wall.layer == "norm" for wall in plan.walls)
    return shrink(model, inputs, layout="scatter")


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("constant", [None, 0.7])
def test_group_norm(groups, constant):
    """Channels 0, 1 and 5 go; 2 has a scale, so it varies; 3 varies on its way in, so the others' mean needs it."""
    model = conv_net(nn.GroupNorm(groups, 8))
    close_(model.first, [0, 1, 2, 5], constant)
    close_(model.norm, [0, 1, 3, 5])
    plan, small = assert_narrow(model, image(), 5, also=[image(size=11)])
    assert type(small.norm) is NarrowGroupNorm and small.norm.num_channels == 5
    assert (small.norm.gone is None) == (constant is None)
    assert plan.parameters_after == sum(p.numel() for p in small.parameters())
    assert ng.Plan.from_json(plan.to_json()) == plan
    assert "5 of 8 channels" in repr(small.norm)


def test_a_group_that_is_gone():
    model = conv_net(nn.GroupNorm(4, 8))
    close_(model.first, [2, 3])
    close_(model.norm, [2, 3])
    assert_narrow(model, image(), 6)


@pytest.mark.parametrize("shift", [None, -1.3])
def test_shift_that_is_left(shift):
    """A constant comes out, and is folded into the layer behind."""
    model = randomise_(
        Net(
            lambda net, x: net.last(F.gelu(net.norm(net.first(x)))),
            **{"first": nn.Linear(5, 8), "norm": nn.LayerNorm(8), "last": nn.Linear(8, 3)},
        )
    )
    close_(model.first, [1, 4, 7], 0.4)
    close_(model.norm, [1, 4, 7], shift)
    _, small = assert_narrow(model, words(), 5, also=[words(length=3)])
    assert type(small.norm) is NarrowLayerNorm and small.norm.normalized_shape == (5,)


def test_layer_norm_over_channels_of_pictures():
    model = conv_net(LayerNorm2d(8))
    close_(model.first, [0, 6], 0.2)
    close_(model.norm, [0, 6])
    assert_narrow(model, image(), 6, also=[image(size=11)])


def test_residual_stream_of_a_transformer():
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.last_norm = nn.Linear(5, 12), nn.LayerNorm(12), nn.LayerNorm(12)
            self.qkv, self.proj = nn.Linear(12, 24), nn.Linear(8, 12)
            self.fc1, self.fc2, self.head = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 3)

        def forward(self, x):
            x = self.embed(x)
            q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + self.fc2(F.gelu(self.fc1(self.last_norm(x))))
            return self.head(x)

    model = randomise_(Transformer())
    for layer in (model.embed, model.proj, model.fc2, model.norm, model.last_norm):
        close_(layer, [0, 3, 11])
    _, small = assert_narrow(model, words(), 9, also=[words(length=4)])
    assert small.embed.out_features == small.proj.out_features == small.qkv.in_features == 9


def noisy(norm):
    class Noisy(nn.GroupNorm):
        def forward(self, x):
            x = super().forward(x)
            return x + torch.randn_like(x) if self.training else x

    return Noisy(4, 8)


def patched(norm):
    made = nn.GroupNorm(4, 8)
    made.forward = lambda x: F.group_norm(x, 4, made.weight, made.bias) * 1.0
    return made


@pytest.mark.parametrize("make", [noisy, patched, lambda norm: nn.GroupNorm(4, 8, affine=False)])
def test_norms_of_which_more_may_be_known_to_others_stay(make):
    model = conv_net(make(None))
    close_(model.first, [0, 1, 5])
    if model.norm.weight is not None:
        close_(model.norm, [0, 1, 5])
    small = ng.compact(model, plan := ng.plan(model, image(), layout="scatter"))
    assert_same_function(model, small, image())
    assert not isinstance(small.norm, NarrowNorm) and plan.widths.get("norm.num_channels") is None


@pytest.mark.parametrize(
    "body",
    [
        lambda net, x: net.last(net.norm(F.relu(net.norm(net.first(x))))),
        lambda net, x: net.last(net.norm(net.first(x))) + net.norm.weight.sum(),
        lambda net, x: net.last(F.group_norm(net.first(x), 4, net.norm.weight, net.norm.bias)),
        lambda net, x: net.last(net.norm(net.first(x)) * torch.arange(1, 9, dtype=x.dtype)[:, None, None]),
        lambda net, x: net.last(net.norm(net.first(x)).view(-1, 8, 8, 8)),
        lambda net, x: net.last(net.norm(F.pad(net.first(x)[:, :6], (0, 0, 0, 0, 1, 1)))),
        lambda net, x: net.last(net.norm(net.first(x).flip(1))),
    ],
)
def test_ways_to_use_a_norm(body):
    """Whatever it takes away, it is the same function."""
    model = conv_net(nn.GroupNorm(4, 8), body)
    close_(model.first, [0, 1, 5, 2, 7])
    close_(model.norm, [0, 1, 5, 2, 7])
    shrink(model, image(), layout="scatter", removes=None)


def test_norm_over_several_axes_stays():
    model = conv_net(nn.LayerNorm([8, 8, 8]))
    close_(model.first, [0, 1])
    close_(model.norm, [0, 1])
    small = ng.compact(model, ng.plan(model, image(), layout="scatter"))
    assert type(small.norm) is nn.LayerNorm
    assert_same_function(model, small, image())


def test_norm_that_nothing_reads_for_a_channel():
    """The last layer reads channel 2 no more, but the mean of its group does."""
    model = conv_net(nn.GroupNorm(4, 8))
    with torch.no_grad():
        model.last.weight[:, 2] = 0
    small = ng.compact(model, ng.plan(model, image(), layout="scatter"))
    assert len(small.norm.weight) == 8
    assert_same_function(model, small, image())


def narrowed(dtype=torch.float64, constant=0.5):
    torch.manual_seed(0)
    model = conv_net(nn.GroupNorm(4, 8))
    close_(model.first, [0, 1, 5], constant)
    close_(model.norm, [0, 1, 5])
    model = model.to(dtype)
    x = image().to(dtype)
    return model, x, ng.plan(model, x, layout="scatter")


def test_saved_and_loaded(tmp_path):
    model, x, plan = narrowed()
    small = ng.compact(model, plan)
    ng.save(small, plan, tmp_path / "small")
    for load in (ng.load, streamed.load):
        again = load(tmp_path / "small", lambda: conv_net(nn.GroupNorm(4, 8))).eval()
        assert torch.equal(again(x), small(x))


def test_precisions_and_layouts_of_memory():
    model, x, plan = narrowed(torch.float32)
    small = ng.compact(model, plan)
    ng.verify(model, small, x)
    last = copy.deepcopy(small).to(memory_format=torch.channels_last)
    assert_same(last(x.to(memory_format=torch.channels_last)), small(x), rtol=0, atol=1e-5)
    for half in (torch.bfloat16, torch.float16):
        got = copy.deepcopy(small).to(half)(x.to(half))
        assert got.dtype == half
        assert_same(got.float(), small(x), rtol=0.1, atol=0.3)
    with torch.autocast("cpu", torch.bfloat16):
        wide, narrow = model.norm(model.first(x)), small.norm(small.first(x))
    assert wide.dtype == narrow.dtype


def test_trains_on():
    model, x, plan = narrowed(constant=None)
    small = ng.compact(model, plan)
    assert_trains(model, small, x)
    for one in (model, small):
        one.train().zero_grad()
        one(x).square().sum().backward()
    kept = plan.cuts["norm.weight"].keep[0]
    assert_same(model.norm.weight.grad[kept], small.norm.weight.grad, rtol=1e-9, atol=1e-9)


def test_stays_a_wall_while_training():
    model, x, _ = narrowed()
    plan = ng.plan(model, x, layout="scatter", training=True)
    assert not plan.cuts and any(wall.layer == "norm" for wall in plan.walls)


def test_exports(tmp_path):
    pytest.importorskip("onnxscript")
    from narrowgate.export import export

    layers = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = randomise_(nn.Sequential(*layers, nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))).float()
    for layer in (0, 1):
        close_(model[layer], [0, 1, 5])
    for layer in (5, 6):
        close_(model[layer], [2, 3], 0.4 if layer == 5 else None)
    x = image().float()
    small = ng.compact(model, ng.plan(model, x, layout="scatter"))
    assert isinstance(small[1], NarrowGroupNorm) and isinstance(small[6], NarrowLayerNorm)
    for kind, ending in (("onnx", "onnx"), ("torch", "pt2")):
        export(small, x, tmp_path / f"small.{ending}", format=kind)  # which runs the file and compares


@pytest.mark.parametrize("placement", ["before-norm", "after-norm"])
def test_gates_on_layer_and_norm_together(placement):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(norm_layer=lambda width: nn.GroupNorm(8, width), num_classes=5).eval()
    x = torch.rand(2, 3, 32, 32)
    found = ng.coupled(model, x)
    assert list(found.bundles[0].layers) == [
        "conv1",
        "bn1",
        *(f"layer1.{i}.{p}2" for i in (0, 1) for p in ("conv", "bn")),
    ]
    whole = model(x)
    gates = ng.attach_gates_(model, groups=found, placement=placement, keep_function=True)
    assert_same(model(x), whole, rtol=0, atol=1e-5)
    for gate in gates.modules():
        gate.close_(torch.arange(gate.size) % 2 == 1)
    plan = ng.plan(model, x, layout="scatter")
    ng.verify(model, ng.compact(model, plan), x)
    assert {row.kept / row.total for row in plan.rows if row.layer != "fc"} == {0.5}
    assert plan.parameters_after < 0.27 * plan.parameters_before
    merged = ng.merge_gates_(copy.deepcopy(model))
    assert type(merged.bn1) is nn.GroupNorm
    assert_same(merged(x), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
@pytest.mark.slow
def test_the_streams_of_a_convnext(library):
    """Its norms are subclasses of PyTorch's, with a forward of their own."""
    torch.manual_seed(0)
    if library == "timm":
        timm = pytest.importorskip("timm")
        model = timm.create_model("convnext_atto", num_classes=5)
    else:
        stages = [CNBlockConfig(width, wider, 2) for width, wider in ((12, 24), (24, 36), (36, None))]
        model = ConvNeXt(stages, num_classes=5)
    model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gamma" in name or "layer_scale" in name:  # they begin so small that blocks hardly matter
                parameter.normal_()
    nn.init.normal_(list(model.modules())[-1].weight if library == "torchvision" else model.head.fc.weight)
    x = image(size=64)
    whole, kinds = model(x), [type(module) for module in model.modules()]
    gates = ng.attach_gates_(model, groups=ng.coupled(model, x), keep_function=True)
    assert_same(model(x), whole, rtol=0, atol=1e-9)
    for gate in gates.modules():
        gate.close_(torch.arange(gate.size) % 2 == 1)
    plan = ng.plan(model, x, layout="scatter")
    ng.verify(model, ng.compact(model, plan), x)
    assert {row.kept / row.total for row in plan.rows if row.total != 5} == {0.5}
    assert [type(module) for module in ng.merge_gates_(model).modules()] == kinds


def test_groups_of_ones_own_on_a_group_norm():
    model = conv_net(nn.GroupNorm(4, 8))
    slices = [(f"{layer}.{key}", 0, [6, 7]) for layer in ("first", "norm") for key in ("weight", "bias")]
    gates = ng.attach_gates_(model, groups={"last two": slices})
    gates["groups"].close_(torch.tensor([True]))
    _, small = shrink(model, image(), layout="scatter")
    assert len(small.norm.weight) == 6


@pytest.mark.parametrize("seed", range(15))
def test_random_networks(seed):
    """Residual networks with norms of all kinds, random channels closed in layers and norms: the same function."""
    torch.manual_seed(seed)
    norms = [lambda c: nn.GroupNorm(2, c), lambda c: nn.GroupNorm(1, c), LayerNorm2d, nn.BatchNorm2d, nn.InstanceNorm2d]

    def draw(several):
        return several[int(torch.randint(len(several), ()))]

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm1, self.norm2 = draw(norms)(width), draw(norms)(12)
            self.conv1 = nn.Conv2d(width, 12, 3, padding=1, bias=bool(torch.rand(()) < 0.5))
            self.conv2 = nn.Conv2d(12, width, draw([1, 3]), padding="same")
            self.pre = bool(torch.rand(()) < 0.5)

        def forward(self, x):
            y = self.conv2(F.silu(self.norm2(self.conv1(self.norm1(x) if self.pre else x))))
            return x + y if self.pre else self.norm1(x + y)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), *(Block(8) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.append(nn.Linear(8, 3))
    randomise_(model)
    shared = [i for i in range(8) if torch.rand(()) < 0.4][:7]
    for name, module in model.named_modules():
        if getattr(module, "weight", None) is None or name == "6":
            continue
        inner = name.endswith(("conv1", "norm2"))
        some = [i for i in range(12) if torch.rand(()) < 0.4][:11] if inner else shared
        if torch.rand(()) < 0.85:
            close_(module, some, draw([None, 0.3]) if getattr(module, "bias", None) is not None else None)
        for block in (model[1], model[2], model[3]):
            if inner and module is block.conv1:  # the norm behind closes some of the same
                close_(block.norm2, some[::2]) if getattr(block.norm2, "weight", None) is not None else None
    shrink(model, image(), layout="scatter", removes=None, also=[image(size=11)])


def test_a_network_of_batch_norms_is_planned_as_ever():
    model, x = PreActResNet(11, classes=3).eval(), torch.rand(2, 3, 16, 16)
    close_(model.conv1, [0, 1])
    assert not any(edit.counted for edit in ng.plan(model, x, layout="scatter").edits.values())


@pytest.mark.parametrize("constant", [3.0, 100.0])
def test_large_constants_cancel_nothing(constant):
    """Their squares would hide everything else, and overflow in half precision."""
    model = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).eval()
    close_(model[0], range(12), constant)
    nn.init.constant_(model[0].bias, constant)
    close_(model[1], range(12))
    x = torch.randn(64, 5)
    small = ng.compact(model, ng.plan(model, x, layout="scatter"))
    assert len(small[1].weight) == 4
    ng.verify(model, small, x)
    for half in (torch.bfloat16, torch.float16):
        assert copy.deepcopy(small).to(half)(x.to(half)).isfinite().all()


def test_one_axis():
    model = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).double().eval()
    for layer in (model[0], model[1]):
        close_(layer, [1, 4])
    for example in (torch.randn(4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)):
        small = ng.compact(model, ng.plan(model, example, layout="scatter"))
        assert len(small[1].weight) == 6
        for x in (torch.randn(5).double(), torch.randn(4, 5).double(), torch.randn(2, 3, 5).double()):
            assert_same(small(x), model(x), rtol=0, atol=1e-12)
