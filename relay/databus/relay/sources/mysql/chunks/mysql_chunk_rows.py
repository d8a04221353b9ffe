"""Receives a SELECT's rows in blocks of the binary protocol and passes them to the kernel."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from databus.common.compiled.kernels import I64Array
from databus.common.schema.source_schema import Column, Kind
from databus.relay.sources import row_buffers
from databus.relay.sources.mysql.chunks import mysql_chunk_kernels as k
from databus.relay.sources.mysql.protocol.binlog_events import packed_int
from databus.relay.sources.mysql.protocol.mysql_connection import BinaryResult, MySqlConnection
from databus.relay.sources.mysql.rows.column_readers import DATED
from databus.relay.sources.row_buffers import RowSpace

_BLOCK_BYTES = 1 << 20
_SLACK_BYTES = 64  # numbers are loaded as whole words

_INTEGER_BYTES = {1: 1, 2: 2, 13: 2, 3: 4, 9: 4, 8: 8}
_DOUBLE, _TIME = 5, 11
_DATES = (7, 10, 12)
_SIZED = {
    Kind.DECIMAL: k.DECIMAL,
    Kind.BYTES: k.BYTES,
    Kind.UUID: k.BYTES,
    Kind.STRING: k.UTF8,
    Kind.JSON: k.UTF8,
}
_UNSIGNED_FLAG = 32


class RowTextNeeded(Exception):
    """The kernel cannot convert these rows as the reference path does."""


class _Field:
    """A column of the result, with its type in the protocol."""

    def __init__(self, definition: bytes) -> None:
        at = 0
        for _ in range(6):  # catalog, schema, table, its own name, column, its own name
            length, at = packed_int(definition, at)
            at += length
        self.code, flags = struct.unpack_from("<BH", definition, at + 1 + 6)
        self.unsigned = bool(flags & _UNSIGNED_FLAG)

    @property
    def width(self) -> int:
        """Bytes of a value; 0 if each value has a length."""
        return 8 if self.code == _DOUBLE else _INTEGER_BYTES.get(self.code, 0)

    def coded(self, column: Column, null_zero: bool) -> list[int] | None:
        """The kernel's line for it; None if the kernel cannot convert it."""
        kind = column.kind
        op = None
        if self.code in _INTEGER_BYTES and kind is Kind.INT:
            op = k.INTEGER
        elif self.code == 8 and kind is Kind.UINT64:
            op = k.UINT64
        elif self.code == _DOUBLE and kind is Kind.FLOAT:
            op = k.DOUBLE
        elif self.code in _DATES and kind in DATED:
            op = k.DATE if kind is Kind.DATE else k.DATETIME
        elif self.code == _TIME and kind is Kind.TIME_SPAN:
            op = k.TIME
        elif not self.width and self.code not in (*_DATES, _TIME, 4):
            op = _SIZED.get(kind)
        if op is None:
            return None
        zero = int(null_zero and kind in DATED)
        return [op, int(column.nullable), self.width, int(self.unsigned), column.scale, zero]


def read_rows(
    connection: MySqlConnection,
    sql: str,
    columns: Sequence[Column],
    key_indexes: Sequence[int],
    *,
    null_zero: bool,
    max_bytes: int,
) -> tuple[RowSpace, list[Any] | None, bool]:
    """The rows of ``sql``, the last row's values, and whether more rows may follow.

    The first columns of ``sql`` are ``columns``.  The rows end with the block in which they reach
    ``max_bytes``; then more may follow, and the connection is closed.

    Raises:
        RowTextNeeded: the kernel cannot convert a type or a value; the result was read to its end.
        ServerError: the server refuses the statement.
    """
    space = RowSpace()
    with connection.binary_result(sql) as result:
        fields = [_Field(definition) for definition in result.definitions]
        coded = [
            field.coded(column, null_zero)
            for field, column in zip(fields, columns, strict=False)
        ]  # fmt: skip
        if None in coded:
            _drain(result)
            raise RowTextNeeded
        plan: list[list[int]] = [line for line in coded if line is not None]
        plan += [[k.SKIPPED, 1, field.width, 0, 0, 0] for field in fields[len(columns) :]]
        last, is_cut = _receive(
            result, space, np.array(plan, dtype=np.int64), key_indexes, max_bytes
        )
    return space, _values(last, fields) if last else None, is_cut


def _receive(
    result: BinaryResult,
    space: RowSpace,
    plan: I64Array,
    key_indexes: Sequence[int],
    max_bytes: int,
) -> tuple[bytes, bool]:
    """Pack up to ``max_bytes``; the last row's packet or b"", and whether more rows may follow."""
    keys = np.array(key_indexes, dtype=np.int64)
    scratch = np.empty((2, len(plan)), dtype=np.int64)
    limbs = np.empty(k.LIMBS, dtype=np.int64)
    data, start, stop, last = bytearray(_BLOCK_BYTES + _SLACK_BYTES), 0, 0, b""
    while True:
        buf = np.frombuffer(data, dtype=np.uint8)
        begin = start
        start, space.fill, space.count, reason = k.walk_rows(
            buf, start, stop, space.out, space.fill, space.spans, space.count,
            plan, keys, scratch, limbs,
        )  # fmt: skip
        if start > begin:
            last_at = k.last_packet(buf, begin, start)
            last = bytes(memoryview(data)[last_at:start])
        if space.fill >= max_bytes:
            return last, True
        if reason == row_buffers.OUT_FULL:
            size = int.from_bytes(data[start : start + 3], "little")
            space.grow(row_buffers.bytes_of_row(size, len(plan)))
            continue
        if reason == row_buffers.ROW_REFUSED:
            _drain(result, data, start, stop)
            raise RowTextNeeded
        if reason == row_buffers.AT_OTHER and result.ends(memoryview(data)[start:stop]):
            return last, False
        data, start, stop = _more(result, data, start, stop)


def _more(
    result: BinaryResult, data: bytearray, start: int, stop: int
) -> tuple[bytearray, int, int]:
    """Receive once, after the rest of the block."""
    left = stop - start
    if len(data) - left < _BLOCK_BYTES // 2:
        data = data[start:stop] + bytearray(2 * len(data) - left)
    else:
        data[:left] = data[start:stop]
    count = result.receive(memoryview(data)[left : len(data) - _SLACK_BYTES])
    return data, 0, left + count


def _drain(
    result: BinaryResult, data: bytearray | None = None, start: int = 0, stop: int = 0
) -> None:
    """Read the result to its end."""
    if data is None:
        data = bytearray(_BLOCK_BYTES + _SLACK_BYTES)
    while True:
        start = k.skip_rows(np.frombuffer(data, dtype=np.uint8), start, stop)
        if stop - start >= 5 and result.ends(memoryview(data)[start:stop]):
            return
        data, start, stop = _more(result, data, start, stop)


def _values(packet: bytes, fields: Sequence[_Field]) -> list[Any]:
    """The values of a row: numbers, bytes, and dates and times in the server's text form."""
    at = 5 + (len(fields) + 9) // 8
    values: list[Any] = []
    for index, field in enumerate(fields):
        if packet[5 + (index + 2) // 8] >> (index + 2) % 8 & 1:
            values.append(None)
            continue
        if field.code == _DOUBLE:
            values.append(struct.unpack_from("<d", packet, at)[0])
            at += 8
        elif field.width:
            raw = packet[at : at + field.width]
            values.append(int.from_bytes(raw, "little", signed=not field.unsigned))
            at += field.width
        else:
            length, at = packed_int(packet, at)
            raw = packet[at : at + length]
            at += length
            values.append(_moment(raw, field.code) if field.code in (*_DATES, _TIME) else raw)
    return values


def _moment(raw: bytes, code: int) -> str:
    raw = raw.ljust(12, b"\0")
    if code == _TIME:
        negative, days, hours, minutes, seconds, us = struct.unpack("<BIBBBI", raw)
        sign = "-" if negative else ""
        return f"{sign}{days * 24 + hours:02d}:{minutes:02d}:{seconds:02d}.{us:06d}"
    year, month, day, hours, minutes, seconds, us = struct.unpack("<HBBBBBI", raw[:11])
    date = f"{year:04d}-{month:02d}-{day:02d}"
    return date if code == 10 else f"{date} {hours:02d}:{minutes:02d}:{seconds:02d}.{us:06d}"


def key_value(column: Column, value: Any) -> Any:
    """A value of ``read_rows`` in the form of a chunk's ``last_key``."""
    if column.kind is Kind.BYTES:
        return base64.b64encode(value).decode()
    return value.decode() if isinstance(value, bytes) else value
