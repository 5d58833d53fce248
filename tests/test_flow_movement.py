"""Views, permutations, concatenation, splits and shuffles of channels."""

import logging

import pytest
import torch
from flow_helpers import Net, close_, close_at_random_, image, kept, prepare_, settle_, shrink, shrink_all
from torch import nn
from torch.nn import functional as F

import narrowgate as ng


def two_layers(middle, last, width=6, **parts):
    """conv1 -> middle -> last; channels 1 and 2 of conv1 are zero, 3 is constant, the others alive."""
    model = Net(lambda net, x: net.last(middle(net, net.conv1(x))), conv1=nn.Conv2d(3, width, 3), last=last, **parts)
    settle_(model, image())
    close_(model.conv1, [1, 2])
    close_(model.conv1, [3], 0.8)
    return model


FLATTENS = {
    "flatten": lambda net, x: x.flatten(1),
    "view_batch": lambda net, x: x.view(x.size(0), -1),
    "reshape": lambda net, x: x.reshape(len(x), -1),
    "unsqueezed": lambda net, x: x.unsqueeze(1).flatten(1),
    "permuted": lambda net, x: x.permute(0, 2, 3, 1).flatten(1),
    "transposed": lambda net, x: x.transpose(1, 3).contiguous().flatten(1),
    "there_and_back": lambda net, x: F.relu(x.flatten(2)).reshape_as(x).flatten(1),
    "in_two_steps": lambda net, x: x.flatten(2).flatten(1),
    "einops_like": lambda net, x: x.view(len(x), x.shape[1], 3, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).reshape(len(x), -1),
}


@pytest.mark.parametrize("name", FLATTENS)
def test_flatten_before_linear(name):
    plan, small = shrink_all(two_layers(FLATTENS[name], nn.Linear(6 * 36, 4)), image())
    assert kept(plan, "conv1.weight") == [0, 4, 5]
    assert small.last.in_features == 3 * 36


HARD_CODED = {
    "all": lambda net, x: x.view(-1, 216),
    "batch_and_all": lambda net, x: x.view(x.size(0), 216),
    "channels": lambda net, x: x.view(x.size(0), 6, 36).flatten(1),
    "unflatten": lambda net, x: x.flatten(1).unflatten(1, (6, 6, 6)).flatten(1),
    "expand": lambda net, x: (x + x.mean((2, 3), keepdim=True).expand(x.size(0), 6, 6, 6)).flatten(1),
    "zeros": lambda net, x: (x + torch.zeros(6, 1, 1, dtype=x.dtype)).flatten(1),
    "batch": lambda net, x: x.permute(1, 0, 2, 3).reshape(6, -1, 36).permute(1, 0, 2).flatten(1),
}


@pytest.mark.parametrize("name", HARD_CODED)
def test_hard_coded_sizes_are_held(name, caplog):
    """The layer before stays at full width; without the check two samples would be merged into one. Quietly."""
    model = two_layers(HARD_CODED[name], nn.Linear(216, 4))
    plan, _ = shrink(model, image(), removes=None)
    assert kept(plan, "conv1.weight") is None
    shrink(model, image(batch=1).expand(2, -1, -1, -1).clone().normal_(), layout="scatter", removes=None)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_hard_coded_size_in_one_place_leaves_the_rest_free():
    def body(net, x):
        x = F.relu(net.conv2(F.relu(net.conv1(x))))
        return net.last(x.view(-1, 64))

    model = Net(body, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 4, 3), last=nn.Linear(64, 3))
    settle_(model, image())
    close_(model.conv1, [0, 1])
    close_(model.conv2, [0, 1])
    plan, small = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [2, 3, 4, 5] and small.conv2.out_channels == 4


def test_channels_last_linear():
    def body(net, x):
        x = net.conv1(x).permute(0, 2, 3, 1)
        x = net.linear2(F.gelu(net.linear1(x)))
        return net.conv2(x.permute(0, 3, 1, 2))

    parts = {"linear1": nn.Linear(6, 8), "linear2": nn.Linear(8, 5)}
    model = Net(body, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(5, 4, 3), **parts)
    settle_(model, image())
    close_(model.conv1, [0, 1])
    close_(model.linear1, [2, 3, 4])
    close_(model.linear1, [5], 0.9)
    close_(model.linear2, [0], 0.4)
    plan, _ = shrink_all(model, image(), also=[image(size=11)])
    assert kept(plan, "conv1.weight") == [2, 3, 4, 5]
    assert kept(plan, "linear1.weight") == [0, 1, 6, 7]
    assert kept(plan, "linear2.weight") == [1, 2, 3, 4]


def test_linear_along_another_axis():
    model = two_layers(lambda net, x: net.token(x), nn.Conv2d(6, 4, 1), token=nn.Linear(6, 5))
    shrink_all(model, image(), removes=None)


def shuffle(x, groups):
    batch, channels, *sizes = x.shape
    return x.view(batch, groups, channels // groups, *sizes).transpose(1, 2).reshape(batch, channels, *sizes)


def test_channel_shuffle_couples_the_groups():
    """Channels 0 and 3, 1 and 4, 2 and 5 become neighbours: a pair goes when both are dead."""
    model = two_layers(lambda net, x: shuffle(x, 2), nn.Conv2d(6, 4, 3))
    close_(model.conv1, [4])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [0, 2, 3, 5]


@pytest.mark.parametrize("groups", [2, 3])
def test_shuffle_net_unit(groups):
    def body(net, x):
        x = net.stem(x)
        first, second = x.chunk(2, 1)
        second = F.relu(net.c(net.dw(F.relu(net.a(second)))))
        return net.head(shuffle(torch.cat([first, second], 1), groups).mean((2, 3)))

    model = Net(
        body,
        stem=nn.Conv2d(3, 12, 3),
        a=nn.Conv2d(6, 6, 1),
        dw=nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
        c=nn.Conv2d(6, 6, 1),
        head=nn.Linear(12, 3),
    )
    shrink_all(prepare_(model, image(), keep=["head"]), image())


def test_splitting_by_a_hard_coded_inner_size():
    """``view(B, -1, 2)`` pairs neighbours: without the odd channels it would pair others."""
    model = two_layers(lambda net, x: x.view(x.size(0), -1, 2, 6, 6).sum(2), nn.Conv2d(3, 4, 1))
    close_(model.conv1, [0, 2, 4])
    shrink_all(model, image(), removes=None)


def test_groups_summed_by_hand():
    model = two_layers(lambda net, x: x.view(x.size(0), 2, -1, 6, 6).sum(1), nn.Conv2d(3, 4, 1))
    close_(model.conv1, [4])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [0, 2, 3, 5]


SPLITS = {
    "chunk": lambda net, x: torch.cat([part * i for i, part in enumerate(x.chunk(3, 1))], 1),
    "split": lambda net, x: torch.cat([*x.split(4, 1)][::-1], 1),
    "split_sizes": lambda net, x: torch.cat([*x.split([1, 3, 2], 1)][::-1], 1),
    "unbind": lambda net, x: torch.stack([*x.unbind(1)][::-1], 1),
    "select": lambda net, x: x * x[:, 4:5] + x[:, 3, None],
    "slice": lambda net, x: torch.cat([x[:, 3:], x[:, :3]], 1),
    "strided": lambda net, x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "negative": lambda net, x: torch.cat([x[:, -2:], x[:, :-2]], 1),
    "narrow": lambda net, x: torch.cat([x.narrow(1, 2, 4), x.narrow(1, 0, 2)], 1),
    "flip": lambda net, x: x.flip(1) + x,
    "stack": lambda net, x: torch.stack([x, 2 * x], 2).flatten(1, 2)[:, ::2],
    "split_batch": lambda net, x: torch.cat([*x.split(2, 0)], 0),
    "unbind_space": lambda net, x: torch.stack([*x.unbind(2)], 2),
    "select_space": lambda net, x: x[:, :, 1][:, :, None],
    "drop_some": lambda net, x: torch.cat([x[:, :2], x[:, :2], x[:, :2]], 1),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_are_exact(name):
    """On the channel axis they are walls in the aligned layout; along other axes they are free."""
    plan, _ = shrink_all(two_layers(SPLITS[name], nn.Conv2d(6, 4, 1)), image(), removes=None)
    if name in ("split_batch", "select_space", "unbind_space"):
        assert kept(plan, "conv1.weight") == [0, 4, 5] and not plan.walls
    else:
        assert plan.walls


@pytest.mark.parametrize("last", [nn.Conv2d(24, 4, 1), nn.Conv2d(24, 4, 3, padding=1)], ids=["plain", "padded"])
def test_pixel_unshuffle(last):
    plan, _ = shrink_all(two_layers(lambda net, x: F.pixel_unshuffle(x, 2), last), image())
    assert set(kept(plan, "conv1.weight")) <= {0, 3, 4, 5}


def test_pixel_shuffle_needs_all_four():
    model = two_layers(lambda net, x: F.pixel_shuffle(x, 2), nn.Conv2d(3, 4, 1), width=12)
    close_(model.conv1, [4, 5, 6, 7])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [0, 1, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("shuffle", [lambda net, x: F.channel_shuffle(x, 3), lambda net, x: net.shuffle(x)])
def test_shuffled_channels_go_from_all_groups_alike(shuffle):
    model = two_layers(shuffle, nn.Conv2d(12, 4, 1), width=12, shuffle=nn.ChannelShuffle(3))
    close_(model.conv1, [1, 5, 9, 2, 6])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [0, 2, 3, 4, 6, 7, 8, 10, 11] and not plan.walls
    assert kept(plan, "last.weight", 1) == [0, 1, 2, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("dim", [1, 2])
def test_concatenation(dim):
    def body(net, x):
        return net.last(torch.cat([net.conv1(x), F.relu(net.conv2(x)), net.conv1(x) * 0.5], dim))

    model = Net(body, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(3, 6, 3), last=nn.Conv2d(18 if dim == 1 else 6, 4, 3))
    settle_(model, image())
    close_(model.conv1, [0, 1, 2], 0.5 if dim == 1 else None)
    close_(model.conv2, [1, 2, 3], -0.7)
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == ([3, 4, 5] if dim == 1 else [0, 3, 4, 5])


def test_concatenation_with_the_input_and_with_a_parameter():
    def body(net, x):
        ones = net.extra.expand(len(x), -1, 6, 6)
        return net.last(torch.cat([x[:, :, 1:-1, 1:-1], net.conv1(x), ones], 1))

    extra = nn.Parameter(torch.randn(1, 4, 1, 1))
    model = Net(body, conv1=nn.Conv2d(3, 6, 3), last=nn.Conv2d(13, 4, 3, padding=1), extra=extra)
    settle_(model, image())
    close_(model.conv1, [0, 1, 2])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv1.weight") == [3, 4, 5]


def test_dense_net_block():
    class Dense(nn.Module):
        def __init__(self, inputs):
            super().__init__()
            self.bn = nn.BatchNorm2d(inputs)
            self.conv = nn.Conv2d(inputs, 4, 3, padding=1, bias=False)

        def forward(self, x):
            return torch.cat([x, self.conv(F.relu(self.bn(x)))], 1)

    blocks = Dense(6), Dense(10), Dense(14)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), *blocks, nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 3, 1))
    shrink_all(prepare_(model, image(), keep=["6"]), image(), also=[image(size=11)])


def test_repeat_and_expand():
    def middle(net, x):
        return x.repeat(1, 2, 1, 1) + x.mean((2, 3), keepdim=True).expand(-1, -1, 6, 6).repeat(1, 2, 1, 1)

    plan, _ = shrink_all(two_layers(middle, nn.Conv2d(12, 4, 1)), image())
    assert kept(plan, "conv1.weight") == [0, 4, 5]


def test_a_shape_that_a_buffer_gives():
    """What ``reshape_as`` is given has all channels, and nobody reads its numbers."""

    def body(net, x):
        return net.last(net.first(x).reshape_as(net.like)) + net.other(net.second(x))

    parts = {"last": nn.Linear(6, 4), "other": nn.Linear(6, 4)}
    model = Net(body, first=nn.Linear(3, 6), second=nn.Linear(3, 6), **parts).double()
    model.register_buffer("like", torch.randn(5, 6, dtype=torch.float64))
    for layer in (model.first, model.second):
        close_(layer, [1, 2])
    x = torch.randn(5, 3, dtype=torch.float64)
    plan = ng.plan(model, x)
    assert kept(plan, "first.weight") is None and kept(plan, "second.weight") == [0, 3, 4, 5]
    assert torch.allclose(ng.compact(model, plan)(x), model(x), rtol=1e-9, atol=1e-9)


def test_lists_in_what_an_operation_gives():
    """``histogramdd`` gives a tensor and a list of them."""

    def body(net, x):
        y = net.conv1(x).mean((2, 3))
        return net.last(y) + torch.histogramdd(y[:, :2].detach(), bins=[2, 2])[1][0].mean()

    model = Net(body, conv1=nn.Conv2d(3, 6, 3), last=nn.Linear(6, 4))
    close_(model.conv1, [4, 5])
    shrink_all(settle_(model, image()), image(), removes=None)


def test_squeeze_of_everything_when_one_channel_is_left():
    def body(net, x):
        x = net.conv1(x).mean((2, 3), keepdim=True).squeeze()
        return net.last(x)

    model = settle_(Net(body, conv1=nn.Conv2d(3, 6, 3), last=nn.Linear(6, 4)), image())
    close_(model.conv1, range(5))
    shrink_all(model, image(), removes=None)


def test_a_gap_between_two_flattens_with_random_zeros():
    there = nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 12)
    model = nn.Sequential(*there, nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 1))
    shrink_all(close_at_random_(settle_(model, image()), keep=["5"]), image())
