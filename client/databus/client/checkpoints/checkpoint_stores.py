"""Stores of checkpoints: a file, LMDB, or the application's own database."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import google_crc32c

from databus.common.checkpoint import Checkpoint, decode, encode
from databus.common.errors import BadCheckpoint, StoreBusy, StoreError
from databus.common.extras import imports_of_extra
from databus.common.private import make_folder
from databus.common.storage.durable_files import replace_file
from databus.common.storage.lmdb_file import SizeGuard, check_lmdb

log = logging.getLogger("databus.client")


class CheckpointStore(Protocol):
    """Stores the newest checkpoint of one consumer.

    Durability: when ``save`` returns, the checkpoint survives a crash of the machine; ``load``
    returns the newest one that was saved, or an older one, never another.
    Both may be ``async``.  A store may also have ``close()``, which the client calls at its end.
    """

    def load(self) -> Checkpoint | Awaitable[Checkpoint | None] | None:
        """The newest checkpoint, or None if none was ever saved.

        Raises:
            BadCheckpoint: there is one, and it cannot be read.
        """

    def save(self, checkpoint: Checkpoint) -> Awaitable[None] | None:
        """Store ``checkpoint`` as the newest.

        Raises:
            StoreError: it could not be made durable.
        """


class NoCheckpoints:
    """Stores nothing: every start is a new one.

    A client without ``checkpoints`` uses it too, and logs a warning.
    """

    def load(self) -> None:
        """Nothing."""

    def save(self, checkpoint: Checkpoint) -> None:
        """Nothing."""


class FileCheckpoints:
    """Stores the last ``history`` checkpoints in one small text file, the newest last.

    A line is the CRC-32C of the JSON as eight hex digits, a space, and the JSON.

    Invariants:
        I1. The file at ``path`` is always a complete one: it is replaced by rename.
        I2. A damaged line is never used; the newest undamaged one is, with a warning.
        I3. A file without an undamaged line raises; it never counts as a new consumer.

    Owner: one process at a time, by a lock on ``path`` + ".lock".
    Durability: the file and its folder are synced when ``save`` returns (unless
        ``sync=False``, which survives a crash of the process but not of the machine).
    Raises: StoreBusy if another process uses the file, StoreError, BadCheckpoint.
    """

    def __init__(self, path: str | Path, *, history: int = 5, sync: bool = True) -> None:
        self.path = Path(path)
        self._history = max(1, history)
        self._sync = sync
        self._lines: list[bytes] | None = None
        self._unlock: weakref.finalize[[int], FileCheckpoints] | None = None

    def load(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None if there is no file."""
        self._acquire()
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            self._lines = []
            return None
        except OSError as error:
            raise StoreError(f"{self.path} cannot be read: {error.strerror}") from error
        lines = data.split(b"\n")[:-1] if data.endswith(b"\n") else data.split(b"\n")
        for skipped, line in enumerate(reversed(lines)):
            checkpoint = _parse_line(line)
            if checkpoint is not None:
                if skipped:
                    log.warning(
                        "%s: the newest %d of %d checkpoints are damaged; resuming at %s",
                        self.path,
                        skipped,
                        len(lines),
                        encode(checkpoint),
                    )
                self._lines = lines[: len(lines) - skipped]
                return checkpoint
        raise BadCheckpoint(
            f"{self.path} holds {len(lines)} lines in {len(data)} bytes and none of them is an "
            "undamaged checkpoint; restore the file, or delete it to start as a new consumer"
        )

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the file by one that ends with ``checkpoint``."""
        if self._lines is None:
            self.load()
        assert self._lines is not None
        text = encode(checkpoint).encode()
        lines = [*self._lines, b"%08x " % google_crc32c.value(text) + text][-self._history :]
        replace_file(self.path, b"\n".join(lines) + b"\n", durable=self._sync)
        self._lines = lines

    def close(self) -> None:
        """Unlock the file for other processes."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._lines = None

    def _acquire(self) -> None:
        if self._unlock is not None:
            return
        path = self.path.with_name(self.path.name + ".lock")
        try:
            make_folder(path.parent)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise StoreBusy(f"{self.path} is in use by another consumer") from error
        self._unlock = weakref.finalize(self, os.close, descriptor)


def describe_checkpoint(path: str | Path) -> dict[str, Any]:
    """What a file of ``FileCheckpoints`` holds, newest first, without locking it.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    found = [_parse_line(line) for line in reversed(lines)]
    return {
        "path": str(path),
        "lines": len(lines),
        "damaged": found.count(None),
        "checkpoints": [json.loads(encode(checkpoint)) for checkpoint in found if checkpoint],
    }


def _parse_line(line: bytes) -> Checkpoint | None:
    crc, _, text = line.partition(b" ")
    try:
        if len(crc) != 8 or int(crc, 16) != google_crc32c.value(text):
            return None
        return decode(text)
    except (ValueError, BadCheckpoint):
        return None


class LmdbCheckpoints:
    """Checkpoints of many consumers in one LMDB environment, each under its name.

    Owner: one client; other processes may use other names at the same time.
    Durability: synced when ``save`` returns.
    Raises: MissingDependency without the package lmdb, StoreError, BadCheckpoint, FormatError for
        a file that was cut off or has damaged pages.
    """

    def __init__(self, folder: str | Path, name: str) -> None:
        with imports_of_extra("bootstrap", package="lmdb", needed_by="LmdbCheckpoints"):
            import lmdb
        self._folder, self._name = Path(folder), name.encode()
        self._lmdb: Any = lmdb
        self._store: Any = None
        self._open()

    def names(self) -> list[str]:
        """The names of all consumers."""
        return [name.decode() for name in self._entries()]

    def load(self) -> Checkpoint | None:
        """The checkpoint of this name."""
        found = self._entries()
        if self._name in found:
            return decode(self._verified(self._name, found[self._name]))
        for name, value in found.items():  # a damaged name must not look like a new consumer
            self._verified(name, value)
        return None

    def _entries(self) -> dict[bytes, bytes]:
        try:
            with self._open().begin() as transaction:
                return dict(transaction.cursor())
        except self._lmdb.Error as error:
            raise StoreError(f"{self._folder / 'data.mdb'} cannot be read: {error}") from error

    def _verified(self, name: bytes, value: bytes) -> bytes:
        """The text of an entry; earlier versions wrote it without a CRC."""
        crc, space, text = value.partition(b" ")
        if value.startswith(b"{"):
            return value
        if not space or crc != b"%08x" % google_crc32c.value(name + text):
            raise BadCheckpoint(
                f"{self._folder / 'data.mdb'}: the checkpoint under {name!r} is damaged: "
                f"{value[:60]!r} does not match its CRC. Restore the file from a copy, or move "
                "its folder away to start as a new consumer."
            )
        return text

    def save(self, checkpoint: Checkpoint) -> None:
        """Store the checkpoint under this name."""
        try:
            text = encode(checkpoint).encode()
            with self._open().begin(write=True) as transaction:
                crc = google_crc32c.value(self._name + text)
                transaction.put(self._name, b"%08x %b" % (crc, text))
        except self._lmdb.Error as error:
            raise StoreError(f"{self._folder / 'data.mdb'} cannot be written: {error}") from error

    def close(self) -> None:
        """Close the environment; the next use opens it again."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> Any:
        if self._store is None:
            try:
                make_folder(self._folder)
                check_lmdb(self._folder, whole=True)
                self._guard = SizeGuard(self._folder)
                self._store = self._lmdb.open(str(self._folder), map_size=16 << 20)
            except (OSError, self._lmdb.Error) as error:
                raise StoreError(
                    f"{self._folder / 'data.mdb'} cannot be opened: {error}"
                ) from error
        self._guard.check()
        return self._store


class ApplicationCheckpoints:
    """The application stores its checkpoint itself, in the transaction that holds its events.

    ``load`` returns what the application has stored: a checkpoint, its text, or None.  The consumer
    writes the checkpoint before it commits.  Events and checkpoint become durable together, so that
    every event takes effect once.  An example:

        class Mirror(Consumer):
            def __init__(self, connection):
                self.db = connection

            def onDataEvent(self, event):
                self.db.execute("REPLACE INTO orders VALUES (?, ?)", ...)

            def onCheckpoint(self, checkpoint):
                text = encode_checkpoint(checkpoint)
                self.db.execute("REPLACE INTO databus VALUES (1, ?)", (text,))
                self.db.commit()

            def onRollback(self, checkpoint):
                self.db.rollback()

        def load():
            row = connection.execute("SELECT checkpoint FROM databus").fetchone()
            return row and row[0]

        client = DatabusClient(..., checkpoints=ApplicationCheckpoints(load))

    Durability: the application's.
    """

    def __init__(
        self, load: Callable[[], Checkpoint | str | Awaitable[Checkpoint | str | None] | None]
    ) -> None:
        self._load = load

    async def load(self) -> Checkpoint | None:
        """What the application has stored."""
        found = self._load()
        if isinstance(found, Awaitable):
            found = await found
        return decode(found) if isinstance(found, str) else found

    def save(self, checkpoint: Checkpoint) -> None:
        """Nothing: the consumer has written it in ``onCheckpoint``."""
