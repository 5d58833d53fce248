"""Options of a plan: widths in multiples, and constants that are kept, folded or dropped."""

import pytest
import torch
from flow_helpers import Net, Residual, close_, image, kept, prepare_, settle_, shrink
from torch import nn

import narrowgate as ng
from narrowgate.flow.plan import LAYOUTS


@pytest.mark.parametrize("round_to", [2, 8, 64])
def test_widths_are_rounded_up(round_to):
    model = prepare_(Residual(), image(), share=0.5, keep=["head"])
    close_(model.conv1, range(3, 16))
    plan, small = shrink(model, image(), round_to=round_to, removes=round_to < 64)
    for layer in (small.stem, small.conv1, small.conv2):
        assert layer.out_channels == min(16, -(-layer.out_channels // round_to) * round_to)
    if round_to == 8:
        assert small.conv1.out_channels == 8
        assert "width" in str(plan)


def constants_net(conv2, *between):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sigmoid(), *between, conv2)
    settle_(model, image())
    close_(model[0], [1, 2])
    return model


def test_exact_keeps_a_carrier_and_fold_does_not():
    model = constants_net(nn.Conv2d(6, 4, 3, padding=1))
    exact, fold, drop = (ng.plan(model, image(), constants=how) for how in ("exact", "fold", "drop"))
    assert len(kept(exact, "0.weight")) == 5
    assert kept(fold, "0.weight") == kept(drop, "0.weight") == [0, 3, 4, 5]


def test_fold_is_exact_inside_and_wrong_at_the_border_only():
    model = constants_net(nn.Conv2d(6, 4, 3, padding=1))
    small = ng.compact(model, ng.plan(model, image(), constants="fold"))
    x = image()
    error = (model(x) - small(x)).abs().amax((0, 1))
    assert error[1:-1, 1:-1].max() < 1e-12 < 1e-3 < error[0].min()


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_fold_is_exact_without_padding(groups):
    model = constants_net(nn.Conv2d(6, 4, 1), nn.Conv2d(6, 6, 3, groups=groups))
    close_(model[0], [4])
    shrink(model, image(), constants="fold")


def test_fold_into_a_layer_used_twice():
    def body(net, x):
        return net.last(net.twice(torch.sigmoid(net.twice(torch.sigmoid(net.first(x))))))

    parts = {"first": nn.Linear(3, 6), "twice": nn.Linear(6, 6), "last": nn.Linear(6, 2)}
    x = torch.randn(4, 3, dtype=torch.float64)
    model = settle_(Net(body, **parts), x)
    close_(model.first, [0, 1])
    close_(model.twice, [1, 2])
    shrink(model, x, constants="fold", removes=None)


@pytest.mark.parametrize("shape", [(6, 4), (6, 6), (4, 6)])
def test_fold_into_a_transposed_convolution(shape):
    """Only the outermost row and column of the result, which fewer kernels reach, may differ."""
    model = nn.Sequential(nn.Conv2d(3, shape[0], 3), nn.Sigmoid(), nn.ConvTranspose2d(*shape, 2))
    settle_(model, image())
    close_(model[0], [1, 2])
    plan = ng.plan(model, image(), constants="fold")
    small = ng.compact(model, plan)
    x = image()
    error = (model(x) - small(x)).abs().amax((0, 1))
    assert error[1:-1, 1:-1].max() < 1e-12


def test_drop_ignores_constants():
    """The small model is the large one with the constants set to zero before the layer that read them."""
    model = constants_net(nn.Conv2d(6, 4, 3, padding=1))
    small = ng.compact(model, ng.plan(model, image(), constants="drop"))
    x = image()
    hidden = torch.sigmoid(model[0](x)) * torch.tensor([1.0, 0, 0, 1, 1, 1], dtype=torch.float64)[:, None, None]
    assert torch.allclose(small(x), model[2](hidden), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drop_is_the_same_in_every_layout(layout):
    model = constants_net(nn.Conv2d(6, 4, 3))
    small = ng.compact(model, ng.plan(model, image(), constants="drop", layout=layout))
    x = image()
    hidden = torch.sigmoid(model[0](x)) * torch.tensor([1.0, 0, 0, 1, 1, 1], dtype=torch.float64)[:, None, None]
    assert torch.allclose(small(x), model[2](hidden), rtol=0, atol=1e-12)
