"""Does a network with x % of its multiply-adds left take at most (x + 15) % of the time? Batch 1 to 256, in turns.

ResNet-50 and MobileNetV2 of torchvision, 224x224, cut to 50 % and 25 % of their multiply-adds: the same share of
channels goes from every layer, from residual streams as a whole (``zero_channels_``), in the aligned layout, all widths
multiples of 8. Each is timed against the whole network, the two in turns. float32 on a CPU, bfloat16 and channels last
on a GPU.

    python benchmarks/latency.py --device cuda --modes eager graph
    python benchmarks/latency.py --device cuda --modes compiled --batches 1 256 --add
    python benchmarks/latency.py --device cpu --modes onnx compiled --batches 1 8 32

Needs torchvision and the package installed, or ``PYTHONPATH=src``; ``onnx`` also needs narrowgate[export]. Writes
``benchmarks/latency_DEVICE.json`` and a table beside it (``.md``) after every single measurement, so that a run that is
stopped loses one. ``--add`` keeps what an earlier run on the same machine wrote there.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from _record import ROOT, about, table, write_json
from torch import Tensor, nn

import narrowgate as ng
from narrowgate.measure.advice import advice, reason
from narrowgate.measure.latency import Latency, Timing, latency
from narrowgate.measure.runners import device_or_why_not
from narrowgate.measure.zeroed import zero_channels_

MARGIN = 0.15
HEAD = ["network", "multiply-adds", "how", "batch", "dense ms", "small ms", "time", "allowed", ""]
Key = tuple[str, float, int]  # the network, the share of multiply-adds to be left, widths in multiples of


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
    parser.add_argument("--add", action="store_true", help="keep what the file has of other modes, batches, networks")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if why := device_or_why_not(arguments.device):
        parser.error(why)
    arguments.modes = arguments.modes or (["eager", "graph"] if arguments.device == "cuda" else ["compiled", "onnx"])
    out = arguments.out or ROOT / "benchmarks" / f"latency_{arguments.device}.json"
    book = Book(out, arguments)
    example = torch.randn(2, 3, arguments.size, arguments.size)
    for name in arguments.models:
        torch.manual_seed(0)
        dense = getattr(torchvision.models, name)().eval()
        for round_to in arguments.round_to:
            for left in arguments.left:
                if (small := cut_to(dense, example, left, round_to)) is None:
                    print(f"{name} can't be cut to {left:.0%} of its multiply-adds in multiples of {round_to}")
                else:
                    book.measure((name, left, round_to), dense, small, example)
    print(f"\n{page(book.record())}")


class Book:
    """What has been measured, in a file that is brought up to date with every measurement."""

    def __init__(self, out: Path, arguments: argparse.Namespace) -> None:
        self.out, self.arguments = out, arguments
        self.about: dict[str, Any] = about(arguments.device)
        self.commands = [self.about.pop("command")]
        self.found: dict[Key, Latency] = {}
        self.start = time.perf_counter()
        if arguments.add and out.exists():
            self._take(json.loads(out.read_text()))

    def _take(self, old: dict[str, Any]) -> None:
        for key, mine in (*self.about.items(), ("image_size", self.arguments.size)):
            if key != "date" and old[key] != mine:
                raise SystemExit(f"{self.out} was made with another {key} ({old[key]}, here {mine}): leave out --add")
        self.commands = [*old["commands"], *self.commands]
        for each in old["networks"]:
            key = each["model"], each["left"], each["round_to"]
            self.found[key] = Latency.from_json(json.dumps({"format": 1, **each["latency"]}))

    def measure(self, key: Key, dense: nn.Module, small: nn.Module, example: Tensor) -> None:
        """Time one pair and write every result as soon as it is there."""
        before, options = self.found.get(key), self.arguments

        def keep(result: Latency) -> None:
            self._write(key, merged(before, result))
            seconds = time.perf_counter() - self.start
            print(f"{seconds:5.0f} s  {'  '.join(cells(row(key, result, result.timings[-1])))}", flush=True)

        result = latency(
            dense,
            small,
            example,
            devices=(options.device,),
            modes=options.modes,
            batches=options.batches,
            rounds=options.rounds,
            seconds=options.seconds,
            progress=keep,
        )
        self._write(key, merged(before, result))  # with what could not be timed

    def _write(self, key: Key, result: Latency) -> None:
        self.found[key] = result
        record = self.record()
        write_json(self.out, record)
        self.out.with_suffix(".md").write_text(page(record))

    def record(self) -> dict[str, Any]:
        """Everything, for the file."""
        rows = [row(key, result, timing) for key, result in self.found.items() for timing in result.timings]
        return {
            "what": "forward time of cut against whole networks; the target is multiply-adds left plus 15 points",
            "commands": self.commands,
            **self.about,
            "precision": "bfloat16, channels last" if self.arguments.device == "cuda" else "float32",
            "image_size": self.arguments.size,
            "met": sum(r["met"] for r in rows),
            "of": len(rows),
            "rows": rows,
            "remarks": [line for key, result in self.found.items() for line in remarks(key, result)],
            "networks": [
                {"model": name, "left": left, "round_to": round_to, "latency": asdict(result)}
                for (name, left, round_to), result in self.found.items()
            ],
        }


def merged(before: Latency | None, result: Latency) -> Latency:
    """An earlier measurement of the same two networks with a new one: what was timed again is replaced."""
    if before is None:
        return result
    if before.multiply_adds != result.multiply_adds:
        raise SystemExit("the networks in the file are not the ones that this version makes: leave out --add")
    new = {(t.mode, t.batch) for t in result.timings}
    ways = {t.mode for t in result.timings} | {each.mode for each in result.missing}
    timings = (*(t for t in before.timings if (t.mode, t.batch) not in new), *result.timings)
    return replace(
        result,
        timings=tuple(sorted(timings, key=lambda t: (t.mode, t.batch))),
        missing=(*(each for each in before.missing if each.mode not in ways), *result.missing),
    )


def cut_to(dense: nn.Module, example: Tensor, left: float, round_to: int) -> nn.Module | None:
    """The widest network of this kind that has at most this share of the multiply-adds left; None if there is none."""
    whole = ng.summarize(dense, example).multiply_adds
    guess = 1 - left**0.5  # the share of channels to zero, if both sides of every layer shrink
    low, high = max(0.0, guess - 0.1), min(0.95, guess + 0.15)
    best: nn.Module | None = None
    for _ in range(6):
        share = (low + high) / 2
        zeroed = copy.deepcopy(dense)
        zero_channels_(zeroed, share)
        small = ng.compact(zeroed, ng.plan(zeroed, example, layout="aligned", round_to=round_to))
        if ng.summarize(small, example).multiply_adds <= left * whole:
            best, high = small, share
        else:
            low = share
    if best is None:
        return None
    odd = {m.out_channels for m in best.modules() if isinstance(m, nn.Conv2d) and m.out_channels % round_to}
    assert not odd, f"widths {odd} are no multiples of {round_to}"
    return best


def row(key: Key, result: Latency, timing: Timing) -> dict[str, Any]:
    allowed = result.multiply_adds_left + MARGIN
    met = timing.ratio.median <= allowed
    return {
        "model": key[0],
        "left": key[1],
        "round_to": key[2],
        "multiply_adds_left": round(result.multiply_adds_left, 4),
        "parameters_left": round(result.parameters[1] / result.parameters[0], 4),
        "activations_left": round(result.activations[1] / result.activations[0], 4),
        "mode": timing.mode,
        "batch": timing.batch,
        "rounds": timing.rounds,
        "dense_ms": [round(value * 1e3, 4) for value in (timing.before.q1, timing.before.median, timing.before.q3)],
        "small_ms": [round(value * 1e3, 4) for value in (timing.after.q1, timing.after.median, timing.after.q3)],
        "time_left": [round(value, 4) for value in (timing.ratio.q1, timing.ratio.median, timing.ratio.q3)],
        "allowed": round(allowed, 4),
        "met": met,
        "why": "" if met else "within the noise" if timing.ratio.q1 <= allowed else reason(result, timing),
    }


def remarks(key: Key, result: Latency) -> list[str]:
    """What could not be timed, and what narrowgate itself says where the small network is not faster."""
    lines = [f"not timed: {each.device} {each.mode}: {each.why}" for each in result.missing] + advice(result)
    return [f"{key[0]}, {key[1]:.0%}: {line}" for line in lines]


def cells(r: dict[str, Any]) -> list[str]:
    return [
        r["model"] if r["round_to"] == 8 else f"{r['model']}, multiples of {r['round_to']}",
        f"{r['multiply_adds_left']:.1%}",
        r["mode"],
        str(r["batch"]),
        f"{r['dense_ms'][1]:.3f}",
        f"{r['small_ms'][1]:.3f}",
        f"{r['time_left'][1]:.0%} ({r['time_left'][0]:.0%}-{r['time_left'][2]:.0%})",
        f"{r['allowed']:.0%}",
        "met" if r["met"] else f"NOT met, {r['why']}",
    ]


def page(record: dict[str, Any]) -> str:
    """The record as a page with a table."""
    lines = [f"# Latency on {record['device']}, {record['precision']}", ""]
    lines += [f"    {command}" for command in record["commands"]]
    lines += ["", f"Met in {record['met']} of {record['of']} cases. Times are medians, shares with quartiles.", ""]
    lines += ["```", table(HEAD, [cells(r) for r in record["rows"]]), "```", ""]
    lines += [f"- {remark}" for remark in record["remarks"]]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
