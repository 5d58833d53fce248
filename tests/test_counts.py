"""Counts against numbers worked out by hand, against PyTorch's own counter and against fvcore."""

import copy
import dataclasses

import pytest
import torch
from helpers import ConvNet, images
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import narrowgate as ng
from narrowgate.measure import compare, summarize
from narrowgate.measure.tables import short


def only_layer(model, *inputs, **options):
    summary = summarize(model, inputs, **options)
    assert not summary.uncounted
    (layer,) = summary.layers
    return layer


def costs(layer):
    return layer.parameters, layer.multiply_adds, layer.activations


class Function(nn.Module):
    """A model that is only a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (3, 10, 12), (3 * 8 * 9 + 8, 10 * 12 * 8 * 3 * 9, 8 * 10 * 12)),
        (nn.Conv2d(3, 8, 3, stride=2, bias=False), (3, 9, 9), (216, 4 * 4 * 8 * 3 * 9, 8 * 4 * 4)),
        (nn.Conv2d(8, 12, (3, 1), groups=4), (8, 5, 5), (12 * 2 * 3 + 12, 3 * 5 * 12 * 2 * 3, 12 * 3 * 5)),
        (nn.Conv2d(6, 6, 3, groups=6), (6, 5, 5), (6 * 9 + 6, 3 * 3 * 6 * 9, 6 * 3 * 3)),
        (nn.Conv1d(4, 6, 5, dilation=2), (4, 20), (4 * 6 * 5 + 6, 12 * 6 * 4 * 5, 6 * 12)),
        (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), (2 * 3 * 8 + 3, 27 * 3 * 2 * 8, 3 * 27)),
        (nn.ConvTranspose2d(6, 4, 2, stride=2), (6, 5, 5), (6 * 4 * 4 + 4, 25 * 6 * 4 * 4, 4 * 10 * 10)),
        (nn.ConvTranspose2d(6, 4, 3, groups=2), (6, 5, 5), (6 * 2 * 9 + 4, 25 * 6 * 2 * 9, 4 * 7 * 7)),
        (nn.Linear(5, 7), (5,), (5 * 7 + 7, 5 * 7, 7)),
        (nn.Linear(5, 7), (11, 5), (5 * 7 + 7, 11 * 5 * 7, 11 * 7)),
        (nn.Linear(5, 7, bias=False), (11, 5), (5 * 7, 11 * 5 * 7, 11 * 7)),
        (nn.BatchNorm2d(4), (4, 3, 3), (8, 0, 36)),
        (nn.LayerNorm(6), (5, 6), (12, 0, 30)),
        (nn.GroupNorm(2, 4), (4, 3), (8, 0, 12)),
        (nn.PReLU(4), (4, 3), (4, 0, 12)),
        (nn.LSTM(3, 5, 2, batch_first=True), (7, 3), (20 * 8 + 20 * 10 + 80, 7 * 20 * (8 + 10), None)),
        (nn.GRU(3, 5, batch_first=True, bidirectional=True), (7, 3), (2 * 15 * (8 + 2), 2 * 7 * 15 * 8, None)),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else "",
)
@pytest.mark.parametrize("batch", [1, 4])
def test_one_layer_for_one_sample_whatever_the_batch(layer, shape, expected, batch):
    row = only_layer(layer, torch.randn(batch, *shape))
    assert row.kind == type(layer).__name__
    assert row.calls == 1
    if expected[2] is None:
        assert costs(row)[:2] == expected[:2]
    else:
        assert costs(row) == expected
        with torch.no_grad():
            assert row.output_shape == layer.eval()(torch.randn(1, *shape)).shape


def test_embedding_counts_its_output():
    row = only_layer(nn.Embedding(10, 4), torch.zeros(3, 6, dtype=torch.long))
    assert costs(row) == (40, 0, 24)
    assert row.output_shape == (1, 6, 4)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (torch.matmul, [(2, 3, 4), (2, 4, 5)], 2 * 3 * 4 * 5),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 3 * 4 * 5),
        (torch.mv, [(3, 4), (4,)], 12),
        (torch.dot, [(6,), (6,)], 6),
        (torch.addmm, [(3, 5), (3, 4), (4, 5)], 60),
        (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 120),
        (torch.addbmm, [(3, 5), (2, 3, 4), (2, 4, 5)], 120),
        (F.linear, [(2, 3, 4), (5, 4)], 2 * 3 * 4 * 5),
        (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(2, 3, 4), (2, 5, 4)], 2 * 3 * 4 * 5),
        (F.scaled_dot_product_attention, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)], 2 * 3 * 5 * 7 * (8 + 8)),
        (F.conv2d, [(2, 3, 8, 8), (4, 3, 3, 3)], 2 * 6 * 6 * 4 * 3 * 9),
    ],
)
def test_functions_belong_to_the_module_that_calls_them(function, shapes, expected):
    inputs = [torch.randn(shape) for shape in shapes]
    row = only_layer(Function(function), *inputs, batch_axis=None)
    assert row.name == ""
    assert row.kind == "Function"
    assert row.multiply_adds == expected
    with torch.inference_mode():
        assert only_layer(Function(function), *inputs, batch_axis=None) == row


class Attention(nn.Module):
    """Self-attention by hand, with one weight that belongs to no layer."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return F.linear((weights @ v).transpose(1, 2).reshape(batch, length, width), self.out)


def test_attention_by_hand():
    summary = summarize(nn.Sequential(Attention(), nn.LayerNorm(8)), torch.randn(5, 6, 8))
    attention, qkv, norm = summary.layers
    assert (attention.name, qkv.name, norm.name) == ("0", "0.qkv", "1")
    assert costs(qkv) == (8 * 24 + 24, 6 * 8 * 24, 6 * 24)
    products = 2 * (6 * 6 * 4) * 2
    assert costs(attention) == (64, products + 6 * 8 * 8, 2 * 6 * 6 + 6 * 8 + 6 * 8)
    assert costs(norm) == (16, 0, 48)
    assert summary.parameters == 216 + 64 + 16
    assert summary.multiply_adds == attention.multiply_adds + qkv.multiply_adds
    assert summary.activations == summary.product_activations + 48


def test_multihead_attention_is_counted_on_its_fast_path_too():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    summary = summarize(layer, torch.randn(3, 6, 8))
    assert summary.multiply_adds == 6 * 8 * 24 + 2 * 6 * 6 * 8 + 6 * 8 * 8 + 2 * 6 * 8 * 16
    assert not summary.uncounted
    assert torch.backends.mha.get_fastpath_enabled()


def test_published_figures():
    models = pytest.importorskip("torchvision").models
    resnet = summarize(models.resnet50(), torch.randn(2, 3, 224, 224))
    assert resnet.parameters == 25_557_032
    assert resnet.multiply_adds == 4_089_184_256
    assert resnet.product_activations == pytest.approx(11.1e6, rel=5e-3)
    mobilenet = summarize(models.mobilenet_v2(), torch.randn(2, 3, 224, 224))
    assert mobilenet.parameters == 3_504_872
    assert mobilenet.multiply_adds == 300_774_272


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("alexnet", 96),
        ("convnext_tiny", 64),
        ("densenet121", 64),
        ("efficientnet_b0", 64),
        ("googlenet", 64),
        ("mobilenet_v3_small", 64),
        ("mnasnet0_5", 64),
        ("resnext50_32x4d", 64),
        ("shufflenet_v2_x1_0", 64),
        ("squeezenet1_1", 64),
        ("swin_v2_t", 64),
        ("vit_b_16", 224),
    ],
)
def test_totals_agree_with_pytorchs_counter(name, size):
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):  # no numbers are needed
        options = {"init_weights": False} if name == "googlenet" else {}
        model = models.get_model(name, **options).eval()
        x = torch.randn(1, 3, size, size)
    counter = FlopCounterMode(display=False)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with counter, torch.no_grad():
            model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    summary = summarize(model, x)
    assert summary.multiply_adds == pytest.approx(counter.get_total_flops() / 2, rel=1e-6)
    assert summary.multiply_adds > 1e6
    assert summary.parameters == sum(p.numel() for p in model.parameters())
    assert not summary.uncounted


def test_fvcore_agrees():
    fvcore = pytest.importorskip("fvcore.nn")
    model, x = ConvNet().eval(), images(1)
    analysis = fvcore.FlopCountAnalysis(model, x).unsupported_ops_warnings(False)
    theirs = analysis.by_operator()
    activations = fvcore.ActivationCountAnalysis(model, x).unsupported_ops_warnings(False)
    summary = summarize(model, x)
    assert summary.multiply_adds == theirs["conv"] + theirs["linear"]  # without their count for norms
    assert summary.product_activations == activations.total()


def test_unknown_operations_are_listed_and_not_guessed():
    summary = summarize(nn.Sequential(Function(lambda x: torch.cdist(x, x)), nn.Linear(4, 2)), torch.randn(1, 4, 3))
    (unknown,) = summary.uncounted
    assert "cdist" in unknown.op
    assert (unknown.calls, unknown.layers) == (1, ("0",))
    assert summary.multiply_adds == 4 * 4 * 2
    assert "not counted" in str(summary)
    assert "cdist" in str(summary)


def test_a_forward_that_reads_values_runs_for_real_and_leaves_the_inputs_alone():
    def forward(x):
        x.relu_()
        return x @ torch.ones(4, 3) if x.sum().item() >= 0 else x

    x = torch.randn(2, 4)
    before, state = x.clone(), torch.get_rng_state()
    assert only_layer(Function(forward), x).multiply_adds == 12
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


class Remembering(nn.Module):
    """Keeps its last features, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.steps += 1
        self.last = self.fc(x)
        return self.last


def test_the_model_is_not_changed():
    model = nn.Sequential(Remembering(), nn.BatchNorm1d(3), nn.Dropout()).train()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    summarize(model, torch.randn(2, 4))
    assert model[0].last is None
    assert [module.training for module in model] == [True, False, True]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_layer_that_runs_twice_and_tied_weights_count_their_parameters_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    summary = summarize(nn.Sequential(first, first, second, nn.ReLU()), torch.randn(1, 4))
    assert [(row.name, row.parameters, row.multiply_adds, row.calls) for row in summary.layers] == [
        ("0", 20, 32, 2),
        ("2", 0, 16, 1),
    ]
    assert summary.parameters == 20
    assert "(x2)" in str(summary)


def test_layers_that_do_not_run_are_listed():
    class WithHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            x = self.body(x)
            return self.head(x) if self.training else x

    summary = summarize(WithHead(), torch.randn(1, 4))
    assert summary.parameters == 15 + 8
    assert summary.layers[1].output_shape is None
    assert summary.layers[1].multiply_adds == 0
    assert "not called" in str(summary)


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_gates_are_counted_apart_and_closed_ones_save_nothing(kind):
    plain = summarize(ConvNet(), images())
    model = ConvNet()
    gates = ng.attach_gates_(model, kind)
    gates.close_below_(10.0)
    gated = summarize(model, images())
    assert gated.gates == (gates.count if kind == "exponential" else 0)
    assert [dataclasses.replace(row, gates=0) for row in gated.layers] == list(plain.layers)
    assert plain.gates == 0
    assert ("gates" in str(gated).splitlines()[1]) == (kind == "exponential")


def test_gates_of_groups_are_counted_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    plain = summarize(model, torch.randn(2, 8))
    slices = ("0.weight", 0), ("0.bias", 0), ("2.weight", 1)
    groups = {name: [(*one, where) for one in slices] for name, where in {"a": [0, 1], "b": [4, 5, 7]}.items()}
    ng.attach_gates_(model, groups=groups)
    gated = summarize(model, torch.randn(2, 8))
    assert gated.parameters == plain.parameters and [layer.gates for layer in gated.layers] == [2, 0]
    assert gated.parameters + gated.gates == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_a_compacted_model_costs_what_its_plan_says(layout):
    model = ConvNet()
    with torch.no_grad():
        model.conv1.weight[::2] = 0
        model.conv1.bias[::2] = 0
        model.fc1.weight[:4] = 0
    before, plan = summarize(model, images()), ng.plan(model, images(), layout=layout)
    after = summarize(ng.compact(model, plan), images())
    assert before.parameters == plan.parameters_before
    assert after.parameters == plan.parameters_after < before.parameters
    assert after.multiply_adds < before.multiply_adds
    assert not after.uncounted


def test_inputs_by_keyword_and_with_the_batch_elsewhere():
    inputs = {"input1": torch.randn(8, 3), "input2": torch.randn(8, 4)}
    summary = summarize(nn.Bilinear(3, 4, 2), inputs)
    assert (summary.inputs, summary.layers[0].output_shape) == ("1 x 3; 1 x 4", (1, 2))
    assert (summary.multiply_adds, summary.uncounted) == (3 * 4 * 2, ())
    several = {"input1": torch.randn(8, 5, 3), "input2": torch.randn(8, 5, 4)}
    assert summarize(nn.Bilinear(3, 4, 2), several).multiply_adds == 5 * 3 * 4 * 2
    steps_first = nn.LSTM(3, 5)
    assert only_layer(steps_first, torch.randn(7, 4, 3), batch_axis=1).multiply_adds == 7 * 4 * 5 * 8


def test_a_compiled_model_counts_like_its_original():
    model = ConvNet()
    assert summarize(torch.compile(model), images()) == summarize(model, images())


def test_the_old_weight_norm():
    with pytest.warns(FutureWarning):
        layer = torch.nn.utils.weight_norm(nn.Linear(4, 3))
    layer(torch.randn(1, 4))
    assert summarize(layer, torch.randn(1, 4)).multiply_adds == 12


def test_what_computes_a_weight_and_what_packs_a_sequence_is_free():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    assert summarize(layer, torch.randn(1, 4)).uncounted == ()
    assert summarize(nn.DataParallel(nn.Linear(4, 3)), torch.randn(1, 4)).uncounted == ()

    def packed(x, lengths):
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False).data

    assert summarize(Function(packed), (torch.randn(2, 5, 4), torch.tensor([5, 3]))).uncounted == ()


def test_one_sample_is_taken_of_tensors_in_dicts_and_tuples_too():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(5, 8)

        def forward(self, x, more=None):
            x, y = (x["x"], x["y"]) if more is None else (x, more[0])
            return self.a(x) + self.b(y)

    x, y = torch.randn(3, 4), torch.randn(3, 5)
    for inputs in (({"x": x, "y": y},), (x, (y,)), {"x": x, "more": (y,)}):
        found = summarize(Pair(), inputs)
        assert (found.multiply_adds, found.inputs) == (8 * 4 + 8 * 5, "1 x 4; 1 x 5")


def test_a_list_of_samples_is_run_as_it_is():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 1)

        def forward(self, images):
            return [self.conv(image[None]) for image in images]

    two = summarize(Detector(), ([torch.randn(3, 4, 4), torch.randn(3, 5, 5)],))
    assert two.multiply_adds == 3 * 2 * (16 + 25) and two.inputs == "3 x 4 x 4; 3 x 5 x 5"


def test_errors_say_what_to_do():
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        summarize(torch.relu, torch.randn(1))
    with pytest.raises(ValueError, match="run the model once"):
        summarize(nn.LazyLinear(3), torch.randn(1, 2))
    with pytest.raises(RuntimeError, match=r"Linear fails on one sample.*batch_axis"):
        summarize(nn.Linear(4, 3), torch.randn(1, 5))
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_compiled_by_torch_jit_is_refused():
    with pytest.raises(TypeError, match=r"torch\.jit"):
        summarize(torch.jit.script(nn.Sequential(nn.Linear(3, 4))), torch.rand(2, 3))


def test_the_table():
    lines = str(summarize(nn.Sequential(nn.Conv2d(3, 1000, 1), nn.ReLU()), torch.randn(2, 3, 4, 4))).splitlines()
    assert lines == [
        "Sequential: 4.00 k parameters, 48.00 k multiply-adds, 16.00 k activations for one sample (1 x 3 x 4 x 4)",
        "layer  kind    output shape      parameters  multiply-adds  activations",
        "-----------------------------------------------------------------------",
        "0      Conv2d  1 x 1000 x 4 x 4       4,000         48,000       16,000",
        "-----------------------------------------------------------------------",
        "total                                 4,000         48,000       16,000",
    ]


def test_compare_shows_before_and_after():
    before = summarize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(1, 4))
    after = summarize(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)), torch.randn(1, 4))
    lines = compare(before, after).splitlines()
    assert lines[0].startswith("Sequential, for one sample (1 x 4): 148.3% left (parameters), 150.0% left")
    assert lines[3].split() == "0 Linear 1 x 8 -> 1 x 6 40 -> 30 32 -> 24 8 -> 6".split()
    assert lines[4].split()[:3] == ["1", "Linear", "(new)"]
    assert lines[5].split() == "2 Linear 1 x 2 18 -> 14 16 -> 12 2".split()
    assert lines[7].split() == "total 58 -> 86 48 -> 72 10 -> 14".split()
    assert "(gone)" in compare(after, before)
    same = compare(before, before)
    assert "->" not in same
    assert "100.0% left" in same


def test_inputs_that_do_not_fit_are_said_once(capfd):
    """PyTorch would log where a forward without numbers failed, in sixty lines, before the message."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 3, 2, 2)

        def forward(self, x):
            return torch.cat([x, self.up(F.max_pool2d(x, 2))], 1)

    assert summarize(Joined(), torch.rand(2, 3, 8, 8)).parameters == 39
    with pytest.raises(RuntimeError, match=r"Joined fails on one sample of the example inputs: .*Sizes of tensors"):
        summarize(Joined(), torch.rand(2, 3, 7, 7))
    assert not capfd.readouterr().err


def test_a_number_is_said_in_the_unit_that_it_rounds_to():
    numbers = [0, 999, 1000, 999_994, 999_995, 999_999_999, 4_090_000_000]
    assert list(map(short, numbers)) == ["0", "999", "1.00 k", "999.99 k", "1.00 M", "1.00 G", "4.09 G"]
