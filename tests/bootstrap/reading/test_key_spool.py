"""Rows that are divided by hash, and read once."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from databus.bootstrap.reading.key_spool import KeySpool
from databus.bootstrap.reading.net_changes import NetChanges
from databus.common.checkpoint import SEQ_END, Position
from databus.common.errors import StoreError
from databus.common.frame.frame_format import FrameView
from tests.bootstrap import model


@given(st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=6), st.integers(1, 5))
def test_all_rows_of_a_hash_come_in_one_part_and_in_order(
    added: list[list[int]], count: int
) -> None:
    with KeySpool(count) as spool:
        number = 0
        for hashes in added:
            index = np.arange(number, number + len(hashes))
            number += len(hashes)
            rows = pa.table({"hash": pa.array(hashes, pa.int64()), "index": index})
            spool.add(rows, np.array(hashes, dtype=np.uint64))
        parts = [part.to_pydict() for part in spool.parts()]
    flat = [one for hashes in added for one in hashes]
    for part in parts:
        assert part["index"] == sorted(part["index"])
        assert part["hash"] == [flat[index] for index in part["index"]]
        assert len({one % count for one in part["hash"]}) <= 1
    assert sorted(index for part in parts for index in part["index"]) == list(range(len(flat)))


class CountingUnit:
    """A unit over frames, which counts how often its columns are read."""

    def __init__(self, frames: Sequence[FrameView]) -> None:
        data = b"".join(bytes(one.bytes) for one in frames)
        columns = model.frame_format.scan(data)
        self._table = model.as_table(data, columns)
        self.rows = self._table.num_rows
        self.reads: list[list[str]] = []

    def table(self, names: list[str]) -> Any:
        """The columns."""
        self.reads.append(names)
        return self._table.select(names)

    def is_wanted(self, scn: Any, seq: Any) -> Any:
        """All."""
        return np.ones(len(scn), dtype=np.bool_)


def test_the_keys_of_a_range_are_read_once_however_many_there_are() -> None:
    history = model.History(4, keys=50)
    blocks = [history.block(10) for _ in range(5)]
    end = Position(history.position.scn, SEQ_END)
    frames = [model.frames_between([block], model.START, end) for block in blocks]
    units = [CountingUnit(one) for one in frames]
    rows = sum(unit.rows for unit in units)
    net = NetChanges(units, rows, pass_rows=3)  # type: ignore[arg-type]  # it calls these alone
    assert len(list(net.reading())) > len(units)
    assert [len(unit.reads) for unit in units] == [1] * len(units)


def test_a_disk_without_room_for_the_keys_is_reported() -> None:
    hashes = np.arange(100_000, dtype=np.uint64)
    rows = pa.table({"key": pa.array([b"%d" % one for one in hashes.tolist()])})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with KeySpool(2) as spool, pytest.raises(StoreError, match="cannot hold the range's keys"):
            for _ in range(10):
                spool.add(rows, hashes)
            list(spool.parts())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
