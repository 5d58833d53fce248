"""Does a network with x % of its multiply-adds left take at most (x + 15) % of the time? Batch 1 to 256, in turns.

ResNet-50 and MobileNetV2 of torchvision, 224x224, cut to 50 % and 25 % of their multiply-adds: the same share of
channels goes from every layer, from residual streams as a whole (``zero_channels_``). Each is timed against the whole
network, the two in turns. float32 on a CPU, bfloat16 and channels last on a GPU.

    python benchmarks/latency.py --device cuda --modes eager graph
    python benchmarks/latency.py --device cuda --modes compiled --batches 1 256 --out latency_cuda_compiled.json
    python benchmarks/latency.py --device cpu --modes onnx compiled --batches 1 8 32

Needs torchvision and the package installed, or ``PYTHONPATH=src``; ``onnx`` also needs narrowgate[export]. Writes
``benchmarks/latency_DEVICE.json`` and a table beside it (``.md``).
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from _record import ROOT, about, table, write_json
from torch import Tensor, nn

import narrowgate as ng
from narrowgate.measure.advice import advice
from narrowgate.measure.latency import Latency, Timing, latency
from narrowgate.measure.zeroed import zero_channels_

MARGIN = 0.15
HEAD = ["network", "widths", "multiply-adds", "how", "batch", "dense ms", "small ms", "time", "allowed", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled", "onnx", "graph"))
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenet_v2"])
    parser.add_argument("--left", nargs="+", type=float, default=[0.5, 0.25], help="shares of the multiply-adds")
    parser.add_argument("--round-to", nargs="+", type=int, default=[8], help="widths in multiples of this")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="at most, for each mode and batch size")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    modes = arguments.modes or (["eager", "graph"] if arguments.device == "cuda" else ["compiled", "onnx"])
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    why: list[str] = []
    example = torch.randn(2, 3, arguments.size, arguments.size)
    for name in arguments.models:
        torch.manual_seed(0)
        dense = getattr(torchvision.models, name)().eval()
        for round_to in arguments.round_to:
            for left in arguments.left:
                result = latency(
                    dense,
                    cut_to(dense, example, left, round_to),
                    example,
                    devices=(arguments.device,),
                    modes=modes,
                    batches=arguments.batches,
                    rounds=arguments.rounds,
                    seconds=arguments.seconds,
                )
                rows += [row(name, round_to, result, timing) for timing in result.timings]
                why += remarks(name, left, result)
                print(f"{name}, {left:.0%}, multiples of {round_to}: {time.perf_counter() - start:.0f} s", flush=True)
    record = {
        "what": "forward time of cut against whole networks; the target is multiply-adds left plus 15 points",
        **about(arguments.device),
        "precision": "bfloat16, channels last" if arguments.device == "cuda" else "float32",
        "image_size": arguments.size,
        "met": sum(r["met"] for r in rows),
        "of": len(rows),
        "rows": rows,
        "remarks": why,
    }
    out = arguments.out or ROOT / "benchmarks" / f"latency_{arguments.device}.json"
    write_json(out, record)
    text = page(record)
    out.with_suffix(".md").write_text(text)
    print(text)


def cut_to(dense: nn.Module, example: Tensor, left: float, round_to: int) -> nn.Module:
    """The widest network of this kind that has at most this share of the multiply-adds left."""
    whole = ng.summarize(dense, example).multiply_adds
    guess = 1 - left**0.5  # the share of channels to zero, if both sides of every layer shrink
    low, high = max(0.0, guess - 0.1), min(0.95, guess + 0.15)
    best: nn.Module | None = None
    for _ in range(5):
        share = (low + high) / 2
        zeroed = copy.deepcopy(dense)
        zero_channels_(zeroed, share)
        small = ng.compact(zeroed, ng.plan(zeroed, example, round_to=round_to))
        if ng.summarize(small, example).multiply_adds <= left * whole:
            best, high = small, share
        else:
            low = share
    if best is None:
        raise SystemExit(f"{type(dense).__name__} can't be cut to {left:.0%} of its multiply-adds this way")
    return best


def row(name: str, round_to: int, result: Latency, timing: Timing) -> dict[str, Any]:
    allowed = result.multiply_adds_left + MARGIN
    return {
        "model": name,
        "round_to": round_to,
        "multiply_adds_left": round(result.multiply_adds_left, 4),
        "parameters_left": round(result.parameters[1] / result.parameters[0], 4),
        "mode": timing.mode,
        "batch": timing.batch,
        "rounds": timing.rounds,
        "dense_ms": [round(value * 1e3, 4) for value in (timing.before.q1, timing.before.median, timing.before.q3)],
        "small_ms": [round(value * 1e3, 4) for value in (timing.after.q1, timing.after.median, timing.after.q3)],
        "time_left": [round(value, 4) for value in (timing.ratio.q1, timing.ratio.median, timing.ratio.q3)],
        "allowed": round(allowed, 4),
        "met": timing.ratio.median <= allowed,
    }


def remarks(name: str, left: float, result: Latency) -> list[str]:
    """What could not be timed, and what narrowgate itself says where the small network is not faster."""
    lines = [f"not timed: {each.device} {each.mode}: {each.why}" for each in result.missing] + advice(result)
    return [f"{name}, {left:.0%}: {line}" for line in lines]


def page(record: dict[str, Any]) -> str:
    """The record as a page with a table."""
    cells = [
        [
            r["model"],
            f"multiples of {r['round_to']}",
            f"{r['multiply_adds_left']:.1%}",
            r["mode"],
            str(r["batch"]),
            f"{r['dense_ms'][1]:.3f}",
            f"{r['small_ms'][1]:.3f}",
            f"{r['time_left'][1]:.0%} ({r['time_left'][0]:.0%}-{r['time_left'][2]:.0%})",
            f"{r['allowed']:.0%}",
            "met" if r["met"] else "NOT met",
        ]
        for r in record["rows"]
    ]
    lines = [f"# Latency on {record['device']}, {record['precision']}", "", f"`{record['command']}`", ""]
    lines += [f"Met in {record['met']} of {record['of']} cases.", "", "```", table(HEAD, cells), "```", ""]
    lines += [f"- {remark}" for remark in record["remarks"]]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
