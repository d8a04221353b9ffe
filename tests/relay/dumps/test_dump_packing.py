"""Dump windows: rows and the deletions that follow them."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pytest

from databus.common.checkpoint import Position
from databus.common.errors import FormatError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Flag, Op
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.dumps.dump_packing import pack_window, with_deletions
from databus.relay.sources.contract import Chunk
from databus.relay.sources.row_buffers import EMPTY, Row, Rows

ITEMS = SourceSchema(
    "shop.items",
    (
        Column("day", Kind.DATE, nullable=False),
        Column("id", Kind.INT, nullable=False),
        Column("name", Kind.STRING),
    ),
    ("day", "id"),
)


class Now:
    """A snapshot that nothing is compared with."""

    high = 1

    def sees(self, scn: int, txid: str) -> bool:
        return True


def chunk_of(rows: Rows) -> Chunk:
    return Chunk(ITEMS, rows, Now(), None, True)


def test_requested_keys_without_a_row_go_out_as_deletions_behind_the_rows() -> None:
    day = dt.date(2026, 11, 21)
    here = Row(ITEMS.encode_key([day, 1]), ITEMS.encode_row([day, 1, "one"]))
    for rows in (Rows.of([here]), EMPTY):
        chunk = with_deletions(chunk_of(rows), ITEMS, [["2026-11-21", 7], ["2026-11-22", -8]])
        left = np.arange(len(chunk.rows))
        data, count = pack_window(ITEMS, chunk.rows, left, Position(5, 2), 99, 1 << 20)
        *events, end = frame_format.iter_frames(data)
        assert count == len(events) == len(rows) + 2
        assert (end.op, end.event_count, end.flags & Flag.DUMP) == (
            Op.END_OF_WINDOW, count, Flag.DUMP,
        )  # fmt: skip
        assert [event.seq for event in events] == list(range(3, 3 + count))
        deletions = events[len(rows) :]
        assert [ITEMS.decode_key(event.key)["id"] for event in deletions] == [7, -8]
        for event in deletions:
            assert (event.op, event.before, event.after) == (Op.DELETE, None, None)
            assert event.key_hash == frame_format.key_hash(bytes(event.key))
        for event in events[: len(rows)]:
            assert (event.op, bytes(event.after or b"")) == (Op.READ, here.row)


def test_a_value_that_is_none_of_its_column_is_refused() -> None:
    with pytest.raises(FormatError, match="'yesterday' is not a value of kind date"):
        with_deletions(chunk_of(EMPTY), ITEMS, [["yesterday", 7]])
