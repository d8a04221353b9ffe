"""The binlog's compiled hot path: packets to frames without an object per row.

``walk`` reads a block of the replication stream and does the work of ``binlog_decoder.py`` for
nearly all events of a binlog: GTIDs, known table maps, rows of the common types (also dates as
text), XIDs.  It stops before any other event and at any irregularity, and the decoder continues.
So only Python handles errors and rare cases.
"""

from __future__ import annotations

from databus.common.compiled.kernels import (
    I64Array,
    U8Array,
    i64,
    jit_uncounted,
    load_i64,
    load_u16,
    load_u32,
)
from databus.common.frame.header_layout import DELETE, INSERT, UPDATE
from databus.relay.sources.mysql.kernels import kernel_cells as c
from databus.relay.sources.mysql.kernels.crc32_kernels import crc32
from databus.relay.sources.mysql.kernels.mysql_frame_kernels import (
    END_FRAME_BYTES,
    end_group,
    put_event,
)
from databus.relay.sources.mysql.kernels.mysql_value_kernels import put_value

_DONE = 3
_HEADER_BYTES = 19
_CRC_BYTES = 4
_LONGEST_PACKET = 0xFFFFFF
_XID, _TABLE_MAP, _WRITE, _UPDATE, _DELETE, _HEARTBEAT, _GTID = 16, 19, 23, 24, 25, 27, 162
_QUERY, _MYSQL_GTID = 2, 33
_WRITE_V2, _DELETE_V2 = 30, 32
_V2 = _WRITE_V2 - _WRITE
_PREPARED_XA = 64
_STATEMENT, _TRANSACTION = 1 | 32, 4
_BY_KERNEL = 1 << 8
"""An extra flag of a MySQL group that the kernel has begun: its uuid is that of the cells."""
_BEGIN = (66, 69, 71, 73, 78)
_LOGICAL_CLOCK, _TIMES, _MICROSECONDS, _HAS_ORIGINAL = 2, 42, 7, 1 << 55
_ARTIFICIAL = 0x20
_SINGLE_BYTE_GROWTH = 3


@jit_uncounted
def _image(
    buf: U8Array,
    at: int,
    end: int,
    out: U8Array,
    to: int,
    table: int,
    blob: U8Array,
    span: int,
    plan: I64Array,
) -> tuple[int, int]:
    """One row image as an Avro record at ``to``; ``span`` gets each value's offsets.

    Returns (the input's end or -1, the output's end).
    """
    count = plan[table + c.T_COLUMNS]
    nulls = at
    at += (count + 7) // 8
    first = plan[table + c.T_COLUMN]
    for index in range(count):
        column = first + c.COLUMN_FIELDS * index
        is_null = buf[nulls + (index >> 3)] >> (index & 7) & 1
        if is_null:
            if not plan[column + c.C_NULLABLE]:
                return -1, to
            out[to] = 0
            to += 1
            plan[span + 2 * index] = plan[span + 2 * index + 1] = to
            continue
        if plan[column + c.C_NULLABLE]:
            out[to] = 2
            to += 1
        plan[span + 2 * index] = to
        if at >= end:
            return -1, to
        at, written = put_value(buf, at, end, out, to, column, blob, plan)
        if at < 0 or at > end:
            return -1, to
        if written < 0:
            out[to - 1] = 0
        else:
            to = written
        plan[span + 2 * index + 1] = to
    return at, to


@jit_uncounted
def _same_key(
    images: U8Array,
    table: int,
    old: int,
    new: int,
    plan: I64Array,
) -> bool:
    for index in range(plan[table + c.T_KEYS]):
        column = plan[plan[table + c.T_KEY] + index]
        old_start, new_start = plan[old + 2 * column], plan[new + 2 * column]
        size = plan[old + 2 * column + 1] - old_start
        if plan[new + 2 * column + 1] - new_start != size:
            return False
        for byte in range(size):
            if images[old_start + byte] != images[new_start + byte]:
                return False
    return True


@jit_uncounted
def _begin_group(buf: U8Array, at: int, plan: I64Array) -> int:
    body = at + _HEADER_BYTES
    seq_no = load_i64(buf, body)
    domain = load_u32(buf, body + 8)
    flags = i64(buf[body + 12])
    ours = domain == plan[c.DOMAIN]
    wanted = ours and seq_no > plan[c.RESOLVED]
    if plan[c.IN_GROUP] or (ours and seq_no <= plan[c.LAST_SEQ_NO]):
        return c.NEED_DECODER
    if ours and (flags & _PREPARED_XA or seq_no >= plan[c.EXPECT]):
        return c.NEED_DECODER
    server = load_u32(buf, at + 5)
    if not ours and (
        domain != plan[c.FOREIGN_DOMAIN]
        or server != plan[c.FOREIGN_SERVER]
        or seq_no <= plan[c.FOREIGN_SEQ_NO]
    ):
        return c.NEED_DECODER
    plan[c.SCN] = seq_no
    plan[c.SEQ] = 0
    plan[c.EVENT_COUNT] = 0
    plan[c.GROUP_BEGIN] = load_u32(buf, at + 13) - load_u32(buf, at + 9)
    plan[c.COMMIT_US] = load_u32(buf, at) * 1_000_000
    plan[c.GROUP_SERVER] = server
    plan[c.GROUP_DOMAIN] = domain
    plan[c.GROUP_FLAGS] = flags
    plan[c.IN_GROUP] = 1
    plan[c.WANTED] = c.READ if wanted else c.NOT_READ
    if ours:
        plan[c.LAST_SEQ_NO] = seq_no
    else:
        plan[c.WANTED] = c.EXAMINED
        plan[c.FOREIGN_GROUPS] += 1
    return _DONE


@jit_uncounted
def _begin_mysql_group(buf: U8Array, at: int, end: int, plan: I64Array) -> int:
    """The next GTID of the followed server; the decoder reads all others."""
    body = at + _HEADER_BYTES
    scn = plan[c.SCN_BASE] + load_i64(buf, body + 17)
    if (
        plan[c.IN_GROUP]
        or plan[c.EXPECT] != c.NO_EXPECT
        or load_i64(buf, body + 1) != plan[c.UUID_LOW]
        or load_i64(buf, body + 9) != plan[c.UUID_HIGH]
        or scn != plan[c.LAST_SEQ_NO] + 1
    ):
        return c.NEED_DECODER
    commit_us = i64(0)
    times = body + _TIMES
    if end >= times + _MICROSECONDS and buf[body + 25] == _LOGICAL_CLOCK:
        commit_us = load_i64(buf, times) & ((1 << 56) - 1)
        if commit_us & _HAS_ORIGINAL:
            if end < times + 2 * _MICROSECONDS:
                return c.NEED_DECODER
            commit_us = load_i64(buf, times + _MICROSECONDS) & ((1 << 56) - 1)
    plan[c.SCN] = scn
    plan[c.SEQ] = 0
    plan[c.EVENT_COUNT] = 0
    plan[c.COMMIT_US] = commit_us if commit_us else load_u32(buf, at) * 1_000_000
    plan[c.GROUP_SERVER] = load_u32(buf, at + 5)
    plan[c.GROUP_DOMAIN] = plan[c.DOMAIN]
    plan[c.GROUP_FLAGS] = _STATEMENT | _BY_KERNEL
    plan[c.IN_GROUP] = 1
    plan[c.WANTED] = c.READ if scn > plan[c.RESOLVED] else c.NOT_READ
    plan[c.SEQ_NO_BEFORE] = plan[c.LAST_SEQ_NO]
    plan[c.LAST_SEQ_NO] = scn
    return _DONE


@jit_uncounted
def _begin_transaction(buf: U8Array, at: int, end: int, plan: I64Array) -> int:
    """The statement BEGIN; the decoder reads all others."""
    if plan[c.GROUP_FLAGS] != _STATEMENT | _BY_KERNEL or end - at < 13:
        return c.NEED_DECODER
    statement = at + 13 + load_u16(buf, at + 11) + i64(buf[at + 8]) + 1
    if not plan[c.IN_GROUP] or end - statement != len(_BEGIN):
        return c.NEED_DECODER
    for index in range(len(_BEGIN)):
        if buf[statement + index] != _BEGIN[index]:
            return c.NEED_DECODER
    plan[c.GROUP_FLAGS] = _TRANSACTION | _BY_KERNEL
    return _DONE


@jit_uncounted
def _may_end_group(plan: I64Array) -> bool:
    if plan[c.GROUPS] == c.GROUPS_MYSQL and plan[c.GROUP_FLAGS] != _TRANSACTION | _BY_KERNEL:
        return False
    return bool(plan[c.IN_GROUP] and plan[c.GROUPS])


@jit_uncounted
def _find_table(table_id: int, plan: I64Array) -> int:
    slots, mask = plan[c.AT_SLOTS], plan[c.SLOT_MASK]
    slot = table_id & mask
    while plan[slots + slot]:
        if plan[plan[slots + slot] + c.T_ID] == table_id:
            return i64(plan[slots + slot])
        slot = (slot + 1) & mask
    return -1


@jit_uncounted
def _known_table_map(buf: U8Array, at: int, end: int, blob: U8Array, plan: I64Array) -> int:
    index = _find_table(load_u32(buf, at) | load_u16(buf, at + 4) << 32, plan)
    if index < 0 or plan[index + c.T_BODY_BYTES] != end - at:
        return c.NEED_DECODER
    body = plan[index + c.T_BODY]
    for byte in range(end - at):
        if blob[body + byte] != buf[at + byte]:
            return c.NEED_DECODER
    return _DONE


@jit_uncounted
def _all_present(buf: U8Array, at: int, count: int) -> bool:
    for index in range(count):
        if not buf[at + (index >> 3)] >> (index & 7) & 1:
            return False
    return True


@jit_uncounted
def _rows(
    buf: U8Array,
    at: int,
    extra: int,
    end: int,
    kind: int,
    out: U8Array,
    images: U8Array,
    blob: U8Array,
    plan: I64Array,
) -> int:
    """The rows event whose body is ``buf[at:end]``, from RESUME_AT on if that is set.

    ``extra`` bytes are between its flags and its number of columns.
    """
    table = _find_table(load_u32(buf, at) | load_u16(buf, at + 4) << 32, plan)
    if table < 0:
        return c.NEED_DECODER
    if plan[table + c.T_MODE] == c.MODE_SKIP:
        return _DONE
    if plan[c.WANTED] != c.READ:
        return c.NEED_DECODER
    count = plan[table + c.T_COLUMNS]
    if plan[table + c.T_MODE] == c.MODE_PYTHON or count > 250 or buf[at + extra + 8] != count:
        return c.NEED_DECODER
    bitmap_bytes = (count + 7) // 8
    first = at + extra + 9
    cursor = first + bitmap_bytes
    if not _all_present(buf, first, count):
        return c.NEED_DECODER
    if kind == _UPDATE:
        if not _all_present(buf, cursor, count):
            return c.NEED_DECODER
        cursor += bitmap_bytes
    if plan[c.RESUME_AT]:
        cursor = at + plan[c.RESUME_AT]
    old = plan[c.AT_SPANS]
    new = old + 2 * count
    while cursor < end:
        # The Avro form of a value is longer by at most this.
        growth = 2 * (plan[table + c.T_EXTRA] + bitmap_bytes) + _SINGLE_BYTE_GROWTH * (end - cursor)
        need = 2 * growth + 2 * END_FRAME_BYTES
        if len(images) < growth or len(out) - plan[c.FILL] < need:
            plan[c.RESUME_AT] = cursor - at
            plan[c.NEED_BYTES] = need
            return c.NEED_ROOM
        after_row, first_stop = _image(buf, cursor, end, images, 0, table, blob, old, plan)
        if after_row < 0:
            return c.NEED_DECODER
        before_stop, after_start, stop = first_stop, 0, first_stop
        if kind == _UPDATE:
            after_start = first_stop
            after_row, stop = _image(
                buf, after_row, end, images, first_stop, table, blob, new, plan
            )
            if after_row < 0:
                return c.NEED_DECODER
        if kind == _UPDATE and _same_key(images, table, old, new, plan):
            put_event(
                out, UPDATE, plan, table, images, new, 0,
                before_stop, after_start, stop,
            )  # fmt: skip
        else:
            if kind != _WRITE:
                put_event(
                    out, DELETE, plan, table, images, old, 0,
                    before_stop, 0, -1,
                )  # fmt: skip
            if kind != _DELETE:
                put_event(
                    out, INSERT, plan, table, images,
                    new if kind == _UPDATE else old, 0, -1, after_start, stop,
                )  # fmt: skip
        cursor = after_row
        plan[c.ROWS_DONE] += 1
    return _DONE


@jit_uncounted
def _intact(buf: U8Array, at: int, end: int) -> bool:
    return crc32(buf, at, end - _CRC_BYTES) == load_u32(buf, end - _CRC_BYTES)


@jit_uncounted
def _event(
    buf: U8Array,
    at: int,
    end: int,
    out: U8Array,
    images: U8Array,
    blob: U8Array,
    plan: I64Array,
) -> int:
    """Read one event, which is wanted and intact."""
    if end - at < _HEADER_BYTES + _CRC_BYTES or load_u32(buf, at + 9) != end - at:
        return c.NEED_DECODER
    kind = i64(buf[at + 4])
    is_v2 = _WRITE_V2 <= kind <= _DELETE_V2
    is_rows = is_v2 or _WRITE <= kind <= _DELETE
    is_mysql = plan[c.GROUPS] == c.GROUPS_MYSQL and kind in (_MYSQL_GTID, _QUERY)
    if not (is_rows or is_mysql or kind in (_GTID, _TABLE_MAP, _XID)):
        return c.NEED_DECODER
    if (is_rows or kind == _TABLE_MAP) and not plan[c.WANTED]:
        return _DONE if plan[c.IN_GROUP] else c.NEED_DECODER
    if plan[c.CHECKSUMS]:
        if not plan[c.RESUME_AT] and not _intact(buf, at, end):
            return c.NEED_DECODER
        end -= _CRC_BYTES
    if kind == _GTID:
        if end - at < _HEADER_BYTES + 13:
            return c.NEED_DECODER
        return _begin_group(buf, at, plan)
    body = at + _HEADER_BYTES
    if kind == _MYSQL_GTID:
        return _begin_mysql_group(buf, at, end, plan) if end - body >= 26 else c.NEED_DECODER
    if kind == _QUERY:
        return _begin_transaction(buf, body, end, plan)
    if kind == _TABLE_MAP:
        return _known_table_map(buf, body, end, blob, plan)
    if kind == _XID:
        if not _may_end_group(plan):
            return c.NEED_DECODER
        if len(out) - plan[c.FILL] < END_FRAME_BYTES:
            plan[c.NEED_BYTES] = END_FRAME_BYTES
            return c.NEED_ROOM
        end_group(out, plan)
        return _DONE
    if end - body < 10:
        return c.NEED_DECODER
    extra = load_u16(buf, body + 8) if is_v2 else i64(0)
    if body + 10 + extra > end:
        return c.NEED_DECODER
    kind -= _V2 if is_v2 else 0
    return _rows(buf, body, extra, end, kind, out, images, blob, plan)


@jit_uncounted
def walk(
    buf: U8Array,
    start: int,
    stop: int,
    out: U8Array,
    images: U8Array,
    blob: U8Array,
    plan: I64Array,
) -> int:
    """Turn the packets in ``buf[start:stop]`` into frames in ``out``.

    Returns why it stopped.  STOPPED_AT is where: before a packet that is incomplete, that the
    decoder must read, or that needs NEED_BYTES of space.
    """
    at = start
    while True:
        plan[c.STOPPED_AT] = at
        if stop - at < 5:
            return c.NEED_INPUT
        size = load_u32(buf, at) & 0xFFFFFF
        if size in (0, _LONGEST_PACKET) or buf[at + 4]:
            return c.NEED_DECODER
        begin, end = at + 5, at + 4 + size
        if end > stop:
            return c.NEED_INPUT
        reason = _event(buf, begin, end, out, images, blob, plan)
        if reason != _DONE:
            return reason
        plan[c.RESUME_AT] = 0
        plan[c.ROWS_DONE] = 0
        if not load_u16(buf, begin + 17) & _ARTIFICIAL:
            offset = load_u32(buf, begin + 13)
            if offset:
                plan[c.SERVER_OFFSET] = plan[c.END_OFFSET] = offset
            else:
                plan[c.END_OFFSET] += end - begin
        at = end
