"""The prediction of Avro's resolution is not better than what an Avro reader does."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace

import fastavro
import pytest

from databus.cli.gate.model_checks import _SAMPLES
from databus.cli.gate.reader_resolution import unreadable
from databus.common.schema.source_schema import Column, Kind, SourceSchema

ID = Column("id", Kind.INT, nullable=False)
PAIRS = list(itertools.product(Kind, Kind))


def table(*columns: Column) -> SourceSchema:
    return SourceSchema("shop.t", (ID, *columns), ("id",))


def column(kind: Kind, *, nullable: bool = False) -> Column:
    precision, scale = (9, 2) if kind is Kind.DECIMAL else (0, 0)
    return Column("v", kind, nullable, precision, scale)


def test_each_pair_of_kinds_that_is_said_to_resolve_is_read_by_fastavro() -> None:
    resolved = set()
    for written, read in PAIRS:
        writer, reader = table(column(written)), table(column(read))
        data = writer.encode_row([1, _SAMPLES[written]])
        if unreadable(writer, reader):
            continue
        resolved.add((written, read))
        fastavro.schemaless_reader(io.BytesIO(data), writer.row_codec.avro, reader.row_codec.avro)
    assert {(kind, kind) for kind in Kind} < resolved
    assert (Kind.INT, Kind.STRING) not in resolved
    assert (Kind.DATE, Kind.INT) not in resolved  # Avro would read it, as a number


@pytest.mark.parametrize("nullable", [False, True])
def test_a_column_that_only_the_reader_has_needs_a_default(nullable: bool) -> None:
    reader = table(column(Kind.STRING, nullable=nullable))
    data = table().encode_row([1])
    found = unreadable(table(), reader)
    if nullable:
        assert not found
        fastavro.schemaless_reader(io.BytesIO(data), table().row_codec.avro, reader.row_codec.avro)
    else:
        assert found == ["v is missing and has no default"]


def test_a_null_and_other_digits_are_named() -> None:
    old = table(column(Kind.DECIMAL, nullable=True))
    assert unreadable(old, table(column(Kind.DECIMAL))) == ["v may be null"]
    other = table(replace(column(Kind.DECIMAL), scale=3))
    assert unreadable(old, other) == ["v is decimal(9,2), not decimal(9,3)"]
