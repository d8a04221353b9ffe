"""Frames as Arrow columns, against the decoder that goes row by row."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.client.tables.arrow_rows import RowDecoder
from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op, pack_bitmap, pack_frame
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from tests.support.schemas import columns_of

MICROSECOND = dt.timedelta(microseconds=1)
_WIDE = decimal.Context(prec=80)


def decimals(digits: int, scale: int) -> Any:
    most = 10**digits - 1
    return st.integers(-most, most).map(lambda n: decimal.Decimal(n).scaleb(-scale, _WIDE))


VALUES: dict[str, tuple[Column, Any]] = {
    "bool": (Column("bool", Kind.BOOL), st.booleans()),
    "int": (Column("int", Kind.INT), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (Column("uint64", Kind.UINT64), st.integers(0, 2**64 - 1)),
    "float": (Column("float", Kind.FLOAT), st.floats(allow_nan=False)),
    "dec": (Column("dec", Kind.DECIMAL, precision=12, scale=2), decimals(12, 2)),
    "dec38": (Column("dec38", Kind.DECIMAL, precision=38, scale=19), decimals(38, 19)),
    "dec65": (Column("dec65", Kind.DECIMAL, precision=65, scale=30), decimals(65, 30)),
    "numeric": (Column("numeric", Kind.NUMERIC), decimals(40, 7)),
    "text": (Column("text", Kind.STRING), st.text(max_size=40)),
    "bytes": (Column("bytes", Kind.BYTES), st.binary(max_size=40)),
    "date": (Column("date", Kind.DATE), st.dates()),
    "time": (Column("time", Kind.TIME), st.times()),
    "span": (Column("span", Kind.TIME_SPAN), st.timedeltas(dt.timedelta(-50), dt.timedelta(50))),
    "ts": (Column("ts", Kind.TIMESTAMP), st.datetimes()),
    "tz": (Column("tz", Kind.TIMESTAMPTZ), st.datetimes(timezones=st.just(dt.UTC))),
    "uuid": (Column("uuid", Kind.UUID), st.uuids()),
    "json": (Column("json", Kind.JSON), st.just('{"a":1}')),
}
EVERY = SourceSchema(
    "shop.every",
    (Column("id", Kind.INT, nullable=False), *(column for column, _ in VALUES.values())),
    ("id",),
)
rows = st.lists(
    st.fixed_dictionaries(
        {"id": st.integers(-(2**63), 2**63 - 1)}
        | {name: st.none() | values for name, (_, values) in VALUES.items()}
    ),
    min_size=1,
    max_size=9,
)


def test_every_kind_is_tried() -> None:
    assert {column.kind for column in EVERY.columns} == set(Kind)


def as_arrow_gives(value: Any, column: Column) -> Any:
    """What a decoded value is in Arrow, by docs/spark.md."""
    if isinstance(value, dt.time):
        return value.isoformat("microseconds")
    if isinstance(value, dt.timedelta):
        return value // MICROSECOND
    if isinstance(value, uuid.UUID):
        return str(value)
    if column.kind is Kind.UINT64 and value is not None:
        return decimal.Decimal(value)
    if column.kind is Kind.NUMERIC and value is not None:
        return str(value)
    if column.precision > 38 and value is not None:
        return format(value, "f")
    return value


def packed(schema: SourceSchema, op: Op, row: Any, number: int = 0, **parts: Any) -> bytes:
    return pack_frame(
        op=op,
        scn=7,
        seq=number,
        source=schema.source_id,
        schema_fp=schema.fingerprint,
        commit_us=1_700_000_000_000_000,
        key=schema.encode_key(row),
        **parts,
    )


def decoded(frames: list[bytes], decoder: RowDecoder) -> Any:
    data = np.frombuffer(b"".join(frames), dtype=np.uint8)
    columns = frame_format.scan(data)
    return decoder.batch(data, columns, np.arange(len(columns)))


def schemas(*versions: SourceSchema) -> Any:
    return SchemaSet(versions).by_fingerprint


@settings(max_examples=40)
@given(found=rows)
def test_columns_hold_what_the_row_decoder_gives(found: list[dict[str, Any]]) -> None:
    frames = [packed(EVERY, Op.INSERT, row, after=EVERY.encode_row(row)) for row in found]
    batch = decoded(frames, RowDecoder(EVERY, schemas(EVERY)))
    batch.validate(full=True)
    expected = [
        {
            column.name: as_arrow_gives(value, column)
            for column, value in zip(EVERY.columns, EVERY.decode_row(data).values(), strict=True)
        }
        for data in (EVERY.encode_row(row) for row in found)
    ]
    assert batch.to_pylist() == expected


@given(found=rows, damage=st.integers(0, 10**6), byte=st.integers(0, 255))
@settings(max_examples=40)
def test_any_bytes_give_rows_or_a_format_error(
    found: list[dict[str, Any]], damage: int, byte: int
) -> None:
    data = bytearray(EVERY.encode_row(found[0]))
    data[damage % len(data)] = byte
    cut = bytes(data)[: len(data) - damage % 3]
    decoder = RowDecoder(EVERY, schemas(EVERY))
    with contextlib.suppress(FormatError):
        batch = decoded([packed(EVERY, Op.INSERT, found[0], after=cut)], decoder)
        batch.validate(full=False)
        assert batch.num_rows == 1


OLD = SourceSchema(
    "shop.orders",
    columns_of("id INT!, gone STRING, total INT"),
    ("id",),
)
NEW = SourceSchema(
    "shop.orders",
    columns_of("id INT!, total DECIMAL(20,1), note STRING"),
    ("id",),
)


def test_versions_are_read_into_the_readers_columns_in_the_order_of_the_frames() -> None:
    old, new = (1, "x", 5), (2, decimal.Decimal("2.5"), "new")
    frames = [
        packed(NEW, Op.UPDATE, (2,), 0, after=NEW.encode_row(new)),
        packed(OLD, Op.INSERT, (1,), 1, after=OLD.encode_row(old)),
        packed(NEW, Op.DELETE, (2,), 2, before=NEW.encode_row(new)),
        packed(OLD, Op.DELETE, (3,), 3),
        pack_frame(op=Op.TRUNCATE, scn=7, seq=4, source=NEW.source_id, schema_fp=NEW.fingerprint),
    ]
    decoder = RowDecoder(NEW, schemas(OLD, NEW), metadata=["_op", "_seq", "_absent"])
    batch = decoded(frames, decoder)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (2, decimal.Decimal("2.5"), "new", "u", 0, None),
        (1, decimal.Decimal(5), None, "c", 1, None),
        (2, decimal.Decimal("2.5"), "new", "d", 2, None),
        (3, None, None, "d", 3, None),
        (None, None, None, "t", 4, None),
    ]


def test_columns_that_are_not_wanted_are_not_made_and_absent_ones_are_named() -> None:
    row = (1, decimal.Decimal(3), None)
    absent = pack_bitmap([2], 3)
    frames = [packed(NEW, Op.UPDATE, (1,), after=NEW.encode_row(row), absent=absent)]
    decoder = RowDecoder(NEW, schemas(NEW), names=["total"], metadata=["_absent"])
    batch = decoded(frames, decoder)
    assert batch.to_pylist() == [{"total": decimal.Decimal(3), "_absent": ["note"]}]


def test_a_value_that_does_not_fit_its_new_type_is_refused_by_name() -> None:
    small = SourceSchema(
        "shop.orders", (Column("id", Kind.INT, nullable=False), Column("gone", Kind.INT)), ("id",)
    )
    frames = [packed(OLD, Op.INSERT, (1,), after=OLD.encode_row((1, "word", 5)))]
    with pytest.raises(UnsupportedChange, match="column gone"):
        decoded(frames, RowDecoder(small, schemas(OLD, small)))


def test_a_column_that_is_named_like_the_streams_own_is_refused() -> None:
    odd = SourceSchema(
        "shop.odd", (Column("_op", Kind.INT), Column("id", Kind.INT, nullable=False)), ("id",)
    )
    with pytest.raises(UnsupportedChange, match="_op"):
        RowDecoder(odd, schemas(odd), metadata=["_op"])
    assert RowDecoder(odd, schemas(odd)).schema.names == ["_op", "id"]
    assert pa.types.is_int64(RowDecoder(odd, schemas(odd)).schema.field("_op").type)
