"""What only a GPU can show; skipped without one."""

import copy

import pytest
import torch
from helpers import ConvNet, assert_same, compiles, gradients, images, layer_by_layer, named, spread_gates_
from torch import nn

import narrowgate as ng
from narrowgate.gates import exponential_gate
from narrowgate.train.step import Step
from narrowgate.train.teacher import Teacher

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def gated_convnet(**options):
    model = ConvNet().cuda()
    spread_gates_(ng.attach_gates_(model, **options))
    return model


@compiles
@pytest.mark.parametrize("mode", ["eager", "autocast", "compiled"])
def test_the_closing_point_is_the_same_on_the_gpu(mode):
    middle = torch.tensor(2**-12.5).view(torch.int32)
    g = (middle + torch.arange(-100_000, 100_001, dtype=torch.int32)).view(torch.float32)
    g = torch.cat([g, -g])
    gate = torch.compile(exponential_gate, fullgraph=True) if mode == "compiled" else exponential_gate
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=mode == "autocast"):
        closed = gate(g.cuda()) == 0
    assert torch.equal(closed.cpu(), g.double().abs() < 2**-12.5)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_batched_and_layer_by_layer_agree(half, channels_last):
    model, x = gated_convnet(), images().cuda()
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    alone = layer_by_layer(model)
    results = []
    for each in (model, alone):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            y = each(x)
        y.float().square().sum().backward()
        results.append((y.detach(), gradients(each)))
    assert_same(results[0][0], results[1][0])
    tolerance = 3e-2 if half else 1e-4
    assert_same(results[0][1], results[1][1], rtol=tolerance, atol=tolerance)


def test_gates_are_made_where_their_layer_is_and_may_be_on_several_devices():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).cuda(), nn.Linear(5, 2).cuda())
    gates = ng.attach_gates_(model)
    assert [g.device.type for g in gates.parameters()] == ["cpu", "cuda"]
    penalty = ng.Penalty(gates, "bounded-l1", 0.5)
    penalty().backward()
    assert penalty().item() == pytest.approx(0.5 * 9 * 0.632120559, rel=1e-6)
    assert all((g.grad > 0).all() for g in gates.parameters())
    penalty.proximal_(10.0)
    assert gates.closed_fraction() == 1
    hard = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5).cuda(), nn.Linear(5, 2))
    ng.Penalty(ng.attach_gates_(hard, "hard-concrete"), "l0", 0.5)().backward()


@pytest.mark.parametrize("proximal", [False, True])
def test_a_captured_training_step_follows_the_schedule(proximal):
    """A CUDA graph of the whole step, penalty included, does what eager steps do, and sees a new epoch's strength."""

    def train(capture):
        torch.manual_seed(0)
        model = gated_convnet(where=named("conv1", "conv2", "fc1"))
        gates = ng.gates_of(model)
        penalty = ng.Penalty(gates, "bounded-l1", lambda epoch: 0.01 * (epoch + 1), sigma=lambda epoch: 1 / (epoch + 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x = images().cuda()

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = model(x).square().mean()
            (loss if proximal else loss + penalty()).backward()
            optimizer.step()
            if proximal:
                penalty.proximal_(0.01)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        if capture:
            graph = torch.cuda.CUDAGraph()
            state = copy.deepcopy(model.state_dict())
            with torch.cuda.graph(graph):
                step()
            model.load_state_dict(state)
            step = graph.replay
        for epoch in range(4):
            penalty.set_epoch(epoch)
            step()
        return gates.flat().detach()

    expected = train(capture=False)
    assert_same(train(capture=True), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["l1", "bounded-l1"])
def test_a_new_epoch_makes_no_new_tensor(kind):
    gates = ng.attach_gates_(ConvNet().cuda())
    penalty = ng.Penalty(gates, kind, lambda epoch: 0.1 * epoch)
    penalty()
    tensor = penalty._strength_tensor
    penalty.set_epoch(5)
    assert penalty._strength_tensor is tensor and tensor.is_cuda and tensor.item() == 0.5


@pytest.mark.parametrize("half", [False, True])
def test_fused_norms_train_as_plain_ones(half):
    """A few steps with Triton's kernels end where steps with PyTorch's own do."""
    from narrowgate.train.fused import Fused
    from narrowgate.train.norm_activation import why_not

    assert why_not(torch.device("cuda", 0)) == ""

    def trained(fused):
        torch.manual_seed(0)
        model = ConvNet().cuda().to(memory_format=torch.channels_last).train()
        ng.attach_gates_(model, placement="after-norm")
        forward = Fused(pytest.fail).around(model) if fused else model
        optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.9, foreach=True)
        x = images().cuda().to(memory_format=torch.channels_last)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
                y = forward(x)
            y.float().square().sum().backward()
            optimizer.step()
        return {name: value.float() for name, value in model.state_dict().items()}

    tolerance = 3e-2 if half else 1e-4
    assert_same(trained(True), trained(False), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("network", ["dense", "residual", "cut"])
def test_half_precision_in_fewer_kernels_is_as_exact_as_in_many(network, monkeypatch):
    """Odd widths, sums, concatenations, pooling: the second step's gradients against those in float32."""
    from narrowgate.models import DenseNet, PreActResNet, build
    from narrowgate.train.fused import Fused

    def gradient(half, fused):
        torch.manual_seed(0)
        if network == "dense":
            model = DenseNet(13, 5, 10, 0.0)
        elif network == "residual":
            model = PreActResNet(29, 10, 0.0)
        else:
            model = build("mobilenetv2", 10, dropout=0.0)
            gates = ng.attach_gates_(model, placement="after-norm")
            with torch.no_grad():
                for gate in gates.modules():
                    gate.g[torch.randperm(gate.size)[: gate.size // 3]] = 0.0
            example = torch.randn(1, 3, 32, 32)
            model = ng.compact(model, ng.plan(model, example))
        model = model.cuda().to(memory_format=torch.channels_last).train()
        forward = Fused(pytest.fail).around(model) if fused else model
        x = torch.randn(64, 3, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last)
        labels = torch.randint(10, (64,), device="cuda")
        for _ in range(2):  # weights are cast together from the second on
            model.zero_grad()
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half, cache_enabled=False):
                y = forward(x)
            torch.nn.functional.cross_entropy(y.float(), labels).backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact = gradient(half=False, fused=False)
    # A rounding that flips a ReLU moves the gradient by far more than itself, in PyTorch's kernels as in ours.
    assert (gradient(half=False, fused=True) - exact).norm() < 0.03 * exact.norm()
    plain = (gradient(half=True, fused=False) - exact).norm()
    assert (gradient(half=True, fused=True) - exact).norm() < 1.5 * plain


@pytest.mark.parametrize("proximal", [False, True])
def test_a_relative_penalty_is_the_same_in_a_cuda_graph(proximal):
    """Replays move the gates as eager steps do, with a strength that changes in between."""
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        gates = ng.gates_of(gated_convnet())
        penalty = ng.Penalty(gates, "bounded-l1", 0.1, sigma=0.5, relative=True)

        def step(gates=gates, penalty=penalty):
            if proximal:
                return penalty.proximal_(0.1)
            for g, slope in zip(gates.parameters(), torch.autograd.grad(penalty(), gates.parameters()), strict=True):
                g.data.sub_(0.1 * slope)

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        for strength in (0.1, 0.3, 0.05):
            penalty.strength = strength
            graph.replay() if captured else step()
        ends.append(gates.flat().detach().cpu())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-7)


def test_a_teacher_in_a_cuda_graph_teaches_as_outside_one():
    """Replays with a teacher's answers in them lead where eager steps do."""
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        student, network = (nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).cuda() for _ in range(2))
        optimizer = torch.optim.SGD(student.parameters(), torch.tensor(0.5, device="cuda"), momentum=0.9, fused=True)
        step = Step(student, optimizer, None, torch.device("cuda"), teacher=Teacher(network.eval(), 0.9, 4.0, {}))
        images, labels = torch.randn(6, 3, 2, 2, device="cuda"), torch.arange(6, device="cuda") % 5
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step(images, labels)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if captured:
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                step(images, labels)
        for _ in range(3):
            images.normal_(generator=torch.Generator("cuda").manual_seed(1))
            graph.replay() if captured else step(images, labels)
        ends.append(student[1].weight.detach().cpu())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
