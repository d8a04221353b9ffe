"""A fetcher and two workers as processes: readers that are lapped take nothing but the stream."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.frame.frame_format import iter_frames
from databus.relay.ring.ring_reader import RingReader
from databus.relay.serving.counters.counter_file import counter_path, read_rows
from databus.relay.serving.counters.worker_counters import COUNTERS
from databus.relay.sources.generator.generator_source import GeneratorSource
from tests.support.chain import databases_text
from tests.support.lapped_reader import LappedReader, Manners
from tests.support.relay_process import RelayProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(200)]

RING_BYTES = 1 << 20
LAPS = 40
URL = "generator://?events_per_second=40000&payload_bytes=1500&events_per_window=7&seed=9"


class GeneratedTruth:
    """The generator's stream, each window made when it is read."""

    def __init__(self) -> None:
        self._source = GeneratorSource(DatabaseConfig(name="gen", url=SourceUrl(URL)))
        self.clock = self._source.clock
        self._window_frames = self._source.shape.events_per_window + 1
        self._scn = 0
        self._window: list[bytes] = []

    def index(self, position: Position) -> int:
        """The number of the frame there."""
        assert position.scn > 0
        assert position.seq < self._window_frames
        return (position.scn - 1) * self._window_frames + position.seq

    def frame(self, index: int) -> bytes:
        """The frame with this number."""
        scn, seq = index // self._window_frames + 1, index % self._window_frames
        if scn != self._scn:
            self._source._next_event = self._source.shape.event_count(scn - 1)
            window = self._source._pack(self._source.shape.event_count(scn))
            self._scn, self._window = scn, [bytes(view.bytes) for view in iter_frames(window)]
        return self._window[seq]


def overtaken_by_worker(data_dir: Path) -> list[int]:
    """How many overtaken readers each of two workers counts."""
    found = []
    for worker in (0, 1):
        rows = dict(read_rows(counter_path(data_dir, worker, "tallies"), len(COUNTERS)))
        found.append(rows["gen"][COUNTERS.index("overtaken")])
    return found


async def test_readers_of_two_worker_processes_are_lapped_and_take_no_byte_but_of_the_stream(
    tmp_path: Path,
) -> None:
    data_dir = tmp_path / "data"
    path = tmp_path / "relay.toml"
    text = databases_text(data_dir, {"gen": URL}, ring_bytes=RING_BYTES)
    path.write_text(text.replace("[relay]", "[relay]\nworkers = 2"))
    truth = GeneratedTruth()
    relay = await asyncio.to_thread(RelayProcess, path)
    try:
        await asyncio.to_thread(relay.ready)
        port = int(relay.url.rpartition(":")[2])
        with RingReader(data_dir / "gen") as ring:

            async def passed(laps: float) -> None:
                """When the ring has gone round so often from now on."""
                goal = ring.snapshot().tail + int(laps * RING_BYTES)
                await eventually(lambda: ring.snapshot().tail >= goal, 60, "the ring goes round")

            await passed(1)  # it is full
            begun = ring.snapshot().tail

            def reader(
                spans: bool, *, stalls: bool, where: str = "", **options: int
            ) -> LappedReader:
                manners = Manners(
                    spans=spans,
                    follow=not options,
                    wait_ms=options.get("wait_ms", 0),
                    receive_bytes=1 << 14 if stalls else 1 << 18,
                    ends_are_marked=True,
                    pause=(lambda: passed(1.2)) if stalls else None,
                    where=where,
                )
                return LappedReader(port, truth, manners, database="gen", clock=truth.clock)

            stalling = [reader(spans, stalls=True) for spans in (True, False)]
            stalling += [reader(spans, stalls=True, wait_ms=500) for spans in (True, False)]
            filtered = [reader(False, stalls=stalls, where="id >= 0") for stalls in (True, False)]
            readers = [*stalling, reader(True, stalls=False), reader(False, stalls=False, poll=1)]
            readers += filtered
            async with asyncio.TaskGroup() as group:
                for each in readers:
                    group.create_task(each.run())
                await passed(LAPS)

                def all_noticed() -> bool:
                    cut = {each.manners.spans for each in stalling if each.cut}
                    assert cut == {True, False}, "with a frame half sent"
                    assert all(each.lapped for each in stalling)
                    return all(overtaken_by_worker(data_dir))

                await eventually(all_noticed, 60)
                last = ring.snapshot()
                for each in readers:
                    each.last = last.max
    finally:
        await asyncio.to_thread(relay.end)
    assert any(each.lapped for each in filtered)
    assert last.tail - begun >= LAPS * RING_BYTES
    for each in readers:
        assert each.frames, "it got something"
        assert each.digest.intdigest() == each.wanted.intdigest()
        if each.manners.spans:
            assert each.span_frames
