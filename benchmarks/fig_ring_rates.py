"""The ring alone: events appended and events looked at by a filter, a second.

Append: blocks of windows of 2.5 KB events into a ring, over and over, beside a plain copy of the
same blocks.  Filter: a reader goes through a filled ring with a 16-way partition, as one does
that has fallen behind; by itself, and sharing its scans with others.  The same by source and by
operation, each taking a sixteenth, and by ``where``, over the generator's rows, of which it takes
about a sixteenth; also by a reader near the tail, which gets at most 64 KiB at once.  Then the
memory of a reader over a hundred ring lengths.  The floors: 500,000 appended, 5 million looked at
by a partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.harness import Report, Run, measure, start
from databus.common.checkpoint import ORIGIN
from databus.common.compiled.kernels import I64Array, U8Array, crc32c, jit, load_u32
from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.filters.predicate import parse_where
from databus.common.filters.stream_filter import ModPartition, StreamFilter
from databus.common.frame import frame_format
from databus.common.frame.frame_format import HEADER_BYTES, OFFSETS, Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import SchemaSet
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.ring_writer import RingWriter
from databus.relay.serving.header_cache import MIN_CACHE_PART_BYTES, HeaderCache
from databus.relay.serving.row_filter import RowFilter
from databus.relay.serving.stream_cursor import StreamCursor, warm_up
from databus.relay.sources.generator.generator_source import SCHEMA, GeneratorSource

EVENT_BYTES = {"2.5 KB": 2500, "200 B": 200}
EVENTS_PER_WINDOW = 10
BLOCK_BYTES = 1 << 20
PARTITIONS = 16
FLOORS = {"append": 500_000, "filter": 5_000_000}
LAPS = 100
CHOSEN_SOURCE = 2
FILTERS = {
    "filter": StreamFilter(partition=ModPartition(PARTITIONS, frozenset({3}))),
    "filter by source": StreamFilter(sources=("shop.chosen",)),
    "filter by ops": StreamFilter(ops=frozenset({Op.UPDATE})),
}
WHERE = f"id % {PARTITIONS} = 3"
WHERE_RING_BYTES = 64 << 20


class Blocks:
    """Blocks of whole windows that may be appended again and again, at ever later positions."""

    def __init__(self, event_bytes: int, total_bytes: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        payload = rng.integers(32, 127, event_bytes, dtype=np.uint8).tobytes()
        self.blocks: list[npt.NDArray[np.uint8]] = []
        self.event_count = 0
        made, scn = 0, 0
        while made < total_bytes:
            block = bytearray()
            while len(block) < BLOCK_BYTES:
                scn += 1
                builder = WindowBuilder(scn, commit_us=scn)
                for _ in range(EVENTS_PER_WINDOW):
                    number = self.event_count % PARTITIONS
                    op = Op.UPDATE if number == 0 else Op.INSERT
                    source = CHOSEN_SOURCE if number == 1 else 1
                    key = int(rng.integers(1 << 40)).to_bytes(8, "little")
                    row = payload[: event_bytes - HEADER_BYTES - len(key)]
                    builder.event(op, source, 1, key, after=row)
                    self.event_count += 1
                block += builder.end()
            self.blocks.append(np.frombuffer(block, dtype=np.uint8))
            made += len(block)
        self.bytes = made
        self._scns = [
            (frame_format.scan(block, verify=False).offset + OFFSETS["scn"]) >> 3
            for block in self.blocks
        ]
        self._step = scn
        self._round = 0

    def next_round(self) -> None:
        """Move all positions on behind those that were appended."""
        if self._round:
            for block, words in zip(self.blocks, self._scns, strict=True):
                block.view(np.uint64)[words] += np.uint64(self._step)
                _reseal(block, (words << 3) - OFFSETS["scn"])
        self._round += 1

    def digest(self) -> str:
        """Hash of the first round."""
        found = hashlib.sha256()
        for block in self.blocks:
            found.update(block.data)
        return found.hexdigest()[:16]

    def append(self, writer: RingWriter) -> float:
        """Append all blocks once; seconds."""
        self.next_round()
        began = time.perf_counter()
        for block in self.blocks:
            writer.append(block.data)
        return time.perf_counter() - began

    def copy(self, target: npt.NDArray[np.uint8]) -> float:
        """Copy all blocks once, to where a ring would have them; seconds."""
        began, at = time.perf_counter(), 0
        for block in self.blocks:
            at = 0 if at + len(block) > len(target) else at
            target[at : at + len(block)] = block
            at += len(block)
        return time.perf_counter() - began


@jit
def _reseal(block: U8Array, offsets: I64Array) -> None:
    """Give the frames at ``offsets`` the CRCs of what they hold now."""
    for at in offsets:
        crc = crc32c(block, at + 4, at + load_u32(block, at + 4))
        for byte in range(4):
            block[at + byte] = (crc >> (8 * byte)) & 0xFF


def filter_once(
    ring: RingReader, header_cache: HeaderCache, chosen: StreamFilter = FILTERS["filter"]
) -> tuple[float, int]:
    """(seconds, events looked at) of a filtered reader's way through the ring."""
    cursor = StreamCursor(ORIGIN, chosen)
    cursor.set_sources(np.array([CHOSEN_SOURCE], dtype=np.uint32))
    began = time.perf_counter()
    at, events = ring.snapshot().head, 0
    while (cached_headers := header_cache.at(ring, at)) is not None:
        cursor.take_cached(cached_headers, partial(cached_headers.fetch, ring))
        at = cached_headers.after
        events += len(cached_headers.columns)
    seconds = time.perf_counter() - began
    _require_all(ring, events)
    return seconds, events


def _require_all(ring: RingReader, events: int) -> None:
    """A walk that ends before the ring's last part, which is not listed, has no rate."""
    state = ring.snapshot()
    held = state.frames - state.evicted_frames
    if events < 0.9 * held:
        raise SystemExit(f"the walk saw {events} of the ring's {held} frames")


def match_once(
    ring: RingReader, header_cache: HeaderCache, row_filter: RowFilter
) -> tuple[float, int]:
    """(seconds, events looked at) of a reader's way through the ring with a predicate."""
    cursor = StreamCursor(ORIGIN, StreamFilter(), row_filter=row_filter)
    began = time.perf_counter()
    at, events = ring.snapshot().head, 0
    while (cached_headers := header_cache.at(ring, at)) is not None:
        refine = partial(row_filter.refine_cached, cached_headers, ring)
        cursor.take_cached(cached_headers, partial(cached_headers.fetch, ring), refine)
        at = cached_headers.after
        events += len(cached_headers.columns)
    seconds = time.perf_counter() - began
    _require_all(ring, events)
    return seconds, events


def follow_once(ring: RingReader, row_filter: RowFilter) -> tuple[float, int]:
    """(seconds, events looked at) where the rows come in blocks as small as near the tail."""
    cursor = StreamCursor(ORIGIN, StreamFilter(), row_filter=row_filter)
    began = time.perf_counter()
    state = ring.snapshot()
    at, events = state.head, 0
    while at < state.tail:
        block, after = ring.read(at, MIN_CACHE_PART_BYTES)
        if len(block):
            columns = frame_format.scan(np.frombuffer(block, dtype=np.uint8), verify=False)
            cursor.take(block, at, columns)
            events += len(columns)
        at = after
    seconds = time.perf_counter() - began
    _require_all(ring, events)
    return seconds, events


async def _fill(writer: RingWriter, event_bytes: int, seed: int) -> None:
    """A lap of the generator's events."""
    url = (
        f"generator://?events_per_second=max&payload_bytes={event_bytes - 150}"
        f"&events_per_window={EVENTS_PER_WINDOW}&seed={seed}"
    )
    source = GeneratorSource(DatabaseConfig(name="gen", url=SourceUrl(url)))
    async with contextlib.aclosing(source.stream(0)) as batches:
        async for batch in batches:
            writer.append(batch.data)
            if writer.state.tail >= writer.ring_bytes:
                return


def _measure_where(run: Run, report: Report, name: str, event_bytes: int, ring_bytes: int) -> None:
    schemas = SchemaSet()
    schemas.add(SCHEMA)

    def rate(row_filter: RowFilter | None, header_cache: HeaderCache | None) -> float:
        fresh = row_filter or RowFilter(parse_where(WHERE), schemas)
        seconds, events = match_once(ring, header_cache or HeaderCache(), fresh)
        return events / seconds

    def follow_rate(ring: RingReader) -> float:
        seconds, events = follow_once(ring, RowFilter(parse_where(WHERE), schemas))
        return events / seconds

    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        with Ring.create(Path(folder), min(ring_bytes, WHERE_RING_BYTES)) as writer:
            asyncio.run(_fill(writer, event_bytes, run.seed))
            with Ring.open_reader(Path(folder)) as ring:
                shared = RowFilter(parse_where(WHERE), schemas)
                header_cache = HeaderCache()
                match_once(ring, header_cache, shared)
                report.add(measure(run, partial(rate, None, None)), series=f"where, {name}")
                again = measure(run, partial(rate, shared, header_cache))
                report.add(again, series=f"where after another reader, {name}")
                near = measure(run, partial(follow_rate, ring))
                report.add(near, series=f"where near the tail, {name}")


def main(run: Run) -> None:
    """Measure and report."""
    ring_bytes = (16 if run.smoke else 256) << 20
    report = Report(run, "The ring's rates", "events/s")
    report.settings = {"ring_bytes": ring_bytes, "partitions": PARTITIONS, "floors": FLOORS}
    warm_up()
    for name, event_bytes in EVENT_BYTES.items():
        blocks = Blocks(event_bytes, ring_bytes * 5 // 4, run.seed)
        report.output_hash = blocks.digest()
        target = np.ones(ring_bytes, dtype=np.uint8)
        with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
            path = Path(folder)
            with Ring.create(path, ring_bytes) as writer:
                blocks.append(writer)
                copied = measure(run, _rate(blocks.event_count, blocks.copy, target))
                appended = measure(run, _rate(blocks.event_count, blocks.append, writer))
                report.add(copied, series=f"memcpy, {name}")
                report.add(appended, series=f"append, {name}")
                with Ring.open_reader(path) as ring:
                    filtered = {
                        series: measure(run, partial(_filter_rate, ring, None, chosen))
                        for series, chosen in FILTERS.items()
                    }
                    for series, measured in filtered.items():
                        report.add(measured, series=f"{series}, {name}")
                    header_cache = HeaderCache()
                    filter_once(ring, header_cache)
                    shared = measure(run, partial(_filter_rate, ring, header_cache))
                    report.add(shared, series=f"filter after another reader, {name}")
                    if name == "2.5 KB":
                        _tell_memory(report, writer, ring, blocks, 3 if run.smoke else LAPS)
        _measure_where(run, report, name, event_bytes, ring_bytes)
        gigabytes = appended.median * blocks.bytes / blocks.event_count / 1e9
        report.note(
            f"append, {name}: {appended.median / FLOORS['append']:.2f} of the floor, "
            f"{gigabytes:.2f} GB/s, {appended.median / copied.median:.2f} of memcpy"
        )
        share = filtered["filter"].median / FLOORS["filter"]
        report.note(f"filter, {name}: {share:.2f} of the floor")
    report.write()


def _rate(count: int, once: Callable[..., float], *arguments: Any) -> Callable[[], float]:
    return lambda: count / once(*arguments)


def _filter_rate(
    ring: RingReader, header_cache: HeaderCache | None, chosen: StreamFilter = FILTERS["filter"]
) -> float:
    seconds, events = filter_once(ring, header_cache or HeaderCache(), chosen)
    return events / seconds


def _tell_memory(
    report: Report, writer: RingWriter, ring: RingReader, blocks: Blocks, laps: int
) -> None:
    """How the process grows while a reader follows the ring for so many of its lengths."""
    process, header_cache = psutil.Process(), HeaderCache()
    for _ in range(4):  # until the header cache is full
        blocks.append(writer)
        filter_once(ring, header_cache)
    before = process.memory_full_info().uss
    start_tail = ring.snapshot().tail
    while ring.snapshot().tail - start_tail < laps * ring.ring_bytes:
        blocks.append(writer)
        filter_once(ring, header_cache)
    grown = process.memory_full_info().uss - before
    report.note(f"memory over {laps} ring lengths: {grown / 1024:+,.0f} KiB")


if __name__ == "__main__":
    main(start("fig_ring_rates", __doc__.partition("\n")[0]))
