"""Avro records with some of their values replaced or left out, byte by byte.

This is the reference for column_kernels.py, and the code for tables that the kernel cannot
walk.  Values that stay are copied as they are, never decoded.
"""

from __future__ import annotations

import hashlib
import hmac
import io
from collections.abc import Iterator, Sequence
from typing import Any

import fastavro

from databus.common.errors import FormatError
from databus.common.frame.frame_format import FrameView, pack_bitmap, pack_frame, unpack_bitmap
from databus.common.schema.source_schema import Column
from databus.relay.columns.column_rules import Action, ColumnPlan, TablePlan

# The form of a value in Avro: a zigzag number, one byte, eight bytes, a length and its bytes,
# or something that only an Avro reader can walk.
VARINT, BYTE, EIGHT, SIZED, OTHER = range(5)
_SHAPES = {"long": VARINT, "int": VARINT, "boolean": BYTE, "double": EIGHT}
_SHAPES |= {"string": SIZED, "bytes": SIZED}


def shape_of(column: Column) -> int:
    """The form of the column's values in Avro, without null."""
    plain = column.plain_avro_type
    name = plain[1] if column.nullable else plain
    return _SHAPES.get(name, OTHER) if isinstance(name, str) else OTHER


def read_number(data: bytes, at: int) -> tuple[int, int]:
    """The zigzag number at ``at``, and where it ends."""
    shift = value = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7


def put_text(text: bytes) -> bytes:
    """A string or bytes in Avro."""
    number, out = len(text) << 1, bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out) + text


def values_of(columns: Sequence[Column], data: bytes) -> Iterator[bytes | None]:
    """Each column's bytes in a record, None for null.

    Raises:
        FormatError: the bytes are not such a record.
    """
    at = 0
    try:
        for column in columns:
            if column.nullable:
                branch, at = read_number(data, at)
                if branch not in (0, 1):
                    raise FormatError(f"{column.name}: branch {branch} of null and a value")
                if not branch:
                    yield None
                    continue
            stop = _end(column, data, at)
            if not at <= stop <= len(data):
                raise FormatError(f"{column.name}: it ends at {stop} of {len(data)}")
            yield data[at:stop]
            at = stop
    except IndexError:
        raise FormatError(f"a record of {len(data)} bytes ends in the middle") from None
    if at != len(data):
        raise FormatError(f"a record ends at byte {at} of {len(data)}")


def _end(column: Column, data: bytes, at: int) -> int:
    shape = shape_of(column)
    if shape == VARINT:
        return read_number(data, at)[1]
    if shape == SIZED:
        length, at = read_number(data, at)
        return at + length
    if shape != OTHER:
        return at + (1 if shape == BYTE else 8)
    plain = column.plain_avro_type
    source = io.BytesIO(data[at:])
    fastavro.schemaless_reader(source, plain[1] if column.nullable else plain, None)
    return at + source.tell()


def hashed_text(column: Column, value: bytes) -> bytes:
    """The bytes of a value that are hashed.

    Texts as UTF-8, bytes as they are, booleans as ``true`` and ``false``, whole numbers, dates
    and times as the decimal digits of their Avro number, floats as eight bytes, decimals as the
    big-endian two's complement of their digits, anything else as its Avro bytes.
    """
    shape = shape_of(column)
    if shape == SIZED:
        return value[read_number(value, 0)[1] :]
    if shape == VARINT:
        return str(read_number(value, 0)[0]).encode()
    if shape == BYTE:
        return b"true" if value[0] else b"false"
    return value


def edited(column: Column, plan: ColumnPlan, salt: bytes, value: bytes | None) -> bytes:
    """A value after its plan, with the branch of its union; not for a dropped column."""
    action = plan.action
    if value is None or action is Action.NULL:
        return b"\0"
    branch = b"\x02" if column.nullable else b""
    if action is Action.KEEP:
        return branch + value
    if action is Action.MASK:
        return branch + put_text(plan.text.encode())
    text = hashed_text(column, value)
    if action is Action.TRUNCATE:
        return branch + put_text(text.decode()[: plan.length].encode())
    return branch + put_text(hmac.new(salt, text, hashlib.sha256).hexdigest().encode())


def edit_record(
    columns: Sequence[Column], plans: Sequence[ColumnPlan], salt: bytes, data: bytes
) -> bytes:
    """A record of ``columns`` with each column's plan applied."""
    return b"".join(
        edited(column, plan, salt, value)
        for column, plan, value in zip(columns, plans, values_of(columns, data), strict=True)
        if plan.action is not Action.DROP
    )


def edit_key(plan: TablePlan, key: bytes) -> bytes:
    """A key's bytes after the plan."""
    if not key or not plan.key_is_hashed:
        return key
    return edit_record(plan.before.key_columns, plan.key_plans(), plan.salt, key)


def edit_row(plan: TablePlan, row: bytes) -> bytes:
    """A row's bytes after the plan."""
    return edit_record(plan.before.columns, plan.columns, plan.salt, row)


def edit_bitmap(plan: TablePlan, bitmap: bytes) -> bytes:
    """The bitmap of absent columns, counted in the remaining columns."""
    absent = set(unpack_bitmap(bitmap))
    left = [i for i, one in enumerate(plan.columns) if one.action is not Action.DROP]
    indices = [number for number, index in enumerate(left) if index in absent]
    return pack_bitmap(indices, len(left)) if indices else b""


def edit_frame(plan: TablePlan, frame: FrameView) -> bytes:
    """A row change after the plan."""
    before, after = frame.before, frame.after
    kept_flags: Any = frame.flags & ~7
    return pack_frame(
        op=frame.op,
        scn=frame.scn,
        seq=frame.seq,
        source=frame.source_id,
        schema_fp=plan.after.fingerprint,
        commit_us=frame.commit_us,
        key=edit_key(plan, bytes(frame.key)),
        before=None if before is None else edit_row(plan, bytes(before)),
        after=None if after is None else edit_row(plan, bytes(after)),
        absent=edit_bitmap(plan, bytes(frame.absent)),
        extra_flags=kept_flags,
    )
