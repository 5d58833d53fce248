"""Dead branches in the scatter layout: layers with nothing left to compute start no kernel."""

import copy

import pytest
import torch
from flow_helpers import Net, Residual, close_, image, settle_, shrink
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgate as ng
from narrowgate.flow.layers import IndexedLayer


class Count(TorchDispatchMode):
    """Which operations run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(model, x):
    with torch.no_grad(), Count() as count:
        model.eval()(x)
    return count.names


def idle(model):
    """The layers that compute nothing."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, IndexedLayer) and layer.scatter is not None and not len(layer.scatter)
    ]


def dead_branch(width=8):
    model = settle_(Residual(width), image())
    close_(model.conv2, range(width))
    return model


def test_a_dead_branch_starts_no_convolution():
    model = dead_branch()
    _, small = shrink(model, image(), layout="scatter", also=[image(size=11)])
    assert idle(small) == ["conv1", "conv2"]
    assert operations(model, image()).count("convolution") == 3
    assert operations(small, image()).count("convolution") == 1
    assert "index_copy" not in operations(small, image())


def test_a_living_branch_runs():
    model = dead_branch()
    with torch.no_grad():
        model.conv2.weight[3] = 1.0
    _, small = shrink(model, image(), layout="scatter")
    assert idle(small) == []
    assert operations(small, image()).count("convolution") == 3


def test_aligned_keeps_plain_layers():
    _, small = shrink(dead_branch(), image())
    assert not any(isinstance(layer, IndexedLayer) for layer in small.modules())
    assert operations(small, image()).count("convolution") == 3


def test_constants_of_a_dead_branch_are_still_added():
    """A branch of constants, not zeros, at two image sizes."""
    model = dead_branch()
    close_(model.conv2, range(8), constant=0.7)
    _, small = shrink(model, image(), layout="scatter", also=[image(size=11)])
    assert idle(small) == ["conv1", "conv2"]


CONVOLUTIONS = [
    (nn.Conv2d(3, 4, 3, stride=2, padding=1), (8, 11)),
    (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (8, 11)),
    (nn.Conv2d(3, 4, 3, padding="same", dilation=2), (8, 11)),
    (nn.Conv2d(3, 4, 3, padding="valid"), (8, 11)),
    (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (8, 11)),
    (nn.Conv1d(3, 4, 5, stride=3, padding=2), (16, 19)),
    (nn.Conv3d(3, 4, 2, stride=2), (4, 5)),
    (nn.Linear(3, 4), (5, 6)),
]


@pytest.mark.parametrize(("layer", "sizes"), CONVOLUTIONS, ids=str)
def test_shapes_are_those_of_the_layer(layer, sizes):
    def body(net, x):
        y = net.dead(x)
        return net.factor * y, net.live(x)

    layer = copy.deepcopy(layer)
    close_(layer, range(4), constant=0.3)
    live = nn.Linear(3, 4) if isinstance(layer, nn.Linear) else type(layer)(3, 4, 1)
    model = Net(body, dead=layer, live=live, factor=nn.Parameter(torch.tensor(2.0))).double().eval()
    dims = 0 if isinstance(layer, nn.Linear) else layer.weight.dim() - 2
    for size in sizes:
        shape = (2, 7, 3) if not dims else (2, 3, *range(size, size + dims))
        x = torch.randn(shape, dtype=torch.float64)
        small = ng.compact(model, ng.plan(model, x, layout="scatter"))
        assert idle(small) == ["dead"]
        for wanted, got in zip(model(x), small(x), strict=True):
            assert torch.equal(wanted, got) or torch.allclose(wanted, got)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: F.relu(y, inplace=True),
        lambda y: y.add_(1.0),
        lambda y: F.relu_(y.flatten(1)).view_as(y),
        lambda y: F.dropout(y, 0.5, False, inplace=True),
    ],
    ids=["relu", "add", "through a view", "dropout"],
)
def test_what_is_written_to_is_not_shared(write):
    """Expanded memory must not be written to: then the layer computes one row, as before."""

    def body(net, x):
        return net.last(write(net.dead(x)) + net.live(x))

    parts = {"dead": nn.Conv2d(3, 4, 3), "live": nn.Conv2d(3, 4, 3), "last": nn.Conv2d(4, 4, 1)}
    model = Net(body, **parts).double().eval()
    close_(model.dead, range(4), constant=-0.4)
    _, small = shrink(model, image(), layout="scatter")
    assert "dead" not in idle(small)
    first = small(image())
    assert first.isfinite().all()


def test_writing_in_training_only():
    """An in-place dropout that the eval graph does not show."""

    def body(net, x):
        y = net.dead(x)
        if net.training:
            y = F.dropout(y, 0.5, True, inplace=True)
        return net.last(y + net.live(x))

    parts = {"dead": nn.Conv2d(3, 4, 3), "live": nn.Conv2d(3, 4, 3), "last": nn.Conv2d(4, 4, 1)}
    model = Net(body, **parts).double().eval()
    close_(model.dead, range(4), constant=-0.4)
    _, small = shrink(model, image(), layout="scatter")
    assert idle(small) == ["dead"]
    fill = small.dead.fill.clone()
    small.train()(image())
    assert torch.equal(small.dead.fill, fill)


def test_an_output_is_not_shared_memory():
    """What the model hands out can be written to by its caller."""

    def body(net, x):
        return net.live(x), net.dead(x)

    model = Net(body, dead=nn.Conv2d(3, 4, 3), live=nn.Conv2d(3, 4, 3)).double().eval()
    close_(model.dead, range(4), constant=0.4)
    _, small = shrink(model, image(), layout="scatter")
    assert idle(small) == []
    small(image())[1].add_(1.0)


def test_the_last_layer_still_learns():
    """With nothing behind it that could learn, it keeps its row and its bias."""

    def body(net, x):
        return x[:, :1, 1:-1, 1:-1] + net.last(net.first(x))

    model = Net(body, first=nn.Conv2d(3, 6, 3), last=nn.Conv2d(6, 4, 1)).double().eval()
    close_(model.first, range(6))
    _, small = shrink(model, image(), layout="scatter")
    assert idle(small) == ["first"] and small.last.bias.requires_grad


def test_idle_layers_do_not_train():
    """Their weights get no gradient, so they ask for none; the others go on."""
    _, small = shrink(dead_branch(), image(), layout="scatter")
    small.train()(image()).sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in small.parameters())
    assert not small.conv1.weight.requires_grad and small.stem.weight.requires_grad


def test_autocast_gives_its_own_dtype():
    model = dead_branch().float()
    small = ng.compact(model, ng.plan(model, image().float(), layout="scatter"))
    kinds = []
    for one in (model, small):
        hook = one.conv2.register_forward_hook(lambda module, args, output: kinds.append(output.dtype))
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            one(image().float())
        hook.remove()
    assert kinds == [torch.bfloat16, torch.bfloat16]


def test_saved_and_loaded(tmp_path):
    model = dead_branch()
    plan, small = shrink(model, image(), layout="scatter")
    ng.save(small, plan, tmp_path / "small")
    again = ng.load(tmp_path / "small", lambda: Residual(8).double())
    x = image()
    assert torch.equal(again.eval()(x), small.eval()(x))
    assert idle(again) == ["conv1", "conv2"]
