"""Frames as Arrow columns: the rows of one table, typed by its schema, without an object per row.

For Spark, the exports and any reader of Arrow.  docs/spark.md lists the types.  Needs pyarrow
(extra ``bootstrap`` or ``export``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from databus.common.compiled import avro_row_kernels as rk
from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame.frame_format import (
    HEADER_BYTES,
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


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of one layout: a schema version, read from the row or from the key alone."""

    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    schema: SourceSchema | None
    columns: tuple[Column, ...]


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

    def batch(
        self, data: npt.NDArray[np.uint8], columns: FrameColumns, rows: npt.NDArray[np.int64]
    ) -> Any:
        """The frames with these indices as one record batch."""
        groups = self._groups(columns, rows)
        tables = [self._decode(data, group) for group in groups]
        if not tables:
            arrays = [pa.nulls(len(rows), field.type) for field in self._rows]
        elif len(tables) == 1:
            arrays = tables[0]
        else:
            order = np.argsort(np.concatenate([group.rows for group in groups]), kind="stable")
            take = pa.array(order)
            arrays = [
                pa.concat_arrays([table[at] for table in tables]).take(take)
                for at in range(len(self._rows))
            ]
        for field in self._metadata:
            arrays.append(_METADATA[field.name](self, data, columns, rows).cast(field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def batch_of(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Rows that combine several frames, by column name."""
        return pa.RecordBatch.from_pylist(list(rows), schema=self.schema)

    def absent_names(self, one: FrameView) -> tuple[str, ...]:
        """The columns that a partial frame does not hold."""
        return self._schema_of(one.schema_fp).absent_names(one.absent) if one.absent else ()

    def _groups(self, columns: FrameColumns, rows: npt.NDArray[np.int64]) -> list[_Group]:
        offset = columns.offset[rows]
        key_len, before_len, after_len = (
            _lengths(columns, rows, name) for name in ("key_len", "before_len", "after_len")
        )
        flags, op = columns.flags[rows], columns.op[rows]
        key_at = offset + HEADER_BYTES
        before_at = key_at + key_len
        after_at = before_at + before_len
        has_after = (flags & Flag.HAS_AFTER) != 0
        has_before = ~has_after & ((flags & Flag.HAS_BEFORE) != 0)
        is_key = ~has_after & ~has_before & (op != Op.TRUNCATE)
        is_empty = ~has_after & ~has_before & ~is_key
        starts = np.where(has_after, after_at, np.where(has_before, before_at, key_at))
        sizes = np.where(has_after, after_len, np.where(has_before, before_len, key_len))
        groups = []
        prints = columns.schema_fp[rows]
        for fingerprint in np.unique(prints).tolist():
            schema = None
            for mask, of_key in ((has_after | has_before, False), (is_key, True)):
                chosen = np.flatnonzero(mask & (prints == fingerprint))
                if len(chosen):
                    schema = schema or self._schema_of(int(fingerprint))
                    layout = schema.key_columns if of_key else schema.columns
                    at = starts[chosen]
                    groups.append(_Group(chosen, at, at + sizes[chosen], schema, layout))
        if is_empty.any():
            none = np.empty(0, dtype=np.int64)
            groups.append(_Group(np.flatnonzero(is_empty), none, none, None, ()))
        return groups

    def _decode(self, data: npt.NDArray[np.uint8], group: _Group) -> list[Any]:
        count = len(group.rows)
        present = {column.name: column for column in group.columns}
        slots = {
            name: slot for slot, name in enumerate(n for n in self._rows.names if n in present)
        }
        first = np.zeros((len(slots), count), dtype=np.int64)
        second = np.zeros((len(slots), count), dtype=np.int64)
        valid = np.zeros((len(slots), count), dtype=np.uint8)
        if group.schema is not None:
            bad = rk.decode_rows(
                data,
                group.starts,
                group.stops,
                np.array([_code_and_type(c)[0] for c in group.columns], dtype=np.int64),
                np.array([c.nullable for c in group.columns], dtype=np.uint8),
                np.array([slots.get(c.name, -1) for c in group.columns], dtype=np.int64),
                first,
                second,
                valid,
            )
            if bad >= 0:
                size = int(group.stops[bad] - group.starts[bad])
                raise FormatError(
                    f"{group.schema.source}: {size} bytes are not a row of schema "
                    f"{group.schema.fingerprint:016x}"
                )
        arrays = []
        for field in self._rows:
            slot = slots.get(field.name)
            if slot is None:
                arrays.append(pa.nulls(count, field.type))
            else:
                column = present[field.name]
                found = _array(column, data, first[slot], second[slot], valid[slot])
                arrays.append(self._fitted(found, column, field))
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

    def _op(self, data: Any, columns: FrameColumns, rows: Any) -> Any:
        return _OPS.take(pa.array(columns.op[rows]))

    def _scn(self, data: Any, columns: FrameColumns, rows: Any) -> Any:
        return pa.array(columns.scn[rows].view(np.int64))

    def _seq(self, data: Any, columns: FrameColumns, rows: Any) -> Any:
        return pa.array(columns.seq[rows].astype(np.int64))

    def _commit_time(self, data: Any, columns: FrameColumns, rows: Any) -> Any:
        return pa.array(columns.commit_us[rows]).cast(pa.timestamp("us", "UTC"))

    def _absent(self, data: Any, columns: FrameColumns, rows: Any) -> Any:
        values: list[tuple[str, ...] | None] = [None] * len(rows)
        partial = (columns.flags[rows] & Flag.PARTIAL) != 0
        for at in np.flatnonzero(partial).tolist():
            one = trusted_frame(data.data, int(columns.offset[rows[at]]))
            values[at] = self.absent_names(one)
        return pa.array(values, type=pa.list_(pa.string()))


_METADATA: dict[str, Callable[..., Any]] = {
    "_op": RowDecoder._op,
    "_scn": RowDecoder._scn,
    "_seq": RowDecoder._seq,
    "_commit_time": RowDecoder._commit_time,
    "_absent": RowDecoder._absent,
}
_OPS = pa.array([OP_LETTERS.get(op) for op in range(max(OP_LETTERS) + 1)], type=pa.string())


def _lengths(
    columns: FrameColumns, rows: npt.NDArray[np.int64], name: str
) -> npt.NDArray[np.int64]:
    return gathered(columns.words, columns.offset[rows], name).astype(np.int64)


def _array(
    column: Column,
    data: npt.NDArray[np.uint8],
    first: npt.NDArray[np.int64],
    second: npt.NDArray[np.int64],
    valid: npt.NDArray[np.uint8],
) -> Any:
    """An Arrow array of the kernel's results for one column."""
    code, type_ = _code_and_type(column)
    count = len(valid)
    bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))

    def made(of: Any, *buffers: Any) -> Any:
        return pa.Array.from_buffers(of, count, [bits, *map(pa.py_buffer, buffers)])

    if code == rk.BOOLEAN:
        return made(type_, np.packbits(first.astype(np.uint8), bitorder="little"))
    if code == rk.DECIMAL:
        return made(type_, np.stack([first, second], axis=1))
    if code == rk.BYTES:
        return _bytes_array(column, type_, data, first, second, made)
    if column.kind is Kind.DATE:
        return made(type_, first.astype(np.int32))
    if column.kind is Kind.TIME:
        edges = np.arange(count + 1, dtype=np.int32) * _TIME_CHARS
        return made(type_, edges, _time_texts(first))
    return made(type_, first)


def _bytes_array(
    column: Column,
    type_: Any,
    data: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    made: Callable[..., Any],
) -> Any:
    edges = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=edges[1:])
    if edges[-1] > 2**31 - 1:
        raise FormatError(f"column {column.name} has {edges[-1]} bytes in one batch, over 2 GiB")
    values = np.empty(int(edges[-1]), dtype=np.uint8)
    rk.gather_bytes(data, starts, edges, values)
    found = made(
        pa.binary() if column.kind is Kind.DECIMAL else type_, edges.astype(np.int32), values
    )
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
