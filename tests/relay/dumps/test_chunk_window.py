"""The outcome of a chunk, case by case; tests/properties/test_splice.py has the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.dumps.chunk_window import ChunkWindow, ReadAgain, Ready, Waiting
from databus.relay.sources.contract import Chunk
from databus.relay.sources.row_buffers import Row, Rows

SCHEMA = SourceSchema("t.t", (Column("id", Kind.INT, False),), ("id",))
FP = SCHEMA.fingerprint


@dataclass(frozen=True)
class Seen:
    scns: frozenset[int]
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        return scn in self.scns


def chunk(keys: Iterable[bytes], *, sees: Iterable[int] = (), high: int = 0) -> Chunk:
    rows = Rows.of(Row(key, b"row " + key) for key in keys)
    return Chunk(SCHEMA, rows, Seen(frozenset(sees), high), None, False)


class Watched:
    """A ChunkWindow that is shown frames, and one chunk of it at a time."""

    def __init__(self, **limits: Any) -> None:
        self.window = ChunkWindow(SCHEMA.source_id, **limits)
        self.waiting = Waiting(0)
        self.chunk: Chunk | None = None

    def show(self, data: bytes) -> None:
        self.window.observe(frame_format.scan(data), memoryview(data))

    def part(self, scn: int, *keys: bytes, fp: int = FP, op: Op = Op.UPDATE) -> WindowBuilder:
        builder = WindowBuilder(scn, 0)
        for key in keys:
            builder.event(op, SCHEMA.source_id, fp, key)
        return builder

    def stream(self, scn: int, *keys: bytes, fp: int = FP, op: Op = Op.UPDATE) -> None:
        self.show(self.part(scn, *keys, fp=fp, op=op).end("7"))

    def begin(self) -> None:
        self.window.leave(self.waiting)
        self.waiting = self.window.begin()

    def arrived(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.window.arrived(self.waiting, chunk)

    def take(self, resolved_scn: int) -> Ready | ReadAgain | None:
        return self.window.outcome(self.waiting, resolved_scn)

    def keys(self, resolved_scn: int) -> list[bytes]:
        outcome = self.take(resolved_scn)
        assert isinstance(outcome, Ready), outcome
        assert self.chunk is not None
        return [self.chunk.rows[index].key for index in outcome.left.tolist()]


def test_a_row_written_by_a_window_that_the_chunk_does_not_show_is_dropped() -> None:
    window = Watched()
    window.begin()
    window.stream(5, b"a")
    window.arrived(chunk([b"a", b"b"], high=5))
    assert window.keys(5) == [b"b"]


def test_a_row_written_by_a_window_that_the_chunk_shows_is_retained() -> None:
    window = Watched()
    window.begin()
    window.stream(5, b"a")
    window.arrived(chunk([b"a"], sees=[5], high=5))
    assert window.keys(5) == [b"a"]


def test_a_chunk_waits_until_the_stream_has_passed_its_high() -> None:
    window = Watched()
    window.begin()
    window.arrived(chunk([b"a"], high=7))
    assert window.waiting.high == 7
    assert window.take(6) is None
    window.stream(7, b"a")
    assert window.keys(7) == []


def test_the_keys_of_an_open_window_are_filtered_at_its_end() -> None:
    window = Watched()
    window.begin()
    builder = window.part(5, b"a")
    window.show(builder.take())
    window.arrived(chunk([b"a", b"b"], high=4))
    assert window.take(9) is None, "the window is open"
    window.show(builder.end())
    assert window.keys(5) == [b"b"]


def test_a_window_streamed_before_the_read_that_the_chunk_misses_drops_its_rows() -> None:
    window = Watched()
    window.stream(3, b"a")
    window.begin()
    window.arrived(chunk([b"a", b"b"], high=3))
    assert window.keys(3) == [b"b"]


def test_a_missed_window_is_remembered_for_the_chunk_after_the_next() -> None:
    window = Watched()
    window.stream(3, b"z")
    for keys, left in (([b"a"], [b"a"]), ([b"z"], [])):
        window.begin()
        window.arrived(chunk(keys, high=3))
        assert window.keys(3) == left


def test_a_window_of_too_many_keys_is_no_harm_if_the_chunk_shows_it() -> None:
    for sees, good in (([3], True), ([], False)):
        window = Watched(max_keys=2)
        window.stream(3, b"a", b"b", b"c")
        window.begin()
        window.arrived(chunk([b"x"], sees=sees, high=3))
        assert isinstance(window.take(3), Ready) is good


def test_too_many_keys_over_many_windows_forget_the_oldest_first() -> None:
    window = Watched(max_keys=4)
    window.begin()
    for scn in range(1, 7):
        window.stream(scn, b"%d" % scn)
    window.arrived(chunk([b"6", b"x"], sees=[1, 2, 3], high=6))
    assert window.keys(6) == [b"x"]
    window.begin()
    for scn in range(7, 13):
        window.stream(scn, b"%d" % scn)
    window.arrived(chunk([b"12", b"x"], high=12))
    assert isinstance(window.take(12), ReadAgain)


def test_more_windows_than_can_be_remembered_during_a_read_make_it_read_again() -> None:
    window = Watched(max_windows=3)
    for scn in range(1, 9):
        window.stream(scn, b"a")
    window.begin()
    window.arrived(chunk([b"b"], sees=[6, 7, 8], high=8))
    assert window.keys(8) == [b"b"], "what was forgotten before the read is old"
    window.begin()
    for scn in range(9, 14):
        window.stream(scn, b"a")
    window.arrived(chunk([b"b"], sees=range(9, 14), high=13))
    outcome = window.take(13)
    assert isinstance(outcome, ReadAgain)
    assert "3 windows" in outcome.reason


def test_a_table_that_changed_after_the_read_is_read_again() -> None:
    window = Watched()
    window.begin()
    window.arrived(chunk([b"a"], sees=[], high=5))
    window.stream(5, b"other", fp=FP + 1)
    outcome = window.take(5)
    assert isinstance(outcome, ReadAgain)
    assert f"{FP + 1:016x}" in outcome.reason


def test_a_table_that_changed_before_the_read_is_not_read_again() -> None:
    window = Watched()
    window.stream(4, b"other", fp=FP + 1)
    window.begin()
    window.arrived(chunk([b"a"], sees=[4], high=5))
    assert window.keys(5) == [b"a"]


def test_rows_that_cannot_be_named_make_the_chunk_read_again_unless_it_shows_them() -> None:
    for sees, good in (([3], True), ([], False)):
        window = Watched()
        window.begin()
        window.stream(3, b"", op=Op.TRUNCATE)
        window.arrived(chunk([b"a"], sees=sees, high=3))
        assert isinstance(window.take(3), Ready) is good


def test_a_window_whose_beginning_was_not_watched_must_be_shown() -> None:
    window = Watched(in_window=True)
    window.begin()
    window.stream(3, b"q")
    window.arrived(chunk([b"a"], high=3))
    assert isinstance(window.take(3), ReadAgain)


def test_a_window_that_touched_another_table_is_not_remembered() -> None:
    window = Watched(max_windows=2)
    window.begin()
    for scn in range(1, 9):
        builder = WindowBuilder(scn, 0)
        builder.event(Op.INSERT, SCHEMA.source_id + 1, FP, b"a")
        window.show(builder.end())
    window.arrived(chunk([b"a"], high=8))
    assert window.keys(8) == [b"a"]


def test_many_windows_in_one_block_are_filtered_one_by_one() -> None:
    window = Watched()
    window.begin()
    windows = [window.part(scn, b"%d" % scn, b"both").end() for scn in (1, 2, 3)]
    open_one = window.part(4, b"4")
    window.show(b"".join([*windows, open_one.take()]))
    window.arrived(chunk([b"1", b"2", b"3", b"4", b"both", b"x"], sees=[1, 2], high=2))
    assert window.take(4) is None
    window.show(open_one.end())
    assert window.keys(4) == [b"1", b"2", b"x"]


def test_rows_that_have_gone_out_cannot_be_dropped_any_more() -> None:
    window = Watched()
    window.begin()
    window.arrived(chunk([b"a", b"b", b"c", b"d"], high=0))
    first = window.take(0)
    assert isinstance(first, Ready)
    window.window.sent(window.waiting, 2)
    window.stream(1, b"a", b"c")
    assert window.keys(1) == [b"d"]
    assert window.waiting.dropped_count == 1


def test_a_window_is_remembered_for_a_chunk_whose_read_began_before_another_showed_it() -> None:
    """The second chunk's snapshot may be older than that of the first, though it arrives later."""
    window = Watched()
    late = window.window.begin()
    window.begin()
    window.stream(5, b"a")
    window.arrived(chunk([b"b"], sees=[5], high=5))
    assert window.keys(5) == [b"b"]
    window.window.arrived(late, chunk([b"a", b"c"], high=4))
    outcome = window.window.outcome(late, 5)
    assert isinstance(outcome, Ready)
    assert outcome.left.tolist() == [1]
    window.window.leave(late)


def test_keys_whose_hashes_are_equal_are_distinguished_by_their_bytes() -> None:
    window = Watched()
    window.begin()
    other = chunk([b"a", b"b"], high=0)
    rows = other.rows
    same = np.full(2, rows.hashes[0], dtype=np.uint64)
    slots = np.full_like(rows.slots, -1)
    mask = len(slots) - 1
    first = int(same[0]) & mask
    slots[first], slots[(first + 1) & mask] = 1, 0
    window.arrived(Chunk(SCHEMA, Rows(rows.data, rows.spans, same, slots), Seen(frozenset(), 0),
                         None, False))  # fmt: skip
    window.stream(1, b"a")
    assert window.keys(1) == [b"b"]
