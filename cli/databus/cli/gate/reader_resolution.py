"""Whether a reader with one version of a table reads the rows of another one.

These are Avro's rules for a record: a column of the reader that the writer lacks needs a default,
which only a nullable one has, and a type must be the same or a wider one.  The kinds of columns
count as types, so that a date does not become a number.
"""

from __future__ import annotations

from collections.abc import Iterator

from databus.common.schema.source_schema import Column, Kind, SourceSchema

_PROMOTED = {(Kind.INT, Kind.FLOAT), (Kind.STRING, Kind.BYTES)}
"""Avro also reads bytes as text, but not all bytes are text."""
_TEXTS = {Kind.STRING, Kind.NUMERIC, Kind.JSON, Kind.UUID}


def unreadable(writer: SourceSchema, reader: SourceSchema) -> list[str]:
    """Why a reader with the definition ``reader`` cannot read rows of ``writer``; empty if it
    can."""
    return list(_conflicts(writer, reader))


def _conflicts(writer: SourceSchema, reader: SourceSchema) -> Iterator[str]:
    written = {column.name: column for column in writer.columns}
    for column in reader.columns:
        found = written.get(column.name)
        if found is None:
            if not column.nullable:
                yield f"{column.name} is missing and has no default"
        elif not _is_read_as(found, column):
            yield f"{column.name} is {_kind(found)}, not {_kind(column)}"
        elif found.nullable and not column.nullable:
            yield f"{column.name} may be null"


def _is_read_as(written: Column, read: Column) -> bool:
    if written.kind is read.kind:
        is_decimal = read.kind is Kind.DECIMAL
        return not is_decimal or (written.precision, written.scale) == (read.precision, read.scale)
    # Any of these texts is a text; a text is not always one of the others.
    if read.kind is Kind.STRING and written.kind in _TEXTS:
        return True
    return (written.kind, read.kind) in _PROMOTED


def _kind(column: Column) -> str:
    if column.kind is Kind.DECIMAL:
        return f"decimal({column.precision},{column.scale})"
    return str(column.kind)
