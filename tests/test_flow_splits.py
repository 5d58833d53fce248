"""Code that takes channels in parts: halves may shrink as halves, numbers written in the code hold."""

import pytest
import torch
from flow_helpers import Net, close_, image, kept, prepare_, shrink, shrink_all
from torch import nn
from torch.nn import functional as F


def chunk(x):
    return x.chunk(2, 1)


def split_by_ratio(x):
    return x.split(x.shape[1] // 2, 1)


def split_by_list(x):
    half = x.shape[1] // 2
    return x.split([half, half], 1)


def slices(x):
    half = x.shape[1] // 2
    return x[:, :half], x[:, half:]


def slices_from_the_end(x):
    half = x.shape[1] // 2
    return x[:, :-half], x[:, -half:]


def narrow(x):
    half = x.shape[1] // 2
    return x.narrow(1, 0, half), x.narrow(1, half, half)


def tensor_split(x):
    return x.tensor_split(2, 1)


def written_split(x):
    return x.split(4, 1)


def written_list(x):
    return x.split([4, 4], 1)


def written_slices(x):
    return x[:, :4], x[:, 4:]


def written_start(x):
    """Right by luck when four channels are left: only the first is a number."""
    return x[:, :4], x[:, x.shape[1] // 2 :]


def written_places(x):
    return torch.tensor_split(x, (4,), dim=1)


def uneven(x):
    return x.split([3, 5], 1)


RATIOS = [chunk, split_by_ratio, split_by_list, slices, slices_from_the_end, narrow, tensor_split]
NUMBERS = [written_split, written_list, written_slices, written_start, written_places, uneven]


def two_branches(parts):
    """Each part goes through a layer of its own."""

    def body(net, x):
        one, two = parts(net.a(x))
        return net.last(torch.cat([net.b(one), net.c(two)], 1))

    first = 3 if parts is uneven else 4
    branches = {"b": nn.Conv2d(first, 5, 1), "c": nn.Conv2d(8 - first, 5, 1)}
    return Net(body, a=nn.Conv2d(3, 8, 3), **branches, last=nn.Conv2d(10, 4, 1)).double().eval()


@pytest.mark.parametrize("parts", RATIOS)
def test_halves_shrink_to_equal_counts(parts):
    """One of the first half is dead and two of the second: one of those stays to make the halves equal."""
    model = two_branches(parts)
    close_(model.a, [1, 4, 6])
    plan, _ = shrink_all(model, image())
    left = kept(plan, "a.weight")
    assert [i for i in left if i < 4] == [0, 2, 3]
    assert len([i for i in left if i >= 4]) == 3 and {5, 7} <= set(left)


@pytest.mark.parametrize("parts", NUMBERS)
def test_numbers_in_the_code_hold(parts):
    model = two_branches(parts)
    close_(model.a, [1, 2, 4, 6])
    plan, _ = shrink_all(model, image(), aligned_removes=False)
    assert kept(plan, "a.weight") is None
    assert plan.walls


@pytest.mark.parametrize("parts", [*RATIOS, *NUMBERS])
@pytest.mark.parametrize("seed", range(3))
def test_random_zeros(parts, seed):
    torch.manual_seed(seed)
    model = prepare_(two_branches(parts), image(), share=0.5, keep=["last"])
    for layout in ("aligned", "scatter"):
        shrink(model, image(), layout=layout, also=[image(size=11)])


@pytest.mark.parametrize("parts", [chunk, slices])
def test_one_half_unused(parts):
    """The half that nobody reads shrinks as far as the other."""

    def body(net, x):
        return net.last(parts(net.a(x))[1])

    model = Net(body, a=nn.Conv2d(3, 8, 3), last=nn.Conv2d(4, 4, 1)).double().eval()
    close_(model.a, [5, 6])
    plan, _ = shrink_all(model, image())
    left = kept(plan, "a.weight")
    assert [i for i in left if i >= 4] == [4, 7] and len(left) == 4


def glu_net(body, inside=8, **parts):
    return Net(body, a=nn.Conv2d(3, inside, 3), last=nn.Conv2d(inside // 2, 4, 1), **parts).double().eval()


def test_glu_couples_its_halves():
    """A zero in the first half ends a channel; a zero in the second is a factor of one half and ends nothing."""
    model = glu_net(lambda net, x: net.last(F.glu(net.a(x), 1)))
    close_(model.a, [1, 6])
    with torch.no_grad():
        model.last.weight[:, 3] = 0
    plan, small = shrink_all(model, image())
    assert kept(plan, "a.weight") == [0, 2, 4, 6]
    assert small.a.out_channels == 4 and small.last.in_channels == 2
    plan, _ = shrink(model, image(), layout="scatter")
    assert kept(plan, "a.weight") == [0, 2, 4]  # what is constant of the second half is put in, not computed
    assert not plan.walls


def test_a_constant_glu_becomes_a_bias():
    model = glu_net(lambda net, x: net.last(F.glu(net.a(x), 1)))
    close_(model.a, [1], 0.7)
    close_(model.a, [5], -0.3)
    plan, small = shrink_all(model, image())
    assert kept(plan, "a.weight") == [0, 2, 3, 4, 6, 7]
    constant = 0.7 * torch.sigmoid(torch.tensor(-0.3, dtype=torch.float64))
    torch.testing.assert_close(small.last.bias, model.last.bias + constant * model.last.weight[:, 1, 0, 0])


def test_glu_beside_the_channels():
    model = glu_net(lambda net, x: net.last(F.glu(net.a(x), 3)))
    model.last = nn.Conv2d(8, 4, 1).double()
    close_(model.a, [2])
    close_(model.a, [5], 0.4)
    plan, _ = shrink_all(model, image(size=8), also=[image(size=10)])
    assert kept(plan, "a.weight") == [0, 1, 3, 4, 6, 7]


@pytest.mark.parametrize("seed", range(4))
def test_random_zeros_around_glu(seed):
    """A norm before, a residual around and a depthwise layer behind, as in conformers."""

    def body(net, x):
        x = net.a(x)
        y = net.deep(F.glu(net.norm(net.b(x)), 1))
        return net.last(x + net.c(F.silu(y)))

    torch.manual_seed(seed)
    parts = {"b": nn.Conv2d(6, 12, 1), "norm": nn.BatchNorm2d(12), "deep": nn.Conv2d(6, 6, 3, padding=1, groups=6)}
    model = Net(body, a=nn.Conv2d(3, 6, 3), **parts, c=nn.Conv2d(6, 6, 1), last=nn.Conv2d(6, 4, 1))
    model = prepare_(model, image(), share=0.5, keep=["last"])
    for layout in ("aligned", "scatter"):
        shrink(model, image(), layout=layout, also=[image(size=11)], removes=None)


def test_three_chunks_for_queries_keys_and_values():
    def body(net, x):
        q, k, v = net.qkv(x).chunk(3, -1)
        return net.proj(F.scaled_dot_product_attention(q, k, v))

    model = Net(body, qkv=nn.Linear(3, 18), proj=nn.Linear(6, 4)).double().eval()
    close_(model.qkv, [0, 7, 12])
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    shrink(model, x, removes=False)  # the width of a query is part of attention's scale
    plan, _ = shrink(model, x, layout="scatter")
    assert kept(plan, "qkv.weight") == [2, 3, 4, 5, 8, 9, 10, 11, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("gate", [F.silu, torch.sigmoid])
def test_gated_units_go_in_pairs(gate):
    """A zero value closes its pair; so does a zero gate where silu(0) is 0, while a sigmoid of it halves the value."""

    def body(net, x):
        value, factor = net.a(x).chunk(2, 1)
        return net.last(value * gate(factor))

    model = Net(body, a=nn.Conv2d(3, 8, 3), last=nn.Conv2d(4, 4, 1)).double().eval()
    close_(model.a, [1, 6])
    plan, _ = shrink_all(model, image())
    assert kept(plan, "a.weight") == ([0, 2, 3, 4, 6, 7] if gate is torch.sigmoid else [0, 3, 4, 7])


class Res2Block(nn.Module):
    """Splits by a number that it holds itself, and adds from part to part."""

    def __init__(self, width=4, scale=3):
        super().__init__()
        self.width, self.scale = width, scale
        self.first = nn.Conv2d(3, width * scale, 1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(scale - 1))
        self.last = nn.Conv2d(width * scale, 4, 1)

    def forward(self, x):
        parts = torch.split(self.first(x), self.width, 1)
        done = [self.convs[0](parts[0])]
        for conv, part in zip(self.convs[1:], parts[1:], strict=False):
            done.append(conv(done[-1] + part))
        return self.last(torch.cat([*done, parts[-1]], 1))


def test_a_block_that_holds_its_width():
    model = Res2Block().double().eval()
    close_(model.first, [0, 3, 4, 7, 9, 10, 11])
    close_(model.convs[0], [0, 3])
    plan, small = shrink_all(model, image())
    assert kept(plan, "first.weight") == [1, 2, 5, 6, 8, 9]
    assert small.width == 2 and model.width == 4 and small.scale == 3
    assert plan.widths == {"width": 2}


class Misleading(Res2Block):
    """Its width is a factor too: a narrower block would compute something else."""

    def forward(self, x):
        return super().forward(x) * self.width


class Telling(Res2Block):
    """Its width is handed out."""

    def forward(self, x):
        return super().forward(x), self.width


@pytest.mark.parametrize("kind", [Misleading, Telling])
def test_a_number_that_does_more_than_count_channels_holds(kind):
    model = kind().double().eval()
    close_(model.first, [0, 3, 4, 7, 8, 11])
    close_(model.convs[0], [0, 3])
    plan, small = shrink(model, image(), removes=False)
    assert small.width == 4 and plan.walls


class Blur(nn.Module):
    """Holds how many groups its function has, and a number that is the same by chance."""

    def __init__(self, channels=6, tells=False):
        super().__init__()
        self.channels, self.chance, self.tells = channels, channels, tells
        self.register_buffer("kernel", torch.rand(channels, 1, 3, 3))

    def forward(self, x):
        x = F.conv2d(x, self.kernel, groups=self.channels)
        return x * self.channels if self.tells else x


@pytest.mark.parametrize("tells", [False, True])
def test_a_function_with_a_group_for_each_channel(tells):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), Blur(tells=tells), nn.Conv2d(6, 4, 1)).double().eval()
    close_(model[0], [1, 4])
    plan, small = shrink(model, image(), removes=not tells)
    assert small[2].channels == len(small[2].kernel) == (6 if tells else 4) and model[2].channels == 6
    assert bool(plan.walls) == tells


def shuffle(x):
    batch, channels, height, width = x.shape
    return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


def shuffle_block(net, x):
    one, two = net.a(x).chunk(2, 1)
    x = shuffle(torch.cat([one, net.b(two)], 1))
    one, two = x.chunk(2, 1)
    return net.last(shuffle(torch.cat([one, net.c(two)], 1)))


@pytest.mark.parametrize("seed", range(5))
def test_shuffled_halves(seed):
    torch.manual_seed(seed)
    parts = {"a": nn.Conv2d(3, 16, 3), "b": nn.Conv2d(8, 8, 1), "c": nn.Conv2d(8, 8, 1), "last": nn.Conv2d(16, 4, 1)}
    model = prepare_(Net(shuffle_block, **parts), image(), share=0.6, keep=["last"])
    close_(model.a, [0, 1, 2, 3, 8, 9, 10, 11])
    for layout in ("aligned", "scatter"):
        shrink(model, image(), layout=layout, removes=True if layout == "scatter" else None)


def test_shuffled_halves_shrink():
    parts = {"a": nn.Conv2d(3, 16, 3), "b": nn.Conv2d(8, 8, 1), "c": nn.Conv2d(8, 8, 1), "last": nn.Conv2d(16, 4, 1)}
    model = Net(shuffle_block, **parts).double().eval()
    close_(model.a, [0, 4, 8, 9])  # one of each quarter of the first half, and as many of the second
    close_(model.b, [0, 4])
    close_(model.c, [0, 1])  # what the first channels of a and b stand beside after the first shuffle
    plan, _ = shrink_all(model, image())
    assert kept(plan, "a.weight") == [1, 2, 3, 5, 6, 7, 10, 11, 12, 13, 14, 15]
    assert kept(plan, "b.weight") == [1, 2, 3, 5, 6, 7]
    assert kept(plan, "c.weight") == [2, 3, 4, 5, 6, 7]


def test_parts_of_shared_channels():
    """The same channels split twice, at other places: both must hold."""

    def body(net, x):
        x = net.a(x)
        return net.b(x.chunk(2, 1)[0]) + net.c(x.chunk(4, 1)[3])

    model = Net(body, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(4, 4, 1), c=nn.Conv2d(2, 4, 1)).double().eval()
    close_(model.a, [0, 1, 2, 6])
    plan, _ = shrink_all(model, image())
    left = kept(plan, "a.weight")
    assert [i // 2 for i in left] == [0, 1, 2, 3]


def test_a_plan_with_numbers_is_checked_and_saved():
    import narrowgate as ng

    model = Res2Block().double().eval()
    close_(model.first, [0, 3, 4, 7, 8, 11])
    close_(model.convs[0], [0, 3])
    plan = ng.plan(model, image())
    again = ng.Plan.from_json(plan.to_json())
    assert again == plan
    assert ng.compact(model, again).width == 2
    model.width = "four"
    with pytest.raises(ng.PlanError, match="width"):
        ng.compact(model, plan)
