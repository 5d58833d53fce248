"""Under fully_shard, two processes end where one with twice the batch does, cuts and optimizer state included."""

import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import assert_same
from sharded_worker import OPTIMIZERS, alone, penalty_for, start, state_of, together, train, work
from torch import nn

import narrowgate as ng
from narrowgate.gates import CLOSING_POINT, exponential_gate

fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this build of torch has no distributed training")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (hasattr(fsdp, "fully_shard") and dist.is_gloo_available()), reason="no fully_shard or gloo"
    ),
    pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="fully_shard of PyTorch 2.6 needs a GPU"),
]
EXAMPLE = Path(__file__).parent.parent / "examples" / "fsdp_loop.py"

# network, optimizer, penalty in the loss or proximal, options of attach_gates_, wrapping, the same batch for both
RUNS = {
    "transformer-blocks-adamw": ("transformer", "adamw", "loss", {}, "blocks", False),
    "transformer-root-sgd": ("transformer", "sgd", "proximal", {}, "root", False),
    "residual-shared-gate": ("residual", "sgd", "loss", {}, "blocks", False),
    "residual-channels-root": ("residual", "adamw", "proximal", {"groups": "channels"}, "root", False),
    "residual-replicas": ("residual", "sgd", "loss", {}, "replicas", False),
    # BatchNorm's statistics are each process's own: only with the same batch are they those of one process.
    "conv-blocks-sgd": ("conv", "sgd", "proximal", {}, "blocks", True),
    "conv-root-adamw": ("conv", "adamw", "loss", {"placement": "before-norm"}, "root", True),
}


def own_statistics(team):
    """Different batches for a network with BatchNorm."""
    found = together(team, "conv", "sgd", "proximal", {}, "blocks", False)
    return {key: found[key] for key in ("weights", "values", "plan")}


def other_gates(team):
    """Hard-concrete and linear gates: the penalty and its gradient, closing and reopening."""
    found = {}
    for kind, penalty in (("hard-concrete", "l0"), ("linear", "l1")):
        model, gates, _ = start("conv", kind=kind, placement="before-norm")
        if team is not None:
            team.shard()(model)
        amount = ng.Penalty(gates, penalty, 0.1)()
        amount.backward()
        closed = gates.close_below_(0.3)
        for g in gates.parameters():
            with torch.no_grad():
                g.mul_(0) if kind == "linear" else g.fill_(-9)
        opened = [gates.reopen_(name) for name in gates]
        gradients = [getattr(g.grad, "full_tensor", lambda g=g: g.grad)() for g in gates.parameters()]
        found[kind] = {"penalty": amount.detach(), "closed": closed, "opened": opened, "gradients": gradients}
        found[kind]["values"] = gates.values()
    return found


def in_bf16(team):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, gates, batches = start("transformer")
    model.float()
    shard = team.shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    shard(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    penalty = penalty_for(gates, "proximal")
    mine = [batch.chunk(2)[team.rank] for batch in batches]
    train(model, optimizer, penalty, "proximal", mine[:4])
    plan = ng.shrink_sharded_(model, optimizer, batches[0][:2], shard=shard)
    train(model, optimizer, penalty, "proximal", mine[4:])
    with torch.no_grad():
        model(batches[0])  # leaves the outermost gates gathered, in bf16
    with ng.gathered(model, optimizer):
        assert all(p.dtype == torch.float32 for p in model.parameters())
        ng.verify(model, ng.compact(model, ng.plan(model, batches[0][:2])), batches[0][:2])
        return {"weights": model.state_dict(), "plan": plan.to_json(), "values": gates.values()}


def after_an_evaluation(team):
    """A forward without a backward leaves copies: writing there is refused, and training goes on right."""
    found = {}
    model, gates, batches = start("residual", groups="channels")
    shard = team.shard(reshard_after_forward=False)
    shard(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for write in (lambda: gates.close_below_(0.1), lambda: gates.assign_(gates.flat()), lambda: gates.reopen_("head")):
        with torch.no_grad():
            model(batches[0])
        try:
            write()
        except (RuntimeError, KeyError) as error:
            found.setdefault("errors", []).append(str(error))
    train(model, optimizer, penalty_for(gates, "loss"), "loss", [b.chunk(2)[team.rank] for b in batches])
    with torch.no_grad():
        model(batches[0])
    assert ng.shrink_sharded_(model, optimizer, batches[0][:2], shard=shard) is not None
    with ng.gathered(model, optimizer):
        found["weights"] = model.state_dict()
    return found


def with_a_shrinker(team):
    """A Shrinker that was made once cuts inside gathered, again and again."""
    model, gates, batches = start("residual", groups="channels")
    shard = team.shard()
    shard(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    penalty = penalty_for(gates, "proximal")
    shrinker = ng.Shrinker(model, batches[0][:2], optimizer, every=1, share=0.0)
    for epoch in range(2):
        part = [batch.chunk(2)[team.rank] for batch in batches[4 * epoch : 4 * epoch + 4]]
        train(model, optimizer, penalty, "proximal", part)
        if epoch:
            gates.close_below_(0.1)
        with ng.gathered(model, optimizer, shard=shard):
            shrinker.step(epoch)
    with ng.gathered(model):
        return {"cuts": len(shrinker.events), "weights": model.state_dict(), "plan": shrinker.plan.to_json()}


def two_optimizers(team):
    """Weights and gates trained by optimizers of their own, cut along in one go."""
    model, _, batches = start("residual")
    if team is not None:
        team.shard()(model)
    both = [
        OPTIMIZERS["sgd"]([p for p in model.parameters() if p.dim() > 1]),
        OPTIMIZERS["adamw"]([p for p in model.parameters() if p.dim() < 2]),
    ]
    for step, batch in enumerate(batches):
        model(batch if team is None else batch.chunk(2)[team.rank]).square().mean().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        if step != 4:
            continue
        if team is None:
            ng.compact_(model, ng.plan(model, batch[:2], training=True), optimizer=both)
        else:
            assert ng.shrink_sharded_(model, both, batch[:2], shard=team.shard()) is not None
    if team is not None:
        with ng.gathered(model, both):
            return {"weights": model.state_dict(), "state": [state_of(model, each) for each in both]}
    return {"weights": model.state_dict(), "state": [state_of(model, each) for each in both]}


def left_whole(team):
    """gathered without shard= leaves an ordinary model, with gradients and state."""
    model, _, batches = start("transformer")
    hooks = count_hooks(model)
    classes = [type(module) for module in model.modules()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard = team.shard()
    shard(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    (model(batches[0].chunk(2)[team.rank]).square().mean()).backward()
    with ng.gathered(model, optimizer):
        pass
    assert {name: torch.equal(p, before[name]) for name, p in model.named_parameters()} == dict.fromkeys(before, True)
    assert [type(module) for module in model.modules()] == classes and count_hooks(model) == hooks
    left = {key for module in model.modules() for key, value in vars(module).items() if value}
    assert not [key for key in left if "fsdp" in key or "composable" in key]
    assert model.head.weight is model.embedding.weight
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.load_state_dict(model.state_dict())
    shard(model)
    for name, p in model.named_parameters():
        assert type(p).__name__ == "DTensor", name
    return gradients


def count_hooks(model):
    tables = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    tables += ("_load_state_dict_post_hooks", "_forward_pre_hooks_with_kwargs")
    return [len(getattr(module, table)) for module in model.modules() for table in tables]


class Draws(nn.Module):
    def forward(self, x):
        random.random()
        return x


def random_numbers(team):
    """Planning runs the network; processes that shuffle with the same seed must not be parted by it."""
    model, gates, batches = start("residual", groups="channels")
    model.blocks.append(Draws())
    shard = team.shard()
    shard(model)
    before = random.getstate()
    assert ng.shrink_sharded_(model, None, batches[0][:2], shard=shard) is not None
    kept = random.getstate() == before
    with torch.no_grad():
        ng.gates_of(model).close_below_(0.9)  # the same gates, whoever made the object
    return {"kept": kept, "closed": gates.closed_fraction()}


def from_meta(team):
    """Gates put on a model without numbers: memory comes after fully_shard, numbers from an ordinary checkpoint."""
    with torch.device("meta"):
        model, gates, _ = start("residual")
    team.shard()(model)
    model.to_empty(device="cpu")
    return {"values": gates.values()}


def refusals(team):
    """What is refused leaves the model as it was: sharded, and fit to train on."""
    found = {}
    model, gates, batches = start("residual", groups="channels")
    shard = team.shard()
    stale = OPTIMIZERS["sgd"](model.parameters())
    attempt(found, "not sharded", lambda: ng.shrink_sharded_(model, stale, batches[0], shard=shard))
    shard(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    attempt(found, "plan alone", lambda: ng.plan(model, batches[0]))
    attempt(found, "merge alone", lambda: ng.merge_gates_(model))
    attempt(found, "checkpoint alone", lambda: ng.plain_state_dict(model))
    attempt(found, "count alone", lambda: ng.summarize(model, batches[0]))
    attempt(found, "save alone", lambda: ng.save(model, None, "nowhere"))
    penalty = penalty_for(gates, "loss")
    attempt(found, "budget alone", lambda: ng.Budget("params: 50%", model, batches[0], penalty, 4))
    with ng.gathered(model, optimizer, shard=shard):
        budget = ng.Budget("params: 50%", model, batches[0], penalty, 4)
    attempt(found, "budget's step alone", lambda: budget.step(0))
    attempt(found, "stale optimizer", lambda: ng.shrink_sharded_(model, stale, batches[0], shard=shard))
    attempt(found, "no plan", lambda: ng.shrink_sharded_(model, optimizer, "nonsense", shard=shard))
    train(model, optimizer, penalty_for(gates, "loss"), "loss", batches[:1])
    attempt(found, "no shard", lambda: ng.shrink_sharded_(model, optimizer, batches[0], shard=lambda model: None))
    shard(model)
    gates.assign_(torch.ones_like(gates.flat()))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    assert ng.shrink_sharded_(model, optimizer, batches[0], shard=shard) is None
    train(model, optimizer, penalty_for(gates, "loss"), "loss", batches[:1])
    return found


def attempt(found, name, action):
    try:
        action()
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"


OTHERS = (
    own_statistics,
    other_gates,
    in_bf16,
    after_an_evaluation,
    with_a_shrinker,
    two_optimizers,
    left_whole,
    random_numbers,
    from_meta,
    refusals,
)


def _run_both(cases, tmp_path_factory):
    """The folder with what both processes wrote.

    About once in two hundred starts the C library aborts one of them ("free(): double free"): memory is freed by
    PyTorch, not by Python code, so such a start says nothing of what is tested here, and there is a second one.
    """
    for last in (False, True):
        folder = tmp_path_factory.mktemp("two")
        try:
            mp.spawn(work, (str(folder), cases), nprocs=2)
            return folder
        except mp.ProcessExitedException as error:
            if last or error.signal_name != "SIGABRT":
                raise
            print(f"{error}: started again; what the process wrote to stderr says where it was")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both processes wrote down, by case; they are started once for all."""
    cases = {name: (together, *run) for name, run in RUNS.items()} | {case.__name__: (case,) for case in OTHERS}
    folder = _run_both(cases, tmp_path_factory)

    def of(name):
        results = [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)]
        for result in results:
            if "assert all_reduce_event is not None" in result.get("failed", ""):
                pytest.skip("copies of a sharded model (HSDP) need a GPU in this version of PyTorch")
            assert "failed" not in result, result["failed"]
        return results

    return of


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_end_where_one_with_the_whole_batch_does(found, name):
    network, optimizer, how, options, _, _ = RUNS[name]
    expected = alone(network, optimizer, how, options)
    full = sum(p.numel() for p in start(network, **options)[0].parameters())
    for result in found(name):
        plans = [ng.Plan.from_json(each["plan"]) for each in (result, expected)]
        assert plans[0].cuts == plans[1].cuts != {}
        assert result["small"] < 0.97 * full
        for key in ("weights", "state", "values", "penalty"):
            assert_same(result[key], expected[key], rtol=1e-9, atol=1e-11)
        for name, value in result["values"].items():
            assert torch.equal(value == 0, expected["values"][name] == 0), name


def test_batch_statistics_are_each_process_s_own(found):
    first, second = found("own_statistics")
    assert first["plan"] == second["plan"]
    buffers = [name for name in first["weights"] if "running" in name]
    assert any(not torch.equal(first["weights"][name], second["weights"][name]) for name in buffers)
    for name in first["weights"].keys() - set(buffers):
        assert torch.equal(first["weights"][name], second["weights"][name]), name
    assert_same(first["values"], second["values"])


def test_hard_concrete_and_linear_gates(found):
    expected = other_gates(None)
    for result in found("other_gates"):
        assert_same(result, expected, rtol=1e-12, atol=1e-14)
    assert expected["linear"]["closed"] + expected["hard-concrete"]["closed"] > 0


def test_mixed_precision(found):
    first, second = found("in_bf16")
    assert first["plan"] == second["plan"]
    assert_same(first["weights"], second["weights"])
    assert any((value == 0).any() for value in first["values"].values())
    exact = alone("transformer", "adamw", "proximal", {})
    assert ng.Plan.from_json(first["plan"]).cuts == ng.Plan.from_json(exact["plan"]).cuts
    for name, weight in first["weights"].items():
        if weight.is_floating_point():
            assert_same(weight, exact["weights"][name].float(), rtol=0.1, atol=0.05)


def test_an_evaluation_leaves_copies_that_are_not_written_to(found):
    expected = alone_without_cut()
    for result in found("after_an_evaluation"):
        assert len(result["errors"]) == 3
        assert all("reshard()" in error for error in result["errors"][:2])
        assert "no gate on 'head'" in result["errors"][2]
        assert_same(result["weights"], expected, rtol=1e-9, atol=1e-11)


def alone_without_cut():
    model, gates, batches = start("residual", groups="channels")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, penalty_for(gates, "loss"), "loss", batches)
    ng.compact_(model, ng.plan(model, batches[0][:2], training=True), optimizer=optimizer)
    return model.state_dict()


def test_several_optimizers_are_cut_along(found):
    expected = two_optimizers(None)
    for result in found("two_optimizers"):
        assert_same(result, expected, rtol=1e-9, atol=1e-11)


def test_a_shrinker_works_inside_gathered(found):
    first, second = found("with_a_shrinker")
    assert first["cuts"] == 2 and first["plan"] == second["plan"]
    assert_same(first["weights"], second["weights"])
    fresh = start("residual", groups="channels")[0]
    ng.compact_(fresh, ng.Plan.from_json(first["plan"]))
    fresh.load_state_dict(first["weights"])  # all cuts as one, for the full-size model


def test_gathered_leaves_no_trace(found):
    model, _, batches = start("transformer")
    model(batches[0]).square().mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for result in found("left_whole"):
        assert_same(result, expected, rtol=1e-9, atol=1e-11)


def test_planning_draws_no_random_numbers(found):
    first, second = found("random_numbers")
    assert first["kept"] and first == second and first["closed"] > 0


def test_gates_start_as_new_ones_when_a_sharded_model_gets_its_memory(found):
    for values in found("from_meta"):
        assert_same(values["values"]["groups"], exponential_gate(torch.ones(3, dtype=torch.float64)))


def test_what_is_refused(found):
    first, second = found("refusals")
    assert "call fully_shard on it first" in first["not sharded"]
    assert "TraceError" in first["plan alone"] and "inside `with ng.gathered(model):`" in first["plan alone"]
    for what in ("merge", "checkpoint", "count", "save"):
        assert re.search("'blocks.0.up.weight' is sharded.*inside `with ng.gathered", first[f"{what} alone"])
    assert "inside `with ng.gathered(model, optimizer, shard=...):`" in first["budget alone"]
    assert first["budget alone"] == first["budget's step alone"]
    assert "make the optimizer after fully_shard" in first["stale optimizer"]
    assert "shard= left the model" in first["no shard"]
    assert first["no plan"].startswith(("TraceError", "TypeError", "ValueError"))
    assert second["no plan"].startswith("RuntimeError: the first process could not plan: ")
    assert {key: second[key] for key in second if key != "no plan"} == {
        key: first[key] for key in first if key != "no plan"
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_closed_gate_stays_closed_when_it_is_rounded(dtype):
    g = torch.tensor([CLOSING_POINT], dtype=torch.float64).float()  # rounds down: the largest that is closed
    assert exponential_gate(g) == 0 and exponential_gate(torch.nextafter(g, torch.ones(1))) > 0
    assert exponential_gate(g.to(dtype)) == 0


def test_a_torch_without_fully_shard_is_named(monkeypatch):
    monkeypatch.delattr(fsdp, "fully_shard")
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=re.escape("install PyTorch 2.6 or newer")), ng.gathered(model):
        pass


def test_state_by_name_is_not_empty():
    """The comparison above would pass with nothing to compare."""
    assert len(state_of(*_one_step())) == 20


def _one_step():
    model, gates, batches = start("residual", groups="channels")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, penalty_for(gates, "loss"), "loss", batches[:1])
    return model, optimizer


def test_the_example_runs_under_torchrun():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port), str(EXAMPLE))
    short = ("--epochs", "2", "--steps", "12", "--strength", "40")
    output = subprocess.run(
        [sys.executable, *torchrun, *short],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert output.returncode == 0, output.stderr
    full, left = re.search(r"([\d,]+) -> ([\d,]+) parameters, same function", output.stdout).groups()
    assert int(left.replace(",", "")) < 0.9 * int(full.replace(",", ""))
    assert output.stdout.count("epoch") == 2  # the first process alone speaks
