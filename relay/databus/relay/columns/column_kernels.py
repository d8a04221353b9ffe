"""Rules for columns applied to frames by compiled code: the hot path of column_rewriting.py.

``edit_frames`` copies frames from one buffer to another; rows of tables that have a plan are
walked value by value, and values are copied, replaced or left out.  record_edits.py is the
reference implementation, and tests compare the two.

Values that are to be hashed take two calls.  The first has no ``hashes``: it writes to ``texts``
the texts to be hashed, back to back, their count to ``ends[0]`` and their ends after it.
The second has the hashes in their order.  ``ends[0]`` is 0 before each.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled.avro_row_kernels import varint
from databus.common.compiled.kernels import I64Array, U8Array, copy, i64, jit
from databus.common.compiled.xxh3 import xxh3_64
from databus.common.frame.header_layout import (
    FIRST_CONTROL_OP,
    HEADER_BYTES,
    PARTIAL,
    commit_us_of,
    flags_of,
    key_hash_of,
    length_of,
    op_of,
    parts_of,
    position_of,
    schema_of,
    seal,
    source_of,
)
from databus.relay.sources.avro_kernels import put_long

# tables: a line for each schema that has a plan.
T_BEFORE, T_AFTER, T_COLUMN, T_COLUMNS, T_LEFT, T_KEY, T_KEYS, T_KEY_HASHED, T_FIELDS = range(9)
# columns: a line for each column of a row, and for each of a key.
C_SHAPE, C_NULLABLE, C_ACTION, C_A, C_B, C_FIELDS = range(6)

NUMBER_ROOM = 24
HASH_BYTES = 64
"""A hash is so many hexadecimal digits."""


@jit
def _put_digits(out: U8Array, to: int, value: int) -> int:
    """Write a number in decimal digits; where they end."""
    if value < 0:
        out[to] = 45
        to += 1
    # Without an absolute value: the smallest number has none.
    rest, end = value, to
    while True:
        end += 1
        rest = (rest + (10 - rest % 10) % 10) // 10 if value < 0 else rest // 10
        if rest == 0:
            break
    rest = value
    for bit in range(end - 1, to - 1, -1):
        digit = (10 - rest % 10) % 10 if value < 0 else rest % 10
        rest = (rest + digit) // 10 if value < 0 else rest // 10
        out[bit] = 48 + digit
    return end


@jit
def _value_end(buf: U8Array, at: int, stop: int, shape: int) -> tuple[int, int]:
    """Where the content of the value at ``at`` begins and where it ends; -1 if not in bounds."""
    if shape == 0:  # a number
        _, end = varint(buf, at, stop)
        return at, end
    begin, end = at, at + 1
    if shape == 2:
        end = at + 8
    elif shape == 3:
        length, begin = varint(buf, at, stop)
        if begin < 0 or length < 0 or length > stop - begin:
            return at, -1
        end = begin + length
    return (begin, end) if end <= stop else (at, -1)


@jit
def _hash(
    buf: U8Array, begin: int, end: int, shape: int, out: U8Array, to: int,
    hashes: U8Array, texts: U8Array, ends: I64Array,
) -> int:  # fmt: skip
    """Write a value's hash as an Avro string; where it ends.

    Without ``hashes`` room is left for it, and what is to be hashed goes to ``texts``.
    """
    to = put_long(out, to, HASH_BYTES)
    number = ends[0]
    ends[0] = number + 1
    if len(hashes):
        copy(out, to, hashes, HASH_BYTES * number, HASH_BYTES)
        return to + HASH_BYTES
    at = ends[number] if number else i64(0)
    if shape == 0:
        value, _ = varint(buf, begin, end)
        at = _put_digits(texts, at, value)
    elif shape == 1:
        word = i64(0x65757274) if buf[begin] else i64(0x65736C6166)  # true, false
        for index in range(4 if buf[begin] else 5):
            texts[at] = word >> 8 * index & 0xFF
            at += 1
    else:
        copy(texts, at, buf, begin, end - begin)
        at += end - begin
    ends[number + 1] = at
    return to + HASH_BYTES


@jit
def _cut(buf: U8Array, begin: int, end: int, count: int) -> int:
    """Where the first ``count`` characters of a text in UTF-8 end."""
    for at in range(begin, end):
        if buf[at] & 0xC0 != 0x80:
            if count == 0:
                return at
            count -= 1
    return end


@jit
def edit_record(
    buf: U8Array, at: int, stop: int, out: U8Array, to: int, columns: I64Array, first: int,
    count: int, blob: U8Array, hashes: U8Array, texts: U8Array, ends: I64Array,
) -> int:  # fmt: skip
    """Write the record ``buf[at:stop]`` by its columns' plans; where it ends, or -1."""
    copied = at  # from here on nothing has been copied yet: what is copied goes out in runs
    for line in range(first, first + count):
        action = columns[line, 2]
        nullable = columns[line, 1] != 0
        start = at
        is_null = False
        if nullable:
            if at >= stop or buf[at] & 0xFD:
                return -1
            is_null = buf[at] == 0
            at += 1
        shape = columns[line, 0]
        begin = at
        if not is_null:
            begin, at = _value_end(buf, at, stop, shape)
            if at < 0:
                return -1
        if action == 0:
            continue
        copy(out, to, buf, copied, start - copied)
        to += start - copied
        copied = at
        if action == 1:
            continue
        if is_null or action == 4:
            out[to] = 0
            to += 1
            continue
        if nullable:
            out[to] = 2
            to += 1
        if action == 2:
            to = _hash(buf, begin, at, shape, out, to, hashes, texts, ends)
        elif action == 3:
            copy(out, to, blob, columns[line, 3], columns[line, 4])
            to += columns[line, 4]
        else:
            end = _cut(buf, begin, at, columns[line, 3])
            to = put_long(out, to, end - begin)
            copy(out, to, buf, begin, end - begin)
            to += end - begin
    copy(out, to, buf, copied, at - copied)
    to += at - copied
    return to if at == stop else -1


@jit
def _edit_bitmap(
    buf: U8Array, at: int, length: int, out: U8Array, to: int, columns: I64Array, first: int,
    count: int, left: int,
) -> int:  # fmt: skip
    """Write the bitmap of absent columns for the remaining columns; nothing if none is absent."""
    size = (left + 7) >> 3
    for index in range(size):
        out[to + index] = 0
    found = False
    bit = 0
    for index in range(count):
        if columns[first + index, 2] == 1:
            continue
        if index >> 3 < length and buf[at + (index >> 3)] >> (index & 7) & 1:
            out[to + (bit >> 3)] |= np.uint8(1 << (bit & 7))
            found = True
        bit += 1
    return to + size if found else to


@jit
def _find(tables: I64Array, fingerprint: int, guess: int) -> int:
    """The line of a schema's plan, -1 if it has none; ``guess`` is tried first."""
    if guess >= 0 and tables[guess, 0] == fingerprint:
        return guess
    for line in range(len(tables)):
        if tables[line, 0] == fingerprint:
            return line
    return -1


@jit
def _edit_frame(
    buf: U8Array, frame: int, out: U8Array, to: int, tables: I64Array,
    table: int, columns: I64Array, blob: U8Array, hashes: U8Array, texts: U8Array,
    ends: I64Array,
) -> int:  # fmt: skip
    """Write a row change by its table's plan; where the frame ends, or -1."""
    key_len, before_len, after_len, absent_len = parts_of(buf, frame)
    flags = flags_of(buf, frame)
    first, count = tables[table, 2], tables[table, 3]
    at = frame + HEADER_BYTES
    start = to + HEADER_BYTES
    end = start
    if key_len and tables[table, 7]:
        end = edit_record(
            buf, at, at + key_len, out, start, columns, tables[table, 5], tables[table, 6],
            blob, hashes, texts, ends,
        )  # fmt: skip
        if end < 0:
            return -1
    else:
        copy(out, start, buf, at, key_len)
        end = start + key_len
    key_end = end
    at += key_len
    before_end = end
    for image, length in enumerate((before_len, after_len)):
        if flags >> image & 1:
            end = edit_record(
                buf, at, at + length, out, end, columns, first, count, blob, hashes, texts,
                ends,
            )  # fmt: skip
            if end < 0:
                return -1
        at += length
        if image == 0:
            before_end = end
    after_end = end
    if absent_len:
        end = _edit_bitmap(
            buf, at, absent_len, out, end, columns, first, count, tables[table, 4]
        )  # fmt: skip
    if end == after_end:
        flags &= ~PARTIAL
    hi, lo, seq = position_of(buf, frame)
    key_hash = i64(xxh3_64(out, start, key_end)) if key_len else key_hash_of(buf, frame)
    return seal(
        out, to, end, op_of(buf, frame), flags, i64(hi) << 32 | i64(lo), seq,
        source_of(buf, frame), key_hash, tables[table, 1], commit_us_of(buf, frame),
        key_end - start, before_end - key_end, after_end - before_end, end - after_end,
    )  # fmt: skip


@jit
def edit_frames(
    buf: U8Array, offsets: I64Array, out: U8Array, to: int, tables: I64Array,
    columns: I64Array, blob: U8Array, hashes: U8Array, texts: U8Array, ends: I64Array,
    dropped_ops: int,
) -> int:  # fmt: skip
    """Write the frames at ``offsets`` of ``buf`` to ``out`` from ``to`` on.

    ``dropped_ops`` has a bit for each op that is left
    out.  Returns where they end, or -1 - the index of a frame whose row is damaged.
    """
    table = -1
    for index in range(len(offsets)):
        frame = offsets[index]
        op = op_of(buf, frame)
        length = length_of(buf, frame)
        found = -1
        if op < FIRST_CONTROL_OP:
            if dropped_ops >> op & 1:
                continue
            found = _find(tables, schema_of(buf, frame), table)
        if found < 0:
            copy(out, to, buf, frame, length)
            to += length
            continue
        table = found
        to = _edit_frame(buf, frame, out, to, tables, table, columns, blob, hashes, texts, ends)
        if to < 0:
            return -1 - index
    return to


@jit
def edit_rows(
    buf: U8Array, spans: I64Array, out: U8Array, edited: I64Array, tables: I64Array, table: int,
    columns: I64Array, blob: U8Array, hashes: U8Array, texts: U8Array, ends: I64Array,
) -> int:  # fmt: skip
    """Write the rows of a chunk that lie at ``spans`` of ``buf`` (row_buffers.py), all of one
    table.

    Their new bounds go to ``edited``.  Returns where they end, or -1 - the number of a row that
    is damaged.
    """
    to = 0
    for row in range(len(spans)):
        start, stop = spans[row, 0], spans[row, 1]
        edited[row, 0] = to
        if tables[table, 7]:
            to = edit_record(
                buf, start, stop, out, to, columns, tables[table, 5], tables[table, 6], blob,
                hashes, texts, ends,
            )  # fmt: skip
        else:
            copy(out, to, buf, start, stop - start)
            to += stop - start
        if to < 0:
            return -1 - row
        edited[row, 1] = to
        edited[row, 2] = to
        to = edit_record(
            buf, spans[row, 2], spans[row, 3], out, to, columns, tables[table, 2],
            tables[table, 3], blob, hashes, texts, ends,
        )  # fmt: skip
        if to < 0:
            return -1 - row
        edited[row, 3] = to
    return to


def warm_up() -> None:
    """Compile the kernels, or load them from numba's cache."""
    out, buf = np.zeros(8, dtype=np.uint8), np.frombuffer(bytes(8), dtype=np.uint8)
    tables = np.zeros((1, T_FIELDS), dtype=np.int64)
    columns = np.zeros((1, C_FIELDS), dtype=np.int64)
    ends = np.zeros(1, dtype=np.int64)
    edit_frames(
        buf, np.zeros(0, dtype=np.int64), out, 0, tables, columns, buf,
        buf, out, ends, 0,
    )  # fmt: skip
    spans = np.zeros((0, 4), dtype=np.int64)
    for data in (buf, out):
        edit_rows(data, spans, out, spans, tables, 0, columns, buf, buf, out, ends)
