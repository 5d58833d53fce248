"""How long plan + compact take, beside Torch-Pruning, and how the time grows with the size of the graph.

    pip install torch-pruning
    python benchmarks/plan_speed.py                   # about twenty minutes on an idle machine
    python benchmarks/plan_speed.py --part models     # or: growth
    python benchmarks/plan_speed.py --only resnet50 --repeats 1
    python benchmarks/plan_speed.py --ours            # without Torch-Pruning, which is then not needed

Needs the package installed, torchvision and torch-pruning. Writes ``benchmarks/plan_speed.json`` and ``.md``. Targets:
the sum over the six models at most 0.4 times Torch-Pruning's, none above 3 s where Torch-Pruning is under 3 s; time
grows linearly with the number of graph nodes.

Models: float32, 224 pixels, one image, half of the filters of every layer but the last zero. Ours is ``plan`` and
``compact`` of those filters, constants exact, in the aligned layout (scatter is given too). Theirs is the dependency
graph and a cut of half of all channels by magnitude, with the settings of its own example for torchvision models.
Building the model and copying it are not counted; both get a fresh copy each time, take turns, and run once before
the clock. Growth: pre-activation ResNets and DenseNets of 50 to 1000 layers, narrow, on 32 pixels; the exponent is the
slope of log time over log nodes, 1 for linear, with the nodes of the traced graph.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _record import ROOT, about, write_json
from _torch_pruning import prune_by_magnitude, require, version
from _zeroed import parameters, randomise_, zero_half_
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgate as ng
from narrowgate.models import PreActResNet

RESULTS = ROOT / "benchmarks" / "plan_speed.json"
MODELS = ("resnet50", "densenet201", "mobilenet_v2", "vit_b_16", "convnext_large", "efficientnet_b7")
DEPTHS = {"resnet": (56, 110, 218, 434, 704, 1001), "densenet": (52, 100, 202, 400, 700, 1000)}
TARGETS = {"sum_ratio": 0.4, "largest_s": 3.0}


class DenseNet(nn.Module):
    """A DenseNet for small images in two stages: BN-ReLU-conv layers, each reading all before it."""

    def __init__(self, depth: int, growth: int = 4) -> None:
        super().__init__()
        per_stage = (depth - 2) // 2
        self.first = nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        channels = 2 * growth
        for _ in range(2):
            stage = nn.ModuleList()
            for _ in range(per_stage):
                norm = nn.BatchNorm2d(channels)
                stage.append(nn.Sequential(norm, nn.ReLU(), nn.Conv2d(channels, growth, 3, padding=1, bias=False)))
                channels += growth
            self.stages.append(stage)
        self.norm = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for stage in self.stages:
            for layer in stage:
                x = torch.cat([x, layer(x)], 1)
            x = F.avg_pool2d(x, 2)
        return self.fc(F.relu(self.norm(x)).mean((2, 3)))


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model by name, ``resnet-110`` and ``densenet-100`` being ours, with zero filters, and an input."""
    torch.manual_seed(0)
    kind, _, depth = name.partition("-")
    if depth:
        model = PreActResNet(int(depth), classes=1000) if kind == "resnet" else DenseNet(int(depth))
        example = torch.randn(1, 3, 32, 32)
    else:
        from torchvision.models import get_model

        model, example = get_model(name, weights=None), torch.randn(1, 3, 224, 224)
    randomise_(model, shift=0.1)
    zero_half_(model)
    return model.eval(), example


def ours(layout: str) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda model, example: ng.compact(model, ng.plan(model, example, layout=layout))


METHODS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "aligned": ours("aligned"),
    "scatter": ours("scatter"),
    "torch_pruning": prune_by_magnitude,
}


def timed(method: Callable[[nn.Module, Tensor], nn.Module], model: nn.Module, example: Tensor) -> tuple[float, int]:
    """Seconds on a fresh copy, and the parameters left."""
    fresh = copy.deepcopy(model)
    gc.collect()
    start = time.perf_counter()
    small = method(fresh, example)
    return time.perf_counter() - start, parameters(small)


def measure(name: str, repeats: int, methods: list[str], limit: float) -> dict[str, Any]:
    """The median time of each method; one that took longer than the limit is not run again."""
    model, example = build(name)
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    result: dict[str, Any] = {"parameters": parameters(model)}
    for turn in range(repeats):
        for method in methods:
            if turn and seconds[method] and seconds[method][0] > limit:
                continue
            try:
                took, left = timed(METHODS[method], model, example)
            except Exception as error:
                result[method] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
                continue
            seconds[method].append(took)
            result[method] = {"parameters": left}
    for method, took in seconds.items():
        if took:
            all_runs = [round(t, 3) for t in took]
            result[method] |= {"seconds": round(statistics.median(took), 3), "all_runs": all_runs}
    return result


def nodes(name: str) -> int:
    """The operations in the traced graph."""
    model, example = build(name)
    program = torch.export.export(model, (example,), strict=False)
    return sum(node.op == "call_function" for node in program.graph.nodes)


def exponent(rows: dict[str, Any], method: str) -> float | None:
    """The slope of log time over log nodes, by least squares, over networks of 100 layers and more."""
    points = [
        (math.log(row["nodes"]), math.log(row[method]["seconds"]))
        for name, row in rows.items()
        if "seconds" in row.get(method, {}) and int(name.rpartition("-")[2]) >= 100
    ]
    return round(statistics.linear_regression(*zip(*points, strict=True)).slope, 2) if len(points) > 2 else None


def totals(rows: dict[str, Any]) -> dict[str, float]:
    """Sums over the models that every method finished, for methods that ran at all."""
    ran = [method for method in METHODS if any(method in row for row in rows.values())]
    done = [row for row in rows.values() if all("seconds" in row.get(method, {}) for method in ran)]
    return {method: round(sum(row[method]["seconds"] for row in done), 2) for method in ran}


def page(record: dict[str, Any]) -> str:
    made = record["about"]
    lines = [
        "# Speed of plan + compact",
        "",
        f"Made by `{made['command']}` ({made['date'][:10]}, {made['device']}, {made['threads']} threads, Torch-Pruning "
        f"{made['torch_pruning']}, PyTorch {made['versions']['torch']}). What is timed: "
        "`plan_speed.py`. Medians, in seconds.",
    ]
    if record.get("models"):
        lines += ["", "| model | aligned | scatter | Torch-Pruning |", "|---|---|---|---|"]
        lines += [row_of(name, row) for name, row in record["models"].items()]
        sums = totals(record["models"])
        lines.append("| **sum** | " + " | ".join(f"**{sums[m]:.2f}**" if m in sums else "" for m in METHODS) + " |")
        if sums.get("torch_pruning"):
            ratio = sums["aligned"] / sums["torch_pruning"]
            lines += ["", f"Aligned over Torch-Pruning: {ratio:.2f} (target {TARGETS['sum_ratio']})."]
    for kind in DEPTHS:
        rows = {name: row for name, row in record.get("growth", {}).items() if name.startswith(kind)}
        if not rows:
            continue
        lines += ["", "| network | graph nodes | aligned | scatter | Torch-Pruning |", "|---|---|---|---|---|"]
        lines += [row_of(f"{name} | {row['nodes']}", row) for name, row in rows.items()]
        slopes = [exponent(rows, method) for method in METHODS]
        lines.append("| **exponent** | | " + " | ".join("" if s is None else f"**{s}**" for s in slopes) + " |")
    return "\n".join([*lines, ""])


def row_of(title: str, row: dict[str, Any]) -> str:
    cells = [f"{row[m]['seconds']:.2f}" if "seconds" in row.get(m, {}) else outcome(row.get(m)) for m in METHODS]
    return f"| {title} | " + " | ".join(cells) + " |"


def outcome(cell: dict[str, Any] | None) -> str:
    return "not run" if cell is None else cell.get("failed", "").partition(":")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("models", "growth"), help="only this part; the other one's results stay")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--ours", action="store_true", help="do not run Torch-Pruning")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="run a method once where it takes longer than this")
    parser.add_argument("--stop", type=float, default=300.0, help="no deeper networks for a method that took this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(options.out.read_text()) if options.out.exists() and (options.part or options.only) else {}
    if not options.ours:
        require("--ours")
    run = Run(options, record)
    warm, example = build("mobilenet_v2")
    for method in run.methods:
        METHODS[method](copy.deepcopy(warm), example)
    if options.part != "growth":
        run.models()
    if options.part != "models":
        run.growth()


class Run:
    """One run: what was asked and the record so far, written after every network."""

    def __init__(self, options: argparse.Namespace, record: dict[str, Any]) -> None:
        self.options, self.record = options, record
        self.methods = [method for method in METHODS if method != "torch_pruning" or not options.ours]

    def models(self) -> None:
        for name in MODELS:
            if self.options.only in name:
                self._put("models", name, measure(name, self.options.repeats, self.methods, self.options.limit))

    def growth(self) -> None:
        for kind, depths in DEPTHS.items():
            methods = self.methods
            for name in (f"{kind}-{depth}" for depth in depths):
                if self.options.only not in name:
                    continue
                found = measure(name, min(3, self.options.repeats), methods, self.options.limit / 2)
                self._put("growth", name, {"nodes": nodes(name), **found})
                methods = [m for m in methods if 0 < found[m].get("seconds", 0) < self.options.stop]

    def _put(self, part: str, name: str, found: dict[str, Any]) -> None:
        self.record.setdefault(part, {})[name] = found
        self.record["about"] = {**about(), "torch_pruning": "not run" if self.options.ours else version()}
        write_json(self.options.out, self.record)
        self.options.out.with_suffix(".md").write_text(page(self.record))
        seconds = {method: found.get(method, {}).get("seconds", "-") for method in METHODS}
        print(f"{name:<18} {seconds}", flush=True)


if __name__ == "__main__":
    main()
