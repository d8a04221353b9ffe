"""Frames as Arrow columns: the rows of one table, typed by its schema, without an object per row.

For Spark, the exports and any reader of Arrow.  docs/spark.md lists the types.  Needs pyarrow
(extra ``bootstrap`` or ``export``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from databus.client.tables.arrow_kernels import cut_frames
from databus.common.compiled import avro_row_kernels as rk
from databus.common.compiled.kernels import I64Array, U8Array
from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame.frame_format import (
    OP_LETTERS,
    Flag,
    FrameColumns,
    FrameView,
    Op,
    trusted_frame,
)
from databus.common.frame.header_layout import gathered
from databus.common.schema.source_schema import Column, Kind, SourceSchema

METADATA = pa.schema(
    [
        ("_op", pa.string()),
        ("_scn", pa.int64()),
        ("_seq", pa.int64()),
        ("_commit_time", pa.timestamp("us", "UTC")),
        ("_absent", pa.list_(pa.string())),
    ]
)
"""The columns about a row's change: its op, its position and time, and the columns that a
partial update does not hold."""

RowsOfBytes = tuple[U8Array, FrameColumns, I64Array]
"""A block's bytes and headers, and the indices of rows in it."""
_Frames = tuple[U8Array, npt.NDArray[np.uint64], I64Array]
"""A block's bytes, the same as words, and the offsets of rows in it."""
_MAX_DIGITS = 38
_PLAIN: dict[Kind, tuple[int, Any]] = {
    Kind.BOOL: (rk.BOOLEAN, pa.bool_()),
    Kind.INT: (rk.LONG, pa.int64()),
    Kind.UINT64: (rk.DECIMAL, pa.decimal128(20, 0)),
    Kind.FLOAT: (rk.DOUBLE, pa.float64()),
    Kind.NUMERIC: (rk.BYTES, pa.string()),
    Kind.STRING: (rk.BYTES, pa.string()),
    Kind.BYTES: (rk.BYTES, pa.binary()),
    Kind.DATE: (rk.LONG, pa.date32()),
    Kind.TIME: (rk.LONG, pa.string()),
    Kind.TIME_SPAN: (rk.LONG, pa.int64()),
    Kind.TIMESTAMP: (rk.LONG, pa.timestamp("us")),
    Kind.TIMESTAMPTZ: (rk.LONG, pa.timestamp("us", "UTC")),
    Kind.UUID: (rk.BYTES, pa.string()),
    Kind.JSON: (rk.BYTES, pa.string()),
}


def arrow_type(column: Column) -> Any:
    """The Arrow type of a column's values."""
    return _code_and_type(column)[1]


def _code_and_type(column: Column) -> tuple[int, Any]:
    if column.kind is not Kind.DECIMAL:
        return _PLAIN[column.kind]
    if 0 < column.precision <= _MAX_DIGITS and 0 <= column.scale <= column.precision:
        return rk.DECIMAL, pa.decimal128(column.precision, column.scale)
    # More digits than Arrow, Spark and the table formats support: exact as text.
    return rk.BYTES, pa.string()


def table_schema(schema: SourceSchema, names: Sequence[str] | None = None) -> Any:
    """The Arrow schema of a table's rows, in column order, or of the columns named."""
    wanted = None if names is None else set(names)
    return pa.schema(
        [
            (column.name, arrow_type(column))
            for column in schema.columns
            if wanted is None or column.name in wanted
        ]
    )


class _Memory:
    """Arrays that one batch after the other uses: a fresh one costs a page fault for each page.

    Owner: one batch at a time.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def zeros(self, name: str, shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
        """The array ``name``, with zeros."""
        size = math.prod(shape)
        found = self._arrays.get(name)
        if found is None or len(found) < size:
            found = self._arrays[name] = np.empty(size, dtype=dtype)
        part = found[:size].reshape(shape)
        part.fill(0)
        return part


class _Cells:
    """Values of rows as the kernels write them: a slot for each column, those of bytes first.

    Owner: one batch, as its memory.
    """

    def __init__(self, slots: Mapping[str, int], columns: Mapping[str, Column], row_count: int,
                 memory: _Memory) -> None:  # fmt: skip
        self.slots = slots
        self.columns = columns
        self.memory = memory
        shape = (len(slots), row_count)
        self.first: I64Array = memory.zeros("first", shape, np.int64)
        self.second: I64Array = memory.zeros("second", shape, np.int64)
        self.valid: U8Array = memory.zeros("valid", shape, np.uint8)

    def texts(self, frames: Sequence[_Frames]) -> tuple[Any, I64Array]:
        """All bytes of the columns of bytes, one column after the other, and the edges of values.

        Raises:
            FormatError: a column has more of them than Arrow's offsets reach.
        """
        row_count = self.first.shape[1]
        bytes_count = sum(_code_and_type(self.columns[name])[0] == rk.BYTES for name in self.slots)
        edges: I64Array = self.memory.zeros("edges", (bytes_count * row_count + 1,), np.int64)
        np.cumsum(self.second[:bytes_count].reshape(-1), out=edges[1:])
        for name, size in zip(self.slots, np.diff(edges[:: row_count or 1]), strict=False):
            if size > 2**31 - 1:
                raise FormatError(f"column {name} has {size} bytes in one batch, over 2 GiB")
        found = pa.allocate_buffer(int(edges[-1]))
        out = np.frombuffer(found, dtype=np.uint8)
        row = 0
        for data, _, offsets in frames:
            starts = self.first[:bytes_count]
            rk.gather_bytes(data, starts, edges, row, len(offsets), out)
            row += len(offsets)
        return found, edges


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the records of a schema version are cut, those of rows or those of keys.

    ``version`` names the cells that take the values: None if the columns have the types of the
    reader's version.
    """

    fingerprint: int
    version: int | None
    cells: dict[str, Column]
    slots: dict[str, int]
    codes: I64Array
    nullable: U8Array
    slot_of: I64Array


class RowDecoder:
    """Turns frames of one table into record batches.

    Rows of older and newer schema versions are read by column name into the columns of
    ``reader``: a column that a version does not have is null.  A delete gives the old row if the
    source has it, otherwise its key and nulls.

    Invariants:
        I1. A batch has one row for each requested frame, in their order, and the columns of
            ``schema``.
        I2. Its values are those of ``SourceSchema.decode_row``.

    Owner: any thread, one at a time.
    Raises: FormatError for bytes that are no such row; UnsupportedChange if a column's type
        has changed and its values do not fit; the errors of ``schema_of``.
    """

    def __init__(
        self,
        reader: SourceSchema,
        schema_of: Callable[[int], SourceSchema],
        *,
        names: Sequence[str] | None = None,
        metadata: Sequence[str] = (),
    ) -> None:
        self.reader = reader
        self._schema_of = schema_of
        self._rows = table_schema(reader, names)
        self._metadata = [METADATA.field(name) for name in metadata]
        clash = {field.name for field in self._metadata} & set(self._rows.names)
        if clash:
            raise UnsupportedChange(
                f"{reader.source} has columns named {sorted(clash)}, as the stream's own columns"
            )
        self.schema = pa.schema([*self._rows, *self._metadata])
        self._layouts: dict[tuple[int, bool], _Layout] = {}
        self._spare: list[_Memory] = []

    def batch(self, data: U8Array, columns: FrameColumns, rows: I64Array) -> Any:
        """The frames with these indices as one record batch."""
        return self.joined([(data, columns, rows)])

    def joined(self, parts: Sequence[RowsOfBytes]) -> Any:
        """Frames of several blocks, one part after the other, as one record batch."""
        frames = [(data, columns.words, columns.offset[rows]) for data, columns, rows in parts]
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = _Memory()
        arrays = self._decode(frames, memory)
        self._spare.append(memory)
        for field in self._metadata:
            arrays.append(_METADATA[field.name](self, frames).cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def batch_of(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Rows that combine several frames, by column name."""
        return pa.RecordBatch.from_pylist(list(rows), schema=self.schema)

    def absent_names(self, one: FrameView) -> tuple[str, ...]:
        """The columns that a partial frame does not hold."""
        return self._schema_of(one.schema_fp).absent_names(one.absent) if one.absent else ()

    def _decode(self, frames: Sequence[_Frames], memory: _Memory) -> list[Any]:
        """The columns of rows of all versions."""
        row_count = sum(len(offsets) for _, _, offsets in frames)
        done: U8Array = memory.zeros("done", (row_count,), np.uint8)
        found: dict[int | None, _Cells] = {}
        row = 0
        for data, _, offsets in frames:
            todo = 0 if len(offsets) else -1
            while todo >= 0:
                one = trusted_frame(data.data, int(offsets[todo]))
                has_row = one.flags & (Flag.HAS_AFTER | Flag.HAS_BEFORE)
                is_key = not has_row and one.op != Op.TRUNCATE
                layout = self._layout(one, is_key=is_key)
                into = found.get(layout.version)
                if into is None:
                    # Other types than the reader's are rare, and have memory of their own.
                    own = _Memory() if found else memory
                    into = _Cells(layout.slots, layout.cells, row_count, own)
                    found[layout.version] = into
                bad, todo = cut_frames(
                    data, offsets, layout.fingerprint, is_key, layout.codes, layout.nullable,
                    layout.slot_of, row, done, into.first, into.second, into.valid,
                )  # fmt: skip
                if bad >= 0:
                    raise _damaged(self.reader.source, trusted_frame(data.data, int(offsets[bad])))
            row += len(offsets)
        if not found:
            return [pa.nulls(0, field.type) for field in self._rows]
        tables = [self._arrays(frames, cells) for cells in found.values()]
        if len(tables) == 1:
            return tables[0]
        # A row has its values in the cells of its version, and nulls in all others.
        return [pc.coalesce(*columns) for columns in zip(*tables, strict=True)]

    def _layout(self, one: FrameView, *, is_key: bool) -> _Layout:
        """The layout of a frame's row, or of its key."""
        known = self._layouts.get((one.schema_fp, is_key))
        if known is None:
            known = self._new_layout(self._schema_of(one.schema_fp), is_key=is_key)
            self._layouts[one.schema_fp, is_key] = known
        return known

    def _new_layout(self, schema: SourceSchema, *, is_key: bool) -> _Layout:
        names = set(self._rows.names)
        wanted = {c.name: c for c in self.reader.columns if c.name in names}
        present = [c for c in schema.columns if c.name in wanted]
        is_own = any(_meaning(column) != _meaning(wanted[column.name]) for column in present)
        into = sorted(
            present if is_own else wanted.values(),
            key=lambda column: _code_and_type(column)[0] != rk.BYTES,
        )
        slots = {column.name: slot for slot, column in enumerate(into)}
        columns = schema.key_columns if is_key else schema.columns
        return _Layout(
            int(np.uint64(schema.fingerprint).astype(np.int64)),
            schema.fingerprint if is_own else None,
            {column.name: column for column in into},
            slots,
            np.array([_code_and_type(c)[0] for c in columns], dtype=np.int64),
            np.array([c.nullable for c in columns], dtype=np.uint8),
            np.array([slots.get(c.name, -1) for c in columns], dtype=np.int64),
        )

    def _arrays(self, frames: Sequence[_Frames], cells: _Cells) -> list[Any]:
        texts = cells.texts(frames)
        arrays = []
        for field in self._rows:
            column = cells.columns.get(field.name)
            if column is None:
                arrays.append(pa.nulls(cells.first.shape[1], field.type))
            else:
                arrays.append(self._fitted(_array(column, cells, texts), column, field))
        return arrays

    def _fitted(self, found: Any, column: Column, field: Any) -> Any:
        """A column in the type of the reader's version."""
        if found.type == field.type:
            return found
        try:
            return found.cast(field.type)
        except pa.ArrowException as error:
            raise UnsupportedChange(
                f"{self.reader.source}: column {column.name} was {column.kind} and is read as "
                f"{field.type}: {error}"
            ) from error

    # -- metadata -----------------------------------------------------------------------

    def _op(self, frames: Sequence[_Frames]) -> Any:
        letters = _LETTERS[_field(frames, "op")]
        edges = np.arange(len(letters) + 1, dtype=np.int32)
        return pa.Array.from_buffers(
            pa.string(), len(letters), [None, pa.py_buffer(edges), pa.py_buffer(letters)]
        )

    def _scn(self, frames: Sequence[_Frames]) -> Any:
        return pa.array(_field(frames, "scn").view(np.int64))

    def _seq(self, frames: Sequence[_Frames]) -> Any:
        return pa.array(_field(frames, "seq").astype(np.int64))

    def _commit_time(self, frames: Sequence[_Frames]) -> Any:
        return pa.array(_field(frames, "commit_us")).cast(pa.timestamp("us", "UTC"))

    def _absent(self, frames: Sequence[_Frames]) -> Any:
        partial = np.flatnonzero(_field(frames, "flags") & Flag.PARTIAL)
        type_ = pa.list_(pa.string())
        if not len(partial):
            return pa.nulls(sum(len(offsets) for _, _, offsets in frames), type_)
        places = [(data, int(offset)) for data, _, offsets in frames for offset in offsets]
        values: list[tuple[str, ...] | None] = [None] * len(places)
        for at in partial.tolist():
            data, offset = places[at]
            values[at] = self.absent_names(trusted_frame(data.data, offset))
        return pa.array(values, type=type_)


_METADATA: dict[str, Callable[..., Any]] = {
    "_op": RowDecoder._op,
    "_scn": RowDecoder._scn,
    "_seq": RowDecoder._seq,
    "_commit_time": RowDecoder._commit_time,
    "_absent": RowDecoder._absent,
}
_LETTERS = np.zeros(256, dtype=np.uint8)
for _number, _letter in OP_LETTERS.items():
    _LETTERS[_number] = ord(_letter)


def _field(frames: Sequence[_Frames], name: str) -> npt.NDArray[Any]:
    """A header field of all frames."""
    return np.concatenate([gathered(words, offsets, name) for _, words, offsets in frames])


def _meaning(column: Column) -> tuple[Any, ...]:
    """What the values of a column depend on, beside their bytes."""
    is_decimal = column.kind is Kind.DECIMAL
    return column.kind, is_decimal and (column.precision, column.scale)


def _damaged(source: str, one: FrameView) -> FormatError:
    row = next(part for part in (one.after, one.before, one.key) if part is not None)
    return FormatError(
        f"{source}: the {len(row)} bytes at {one.position} are not a row of schema "
        f"{one.schema_fp:016x}"
    )


def _array(column: Column, cells: _Cells, texts: tuple[Any, I64Array]) -> Any:
    """The Arrow array of one column; it shares no memory with the cells."""
    code, type_ = _code_and_type(column)
    slot = cells.slots[column.name]
    first, valid = cells.first[slot], cells.valid[slot]
    count = len(valid)
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))

    def made(of: Any, *buffers: Any) -> Any:
        return pa.Array.from_buffers(of, count, [bits, *map(pa.py_buffer, buffers)])

    if code == rk.BOOLEAN:
        return made(type_, np.packbits(first.astype(np.uint8), bitorder="little"))
    if code == rk.DECIMAL:
        return made(type_, np.stack([first, cells.second[slot]], axis=1))
    if code == rk.BYTES:
        values, edges = texts
        edges = edges[slot * count : (slot + 1) * count + 1]
        start, size = int(edges[0]), int(edges[-1] - edges[0])
        return _bytes_array(
            column, type_, made, (edges - start).astype(np.int32), values.slice(start, size)
        )
    if column.kind is Kind.DATE:
        return made(type_, first.astype(np.int32))
    if column.kind is Kind.TIME:
        every = np.arange(count + 1, dtype=np.int32) * _TIME_CHARS
        return made(type_, every, _time_texts(first))
    return made(type_, first.copy())


def _bytes_array(column: Column, type_: Any, made: Callable[..., Any], *buffers: Any) -> Any:
    found = made(pa.binary() if column.kind is Kind.DECIMAL else type_, *buffers)
    if column.kind is Kind.DECIMAL:
        return pa.array([_digits(one, column.scale) for one in found.to_pylist()], type=type_)
    if type_ == pa.string():
        try:
            found.validate(full=True)
        except pa.ArrowException as error:
            raise FormatError(f"column {column.name}: {error}") from error
    return found


def _digits(data: bytes | None, scale: int) -> str | None:
    """An exact decimal as text, without an exponent."""
    if data is None:
        return None
    number = int.from_bytes(data, "big", signed=True)
    if scale <= 0:
        return str(number * 10**-scale)
    digits = f"{abs(number):0{scale + 1}d}"
    return f"{'-' if number < 0 else ''}{digits[:-scale]}.{digits[-scale:]}"


_TIME_CHARS = 15


def _time_texts(us: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """``HH:MM:SS.ffffff`` of each, back to back."""
    texts = np.full((len(us), _TIME_CHARS), ord(":"), dtype=np.uint8)
    texts[:, 8] = ord(".")
    parts = ((us // 3_600_000_000, 0, 2), (us // 60_000_000 % 60, 3, 2))
    for number, at, width in (*parts, (us // 1_000_000 % 60, 6, 2), (us % 1_000_000, 9, 6)):
        for index in range(width):
            digit = number // 10 ** (width - 1 - index) % 10
            texts[:, at + index] = ord("0") + digit
    return texts.reshape(-1)
