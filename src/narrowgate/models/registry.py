"""``build``: a network by name, one of the paper's or any of torchvision's and timm's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from narrowgate.models.densenet import densenet40
from narrowgate.models.lenet import LeNet5
from narrowgate.models.mobilenet import mobilenetv2
from narrowgate.models.resnet import PreActResNet, resnet164

Shape = tuple[int, int, int]


class ModelError(ValueError):
    """A network that can't be built as asked; says why, and what would do."""


class MissingLibraryError(ModelError):
    """The library that the network is of is not installed."""


@dataclass(frozen=True)
class _Entry:
    """One of the paper's networks: what makes it, and which images it takes, of one shape or of ``side`` and more."""

    make: Callable[..., nn.Module]
    side: int = 0
    shape: Shape | None = None


_PAPER = {
    "lenet5": _Entry(LeNet5, shape=(1, 28, 28)),
    "resnet164": _Entry(resnet164, side=4),
    "resnet": _Entry(PreActResNet, side=4),
    "densenet40": _Entry(densenet40, side=4),
    "mobilenetv2": _Entry(mobilenetv2, side=8),
}
_LIBRARIES = ("torchvision", "timm")
# Set by the data, under the name that each builder has for them.
_RESERVED = ("classes", "channels", "num_classes", "in_chans")
# Without these, they have further outputs in training, and warn about how their weights start.
_TORCHVISION_DEFAULTS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def names() -> tuple[str, ...]:
    """What ``build`` knows, for a help text."""
    return (*_PAPER, *(f"{library}/NAME" for library in _LIBRARIES))


def build(name: str, classes: int, *, image_shape: Shape = (3, 32, 32), **options: Any) -> nn.Module:
    """A new network for images of a shape (channels, height, width), with random weights unless options ask for others.

    ``options`` go to the builder: ``dropout``, ``depth`` (for ``resnet``), ``bias`` (for ``lenet5``), or whatever
    ``torchvision.models`` and ``timm.create_model`` take, for example ``weights`` and ``pretrained``.
    """
    if classes < 1:
        raise ModelError(f"a network needs at least 1 class, got {classes}")
    if given := [option for option in options if option in _RESERVED]:
        raise ModelError(f"{name}: {', '.join(given)} can't be an option, the data decides it")
    library, slash, rest = name.partition("/")
    if slash and library == "torchvision":
        return _from_torchvision(rest, classes, image_shape, options)
    if slash and library == "timm":
        return _from_timm(rest, classes, image_shape, options)
    if name not in _PAPER:
        there = next(_in_libraries(name.lower()), "")
        unknown = f"there is no network {name!r}; did you mean {there}?" if there else _unknown(name, _PAPER)
        raise ModelError(f"{unknown} There are {', '.join(names())}")
    return _from_paper(name, classes, image_shape, options)


def options_of(name: str) -> tuple[str, ...]:
    """The options that one of the paper's networks takes; none for any other name."""
    parameters = inspect.signature(_PAPER[name].make).parameters if name in _PAPER else ()
    return tuple(option for option in parameters if option not in _RESERVED)


def _from_paper(name: str, classes: int, shape: Shape, options: dict[str, Any]) -> nn.Module:
    entry = _PAPER[name]
    found = "x".join(map(str, shape))
    if entry.shape is not None and shape != entry.shape:
        raise ModelError(f"{name} takes images of {'x'.join(map(str, entry.shape))}, and these are {found}")
    if min(shape[1:]) < entry.side:
        raise ModelError(f"{name} takes images of at least {entry.side}x{entry.side}, and these are {found}")
    takes = options_of(name)
    for option in options:
        if option not in takes:
            raise ModelError(f"{_unknown(option, takes, f'{name} has no option')} It takes {', '.join(takes)}")
    channels = {} if entry.shape is not None else {"channels": shape[0]}
    try:
        return entry.make(classes=classes, **channels, **options)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{name} can't be built with {_shown(options)}: {error}") from error


def _from_torchvision(name: str, classes: int, shape: Shape, options: dict[str, Any]) -> nn.Module:
    try:
        with _outside_devices():
            from torchvision import models
    except ImportError as error:
        raise MissingLibraryError(
            f"torchvision/{name} needs torchvision: pip install '.[train]' in the checkout of narrowgate"
        ) from error
    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(
            _unknown(name, known, "torchvision has no image classifier") + " See torchvision.models.list_models()"
        )
    if shape[0] != 3:
        raise ModelError(
            f"torchvision/{name} takes images of 3 channels, and these have {shape[0]}; timm's take any number"
        )
    if options.get("weights") is None:
        options = _TORCHVISION_DEFAULTS.get(name, {}) | options
    try:
        model: nn.Module = models.get_model(name, num_classes=classes, **options)
    except KeyError as error:
        choices = ", ".join(models.get_model_weights(name).__members__)
        raise ModelError(f"torchvision/{name} has no weights {error}; it has {choices}") from error
    except (TypeError, ValueError) as error:
        reason = str(error)
        if "num_classes" in reason:
            reason = (
                f"they are for other classes than these {classes}. timm/NAME with pretrained = true gets a new head"
            )
        raise ModelError(f"torchvision/{name} can't be built with {_shown(options)}: {reason}") from error
    return model


def _from_timm(name: str, classes: int, shape: Shape, options: dict[str, Any]) -> nn.Module:
    try:
        with _outside_devices():
            import timm
    except ImportError as error:
        raise MissingLibraryError(f"timm/{name} needs timm: pip install timm") from error
    if not timm.is_model(name):
        raise ModelError(_unknown(name, timm.list_models(), "timm has no model") + " See timm.list_models()")
    try:
        model: nn.Module = timm.create_model(name, num_classes=classes, in_chans=shape[0], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"timm/{name} can't be built with {_shown(options)}: {error}") from error
    return model


def _in_libraries(name: str) -> Iterator[str]:
    """What a network of a library that is installed is called here, whose library was left out."""
    with suppress(ImportError):
        from torchvision import models

        if name in models.list_models(module=models):
            yield f"torchvision/{name}"
    with suppress(ImportError):
        import timm

        if timm.is_model(name):
            yield f"timm/{name}"


def _outside_devices() -> AbstractContextManager[Any]:
    """For imports: both libraries load PyTorch's compiler, and that of 2.6 fails under ``torch.device("meta")``."""
    return torch.device("cpu")


def _unknown(name: str, known: Iterable[str], what: str = "there is no network") -> str:
    near = get_close_matches(name.lower(), list(known), 3)
    return f"{what} {name!r}" + (f"; did you mean {' or '.join(near)}?" if near else ".")


def _shown(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in options.items()) or "no options"
