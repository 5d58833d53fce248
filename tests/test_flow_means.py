"""Constants in front of a layer that a norm reads alone go into the norm's running mean: no bias is added."""

import copy

import pytest
import torch
from flow_helpers import Net, assert_same_function, close_, image, settle_, tensors_of
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.flow.plan import LAYOUTS, Plan
from narrowgate.streamed import compact_to

CLOSED = [1, 4]


def net(body, *, last=None, **parts):
    """conv1 -> norm1 -> ReLU, of which channels 1 and 4 are constants that are not 0, -> body."""
    parts = {
        "conv1": nn.Conv2d(3, 6, 3, bias=False),
        "norm1": nn.BatchNorm2d(6),
        "conv2": last or nn.Conv2d(6, 5, 3, bias=False),
        "norm2": nn.BatchNorm2d(5),
        **parts,
    }
    model = settle_(Net(lambda net, x: body(net, F.relu(net.norm1(net.conv1(x)))), **parts), image())
    close_(model.conv1, CLOSED)
    with torch.no_grad():
        model.norm1.running_mean[CLOSED] = 0.0
        model.norm1.bias[CLOSED] = 0.7
    return model


def chain(net, x):
    return F.relu(net.norm2(net.conv2(x)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_norm_takes_the_constants(layout):
    model = net(chain)
    plan = ng.plan(model, image(), layout=layout)
    small = ng.compact(model, plan)
    assert small.conv1.out_channels == 4 and small.conv2.bias is None
    assert plan.parameters_after == sum(p.numel() for p in small.parameters())
    wanted = model.norm2.running_mean - 0.7 * model.conv2.weight[:, CLOSED].sum((1, 2, 3))
    assert torch.allclose(small.norm2.running_mean, wanted, rtol=1e-12)
    assert not torch.allclose(wanted, model.norm2.running_mean, rtol=1e-2), "nothing had to move: the test is blind"
    assert_same_function(model, small, image())
    assert_same_function(model, small, image(size=11))


@pytest.mark.parametrize(
    "last",
    [
        nn.Conv2d(6, 5, 1, padding="same", bias=False),
        nn.Conv2d(6, 5, 3, padding=1, padding_mode="reflect", bias=False),
    ],
    ids=["one pixel", "reflect"],
)
def test_other_layers_do_as_well(last):
    model = net(chain, last=last)
    small = ng.compact(model, ng.plan(model, image()))
    assert small.conv1.out_channels == 4 and small.conv2.bias is None
    assert_same_function(model, small, image())


def test_rows_that_are_constant_and_stay_are_zero():
    """A residual stream keeps the channel; its filter is zero and the norm holds what it is."""

    def body(net, x):
        return net.norm2(net.conv2(x)) + net.conv3(x)

    model = net(body, conv3=nn.Conv2d(6, 5, 3, bias=False))
    with torch.no_grad():
        model.conv2.weight[2, [0, 2, 3, 5]] = 0.0  # reads constants alone
    plan = ng.plan(model, image())
    small = ng.compact(model, plan)
    assert plan.edits["conv2.weight"].rows and small.conv2.bias is None
    assert small.conv3.bias is not None  # no norm behind it
    assert not small.conv2.weight[2].any()
    assert_same_function(model, small, image())


def two_writers(net, x):
    return F.relu(net.norm2(net.conv2(x)) + net.norm3(net.conv3(x)))


def test_channels_that_are_filled_in_keep_their_mean():
    """In the scatter layout each of two layers computes its own channels of a stream, and the norms read all of it."""
    model = net(two_writers, conv3=nn.Conv2d(6, 5, 3, bias=False), norm3=nn.BatchNorm2d(5))
    with torch.no_grad():
        model.conv2.weight[[1, 3]] = 0.0
        model.conv2.weight[2, [0, 2, 3, 5]] = 0.0  # reads constants alone
        model.conv3.weight[[0, 4]] = 0.0
    plan = ng.plan(model, image(), layout="scatter")
    small = ng.compact(model, plan)
    assert plan.edits["conv2.weight"].scatter is not None and len(small.conv2.weight) == 2
    assert small.conv2.bias is None and small.conv3.bias is None
    assert_same_function(model, small, image())


def also_read(net, x):
    y = net.conv2(x)
    return net.norm2(y) + y


def read_twice(net, x):
    return net.norm2(net.conv2(x)) + net.norm2(net.conv3(x))


def statistics_read(net, x):
    return net.norm2(net.conv2(x)) * net.norm2.running_mean.mean()


def activated_first(net, x):
    return net.norm2(F.relu(net.conv2(x)))


def places_for_channels(net, x):
    return net.norm3(net.linear(x.mean(3).transpose(1, 2)))


@pytest.mark.parametrize("body", [also_read, read_twice, statistics_read, activated_first])
def test_a_bias_where_the_norm_is_not_alone(body):
    parts = {"conv3": nn.Conv2d(6, 5, 3, bias=False)} if body is read_twice else {}
    model = net(body, **parts)
    small = ng.compact(model, ng.plan(model, image()))
    assert small.conv1.out_channels == 4 and small.conv2.bias is not None
    assert_same_function(model, small, image())


def test_a_norm_over_places_takes_nothing():
    """A BatchNorm1d behind a linear layer over (batch, places, channels) has a mean of each place, here as many."""
    model = net(places_for_channels, linear=nn.Linear(6, 6, bias=False), norm3=nn.BatchNorm1d(6))
    small = ng.compact(model, ng.plan(model, image()))
    assert torch.equal(small.norm3.running_mean, model.norm3.running_mean)
    assert_same_function(model, small, image())


def test_training_goes_on_alike_without_a_bias():
    """In training mode the small model gives what the large one does, and its running mean keeps its distance."""
    model = net(chain, head=nn.Linear(5, 2))
    gates = ng.attach_gates_(model, where=lambda name, _: name == "conv1")
    for gate in gates.modules():
        gate.g.data[CLOSED] = 0.0
    cut = copy.deepcopy(model)
    optimizer = torch.optim.SGD(cut.parameters(), 0.1, momentum=0.9)
    ng.compact_(cut, ng.plan(cut, image(), training=True), optimizer=optimizer)
    assert cut.conv1.out_channels == 4 and cut.conv2.bias is None
    assert_same_function(model, cut, image())
    away = model.norm2.running_mean - cut.norm2.running_mean
    for _ in range(3):
        x = image(batch=8)
        assert torch.allclose(model.train()(x), cut.train()(x), rtol=1e-9, atol=1e-9)
    assert torch.allclose(cut.norm2.running_mean + away, model.norm2.running_mean, rtol=1e-9)
    assert_same_function(model, cut, image())


def noise_in_training(net, x):
    """It multiplies what the layer gives, and would meet the constant."""
    y = net.conv2(x)
    return net.norm2(y * (1 + torch.rand_like(y)) if net.training else y)


def without_the_norm_in_training(net, x):
    y = net.conv2(x)
    z = net.norm2(y)
    return net.conv3(y if net.training else z)


def both_in_training(net, x):
    y = net.conv2(x)
    z = net.norm2(y)
    return (y, z) if net.training else z


@pytest.mark.parametrize("body", [noise_in_training, without_the_norm_in_training, both_in_training])
def test_a_bias_where_training_does_more_than_the_plan_sees(body):
    model = net(body, conv3=nn.Conv2d(5, 4, 1))
    gates = ng.attach_gates_(model, where=lambda name, _: name == "conv1")
    for gate in gates.modules():
        gate.g.data[CLOSED] = 0.0
    cut = copy.deepcopy(model)
    ng.compact_(cut, ng.plan(cut, image(), training=True))
    assert cut.conv1.out_channels < 6 and cut.conv2.bias is not None
    assert_same_function(model, cut, image())
    x = image(batch=8)
    torch.manual_seed(0)
    wanted = tensors_of(model.train()(x))
    torch.manual_seed(0)
    for one, other in zip(wanted, tensors_of(cut.train()(x)), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_from_disk_and_in_a_file(tmp_path):
    model = net(chain)
    plan = Plan.from_json(ng.plan(model, image()).to_json())
    assert plan.edits["conv2.weight"].mean == "norm2.running_mean"
    small = ng.compact(model, plan)
    with torch.device("meta"):
        shapes = copy.deepcopy(model).to("meta")
    compact_to(tmp_path / "small", shapes, plan, model.state_dict())
    ng.save(small, plan, tmp_path / "other")
    for folder in ("small", "other"):
        again = ng.load(tmp_path / folder, lambda: copy.deepcopy(model)).state_dict()
        assert all(torch.equal(again[name], tensor) for name, tensor in small.state_dict().items())


@pytest.mark.parametrize("tensor", ["conv2.bias", "norm2.running_mean"])
def test_constants_go_where_a_file_has_them(tmp_path, tensor):
    """A buffer that is not saved is made anew when the model is loaded, and has nothing of what was put into it."""

    def build(values=None):
        model = net(chain, last=nn.Conv2d(6, 5, 3, bias=tensor == "conv2.bias"))
        owner, _, key = tensor.partition(".")
        owner, values = model.get_submodule(owner), model.state_dict()[tensor] if values is None else values
        delattr(owner, key)
        owner.register_buffer(key, values, persistent=False)
        model.norm1.bias.data[CLOSED[0]] = 0.0  # a zero goes in any case
        return model

    model = build()
    plan = ng.plan(model, image())
    small = ng.compact(model, plan)
    assert sum(p.numel() for p in small.parameters()) < plan.parameters_before
    assert_same_function(model, small, image())
    ng.save(small, plan, tmp_path / "small")
    again = ng.load(tmp_path / "small", lambda: build(model.get_buffer(tensor)))
    assert_same_function(model, again, image())


def test_a_plan_for_another_model_is_refused():
    model = net(chain)
    plan = ng.plan(model, image())
    model.norm2 = nn.Identity()
    with pytest.raises(ng.PlanError, match="norm2"):
        ng.compact(model, plan)
