"""Gated models under everything PyTorch does to a model: checkpoints, copies, compilation, DDP and more."""

import copy
import io
import pickle

import pytest
import torch
from helpers import (
    ConvNet,
    assert_same,
    compiles,
    gradients,
    images,
    layer_by_layer,
    named,
    needs_cpp_compiler,
    spread_gates_,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowgate as ng
from narrowgate.inspect_model import inspect_model


@pytest.fixture
def plain():
    return ConvNet()


@pytest.fixture
def gated(plain):
    return gate_some(plain)


def gate_some(plain, **options):
    """A gated copy with the gates spread out and some of them closed."""
    model = copy.deepcopy(plain)
    spread_gates_(ng.attach_gates_(model, **options))
    return model


def run(model, x):
    """Output, and gradients of everything, of one training step."""
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), gradients(model)


def test_an_ordinary_checkpoint_loads_into_a_gated_model(plain, gated):
    before = [g.detach().clone() for g in ng.gates_of(gated).parameters()]
    other = ConvNet().state_dict()
    gated.load_state_dict(other, strict=True)
    assert_same(gated.conv1.weight.detach(), other["conv1.weight"])
    assert_same(before, [g.detach() for g in ng.gates_of(gated).parameters()])
    with pytest.raises(RuntimeError, match=r"Missing key.*conv1\.weight"):
        gated.load_state_dict({key: value for key, value in other.items() if key != "conv1.weight"}, strict=True)


def test_a_gated_checkpoint_comes_back(plain, gated):
    file = io.BytesIO()
    torch.save(gated.state_dict(), file)
    file.seek(0)
    other = ConvNet()
    ng.attach_gates_(other)
    x = images()
    assert not torch.equal(other.eval()(x), gated.eval()(x))
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same(other(x), gated(x))


@pytest.mark.parametrize("placement", ["before-norm", "after-norm"])
def test_plain_weights_load_into_the_ordinary_model_and_compute_the_same(plain, placement):
    gated = gate_some(plain.double(), placement=placement).eval()
    x = images(dtype=torch.float64)
    before = plain.eval()(x)
    plain.load_state_dict(ng.plain_state_dict(gated), strict=True)
    assert_same(plain(x), gated(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(plain(x), before)
    assert len(ng.gates_of(gated)) == 5  # the gated model still has its gates


def test_a_deep_copy_has_gates_of_its_own(gated):
    before = copy.deepcopy(gated.state_dict())
    twin = copy.deepcopy(gated)
    gates = ng.gates_of(twin)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        run(twin, images())
        optimizer.step()
    gates.close_below_(2.0)
    assert gates.closed_fraction() == 1 and ng.gates_of(gated).closed_fraction() < 1
    assert_same(gated.state_dict(), before)
    ng.merge_gates_(twin)
    assert len(ng.gates_of(gated)) == 5
    assert gates["conv1"] is not ng.gates_of(gated)["conv1"]


def test_a_deep_copy_of_linear_gates_follows_the_copy(plain):
    gates = ng.attach_gates_(plain, "linear")
    twin = copy.deepcopy(plain)
    ng.gates_of(twin).close_below_(2.0)
    assert (twin.bn1.weight == 0).all() and (plain.bn1.weight != 0).all() and gates.closed_fraction() == 0


def test_a_gated_model_can_be_pickled(gated):
    twin = pickle.loads(pickle.dumps(gated))
    x = images()
    assert_same(run(twin, x), run(gated, x))
    assert ng.gates_of(twin).names == ng.gates_of(gated).names


@compiles
@needs_cpp_compiler
@pytest.mark.slow
def test_a_compiled_model_is_the_eager_one(gated):
    x = images()
    expected = run(copy.deepcopy(gated), x)
    compiled = torch.compile(gated, fullgraph=True)
    y = compiled(x)
    y.square().sum().backward()
    assert_same((y.detach(), gradients(gated)), expected, rtol=1e-4, atol=1e-5)


@compiles
def test_a_compiled_model_takes_part_in_the_graph_without_breaks(gated):
    """The graph alone, without code generation: exact, fast, and no C++ compiler is needed."""
    x = images()
    expected = run(copy.deepcopy(gated), x)
    compiled = torch.compile(gated, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    y.square().sum().backward()
    assert_same((y.detach(), gradients(gated)), expected, rtol=1e-5, atol=1e-6)


@compiles
@pytest.mark.parametrize("how", ["module.compile", "torch.compile", "forward"])
def test_compiling_only_a_part_of_a_model_works_and_warns_of_nothing(gated, how):
    x = images()
    expected = run(copy.deepcopy(gated), x)
    options = {"backend": "aot_eager", "fullgraph": True}
    if how == "module.compile":
        gated.conv2.compile(**options)
    elif how == "torch.compile":
        gated.conv2 = torch.compile(gated.conv2, **options)
    else:
        gated.conv2.forward = torch.compile(gated.conv2.forward, **options)
    for _ in range(2):
        y, grads = run(gated, x)
        assert_same(y, expected[0], rtol=1e-4, atol=1e-5)
        assert_same(list(grads.values()), list(expected[1].values()), rtol=1e-4, atol=1e-5)
        gated.bn1.reset_running_stats()


@compiles
def test_a_graph_break_inside_the_model_does_no_harm(gated):
    class Broken(ConvNet):
        def forward(self, x):
            x = torch.relu(self.bn1(self.conv1(x)))
            torch._dynamo.graph_break()
            x = self.conv2(torch.relu(self.up(self.depthwise(x)))).mean((2, 3))
            return self.fc2(torch.relu(self.fc1(x)))

    model = gate_some(Broken())
    x = images()
    expected = run(copy.deepcopy(model), x)
    y = torch.compile(model, backend="eager")(x)
    y.square().sum().backward()
    assert_same((y.detach(), gradients(model)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["exponential", "linear", "hard-concrete"])
def test_an_exported_model_is_the_eager_one(plain, kind):
    model = gate_some(plain, kind=kind).eval()
    x = images()
    exported = torch.export.export(model, (x,), strict=False).module()
    for batch in (x, images()):
        assert_same(exported(batch), model(batch), rtol=1e-5, atol=1e-6)


class Checkpointed(ConvNet):
    reentrant: bool | None = None

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.middle(x) if self.reentrant is None else checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.fc2(torch.relu(self.fc1(x.mean((2, 3)))))

    def middle(self, x):
        x = torch.relu(self.up(self.depthwise(x)))
        return torch.tanh(self.conv2(x)) + torch.tanh(self.conv2(x * 0.5))  # one layer is called twice


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "hard-concrete"}, {"inputs": named("conv2")}],
    ids=["exponential", "hard-concrete", "inputs"],
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant, frozen, options):
    model = Checkpointed().requires_grad_(not frozen)
    spread_gates_(ng.attach_gates_(model, **options))
    model.bn1.requires_grad_()  # a reentrant checkpoint needs an input with a gradient
    x = images()
    results = []
    for model.reentrant in (None, reentrant):
        torch.manual_seed(1)
        results.append(run(model, x))
        model.bn1.reset_running_stats()
    assert_same(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert (results[0][1]["conv2.gate.g"] != 0).any()


def test_a_checkpoint_around_the_whole_model_changes_nothing(gated, monkeypatch):
    x = images()
    y, expected = run(copy.deepcopy(gated), x)
    monkeypatch.setattr(
        "narrowgate.batched._prepare", lambda layers: pytest.fail("prepared weights no layer would use")
    )
    again = checkpoint(gated, x, use_reentrant=False)
    again.square().sum().backward()
    assert_same((again.detach(), gradients(gated)), (y, expected), rtol=1e-5, atol=1e-6)


def test_functional_call_and_its_gradient(gated):
    gated.eval()
    x = images()
    expected = run(gated, x)
    zero = {name: torch.zeros_like(p) for name, p in gated.named_parameters()}
    parameters = {name: p.detach().clone() for name, p in gated.named_parameters()}
    assert_same(torch.func.functional_call(gated, parameters, (x,)), expected[0])
    assert not torch.equal(torch.func.functional_call(gated, zero, (x,)), expected[0])
    loss = lambda p: torch.func.functional_call(gated, p, (x,)).square().sum()  # noqa: E731
    assert_same(torch.func.grad(loss)(parameters), expected[1], rtol=1e-5, atol=1e-6)


def test_vmap_over_gate_parameters(gated):
    gated.eval()
    x = images()
    stack = torch.stack([torch.full((6,), 0.5), torch.zeros(6)])
    outputs = torch.vmap(lambda g: torch.func.functional_call(gated, {"conv1.gate.g": g}, (x,)))(stack)
    for g, output in zip(stack, outputs, strict=True):
        with torch.no_grad():
            gated.conv1.gate.g.copy_(g)
        assert_same(output, gated(x), rtol=1e-4, atol=1e-5)


def test_float64_models_are_float64_throughout(plain):
    model = gate_some(plain.double())
    assert {g.dtype for g in ng.gates_of(model).parameters()} == {torch.float64}
    assert {value.dtype for value in ng.gates_of(model).values().values()} == {torch.float64}
    assert model(images(dtype=torch.float64)).dtype == torch.float64


def test_a_model_in_half_precision_trains_with_gates_in_float32(plain):
    model = gate_some(plain.to(torch.bfloat16))
    y, grads = run(model, images(dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and grads["conv1.gate.g"].dtype == torch.float32
    assert (grads["conv1.gate.g"] != 0).any()
    model.to(torch.bfloat16)  # and when the gates are cast too
    assert run(model, images(dtype=torch.bfloat16))[0].isfinite().all()


def test_frozen_weights_leave_the_gates_trainable(plain):
    model = gate_some(plain.requires_grad_(False))
    _, grads = run(model, images())
    assert {name for name, grad in grads.items() if grad is not None} == {
        name for name, _ in model.named_parameters() if name.endswith("gate.g")
    }


def test_gradients_accumulate_over_several_batches(gated):
    gated.eval()
    first, second = images(), images()
    expected = {name: grad + run(gated, second)[1][name] for name, grad in run(gated, first)[1].items()}
    gated.zero_grad()
    for x in (first, second):
        gated(x).square().sum().backward()
    assert_same(gradients(gated), expected)


def test_two_forwards_before_one_backward(gated):
    gated.eval()
    first, second = images(), images()
    gated.zero_grad()
    (gated(first).square().sum() + gated(second).square().sum()).backward()
    together = gradients(gated)
    reference = layer_by_layer(gated)
    reference.zero_grad()
    (reference(first).square().sum() + reference(second).square().sum()).backward()
    assert_same(together, gradients(reference), rtol=1e-5, atol=1e-6)


def test_a_part_that_torch_jit_compiled_does_not_stand_in_the_way():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    model = nn.Sequential(nn.Linear(4, 8), scripted, nn.Linear(8, 3))
    gates = ng.attach_gates_(model)
    x = torch.randn(2, 4)
    assert ng.gates_of(model).names == gates.names == ["0"]
    ng.Shrinker(model, x, torch.optim.SGD(model.parameters(), 0.1))
    before = model(x)
    assert "1.0.weight" in ng.plain_state_dict(model) and "0.gate.g" not in ng.plain_state_dict(model)
    torch.testing.assert_close(ng.merge_gates_(model)(x), before)
    with pytest.raises(ValueError, match="this model has no gates"):
        ng.gates_of(scripted)


def test_a_model_that_torch_jit_compiled_is_named():
    scripted, x = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU())), torch.randn(2, 4)
    with pytest.raises(ng.TraceError, match=r"is compiled by torch\.jit, which hides its code; pass the model itself"):
        inspect_model(scripted, x)
