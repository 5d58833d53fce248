"""The plan as a value: readable, serialisable, checked before anything is touched; and gated models."""

import copy
import json
import sys
from dataclasses import dataclass

import pytest
import torch
from flow_helpers import (
    Net,
    Residual,
    assert_same_function,
    assert_trains,
    assert_untouched,
    close_,
    count,
    image,
    prepare_,
    settle_,
    shrink,
)
from torch import distributed as dist
from torch import nn
from torch.nn.utils import prune

import narrowgate as ng
from narrowgate import Plan, PlanError, TraceError, streamed
from narrowgate.flow.plan import CONSTANTS, LAYOUTS


def model_with_zeros():
    return prepare_(Residual(), image(), share=0.5, keep=["head"])


# -- reading a plan ----------------------------------------------------------------------------------------------------
def test_printing_tells_layer_width_and_why():
    def body(net, x):
        return net.c(torch.sort(net.b(net.a(x)), 1).values)

    convs = {"a": nn.Conv2d(3, 6, 3), "b": nn.Conv2d(6, 5, 3), "c": nn.Conv2d(5, 2, 1)}
    model = settle_(Net(body, **convs), image())
    close_(model.a, [0, 1])
    close_(model.b, [3])
    plan = ng.plan(model, image())
    lines = str(plan).splitlines()
    assert f"{count(model):,} -> {plan.parameters_after:,} parameters" in lines[0]
    row = {line.split()[0]: line for line in lines[1:] if line.strip()}
    assert row["a"].split()[1:4] == ["6", "4", "4"]  # channels, used, kept
    assert row["b"].split()[1:4] == ["5", "4", "5"] and "1 for sort" in row["b"]
    assert any("sort" in line and "no rule" in line for line in lines)


def test_layers_that_the_inputs_do_not_lead_through_are_listed():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.extra = nn.Conv2d(3, 6, 3), nn.Linear(4, 6)
            self.head, self.auxiliary = nn.Linear(6, 2), nn.Linear(6, 1)

        def forward(self, x, more=None):
            x = self.conv(x).mean((2, 3))
            x = x if more is None else x + self.extra(more)
            return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)

    model = Optional()
    close_(model.conv, [0, 1])
    found = {wall.layer: wall.op for wall in ng.plan(model, image().float()).walls}
    assert found == {"extra": "not run", "auxiliary": "training only"}
    both = (image().float(), torch.randn(4, 4))
    assert {wall.layer: wall.op for wall in ng.plan(model, both).walls} == {"auxiliary": "training only"}


def test_rows_are_in_the_order_of_the_network():
    plan = ng.plan(model_with_zeros(), image())
    assert [row.layer for row in plan.rows] == ["stem", "conv1", "conv2", "head"]
    assert all(0 < row.used <= row.kept <= row.total for row in plan.rows)


def test_a_plan_cannot_be_changed():
    plan = ng.plan(model_with_zeros(), image())
    with pytest.raises(AttributeError):
        plan.layout = "scatter"


# -- JSON --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("constants", CONSTANTS)
def test_json_round_trip(layout, constants):
    model = model_with_zeros()
    plan = ng.plan(model, image(), layout=layout, constants=constants)
    again = Plan.from_json(plan.to_json())
    assert again == plan and str(again) == str(plan)
    first, second = ng.compact(model, plan), ng.compact(model, again)
    x = image()
    assert torch.equal(first(x), second(x))


def test_json_of_grouped_and_transposed_layers():
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2)
    model = nn.Sequential(first, second, nn.ConvTranspose2d(8, 6, 2), nn.Conv2d(6, 2, 1))
    settle_(model, image())
    close_(model[0], [0, 1, 4, 5])
    close_(model[1], [0, 7])
    close_(model[2], [3], 0.5)
    plan = ng.plan(model, image())
    again = Plan.from_json(plan.to_json())
    assert again == plan and plan.parameters_after < plan.parameters_before
    assert_same_function(model, ng.compact(model, again), image())


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": 2}', '{"format": 1, "cuts": 3}'])
def test_json_that_is_no_plan(text):
    with pytest.raises(ValueError, match="not a narrowgate plan"):
        Plan.from_json(text)


def test_json_with_a_key_missing():
    data = json.loads(ng.plan(model_with_zeros(), image()).to_json())
    del data["edits"]
    with pytest.raises(ValueError, match="not a narrowgate plan"):
        Plan.from_json(json.dumps(data))


def test_a_saved_plan_prepares_a_fresh_model_for_saved_weights():
    model = model_with_zeros()
    plan = ng.plan(model, image())
    small = ng.compact(model, plan)
    fresh = ng.compact(Residual().double(), Plan.from_json(plan.to_json()))
    fresh.load_state_dict(small.state_dict())
    x = image()
    assert torch.equal(fresh.eval()(x), small.eval()(x))


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_a_plan_for_another_model_is_refused():
    model = model_with_zeros()
    plan = ng.plan(model, image())
    for other in (nn.Sequential(nn.Conv2d(3, 4, 3)), Residual(width=12)):
        before = copy.deepcopy(other)
        with pytest.raises(PlanError):
            ng.compact(other, plan)
        assert_untouched(other, before)


def test_a_plan_is_applied_once():
    model = model_with_zeros()
    plan = ng.plan(model, image())
    small = ng.compact(model, plan)
    with pytest.raises(PlanError, match="already"):
        ng.compact(small, plan)


@dataclass
class Unregistered:
    scores: torch.Tensor


class Keeps(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.body, self.head, self.keep = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), keep

    def forward(self, x):
        x = self.body(x)
        self.features = self.keep(x)
        return self.head(x)


def kept_result(keep=lambda x: x):
    model = nn.Sequential(Keeps(keep))
    model(torch.rand(2, 3, 8, 8))
    return model


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (kept_result(), r"'0\.features' holds a result.*model\.0\.features = None"),
        (kept_result(lambda x: [1, {"x": x}]), r"'0\.features' holds a result.*model\.0\.features = None"),
        (nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 2, 1)), "Run the model once"),
        (Net(lambda net, x: Unregistered(net.conv(x)), conv=nn.Conv2d(3, 4, 3)), r"torch\.export\.register_dataclass"),
    ],
    ids=["result", "result in a list", "lazy", "dataclass"],
)
def test_models_that_need_something_first(model, match):
    with pytest.raises(TraceError, match=match):
        ng.plan(model, torch.rand(2, 3, 8, 8))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("put", "remedy"),
    [
        (nn.utils.weight_norm, r"nn\.utils\.remove_weight_norm\(layer, 'weight'\)"),
        (nn.utils.spectral_norm, r"nn\.utils\.remove_spectral_norm\(layer, 'weight'\)"),
        (lambda layer: prune.random_unstructured(layer, "weight", 0.5), r"nn\.utils\.prune\.remove\(layer, 'weight'\)"),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
def test_a_computed_weight_comes_with_what_takes_it_off(put, remedy):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    put(model[0])
    model(torch.rand(2, 3, 8, 8))
    with pytest.raises(TraceError, match=rf"'0\.weight' is computed\. Call torch\.{remedy} first"):
        ng.plan(model, torch.rand(2, 3, 8, 8))


def test_a_single_gated_layer_in_torch_compile_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    ng.attach_gates_(model)["2.0"].close_(torch.arange(4) < 2)
    layer, block = model[0], model[2]
    model[2] = torch.compile(block, backend="eager")
    x = torch.randn(2, 3)
    assert ng.plan(model, x).cuts["2._orig_mod.0.weight"].new_shape == (2, 4)
    model[0] = torch.compile(layer, backend="eager")
    with pytest.raises(
        TraceError, match=r"torch\.compile wraps '0', a single layer .*compile the module that it is in"
    ):
        ng.plan(model, x)


def test_a_model_that_can_not_be_traced_is_said_in_a_line(capfd):
    """torch.export would print the graph up to there before, which is hundreds of lines for a detector."""

    def body(net, x, talks=False):
        print("from the model", file=sys.stderr)
        y = net.fc(x).relu()
        return y if talks or y.sum() > 0 else -y

    x = torch.randn(2, 3, dtype=torch.float64)
    with pytest.raises(TraceError, match="no branch on tensor values"):
        ng.plan(Net(body, fc=nn.Linear(3, 4)).double(), x)
    assert "def forward" not in capfd.readouterr().err
    ng.plan(Net(lambda net, x: body(net, x, True), fc=nn.Linear(3, 4)).double(), x)
    assert "from the model" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_compiled_by_torch_jit_is_refused():
    model = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)))
    with pytest.raises(TraceError, match=r"torch\.jit"):
        ng.plan(model, torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    "inputs",
    [image(channels=4), torch.randn(2, 3).double(), (image(), image()), {"y": image()}, image().float()],
    ids=["channels", "rank", "too many", "keyword", "dtype"],
)
def test_inputs_that_do_not_fit(inputs, train):
    model = model_with_zeros().train(train)
    before = copy.deepcopy(model)
    with pytest.raises(TraceError, match="Residual"):
        ng.plan(model, inputs)
    assert_untouched(model, before)


@pytest.mark.parametrize("inputs", [None, 3, "x"])
def test_inputs_of_a_wrong_type(inputs):
    with pytest.raises(TypeError, match="example_inputs"):
        ng.plan(model_with_zeros(), inputs)


def test_the_model_inside_distributed_data_parallel_is_asked_for(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with pytest.raises(TraceError, match=r"DistributedDataParallel.*model\.module"):
            ng.plan(nn.parallel.DistributedDataParallel(model), image())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "pick",
    [lambda y: y[:, torch.tensor([True, False] * 3)], lambda y: y.mean((2, 3))[y.mean((1, 2, 3)) > 0]],
    ids=["channels", "samples"],
)
def test_sizes_that_depend_on_numbers_cannot_be_traced(pick):
    model = settle_(Net(lambda net, x: pick(net.a(x)).sum(1), a=nn.Conv2d(3, 6, 3)), image())
    close_(model.a, [1, 2])
    with pytest.raises(TraceError, match="the size of what index gives depends on the numbers"):
        ng.plan(model, image())


def test_a_branch_on_tensor_values_cannot_be_traced():
    def body(net, x):
        return net.a(x) if x.sum() > 0 else net.a(-x)

    model = settle_(Net(body, a=nn.Conv2d(3, 6, 3)), image()).train()
    before = copy.deepcopy(model)
    with pytest.raises(TraceError, match="branch"):
        ng.plan(model, image())
    assert_untouched(model, before)


def test_a_tensor_that_is_hidden_from_the_trace_is_named():
    model = Net(
        lambda net, x: nn.functional.linear(net.a(x), net.b.weight.data), a=nn.Linear(4, 4), b=nn.Linear(4, 4)
    ).double()
    with pytest.raises(TraceError, match=r"\.data \(write \.detach\(\)\)"):
        ng.plan(model, torch.randn(2, 4).double())


def test_options_are_checked():
    model = model_with_zeros()
    with pytest.raises(ValueError, match=r"layout.*aligned"):
        ng.plan(model, image(), layout="diagonal")
    with pytest.raises(ValueError, match=r"constants.*exact"):
        ng.plan(model, image(), constants="guess")
    for bad in (0, -8, 2.5, "8", None):
        with pytest.raises(ValueError, match="round_to"):
            ng.plan(model, image(), round_to=bad)


def test_planning_changes_nothing():
    model = model_with_zeros().train()
    model.bn.eval()
    before = copy.deepcopy(model)
    state = torch.get_rng_state()
    ng.plan(model, image().zero_())
    torch.set_rng_state(state)
    assert_untouched(model, before)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_compact_keeps_modes_devices_and_frozen_parameters():
    model = model_with_zeros().train()
    model.bn.eval()
    model.conv1.weight.requires_grad_(False)
    small = ng.compact(model, ng.plan(model, image()))
    assert [m.training for m in small.modules()] == [m.training for m in model.modules()]
    assert not small.conv1.weight.requires_grad and small.conv2.weight.requires_grad
    assert {p.dtype for p in small.parameters()} == {torch.float64}


def test_a_new_bias_of_a_frozen_layer_is_frozen(tmp_path):
    """A constant in front of a layer without bias becomes one; it trains if the layer's weight does."""

    def build(frozen=True):
        model = nn.Sequential(nn.Linear(3, 6), nn.Sigmoid(), nn.Linear(6, 2, bias=False)).double()
        close_(model[0], [0, 1], 0.5)
        model[2].weight.requires_grad_(not frozen)
        return model

    x = torch.randn(4, 3, dtype=torch.float64)
    for frozen in (True, False):
        model = build(frozen)
        plan = ng.plan(model, x)
        small = ng.compact(model, plan)
        ng.save(small, plan, tmp_path / "small")
        loaded = streamed.load(tmp_path / "small", lambda: build(frozen))  # noqa: B023
        for one in (small, loaded, ng.compact_(model, plan)):
            assert one[2].bias.requires_grad != frozen


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_compact_keeps_memory_formats(layout):
    model = model_with_zeros().to(memory_format=torch.channels_last)
    plan = ng.plan(model, image(), layout=layout)
    small = ng.compact(model, plan)
    assert "conv1.weight" in plan.cuts
    assert small.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not small.conv1.weight.is_contiguous()


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_a_model_made_in_inference_mode_can_train(layout):
    model = model_with_zeros()
    with torch.inference_mode():
        small = ng.compact(model, ng.plan(model, image(), layout=layout))
    assert not any(t.is_inference() for t in (*small.parameters(), *small.buffers()))
    assert_trains(model, small, image())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    model = model_with_zeros().to(dtype)
    plan = ng.plan(model, image().to(dtype))
    small = ng.compact(model, plan)
    assert plan.parameters_after < plan.parameters_before
    assert {p.dtype for p in small.parameters()} == {dtype}
    ng.verify(model, small, image().to(dtype))


def test_nothing_to_remove():
    model = settle_(Residual(), image())
    plan, _ = shrink(model, image(), removes=False)
    assert not plan.cuts and plan.parameters_after == plan.parameters_before


def test_planning_again_finds_nothing_more():
    _, small = shrink(model_with_zeros(), image())
    assert ng.plan(small, image()).parameters_after == count(small)


def test_planning_again_leaves_the_widths_that_a_forward_reads():
    def body(net, x):
        return net.head(net.norm(net.conv(x)).relu().mean((2, 3)) * net.conv.out_channels + net.head.in_features)

    model = Net(body, conv=nn.Conv2d(3, 8, 3), norm=nn.GroupNorm(2, 8), head=nn.Linear(8, 4)).double()
    close_(model.conv, [0, 1, 2, 5])
    _, small = shrink(model, image(), layout="scatter")
    assert len(small.conv.weight) == 4 and small.conv.out_channels == 8
    for layout in ("aligned", "scatter"):
        shrink(small, image(), layout=layout, removes=False)


def test_a_collapsed_model_can_be_reopened():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    gates = ng.attach_gates_(model)
    gates["0"].close_(torch.ones(4, dtype=torch.bool))
    with pytest.raises(ng.CollapseError, match=r"gates\.reopen_\('0'\)"):
        ng.plan(model, image())
    gates.reopen_("0")
    with torch.no_grad():
        model[0].bias.fill_(1.0)  # the reopened channel is above the ReLU's kink
    plan = ng.plan(model, image())
    assert len(plan.cuts["0.weight"].keep[0]) == 1


def test_what_cannot_be_copied_is_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model[1].module = sys
    with pytest.raises(TraceError, match=r"the attribute '1.module' is a module, which copy.deepcopy refuses"):
        ng.plan(model, torch.randn(2, 3))


def test_a_class_is_no_model():
    with pytest.raises(TypeError, match=r"plan needs a model, an nn\.Module that was built, got <class"):
        ng.plan(nn.ReLU, torch.ones(1))
