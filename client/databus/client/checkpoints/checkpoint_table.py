"""The table of checkpoints in an application's database: its statements, and what answers mean.

Pure: a method gives statements one after another and receives the answer of each.  Which driver
runs them is the matter of ``database_checkpoints``.  The statements are the same for PostgreSQL,
MySQL, MariaDB and SQLite; only the mark of a parameter differs.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from databus.common.checkpoint import Checkpoint, decode, encode
from databus.common.errors import CheckpointMoved, ConfigError, UsageError

TABLE = "databus_checkpoints"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_$]*(\.[A-Za-z_][A-Za-z0-9_$]*)?")
_LONGEST_NAME = 190
_DDL = """\
CREATE TABLE IF NOT EXISTS {table} (
    consumer VARCHAR(190) NOT NULL PRIMARY KEY,
    owner VARCHAR(190) NOT NULL,
    revision BIGINT NOT NULL,
    checkpoint TEXT,
    updated_us BIGINT NOT NULL
)"""
_COLUMNS = "consumer, owner, revision, checkpoint, updated_us"

Statement = tuple[str, tuple[Any, ...]]
"""SQL with a ? for each parameter, and the parameters."""


class Answer(NamedTuple):
    """What a database answers to a statement."""

    row_count: int
    rows: list[tuple[Any, ...]]


T = TypeVar("T")
Steps = Generator[Statement, Answer, T]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A row of the table."""

    consumer: str
    owner: str
    """The process that uses the name, as host:pid:number; empty after ``set``."""
    revision: int
    """How often the checkpoint has been changed."""
    checkpoint: Checkpoint | None
    """None if the consumer has not finished anything yet."""
    updated_us: int
    """When the checkpoint was stored, in microseconds since 1970."""


class CheckpointTable:
    """One row for each consumer.

    Invariants:
        I1. A row belongs to one owner, the last one that claimed it.  No other changes it, but
            for ``set``, after which it belongs to none.
        I2. Each change of the checkpoint adds 1 to the revision, and is made only with the
            revision before it.  So a transaction that is applied again is refused, and one whose
            COMMIT was made although it was reported as failed is noticed.

    Raises: ConfigError for a name that is not an SQL name.
    """

    def __init__(self, name: str = TABLE) -> None:
        self.name = checked_table(name)
        self.ddl = _DDL.format(table=name)

    def create(self) -> Steps[None]:
        """Create the table if it is not there."""
        yield self.ddl, ()

    def rows(self) -> Steps[list[StoredCheckpoint]]:
        """All rows, by consumer."""
        answer = yield f"SELECT {_COLUMNS} FROM {self.name} ORDER BY consumer", ()
        return [_stored(row) for row in answer.rows]

    def row(self, consumer: str) -> Steps[StoredCheckpoint | None]:
        """The row of a consumer.

        Raises:
            ConfigError: the database takes another consumer's name for this one.
        """
        answer = yield f"SELECT {_COLUMNS} FROM {self.name} WHERE consumer = ?", (consumer,)
        if not answer.rows:
            return None
        found = _stored(answer.rows[0])
        if found.consumer != consumer:
            raise ConfigError(
                f"the database takes the consumer names {consumer!r} and {found.consumer!r} for "
                f"equal (table {self.name}): choose names that differ by more than their case"
            )
        return found

    def claim(self, consumer: str, owner: str) -> Steps[StoredCheckpoint]:
        """Make ``owner`` the only one that may change the row; makes the row if there is none."""
        # The update waits for a transaction of the owner before; the row is read after it.
        update = f"UPDATE {self.name} SET owner = ? WHERE consumer = ?"
        answer = yield update, (owner, consumer)
        if not answer.row_count:
            yield self._insert(consumer, owner, 0, None)
        found = yield from self.row(consumer)
        if found is None or found.owner != owner:
            raise _moved(self.name, consumer, found)
        return found

    def hold(self, consumer: str, owner: str) -> Steps[None]:
        """Lock the row, so that a claim waits for this transaction.

        Raises:
            CheckpointMoved: ``owner`` does not have the row any more.
        """
        update = f"UPDATE {self.name} SET owner = ? WHERE consumer = ? AND owner = ?"
        answer = yield update, (owner, consumer, owner)
        if not answer.row_count:
            raise _moved(self.name, consumer, (yield from self.row(consumer)))

    def put(self, before: StoredCheckpoint, checkpoint: Checkpoint) -> Steps[StoredCheckpoint]:
        """Replace ``before`` by ``checkpoint``.

        Raises:
            CheckpointMoved: the row is not as ``before``.
            UsageError: the checkpoint lies before the stored one.
        """
        old = before.checkpoint
        if old and old.clock == checkpoint.clock and checkpoint.position < old.position:
            raise UsageError(
                f"consumer {before.consumer}: the checkpoint {checkpoint.position} lies before "
                f"the stored one {old.position}; to go back use the store's set()"
            )
        revision, now_us = before.revision + 1, _now_us()
        answer = yield (
            f"UPDATE {self.name} SET revision = ?, checkpoint = ?, updated_us = ? "
            "WHERE consumer = ? AND owner = ? AND revision = ?",
            (
                revision,
                encode(checkpoint),
                now_us,
                before.consumer,
                before.owner,
                before.revision,
            ),
        )
        if answer.row_count != 1:
            raise _moved(self.name, before.consumer, (yield from self.row(before.consumer)), before)
        return StoredCheckpoint(before.consumer, before.owner, revision, checkpoint, now_us)

    def set(self, consumer: str, checkpoint: Checkpoint) -> Steps[None]:
        """Store a checkpoint whatever is there; the process that uses the row loses it."""
        answer = yield (
            f"UPDATE {self.name} SET owner = '', revision = revision + 1, checkpoint = ?, "
            "updated_us = ? WHERE consumer = ?",
            (encode(checkpoint), _now_us(), consumer),
        )
        if not answer.row_count:
            yield self._insert(consumer, "", 1, encode(checkpoint))

    def _insert(self, consumer: str, owner: str, revision: int, text: str | None) -> Statement:
        return (
            f"INSERT INTO {self.name} ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)",
            (consumer, owner, revision, text, _now_us()),
        )


def checked_table(name: str) -> str:
    """The name of a table.

    Raises:
        ConfigError: it is not an SQL name.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"table={name!r} is not TABLE or SCHEMA.TABLE in plain letters")
    return name


def checked_consumer(name: str) -> str:
    """The name of a consumer.

    Raises:
        ConfigError: it is empty or longer than its column.
    """
    if not 0 < len(name) <= _LONGEST_NAME:
        raise ConfigError(
            f"the consumer's name {name!r} does not have 1 to {_LONGEST_NAME} letters"
        )
    return name


def new_owner() -> str:
    """A name for this use of a row that no other use has."""
    return f"{socket.gethostname()[:120]}:{os.getpid()}:{secrets.token_hex(8)}"


def with_marks(sql: str, paramstyle: str) -> str:
    """The statement with a driver's marks for its parameters.

    Raises:
        ConfigError: the style is none of qmark, format, pyformat and numeric_dollar.
    """
    if paramstyle == "qmark":
        return sql
    if paramstyle in ("format", "pyformat"):
        return sql.replace("?", "%s")
    if paramstyle == "numeric_dollar":
        first, *others = sql.split("?")
        return first + "".join(f"${number}{part}" for number, part in enumerate(others, start=1))
    raise ConfigError(
        f"the driver's paramstyle is {paramstyle!r}; checkpoints need qmark, format or pyformat"
    )


def _stored(row: tuple[Any, ...]) -> StoredCheckpoint:
    consumer, owner, revision, text, updated_us = row
    checkpoint = None if text is None else decode(text)
    return StoredCheckpoint(consumer, owner, int(revision), checkpoint, int(updated_us))


def _moved(
    table: str,
    consumer: str,
    found: StoredCheckpoint | None,
    before: StoredCheckpoint | None = None,
) -> CheckpointMoved:
    if found is None:
        why = "its row is gone"
    elif before is not None and found.owner == before.owner:
        why = (
            f"it is at revision {found.revision}, and this transaction continues from "
            f"{before.revision}: an earlier transaction was committed although it was reported "
            "as failed, or put() was called twice before the client was notified"
        )
    elif not found.owner:
        why = "it was set by an operator"
    else:
        why = f"the process {found.owner} (host:pid) has taken the consumer over"
    return CheckpointMoved(
        f"the checkpoint of consumer {consumer} in {table} is not this process's any more: {why}. "
        "Roll the transaction back."
    )


def _now_us() -> int:
    return time.time_ns() // 1000
