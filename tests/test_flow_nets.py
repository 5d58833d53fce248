"""Convolutions and constants, one awkward feature a net, with the kept channels worked out by hand."""

import pytest
import torch
from flow_helpers import Net, close_, image, kept, settle_, shrink, shrink_all
from torch import nn
from torch.nn import functional as F

import narrowgate as ng

# In every net here conv1 has six channels: 1 and 2 are zero, 3 and 4 constant, 0 and 5 alive.
ZERO, CONSTANT, ALIVE = [1, 2], [3, 4], [0, 5]


def net(body, conv2, *, norm=False, **parts):
    """conv1 (-> BatchNorm) -> body -> conv2."""
    parts = {"conv1": nn.Conv2d(3, 6, 3, bias=not norm), "conv2": conv2} | parts
    if norm:
        parts["bn"] = nn.BatchNorm2d(6)
    model = settle_(Net(body, **parts), image())
    close_(model.conv1, ZERO)
    close_(model.conv1, CONSTANT, 0.8)
    if norm:  # a closed filter is zero before its norm, and -0.2, -0.6, 0.7 and -0.4 after it
        with torch.no_grad():
            scale = (model.bn.running_var + model.bn.eps).rsqrt() * model.bn.weight
            wanted = torch.tensor([0.3, -0.2, -0.6, 0.7, -0.4, 0], dtype=torch.float64)
            model.bn.bias.copy_(wanted + model.bn.running_mean * scale)
    return model


def plain(net, x):
    return net.conv2(net.conv1(x))


def three(net, x):
    return net.conv3(net.conv2(net.conv1(x)))


def test_plain_chain_drops_zeros_and_folds_constants():
    plan, small = shrink(net(plain, nn.Conv2d(6, 4, 3)), image(), also=[image(size=13)])
    assert kept(plan, "conv1.weight") == kept(plan, "conv1.bias") == kept(plan, "conv2.weight", 1) == ALIVE
    assert kept(plan, "conv2.weight") is None
    assert (small.conv1.out_channels, small.conv2.in_channels) == (2, 2)
    assert not plan.walls


def test_constants_fold_into_a_new_bias():
    plan, small = shrink(net(plain, nn.Conv2d(6, 4, 3, bias=False)), image())
    assert kept(plan, "conv1.weight") == ALIVE
    assert small.conv2.bias is not None


def normed(net, x):
    return net.conv2(F.relu(net.bn(net.conv1(x))))


@pytest.mark.parametrize(
    "conv2",
    [
        nn.Conv2d(6, 4, 3, bias=False),
        nn.Conv2d(6, 4, 3, padding="valid"),
        nn.Conv2d(6, 4, 1, padding="same"),
        nn.Conv2d(6, 4, 3, dilation=2, stride=2),
        nn.Conv2d(6, 4, (3, 1)),
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(6, 4, 3, padding=1, padding_mode="replicate"),
    ],
    ids=str,
)
def test_a_shift_folds_where_no_zero_border_comes_in(conv2):
    """Channel 3 is the constant 0.7 after the norm; 1, 2 and 4 are negative, so zero after the ReLU."""
    plan, _ = shrink(net(normed, conv2, norm=True), image(), also=[image(size=12)])
    assert kept(plan, "conv1.weight") == kept(plan, "bn.running_mean") == ALIVE


@pytest.mark.parametrize(
    "conv2",
    [
        nn.Conv2d(6, 4, 3, padding=1),
        nn.Conv2d(6, 4, 3, padding="same"),
        nn.Conv2d(6, 4, 1, padding=1, bias=False),
        nn.Conv2d(6, 4, (3, 1), padding=(0, 1)),
        nn.Conv2d(6, 4, 3, padding=2, dilation=2, stride=2),
        nn.Conv2d(6, 4, 3, padding=40),
    ],
    ids=str,
)
def test_one_carrier_stays_for_a_zero_border(conv2):
    model = net(normed, conv2, norm=True)
    plan, _ = shrink(model, image(), also=[image(size=12)])
    assert kept(plan, "conv1.weight") == [0, 3, 5]


def test_one_carrier_is_enough_for_several_constants():
    def body(net, x):
        return net.conv2(F.gelu(net.bn(net.conv1(x))))

    plan, _ = shrink(net(body, nn.Conv2d(6, 4, 3, padding=1), norm=True), image())
    assert len(kept(plan, "conv1.weight")) == 3  # one of the four constants carries the others


def test_two_readers_share_a_carrier():
    def body(net, x):
        x = torch.sigmoid(net.conv1(x))
        return net.conv2(x), net.conv3(x)

    parts = {"conv3": nn.Conv2d(6, 4, 5, padding=2)}
    plan, _ = shrink(net(body, nn.Conv2d(6, 4, 3, padding=1), **parts), image())
    assert len(kept(plan, "conv1.weight")) == 3


@pytest.mark.parametrize("conv2", [nn.Conv2d(6, 6, 3, padding=1, groups=6), nn.Conv2d(6, 12, 3, padding=1, groups=6)])
def test_depthwise_keeps_a_constant_next_to_a_zero_border(conv2):
    def body(net, x):
        return net.conv3(F.leaky_relu(net.conv2(F.relu(net.bn(net.conv1(x))))))

    model = net(body, conv2, norm=True, conv3=nn.Conv2d(conv2.out_channels, 4, 1))
    plan, small = shrink(model, image())
    assert kept(plan, "conv1.weight") == [0, 3, 5]
    assert small.conv2.groups == 3 and small.conv2.out_channels == conv2.out_channels // 2


def test_unpadded_depthwise_passes_a_constant_on():
    model = net(three, nn.Conv2d(6, 6, 3, groups=6), conv3=nn.Conv2d(6, 4, 3))
    plan, small = shrink(model, image())
    assert kept(plan, "conv2.weight") == kept(plan, "conv1.weight") == ALIVE
    assert small.conv2.groups == small.conv2.in_channels == 2


def test_depthwise_filters_of_its_own_die():
    model = net(three, nn.Conv2d(6, 6, 3, groups=6), conv3=nn.Conv2d(6, 4, 1))
    close_(model.conv2, [0])
    plan, _ = shrink(model, image())
    assert kept(plan, "conv1.weight") == [5]


def test_grouped_convolution_keeps_equal_groups():
    model = net(three, nn.Conv2d(6, 6, 3, groups=2), conv3=nn.Conv2d(6, 4, 3))
    close_(model.conv2, [0, 1, 4])
    plan, small = shrink_all(model, image())
    assert small.conv2.groups == 2
    assert len(kept(plan, "conv1.weight")) == 2  # one alive in each group
    assert len(kept(plan, "conv2.weight")) == 4  # one alive in the first group, two in the second


def test_grouped_convolution_with_uneven_survivors_and_constants():
    model = net(lambda net, x: net.conv2(net.conv1(x).sigmoid()), nn.Conv2d(6, 6, 3, groups=3, padding=1))
    shrink_all(model, image(), aligned_removes=False)  # sigmoid(0) is a constant that a group reads next to a border
    model = net(three, nn.Conv2d(6, 9, 3, groups=3), conv3=nn.Conv2d(9, 2, 1))
    close_(model.conv2, [0, 2, 3, 4], 0.3)
    plan, small = shrink_all(model, image())
    assert len(kept(plan, "conv1.weight")) == 3 and small.conv2.in_channels == 3
    assert plan.cuts["conv2.weight"].new_shape[0] == small.conv2.out_channels == 9


def test_closed_input_columns_free_the_layer_before():
    """Channel 0 is alive, but nothing reads it."""
    model = net(plain, nn.Conv2d(6, 4, 3))
    with torch.no_grad():
        model.conv2.weight[:, 0] = 0
    plan, _ = shrink(model, image())
    assert kept(plan, "conv1.weight") == [5]


def test_death_goes_back_through_several_layers():
    """conv2's channel 2 is not read, and it alone read conv1's channel 0."""
    model = net(three, nn.Conv2d(6, 4, 3), conv3=nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        model.conv2.weight[[0, 1, 3], 0] = 0
        model.conv3.weight[:, 2] = 0
    plan, _ = shrink(model, image())
    assert kept(plan, "conv2.weight") == [0, 1, 3]
    assert kept(plan, "conv1.weight") == [5]


def test_death_goes_forward_through_several_layers():
    """conv2's channel 1 reads only what is zero."""
    model = net(lambda net, x: net.conv3(F.relu(net.conv2(net.conv1(x)))), nn.Conv2d(6, 4, 3), conv3=nn.Conv2d(4, 2, 3))
    with torch.no_grad():
        model.conv2.weight[1, ALIVE] = 0
    plan, _ = shrink(model, image())
    assert kept(plan, "conv2.weight") == [0, 2, 3]


@pytest.mark.parametrize(
    "conv2",
    [
        nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1, bias=False),
        nn.ConvTranspose2d(6, 4, 3, dilation=2),
        nn.ConvTranspose2d(6, 4, 2, groups=2),
    ],
    ids=str,
)
def test_transposed_convolution(conv2):
    model = net(three, conv2, conv3=nn.Conv2d(4, 3, 3, padding=1))
    close_(model.conv2, [1], 0.5)
    plan, _ = shrink_all(model, image(), aligned_removes=conv2.groups == 1, also=[image(size=11)])
    if conv2.groups == 1:
        assert len(kept(plan, "conv1.weight")) == 3  # the living and a carrier


@pytest.mark.parametrize("bias", [True, False])
def test_transposed_depthwise_convolution(bias):
    """Zero channels go; what the bias makes of them is added behind, and other constants stay."""
    conv2 = nn.ConvTranspose2d(6, 6, 3, stride=2, padding=1, groups=6, bias=bias)
    model = net(three, conv2, conv3=nn.Conv2d(6, 3, 1))
    close_(model.conv1, [1, 2])
    with torch.no_grad():
        model.conv2.weight[ALIVE[0]] = 0
    plan, small = shrink_all(model, image(), also=[image(size=11)])
    assert {1, 2, ALIVE[0]}.isdisjoint(kept(plan, "conv2.weight"))
    assert small.conv2.groups == small.conv2.in_channels == small.conv2.out_channels == len(small.conv2.weight)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_transposed_convolution_with_groups(dims, bias):
    """Groups stay equal: two inputs of three and one output of two. What is zero goes, its bias is added behind."""
    conv, up = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
    middle = up(6, 4, 3, stride=2, padding=1, groups=2, bias=bias)
    x = torch.randn(4, 3, *[7] * dims, dtype=torch.float64)
    model = settle_(nn.Sequential(conv(3, 6, 3), nn.ReLU(), middle, conv(4, 3, 1)), x)
    close_(model[0], [1, 5])
    close_(model[2], [0, 3], 0.5)
    with torch.no_grad():
        model[2].weight[0, 1] = 0  # nothing reads the first input any more, and of the second group all are needed
    plan, small = shrink_all(model, x, also=[torch.randn(2, 3, *[9] * dims, dtype=torch.float64)])
    assert kept(plan, "2.weight", 0) == kept(plan, "0.weight") == [0, 2, 3, 4]
    assert plan.cuts["2.weight"].grouped == [[1], [0]] and kept(plan, "3.weight", 1) == [1, 2]
    assert (small[2].in_channels, small[2].out_channels, small[2].groups) == (4, 2, 2)
    assert ng.Plan.from_json(plan.to_json()) == plan


def test_a_transposed_convolution_with_groups_keeps_constants_that_it_reads():
    """Beside its border a constant is none: 3 stays for what reads it, 4 goes where no weight does."""
    model = net(three, nn.ConvTranspose2d(6, 4, 3, padding=1, groups=2), conv3=nn.Conv2d(4, 3, 1))
    with torch.no_grad():
        model.conv2.weight[4] = 0
    plan, _ = shrink_all(model, image(), also=[image(size=11)])
    assert kept(plan, "conv1.weight") == [0, 1, 3, 5]


def test_what_a_transposed_convolution_with_groups_makes_of_zeros_alone():
    """Its first group reads zeros only: both outputs are their bias, and one of them has to stay as such."""
    model = net(three, nn.ConvTranspose2d(6, 4, 2, groups=2), conv3=nn.Conv2d(4, 3, 3, padding=1))
    close_(model.conv1, [0, 1, 2])
    close_(model.conv2, [2])
    plan, small = shrink_all(model, image(), also=[image(size=11)])
    assert len(kept(plan, "conv2.bias")) == 2 and small.conv2.groups == 2


@pytest.mark.parametrize("dims", [1, 3])
def test_one_and_three_dimensions(dims):
    conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
    up, pool = getattr(nn, f"ConvTranspose{dims}d"), getattr(nn, f"AvgPool{dims}d")
    first = conv(3, 6, 3), norm(6), nn.ReLU(), conv(6, 6, 3, padding=1), nn.Sigmoid()
    model = nn.Sequential(*first, up(6, 5, 2), pool(2), conv(5, 2, 1))
    x = torch.randn(4, 3, *[7] * dims, dtype=torch.float64)
    settle_(model, x)
    close_(model[0], [1, 4])
    close_(model[3], [0, 1])
    close_(model[5], [2], 0.3)
    plan, _ = shrink_all(model, x)
    assert len(kept(plan, "5.weight", 0)) == 5 and len(kept(plan, "5.weight", 1)) == 4


def test_width_is_never_zero():
    """A branch whose every filter is closed keeps one channel, and the rest of the net still works."""
    model = net(lambda net, x: x[:, :1, 1:-1, 1:-1] + net.conv2(net.conv1(x)), nn.Conv2d(6, 4, 1))
    close_(model.conv1, range(6))
    plan, small = shrink_all(model, image())
    assert len(kept(plan, "conv1.weight")) == 1 and small.conv1.out_channels == 1


def test_collapse_names_the_layer():
    model = net(plain, nn.Conv2d(6, 4, 1))
    close_(model.conv1, range(6))
    with pytest.raises(ng.CollapseError, match="conv1"):
        ng.plan(model, image())


def test_an_output_that_is_partly_constant_stays_whole():
    model = net(plain, nn.Conv2d(6, 4, 1))
    close_(model.conv2, [2], 1.5)
    plan, small = shrink_all(model, image())
    assert kept(plan, "conv2.weight") is None and torch.all(small(image())[:, 2] == 1.5)
