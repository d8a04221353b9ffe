"""The hot path: converts the pgoutput messages of a block to frames, without Python per row.

``transcode`` reads a block and packs transactions, and the row changes of tables whose values it
can read.  It stops before any other message and returns the offset.  The caller reads that message
with the reference path (``window_assembler``, ``row_codec``) and calls again.  So this module can
be simple, while the reference path is complete; tests compare the two.

The 64-bit arithmetic of hashes wraps on purpose.  Texts that are invalid in their encoding are left
to the reference path, which reports them.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import I64Array, U8Array, i64, put_digits
from databus.common.compiled.xxh3 import xxh3_64
from databus.common.frame.header_layout import (
    DELETE,
    HAS_AFTER,
    HAS_BEFORE,
    HEADER_BYTES,
    INSERT,
    PARTIAL,
    UPDATE,
    WINDOW_END_BYTES,
    seal,
    seal_window_end,
)
from databus.relay.sources.postgres.kernels.text_value_kernels import BYTES, STRING, put_value

# state: the numbers that the reference path and the kernel share.
IN_TRANSACTION, SCN, COMMIT_US, XID, SEQ, RESOLVED, CHANGED_AFTER, STATE_COUNT = range(8)

# Why transcode stopped.
AT_END, AT_OTHER, OUT_FULL = range(3)

# relations: a row for each table that the stream has described; CAPTURED is 0 or 1, or 2 if the
# key's columns are unions with null.
OID, CAPTURED, FIRST_COLUMN, COLUMN_COUNT, FIRST_KEY, KEY_COUNT, SOURCE_ID, SCHEMA_FP = range(8)

# columns: a row for each column of each captured table.
# Chunks use FORM.
KIND, NULLABLE, SCALE, FORM = range(4)

_NULL, _UNCHANGED = -1, -2
_END_OF_WINDOW_ROOM = WINDOW_END_BYTES + 12
_POSTGRES_EPOCH_US = 946_684_800_000_000


@kernels.jit_uncounted
def last_whole(buf: U8Array, at: int, end: int) -> int:
    """The end of the last whole protocol message in ``buf[at:end]``."""
    while end - at >= 5:
        length = u32(buf, at + 1) + 1
        if length > end - at:
            break
        at += length
    return at


@kernels.jit_uncounted
def transcode(
    buf: U8Array,
    at: int,
    stop: int,
    out: U8Array,
    out_at: int,
    state: I64Array,
    index: I64Array,
    relations: I64Array,
    columns: I64Array,
    keys: I64Array,
    fields: I64Array,
) -> tuple[int, int, int]:
    """Pack the messages of ``buf[at:stop]``, whole ones, into ``out`` from ``out_at`` on.

    ``out_at`` is a multiple of 8; ``fields`` is scratch
    for four rows of as many numbers as the widest table has columns.
    Returns (where in buf it stopped, where out ends, why it stopped).
    """
    while at < stop:
        end = at + 1 + u32(buf, at + 1)
        body = at + 30
        if buf[at] != 100 or end < body + 1 or buf[at + 5] != 119:  # CopyData, XLogData
            return at, out_at, 1
        kind = buf[body]
        if kind == 73 or kind == 85 or kind == 68:  # Insert, Update, Delete
            relation = -1 if end - body < 8 else _find(index, relations, u32(buf, body + 1))
            if relation < 0 or state[0] == 0:
                return at, out_at, 1
            if relations[relation, 1] == 0:
                at = end
                continue
            room = 160 + 2 * (end - at) + 48 * relations[relation, 3]
            if out_at + room > len(out):
                return at, out_at, 2
            packed = _row_change(
                buf, body, end, kind, out, out_at, state, relations, relation,
                columns, keys, fields,
            )  # fmt: skip
            if packed < 0:
                return at, out_at, 1
            out_at = packed
            state[4] += 1
        elif kind == 66:  # Begin
            if end - body != 21 or state[0] != 0:
                return at, out_at, 1
            scn = _u64(buf, body + 1)
            if scn <= state[5]:
                return at, out_at, 1
            state[0] = 1
            state[1] = scn
            state[2] = _u64(buf, body + 9) + _POSTGRES_EPOCH_US
            state[3] = u32(buf, body + 17)
            state[4] = 0
        elif kind == 67:  # Commit
            if end - body != 26 or state[0] == 0 or state[6] != 0:
                return at, out_at, 1
            if _u64(buf, body + 2) != state[1]:
                return at, out_at, 1
            if state[4] > 0:
                if out_at + _END_OF_WINDOW_ROOM > len(out):
                    return at, out_at, 2
                txid_stop = put_digits(out, out_at + HEADER_BYTES, state[3])
                out_at = seal_window_end(
                    out, out_at, txid_stop, state[1], state[4], state[2], state[4]
                )
            state[5] = state[1]
            state[0] = 0
        else:
            return at, out_at, 1
        at = end
    return at, out_at, 0


@kernels.jit_uncounted
def _row_change(
    buf: U8Array,
    body: int,
    end: int,
    kind: int,
    out: U8Array,
    frame: int,
    state: I64Array,
    relations: I64Array,
    number: int,
    columns: I64Array,
    keys: I64Array,
    fields: I64Array,
) -> int:
    """Pack one Insert, Update or Delete at ``frame``; its end, or -1 for the reference path."""
    count = relations[number, 3]
    at = body + 5
    old_mark = i64(buf[at])
    has_old = kind != 73 and (old_mark == 75 or old_mark == 79)
    full_old = has_old and old_mark == 79
    if has_old:
        if kind == 85 and not full_old:
            return -1  # the key changed
        at = _tuple(buf, at + 1, end, count, fields, 0)
        if at < 0:
            return -1
    if kind != 68:
        if at >= end or buf[at] != 78:
            return -1
        at = _tuple(buf, at + 1, end, count, fields, 2)
    elif not has_old:
        return -1
    if at != end:
        return -1
    new = 0 if kind == 68 else 2
    first, key_start = relations[number, 2], frame + HEADER_BYTES
    key_end = _key(buf, out, key_start, relations, number, columns, keys, fields, new)
    if key_end < 0:
        return -1
    before_end, flags = key_end, 0
    if full_old:
        if kind == 85:
            # The old key, packed temporarily after the new one, must be the same.
            size = key_end - key_start
            other = _key(buf, out, key_end, relations, number, columns, keys, fields, 0)
            if other != key_end + size:
                return -1
            for offset in range(size):
                if out[key_start + offset] != out[key_end + offset]:
                    return -1
        before_end = _row(buf, out, key_end, first, count, columns, fields, 0)
        if before_end < 0:
            return -1
        for ordinal in range(count):
            if fields[1, ordinal] == _UNCHANGED:
                return -1
        flags |= HAS_BEFORE
    after_end = before_end
    if kind != 68:
        after_end = _row(buf, out, before_end, first, count, columns, fields, 2)
        if after_end < 0:
            return -1
        flags |= HAS_AFTER
    absent_end = after_end
    if kind == 85:
        absent_end = _absent(out, after_end, count, fields)
        if absent_end > after_end:
            if full_old:
                return -1  # the old row has the values
            flags |= PARTIAL
    op = INSERT if kind == 73 else UPDATE if kind == 85 else DELETE
    return seal(
        out, frame, absent_end, op, flags, state[1], state[4], relations[number, 6],
        xxh3_64(out, key_start, key_end), relations[number, 7], state[2], key_end - key_start,
        before_end - key_end, after_end - before_end, absent_end - after_end,
    )  # fmt: skip


@kernels.jit_uncounted
def _find(index: I64Array, relations: I64Array, oid: int) -> int:
    """The row of ``relations`` for a table; -1 if there is none.  ``index`` is open-addressed."""
    mask = len(index) - 1
    slot = oid * 2654435761 >> 7 & mask
    found: int = index[slot]
    while found >= 0 and relations[found, 0] != oid:
        slot = (slot + 1) & mask
        found = index[slot]
    return found


@kernels.jit_uncounted
def _tuple(buf: U8Array, at: int, end: int, count: int, fields: I64Array, line: int) -> int:
    """Find a TupleData's values; its end, or -1 if it is not as expected.

    Row ``line`` of ``fields`` gets the starts, the next row the lengths (or the marks).
    """
    if at + 2 > end or (i64(buf[at]) << 8 | i64(buf[at + 1])) != count:
        return -1
    at += 2
    for ordinal in range(count):
        if at >= end:
            return -1
        mark = buf[at]
        at += 1
        if mark == 116:  # t
            if at + 4 > end:
                return -1
            length = u32(buf, at)
            at += 4
            if at + length > end:
                return -1
            fields[line, ordinal] = at
            fields[line + 1, ordinal] = length
            at += length
        elif mark == 110:  # n
            fields[line + 1, ordinal] = _NULL
        elif mark == 117:  # u
            fields[line + 1, ordinal] = _UNCHANGED
        else:
            return -1
    return at


@kernels.jit_uncounted
def _key(
    buf: U8Array,
    out: U8Array,
    at: int,
    relations: I64Array,
    number: int,
    columns: I64Array,
    keys: I64Array,
    fields: I64Array,
    line: int,
) -> int:
    """Write the key's Avro record; returns the offset after it, or -1."""
    for key_index in range(relations[number, 5]):
        ordinal = keys[relations[number, 4] + key_index]
        nullable = relations[number, 1] == 2
        if fields[line + 1, ordinal] < 0:
            if not nullable or fields[line + 1, ordinal] != _NULL:
                return -1
            out[at] = 0
            at += 1
            continue
        if nullable:
            out[at] = 2
            at += 1
        column = relations[number, 2] + ordinal
        kind, scale = columns[column, 0], columns[column, 2]
        at = put_value(buf, fields[line, ordinal], fields[line + 1, ordinal], kind, scale, out, at)
        if at < 0:
            return -1
    return at


@kernels.jit_uncounted
def _row(
    buf: U8Array,
    out: U8Array,
    at: int,
    first: int,
    count: int,
    columns: I64Array,
    fields: I64Array,
    line: int,
) -> int:
    """Write the row's Avro record; returns the offset after it, or -1."""
    for ordinal in range(count):
        column = first + ordinal
        length = fields[line + 1, ordinal]
        if length < 0:
            # Of the kinds that can be absent, these two have an empty placeholder.
            empty = length == _UNCHANGED and (
                columns[column, 0] == STRING or columns[column, 0] == BYTES
            )
            if columns[column, 1] == 0 and not empty:
                return -1
            out[at] = 0
            at += 1
            continue
        if columns[column, 1] != 0:
            out[at] = 2
            at += 1
        kind, scale = columns[column, 0], columns[column, 2]
        at = put_value(buf, fields[line, ordinal], length, kind, scale, out, at)
        if at < 0:
            return -1
    return at


@kernels.jit_uncounted
def _absent(out: U8Array, at: int, count: int, fields: I64Array) -> int:
    """Write the bitmap of unchanged values if there are any; returns the offset after it."""
    found = False
    for ordinal in range(count):
        if fields[3, ordinal] == _UNCHANGED:
            if not found:
                found = True
                for byte in range((count + 7) >> 3):
                    out[at + byte] = 0
            out[at + (ordinal >> 3)] |= np.uint8(1 << (ordinal & 7))
    return at + ((count + 7) >> 3) if found else at


@kernels.jit_uncounted
def u32(buf: U8Array, at: int) -> int:
    """The big-endian 32-bit number at ``at``."""
    return i64(buf[at]) << 24 | i64(buf[at + 1]) << 16 | i64(buf[at + 2]) << 8 | i64(buf[at + 3])


@kernels.jit_uncounted
def _u64(buf: U8Array, at: int) -> int:
    """The big-endian 64-bit number at ``at``."""
    return u32(buf, at) << 32 | u32(buf, at + 4)
