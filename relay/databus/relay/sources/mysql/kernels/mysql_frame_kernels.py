"""Packs frames of row changes and ends of windows in place, compiled."""

from __future__ import annotations

from databus.common.compiled.kernels import I64Array, U8Array, jit_uncounted, put_digits
from databus.common.compiled.xxh3 import xxh3_64
from databus.common.frame.header_layout import (
    HAS_AFTER,
    HAS_BEFORE,
    HEADER_BYTES,
    seal,
    seal_window_end,
)
from databus.relay.sources.avro_kernels import put_raw
from databus.relay.sources.mysql.kernels import kernel_cells as c

END_FRAME_BYTES = HEADER_BYTES + 120
"""Space for an end-of-window frame with any GTID."""


@jit_uncounted
def put_event(
    out: U8Array,
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
    """Write one row frame at FILL; the stop of an absent image is before its start."""
    start = plan[c.FILL]
    to = _put_key(out, start + HEADER_BYTES, images, table, span, plan)
    key_bytes = to - start - HEADER_BYTES
    flags = 0
    before_bytes = after_bytes = 0
    if before_stop >= before_start:
        flags |= HAS_BEFORE
        before_bytes = before_stop - before_start
        to = put_raw(out, to, images, before_start, before_bytes)
    if after_stop >= after_start:
        flags |= HAS_AFTER
        after_bytes = after_stop - after_start
        to = put_raw(out, to, images, after_start, after_bytes)
    key_start = start + HEADER_BYTES
    plan[c.FILL] = seal(
        out, start, to, op, flags, plan[c.SCN], plan[c.SEQ], plan[table + c.T_SOURCE],
        xxh3_64(out, key_start, key_start + key_bytes), plan[table + c.T_SCHEMA],
        plan[c.COMMIT_US], key_bytes, before_bytes, after_bytes, 0,
    )  # fmt: skip
    plan[c.SEQ] += 1
    plan[c.EVENT_COUNT] += 1


@jit_uncounted
def end_group(out: U8Array, plan: I64Array) -> None:
    """End the open group; there is space for an end-of-window frame."""
    if plan[c.WANTED] == c.EXAMINED:
        plan[c.FOREIGN_SEQ_NO] = plan[c.SCN]
    elif plan[c.WANTED] == c.READ:
        if plan[c.SEQ]:
            start = plan[c.FILL]
            if plan[c.GROUPS] == c.GROUPS_MYSQL:
                to = _put_uuid(out, start + HEADER_BYTES, plan)
                out[to] = 58
                to = put_digits(out, to + 1, plan[c.SCN] - plan[c.SCN_BASE])
            else:
                to = put_digits(out, start + HEADER_BYTES, plan[c.GROUP_DOMAIN])
                out[to] = 45
                to = put_digits(out, to + 1, plan[c.GROUP_SERVER])
                out[to] = 45
                to = put_digits(out, to + 1, plan[c.SCN])
            plan[c.FILL] = seal_window_end(
                out, start, to, plan[c.SCN], plan[c.SEQ], plan[c.COMMIT_US], plan[c.EVENT_COUNT]
            )
            plan[c.SEQ] += 1
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
        to = put_raw(out, to, images, start, size)
    return to


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
