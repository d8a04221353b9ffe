"""Stores of dead letters: a file, a table in the application's database, its own code."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import google_crc32c

from databus.client.checkpoints.checkpoint_table import checked_consumer, with_marks
from databus.client.checkpoints.database_steps import paramstyle_of, row_values
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.deadletters.dead_letter_table import DeadLetterTable, letters_of
from databus.common.errors import DatabusError, FormatError, StoreBusy, StoreError
from databus.common.private import make_folder
from databus.common.storage.durable_files import replace_file, sync_path


class DeadLetterStore(Protocol):
    """Stores the dead letters of one consumer.

    Durability: when ``put`` or ``remove`` returns, its effect survives a crash of the machine.
    All may be ``async``.  A store may also have ``close()``, which the client calls at its end.
    """

    def put(self, letters: Sequence[DeadLetter]) -> Awaitable[None] | None:
        """Store letters; one of the same position is replaced.

        Raises:
            StoreError: they could not be made durable.
        """

    def all(self) -> Sequence[DeadLetter] | Awaitable[Sequence[DeadLetter]]:
        """All letters.

        Raises:
            StoreError: they cannot be read.
        """

    def remove(self, letters: Sequence[DeadLetter]) -> Awaitable[None] | None:
        """Remove letters, by their positions."""


class CallbackDeadLetters:
    """Dead letters in the application's own code: three functions, plain or ``async``.

    Durability: the application's.
    """

    def __init__(
        self,
        put: Callable[[Sequence[DeadLetter]], Awaitable[None] | None],
        load: Callable[[], Sequence[DeadLetter] | Awaitable[Sequence[DeadLetter]]],
        remove: Callable[[Sequence[DeadLetter]], Awaitable[None] | None],
    ) -> None:
        self.put = put
        self.all = load
        self.remove = remove


class FileDeadLetters:
    """Dead letters in a file that only its user can read, a line each.

    A line is the CRC-32C of the JSON as eight hex digits, a space, and the JSON.

    Invariants:
        I1. An incomplete last line, of a ``put`` that did not return, is ignored and overwritten.
        I2. Any other damaged line is an error, and nothing is written then.

    Owner: one process at a time, by a lock on ``path`` + ".lock".
    Durability: the file is synced when ``put`` or ``remove`` returns.
    Raises: StoreBusy if another process uses the file; StoreError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def put(self, letters: Sequence[DeadLetter]) -> None:
        """Append the letters."""
        with self._using():
            whole = self._whole()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                file.truncate(len(whole))
                file.seek(len(whole))
                file.write(b"".join(map(_line, letters)))
                file.flush()
                os.fsync(file.fileno())
            sync_path(self.path.parent)

    def all(self) -> list[DeadLetter]:
        """All letters, by position."""
        with self._using():
            return self._all()

    def remove(self, letters: Sequence[DeadLetter]) -> None:
        """Replace the file by one without the letters."""
        gone = {one.position for one in letters}
        with self._using():
            kept = [one for one in self._all() if one.position not in gone]
            replace_file(self.path, b"".join(map(_line, kept)))

    def close(self) -> None:
        """Unlock the file for other processes."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _whole(self) -> bytes:
        data = self.path.read_bytes() if self.path.exists() else b""
        return data[: data.rfind(b"\n") + 1]

    def _all(self) -> list[DeadLetter]:
        found: dict[Any, DeadLetter] = {}
        for number, line in enumerate(self._whole().splitlines(), 1):
            crc, _, text = line.partition(b" ")
            if crc != b"%08x" % google_crc32c.value(text):
                raise StoreError(
                    f"{self.path}: line {number} is damaged; restore the file, or remove the line "
                    "if you can do without its event"
                )
            letter = DeadLetter.from_json(text)
            found[letter.position] = letter
        return [found[position] for position in sorted(found)]

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        try:
            self._acquire()
            yield
        except (OSError, FormatError) as error:
            raise StoreError(f"{self.path} cannot be used: {error}") from error

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        make_folder(self.path.parent)
        lock = self.path.with_name(self.path.name + ".lock")
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise StoreBusy(f"{self.path} is in use by another process") from error
        self._lock = descriptor


class DatabaseDeadLetters:
    """Dead letters in a table of the application's database, by a driver of the DB-API.

    ``name`` names the consumer, ``connect`` opens a connection, which the store closes.

    Durability: each call is one transaction.
    Raises: StoreError.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        *,
        table: str = "databus_dead_letters",
        paramstyle: str | None = None,
    ) -> None:
        self._consumer = checked_consumer(name)
        self._letters = DeadLetterTable(table)
        self._connect = connect
        self._style = paramstyle
        self.ddl = self._letters.ddl
        """The statement that creates the table, for an account that may."""

    def create_table(self) -> None:
        """Create the table if it is not there."""
        self._do([(self.ddl, ())])

    def put(self, letters: Sequence[DeadLetter]) -> None:
        """Store the letters."""
        self._do(self._letters.putting(self._consumer, letters))

    def all(self) -> list[DeadLetter]:
        """All letters, by position."""
        return letters_of(self._do([self._letters.reading(self._consumer)]))

    def remove(self, letters: Sequence[DeadLetter]) -> None:
        """Delete the letters."""
        self._do(self._letters.removing(self._consumer, letters))

    def _do(self, statements: list[tuple[str, tuple[Any, ...]]]) -> list[tuple[Any, ...]]:
        """The statements in one transaction; returns the rows of the last."""
        rows: list[tuple[Any, ...]] = []
        try:
            with contextlib.closing(self._connect()) as connection:
                style = self._style or paramstyle_of(connection)
                with contextlib.closing(connection.cursor()) as cursor:
                    for sql, values in statements:
                        cursor.execute(with_marks(sql, style), values)
                    if statements and cursor.description:
                        rows = [row_values(row) for row in cursor.fetchall()]
                connection.commit()
        except DatabusError:
            raise
        except Exception as error:
            raise StoreError(
                f"consumer {self._consumer}: the table {self._letters.name} of dead letters could "
                f"not be used: {error!r}. If there is no such table, call create_table(), or "
                "create it with the statement that the store's ddl has."
            ) from error
        return rows


def _line(letter: DeadLetter) -> bytes:
    text = letter.to_json().encode()
    return b"%08x %s\n" % (google_crc32c.value(text), text)
