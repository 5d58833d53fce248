"""verify: passes equal models, and fails loudly for everything else."""

import copy
from dataclasses import dataclass

import pytest
import torch
from flow_helpers import Net, assert_untouched, close_, image, settle_
from torch import nn

import narrowgate as ng
from narrowgate import Verification, VerificationError


def network():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4))
    return settle_(model, image())


@torch.no_grad()
def changed(model, amount):
    other = copy.deepcopy(model)
    other[0].weight[0, 0, 0, 0] += amount
    return other


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_models_pass(dtype):
    model = network().to(dtype)
    result = ng.verify(model, copy.deepcopy(model), image().to(dtype))
    assert isinstance(result, Verification) and result.passed
    assert result.max_error == result.relative_error == 0
    assert "same function" in str(result)


def test_an_output_that_is_the_same_for_all_inputs_is_told():
    """Of a model that collapsed behind an operation which no plan follows: it is the same function all the same."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Softmax(1), nn.Linear(216, 4)).double()
    gates = ng.attach_gates_(model)
    assert not ng.verify(model, copy.deepcopy(model), image()).constant
    gates["0"].close_(torch.ones(6, dtype=torch.bool))
    result = ng.verify(model, ng.compact(model, ng.plan(model, image())), image())
    assert result.passed and result.constant
    assert str(result).endswith("the model's output is the same for all inputs")


def test_rounding_passes_and_is_reported():
    model = network()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[4].weight.mul_(1 + 1e-15)
    result = ng.verify(model, other, image())
    assert 0 < result.relative_error < 1e-12 < result.tolerance


@pytest.mark.parametrize("amount", [1e-6, 1.0, torch.nan, torch.inf])
def test_another_function_fails(amount):
    model = network()
    with pytest.raises(VerificationError, match=r"not the same function|NaN"):
        ng.verify(model, changed(model, amount), image())


def test_a_small_difference_on_a_large_offset_fails():
    """Relative to the size of the outputs it would be nothing."""

    def body(net, x):
        return net.fc(x) + 1e6

    x = torch.randn(4, 3, dtype=torch.float64)
    model = Net(body, fc=nn.Linear(3, 2)).double()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight[0, 0] += 1e-4
    with pytest.raises(VerificationError):
        ng.verify(model, other, x)


def two_scales(net, x):
    """Coordinates and scores, as a detector gives them out: along the last axis, or along the second."""
    return torch.cat([640 * net.boxes(x), net.scores(x).sigmoid()], 1)


@pytest.mark.parametrize("last", [True, False])
def test_a_small_output_beside_a_large_one_is_not_hidden(last):
    def body(net, x):
        return two_scales(net, x).flatten(2).transpose(1, 2) if last else two_scales(net, x)

    model = Net(body, boxes=nn.Conv2d(3, 4, 1), scores=nn.Conv2d(3, 5, 1))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.scores.bias[2] += 0.01
    x = torch.randn(2, 3, 4, 4)
    whole = (model(x) - model(x).mean(0)).abs().max()
    assert (model(x) - other(x)).abs().max() < 1e-4 * whole  # as a whole it would be rounding
    ng.verify(model, copy.deepcopy(model), x)
    with pytest.raises(VerificationError, match=f"not the same function.* at number 6 of axis {2 if last else 1}"):
        ng.verify(model, other, x)
    assert ng.verify(model, other, x, tolerance=1e-3).passed


def test_one_noisy_output_allows_others_nothing():
    def body(net, x):
        return (net.fc(x) * 1e7).sin(), net.fc(x)  # the first is all rounding

    model = Net(body, fc=nn.Linear(3, 4))
    other = Net(lambda net, x: (body(net, x)[0], 1.001 * body(net, x)[1]), fc=copy.deepcopy(model.fc))
    with pytest.raises(VerificationError, match="not the same function"):
        ng.verify(model, other, torch.randn(8, 3))


def test_a_channel_that_hardly_varies_does_not_fail_on_rounding():
    def body(net, x):
        return torch.cat([net.scores(x), 5 + 1e-5 * net.scores(x)], 1)

    model = Net(body, scores=nn.Conv2d(3, 5, 1))
    other = Net(lambda net, x: body(net, x) * (1 + 1e-6), scores=copy.deepcopy(model.scores))
    ng.verify(model, other, torch.randn(4, 3, 4, 4))


def test_tolerance_is_the_callers():
    model = network()
    assert ng.verify(model, changed(model, 1e-6), image(), tolerance=1e-2).passed
    with pytest.raises(VerificationError):
        ng.verify(model, changed(model, 1e-12), image(), tolerance=1e-16)


def test_other_shapes_fail():
    model = network()
    other = copy.deepcopy(model)
    other[4] = nn.Linear(216, 5).double()
    with pytest.raises(VerificationError, match="shapes"):
        ng.verify(model, other, image())


def test_another_number_of_outputs_fails():
    fc = nn.Linear(3, 2).double()
    one = Net(lambda net, x: net.fc(x), fc=fc)
    two = Net(lambda net, x: (net.fc(x), net.fc(x)), fc=fc)
    with pytest.raises(VerificationError, match="shapes"):
        ng.verify(one, two, torch.randn(4, 3, dtype=torch.float64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_outputs_of_both_models_do_not_hide_a_difference(bad):
    def body(factor):
        def forward(net, x):
            y = x * factor
            return torch.cat([y, torch.full_like(y[:, :1], bad)], 1)

        return Net(forward)

    x = torch.randn(4, 3, dtype=torch.float64)
    assert ng.verify(body(1.0), body(1.0), x).passed
    with pytest.raises(VerificationError):
        ng.verify(body(1.0), body(1.5), x)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_model_that_gives_out_nothing_finite_can_not_be_compared(bad):
    """As a diverged one does: any two such models would be equal."""
    x = torch.randn(4, 3, dtype=torch.float64)
    first, second = Net(lambda net, x: x + bad), Net(lambda net, x: 2 * x + bad)
    with pytest.raises(VerificationError, match=r"can't tell.*NaN or infinite"):
        ng.verify(first, second, x)
    with pytest.raises(VerificationError, match="can't tell"):
        ng.verify(first, first, x)


def test_a_difference_of_rounding_is_not_called_nothing_of_the_spread():
    model = Net(lambda net, x: x)
    result = ng.verify(model, Net(lambda net, x: x * (1 + 3e-16)), torch.randn(4, 3, dtype=torch.float64))
    assert result.max_error > 0 == result.relative_error
    assert "rounding of the outputs themselves" in str(result) and "0.0e+00 of" not in str(result)
    same = ng.verify(model, model, torch.randn(4, 3, dtype=torch.float64))
    assert "max difference 0.0e+00, 0.0e+00 of the outputs' spread" in str(same)


def test_nan_elsewhere_fails():
    x = torch.randn(4, 3, dtype=torch.float64)
    first = Net(lambda net, x: torch.where(torch.arange(3) == 0, torch.nan, x))
    second = Net(lambda net, x: torch.where(torch.arange(3) == 1, torch.nan, x))
    with pytest.raises(VerificationError):
        ng.verify(first, second, x)


@pytest.mark.parametrize("odd, number", [(torch.nan, 1.0), (torch.inf, torch.finfo(torch.float64).max)])
def test_a_number_is_no_nan_and_not_infinite(odd, number):
    def model(first):
        return Net(lambda net, x: torch.where(torch.arange(3) == 0, first, x))

    x = torch.randn(4, 3, dtype=torch.float64)
    assert ng.verify(model(odd), model(odd), x).passed
    with pytest.raises(VerificationError, match="NaN or infinities are elsewhere"):
        ng.verify(model(odd), model(number), x)


@pytest.mark.parametrize("wrap", [dict, tuple, list])
def test_every_output_counts(wrap):
    def model(factor):
        def forward(net, x):
            return {"a": x, "b": [x * factor]} if wrap is dict else wrap([x, [x * factor]])

        return Net(forward)

    x = torch.randn(4, 3, dtype=torch.float64)
    assert ng.verify(model(2.0), model(2.0), x).passed
    with pytest.raises(VerificationError):
        ng.verify(model(2.0), model(2.1), x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex128])
def test_outputs_that_are_not_real_numbers_count_too(dtype):
    def model(shift):
        return Net(lambda net, x: (x, (x * 10 + shift).to(dtype)) if dtype is not torch.bool else (x, x > shift))

    x = torch.randn(4, 3, dtype=torch.float64)
    assert ng.verify(model(0.0), model(0.0), x).passed
    with pytest.raises(VerificationError):
        ng.verify(model(0.0), model(1.0), x)


def test_a_second_batch_size_is_tried():
    """Merging two samples shows only when there are two."""
    seen = []

    def body(net, x):
        seen.append(len(x))
        return net.fc(x)

    model = Net(body, fc=nn.Linear(3, 2)).double()
    ng.verify(model, model, torch.randn(4, 3, dtype=torch.float64))
    assert len(set(seen)) == 2


@pytest.mark.parametrize(
    ("shape", "takes", "tried"),
    [
        ((2, 3, 8, 8), lambda shape: True, (2, 3, 16, 16)),
        ((1, 3, 96, 64), lambda shape: True, (2, 3, 128, 96)),
        ((1, 3, 96, 64), lambda shape: shape[0] != 2, (1, 3, 128, 96)),
        ((2, 3, 8, 8), lambda shape: shape[3] == 8, None),
        ((2, 5, 8), lambda shape: True, (2, 5, 16)),
        ((2, 5, 8), lambda shape: shape[2] == 8, (2, 10, 8)),
        ((2, 5), lambda shape: True, None),
    ],
)
def test_larger_images_and_longer_sequences_are_tried_where_the_model_takes_them(shape, takes, tried):
    seen = []

    def body(net, x):
        if not takes(x.shape):
            raise ValueError("not this size")
        seen.append(tuple(x.shape))
        return x

    x = torch.randn(shape, dtype=torch.float64)
    ng.verify(Net(body), Net(body), x)
    assert {one for one in seen if one[1:] != shape[1:]} == ({tried} if tried else set())
    seen.clear()
    ng.verify(Net(body), Net(body), x, other_sizes=False)
    assert {one[1:] for one in seen} == {shape[1:]}


def test_an_error_at_another_image_size_is_seen_and_can_be_left_out():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    wrong_when_large = Net(lambda net, x: x * (1.0 if x.shape[-1] == 8 else 1.1))
    with pytest.raises(
        VerificationError, match=r"inputs of shape \(2, 3, 16, 16\).*At the size given.*other_sizes=False"
    ):
        ng.verify(Net(lambda net, x: x), wrong_when_large, x)
    assert ng.verify(Net(lambda net, x: x), wrong_when_large, x, other_sizes=False).passed
    wrong = Net(lambda net, x: x * 1.1)
    with pytest.raises(VerificationError) as caught:
        ng.verify(Net(lambda net, x: x), wrong, x)
    assert "size" not in str(caught.value)


def test_a_size_at_which_samples_are_mixed_up_is_no_size_the_model_takes():
    """Twice the size makes four rows of each image."""
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    other = Net(lambda net, x: x.view(-1, 48) * (1.0 if x.shape[-1] == 4 else 1.1))
    assert ng.verify(Net(lambda net, x: x.view(-1, 48)), other, x).passed


def test_a_small_model_that_fails_where_the_other_runs_is_no_other_error():
    def fussy(net, x):
        assert x.shape[-1] == 8, "eight or nothing"
        return x

    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(
        VerificationError, match=r"fails where the other runs: AssertionError: eight.* shape \(2, 3, 16"
    ):
        ng.verify(Net(lambda net, x: x), Net(fussy), x)


def test_an_error_at_the_other_batch_size_is_seen():
    x = torch.randn(4, 3, dtype=torch.float64)
    wrong_when_large = Net(lambda net, x: x * (1.0 if len(x) == 4 else 1.1))
    with pytest.raises(VerificationError):
        ng.verify(Net(lambda net, x: x), wrong_when_large, x)


@pytest.mark.parametrize(("shape", "sizes"), [((-1, 2, 3), {4, 8}), ((2, 2, 3), {4})])
def test_a_model_that_takes_few_batch_sizes(shape, sizes):
    """Frames in pairs; or a batch size written in its code: then there is one to try."""
    seen = set()

    def body(net, x):
        y = net.fc(x.view(shape)).mean(1)
        seen.add(len(x))
        return y

    model, x = Net(body, fc=nn.Linear(3, 2)).double(), torch.randn(4, 3, dtype=torch.float64)
    ng.verify(model, model, x)
    assert seen == sizes


def test_a_single_sample_is_not_blind():
    x = torch.randn(1, 3, dtype=torch.float64)
    with pytest.raises(VerificationError):
        ng.verify(Net(lambda net, x: x + 1e9), Net(lambda net, x: x * 1.001 + 1e9), x)


@pytest.mark.parametrize("train", [True, False])
def test_modes_go_back(train):
    model, small = network().train(train), network().train(not train)
    small[1].train(train)
    before = [[m.training for m in one.modules()] for one in (model, small)]
    statistics = model[1].running_mean.clone()
    with pytest.raises(VerificationError):
        ng.verify(model, small, image())
    assert before == [[m.training for m in one.modules()] for one in (model, small)]
    assert torch.equal(model[1].running_mean, statistics)


def test_random_numbers_go_back():
    model = network()
    inputs = image()
    state = torch.get_rng_state()
    ng.verify(model, model, inputs)
    assert torch.equal(torch.get_rng_state(), state)


def test_constant_outputs_do_not_fail_on_rounding():
    """The spread is rounding only: then the size of the outputs is the scale."""
    model = Net(lambda net, x: 0.1 + x * 1e-18)
    other = Net(lambda net, x: 0.1 + 2e-17 + x * 1e-18)
    ng.verify(model, other, torch.randn(4, 3, dtype=torch.float64))


def test_the_remover_is_checked_by_it():
    """The negative control of all contract tests: one kept channel too few is found."""
    model = network()
    close_(model[0], [1])
    small = ng.compact(model, ng.plan(model, image()))
    with torch.no_grad():
        small[0].weight[0] = 0
    with pytest.raises(VerificationError):
        ng.verify(model, small, image())


@dataclass
class Result:
    scores: torch.Tensor
    notes: str = "ours"


@pytest.mark.parametrize(
    "give",
    [Result, lambda y: {"one": Result(y), "two": None}, lambda y: [y, "text", b"bytes", 3], torch.fft.fft],
    ids=["dataclass", "nested", "text", "complex"],
)
def test_outputs_of_any_kind_are_compared(give):
    def body(net, x):
        return give(net.fc(x))

    x = torch.randn(4, 3, dtype=torch.float64)
    model = Net(body, fc=nn.Linear(3, 2)).double()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight.mul_(1 + 1e-15)
    assert ng.verify(model, other, x).passed
    with torch.no_grad():
        other.fc.weight.add_(1e-3)
    with pytest.raises(VerificationError):
        ng.verify(model, other, x)


def test_a_model_that_gives_out_no_tensors_is_named():
    model = Net(lambda net, x: "nothing", fc=nn.Linear(3, 2))
    with pytest.raises(TypeError, match="Net gives out no tensors"):
        ng.verify(model, model, torch.randn(4, 3))


def test_what_a_model_does_to_its_inputs_is_undone():
    class Standardised(nn.Module):
        """It says whether it was given one tensor twice, as attention asks, and writes to it."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x, y):
            return self.fc(x.sub_(0.5).div_(0.25)) * (2 if x is y else 1)

    model, x = Standardised().double(), torch.randn(4, 6, dtype=torch.float64)
    other, before = copy.deepcopy(model), x.clone()
    assert ng.verify(model, other, (x, x)).passed and torch.equal(x, before)
    with torch.no_grad():
        other.fc.weight.mul_(1.001)
    with pytest.raises(VerificationError, match="not the same function"):
        ng.verify(model, other, (x, x))


@pytest.mark.parametrize("amount", [0.0, 1e-3])
def test_what_a_model_leaves_in_its_buffers_is_undone(amount):
    def body(net, x):
        y = net.fc(x) * net.calls
        net.calls = net.calls + 1
        net.mean.add_(x.mean(0))
        return y + net.mean

    buffers = {"calls": nn.Buffer(torch.ones(())), "mean": nn.Buffer(torch.zeros(3))}
    model = Net(body, fc=nn.Linear(3, 3), **buffers).double()
    other, before = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight.add_(amount)
    x = torch.randn(4, 3, dtype=torch.float64)
    if amount:
        with pytest.raises(VerificationError):
            ng.verify(model, other, x)
    else:
        assert ng.verify(model, other, x).noise < 1e-12
    assert_untouched(model, before)


@torch.no_grad()
def in_half_precision(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))
    gates = ng.attach_gates_(model)
    for gate in gates.modules():
        gate.g[::3] = 0
    return model.to(dtype), torch.randn(16, 20, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_excuse(dtype):
    model, x = in_half_precision(dtype)
    small = ng.compact(model, ng.plan(model, x))
    before = copy.deepcopy(small)
    result = ng.verify(model, small, x)
    assert 0 < result.relative_error < result.tolerance < 0.1
    assert_untouched(small, before)
    with torch.no_grad():
        small[2].weight[0] = 0
    with pytest.raises(VerificationError, match="not the same function"):
        ng.verify(model, small, x)


def test_code_that_asks_for_half_precision_itself():
    def body(net, x):
        return net.fc(x.bfloat16())

    model = Net(body, fc=nn.Linear(20, 4)).bfloat16()
    other = copy.deepcopy(model)
    x = torch.randn(8, 20)
    assert ng.verify(model, other, x).passed
    with torch.no_grad():
        other.fc.weight[0, :8] += 1
    with pytest.raises(VerificationError, match="not the same function"):
        ng.verify(model, other, x)


def test_a_small_model_that_runs_in_half_precision_only_is_compared_there():
    """As an exported file does, whose numbers are what they are."""

    def fixed(net, x):
        assert x.dtype == torch.bfloat16, "half precision or nothing"
        return x * 2

    x = torch.randn(4, 3).bfloat16()
    assert ng.verify(Net(lambda net, x: x * 2), Net(fixed), x).passed
    with pytest.raises(VerificationError, match="fails where the other runs: AssertionError: half precision"):
        ng.verify(Net(lambda net, x: x * 2), Net(fixed), x.float())


def test_what_rounding_hides_is_not_passed():
    """Large weights on inputs that are constant: rounding them moves the outputs by more than inputs do."""
    model = Net(lambda net, x: net.fc(torch.cat([torch.ones_like(x), x], 1)), fc=nn.Linear(20, 1)).bfloat16()
    with torch.no_grad():
        model.fc.weight[0, :10] = torch.tensor([500.0, -500.0]).repeat(5)
    x = torch.randn(8, 10, dtype=torch.bfloat16)
    assert ng.verify(model, copy.deepcopy(model), x).passed
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight[0, 0] += 2  # one unit in the last place
    with pytest.raises(VerificationError, match=r"can't tell.*float32"):
        ng.verify(model, other, x)


def test_a_model_that_draws_random_numbers_in_eval_mode_is_not_passed():
    model = Net(lambda net, x: nn.functional.dropout(net.fc(x), 0.5), fc=nn.Linear(20, 4)).double()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight[0] = 0
    with pytest.raises(VerificationError, match=r"random|not the same function"):
        ng.verify(model, other, torch.randn(8, 20, dtype=torch.float64))


def test_a_gate_that_opened_after_the_plan_is_named_as_what_may_be_wrong():
    model = network()
    gates = ng.attach_gates_(model)
    gates["0"].close_(torch.arange(6) < 3)
    plan = ng.plan(model, image())
    ng.verify(model, ng.compact(model, plan), image())
    with torch.no_grad():
        gates["0"].g[0] = 1.0
    with pytest.raises(
        VerificationError, match=r"DIFFERENT.* trained on since the plan was made, plan and compact again$"
    ):
        ng.verify(model, ng.compact(model, plan), image())
    with pytest.raises(TypeError, match=r"two models, nn\.Modules that were built, got Plan"):
        ng.verify(model, plan, image())


def cancelling():
    """Two constants of about 1000 that the norm's mean takes away, beside a signal of a hundredth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1, bias=False), nn.BatchNorm2d(5)).eval()
    with torch.no_grad():
        model[0].weight.mul_(0.01)
        model[0].weight[:2] = 0.0
        model[0].bias.copy_(torch.tensor([999.7, 1003.1, 0.0, 0.0]))
        model[2].running_mean.copy_(model[1].weight[:, :, 0, 0] @ model[0].bias)
        model[2].running_var.fill_(1e-5)
    return model


def test_rounding_where_constants_nearly_cancel_is_that_of_weights():
    model, x = cancelling(), torch.randn(4, 3, 8, 8)
    small = ng.compact(model, ng.plan(model, x))
    assert small[0].out_channels == 2
    result = ng.verify(model, small, x)
    assert result.relative_error > 1e-4  # more than another last digit of the inputs explains
    ng.verify(model.double(), ng.compact(model, ng.plan(model, x.double())), x.double(), tolerance=1e-8)
    with torch.no_grad():
        small[1].weight[0] *= 1.1
    with pytest.raises(VerificationError, match="DIFFERENT"):
        ng.verify(model.float(), small, x)
