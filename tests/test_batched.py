"""The model's forward computes all gated weights at once; that must never show, except in speed."""

import copy
import threading
import warnings

import pytest
import torch
from helpers import ConvNet, assert_same, gradients, images, layer_by_layer, spread_gates_
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

import narrowgate as ng
from narrowgate import gated
from narrowgate.gated import PREPARED, GatedLayer
from narrowgate.gates import ExponentialGate
from narrowgate.models import PreActResNet

batches = pytest.mark.skipif(
    gated._top_saved_tensor_hooks is None, reason="this torch can't say whether a checkpoint is active: never batched"
)


def small_resnet(**options):
    model = PreActResNet(11, classes=5, dropout=0.0)
    spread_gates_(ng.attach_gates_(model, **options))
    return model


def run(model, x):
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), gradients(model)


@pytest.fixture
def computed_alone(monkeypatch):
    """The layers that computed their own weight, in order."""
    calls = []
    original = GatedLayer.scaled
    monkeypatch.setattr(GatedLayer, "scaled", lambda self, *a: calls.append(self) or original(self, *a))
    return calls


@batches
def test_the_batched_path_is_taken_where_it_can_be(computed_alone):
    model = ConvNet()
    ng.attach_gates_(model)
    model(images())
    assert computed_alone == [model.up]  # its gate is on the second axis of its weight


@pytest.mark.parametrize("replaces", [True, False])
def test_a_weight_that_the_forward_normalises(replaces):
    """What was computed ahead is of the weight before that, and is not used."""

    class Normalises(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 2)

        def forward(self, x):
            with torch.no_grad():
                weight = F.normalize(self.second.weight, dim=1)
                if replaces:
                    self.second.weight.data = weight
                else:
                    self.second.weight.copy_(weight)
            return self.head(self.second(torch.relu(self.first(x))))

    model = Normalises()
    spread_gates_(ng.attach_gates_(model))
    alone = layer_by_layer(model)
    x = torch.randn(3, 6)
    assert_same(model(x), alone(x))


@pytest.mark.parametrize("by", ["replaced", "mapped over", "closed by a hook"])
def test_gates_that_change_during_the_forward(by):
    """What was computed ahead is of the gates before that, and is not used."""

    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.answer(x))

        def answer(self, x):
            return self.body(x)

    model = Ensemble().double()
    spread_gates_(ng.attach_gates_(model))
    x, g = torch.randn(3, 6).double(), model.body[0].gate.g.detach()
    halved, closed = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        halved.body[0].gate.g.copy_(g / 2)
        closed.body[0].gate.g.zero_()
    if by == "replaced":
        expected = closed(x)
        model.answer = lambda x: functional_call(model.body, {"0.gate.g": torch.zeros_like(g)}, (x,))
    elif by == "mapped over":
        expected = (halved(x) + model(x)) / 2
        each = torch.stack([g / 2, g])
        model.answer = lambda x: vmap(lambda g: functional_call(model.body, {"0.gate.g": g}, (x,)))(each).mean(0)
    else:
        expected = closed(x)
        model.register_forward_pre_hook(lambda *_: model.body[0].gate.close_(torch.ones(8, dtype=torch.bool)))
    assert torch.allclose(model(x), expected, rtol=1e-12)


@batches
def test_values_of_gates_on_inputs_are_computed_together(monkeypatch):
    model = small_resnet(where=lambda name, layer: False, inputs=lambda name, layer: "conv" in name)
    alone = layer_by_layer(model)
    seen = []
    original = ExponentialGate.value
    monkeypatch.setattr(ExponentialGate, "value", lambda gate: seen.append(gate) or original(gate))
    x = images()
    (y, grads), count = run(model, x), len(seen)
    expected, expected_grads = run(alone, x)
    assert count == 0 and len(seen) > 0
    assert_same(y, expected)
    assert_same(grads, expected_grads)


@pytest.mark.parametrize("placement", ["before-norm", "after-norm"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_batched_and_layer_by_layer_agree_bit_for_bit(channels_last, placement):
    model = small_resnet(placement=placement)
    x = images()
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    alone = layer_by_layer(model)
    (y, grads), (expected, expected_grads) = run(model, x), run(alone, x)
    assert_same(y, expected)
    for name, grad in grads.items():
        # A gate's gradient is a sum over a filter, and two layouts may add in another order.
        assert_same(grad, expected_grads[name], **({"rtol": 1e-4, "atol": 1e-5} if name.endswith(".g") else {}))


def test_the_stride_of_every_weight_survives(monkeypatch):
    model = small_resnet().to(memory_format=torch.channels_last)
    model(images())  # the hooks run without an error
    seen = {}
    original = GatedLayer.effective
    monkeypatch.setattr(GatedLayer, "effective", lambda self: seen.setdefault(self, original(self)))
    model(images())
    assert len(seen) == 13
    assert all(weight.stride() == layer.weight.stride() for layer, (weight, _) in seen.items())


@pytest.mark.parametrize("make", [small_resnet, lambda: gated_convnet()])
def test_batched_and_layer_by_layer_agree_under_autocast(make):
    model = make()
    alone = layer_by_layer(model)
    x = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (y, grads), (expected, expected_grads) = run(model, x), run(alone, x)
    assert y.dtype == torch.bfloat16
    assert_same(y, expected)
    assert_same(grads, expected_grads, rtol=2e-2, atol=2e-2)


def gated_convnet():
    model = ConvNet()
    spread_gates_(ng.attach_gates_(model))
    return model


def test_a_layer_and_a_part_of_the_model_can_be_called_on_their_own():
    model = small_resnet().eval()
    x = images()
    stem = model.conv1(x)
    assert_same(stem, F.conv2d(x, model.conv1.weight * model.conv1.gate.value().view(-1, 1, 1, 1), padding=1))
    assert_same(model.fc(F.relu(model.bn(model.stages(stem))).mean((2, 3))), model(x))


@batches
def test_an_exception_in_forward_leaves_nothing_behind():
    class Fails(ConvNet):
        def forward(self, x):
            self.fc1(self.conv1(x))

    model = Fails()
    ng.attach_gates_(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(images())
    assert not any(PREPARED in vars(module) for module in model.modules())
    copy.deepcopy(model)


@batches
def test_a_copy_made_in_the_middle_of_a_forward_is_clean():
    class CopiesItself(ConvNet):
        def forward(self, x):
            assert PREPARED in vars(self.conv1)
            self.__dict__["twin"] = None
            self.__dict__["twin"] = copy.deepcopy(self)
            return super().forward(x)

    model = CopiesItself()
    ng.attach_gates_(model)
    model(images())
    assert not any(PREPARED in vars(module) for module in model.twin.modules())


def test_nothing_is_left_behind_after_a_forward():
    model = gated_convnet()
    with torch.no_grad():
        model(images())
    model(images())
    assert not any(PREPARED in vars(module) for module in model.modules())


def test_a_layer_called_twice_computes_the_same_both_times():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    model = Twice()
    spread_gates_(ng.attach_gates_(model, last=True))
    alone = layer_by_layer(model)
    x = torch.randn(3, 5)
    assert_same(run(model, x), run(alone, x), rtol=1e-6, atol=1e-7)


def test_no_grad_and_inference_mode():
    model = gated_convnet().eval()
    x = images()
    expected = model(x)
    with torch.no_grad():
        y = model(x)
    assert not y.requires_grad
    assert_same(y, expected.detach())
    with torch.inference_mode():
        assert_same(model(x), expected.detach())
    model(x).sum().backward()  # and nothing of those modes stays


def test_autocast_switched_off_inside_the_model():
    class FloatHead(ConvNet):
        def forward(self, x):
            x = torch.relu(self.conv1(x)).mean((2, 3))
            with torch.autocast("cpu", enabled=False):
                return self.fc2(torch.relu(self.fc1(x.float()[:, :5])))

    model = FloatHead().eval()
    spread_gates_(ng.attach_gates_(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(images())
    assert y.dtype == torch.float32


def test_gradients_switched_on_inside_the_model():
    class Differentiates(ConvNet):
        def forward(self, x):
            with torch.enable_grad():
                return super().forward(x)

    model = Differentiates().eval()
    spread_gates_(ng.attach_gates_(model))
    x = images()
    expected = run(model, x)[1]
    with torch.no_grad():
        y = model(x)
    model.zero_grad()
    y.square().sum().backward()
    assert_same(gradients(model), expected, rtol=1e-5, atol=1e-6)


class UsesWeightDirectly(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.first(x), self.second.weight)


@batches
def test_a_gate_without_effect_is_named_once_in_training():
    model = UsesWeightDirectly()
    gates = ng.attach_gates_(model, last=True)
    x = torch.randn(2, 4)
    model.eval()(x)  # idle layers are normal here: auxiliary heads
    with pytest.warns(UserWarning, match="the gates on second have no effect"):
        model.train()(x)
    model(x).sum().backward()  # a second warning would be an error
    assert gates["first"].g.grad is not None and gates["second"].g.grad is None


def test_gates_with_a_nan_are_named_in_forward():
    model = gated_convnet()
    with torch.no_grad():
        model.conv2.gate.g[1] = float("nan")
    if gated._top_saved_tensor_hooks is not None:
        with pytest.raises(ValueError, match="gate parameters of conv2 contain NaN: training diverged"):
            model(images())
    with pytest.raises(ValueError, match="gate parameters of conv2 contain NaN"):
        ng.gates_of(model).values()


def test_nested_models_each_prepare_their_own_gates():
    model = nn.Sequential(ConvNet(), nn.ReLU(), nn.Linear(2, 3), nn.Linear(3, 2))
    inner = ng.attach_gates_(model[0])
    outer = ng.attach_gates_(model, where=lambda name, _: not name.startswith("0."))
    spread_gates_(inner)
    spread_gates_(outer)
    assert ng.gates_of(model).names == [*(f"0.{name}" for name in inner), *outer] and outer.names == ["2"]
    alone = layer_by_layer(model)
    x = images()
    assert_same(run(model, x), run(alone, x), rtol=1e-5, atol=1e-6)


def test_gates_of_another_dtype_are_computed_apart():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    spread_gates_(ng.attach_gates_(model))
    model[1].gate.double()
    alone = layer_by_layer(model)
    x = torch.randn(4, 3)
    assert_same(model(x), alone(x))


def test_frozen_layers_ask_for_no_gradient_because_of_others():
    """As in the plain model: else each backward pass would go through a frozen backbone for nothing."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    spread_gates_(ng.attach_gates_(model))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    model[2].gate.requires_grad_(False)  # its weight still learns
    asks = {}
    for i, layer in enumerate(model):
        layer.register_forward_hook(lambda layer, args, y, i=i: asks.update({i: y.requires_grad}))
    x = torch.randn(3, 4)
    alone = run(layer_by_layer(model), x)
    assert asks == {0: False, 1: False, 2: True, 3: True, 4: True}
    asks.clear()
    for ours, theirs in zip(run(model, x), alone, strict=True):
        assert_same(ours, theirs)
    assert asks == {0: False, 1: False, 2: True, 3: True, 4: True}


class Heads(nn.Module):
    """Two networks that share nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)) for _ in range(2))
        self.last = nn.Linear(2, 2)

    def forward(self, x):
        return self.a(x), self.last(self.b(x))


def test_outputs_that_share_nothing_can_go_backward_one_by_one():
    """docs/own-loop.md says how."""
    model = Heads()
    spread_gates_(ng.attach_gates_(model))
    alone = layer_by_layer(model)
    x = torch.randn(3, 4)
    for first, second in ((loss.square().sum() for loss in each(x)) for each in (model, alone)):
        first.backward(retain_graph=True)
        second.backward()
    assert_same(gradients(model), gradients(alone))


def test_data_parallel_replicas_compute_their_own(computed_alone):
    model = gated_convnet()
    model.__dict__["_is_replica"] = True  # what torch.nn.parallel.replicate sets
    model(images())
    assert len(computed_alone) == 5


def test_a_model_on_the_meta_device_can_be_gated_and_run():
    with torch.device("meta"):
        model = ConvNet()
        ng.attach_gates_(model)
        assert model(images()).shape == (4, 2)


def test_merging_takes_every_hook_away():
    model = gated_convnet()
    ng.merge_gates_(model)
    assert not model._forward_pre_hooks and not model._forward_hooks and not model._forward_hooks_always_called
    assert not any(key.startswith("_narrowgate") for key in vars(model))


@batches
def test_gates_whose_layers_were_replaced_are_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    ng.attach_gates_(model, placement="after-norm")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"gates on 1 have no effect: other layers .* then call attach_gates_"):
        model(x)
    model(x)  # a second warning would be an error


def test_threads_that_train_one_model_do_not_share_a_graph():
    class Meeting(nn.Module):
        """The second thread stops here until the first has come through."""

        def forward(self, x):
            if threading.current_thread() is other:
                there.set()
                done.wait(10)
            else:
                other.start()
                there.wait(10)
            return x

    def backward():
        try:
            results.append(torch.autograd.grad(model(x).square().sum(), model[0].weight)[0])
        finally:
            done.set()

    there, done, results, other = threading.Event(), threading.Event(), [], threading.Thread(target=lambda: backward())
    model = nn.Sequential(nn.Linear(4, 4), Meeting(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    ng.attach_gates_(model)
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of gates without effect, too
        backward()
        other.join()
    assert len(results) == 2 and torch.equal(*results)
