"""Files and folders that are replaced as a whole: a reader finds the old or the new, never a mixture."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which then takes the place of ``target``; an error, or the end of the process, leaves
    the old one.

    Between two renames nothing is at ``target``: if the process ends there, ``surviving_folder`` finds the old one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        new.mkdir()
        yield new
        _sync_folder(new)
        _swap(new, target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def replace_folder(target: Path, files: Mapping[str, bytes]) -> None:
    """Make ``target`` a folder with exactly these files, as ``new_folder`` does."""
    with new_folder(target) as new:
        for name, content in files.items():
            write_new(new / name, content)


def replace_file(target: Path, content: bytes) -> None:
    """Write a file beside ``target`` and put it in its place; an error leaves the old one."""
    if target.is_dir():  # the system would name the new file
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    new = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        write_new(new, content)
        os.replace(new, target)
        _sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            new.unlink(missing_ok=True)
        if isinstance(error, OSError):  # the system names the new file, and of a full disk none
            error.filename = str(target)
        raise


def remove_leftovers(folder: Path, names: Iterable[str]) -> None:
    """Remove what killed processes left beside these files and folders; nobody may be writing there."""
    for name in names:
        for path in folder.glob(f".{name}.{'[0-9a-f]' * 8}.new"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def surviving_folder(target: Path) -> Path | None:
    """Where the last complete version is: at ``target`` or, after an interrupted replacement, beside it."""
    return next((path for path in (target, _previous(target)) if path.exists()), None)


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _swap(new: Path, target: Path) -> None:
    previous = _previous(target)
    if target.exists():
        if previous.exists():
            shutil.rmtree(previous)
        os.replace(target, previous)
        try:
            os.replace(new, target)
        except BaseException:
            os.replace(previous, target)
            raise
    else:
        os.replace(new, target)
    _sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, down to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk too, where the system can."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what file systems say that know this of files only
            raise
    finally:
        os.close(descriptor)
