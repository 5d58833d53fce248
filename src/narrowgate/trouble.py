"""What a command says when it can't go on, and its status: 2 for a wrong call, 1 for a failure, 130 after Ctrl-C."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

_INSTALL = {
    "typer": '".[cli]"',
    "rich": '".[cli]"',
    "sklearn": '".[cli]" scikit-learn',
    "lightning": '".[train]"',
    "torchvision": '".[train]"',
    "tomli": '".[train]"',
    "timm": "timm",
    "onnx": '".[export]"',
    "onnxruntime": '".[export]"',
    "onnxscript": '".[export]"',
    "matplotlib": '".[report]"',
    "ray": '".[sweep]"',
}

_OF_THE_CALL = (
    "ChoiceError",
    "DataError",
    "ModelError",
    "RecipeError",
    "RecordError",
    "ReportError",
    "SourceError",
    "SweepError",
    "TargetError",
)
"""Errors about what was typed: an option, a recipe, a file or folder. What is derived from one of them is a failure."""
_WRONG_PLACES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError)


@contextmanager
def told_in_one_line(stopped: Callable[[], str] = lambda: "stopped") -> Iterator[None]:
    """End the process with a line and a status for what a person can mend; a bug keeps its traceback.

    Args:
        stopped: what to say after Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt:
        _end(stopped(), 130)
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        _end(message, status_of(error))


def tell_own_warnings_in_one_line() -> None:
    """Show what the package warns of without the place in its code; other packages' warnings stay as they are."""
    usual, package = warnings.formatwarning, str(Path(__file__).parent)

    def formatted(message: Warning | str, category: type[Warning], filename: str, *place: Any, **more: Any) -> str:
        ours = filename.startswith(package)
        return f"narrowgate: {message}\n" if ours else usual(message, category, filename, *place, **more)

    warnings.formatwarning = formatted


def message_of(error: Exception) -> str | None:
    """What to tell a person, or None for a bug.

    The package's own errors are written for people, whichever module they come from; so are the system's about files.
    """
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        install = _INSTALL.get(package)
        if install is None:
            return None
        where = " in the checkout of narrowgate" if install.startswith('".') else ""
        return f"{package} is not installed. Install it with: pip install {install}{where}"
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # the reader of a pipe has enough
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    kind = type(error)
    ours = kind.__module__.partition(".")[0] == "narrowgate" and not kind.__name__.startswith("_")
    return str(error) if ours else None


def status_of(error: Exception) -> int:
    """2 where the command was called wrongly, 1 where it was called rightly and failed."""
    return 2 if type(error).__name__ in _OF_THE_CALL or isinstance(error, _WRONG_PLACES) else 1


def _end(message: str, status: int) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of several processes that find the same, one says it
        print(f"narrowgate: {message}", file=sys.stderr)
    sys.exit(status)
