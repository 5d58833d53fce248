"""One gated layer against the ordinary layer it was, in float64."""

import copy
import math

import pytest
import torch
from helpers import assert_same
from torch import nn

from narrowgate.gated import GatedLayer
from narrowgate.gates import CLOSING_POINT, ExponentialGate, exponential_gate
from narrowgate.swap import check_gate_fits, gate_layer_, merge_layer_

# (make the layer, shape of its input); every layer has 4 or 6 output channels
LAYERS = {
    "conv1d": (lambda **k: nn.Conv1d(4, 6, 3, **k), (3, 4, 9)),
    "conv2d": (lambda **k: nn.Conv2d(4, 6, 3, padding=1, stride=2, **k), (3, 4, 7, 7)),
    "conv3d": (lambda **k: nn.Conv3d(4, 6, 2, **k), (2, 4, 4, 4, 4)),
    "grouped": (lambda **k: nn.Conv2d(4, 6, 3, groups=2, **k), (3, 4, 6, 6)),
    "depthwise": (lambda **k: nn.Conv2d(4, 4, 3, groups=4, **k), (3, 4, 6, 6)),
    "reflect": (lambda **k: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", **k), (3, 4, 6, 6)),
    "same": (lambda **k: nn.Conv2d(4, 6, 3, padding="same", dilation=2, **k), (3, 4, 6, 6)),
    "unbatched": (lambda **k: nn.Conv2d(4, 6, 3, **k), (4, 6, 6)),
    "transposed1d": (lambda **k: nn.ConvTranspose1d(4, 6, 3, stride=2, **k), (3, 4, 5)),
    "transposed2d": (lambda **k: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, **k), (3, 4, 5, 5)),
    "transposed3d": (lambda **k: nn.ConvTranspose3d(4, 6, 2, **k), (2, 4, 3, 3, 3)),
    "transposed1d-grouped": (lambda **k: nn.ConvTranspose1d(4, 6, 3, groups=2, **k), (3, 4, 5)),
    "transposed2d-grouped": (lambda **k: nn.ConvTranspose2d(4, 6, 3, groups=2, **k), (3, 4, 5, 5)),
    "transposed3d-grouped": (lambda **k: nn.ConvTranspose3d(4, 6, 2, groups=2, **k), (2, 4, 3, 3, 3)),
    "linear": (lambda **k: nn.Linear(4, 6, **k), (3, 4)),
    "linear-tokens": (lambda **k: nn.Linear(4, 6, **k), (3, 5, 4)),
}
NORMS = {
    "norm1d": (lambda **k: nn.BatchNorm1d(4, **k), (5, 4)),
    "norm1d-sequence": (lambda **k: nn.BatchNorm1d(4, **k), (3, 4, 7)),
    "norm2d": (lambda **k: nn.BatchNorm2d(4, **k), (3, 4, 5, 5)),
    "norm3d": (lambda **k: nn.BatchNorm3d(4, **k), (2, 4, 3, 3, 3)),
}


def channel_axis(layer, x):
    if isinstance(layer, nn.Linear):
        return x.dim() - 1
    return x.dim() - 1 - len(layer.kernel_size) if hasattr(layer, "kernel_size") else 1


def along(values, tensor, axis):
    return tensor * values.view(-1, *[1] * (tensor.dim() - 1 - axis))


def new_gate(size):
    gate = ExponentialGate(size).double()
    with torch.no_grad():
        gate.g.copy_(torch.linspace(-1.3, 1.1, size) if size > 1 else torch.tensor([0.7]))
        gate.g[size // 2 :: 3] = 1e-4 if size > 1 else 0.7  # closed
    return gate


def example(make, shape, **options):
    """An ordinary layer in float64, a copy to be gated, and an input."""
    plain = make(**options).double()
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    return plain, copy.deepcopy(plain), torch.randn(shape, dtype=torch.float64, requires_grad=True)


def assert_same_function(gated, plain, inputs, g, scaled, **call):
    """The gated layer's output and all gradients are those of ``scaled``, made of the plain layer and its own g."""
    (x,) = inputs
    ours, theirs = gated(x, **call), scaled()
    assert_same(ours, theirs, rtol=1e-12, atol=1e-12)
    probe = torch.randn_like(theirs)
    ours_grads = torch.autograd.grad((ours * probe).sum(), [x, gated.weight, *_bias(gated), _g(gated)])
    theirs_grads = torch.autograd.grad((theirs * probe).sum(), [x, plain.weight, *_bias(plain), g])
    for our, their in zip(ours_grads, theirs_grads, strict=True):
        assert_same(our, their, rtol=1e-10, atol=1e-11)
    assert (theirs_grads[-1] != 0).any()


def _bias(layer):
    return [] if layer.bias is None else [layer.bias]


def _g(layer):
    return (layer.gate or layer.gate_in).g


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("single", [False, True], ids=["gate-a-channel", "one-gate"])
def test_a_gated_layer_is_the_plain_layer_times_its_gates(name, bias, single):
    plain, gated, x = example(*LAYERS[name], bias=bias)
    axis = channel_axis(plain, x)
    gate = new_gate(1 if single else plain(x).shape[axis])
    g = gate.g.detach().clone().requires_grad_()
    gate_layer_(gated, "gate", gate)
    assert isinstance(gated, GatedLayer)
    assert_same_function(gated, plain, [x], g, lambda: along(exponential_gate(g), plain(x), axis))
    if not single:
        closed = (gate.g.abs() < CLOSING_POINT).nonzero().flatten()
        assert closed.numel() and (gated(x).index_select(axis, closed) == 0).all()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("name", [name for name in LAYERS if "group" not in name and name != "depthwise"])
def test_an_input_gate_is_a_gate_on_the_input(name, bias):
    plain, gated, x = example(*LAYERS[name], bias=bias)
    gate = new_gate(4)
    g = gate.g.detach().clone().requires_grad_()
    gate_layer_(gated, "gate_in", gate)
    axis = channel_axis(plain, x)
    assert_same_function(gated, plain, [x], g, lambda: plain(along(exponential_gate(g), x, axis)))


def test_gates_on_both_sides_of_a_layer():
    plain, gated, x = example(*LAYERS["conv2d"])
    into, out = new_gate(4), new_gate(6)
    gate_layer_(gated, "gate_in", into)
    gate_layer_(gated, "gate", out)
    expected = along(out.value(), plain(along(into.value(), x, 1)), 1)
    assert_same(gated(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["conv2d", "transposed2d", "linear"])
def test_a_gated_layer_is_called_by_keyword_like_the_plain_one(name):
    plain, gated, x = example(*LAYERS[name])
    gate_layer_(gated, "gate", new_gate(6))
    assert gated(input=x).shape == plain(input=x).shape


def test_a_transposed_convolution_keeps_its_output_size_argument():
    plain, gated, x = example(*LAYERS["transposed2d"])
    gate_layer_(gated, "gate", new_gate(6))
    assert gated(x, output_size=[11, 11]).shape == plain(x, output_size=[11, 11]).shape == (3, 6, 11, 11)


@pytest.mark.parametrize("single", [False, True], ids=["gate-a-channel", "one-gate"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.5}], ids=str
)
@pytest.mark.parametrize("name", NORMS)
def test_a_gated_norm_is_the_plain_norm_times_its_gates(name, options, training, single):
    plain, gated, x = example(*NORMS[name], **options)
    gate = new_gate(1 if single else 4)
    g = gate.g.detach().clone().requires_grad_()
    gate_layer_(gated, "gate", gate)
    for step in range(2):  # twice, for the running statistics
        plain.train(training or step == 0)
        gated.train(training or step == 0)
        assert_same_function(gated, plain, [x], g, lambda: along(exponential_gate(g), plain(x), 1))
    assert_same(dict(gated.named_buffers()), dict(plain.named_buffers()))
    assert single or (gated(x)[:, 2] == 0).all()  # a closed channel is zero, not the constant beta


def test_a_norm_that_no_longer_tracks_leaves_its_statistics_alone():
    norm = nn.BatchNorm2d(4)
    norm.track_running_stats = False
    gate_layer_(norm, "gate", ExponentialGate(4))
    norm(torch.randn(3, 4, 5, 5) + 2)
    assert (norm.running_mean == 0).all() and norm.num_batches_tracked == 0


def test_a_gated_norm_checks_its_input_like_a_plain_one():
    norm = nn.BatchNorm2d(4)
    gate_layer_(norm, "gate", ExponentialGate(4))
    with pytest.raises(ValueError, match="expected 4D input"):
        norm(torch.randn(2, 4))


@pytest.mark.parametrize("name", [*LAYERS, *NORMS])
def test_the_class_swap_keeps_what_the_layer_was(name):
    plain, gated, x = example(*(LAYERS | NORMS)[name])
    before = {key: value for key, value in vars(gated).items() if not key.startswith("_")}
    gate = new_gate(plain(x).shape[channel_axis(plain, x)])
    gate_layer_(gated, "gate", gate)
    assert isinstance(gated, type(plain))
    assert {key: value for key, value in vars(gated).items() if not key.startswith("_")} == before
    assert list(gated.state_dict()) == [*plain.state_dict(), "gate.g"]
    gated.eval()
    expected = gated(x)
    merge_layer_(gated)
    assert type(gated) is type(plain) and list(gated.state_dict()) == list(plain.state_dict())
    assert_same(gated(x), expected, rtol=1e-12, atol=1e-12)


def test_half_precision_layers_have_gates_in_float32():
    layer = nn.Linear(4, 3).to(torch.bfloat16)
    gate = ExponentialGate(3)
    gate_layer_(layer, "gate", gate)
    y = layer(torch.ones(2, 4, dtype=torch.bfloat16))
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert gate.g.grad.dtype == torch.float32 and (gate.g.grad != 0).all()


@pytest.mark.parametrize(
    ("layer", "key", "message"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "gate_in", "layer 'it' has groups=2: input gates need groups=1"),
        (nn.BatchNorm2d(4), "gate_in", "layer 'it' is a BatchNorm2d: input gates serve"),
        (nn.ReLU(), "gate_in", "layer 'it' is a ReLU: input gates serve"),
        (nn.LazyLinear(4), "gate", "layer 'it' has no weights yet"),
        (nn.ModuleList(), "gate", "layer 'it' is a ModuleList, which goes through its own children"),
    ],
)
def test_a_gate_that_does_not_fit_is_refused_by_name(layer, key, message):
    with pytest.raises(ValueError, match=message):
        check_gate_fits("it", layer, key)


def test_an_output_that_is_no_tensor_is_named():
    rnn = nn.GRU(3, 3)
    gate_layer_(rnn, "gate", ExponentialGate(1))
    with pytest.raises(TypeError, match="output of a GRU, which returned tuple"):
        rnn(torch.randn(2, 1, 3))


def test_second_derivatives_of_the_gate_are_right():
    plain, gated, x = example(*LAYERS["linear"])
    gate = new_gate(6)
    gate_layer_(gated, "gate", gate)
    (first,) = torch.autograd.grad(gated(x).square().sum(), gate.g, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), gate.g)
    g, y2 = gate.g.detach(), plain(x).square().sum(0).detach()
    e = torch.exp(-g * g)
    by_hand = y2 * (8 * g * g * e * e + 4 * (1 - e) * e * (1 - 2 * g * g)) * (g.abs() >= CLOSING_POINT)
    assert math.isfinite(by_hand.sum()) and (by_hand != 0).any()
    assert_same(second, by_hand, rtol=1e-10, atol=1e-10)
