"""The leases of a log writer: of the log's folder, and of the store of its runs."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.run_storage import Lease

OWNER = "owner"


@contextlib.contextmanager
def writer_leases(folder: Path, store: Store) -> Iterator[None]:
    """Be the only writer of the log in ``folder`` and of its store while the block runs.

    Raises:
        StoreBusy: another process is.
    """
    with log_lease(folder), store_lease(folder, store):
        yield


@contextlib.contextmanager
def log_lease(folder: Path) -> Iterator[None]:
    """Be the only process that writes the log in ``folder``.

    Raises:
        StoreBusy: another process of this machine is.
    """
    local = Store(folder)
    local.create()
    with local.lease("writer"):
        yield


@contextlib.contextmanager
def store_lease(folder: Path, store: Store) -> Iterator[Lease | None]:
    """Be the only log writer of a store, for the log in ``folder``, whose lease the caller holds.

    None for a store in a folder: it is where the log is, and has no other lease.

    Raises:
        StoreBusy: a process of another machine is.
    """
    if store.storage.folder is not None:
        yield None
        return
    store.create()
    # While we hold the log's folder, no other process can be the owner that it names.
    with store.lease("writer", _owner(Store(folder))) as lease:
        yield lease


def _owner(local: Store) -> str:
    """The name of the log in this folder, which is stored there."""
    name = (local.storage.read_note(OWNER) or b"").decode().strip()
    if not name:
        name = uuid.uuid4().hex
        local.storage.write_note(OWNER, f"{name}\n".encode())
    return name
