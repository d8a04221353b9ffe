"""Builds pgoutput messages as the server sends them, for tests without one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from databus.relay.sources.postgres.protocol.pgoutput_messages import (
    POSTGRES_EPOCH_US,
    UNCHANGED,
    Value,
)

Column = tuple[str, int, int, bool]  # name, type oid, modifier, part of the replica identity


def begin(lsn: int, xid: int = 7, commit_us: int = POSTGRES_EPOCH_US + 5) -> bytes:
    return b"B" + struct.pack("!QqI", lsn, commit_us - POSTGRES_EPOCH_US, xid)


def commit(lsn: int, commit_us: int = POSTGRES_EPOCH_US + 5) -> bytes:
    return b"C" + struct.pack("!BQQq", 0, lsn, lsn + 48, commit_us - POSTGRES_EPOCH_US)


def relation(oid: int, source: str, columns: Sequence[Column], identity: str = "d") -> bytes:
    schema, _, table = source.partition(".")
    body = struct.pack("!I", oid) + f"{schema}\0{table}\0{identity}".encode()
    body += struct.pack("!H", len(columns))
    for name, type_oid, modifier, is_key in columns:
        body += bytes([is_key]) + f"{name}\0".encode() + struct.pack("!Ii", type_oid, modifier)
    return b"R" + body


def row(values: Sequence[Value]) -> bytes:
    body = struct.pack("!H", len(values))
    for value in values:
        if value is None:
            body += b"n"
        elif value is UNCHANGED:
            body += b"u"
        else:
            body += b"t" + struct.pack("!I", len(value)) + value
    return body


def insert(oid: int, new: Sequence[Value]) -> bytes:
    return b"I" + struct.pack("!I", oid) + b"N" + row(new)


def update(
    oid: int, new: Sequence[Value], old: Sequence[Value] | None = None, old_kind: str = "O"
) -> bytes:
    old_part = old_kind.encode() + row(old) if old is not None else b""
    return b"U" + struct.pack("!I", oid) + old_part + b"N" + row(new)


def delete(oid: int, old: Sequence[Value], old_kind: str = "K") -> bytes:
    return b"D" + struct.pack("!I", oid) + old_kind.encode() + row(old)


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack("!IB", len(oids), 0) + struct.pack(f"!{len(oids)}I", *oids)


def copy_data(*messages: bytes) -> bytes:
    """The messages as CopyData of XLogData, as they come from the socket."""
    block = b""
    for message in messages:
        content = b"w" + struct.pack("!QQq", 0, 0, 0) + message
        block += b"d" + struct.pack("!I", len(content) + 4) + content
    return block
