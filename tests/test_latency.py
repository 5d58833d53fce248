"""Timing two networks: what is timed, what is said of it, and what is said where nothing could be timed."""

import dataclasses
import io
import json
import sys
import time

import pytest
import torch
from torch import nn

import narrowgate as ng
from narrowgate.flow.layers import IndexedLayer
from narrowgate.measure import latency as module
from narrowgate.measure import runners
from narrowgate.measure.advice import advice, reason
from narrowgate.measure.latency import ChoiceError, Latency, Missing, Spread, Timing, latency
from narrowgate.measure.zeroed import zero_channels_
from narrowgate.models import LeNet5


class Sleepy(nn.Module):
    """A network that takes as long as it is told."""

    def __init__(self, seconds):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.seconds = seconds
        self.modes = set()

    def forward(self, x):
        time.sleep(self.seconds)
        self.modes.add(self.training)
        return self.fc(x)


EXAMPLE = torch.rand(2, 4)


def eager(before, after, **options):
    return latency(before, after, EXAMPLE, devices=("cpu",), modes=("eager",), **{"rounds": 8, **options})


def timing(ratio=0.5, device="cpu", mode="eager", batch=1):
    spread = Spread(1.0, 1.0, 1.0)
    return Timing(device, mode, batch, 8, spread, spread, Spread(ratio - 0.02, ratio, ratio + 0.02))


def result(*timings, **changes):
    whole = Latency(
        model="Net",
        inputs="1 x 4",
        precisions={"cpu": "32", "cuda": "bf16"},
        devices={"cpu": "CPU"},
        threads=1,
        torch="2",
        multiply_adds=(100, 25),
        parameters=(10, 5),
        indexed_layers=0,
        odd_widths=0,
        timings=timings,
        missing=(),
    )
    return dataclasses.replace(whole, **changes)


def test_the_slower_network_is_the_slower_one():
    fast, slow = Sleepy(0.002), Sleepy(0.02)
    sped_up, slowed_down = eager(slow, fast, batches=(1, 3)), eager(fast, slow, batches=(2,))
    assert [t.batch for t in sped_up.timings] == [1, 3]
    assert {t.verdict for t in sped_up.timings} == {"faster"} and slowed_down.timings[0].verdict == "slower"
    first = sped_up.timings[0]
    assert 0.02 <= first.before.q1 <= first.before.median <= first.before.q3
    assert 0.05 < first.ratio.median < 0.8
    assert first.rounds == 8


def test_equal_networks_differ_by_nothing_clear():
    verdicts = {timing(ratio).verdict for ratio in (0.94, 1.0, 1.06)}
    assert verdicts == {"no clear difference"}
    assert (timing(0.9).verdict, timing(1.1).verdict) == ("faster", "slower")


def test_networks_take_turns_and_the_order_changes(monkeypatch):
    log = []
    calls = [lambda: log.append("before"), lambda: log.append("after")]
    monkeypatch.setattr(module, "_seconds", lambda call, device, count: call() or 1.0)
    module._time_pair(calls, "cpu", "eager", 1, 4, 60.0)
    assert log[6:] == ["after", "before", "before", "after"] * 2


def test_a_time_limit_leaves_a_few_rounds():
    slow = Sleepy(0.02)
    assert eager(slow, slow, batches=(1,), rounds=50, seconds=0.01).timings[0].rounds == 5
    assert eager(slow, slow, batches=(1,), rounds=3, seconds=0.01).timings[0].rounds == 3


def test_models_are_timed_in_eval_mode_as_copies_and_left_as_they_are():
    model = Sleepy(0).train()
    seen = []
    model.fc.register_forward_hook(lambda layer, args, output: seen.append(args[0].shape))
    eager(model, model, batches=(5,))
    assert model.training and model.modes == set() and model.fc.weight.dtype == torch.float32
    assert torch.Size([5, 4]) in seen


def test_counts_go_with_the_times():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    zero_channels_(model, 0.5)
    small = ng.compact(model, ng.plan(model, EXAMPLE))
    found = eager(model, small, batches=(1,), rounds=2)
    assert found.multiply_adds == (128, 64) and found.multiply_adds_left == 0.5
    assert found.parameters == (4 * 16 + 16 + 16 * 4 + 4, 4 * 8 + 8 + 8 * 4 + 4)
    assert (found.indexed_layers, found.odd_widths) == (0, 0)


def test_index_layers_and_odd_widths_are_counted():
    model = LeNet5()
    gates = ng.attach_gates_(model)
    with torch.no_grad():
        for gate in gates.modules():
            gate.g[1::2] = 0
    images = torch.rand(2, 1, 28, 28)
    small = ng.compact(model, ng.plan(model, images, layout="scatter"))
    found = latency(model, small, images, devices=("cpu",), modes=("eager",), batches=(1,), rounds=2)
    assert found.indexed_layers == sum(isinstance(m, IndexedLayer) for m in small.modules()) == 1
    assert found.odd_widths == 3  # 10, 25 and 250 channels


def test_json_round_trip():
    whole = result(timing(), timing(1.2, batch=8), missing=(Missing("cuda", "graph", "no GPU"),))
    assert Latency.from_json(whole.to_json()) == whole
    assert json.loads(whole.to_json())["timings"][0]["ratio"]["median"] == 0.5
    for text in ("{}", "[]", whole.to_json().replace('"format": 1', '"format": 2'), "nonsense"):
        with pytest.raises(ValueError, match="not a latency measurement"):
            Latency.from_json(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ("tpu",)}, "unknown device 'tpu'; choose from cpu, cuda"),
        ({"modes": ("egaer",)}, "unknown mode 'egaer'; choose from eager, compiled, onnx, graph"),
        ({"devices": ("cpu",), "modes": ("graph",)}, "graph can't run on cpu; a CPU has eager, compiled, onnx"),
        ({"precision": "8"}, "unknown precision '8'"),
        ({"batches": (0,)}, "batch sizes must be 1 or above, got 0"),
        ({"batches": ()}, "got none"),
        ({"devices": ()}, "no device is given"),
        ({"modes": ()}, "no mode is given"),
        ({"rounds": 1}, "at least 2 rounds"),
    ],
)
def test_wrong_choices_are_refused_by_name(options, message):
    with pytest.raises(ChoiceError, match=message):
        latency(Sleepy(0), Sleepy(0), EXAMPLE, **options)


@pytest.mark.parametrize(
    ("example", "message"), [((EXAMPLE,), "got a tuple"), ({"x": EXAMPLE}, "got a dict"), (EXAMPLE[:0], "got shape")]
)
def test_an_example_that_is_not_one_tensor_is_refused(example, message):
    with pytest.raises(ChoiceError, match=message):
        latency(Sleepy(0), Sleepy(0), example, devices=("cpu",), modes=("eager",))


def test_no_gpu_is_said_for_every_mode(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = latency(Sleepy(0), Sleepy(0), EXAMPLE, devices=("cuda",), batches=(1,))
    assert found.timings == () and [m.mode for m in found.missing] == ["eager", "compiled", "graph"]
    assert "GPU" in found.missing[0].why or "CUDA" in found.missing[0].why


def test_missing_onnx_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = latency(Sleepy(0), Sleepy(0), EXAMPLE, devices=("cpu",), modes=("onnx", "eager"), batches=(1,), rounds=2)
    assert [t.mode for t in found.timings] == ["eager"]
    remedy = 'onnxruntime is not installed: pip install ".[export]" in the checkout of narrowgate'
    assert found.missing == (Missing("cpu", "onnx", remedy),)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_what_the_exporter_lacks_costs_only_its_mode(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    found = latency(Sleepy(0), Sleepy(0), EXAMPLE, devices=("cpu",), modes=("eager", "onnx"), batches=(1,), rounds=2)
    assert [t.mode for t in found.timings] == ["eager"] and '".[export]"' in found.missing[0].why


def test_a_network_that_cannot_be_exported_is_timed_in_the_other_modes():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class Branching(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    found = latency(
        Branching(4, 3), Branching(4, 2), EXAMPLE, devices=("cpu",), modes=("eager", "onnx"), batches=(1,), rounds=2
    )
    assert [t.mode for t in found.timings] == ["eager"]
    assert [m.mode for m in found.missing] == ["onnx"] and "can't trace Branching" in found.missing[0].why


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("InvalidCxxCompiler: No working C++ compiler found"), "install g++ or clang"),
        (RuntimeError("TritonMissing: Cannot find a working triton"), "pip install triton"),
        (RuntimeError("out of luck\nsecond line"), "torch.compile failed: RuntimeError: out of luck"),
    ],
)
def test_a_compiler_that_fails_is_named(monkeypatch, error, why):
    def compile(model, **options):
        def fails(x):
            if "luck" in str(error):
                raise error
            raise ValueError("wrapped") from error

        return fails

    monkeypatch.setattr(torch, "compile", compile)
    found = latency(Sleepy(0), Sleepy(0), EXAMPLE, devices=("cpu",), modes=("compiled",), batches=(1,))
    assert found.timings == () and why in found.missing[0].why and "\n" not in found.missing[0].why


def test_onnx_runtime_runs_the_network(monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    call = runners.prepare(model, EXAMPLE, "onnx")
    for batch in (1, 7):
        x = torch.rand(batch, 4)
        (output,) = call(x)()
        torch.testing.assert_close(torch.from_numpy(output), model(x).detach())
    with pytest.raises(runners.UnavailableError, match="float32"):
        runners.prepare(model.double(), EXAMPLE.double(), "onnx")


@pytest.mark.slow
def test_compiled_networks_are_timed():
    model = nn.Sequential(nn.Linear(4, 4))
    found = latency(model, model, EXAMPLE, devices=("cpu",), modes=("compiled",), batches=(1, 2), rounds=2)
    assert [(t.mode, t.batch) for t in found.timings] == [("compiled", 1), ("compiled", 2)] or found.missing


def test_what_is_there_so_far_is_handed_out():
    seen = []
    model = Sleepy(0)
    found = eager(model, model, batches=(1, 2, 3), rounds=2, progress=seen.append)
    assert [[t.batch for t in each.timings] for each in seen] == [[1], [1, 2], [1, 2, 3]]
    assert seen[-1] == found and found.activations == (4, 4)


def test_an_older_measurement_is_read():
    whole = json.loads(result(timing()).to_json())
    del whole["activations"]
    assert Latency.from_json(json.dumps(whole)) == result(timing())


def at(batch, after, ratio=0.6, device="cuda", mode="eager"):
    """A timing in which the small network takes so many milliseconds."""
    small = Spread(*[after / 1e3] * 3)
    return dataclasses.replace(timing(ratio, device, mode, batch), after=small)


def test_the_reason_is_the_first_that_the_numbers_show():
    launches = result(at(1, 1.0), at(8, 1.1), at(64, 8.0), at(1, 0.3, mode="graph"), at(8, 0.9, mode="graph"))
    first, second, third, _, graph = launches.timings
    assert reason(launches, first) == (
        "launch-bound: a CUDA graph takes 30% of this; 8 times the batch takes 1.1 times as long"
    )
    assert "launch-bound" not in reason(launches, second) and "fixed costs" not in reason(launches, third)
    few = result(at(1, 0.3, mode="graph"), at(8, 0.5, mode="graph"))
    for each in few.timings:  # the last one has a smaller batch to compare with
        assert reason(few, each) == "fixed costs of each layer: 8 times the batch takes 1.7 times as long"
    assert reason(few, at(8, 0.5)).startswith("less efficient kernels: narrower layers do 42% as many")
    assert reason(launches, graph).startswith("less efficient kernels")
    assert reason(dataclasses.replace(few, indexed_layers=2), graph) == "index operations: 2 layers pick their channels"
    assert reason(dataclasses.replace(few, indexed_layers=1), graph) == "index operations: 1 layer picks its channels"


def test_time_that_follows_the_activations_is_bandwidth():
    moved = result(at(64, 1.0), at(256, 4.0), activations=(100, 60))
    assert reason(moved, moved.timings[0]) == "bandwidth-bound: 60% of the activations are left to be moved"
    slow = at(64, 1.0, ratio=0.8)
    assert "less efficient" in reason(result(slow, at(256, 4.0), activations=(100, 60)), slow)
    odd = result(slow, at(256, 4.0), activations=(100, 60), odd_widths=3)
    assert reason(odd, slow) == "odd widths: 3 layers are no multiple of 8 wide"
    assert "odd" not in reason(odd, dataclasses.replace(slow, device="cpu"))


def test_advice_only_where_it_is_not_faster():
    assert advice(result(timing(0.5), timing(0.7, batch=64), indexed_layers=3, odd_widths=5)) == []
    lines = advice(result(timing(1.1), timing(0.5, batch=64), indexed_layers=3, odd_widths=5))
    assert lines[0] == "Slower: cpu eager, batch 1 (108% to 112% of the time)."
    assert 'layout="aligned"' in lines[1] and "round_to=8" in lines[2] and "larger batches" in lines[3]


def test_what_is_not_clear_is_not_called_slower():
    noisy = dataclasses.replace(timing(0.8, batch=64), ratio=Spread(0.11, 0.8, 3.42))
    lines = advice(result(timing(0.5), noisy))
    assert lines[0] == "No clear difference: cpu eager, batch 64 (11% to 342% of the time)."
    assert "idle machine" in lines[1] and len(lines) == 2
    assert [line.partition(":")[0] for line in advice(result(noisy, timing(1.1), odd_widths=2))[:2]] == [
        "Slower",
        "No clear difference",
    ]


def test_advice_names_only_what_applies():
    lines = " ".join(advice(result(timing(1.1), odd_widths=2)))
    assert "round_to=8" in lines and "aligned" not in lines and "--batches 1,64" in lines
    gpu = " ".join(advice(result(timing(1.1, "cuda", batch=64))))
    assert "CUDA graph" in gpu and "round_to" not in gpu and "idle machine" not in gpu
    little = advice(result(timing(1.0), multiply_adds=(100, 99), odd_widths=2))
    assert "99% of the multiply-adds are left" in little[1] and len(little) == 2
    assert "idle machine" in advice(result(timing(1.0, batch=64)))[-1]


def test_the_table_says_it_all():
    rich = pytest.importorskip("rich.console")
    from narrowgate.printing import print_latency

    missing = tuple(Missing("cuda", mode, "PyTorch sees no GPU") for mode in ("eager", "graph"))
    page = io.StringIO()
    print_latency(result(timing(0.5), timing(1.1, batch=8), missing=missing), rich.Console(file=page, width=80))
    text = page.getvalue()
    assert "25.0% left of 100 multiply-adds" in text and "faster" in text and "slower" in text
    assert "1000.0" in text and "48%-52%" in text and "quartiles" in text
    assert "not timed: cuda eager, graph: PyTorch sees no GPU" in text and "- Slower: cpu eager, batch 8" in text
    assert max(map(len, text.splitlines())) <= 80
    wide = Spread(0.3979, 0.4019, 11.684)
    noisy = dataclasses.replace(timing(1.0, batch=64), before=wide, after=wide, ratio=Spread(0.11, 0.8, 3.42))
    page = io.StringIO()
    print_latency(result(noisy), rich.Console(file=page, width=80))
    assert "397.9-11684.0" in page.getvalue() and "11%-342%" in page.getvalue()
    page = io.StringIO()
    print_latency(result(timing(0.5), timing(1.1, batch=512)), rich.Console(file=page, width=60))
    text = page.getvalue()
    assert max(map(len, text.splitlines())) <= 60 and "…" not in text
    assert {"512", "1000.0", "faster", "slower", "110%"} <= set(text.split())


def test_onnx_runtime_takes_whole_numbers_and_is_told_apart_by_the_weights():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    words, model = torch.randint(9, (2, 5)), nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    how = {"devices": ("cpu",), "modes": ("onnx",), "batches": (1,), "rounds": 2}
    found = latency(model, model, words, **how)
    assert [timing.mode for timing in found.timings] == ["onnx"] and not found.missing
    found = latency(model, model, words, precision="bf16", **how)
    assert not found.timings and "in float32 only" in found.missing[0].why


def test_zeroing_takes_output_channels_of_grouped_transposed_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 12, 3, groups=2), nn.Conv2d(12, 2, 1)).eval()
    zero_channels_(model, 0.5)
    assert (model[1](torch.randn(1, 8, 4, 4)) == 0).all((0, 2, 3)).tolist() == [False, True] * 6


def test_zeroing_takes_output_channels_of_gpt_2s_layers():
    layers = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(layers.Conv1D(8, 4), nn.ReLU(), layers.Conv1D(2, 8)).eval()
    zero_channels_(model, 0.5)
    assert (model[0](torch.randn(3, 4)) == 0).all(0).tolist() == [False, True] * 4


def test_zeroing_takes_the_same_channels_everywhere_and_spares_the_last_layer():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.ConvTranspose2d(8, 6, 3), nn.Conv2d(6, 2, 1)
    )
    zero_channels_(model, 0.5)
    for layer, axis in ((model[0], 0), (model[1], 0), (model[2], 1)):
        size = layer.weight.movedim(axis, 0).flatten(1).abs().sum(1)
        assert (size == 0).tolist() == [False, True] * (len(size) // 2)
        assert (layer.bias == 0).tolist() == (size == 0).tolist()
    assert model[3].weight.all()
    with pytest.raises(ValueError, match="below 1, got 1"):
        zero_channels_(model, 1.0)


@pytest.mark.parametrize(("share", "gone"), [(0.0, 0), (0.25, 2), (0.3, 3), (0.9, 9)])
def test_zeroing_takes_the_share_asked_for(share, gone):
    model = nn.Sequential(nn.Linear(4, 10 if share != 0.25 else 8), nn.Linear(10 if share != 0.25 else 8, 2))
    zero_channels_(model, share)
    assert int((model[0].weight == 0).all(1).sum()) == gone
