"""Frames of row changes and ends of windows, packed in place by compiled code."""

from __future__ import annotations

from databus.common.compiled.kernels import I64Array, U8Array, crc32c, i64, jit_uncounted
from databus.common.compiled.xxh3 import xxh3_64
from databus.relay.sources.mysql.kernels import kernel_cells as c
from databus.relay.sources.mysql.kernels.mysql_value_kernels import put_bytes

INSERT, UPDATE, DELETE = 1, 2, 3
END_FRAME_BYTES = 192
"""Room enough for an end-of-window frame with any GTID."""

_FRAME_BYTES = 72
_FRAME_MARK = 0xDB05 | 1 << 16
_END_OF_WINDOW = 64
_HAS_BEFORE, _HAS_AFTER = 1, 2


@jit_uncounted
def put_event(
    out: U8Array,
    words: I64Array,
    op: int,
    plan: I64Array,
    table: int,
    images: U8Array,
    span: int,
    before_start: int,
    before_stop: int,
    after_start: int,
    after_stop: int,
) -> None:
    """One row frame at FILL; an image that is absent has its stop before its start."""
    start = plan[c.FILL]
    to = _put_key(out, start + _FRAME_BYTES, images, table, span, plan)
    key_bytes = to - start - _FRAME_BYTES
    flags = 0
    before_bytes = after_bytes = 0
    if before_stop >= before_start:
        flags |= _HAS_BEFORE
        before_bytes = before_stop - before_start
        to = put_bytes(out, to, images, before_start, before_bytes)
    if after_stop >= after_start:
        flags |= _HAS_AFTER
        after_bytes = after_stop - after_start
        to = put_bytes(out, to, images, after_start, after_bytes)
    _seal(
        out,
        words,
        start,
        to,
        op,
        flags,
        plan,
        plan[table + c.T_SOURCE],
        plan[table + c.T_SCHEMA],
        key_bytes,
        before_bytes,
        after_bytes,
    )
    plan[c.EVENT_COUNT] += 1


@jit_uncounted
def end_group(out: U8Array, words: I64Array, plan: I64Array) -> None:
    """Close the open group; there is room for an end-of-window frame."""
    if plan[c.WANTED]:
        if plan[c.SEQ]:
            start = plan[c.FILL]
            if plan[c.GROUPS] == c.GROUPS_MYSQL:
                to = _put_uuid(out, start + _FRAME_BYTES, plan)
                out[to] = 58
                to = _put_number(out, to + 1, plan[c.SCN] - plan[c.SCN_BASE])
            else:
                to = _put_number(out, start + _FRAME_BYTES, plan[c.GROUP_DOMAIN])
                out[to] = 45
                to = _put_number(out, to + 1, plan[c.GROUP_SERVER])
                out[to] = 45
                to = _put_number(out, to + 1, plan[c.SCN])
            key_bytes = to - start - _FRAME_BYTES
            for index in range(4):
                out[to + index] = plan[c.EVENT_COUNT] >> 8 * index & 0xFF
            _seal(
                out, words, start, to + 4, _END_OF_WINDOW, _HAS_AFTER, plan, 0, 0, key_bytes, 0, 4
            )
        else:
            plan[c.OTHER_GROUPS] += 1
        plan[c.RESOLVED] = plan[c.SCN]
    plan[c.IN_GROUP] = 0
    plan[c.WANTED] = 0
    plan[c.GROUP_START] = plan[c.FILL]
    plan[c.SENT_PART] = 0


@jit_uncounted
def _put_key(
    out: U8Array,
    to: int,
    images: U8Array,
    table: int,
    span: int,
    plan: I64Array,
) -> int:
    for index in range(plan[table + c.T_KEYS]):
        column = plan[plan[table + c.T_KEY] + index]
        start = plan[span + 2 * column]
        size = plan[span + 2 * column + 1] - start
        if plan[table + c.T_NULLABLE_KEY]:
            # No value is empty in Avro: an empty span is a null.
            out[to] = 2 if size else 0
            to += 1
        to = put_bytes(out, to, images, start, size)
    return to


@jit_uncounted
def _put_number(out: U8Array, to: int, value: int) -> int:
    """A number in decimal digits."""
    digits = 1
    rest = value // 10
    while rest:
        digits += 1
        rest //= 10
    for index in range(digits):
        out[to + digits - 1 - index] = 48 + value % 10
        value //= 10
    return to + digits


@jit_uncounted
def _put_uuid(out: U8Array, to: int, plan: I64Array) -> int:
    """The uuid of the cells as text, ``3e11fa47-71ca-11e1-9e33-c80aa9429562``."""
    for index in range(16):
        if index in (4, 6, 8, 10):
            out[to] = 45
            to += 1
        half = plan[c.UUID_LOW] if index < 8 else plan[c.UUID_HIGH]
        byte = half >> 8 * (index & 7) & 0xFF
        for digit in (byte >> 4, byte & 15):
            out[to] = digit + (48 if digit < 10 else 87)
            to += 1
    return to


@jit_uncounted
def _seal(
    out: U8Array,
    words: I64Array,
    start: int,
    stop: int,
    op: int,
    flags: int,
    plan: I64Array,
    source: int,
    schema: int,
    key_bytes: int,
    before_bytes: int,
    after_bytes: int,
) -> int:
    """Pad the frame at ``start``, whose parts end at ``stop``, and write its header."""
    while stop & 7:
        out[stop] = 0
        stop += 1
    word = start >> 3
    words[word] = (stop - start) << 32
    words[word + 1] = i64(_FRAME_MARK) | op << 24 | flags << 32
    words[word + 2] = plan[c.SCN]
    words[word + 3] = plan[c.SEQ] | source << 32
    key_start = start + _FRAME_BYTES
    words[word + 4] = i64(xxh3_64(out, key_start, key_start + key_bytes)) if source else 0
    words[word + 5] = schema
    words[word + 6] = plan[c.COMMIT_US]
    words[word + 7] = key_bytes | before_bytes << 32
    words[word + 8] = after_bytes
    words[word] |= crc32c(out, start + 4, stop)
    plan[c.SEQ] += 1
    plan[c.FILL] = stop
    return stop
