"""Locks of writers: a lock on a file, held as long as its descriptor is open."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from databus.common.errors import StoreBusy, StoreError
from databus.common.private import make_folder

RELAY_LOCK = "relay.lock"
_POLL_S = 0.05


def lock_data_dir(data_dir: Path, *, wait_s: float = 0.0) -> int:
    """Make the folder of a relay, and take its lock; see ``take_lock``.

    Raises:
        StoreError: the folder or the lock cannot be made.
    """
    try:
        make_folder(data_dir)
        return take_lock(data_dir / RELAY_LOCK, f"the relay's data_dir {data_dir}", wait_s=wait_s)
    except OSError as error:
        raise StoreError(f"{error.filename or data_dir}: {error.strerror}") from error


def take_lock(path: Path, what: str, *, wait_s: float = 0.0) -> int:
    """Take the lock of ``what``, waiting up to ``wait_s``; returns the descriptor that holds it.

    Raises:
        StoreBusy: another process holds it; the message names that process.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() < until_s:
                time.sleep(_POLL_S)
                continue
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreBusy(
            f"{what} is open for writing in process {holder}; stop that process "
            f"or use another data_dir"
        )
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
