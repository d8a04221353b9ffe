"""One value, or the values of many rows: what the envelopes are written in.

An envelope makes the record of one change from plain values.  Given columns it makes the records of
many changes at once: each field of the record is then a column, or a value that all records share.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from databus.common.schema.column_values import to_json_value
from databus.common.schema.source_schema import Column

Convert = Callable[[Any], Any]


class ValueColumn:
    """The values of one field in many records.

    A column of a table may have its values as they are stored: ``stored`` is then what ``convert``
    makes of each of them, and the values themselves are made when they are read.

    Owner: one task.
    """

    __slots__ = ("_make", "_stored", "_values", "convert")

    def __init__(
        self,
        make: Callable[[], Sequence[Any]],
        *,
        convert: Convert | None = None,
        stored: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        self._make = make
        self._values: Sequence[Any] | None = None
        self._stored = stored
        self.convert = convert

    @property
    def values(self) -> Sequence[Any]:
        """The value of each record."""
        if self._values is None:
            self._values = self._make()
        return self._values

    @property
    def stored(self) -> Sequence[Any]:
        """What ``convert`` makes of each value."""
        assert self._stored is not None
        return self._stored()


def column_of(values: Sequence[Any]) -> ValueColumn:
    """A column of values that are there."""
    return ValueColumn(lambda: values)


def each(function: Callable[..., Any], *values: Any) -> Any:
    """What a function makes of values: a column if one of them is a column."""
    if not any(isinstance(one, ValueColumn) for one in values):
        return function(*values)
    rows = (one.values if isinstance(one, ValueColumn) else itertools.repeat(one) for one in values)
    return column_of(list(map(function, *rows)))


def each_present(convert: Convert, value: Any) -> Any:
    """What ``convert`` makes of a value that is not None, or of all such values of a column."""
    if not isinstance(value, ValueColumn):
        return None if value is None else convert(value)
    if value.convert is convert:
        return column_of(value.stored)
    return column_of([None if one is None else convert(one) for one in value.values])


def json_record(
    record: Mapping[str, Any], columns: tuple[Column, ...], absent: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A decoded record, or the records in columns, as the relay's JSON has them."""
    return {
        column.name: each(to_json_value, record[column.name])
        for column in columns
        if column.name not in absent
    }
