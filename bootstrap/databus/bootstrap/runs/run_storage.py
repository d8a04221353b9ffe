"""Storage of runs and manifest: a local folder, or anything with the methods defined here.

It reads, writes, lists and deletes, replaces the manifest atomically, and grants leases.
It does not depend on a manifest's content, nor on which files a run has.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from databus.bootstrap.runs import failpoints
from databus.common.errors import StoreBusy, StoreError
from databus.common.private import make_folder, private_opener
from databus.common.storage.durable_files import replace_file, sync_path

MANY_FILES = 16
SYNCS_AT_ONCE = 16

MANIFEST = "manifest.json"
RUNS = "runs"


@dataclass(frozen=True, slots=True)
class Document:
    """A small object's content, and the tag that a replacement must name."""

    content: bytes
    tag: str


class Lease(Protocol):
    """The right to be the only process of a role.

    ``number`` grows with each holder; 0 if a holder cannot outlive its lease.
    """

    @property
    def number(self) -> int:
        """The number of this holder."""

    def check(self) -> None:
        """Check that we still hold it.

        Raises:
            StoreBusy: another process holds it, or may hold it by now.
        """


class RunFiles(Protocol):
    """The files of one run."""

    @property
    def refusal(self) -> type[StoreError]:
        """The error raised when reading or writing fails: its hint fits the storage."""

    def location(self, name: str) -> str:
        """The file's location, for messages and for Spark."""

    def open(self, name: str) -> Any:
        """The file as a ``pyarrow.NativeFile`` that can be read at any offset."""

    def create(self, name: str) -> Any:
        """A new file as a ``pyarrow.NativeFile`` to write; complete when closed."""

    def names(self) -> list[str]:
        """The names of the files."""

    def delete(self, name: str) -> None:
        """Delete one file."""

    def settle(self, names: list[str]) -> None:
        """Make files durable."""


class Storage(Protocol):
    """The storage of one database's runs.

    Invariants:
        I1. ``replace_manifest`` changes all of it or nothing, and only the manifest with the tag.
        I2. A run's file appears only when complete, or no manifest names it until then.

    Raises: StoreError for what the storage refuses.
    """

    @property
    def url(self) -> str:
        """The location, for messages."""

    @property
    def folder(self) -> Path | None:
        """The location as a local folder, if it is one."""

    def create(self) -> None:
        """Make what must exist before the first write."""

    def read_manifest(self) -> Document | None:
        """The manifest; None before the first."""

    def switching(self) -> AbstractContextManager[None]:
        """A lock, if it is cheap: no other process replaces the manifest within the block."""

    def replace_manifest(self, content: bytes, tag: str | None) -> bool:
        """Replace the object with this tag (None: there is none); False if another is there."""

    def lease(self, role: str, owner: str | None) -> AbstractContextManager[Lease]:
        """Be the only ``role``.  ``owner`` names a process that cannot run twice.

        Raises:
            StoreBusy: another process holds the role.
        """

    def run_ids(self) -> list[str]:
        """Runs of which any file exists, named by a manifest or not."""

    def files(self, run_id: str) -> RunFiles:
        """The files of a run."""

    def delete_run(self, run_id: str) -> None:
        """Delete all files of a run."""

    def write_note(self, name: str, content: bytes, *, durable: bool = False) -> None:
        """Replace a small document; with ``durable`` it survives a power loss."""

    def read_note(self, name: str) -> bytes | None:
        """The document; None if there is none."""

    def note_names(self, prefix: str) -> list[str]:
        """The names of documents that begin with ``prefix``."""

    def delete_note(self, name: str) -> None:
        """Delete a document, if it is there."""


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Raise the disk's errors in the block as a StoreError with the path."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error}") from error


def sync_folder(folder: Path, names: list[str]) -> None:
    """Make files and their entries in the folder durable.

    Many files are synced at the same time: the file system then writes its journal once for
    several of them.
    """
    if len(names) < MANY_FILES:
        for name in names:
            sync_path(folder / name)
    else:
        with ThreadPoolExecutor(SYNCS_AT_ONCE, "databus-sync") as threads:
            for _ in threads.map(sync_path, (folder / name for name in names)):
                pass
    sync_path(folder)


class LocalFiles:
    """A run's folder.

    Once a file is open, its data cannot be deleted: the descriptor holds it.
    """

    refusal = StoreError

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def location(self, name: str) -> str:
        """The file's path."""
        return str(self.folder / name)

    def open(self, name: str) -> Any:
        """The open file."""
        return pa.OSFile(self.location(name))

    def create(self, name: str) -> Any:
        """A new file; its folder is made."""
        make_folder(self.folder)
        return pa.OSFile(self.location(name), mode="wb")

    def names(self) -> list[str]:
        """Everything in the folder, in alphabetical order."""
        with _refusals(self.folder):
            return sorted(path.name for path in self.folder.iterdir())

    def delete(self, name: str) -> None:
        """Delete a file, or a folder that Spark left."""
        path = self.folder / name
        with _refusals(path):
            path.unlink() if path.is_file() else shutil.rmtree(path)

    def settle(self, names: list[str]) -> None:
        """fsync files, their folder, and the folder that it lies in."""
        with _refusals(self.folder):
            sync_folder(self.folder, names)
            sync_folder(self.folder.parent, [])


class _HeldFile:
    """A lease that the operating system ends with its holder."""

    number = 0

    def check(self) -> None:
        """It cannot be lost."""


class LocalStorage:
    """A folder on a local disk, or on one that several machines have mounted.

    Assumptions: rename is atomic, what was fsynced stays, and ``flock`` works on all machines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs_folder = folder / RUNS
        self.manifest_path = folder / MANIFEST

    @property
    def url(self) -> str:
        """The folder."""
        return str(self.folder)

    def create(self) -> None:
        """Make the folders."""
        with _refusals(self.runs_folder):
            make_folder(self.runs_folder)

    def read_manifest(self) -> Document | None:
        """The file's content; its tag has no meaning, because ``switching`` is a lock."""
        try:
            return Document(self.manifest_path.read_bytes(), "")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.manifest_path}: {error}") from error

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Hold the manifest's lock."""
        with self._locked("manifest.lock", wait=True):
            yield

    def replace_manifest(self, content: bytes, tag: str | None) -> bool:
        """Write a new file, then rename it; the caller is within ``switching``."""
        temporary = self.manifest_path.with_suffix(".new")
        try:
            with open(temporary, "wb", opener=private_opener) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            failpoints.reach("manifest.file_written")
            temporary.rename(self.manifest_path)
            failpoints.reach("manifest.renamed")
            sync_folder(self.folder, [])
        except OSError as error:
            raise StoreError(f"{self.manifest_path} cannot be replaced: {error}") from error
        return True

    @contextlib.contextmanager
    def lease(self, role: str, owner: str | None) -> Iterator[Lease]:
        """Hold the role's lock; it ends with this process, in every case."""
        with self._locked(f"{role}.lock", wait=False):
            yield _HeldFile()

    @contextlib.contextmanager
    def _locked(self, name: str, *, wait: bool) -> Iterator[None]:
        path = self.folder / name
        with contextlib.ExitStack() as stack:
            with _refusals(path):
                file = stack.enter_context(open(path, "a+", opener=private_opener))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                role = name.removesuffix(".lock")
                raise StoreBusy(
                    f"process {holder} is the {role} of {self.folder}; there can be only one"
                ) from None
            # A full disk must not prevent a lock: the content is only informative.
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), f"{os.getpid()}\n".encode(), 0)
            yield

    def run_ids(self) -> list[str]:
        """The names of the run folders."""
        if not self.runs_folder.is_dir():
            return []
        with _refusals(self.runs_folder):
            return sorted(path.name for path in self.runs_folder.iterdir())

    def files(self, run_id: str) -> RunFiles:
        """The run's folder."""
        return LocalFiles(self.runs_folder / run_id)

    def delete_run(self, run_id: str) -> None:
        """Delete the run's folder."""
        shutil.rmtree(self.runs_folder / run_id, ignore_errors=True)

    def write_note(self, name: str, content: bytes, *, durable: bool = False) -> None:
        """Replace a file."""
        path = self.folder / name
        temporary = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}")
        replace_file(path, content, durable=durable, beside=temporary)

    def read_note(self, name: str) -> bytes | None:
        """The file's content."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self.folder / name}: {error}") from error

    def note_names(self, prefix: str) -> list[str]:
        """The names of files that begin with ``prefix``."""
        with _refusals(self.folder):
            return sorted(path.name for path in self.folder.glob(f"{prefix}*"))

    def delete_note(self, name: str) -> None:
        """Delete the file."""
        with _refusals(self.folder / name):
            (self.folder / name).unlink(missing_ok=True)
