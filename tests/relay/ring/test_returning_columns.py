"""Columns that a table has again: the registry notices them, over restarts too, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from databus.common.errors import StoreError
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.common.table_state import CaptureState
from databus.relay.dumps.table_records import TableBook, TableRecord
from databus.relay.ring.schema_registry import Registry

Open = Callable[[], Registry]


def shape(*names: str, kind: Kind = Kind.STRING) -> SourceSchema:
    columns = [Column("id", Kind.INT, nullable=False), *(Column(name, kind) for name in names)]
    return SourceSchema("shop.items", tuple(columns), ("id",))


class Noted:
    """Registries on one file, one after the other, and what they called columns that returned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[list[str]] = []
        self.registry = self._open()

    def _open(self) -> Registry:
        return Registry(self.path, self._note)

    def _note(self, source: str, names: Sequence[str]) -> None:
        assert source == "shop.items"
        self.names.append(list(names))

    def restart(self) -> None:
        self.registry.close()
        self.registry = self._open()

    def follow(self, *shapes: SourceSchema, restarts: bool) -> None:
        for one in shapes:
            if restarts:
                self.restart()
            self.registry.follow([one])


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ([shape("c"), shape(), shape("c")], [["c"]]),
        ([shape("c"), shape(), shape("c", kind=Kind.INT)], [["c"]]),
        ([shape("a", "b"), shape("b"), shape(), shape("a", "b")], [["a", "b"]]),
        ([shape("c"), shape("d"), shape("d", "c")], [["c"]]),
        ([shape("c"), shape(), shape("c"), shape("c"), shape(), shape("c")], [["c"], ["c"]]),
        ([shape(), shape("c"), shape("c", "d"), shape("c")], []),
        ([shape("c"), shape("c", kind=Kind.INT), shape("c")], []),
        ([shape("c"), shape("c"), shape()], []),
    ],
)
def test_a_column_counts_as_returned_where_a_version_between_lacks_it(
    tmp_path: Path, shapes: list[SourceSchema], names: list[list[str]], restarts: bool
) -> None:
    noted = Noted(tmp_path / "schemas.jsonl")
    noted.follow(*shapes, restarts=restarts)
    assert noted.names == names
    noted.registry.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_version_that_the_catalogue_has_ahead_of_the_stream_is_no_earlier_one(
    tmp_path: Path, restarts: bool
) -> None:
    noted = Noted(tmp_path / "schemas.jsonl")
    noted.registry.follow([shape()])
    noted.registry.add([shape("c")])
    noted.follow(shape(), shape("c"), restarts=restarts)
    assert noted.names == []
    noted.follow(shape(), shape("c"), restarts=restarts)
    assert noted.names == [["c"]]
    noted.registry.close()


def test_several_versions_of_one_batch_are_followed_in_their_order(tmp_path: Path) -> None:
    noted = Noted(tmp_path / "schemas.jsonl")
    noted.registry.follow([shape("c")])
    noted.registry.follow([shape(), shape("c")])
    assert noted.names == [["c"]]
    assert noted.registry.schemas.latest("shop.items") == shape("c")
    noted.restart()
    assert noted.registry.schemas.latest("shop.items") == shape("c")
    noted.registry.close()


def test_a_version_is_not_on_disk_before_its_table_is(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "schemas.jsonl")
    registry.follow([shape("c"), shape()])
    before = registry.path.read_bytes()

    def refuse(source: str, names: Sequence[str]) -> None:
        raise StoreError("the disk is full")

    registry.on_return = refuse
    for _ in range(2):
        with pytest.raises(StoreError, match="the disk is full"):
            registry.follow([shape("c")])
    assert registry.path.read_bytes() == before
    registry.close()


def test_a_record_that_is_stored_at_once_is_not_overwritten_by_what_was_packed_before(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tables.json"
    book = TableBook(path)
    packed = book.content()
    record = TableRecord("shop.items", CaptureState.SUSPENDED, 7, "it has the column c again")
    book.add(record)
    book.write_before_sync(packed, record)
    book.write(packed)
    assert TableBook(path).get("shop.items") == record
    book.remove("shop.items")
    book.write(book.content())
    assert TableBook(path).get("shop.items") is None
