"""Scratch folders: where an applier's Spark spills what it cannot hold in memory.

Spark removes its files at an orderly end.  The files of a killed Spark would stay forever in the
system's temporary folder, without a sign of their owner.  Below ``data_dir`` the next applier
removes them.  Nothing that must last belongs here.

A folder belongs to the process that holds its lock; the operating system frees the lock at any end
of the process.  A process id would prove nothing, since another process may have it by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from databus.common.errors import StoreError
from databus.common.private import make_folder

FOLDER = ".scratch"
"""Below ``data_dir``; no database has this name."""

LOCK = "lock"
"""In each scratch folder, held by its owner; in ``FOLDER``, held to make or remove folders."""


@contextlib.contextmanager
def scratch_folder(data_dir: Path) -> Iterator[Path]:
    """An empty folder of this process, for the block; folders of dead processes are removed first.

    Raises:
        StoreError: ``data_dir`` cannot be written.
    """
    parent = data_dir.absolute() / FOLDER
    with contextlib.ExitStack() as held:
        try:
            make_folder(parent)
            with _locked(parent / LOCK):
                _sweep(parent)
                # Rows of tables pass through it: no other user may read it.
                folder = Path(tempfile.mkdtemp(prefix="applier-", dir=parent))
                held.enter_context(_locked(folder / LOCK))
        except OSError as error:
            raise StoreError(f"{parent}: no scratch folder for Spark: {error}") from error
        try:
            yield folder
        finally:
            held.close()
            sweep(data_dir)


def sweep(data_dir: Path) -> None:
    """Remove the scratch folders whose owners are gone; what cannot be removed now stays."""
    parent = data_dir.absolute() / FOLDER
    with contextlib.suppress(OSError), _locked(parent / LOCK):
        _sweep(parent)


def _sweep(parent: Path) -> None:
    """The same under the lock of ``parent``: no folder is seen before its owner has locked it."""
    for folder in parent.iterdir():
        # A lock that cannot be taken, for whatever reason, may be held.
        with contextlib.suppress(OSError):
            if folder.is_dir():
                with _locked(folder / LOCK, wait=False):
                    pass
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the file's lock; the file is made if it is missing.

    Raises:
        OSError: it cannot be made; BlockingIOError: another process holds it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
