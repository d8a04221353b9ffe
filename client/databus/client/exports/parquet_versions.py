"""The versions of a Parquet table, in a local folder or on S3.

What is not here: the content of a version; see ``parquet_table``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pyarrow.fs import LocalFileSystem

from databus.common.errors import StoreBusy, StoreError
from databus.common.storage.bucket import Bucket
from databus.common.storage.durable_files import sync_path

NOTE_NAME = "_databus.json"
LOCK_NAME = "_databus.lock"
LIST_NAME = "current/files.txt"


@dataclass(frozen=True, slots=True)
class Version:
    """A complete version: its files as ``filesystem`` names them, and its note."""

    files: tuple[str, ...] = ()
    note: Mapping[str, Any] | None = None


class NewVersion(Protocol):
    """A version that is being written.

    Invariants:
        I1. Readers see nothing of it before ``commit``, and all of it afterwards, with the note.
    """

    @property
    def label(self) -> str:
        """A part for the names of its files that no other version has."""

    def path(self, name: str) -> str:
        """Where a new file of this name is written."""

    def reuse(self, path: str) -> None:
        """Include an unchanged file of the version before."""

    def settle(self, note: Mapping[str, Any]) -> None:
        """Everything is written: make it durable."""

    def commit(self) -> None:
        """Make it the current version.

        Raises:
            StoreBusy: another version became the current one in between.
        """


class Versions(Protocol):
    """All versions of one table."""

    @property
    def filesystem(self) -> Any:
        """Arrow's file system of the paths."""

    def current(self) -> Version:
        """The newest; an empty one if there is none."""

    def begin(self) -> NewVersion:
        """Begin the next one."""


class LocalVersions:
    """A folder a version, ``v-N``; ``current`` is a symbolic link that a rename replaces.

    Reused files are hard links.  The export that makes a version holds a lock on the folder,
    which ends with the version or the process.
    """

    filesystem: Any = LocalFileSystem()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._link = folder / "current"

    def current(self) -> Version:
        """The version that the link names."""
        try:
            note = json.loads((self._link / NOTE_NAME).read_text())
        except FileNotFoundError:
            note = None
        return Version(tuple(str(path) for path in sorted(self._link.glob("*.parquet"))), note)

    def begin(self) -> NewVersion:
        """An empty folder; folders of killed exports are deleted.

        Raises:
            StoreBusy: another export is making a version.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = _Lock(self._folder)
        current = self._link.readlink().name if self._link.is_symlink() else "v-0"
        number = int(current.removeprefix("v-"))
        for path in self._folder.glob("v-*"):
            if int(path.name.removeprefix("v-")) not in (number, number - 1):
                shutil.rmtree(path)
        folder = self._folder / f"v-{number + 1}"
        folder.mkdir()
        return _NewFolder(folder, self._link, lock)


class _NewFolder:
    def __init__(self, folder: Path, link: Path, lock: _Lock) -> None:
        self._folder, self._link, self._lock = folder, link, lock

    @property
    def label(self) -> str:
        return self._folder.name

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def reuse(self, path: str) -> None:
        os.link(path, self._folder / Path(path).name)

    def settle(self, note: Mapping[str, Any]) -> None:
        (self._folder / NOTE_NAME).write_text(json.dumps(note))
        for path in [*self._folder.iterdir(), self._folder]:
            sync_path(path)

    def commit(self) -> None:
        link = self._link.with_name("current.new")
        link.unlink(missing_ok=True)
        link.symlink_to(self._folder.name)
        link.rename(self._link)
        sync_path(self._link.parent)
        self._lock.release()


class _Lock:
    """The right to write a folder, until ``release``, garbage collection, or the process's end."""

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / LOCK_NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise StoreBusy(
                f"another export is writing {folder}; there can be only one at a time: run it again"
            ) from error


class S3Versions:
    """Files below ``data/``; ``current/files.txt`` has the URLs of the current version's.

    Invariants:
        I1. The list and its note are one object, which is replaced only if it is still the one
            that the version began with.
        I2. An export deletes files after its commit: those that neither its version nor the one
            before lists, but none of a later version.  So a reader of a list has the time of
            one export to read the files, and no export deletes what another one is writing.

    Raises: BucketError with what S3 answered.
    """

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix

    @property
    def filesystem(self) -> Any:
        """The bucket's."""
        return self._bucket.filesystem

    def current(self) -> Version:
        """The version that the list names."""
        return self._read()[0]

    def _read(self) -> tuple[Version, str | None]:
        found = self._bucket.get(self._prefix + LIST_NAME)
        if found is None:
            return Version(), None
        try:
            note = json.loads(found.note)
            int(note["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"s3://{self._bucket.name}/{self._prefix}{LIST_NAME} has no note of an export "
                "(x-amz-meta-databus): another program has written or copied it; delete it, and "
                "the next export writes the whole table"
            ) from error
        files = tuple(url.removeprefix("s3://") for url in found.content.decode().splitlines())
        return Version(files, note), found.tag

    def begin(self) -> NewVersion:
        """The next number."""
        before, tag = self._read()
        return _NewList(self._bucket, self._prefix, before, tag)


class _NewList:
    def __init__(self, bucket: Bucket, prefix: str, before: Version, tag: str | None) -> None:
        self._bucket, self._prefix = bucket, prefix
        self._before, self._tag = before, tag
        self._number = int((before.note or {"version": 0})["version"]) + 1
        self.label = f"v-{self._number}-{uuid.uuid4().hex[:8]}"
        self._files: list[str] = []
        self._note: Mapping[str, Any] = {}

    def path(self, name: str) -> str:
        self._files.append(f"{self._bucket.name}/{self._prefix}data/{name}")
        return self._files[-1]

    def reuse(self, path: str) -> None:
        self._files.append(path)

    def settle(self, note: Mapping[str, Any]) -> None:
        # The label makes the note unique to this version.
        self._note = {**note, "version": self._number, "label": self.label}

    def commit(self) -> None:
        key = self._prefix + LIST_NAME
        content = "".join(f"s3://{path}\n" for path in self._files).encode()
        if self._bucket.commit(key, content, self._tag, json.dumps(self._note)) is None:
            raise StoreBusy(
                f"another export has written s3://{self._bucket.name}/{key} since this one "
                "began; there can be only one at a time: run it again"
            )
        with contextlib.suppress(StoreError):  # the next export deletes the rest
            self._collect()

    def _collect(self) -> None:
        folder = f"{self._prefix}data/"
        named = {path.rpartition("/")[2] for path in (*self._files, *self._before.files)}
        gone = [
            folder + name
            for name in self._bucket.keys(folder)
            if name not in named and _number(name) <= self._number
        ]
        self._bucket.delete(gone)


def _number(name: str) -> int:
    """The version that a file was written for."""
    found = re.search(r"-v-(\d+)-", name)
    return int(found[1]) if found else 0
