"""Converts the DataRow messages of a chunk to Avro keys and rows, without Python per row.

Values have the text form of the stream, and the same functions convert them; a few types come in
binary form, which costs the server less.  ``walk_rows`` stops before a row that it cannot convert
exactly as the reference path (``row_codec.py``) does, and before a text that is invalid in its
encoding.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import COMPILED, I64Array, U8Array, i64
from databus.relay.sources.postgres.kernels.binary_value_kernels import TEXT, put_binary
from databus.relay.sources.postgres.kernels.pgoutput_kernels import u32
from databus.relay.sources.postgres.kernels.text_value_kernels import put_value
from databus.relay.sources.row_buffers import (
    AT_END,
    AT_OTHER,
    OUT_FULL,
    ROW_REFUSED,
    add_span,
    bytes_of_row,
    has_space,
)

# columns: a row for each column.  FORM is the form of its values.
KIND, NULLABLE, SCALE, FORM = range(4)


@kernels.jit
def walk_rows(
    buf: U8Array,
    at: int,
    stop: int,
    out: U8Array,
    out_at: int,
    spans: I64Array,
    count: int,
    columns: I64Array,
    keys: I64Array,
    fields: I64Array,
) -> tuple[int, int, int, int]:
    """Pack the rows of ``buf[at:stop]``, whole messages, into ``out`` from ``out_at`` on.

    ``spans`` has a line for each row, the next one is ``count``; ``fields`` is scratch of two
    lines.  Returns (where in buf it stopped, where out ends, rows so far, why it stopped).
    """
    while at < stop:
        end = at + 1 + u32(buf, at + 1)
        if buf[at] != 68:  # D
            return at, out_at, count, AT_OTHER
        need_bytes = bytes_of_row(end - at, len(columns))
        if not has_space(out, out_at, spans, count, need_bytes):
            return at, out_at, count, OUT_FULL
        if not _fields(buf, at + 5, end, len(columns), fields):
            return at, out_at, count, ROW_REFUSED
        middle = _key(buf, out, out_at, columns, keys, fields)
        if middle < 0:
            return at, out_at, count, ROW_REFUSED
        row_end = _row(buf, out, middle, columns, fields)
        if row_end < 0:
            return at, out_at, count, ROW_REFUSED
        count = add_span(spans, count, out_at, middle, row_end)
        out_at, at = row_end, end
    return at, out_at, count, AT_END


@kernels.jit
def last_row(buf: U8Array, at: int, stop: int) -> int:
    """The offset of the last message in ``buf[at:stop]``, which has at least one whole message."""
    found = at
    while at < stop:
        found = at
        at += 1 + u32(buf, at + 1)
    return found


@kernels.jit
def _fields(buf: U8Array, at: int, end: int, count: int, fields: I64Array) -> bool:
    if at + 2 > end or (i64(buf[at]) << 8 | i64(buf[at + 1])) != count:
        return False
    at += 2
    for index in range(count):
        if at + 4 > end:
            return False
        length = u32(buf, at)
        at += 4
        if length == 0xFFFFFFFF:
            length = -1
        elif at + length > end:
            return False
        fields[0, index] = at
        fields[1, index] = length
        at += max(length, 0)
    return True


@kernels.jit
def _key(
    buf: U8Array, out: U8Array, at: int, columns: I64Array, keys: I64Array, fields: I64Array
) -> int:
    for number in range(len(keys)):
        index = keys[number]
        if fields[1, index] < 0:
            return -1
        at = _value(buf, fields[0, index], fields[1, index], columns, index, out, at)
        if at < 0:
            return -1
    return at


@kernels.jit
def _row(buf: U8Array, out: U8Array, at: int, columns: I64Array, fields: I64Array) -> int:
    for index in range(len(columns)):
        length = fields[1, index]
        if columns[index, NULLABLE]:
            out[at] = 0 if length < 0 else 2
            at += 1
        elif length < 0:
            return -1
        if length >= 0:
            at = _value(buf, fields[0, index], length, columns, index, out, at)
            if at < 0:
                return -1
    return at


@kernels.jit
def _value(
    buf: U8Array, start: int, length: int, columns: I64Array, index: int, out: U8Array, at: int
) -> int:
    """Write one value, not null; returns the offset after it, or -1."""
    form = columns[index, FORM]
    if form == TEXT:
        kind, scale = columns[index, KIND], columns[index, SCALE]
        return i64(put_value(buf, start, length, kind, scale, out, at))
    return i64(put_binary(buf, start, length, form, columns[index, SCALE], out, at))


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache."""
    if not COMPILED:
        return
    numbers = np.zeros((1, 4), dtype=np.int64)
    nothing = np.frombuffer(bytearray(8), dtype=np.uint8)
    walk_rows(
        nothing, 0, 0, nothing, 0, numbers, 0, numbers, numbers[0], np.zeros((2, 1), dtype=np.int64)
    )  # fmt: skip
    last_row(nothing, 0, 0)
