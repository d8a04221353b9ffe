"""Rows of SQLite's change log to frames, compiled: no object per row.

The log's rows come as one block of text, three lines for each: ``id version op``, the row before
and the row after as the triggers' JSON, empty where there is none.  At anything else, and at any
value that is not of its column's kind, the kernel stops before the row and leaves it to
``sqlite_source.py``; so Python alone handles errors and rare cases.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import kernels
from databus.common.compiled.kernels import I64Array, U8Array, copy, i64, jit
from databus.common.compiled.xxh3 import xxh3_64
from databus.common.frame.header_layout import (
    DELETE,
    HAS_AFTER,
    HAS_BEFORE,
    HEADER_BYTES,
    INSERT,
    UPDATE,
    seal,
)
from databus.relay.sources.avro_kernels import (
    EXACT_DIGITS,
    put_double,
    put_exact_double,
    put_long,
)

STOPPED, ENDED, FULL = range(3)
"""Why the kernel returned: a row for Python, the block's end, no more space."""

AT, FILL, SEQ, EVENTS, LAST_ID, SCN, COMMIT_US, STOP_ID, STATE_COUNT = range(9)
"""Cells of the state.  LAST_ID: the log id of the row before; STOP_ID: the last id to pack."""

T_VERSION, T_SOURCE, T_SCHEMA, T_COLUMN, T_COLUMNS, T_KEY, T_KEYS, T_NULLABLE_KEY, T_FIELDS = range(
    9
)
"""Fields of ``tables``, a line for each version; other arrays hold its columns and key indexes."""

INT, FLOAT, TEXT, BYTES, NUMERIC, OTHER = range(6)
"""Kinds of columns, in ``columns[:, 0]``; ``columns[:, 1]`` is 1 if it can be null."""

_NEWLINE, _QUOTE, _COMMA, _MINUS, _OPEN, _CLOSE, _BACKSLASH = 10, 34, 44, 45, 91, 93, 92
_N, _U = 110, 117


@jit
def _number(buf: U8Array, at: int, stop: int) -> tuple[int, int]:
    """A whole number and its end; (0, -1) for anything else or a number that is too large."""
    negative = at < stop and buf[at] == _MINUS
    cursor = at + 1 if negative else at
    first, value = cursor, 0
    while cursor < stop and 48 <= buf[cursor] <= 57:
        if cursor - first > 18:
            return 0, -1
        value = value * 10 - (i64(buf[cursor]) - 48)
        cursor += 1
    if cursor == first or (value > 0 or (value == -(1 << 63) and not negative)):
        return 0, -1
    return value if negative else -value, cursor


@jit
def _hex_digit(digit: int) -> int:
    if 48 <= digit <= 57:
        return i64(digit) - 48
    if 65 <= digit <= 70:
        return i64(digit) - 55
    if 97 <= digit <= 102:
        return i64(digit) - 87
    return -1


@jit
def _escaped(buf: U8Array, at: int, stop: int) -> tuple[int, int]:
    r"""The character after a backslash and its end; (-1, at) if it is beyond \u007f."""
    letter = buf[at]
    if letter == _U:
        value = 0
        if at + 5 > stop:
            return -1, at
        for offset in range(1, 5):
            digit = _hex_digit(buf[at + offset])
            if digit < 0:
                return -1, at
            value = value << 4 | digit
        return (value if value < 128 else -1), at + 5
    if letter == _N:
        return 10, at + 1
    if letter == 116:
        return 9, at + 1
    if letter == 114:
        return 13, at + 1
    if letter == 98:
        return 8, at + 1
    if letter == 102:
        return 12, at + 1
    return (i64(letter) if letter in (34, 92, 47) else -1), at + 1


@jit
def _text(buf: U8Array, at: int, stop: int, out: U8Array, to: int) -> tuple[int, int]:
    """Write the JSON string after its opening quote as Avro; (-1, to) if Python must read it."""
    cursor, length = at, 0
    while cursor < stop and buf[cursor] != _QUOTE:
        if buf[cursor] == _BACKSLASH:
            if cursor + 1 >= stop:
                return -1, to
            character, cursor = _escaped(buf, cursor + 1, stop)
            if character < 0:
                return -1, to
        else:
            cursor += 1
        length += 1
    if cursor >= stop:
        return -1, to
    to = put_long(out, to, length)
    if length == cursor - at:
        copy(out, to, buf, at, length)
        return cursor + 1, to + length
    while at < cursor:
        if buf[at] == _BACKSLASH:
            character, at = _escaped(buf, at + 1, stop)
            out[to] = np.uint8(character)
        else:
            out[to] = buf[at]
            at += 1
        to += 1
    return cursor + 1, to


@jit
def _real_text(buf: U8Array, at: int, stop: int) -> tuple[int, int]:
    """Where the text of ``["r","..."]`` begins and ends; -1 if there is no such text."""
    if at + 5 > stop or buf[at + 1] != _QUOTE or buf[at + 2] != 114:
        return -1, -1
    if buf[at + 3] != _QUOTE or buf[at + 4] != _COMMA or buf[at + 5] != _QUOTE:
        return -1, -1
    cursor = at + 6
    while cursor < stop and buf[cursor] != _QUOTE:
        cursor += 1
    if cursor + 1 >= stop or buf[cursor + 1] != _CLOSE:
        return -1, -1
    return at + 6, cursor


@jit
def _plain(buf: U8Array, at: int, stop: int) -> bool:
    """Whether a number's text has neither an exponent nor more digits than are exact."""
    digits = 0
    for cursor in range(at, stop):
        if 48 <= buf[cursor] <= 57:
            digits += 1
        elif buf[cursor] not in (46, _MINUS):
            return False
    return 0 < digits <= EXACT_DIGITS


@jit
def _blob(buf: U8Array, at: int, stop: int, out: U8Array, to: int) -> tuple[int, int]:
    """``["b","00ff"]`` as Avro's bytes."""
    if at + 6 > stop or buf[at + 1] != _QUOTE or buf[at + 2] != 98 or buf[at + 4] != _COMMA:
        return -1, to
    start = cursor = at + 6
    while cursor < stop and buf[cursor] != _QUOTE:
        cursor += 1
    if cursor + 1 >= stop or buf[cursor + 1] != _CLOSE or (cursor - start) & 1:
        return -1, to
    to = put_long(out, to, (cursor - start) >> 1)
    for digit in range(start, cursor, 2):
        high, low = _hex_digit(buf[digit]), _hex_digit(buf[digit + 1])
        if high < 0 or low < 0:
            return -1, to
        out[to] = np.uint8(high << 4 | low)
        to += 1
    return cursor + 2, to


@jit
def _value(buf: U8Array, at: int, stop: int, kind: int, out: U8Array, to: int) -> tuple[int, int]:
    """A cell that is not null as the Avro of its kind: where both end, or (-1, to)."""
    first = buf[at]
    if kind == TEXT and first == _QUOTE:
        return _text(buf, at + 1, stop, out, to)
    if kind == BYTES and first == _OPEN:
        return _blob(buf, at, stop, out, to)
    if first == _OPEN and kind in (FLOAT, NUMERIC):
        start, end = _real_text(buf, at, stop)
        if start < 0:
            return -1, to
        if kind == FLOAT:
            done = put_exact_double(buf, start, end, out, to)
            return (end + 2, done) if done >= 0 else (-1, to)
        if not _plain(buf, start, end):
            return -1, to
        to = put_long(out, to, end - start)
        copy(out, to, buf, start, end - start)
        return end + 2, to + end - start
    if first != _MINUS and not 48 <= first <= 57:
        return -1, to
    number, end = _number(buf, at, stop)
    if end < 0:
        return -1, to
    if kind == INT:
        return end, put_long(out, to, number)
    if kind == FLOAT and -(1 << 53) <= number <= 1 << 53:
        return end, put_double(out, to, float(number))
    if kind == NUMERIC:
        to = put_long(out, to, end - at)
        copy(out, to, buf, at, end - at)
        return end, to + end - at
    return -1, to


@jit
def _row(
    buf: U8Array,
    at: int,
    stop: int,
    table: I64Array,
    columns: I64Array,
    out: U8Array,
    to: int,
    spans: I64Array,
) -> int:
    """Write a row's JSON as an Avro record at ``to``; ``spans`` gets each value's offsets.

    Returns where the record ends, -1 if Python must read the row.
    """
    count = table[T_COLUMNS]
    if at >= stop or buf[at] != _OPEN:
        return -1
    at += 1
    for index in range(count):
        if at >= stop:
            return -1
        if buf[at] == _CLOSE:  # sixty cells make a group
            if at + 2 >= stop or buf[at + 1] != _COMMA:
                return -1
            at += 2
            if buf[at] != _OPEN:
                return -1
            at += 1
        elif index == 0:
            if buf[at] != _OPEN:
                return -1
            at += 1
        else:
            if buf[at] != _COMMA:
                return -1
            at += 1
        if at + 4 > stop:
            return -1
        kind, nullable = columns[table[T_COLUMN] + index, 0], columns[table[T_COLUMN] + index, 1]
        if buf[at] == _N:
            if not nullable:
                return -1
            out[to] = 0
            to += 1
            spans[index, 0] = spans[index, 1] = to
            at += 4
            continue
        if nullable:
            out[to] = 2
            to += 1
        spans[index, 0] = to
        at, to = _value(buf, at, stop, kind, out, to)
        if at < 0:
            return -1
        spans[index, 1] = to
    return to if at + 2 == stop and buf[at] == _CLOSE and buf[at + 1] == _CLOSE else -1


@jit
def _same_key(
    images: U8Array, table: I64Array, keys: I64Array, old: I64Array, new: I64Array
) -> bool:
    for index in range(table[T_KEYS]):
        column = keys[table[T_KEY] + index]
        size = old[column, 1] - old[column, 0]
        if new[column, 1] - new[column, 0] != size:
            return False
        for byte in range(size):
            if images[old[column, 0] + byte] != images[new[column, 0] + byte]:
                return False
    return True


@jit
def _frame(
    out: U8Array,
    state: I64Array,
    table: I64Array,
    keys: I64Array,
    op: int,
    images: U8Array,
    spans: I64Array,
    before_stop: int,
    after_start: int,
    after_stop: int,
) -> None:
    """One event; the row before is ``images[:before_stop]``, if that is not 0."""
    start = state[FILL]
    at = start + HEADER_BYTES
    for index in range(table[T_KEYS]):
        column = keys[table[T_KEY] + index]
        size = spans[column, 1] - spans[column, 0]
        if table[T_NULLABLE_KEY]:
            # No value is empty in Avro: an empty span is a null.
            out[at] = 2 if size else 0
            at += 1
        copy(out, at, images, spans[column, 0], size)
        at += size
    key_bytes = at - start - HEADER_BYTES
    copy(out, at, images, 0, before_stop)
    at += before_stop
    after_bytes = after_stop - after_start
    copy(out, at, images, after_start, after_bytes)
    at += after_bytes
    flags = (HAS_BEFORE if before_stop else 0) | (HAS_AFTER if after_bytes else 0)
    key_start = start + HEADER_BYTES
    state[FILL] = seal(
        out, start, at, op, flags, state[SCN], state[SEQ], table[T_SOURCE],
        xxh3_64(out, key_start, key_start + key_bytes), table[T_SCHEMA], state[COMMIT_US],
        key_bytes, before_stop, after_bytes, 0,
    )  # fmt: skip
    state[SEQ] += 1
    state[EVENTS] += 1


@jit
def _line_end(buf: U8Array, at: int) -> int:
    while buf[at] != _NEWLINE:
        at += 1
    return at


@jit
def _table_of(tables: I64Array, version: int) -> int:
    for line in range(len(tables)):
        if tables[line, T_VERSION] == version:
            return line
    return -1


@jit
def pack_log(
    buf: U8Array,
    state: I64Array,
    tables: I64Array,
    columns: I64Array,
    keys: I64Array,
    images: U8Array,
    spans: I64Array,
    out: U8Array,
) -> int:
    """Turn the log rows in ``buf`` from AT on into frames at FILL; see the cells for the rest.

    ``buf`` holds whole rows, ``spans`` has room for two
    rows of the widest table, ``images`` for twice the longest row's text and its columns.
    """
    half = len(spans) // 2
    while state[AT] < len(buf):
        log_id, at = _number(buf, state[AT], len(buf))
        version, at = _number(buf, at + 1, len(buf))
        letter = buf[at + 1]
        old_start = _line_end(buf, at) + 1
        old_stop = _line_end(buf, old_start)
        new_start = old_stop + 1
        new_stop = _line_end(buf, new_start)
        line = _table_of(tables, version)
        if line < 0 or log_id > state[STOP_ID] or log_id <= state[LAST_ID]:
            return STOPPED
        table = tables[line]
        room = 2 * (new_stop - old_start + 16 * table[T_COLUMNS]) + 4 * HEADER_BYTES
        if len(images) < room or len(out) - state[FILL] < 2 * room:
            return FULL
        old, new = spans[:half], spans[half:]
        before = after = 0
        if letter != 99:  # c
            before = _row(buf, old_start, old_stop, table, columns, images, 0, old)
        if before >= 0 and letter != 100:  # d
            after = _row(buf, new_start, new_stop, table, columns, images, before, new)
        if before < 0 or after < 0:
            return STOPPED
        if before and after and _same_key(images, table, keys, old, new):
            _frame(
                out, state, table, keys, UPDATE, images, new, before, before, after
            )  # fmt: skip
        else:
            if before:
                _frame(out, state, table, keys, DELETE, images, old, before, 0, 0)
            if after:
                _frame(out, state, table, keys, INSERT, images, new, 0, before, after)
        state[LAST_ID] = log_id
        state[AT] = new_stop + 1
    return ENDED


def warm_up() -> None:
    """Compile the kernel, or load it from numba's cache."""
    if not kernels.COMPILED:
        return
    out = np.zeros(8, dtype=np.uint8)
    lines = np.zeros((1, T_FIELDS), dtype=np.int64)
    pack_log(
        np.frombuffer(b"", dtype=np.uint8), np.zeros(STATE_COUNT, dtype=np.int64), lines,
        np.zeros((1, 2), dtype=np.int64), np.zeros(1, dtype=np.int64), out,
        np.zeros((2, 2), dtype=np.int64), out,
    )  # fmt: skip
