"""What ``import narrowgate`` costs on top of ``import torch``: medians over fresh Python processes, taken in turns.

    python benchmarks/import_time.py

Needs the package installed, or ``PYTHONPATH=src``. Writes ``benchmarks/import_time.json``. Target: below 0.3 s. The
file also lists the packages that importing narrowgate loads beyond those of torch: there should be none but its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _record import ROOT, about, quartiles, table, write_json

TARGET_SECONDS = 0.3
STATEMENTS = {"torch": "import torch", "torch and narrowgate": "import torch; import narrowgate"}
# Timed inside the process, so that the interpreter's own start is left out.
PROGRAM = """
import time
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""
LOADED = """
import json, sys, torch
before = set(sys.modules)
import narrowgate
new = set(sys.modules) - before
print(json.dumps({"modules": len(new), "packages": sorted({name.partition(".")[0] for name in new})}))
"""


def python(program: str) -> str:
    """What a fresh interpreter prints for a program."""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds for each statement; the first round only fills the file cache and is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for round_ in range(repeats + 1):
        names = list(STATEMENTS) if round_ % 2 else list(STATEMENTS)[::-1]
        for name in names:
            taken = float(python(PROGRAM.format(statement=STATEMENTS[name])))
            if round_:
                seconds[name].append(taken)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="rounds of one process each (default 20)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "import_time.json")
    options = parser.parse_args()
    seconds = measure(options.repeats)
    summary = {name: quartiles(values, 4) for name, values in seconds.items()}
    added = [with_it - without for without, with_it in zip(*seconds.values(), strict=True)]
    extra = quartiles(added, 4)
    record: dict[str, Any] = {
        "what": "seconds to import, timed inside fresh processes taken in turns",
        **about(),
        "repeats": options.repeats,
        "seconds": summary,
        "added_seconds": extra,
        "target_added_seconds": TARGET_SECONDS,
        "met": extra["median"] < TARGET_SECONDS,
        "loaded_beyond_torch": json.loads(python(LOADED)),
        "samples": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
    }
    write_json(options.out, record)
    rows = [[name, *(f"{row[key]:.3f}" for key in ("median", "q1", "q3"))] for name, row in summary.items()]
    rows.append(["added, by pairs", *(f"{extra[key]:.3f}" for key in ("median", "q1", "q3"))])
    print(table(["import", "median s", "q1", "q3"], rows))
    loaded = record["loaded_beyond_torch"]
    print(f"loaded beyond torch: {loaded['modules']} modules of {', '.join(loaded['packages'])}")
    print(f"target: adds less than {TARGET_SECONDS} s: {'met' if record['met'] else 'NOT met'}")


if __name__ == "__main__":
    main()
