"""The Ray side: Ray Tune places trials on cores and GPUs, starts again what died, and draws from ranges."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import ray
from ray import tune

from narrowgate.sweep.space import Draw, Range, SweepError
from narrowgate.sweep.trial import Job, run_trial

RETRIES = 2
"""How often a trial whose process died is started again; it goes on from its own checkpoint."""
_SECONDS_TO_ANSWER = 10.0
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what the next release of Ray does, without its warning
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a recipe means its paths from where the command was given
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the run folders are the logs
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends the sweep at once: every trial has its checkpoints
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints boxes even when told to be silent
}


class Watcher(Protocol):
    """Whoever wants to know how a sweep goes, trial by trial."""

    def started(self, name: str) -> None:
        """A trial begins, or goes on."""

    def ended(self, name: str) -> None:
        """A trial has a result, or an error."""

    def died(self, name: str, again: bool) -> None:
        """A trial's process is gone, without a word; ``again`` if it will be started again."""


@dataclass(frozen=True)
class Resources:
    """What each trial gets, and how many run at once (0: as many as fit)."""

    cpus: float
    gpus: float
    workers: int


def drawing(seed: int) -> Draw:
    """Tune's samplers, with a seed."""
    state = np.random.RandomState(seed % 2**32)  # which takes no larger ones; a recipe does

    def draw(found: Range) -> Iterator[float]:
        if found.whole:  # Tune leaves the upper end out
            make = tune.lograndint if found.log else tune.randint
            domain = make(int(found.low), int(found.high) + 1)
        else:
            domain = (tune.loguniform if found.log else tune.uniform)(found.low, found.high)
        while True:
            yield domain.sample(random_state=state)

    return draw


@contextmanager
def ray_running(address: str) -> Iterator[None]:
    """Ray while the context lasts: of this process and this machine, or the cluster at an address.

    A Ray that the caller has started already is used, and left running.
    """
    if ray.is_initialized():
        yield
        return
    if address.startswith("ray://"):
        raise SweepError(f"--address {address}: give HOST:PORT or auto, on a machine of the cluster itself")
    _check_answers(address)
    with _environment():
        options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        except (ConnectionError, ValueError) as error:
            raise SweepError(f"no Ray at --address {address}: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse a HOST:PORT where nobody listens: Ray itself would try for ten minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise SweepError(f"no Ray at --address {address}: {error}") from error


def fitting(cpus: float, gpus: float | None, workers: int) -> Resources:
    """What each trial gets: a GPU unless told otherwise, if there is one; refused if no machine has so much."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if gpus is None:
        gpus = 1.0 if any(machine.get("GPU", 0) >= 1 for machine in machines) else 0.0
    if gpus > 1 and not gpus.is_integer():
        raise SweepError(f"--gpus-per-trial {gpus:g}: several GPUs are whole ones; a share is for one, such as 0.5")
    if not any(machine.get("CPU", 0) >= cpus and machine.get("GPU", 0) >= gpus for machine in machines):
        most = "; ".join(f"{machine.get('CPU', 0):g} cores, {machine.get('GPU', 0):g} GPUs" for machine in machines)
        raise SweepError(
            f"no machine has {cpus:g} cores and {gpus:g} GPUs for a trial (there are {most}): "
            "lower --cpus-per-trial or --gpus-per-trial"
        )
    return Resources(cpus, gpus, workers)


def run_trials(jobs: Mapping[str, Job], resources: Resources, watcher: Watcher) -> None:
    """Run all jobs; how each ended is in its folder, and the watcher is told."""
    trainable = tune.with_resources(_OnRay, {"cpu": resources.cpus, "gpu": resources.gpus})
    names = list(jobs)
    # What Tune writes is of no use afterwards: a sweep goes on by its run folders.
    with tempfile.TemporaryDirectory(prefix="narrowgate-sweep-") as scratch, _environment(), _quiet():
        tuner = tune.Tuner(
            trainable,
            param_space={"job": tune.grid_search([{"name": name, **asdict(jobs[name])} for name in names])},
            tune_config=tune.TuneConfig(
                max_concurrent_trials=resources.workers or None,
                # A process that is used again has loaded PyTorch already. On a GPU a new one is safer: all memory
                # is given back, and an error may have left the device unusable to the old one.
                reuse_actors=resources.gpus == 0,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=scratch,
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                callbacks=[_Telling(watcher)],
                verbose=0,
            ),
        )
        tuner.fit()


class _OnRay(tune.Trainable):  # type: ignore[misc]
    """A trial as Tune knows it: all of the run is one step."""

    def setup(self, config: dict[str, Any]) -> None:
        """Tune's way to say what to run."""
        self.job = Job(**{key: value for key, value in config["job"].items() if key != "name"})

    def step(self) -> dict[str, Any]:
        """Run it; an error is a result too, since only what died is worth another try."""
        return {"error": run_trial(self.job), "done": True}

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial."""
        self.setup(new_config)
        return True


class _Telling(tune.Callback):  # type: ignore[misc]
    """Tells the watcher what Tune tells."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune keeps its callbacks for a restore, which is not how a sweep goes on."""
        return {}

    def on_trial_start(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self.watcher.started(_name(trial))

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self.watcher.ended(_name(trial))

    def on_trial_recover(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self.watcher.died(_name(trial), again=True)

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self.watcher.died(_name(trial), again=False)


def _name(trial: Any) -> str:
    return str(trial.config["job"]["name"])


@contextmanager
def _environment() -> Iterator[None]:
    """Ray's settings that are read from the environment, for the time of the sweep."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update({name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines of Tune's about trials that died: the sweep says that itself."""
    logger = logging.getLogger("ray.tune")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
