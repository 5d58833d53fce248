"""Norms in the scatter layout: where what is behind one reads only some channels, it normalises only those."""

import copy
import random

import pytest
import torch
from flow_helpers import Net, close_, count, image, kept, mixing_layers, settle_, shrink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate import streamed
from narrowgate.export import export
from narrowgate.flow.compose import compose
from narrowgate.flow.layers import IndexedBatchNorm2d, IndexedLayer, IndexedNorm
from narrowgate.flow.plan import Plan
from narrowgate.flow.trace import op_name, trace
from narrowgate.models.densenet import DenseNet

WIDTH = 8


def indexed(model):
    """The layers that pick their inputs, by name."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, IndexedLayer)}
    return [name for name, layer in layers.items() if layer.gather is not None]


@torch.no_grad()
def ignore_(layer, inputs):
    """Close inputs of a layer."""
    layer.weight[:, list(inputs)] = 0


def around(body, norm=None, **parts):
    """A network whose stream of 8 channels goes on beside a norm and what reads it: ``body(net, y)`` of 4 channels."""

    def forward(net, x):
        x = net.stem(x)
        return net.last(torch.cat([x, body(net, net.bn(x))], 1))

    stem, last = nn.Conv2d(3, WIDTH, 3), nn.Conv2d(WIDTH + 4, 5, 3, padding=1)
    return Net(forward, stem=stem, bn=norm or nn.BatchNorm2d(WIDTH), **parts, last=last)


def one_reader(between=F.relu, conv=None, norm=None):
    """A norm, something between, and a layer that reads channels 1, 4 and 6."""
    conv = conv or nn.Conv2d(WIDTH, 4, 3, padding=1)
    model = settle_(around(lambda net, y: net.conv(between(y)), norm, conv=conv), image())
    ignore_(model.conv, [0, 2, 3, 5, 7])
    return model


def dense(depth=13, dropout=0.05, share=0.75):
    """A small DenseNet with closed gates on the inputs of its layers."""
    model = DenseNet(depth, 6, 5, dropout).double()
    gates = ng.attach_gates_(
        model, where=lambda name, layer: False, inputs=lambda name, layer: name.endswith("conv") or name == "fc"
    )
    settle_(model, image())
    with torch.no_grad():
        for gate in gates.modules():
            gate.g.masked_fill_(torch.rand_like(gate.g) < share, 0.0)
            gate.g[torch.randint(len(gate.g), ())] = 1.0
    return model


# -- what goes -------------------------------------------------------------------------------------------------------
def test_a_densenet_normalises_only_what_its_layers_read():
    model = dense()
    plan, small = shrink(model, image(), layout="scatter", also=[image(size=12)])
    norms = {name: layer for name, layer in small.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    readers = {name: small.get_submodule(f"{name[:-2]}conv" if name != "bn" else "fc") for name in norms}
    assert len(norms) == 3 * 3 + 2 + 1
    assert indexed(small) == list(norms)  # no layer behind one gathers
    for name, norm in norms.items():
        width = readers[name].weight.shape[1]
        assert type(norm) is IndexedBatchNorm2d and norm.num_features > width
        assert {len(v) for v in (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.gather)} == {width}
    _, aligned = shrink(model, image())
    assert not indexed(aligned) and count(small) < count(aligned) < plan.parameters_before


def test_the_norm_and_not_the_layer_gathers():
    plan, small = shrink(one_reader(), image(), layout="scatter", also=[image(size=11)])
    assert indexed(small) == ["bn"] and type(small.conv) is nn.Conv2d
    assert small.bn.gather.tolist() == kept(plan, "bn.running_var") == kept(plan, "conv.weight", 1) == [1, 4, 6]
    assert (small.bn.num_features, small.conv.in_channels) == (8, 3)
    assert "(8, " in repr(small.bn) and "weight=(3,)" in repr(small.bn)


def test_aligned_leaves_norms_alone():
    _, small = shrink(one_reader(), image(), removes=False)
    assert not indexed(small) and small.bn.num_features == 8


PASSING = {
    "nothing": lambda y: y,
    "in place": lambda y: F.relu(y, inplace=True),
    "in place, by name": lambda y: (y.relu_(), y)[1],
    "two activations": lambda y: torch.tanh(F.leaky_relu(y)),
    "numbers": lambda y: (y * 2 - 1).clamp(-1, 3),
    "with itself": lambda y: y * torch.sigmoid(y),
    "dropout": lambda y: F.dropout(F.relu(y), 0.3, False),
    "pooling": lambda y: F.max_pool2d(F.relu(y), 3, 1, 1),
    "padding": lambda y: F.avg_pool2d(F.pad(y, (1, 1, 1, 1)), 3, 1),
}


@pytest.mark.parametrize("between", PASSING.values(), ids=PASSING)
def test_between_a_norm_and_its_reader(between):
    _, small = shrink(one_reader(between), image(), layout="scatter")
    passes = "sigmoid" not in between.__code__.co_names  # two operands: each is known, but not that both are one
    assert indexed(small) == (["bn"] if passes else ["conv"])


@pytest.mark.parametrize(
    ("norm", "layer", "shape"),
    [
        (nn.BatchNorm1d, nn.Linear, (5, 3)),
        (nn.BatchNorm1d, lambda a, b: nn.Conv1d(a, b, 1), (5, 3, 7)),
        (nn.BatchNorm2d, lambda a, b: nn.ConvTranspose2d(a, b, 1), (5, 3, 4, 4)),
        (nn.BatchNorm3d, lambda a, b: nn.Conv3d(a, b, 1), (5, 3, 4, 4, 4)),
    ],
    ids=["features", "1d", "transposed", "3d"],
)
def test_any_number_of_dimensions(norm, layer, shape):
    def body(net, x):
        x = net.stem(x)
        return net.last(torch.cat([x, net.layer(F.relu(net.bn(x)))], 1))

    x = torch.randn(shape, dtype=torch.float64)
    parts = {"stem": layer(3, 8), "bn": norm(8), "layer": layer(8, 4), "last": layer(12, 2)}
    model = settle_(Net(body, **parts), x)
    with torch.no_grad():
        inputs = 0 if isinstance(model.layer, nn.ConvTranspose2d) else 1
        model.layer.weight.index_fill_(inputs, torch.tensor([0, 2, 3]), 0)
    _, small = shrink(model, x, layout="scatter")
    assert indexed(small) == ["bn"] and len(small.bn.weight) == 5


def test_a_norm_on_the_models_input():
    """Its channels can't go, but it need not give them all."""
    model = Net(lambda net, x: net.conv(net.bn(x)), bn=nn.BatchNorm2d(3), conv=nn.Conv2d(3, 4, 3))
    settle_(model, image())
    ignore_(model.conv, [1])
    _, small = shrink(model, image(), layout="scatter")
    assert indexed(small) == ["bn"] and small.bn.gather.tolist() == [0, 2]


def test_without_statistics_of_its_own():
    _, small = shrink(one_reader(norm=nn.BatchNorm2d(8, track_running_stats=False)), image(), layout="scatter")
    assert indexed(small) == ["bn"] and small.bn.running_mean is None


def test_closed_filters_and_constants_besides():
    """A padded layer that reads a constant keeps a carrier; an unpadded one takes it into its bias."""
    for conv in (nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(8, 4, 1, bias=False)):
        model = one_reader(conv=conv)
        close_(model.stem, [1, 4], constant=0.6)
        with torch.no_grad():
            model.bn.bias += 3
        _, small = shrink(model, image(), layout="scatter", also=[image(size=11)])
        assert indexed(small) == ["bn"] and len(small.bn.weight) == conv.kernel_size[0] // 2 + 1


def test_a_norm_in_front_of_a_dead_layer():
    model = one_reader()
    close_(model.conv, range(4), constant=0.3)
    _, small = shrink(model, image(), layout="scatter")
    assert len(small.bn.weight) == 1 and indexed(small) == ["bn"] and not len(small.conv.scatter)


# -- forks -----------------------------------------------------------------------------------------------------------
def fork(first, second):
    """Two layers behind one norm that leave these channels unread."""
    parts = {"a": nn.Conv2d(WIDTH, 2, 3, padding=1), "b": nn.Conv2d(WIDTH, 2, 1)}
    model = around(lambda net, y: torch.cat([net.a(F.relu(y)), net.b(y)], 1), **parts)
    settle_(model, image())
    ignore_(model.a, first)
    ignore_(model.b, second)
    return model


def test_two_readers_of_the_same_channels():
    for layout in ("scatter", "auto"):
        plan, small = shrink(fork([0, 1, 5], [0, 1, 5]), image(), layout=layout, removes=None)
        assert layout == "auto" or indexed(small) == ["bn"]
        assert kept(plan, "bn.weight") in ([2, 3, 4, 6, 7], None)


def test_two_readers_of_different_channels():
    plan, small = shrink(fork([0, 1, 5], [0, 1, 2, 3]), image(), layout="scatter")
    assert indexed(small) == ["bn", "a", "b"]
    assert kept(plan, "bn.weight") == [2, 3, 4, 5, 6, 7] and small.bn.gather.tolist() == [2, 3, 4, 5, 6, 7]
    assert small.a.gather.tolist() == [0, 1, 2, 4, 5] and small.b.gather.tolist() == [2, 3, 4, 5]
    assert small.a.in_channels == small.b.in_channels == 6


def test_one_reads_all_that_any_reads():
    _, small = shrink(fork([0, 1], [0, 1, 2, 3]), image(), layout="scatter")
    assert indexed(small) == ["bn", "b"] and type(small.a) is nn.Conv2d


def test_together_they_read_everything():
    _, small = shrink(fork([0, 1], [2, 3]), image(), layout="scatter")
    assert indexed(small) == ["a", "b"] and len(small.bn.weight) == 8


def test_one_of_them_reads_everything():
    _, small = shrink(fork([0, 1], []), image(), layout="scatter")
    assert indexed(small) == ["a"]


def test_auto_does_not_gather_twice(monkeypatch):
    """There a norm takes a gather over, or is left alone."""
    monkeypatch.setattr("narrowgate.flow.auto._pays", lambda *args: True)
    _, small = shrink(fork([0, 1, 5], [0, 1, 2, 3]), image(), layout="auto")
    assert indexed(small) == ["a", "b"]
    _, small = shrink(fork([0, 1, 5], [0, 1, 5]), image(), layout="auto")
    assert indexed(small) == ["bn"]


def test_auto_leaves_a_norm_whole_with_its_reader(monkeypatch):
    monkeypatch.setattr("narrowgate.flow.auto._pays", lambda *args: False)
    _, small = shrink(one_reader(), image(), layout="auto", removes=False)
    assert not indexed(small)


# -- what stays ------------------------------------------------------------------------------------------------------
class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.randn(WIDTH, 1, 1))

    def forward(self, x):
        return x + self.by


UNKNOWN = {
    "no rule": lambda net, y: net.conv(y.cumprod(2)),
    "a view": lambda net, y: net.conv(y.flatten(2).reshape(y.shape)),
    "channels mixed": lambda net, y: net.conv(y - y.mean(1, keepdim=True)),
    "a vector": lambda net, y: net.conv(net.shift(y)),
    "depthwise": lambda net, y: net.conv(net.deep(y)),
    "a sum besides": lambda net, y: net.conv(y) + y[:, :4],
    "concatenated": lambda net, y: net.conv(torch.cat([y, y], 1)[:, :WIDTH]),
    "its width as a number": lambda net, y: net.conv(y / y.shape[1]),
    "its shape": lambda net, y: net.conv(y) + torch.ones_like(y).sum(1, keepdim=True),
    "twice": lambda net, y: net.conv(net.bn(y)),
    "its weight elsewhere": lambda net, y: net.conv(y) * net.bn.weight.mean(),
}


@pytest.mark.parametrize("body", UNKNOWN.values(), ids=UNKNOWN)
def test_a_norm_with_another_reader_stays(body):
    parts = {"conv": nn.Conv2d(WIDTH, 4, 3, padding=1), "deep": nn.Conv2d(WIDTH, WIDTH, 1, groups=WIDTH)}
    model = settle_(around(body, **parts, shift=Shift()), image())
    ignore_(model.conv, [0, 2, 3, 5, 7])
    plan, small = shrink(model, image(), layout="scatter", removes=None)
    assert type(small.bn) is nn.BatchNorm2d and "bn.weight" not in plan.cuts


def test_a_norm_that_is_an_output_stays():
    def body(net, x):
        y = net.bn(net.stem(x))
        return y, net.conv(y)

    model = settle_(Net(body, stem=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(8), conv=nn.Conv2d(8, 4, 3)), image())
    ignore_(model.conv, [0, 1])
    _, small = shrink(model, image(), layout="scatter")
    assert indexed(small) == ["conv"]


def test_a_norm_of_another_class_stays():
    class Louder(nn.BatchNorm2d):
        def forward(self, x):
            return 2 * super().forward(x)

    for norm in (Louder(8), nn.BatchNorm2d(8, affine=False)):
        _, small = shrink(one_reader(norm=norm), image(), layout="scatter")
        assert indexed(small) == ["conv"]


def test_a_reader_that_runs_in_training_only():
    """The eval graph does not show it; without it the norm would be cut."""

    def body(net, y):
        result = net.conv(y)
        return result + net.aux(y).mean() if net.training else result

    for aux, wanted in ((nn.Conv2d(8, 2, 1), ["conv"]), (nn.Identity(), ["bn"])):
        model = settle_(around(body, conv=nn.Conv2d(8, 4, 3, padding=1), aux=aux), image())
        ignore_(model.conv, [0, 2])
        _, small = shrink(model, image(), layout="scatter")
        assert indexed(small) == wanted


def test_tensors_written_through_views():
    """Then the graph is another one, in which a norm has three results."""

    def body(net, x):
        x = net.stem(x)
        x[:, :, 0].mul_(2)
        return net.last(torch.cat([x, net.conv(F.relu(net.bn(x)))], 1))

    parts = {"stem": nn.Conv2d(3, 8, 3), "bn": nn.BatchNorm2d(8), "conv": nn.Conv2d(8, 4, 1)}
    model = settle_(Net(body, **parts, last=nn.Conv2d(12, 2, 1)), image())
    ignore_(model.conv, [0, 2])
    assert any(op_name(node) == "_native_batch_norm_legit_no_training" for node in trace(model, image()).nodes)
    _, small = shrink(model, image(), layout="scatter")
    assert indexed(small) == ["bn"]


# -- training --------------------------------------------------------------------------------------------------------
def test_a_training_step_is_the_same():
    """Statistics of the batch are those of each channel: results, gradients and running statistics agree."""
    model = dense(dropout=0.0)
    plan = ng.plan(model, image(), layout="scatter")
    small, large = ng.compact(model, plan).train(), ng.merge_gates_(copy.deepcopy(model)).train()
    x = image(batch=6)
    wanted, got = large(x), small(x)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    for result in (wanted, got):
        result.square().sum().backward()
    large_tensors = {**dict(large.named_parameters()), **dict(large.named_buffers())}
    checked = 0
    for name, tensor in (*small.named_parameters(), *small.named_buffers()):
        if ".bn." not in name or name.endswith("gather"):
            continue
        other = large_tensors[name]
        for ours, theirs in ((tensor, other), (tensor.grad, other.grad)):
            if ours is not None and ours.dim():
                positions = torch.tensor(kept(plan, name))
                torch.testing.assert_close(ours, theirs[positions], rtol=1e-7, atol=1e-9)
                checked += 1
    assert checked == 6 * 11


def test_planned_while_training():
    """Only closed gates count then."""
    model = dense()
    _, small = shrink(model, image(), layout="scatter", training=True)
    assert sum(isinstance(layer, IndexedNorm) for layer in small.modules()) == 12


# -- on disk, and elsewhere ------------------------------------------------------------------------------------------
def test_saved_and_loaded(tmp_path):
    model = dense()
    plan, small = shrink(model, image(), layout="scatter")
    assert Plan.from_json(plan.to_json()) == plan
    ng.save(small, plan, tmp_path / "small")

    def on_meta():
        with torch.device("meta"):
            return DenseNet(13, 6, 5).double()

    x = image()
    for again in (ng.load(tmp_path / "small", lambda: DenseNet(13, 6, 5)), streamed.load(tmp_path / "small", on_meta)):
        assert torch.equal(again.eval()(x), small.eval()(x))
        assert indexed(again) == indexed(small) and repr(again) == repr(small)


def test_planned_without_numbers_in_memory(tmp_path):
    model = dense(7, dropout=0)  # which draws as many numbers in every PyTorch
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = ng.plan(model, image(), layout="scatter")
    shapes = copy.deepcopy(model).to("meta")
    assert ng.plan(shapes, image(), layout="scatter", weights=weights) == wanted
    streamed.compact_to(tmp_path / "small", shapes, wanted, weights)
    again = ng.load(tmp_path / "small", lambda: DenseNet(7, 6, 5))
    ng.verify(model, again.eval(), image())
    assert indexed(again) == ["blocks.0.0.bn", "blocks.1.bn", "blocks.2.0.bn", "blocks.3.bn", "blocks.4.0.bn", "bn"]


def test_a_plan_for_another_width_is_refused():
    plan, small = shrink(one_reader(), image(), layout="scatter")
    with pytest.raises(ng.PlanError, match="applied already"):
        ng.compact(small, plan)


def test_a_small_model_is_planned_again():
    """What a norm picks from stays in place."""
    model = one_reader()
    _, small = shrink(model, image(), layout="scatter")
    close_(small.conv, [0, 1])
    for layout in ("aligned", "scatter"):
        _, smaller = shrink(small, image(), layout=layout)
        assert smaller.bn.num_features == 8 and smaller.bn.gather.tolist() == [1, 4, 6]


def test_a_gate_is_on_the_layer_in_front_of_a_norm_that_picks():
    _, small = shrink(one_reader(), image(), layout="scatter")
    gates = ng.attach_gates_(small, placement="after-norm")
    assert "bn" not in gates.names and small(image()).isfinite().all()
    shrink(small, image(), removes=False)


def test_behind_another_plan():
    model = one_reader()
    close_(model.stem, [0, 4])
    first = ng.plan(model, image())
    second = ng.plan(ng.compact(model, first), image(), layout="scatter")
    small = ng.compact(model, compose(first, second))
    ng.verify(model, small, image())
    assert indexed(small) == ["bn"] and kept(first, "stem.weight") == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_exported(tmp_path, format):
    if format == "onnx":
        for package in ("onnx", "onnxruntime", "onnxscript"):
            pytest.importorskip(package)
    model, x = dense(7).float(), image().float()
    small = ng.compact(model, ng.plan(model, x, layout="scatter"))
    assert "bn" in indexed(small)
    assert export(small, x, tmp_path / "model", format=format).proof.passed


def test_counted():
    model = dense()
    plan, small = shrink(model, image(), layout="scatter")
    summary, before = ng.summarize(small, image()), ng.summarize(model, image())
    assert summary.parameters == plan.parameters_after
    assert summary.activations < before.activations and summary.uncounted == before.uncounted == ()


# -- at random -------------------------------------------------------------------------------------------------------
class PreActivation(nn.Module):
    """Norms before layers, in blocks drawn at random: concatenated, added, forked, or with a reader of another kind."""

    def __init__(self, rng):
        super().__init__()
        activations = [F.relu, torch.tanh, F.gelu, nn.Identity(), nn.ReLU(True), nn.Dropout(0.2)]
        self.stem, self.blocks, self.steps = nn.Conv2d(3, 5, 3), nn.ModuleList(), []
        width = 5
        for _ in range(4):
            kind = rng.choice(["dense", "dense", "sum", "fork", "twice", "leak", "loud"])
            out = width if kind == "sum" else 4
            convs = [nn.Conv2d(width, out, *rng.choice([(1,), (3, 1, 1)]), bias=rng.random() < 0.5) for _ in range(2)]
            self.blocks.append(nn.ModuleList([nn.BatchNorm2d(width), *convs]))
            self.steps.append((kind, rng.choice(activations)))
            width += {"sum": 0, "fork": 2 * out, "twice": 2 * out}.get(kind, out)
        self.bn, self.fc = nn.BatchNorm2d(width), nn.Linear(width, 3)
        # Registered, so that eval() turns the dropout off.
        self.modules_drawn = nn.ModuleList(one for _, one in self.steps if isinstance(one, nn.Module))

    def forward(self, x):
        x = self.stem(x)
        for (norm, conv, other), (kind, activation) in zip(self.blocks, self.steps, strict=True):
            y = activation(norm(x))
            y = 2 * y.abs() + 0.1 if kind == "loud" else y
            parts = [conv(y)]
            if kind == "fork":
                parts.append(other(F.max_pool2d(y, 3, 1, 1)))
            elif kind == "twice":
                parts.append(conv(y.neg()))
            elif kind == "leak":
                parts[0] = parts[0] + y.mean(1, keepdim=True)
            x = x + parts[0] if kind == "sum" else torch.cat([x, *parts], 1)
        return self.fc(F.relu(self.bn(x)).mean((2, 3)))


@torch.no_grad()
def close_some_(model, rng):
    """Inputs that layers ignore, and filters that are closed."""
    for layer in mixing_layers(model).values():
        if layer is not model.stem:
            ignore_(layer, [i for i in range(layer.weight.shape[1] - 1) if rng.random() < 0.6])
        if layer is not model.fc:
            close_(layer, [i for i in range(len(layer.weight) - 1) if rng.random() < 0.2], rng.choice([None, 0.7]))


met = []


@settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6))
def check_random_network(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = PreActivation(rng)
    close_some_(model, rng)
    settle_(model, image())
    with torch.no_grad():
        model.bn.weight[0] = 0
    for layout in ("aligned", "scatter", "auto"):
        _, small = shrink(model, image(), layout=layout, removes=None, also=[image(size=9)])
        if layout == "scatter":
            met.append(sum(isinstance(layer, IndexedNorm) for layer in small.modules()))


def test_random_networks():
    met.clear()
    check_random_network()
    assert sum(number > 1 for number in met) > len(met) / 2, "norms are hardly ever cut: the test is blind"
