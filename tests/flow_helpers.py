"""Small networks for the remover's tests, and the one question asked of each: smaller, and still the same function?"""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils import _pytree as pytree

import narrowgate as ng
from narrowgate.flow.plan import LAYOUTS

# The largest difference allowed, relative to the spread of outputs, and how many times rounding noise it may be.
TOLERANCE = 1e-9
NOISE_FACTOR = 100.0


class Net(nn.Module):
    """Named modules and parameters, and a function ``body(net, *inputs)`` that is the forward pass."""

    def __init__(self, body, **parts):
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.body(self, *inputs)


class Residual(nn.Module):
    """One residual block with a norm before it, for 3 channels."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.stem(x)))
        x = x + self.conv2(F.relu(self.conv1(x)))
        return self.head(x.mean((2, 3)))


def image(channels=3, size=8, batch=4):
    return torch.randn(batch, channels, size, size, dtype=torch.float64)


def mixing_layers(model):
    """The convolutions and linear layers by name; a layer registered twice counts once."""
    return {name: m for name, m in model.named_modules() if isinstance(m, (_ConvNd, nn.Linear))}


@torch.no_grad()
def close_(layer, channels, constant=None):
    """Make output channels of a convolution or linear layer zero, or a constant."""
    if isinstance(layer, _ConvTransposeNd):
        inputs = layer.weight.shape[0] // layer.groups
        for channel in channels:
            group, row = divmod(channel, layer.weight.shape[1])
            layer.weight[group * inputs : (group + 1) * inputs, row] = 0
    else:
        layer.weight[list(channels)] = 0
    if layer.bias is not None:
        layer.bias[list(channels)] = 0.0 if constant is None else constant


@torch.no_grad()
def settle_(model, inputs):
    """Double precision, BatchNorm statistics that fit the data and are then moved, shifts with some exact zeros."""
    model.double()
    norms = {norm: norm.momentum for norm in model.modules() if isinstance(norm, _BatchNorm)}
    if norms:
        model.train()
        for norm in norms:
            norm.momentum = None  # the average of all batches
        for _ in range(2):
            call(model, inputs)
    for norm, momentum in norms.items():
        norm.momentum = momentum
        _perturb_norm_(norm)
    return model.eval()


def _perturb_norm_(norm):
    if norm.running_var is not None:
        variance = norm.running_var
        variance.copy_(torch.where(variance < 1e-9, 1.0, variance).mul_(torch.empty_like(variance).uniform_(0.5, 2)))
        norm.running_mean.add_(torch.randn_like(variance) * 0.3 * variance.sqrt())
    if norm.weight is not None:
        norm.weight.uniform_(0.5, 1.5).mul_(torch.randn_like(norm.weight).sign())
        norm.bias.normal_(0, 0.5).masked_fill_(torch.rand_like(norm.bias) < 0.3, 0.0)


@torch.no_grad()
def close_at_random_(model, share=0.4, keep=()):
    """Close filters at random in every layer but those named, never all of one; about half keep a bias."""
    for name, layer in mixing_layers(model).items():
        width = layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features
        closed = torch.rand(width) < share
        closed[torch.randint(width, ())] = False
        if name in keep:
            continue
        for channel in closed.nonzero().flatten().tolist():
            close_(layer, [channel], torch.randn(()).item() if torch.rand(()) < 0.5 else None)
    return model


def prepare_(model, inputs, share=0.4, keep=()):
    """A model with random closed filters, and statistics that keep the signal alive all the same."""
    return settle_(close_at_random_(model, share, keep), inputs)


def call(model, inputs):
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def more_like(inputs, batch=None):
    """Random inputs of the same kind at another batch size."""

    def one(leaf):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        shape = (2 * leaf.shape[0] + 1 if batch is None else batch, *leaf.shape[1:])
        if leaf.is_floating_point():
            return torch.randn(shape, dtype=leaf.dtype)
        return torch.randint(0, int(leaf.max()) + 1, shape, dtype=leaf.dtype)

    return pytree.tree_map(one, inputs)


def tensors_of(output):
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@torch.no_grad()
def relative_error(model, small, inputs):
    """The largest difference over the spread of outputs across inputs, and what one ulp in or out is on that scale."""
    model, small = copy.deepcopy(model).eval(), copy.deepcopy(small).eval()
    wanted, got = tensors_of(call(model, inputs)), tensors_of(call(small, inputs))
    moved = tensors_of(call(model, pytree.tree_map(_next, inputs)))
    assert [t.shape for t in wanted] == [t.shape for t in got]
    error = noise = 0.0
    for want, other, near in zip(wanted, got, moved, strict=True):
        if not want.is_floating_point():
            assert torch.equal(want, other)
            continue
        assert want.isfinite().all() and other.isfinite().all()
        spread, size = spread_of(want), want.abs().max().item()
        if spread <= 1e-9 * size:  # constant outputs: their spread is rounding, so their size is the scale
            spread = size or 1.0
        rounding = max((want - near).abs().max().item(), torch.finfo(want.dtype).eps * size)
        error = max(error, (want - other).abs().max().item() / spread)
        noise = max(noise, rounding / spread)
    return error, noise


def spread_of(output):
    """How much outputs differ from one input to another."""
    return (output - output.mean(0, keepdim=True)).abs().max().item() if output.dim() else 0.0


def _next(leaf):
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    return torch.nextafter(leaf, torch.full_like(leaf, torch.inf))


@torch.no_grad()
def assert_alive(model, inputs):
    """Outputs differ from input to input: otherwise every comparison would be blind."""
    outputs = [t for t in tensors_of(call(copy.deepcopy(model).eval(), inputs)) if t.is_floating_point()]
    assert any(spread_of(t) > 1e-6 * max(1.0, t.abs().max().item()) for t in outputs), "the signal died"


def assert_same_function(model, small, inputs, also=()):
    """Equal outputs for these inputs, for another batch size, and for any other inputs given."""
    for one in (inputs, more_like(inputs), *also):
        error, noise = relative_error(model, small, one)
        assert error <= max(TOLERANCE, NOISE_FACTOR * noise), f"off by {error:.1e} of the spread, noise {noise:.1e}"


def assert_apart(model, small):
    """The two models share no memory: training one must not change the other."""
    ours = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if t.numel()}
    theirs = {t.untyped_storage().data_ptr() for t in (*small.parameters(), *small.buffers()) if t.numel()}
    assert not ours & theirs


def assert_trains(model, small, inputs):
    """A forward and a backward pass in train mode, with the shapes the large model has there."""
    model, small = copy.deepcopy(model).train(), copy.deepcopy(small).train()
    wanted, got = tensors_of(call(model, inputs)), tensors_of(call(small, inputs))
    assert [t.shape for t in wanted] == [t.shape for t in got]
    sum(t.sum() for t in got if t.requires_grad).backward()


def assert_untouched(model, before):
    """Parameters, buffers and train/eval flags are those of the copy, to the bit."""
    after, wanted = model.state_dict(), before.state_dict()
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]


def count(model):
    return sum(p.numel() for p in model.parameters())


def shrink(model, inputs, *, removes=True, layout="aligned", also=(), **options):
    """Plan, compact, and check everything that must hold for any model; returns the plan and the small model.

    ``removes`` is the negative control: whether fewer parameters must be left.
    """
    before = copy.deepcopy(model)
    assert_alive(model, inputs)
    plan = ng.plan(model, inputs, layout=layout, **options)
    small = ng.compact(model, plan)
    assert_untouched(model, before)
    assert_apart(model, small)
    assert plan.parameters_after == count(small)
    assert removes is None or (count(small) < plan.parameters_before) == removes, plan
    ng.verify(model, small, inputs)
    assert_same_function(model, small, inputs, also)
    assert_trains(model, small, inputs)
    return plan, small


def shrink_all(model, inputs, *, removes=True, aligned_removes=None, also=()):
    """``shrink`` in every layout; returns the plan and the small model of the aligned one."""
    results = {}
    for layout in LAYOUTS:
        wanted = aligned_removes if layout == "aligned" and aligned_removes is not None else removes
        if layout == "auto" and aligned_removes is not None:
            wanted = None  # it takes what measures faster, which may be nothing
        results[layout] = shrink(model, inputs, removes=wanted, layout=layout, also=also)
    sizes = {layout: plan.parameters_after for layout, (plan, _) in results.items()}
    assert sizes["scatter"] <= sizes["auto"] <= sizes["aligned"], sizes
    return results["aligned"]


def kept(plan, name, axis=0):
    """The kept positions of one axis of a parameter."""
    cut = plan.cuts.get(name)
    return None if cut is None or axis not in cut.keep else list(cut.keep[axis])
