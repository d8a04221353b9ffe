"""The mapped tables as arrays of numbers, for the kernel.

``MySqlKernelTables`` describes every mapped table of a stream in a few arrays.  A table with a
column that the kernel does not support is marked, and the Python decoder reads its rows.
"""

from __future__ import annotations

import numpy as np

from databus.common.schema.source_schema import Kind
from databus.relay.sources.mysql.kernels import kernel_cells as c
from databus.relay.sources.mysql.protocol.binlog_events import ENUM, SET, STRING
from databus.relay.sources.mysql.rows import column_readers as types
from databus.relay.sources.mysql.rows.column_readers import StreamColumn
from databus.relay.sources.mysql.tables.mapped_table import MappedTable

_SIZED = (
    types.VARCHAR,
    types.VAR_STRING,
    STRING,
    types.BLOB,
    types.GEOMETRY,
    types.VECTOR,
)
_SINGLE_BYTE_GROWTH = 3
_LONGEST_FIXED_BYTES = 48
_ADDRESSES = {"uuid": c.OP_UUID, "inet4": c.OP_INET4, "inet6": c.OP_INET6}
_DATE_TEXTS = {
    types.DATE: c.OP_DATE_TEXT,
    types.DATETIME2: c.OP_DATETIME_TEXT,
    types.TIMESTAMP2: c.OP_TIMESTAMP_TEXT,
}


class MySqlKernelTables:
    """Mapped tables in one array of numbers, the plan, and one of bytes, the blob.

    Invariants:
        I1. ``plan`` is the head, then tables, columns, keys, lists, slots and spans; every
            offset in it is counted from its beginning.
        I2. The slots find a table by its id, by linear probing; at least half are free.

    Owner: the task that reads the stream.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all tables: table ids restart with each binlog file."""
        self._rows: list[list[int]] = []
        self._columns: list[list[int]] = []
        self._keys: list[int] = []
        self._lists: list[int] = []
        self._blob = bytearray()
        self._texts: dict[str, int] = {}
        self._freeze()

    def add(
        self, table_id: int, body: bytes, mapped: MappedTable | None, for_decoder: bool = False
    ) -> None:
        """Add a table, or the new definition of one; None is a table that is not captured.

        ``for_decoder``: the Python decoder reads its rows.
        """
        row = [0] * c.TABLE_FIELDS
        row[c.T_ID], row[c.T_BODY], row[c.T_BODY_BYTES] = table_id, len(self._blob), len(body)
        self._blob += body
        if mapped is not None:
            self._add_columns(row, mapped)
        if for_decoder:
            row[c.T_MODE] = c.MODE_PYTHON
        self._rows = [old for old in self._rows if old[c.T_ID] != table_id]
        self._rows.append(row)
        self._freeze()

    def _add_columns(self, row: list[int], mapped: MappedTable) -> None:
        coded = [self._column(column) for column in mapped.columns]
        row[c.T_MODE] = c.MODE_PYTHON if None in coded else c.MODE_KERNEL
        row[c.T_NULLABLE_KEY] = int(mapped.schema.nullable_key)
        row[c.T_COLUMN], row[c.T_COLUMNS] = len(self._columns), len(coded)
        row[c.T_KEY], row[c.T_KEYS] = len(self._keys), len(mapped.key_indices)
        row[c.T_SOURCE] = mapped.schema.source_id
        row[c.T_SCHEMA] = mapped.schema.signed_fingerprint
        row[c.T_EXTRA] = sum(code[c.C_EXTRA] for code in coded if code)
        self._columns += [code or [0] * c.COLUMN_FIELDS for code in coded]
        self._keys += mapped.key_indices

    def _freeze(self) -> None:
        at_tables = c.HEAD
        at_columns = at_tables + c.TABLE_FIELDS * len(self._rows)
        at_keys = at_columns + c.COLUMN_FIELDS * len(self._columns)
        at_lists = at_keys + len(self._keys)
        at_slots = at_lists + len(self._lists)
        slot_count = 1 << (2 * len(self._rows) + 1).bit_length()
        at_spans = at_slots + slot_count
        most_columns = max((row[c.T_COLUMNS] for row in self._rows), default=0)
        plan = [0] * (at_spans + 4 * most_columns)
        plan[c.AT_SLOTS], plan[c.SLOT_MASK], plan[c.AT_SPANS] = at_slots, slot_count - 1, at_spans
        for index, row in enumerate(self._rows):
            line = at_tables + c.TABLE_FIELDS * index
            plan[line : line + c.TABLE_FIELDS] = row
            plan[line + c.T_COLUMN] = at_columns + c.COLUMN_FIELDS * row[c.T_COLUMN]
            plan[line + c.T_KEY] = at_keys + row[c.T_KEY]
            slot = row[c.T_ID] & (slot_count - 1)
            while plan[at_slots + slot]:
                slot = (slot + 1) & (slot_count - 1)
            plan[at_slots + slot] = line
        for index, column in enumerate(self._columns):
            line = at_columns + c.COLUMN_FIELDS * index
            plan[line : line + c.COLUMN_FIELDS] = column
            if column[c.C_OP] in (c.OP_ENUM, c.OP_SET):
                plan[line + c.C_B] += at_lists
        plan[at_keys:at_lists] = self._keys
        plan[at_lists:at_slots] = self._lists
        self.plan = np.array(plan, dtype=np.int64)
        self.blob = np.frombuffer(bytes(self._blob) + b"\0", dtype=np.uint8)

    # -- columns

    def _column(self, column: StreamColumn) -> list[int] | None:
        """[op, a, b, nullable, extra bytes, zero dates as null]; None: not supported."""
        found = self._code(column)
        if found is None:
            return None
        op, a, b, extra = found
        null_zero = column.zero_dates == "null" and column.column.kind in types.DATED
        return [op, a, b, int(column.column.nullable), extra, int(null_zero)]

    def _code(self, column: StreamColumn) -> tuple[int, int, int, int] | None:
        code, meta = column.code, column.meta
        fixed = _LONGEST_FIXED_BYTES
        if code in types.INTEGER_BYTES:
            width = types.INTEGER_BYTES[code]
            if not column.unsigned:
                return c.OP_SIGNED, width, 0, fixed
            return (c.OP_UINT64, 0, 0, fixed) if width == 8 else (c.OP_UNSIGNED, width, 0, fixed)
        if code in _SIZED:
            return self._sized(column)
        if code in (ENUM, SET):
            op = c.OP_ENUM if code == ENUM else c.OP_SET
            sizes = [len(member.encode()) + 1 for member in column.members]
            longest = max(sizes, default=0) if code == ENUM else sum(sizes)
            return op, meta & 255, self._members(column.members), fixed + longest
        if code == types.BIT:
            width = (meta >> 8) + (meta & 255 > 0)
            return c.OP_BIT64 if column.column.kind is Kind.UINT64 else c.OP_BIT, width, 0, fixed
        if column.is_date_text:
            return _DATE_TEXTS[code], meta, 0, fixed
        simple = {
            types.FLOAT: c.OP_FLOAT,
            types.DOUBLE: c.OP_DOUBLE,
            types.YEAR: c.OP_YEAR,
            types.DATE: c.OP_DATE,
            types.DATETIME2: c.OP_DATETIME,
            types.TIMESTAMP2: c.OP_TIMESTAMP,
            types.TIME2: c.OP_TIME,
        }
        if code in simple:
            return simple[code], meta, 0, fixed
        if code == types.NEWDECIMAL:
            return c.OP_DECIMAL, meta >> 8, meta & 255, fixed
        return None

    def _sized(self, column: StreamColumn) -> tuple[int, int, int, int] | None:
        name, length_bytes = column.column.type_name, column.length_bytes
        if name in _ADDRESSES:
            return _ADDRESSES[name], length_bytes, 0, _LONGEST_FIXED_BYTES
        if column.code == STRING and column.column.kind is Kind.BYTES:
            width = types.char_bytes(column.meta)
            return c.OP_PADDED, length_bytes, width, width + _LONGEST_FIXED_BYTES
        charset = column.charset
        if column.column.kind is Kind.BYTES or charset is None:
            return c.OP_BYTES, length_bytes, 0, _LONGEST_FIXED_BYTES
        if charset.is_utf8:
            return c.OP_UTF8, length_bytes, 0, _LONGEST_FIXED_BYTES
        if charset.is_single_byte:
            return c.OP_SINGLE_BYTE, length_bytes, self._text(charset.table), _LONGEST_FIXED_BYTES
        return None

    def _text(self, table: str) -> int:
        """Offset in ``blob`` of 256 entries of four bytes: a length and up to three of UTF-8."""
        if table not in self._texts:
            self._texts[table] = len(self._blob)
            for character in table:
                data = character.encode()
                self._blob += bytes([len(data)]) + data.ljust(_SINGLE_BYTE_GROWTH, b"\0")
        return self._texts[table]

    def _members(self, members: tuple[str, ...]) -> int:
        """Offset in ``lists`` of a count and (offset, length) in ``blob`` of each member."""
        at = len(self._lists)
        self._lists.append(len(members))
        for member in members:
            data = member.encode()
            self._lists += [len(self._blob), len(data)]
            self._blob += data
        return at
