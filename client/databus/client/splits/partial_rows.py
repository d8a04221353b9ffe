"""Folds PARTIAL frames into the whole row before them, by their schemas.  Pure functions.

PostgreSQL does not log a large value that an update leaves alone, so the frame of such an update
lacks that column.  A row is Avro binary without a container: its fields lie back to back.  So the
whole row is made of fields of both, and no value is decoded.

Spark's workers need not have this package: ``spark_merges`` ships the module by value.
So its functions use constants of this module alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from databus.common.frame.frame_format import Flag
from databus.common.frame.header_layout import ALIGNMENT, CRC_BYTES, FIELDS, MAX_FRAME_BYTES
from databus.common.schema.source_schema import Column, SourceSchema

_HEADER = "<" + "".join(field.code for field in FIELDS)
_HEADER_BYTES = struct.calcsize(_HEADER)
_NAMES = tuple(field.name for field in FIELDS)
_ALIGNMENT, _CRC_BYTES, _MOST_BYTES = ALIGNMENT, CRC_BYTES, MAX_FRAME_BYTES
_HAS_AFTER, _PARTIAL = int(Flag.HAS_AFTER), int(Flag.PARTIAL)


@dataclass(frozen=True)
class ColumnLayout:
    """How one column lies in a row's bytes.

    Values of two columns with one ``meaning`` have the same bytes.  ``is_returned``: an earlier
    version of the table had a column of this name that a later one lacked.
    """

    name: str
    avro: str
    is_nullable: bool
    meaning: str
    is_returned: bool


Layout = tuple[ColumnLayout, ...]
Layouts = Mapping[int, Layout]
"""By fingerprint of the schema."""


def layouts_of(schemas: Iterable[SourceSchema]) -> dict[int, Layout]:
    """The layouts of schemas in the order of their announcement.

    A version that a table returned to is listed again.
    """
    found: dict[int, Layout] = {}
    before: dict[str, set[str]] = {}
    seen: dict[str, set[str]] = {}
    returned: dict[str, set[str]] = {}
    versions = list(schemas)
    for schema in versions:
        names = {column.name for column in schema.columns}
        known = seen.setdefault(schema.source, set())
        back = (names & known) - before.get(schema.source, names)
        returned.setdefault(schema.source, set()).update(back)
        before[schema.source] = names
        known |= names
    for schema in versions:
        back = returned[schema.source]
        found[schema.fingerprint] = tuple(_layout(one, back) for one in schema.columns)
    return found


def _layout(column: Column, returned: set[str]) -> ColumnLayout:
    plain = column.plain_avro_type
    avro = str(plain[1] if column.nullable else plain)
    meaning = f"{column.kind.value} {avro} {column.scale}"
    return ColumnLayout(column.name, avro, column.nullable, meaning, column.name in returned)


def folded(frames: Sequence[bytes], layouts: Layouts) -> list[bytes]:
    """A key's whole row and the PARTIAL ones after it as one frame; the same frames if not.

    The result has header and key of the last frame that it is made of, and no row before.  A
    PARTIAL frame and what follows it stay as they are if a layout is not known, or if the row
    before has no value of the same meaning for a column that the frame lacks.
    """
    row = _whole(frames[0], layouts)
    count = 1
    for frame in frames[1:]:
        patched = None if row is None else _patched(row, frame, layouts)
        if patched is None:
            break
        row, count = patched, count + 1
    made = _packed(frames[count - 1], row) if row is not None and count > 1 else None
    return list(frames) if made is None else [made, *frames[count:]]


@dataclass(frozen=True)
class _Row:
    """The fields of a row; None is null."""

    layout: Layout
    fields: list[bytes | None]


def _header(frame: bytes) -> dict[str, int]:
    return dict(zip(_NAMES, struct.unpack_from(_HEADER, frame), strict=True))


def _whole(frame: bytes, layouts: Layouts) -> _Row | None:
    header = _header(frame)
    layout = layouts.get(header["schema_fp"])
    if layout is None or header["flags"] & (_HAS_AFTER | _PARTIAL) != _HAS_AFTER:
        return None
    return _row(frame, header, layout)


def _row(frame: bytes, header: Mapping[str, int], layout: Layout) -> _Row | None:
    start = _HEADER_BYTES + header["key_len"] + header["before_len"]
    fields = _fields(frame[start : start + header["after_len"]], layout)
    return None if fields is None else _Row(layout, fields)


def _patched(before: _Row, frame: bytes, layouts: Layouts) -> _Row | None:
    """The row after a PARTIAL frame; None if it is not known."""
    header = _header(frame)
    layout = layouts.get(header["schema_fp"])
    row = None if layout is None else _row(frame, header, layout)
    if layout is None or row is None:
        return None
    columns = zip(before.layout, before.fields, strict=True)
    known = {column.name: (column.meaning, value) for column, value in columns}
    end = _HEADER_BYTES + header["key_len"] + header["before_len"] + header["after_len"]
    absent = int.from_bytes(frame[end : end + header["absent_len"]], "little")
    if absent >> len(layout):
        return None
    for index, column in enumerate(layout):
        if absent >> index & 1:
            meaning, value = known.get(column.name, ("", None))
            is_unfit = value is None and not column.is_nullable
            if column.is_returned or meaning != column.meaning or is_unfit:
                return None
            row.fields[index] = value
    return row


def _fields(row: bytes, layout: Layout) -> list[bytes | None] | None:
    """The bytes of each value, without the mark of a union; None if they are not such a row."""
    found: list[bytes | None] = []
    at = 0
    try:
        for column in layout:
            if column.is_nullable:
                mark, at = row[at], at + 1
                if mark == 0:
                    found.append(None)
                    continue
                if mark != 2:
                    return None
            end = _end(row, at, column.avro)
            found.append(row[at:end])
            at = end
    except IndexError:
        return None
    return found if at == len(row) else None


def _end(row: bytes, at: int, avro: str) -> int:
    """Where a value ends that begins at ``at``."""
    if avro == "boolean":
        return at + 1
    if avro == "double":
        return at + 8
    number = shift = 0
    while True:
        byte, at = row[at], at + 1
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            # An even number is not negative: twice the length of a string or of bytes.
            return at if avro in ("int", "long") else at + (number >> 1)


def _packed(frame: bytes, row: _Row) -> bytes | None:
    """The frame with a whole row instead of its own; None if it would be too long."""
    parts = []
    for column, value in zip(row.layout, row.fields, strict=True):
        if column.is_nullable:
            parts.append(b"\x00" if value is None else b"\x02")
        parts.append(value or b"")
    after = b"".join(parts)
    header = _header(frame)
    size = _HEADER_BYTES + header["key_len"] + len(after)
    length = -(-size // _ALIGNMENT) * _ALIGNMENT
    if length > _MOST_BYTES:
        return None
    header |= {"length": length, "flags": _HAS_AFTER}
    header |= {"before_len": 0, "after_len": len(after), "absent_len": 0}
    key = frame[_HEADER_BYTES : _HEADER_BYTES + header["key_len"]]
    rest = struct.pack(_HEADER, *header.values())[_CRC_BYTES:] + key + after
    rest += bytes(length - size)
    return _crc32c(rest).to_bytes(_CRC_BYTES, "little") + rest


def _crc32c(data: bytes) -> int:
    try:
        import google_crc32c
    except ImportError:  # a worker of a cluster need not have it
        return slow_crc32c(data)
    return int(google_crc32c.value(data))


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def slow_crc32c(data: bytes) -> int:
    """CRC-32C in Python alone."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF
