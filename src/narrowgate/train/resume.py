"""What a checkpoint holds of a run, and a run that goes on from one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import Tensor

from narrowgate.train.checkpoint import Checkpoints, Saved
from narrowgate.train.log import EpochRow
from narrowgate.train.state import load_model_, load_optimizer_, pack_model, pack_optimizer
from narrowgate.train.training import Size, Training


def save(training: Training, checkpoints: Checkpoints, row: EpochRow) -> None:
    """Write a checkpoint if it is time for one, and the best one if this is it; only the first process writes."""
    part, last = training.recipe.checkpoint, training.epoch == training.recipe.train.epochs
    due = last or training.epoch % part.every == 0
    better = part.best and row.accuracy is not None and row.accuracy > training.best
    if better and row.accuracy is not None:
        training.best = row.accuracy
    if not (due or better):
        return
    with training.team.first_alone():
        if training.place.rank == 0:
            tensors, meta = _pack(training)
            if better:
                checkpoints.save_best(training.epoch, tensors, meta)
            if due:
                checkpoints.save(training.epoch, tensors, meta)


def restore(training: Training, saved: Saved | None) -> None:
    """Go on from a checkpoint; from the start if there is none."""
    parts = training.parts
    if saved is not None:
        meta = saved.meta
        if training.shrinker is not None:
            training.shrinker.load_state_dict(meta["shrinker"])  # cuts the network to the shapes of the tensors
        load_model_(parts.model, saved.tensors)
        load_optimizer_(parts.optimizer, parts.model, saved.tensors, meta["optimizer"])
        if training.budget is not None:
            training.budget.load_state_dict(meta["budget"])
        training.epoch, training.seconds, training.best = saved.epoch, meta["seconds"], meta["best"]
        training.left = Size(**meta["left"])
        if training.recipe.shrink.batch:
            training.fit_batch(Size.of(parts.model, training.example))
        training.show.begin(training.epoch)
        training.show.notice(f"going on after epoch {training.epoch}, from {saved.path}")
        world = training.place.world
        if (began := meta.get("processes", world)) != world:  # checkpoints of earlier versions do not say
            training.show.notice(
                f"this run had {began} processes and goes on with {world}: each takes train.batch images a step, so "
                "its steps are others from here on"
            )
        teacher = training.teacher
        if teacher is not None and meta.get("teacher") not in (None, teacher.digest()):
            training.show.notice(
                f"the network in {training.recipe.teacher.run} is another one than when this run began, which learns "
                "from that one from here on"
            )
    training.rewind_log()


def _pack(training: Training) -> tuple[dict[str, Tensor], dict[str, Any]]:
    parts = training.parts
    tensors, optimizer = pack_optimizer(parts.optimizer, parts.model)
    meta = {
        "recipe": training.recipe.to_toml(),
        "optimizer": optimizer,
        "shrinker": None if training.shrinker is None else training.shrinker.state_dict(),
        "budget": None if training.budget is None else training.budget.state_dict(),
        "seconds": training.seconds,
        "best": training.best,
        "left": asdict(training.left),
        "processes": training.place.world,
        "teacher": None if training.teacher is None else training.teacher.digest(),
    }
    return {**pack_model(parts.model), **tensors}, meta
