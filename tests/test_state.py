"""Training state: packed, written, read and loaded, a run goes on to the same bits."""

import copy
import json

import pytest
import torch
from helpers import ConvNet, assert_same, images
from torch import nn

import narrowgate as ng
from narrowgate.train.checkpoint import Checkpoints
from narrowgate.train.state import (
    StateError,
    load_model_,
    load_optimizer_,
    pack_model,
    pack_optimizer,
)


def sgd(model, **options):
    gates = [p for name, p in model.named_parameters() if name.endswith(".g")]
    others = [p for name, p in model.named_parameters() if not name.endswith(".g")]
    return torch.optim.SGD(
        [{"params": others}, {"params": gates, "lr": 0.5, "weight_decay": 0.0}],
        **({"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3} | options),
    )


OPTIMIZERS = {
    "sgd": sgd,
    "nesterov": lambda model: sgd(model, nesterov=True),
    "plain sgd": lambda model: sgd(model, momentum=0.0),
    "lr tensor": lambda model: torch.optim.SGD(model.parameters(), torch.tensor(0.1), momentum=0.9, foreach=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.8, 0.99)),
    "fused adamw": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, fused=True),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), 1e-3, amsgrad=True),
}


def gated(channels_last=False):
    model = ConvNet()
    ng.attach_gates_(model)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def train_(model, optimizer, steps=3):
    for _ in range(steps):
        x = torch.nn.functional.dropout(images(8), 0.1)
        optimizer.zero_grad()
        model(x).square().sum().div(8).backward()
        optimizer.step()


def pack(model, optimizer):
    tensors, meta = pack_optimizer(optimizer, model)
    return {**pack_model(model), **tensors, "random": torch.get_rng_state()}, {"optimizer": meta}


def load_(model, optimizer, tensors, meta):
    load_model_(model, tensors)
    load_optimizer_(optimizer, model, tensors, meta["optimizer"])
    torch.set_rng_state(tensors["random"])


def through_disk(folder, tensors, meta):
    checkpoints = Checkpoints(folder / "checkpoints", 1)
    checkpoints.save(0, tensors, meta)
    saved = checkpoints.latest()
    return saved.tensors, saved.meta


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_to_the_same_bits(tmp_path, kind, channels_last):
    model = gated(channels_last)
    optimizer = OPTIMIZERS[kind](model)
    train_(model, optimizer)
    optimizer.param_groups[-1]["weight_decay"] = 0.25
    state = through_disk(tmp_path, *pack(model, optimizer))
    train_(model, optimizer)

    def resumed(load_state):
        torch.manual_seed(99)
        other = gated(channels_last)
        again = OPTIMIZERS[kind](other)
        if load_state:
            load_(other, again, *state)
        train_(other, again)
        return other, again

    other, again = resumed(load_state=True)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(pack(other, again)[0], pack(model, optimizer)[0])
    assert pack(other, again)[1] == pack(model, optimizer)[1]
    assert again.param_groups[-1]["weight_decay"] == 0.25
    with pytest.raises(AssertionError):
        assert_same(resumed(load_state=False)[0].state_dict(), model.state_dict())


@pytest.mark.parametrize("part", ["model", "optimizer", "random"])
def test_every_part_matters(tmp_path, part):
    model = gated()
    optimizer = sgd(model)
    train_(model, optimizer)
    tensors, meta = through_disk(tmp_path, *pack(model, optimizer))
    train_(model, optimizer)
    torch.manual_seed(99)
    other = gated()
    again = sgd(other)
    if part != "model":
        load_model_(other, tensors)
    if part != "optimizer":
        load_optimizer_(again, other, tensors, meta["optimizer"])
    if part != "random":
        torch.set_rng_state(tensors["random"])
    train_(other, again)
    with pytest.raises(AssertionError):
        assert_same(other.state_dict(), model.state_dict())


def test_a_cut_model_goes_on_to_the_same_bits(tmp_path):
    def cut(plan=None):
        model = gated()
        optimizer = sgd(model)
        if plan is None:
            train_(model, optimizer)
            ng.gates_of(model)["conv2"].close_(torch.tensor([True, False, True, False, False]))
            plan = ng.plan(model, images(), training=True)
        return ng.compact_(model, plan, optimizer=optimizer), optimizer, plan

    model, optimizer, plan = cut()
    tensors, meta = through_disk(tmp_path, *pack(model, optimizer))
    assert tensors["optimizer/conv2.weight/momentum_buffer"].shape[0] == 3
    train_(model, optimizer)
    other, again, _ = cut(plan)
    load_(other, again, tensors, meta)
    train_(other, again)
    assert_same(other.state_dict(), model.state_dict())
    full = gated()
    with pytest.raises(StateError, match=r"'conv2\.weight' is float32 \(3, 4, 1, 1\) there.*cut the model"):
        load_model_(full, tensors)
    with pytest.raises(StateError, match=r"knows 'conv2\.weight' with shape \(3, 4, 1, 1\).*cut the model"):
        load_optimizer_(sgd(full), full, tensors, meta["optimizer"])


def test_names_and_json():
    model = gated()
    optimizer = OPTIMIZERS["adamw"](model)
    train_(model, optimizer)
    tensors, meta = pack_optimizer(optimizer, model)
    assert {name.split("/")[0] for name in tensors} == {"optimizer"}
    assert {"optimizer/conv1.gate.g/exp_avg", "optimizer/fc2.bias/step"} <= set(tensors)
    assert json.loads(json.dumps(meta))["groups"][0]["options"]["betas"] == [0.8, 0.99]
    assert {"model/conv1.gate.g", "model/bn1.running_mean"} <= set(pack_model(model))


def test_parameters_without_state_stay_without():
    model = gated()
    optimizer = sgd(model)
    model.fc2.bias.grad = torch.ones(2)
    optimizer.step()
    tensors, meta = pack_optimizer(optimizer, model)
    assert list(tensors) == ["optimizer/fc2.bias/momentum_buffer"]
    other = copy.deepcopy(model)
    again = sgd(other)
    train_(other, again)
    load_optimizer_(again, other, tensors, meta)
    assert list(again.state) == [other.fc2.bias]


def test_values_that_are_no_tensors():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    optimizer.state[model.weight] = {"momentum_buffer": None, "count": 3}
    tensors, meta = pack_optimizer(optimizer, model)
    again = sgd(model)
    load_optimizer_(again, model, tensors, json.loads(json.dumps(meta)))
    assert dict(again.state) == {model.weight: {"momentum_buffer": None, "count": 3}}
    optimizer.state[model.weight] = {"odd": object()}
    with pytest.raises(StateError, match=r"'odd' of 'weight'.*JSON"):
        pack_optimizer(optimizer, model)


def test_learning_rates_are_filled_in_place():
    model = nn.Linear(2, 2)
    lr = torch.tensor(0.1)
    ours = torch.optim.SGD(model.parameters(), lr)
    state = pack_optimizer(torch.optim.SGD(model.parameters(), torch.tensor(0.03)), model)
    load_optimizer_(ours, model, *state)
    assert ours.param_groups[0]["lr"] is lr and lr == torch.tensor(0.03)
    load_optimizer_(ours, model, *pack_optimizer(torch.optim.SGD(model.parameters(), 0.25), model))
    assert ours.param_groups[0]["lr"] is lr and lr == 0.25
    plain = torch.optim.SGD(model.parameters(), 0.5)
    load_optimizer_(plain, model, *state)
    assert plain.param_groups[0]["lr"] == torch.tensor(0.03).item()


def test_memory_format_precision_and_choice_of_kernels_stay():
    model = gated(channels_last=True)
    optimizer = OPTIMIZERS["adamw"](model)
    train_(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    tensors, meta = pack_optimizer(optimizer, model)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    again = OPTIMIZERS["fused adamw"](model)
    load_optimizer_(again, model, contiguous, meta)
    state = again.state[model.conv1.weight]
    assert state["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert state["exp_avg"].dtype == torch.bfloat16 and not state["exp_avg"].requires_grad
    assert again.param_groups[0]["fused"] is True
    parameter = model.conv1.weight
    load_model_(model, {name: tensor.contiguous().clone() for name, tensor in pack_model(model).items()})
    assert model.conv1.weight is parameter and parameter.is_contiguous(memory_format=torch.channels_last)


def test_tied_parameters_are_packed_once():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert list(pack_model(model)) == ["model/0.weight", "model/0.bias", "model/1.bias"]
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other[0].weight)
    load_model_(other, pack_model(model))
    assert other[1].weight is other[0].weight
    assert_same(other.state_dict(), model.state_dict())


def test_state_of_something_else_changes_nothing():
    model, foreign = gated(), ConvNet()
    optimizer = sgd(model)
    train_(model, optimizer)
    tensors, meta = pack(model, optimizer)
    before = copy.deepcopy(tensors)
    for other, message in (
        (torch.optim.AdamW(model.parameters()), "of SGD, the optimizer is AdamW"),
        (torch.optim.SGD(model.parameters(), 0.1), "had 2 groups, this one has 1"),
        (torch.optim.SGD([{"params": [p]} for p in list(model.parameters())[:2]], 0.1), "only one of them has"),
    ):
        with pytest.raises(StateError, match=message):
            load_optimizer_(other, model, tensors, meta["optimizer"])
        assert not other.state
    with pytest.raises(StateError, match="not the model's"):
        pack_optimizer(optimizer, foreign)
    with pytest.raises(StateError, match=r"only the saved state has 'bn1\.bias'"):
        load_model_(nn.Identity(), tensors)
    assert_same(pack(model, optimizer)[0], before)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_step_counters_lie_where_the_optimizer_keeps_them(tmp_path, options):
    model = gated().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    model(images().cuda()).sum().backward()
    optimizer.step()
    tensors, meta = through_disk(tmp_path, *pack(model, optimizer))
    again = torch.optim.AdamW(model.parameters(), 1e-3, **options)
    load_optimizer_(again, model, tensors, meta["optimizer"])
    for parameter, state in optimizer.state.items():
        assert {key: value.device for key, value in state.items()} == {
            key: value.device for key, value in again.state[parameter].items()
        }
    optimizer.step()
    kept = {name: tensor.clone() for name, tensor in pack_model(model).items()}
    load_model_(model, tensors)
    again.step()
    assert_same(pack_model(model), kept)
