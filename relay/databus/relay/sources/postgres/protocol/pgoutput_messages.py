"""Reads the messages of pgoutput, protocol version 1.

Each function reads one message's body (without its type byte) and raises FormatError for any
other bytes.  Source: PostgreSQL manual, "Logical Replication Message Formats".
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TypeAlias

from databus.common.errors import FormatError
from databus.common.schema.source_names import join_source

POSTGRES_EPOCH_US = 946_684_800_000_000
"""2000-01-01, PostgreSQL's own epoch, in microseconds since 1970."""

_BEGIN = struct.Struct("!QqI")
_COMMIT = struct.Struct("!BQQq")
_XLOG = struct.Struct("!QQq")
_KEEPALIVE = struct.Struct("!QqB")
_INT = struct.Struct("!I")
_SHORT = struct.Struct("!H")
_COLUMN = struct.Struct("!Ii")
_TRUNCATE = struct.Struct("!IB")

XLOG_HEADER_BYTES = _XLOG.size
_KIND = 6 + XLOG_HEADER_BYTES
HEAD_BYTES = _KIND + 5
"""The size of a CopyData message's head, which names the changed table."""


class Unchanged(enum.Enum):
    """The mark of a TOAST value that an update did not change."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


Value: TypeAlias = "bytes | Unchanged | None"


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of a transaction; ``commit_lsn`` is where its commit record starts."""

    commit_lsn: int
    commit_us: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a transaction: start and end of its commit record."""

    commit_lsn: int
    end_lsn: int
    commit_us: int


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column in the stream's description."""

    name: str
    type_oid: int
    modifier: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A table at this point of the stream; ``identity`` is d, n, f or i."""

    oid: int
    source: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """A row change: ``old_kind`` is whether ``old`` is a key (K) or the whole row (O)."""

    oid: int
    old_kind: str = ""
    old: tuple[Value, ...] = ()
    new: tuple[Value, ...] | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    """A TRUNCATE of tables."""

    oids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Everything committed before ``wal_end`` has been sent."""

    wal_end: int
    reply_asked: bool


def read_begin(body: bytes) -> Begin:
    """Message B."""
    lsn, commit_us, xid = _unpack(_BEGIN, body, "Begin")
    return Begin(lsn, commit_us + POSTGRES_EPOCH_US, xid)


def read_commit(body: bytes) -> Commit:
    """Message C."""
    _, lsn, end_lsn, commit_us = _unpack(_COMMIT, body, "Commit")
    return Commit(lsn, end_lsn, commit_us + POSTGRES_EPOCH_US)


def read_keepalive(body: bytes) -> Keepalive:
    """Message k of the replication protocol."""
    wal_end, _, reply = _unpack(_KEEPALIVE, body, "keepalive")
    return Keepalive(wal_end, bool(reply))


def read_relation(body: bytes, encoding: str = "utf-8") -> Relation:
    """Message R; ``encoding`` is that of the names."""
    try:
        (oid,) = _INT.unpack_from(body)
        schema, at = _string(body, 4, encoding)
        table, at = _string(body, at, encoding)
        identity = chr(body[at])
        (count,) = _SHORT.unpack_from(body, at + 1)
        at += 3
        columns = []
        for _ in range(count):
            is_key = bool(body[at] & 1)
            name, at = _string(body, at + 1, encoding)
            type_oid, modifier = _COLUMN.unpack_from(body, at)
            at += _COLUMN.size
            columns.append(RelationColumn(name, type_oid, modifier, is_key))
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(f"a Relation message of {len(body)} bytes is cut: {error}") from None
    # An empty name means pg_catalog.
    return Relation(oid, join_source(schema or "pg_catalog", table), identity, tuple(columns))


def read_insert(body: bytes) -> Change:
    """Message I."""
    try:
        (oid,) = _INT.unpack_from(body)
        new, at = _tuple_after(body, 4, b"N")
    except (struct.error, IndexError) as error:
        raise FormatError(f"an Insert message of {len(body)} bytes is cut: {error}") from None
    _at_end(body, at, "Insert")
    return Change(oid, new=new)


def read_update(body: bytes) -> Change:
    """Message U."""
    try:
        (oid,) = _INT.unpack_from(body)
        old_kind, old, at = "", tuple[Value, ...](), 4
        if body[4:5] in (b"K", b"O"):
            old_kind = chr(body[4])
            old, at = _tuple_after(body, 4, b"KO")
        new, at = _tuple_after(body, at, b"N")
    except (struct.error, IndexError) as error:
        raise FormatError(f"an Update message of {len(body)} bytes is cut: {error}") from None
    _at_end(body, at, "Update")
    return Change(oid, old_kind, old, new)


def read_delete(body: bytes) -> Change:
    """Message D."""
    try:
        (oid,) = _INT.unpack_from(body)
        old, at = _tuple_after(body, 4, b"KO")
        old_kind = chr(body[4])
    except (struct.error, IndexError) as error:
        raise FormatError(f"a Delete message of {len(body)} bytes is cut: {error}") from None
    _at_end(body, at, "Delete")
    return Change(oid, old_kind, old)


def read_truncate(body: bytes) -> Truncate:
    """Message T."""
    if len(body) < _TRUNCATE.size:
        raise FormatError(f"a Truncate message of {len(body)} bytes is cut")
    count, _ = _TRUNCATE.unpack_from(body)
    if len(body) != _TRUNCATE.size + 4 * count:
        raise FormatError(f"a Truncate message of {len(body)} bytes names {count} tables")
    return Truncate(struct.unpack_from(f"!{count}I", body, _TRUNCATE.size))


def _unpack(layout: struct.Struct, body: bytes, what: str) -> tuple[int, ...]:
    if len(body) != layout.size:
        raise FormatError(f"a {what} message has {len(body)} bytes, expected {layout.size}")
    return layout.unpack(body)


def _string(body: bytes, at: int, encoding: str) -> tuple[str, int]:
    end = body.index(0, at)
    # An unreadable name must not end the stream.
    return body[at:end].decode(encoding, "backslashreplace"), end + 1


def _tuple_after(body: bytes, at: int, marks: bytes) -> tuple[tuple[Value, ...], int]:
    """The TupleData after one of the marks, and its end."""
    if body[at] not in marks:
        raise FormatError(f"byte {at} of a row message is {body[at]:#x}, expected {marks!r}")
    (count,) = _SHORT.unpack_from(body, at + 1)
    at += 3
    values = list[Value]()
    for _ in range(count):
        mark = body[at]
        at += 1
        if mark == 0x74:  # t
            (length,) = _INT.unpack_from(body, at)
            at += 4
            if at + length > len(body):
                raise FormatError(f"a value of {length} bytes at {at} of {len(body)} is cut")
            values.append(body[at : at + length])
            at += length
        elif mark == 0x6E:  # n
            values.append(None)
        elif mark == 0x75:  # u
            values.append(UNCHANGED)
        else:
            raise FormatError(f"a column's mark is {mark:#x}, expected t, n or u")
    return tuple(values), at


def _at_end(body: bytes, at: int, what: str) -> None:
    if at != len(body):
        raise FormatError(f"a {what} message ends at byte {at} of {len(body)}")


def changed_table(head: bytes) -> tuple[int, ...] | None:
    """The oid of the table that a CopyData message with this head changes.

    Empty for a TRUNCATE, which names its tables later; None if it changes no table.
    """
    kind = head[_KIND : _KIND + 1]
    if head[:1] != b"d" or head[5:6] != b"w" or kind not in (b"I", b"U", b"D", b"T"):
        return None
    return () if kind == b"T" else (int.from_bytes(head[_KIND + 1 :], "big"),)
