"""Many runs at once, each a process of its own whose result is a file: a second call does what is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _compare_methods import Job
from _record import write_json

_PROGRAM = Path(__file__).with_name("compare.py")


class WorkError(ValueError):
    """A work folder that can't be used; says what to do."""


@dataclass(frozen=True)
class Work:
    """A folder with a file for each finished run."""

    folder: Path

    def settings(self, wanted: dict[str, Any]) -> None:
        """Write down what all runs have in common; refuse a folder of other runs."""
        path = self.folder / "settings.json"
        if path.exists() and (held := json.loads(path.read_text())) != wanted:
            raise WorkError(f"{self.folder} holds runs with {held}, not {wanted}: choose another folder with --work")
        write_json(path, wanted)

    def result(self, job: Job) -> Path:
        return self.folder / "jobs" / f"{job.name}.json"

    def model(self, job: Job) -> Path:
        return self.folder / "models" / job.name

    def latency(self, job: Job) -> Path:
        return self.folder / "latency" / f"{job.name}.json"

    def log(self, job: Job) -> Path:
        return self.folder / "logs" / f"{job.name}.txt"

    def last_words(self, job: Job) -> str:
        """The last line that a run printed; empty where it printed nothing."""
        path = self.log(job)
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else ""

    def read(self, job: Job) -> dict[str, Any] | None:
        """A finished run's record, or None."""
        path = self.result(job)
        return json.loads(path.read_text()) if path.exists() else None


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    start: float


def run_all(
    jobs: Sequence[Job], work: Work, arguments: Sequence[str], workers: int, threads: int, deadline: float | None
) -> tuple[int, list[Job]]:
    """Run what has no result yet; how many came to one, and the runs that are left: crashed, stopped or not begun.

    Args:
        arguments: of ``compare.py``, for each run's process.
        deadline: seconds from now after which nothing starts and what runs is killed.
    """
    begun = time.monotonic()
    waiting = [job for job in jobs if work.read(job) is None][::-1]
    running: list[_Running] = []
    crashed: list[Job] = []
    done = 0
    try:
        while waiting or running:
            if deadline is not None and time.monotonic() - begun >= deadline:
                break
            while waiting and len(running) < workers:
                running.append(_start(waiting.pop(), work, arguments, threads))
            time.sleep(0.1)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                _tell(one, work)
                if work.read(one.job) is None:
                    crashed.append(one.job)
                else:
                    done += 1
    finally:
        for one in running:
            one.process.kill()
            one.process.wait()
    return done, [*crashed, *(one.job for one in running), *waiting[::-1]]


def _start(job: Job, work: Work, arguments: Sequence[str], threads: int) -> _Running:
    count = str(threads)
    environment = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    command = [sys.executable, str(_PROGRAM), *arguments, "--threads", count, "--only", job.name]
    log = work.log(job)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    return _Running(job, process, time.monotonic())


def _tell(one: _Running, work: Work) -> None:
    """Print a line. A process that died has no result, so that the next call tries it again."""
    record = work.read(one.job)
    told = (
        f"CRASHED, exit code {one.process.returncode}: {work.last_words(one.job)}" if record is None else short(record)
    )
    print(f"{one.job.name}: {told}, {time.monotonic() - one.start:.0f} s", flush=True)


def short(record: dict[str, Any]) -> str:
    """A run's outcome in a few words."""
    if "failure" in record:
        return f"FAILED, {record['failure']}"
    return f"{record['accuracy']:.2%}, {record['parameters']:,} of {record['parameters_full']:,} parameters"
