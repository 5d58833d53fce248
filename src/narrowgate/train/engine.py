"""``run``: train a recipe, on one process or many; the network shrinks as it goes, and a killed run goes on."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from narrowgate.atomic import remove_leftovers, replace_file, surviving_folder
from narrowgate.storage import save as save_small
from narrowgate.train.checkpoint import Checkpoints
from narrowgate.train.data import Data, DataError, FolderData, load_data
from narrowgate.train.factors import kept_apart
from narrowgate.train.feed import Place
from narrowgate.train.finish import Result
from narrowgate.train.lock import alone_in
from narrowgate.train.recipe import Recipe, RecipeError
from narrowgate.train.resume import restore, save
from narrowgate.train.run_folder import CHECKPOINTS, GATES, METRICS, RECIPE, RESULT, SMALL
from narrowgate.train.setup import Parts, make_optimizer
from narrowgate.train.show import Show
from narrowgate.train.training import Size, Training
from narrowgate.train.watch import TrainingError

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from rich.console import Console


def run(
    recipe: Recipe,
    folder: str | Path,
    *,
    data_path: str | None = None,
    resume: bool = False,
    download: bool = False,
    accelerator: str = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    console: Console | None = None,
) -> Result:
    """Train, prune, verify and save what a recipe describes; everything it makes lies in ``folder`` afterwards.

    Args:
        data_path: where the data is, if not where the recipe says.
        resume: go on from the last checkpoint in ``folder``, or start if there is none.
        download: fetch a data set that torchvision knows.
        devices: how many processes on this machine; each takes ``train.batch`` images a step.
    """
    folder = Path(folder)
    fabric = launch(accelerator, devices, num_nodes)
    place = Place(fabric.device, fabric.global_rank, fabric.world_size)
    show = Show(console, recipe.train.epochs, quiet=place.rank != 0)
    if (finished := _finished(folder, recipe, resume)) is not None:
        left = f"{finished.parameters:,} of {finished.parameters_full:,} parameters"
        show.notice(f"{folder} is finished: test accuracy {finished.accuracy:.2%}, {left}")
        return finished
    data = _load(fabric, recipe, data_path, download)
    with _numerics(recipe, place.device), show, ExitStack() as held:
        training = Training(recipe, folder, data, place, fabric, show)
        fabric.barrier()  # every process has looked at the folder before the first one writes there
        with training.team.first_alone():
            if place.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(alone_in(folder))
                remove_leftovers(folder, (RECIPE, METRICS, GATES, SMALL, RESULT))
                replace_file(folder / RECIPE, recipe.to_toml().encode())
        try:
            checkpoints = Checkpoints(folder / CHECKPOINTS, recipe.checkpoint.keep)
            if resume:
                with training.team.first_alone():
                    saved = checkpoints.latest() if place.rank == 0 else None
                restore(training, fabric.broadcast(saved))
            while training.epoch < recipe.train.epochs:
                save(training, checkpoints, training.one_epoch())
            return _finish(training, folder)
        finally:
            training.close()


def _finish(training: Training, folder: Path) -> Result:
    """Remove, prove, fine-tune, test, and write the small network and the result."""
    recipe, parts, place, started = training.recipe, training.parts, training.place, time.perf_counter()
    gated = training.accuracy(parts.model, "test")
    closed = training.closed_fraction()  # without the threshold's
    pruned = training.pruned()
    size = Size.of(pruned.small, training.example)
    removed = training.accuracy(pruned.small, "test")
    if recipe.finish.finetune_epochs:
        with kept_apart(pruned.small, pruned.factors):
            _fine_tune(training, pruned.small)
    result = Result(
        accuracy=training.accuracy(pruned.small, "test") if recipe.finish.finetune_epochs else removed,
        accuracy_gated=gated,
        accuracy_removed=removed,
        validation_accuracy=training.accuracy(pruned.small, "held-out") if recipe.data.validation else None,
        parameters=size.parameters,
        parameters_full=training.full.parameters,
        multiply_adds=size.multiply_adds,
        multiply_adds_full=training.full.multiply_adds,
        closed=closed,
        max_error=None if pruned.verification is None else pruned.verification.max_error,
        closed_by_threshold=pruned.closed_by_threshold,
        finetune_epochs=recipe.finish.finetune_epochs,
        epochs=recipe.train.epochs,
        seconds=round(training.seconds + time.perf_counter() - started, 3),
        device=_name_of(place.device),
        processes=place.world,
        recipe_digest=recipe.digest(),
        classes=training.data.classes,
        image_shape=training.data.image_shape,
        teacher=None if training.teacher is None else training.teacher.about,
    )
    with training.team.first_alone():
        if place.rank == 0:
            save_small(pruned.small, pruned.plan, folder / SMALL)
            result.save(folder)
    training.show.summary(result, {row.layer: (row.total, row.kept) for row in pruned.plan.rows}, folder)
    return result


def _fine_tune(training: Training, small: nn.Module) -> None:
    """Train the small network on, at one low learning rate and without a penalty."""
    recipe = training.recipe
    training.set_batch(recipe.train.batch)
    parts = Parts(small.train(), None, None, make_optimizer(recipe, small, None, training.place.device))
    loop = training.loop_for(parts)
    for i in range(recipe.finish.finetune_epochs):
        epoch = recipe.train.epochs + i
        training.seed_noise(epoch)
        loss, _ = training.run_epoch(loop, epoch, lambda progress: recipe.finish.finetune_lr)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of epoch {i + 1} of fine-tuning is {loss}. Go on with --resume and a lower "
                f"finish.finetune_lr (it is {recipe.finish.finetune_lr:g})"
            )
        training.team.share_buffers_(small)
        training.show.notice(f"fine-tuned {i + 1} of {recipe.finish.finetune_epochs} epochs, loss {loss:.4f}")
    small.eval()


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def launch(accelerator: str, devices: int, num_nodes: int) -> Fabric:
    """Fabric with its processes started, or joined where torchrun started them."""
    from lightning.fabric import Fabric
    from lightning_utilities.core import rank_zero

    if torch.distributed.is_torchelastic_launched():  # torchrun was told how many
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(os.environ["WORLD_SIZE"]) // devices
    there = torch.cuda.is_available()
    if accelerator == "auto":  # not Apple's GPUs: they lack float64, in which the remover computes
        accelerator = "cuda" if there else "cpu"
    if accelerator not in ("cpu", "cuda"):
        raise TrainingError(f"can't train with accelerator {accelerator!r}: choose cpu, cuda or auto")
    if accelerator == "cuda" and not there:
        raise TrainingError(f"PyTorch {torch.__version__} sees no GPU: train with accelerator 'cpu'")
    strategy = "ddp" if devices * num_nodes > 1 else "auto"
    # Precision stays ours: Fabric's autocast keeps a cache of casts, which a captured CUDA graph can't have.
    rank_zero.log.addFilter(_is_no_advice)
    try:
        fabric = Fabric(accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=strategy)
    except (ValueError, RuntimeError, ImportError) as error:
        raise TrainingError(f"can't train with accelerator {accelerator!r} x {devices}: {error}") from error
    fabric.launch()
    return fabric


def _is_no_advice(record: logging.LogRecord) -> bool:
    """False for Fabric's advice on float32 products: what it advises would change a run's numbers."""
    return "set_float32_matmul_precision" not in record.getMessage()


def _finished(folder: Path, recipe: Recipe, resume: bool) -> Result | None:
    """Check that a folder is fit for this run; a finished run's result if there is one."""
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file: choose a folder with --out")
    if not resume and _holds_run(folder):
        raise FileExistsError(f"{folder} holds a run: go on with --resume, or choose another folder with --out")
    where, kept = _recipe_in(folder)
    different = {} if kept is None else kept.differences(recipe)
    if not (folder / RESULT).exists():  # fine-tuning has not come to its end, and begins anew
        different = {key: values for key, values in different.items() if not key.startswith("finish.finetune_")}
    if different:
        keys = ", ".join(f"{key} is {there} there and {here} here" for key, (there, here) in different.items())
        raise RecipeError(f"{where} is not the recipe given ({keys}): resume with that one, or choose another folder")
    if not resume or not (folder / RESULT).exists():
        return None
    # Without its small network, which was lost, it ends once more.
    lost = surviving_folder(folder / SMALL) is None and bool(Checkpoints(folder / CHECKPOINTS, 1).epochs())
    return None if lost else Result.load(folder)


def _holds_run(folder: Path) -> bool:
    """Whether a folder has anything that a run would go on from, or end with."""
    files = any((folder / name).exists() for name in (RECIPE, RESULT))
    return files or bool(Checkpoints(folder / CHECKPOINTS, 1).epochs())


def _recipe_in(folder: Path) -> tuple[Path, Recipe | None]:
    """The recipe of the run in a folder, and where it was found: the last checkpoint has it where its file was lost."""
    if (folder / RECIPE).exists():
        return folder / RECIPE, Recipe.load(folder / RECIPE)
    saved = Checkpoints(folder / CHECKPOINTS, 1).latest()
    if saved is None:
        return folder, None
    return saved.path, Recipe.from_toml(saved.meta["recipe"], source=str(saved.path))


def _load(fabric: Fabric, recipe: Recipe, path: str | None, download: bool) -> Data | FolderData:
    """The recipe's data; what is wrong with it is raised when no process waits for this one any more."""
    with fabric.rank_zero_first():  # one process downloads
        try:
            return load_data(recipe.data, path, download and fabric.global_rank == 0, recipe.train.seed)
        except DataError as error:
            problem = error
    raise problem


@contextmanager
def _numerics(recipe: Recipe, device: torch.device) -> Iterator[None]:
    """The process's own settings for a run; all of them, and the random state, are given back."""
    benchmark, strict = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if recipe.train.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Trying kernels out took up to half a minute for each new set of widths, and MobileNetV2 was no faster for it.
        torch.backends.cudnn.benchmark = not recipe.train.deterministic and recipe.shrink.when != "during"
        if recipe.train.deterministic:
            torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
