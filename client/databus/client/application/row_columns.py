"""Rows of one schema version as dictionaries or as columns, many at once.

A kernel cuts the rows into columns; each column becomes Python values in one step.  One row at a
time is ``SourceSchema.decode_row``, whose values these are.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.common.compiled import avro_row_kernels as rk
from databus.common.compiled import kernels
from databus.common.compiled.kernels import I64Array
from databus.common.envelopes.value_columns import ValueColumn, column_of
from databus.common.errors import FormatError
from databus.common.schema.column_values import bytes_of_int, from_avro, to_avro
from databus.common.schema.source_schema import Column, Kind

_CODES: dict[Kind, int] = {
    Kind.BOOL: rk.BOOLEAN,
    Kind.INT: rk.LONG,
    Kind.FLOAT: rk.DOUBLE,
    Kind.DATE: rk.LONG,
    Kind.TIME: rk.LONG,
    Kind.TIME_SPAN: rk.LONG,
    Kind.TIMESTAMP: rk.LONG,
    Kind.TIMESTAMPTZ: rk.LONG,
}
_MAX_DIGITS = 38
"""Digits of the largest decimals that fit the kernel's two words."""
_WIDE = decimal.Context(prec=200)
_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)
_TIMES_US = tuple((at - _EPOCH) // _MICROSECOND for at in (dt.datetime.min, dt.datetime.max))
_BOUNDS = {
    Kind.DATE: tuple((at - _EPOCH.date()).days for at in (dt.date.min, dt.date.max)),
    Kind.TIMESTAMP: _TIMES_US,
    Kind.TIMESTAMPTZ: _TIMES_US,
}
"""The least and the largest number of a kind that Python's values have room for."""


class RowColumns:
    """Decodes records of some columns: rows of one schema version, or their keys.

    Invariants:
        I1. ``rows`` gives what ``decode_row`` gives for each of the rows, in their order.
        I2. ``columns`` gives the same values by column.

    Owner: any thread.
    """

    def __init__(self, source: str, columns: Sequence[Column]) -> None:
        self._names = [column.name for column in columns]
        self._columns = columns
        self._codes = np.array([_code(column) for column in columns], dtype=np.int64)
        self._nullable = np.array([c.nullable for c in columns], dtype=np.uint8)
        self._slots = np.arange(len(columns), dtype=np.int64)
        self._source = source

    def rows(self, data: memoryview, starts: I64Array, stops: I64Array) -> list[dict[str, Any]]:
        """The rows ``data[starts[i] : stops[i]]``.

        Raises:
            FormatError: one of them is not such a row, or only ``decode_row`` can decode it.
        """
        columns = self.columns(data, starts, stops).values()
        names = self._names
        rows = zip(*[column.values for column in columns], strict=True)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def columns(
        self, data: memoryview, starts: I64Array, stops: I64Array
    ) -> dict[str, ValueColumn]:
        """The columns of the rows ``data[starts[i] : stops[i]]``.

        Raises:
            FormatError: one of them is not such a row, or only ``decode_row`` can decode it.
        """
        if not kernels.COMPILED:
            raise FormatError(f"{self._source}: the kernels are not compiled")
        shape = (len(self._names), len(starts))
        first = np.zeros(shape, dtype=np.int64)
        second = np.zeros(shape, dtype=np.int64)
        valid = np.zeros(shape, dtype=np.uint8)
        low, high = int(starts[0]), int(stops[-1])
        piece = bytes(data[low:high])
        bad = rk.decode_rows(
            np.frombuffer(piece, dtype=np.uint8), starts - low, stops - low,
            self._codes, self._nullable, self._slots, first, second, valid,
        )  # fmt: skip
        if bad >= 0:
            raise FormatError(f"{self._source}: the bytes at {starts[bad]} are not a row")
        try:
            return {
                column.name: _column(column, piece, first[at], second[at], valid[at])
                for at, column in enumerate(self._columns)
            }
        except (ValueError, ArithmeticError) as error:
            raise FormatError(f"{self._source}: {error}") from error


def _code(column: Column) -> int:
    if column.kind is Kind.DECIMAL:
        return rk.DECIMAL if 0 < column.precision <= _MAX_DIGITS else rk.BYTES
    return _CODES.get(column.kind, rk.BYTES)


def _column(
    column: Column, piece: bytes, first: I64Array, second: I64Array, valid: npt.NDArray[np.uint8]
) -> ValueColumn:
    """The values of one column; None where the row has null."""
    here = None if valid.all() else np.flatnonzero(valid)
    if here is not None:
        first, second = first[here], second[here]

    def spread(some: list[Any]) -> list[Any]:
        if here is None:
            return some
        found: list[Any] = [None] * len(valid)
        for at, value in zip(here.tolist(), some, strict=True):
            found[at] = value
        return found

    def values() -> list[Any]:
        return spread(_present_values(column, piece, first, second))

    if _code(column) == rk.DECIMAL:
        return ValueColumn(
            values,
            convert=to_avro(column.kind, column.scale),
            stored=lambda: spread([bytes_of_int(one) for one in _wide_numbers(first, second)]),
        )
    if column.kind in _BOUNDS:
        _require_between(first, _BOUNDS[column.kind])
        return ValueColumn(
            values,
            convert=to_avro(column.kind, column.scale),
            stored=lambda: spread(first.tolist()),
        )
    return column_of(values())


def _present_values(column: Column, piece: bytes, first: I64Array, second: I64Array) -> list[Any]:
    kind = column.kind
    convert = from_avro(kind, column.scale)
    code = _code(column)
    values: list[Any]
    if code == rk.BYTES:
        pairs = zip(first.tolist(), (first + second).tolist(), strict=True)
        if kind in (Kind.BYTES, Kind.UINT64, Kind.DECIMAL):
            values = [piece[start:stop] for start, stop in pairs]
        else:
            values = [piece[start:stop].decode() for start, stop in pairs]
    elif code == rk.DECIMAL:
        unit, multiply = decimal.Decimal(1).scaleb(-column.scale, _WIDE), _WIDE.multiply
        return [multiply(number, unit) for number in _wide_numbers(first, second)]
    elif code == rk.DOUBLE:
        values = first.view(np.float64).tolist()
    elif code == rk.BOOLEAN:
        values = first.astype(np.bool_).tolist()
    elif kind is Kind.DATE:
        values = first.view("datetime64[D]").tolist()
        return values
    elif kind is Kind.TIMESTAMP:
        return _times(first)
    elif kind is Kind.TIMESTAMPTZ:
        return [value.replace(tzinfo=dt.UTC) for value in _times(first)]
    else:
        values = first.tolist()
    return values if convert is None else [convert(value) for value in values]


def _times(first: I64Array) -> list[Any]:
    values: list[Any] = first.view("datetime64[us]").tolist()
    return values


def _require_between(numbers: I64Array, bounds: tuple[int, ...]) -> None:
    if len(numbers) and (int(numbers.min()) < bounds[0] or int(numbers.max()) > bounds[1]):
        raise ValueError("a time is outside the years 1 to 9999")


def _wide_numbers(low: I64Array, high: I64Array) -> list[int]:
    if bool((low >> 63 == high).all()):
        numbers: list[int] = low.tolist()
        return numbers
    words = zip(low.view(np.uint64).tolist(), high.tolist(), strict=True)
    return [(upper << 64) | lower for lower, upper in words]
