"""Dumps as records: transitions, requests, their file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.checkpoint import Position
from databus.common.errors import BadRequest, FormatError, NotFound
from databus.relay.dumps.dump_records import (
    KEPT_FINISHED,
    TRANSITIONS,
    Dump,
    DumpBook,
    DumpState,
    TableProgress,
    change_dump,
    new_dump,
)


@pytest.mark.parametrize(
    ("state", "wanted"),
    list(itertools.product(DumpState, (DumpState.PAUSED, DumpState.RUNNING))),
)
def test_every_transition_is_in_the_table_or_refused(state: DumpState, wanted: DumpState) -> None:
    dump = Dump("1", ["*"], state=state)
    if (state, wanted) in TRANSITIONS:
        change_dump(dump, {"state": str(wanted)})
        assert dump.state == TRANSITIONS[state, wanted]
    else:
        with pytest.raises(BadRequest, match=str(state)):
            change_dump(dump, {"state": str(wanted), "chunk_rows": 7})
        assert (dump.state, dump.chunk_rows) == (state, 2000), "a refused change changes nothing"


def test_only_paused_and_running_can_be_requested() -> None:
    with pytest.raises(BadRequest, match="completed"):
        change_dump(Dump("1", ["*"]), {"state": "completed"})


def test_a_reader_is_notified_replaced_and_disconnected() -> None:
    dump = new_dump({"sources": ["t"], "reader": {"scn": 3, "seq": 1}})
    assert dump.reader == Position(3, 1)
    change_dump(dump, {"share": 50})
    assert dump.reader == Position(3, 1)
    with pytest.raises(BadRequest, match="reader"):
        change_dump(dump, {"reader": 7})
    change_dump(dump, {"reader": None})
    assert dump.reader is None


def test_plain_keys_become_lists() -> None:
    assert new_dump({"sources": ["t"], "keys": [1, ["a", 2]]}).keys == [[1], ["a", 2]]


def test_a_book_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "dumps.json"
    book = DumpBook(path)
    dump = new_dump({"sources": ["shop.*"], "where": "id > 3", "chunk_rows": 9, "delay_ms": 4})
    dump.tables = [TableProgress("shop.items", [99], [7], False, 12, 3, 2)]
    dump.state = DumpState.PAUSED
    dump.end = Position(5, 6)
    change_dump(dump, {"reader": {"scn": 4, "seq": 9}})
    assert dump.reader == Position(4, 9)
    book.add(dump)
    book.save()
    (again,) = DumpBook(path)
    assert again == dump


@given(st.binary(max_size=60))
def test_any_file_is_a_book_or_a_format_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("book") / "dumps.json"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        DumpBook(path)


def test_what_has_begun_goes_before_what_has_not(tmp_path: Path) -> None:
    book = DumpBook(tmp_path / "dumps.json")
    assert book.next_active() is None
    for number, state in enumerate(
        (DumpState.COMPLETED, DumpState.QUEUED, DumpState.PAUSED, DumpState.RUNNING)
    ):
        book.add(Dump(str(number), ["*"], state=state))
    assert book.next_active() is book.get("3")
    book.get("3").state = DumpState.FAILED
    assert book.next_active() is book.get("1")


def test_only_the_newest_finished_dumps_are_retained(tmp_path: Path) -> None:
    book = DumpBook(tmp_path / "dumps.json")
    book.add(Dump("waiting", ["*"]))
    for number in range(KEPT_FINISHED + 5):
        book.add(Dump(str(number), ["*"], state=DumpState.COMPLETED))
    assert len(list(book)) == KEPT_FINISHED + 1
    assert book.get("waiting")
    with pytest.raises(NotFound, match="'4'"):
        book.get("4")


def test_a_size_that_is_requested_stays() -> None:
    dump = new_dump({"sources": ["t"]})
    assert dump.chunk_ms > 0
    change_dump(dump, {"chunk_rows": 5000})
    assert (dump.chunk_rows, dump.chunk_ms) == (5000, 0)
    change_dump(dump, {"chunk_ms": 100})
    assert (dump.chunk_rows, dump.chunk_ms) == (5000, 100)
