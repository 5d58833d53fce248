"""One process at a time writes in a run's folder: two would take each other's log and checkpoints away."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from narrowgate.train.run_folder import LOCK

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


class LockedError(RuntimeError):
    """Another process trains in this folder."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from training in a folder; the system lets go of it however this one ends."""
    if fcntl is None:
        yield
        return
    # A record lock, not flock: processes that this one started, which may outlive it, do not hold it. A sweep holds
    # another file: closing one here would let go of all record locks on it.
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system without locks: as if there were none
            return
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
        raise LockedError(
            f"{folder} is in use: {holder} trains there. Wait for it or end it, or choose another folder with --out"
        ) from error
    with suppress(OSError):  # of a full disk: who holds it is for people only
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
