"""The verdict over a chunk, case by case; tests/properties/test_splice.py has the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from databus.common.schema import Column, Kind, SourceSchema
from databus.relay.sources.source import Chunk, Row
from databus.relay.watermark import ChunkWindow, ReadAgain, Spliced

SCHEMA = SourceSchema("t.t", (Column("id", Kind.INT, False),), ("id",))
FP = SCHEMA.fingerprint


@dataclass(frozen=True)
class Seen:
    scns: frozenset[int]
    high: int

    def sees(self, scn: int, txid: str) -> bool:
        return scn in self.scns


def chunk(keys: Iterable[bytes], *, sees: Iterable[int] = (), high: int = 0) -> Chunk:
    rows = [Row(key, b"row " + key) for key in keys]
    return Chunk(SCHEMA, rows, Seen(frozenset(sees), high), None, False)


def stream(window: ChunkWindow, scn: int, *keys: bytes, fp: int = FP) -> None:
    for key in keys:
        window.touch(key, fp)
    window.end_window(scn, "")


def keys_of(outcome: Spliced | ReadAgain | None) -> list[bytes]:
    assert isinstance(outcome, Spliced), outcome
    return [row.key for row in outcome.rows]


def test_a_row_written_by_a_window_that_the_chunk_does_not_show_is_dropped() -> None:
    window = ChunkWindow()
    window.begin()
    stream(window, 5, b"a")
    window.arrived(chunk([b"a", b"b"], high=5))
    assert keys_of(window.take(5)) == [b"b"]


def test_a_row_written_by_a_window_that_the_chunk_shows_is_kept() -> None:
    window = ChunkWindow()
    window.begin()
    stream(window, 5, b"a")
    window.arrived(chunk([b"a"], sees=[5], high=5))
    assert keys_of(window.take(5)) == [b"a"]


def test_a_chunk_waits_until_the_stream_has_passed_its_high() -> None:
    window = ChunkWindow()
    window.begin()
    window.arrived(chunk([b"a"], high=7))
    assert window.waits_for == 7
    assert window.take(6) is None
    stream(window, 7, b"a")
    assert keys_of(window.take(7)) == []
    assert window.waits_for is None


def test_the_keys_of_an_open_window_are_judged_at_its_end() -> None:
    window = ChunkWindow()
    window.begin()
    window.touch(b"a", FP)
    window.arrived(chunk([b"a", b"b"], high=4))
    assert window.take(9) is None, "the window is open"
    window.end_window(5, "")
    assert keys_of(window.take(5)) == [b"b"]


def test_a_window_streamed_before_the_read_that_the_chunk_misses_drops_its_rows() -> None:
    window = ChunkWindow()
    stream(window, 3, b"a")
    window.begin()
    window.arrived(chunk([b"a", b"b"], high=3))
    assert keys_of(window.take(3)) == [b"b"]


def test_a_missed_window_is_remembered_for_the_chunk_after_the_next() -> None:
    window = ChunkWindow()
    stream(window, 3, b"z")
    for keys, left in (([b"a"], [b"a"]), ([b"z"], [])):
        window.begin()
        window.arrived(chunk(keys, high=3))
        assert keys_of(window.take(3)) == left


def test_a_window_of_too_many_keys_is_no_harm_if_the_chunk_shows_it() -> None:
    for sees, good in (([3], True), ([], False)):
        window = ChunkWindow(max_keys=2)
        stream(window, 3, b"a", b"b", b"c")
        window.begin()
        window.arrived(chunk([b"x"], sees=sees, high=3))
        assert isinstance(window.take(3), Spliced) is good


def test_too_many_keys_over_many_windows_forget_the_oldest_first() -> None:
    window = ChunkWindow(max_keys=4)
    window.begin()
    for scn in range(1, 7):
        stream(window, scn, b"%d" % scn)
    window.arrived(chunk([b"6", b"x"], sees=[1, 2, 3], high=6))
    assert keys_of(window.take(6)) == [b"x"]
    window.begin()
    for scn in range(7, 13):
        stream(window, scn, b"%d" % scn)
    window.arrived(chunk([b"12", b"x"], high=12))
    assert isinstance(window.take(12), ReadAgain)


def test_more_windows_than_can_be_remembered_during_a_read_make_it_read_again() -> None:
    window = ChunkWindow(max_windows=3)
    for scn in range(1, 9):
        stream(window, scn, b"a")
    window.begin()
    window.arrived(chunk([b"b"], sees=[6, 7, 8], high=8))
    assert keys_of(window.take(8)) == [b"b"], "what was forgotten before the read is old"
    window.begin()
    for scn in range(9, 14):
        stream(window, scn, b"a")
    window.arrived(chunk([b"b"], sees=range(9, 14), high=13))
    outcome = window.take(13)
    assert isinstance(outcome, ReadAgain)
    assert "3 windows" in outcome.reason


def test_a_table_that_changed_after_the_read_is_read_again() -> None:
    window = ChunkWindow()
    window.begin()
    window.arrived(chunk([b"a"], sees=[], high=5))
    stream(window, 5, b"other", fp=FP + 1)
    outcome = window.take(5)
    assert isinstance(outcome, ReadAgain)
    assert f"{FP + 1:016x}" in outcome.reason


def test_a_table_that_changed_before_the_read_is_not_read_again() -> None:
    window = ChunkWindow()
    stream(window, 4, b"other", fp=FP + 1)
    window.begin()
    window.arrived(chunk([b"a"], sees=[4], high=5))
    assert keys_of(window.take(5)) == [b"a"]


def test_rows_that_cannot_be_named_make_the_chunk_read_again_unless_it_shows_them() -> None:
    for sees, good in (([3], True), ([], False)):
        window = ChunkWindow()
        window.begin()
        window.touch_unknown()
        window.end_window(3, "")
        window.arrived(chunk([b"a"], sees=sees, high=3))
        assert isinstance(window.take(3), Spliced) is good


def test_a_window_whose_beginning_was_not_watched_must_be_shown() -> None:
    window = ChunkWindow(in_window=True)
    window.begin()
    stream(window, 3, b"q")
    window.arrived(chunk([b"a"], high=3))
    assert isinstance(window.take(3), ReadAgain)
