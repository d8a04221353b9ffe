"""Columns of a schema in few words."""

from __future__ import annotations

import re

from databus.common.schema.source_schema import Column, Kind

_COLUMN = re.compile(r"(.+) ([A-Z\d_]+)(?:\((\d+),(\d+)\))?(!?)")


def columns_of(text: str) -> tuple[Column, ...]:
    """Columns such as ``"id INT!, note STRING, n DECIMAL(9,2)"``; ``!`` is for NOT NULL."""
    return tuple(map(_column, text.split(", ")))


def _column(text: str) -> Column:
    found = _COLUMN.fullmatch(text)
    assert found is not None, text
    name, kind, precision, scale, not_null = found.groups(default="")
    if precision:
        return Column(name, Kind[kind], not not_null, precision=int(precision), scale=int(scale))
    return Column(name, Kind[kind], not not_null)
