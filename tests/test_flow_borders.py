"""Constants that a padded convolution reads: its outputs depend on the place, and may be constant behind a ReLU."""

import numpy as np
import pytest
import torch
from flow_helpers import Net, assert_same_function, close_, kept, prepare_, shrink, shrink_all
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.flow.analysis import Flow
from narrowgate.flow.borders import padded_constants, sums_of_others
from narrowgate.flow.compose import compose
from narrowgate.flow.rules import RULES
from narrowgate.flow.trace import trace

SIZES = [(1, 1), (1, 5), (2, 2), (3, 2), (4, 4), (9, 6)]


def images(channels=3, sizes=SIZES):
    return [torch.randn(3, channels, *size, dtype=torch.float64) for size in sizes]


def depthwise_net(kernels, shifts, **options):
    """1x1, depthwise with these kernels on constants of 1 (and one living channel), shift, ReLU, 1x1."""
    count = len(kernels) + 1
    size = kernels[0].shape[-1]
    options = {"padding": size // 2, **options}
    net = Net(
        lambda net, x: net.last(F.relu(net.norm(net.deep(F.relu(net.first(x)))))),
        first=nn.Conv2d(3, count, 1),
        deep=nn.Conv2d(count, count, size, groups=count, bias=False, **options),
        norm=nn.BatchNorm2d(count),
        last=nn.Conv2d(count, 4, 1),
    ).double()
    with torch.no_grad():
        for i, (kernel, shift) in enumerate(zip(kernels, shifts, strict=True)):
            close_(net.first, [i], 1.0)
            net.deep.weight[i, 0] = kernel
            net.norm.bias[i] = shift
    return net.eval()


def three(*rows):
    return torch.tensor(rows, dtype=torch.float64)


NEGATIVE = -torch.ones(3, 3)
ALONE = three((-1, -1, -1), (-1, 1, -1), (-1, -1, -1))  # the middle counts by itself in an image of one pixel only
CORNER = three((1, 1, 0), (1, 1, 0), (-3, -3, -3))  # positive at the bottom border only


@pytest.mark.parametrize("layout", ["aligned", "scatter", "auto"])
def test_what_is_negative_at_every_border_goes(layout):
    net = depthwise_net([NEGATIVE, NEGATIVE + 5, ALONE, CORNER], [0.0, 0.0, 0.0, 0.0])
    plan, small = shrink(net, images()[-1], layout=layout, also=images())
    assert kept(plan, "deep.weight") == [1, 2, 3, 4]
    assert small.deep.out_channels == 4


def test_a_shift_decides():
    net = depthwise_net([NEGATIVE, NEGATIVE, ALONE], [0.5, 8.5, -1.5])
    plan, _ = shrink(net, images()[-1], also=images())
    # Of nine times -1 there are 9 inside, 6 or 4 at borders, 1 in an image of one pixel: 8.5 lifts some above zero.
    assert kept(plan, "deep.weight") == [1, 3]


def test_a_saturated_channel_becomes_a_bias():
    """Behind a ReLU6 a channel that is above 6 everywhere is 6, and its share goes into the next layer's bias."""
    net = depthwise_net([20 * torch.ones(3, 3)], [0.0])
    net.body = lambda net, x: net.last(F.relu6(net.norm(net.deep(F.relu(net.first(x))))))
    plan, small = shrink(net, images()[-1], also=images())
    assert kept(plan, "deep.weight") == [1]
    expected = net.last.bias + 6 * net.last.weight[:, 0, 0, 0]
    torch.testing.assert_close(small.last.bias, expected)


def test_a_row_that_stays_all_the_same_still_gives_its_constant():
    """A dense row reads constants only and is dead behind its ReLU; rounding keeps it, its inputs go."""
    net = Net(
        lambda net, x: net.last(F.relu(net.middle(F.relu(net.first(x))))),
        first=nn.Conv2d(3, 8, 1),
        middle=nn.Conv2d(8, 8, 3, padding=1),
        last=nn.Conv2d(8, 4, 1),
    ).double()
    with torch.no_grad():
        close_(net.first, range(6), 1.0)
        net.middle.weight[:5, 6:] = 0
        net.middle.weight[:5, :6] = -1
        net.middle.bias[:5] = 0.5  # positive if nothing came in
    plan, small = shrink(net, images()[-1], round_to=4, also=images())
    assert small.middle.out_channels == 4  # three that are used and one that is not
    plan, _ = shrink(net, images()[-1], also=images())
    assert kept(plan, "middle.weight") == [5, 6, 7]


def test_a_reader_before_the_activation_keeps_it():
    net = depthwise_net([NEGATIVE], [0.0])
    net.other = nn.Conv2d(2, 4, 1).double()

    def body(net, x):
        x = net.norm(net.deep(F.relu(net.first(x))))
        return net.last(F.relu(x)) + net.other(x)

    net.body = body
    plan, _ = shrink(net, images()[-1], also=images(), removes=False)
    assert kept(plan, "deep.weight") is None


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1, "stride": 2},
        {"padding": 2, "dilation": 2},
        {"padding": (0, 2), "size": 5},
        {"padding": 3, "size": 3},  # some windows lie outside as a whole
        {"padding": 1, "dilation": (1, 2), "stride": (2, 1), "size": 4},
        {"padding": "same", "size": 5},
    ],
    ids=str,
)
def test_random_kernels_and_geometries(options):
    torch.manual_seed(1)
    options = dict(options)
    size = options.pop("size", 3)
    kernels = [torch.randn(size, size) - 1.2 for _ in range(12)]
    net = depthwise_net(kernels, torch.randn(12) - 0.5, **options)
    shapes = [(9, 10), (8, 8), (20, 11)] if options["padding"] != 3 else SIZES[::-1]
    shrink_all(net, images(sizes=shapes)[0], also=images(sizes=shapes))


def test_all_parts_of_a_kernel_are_known():
    """Against PyTorch: every number that padded convolutions of ones put out is in the table, at every image size."""
    torch.manual_seed(0)
    weight, bias = torch.randn(2, 1, 3, 5, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    constants = torch.tensor([2.0, -3.0], dtype=torch.float64)
    rows = torch.ones(2, dtype=torch.bool).numpy()
    table = padded_constants(weight, bias, constants.numpy(), rows, ((1, 3), (1, 2)))
    inside = (weight.flatten(1).sum(1) * constants + bias).numpy()
    assert table[0] == pytest.approx(inside)
    for height in range(1, 5):
        for width in range(4, 12):
            x = constants.reshape(1, 2, 1, 1).expand(1, 2, height, width)
            out = F.conv2d(x, weight, bias, padding=(1, 3), dilation=(1, 2), groups=2)
            for channel in range(2):
                distance = (out[0, channel].reshape(-1, 1) - torch.from_numpy(table[:, channel])).abs().min(1).values
                assert distance.max() < 1e-12


def many(count=40, size=3, **options):
    """More constants beside a border than a kernel has parts, all of them above zero somewhere."""
    torch.manual_seed(2)
    return depthwise_net([torch.randn(size, size) + 0.5 for _ in range(count)], torch.randn(count) + 2, **options)


@pytest.mark.parametrize("layout", ["aligned", "scatter", "auto"])
def test_fifteen_carry_all_others(layout):
    """3 x 3 with padding 1 has sixteen parts; one pattern, the same everywhere, is a bias."""
    plan, small = shrink(many(), images()[-1], layout=layout, also=images())
    assert len(kept(plan, "deep.weight")) == small.deep.out_channels == 15 + 1
    again = ng.compact(many(), ng.Plan.from_json(plan.to_json()))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), small.parameters(), strict=True))


def test_few_constants_beside_a_border_stay():
    plan, _ = shrink(many(15), images()[-1], also=images(), removes=False)
    assert kept(plan, "deep.weight") is None


def test_those_that_stay_for_another_reason_are_not_counted_twice():
    plan, small = shrink(many(), images()[-1], round_to=32, also=images())
    assert small.deep.out_channels == 32
    net = many()
    net.other = nn.Conv2d(41, 2, 3, padding=1).double()  # it can't express one by others: its own border cuts them
    net.body = lambda net, x: both(net, F.relu(net.norm(net.deep(F.relu(net.first(x))))))
    plan, _ = shrink(net, images()[-1], also=images(), removes=False)
    assert plan.edits["last.weight"].merged and not plan.edits["other.weight"].merged


def both(net, x):
    return net.last(x), net.other(x)


def test_a_larger_kernel_reads_sums_as_well():
    net = many()
    net.last = nn.Conv2d(41, 4, 3, stride=2, bias=False).double()
    sizes = [(9, 6), (3, 3), (4, 7)]
    plan, small = shrink(net, images(sizes=sizes)[0], also=images(sizes=sizes))
    assert len(kept(plan, "deep.weight")) == 16 and small.last.bias is not None


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_single_precision(layout):
    net = many(100).float()
    x = torch.randn(4, 3, 7, 7)
    small = ng.compact(net, ng.plan(net, x, layout=layout))
    assert small.deep.out_channels == 16
    assert ng.verify(net, small, x).relative_error < 1e-5


def test_kernels_that_hardly_differ():
    """Their patterns are nearly parallel: whatever is kept, digits are not lost."""
    base = torch.rand(3, 3, dtype=torch.float64)
    kernels = [base + 10.0**-i * torch.randn(3, 3, dtype=torch.float64) for i in range(1, 13) for _ in range(4)]
    shrink(depthwise_net(kernels, [1.0] * 48), images()[-1], also=images(), removes=None)


def test_sums_are_what_they_say():
    generator = np.random.default_rng(0)
    table = generator.normal(size=(9, 30))
    columns = generator.random(30) < 0.8
    sums = sums_of_others(table, columns)
    assert len(sums) == columns.sum() - 8 and all(columns[column] for column in sums)
    for column, (factors, constant) in sums.items():
        assert not factors.keys() & sums.keys()
        made = constant + sum(factor * table[:, other] for other, factor in factors.items())
        assert made == pytest.approx(table[:, column])
    table[0, 5] = np.nan
    assert 5 not in sums_of_others(table, np.ones(30, bool))


class Block(nn.Module):
    """An inverted residual: wide inside, depthwise between two activations."""

    def __init__(self, inputs, inside, outputs, kernel, stride):
        super().__init__()
        padding = tuple(size // 2 for size in kernel)
        self.expand = nn.Sequential(nn.Conv2d(inputs, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU6())
        deep = nn.Conv2d(inside, inside, kernel, stride, padding, groups=inside, bias=False)
        self.deep = nn.Sequential(deep, nn.BatchNorm2d(inside), nn.ReLU6())
        self.project = nn.Sequential(nn.Conv2d(inside, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.residual = inputs == outputs and stride == 1

    def forward(self, x):
        y = self.project(self.deep(self.expand(x)))
        return x + y if self.residual else y


@pytest.mark.parametrize("seed", range(6))
def test_random_inverted_residuals(seed):
    """Closed filters at random, statistics that fit: in every layout exact at every size, and sums are made of some."""
    torch.manual_seed(seed)
    kernels = [[(3, 1), (3, 3)], [(1, 3), (3, 3)], [(3, 1), (5, 1)]][seed % 3]
    blocks = [Block(8, 96, 8, kernels[0], 1), Block(8, 96, 12, kernels[1], 2), Block(12, 96, 12, kernels[0], 1)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.Conv2d(12, 4, 1))
    model = prepare_(model, torch.randn(8, 3, 9, 9, dtype=torch.float64), share=0.5, keep=["4"])
    merged = []
    for layout in ("aligned", "scatter"):
        plan, _ = shrink(model, images()[-1], layout=layout, also=images())
        merged.append(sum(len(edit.merged) for edit in plan.edits.values()))
    assert min(merged) > 0


def test_two_plans_in_a_row_are_one():
    """The first takes two zero channels, the second merges: together, in positions of the first model, they do both."""
    net = many()
    with torch.no_grad():
        net.first.weight[:40].normal_()  # nothing is constant yet
        close_(net.deep, [3, 14])
        net.norm.bias[[3, 14]] = -1
    first = ng.plan(net, images()[-1])
    assert len(kept(first, "deep.weight")) == 39
    small = ng.compact(net, first)
    for model in (net, small):
        close_(model.first, range(len(model.first.weight) - 1), 1.0)
    second = ng.plan(small, images()[-1])
    assert len(second.edits["last.weight"].merged) == 38 - 15
    one, two = ng.compact(net, compose(first, second)), ng.compact(small, second)
    assert_same_function(one, two, images()[-1])
    assert_same_function(net, two, images()[-1])


def test_while_training_nothing_is_concluded():
    net = depthwise_net([NEGATIVE], [0.0])
    graph = trace(net, images()[-1])
    assert Flow(graph, net).run(RULES).borders
    assert not Flow(graph, net, closed={}).run(RULES).borders
    assert not Flow(graph, net, constants="fold").run(RULES).borders
