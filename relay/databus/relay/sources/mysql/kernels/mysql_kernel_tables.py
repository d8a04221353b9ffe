"""The mapped tables as arrays of numbers, for the kernel.

``MySqlKernelTables`` describes every mapped table of a stream in a few arrays.  A table with a
column that the kernel does not support is marked, and the Python decoder reads its rows.
"""

from __future__ import annotations

import numpy as np

from databus.common.compiled.kernels import I64Array, U8Array
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
        I1. ``plan`` is the head, then tables, columns, keys, lists, slots and spans, each with room
            for more; every offset in it is counted from its beginning.
        I2. The slots find a table by its id, by linear probing; at least half are free.
        I3. A new table costs what its columns cost, however many tables there are.

    Owner: the task that reads the stream.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all tables: table ids restart with each binlog file."""
        self._rows: list[list[int]] = []
        self._ids: set[int] = set()
        self._columns: list[list[int]] = []
        self._keys: list[int] = []
        self._lists: list[int] = []
        self._blob = bytearray()
        self._texts: dict[str, int] = {}
        self._widest = self._blob_bytes = 0
        self.blob: U8Array = np.zeros(1, dtype=np.uint8)
        self._lay_out()

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
        is_new = table_id not in self._ids
        if not is_new:
            self._rows = [old for old in self._rows if old[c.T_ID] != table_id]
        self._ids.add(table_id)
        self._rows.append(row)
        if is_new and self._has_room():
            self._write()
        else:
            self._lay_out()

    def _add_columns(self, row: list[int], mapped: MappedTable) -> None:
        coded = [self._column(column) for column in mapped.columns]
        row[c.T_MODE] = c.MODE_PYTHON if None in coded else c.MODE_KERNEL
        row[c.T_NULLABLE_KEY] = int(mapped.schema.nullable_key)
        row[c.T_COLUMN], row[c.T_COLUMNS] = len(self._columns), len(coded)
        row[c.T_KEY], row[c.T_KEYS] = len(self._keys), len(mapped.key_indices)
        self._widest = max(self._widest, len(coded))
        row[c.T_SOURCE] = mapped.schema.source_id
        row[c.T_SCHEMA] = mapped.schema.signed_fingerprint
        row[c.T_EXTRA] = sum(code[c.C_EXTRA] for code in coded if code)
        self._columns += [code or [0] * c.COLUMN_FIELDS for code in coded]
        self._keys += mapped.key_indices

    def _counts(self) -> list[int]:
        """How many tables, columns, keys and lists there are, and the most columns of a table."""
        rows, columns = len(self._rows), len(self._columns)
        return [rows, columns, len(self._keys), len(self._lists), self._widest]

    def _has_room(self) -> bool:
        return all(count <= room for count, room in zip(self._counts(), self._room, strict=True))

    def _lay_out(self) -> None:
        """Make a plan with room for twice what there is."""
        self._room = [2 * count + 16 for count in self._counts()]
        tables, columns, keys, lists, widest = self._room
        self._at_columns = c.HEAD + c.TABLE_FIELDS * tables
        self._at_keys = self._at_columns + c.COLUMN_FIELDS * columns
        self._at_lists = self._at_keys + keys
        at_slots = self._at_lists + lists
        slot_count = 1 << (2 * tables + 1).bit_length()
        at_spans = at_slots + slot_count
        self.plan: I64Array = np.zeros(at_spans + 4 * widest, dtype=np.int64)
        self.plan[[c.AT_SLOTS, c.SLOT_MASK, c.AT_SPANS]] = at_slots, slot_count - 1, at_spans
        self._written = [0] * len(self._room)
        self._write()

    def _write(self) -> None:
        """Write into the plan and the blob what they lack."""
        plan, before, counts = self.plan, self._written, self._counts()
        at_slots, mask = int(plan[c.AT_SLOTS]), int(plan[c.SLOT_MASK])
        for index in range(before[0], counts[0]):
            row, line = self._rows[index], c.HEAD + c.TABLE_FIELDS * index
            plan[line : line + c.TABLE_FIELDS] = row
            plan[line + c.T_COLUMN] = self._at_columns + c.COLUMN_FIELDS * row[c.T_COLUMN]
            plan[line + c.T_KEY] = self._at_keys + row[c.T_KEY]
            slot = row[c.T_ID] & mask
            while plan[at_slots + slot]:
                slot = (slot + 1) & mask
            plan[at_slots + slot] = line
        for index in range(before[1], counts[1]):
            column, line = self._columns[index], self._at_columns + c.COLUMN_FIELDS * index
            plan[line : line + c.COLUMN_FIELDS] = column
            if column[c.C_OP] in (c.OP_ENUM, c.OP_SET):
                plan[line + c.C_B] += self._at_lists
        plan[self._at_keys + before[2] : self._at_keys + counts[2]] = self._keys[before[2] :]
        plan[self._at_lists + before[3] : self._at_lists + counts[3]] = self._lists[before[3] :]
        self._written = counts
        self._write_blob()

    def _write_blob(self) -> None:
        if len(self._blob) >= len(self.blob):
            self.blob = np.zeros(2 * len(self._blob) + 1, dtype=np.uint8)
            self._blob_bytes = 0
        end, added = len(self._blob), bytes(self._blob[self._blob_bytes :])
        self.blob[self._blob_bytes : end] = np.frombuffer(added, dtype=np.uint8)
        self._blob_bytes = end

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
