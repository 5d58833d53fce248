"""What ``import narrowgate`` adds to ``import torch``, and how long ``narrowgate --help`` takes.

Medians over fresh Python processes, taken in turns. All public names are imported, since each is loaded at its first
use only. The command is timed from start to end of its process, as it is, and with all names imported first, which is
what it would take if the package did that.

    python benchmarks/import_time.py

Needs the package installed with its ``cli`` extra, or ``PYTHONPATH=src``. Writes ``benchmarks/import_time.json``.
Targets: adds less than 0.3 s; help in less than 0.5 s. The file also lists the packages that importing narrowgate loads
beyond those of torch: there should be none but its own and Python's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _record import ROOT, about, quartiles, table, write_json

TARGET_SECONDS = 0.3
TARGET_HELP_SECONDS = 0.5
# Timed inside the process, so that the interpreter's own start is left out.
INSIDE = """
import time
start = time.perf_counter()
{statement}
print(time.perf_counter() - start)
"""
HELP = "import sys; sys.argv[1:] = ['--help']; from narrowgate.cli import main; main()"
LOADED = """
import json, sys, torch
before = set(sys.modules)
from narrowgate import *
new = set(sys.modules) - before
print(json.dumps({"modules": len(new), "packages": sorted({name.partition(".")[0] for name in new})}))
"""


def python(program: str) -> str:
    """What a fresh interpreter prints for a program."""
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


def inside(statement: str) -> Callable[[], float]:
    return lambda: float(python(INSIDE.format(statement=statement)))


def whole(program: str) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        python(program)
        return time.perf_counter() - start

    return seconds


TIMED = {
    "import torch": inside("import torch"),
    "import torch and narrowgate": inside("import torch; from narrowgate import *"),
    "narrowgate --help": whole(HELP),
    "narrowgate --help, all imported first": whole(f"from narrowgate import *; {HELP}"),
}


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds for each; the first round only fills the file cache and is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    for round_ in range(repeats + 1):
        for name in list(TIMED) if round_ % 2 else list(TIMED)[::-1]:
            taken = TIMED[name]()
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
    pairs = zip(seconds["import torch"], seconds["import torch and narrowgate"], strict=True)
    added = quartiles([with_it - without for without, with_it in pairs], 4)
    record: dict[str, Any] = {
        "what": "seconds to import, and for narrowgate --help, in fresh processes taken in turns",
        **about(),
        "repeats": options.repeats,
        "seconds": summary,
        "added_seconds": added,
        "target_added_seconds": TARGET_SECONDS,
        "target_help_seconds": TARGET_HELP_SECONDS,
        "met": added["median"] < TARGET_SECONDS and summary["narrowgate --help"]["median"] < TARGET_HELP_SECONDS,
        "loaded_beyond_torch": json.loads(python(LOADED)),
        "samples": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
    }
    write_json(options.out, record)
    rows = [[name, *(f"{row[key]:.3f}" for key in ("median", "q1", "q3"))] for name, row in summary.items()]
    rows.append(["narrowgate adds, by pairs", *(f"{added[key]:.3f}" for key in ("median", "q1", "q3"))])
    print(table(["", "median s", "q1", "q3"], rows))
    loaded = record["loaded_beyond_torch"]
    print(f"loaded beyond torch: {loaded['modules']} modules of {', '.join(loaded['packages'])}")
    targets = f"adds less than {TARGET_SECONDS} s, help in less than {TARGET_HELP_SECONDS} s"
    print(f"targets: {targets}: {'met' if record['met'] else 'NOT met'}")


if __name__ == "__main__":
    main()
