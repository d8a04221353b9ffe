"""Readers of runs that retired before they began: the runs stay until they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from databus.bootstrap.log import log_handover, segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream, Piece
from databus.bootstrap.reading.frame_ranges import FrameRange, changes_from
from databus.bootstrap.reading.range_stream import RangeContent, RangeStream
from databus.bootstrap.reading.retained_runs import Retain
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.open_readers import OpenReaders
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.checkpoint import ORIGIN, BootstrapCheckpoint
from databus.common.errors import StoreError
from databus.common.filters.stream_filter import StreamFilter
from databus.common.frame.frame_format import Op, iter_frames
from tests.bootstrap import model
from tests.bootstrap.bench import Bench, rows_in
from tests.bootstrap.http.test_readers import Gate, gate, serving
from tests.bootstrap.model import CLOCK, START, History, State, compact, frames_between, write_run
from tests.support.waiting import eventually

__all__ = ["gate"]
RETIRED_US = 1_000_000_000
LATER_US = RETIRED_US + 3600 * 10**6


class Merged:
    """Segments that a merge has replaced some time ago, and that are still on disk."""

    def __init__(self, store: Store, log: HotLog) -> None:
        self.store, self.log = store, log
        history = History(8)
        self.blocks = [history.block(6) for _ in range(4)]
        for block in self.blocks:
            log.append(block, 1)
            segments.seal(log, store, 1)
        self.retired = [run.id for run in store.read().chain]
        self.readers = OpenReaders(store.storage, lambda: LATER_US / 1e6)
        replace_all(store, self.blocks, RETIRED_US)

    def collect(self) -> list[str]:
        return self.store.collect(0, "cs", LATER_US)

    def every_change(self, *, retains: bool = True) -> RangeStream:
        """A reader of all changes, which are in the replaced segments alone."""
        window = self.log.state().window

        def retain(retired_us: int) -> None:
            self.readers.retain(stream, retired_us)

        stream = RangeStream(
            database="shop",
            clock=CLOCK,
            since=START,
            until=window,
            content=RangeContent.ALL,
            opening=lambda may_open: FrameRange(
                self.store,
                self.log,
                changes_from(START, every_change=True),
                window,
                every_change=True,
                may_open=may_open,
                retain=retain if retains else None,
            ),
            stream_filter=StreamFilter(),
            source_ids=np.empty(0, dtype=np.uint32),
            piece_bytes=1,
        )
        return stream

    def resumed(self, checkpoint: BootstrapCheckpoint) -> BootstrapStream:
        """A reader whose checkpoint lies inside a replaced segment."""

        def retain(retired_us: int) -> None:
            self.readers.retain(stream, retired_us)

        stream = BootstrapStream(
            store=self.store,
            log=self.log,
            since=START,
            target=self.log.state().window,
            stream_filter=StreamFilter(),
            source_ids=np.empty(0, dtype=np.uint32),
            resume=checkpoint,
            piece_bytes=1,
            retain=retain,
        )
        return stream


def replace_all(store: Store, blocks: list[bytes], retired_us: int) -> None:
    """A delta takes the place of the whole chain."""
    chain = store.read().chain
    rows = compact(frames_between(blocks, START, chain[-1].stop), base=False)
    delta = write_run(store, RunKind.DELTA, START, chain[-1].stop, rows, bits=0)
    store.switch(lambda m: m.with_changes(add=delta, drop=chain, now_us=retired_us))


@pytest.fixture
def merged(store: Store, log: HotLog) -> Merged:
    return Merged(store, log)


def frames_of(pieces: Iterator[Piece]) -> bytes:
    return b"".join(bytes(piece.frames) for piece in pieces)


def test_a_range_of_retired_runs_is_read_to_its_end_though_their_grace_is_over(
    merged: Merged,
) -> None:
    stream = merged.every_change()
    merged.readers.enter(stream)
    pieces = stream.pieces()
    first = bytes(next(pieces).frames)
    assert merged.collect() == [], "the reader has them open"
    merged.readers.renew()
    assert merged.collect() == []
    assert first + frames_of(pieces) == b"".join(merged.blocks)
    merged.readers.leave(stream)
    assert sorted(merged.collect()) == sorted(merged.retired)


def test_a_reader_that_retains_nothing_loses_its_runs(merged: Merged) -> None:
    stream = merged.every_change(retains=False)
    merged.readers.enter(stream)
    pieces = stream.pieces()
    next(pieces)
    assert sorted(merged.collect()) == sorted(merged.retired)
    with pytest.raises(StoreError, match="cannot be read"):
        frames_of(pieces)
    merged.readers.leave(stream)


def test_a_reader_that_resumes_inside_a_retired_run_finishes_it(merged: Merged) -> None:
    inside = list(iter_frames(merged.blocks[1]))[2]
    state = State().apply_all(
        bytes(one.bytes) for one in frames_between(merged.blocks, ORIGIN, inside.position)
    )
    checkpoint = BootstrapCheckpoint(
        "shop",
        CLOCK,
        since=START,
        target=merged.log.state().window,
        run=merged.retired[1],
        row=3,
        position=merged.store.read().retired[1].run.start,
    )
    stream = merged.resumed(checkpoint)
    merged.readers.enter(stream)
    pieces = stream.pieces()
    shown = next(pieces).checkpoint
    assert isinstance(shown, BootstrapCheckpoint) and shown.run == merged.retired[1]
    assert merged.collect() == [], "all that retired then or later stays"
    state.apply_all(piece.frames for piece in pieces)
    assert state.rows == State().apply_all(merged.blocks).rows
    merged.readers.leave(stream)
    assert len(merged.collect()) == len(merged.retired)


def test_a_plan_whose_runs_are_deleted_before_they_are_noted_is_made_again(
    merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = merged.store.read()
    end = merged.log.state().window
    assert len(merged.collect()) == len(merged.retired)
    read: Callable[..., tuple[Any, Manifest]] = log_handover.read
    answers = iter([stale])

    def first_stale(log: HotLog, store: Store) -> tuple[Any, Manifest]:
        start, manifest = read(log, store)
        return start, next(answers, manifest)

    monkeypatch.setattr(log_handover, "read", first_stale)
    noted: list[int] = []
    retain: Retain = noted.append
    middle = stale.retired[1].run.stop
    starts = changes_from(START, every_change=False)
    monkeypatch.setattr(
        "databus.bootstrap.merging.run_planner.cover", preferring(stale.retired[0].run.id)
    )
    found = FrameRange(merged.store, merged.log, starts, end, every_change=False, retain=retain)
    assert noted == [RETIRED_US] and middle < end
    (run,) = merged.store.read().chain
    assert [part.run.id for part, _ in found.parts] == [run.id]
    assert sum(unit.rows for unit in found.units()) == run.rows
    found.close()


def preferring(run_id: str) -> Any:
    """A planner that takes the retired runs for as long as the manifest names them."""
    from databus.bootstrap.merging import run_planner

    cover = run_planner.cover

    def planned(manifest: Manifest, *given: Any, every_change: bool) -> Any:
        return cover(manifest, *given, every_change=manifest.find(run_id) is not None)

    return planned


async def test_the_server_retains_replaced_runs_for_an_answer_that_reads_them(
    tmp_path: Path, gate: Gate
) -> None:
    bench = Bench(tmp_path / "data")
    bench.bind()
    bench.seed()
    for _ in range(3):
        bench.write(4)
        bench.seal()
    retired = sorted(run.id for run in bench.store.read().chain)
    replace_all(bench.store, bench.blocks, time.time_ns() // 1000 - 60 * 10**6)
    async with serving(bench):
        gate.close()
        answer = asyncio.create_task(
            bench.frames("changes", mode="all", since=str(model.START.scn) + ":3")
        )
        await eventually(lambda: gate.waiting == 1)
        assert bench.store.collect(0, "cs") == []
        gate.open()
        sent = rows_in(await answer)
        assert sent == [bytes(one.bytes) for block in bench.blocks for one in iter_frames(block)]
        assert not any(one.op == Op.ERROR for one in iter_frames(b"".join(sent)))
        await eventually(lambda: sorted(bench.store.collect(0, "cs")) == retired)
    assert bench.store.check() == []
    bench.logs.close()
