"""How layers are joined: residuals, products, squeeze-excite, layers and weights that are shared."""

import pytest
import torch
from flow_helpers import Net, close_, image, kept, prepare_, settle_, shrink_all
from torch import nn
from torch.nn import functional as F

import narrowgate as ng


class Block(nn.Module):
    """A residual block, pre-activation or not, with a projection if widths differ."""

    def __init__(self, inputs, width, outputs, pre=False, stride=1):
        super().__init__()
        self.pre = pre
        self.bn1 = nn.BatchNorm2d(inputs if pre else width)
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width if pre else outputs)
        self.conv2 = nn.Conv2d(width, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.project = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        if self.pre:
            branch = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
            return branch + self.project(x)
        branch = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        branch += self.project(x)
        return F.relu(branch, inplace=True)


def residual_net(pre):
    layers = nn.Conv2d(3, 6, 3, padding=1), Block(6, 5, 6, pre), Block(6, 5, 8, pre, 2)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize("pre", [False, True])
def test_residual_stream(pre):
    """A channel of the stream goes only where the stem and the branch are dead: 1 and 2, not 0 or 3."""
    model = settle_(residual_net(pre), image())
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):  # zero stays zero, so that no constant has to be carried
            nn.init.zeros_(norm.bias)
            norm.running_mean.zero_()
    close_(model[0], [0, 1, 2])
    close_(model[1].conv2, [1, 2, 3])
    close_(model[1].conv1, [0, 4])
    close_(model[2].conv2, [5, 6, 7])
    close_(model[2].project, [6, 7])
    plan, _ = shrink_all(model, image(), also=[image(size=11)])
    assert kept(plan, "0.weight") == kept(plan, "1.conv2.weight") == [0, 3, 4, 5]
    assert kept(plan, "1.conv1.weight") == [1, 2, 3]
    assert kept(plan, "2.conv2.weight") == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pre", [False, True])
def test_residual_stream_with_shifts(pre, seed):
    torch.manual_seed(seed)
    model = prepare_(residual_net(pre), image(), share=0.6, keep=["5"])
    shrink_all(model, image(), also=[image(size=11)])


@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.maximum])
def test_two_producers(op):
    def body(net, x):
        return net.last(op(net.a(x), net.b(x)))

    model = Net(body, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(3, 6, 3), last=nn.Conv2d(6, 4, 3, padding=1))
    settle_(model, image())
    close_(model.a, [0, 1, 2])
    close_(model.b, [2, 3])
    plan, _ = shrink_all(model, image())
    wanted = [4, 5] if op is torch.mul else [0, 1, 3, 4, 5]  # zero times anything is zero
    assert kept(plan, "a.weight") == kept(plan, "b.weight") == wanted


def test_a_forward_that_reads_its_layers_width():
    """In the scatter layout a layer is narrower than what it gives out; its own numbers must fit what callers see."""

    def body(net, x):
        x = net.stem(x)
        branch = net.branch(F.relu(x))
        return net.head(x + branch.reshape(len(x), net.branch.out_channels, -1).mean(-1)[:, :, None, None])

    model = Net(body, stem=nn.Conv2d(3, 6, 3), branch=nn.Conv2d(6, 6, 1), head=nn.Conv2d(6, 3, 1))
    settle_(model, image())
    close_(model.stem, [1, 2])
    close_(model.branch, [2, 3])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "stem.weight") == [0, 1, 3, 4, 5]


def test_division_by_a_constant_channel():
    def body(net, x):
        return net.last(net.a(x) / (2 + torch.sigmoid(net.b(x))))

    model = Net(body, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(3, 6, 3), last=nn.Conv2d(6, 4, 3))
    settle_(model, image())
    close_(model.a, [0, 1])
    close_(model.b, [1, 2, 3], 0.4)
    plan, _ = shrink_all(model, image())
    assert kept(plan, "a.weight") == [0, 2, 3, 4, 5]  # 0 / varying is not taken for zero


def test_a_shortcut_that_pads_its_channels():
    """The middle channels are those of both; the outer ones are the branch's alone, and counted in the code."""

    def body(net, x):
        x = F.relu(net.bn(net.stem(x)))
        x = net.branch(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return net.head(F.relu(x).mean((2, 3)))

    layers = {"stem": nn.Conv2d(3, 8, 3), "bn": nn.BatchNorm2d(8), "branch": nn.Conv2d(8, 12, 3, 2, padding=1)}
    model = settle_(Net(body, **layers, head=nn.Linear(12, 4)), image(size=9))
    with torch.no_grad():
        model.bn.bias[:4] = 0
        model.bn.running_mean[:4] = 0
    close_(model.stem, [0, 1, 2], 0.0)
    close_(model.branch, [0, 2, 3, 11])
    plan, _ = shrink_all(model, image(size=9), also=[image(size=12)])
    assert kept(plan, "stem.weight") == [2, 3, 4, 5, 6, 7]
    assert kept(plan, "branch.weight") == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11]
    assert not plan.walls


class SqueezeExcite(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))


def test_squeeze_excite_goes_with_its_inputs():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), SqueezeExcite(6, 4), nn.Conv2d(6, 4, 3, padding=1))
    settle_(model, image())
    close_(model[0], [0, 1])
    close_(model[1].down, [2])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "0.weight") == kept(plan, "1.up.weight") == kept(plan, "1.down.weight", 1) == [2, 3, 4, 5]
    assert kept(plan, "1.down.weight") == [0, 1, 3]


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_a_global_pool_of_channels_last(layout):
    """Whose result PyTorch 2.6 writes down anew where it has several channels, by their number."""

    def body(net, x):
        x = net.out(F.gelu(net.mlp(net.stem(x).permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        return net.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

    layers = {"stem": nn.Conv2d(3, 6, 3), "mlp": nn.Linear(6, 8), "out": nn.Linear(8, 6), "head": nn.Linear(6, 4)}
    net = Net(body, **layers).double().eval()
    for layer, dead in ((net.stem, [0, 1]), (net.mlp, [2, 3]), (net.out, [1, 5])):
        close_(layer, dead)
    plan = ng.plan(net, image(), layout=layout)
    assert plan.parameters_after == (3 * 9 + 1) * 4 + (4 + 1) * 6 + (6 + 1) * 4 + (4 + 1) * 4
    ng.verify(net, ng.compact(net, plan), image())


def test_a_closed_scale_closes_its_channel():
    def body(net, x):
        return net.last(net.conv(x) * F.relu(net.scale(x.mean((2, 3)))[:, :, None, None]))

    model = Net(body, conv=nn.Conv2d(3, 6, 3), scale=nn.Linear(3, 6), last=nn.Conv2d(6, 4, 3, padding=1))
    settle_(model, image())
    close_(model.conv, [0])
    close_(model.scale, [1, 2], -0.5)
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv.weight") == [3, 4, 5]


def test_spatial_attention_of_one_channel():
    def body(net, x):
        x = net.conv(x)
        return net.last(x * torch.sigmoid(net.attention(x)))

    attention, last = nn.Conv2d(6, 1, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
    model = Net(body, conv=nn.Conv2d(3, 6, 3), attention=attention, last=last)
    settle_(model, image())
    close_(model.conv, [0, 1])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "conv.weight") == [2, 3, 4, 5]


def test_layer_scale_with_zeros_kills_its_branch():
    def body(net, x):
        x = net.stem(x)
        return net.last(x + net.gamma * net.b(F.gelu(net.a(x))))

    gamma = nn.Parameter(torch.tensor([0.5, 0, 0, 0.3, 1, 2])[:, None, None])
    convs = {"stem": nn.Conv2d(3, 6, 3), "a": nn.Conv2d(6, 8, 1), "b": nn.Conv2d(8, 6, 1), "last": nn.Conv2d(6, 4, 1)}
    model = settle_(Net(body, gamma=gamma, **convs), image())
    close_(model.stem, [1, 3])
    plan, small = shrink_all(model, image())
    assert kept(plan, "stem.weight") == kept(plan, "gamma") == [0, 2, 3, 4, 5]
    assert small.gamma.shape == (5, 1, 1)


def test_dead_residual_branch_keeps_one_channel():
    """Behind it the block activates again, which its input was not: it does something still."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Block(6, 8, 6), nn.Conv2d(6, 4, 3))
    settle_(model, image())
    close_(model[1].conv2, range(6))
    nn.init.zeros_(model[1].bn2.running_mean)
    nn.init.zeros_(model[1].bn2.bias)
    plan, small = shrink_all(model, image())
    assert small[1].conv1.out_channels == 1 and kept(plan, "0.weight") is None


def test_zero_initialised_residual():
    """Its last norm has scale and shift zero: the branch is dead, the stream is not."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), Block(6, 8, 6), nn.Conv2d(6, 4, 3))
    settle_(model, image())
    nn.init.zeros_(model[1].bn2.weight)
    nn.init.zeros_(model[1].bn2.bias)
    _, small = shrink_all(model, image())
    assert small[1].conv1.out_channels == 1


@pytest.mark.parametrize("groups", [1, 6])
def test_layer_used_twice(groups):
    twice = nn.Conv2d(6, 6, 3, padding=1, groups=groups)
    model = Net(
        lambda net, x: net.last(net.twice(torch.sigmoid(net.twice(net.first(x))))),
        **{"first": nn.Conv2d(3, 6, 3), "twice": twice, "last": nn.Conv2d(6, 4, 3)},
    )
    settle_(model, image())
    close_(model.first, [0, 1])
    close_(model.first, [2], 0.5)
    close_(model.twice, [1, 2, 3], 0.2)
    shrink_all(model, image(), removes=None)


@pytest.mark.parametrize("groups", [1, 6])
def test_layer_used_twice_without_constants(groups):
    """Channel 1 is zero everywhere and goes; 2 is read the second time only, so it stays."""
    twice = nn.Conv2d(6, 6, 3, padding=1, groups=groups, bias=False)
    model = Net(
        lambda net, x: net.last(net.twice(F.relu(net.twice(net.first(x))))),
        **{"first": nn.Conv2d(3, 6, 3), "twice": twice, "last": nn.Conv2d(6, 4, 3)},
    )
    settle_(model, image())
    close_(model.first, [1] if groups == 1 else [1, 2])
    close_(model.twice, [1])
    plan, _ = shrink_all(model, image())
    assert 1 not in kept(plan, "first.weight")


@pytest.mark.parametrize("groups", [2, 4])
def test_grouped_layer_used_on_two_streams(groups):
    """Its weight has one set of input positions: they stay together, though each stream has other dead channels."""

    def body(net, x):
        return net.last(net.twice(net.a(x)) + net.twice(F.relu(net.b(x))))

    twice = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False)
    parts = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(3, 8, 3), "twice": twice, "last": nn.Conv2d(8, 4, 1)}
    model = settle_(Net(body, **parts), image())
    close_(model.a, [0, 2, 5, 7])
    close_(model.b, [1, 3, 5, 6])
    shrink_all(model, image(), removes=None)
    close_(model.a, range(0, 8, 2))
    close_(model.b, range(0, 8, 2))
    plan, _ = shrink_all(model, image())
    assert 0 not in kept(plan, "a.weight")


@pytest.mark.parametrize("groups", [1, 6])
def test_layer_registered_under_two_names(groups):
    conv = nn.Conv2d(6, 6, 3, padding=1, groups=groups, bias=False)
    model = Net(
        lambda net, x: net.last(net.again(F.relu(net.once(net.first(x))))),
        **{"first": nn.Conv2d(3, 6, 3), "once": conv, "again": conv, "last": nn.Conv2d(6, 4, 3)},
    )
    settle_(model, image())
    close_(model.first, [1])
    close_(model.once, [1])
    _, small = shrink_all(model, image())
    assert small.once is small.again


def test_only_the_second_name_is_used():
    conv = nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False)
    model = Net(
        lambda net, x: net.last(net.again(net.first(x))),
        **{"first": nn.Conv2d(3, 6, 3), "once": conv, "again": conv, "last": nn.Conv2d(6, 4, 3)},
    )
    settle_(model, image())
    close_(model.first, [1, 2])
    plan, small = shrink_all(model, image())
    assert small.again.groups == 4 and kept(plan, "first.weight") == [0, 3, 4, 5]


def test_two_layers_with_one_weight():
    model = Net(
        lambda net, x: net.last(net.b(F.relu(net.a(net.first(x))))),
        **{"first": nn.Conv2d(3, 6, 3), "a": nn.Conv2d(6, 6, 1), "b": nn.Conv2d(6, 6, 1), "last": nn.Conv2d(6, 4, 3)},
    )
    model.b.weight = model.a.weight
    settle_(model, image())
    close_(model.first, [2])
    close_(model.a, [2])
    close_(model.b, [2])
    plan, small = shrink_all(model, image())
    assert small.b.weight is small.a.weight and kept(plan, "first.weight") == [0, 1, 3, 4, 5]


def test_shared_batch_norm():
    def body(net, x):
        return net.last(net.bn(net.a(x)) + F.relu(net.bn(net.b(x))))

    model = Net(body, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(3, 6, 3), bn=nn.BatchNorm2d(6), last=nn.Conv2d(6, 4, 3))
    settle_(model, image())
    close_(model.a, [0, 1, 2])
    close_(model.b, [1, 2, 3])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "a.weight") == [0, 3, 4, 5]


def test_embedding_tied_to_the_output():
    def body(net, tokens):
        x = net.embed(tokens) + net.position[:, : tokens.shape[1]]
        return F.linear(x + net.b(F.gelu(net.a(x))), net.embed.weight)

    model = Net(
        body,
        embed=nn.Embedding(11, 6),
        position=nn.Parameter(torch.randn(1, 9, 6)),
        a=nn.Linear(6, 12),
        b=nn.Linear(12, 6),
    )
    tokens = torch.randint(0, 11, (4, 7))
    settle_(model, tokens)
    close_(model.a, [0, 1, 2])
    close_(model.a, [3], 0.7)
    with torch.no_grad():
        model.embed.weight[:, [1, 4]] = 0
        model.position[..., [1, 4]] = 0
    close_(model.b, [1])
    plan, small = shrink_all(model, tokens, also=[torch.randint(0, 11, (3, 5))])
    assert len(kept(plan, "a.weight")) == 8
    assert kept(plan, "embed.weight", 1) == kept(plan, "position", 2) == [0, 2, 3, 5]
    assert small.embed.embedding_dim == 4


@pytest.mark.parametrize(
    "places", [torch.arange(7), torch.arange(7)[None], torch.full((7,), 3)], ids=["1d", "2d", "3s"]
)
def test_numbers_of_places_that_a_buffer_holds(places):
    """As transformers have them: one place for all would be added to all tokens without a word."""

    def body(net, tokens):
        x = net.embed(tokens) + net.position(net.places[..., : tokens.shape[1]])
        return net.head(F.relu(net.hidden(x)))

    layers = {"embed": nn.Embedding(11, 6), "hidden": nn.Linear(6, 8), "head": nn.Linear(8, 3)}
    model = Net(body, **layers, position=nn.Embedding(7, 6), places=nn.Buffer(places))
    tokens = torch.randint(0, 11, (4, 7))
    close_(settle_(model, tokens).hidden, [0, 1])
    plan, _ = shrink_all(model, tokens)
    assert kept(plan, "hidden.weight") == [2, 3, 4, 5, 6, 7] and "places" not in plan.cuts


def test_embedding_and_linear_share_a_parameter():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.hidden, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(F.relu(self.hidden(self.embed(tokens))))

    tokens = torch.randint(0, 11, (4, 7))
    model = settle_(Tied(), tokens)
    close_(model.hidden, [1, 4])
    with torch.no_grad():
        model.embed.weight[:, 4] = 0
    plan, small = shrink_all(model, tokens)
    assert small.head.weight is small.embed.weight
    assert kept(plan, "hidden.weight") == [0, 1, 2, 3, 5]
