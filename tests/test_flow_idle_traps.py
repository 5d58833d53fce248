"""Dead blocks that were once replaced where somebody could tell: each of these models must do as well as before."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowgate as ng


@pytest.fixture(autouse=True)
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def dead(layer):
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Block(nn.Module):
    def __init__(self, after=None):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(6, 12, 3, padding=1), dead(nn.Conv2d(12, 6, 3, padding=1))
        self.after = after

    def forward(self, x):
        y = x + self.conv2(F.relu(self.conv1(x)))
        return y if self.after is None else self.after(y)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 24), dead(nn.Linear(24, 8))

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(x) + x


class Net(nn.Module):
    def __init__(self, body, **parts):
        super().__init__()
        self.body = body
        defaults = {"stem": nn.Conv2d(3, 6, 3, padding=1), "block": Block(), "head": nn.Linear(6, 4)}
        for name, part in {**defaults, **parts}.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.body(self, *inputs)


def narrow(model, x, goes=False, **options):
    """The plan, which takes modules out or not, and the small model, which is the same function."""
    model.eval()
    plan = ng.plan(model, x, **options)
    small = ng.compact(model, plan).eval()
    ng.verify(model, small, x)
    assert bool(plan.idle) == goes
    assert plan.parameters_after == sum(p.numel() for p in small.parameters())
    return plan, small


def image(*shape):
    return torch.randn(shape or (4, 3, 8, 8))


def words(batch, length=5):
    return torch.randint(11, (batch, length))


def on_words(body, block, **parts):
    return Net(body, **{"stem": nn.Embedding(11, 8), "block": block, "head": nn.Linear(8, 11), **parts})


def test_planning_leaves_parameters_that_a_forward_writes_to():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.block = nn.Parameter(torch.randn(1, 8, 5)), Residual()
            self.head, self.into = nn.Linear(8, 4), nn.Linear(3, 8)

        def forward(self, x):
            y = self.block(self.tokens.transpose(1, 2)).unsqueeze(0).clamp_(min=-0.1).squeeze(0)
            return self.head((y + self.into(x)[:, None]).mean(1))

    model = Tokens()
    before = model.tokens.detach().clone()
    narrow(model, torch.randn(4, 3))
    assert torch.equal(before, model.tokens)


def test_planning_leaves_an_embedding_that_is_kept_short():
    class Short(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.block = nn.Embedding(11, 8, max_norm=0.5), Residual()
            self.calls = nn.Parameter(torch.zeros(()), False)

        def forward(self, x):
            self.calls.add_(1.0)
            return self.block(self.embedding(x))

    model = Short().eval()
    before = model.embedding.weight.detach().clone()
    ng.plan(model, words(3))
    assert model.calls.item() == 0 and torch.equal(before, model.embedding.weight)


def input_written_later(net, x):
    x = net.stem(x)
    y = net.block(x)
    x.clamp_(max=5.0)
    return net.head(y.mean((2, 3))) + x.mean()


def view_of_the_result_written(net, x):
    x = net.stem(x)
    y = net.block(x)
    z = y.flatten(1).clamp_(max=5.0)
    return net.head(x.mean((2, 3))) + z.mean()


def written_beside_a_buffer(net, x):
    net.seen.add_(1)
    x = net.stem(x)
    y = net.block(x).clamp_(max=5.0)
    return net.head((y - x * 0.5).mean((2, 3)))


@pytest.mark.parametrize("body", [input_written_later, view_of_the_result_written, written_beside_a_buffer])
def test_memory_that_is_written_to(body):
    model = Net(body)
    model.register_buffer("seen", torch.zeros(()))
    _, small = narrow(model, image())
    x = 20 * image()
    assert torch.allclose(model(x), small(x))


def test_input_that_would_be_written_to():
    def body(net, x):
        return net.head(net.block(x.transpose(1, 2)).flatten(2).clamp_(min=0).mean(1))

    x = torch.randn(4, 8, 5)
    _, small = narrow(Net(body, block=Residual(), head=nn.Linear(8, 4)), x)
    before = x.clone()
    with torch.no_grad():
        small(x)
    assert torch.equal(x, before)


def dropped_in_place(net, x):
    return net.head(net.drop(net.block(F.relu(net.stem(x))).flatten(1)))


def noisy_while_training(net, x):
    x = F.relu(net.stem(x))
    y = net.block(x)
    if net.training:
        y += 0.1 * torch.randn_like(y)
    return net.head(y.mean((2, 3)))


def read_while_training(net, x):
    y = net.head(net.block(F.relu(net.stem(x))).mean((2, 3)))
    return (y, net.block.conv1.weight.abs().sum()) if net.training else y


@pytest.mark.parametrize("body", [dropped_in_place, noisy_while_training, read_while_training])
def test_what_training_does(body):
    parts = {"head": nn.Linear(384, 4), "drop": nn.Dropout(0.5, inplace=True)} if body is dropped_in_place else {}
    x = image()
    _, small = narrow(Net(body, **parts), x)
    result = small.train()(x)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


def test_attention_that_returns_two():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm, self.head = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            dead(self.attention.out_proj)

        def forward(self, x):
            x = self.embedding(x)
            y = self.norm(x)
            return self.head(x + self.attention(y, y, y, need_weights=False)[0])

    model = Words()
    _, small = narrow(model, words(2), layout="scatter")
    x = words(3)
    assert torch.allclose(model(x), small(x))


@pytest.mark.parametrize("batch", [1, 2])
def test_block_that_returns_two(batch):
    class Two(Residual):
        def forward(self, x):
            return super().forward(x), None

    model = on_words(lambda net, x: net.head(net.block(net.stem(x))[0]).view(-1, 11), Two())
    _, small = narrow(model, words(batch))
    assert small(words(3)).shape == (15, 11)


def test_new_biases_are_counted_as_wide_as_they_would_be():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.norm = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6)
            self.conv2, self.scale = nn.Conv2d(6, 6, 1, bias=False), nn.Parameter(torch.zeros(6, 1, 1))
            nn.init.zeros_(self.norm.weight)
            nn.init.ones_(self.norm.bias)

        def forward(self, x):
            return x + self.scale * self.conv2(F.relu(self.norm(self.conv1(x))))

    narrow(
        Net(lambda net, x: net.head(net.block(F.relu(net.stem(x))).mean((2, 3))), block=Scaled()), image(), goes=True
    )


def test_a_number_below_zero_is_added():
    model = Net(lambda net, x: net.head(net.block(F.relu(net.stem(x)) + (-1.0)).mean((2, 3))), block=Block(F.relu))
    nn.init.constant_(model.stem.bias, 8.0)  # so that nothing is negative for small images
    _, small = narrow(model, image())
    x = 20 * image()
    assert torch.allclose(model(x), small(x))


def test_result_that_lies_otherwise_in_memory():
    model = on_words(lambda net, x: net.head(net.block(net.stem(x).transpose(0, 1)).view(-1, 8)), Residual())
    _, small = narrow(model, words(1))
    assert small(words(3)).shape == (15, 11)


class Sliced(Mlp):
    def forward(self, x):
        return super().forward(x[:, :8])


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), dead(nn.Linear(6, 6))

    def forward(self, x):
        return self.last(F.relu(self.first(x.permute(0, 2, 3, 1)))).permute(0, 3, 2, 1)


class TurnedView(Block):
    def forward(self, x):
        y = super().forward(x)
        batch, channels, height, width = y.shape
        return y.flatten(2).view(batch, channels, width, height)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.positions = dead(nn.Linear(8, 8)), nn.Parameter(torch.randn(6, 8))

    def forward(self, x):
        return x + self.fc(x + self.positions)


def sliced(net, x):
    x = net.stem(x)
    return net.head(torch.cat([x, net.block(x)], 1).mean(1))


def turned(net, x):
    x = net.stem(x)
    return net.head(x.mean((2, 3))), net.block(x)


SIZES = {
    "slice": (lambda: on_words(sliced, Sliced(), head=nn.Linear(8, 4)), words(2, 8), words(2, 12)),
    "turned": (lambda: Net(turned, block=Turned()), image(), image(2, 3, 8, 12)),
    "turned view": (
        lambda: Net(
            lambda net, x: net.head(net.last(net.block(net.stem(x))).mean((2, 3))),
            **{"block": TurnedView(), "last": nn.Conv2d(6, 6, (1, 3))},
        ),
        image(),
        image(2, 3, 8, 12),
    ),
    "broadcast": (
        lambda: Net(
            lambda net, x: net.head(net.block(net.stem(x))),
            **{"stem": nn.Linear(3, 8), "block": Positions(), "head": nn.Linear(8, 4)},
        ),
        torch.randn(4, 6, 3),
        torch.randn(4, 1, 3),
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_at_which_it_is_something_else(name):
    build, given, other = SIZES[name]
    model = build()
    _, small = narrow(model, given.to(torch.get_default_dtype()) if given.is_floating_point() else given)
    x = other.to(torch.get_default_dtype()) if other.is_floating_point() else other
    wanted, got = model(x), small(x)
    for one, two in zip(*((t if isinstance(t, tuple) else (t,)) for t in (wanted, got)), strict=True):
        assert one.shape == two.shape and torch.allclose(one, two)


def test_nothing_to_compare_is_no_proof():
    class Out:
        def __init__(self, x):
            self.x = x

    torch.utils._pytree.register_pytree_node(
        Out, lambda out: ([out.x], None), lambda parts, _: Out(parts[0]), serialized_type_name="tests.Out"
    )

    def body(net, x):
        y = F.relu(net.stem(x))
        return Out(net.head((net.block(y) if isinstance(net.block, Block) else -y).mean((2, 3))))

    model = Net(body).eval()
    x = image()
    plan = ng.plan(model, x)
    assert not plan.idle and torch.allclose(model(x).x, ng.compact(model, plan)(x).x)


def test_norm_without_parameters_that_was_not_replaced(tmp_path):
    def build():
        parts = {"norm": nn.LayerNorm(8, elementwise_affine=False), "block": Mlp(), "head": nn.Linear(8, 4)}
        body = lambda net, x: net.head(net.stem(x) + net.block(net.norm(net.stem(x))))  # noqa: E731
        return Net(body, stem=nn.Linear(3, 8), **parts)

    model = build().eval()
    x = torch.randn(4, 5, 3)
    plan = ng.plan(model, x)
    ng.compact_(model, plan)  # which leaves both
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ng.save(model, plan, tmp_path / "small")
    again = ng.load(tmp_path / "small", build).eval()
    assert type(again.norm) is nn.LayerNorm and torch.allclose(model(x), again(x))


def test_forward_put_on_the_block():
    model, seen = Net(lambda net, x: net.head(net.block(F.relu(net.stem(x))).mean((2, 3)))), []
    own = model.block.forward
    model.block.forward = lambda x: seen.append(1) or own(x)
    narrow(model, image())


def test_block_that_lets_no_gradient_through():
    def body(net, x):
        x = F.relu(net.stem(x))
        with torch.no_grad():
            x = net.block(x)
        return net.head(x.mean((2, 3)))

    _, small = narrow(Net(body), image())
    small.train()(image()).sum().backward()
    assert small.stem.weight.grad is None


def test_results_that_are_handed_out_stay_two():
    def body(net, x):
        x = F.relu(net.stem(x))
        return x, net.block(x)

    _, small = narrow(Net(body), image())
    one, other = small(image())
    assert one.data_ptr() != other.data_ptr()
