"""Records that are made by columns, against those of each row alone: equal byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.client.application.events import Decoding
from databus.client.application.frame_blocks import Block
from databus.client.sinks import SinkBatch, SinkContext, SinkRoutes
from databus.client.sinks.encoded_records import EncodedRecord, EncodedRecords
from databus.client.sinks.row_changes import RowRecords
from databus.client.tables.data_batch import BatchDecoding, DataBatch
from databus.common.envelopes import debezium_envelope
from databus.common.envelopes.json_encoding import JsonEncoding
from databus.common.envelopes.named_envelopes import ENVELOPES
from databus.common.frame.frame_format import Op, pack_bitmap
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SchemaSet, SourceSchema
from databus.common.sink_config import RouteConfig
from tests.client.tables.test_arrow_rows import EVERY, VALUES

NAMED = SourceSchema(
    "shop.named",
    (
        Column("id", Kind.INT, nullable=False, type_name="int"),
        Column("tiny", Kind.INT, type_name="tinyint(4)"),
        Column("flag", Kind.INT, type_name="bit(1)"),
        Column("bits", Kind.INT, type_name="bit(9)"),
        Column("real", Kind.FLOAT, type_name="float"),
        Column("at", Kind.TIMESTAMP, type_name="datetime(3)"),
        Column("zoned", Kind.TIMESTAMPTZ, type_name="timestamp(2)"),
        Column("shape", Kind.BYTES, type_name="geometry"),
        Column("floats", Kind.BYTES, type_name="vector(2)"),
        Column('odd "name"\n%b', Kind.STRING, type_name="varchar(9)"),
        Column("doc", Kind.JSON, type_name="json"),
    ),
    ("id",),
)
texts = st.text(max_size=12) | st.sampled_from(['","', 'a\\"', ",\n  ", "null", "\u2028", "\x00"])
every_row = st.fixed_dictionaries(
    {"id": st.integers(-(2**63), 2**63 - 1)}
    | {name: st.none() | (texts if name == "text" else values)
       for name, (_, values) in VALUES.items()}
)  # fmt: skip
named_row = st.fixed_dictionaries(
    {"id": st.integers(0, 2**31)}
    | {
        name: st.none() | values
        for name, values in {
            "tiny": st.integers(-128, 127),
            "flag": st.integers(0, 1),
            "bits": st.integers(0, 511),
            "real": st.floats(width=32),
            "at": VALUES["ts"][1],
            "zoned": VALUES["tz"][1],
            "shape": st.binary(min_size=4, max_size=9),
            "floats": st.binary(min_size=8, max_size=8),
            'odd "name"\n%b': texts,
            "doc": st.sampled_from(['{"a": [1, "b: \\" c"]}', "null", '"é"']),
        }.items()
    }
)
ops = st.lists(st.sampled_from("cccuuddr"), min_size=1, max_size=40)


def frames_of(
    schema: SourceSchema, rows: Sequence[dict[str, Any]], ops: str, scn: int, builder: Any = None
) -> WindowBuilder:
    """A window with a row for each op: with the row before some updates, and partial updates."""
    builder = builder or WindowBuilder(scn, 1_700_000_000_000_000 + scn, 0)
    fingerprint, source_id = schema.fingerprint, schema.source_id
    for number, op in enumerate(ops):
        row = rows[number % len(rows)]
        other = schema.encode_row(rows[(number + 1) % len(rows)])
        key, after = schema.encode_key(row), schema.encode_row(row)
        parts: dict[str, Any] = {"after": after}
        if op == "u" and number % 3:
            parts["before"] = other
        elif op == "u" and number % 2:
            absent = pack_bitmap([1], len(schema.columns))
            nothing = {**row, schema.columns[1].name: None}
            parts = {"after": schema.encode_row(nothing), "absent": absent}
        elif op == "d":
            parts = {"before": other if number % 2 else None}
        letter = {"c": Op.INSERT, "u": Op.UPDATE, "d": Op.DELETE, "r": Op.READ}[op]
        builder.event(letter, source_id, fingerprint, key, **parts)
    return builder


def batches_of(schemas: SchemaSet, data: bytes) -> list[DataBatch]:
    block = Block(data, first=0, bootstrap=False)
    decoding = BatchDecoding(Decoding("shop", schemas, objects=False))
    return [
        DataBatch(decoding, schemas.by_fingerprint(block.schema_fps[rows[0]]).source, "online",
                  [(block, rows)])
        for rows in block.rows_by_source(0, block.count).values()
    ]  # fmt: skip


def encoded(
    batch: SinkBatch, envelope: str, clock: str = "mariadb:0:shop", **options: Any
) -> list[EncodedRecord]:
    records = RowRecords(envelope, prefix="cdc", catalogue="db")
    context = SinkContext(name="s", database="shop", routes=batch.routes, clock=lambda: clock)
    return [*EncodedRecords(records, JsonEncoding(**options)).of(batch, context)]


def one_by_one(batch: SinkBatch, *arguments: Any, **options: Any) -> list[EncodedRecord]:
    """The records of each row alone, as they are made where a batch lacks some of its rows."""
    positions = [row.position for row in batch.rows()]
    return encoded(batch.only(positions), *arguments, **options)


@pytest.fixture(autouse=True)
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debezium_envelope.DebeziumEnvelope.__init__, "__defaults__", (lambda: 7,))


@pytest.mark.parametrize("envelope", ENVELOPES)
@pytest.mark.parametrize("clock", ["mariadb:0:shop", "postgresql:0:shop", "mysql:0:shop", "x"])
@settings(max_examples=8, deadline=None)
@given(every=st.lists(every_row, min_size=9, max_size=12),
       named=st.lists(named_row, min_size=9, max_size=12),
       ops=ops, with_schemas=st.booleans(), columns=st.booleans())  # fmt: skip
def test_records_do_not_depend_on_the_rows_beside_them(
    envelope: str, clock: str, every: list[Any], named: list[Any], ops: list[str],
    with_schemas: bool, columns: bool,
) -> None:  # fmt: skip
    data = b""
    for scn, letters in enumerate(["cccccccccc", "".join(ops), "u" * 20], 1):
        builder = frames_of(EVERY, every, letters, scn)
        frames_of(NAMED, named, letters, scn, builder)
        frames_of(EVERY, every, letters, scn, builder)
        data += builder.end(f"0-{scn}-{scn}" if scn > 1 else str(scn))
    config = [RouteConfig(source="*", columns=["dec", "text", "at"] if columns else [])]
    routes = SinkRoutes("shop", config, default_target="")
    batch = SinkBatch(batches_of(SchemaSet([EVERY, NAMED]), data), routes)
    found = encoded(batch, envelope, clock, with_schemas=with_schemas)
    assert found == one_by_one(batch, envelope, clock, with_schemas=with_schemas)
    positions = [(int(dict(headers)["scn"]), int(dict(headers)["seq"])) for *_, headers in found]
    assert positions == sorted(positions)


@pytest.mark.parametrize("envelope", ["debezium", "flat"])
def test_windows_over_blocks_and_versions_have_their_own_transactions(envelope: str) -> None:
    wider = SourceSchema(NAMED.source, (*NAMED.columns[:5], Column("more", Kind.STRING)), ("id",))
    row = {"id": 7, "tiny": 1, "flag": 1, "bits": 3, "real": 0.5, "more": "é"}
    row |= {column.name: None for column in NAMED.columns if column.name not in row}
    first = b"".join(
        frames_of(NAMED, [row], "cud" * scn, scn).end(f"0-1-{scn}") for scn in range(1, 20)
    )
    cut = frames_of(wider, [row], "cu" * 20, 20).end("0-1-20")
    block = Block(first + cut, first=0, bootstrap=False)
    middle = int(block.columns.offset[-10])
    blocks = [Block(part, first=0, bootstrap=False) for part in
              (bytes(block.data[:middle]), bytes(block.data[middle:]))]  # fmt: skip
    schemas = SchemaSet([NAMED, wider])
    decoding = BatchDecoding(Decoding("shop", schemas, objects=False))
    parts = [(one, *one.rows_by_source(0, one.count).values()) for one in blocks]
    batch = SinkBatch([DataBatch(decoding, NAMED.source, "online", parts)], SinkRoutes("shop"))  # type: ignore[arg-type]  # one source has one array
    found = encoded(batch, envelope)
    assert found == one_by_one(batch, envelope)
    assert b'"0-1-20"' in (found[-1][2] or b"")


def test_a_transform_and_where_are_applied_to_each_row() -> None:
    data = frames_of(NAMED, [{c.name: None for c in NAMED.columns} | {"id": 5}], "c" * 30, 1)
    routes = SinkRoutes(
        "shop", default_target="", transform=lambda row: row if row.event.seq % 2 else None
    )
    batch = SinkBatch(batches_of(SchemaSet([NAMED]), data.end("0-1-1")), routes)
    assert len(encoded(batch, "flat")) == 15


def test_rows_of_one_shape_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    data = frames_of(NAMED, [{c.name: None for c in NAMED.columns} | {"id": 5}], "c" * 30, 1)
    batch = SinkBatch(batches_of(SchemaSet([NAMED]), data.end("0-1-1")), SinkRoutes("shop"))
    monkeypatch.delattr(RowRecords, "of")
    assert len(encoded(batch, "debezium")) == 30
