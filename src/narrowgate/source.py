"""From what a person types to networks: a run's folder, a saved network's folder, or a network's name."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from narrowgate.atomic import surviving_folder
from narrowgate.flow.plan import Plan, plan
from narrowgate.flow.surgery import PlanError, compact
from narrowgate.measure.zeroed import zero_channels_
from narrowgate.models.registry import MissingLibraryError, ModelError, Shape, build, names
from narrowgate.storage import META, PLAN, load, read_meta
from narrowgate.train.run_folder import RECIPE, RESULT, SMALL
from narrowgate.weights import OtherModelError

_KNOWN_DATA: dict[str, tuple[int, Shape]] = {
    "mnist": (10, (1, 28, 28)),
    "cifar10": (10, (3, 32, 32)),
    "cifar100": (100, (3, 32, 32)),
    "digits": (10, (1, 8, 8)),
}
_IMAGENET: tuple[int, Shape] = (1000, (3, 224, 224))


class SourceError(ValueError):
    """Something that is no network here; says what would do."""


class OwnCodeError(SourceError):
    """Code that a person wrote to make a network, and that fails."""


@dataclass(frozen=True)
class Source:
    """A network at full size, the small one where a folder holds it, the plan between the two, and its images.

    ``image_shape`` is the shape of one input; a network of one's own may take other things than images.
    """

    name: str
    full: nn.Module
    small: nn.Module | None
    plan: Plan | None
    image_shape: tuple[int, ...]

    @property
    def network(self) -> nn.Module:
        """The small network where there is one."""
        return self.full if self.small is None else self.small

    def example(self, batch: int = 2) -> Tensor:
        """Random images, always the same, in the numbers that the network computes with."""
        images = torch.randn((batch, *self.image_shape), generator=torch.Generator().manual_seed(0), device="cpu")
        dtypes = (each.dtype for each in self.network.parameters() if each.is_floating_point())
        return images.to(next(dtypes, images.dtype))

    def zeroed(self, share: float, *, layout: str = "aligned", round_to: int = 1) -> Source:
        """The same with a small network that lacks this share of each layer's channels: a look, not a result."""
        if self.small is not None:
            raise SourceError(f"{self.name} holds a small network already; zero channels of a network's name instead")
        zeroed = copy.deepcopy(self.full)
        zero_channels_(zeroed, share)
        made = plan(zeroed, self.example(), layout=layout, round_to=round_to)
        return Source(self.name, self.full, compact(zeroed, made), made, self.image_shape)


def open_source(
    what: str, *, model: str = "", classes: int | None = None, image_shape: tuple[int, ...] | None = None
) -> Source:
    """The networks that a run's folder, a saved folder or a name stands for, in eval mode on the CPU.

    Args:
        model: for a saved folder, the network that it was at full size: a name, or ``package.module:function``.
        classes: where the name or the folder does not say; 1000 for torchvision's and timm's.
        image_shape: channels, height and width, in the same way; 3x224x224 for torchvision's, their own for timm's. For
            ``package.module:function`` the shape of one input, whatever it is.
    """
    path = Path(what)
    if path.name == SMALL and (path.parent / RECIPE).is_file() and not model:
        path = path.parent
    if (path / RECIPE).is_file():
        return _of_run(path, classes, _of_images(image_shape))
    saved = surviving_folder(path.resolve())
    if saved is not None and (saved / META).is_file():
        if not model:
            raise SourceError(
                f"{path} is a saved network, and which one it was at full size is not written there: add --model NAME, "
                f"NAME being one of {', '.join(names())} or package.module:function"
            )
        return _of_folder(path, model, classes, image_shape)
    if path.is_dir():
        raise SourceError(
            f"{path} is neither a run (no {RECIPE}) nor a saved network (no {META}): "
            "give a folder that narrowgate train or narrowgate.save wrote"
        )
    if path.is_file() and what not in names():
        raise SourceError(
            f"{path} is a file: give the folder of a run or of a saved network, or a network's name (for the times of "
            "an exported network, narrowgate measure FOLDER --modes onnx)"
        )
    return _of_name(what, classes, image_shape)


def _of_run(folder: Path, classes: int | None, image_shape: Shape | None) -> Source:
    from narrowgate.train.finish import Result
    from narrowgate.train.recipe import Recipe

    recipe = Recipe.load(folder / RECIPE)
    saved = surviving_folder((folder / SMALL).resolve())
    if saved is None or not (saved / META).is_file():
        raise SourceError(f"{folder} has no small network yet; finish the run with narrowgate train ... --resume")
    written = Result.load(folder) if (folder / RESULT).is_file() else None
    known: tuple[int | None, Shape | None] = _KNOWN_DATA.get(recipe.data.source, (None, None))
    if recipe.data.source == "folder":
        side = recipe.data.size or 224
        known = (None, (3, side, side))
    if written is not None:  # a run of an older version did not write them down
        known = (written.classes or known[0], written.image_shape or known[1])
    classes, shape = classes or known[0], image_shape or known[1]
    if classes is None or shape is None:
        missing = " and ".join(
            option for option, value in (("--classes N", classes), ("--image-shape C,H,W", shape)) if not value
        )
        raise SourceError(f"{folder} does not say what its data was like ({recipe.data.source}): add {missing}")
    builder = partial(build, recipe.model.name, classes, image_shape=shape, **recipe.model.options)
    return _with_small(str(folder), builder, folder / SMALL, shape)


def _of_images(shape: tuple[int, ...] | None) -> Shape | None:
    if shape is None:
        return None
    if len(shape) != 3:
        raise SourceError(f"images have channels, height and width, such as 3,224,224; got {','.join(map(str, shape))}")
    channels, height, width = shape
    return channels, height, width


def _of_folder(folder: Path, model: str, classes: int | None, image_shape: tuple[int, ...] | None) -> Source:
    builder, shape = _builder(model, classes, image_shape)
    try:
        return _with_small(str(folder), builder, folder, shape)
    except (PlanError, OtherModelError) as error:
        saved = read_meta((surviving_folder(folder.resolve()) or folder) / META)["class"]
        raise SourceError(
            f"{folder} holds a {saved}, and --model {model} makes another network: give the one that was saved, at its "
            "full size, and --classes and --image-shape where they are not the usual ones"
        ) from error


def _with_small(name: str, builder: Callable[[], nn.Module], folder: Path, shape: tuple[int, ...]) -> Source:
    small = load(folder, builder).eval()
    made = Plan.from_json(((surviving_folder(folder.resolve()) or folder) / PLAN).read_text())
    return Source(name, _fresh(builder), small, made, shape)


def _of_name(name: str, classes: int | None, image_shape: tuple[int, ...] | None) -> Source:
    library = name.partition("/")[0]
    if "/" in name and ":" not in name and library not in ("torchvision", "timm"):
        raise SourceError(f"there is no folder {name}, and networks are called {', '.join(names())}")
    builder, shape = _builder(name, classes, image_shape)
    try:
        return Source(name, _fresh(builder), None, None, shape)
    except ModelError as error:
        if "/" in name or ":" in name or name in names():
            raise
        raise SourceError(f"there is no folder {name}, and {error}") from error


def _fresh(builder: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return builder().eval()


def _builder(
    name: str, classes: int | None, shape: tuple[int, ...] | None
) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    if ":" in name:
        if shape is None:
            raise SourceError(f"what images {name} takes is not known: add --image-shape C,H,W")
        return _imported(name), shape
    usual_classes, usual_shape = _usual(name)
    number, images = classes or usual_classes, _of_images(shape) or usual_shape
    return lambda: build(name, number, image_shape=images), images


def _usual(name: str) -> tuple[int, Shape]:
    library, slash, rest = name.partition("/")
    if not slash:
        return (10, (1, 28, 28)) if name == "lenet5" else (100, (3, 32, 32))
    if library == "timm":
        try:
            import timm
        except ImportError as error:
            raise MissingLibraryError(f"{name} needs timm: pip install timm") from error
        settings = timm.get_pretrained_cfg(rest) if timm.is_model(rest) else None
        if settings is not None:
            channels, height, width = settings.input_size
            return 1000, (channels, height, width)
    return _IMAGENET


def _imported(name: str) -> Callable[[], nn.Module]:
    """``package.module:function``, looked for in the current folder too, as ``python -m`` does."""
    module_name, _, function_name = name.partition(":")
    if "/" in module_name or module_name.startswith(".") or module_name.endswith(".py"):
        file = module_name.rpartition("/")[2].removesuffix(".py")
        raise SourceError(
            f"{name} names a file: write it as Python imports it, such as {file}:{function_name} in the folder where "
            f"{file}.py is"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise SourceError(f"{name} can't be imported: {error}") from error
    except Exception as error:  # of the module's own code
        raise OwnCodeError(f"{name} can't be imported: {_told(error)}") from error
    finally:
        sys.path.pop(0)
    if not callable(function) or isinstance(function, nn.Module):
        raise SourceError(f"{name} is a {type(function).__name__}; it must be a function that makes the network")
    _check_no_arguments(name, function)
    return partial(_made_by, name, function)


def _check_no_arguments(name: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise SourceError(
            f"{name} can't be called without arguments ({error}); write a function that needs none"
        ) from error
    except ValueError:  # Python can't tell what this one takes
        pass


def _told(error: Exception, function: Callable[[], Any] | None = None) -> str:
    """An error and where it came from: the last line that led to it, in the function's own file if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    frame = [frame for frame in frames if frame.filename == file][-1:] or frames[-1:]
    return f"{type(error).__name__}: {error} ({frame[0].filename}, line {frame[0].lineno})"


def _made_by(name: str, function: Callable[[], Any]) -> nn.Module:
    try:
        model = function()
    except Exception as error:
        raise OwnCodeError(f"{name} failed: {_told(error, function)}") from error
    if not isinstance(model, nn.Module):
        raise SourceError(f"{name} returned a {type(model).__name__}; it must return the network, an nn.Module")
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise SourceError(f"{tensor_name!r} of {name} has no shape yet; run the network on an example in there")
        if tensor.is_meta:
            raise SourceError(f"{tensor_name!r} of {name} is on the meta device, without numbers; build it on the CPU")
    return model
