"""Does a killed run end as if nothing had happened? SIGKILL at random moments, resume, compare every bit at the end.

A small recipe trains scikit-learn's digits on the CPU and shrinks as it goes. One run is left alone. Each of the others
is killed at a random moment, some of them twice, then resumed until it ends; its small network, its last checkpoint and
its log must hold the same bits (but for the times in the log).

    python benchmarks/kill_resume.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _record import ROOT, about, table, write_json
from safetensors.numpy import load_file

RECIPE = ROOT / "recipes" / "digits-small.toml"
TIMES = ("seconds", "images_per_second", "event")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "kill_resume.json")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    rows: list[dict[str, object]] = []
    too_late = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        start_up, seconds = timed(whole)
        whole_seconds = seconds
        expected = digests(whole)
        for number in range(arguments.runs):
            run = Path(folder) / f"run-{number}"
            moments: list[str] = []
            for _ in range(draw.choice((1, 1, 2))):
                # Starting up takes nearly half of so short a run, and nothing can be lost then.
                while not (moment := killed_after(run, draw.uniform(start_up, seconds))):
                    shutil.rmtree(run)  # it came to its end: not a killed run, so try again
                    moments.clear()
                    too_late += 1
                    start_up, seconds = 0.9 * start_up, 0.9 * seconds  # the machine is less busy than it was
                moments.append(moment)
            done = train(run).wait() == 0
            same = done and digests(run) == expected
            rows.append({"run": number, "killed": moments, "finished": done, "same_bits": same})
            print(f"run {number}: killed {'; '.join(moments)}; {'same bits' if same else 'DIFFERENT'}", flush=True)
    good = sum(bool(row["same_bits"]) for row in rows)
    facts = {
        "seconds_of_a_run": round(whole_seconds, 1),
        "same_bits": good,
        "ended_before_the_kill": too_late,
        "rows": rows,
    }
    write_json(arguments.out, {"what": "runs killed and resumed", **about(), **facts})
    print(table(["runs", "same bits at the end"], [[str(len(rows)), str(good)]]))
    sys.exit(0 if good == len(rows) else 1)


def train(folder: Path) -> subprocess.Popen[bytes]:
    """Start or resume a run in a process group of its own."""
    command = [sys.executable, "-m", "narrowgate", "train", str(RECIPE), "--out", str(folder), "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--accelerator", "cpu"], stdout=subprocess.DEVNULL, env=environment, start_new_session=True
    )


def timed(folder: Path) -> tuple[float, float]:
    """Let a run come to its end; how long it took to start, and in all."""
    start = time.perf_counter()
    process = train(folder)
    while process.poll() is None and not (folder / "recipe.toml").exists():
        time.sleep(0.02)
    start_up = time.perf_counter() - start
    if process.wait() != 0:
        sys.exit("the run that is left alone failed")
    return start_up, time.perf_counter() - start


def killed_after(folder: Path, seconds: float) -> str:
    """Let a run go for some time, kill it, and say how far it was; empty if it came to its end before."""
    process = train(folder)
    try:
        process.wait(seconds)
        return ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log = folder / "metrics.jsonl"
    epochs = len(log.read_text().splitlines()) if log.exists() else 0
    return f"at {seconds:.1f} s, {epochs} epochs logged"


def digests(folder: Path) -> dict[str, str]:
    """A checksum of each thing that a finished run leaves."""
    checkpoint = max((folder / "checkpoints").glob("epoch-*"))
    found = {
        "small": (folder / "small" / "model.safetensors").read_bytes(),
        "plan": (folder / "small" / "plan.json").read_bytes(),
    }
    for name, array in load_file(checkpoint / "tensors.safetensors").items():
        found[name] = array.tobytes()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found["log"] = json.dumps([{k: v for k, v in row.items() if k not in TIMES} for row in rows]).encode()
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


if __name__ == "__main__":
    main()
