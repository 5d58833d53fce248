"""Blocks whose branch is dead go as a whole, and only if nobody could tell."""

import copy

import pytest
import torch
from flow_helpers import Net, assert_same_function, close_, image, settle_, shrink_all
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate import streamed
from narrowgate.flow.compose import compose


class Block(nn.Module):
    """Convolutions in a branch, with what comes of it added to what came in, by ``join`` if that is given."""

    def __init__(self, width=6, join=None, after=None):
        super().__init__()
        self.conv1 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.norm = nn.BatchNorm2d(2 * width)
        self.conv2 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.join, self.after = join or torch.add, after

    def forward(self, x, unused=None):
        y = self.join(x, self.conv2(F.relu(self.norm(self.conv1(x)))))
        return y if self.after is None else self.after(y)


def net(block, body=None, **more):
    """A stem, the block with its branch dead, and a head."""
    body = body or (lambda net, x: net.head(net.block(F.relu(net.stem(x))).mean((2, 3))))
    model = Net(body, stem=nn.Conv2d(3, 6, 3, padding=1), block=block, head=nn.Linear(6, 4), **more)
    settle_(model, image())
    close_(model.block.conv2, range(6))
    return model


def test_block_with_a_dead_branch_is_an_identity():
    model = net(Block())
    plan, small = shrink_all(model, image(), also=[image(size=11)])
    assert plan.idle == {"block": "identity"} and type(small.block) is nn.Identity
    left = sum(p.numel() for part in (model.stem, model.head) for p in part.parameters())
    assert plan.parameters_after == sum(p.numel() for p in small.parameters()) == left
    assert [(row.layer, row.kept) for row in plan.rows if "block" in row.layer] == [
        ("block.conv1", 0),
        ("block.conv2", 0),
    ]
    assert "block.conv1 12 0 0 block does nothing any more" in " ".join(str(plan).split())
    assert ng.Plan.from_json(plan.to_json()) == plan


def test_open_branch_stays():
    model = net(Block())
    with torch.no_grad():
        model.block.conv2.weight[3, 2] = 0.1
    plan, small = shrink_all(model, image())
    assert not plan.idle and small.block.conv2.out_channels == 6


@pytest.mark.parametrize(
    ("after", "before", "goes"),
    [
        (F.relu, F.relu, True),
        (F.relu, torch.sigmoid, True),
        (F.relu, lambda x: F.max_pool2d(F.relu(x), 3, 1, 1), True),
        (F.relu, lambda x: F.hardtanh(x, 0.0, 6.0), True),
        (F.relu6, F.relu6, True),
        (lambda x: F.hardtanh(x, -1.0, 2.0), lambda x: F.hardtanh(x, -1.0, 2.0), True),
        (lambda x: F.dropout(x, 0.0, False), F.relu, True),
        (lambda x: F.dropout(x, 0.5, False), F.relu, False),
        (lambda x: x.flatten(2).unflatten(2, x.shape[2:]), F.relu, True),
        (F.relu, F.silu, False),
        (F.relu, lambda x: x, False),
        (F.relu, lambda x: F.hardtanh(x, -1.0, 6.0), False),
        (F.relu6, F.relu, False),
        (lambda x: F.hardtanh(x, -1.0, 1.0), lambda x: F.hardtanh(x, -1.0, 2.0), False),
        (F.silu, F.silu, False),
        (lambda x: x.transpose(2, 3), F.relu, False),
    ],
)
def test_activation_behind_the_sum(after, before, goes):
    """It changes nothing where its input is what it would make of it."""
    last = nn.Conv2d(6, 6, (1, 3), padding=(0, 1))  # tells a picture from one that lies on its side
    body = lambda net, x: net.head(net.last(net.block(before(net.stem(x)))).mean((2, 3)))  # noqa: E731
    model = net(Block(after=after), body, last=last)
    plan, _ = shrink_all(model, image(), also=[image(size=11)], removes=None)
    assert bool(plan.idle) == goes


@pytest.mark.parametrize(
    ("join", "goes"),
    [
        (lambda x, y: y + x, True),
        (torch.sub, True),
        (lambda x, y: torch.add(x, y, alpha=2), True),
        (lambda x, y: torch.add(y, x, alpha=2), False),
        (lambda x, y: y - x, False),
        (lambda x, y: x * y + x, True),
        (lambda x, y: x + y.mean((2, 3), keepdim=True), True),
        (lambda x, y: x.mean((2, 3), keepdim=True) + y, False),
        (lambda x, y: torch.cat([x[:, :3], (x + y)[:, 3:]], 1), False),
    ],
)
def test_how_the_branch_is_joined(join, goes):
    model = net(Block(join=join))
    plan, _ = shrink_all(model, image(), also=[image(size=11)], removes=None)
    assert bool(plan.idle) == goes


def test_branch_that_is_a_constant_stays():
    model = net(Block())
    nn.init.constant_(model.block.conv2.bias, 0.3)
    plan, _ = shrink_all(model, image())
    assert not plan.idle


def used_twice(net, x):
    return net.head(net.block(net.block(F.relu(net.stem(x)))).mean((2, 3)))


def read_elsewhere(net, x):
    return net.head(net.block(F.relu(net.stem(x))).mean((2, 3))) + net.block.conv1.weight.sum()


def asked_for_an_attribute(net, x):
    x = F.relu(net.stem(x))
    return net.head((net.block(x) if net.block.conv1.kernel_size == (3, 3) else x).mean((2, 3)))


def given_more(net, x):
    return net.head(net.block(F.relu(net.stem(x)), x).mean((2, 3)))


def chosen_by_its_class(net, x):
    x = F.relu(net.stem(x))
    return net.head((net.block(x) if isinstance(net.block, Block) else -x).mean((2, 3)))


def written_to(net, x):
    x = F.silu(net.stem(x))
    y = net.block(x).relu_()
    return net.head((x - y).mean((2, 3)))


def partly_looked_at(net, x):
    x = F.relu(net.stem(x))
    y = net.block.conv1(x)
    return net.head(net.block(x).mean((2, 3)) + y.mean())


@pytest.mark.parametrize(
    "body",
    [
        used_twice,
        read_elsewhere,
        asked_for_an_attribute,
        given_more,
        chosen_by_its_class,
        written_to,
        partly_looked_at,
    ],
)
def test_block_that_would_be_missed_stays(body):
    plan, small = shrink_all(net(Block(), body), image(), also=[image(size=11)], removes=None)
    assert not plan.idle and isinstance(small.block, Block)


def test_block_with_a_hook_stays():
    model, seen = net(Block()), []
    model.block.conv1.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    plan = ng.plan(model, image())
    assert not plan.idle
    seen.clear()
    ng.compact(model, plan)(image())
    assert len(seen) == 1


def test_tied_weight_stays():
    model = net(Block(), other=nn.Conv2d(6, 12, 3, padding=1).double())
    model.other.weight = model.block.conv1.weight
    assert not ng.plan(model, image()).idle


def test_the_models_input_is_not_written_to():
    """With an Identity in its place, what is written to the block's result would be written to the user's images."""
    model = Net(
        lambda net, x: net.head(net.block(x).relu_().mean((2, 3))), block=Block(3), head=nn.Linear(3, 4)
    ).double()
    close_(model.block.conv2, range(3))
    x = image()
    before = x.clone()
    plan, small = shrink_all(model, x, removes=None)
    small(x)
    assert not plan.idle and torch.equal(x, before)


def test_one_of_several_classes():
    """What is asked of one class of blocks does not hold the others."""

    class Asked(Block):
        pass

    def body(net, x):
        x = net.block(F.relu(net.stem(x)))
        return net.head((net.asked(x) * float(net.asked.conv1.kernel_size[0])).mean((2, 3)))

    model = net(Block(), body, asked=Asked())
    close_(model.asked.conv2, range(6))
    plan, _ = shrink_all(model, image())
    assert plan.idle == {"block": "identity"}


def test_blocks_in_a_row():
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()),
        nn.Sequential(*(Block(after=F.relu) for _ in range(4))),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    )
    settle_(model, image())
    for i in (0, 1, 3):
        close_(model[1][i].conv2, range(6))
    plan, small = shrink_all(model, image())
    assert sorted(plan.idle) == ["1.0", "1.1", "1.3"]
    assert [type(part) for part in small[1]] == [nn.Identity, nn.Identity, Block, nn.Identity]


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x, scale=None):
        x = self.fc2(F.gelu(self.fc1(x)))
        return x if scale is None else x * scale


class Transformer(nn.Module):
    """Two MLPs behind norms; the second is handed a number that the first one is not."""

    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.mlp1, self.mlp2 = Mlp(width), Mlp(width)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.mlp1(self.norm1(x))
        x = x + self.mlp2(self.norm2(x), scale=0.5)
        return self.norm3(x)


def test_branch_that_is_a_module_gives_zeros():
    model, x = settle_(Transformer(), torch.randn(4, 7, 5)), torch.randn(4, 7, 5, dtype=torch.float64)
    close_(model.mlp1.fc2, range(8))
    plan, small = shrink_all(model, x)
    assert plan.idle == {"mlp1": "zeros", "norm1": "unread"}
    assert type(small.mlp1) is nn.Threshold and type(small.norm1) is nn.Identity
    assert "replaced as well, as nothing reads it: norm1" in str(plan)
    gone = sum(p.numel() for part in (model.mlp1, model.norm1) for p in part.parameters())
    assert plan.parameters_before - plan.parameters_after == gone


@pytest.mark.parametrize(("layout", "idle"), [("aligned", []), ("scatter", ["mlp2", "norm2"])])
def test_branch_that_is_handed_more(layout, idle):
    """No module of PyTorch's takes a second argument and gives zeros: in the aligned layout the branch is one wide."""
    model, x = settle_(Transformer(), torch.randn(4, 7, 5)), torch.randn(4, 7, 5, dtype=torch.float64)
    close_(model.mlp2.fc2, range(8))
    plan = ng.plan(model, x, layout=layout)
    small = ng.compact(model, plan)
    assert_same_function(model, small, x)
    assert sorted(plan.idle) == idle
    if layout == "aligned":
        assert small.mlp2.fc1.out_features == 1


@pytest.mark.parametrize(
    "branch",
    [
        nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Conv2d(6, 6, 1)),
        nn.Sequential(nn.Conv2d(6, 6, 3, 2, 1), nn.Upsample(size=8)),
        nn.Sequential(nn.Conv2d(6, 6, 3, 2, 1), nn.ConvTranspose2d(6, 6, 2, 2)),
        nn.Sequential(nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3, padding=2)),
    ],
)
def test_branch_that_may_have_another_size_elsewhere(branch):
    """Zeros as large as the input are what it gives at this size; only by rule is that known of others."""
    model = Net(
        lambda net, x: net.head((net.stem(x).mean((2, 3), keepdim=True) + net.branch(net.stem(x))).mean((2, 3))),
        **{"stem": nn.Conv2d(3, 6, 1), "branch": branch, "head": nn.Linear(6, 4)},
    )
    settle_(model, image())
    layers = [layer for layer in branch if hasattr(layer, "weight")]
    close_(layers[-1], range(6))
    plan, _ = shrink_all(model, image(), removes=None)
    assert "branch" not in plan.idle


def test_norm_that_is_read_elsewhere_stays():
    class Both(Transformer):
        def forward(self, x):
            x = self.embed(x)
            y = self.norm1(x)
            return self.norm3(x + self.mlp1(y)), y

    model, x = settle_(Both(), torch.randn(4, 7, 5)), torch.randn(4, 7, 5, dtype=torch.float64)
    close_(model.mlp1.fc2, range(8))
    plan, _ = shrink_all(model, x)
    assert plan.idle == {"mlp1": "zeros"}


def test_norm_that_is_read_in_training_only_stays():
    class Both(Transformer):
        def forward(self, x):
            x = self.embed(x)
            y = self.norm1(x)
            x = self.norm3(x + self.mlp1(y))
            return x + 0.1 * y if self.training else x

    model, x = settle_(Both(), torch.randn(4, 7, 5)), torch.randn(4, 7, 5, dtype=torch.float64)
    close_(model.mlp1.fc2, range(8))
    plan, _ = shrink_all(model, x)
    assert plan.idle == {"mlp1": "zeros"}


def test_saved_and_loaded(tmp_path):
    model = net(Block())
    x = image()
    plan = ng.plan(model, x)
    small = ng.compact(model, plan)
    ng.save(small, plan, tmp_path / "small")
    for load in (ng.load, streamed.load):
        again = load(tmp_path / "small", lambda: net(Block())).eval()
        assert type(again.block) is nn.Identity
        assert torch.equal(again(x), small(x))


def test_in_place_it_stays_one_channel_wide(tmp_path):
    """Gates and optimizer state hang on its layers; what is saved then has them, too."""
    model = net(Block())
    x, whole = image(), copy.deepcopy(model)
    plan = ng.plan(model, x)
    ng.compact_(model, plan)
    assert model.block.conv1.out_channels == 1
    assert_same_function(whole, model, x)
    ng.save(model, plan, tmp_path / "small")
    again = ng.load(tmp_path / "small", lambda: net(Block())).eval()
    assert isinstance(again.block, Block) and torch.equal(again(x), model(x))


def test_not_while_training():
    assert not ng.plan(net(Block()), image(), training=True).idle


def test_composed_with_an_earlier_cut():
    model = net(Block())
    x = image()
    gates = ng.attach_gates_(model, where=lambda name, _: name == "block.conv1")
    gates["block.conv1"].close_(torch.arange(12) < 5)
    first = ng.plan(model, x, training=True)
    ng.compact_(model, first)
    second = ng.plan(model, x)
    small = ng.compact(model, second)
    both = compose(first, second)
    assert both.idle == {"block": "identity"} and both.parameters_after == second.parameters_after
    assert {n: p.shape for n, p in ng.compact(net(Block()), both).named_parameters()} == {
        n: p.shape for n, p in small.named_parameters()
    }


def test_plan_for_another_model_is_refused():
    plan = ng.plan(net(Block()), image())
    other = Net(lambda net, x: net.head(x), stem=nn.Conv2d(3, 6, 3), head=nn.Linear(6, 4)).double()
    with pytest.raises(ng.PlanError, match="another model"):
        ng.compact(other, plan)


def test_trains_on_as_the_whole_network_does():
    model = net(Block(after=F.relu))
    x = image()
    small = ng.compact(model, ng.plan(model, x)).train()
    model.train()
    for one in (model, small):
        one.zero_grad()
        one(x).square().sum().backward()
    assert torch.allclose(model.stem.weight.grad, small.stem.weight.grad)


@pytest.mark.parametrize("seed", range(12))
def test_random_rows_of_blocks(seed):
    """Blocks of several kinds, dead or not, in random order: always the same function, and dead ones of one kind go."""
    torch.manual_seed(seed)
    kinds = [lambda: Block(after=F.relu), Block, lambda: Block(after=F.silu), lambda: Block(join=lambda x, y: y + x)]
    blocks = [kinds[int(torch.randint(4, ()))]() for _ in range(6)]
    model = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)),
    )
    settle_(model, image())
    dead = [i for i in range(6) if torch.rand(()) < 0.5]
    for i in dead:
        close_(blocks[i].conv2, range(6))
    plan, small = shrink_all(model, image(), also=[image(size=11)], removes=None)
    plain = [f"{i + 2}" for i in dead if blocks[i].after is None]
    assert set(plain) <= plan.idle.keys() <= {f"{i + 2}" for i in dead if blocks[i].after is not F.silu}
    assert all(type(small[int(i)]) is nn.Identity for i in plan.idle)
