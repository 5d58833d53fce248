"""Removes channels from random networks, one a seed, and writes what was met, what went, and the worst error.

    python benchmarks/fuzz.py --examples 1000 --out benchmarks/fuzz.json
    python benchmarks/fuzz.py --examples 1000 --workers 12 --out benchmarks/fuzz.json

The networks are those of tests/test_flow_fuzz.py: float64, random wiring, random statistics, random closed filters.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _record import ROOT, about, write_json
from _workers import Limits, Outcome, add_options, outcomes

sys.path.insert(0, str(ROOT / "tests"))

from flow_helpers import NOISE_FACTOR, TOLERANCE, count, more_like, relative_error, spread_of
from flow_networks import ALL_STEPS, random_network

import narrowgate as ng
from narrowgate.flow.plan import LAYOUTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="how many networks (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--out", type=Path, help="where to write the numbers as JSON")
    add_options(parser, seconds=120.0)
    options = parser.parse_args()
    started = time.perf_counter()
    record = run(range(options.first, options.first + options.examples), Limits.of(options))
    record["seconds"] = round(time.perf_counter() - started, 1)
    if options.out:
        write_json(options.out, {**about(), **record})
    print(f"{record['networks']} networks, {record['collapsed']} of them without a living output")
    for name, layout in record["layouts"].items():
        print(
            f"{name}: {layout['parameters_before']:,} -> {layout['parameters_after']:,} parameters, "
            f"worst error {layout['worst_error']:.1e} of the outputs' spread"
        )
    for failure in record["failures"]:
        print(f"seed {failure['seed']}, {failure['layout']}: {failure['why']}")
    return 1 if record["failures"] else 0


def run(seeds: range, limits: Limits) -> dict[str, Any]:
    """Counts over all networks, and every failure by seed."""
    found: dict[int, Outcome] = {}
    for key, outcome in outcomes({str(seed): functools.partial(narrow, seed) for seed in seeds}, limits):
        found[int(key)] = outcome
        if sys.stderr.isatty():
            print(f"\r{len(found)}/{len(seeds)}", end="", file=sys.stderr, flush=True)
    failures: list[dict[str, Any]] = []
    operations: Counter[str] = Counter()
    collapsed = 0
    layouts = {
        name: {"parameters_before": 0, "parameters_after": 0, "narrowed": 0, "worst_error": 0.0} for name in LAYOUTS
    }
    for seed, outcome in sorted(found.items()):
        if outcome.failure:
            failures.append({"seed": seed, "layout": "all", "why": outcome.failure})
            continue
        failures += outcome.value["failures"]
        operations.update(outcome.value["operations"])
        collapsed += outcome.value["layouts"][LAYOUTS[0]] is None
        for name, one in outcome.value["layouts"].items():
            add(layouts[name], one or {})
    return {
        "networks": len(seeds),
        "first_seed": seeds.start,
        "collapsed": collapsed,
        "failures": failures,
        "tolerance": TOLERANCE,
        "noise_factor": NOISE_FACTOR,
        "layouts": layouts,
        "operations": dict(sorted(operations.items())),
    }


def add(totals: dict[str, Any], one: dict[str, Any]) -> None:
    """Counts add up, of errors the worst stays."""
    for key, value in one.items():
        totals[key] = max(totals[key], value) if key == "worst_error" else totals[key] + value


def narrow(seed: int) -> dict[str, Any]:
    """One network in every layout: its operations, what went, what failed; None for a layout that refused it."""
    model, inputs = random_network(random.Random(seed), kinds=ALL_STEPS)
    operations = [name for name in model.operations() if name != "apply"]
    operations += [type(layer).__name__ for layer in model.children()]
    layouts: dict[str, dict[str, Any] | None] = {}
    failures = []
    for layout in LAYOUTS:
        try:
            layouts[layout] = check(model, inputs, layout)
        except Exception as error:  # anything at all is a finding, and the other layouts still count
            layouts[layout] = {}
            failures.append({"seed": seed, "layout": layout, "why": f"{type(error).__name__}: {error}"[:300]})
    return {"operations": operations, "layouts": layouts, "failures": failures}


def check(model: torch.nn.Module, inputs: torch.Tensor, layout: str) -> dict[str, Any] | None:
    """Narrow one network and compare; None if its outputs are constant and it was refused."""
    try:
        plan = ng.plan(model, inputs, layout=layout)
    except ng.CollapseError:
        if any(spread_of(output) > TOLERANCE for output in model(more_like(inputs))):
            raise
        return None
    small = ng.compact(model, plan)
    worst = 0.0
    for batch in (inputs, more_like(inputs)):
        error, noise = relative_error(model, small, batch)
        if not error <= max(TOLERANCE, NOISE_FACTOR * noise):
            raise AssertionError(f"off by {error:.1e} of the outputs' spread, rounding noise {noise:.1e}")
        worst = max(worst, error)
    before, after = count(model), count(small)
    return {"parameters_before": before, "parameters_after": after, "narrowed": after < before, "worst_error": worst}


if __name__ == "__main__":
    raise SystemExit(main())
