"""Files of tables in Delta and Iceberg: written, named, replaced in one commit with the mark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from databus.client.exports.delta_files import DeltaFiles
from databus.client.exports.export_formats import Lake
from databus.client.exports.iceberg_files import IcebergFiles
from databus.client.exports.iceberg_table import open_catalog
from databus.client.exports.lake_files import FileTable, LakeFile, Layout
from databus.client.exports.table_export import ExportMark
from databus.common import config
from databus.common.checkpoint import Position
from databus.common.errors import StoreBusy, UnsupportedChange
from tests.support.s3_server import S3Server

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string()), ("day", pa.date32())])
FORMS = ("delta", "iceberg")


PLAIN = Layout()


def opened(form: str, folder: Path, layout: Layout = PLAIN) -> FileTable:
    if form == "delta":
        return DeltaFiles(str(folder / "t"), ("id",), "clock", layout)
    return IcebergFiles(open_catalog(folder), ("shop", "t"), ("id",), layout)


def stored(form: str, folder: Path) -> list[dict[str, Any]]:
    """The rows, by the format's own reader."""
    if form == "delta":
        found = DeltaTable(str(folder / "t")).to_pyarrow_table()
    else:
        found = open_catalog(folder).load_table(("shop", "t")).scan().to_arrow()
    return sorted(found.to_pylist(), key=lambda row: row["id"])


def rows(first: int, last: int, state: str = "new", **more: Any) -> list[dict[str, Any]]:
    return [{"id": n, "state": state, "day": date(2026, 1, 1 + n % 2), **more}
            for n in range(first, last)]  # fmt: skip


def at(scn: int) -> ExportMark:
    return ExportMark("clock", Position(scn, 3))


def put(
    table: FileTable,
    new: list[dict[str, Any]],
    scn: int,
    removed: list[LakeFile] | None = None,
    schema: Any = SCHEMA,
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    writing = table.begin(schema, whole=removed is None)
    batches = iter(pa.Table.from_pylist(new, schema=schema).to_batches())
    added = list(writing.place.write(batches, 100))
    before_commit()
    writing.commit(removed, added, at(scn))


@pytest.mark.parametrize("form", FORMS)
def test_files_are_replaced_with_the_mark_and_columns_come_and_go(
    form: str, tmp_path: Path
) -> None:
    assert opened(form, tmp_path).mark() is None
    put(opened(form, tmp_path), rows(0, 5), 7)
    put(opened(form, tmp_path), rows(5, 9), 8, [])
    assert stored(form, tmp_path) == rows(0, 9)
    table = opened(form, tmp_path)
    assert table.mark() == at(8)
    first, second = sorted(table.files(), key=lambda one: one.low)
    assert [(one.low, one.high, one.row_count) for one in (first, second)] == [(0, 4, 5), (5, 8, 4)]
    read = [row for batch in begun(table).read([second], ["state", "id"])
            for row in batch.to_pylist()]  # fmt: skip
    assert read == [{"state": "new", "id": n} for n in range(5, 9)]

    wider = SCHEMA.append(pa.field("price", pa.float64()))
    put(table, rows(5, 8, "paid", price=1.5), 9, [second], wider)
    assert opened(form, tmp_path).schema().names == wider.names
    expected = [*rows(0, 5, price=None), *rows(5, 8, "paid", price=1.5)]
    assert stored(form, tmp_path) == expected
    place = begun(opened(form, tmp_path), wider)
    assert [b.to_pylist() for b in place.read([first], ["price"])] == [[{"price": None}] * 5]

    narrower = pa.schema([("id", pa.int64()), ("state", pa.int64())])
    put(opened(form, tmp_path), [{"id": 1, "state": 4}], 10, schema=narrower)
    assert stored(form, tmp_path) == [{"id": 1, "state": 4}]
    put(opened(form, tmp_path), [], 11, [], narrower)
    assert opened(form, tmp_path).mark() == at(11), "a position alone"


def begun(table: FileTable, schema: Any = SCHEMA) -> Any:
    return table.begin(schema, whole=False).place


@pytest.mark.parametrize("form", FORMS)
def test_the_second_of_two_writers_is_refused_and_changes_nothing(
    form: str, tmp_path: Path
) -> None:
    put(opened(form, tmp_path), rows(0, 5), 7)
    table = opened(form, tmp_path)
    old = table.files()

    def another() -> None:
        put(opened(form, tmp_path), rows(0, 4, "theirs"), 8, old)

    with pytest.raises(StoreBusy, match="another writer"):
        put(table, rows(0, 4, "ours"), 8, old, before_commit=another)
    assert stored(form, tmp_path) == rows(0, 4, "theirs")


@pytest.mark.parametrize("form", FORMS)
def test_a_partition_has_files_of_its_own(form: str, tmp_path: Path) -> None:
    layout = Layout(("day",))
    new = sorted(rows(0, 6), key=lambda row: row["day"])
    put(opened(form, tmp_path, layout), [*new, {"id": 9, "state": "x", "day": None}], 7)
    table = opened(form, tmp_path, layout)
    assert [one.row_count for one in table.files()] == [1, 3, 3] or len(table.files()) == 3
    place = begun(table)
    read = [row for batch in place.read(table.files(), SCHEMA.names) for row in batch.to_pylist()]
    assert sorted(read, key=lambda row: row["id"]) == stored(form, tmp_path)
    with pytest.raises(UnsupportedChange, match="no columns"):
        Layout(("nothing",)).check("shop.t", SCHEMA.names)


@pytest.mark.parametrize("form", FORMS)
def test_a_table_of_another_writer_is_refused(form: str, tmp_path: Path) -> None:
    found = pa.Table.from_pylist(rows(0, 2), schema=SCHEMA)
    if form == "delta":
        from deltalake import write_deltalake

        write_deltalake(str(tmp_path / "t"), found)
    else:
        catalog = open_catalog(tmp_path)
        catalog.create_namespace("shop")
        catalog.create_table(("shop", "t"), schema=SCHEMA).append(found)
    with pytest.raises(UnsupportedChange, match="would replace them"):
        opened(form, tmp_path).mark()


@pytest.mark.parametrize("form", FORMS)
def test_files_on_s3(form: str, s3: S3Server, tmp_path: Path) -> None:
    options = s3.options()
    text = f"""[export.s3]
endpoint = "{s3.url}"
region = "{options.region}"
access_key = "{options.access_key}"
secret_key = "{options.secret_key.get_secret_value()}"
"""
    to = s3.empty_prefix()

    def opened_again() -> FileTable:
        lake = Lake(form, to, config.parse(text, folder=tmp_path))
        return lake.files("shop", "main.orders", "clock")(("id",), PLAIN)

    put(opened_again(), rows(0, 5), 7)
    put(opened_again(), rows(5, 9), 8, [])
    table = opened_again()
    assert table.mark() == at(8)
    second = max(table.files(), key=lambda one: one.low)
    put(table, rows(5, 7, "paid"), 9, [second])
    table = opened_again()
    read = begun(table).read(table.files(), SCHEMA.names)
    found = [row for batch in read for row in batch.to_pylist()]
    assert sorted(found, key=lambda row: row["id"]) == [*rows(0, 5), *rows(5, 7, "paid")]
