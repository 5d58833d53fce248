"""What gates and their penalty cost in a training step, against the same step without them.

    python benchmarks/gate_overhead.py                                       # CPU, a few minutes
    python benchmarks/gate_overhead.py --device cuda                         # one GPU, about five minutes
    python benchmarks/gate_overhead.py --device cuda --models resnet164 --modes compiled --deadline 560 \\
        --out benchmarks/gate_overhead_cuda_resnet164.json                   # compiling it takes minutes

Needs the package installed, or ``PYTHONPATH=src``, and torchvision. Writes ``benchmarks/gate_overhead_{device}.json``,
again after every part. Targets: gated / plain at most 1.05 on a CPU, at most 1.03 on a GPU in a CUDA graph or compiled.

A step is forward, cross entropy, bounded-l1 penalty in the loss, backward, SGD with momentum, on one random batch.
Plain and gated steps take turns, with a second plain instance as the noise floor; ``ratio`` is the median of the
gated / plain ratios of all rounds. ``seconds_of_first_step`` is mostly compilation where a mode compiles; the gated
network comes second and finds some of the plain one's kernels in the compiler's cache. Modes:

  eager           as written; float32 on a CPU, bfloat16 autocast and channels_last on a GPU
  graph           the whole step captured in one CUDA graph
  compiled        network, loss and penalty compiled as one full graph, then the whole step captured
  compiled-model  only the network compiled, then the whole step captured

On a CPU MobileNetV2 runs at batch 16 and 128 pixels: 224 pixels would take three times as long a repeat. The gates act
on the weights, so their cost does not depend on the batch or the image, and a smaller input makes the ratio look
worse, not better.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import ROOT, about, quartiles, table, write_json
from _steps import LR, MOMENTUM, STRENGTH, Step, Workload, captured, warmed_up
from torch import nn

from narrowgate.models import resnet164

MODELS = ("mobilenet_v2", "resnet164")
MODES = {"cpu": ("eager",), "cuda": ("eager", "graph", "compiled", "compiled-model")}
TARGETS = {"cpu": {"eager": 1.05}, "cuda": {"graph": 1.03, "compiled": 1.03, "compiled-model": 1.03}}
FEWEST_ROUNDS = 5
NAMES = ("plain", "gated", "plain_again")

Calls = dict[str, Callable[[], None]]


def mobilenet_v2() -> nn.Module:
    from torchvision.models import mobilenet_v2 as build

    return build()


def workload(model: str, device: str, batch: int | None, pixels: int | None) -> Workload:
    """The sizes of each network on each device."""
    cpu = device == "cpu"
    if model == "mobilenet_v2":
        return Workload(model, mobilenet_v2, 1000, batch or (16 if cpu else 128), pixels or (128 if cpu else 224))
    return Workload(model, resnet164, 100, batch or (16 if cpu else 128), pixels or 32)


def prepare(load: Workload, device: str, mode: str) -> tuple[Calls, list[Step], dict[str, float]]:
    """The three steps ready to be timed, their Step objects, and the seconds until each was ready."""
    compiled = {"compiled": "loss", "compiled-model": "model"}.get(mode, "")
    ready = warmed_up if mode == "eager" else captured
    steps: dict[str, Step] = {}
    calls: Calls = {}
    seconds: dict[str, float] = {}
    for name in NAMES:
        start = time.perf_counter()
        if name == "plain_again" and compiled:
            steps[name] = steps["plain"]  # compiling once more takes minutes; a second capture shows the noise as well
        else:
            steps[name] = Step(load, device, name == "gated", compiled)
        calls[name] = ready(steps[name])
        seconds[name] = round(time.perf_counter() - start, 2)
        print(f"  {name} ready after {seconds[name]:.1f} s", flush=True)
    return calls, list(steps.values()), seconds


def in_turns(calls: Calls, rounds: int, inner: int, limit: float, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Milliseconds a step: each round times every call once, there and back, until the rounds or the seconds are up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + limit
    for round_ in range(rounds):
        for name in list(calls) if round_ % 2 == 0 else reversed(calls):
            start = time.perf_counter()
            for _ in range(inner):
                calls[name]()
            wait()
            samples[name].append(1000 * (time.perf_counter() - start) / inner)
        if time.perf_counter() > end and round_ + 1 >= FEWEST_ROUNDS:
            break
    return samples


def measure(load: Workload, device: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part: a network in a mode."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    calls, steps, seconds = prepare(load, device, mode)
    one_round = in_turns(calls, 1, 1, 0.0, wait)
    # Samples of at least a tenth of a second on a GPU: a replay takes a few milliseconds.
    inner = 1 if device == "cpu" else max(1, math.ceil(100 / min(one_round["plain"])))
    for step in steps:
        step.mark_()
    gc.collect()
    gc.disable()
    samples = in_turns(calls, options.repeats, inner, options.part_seconds, wait)
    gc.enable()
    for step in steps:
        step.check()
    target = TARGETS[device].get(mode)
    ratio, noise = (ratios(samples[name], samples["plain"]) for name in ("gated", "plain_again"))
    gates = steps[1].gates
    return {
        "rounds": len(samples["plain"]),
        "steps_per_sample": inner,
        "gates": None if gates is None else gates.count,
        "gated_layers": None if gates is None else len(gates),
        "ms": {name: quartiles(values, 4) for name, values in samples.items()},
        "ratio": ratio,
        "noise_floor": noise,
        "target": target,
        "verdict": "no target" if target is None else verdict(ratio, noise, target),
        "seconds_until_ready": seconds,
        "seconds_of_first_step": {name: step.first_seconds for name, step in zip(NAMES[:2], steps, strict=False)},
        "samples_ms": {name: [round(value, 4) for value in values] for name, values in samples.items()},
    }


def ratios(above: list[float], below: list[float]) -> dict[str, float]:
    """Quartiles of the ratios by round; the ratios of the medians and of the fastest samples, as a second opinion."""
    by_round = [a / b for a, b in zip(above, below, strict=True)]
    of_medians = statistics.median(above) / statistics.median(below)
    middle = quartiles(by_round, 4)
    return {
        **middle,
        # The standard error of a median of normal values: 1.253 deviations, a deviation being 1/1.349 of the quartiles.
        "uncertainty": round(0.93 * (middle["q3"] - middle["q1"]) / math.sqrt(len(by_round)), 4),
        "of_medians": round(of_medians, 4),
        "of_fastest": round(min(above) / min(below), 4),
    }


def verdict(ratio: dict[str, float], noise: dict[str, float], target: float) -> str:
    """Whether the target is met, unless noise alone takes more than half of what it allows."""
    if max(abs(noise["median"] - 1), ratio["uncertainty"]) > (target - 1) / 2:
        return "too noisy"
    return "met" if ratio["median"] <= target else "not met"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", help="default: eager on a CPU; eager, graph and compiled on a GPU")
    parser.add_argument(
        "--compile-models",
        nargs="+",
        choices=MODELS,
        help="networks to compile, which takes minutes (default: the first of --models)",
    )
    parser.add_argument("--repeats", type=int, default=40, help="rounds of one sample each (default 40)")
    parser.add_argument("--part-seconds", type=float, help="stop a part's rounds after this (default 120 CPU, 15 GPU)")
    parser.add_argument(
        "--deadline", type=float, help="start no part after this many seconds (default 900 CPU, 290 GPU)"
    )
    parser.add_argument("--batch", type=int)
    parser.add_argument("--pixels", type=int)
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.modes = options.modes or [mode for mode in MODES[options.device] if mode != "compiled-model"]
    if unknown := set(options.modes) - set(MODES[options.device]):
        parser.error(f"no mode {', '.join(unknown)} on {options.device}; there is {', '.join(MODES[options.device])}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and PyTorch sees none")
    options.compile_models = options.compile_models or options.models[:1]
    options.part_seconds = options.part_seconds or {"cpu": 120.0, "cuda": 15.0}[options.device]
    options.deadline = options.deadline or {"cpu": 900.0, "cuda": 290.0}[options.device]
    options.out = options.out or ROOT / "benchmarks" / f"gate_overhead_{options.device}.json"
    return options


def parts_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(mode, model) in the order of their cost, so that a deadline cuts off the dearest."""
    return [
        (mode, model)
        for mode in MODES[options.device]
        if mode in options.modes
        for model in options.models
        if not mode.startswith("compiled") or model in options.compile_models
    ]


def run_part(mode: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One part's record; an error is part of it, so that the other parts still run."""
    load = workload(model, options.device, options.batch, options.pixels)
    part: dict[str, Any] = {"model": model, "mode": mode, "batch": load.batch, "pixels": load.pixels}
    print(f"{model}, {mode}: batch {load.batch} at {load.pixels} pixels", flush=True)
    try:
        part |= measure(load, options.device, mode, options)
    except Exception as error:
        part["error"] = f"{type(error).__name__}: {error}"
        print(f"  failed: {part['error'][:2000]}", flush=True)
    gc.enable()
    gc.collect()
    if options.device == "cuda":
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return part


def summary(parts: list[dict[str, Any]]) -> str:
    """The parts as a table."""
    rows = []
    for part in parts:
        left = [part["model"], part["mode"]]
        if "ratio" not in part:
            rows.append([*left, "", "", part.get("skipped") or "failed", "", "", ""])
            continue
        ms, ratio, noise = part["ms"], part["ratio"], part["noise_floor"]
        spread = f"{ratio['median']:.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})"
        floor = f"{noise['median']:.3f} ({noise['q1']:.3f}-{noise['q3']:.3f})"
        target = "" if part["target"] is None else f"<= {part['target']} {part['verdict']}"
        times = [f"{ms[name]['median']:.2f}" for name in ("plain", "gated")]
        rows.append([*left, *times, spread, floor, str(part["rounds"]), target])
    return table(["model", "mode", "plain ms", "gated ms", "gated/plain", "plain/plain", "rounds", "target"], rows)


def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cudnn.benchmark = (
        True  # one choice of algorithm per shape, shared by the plain and the gated network
    )
    start = time.perf_counter()
    record: dict[str, Any] = {
        "what": "milliseconds a training step, gated against plain, taken in turns",
        **about(options.device),
        "step": {"optimizer": "SGD", "lr": LR, "momentum": MOMENTUM, "penalty": "bounded-l1", "strength": STRENGTH},
        "precision": "float32" if options.device == "cpu" else "bfloat16 autocast, channels_last",
        "parts": [],
    }
    save = functools.partial(write_json, options.out, record)
    for mode, model in parts_of(options):
        if time.perf_counter() - start > options.deadline:
            record["parts"].append({"model": model, "mode": mode, "skipped": f"after {options.deadline:.0f} s"})
        else:
            record["parts"].append(run_part(mode, model, options))
        save()
    print(summary(record["parts"]))


if __name__ == "__main__":
    main()
