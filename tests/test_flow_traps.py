"""Ways to be silently wrong: each of these models once was, or nearly was, narrowed to another function."""

import math
import random
import types
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from flow_helpers import Net, assert_same_function, assert_trains, close_, image, kept, settle_, shrink, shrink_all
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import narrowgate as ng
from narrowgate.flow.plan import plan_traced
from narrowgate.flow.trace import Tracer

TRAPS = []


def trap(body):
    TRAPS.append(body)
    return body


def chain(body):
    """conv1 -> the awkward thing -> conv2, with channels 1 and 2 of conv1 closed and 3 constant."""
    parts = {"conv1": nn.Conv2d(3, 6, 3), "conv2": nn.Conv2d(6, 4, 1), "kernel": nn.Buffer(torch.rand(1, 1, 3, 3))}
    if body is chooses_weights_by_its_width:
        parts |= {"conv3": nn.Conv2d(3, 3, 1), "conv4": nn.Conv2d(3, 3, 1)}
    numbers = {"factor": nn.Buffer(torch.tensor(2.0)), "another": nn.Buffer(torch.tensor(3.0))}
    model = settle_(Net(body, **parts, **numbers), image())
    close_(model.conv1, [1, 2])
    close_(model.conv1, [3], 0.7)
    return model


@trap
def divides_by_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x / math.sqrt(x.shape[1]))


@trap
def mean_over_channels_by_hand(net, x):
    x = net.conv1(x)
    return net.conv2(x) + x.sum(1, keepdim=True) / x.shape[1]


@trap
def scales_by_its_width_in_a_branch(net, x):
    x = net.conv1(x)
    return net.conv2(F.relu(x) * (0.5 if x.shape[1] > 5 else 2.0))


@trap
def puts_its_width_in_a_tensor(net, x):
    x = net.conv1(x)
    return net.conv2(x * torch.tensor(x.shape[1]))


@trap
def puts_its_width_in_a_tensor_like_another(net, x):
    x = net.conv1(x)
    return net.conv2(x * x.new_tensor([1 / x.shape[1]]))


@trap
def puts_its_width_in_a_float_tensor(net, x):
    x = net.conv1(x)
    return net.conv2(x * torch.sqrt(torch.FloatTensor([x.shape[1]])))


@trap
def puts_its_width_in_a_new_tensor(net, x):
    x = net.conv1(x)
    return net.conv2(x * x.new([x.shape[1]]))


@trap
def is_told_what_to_do_by_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(F.gelu(x, approximate="tanh" if x.shape[1] > 5 else "none"))


@trap
def fills_with_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x * torch.full((1,), x.shape[1]))


@trap
def counts_to_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x * torch.arange(x.shape[1])[-1])


@trap
def sums_as_many_ones_as_it_is_wide(net, x):
    x = net.conv1(x)
    return net.conv2(x * torch.ones(x.shape[1], dtype=x.dtype).sum())


@trap
def sums_ones_over_channels(net, x):
    x = net.conv1(x)
    return net.conv2(x / torch.ones_like(x).sum(1, keepdim=True))


@trap
def adds_as_often_as_it_is_wide(net, x):
    x = net.conv1(x)
    return net.conv2(torch.add(x, x.abs(), alpha=x.shape[1]))


@trap
def rolls_rows_by_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x * x.roll(x.shape[1] // 2, 2))


@trap
def picks_a_row_by_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x * x[:, :, x.shape[1] // 2].unsqueeze(2))


@trap
def sums_over_space(net, x):
    return net.conv2(net.conv1(x).sum((2, 3), keepdim=True))


@trap
def sums_over_the_batch(net, x):
    x = net.conv1(x)
    return net.conv2(x + x.sum(0, keepdim=True))


@trap
def squeezes_everything(net, x):
    x = net.conv1(x).mean((2, 3), keepdim=True).squeeze()
    return net.conv2(x[:, :, None, None])


@trap
def dropout2d_then_in_place(net, x):
    x = net.conv1(x)
    y = F.dropout2d(x, training=False)
    y.relu_()
    return net.conv2(x * y)


@trap
def alpha_dropout_then_in_place(net, x):
    x = net.conv1(x)
    y = F.alpha_dropout(x, training=False)
    y.add_(1)
    return net.conv2(x * y)


@trap
def in_place_through_slice(net, x):
    x = net.conv1(x)
    x[:, 1:3] += 1
    return net.conv2(x)


@trap
def in_place_through_as_strided(net, x):
    x = net.conv1(x)
    x.as_strided(x.shape, x.stride()).add_(1)
    return net.conv2(x)


@trap
def in_place_through_swapdims(net, x):
    x = net.conv1(x)
    x.swapdims(1, 2).add_(1)
    return net.conv2(x)


@trap
def in_place_through_ravel(net, x):
    x = net.conv1(x)
    x.ravel().add_(1)
    return net.conv2(x)


@trap
def in_place_through_reshape_as(net, x):
    x = net.conv1(x)
    x.reshape_as(x.flatten(2)).add_(1)
    return net.conv2(x)


@trap
def in_place_through_type_as(net, x):
    x = net.conv1(x)
    x.type_as(x).add_(1)
    return net.conv2(x)


@trap
def in_place_through_numpy_style_index(net, x):
    x = net.conv1(x)
    x[:, [1, 4]] = 1.0
    return net.conv2(x)


@trap
def in_place_view_made_before(net, x):
    x = net.conv1(x)
    view = x.flatten(2)
    x.add_(1)
    return net.conv2(view[..., None])


@trap
def in_place_in_a_list(net, x):
    x = net.conv1(x)
    torch._foreach_mul_([x.flatten(2)], 2.0)
    return net.conv2(x)


@trap
def assembled_by_slices(net, x):
    x = net.conv1(x)
    y = torch.zeros_like(x)
    y[:, :3] = x[:, 3:]
    y[:, 3:] = x[:, :3]
    return net.conv2(y)


@trap
def splits_into_pairs(net, x):
    x = net.conv1(x)
    x = x.view(x.shape[0], -1, 2, *x.shape[2:])
    return net.conv2(torch.cat([x[:, :, 0] * 2, x[:, :, 1]], 1))


@trap
def splits_into_pairs_and_reduces(net, x):
    x = net.conv1(x)
    x = x.view(x.shape[0], -1, 2, *x.shape[2:]).amax(1)
    return net.conv2(x.repeat(1, 3, 1, 1))


@trap
def nan_swallowed_by_where(net, x):
    x = net.conv1(x)
    return net.conv2(torch.where(x > 0.1, torch.ones_like(x), torch.zeros_like(x)) + 0 * x)


@trap
def nan_swallowed_by_nan_to_num(net, x):
    return net.conv2(torch.nan_to_num(net.conv1(x)))


@trap
def nan_swallowed_by_fmax(net, x):
    return net.conv2(torch.fmax(net.conv1(x), torch.zeros(())))


@trap
def nan_swallowed_by_power(net, x):
    x = net.conv1(x)
    return net.conv2(x**0 + x)


@trap
def nan_swallowed_by_isnan(net, x):
    x = net.conv1(x)
    return net.conv2(x + torch.isnan(x).double())


@trap
def nan_swallowed_by_comparison(net, x):
    return net.conv2((net.conv1(x) > 0.1).double())


@trap
def nan_swallowed_by_maximum_position(net, x):
    x = net.conv1(x)
    return net.conv2(x + x.flatten(2).argmax(2)[..., None, None])


@trap
def sorted_over_channels(net, x):
    return net.conv2(net.conv1(x).sort(1).values)


@trap
def divides_by_a_layers_width(net, x):
    return net.conv2(net.conv1(x) / net.conv1.out_channels)


@trap
def writes_with_out(net, x):
    x = net.conv1(x)
    y = torch.zeros_like(x)
    with torch.no_grad():
        torch.add(x, 1.0, out=y)
    return net.conv2(x + y)


@trap
def computes_without_gradients(net, x):
    with torch.no_grad():
        scale = net.conv1(x).abs().mean((2, 3), keepdim=True)
    return net.conv2(torch.sigmoid(net.conv1(x)) * scale)


@trap
def makes_a_tensor_of_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x * torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None, None])


@trap
def makes_a_tensor(net, x):
    return net.conv2(net.conv1(x) * torch.linspace(1, 2, x.shape[-1] - 2, dtype=x.dtype))


@trap
def blurs_with_a_kernel_for_each_channel(net, x):
    x = torch.sigmoid(net.conv1(x))
    return net.conv2(F.conv2d(x, net.kernel.expand(x.shape[1], -1, -1, -1), groups=x.shape[1], padding=1))


@trap
def variance_of_everything(net, x):
    x = net.conv1(x)
    return net.conv2(x * x.var(False))


@trap
def pools_channels_as_if_they_were_space(net, x):
    return net.conv2(F.avg_pool3d(net.conv1(x), (3, 1, 1), 1, (1, 0, 0)))


@trap
def products_of_all_pairs(net, x):
    x = net.conv1(x).mean((2, 3))
    x = (x[:, :, None] * x[:, None, :]).sum(2)
    return net.conv2(x[..., None, None])


@trap
def turns_by_a_quarter(net, x):
    return net.conv2((1j * net.conv1(x)).abs())


@trap
def on_the_unit_circle(net, x):
    return net.conv2((torch.exp(1j * net.conv1(x)) + 1).abs())


@trap
def reads_the_bits(net, x):
    x = net.conv1(x)
    return net.conv2(x + x.view(torch.int64) // 2**52)  # sign and exponent


@trap
def chooses_a_parameter_by_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x * (net.factor if x.shape[1] == 6 else net.another))


@trap
def chooses_by_value(net, x):
    x = net.conv1(x)
    width = x.shape[1]
    return net.conv2(x) * torch.cond(x.sum() > 0, lambda y: y * width, lambda y: y / width, (x.new_ones(1),))


FACTORS = [torch.tensor(float(width)) for width in range(7)]  # neither parameters nor buffers


@trap
def chooses_a_tensor_of_its_own_by_its_width(net, x):
    x = net.conv1(x)
    return net.conv2(x * FACTORS[x.shape[1]])


@trap
def turns_by_an_angle_of_its_width(net, x):
    x = net.conv1(x)
    return (net.conv2(x) * complex(1, x.shape[1])).abs()


@trap
def picks_a_row_in_a_list_by_its_width(net, x):
    y = net.conv1(x)
    return net.conv2(y) + x.mean(1, keepdim=True)[:, :, [y.shape[1] - 1], :1]


@trap
def chooses_weights_by_its_width(net, x):
    y = net.conv1(x)
    first, second = (net.conv3, net.conv4) if y.shape[1] > 5 else (net.conv4, net.conv3)
    z = F.relu(F.conv2d(x[:, :, 1:-1, 1:-1], first.weight))
    return net.conv2(y) + F.conv2d(z, second.weight).sum(1, keepdim=True)


@trap
def chooses_a_result_by_its_width(net, x):
    x = net.conv1(x)
    y = net.conv2(x)
    results = F.relu(y), y.abs()
    return results[x.shape[1] > 5] + 0.1 * results[0]


@trap
def gives_out_one_of_two_by_its_width(net, x):
    x = net.conv1(x)
    y = net.conv2(x)
    z = torch.sigmoid(y)
    return (y, z) if x.shape[1] > 5 else (z, y)


@trap
def puts_together_as_many_as_it_is_wide(net, x):
    x = net.conv1(x)
    return torch.stack([net.conv2(x)] * x.shape[1]).sum(0)


@trap
def zero_times_a_constant_that_is_infinite(net, x):
    x = net.conv1(x)
    return net.conv2(torch.nan_to_num(x.abs() * x.abs().log(), nan=3.0))


@trap
def reads_its_bits(net, x):
    x = net.conv1(x)
    return net.conv2(x.view(torch.int64).to(x.dtype) * 1e-18)


@trap
def flips_along_no_axis(net, x):
    x = net.conv1(x)
    return net.conv2(x.flip(()) + x.flip(2))


@torch.library.custom_op("narrowgate_tests::flip", mutates_args=())
def flip(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.flip(1)


@torch.library.custom_op("narrowgate_tests::neg_", mutates_args=())
def neg_(x: torch.Tensor) -> torch.Tensor:
    return -x.flip(1)


flip.register_fake(lambda x, dims: torch.empty_like(x))
flip.register_autograd(lambda ctx, grad: (grad.flip(1), None))
neg_.register_fake(torch.empty_like)
neg_.register_autograd(lambda ctx, grad: -grad.flip(1))


@trap
def turns_channels_by_an_operation_with_a_known_name(net, x):
    return net.conv2(flip(net.conv1(x), [2]))


@trap
def turns_channels_not_in_place_by_an_operation_with_a_known_name(net, x):
    x = net.conv1(x)
    y = neg_(x)
    return net.conv2(x + 2 * y)


@pytest.mark.parametrize("body", TRAPS, ids=lambda body: body.__name__)
def test_same_function(body):
    shrink_all(chain(body), image(), removes=None, also=[image(size=11, batch=3)])


def test_the_traps_have_something_to_remove():
    shrink_all(chain(lambda net, x: net.conv2(net.conv1(x))), image())


BY_WIDTH = {
    "slice start": lambda x, width: x * x[:, :, width - 1 : width],
    "slice end": lambda x, width: x[..., : width - 1].mean(3, keepdim=True),
    "slice step": lambda x, width: x[..., :: width // 2].mean(3, keepdim=True),
    "slice from the end": lambda x, width: x[..., -width:].mean(3, keepdim=True),
    "narrow": lambda x, width: x * x.narrow(2, width // 2, 1),
    "split": lambda x, width: x.split(width // 2, 2)[0].mean(2, keepdim=True),
    "split in sizes": lambda x, width: x.split([width - 1, 7 - width], 2)[0].mean(2, keepdim=True),
    "chunk": lambda x, width: x.chunk(width // 2, 2)[0].mean(2, keepdim=True),
    "pad": lambda x, width: F.pad(x, [width] * 4).mean((2, 3), keepdim=True),
    "pool": lambda x, width: F.max_pool2d(x, width // 2).mean((2, 3), keepdim=True),
    "pool up": lambda x, width: F.avg_pool2d(x, 4, 3, ceil_mode=width > 5).amax((2, 3), keepdim=True),
    "resize": lambda x, width: F.interpolate(x, (width, width), mode="bilinear").amax((2, 3), keepdim=True),
    "repeat": lambda x, width: x.repeat(1, 1, width, 1).sum(2, keepdim=True),
    "expand": lambda x, width: x.mean((2, 3), keepdim=True).expand(-1, -1, width, -1).sum(2, keepdim=True),
    "view": lambda x, width: x.reshape(len(x), width, -1, 18 if width > 5 else 12).amax(2, keepdim=True),
    "transpose": lambda x, width: x.transpose(2, 3 if width > 5 else 2),
    "truth": lambda x, width: x * (width > 5),
    "fill": lambda x, width: x * x.new_empty(width).fill_(1).sum(),
}


@pytest.mark.parametrize("name", BY_WIDTH)
def test_what_happens_in_space_depends_on_the_number_of_channels(name):
    def body(net, x):
        x = net.conv1(x)
        return net.conv2(BY_WIDTH[name](x, x.shape[1]))

    plan, _ = shrink_all(chain(body), image(), removes=None)
    assert plan.walls


MORE_THAN_THERE_IS = {
    "slice": lambda x, width: x[..., :width],
    "slice from the end": lambda x, width: x[:, :, -width:],
    "split": lambda x, width: x.split(width, 2)[0],
    "tensor_split": lambda x, width: x.tensor_split([width], 3)[0],
    "chunk": lambda x, width: x.chunk(width, 2)[0],
    "written": lambda x, width: x * ones_up_to(width, x.new_zeros(x.shape[2:])),
}


def ones_up_to(end, mask):
    mask[:end] = 1
    return mask


@pytest.mark.parametrize("name", MORE_THAN_THERE_IS)
def test_a_part_by_the_number_of_channels_is_all_of_a_small_image(name):
    def body(net, x):
        x = net.conv1(x)
        return net.conv2(MORE_THAN_THERE_IS[name](x, x.shape[1]))

    plan, _ = shrink_all(chain(body), image(size=5), removes=None, also=[image(size=10)])
    assert plan.walls


def test_an_activation_is_chosen_by_the_number_of_channels():
    def body(net, x):
        x = net.conv1(x)
        return net.conv2((net.relu if x.shape[1] > 5 else net.gelu)(x))

    model = chain(body)
    model.relu, model.gelu = nn.ReLU(), nn.GELU()
    plan, _ = shrink_all(model, image(), removes=None)
    assert plan.walls


@pytest.mark.parametrize("by_number", [True, False])
def test_the_second_third_of_the_channels(by_number):
    """One channel of each third is left: `2:4` would be the last of the three."""

    def body(net, x):
        x = net.conv1(x)
        third = 2 if by_number else x.shape[1] // 3
        return net.conv2(x[:, third : 2 * third])

    model = settle_(Net(body, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(2, 4, 1)), image())
    close_(model.conv1, [0, 2, 4])
    plan, _ = shrink_all(model, image(), aligned_removes=not by_number)
    assert bool(plan.walls) == by_number


ROUNDING = {"ge": lambda x: x >= 0.7, "floor": lambda x: torch.floor(x * 10), "int": lambda x: (x * 10).to(torch.int32)}


@pytest.mark.parametrize("name", ROUNDING)
def test_constants_are_computed_in_the_precision_of_the_model(name):
    """0.7 in single precision is not 0.7: a threshold may fall between the two."""
    model = chain(lambda net, x: net.conv2(ROUNDING[name](net.conv1(x)).to(x.dtype))).float()
    x = image(batch=16).float()
    small = ng.compact(model, ng.plan(model, x))
    assert torch.allclose(small(x), model(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_without_axes_has_the_precision_of_what_it_meets(dtype):
    """0.7 in double precision, as a tensor without axes, is compared with 0.7 in single precision as one of those."""
    model = chain(lambda net, x: net.conv2((net.conv1(x) >= net.threshold).to(x.dtype))).float()
    model.threshold = nn.Buffer(torch.tensor(0.7, dtype=dtype))
    x = image(batch=16).float()
    small = ng.compact(model, ng.plan(model, x))
    assert torch.allclose(small(x), model(x), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_norm_in_single_precision_of_numbers_in_half():
    """In half precision a mean of 1000.3 is 1000.5, and a variance of 100,000 is infinite."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, eps=1e-8), nn.Conv2d(6, 4, 1)).eval()
    close_(model[0], [1], 1000.0)
    close_(model[0], [2], 0.5)
    model[1].running_mean[1], model[1].running_var[1] = 1000.3, 1e-3
    model[1].running_var[2] = 1e5
    model[0].half(), model[2].half()
    x = image().half()
    plan = ng.plan(model, x)
    assert kept(plan, "2.weight", 1) == [0, 3, 4, 5]
    assert torch.allclose(ng.compact(model, plan)(x), model(x), rtol=0, atol=0.02)


class Deep(nn.Module):
    """What differs between training and evaluation beside an auxiliary head."""

    def __init__(self, difference):
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 2)
        self.difference = difference

    def forward(self, x):
        x = F.relu(self.a(x))
        if self.training and self.difference == "view":
            x = x.view(-1, 6, 6, 6)
        out = self.head(F.relu(self.b(x)).mean((2, 3)))
        if self.training and self.difference == "features":
            return out, x
        if self.training and self.difference == "head":
            return out, self.head(x.mean((2, 3)))
        return out


@pytest.mark.parametrize("difference", ["view", "features", "head"])
def test_what_runs_in_training_only_still_runs(difference):
    model = settle_(Deep(difference), image())
    close_(model.a, [1, 2])
    close_(model.b, [3, 4])
    small = ng.compact(model, ng.plan(model, image()))
    assert_same_function(model, small, image())
    assert_trains(model, small, image())


INTERLEAVED = {
    "divided": lambda b, c: (b, c // 4, 4),
    "inferred": lambda b, c: (b, -1, 4),
    "outer_fixed": lambda b, c: (b, 4, c // 4),
    "outer_inferred": lambda b, c: (b, 4, -1),
}


@pytest.mark.parametrize("name", INTERLEAVED)
def test_a_view_that_takes_channels_apart(name):
    """Either part may be the one that shrinks: the wrong guess keeps all shapes and permutes the channels."""

    def body(net, x):
        y = F.relu(net.conv1(x))
        b, c, h, w = y.shape
        y = y.view(*INTERLEAVED[name](b, c), h, w).transpose(1, 2).reshape(b, c, h, w)
        return net.conv2(y).mean((2, 3))

    parts = {"conv1": nn.Conv2d(3, 16, 3, padding=1), "conv2": nn.Conv2d(16, 8, 3, padding=1)}
    model = settle_(Net(body, **parts), image())
    close_(model.conv1, range(2, 16, 4))
    shrink_all(model, image(), removes=None)


class DividesByItsInputs(nn.Conv2d):
    def forward(self, x):
        return super().forward(x / x.shape[1])


class DividesByItsOutputs(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) / self.out_channels


def replaced_forward():
    layer = nn.Conv2d(6, 5, 1)
    layer.forward = types.MethodType(lambda self, x: F.conv2d(x, self.weight, self.bias) / self.in_channels, layer)
    return layer


@pytest.mark.parametrize(
    "make", [lambda: DividesByItsInputs(6, 5, 1), lambda: DividesByItsOutputs(6, 5, 1), replaced_forward]
)
def test_a_layer_of_the_users_own_that_reads_its_width(make):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), make(), nn.ReLU(), nn.Conv2d(5, 4, 1))
    settle_(model, image())
    close_(model[0], [1, 2])
    close_(model[2], [0])
    shrink_all(model, image(), removes=None)


def test_an_activation_whose_forward_was_replaced():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1))
    model[1].forward = lambda x: F.relu(x) * x.shape[1]
    settle_(model, image())
    close_(model[0], [1, 2])
    shrink_all(model, image(), removes=None)


def test_a_hook_that_divides_by_its_layers_width():
    model = chain(lambda net, x: net.conv2(net.conv1(x)))
    model.conv1.register_forward_hook(lambda layer, args, output: output / layer.out_channels)
    shrink_all(model, image(), removes=None)


@pytest.mark.parametrize("kind", [nn.ReLU, nn.BatchNorm2d])
def test_what_is_in_front_of_a_module_is_chosen_by_the_number_of_channels(kind):
    def body(net, x):
        x = net.conv1(x)
        y = net.conv2(x)
        z = net.module(y)
        return z + net.last(y if x.shape[1] > 5 else z)

    model = chain(body)
    model.module = kind(4).double().eval() if kind is nn.BatchNorm2d else kind()
    model.last = nn.Conv2d(4, 4, 1).double()
    if kind is nn.BatchNorm2d:
        nn.init.constant_(model.module.bias, 3.0)
    plan, _ = shrink_all(model, image(), removes=None)
    assert plan.walls


def test_a_forward_that_reads_a_weights_shape():
    model = chain(lambda net, x: net.conv2(net.conv1(x) / net.conv1.weight.shape[0]))
    shrink_all(model, image(), removes=None)


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like])
def test_constants_like_a_tensor_are_as_wide_as_it(like):
    plan, _ = shrink_all(chain(lambda net, x: net.conv2(F.relu(net.conv1(x)) + like(net.conv1(x)))), image())
    assert not plan.walls


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_layers_called_by_keyword(layout):
    def body(net, x):
        x = net.conv1(input=x)
        return net.conv2(input=net.norm(input=net.relu(input=x + net.conv3(input=x))))

    convs = {"conv1": nn.Conv2d(3, 6, 3), "conv2": nn.Conv2d(6, 4, 1), "conv3": nn.Conv2d(6, 6, 1)}
    model = settle_(Net(body, **convs, norm=nn.BatchNorm2d(6), relu=nn.ReLU()), image())
    close_(model.conv1, [1, 2, 3])
    close_(model.conv3, [1, 4])
    _, small = shrink(model, image(), layout=layout)
    assert layout == "aligned" or len(small.conv3.weight) == 4


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_a_transposed_convolution_is_told_its_size_by_keyword(layout):
    def body(net, x):
        y = net.conv1(x)
        return net.conv2(F.relu(y + net.up(net.down(y), output_size=y.shape[2:])))

    convs = {"conv1": nn.Conv2d(3, 6, 3), "conv2": nn.Conv2d(6, 4, 1), "down": nn.Conv2d(6, 6, 3, stride=2, padding=1)}
    model = settle_(Net(body, **convs, up=nn.ConvTranspose2d(6, 6, 3, stride=2, padding=1)), image(size=9))
    close_(model.down, [0, 3])
    with torch.no_grad():
        model.up.weight[:, [1, 2]] = 0
    _, small = shrink(model, image(size=9), layout=layout, also=[image(size=8)])
    assert layout == "aligned" or small.up.weight.shape[:2] == (4, 4)


@pytest.mark.parametrize("reader", [nn.Linear(6, 5), nn.Conv1d(6, 5, 1), nn.ConvTranspose1d(6, 5, 3)])
def test_as_many_places_as_channels(reader):
    def body(net, x):
        x = net.second(F.relu(net.first(x)))
        return net.reader(x if isinstance(net.reader, nn.Linear) else x.transpose(1, 2))

    model = Net(body, first=nn.Conv1d(3, 8, 1), second=nn.Conv1d(8, 6, 1), reader=reader).double().eval()
    close_(model.first, [6, 7])
    with torch.no_grad():
        model.second.weight[:, :3] = 0
        model.second.weight[2, :3] = 1  # the channel that alone reads three others
        (reader.weight[2] if isinstance(reader, nn.ConvTranspose1d) else reader.weight[:, 2]).zero_()  # a place
    shrink_all(model, torch.randn(4, 3, 6, dtype=torch.float64))


class Window(nn.Module):
    """It counts its tokens, and by chance there may be as many as it has channels."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.num_heads, self.head_dim, self.dim, self.most = heads, width // heads, width, width
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        x = x[:, -self.most :]
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).reshape(batch, tokens, self.dim)
        return self.proj(x).mean(1)


def test_a_number_of_something_else_is_that_of_the_channels():
    model = Window().double().eval()
    close_(model.qkv, range(32, 36))  # the values of the first head
    inputs, more = (torch.randn(4, tokens, 16, dtype=torch.float64) for tokens in (10, 20))
    plan, _ = shrink_all(model, inputs, also=[more])
    assert plan.widths == {"num_heads": 3, "dim": 12}


def add_to_(parameter):
    with torch.no_grad():
        parameter.add_(1.0)


WRITTEN = {
    "bias": lambda net: net.conv1.bias,
    "weight": lambda net: net.conv2.weight,
    "scale": lambda net: net.norm.weight,
    "factor": lambda net: net.factors,
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_a_forward_that_writes_to_a_parameter(name, layout):
    """What is a constant in the first forward pass is another one in the second."""

    def body(net, x):
        y = net.conv2(net.norm(net.conv1(x)) * net.factors)
        add_to_(WRITTEN[name](net))
        return y

    model = Net(body, conv1=nn.Conv2d(3, 6, 3), norm=nn.BatchNorm2d(6), conv2=nn.Conv2d(6, 4, 1)).double().eval()
    model.factors = nn.Parameter(torch.rand(6, 1, 1, dtype=torch.float64))
    close_(model.conv1, [1, 2, 3], 0.7)
    small = ng.compact(model, ng.plan(model, image(), layout=layout))
    for x in (image(), image(), image(batch=2)):
        assert torch.allclose(small(x), model(x), rtol=1e-10, atol=1e-12)


def test_a_switch_is_turned_between_two_plans():
    """A graph that is kept from one plan to the next is of a forward that went another way."""

    def body(net, x):
        x = net.conv1(x)
        return net.conv2(x - x.mean(1, keepdim=True) if net.centred else x)

    x = image()
    model, tracer = chain(lambda net, x: net.conv2(net.conv1(x))), Tracer()
    model.body = body
    for model.centred in (False, True):
        plan = plan_traced(model, x, tracer, "aligned", "exact", 1, training=False)
        assert_same_function(model, ng.compact(model, plan), x)
    assert not plan.cuts


class Heads(nn.Module):
    """Attention that does something to its values; the second of the first head is closed."""

    def __init__(self, change):
        super().__init__()
        self.change, self.qkv, self.proj = change, nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        heads = self.qkv(x).reshape(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        return self.proj(F.scaled_dot_product_attention(query, key, self.change(value)).transpose(1, 2).flatten(2))


CHANGED = {
    "noise": lambda value: F.alpha_dropout(value, 0.5, True),
    "bits": lambda value: (value.view(torch.int64) | 0x3FF0000000000000).view(torch.float64),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_turns_zero_into_something_else_in_a_head(name):
    model = Heads(CHANGED[name]).double().eval()
    close_(model.qkv, [17])
    plan = ng.plan(model, torch.randn(3, 5, 8, dtype=torch.float64), layout="scatter")
    assert kept(plan, "proj.weight", 1) is None
    plain = Heads(lambda value: value).double().eval()
    close_(plain.qkv, [17])
    assert kept(ng.plan(plain, torch.randn(3, 5, 8).double(), layout="scatter"), "proj.weight", 1) == [0, *range(2, 8)]


@pytest.mark.parametrize("dims", [1, 3])
def test_a_weight_that_is_read_as_well_keeps_its_kernel(dims):
    """Its first places are zero, and a sum over them is the same without; at this size, so is the result's shape."""
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    parts = {"first": layer(3, 8, 1), "conv": layer(8, 8, 3, stride=2, padding=1), "last": layer(8, 3, 1)}
    model = Net(lambda net, x: net.last(net.conv(net.first(x))) * net.conv.weight.sum(), **parts).double().eval()
    close_(model.last, [0])
    with torch.no_grad():
        model.conv.weight[..., 0] = 0
        model.last.weight[:, 3] = 0
    shrink_all(model, torch.randn(4, 3, *[7] * dims, dtype=torch.float64), removes=None)


GROUPS = {
    "none": lambda net, x: F.conv2d(net.narrow(x), net.conv.weight),
    "four": lambda net, x: F.conv2d(torch.cat([x, x], 1), net.conv.weight, groups=4),
    "read": lambda net, x: net.conv(x) * net.conv.weight.sum((1, 2, 3))[:, None, None],
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_grouped_weight_is_used_with_other_groups(name):
    def body(net, x):
        x = F.relu(net.first(x))
        return net.last(net.conv(x)), GROUPS[name](net, x)

    parts = {"first": nn.Conv2d(3, 8, 1), "conv": nn.Conv2d(8, 8, 1, groups=2), "narrow": nn.Conv2d(8, 4, 1)}
    model = Net(body, **parts, last=nn.Conv2d(8, 3, 1)).double().eval()
    close_(model.first, [1, 5, 6])
    close_(model.narrow, [2])
    if name == "read":
        with torch.no_grad():
            model.conv.weight[:, 3] = 0
    shrink_all(model, image(), removes=None)


BESIDE = {
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "pool": lambda x: F.max_pool1d(x, 3, 1, 1),
    "norm": lambda x: F.instance_norm(x),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_view_takes_as_many_channels_for_tokens(name):
    """At this size it changes nothing; with fewer channels it would mix both."""

    def body(net, x):
        tokens = net.conv(x).reshape(len(x), x.shape[2], -1)
        return net.head(BESIDE[name](tokens).flatten(1))

    model = Net(body, conv=nn.Conv1d(3, 6, 1), head=nn.Linear(36, 4)).double().eval()
    close_(model.conv, [1, 4])
    shrink_all(model, torch.randn(4, 3, 6, dtype=torch.float64), removes=None)


class OwnShift(nn.Module):
    """A convolution that is shifted by a vector of the block's, unless it has a bias of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1, bias=False)
        self.shift = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x):
        y = self.conv(x)
        return F.relu(y if self.conv.bias is not None else y + self.shift)


@pytest.mark.parametrize("layout", ["aligned", "scatter", "auto"])
def test_a_bias_that_code_asks_for_is_not_added(layout):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), OwnShift(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    model = settle_(model, image())
    close_(model[0], [0, 1, 2], 1.0)
    _, small = shrink(model, image(), removes=None, layout=layout)
    assert small[2].conv.bias is None


@pytest.mark.parametrize("layout", ["aligned", "scatter", "auto"])
def test_a_layer_whose_memory_is_strided_through_is_never_idle(layout):
    def body(net, x):
        y, z = net.a(x), net.b(x)
        n, t, c = z.shape
        windows = z.as_strided((n, t - 2, 3, c), (t * c, c, c, 1))
        return net.head(y[:, 2:] + windows.mean(2))

    model = Net(body, a=nn.Linear(6, 8), b=nn.Linear(6, 8), head=nn.Linear(8, 3)).double()
    with torch.no_grad():
        model.b.weight.zero_()
    shrink(model, torch.randn(2, 9, 6).double(), removes=None, layout=layout)


class Dropped(nn.Module):
    """LayerDrop: in training a block is left out by chance, which Python or NumPy draws."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or self.draw() < 0.5:
                x = x + F.relu(block(x))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("draw", [lambda: random.random(), lambda: np.random.rand()], ids=["python", "numpy"])
def test_layers_that_are_left_out_by_chance_are_narrowed(draw):
    model = Dropped(draw).double()
    for layer in (model.stem, *model.blocks):
        close_(layer, [0, 3, 4])
    for seed in range(4):
        random.seed(seed)
        np.random.seed(seed)
        plan = ng.plan(model, image())
        state = random.getstate(), np.random.get_state()[1].tolist()
        random.seed(seed)
        np.random.seed(seed)
        assert state == (random.getstate(), np.random.get_state()[1].tolist())  # a plan draws nothing that is missed
        assert kept(plan, "stem.weight") == [1, 2, 5, 6, 7]
        ng.verify(model, ng.compact(model, plan), image())


class Watched(nn.Module):
    """Functions of its own that refer to it: deepcopy takes those as they are, and a copy would go on using it."""

    def __init__(self, how):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.kept = {}

        def keep(name, output):
            self.kept[name] = self.norm(output)

        def watch(module, args, output, net=self):
            net.kept["conv2"] = net.norm(output)

        self.step, self.steps = partial(keep, "conv2"), [lambda y: keep("conv2", y)]
        self.how = how
        if how == "hook":
            self.conv2.register_forward_hook(lambda module, args, output: keep("conv2", output))
        elif how == "default":
            self.conv2.register_forward_hook(watch)
        elif how == "weak":
            weak = self.conv2.model = weakref.ref(self)
            self.conv2.register_forward_hook(lambda module, args, output: weak().kept.update(conv2=weak().norm(output)))
        elif how == "method":
            normed = self.norm.forward
            self.conv2.register_forward_hook(lambda module, args, output: self.kept.update(conv2=normed(output)))

    def forward(self, x):
        y = self.conv2(F.relu(self.conv1(x)))
        if self.how in ("list", "partial"):
            (self.step if self.how == "partial" else self.steps[0])(y)
        return self.head(F.relu(self.kept.pop("conv2")).mean((2, 3)))


@pytest.mark.parametrize("how", ["hook", "default", "weak", "method", "list", "partial"])
@pytest.mark.parametrize("layout", ["aligned", "scatter", "auto"])
@torch.no_grad()
def test_functions_that_refer_to_the_model_refer_to_the_small_one(how, layout, tmp_path):
    x = image()
    model = Watched(how).double().eval()
    close_(model.conv1, [1, 2], 0.7)
    close_(model.conv2, [3, 4])
    model.norm.bias[3:5] = -1.0
    plan = ng.plan(model, x, layout=layout)
    assert not model.kept
    assert kept(plan, "norm.bias") == [0, 1, 2, 5, 6, 7]
    ng.save(ng.compact(model, plan), plan, tmp_path / "small")
    small = ng.load(tmp_path / "small", lambda: Watched(how).double().eval())
    for _ in range(2):
        assert torch.allclose(small(x), model(x), rtol=0, atol=1e-12)
    ng.verify(model, small, x)
    ng.verify(model.half(), small.half(), x.half())


def test_a_hook_that_reaches_another_layer_while_layers_are_timed():
    """A layer alone has the width that it was planned with, the other one still the model's."""
    parts = {"conv1": nn.Conv2d(3, 8, 3), "conv2": nn.Conv2d(8, 8, 3), "other": nn.Conv2d(8, 8, 3)}
    model = Net(lambda net, x: net.conv2(F.relu(net.conv1(x))), **parts).double().eval()
    model.conv2.register_forward_hook(lambda module, args, output: output + model.other(args[0]))
    close_(model.conv2, [1, 2])
    with torch.no_grad():
        model.conv2.weight[:, 3:5] = 0
        model.other.weight[:, 4:6] = 0
    shrink(model, image(), layout="auto")


def in_a_loop(net, x):
    y = F.relu(net.conv1(x))
    factor = 1 / y.shape[1] if net.by_width else 0.25
    start = torch.zeros((), dtype=torch.int64)
    _, z = while_loop(lambda n, z: n < 3, lambda n, z: (n + 1, F.relu(net.other(z)) * factor + z), (start, x))
    return net.conv2(y) + z[:, :, 2:, 2:].sum(1, keepdim=True)


def to_each_score(net, x):
    y = F.relu(net.conv1(x))
    factor = 1 / y.shape[1] if net.by_width else 0.25
    tokens = net.other(x).flatten(2).mT[:, None]
    z = flex_attention(tokens, tokens, tokens, score_mod=lambda score, *places: score * factor)
    return net.conv2(y) + z.mean((1, 2, 3))[:, None, None, None]


@pytest.mark.parametrize("by_width", [True, False])
@pytest.mark.parametrize("body", [in_a_loop, to_each_score])
def test_what_happens_out_of_sight_depends_on_the_number_of_channels(body, by_width):
    parts = {"conv1": nn.Conv2d(3, 6, 3), "conv2": nn.Conv2d(6, 4, 1), "other": nn.Conv2d(3, 3, 1)}
    model = Net(body, **parts).double().eval()
    model.by_width = by_width
    close_(model.conv1, [1, 2], 0.7)
    x = image(size=4)
    for layout in ("aligned", "scatter"):
        plan = ng.plan(model, x, layout=layout)
        assert kept(plan, "conv1.weight") == (None if by_width and layout == "aligned" else [0, 3, 4, 5])
        assert_same_function(model, ng.compact(model, plan), x)
