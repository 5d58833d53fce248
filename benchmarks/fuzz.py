"""Removes channels from random networks, one a seed, and writes what was met, what went, and the worst error.

    python benchmarks/fuzz.py --examples 1000 --out benchmarks/fuzz.json

The networks are those of tests/test_flow_fuzz.py: float64, random wiring, random statistics, random closed filters.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from _record import ROOT, about, write_json

sys.path.insert(0, str(ROOT / "tests"))

from flow_helpers import NOISE_FACTOR, TOLERANCE, count, more_like, relative_error, spread_of
from flow_networks import random_network

import narrowgate as ng
from narrowgate.flow.plan import LAYOUTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="how many networks (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--out", type=Path, help="where to write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    record = run(range(options.first, options.first + options.examples))
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


def run(seeds: range) -> dict[str, Any]:
    """Counts over all networks, and every failure by seed."""
    operations: Counter[str] = Counter()
    collapsed = 0
    failures: list[dict[str, Any]] = []
    layouts = {
        name: {"parameters_before": 0, "parameters_after": 0, "narrowed": 0, "worst_error": 0.0} for name in LAYOUTS
    }
    for done, seed in enumerate(seeds, 1):
        model, inputs = random_network(random.Random(seed))
        operations.update(name for name in model.operations() if name != "apply")
        operations.update(type(layer).__name__ for layer in model.children())
        for layout, totals in layouts.items():
            try:
                if not check(model, inputs, layout, totals):
                    collapsed += layout == LAYOUTS[0]
            except Exception as error:  # anything at all is a finding, and the other networks still count
                failures.append({"seed": seed, "layout": layout, "why": f"{type(error).__name__}: {error}"[:300]})
        if sys.stderr.isatty():
            print(f"\r{done}/{len(seeds)}", end="", file=sys.stderr, flush=True)
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


def check(model: torch.nn.Module, inputs: torch.Tensor, layout: str, totals: dict[str, Any]) -> bool:
    """Narrow one network and add to the totals; False if its outputs are constant and it was refused."""
    try:
        plan = ng.plan(model, inputs, layout=layout)
    except ng.CollapseError:
        if any(spread_of(output) > TOLERANCE for output in model(more_like(inputs))):
            raise
        return False
    small = ng.compact(model, plan)
    for batch in (inputs, more_like(inputs)):
        error, noise = relative_error(model, small, batch)
        if not error <= max(TOLERANCE, NOISE_FACTOR * noise):
            raise AssertionError(f"off by {error:.1e} of the outputs' spread, rounding noise {noise:.1e}")
        totals["worst_error"] = max(totals["worst_error"], error)
    totals["parameters_before"] += count(model)
    totals["parameters_after"] += count(small)
    totals["narrowed"] += count(small) < count(model)
    return True


if __name__ == "__main__":
    raise SystemExit(main())
