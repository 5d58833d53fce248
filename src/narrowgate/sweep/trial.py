"""One trial, in a worker's process: the ordinary run in its own folder, which goes on where a killed one stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from narrowgate.atomic import replace_file
from narrowgate.sweep.folder import ERROR, held
from narrowgate.train.recipe import Recipe
from narrowgate.train.run_folder import RECIPE
from narrowgate.trouble import message_of

LOG = "log.txt"
_PATIENCE = 90.0  # seconds for a killed predecessor to go; torchrun gives its processes 30 to end
_PREFIX = "narrowgate: "  # of the command's own errors


@dataclass(frozen=True)
class Job:
    """What a worker needs to know of a trial; all of it text and numbers, with absolute paths."""

    recipe: str
    folder: str
    data: str | None
    accelerator: str
    devices: int


class TrialFailedError(RuntimeError):
    """The processes of a trial ended without a result."""


def run_trial(job: Job) -> str:
    """Train until there is a result; empty, or why there is none, which ``error.txt`` then says too.

    An error is given back and not raised: whoever retries what died is not to retry what can't work.
    """
    folder = Path(job.folder)
    try:
        with held(folder, _PATIENCE) as lock:
            (folder / ERROR).unlink(missing_ok=True)
            if job.devices == 1:
                _train_here(job, folder)
            else:
                _train_in_processes(job, folder, lock)
    except Exception as error:
        return note_failure(folder, _one_line(error), "".join(traceback.format_exception(error)))
    return ""


def note_failure(folder: Path, line: str, details: str = "") -> str:
    """Leave ``error.txt`` in a trial's folder; the line."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / ERROR, f"{line}\n\n{details}".rstrip().encode() + b"\n")
    return line


def _train_here(job: Job, folder: Path) -> None:
    from rich.console import Console

    from narrowgate.train.engine import run

    with (folder / LOG).open("a", encoding="utf-8") as log:
        console = Console(file=log, width=120)
        run(
            Recipe.from_toml(job.recipe),
            folder,
            data_path=job.data,
            resume=True,
            accelerator=job.accelerator,
            console=console,
        )


def _train_in_processes(job: Job, folder: Path, lock: int) -> None:
    """Have torchrun start ``narrowgate train``, one process a device.

    Fabric would start its own processes by running this process's command again, which here is Ray's.
    """
    replace_file(folder / RECIPE, Recipe.from_toml(job.recipe).to_toml().encode())
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.devices}"]
    train = ["-m", "narrowgate", "train", str(folder / RECIPE), "--out", str(folder), "--resume"]
    options = ["--accelerator", job.accelerator, *(["--data", job.data] if job.data else [])]
    with (folder / LOG).open("ab") as log:
        began = log.tell()
        process = subprocess.Popen(
            [sys.executable, *torchrun, *train, *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock] if lock >= 0 else [],  # the folder is theirs until they are gone, even if this process dies
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        printed = (folder / LOG).read_bytes()[began:].decode(errors="replace").splitlines()
        said = [line.removeprefix(_PREFIX) for line in printed if line.startswith(_PREFIX)]
        raise TrialFailedError(said[-1] if said else f"its processes ended with status {status}; see {folder / LOG}")


def _end_with_parent() -> None:
    """Have the system send SIGTERM to this process when the one that started it dies, so that none is left behind."""
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _one_line(error: Exception) -> str:
    """What went wrong, in one line; of an error that is not written for people, the kind too."""
    told = message_of(error) or f"{type(error).__name__}: {error}"
    return " ".join(told.split()).removesuffix(":")
