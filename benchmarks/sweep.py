"""Does a sweep keep its workers busy, and does it lose anything when one of them is killed?

Eight short MNIST runs of LeNet-5 (four strengths, two seeds), two at a time, one thread each. Once undisturbed: the
whole command's time, Ray's start and the report included, against the ideal, which is half the sum of the trials' own
times. Once more with a worker killed (SIGKILL) after the first trials have ended: everything that was finished must
stay as it was, and every network must end with the bits it has undisturbed.

    python benchmarks/sweep.py --data mnist.npz
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import ROOT, about, table, write_json

RECIPE = ROOT / "recipes" / "mnist-lenet5-l1-exp-1e-3.toml"
WORKERS = 2
MOST = 1.15  # times the ideal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="mnist.npz")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--strengths", default="1e-4,5e-4,1e-3,2e-3")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "sweep.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        load = os.getloadavg()[0]
        whole = undisturbed(command(arguments, Path(home) / "whole"), Path(home) / "whole")
        killed = with_a_kill(command(arguments, Path(home) / "killed"), Path(home) / "killed")
        killed["same_bits"] = digests(Path(home) / "killed") == digests(Path(home) / "whole")
    good = (
        whole["times_ideal"] <= MOST and not killed["lost"] and killed["done"] == whole["done"] and killed["same_bits"]
    )
    versions = {**about()["versions"], "ray": importlib.metadata.version("ray")}
    facts = {
        "threads": 1,
        "versions": versions,
        "epochs": arguments.epochs,
        "workers": WORKERS,
        "load_average_before": round(load, 2),
    }
    write_json(
        arguments.out,
        {
            "what": "a sweep on Ray",
            **about(),
            **facts,
            "most": MOST,
            "undisturbed": whole,
            "killed": killed,
            "good": good,
        },
    )
    head = ["trials", "wall s", "ideal s", "times ideal", "finished at the kill", "lost", "done after it", "same bits"]
    row = [whole["done"], whole["wall_seconds"], whole["ideal_seconds"], whole["times_ideal"]]
    row += [killed["finished_at_the_kill"], len(killed["lost"]), killed["done"], killed["same_bits"]]
    print(table(head, [[str(cell) for cell in row]]))
    sys.exit(0 if good else 1)


def command(arguments: argparse.Namespace, out: Path) -> list[str]:
    """The command that a person would give."""
    over = ["--over", f"penalty.strength={arguments.strengths}", "--over", f"seed={arguments.seeds}"]
    short = ["--set", f"train.epochs={arguments.epochs}", "--set", "lr.schedule=cosine", "--set", "lr.drops=[]"]
    where = ["--data", str(arguments.data), "--out", str(out), "--workers", str(WORKERS), "--gpus-per-trial", "0"]
    return [sys.executable, "-m", "narrowgate", "sweep", str(RECIPE), *over, *short, *where]


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def undisturbed(command: list[str], folder: Path) -> dict[str, Any]:
    """The time of the whole command beside the times of its trials."""
    began = time.perf_counter()
    if start(command).wait() != 0:
        sys.exit("the sweep that is left alone failed")
    wall = time.perf_counter() - began
    seconds = {name: found["seconds"] for name, found in results(folder).items()}
    ideal = sum(seconds.values()) / WORKERS
    return {
        "done": len(seconds),
        "wall_seconds": round(wall, 1),
        "ideal_seconds": round(ideal, 1),
        "times_ideal": round(wall / ideal, 3),
        "trial_seconds": seconds,
    }


def with_a_kill(command: list[str], folder: Path) -> dict[str, Any]:
    """The same with one worker killed while it trains, when something is finished already; what came of it."""
    began = time.perf_counter()
    process = start(command)
    victim = None
    while victim is None:
        if process.poll() is not None:
            sys.exit("the sweep ended before a worker could be killed: give it more epochs")
        time.sleep(0.05)
        if results(folder):
            victim = next((path.parent for path in folder.glob("*/metrics.jsonl") if is_training(path.parent)), None)
    before = stamps(folder)
    os.kill(int((victim / ".lock").read_text()), signal.SIGKILL)
    status = process.wait()
    after = stamps(folder)
    return {
        "status": status,
        "wall_seconds": round(time.perf_counter() - began, 1),
        "killed_trial": victim.name,
        "went_on": "going on after epoch" in (victim / "log.txt").read_text(),
        "finished_at_the_kill": len(before),
        "lost": [name for name, stamp in before.items() if after.get(name) != stamp],
        "done": len(after),
    }


def is_training(folder: Path) -> bool:
    """Whether a trial has a checkpoint and no result yet."""
    return not (folder / "result.json").exists() and any((folder / "checkpoints").glob("epoch-*"))


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What each finished trial ended with, by name."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))}


def stamps(folder: Path) -> dict[str, int]:
    """When each finished trial's result was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}


def digests(folder: Path) -> dict[str, str]:
    """A checksum of each small network."""
    return {
        path.parent.parent.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*/small/model.safetensors")
    }


if __name__ == "__main__":
    main()
