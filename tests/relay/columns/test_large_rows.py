"""Frames that are too large: what is taken out of the stream does not depend on how it is cut."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.common.errors import FormatError, UnsupportedChange
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.columns.large_rows import MAX_KEY_BYTES, LargeRows, RowLimit, decode_large
from databus.relay.sources.contract import Batch, Chunk, ScnSnapshot
from databus.relay.sources.row_buffers import Row, Rows
from databus.relay.sources.suspended_tables import SuspendedTables

RING_BYTES = 64 << 10
LIMIT = RING_BYTES // 4
COLUMNS = (Column("id", Kind.INT, nullable=False), Column("body", Kind.STRING))
CALM = SourceSchema("shop.calm", COLUMNS, ("id",))
WIDE = SourceSchema("shop.wide", COLUMNS, ("id",))


def limit() -> RowLimit:
    found = RowLimit(RING_BYTES, SuspendedTables({}))
    found.learn((CALM, WIDE))
    return found


class Stream:
    """Windows that the test writes."""

    def __init__(self) -> None:
        self.scn = 0

    def window(self, *changes: tuple[Op, SourceSchema, int, int | None, int | None]) -> bytes:
        """One window of (op, table, key, letters before, letters after)."""
        self.scn += 1
        builder = WindowBuilder(self.scn, self.scn)
        for op, schema, key, before, after in changes:
            images = [
                None if letters is None else schema.encode_row((key, "x" * letters))
                for letters in (before, after)
            ]
            builder.event(
                op, schema.source_id, schema.fingerprint, schema.encode_key((key,)),
                before=images[0], after=images[1],
            )  # fmt: skip
        return builder.end()


def waits(found: RowLimit) -> str:
    return found._tables.suspensions["shop.wide"].waits_for


def test_a_frame_at_the_limit_passes_and_a_larger_one_does_not() -> None:
    stream, found = Stream(), limit()
    room = (
        LIMIT
        - frame_format.HEADER_BYTES
        - len(WIDE.encode_key((1,)))
        - len(WIDE.encode_row((1, "")))
    )
    fits = stream.window((Op.INSERT, WIDE, 1, None, room - 2))
    assert frame_format.read_frame(fits).length == LIMIT
    assert found.sift(Batch(fits)).batch.data == fits and not found.large
    sifted = found.sift(Batch(stream.window((Op.INSERT, WIDE, 2, None, room + 6))))
    assert [view.op for view in frame_format.iter_frames(sifted.batch.data)] == [Op.END_OF_WINDOW]
    assert sifted.has_suspended and list(found.large) == ["shop.wide"]
    with pytest.raises(UnsupportedChange, match=r"shop.wide: its row with the key \[3\] takes"):
        row = Row(WIDE.encode_key((3,)), WIDE.encode_row((3, "x" * (room + 6))))
        found.require(Chunk(WIDE, Rows.of([row]), ScnSnapshot(1), [3], True))


@pytest.mark.parametrize(
    ("change", "ends"),
    [
        ((Op.DELETE, WIDE, 1, LIMIT, None), True),
        ((Op.DELETE, WIDE, 2, LIMIT, None), False),
        ((Op.UPDATE, WIDE, 1, LIMIT, 10), True),
        ((Op.UPDATE, WIDE, 1, LIMIT, LIMIT // 2), False),
        ((Op.UPDATE, WIDE, 1, None, LIMIT // 2), True),
        ((Op.UPDATE, WIDE, 2, 10, 10), False),
        ((Op.TRUNCATE, WIDE, 0, None, None), True),
        ((Op.TRUNCATE, CALM, 0, None, None), False),
    ],
)
def test_the_wait_ends_when_the_stream_shows_that_the_row_is_gone_or_its_next_change_fits(
    change: tuple[Op, SourceSchema, int, int | None, int | None], ends: bool
) -> None:
    stream, found = Stream(), limit()
    found.sift(Batch(stream.window((Op.INSERT, WIDE, 1, None, LIMIT))))
    assert waits(found).startswith("Set ring_bytes")
    sifted = found.sift(Batch(stream.window(change)))
    assert bool(waits(found)) != ends
    retained = [view.source_id for view in frame_format.iter_frames(sifted.batch.data)]
    assert WIDE.source_id not in retained, "it is still suspended"


def test_another_large_row_of_a_table_that_waits_no_more_makes_it_wait_again() -> None:
    stream, found = Stream(), limit()
    found.sift(Batch(stream.window((Op.INSERT, WIDE, 1, None, LIMIT))))
    found.sift(Batch(stream.window((Op.DELETE, WIDE, 1, None, None))))
    assert not waits(found)
    found.sift(Batch(stream.window((Op.INSERT, WIDE, 5, None, LIMIT))))
    assert waits(found) and found.keys_of("shop.wide", WIDE) == [[5]]


def test_large_rows_survive_a_restart_and_a_damaged_record_is_refused() -> None:
    rows = LargeRows("what", {b"a", b"bc"})
    rows.add(b"k" * (MAX_KEY_BYTES + 1))
    document = json.loads(json.dumps({"shop.wide": rows.to_json()}))
    assert decode_large(document) == {"shop.wide": LargeRows("what", {b"a", b"bc"}, has_more=True)}
    for damaged in ({"a": 1}, {"a": ["w", ["zz"], False]}, {"a": ["w"]}):
        with pytest.raises(FormatError, match="no record of large rows"):
            decode_large(damaged)


CHANGES = st.tuples(
    st.sampled_from([Op.INSERT, Op.UPDATE]),
    st.sampled_from([CALM, WIDE]),
    st.integers(1, 3),
    st.none(),
    st.sampled_from([1, 40, LIMIT]),
)


@given(st.lists(st.lists(CHANGES, max_size=4), max_size=5), st.data())
def test_how_frames_are_cut_into_batches_does_not_matter(
    windows: list[list[tuple[Op, SourceSchema, int, int | None, int | None]]], data: st.DataObject
) -> None:
    stream = Stream()
    frames = b"".join(stream.window(*window) for window in windows)
    whole = limit()
    expected = whole.sift(Batch(frames)).batch.data
    offsets = frame_format.scan(frames).offset.tolist() if frames else [0]
    cuts = data.draw(st.sets(st.sampled_from(offsets)))
    parts, piecewise = b"", limit()
    for start, stop in pairwise([0, *sorted(cuts), len(frames)]):
        parts += piecewise.sift(Batch(frames[start:stop])).batch.data
    assert parts == expected
    assert piecewise.large == whole.large
    gone = {source for source in ("shop.calm", "shop.wide") if source in whole.large}
    for view in frame_format.iter_frames(expected):
        assert view.length <= LIMIT
    assert gone == set(whole._tables.suspensions)
