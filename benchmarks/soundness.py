"""Does every compacted model compute what the original did? All of torchvision's classifiers and varied timm models.

    python benchmarks/soundness.py                    # all models, about an hour on one core; then the table
    python benchmarks/soundness.py --workers 12       # twelve at a time, the longest first
    python benchmarks/soundness.py --resume           # only models without a result yet
    python benchmarks/soundness.py --only resnet50    # names that contain this; other results stay as they are
    python benchmarks/soundness.py --table            # write soundness.md again from soundness.json
    python benchmarks/soundness.py --zero inputs --out benchmarks/soundness_inputs.json
    python benchmarks/soundness.py --others          # models of other libraries (_zoo_others.py says which)

Needs the package installed, torchvision and timm; with ``--others``, the packages whose models are to be looked at.
Writes ``benchmarks/soundness.json`` after every model and ``benchmarks/soundness.md`` at the end, with ``--others``
``soundness_others.json`` and its page, or what ``--out some/where.json`` names, models always in the same order.

Each model has random weights, random BatchNorm statistics and shifts, and half of the filters of every layer but the
last set to zero, drawn layer by layer; with ``--zero inputs``, half of what every layer reads. It is planned and
compacted in float64 in both layouts and compared on random images in batches of 2 and 3. The error is the largest
difference over the spread of the outputs across inputs; noise is what one unit in the last place of every input does,
on the same scale. A model passes if plan, compact and forward work and the error is at most 1e-9, or 100 times the
noise, in both layouts at both batch sizes.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _record import ROOT, about, write_json
from _soundness_table import write_table
from _workers import Job, Limits, Outcome, add_options, first_line, outcomes
from _zeroed import calibrate_, parameters, randomise_, zero_half_, zero_half_inputs_
from _zoo import Entry, Unknown, entries, load, other_entries
from _zoo_others import installed
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import narrowgate as ng

RESULTS = ROOT / "benchmarks" / "soundness.json"
OTHERS = ROOT / "benchmarks" / "soundness_others.json"
LAYOUTS = ("aligned", "scatter")
BATCHES = (2, 3)
TOLERANCE = 1e-9
NOISE_FACTOR = 100.0
ZEROS = {
    "filters": (zero_half_, "half of the filters of every layer but the last"),
    "inputs": (zero_half_inputs_, "half of the inputs of every layer"),
}


class Wrong(Exception):
    """The outputs are not comparable: other shapes, not finite, or the same for every input."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run models whose name contains this")
    parser.add_argument("--resume", action="store_true", help="keep results that are there")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--zero", choices=tuple(ZEROS), default="filters", help="what half of is set to zero")
    parser.add_argument("--skip-larger-than", type=float, default=250.0, help="million parameters")
    parser.add_argument("--others", action="store_true", help="models of other libraries than torchvision and timm")
    add_options(parser, seconds=420.0)
    parser.add_argument("--out", type=Path, help="where to write the numbers (default soundness[_others].json)")
    options = parser.parse_args()
    options.out = options.out or (OTHERS if options.others else RESULTS)
    record = read(options.out)
    if not options.table:
        if not (options.resume or options.only):
            record["models"] = {}
        run_all(options, record)
    write_table(record, options.out.with_suffix(".md"))


def read(path: Path) -> dict[str, Any]:
    """The record so far, or an empty one."""
    return json.loads(path.read_text()) if path.exists() else {"models": {}}


def run_all(options: argparse.Namespace, record: dict[str, Any]) -> None:
    import torchvision  # noqa: F401

    packages = installed() if options.others else {"timm": importlib.metadata.version("timm")}
    models: dict[str, Any] = record["models"]
    zoo = {entry.key: entry for entry in (other_entries(packages) if options.others else entries())}
    jobs = jobs_of(options, [entry for entry in zoo.values() if options.only in entry.key], models)
    for i, (key, outcome) in enumerate(outcomes(jobs, Limits.of(options)), 1):
        models[key] = result_of(zoo[key], outcome)
        record["models"] = {key: models[key] for key in zoo if key in models}
        record |= {"about": {**about(), **packages}, "settings": settings(options.zero)}
        write_json(options.out, record)
        print(f"{i:>4}/{len(jobs)}  {key:<55} {outcome.seconds:6.1f} s  {models[key]['verdict']}", flush=True)


def jobs_of(options: argparse.Namespace, wanted: list[Entry], done: dict[str, Any]) -> dict[str, Job]:
    """What is to run: with several workers the longest first, going by the committed times, so that none comes last."""
    if options.resume:
        wanted = [e for e in wanted if done.get(e.key, {"verdict": "not run"})["verdict"].startswith("not run")]
    if options.workers > 1:
        times = {key: model.get("seconds", 0.0) for key, model in read(RESULTS)["models"].items()}
        wanted = sorted(wanted, key=lambda entry: -times.get(entry.key, float("inf")))
    return {entry.key: functools.partial(measure, entry, options.skip_larger_than, options.zero) for entry in wanted}


def result_of(entry: Entry, outcome: Outcome) -> dict[str, Any]:
    """A model's row: what was measured, or why nothing was."""
    spent = {"seconds": outcome.seconds, "peak_gb": outcome.peak_gb}
    if not outcome.failure:
        return {"source": entry.source, **outcome.value, **spent}
    kind = "not run" if outcome.failure.endswith("of memory") else "FAILED"
    where = {"where": outcome.where} if outcome.where else {}
    return {"source": entry.source, "verdict": f"{kind}: {outcome.failure}", **where, **spent}


def settings(zero: str) -> dict[str, Any]:
    return {
        "dtype": "float64",
        "zeroed": ZEROS[zero][1],
        "batches": list(BATCHES),
        "tolerance": TOLERANCE,
        "noise_factor": NOISE_FACTOR,
    }


@torch.no_grad()
def measure(entry: Entry, largest: float, zero: str) -> dict[str, Any]:
    """Everything the table says about one model."""
    torch.manual_seed(zlib.crc32(entry.key.encode()))
    try:
        loaded = load(entry)
    except Unknown as error:
        return {"verdict": f"not run: {error}"}
    model = loaded.model.eval()
    before = parameters(model)
    result: dict[str, Any] = {"input": list(loaded.shape), "parameters": before}
    if before > largest * 1e6:
        return {**result, "verdict": f"not run: size ({before / 1e6:.0f} M parameters)"}
    model.double()
    randomise_(model)
    ZEROS[zero][0](model)
    batches = [loaded.inputs(batch) for batch in BATCHES]
    if entry.may_not_trace:  # running one that does not would only take time
        try:
            ng.plan(model, batches[0])
        except ng.TraceError as error:
            return {**result, "verdict": f"not traced: {first_line(error)}"}
    calibrate_(model, lambda: call(model, loaded.inputs(4)))
    expected = [call(model, inputs) for inputs in batches]
    result |= spreads(expected)
    noises = [distance(want, call(model, nudged(inputs))) for want, inputs in zip(expected, batches, strict=True)]
    result["noise"] = max(noises)
    for layout in LAYOUTS:
        try:
            result[layout] = one_layout(model, batches, expected, layout)
        except ng.TraceError as error:
            return {**result, "verdict": f"not traced: {first_line(error)}"}
    allowed = max(TOLERANCE, NOISE_FACTOR * result["noise"])
    worst = max(result[layout]["error"] for layout in LAYOUTS)
    return {**result, "error": worst, "verdict": "same" if worst <= allowed else "FAILED: outputs differ"}


def one_layout(model: nn.Module, batches: list[Any], expected: list[Any], layout: str) -> dict[str, Any]:
    start = time.perf_counter()
    plan = ng.plan(model, batches[0], layout=layout)
    planned = time.perf_counter()
    small = ng.compact(model, plan)
    compacted = time.perf_counter()
    if parameters(small) != plan.parameters_after:
        raise Wrong(f"the plan says {plan.parameters_after} parameters, the model has {parameters(small)}")
    errors = [distance(want, call(small.eval(), inputs)) for want, inputs in zip(expected, batches, strict=True)]
    return {
        "parameters": plan.parameters_after,
        "plan_s": round(planned - start, 3),
        "compact_s": round(compacted - planned, 3),
        "walls": len(plan.walls),
        "wall_ops": sorted({wall.op for wall in plan.walls}),
        "error": max(errors),
        "errors": errors,
    }


def call(model: nn.Module, inputs: Any) -> Any:
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def nudged(inputs: Any) -> Any:
    """Every number one unit in the last place up."""
    return pytree.tree_map(lambda x: torch.nextafter(x, torch.full_like(x, torch.inf)), inputs)


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def spread(output: Tensor) -> float:
    """How far apart outputs are from one input to another."""
    return (output - output.mean(0, keepdim=True)).abs().max().item() if output.dim() else 0.0


def spreads(expected: list[Any]) -> dict[str, float]:
    """Spread and size of the output that differs least; raises where nothing could be seen."""
    found = [(spread(t), t.abs().max().item()) for out in expected for t in tensors(out) if t.is_floating_point()]
    if not all(torch.tensor(pair).isfinite().all() for pair in found):
        raise Wrong("the original model's outputs are not finite")
    least = min(found, key=lambda pair: pair[0] / (pair[1] or 1.0))
    if least[0] <= 1e-6 * least[1]:
        raise Wrong(f"outputs hardly depend on inputs: spread {least[0]:.1e}, size {least[1]:.1e}")
    return {"spread": least[0], "size": least[1]}


def distance(expected: Any, actual: Any) -> float:
    """The largest difference between two outputs, each tensor relative to its spread across inputs."""
    wanted, got = tensors(expected), tensors(actual)
    if [t.shape for t in wanted] != [t.shape for t in got]:
        raise Wrong(f"shapes {[tuple(t.shape) for t in wanted]} became {[tuple(t.shape) for t in got]}")
    worst = 0.0
    for want, have in zip(wanted, got, strict=True):
        if not want.is_floating_point():
            if not torch.equal(want, have):
                raise Wrong("whole numbers in the output differ")
        else:
            error = (want - have).abs().max().item() / spread(want)
            worst = max(worst, error if error == error else float("inf"))
    return worst


if __name__ == "__main__":
    main()
