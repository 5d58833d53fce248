"""Norms, activations, pooling, padding and resizing between two convolutions: exact, and narrower where that can be."""

import pytest
import torch
from flow_helpers import Net, close_, image, kept, settle_, shrink, shrink_all
from torch import nn
from torch.nn import functional as F

import narrowgate as ng

# Channels of conv1: 1 and 2 are zero, 3 and 4 constant, 0 and 5 alive.
ALIVE = [0, 5]


def between(middle, conv2=None, width=6, **parts):
    """conv1 -> middle -> conv2 for 3 x 8 x 8, where ``middle`` is a module or a function of the net and a tensor."""
    if isinstance(middle, nn.Module):
        parts["middle"] = middle

    def body(net, x):
        x = net.conv1(x)
        return net.conv2(net.middle(x) if isinstance(middle, nn.Module) else middle(net, x))

    model = Net(body, conv1=nn.Conv2d(3, 6, 3, padding=1), conv2=conv2 or nn.Conv2d(width, 4, 1), **parts)
    settle_(model, image())
    close_(model.conv1, [1, 2])
    close_(model.conv1, [3], 0.8)
    close_(model.conv1, [4], -0.6)
    return model


ACTIVATIONS = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.1), nn.ELU(), nn.SELU(inplace=True), nn.CELU(0.5)),
    *(nn.GELU(), nn.GELU("tanh"), nn.SiLU(inplace=True), nn.Mish(), nn.Hardswish(), nn.Hardsigmoid(), nn.Hardtanh()),
    *(nn.Sigmoid(), nn.Tanh(), nn.Softplus(), nn.Softsign(), nn.LogSigmoid(), nn.Tanhshrink(), nn.Hardshrink(0.1)),
    *(nn.Softshrink(0.1), nn.Threshold(0.1, 0.4), nn.PReLU(), nn.PReLU(6), nn.Identity()),
    *(nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout()),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activation_folds_its_constant(activation):
    plan, _ = shrink(between(activation, nn.Conv2d(6, 4, 3)), image())
    assert kept(plan, "conv1.weight") == ALIVE
    assert not plan.walls


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.Sigmoid(), nn.PReLU(6)], ids=str)
def test_activation_before_a_zero_border(activation):
    plan, _ = shrink_all(between(activation, nn.Conv2d(6, 4, 3, padding=1)), image(), also=[image(size=11)])
    assert len(kept(plan, "conv1.weight")) == 3


POINTWISE = {
    "add": lambda net, x: x + 1.5,
    "rsub": lambda net, x: 1.0 - x,
    "mul": lambda net, x: 0.3 * x,
    "div": lambda net, x: x / 2,
    "reciprocal": lambda net, x: 1 / (2 + x * x),
    "power": lambda net, x: x**3,
    "clamp": lambda net, x: x.clamp(-0.2, 0.5),
    "where": lambda net, x: torch.where(x > 0.1, x, 0.2),
    "masked_fill": lambda net, x: x.masked_fill(x > 0.7, 3.0),
    "comparison": lambda net, x: (x > 0.1).double() + x,
    "maximum": lambda net, x: torch.maximum(x, 0.5 * x),
    "exp": lambda net, x: torch.exp(-x.abs()),
    "sign": lambda net, x: x.sign() * x.abs().sqrt(),
    "round": lambda net, x: x.round() + x,
    "lerp": lambda net, x: torch.lerp(x, x * 2, 0.3),
    "addcmul": lambda net, x: torch.addcmul(x, x, x, value=0.2),
    "detach": lambda net, x: x + x.detach().clone(),
    "cast": lambda net, x: x.float().double(),
    "channels_last": lambda net, x: x.contiguous(memory_format=torch.channels_last),
    "channels_last_cast": lambda net, x: x.to(torch.float32, memory_format=torch.channels_last).double(),
    "fmod": lambda net, x: x.fmod(0.5) + torch.asinh(x),
    "logaddexp": lambda net, x: torch.logaddexp(x, 0.5 * x),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name):
    plan, _ = shrink_all(between(POINTWISE[name], nn.Conv2d(6, 4, 3, padding=1)), image())
    assert len(kept(plan, "conv1.weight")) <= 3


SPACE = {
    "max_pool": nn.MaxPool2d(3, 2, padding=1),
    "max_pool_ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
    "avg_pool": nn.AvgPool2d(2),
    "avg_pool_excluding_pad": nn.AvgPool2d(3, 1, padding=1, count_include_pad=False),
    "adaptive_avg": nn.AdaptiveAvgPool2d(3),
    "adaptive_avg_one": nn.AdaptiveAvgPool2d(1),
    "adaptive_max": nn.AdaptiveMaxPool2d((3, 2)),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bilinear_corners": nn.Upsample(size=(13, 9), mode="bilinear", align_corners=True),
    "bicubic": nn.Upsample(scale_factor=1.5, mode="bicubic"),
    "nearest_exact": nn.Upsample(scale_factor=1.5, mode="nearest-exact"),
    "bilinear_antialiased": lambda net, x: F.interpolate(x, (5, 5), mode="bilinear", antialias=True),
    "mean": lambda net, x: x.mean((2, 3), keepdim=True),
    "mean_one_axis": lambda net, x: x.mean(-1, keepdim=True),
    "amax": lambda net, x: x.amax((2, 3), keepdim=True),
    "max": lambda net, x: x.max(2, keepdim=True).values,
    "min_one_axis_gone": lambda net, x: x.min(-1).values.unsqueeze(3),
    "max_of_two": lambda net, x: torch.max(x, x.flip(2)),
    "mean_of_var_mean": lambda net, x: torch.var_mean(x, (2, 3), keepdim=True)[1],
    "stacked": lambda net, x: torch.stack([x, x.flip(2)], 1).amax(1),
    "stacked_last": lambda net, x: torch.stack([x, x.flip(2)], -1).mean(-1),
    "reflect": lambda net, x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "replicate": lambda net, x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "circular": lambda net, x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "flip_space": lambda net, x: x.flip(-1),
    "roll_space": lambda net, x: x.roll(1, 2),
    "slice_space": lambda net, x: x[:, :, ::2, 1:-1],
}


@pytest.mark.parametrize("name", SPACE)
def test_constants_pass_where_no_border_comes_in(name):
    plan, _ = shrink_all(between(SPACE[name], nn.Conv2d(6, 4, 1)), image(), also=[image(size=12)])
    assert kept(plan, "conv1.weight") == ALIVE
    assert not plan.walls


BORDERS = {
    "avg_pool_padded": nn.AvgPool2d(3, 1, padding=1),
    "avg_pool_ceil": nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    "avg_pool_divisor": nn.AvgPool2d(3, 2, divisor_override=2),
    "zero_pad": nn.ZeroPad2d(1),
    "constant_pad": nn.ConstantPad2d(1, 0.8),
    "pad_one_side": lambda net, x: F.pad(x, (0, 1)),
    "pad_to_even": lambda net, x: F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2)),
    "crop": lambda net, x: F.pad(x, (-1, -1)),
    "sum": lambda net, x: x.sum((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", BORDERS)
def test_constants_that_a_border_or_a_size_changes(name):
    """A constant is no longer one: it stays unless it is zero, but the zeros go."""
    plan, _ = shrink_all(between(BORDERS[name], nn.Conv2d(6, 4, 1)), image(), also=[image(size=12), image(size=7)])
    assert set(ALIVE) <= set(kept(plan, "conv1.weight"))


def test_places_that_another_tensor_tells():
    """grid_sample: channels pass each by itself, but a constant ends where the image does; places are all read."""

    def middle(net, x):
        places = net.places(x).movedim(1, -1) * 2
        fixed = net.grid.expand(len(x), -1, -1, -1)
        return F.grid_sample(x, places, align_corners=False) + F.grid_sample(x, fixed, align_corners=True)

    grid = torch.rand(1, 8, 8, 2, dtype=torch.float64) * 3 - 1.5
    model = between(middle, places=nn.Conv2d(6, 2, 1), grid=nn.Buffer(grid))
    close_(model.places, [1])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [0, 3, 4, 5] and kept(plan, "places.weight") is None


def test_constant_pad_of_the_same_value_keeps_the_constant():
    plan, _ = shrink(between(nn.ConstantPad2d(1, 0.8)), image())
    assert 3 not in kept(plan, "conv1.weight") and 4 in kept(plan, "conv1.weight")


VARYING = {
    "var": lambda net, x: x.var((2, 3), keepdim=True),
    "var_mean": lambda net, x: sum(torch.var_mean(x, (2, 3), keepdim=True)),
    "std_mean": lambda net, x: sum(torch.std_mean(x, 2, keepdim=True)),
    "max_and_where": lambda net, x: sum(x.max(2, keepdim=True)),
    "max_of_two": lambda net, x: torch.max(x, x.mean((1, 2, 3), keepdim=True)),
    "stacked_unlike": lambda net, x: torch.stack([x, F.relu(x) + 1, x.sigmoid()]).amax(0),
    "stacked_with_fixed_width": lambda net, x: torch.stack([x, torch.ones(6, *x.shape[2:]).expand_as(x)], 1).sum(1),
    "rms_norm_over_space": lambda net, x: F.rms_norm(x, x.shape[2:]),
    "softmax_over_space": lambda net, x: x.flatten(2).softmax(-1).view_as(x),
    "cumsum_over_space": lambda net, x: x.cumsum(-1),
    "norm_over_space": lambda net, x: x / (1 + x.norm(dim=(2, 3), keepdim=True)),
    "logsumexp_over_space": lambda net, x: x.logsumexp((2, 3), keepdim=True),
    "rrelu": nn.RReLU(),
}


@pytest.mark.parametrize("name", VARYING)
def test_constants_that_count_as_varying(name):
    shrink_all(between(VARYING[name], nn.Conv2d(6, 4, 1)), image(), removes=None, also=[image(size=12)])


NORMS = {
    "layer_norm": lambda net, x: net.norm(x.movedim(1, -1)).movedim(-1, 1),
    "layer_norm_over_everything": lambda net, x: F.layer_norm(x, x.shape[1:]),
    "group_norm": lambda net, x: net.norm(x),
    "rms_norm": lambda net, x: net.norm(x.movedim(1, -1)).movedim(-1, 1),
    "rms_norm_over_everything": lambda net, x: F.rms_norm(x, x.shape[1:]),
    "normalize_that_counts": lambda net, x: F.normalize(x, p=0.0, dim=1),
    "repeated_as_often_as_it_is_wide": lambda net, x: x * x.sum(1, keepdim=True).expand_as(x).mean(1, keepdim=True),
    "distance": lambda net, x: x * F.pairwise_distance(x.movedim(1, -1), x.relu().movedim(1, -1))[:, None],
    "softmax_over_channels": lambda net, x: x.softmax(1),
    "local_response": lambda net, x: F.local_response_norm(x, 3),
    "pad_channels": lambda net, x: F.pad(x, (0, 0, 0, 0, 1, 1))[:, 1:-1],
    "mean_over_channels": lambda net, x: x - x.mean(1, keepdim=True),
    "var_over_channels": lambda net, x: x * x.var(1, keepdim=True),
    "where_the_maximum_is": lambda net, x: x * x.max(1, keepdim=True).indices,
    "norm_that_counts": lambda net, x: x * torch.linalg.vector_norm(x, 0, 1, keepdim=True),
    "cumsum_over_channels": lambda net, x: x.cumsum(1),
    "channel_shuffle_op": lambda net, x: F.channel_shuffle(x, 2) + x,
    "roll_channels": lambda net, x: x.roll(1, 1),
    "stacked_along_different_axes": lambda net, x: torch.stack([x[:, :, :6], x[:, :, :6].transpose(1, 2)], 1).sum(1),
    "index": lambda net, x: x[:, [5, 4, 3, 2, 1, 0]],
    "index_select": lambda net, x: x.index_select(1, torch.tensor([0, 2, 2, 3, 5, 1])),
    "gather": lambda net, x: x.gather(1, torch.zeros_like(x, dtype=torch.int64) + 5) + x,
    "unfold": lambda net, x: F.fold(F.unfold(x, 2, stride=2), x.shape[2:], 2, stride=2),
    "matmul": lambda net, x: torch.einsum("bchw,cd->bdhw", x, net.matrix),
    "einsum_of_three": lambda net, x: torch.einsum("bchw,cd,de->behw", x, net.matrix, net.matrix),
    "einsum_over_channels_and_places": lambda net, x: x * torch.einsum("bchw,bchw->b", x, x)[:, None, None, None],
    "einsum_of_channels_with_channels": lambda net, x: x * torch.einsum("bchw,bdhw->bcd", x, x).sum(2)[..., None, None],
}


@pytest.mark.parametrize("name", NORMS)
def test_walls_stay_whole_and_exact(name):
    """Operations across channels: nothing is cut there, and the plan says so."""
    norm = {"group_norm": nn.GroupNorm(2, 6), "rms_norm": nn.RMSNorm(6)}.get(name, nn.LayerNorm(6))
    model = between(NORMS[name], norm=norm, matrix=nn.Parameter(torch.randn(6, 6)))
    for vector in model.norm.parameters():
        nn.init.normal_(vector)
    plan, _ = shrink_all(model, image(), removes=None)
    assert kept(plan, "conv1.weight") is None
    assert plan.walls


# What is left of conv1's channels: with the largest constant for a maximum, with all that are not zero for a sum.
OVER_CHANNELS = {
    "max": (lambda net, x: x.max(1, keepdim=True).values, [0, 3, 5]),
    "min": (lambda net, x: x.min(1)[0].unsqueeze(1), [0, 4, 5]),
    "amax": (lambda net, x: x.amax(1, keepdim=True), [0, 3, 5]),
    "amin": (lambda net, x: x.amin((1, 2), keepdim=True), [0, 4, 5]),
    "max_of_all": (lambda net, x: x.max() - x.amax(1, keepdim=True), [0, 3, 5]),
    "sum": (lambda net, x: x.sum(1, keepdim=True), [0, 3, 4, 5]),
    "sum_without_constants": (lambda net, x: (x - 0.8).relu().sum((1, 3), keepdim=True), ALIVE),
    "norm": (lambda net, x: x.relu().norm(dim=1, keepdim=True), [0, 3, 5]),
    "largest": (lambda net, x: torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True), [0, 3, 4, 5]),
}


@pytest.mark.parametrize("name", OVER_CHANNELS)
def test_a_maximum_or_sum_over_channels_needs_few_constants(name):
    middle, left = OVER_CHANNELS[name]
    model = between(middle, nn.Conv2d(1, 4, 1))
    plan, _ = shrink_all(model, image(), also=[image(size=12)])
    assert kept(plan, "conv1.weight") == left


NORMALISED = {
    "normalize": lambda net, x: F.normalize(x, dim=1),
    "of_order_one": lambda net, x: F.normalize(x, 1.0, dim=-3, eps=1e-3),
    "largest": lambda net, x: F.normalize(x, torch.inf),
    "by_hand": lambda net, x: x / x.norm(dim=1, keepdim=True).clamp(min=1e-6),
    "features": lambda net, x: F.normalize(x.mean((2, 3)), dim=1)[..., None, None],
}


@pytest.mark.parametrize("name", NORMALISED)
def test_zeros_go_through_a_division_by_the_length(name):
    """Zeros are no part of the length, and zero divided by what has a floor is zero; other constants stay."""
    plan, _ = shrink_all(between(NORMALISED[name]), image(), also=[image(size=12), torch.zeros_like(image())])
    assert kept(plan, "conv1.weight") == [0, 3, 4, 5] and not plan.walls


NO_FLOOR = {
    "no_floor": lambda net, x: x / x.norm(dim=1, keepdim=True),
    "floor_of_zero": lambda net, x: x / x.norm(dim=1, keepdim=True).clamp_min(0.0),
    "ceiling": lambda net, x: x / x.norm(dim=1, keepdim=True).clamp(1e-6, 1.0),
    "floor_moved": lambda net, x: x / x.norm(dim=1, keepdim=True).clamp_min(1e-6).sub_(1.0),
    "turned_round": lambda net, x: 1 / x.norm(dim=1, keepdim=True).clamp_min(1e-6) / (x + 2),
}


@pytest.mark.parametrize("name", NO_FLOOR)
def test_zero_divided_by_what_may_be_zero_varies(name):
    plan, _ = shrink_all(between(NO_FLOOR[name]), image(), removes=None)
    assert kept(plan, "conv1.weight") is None


# What is left of conv1's channels; what is zero in one of the two only is part of the other's length.
COSINES = {
    "with_itself_behind_an_activation": (lambda net, x: F.cosine_similarity(x, x.sigmoid() * x), [0, 3, 4, 5]),
    "with_zeros_elsewhere": (lambda net, x: F.cosine_similarity(x.relu(), x), [0, 3, 4, 5]),
    "with_no_zeros": (lambda net, x: F.cosine_similarity(x, x + 1), None),
    "with_parameters": (lambda net, x: F.cosine_similarity(x, net.first[:, None, None]), [0, 2, 3, 4, 5]),
    "with_a_number": (lambda net, x: F.cosine_similarity(x, x.sum(1, keepdim=True)), None),
    "along_another_axis": (lambda net, x: F.cosine_similarity(x, x.relu(), dim=2).mean(1, keepdim=True), None),
}


@pytest.mark.parametrize("name", COSINES)
def test_cosine_similarity_over_channels(name):
    middle, left = COSINES[name]
    first = nn.Parameter(torch.tensor([1.0, 0, 2, 3, 4, 5]))
    model = between(lambda net, x: middle(net, x).reshape(len(x), 1, -1, 8), nn.Conv2d(1, 4, 1), first=first)
    plan, _ = shrink_all(model, image(), removes=None)
    assert kept(plan, "conv1.weight") == left
    assert kept(plan, "first") == (left if name == "with_parameters" else None)


def test_a_classifier_by_cosine():
    """Classes as directions: a feature that is zero goes where every class is zero there, too."""

    def body(net, x):
        return F.cosine_similarity(net.conv1(x).amax((2, 3))[:, None], net.classes, dim=-1) * 8

    model = settle_(Net(body, conv1=nn.Conv2d(3, 6, 3), classes=nn.Parameter(torch.randn(5, 6))), image())
    close_(model.conv1, [1, 2, 4])
    with torch.no_grad():
        model.classes[:, [0, 1, 4]] = 0
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == kept(plan, "classes", 1) == [0, 2, 3, 5]
    assert [wall.op for wall in ng.plan(model, image(), training=True).walls] == ["cosine_similarity"]


def test_a_mean_over_channels_says_why_and_one_by_hand_is_no_wall():
    """The number by which a mean divides is its input's width; a number in the code stays what it is."""
    walls = [ng.plan(between(NORMS[f"{name}_over_channels"]), image()).walls for name in ("mean", "var")]
    assert {wall.why for found in walls for wall in found} == {"it divides by the number of channels"}
    plan, _ = shrink_all(between(lambda net, x: x * (x.sum(1, keepdim=True) / 6)), image())
    assert kept(plan, "conv1.weight") == [0, 3, 4, 5] and not plan.walls


def test_a_maximum_over_channels_is_a_wall_while_training():
    """A constant that is not the largest may become it."""
    model = between(OVER_CHANNELS["amax"][0], nn.Conv2d(1, 4, 1))
    gates = ng.attach_gates_(model)
    gates["conv1"].close_(torch.tensor([False, True, True, False, False, False]))
    assert kept(ng.plan(model, image()), "conv1.weight") == [0, 3, 5]
    plan = ng.plan(model, image(), training=True)
    assert kept(plan, "conv1.weight") is None and plan.walls


def test_attention_over_places():
    """CBAM: the mean counts every channel, and the maximum alone would not."""

    def body(net, x, over=("mean", "amax")):
        x = net.conv1(x).relu()
        mask = torch.cat([getattr(x, name)(1, keepdim=True) for name in over], 1)
        return net.conv2(x * net.mask(mask).sigmoid())

    both = Net(body, conv1=nn.Conv2d(3, 6, 3), mask=nn.Conv2d(2, 1, 7, padding=3), conv2=nn.Conv2d(6, 4, 3))
    largest = Net(lambda net, x: body(net, x, ("sum", "amax")), **dict(both.named_children()))
    close_(settle_(both, image()).conv1, [1, 2])
    plan, _ = shrink_all(both, image(), aligned_removes=False)
    assert [wall.op for wall in plan.walls] == ["mean"]
    plan, _ = shrink_all(largest, image())
    assert kept(plan, "conv1.weight") == [0, 1, 3, 4, 5] and not plan.walls


@pytest.mark.parametrize("norm", ["layer_norm", "group_norm", "rms_norm"])
def test_zero_scales_of_a_norm_across_channels_stop_their_channels(norm):
    norms = {"group_norm": nn.GroupNorm(3, 6), "layer_norm": nn.LayerNorm(6), "rms_norm": nn.RMSNorm(6)}
    model = between(NORMS[norm], norm=norms[norm])
    with torch.no_grad():
        model.norm.weight.copy_(torch.tensor([1.0, 0, 2, 0, 3, 4]))
        if norm != "rms_norm":
            model.norm.bias.copy_(torch.tensor([1.0, 0, 2, -1, 0, 4]))
    shrink_all(model, image(), removes=True, aligned_removes=False)


COMPUTED = {
    "layer_norm": lambda net, x: F.layer_norm(x.movedim(1, -1), (6,), net.scale, net.shift + 1).movedim(-1, 1),
    "layer_norm_beside_channels": lambda net, x: F.layer_norm(x[..., :6], (6,), 1 + net.scale, net.shift * 2),
    "rms_norm": lambda net, x: F.rms_norm(x.movedim(1, -1), (6,), 1 + net.scale).movedim(-1, 1),
    "group_norm": lambda net, x: F.group_norm(x, 3, net.scale, net.shift + 1),
    "instance_norm": lambda net, x: F.instance_norm(x, weight=net.scale, bias=net.shift + 1),
    "batch_norm": lambda net, x: F.batch_norm(x, None, None, net.scale, net.shift + 1, training=True),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_norm_whose_scale_or_shift_is_computed(name):
    """Where its scale is 0 the norm gives its shift, which is none of the numbers at hand."""
    scale, shift = nn.Parameter(torch.tensor([1.0, 0, 2, 0, 3, 4])), nn.Parameter(torch.randn(6))
    shrink_all(between(COMPUTED[name], scale=scale, shift=shift), image(), removes=None)


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm(affine):
    plan, _ = shrink_all(between(nn.InstanceNorm2d(6, affine=affine), nn.Conv2d(6, 4, 3)), image())
    assert kept(plan, "conv1.weight") == ALIVE


def test_instance_norm_as_a_function():
    plan, _ = shrink_all(between(lambda net, x: F.instance_norm(x), nn.Conv2d(6, 4, 3)), image())
    assert kept(plan, "conv1.weight") == ALIVE


def test_instance_norm_with_statistics_of_its_own():
    shrink_all(between(nn.InstanceNorm2d(6, track_running_stats=True)), image(), removes=None)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_batch_norm(options):
    plan, small = shrink_all(between(nn.BatchNorm2d(6, **options), nn.Conv2d(6, 4, 3)), image())
    assert kept(plan, "conv1.weight") == ALIVE and small.middle.num_features == 2


def test_batch_norm_with_zero_scales():
    model = between(nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3))
    with torch.no_grad():
        model.middle.weight[5] = 0
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [0]


def test_batch_norm_on_the_input_and_between_padded_layers():
    first, second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
    model = nn.Sequential(nn.BatchNorm2d(3), first, nn.BatchNorm2d(6), second)
    settle_(model, image())
    close_(model[1], [0, 1, 2, 3])
    plan, _ = shrink_all(model, image(), also=[image(size=11)])
    assert len(kept(plan, "1.weight")) == 3


def test_max_pool_with_indices():
    def middle(net, x):
        values, where = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, where, 2) + x

    shrink_all(between(middle), image(), removes=None)


def test_a_linear_function_with_a_vector():
    """F.linear takes one weight a channel, and gives a result without that axis."""
    vector = nn.Parameter(torch.randn(8, dtype=torch.float64))
    model = Net(lambda net, x: F.linear(F.relu(net.second(F.relu(net.first(x)))), net.vector), vector=vector)
    model.first, model.second = nn.Linear(4, 6).double(), nn.Linear(6, 8).double()
    close_(model.first, [1, 2])
    close_(model.second, [3])
    plan, _ = shrink_all(model.eval(), torch.randn(5, 4, dtype=torch.float64))
    assert [(wall.op, wall.why) for wall in plan.walls] == [("linear", "its weight is a vector")]


@pytest.mark.parametrize("shape", [(), (1,), (1, 8)])
def test_a_linear_function_that_adds_no_bias(shape):
    """F.linear adds whatever can be expanded to its result."""
    parts = {"weight": nn.Parameter(torch.randn(8, 6)), "added": nn.Parameter(torch.randn(shape))}
    model = Net(lambda net, x: net.last(F.linear(F.relu(net.first(x)), net.weight, net.added)), **parts)
    model.first, model.last = nn.Linear(4, 6), nn.Linear(8, 3)
    close_(model.first, [1, 2])
    plan, _ = shrink_all(model.double().eval(), torch.randn(5, 4, dtype=torch.float64), removes=None)
    assert [(wall.op, wall.why) for wall in plan.walls] == [("linear", "what it adds is no bias")]


def test_prelu_with_one_number():
    slope = nn.Parameter(torch.tensor(-0.25, dtype=torch.float64))
    model = Net(lambda net, x: net.last(F.prelu(net.first(F.prelu(x, net.slope)), net.slope)), slope=slope)
    model.first, model.last = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
    close_(model.first, [1, 2])
    close_(model.first, [3], -0.5)
    shrink_all(model.eval(), torch.randn(5, 4, dtype=torch.float64))


def test_a_linear_layer_without_inputs():
    """Some of what a network may read is switched off, and a layer for nothing adds its bias alone."""
    model = Net(lambda net, x: net.last(F.relu(net.first(x) + net.other(x[:, :0]))))
    model.first, model.other, model.last = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
    model.other.weight = nn.Parameter(torch.empty(6, 0))
    close_(model.first, [1, 2])
    plan, _ = shrink_all(model.double().eval(), torch.randn(5, 4, dtype=torch.float64), removes=None)
    assert ("linear", "its weight has no numbers") in [(wall.op, wall.why) for wall in plan.walls]
