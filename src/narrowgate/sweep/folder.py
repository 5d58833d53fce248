"""The folder of a sweep: ``sweep.json`` says what is swept, and each trial is the folder of an ordinary run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from narrowgate.atomic import replace_file
from narrowgate.sweep.space import DamagedSweepError, SweepError, Trial
from narrowgate.train.finish import Result
from narrowgate.train.lock import LockedError
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import RESULT

SWEEP = "sweep.json"
REPORT = "report.html"
ERROR = "error.txt"
"""In a trial's folder: why it failed, in one line, and where in the code."""
_WHAT = "narrowgate sweep"
_LOCK = ".lock"


@dataclass(frozen=True)
class Swept:
    """All that decides what a sweep runs; ``sweep.json``."""

    recipe: str
    """The recipe that all trials start from, as TOML, with every key."""
    over: tuple[str, ...]
    samples: int
    trials: tuple[Trial, ...]

    def save(self, folder: Path) -> None:
        """Write ``sweep.json``, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / SWEEP, json.dumps({"what": _WHAT, **asdict(self)}, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Swept:
        """What the sweep in a folder runs."""
        try:
            data = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
            trials = tuple(Trial(trial["name"], tuple(trial["settings"])) for trial in data["trials"])
            return cls(data["recipe"], tuple(data["over"]), data["samples"], trials)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedSweepError(
                f"{folder / SWEEP} can't be read as a sweep ({type(error).__name__}: {error}): bring back a copy, "
                "or choose another folder with --out"
            ) from error


def begin(folder: Path, swept: Swept, resume: bool) -> Swept:
    """Make the folder, or see that it is of the same sweep; that sweep, with the points drawn when it began."""
    check_is_ours(folder)
    kept = Swept.load(folder) if (folder / SWEEP).exists() else None
    if kept is None or not any((folder / trial.name).exists() for trial in kept.trials):  # or it ended before the first
        swept.save(folder)
        return swept
    if not resume:
        raise SweepError(f"{folder} holds a sweep: go on with --resume, or choose another folder with --out")
    differences = list(_differences(kept, swept))
    if differences:
        raise SweepError(
            f"{folder} holds another sweep: {'; '.join(differences)}. Resume with its settings, or choose another "
            "folder with --out"
        )
    return kept


def check_is_ours(folder: Path) -> None:
    """Refuse a folder with something else in it, in which not even a lock may be left."""
    if not (folder / SWEEP).exists() and folder.exists() and any(path.name != _LOCK for path in folder.iterdir()):
        raise SweepError(f"{folder} holds something else than a sweep: choose another folder with --out")


def _differences(kept: Swept, now: Swept) -> Iterator[str]:
    for name, was, given in (("over", kept.over, now.over), ("samples", kept.samples, now.samples)):
        if was != given:
            yield f"--{name} was {_shown(was)}, not {_shown(given)}"
    before, after = Recipe.from_toml(kept.recipe, source=SWEEP), Recipe.from_toml(now.recipe)
    if before.digest() != after.digest():
        old, new = before.tables(), after.tables()
        keys = [f"{table}.{key}" for table in old for key in old[table] if old[table][key] != new[table][key]]
        yield f"its recipe differs in {', '.join(keys)}"


def _shown(value: tuple[str, ...] | int) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Outcome:
    """How a trial stands, as its folder tells."""

    trial: Trial
    folder: Path
    result: Result | None
    error: str

    @property
    def state(self) -> Literal["done", "failed", "unfinished"]:
        """What has become of it."""
        return "done" if self.result is not None else "failed" if self.error else "unfinished"


def outcomes(folder: Path, trials: Sequence[Trial]) -> list[Outcome]:
    """How each trial stands, in their order."""
    return [_outcome(folder / trial.name, trial) for trial in trials]


def _outcome(folder: Path, trial: Trial) -> Outcome:
    result = Result.load(folder) if (folder / RESULT).exists() else None
    error = ""
    if result is None and (folder / ERROR).exists():
        error = (folder / ERROR).read_text(encoding="utf-8").partition("\n")[0]
    return Outcome(trial, folder, result, error)


def last_row(folder: Path, log: str) -> dict[str, Any] | None:
    """The last whole line of a run's log; None where there is none yet."""
    try:
        lines = (folder / log).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in reversed(lines[-2:]):  # the last may be half written
        try:
            found = json.loads(line)
        except ValueError:
            continue
        return found if isinstance(found, dict) else None
    return None


@contextmanager
def held(folder: Path, seconds: float) -> Iterator[int]:
    """Keep a folder to this process while the context lasts; gives the descriptor that holds it, -1 where none can.

    Two processes that train in one folder would spoil it. A killed one may take some time to go, so that a second one
    waits ``seconds`` for it. Nothing is left to clean up: the lock goes with the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield -1
        return
    import fcntl

    with (folder / _LOCK).open("a+") as file:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise LockedError(
                        f"{folder} is in use by process {file.read().strip()}: wait for its end, or stop it"
                    ) from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()
