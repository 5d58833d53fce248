"""Whole models with something unusual: raw parameters, odd signatures, heads of training only, attention, walls."""

import types

import pytest
import torch
from flow_helpers import Net, close_, count, image, kept, prepare_, settle_, shrink, shrink_all
from helpers import assert_same
from torch import nn
from torch.nn import functional as F

import narrowgate as ng


def test_class_token_and_position():
    def body(net, x):
        x = net.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([net.token.expand(len(x), -1, -1), x], 1) + net.position
        x = x + net.b(F.gelu(net.a(x)))
        return net.head(x[:, 0] + x.mean(1))

    model = Net(
        body,
        patch=nn.Conv2d(3, 6, 4, 4),
        token=nn.Parameter(torch.randn(1, 1, 6)),
        position=nn.Parameter(torch.randn(1, 5, 6)),
        a=nn.Linear(6, 9),
        b=nn.Linear(9, 6),
        head=nn.Linear(6, 3),
    )
    settle_(model, image())
    close_(model.a, [0, 5], 0.4)
    close_(model.patch, [0, 1])
    close_(model.b, [0, 1, 2])
    with torch.no_grad():
        model.token[..., [0, 2]] = 0
        model.position[..., [0, 1]] = 0
    plan, _ = shrink_all(model, image())
    assert kept(plan, "patch.weight") == kept(plan, "token", 2) == [1, 2, 3, 4, 5]
    assert len(kept(plan, "a.weight")) == 7


def test_functional_layers_with_raw_parameters():
    def body(net, x):
        x = F.conv2d(x, net.w1, net.b1, padding=1)
        x = F.conv2d(torch.sigmoid(x), net.w2)
        return F.linear(x.mean((2, 3)), net.w3, net.b3)

    shapes = {"w1": (6, 3, 3, 3), "b1": (6,), "w2": (5, 6, 3, 3), "w3": (4, 5), "b3": (4,)}
    model = Net(body, **{name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}).double()
    with torch.no_grad():
        model.w1[[1, 2]] = 0
        model.b1[1] = 0
        model.w2[[3, 4]] = 0
    plan, _ = shrink_all(model, image())
    assert kept(plan, "w2") == [0, 1, 2]


def test_buffers_along_a_stream():
    def body(net, x):
        return net.last((net.conv(x) - net.mean) / net.std)

    buffers = {"mean": nn.Buffer(torch.randn(1, 6, 1, 1)), "std": nn.Buffer(torch.rand(1, 6, 1, 1) + 0.5)}
    model = settle_(Net(body, conv=nn.Conv2d(3, 6, 3), last=nn.Conv2d(6, 4, 3, padding=1), **buffers), image())
    close_(model.conv, [0, 1])
    plan, small = shrink_all(model, image())
    assert small.mean.shape == small.std.shape == (1, 5, 1, 1) and len(kept(plan, "conv.weight")) == 5


def test_several_inputs_and_nested_outputs():
    def body(net, x, pair):
        a, b = net.a(x), net.b(pair["y"])
        return {"sum": net.last(a + b), "parts": (net.last(a), [net.other(b)])}

    convs = {name: nn.Conv2d(3, 6, 3) for name in "ab"} | {name: nn.Conv2d(6, 4, 3) for name in ("last", "other")}
    model = settle_(Net(body, **convs), (image(), {"y": image()}))
    close_(model.a, [0, 1])
    close_(model.b, [1, 2])
    plan, _ = shrink_all(model, (image(), {"y": image()}))
    assert kept(plan, "a.weight") == [0, 2, 3, 4, 5]


def test_keyword_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, *, left, right=None):
            return self.b(F.relu(self.a(left) + self.a(right)))

    inputs = {"left": torch.randn(4, 3).double(), "right": torch.randn(4, 3).double()}
    model = settle_(Model(), inputs)
    close_(model.a, [0, 1])
    plan, _ = shrink_all(model, inputs)
    assert kept(plan, "a.weight") == [2, 3, 4, 5, 6, 7]


def test_an_output_in_the_middle_stays_whole():
    def body(net, x):
        x = F.relu(net.a(x))
        return net.b(x), x

    model = settle_(Net(body, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 4, 3, padding=1)), image())
    close_(model.a, [0, 1], 0.6)
    plan, _ = shrink_all(model, image(), removes=True, aligned_removes=False)
    assert kept(plan, "a.weight") is None


class WithAuxiliaryHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.aux, self.head = nn.Linear(6, 2), nn.Linear(8, 2)

    def forward(self, x):
        x = F.relu(self.a(x))
        out = self.head(F.relu(self.b(x)).mean((2, 3)))
        return (out, self.aux(x.mean((2, 3)))) if self.training else out


def test_auxiliary_head_that_runs_in_training_only():
    model = settle_(WithAuxiliaryHead(), image())
    close_(model.a, [0, 1])
    close_(model.b, [2, 3])
    _, small = shrink_all(model, image())
    assert small.b.out_channels == 6
    assert len(small.train()(image())) == 2


@pytest.mark.parametrize("attention", ["sdpa", "by_hand", "module"])
def test_attention_is_exact(attention):
    def body(net, x):
        x = x + (net.mha(x, x, x)[0] if attention == "module" else net.out(mix(net, x)))
        return net.head((x + net.down(F.gelu(net.up(x)))).mean(1))

    def mix(net, x):
        q, k, v = net.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if attention == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(-2, -1) * 4**-0.5).softmax(-1) @ v
        return y.transpose(1, 2).flatten(2)

    x = torch.randn(4, 5, 8, dtype=torch.float64)
    model = Net(
        body,
        **{"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)},
        **{"head": nn.Linear(8, 3), "mha": nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.0)},
    )
    prepare_(model, x, keep=["head"])
    plan, _ = shrink_all(model, x)
    assert kept(plan, "qkv.weight") is None
    assert kept(plan, "up.weight") is not None


def test_recurrent_layer_is_a_wall_and_stays_connected():
    def body(net, x):
        return net.last(net.lstm(net.first(x))[0])

    x = torch.randn(4, 5, 3, dtype=torch.float64)
    last = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 2))
    model = Net(body, first=nn.Linear(3, 6), lstm=nn.LSTM(6, 7, batch_first=True), last=last)
    settle_(model, x)
    close_(model.first, [0])
    close_(model.last[0], [1, 2])
    _, small = shrink_all(model, x)
    before = small(x)
    with torch.no_grad():
        for parameter in small.lstm.parameters():
            parameter.mul_(2)
    assert not torch.equal(small(x), before)  # its parameters are those that it computes with


def test_no_channel_goes_through_a_wall_and_the_wall_is_listed():
    def body(net, x):
        return net.b(torch.sort(net.a(x), 1).values)

    model = settle_(Net(body, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 4, 3)), image())
    close_(model.a, [0, 1])
    plan, _ = shrink(model, image(), removes=False)
    assert [wall.op for wall in plan.walls] == ["sort"]
    assert "sort" in str(plan)


def test_lazy_bias_is_not_added_where_forward_ignores_it():
    class Quiet(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(x, self.weight)

    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sigmoid(), Quiet(6, 4, 3, bias=False))
    settle_(model, image())
    close_(model[0], [0, 1])
    shrink_all(model, image(), removes=None)


def test_lazy_bias_is_not_added_where_a_replaced_forward_ignores_it():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sigmoid(), nn.Conv2d(6, 4, 3, bias=False))
    model[2].forward = types.MethodType(lambda self, x: F.conv2d(x, self.weight), model[2])
    settle_(model, image())
    close_(model[0], [0, 1])
    shrink_all(model, image(), removes=None)


class Scaled(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return F.conv2d(x, weight) * self.stride[0]


@pytest.mark.parametrize("own", ["class", "layer", "neither"])
def test_lazy_bias_is_not_added_where_the_inside_of_a_layer_ignores_it(own):
    kind = Scaled if own == "class" else nn.Conv2d
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sigmoid(), kind(6, 4, 3, bias=False))
    if own == "layer":
        model[2]._conv_forward = types.MethodType(Scaled._conv_forward, model[2])
    settle_(model, image())
    close_(model[0], [0, 1])
    plan, _ = shrink_all(model, image(), removes=None)
    assert kept(plan, "0.weight") == ([2, 3, 4, 5] if own == "neither" else None)


def test_the_inside_of_a_layer_divides_by_its_width():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
    model[2]._conv_forward = lambda x, weight, bias: F.conv2d(x / x.shape[1], weight, bias)
    settle_(model, image())
    close_(model[0], [0, 1])
    shrink_all(model, image(), removes=None)


def test_zeros_pass_a_layer_whose_forward_is_the_users_own():
    """No bias can be added there, and none has to be."""

    class SamePadding(nn.Conv2d):
        def forward(self, x):
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, groups=self.groups)

    depthwise = SamePadding(6, 6, 2, groups=6, bias=False)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), depthwise, nn.ReLU(), nn.Conv2d(6, 4, 1))
    settle_(model, image())
    close_(model[0], [0, 1])
    close_(model[0], [2], 0.7)
    plan, _ = shrink_all(model, image())
    assert kept(plan, "0.weight") == [2, 3, 4, 5] and len(kept(plan, "1.weight")) == 4


def test_weight_read_from_outside_its_layer():
    def body(net, x):
        return F.linear(torch.sigmoid(net.a(x)), net.b.weight), net.b.weight.norm() * x

    x = torch.randn(4, 3, dtype=torch.float64)
    model = settle_(Net(body, a=nn.Linear(3, 6), b=nn.Linear(6, 4, bias=False)), x)
    close_(model.a, [0, 1])
    shrink_all(model, x, removes=None)


def test_weight_as_an_output():
    def body(net, x):
        return net.b(torch.relu(net.a(x))), net.a.weight, net.b.weight * 1

    x = torch.randn(4, 3, dtype=torch.float64)
    model = settle_(Net(body, a=nn.Linear(3, 6), b=nn.Linear(6, 4)), x)
    close_(model.a, [0, 1])
    with torch.no_grad():
        model.b.weight[2, 2:] = 0
    shrink_all(model, x, removes=None)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_computed_weights_are_walls(kind):
    wrap = getattr(nn.utils.parametrizations, kind)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), wrap(nn.Conv2d(6, 6, 3)), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.Conv2d(5, 4, 1)
    )
    model.double().eval()
    close_(model[0], [0, 1])
    close_(model[3], [2])
    plan, _ = shrink_all(model, image())
    assert plan.walls


def test_a_model_inside_a_list_and_a_dictionary():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1)])
            self.heads = nn.ModuleDict({"one": nn.Conv2d(6, 4, 1)})
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(6, 1, 1))])

        def forward(self, x):
            for step in self.steps:
                x = F.relu(step(x)) * self.scales[0]
            return {name: head(x) for name, head in self.heads.items()}

    model = settle_(Holder(), image())
    close_(model.steps[0], [0, 1])
    close_(model.steps[1], [1, 2])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "steps.0.weight") == [0, 2, 3, 4, 5]


def averages(net, x):
    x = F.relu(net.conv1(x))
    y = x + net.state * net.branch(x)
    net.state.mul_(0.9).add_(x.mean((0, 2, 3), keepdim=True), alpha=0.1)
    return net.conv2(y)


def remembers(net, x):
    x = F.relu(net.conv1(x))
    y = x + net.state
    net.state.copy_(net.branch(x).mean((0, 2, 3), keepdim=True))
    return net.conv2(y)


def counts(net, x):
    x = F.relu(net.conv1(x))
    y = x + net.calls * net.branch(x)
    net.calls = net.calls + 1
    return net.conv2(y)


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize("body", [averages, remembers, counts])
def test_what_one_forward_pass_leaves_for_the_next(body, layout):
    """Both buffers are zero now, which says nothing of the second pass."""
    state = {"state": nn.Buffer(torch.zeros(1, 6, 1, 1)), "calls": nn.Buffer(torch.zeros(()))}
    convs = {"conv1": nn.Conv2d(3, 6, 3), "branch": nn.Conv2d(6, 6, 3, padding=1), "conv2": nn.Conv2d(6, 4, 1)}
    model = Net(body, **convs, **state).double().eval()
    for layer in (model.conv1, model.branch):
        close_(layer, [1, 2])
    small = ng.compact(model, ng.plan(model, image(), layout=layout))
    assert layout == "aligned" or count(small) < count(model)
    for _ in range(3):
        x = image()
        torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-12)
    assert model.state.any() or model.calls == 3


def looks_up(net, x):
    y = net.conv1(x).mean((2, 3)) + F.embedding(torch.arange(len(x)), net.table)
    net.table.mul_(0.5)
    return net.conv2(y[..., None, None])


def leaks(net, x):
    y = F.prelu(net.conv1(x), net.slopes)
    net.slopes.mul_(0.5)
    return net.conv2(y)


def shifts(net, x):
    y = torch.addmm(net.shift, net.conv1(x).mean((2, 3)), net.square)
    net.shift.add_(0.3)
    return net.conv2(F.relu(y)[..., None, None])


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize("body", [looks_up, leaks, shifts])
def test_constants_that_the_next_forward_pass_changes(body, layout):
    state = {"table": nn.Buffer(torch.rand(9, 6)), "slopes": nn.Buffer(torch.full((6,), 0.5))}
    state |= {"shift": nn.Buffer(torch.zeros(6)), "square": nn.Buffer(torch.rand(6, 6))}
    state["table"][:, 1:4] = 0.5
    state["square"][:, 4] = 0
    model = Net(body, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 4, 1), **state).double().eval()
    close_(model.conv1, [1, 2])
    close_(model.conv1, [3], -0.8)
    small = ng.compact(model, ng.plan(model, image(), layout=layout))
    assert layout == "aligned" or count(small) < count(model)
    for _ in range(3):
        x = image()
        torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-12)


def test_counting_buffer():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return self.b(F.relu(self.a(x)))

    x = torch.randn(4, 3, dtype=torch.float64)
    model = settle_(Counts(), x)
    close_(model.a, [0, 1])
    plan = ng.plan(model, x)
    small = ng.compact(model, plan)
    ng.verify(model, small, x)
    assert kept(plan, "a.weight") == [2, 3, 4, 5]


def test_parameters_in_a_list_are_those_of_the_small_model():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(2, 6))
            self.weights = [self.first, self.second]

        def forward(self, x):
            for weight in self.weights:
                x = F.relu(F.linear(x, weight))
            return x

    model, x = Listed().double(), torch.randn(4, 3, dtype=torch.float64)
    small = ng.compact(model, ng.plan(model, x))
    assert small.weights[0] is small.first is not model.first
    ng.verify(model, small, x)


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_complex_numbers_stay_as_they_are(layout):
    def body(net, x):
        x = net.conv2(net.conv1(x)).mean((2, 3))
        z = net.second(net.first(torch.complex(x, x)))
        return (z * net.turn).abs()

    layers = {"first": nn.Linear(6, 8, dtype=torch.complex128), "second": nn.Linear(8, 6, dtype=torch.complex128)}
    turn = nn.Parameter(torch.full((6,), 1j, dtype=torch.complex128))
    model = Net(body, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 6, 1), **layers, turn=turn)
    model.conv1.double(), model.conv2.double()
    close_(model.conv1, [1, 2])
    with torch.no_grad():
        model.first.weight[2] = 0
        model.first.bias[2] = 1j
    plan, _ = shrink(model, image(), layout=layout)
    assert "its numbers are complex" in {wall.why for wall in plan.walls}


def autocast_off(net, x):
    x = net.conv1(x)
    with torch.autocast("cpu", enabled=False):
        x = F.relu(x)
        x = x + net.branch(x)
    return net.conv2(x)


def gradients_on_and_off(net, x):
    with torch.enable_grad():
        x = net.conv1(x)
        with torch.no_grad():
            y = net.branch(F.relu(x))
        y = y + 1
    return net.conv2(x * y)


def changed_within(net, x):
    x = net.conv1(x)
    with torch.enable_grad():
        x.add_(1.0)
    return net.conv2(x + net.branch(x))


def buffer_written_within(net, x):
    x = net.conv1(x)
    with torch.autocast("cpu", enabled=False):
        net.state.add_(net.branch(x).mean((0, 2, 3), keepdim=True))
        y = x + net.state
    return net.conv2(y)


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
@pytest.mark.parametrize("body", [autocast_off, gradients_on_and_off, changed_within, buffer_written_within])
def test_with_blocks_in_a_forward_are_no_walls(body, layout):
    convs = {"conv1": nn.Conv2d(3, 6, 3), "branch": nn.Conv2d(6, 6, 1), "conv2": nn.Conv2d(6, 4, 1)}
    model = Net(body, **convs, state=nn.Buffer(torch.zeros(1, 6, 1, 1))).double().eval()
    for layer in (model.conv1, model.branch):
        close_(layer, [1, 2])
        close_(layer, [3], 0.7)
    plan, small = shrink(model, image(), layout=layout, removes=None)
    assert not plan.walls
    for _ in range(2):  # the second pass meets what the first one left
        x = image()
        torch.testing.assert_close(small(x), model(x), rtol=0, atol=1e-12)
    assert layout == "aligned" or count(small) < count(model)


def test_a_copy_is_in_the_mode_of_its_model():
    """torchvision's extractors are copied in training mode by PyTorch, and then norm by the batch, unseen."""
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)).double()
    x = image()
    settle_(model, x)
    close_(model[0], [1, 2])
    extractor = extraction.create_feature_extractor(model, {"3": "out"}).eval()
    small = ng.compact(extractor, ng.plan(extractor, x))
    assert getattr(small, "0").out_channels == 4
    assert not any(module.training for module in small.modules())
    assert_same(small(x)["out"], extractor(x)["out"], atol=1e-12)
