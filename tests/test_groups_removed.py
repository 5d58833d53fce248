"""Closed groups go: planned, removed exactly, while training and after it, saved and loaded."""

import copy
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from group_networks import HEADS, MLP, TRANSFORMERS, WIDTH, gated, output, vit
from helpers import assert_same
from torch import nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.flow.compose import compose

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-9}
HEAD = 4 * WIDTH * (WIDTH // HEADS) + 3 * (WIDTH // HEADS)  # rows of q, k and v with their biases, columns behind
NEURON = 2 * WIDTH + 1
# Where heads go in the aligned layout too, and while training; elsewhere in the scatter layout, and not in GPT-2.
LOSES_HEADS = ("vit", "deit", "bert", "gpt2")


def close_some(gates):
    """The second head of each attention, every third neuron of each MLP and the last branch; how many of each."""
    heads = [gate for name, gate in zip(gates, gates.modules(), strict=True) if name.endswith(".heads")]
    for gate in heads:
        gate.close_(torch.arange(gate.size) == 1)
    for name in gates.names:
        if name != "blocks" and not name.endswith(".heads"):
            gates[name].close_(torch.arange(gates[name].size) % 3 == 0)
    gates["blocks"].close_(torch.arange(gates["blocks"].size) == gates["blocks"].size - 1)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_compaction_is_exact(name):
    model, gates, x = gated(name, ("heads", "neurons", "blocks"))
    whole = output(model, x)
    close_some(gates)
    expected = output(model, x)
    assert (whole - expected).abs().max() > 1e-3
    plan = ng.plan(model, x, layout="aligned" if name in LOSES_HEADS else "scatter")
    small = ng.compact(model, plan)
    assert_same(output(small, x), expected, rtol=0, atol=1e-9)
    ng.verify(model, small, x)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in small.modules())
    if name in LOSES_HEADS:  # the second MLP is a dead branch: timm's goes with its norm, one neuron of others is left
        one_neuron, norm = NEURON + WIDTH, 2 * WIDTH
        gone = 2 * HEAD + (MLP // 3 + MLP - 1) * NEURON + (one_neuron + norm if plan.idle else 0)
        assert bool(plan.idle) == (name in ("vit", "deit"))
        assert plan.parameters_before - plan.parameters_after == gone
        assert not any(type(module).__module__.startswith("narrowgate") for module in small.modules())


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_in_place_with_the_optimizers_state(name):
    model, gates, x = gated(name, ("heads", "neurons", "blocks"), torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        result = model.train()(x)
        (result if isinstance(result, torch.Tensor) else result.last_hidden_state).square().mean().backward()
        optimizer.step()
    close_some(gates)
    expected = output(model.eval(), x)
    plan = ng.plan(model, x, training=True)
    ng.compact_(model, plan, optimizer=optimizer)
    assert_same(output(model, x), expected, rtol=0, atol=1e-6)
    for parameter in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state.get(parameter, {}).get(key, parameter).shape == parameter.shape
    result = model.train()(x)
    (result if isinstance(result, torch.Tensor) else result.last_hidden_state).square().mean().backward()
    optimizer.step()
    if name in LOSES_HEADS:
        assert plan.parameters_before - plan.parameters_after >= 2 * HEAD + (MLP // 3 + MLP - 1) * NEURON
    again = ng.plan(model.eval(), x, training=True)
    assert not again.cuts
    assert_same(output(ng.compact(model, again), x), output(model, x), rtol=0, atol=1e-6)


def test_dead_blocks_take_their_compute_along():
    model = torchvision.models.resnet18(num_classes=3).double().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.bias)
    gates = ng.attach_gates_(model, groups="blocks")
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = ng.summarize(model, x)
    dead = ("layer1.1.bn2", "layer3.1.bn2")
    gates["blocks"].close_(torch.tensor([name in dead for name in gates["blocks"].names]))
    convolutions = [f"{name[:8]}.conv{i}" for name in dead for i in (1, 2)]
    costs = {layer.name: layer.multiply_adds for layer in before.layers}
    for layout in ("aligned", "scatter"):
        small = ng.compact(model, ng.plan(model, x, layout=layout))
        ng.verify(model, small, x)
        after = ng.summarize(small, x)
        assert before.multiply_adds - after.multiply_adds == sum(costs[name] for name in convolutions)
        assert type(small.layer1[1]) is type(small.layer3[1]) is nn.Identity


def train(model, gates, optimizer, after_epoch, strength, epochs=6):
    """Some epochs on noise with two classes, with the penalty as a proximal step; the images."""
    penalty = ng.Penalty(gates, "bounded-l1", strength)
    torch.manual_seed(1)
    x = torch.randn(16, 3, 16, 16)
    labels = torch.arange(16) % 2
    x[labels == 1, 0] += 1
    model.train()
    for epoch in range(epochs):
        for batch in torch.arange(16).split(8):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), labels[batch]).backward()
            optimizer.step()
            penalty.proximal_(0.1)
        after_epoch(epoch)
    return x


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_training_closes_groups_and_a_shrinker_removes_them(dtype, tmp_path):
    torch.manual_seed(0)
    model = vit()
    gates = ng.attach_gates_(model, groups=("heads", "neurons", "blocks"))
    with torch.no_grad():
        for g in gates.parameters():
            g.uniform_(0.3, 1.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shrinker = ng.Shrinker(model, torch.randn(2, 3, 16, 16), optimizer, every=2, share=0.0)
    x = train(model, gates, optimizer, shrinker.step, strength=0.8)
    open_heads = [int((gates[name].value() > 0).sum()) for name in gates if name.endswith(".heads")]
    assert min(open_heads) >= 1 and sum(open_heads) < 2 * HEADS
    assert shrinker.events and [module.attn.num_heads for module in model.blocks] == open_heads
    model.to(dtype).eval()
    x = x.to(dtype)
    plan = ng.plan(model, x)
    small = ng.compact(model, plan)
    assert_same(output(small, x), output(model, x), rtol=0, atol=TOLERANCE[dtype])
    ng.save(small, compose(shrinker.plan, plan), tmp_path / "small")
    assert_same(output(ng.load(tmp_path / "small", vit).eval(), x), output(small, x))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.AdamW])
def test_momentum_does_not_open_what_is_gone(make, by_hand):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(8, 3)
    listed = {i: [("0.weight", 0, [2 * i, 2 * i + 1]), ("0.bias", 0, [2 * i, 2 * i + 1])] for i in range(3)}
    gates = ng.attach_gates_(model, groups={f"pair {i}": slices for i, slices in listed.items()})
    penalty, optimizer = ng.Penalty(gates, "l1", 0.1), make(model.parameters())

    def step():
        optimizer.zero_grad()
        (model(x).square().mean() + penalty()).backward()
        optimizer.step()

    step()
    gates["groups"].close_(torch.tensor([False, True, False]))
    shrinker = ng.Shrinker(model, x, optimizer)
    if by_hand:
        ng.compact_(model, ng.plan(model, x, training=True), optimizer=optimizer)
    else:
        assert shrinker.shrink(0) is not None
    assert model[0].out_features == 4
    step()
    step()
    assert gates["groups"].g[1] == 0 and gates["groups"].g.count_nonzero() == 2
    assert shrinker.closed_fraction() == gates.closed_fraction() == pytest.approx(1 / 3)


def test_a_resumed_run_gets_its_views_back():
    torch.manual_seed(0)
    model = vit()
    gates = ng.attach_gates_(model, groups=("heads", "blocks"))
    fresh = copy.deepcopy(model)
    x = torch.randn(2, 3, 16, 16)
    shrinker = ng.Shrinker(model, x)
    gates["blocks.0.attn.proj.heads"].close_(torch.arange(HEADS) == 2)
    assert shrinker.shrink(0) is not None
    other = ng.Shrinker(fresh, x)
    other.load_state_dict(shrinker.state_dict())
    fresh.load_state_dict(model.state_dict())
    assert_same(output(fresh.eval(), x), output(model.eval(), x))
    assert fresh.blocks[0].attn.proj.gate_in.g.tolist() == [
        i for i in range(HEADS) if i != 2 for _ in range(WIDTH // HEADS)
    ]


def test_the_example_meets_its_budget(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["vit_heads.py", "--smoke"])
    path = Path(__file__).parent.parent / "examples" / "vit_heads.py"
    functions = runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    before, after = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) -> ([\d,]+) parameters", printed)[0])
    assert 0.57 < after / before < 0.63 and "same function" in printed
    still_open = re.findall(r"^(\S+): (\d+) of (\d+) open$", printed, re.MULTILINE)
    assert len(still_open) == 5 and all(0 < int(left) <= int(all_) for _, left, all_ in still_open)
    small = ng.load(tmp_path / "small", lambda: functions["build"]("vit_tiny_patch16_224", 2, False, True))
    assert sum(p.numel() for p in small.parameters()) == after


@pytest.mark.parametrize("layout", ["aligned", "scatter"])
def test_the_channels_of_gpt2s_own_layers_have_gates_and_go(layout):
    model, gates, x = gated("gpt2", "channels")
    layers = [f"h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]
    assert gates.names == layers[:-1]  # the last one's outputs are the model's
    for gate in gates.modules():
        gate.close_(torch.arange(gate.size) % 3 == 0)
    expected = output(model, x)
    plan = ng.plan(model, x, layout=layout)
    small = ng.compact(model, plan)
    assert_same(output(small, x), expected, rtol=0, atol=1e-9)
    gone = len(range(0, MLP, 3)) * NEURON
    assert plan.parameters_before - plan.parameters_after >= 2 * gone
    assert all(block.mlp.c_fc.nf == MLP - len(range(0, MLP, 3)) for block in small.h)
