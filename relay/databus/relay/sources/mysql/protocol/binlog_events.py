"""Binlog events other than rows: pure functions from bytes to records.

Layouts: MariaDB's documentation, "Replication Protocol" and "Binlog event types".
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from databus.common.errors import FormatError, UnsupportedChange

HEADER_BYTES = 19
CRC_BYTES = 4
ARTIFICIAL = 0x20
"""The flag of an event that the server made for the reader.  Such an event is in no file."""
_HEADER = struct.Struct("<IBIIIH")


class EventType(IntEnum):
    """The event types that this reader knows."""

    QUERY = 2
    STOP = 3
    ROTATE = 4
    INTVAR = 5
    APPEND_BLOCK = 9
    DELETE_FILE = 11
    RAND = 13
    USER_VAR = 14
    FORMAT_DESCRIPTION = 15
    XID = 16
    BEGIN_LOAD_QUERY = 17
    EXECUTE_LOAD_QUERY = 18
    TABLE_MAP = 19
    WRITE_ROWS = 23
    UPDATE_ROWS = 24
    DELETE_ROWS = 25
    INCIDENT = 26
    HEARTBEAT = 27
    WRITE_ROWS_V2 = 30
    UPDATE_ROWS_V2 = 31
    DELETE_ROWS_V2 = 32
    MYSQL_GTID = 33
    ANONYMOUS_GTID = 34
    PREVIOUS_GTIDS = 35
    TRANSACTION_CONTEXT = 36
    VIEW_CHANGE = 37
    XA_PREPARE = 38
    PARTIAL_UPDATE_ROWS = 39
    TRANSACTION_PAYLOAD = 40
    HEARTBEAT_V2 = 41
    TAGGED_GTID = 42
    ANNOTATE_ROWS = 160
    BINLOG_CHECKPOINT = 161
    GTID = 162
    GTID_LIST = 163
    START_ENCRYPTION = 164
    QUERY_COMPRESSED = 165
    WRITE_ROWS_COMPRESSED = 166
    UPDATE_ROWS_COMPRESSED = 167
    DELETE_ROWS_COMPRESSED = 168
    WRITE_ROWS_COMPRESSED_V2 = 169
    UPDATE_ROWS_COMPRESSED_V2 = 170
    DELETE_ROWS_COMPRESSED_V2 = 171


_ROWS_V2 = {
    EventType.WRITE_ROWS_V2: EventType.WRITE_ROWS,
    EventType.UPDATE_ROWS_V2: EventType.UPDATE_ROWS,
    EventType.DELETE_ROWS_V2: EventType.DELETE_ROWS,
    EventType.PARTIAL_UPDATE_ROWS: EventType.UPDATE_ROWS,
}
ROWS_EVENTS = frozenset({*_ROWS_V2.keys(), *_ROWS_V2.values()})
OTHER_ROWS_EVENTS = frozenset({20, 21, 22})
_MADE_WITHOUT_FLAG = frozenset(
    {EventType.FORMAT_DESCRIPTION, EventType.HEARTBEAT, EventType.HEARTBEAT_V2}
)


class GtidFlag(IntEnum):
    """Bits of a GTID event's flags."""

    STANDALONE = 1
    TRANSACTIONAL = 4
    DDL = 32
    PREPARED_XA = 64


@dataclass(frozen=True, slots=True)
class Header:
    """An event's header.

    ``end_offset`` is where the event ends in its file.  It is 0 if the event is artificial, and
    since MariaDB 11.4 also between the first and the last event of a transaction (MDEV-31273).
    """

    timestamp_s: int
    type: int
    server_id: int
    length: int
    end_offset: int
    flags: int

    @property
    def is_in_file(self) -> bool:
        """Whether the event is in its file.  The server makes other events while it sends."""
        if self.flags & ARTIFICIAL or self.type == EventType.ROTATE:
            return False
        return self.end_offset > 0 or self.type not in _MADE_WITHOUT_FLAG

    def end_after(self, offset: int) -> int:
        """Where the event ends, if the previous one ended at ``offset``.

        If the event has no end position, this is a lower bound: the file also has ANNOTATE_ROWS
        events, which the server does not send.
        """
        return self.end_offset or offset + self.length

    def of_plain(self, kind: int, body_bytes: int) -> bytes:
        """The header of an event inside this one; it has no position in the file."""
        length = HEADER_BYTES + body_bytes
        return _HEADER.pack(self.timestamp_s, kind, self.server_id, length, 0, self.flags)


@dataclass(frozen=True, slots=True)
class Gtid:
    """The beginning of an event group."""

    seq_no: int
    domain_id: int
    flags: int


@dataclass(frozen=True, slots=True)
class TableMap:
    """The table of the rows events with ``table_id``, as the stream describes it.

    ``names`` is empty if the binlog has no column names; ``unsigned`` may be empty then, too.
    """

    table_id: int
    schema: str
    table: str
    types: bytes
    metas: tuple[int, ...]
    nullable: tuple[bool, ...]
    unsigned: tuple[bool, ...]
    collations: tuple[int, ...]
    names: tuple[str, ...]
    members: tuple[tuple[bytes, ...], ...]
    primary_key: tuple[int, ...]


def read_header(data: memoryview) -> Header:
    """The header at the beginning of an event."""
    if len(data) < HEADER_BYTES:
        raise FormatError(f"an event of {len(data)} bytes is shorter than its header")
    return Header(*_HEADER.unpack_from(data))


def read_gtid(body: memoryview) -> Gtid:
    """A GTID event's body."""
    return Gtid(*struct.unpack_from("<QIB", body))


def read_query(body: memoryview) -> tuple[str, str]:
    """The default schema and the statement of a QUERY event."""
    schema_bytes = body[8]
    (status_bytes,) = struct.unpack_from("<H", body, 11)
    at = 13 + status_bytes
    schema = bytes(body[at : at + schema_bytes]).decode("utf-8", "replace")
    return schema, bytes(body[at + schema_bytes + 1 :]).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """A QUERY event and its session's settings; ``collation`` of the text is 0 if unknown."""

    schema: str
    text: bytes
    sql_mode: int
    collation: int


_STATUS_BYTES = {0: 4, 1: 8, 3: 4, 4: 6, 7: 2, 8: 2, 9: 8, 10: 4}
"""Sizes of the status variables between the needed ones."""
_SQL_MODE, _CATALOG, _CHARSET, _TIME_ZONE, _CATALOG_NZ = 1, 2, 4, 5, 6


def read_query_event(body: memoryview) -> QueryEvent:
    """A QUERY event's body, with the status variables that determine how its text is read.

    The server writes them in the order of their numbers.  Reading ends at an unknown one, because
    no needed variable has a larger number.
    """
    (status_bytes,) = struct.unpack_from("<H", body, 11)
    status = body[13 : 13 + status_bytes]
    sql_mode = collation = at = 0
    while at < len(status):
        kind = status[at]
        at += 1
        if kind == _SQL_MODE:
            (sql_mode,) = struct.unpack_from("<Q", status, at)
        elif kind == _CHARSET:
            (collation,) = struct.unpack_from("<H", status, at)
        if kind in _STATUS_BYTES:
            at += _STATUS_BYTES[kind]
        elif kind in (_CATALOG, _TIME_ZONE, _CATALOG_NZ):
            at += 1 + status[at] + (kind == _CATALOG)
        else:
            break
    end = 13 + status_bytes + body[8]
    schema = bytes(body[13 + status_bytes : end]).decode("utf-8", "replace")
    return QueryEvent(schema, bytes(body[end + 1 :]), sql_mode, collation)


_LOAD_FILE_BYTES = 13


def load_query(body: memoryview) -> memoryview:
    """An EXECUTE_LOAD_QUERY event's body as that of a QUERY event, without the file's fields."""
    return memoryview(bytes(body[:13]) + bytes(body[13 + _LOAD_FILE_BYTES :]))


THREAD_SPECIFIC = 0x4
"""The flag of a statement that used an object of its session, such as a temporary table."""


def read_rotate(body: memoryview) -> tuple[str, int]:
    """The next file, and the offset in it."""
    (offset,) = struct.unpack_from("<Q", body)
    return bytes(body[8:]).decode(), offset


def read_checksum_algorithm(body: memoryview) -> int:
    """0 or 1 (CRC-32) from a FORMAT_DESCRIPTION event's body, its own checksum included."""
    return body[len(body) - CRC_BYTES - 1]


def read_server_version(body: memoryview) -> str:
    """The version of the server that wrote a file, from its FORMAT_DESCRIPTION."""
    return bytes(body[2:52]).rstrip(b"\0").decode("ascii", "replace")


def packed_int(data: memoryview | bytes, at: int) -> tuple[int, int]:
    """A length-encoded number, and the offset after it."""
    first = data[at]
    if first < 251:
        return first, at + 1
    width = {252: 2, 253: 3, 254: 8}.get(first)
    if width is None:
        raise FormatError(f"{first} does not begin a packed number")
    return int.from_bytes(data[at + 1 : at + 1 + width], "little"), at + 1 + width


def rows_event(kind: int, body: memoryview) -> tuple[EventType, int]:
    """The kind of row change, and the offset of the column count in the body.

    MySQL's form has a block of extra data before the count; its length includes itself.
    """
    v1 = _ROWS_V2.get(EventType(kind))
    if v1 is None:
        return EventType(kind), 8
    return v1, 8 + int.from_bytes(body[8:10], "little")


def table_map_names(body: memoryview) -> tuple[int, str, str]:
    """Table id, schema and table of a TABLE_MAP event, without the rest."""
    table_id = int.from_bytes(body[0:6], "little")
    schema_end = 9 + body[8]
    schema = bytes(body[9:schema_end]).decode()
    table_start = schema_end + 2
    return table_id, schema, bytes(body[table_start : table_start + body[schema_end + 1]]).decode()


def names_columns(body: memoryview) -> bool:
    """Whether a TABLE_MAP event has the names of its columns (binlog_row_metadata = FULL)."""
    at = 9 + body[8] + 1
    at += 1 + body[at] + 1
    count, at = packed_int(body, at)
    meta_bytes, at = packed_int(body, at + count)
    return _COLUMN_NAMES in _optional(body, at + meta_bytes + (count + 7) // 8)


_COLUMN_NAMES = 4

TEXT_OF_MYSQL = frozenset({15, 242, 252, 253, 254})
"""Types that the list of character sets counts."""
TEXT_OF_MARIADB = TEXT_OF_MYSQL | {140, 141, 255}
"""The same in MariaDB, which also counts geometry, a kind of blob."""


def counts_years(server_version: str) -> bool | None:
    """Whether the list of signs counts YEAR columns; None for versions that were not examined.

    MySQL 8.0.15 does not count them; later versions and MariaDB do.
    """
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", server_version)
    version = tuple(map(int, numbers.groups())) if numbers else (0, 0, 0)
    if "MariaDB" in server_version or version >= (8, 0, 20):
        return True
    return False if version < (8, 0, 17) else None


def read_table_map(
    body: memoryview,
    textual: frozenset[int] = TEXT_OF_MARIADB,
    years_have_signs: bool | None = True,
) -> TableMap:
    """A whole TABLE_MAP event; ``textual`` are the types that its list of character sets counts.

    ``years_have_signs``: see ``counts_years``.

    Raises:
        FormatError: the bytes are no table map.
        UnsupportedChange: which columns are unsigned cannot be known.
    """
    table_id, schema, table = table_map_names(body)
    at = 9 + body[8] + 1
    at += 1 + body[at] + 1
    count, at = packed_int(body, at)
    types = bytes(body[at : at + count])
    meta_bytes, at = packed_int(body, at + count)
    metas = _metas(types, body[at : at + meta_bytes])
    at += meta_bytes
    null_bytes = (count + 7) // 8
    nulls = body[at : at + null_bytes]
    at += null_bytes
    extra = _optional(body, at)
    real = tuple(_real_type(code, meta) for code, meta in zip(types, metas, strict=True))
    names = tuple(name.decode() for name in _strings(extra.get(_COLUMN_NAMES, body[:0])))
    if names and len(names) != count:
        raise FormatError(f"{schema}.{table}: {count} columns, but {len(names)} names")
    members = _members(real, extra) if names else ()
    return TableMap(
        table_id,
        schema,
        table,
        bytes(real),
        metas,
        tuple(bool(nulls[i >> 3] >> (i & 7) & 1) for i in range(count)),
        _signs(real, extra.get(1), years_have_signs) if names or 1 in extra else (),
        _collations(real, extra, textual),
        names,
        members,
        _primary_key(extra),
    )


_TWO_BYTE_META = frozenset({15, 16, 246, 247, 248, 253, 254, 141})
_ONE_BYTE_META = frozenset({4, 5, 17, 18, 19, 242, 245, 249, 250, 251, 252, 255, 140})
_NUMERIC = frozenset({1, 2, 3, 4, 5, 8, 9, 13, 246})
"""Types that the list of signs counts; for YEAR see ``counts_years``."""
_YEAR = 13
ENUM, SET, STRING = 247, 248, 254


def _metas(types: bytes, data: memoryview) -> tuple[int, ...]:
    metas = []
    at = 0
    for code in types:
        if code in (246, 247, 248, 254):
            metas.append(data[at] << 8 | data[at + 1])
            at += 2
        elif code in _TWO_BYTE_META:
            metas.append(data[at] | data[at + 1] << 8)
            at += 2
        elif code in _ONE_BYTE_META:
            metas.append(data[at])
            at += 1
        else:
            metas.append(0)
    if at != len(data):
        raise FormatError(f"the table map's metadata has {len(data)} bytes, its types need {at}")
    return tuple(metas)


def _real_type(code: int, meta: int) -> int:
    """ENUM and SET are logged as STRING with their own type number in the metadata."""
    if code == STRING and meta >> 8 in (ENUM, SET):
        return meta >> 8
    return code


def _optional(body: memoryview, at: int) -> dict[int, memoryview]:
    found = {}
    while at < len(body):
        kind = body[at]
        length, at = packed_int(body, at + 1)
        found[kind] = body[at : at + length]
        at += length
    return found


def _strings(data: memoryview) -> list[bytes]:
    at = 0
    found = []
    while at < len(data):
        length, at = packed_int(data, at)
        found.append(bytes(data[at : at + length]))
        at += length
    return found


def _numbers(data: memoryview) -> list[int]:
    at = 0
    found = []
    while at < len(data):
        value, at = packed_int(data, at)
        found.append(value)
    return found


def _signs(
    types: tuple[int, ...], data: memoryview | None, years_have_signs: bool | None
) -> tuple[bool, ...]:
    signs = []
    number = 0
    if years_have_signs is None and _YEAR in types:
        raise UnsupportedChange(
            "the table has a YEAR column, and this version of MySQL (8.0.17 to 8.0.19) does not "
            "say which other columns are unsigned; upgrade the server to 8.0.20 or later"
        )
    counted = _NUMERIC if years_have_signs else _NUMERIC - {_YEAR}
    for code in types:
        if code not in counted or data is None:
            signs.append(False)
            continue
        signs.append(bool(data[number >> 3] & 0x80 >> (number & 7)))
        number += 1
    return tuple(signs)


def _collations(
    types: tuple[int, ...], extra: dict[int, memoryview], textual: frozenset[int]
) -> tuple[int, ...]:
    text = _expanded(sum(code in textual for code in types), extra.get(2), extra.get(3))
    listed = _expanded(sum(code in (ENUM, SET) for code in types), extra.get(10), extra.get(11))
    texts, lists = iter(text), iter(listed)
    return tuple(
        next(texts) if code in textual else next(lists) if code in (ENUM, SET) else 0
        for code in types
    )


def _expanded(count: int, default: memoryview | None, each: memoryview | None) -> list[int]:
    if each is not None:
        return _numbers(each)
    if default is None:
        return [0] * count
    first, *pairs = _numbers(default)
    collations = [first] * count
    for index, collation in zip(pairs[::2], pairs[1::2], strict=True):
        collations[index] = collation
    return collations


def _members(types: tuple[int, ...], extra: dict[int, memoryview]) -> tuple[tuple[bytes, ...], ...]:
    sets = iter(_lists(extra[5]) if 5 in extra else [])
    enums = iter(_lists(extra[6]) if 6 in extra else [])
    return tuple(
        next(sets) if code == SET else next(enums) if code == ENUM else () for code in types
    )


def _lists(data: memoryview) -> list[tuple[bytes, ...]]:
    at = 0
    found = []
    while at < len(data):
        count, at = packed_int(data, at)
        values = []
        for _ in range(count):
            length, at = packed_int(data, at)
            values.append(bytes(data[at : at + length]))
            at += length
        found.append(tuple(values))
    return found


def _primary_key(extra: dict[int, memoryview]) -> tuple[int, ...]:
    if 8 in extra:
        return tuple(_numbers(extra[8]))
    if 9 in extra:
        return tuple(_numbers(extra[9])[::2])
    return ()


PASSED_OVER = frozenset(
    {
        EventType.INTVAR,
        EventType.APPEND_BLOCK,
        EventType.DELETE_FILE,
        EventType.BEGIN_LOAD_QUERY,
        EventType.RAND,
        EventType.USER_VAR,
        EventType.ANNOTATE_ROWS,
        EventType.BINLOG_CHECKPOINT,
        EventType.GTID_LIST,
        EventType.START_ENCRYPTION,
        EventType.PREVIOUS_GTIDS,
        EventType.TRANSACTION_CONTEXT,
        EventType.VIEW_CHANGE,
    }
)
"""Events without changes of rows."""


def checked_body(header: Header, event: memoryview, checksums: bool, where: str) -> memoryview:
    """An event's body without its checksum, which is verified if there is one.

    Raises:
        FormatError: the checksum is wrong.
    """
    is_format = header.type == EventType.FORMAT_DESCRIPTION
    checked = read_checksum_algorithm(event) == 1 if is_format else checksums
    if not checked:
        # A format description has space for a checksum even without one.
        return event[HEADER_BYTES : len(event) - CRC_BYTES if is_format else len(event)]
    stop = len(event) - CRC_BYTES
    expected = int.from_bytes(event[stop:], "little")
    found = zlib.crc32(event[:stop])
    if found != expected:
        raise FormatError(
            f"{where}: the checksum of an event of type {header.type} and "
            f"{len(event)} bytes is {found:#010x}, expected {expected:#010x}"
        )
    return event[HEADER_BYTES:stop]
