"""Scratch folders: where an applier's Spark puts aside what it cannot hold in memory.

Spark removes that itself at an orderly end.  What a killed one leaves would stay for ever in the
system's temporary folder, where nobody knows whose it was; below ``data_dir`` the next applier
knows.  What does not belong here: anything that has to last.

A folder belongs to whoever has its lock, which the operating system takes back at any end of the
process; a process id would say nothing, since another process may have it by now.
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
"""Below ``data_dir``; no database has such a name."""

LOCK = "lock"
"""In each scratch folder, held by its owner; in ``FOLDER``, by whoever makes or removes one."""


@contextlib.contextmanager
def scratch_folder(data_dir: Path) -> Iterator[Path]:
    """An empty folder of this process, for the block; what dead processes have left goes first.

    Raises:
        StoreError: ``data_dir`` cannot be written.
    """
    place = data_dir.absolute() / FOLDER
    with contextlib.ExitStack() as held:
        try:
            make_folder(place)
            with _locked(place / LOCK):
                _sweep(place)
                # Rows of tables pass through it: nobody else may read it.
                folder = Path(tempfile.mkdtemp(prefix="applier-", dir=place))
                held.enter_context(_locked(folder / LOCK))
        except OSError as error:
            raise StoreError(f"{place}: no scratch folder for Spark: {error}") from error
        try:
            yield folder
        finally:
            held.close()
            sweep(data_dir)


def sweep(data_dir: Path) -> None:
    """Remove the scratch folders whose owners are gone; what cannot be removed now stays."""
    place = data_dir.absolute() / FOLDER
    with contextlib.suppress(OSError), _locked(place / LOCK):
        _sweep(place)


def _sweep(place: Path) -> None:
    """The same for who has the place's lock: a folder is never seen before its owner has it."""
    for folder in place.iterdir():
        # A lock that cannot be had, for whatever reason, is one that may be held.
        with contextlib.suppress(OSError):
            if folder.is_dir():
                with _locked(folder / LOCK, wait=False):
                    pass
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the file's lock, which is made where there is none.

    Raises:
        OSError: it cannot be made; BlockingIOError: somebody else holds it.
    """
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
