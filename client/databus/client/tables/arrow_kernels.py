"""Rows of frames into columns: one pass over the rows of a block for each layout among them.

What belongs here: finding the row in a frame.  What does not: cutting its Avro record
(``databus.common.compiled.avro_row_kernels``), and the Arrow arrays (``arrow_rows``).
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled import avro_row_kernels as rk
from databus.common.compiled import kernels
from databus.common.compiled.kernels import I64Array, U8Array, i64
from databus.common.frame import header_layout
from databus.common.frame.header_layout import HAS_AFTER, HAS_BEFORE, HEADER_BYTES, TRUNCATE


@kernels.jit_uncounted
def cut_frames(
    buf: U8Array,
    offsets: I64Array,
    fingerprint: int,
    is_key: bool,
    codes: I64Array,
    nullable: U8Array,
    slots: I64Array,
    row: int,
    done: U8Array,
    first: I64Array,
    second: I64Array,
    valid: U8Array,
) -> tuple[int, int]:
    """Cut the rows of one layout among the frames at ``offsets`` into columns.

    The layout is the schema with this fingerprint: the row after the change or else before it, or,
    with ``is_key``, the key of a frame that has neither.  Frame i goes to row ``row + i`` of the
    outputs, as ``avro_row_kernels.decode_row`` writes them, and ``done[row + i]`` becomes 1.  A
    truncate has no row: it is done with any layout.

    Returns the index of the first damaged row or -1, and that of the first frame that is not done
    or -1.
    """
    other = -1
    for index in range(len(offsets)):
        if done[row + index]:
            continue
        at = offsets[index]
        flags = header_layout.flags_of(buf, at)
        key_len, before_len, after_len, _ = header_layout.parts_of(buf, at)
        start = at + HEADER_BYTES
        stop = start + key_len
        has_row = flags & (HAS_AFTER | HAS_BEFORE)
        if flags & HAS_AFTER:
            start = stop + before_len
            stop = start + after_len
        elif has_row:
            start = stop
            stop = start + before_len
        elif header_layout.op_of(buf, at) == TRUNCATE:
            done[row + index] = 1
            continue
        if is_key == (has_row != 0) or header_layout.schema_of(buf, at) != fingerprint:
            if other < 0:
                other = index
            continue
        if not rk.decode_row(
            buf, i64(start), i64(stop), codes, nullable, slots, row + index, first, second, valid
        ):
            return index, other
        done[row + index] = 1
    return -1, other


def warm_up() -> None:
    """Compile every kernel, or load it from the cache."""
    for writable in (True, False):
        buf = np.zeros(HEADER_BYTES, dtype=np.uint8)
        buf.flags.writeable = writable
        one = np.zeros(1, dtype=np.int64)
        numbers = np.zeros((1, 1), dtype=np.int64)
        bits = np.zeros((1, 1), dtype=np.uint8)
        cut_frames(buf, one, 0, False, one, bits[0], one, 0, bits[0], numbers, numbers, bits)
