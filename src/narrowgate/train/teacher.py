"""``Teacher``: a trained network whose answers another one learns beside the labels (Hinton et al. 2015)."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgate.flow import PlanError
from narrowgate.models import ModelError
from narrowgate.storage import load
from narrowgate.train.finish import Result
from narrowgate.train.recipe import Recipe, RecipeError
from narrowgate.train.recipe.parts import TeacherPart
from narrowgate.train.run_folder import RECIPE, RESULT, SMALL
from narrowgate.train.setup import plain_model
from narrowgate.weights import StorageError

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Teacher:
    """A network that is not trained any more, and how much its answers count."""

    network: nn.Module
    share: float
    temperature: float
    about: dict[str, Any]
    """What a result says of it."""

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Its logits."""
        answers: Tensor = self.network(images)
        return answers

    def digest(self) -> str:
        """A checksum of its numbers."""
        found = hashlib.sha256()
        for name, tensor in self.network.state_dict().items():
            found.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def mixed(self, loss: Tensor, outputs: Tensor, answers: Tensor) -> Tensor:
        """The loss of the labels and how far two softened answers are apart, with gradients as large as unsoftened."""
        student, teacher = (F.log_softmax(logits.float() / self.temperature, 1) for logits in (outputs, answers))
        distance = F.kl_div(student, teacher, reduction="batchmean", log_target=True) * self.temperature**2
        return (1 - self.share) * loss + self.share * distance


def load_teacher(part: TeacherPart, classes: int, image_shape: Shape, device: torch.device) -> Teacher | None:
    """The network that the run in ``teacher.run`` ended with, ready to answer; None without one."""
    if not part.run:
        return None
    folder = Path(part.run).expanduser()
    if not folder.exists():
        begins = "" if folder.is_absolute() else f"; the path begins at the current folder, {Path.cwd()}"
        raise _refused(part, f"there is no such folder{begins}")
    if missing := [name for name in (RECIPE, RESULT, SMALL) if not (folder / name).exists()]:
        raise _refused(part, f"is not the folder of a finished run, it lacks {', '.join(missing)}; train one first")
    try:
        recipe, result = Recipe.load(folder / RECIPE), Result.load(folder)
        for what, its, ours in (("classes", result.classes, classes), ("images of", result.image_shape, image_shape)):
            if its is not None and its != ours:
                raise _refused(part, f"was trained for {what} {its}, and the data has {ours}: they have to be alike")
        network = load(folder / SMALL, lambda: plain_model(recipe, classes, image_shape))
    except (StorageError, PlanError, ModelError) as error:
        raise _refused(part, f"can't be loaded: {error}") from error
    network = network.to(device).eval().requires_grad_(False)
    if device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)
    about = {
        "model": asdict(recipe.model),
        "parameters": result.parameters,
        "accuracy": result.accuracy,
        "recipe_digest": result.recipe_digest,
    }
    return Teacher(network, part.share, part.temperature, about)


def _refused(part: TeacherPart, reason: str) -> RecipeError:
    return RecipeError(f'teacher.run = "{part.run}": {reason}', "teacher.run")
