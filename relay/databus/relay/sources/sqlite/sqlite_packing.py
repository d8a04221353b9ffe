"""Packs SQLite's change log into frames: the kernel's arrays, and the rows that Python packs."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from databus.common.compiled.kernels import I64Array, U8Array
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Kind, SourceSchema
from databus.relay.sources.kernel_rows import KernelRows
from databus.relay.sources.sqlite import sqlite_kernels as k
from databus.relay.sources.sqlite.sqlite_log import key_of, texts_as_bytes

_BLOCK = """SELECT count(*), max(id), group_concat(line, '') FROM (
    SELECT id, id || ' ' || version || ' ' || op || char(10) || coalesce(old, '') || char(10)
        || coalesce(new, '') || char(10) AS line
    FROM databus_log
    WHERE id > ? AND id <= ? AND op <> 'r' AND (version NOT IN ({}) OR op = 't')
    ORDER BY id LIMIT ?)"""
_NEVER = (1 << 63) - 1
_KINDS = {
    Kind.INT: k.INT,
    Kind.FLOAT: k.FLOAT,
    Kind.STRING: k.TEXT,
    Kind.JSON: k.TEXT,
    Kind.BYTES: k.BYTES,
    Kind.NUMERIC: k.NUMERIC,
}


@dataclass(frozen=True, slots=True)
class LogBlock:
    """Rows of the log as text for the kernel; if not ``is_utf8``, for Python alone.

    ``is_last``: the window has no more rows.
    """

    text: bytes
    last_id: int
    is_last: bool
    is_utf8: bool = True


@dataclass(frozen=True, slots=True)
class LogRow:
    """One row of the log, its images as the triggers' JSON."""

    log_id: int
    version: int
    op: str
    old: bytes | None
    new: bytes | None


def read_block(
    connection: sqlite3.Connection,
    after: int,
    upto: int,
    limit: int,
    left_out: Iterable[int] = (),
) -> LogBlock:
    """The log's rows after one id and up to another; fewer than ``limit`` if they are large.

    Rows of the versions in ``passed_over`` are left out, except the record that a table was
    emptied.
    """
    query = _BLOCK.format(", ".join(map(str, left_out)))
    while True:
        try:
            with texts_as_bytes(connection):
                count, last_id, text = connection.execute(query, (after, upto, limit)).fetchone()
        except sqlite3.DataError:
            if limit == 1:
                raise
            limit = max(1, limit // 8)  # the block exceeds SQLite's maximum value length
            continue
        text = text or b""
        last_id = after if last_id is None else int(last_id)
        return LogBlock(text, last_id, count < limit or last_id >= upto, _is_utf8(text))


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


class LogPacker:
    """Runs the kernel over one block after the other.

    Invariants:
        I1. ``AT`` is the offset in the block of the first row that the kernel did not take.

    Owner: the thread that reads the log.
    """

    def __init__(self) -> None:
        self._state: I64Array = np.zeros(k.STATE_COUNT, dtype=np.int64)
        self._text = b""
        self._block: U8Array = np.zeros(0, dtype=np.uint8)
        self._images: U8Array = np.empty(1 << 16, dtype=np.uint8)
        self._out: U8Array = np.empty(1 << 20, dtype=np.uint8)
        self.forget()

    def forget(self) -> None:
        """Remove all versions."""
        self._tables = KernelRows(k.T_FIELDS)
        self._kinds, self._places = KernelRows(2), KernelRows(1)
        self._spans: I64Array = np.zeros((2, 2), dtype=np.int64)

    def learn(self, version: int, schema: SourceSchema) -> None:
        """Let the kernel pack rows of this version."""
        names = [column.name for column in schema.columns]
        line = [0] * k.T_FIELDS
        line[k.T_VERSION], line[k.T_SOURCE] = version, schema.source_id
        line[k.T_SCHEMA] = schema.signed_fingerprint
        line[k.T_COLUMN] = self._kinds.add(
            [(_KINDS.get(column.kind, k.OTHER), int(column.nullable)) for column in schema.columns]
        )
        line[k.T_KEY] = self._places.add([[names.index(name)] for name in schema.key])
        line[k.T_COLUMNS], line[k.T_KEYS] = len(names), len(schema.key)
        line[k.T_NULLABLE_KEY] = int(schema.nullable_key)
        self._tables.add([line])
        if 2 * len(names) > len(self._spans):
            self._spans = np.zeros((2 * len(names), 2), dtype=np.int64)

    def unlearn(self, versions: Container[int]) -> None:
        """Leave rows of these versions to Python again."""
        lines = [line for line in self._tables.rows.tolist() if line[k.T_VERSION] not in versions]
        self._tables = KernelRows(k.T_FIELDS)
        self._tables.add(lines)

    def begin(self, block: LogBlock, after: int, scn: int, commit_us: int) -> None:
        """Set the next block, of the window ``scn``; the log id before its rows is ``after``."""
        self._text, self._block = block.text, np.frombuffer(block.text, dtype=np.uint8)
        state = self._state
        state[k.AT] = state[k.FILL] = 0
        state[k.LAST_ID], state[k.SCN], state[k.COMMIT_US] = after, scn, commit_us

    @property
    def last_id(self) -> int:
        """The id of the row that was packed last."""
        return int(self._state[k.LAST_ID])

    def run(self, seq: int, stop_id: int | None) -> tuple[bytes, int, bool]:
        """The frames of the next rows, the first with ``seq``; how many; whether a row is left.

        The frames end with the log id ``stop_id``.
        """
        state, parts = self._state, []
        state[k.SEQ], state[k.EVENTS] = seq, 0
        state[k.STOP_ID] = _NEVER if stop_id is None else stop_id
        while True:
            why = k.pack_log(
                self._block, state, self._tables.rows, self._kinds.rows,
                self._places.rows.reshape(-1), self._images, self._spans, self._out,
            )  # fmt: skip
            parts.append(self._out[: int(state[k.FILL])].tobytes())
            state[k.FILL] = 0
            if why != k.FULL:
                return b"".join(parts), int(state[k.EVENTS]), why == k.STOPPED
            if not parts[-1]:
                self._images = np.empty(2 * len(self._images), dtype=np.uint8)
                self._out = np.empty(2 * len(self._out), dtype=np.uint8)

    @property
    def has_more(self) -> bool:
        """Whether a row of the block is left."""
        return int(self._state[k.AT]) < len(self._text)

    def take_row(self) -> LogRow:
        """The row that Python must pack; the kernel continues after it."""
        cursor, lines = int(self._state[k.AT]), []
        for _ in range(3):
            end = self._text.index(b"\n", cursor)
            lines.append(self._text[cursor:end])
            cursor = end + 1
        log_id, version, op = lines[0].decode().split()
        self._state[k.AT], self._state[k.LAST_ID] = cursor, int(log_id)
        return LogRow(int(log_id), int(version), op, lines[1] or None, lines[2] or None)


def add_schema_change(window: WindowBuilder, schema: SourceSchema) -> None:
    """The frame that announces a table's new schema."""
    window.control(
        Op.SCHEMA_CHANGE,
        source=schema.source_id,
        schema_fp=schema.fingerprint,
        after=json.dumps(schema.to_json()).encode(),
    )


def add_event(
    window: WindowBuilder,
    schema: SourceSchema,
    op: str,
    before: list[Any] | None,
    after: list[Any] | None,
) -> None:
    """One logged change as one event; an update of the key as a delete and an insert."""
    if op == "t":
        window.event(Op.TRUNCATE, schema.source_id, schema.fingerprint, b"")
        return
    old_key = None if before is None else key_of(schema, before)
    new_key = None if after is None else key_of(schema, after)
    source, fingerprint = schema.source_id, schema.fingerprint
    old_row = None if before is None else schema.encode_row(before)
    new_row = None if after is None else schema.encode_row(after)
    if old_key is not None and new_key is not None and old_key == new_key:
        window.event(Op.UPDATE, source, fingerprint, new_key, before=old_row, after=new_row)
        return
    if old_key is not None:
        window.event(Op.DELETE, source, fingerprint, old_key, before=old_row)
    if new_key is not None:
        window.event(Op.INSERT, source, fingerprint, new_key, after=new_row)
