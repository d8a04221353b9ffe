"""Filtered readers that are behind choose by a directory of headers: what a scan would choose."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import ReaderOvertaken
from databus.common.filters.stream_filter import (
    HashPartition,
    ModPartition,
    RangePartition,
    StreamFilter,
)
from databus.common.frame.frame_format import Op, scan
from databus.common.frame.window_builder import WindowBuilder
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.ring_writer import RingWriter
from databus.relay.serving import header_cache as directories
from databus.relay.serving import stream_cursor
from databus.relay.serving.header_cache import HeaderCache
from databus.relay.serving.stream_cursor import StreamCursor
from tests.support.windows import split_frames

RING_BYTES = 1 << 20


def numbered(scn: int) -> bytes:
    """A window of a few rows with keys of their own."""
    builder = WindowBuilder(scn, commit_us=scn)
    for number in range(scn % 7):
        key = (scn * 7 + number).to_bytes(8, "little")
        builder.event(Op.INSERT, 1, 1, key, after=bytes([number]) * (scn % 13 * 60))
    return builder.end(f"t{scn}")


def fill(writer: RingWriter, first: int, laps: float) -> int:
    """Append windows for so many ring lengths; the next scn."""
    until = writer.state.tail + laps * RING_BYTES
    while writer.state.tail < until:
        writer.append(numbered(first))
        first += 1
    return first


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[tuple[RingWriter, RingReader]]:
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        yield writer, reader


def listed(ring: RingReader, cursor: StreamCursor, directory: HeaderCache) -> list[bytes]:
    """The parts that a reader is given, as ``StreamAnswer`` takes them."""
    at, parts = ring.find(cursor.position), []
    while not cursor.is_full and (cached_headers := directory.at(ring, at)) is not None:
        part = cursor.take_cached(cached_headers, partial(cached_headers.fetch, ring))
        parts.append(bytes(part.data))
        is_whole = part.used_bytes == cached_headers.stop - cached_headers.start
        at = cached_headers.after if is_whole else cached_headers.start + part.used_bytes
    return parts


def scanned(ring: RingReader, cursor: StreamCursor, until: Position) -> bytes:
    """The same by copies of blocks, up to a position."""
    at, found = ring.find(cursor.position), b""
    while not cursor.is_full and cursor.position < until:
        block, at = ring.read(at, 5000)
        found += cursor.take(block).data
    return found


@pytest.mark.parametrize("part_bytes", [300, 5000, 1 << 20])
@pytest.mark.parametrize("max_bytes", [None, 90_000])
@pytest.mark.parametrize(
    "wanted",
    [
        StreamFilter(partition=ModPartition(16, frozenset({3}))),
        StreamFilter(partition=ModPartition(2, frozenset({0}))),
        StreamFilter(ops=frozenset({int(Op.INSERT)})),
        StreamFilter(ops=frozenset({int(Op.DELETE)})),
    ],
)
def test_a_directory_gives_what_a_scan_gives(
    ring: tuple[RingWriter, RingReader],
    wanted: StreamFilter,
    max_bytes: int | None,
    part_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_cursor, "PART_BYTES", part_bytes)
    monkeypatch.setattr(directories, "CACHE_PART_BYTES", 100_000)
    writer, reader = ring
    fill(writer, 1, 2.4)
    oldest = reader.snapshot().prev
    first = StreamCursor(oldest, wanted, max_bytes=max_bytes)
    parts = listed(reader, first, HeaderCache())
    second = StreamCursor(oldest, wanted, max_bytes=max_bytes)
    found = scanned(reader, second, first.position)
    reached = [frame for position, frame in split_frames(found) if position <= first.position]
    assert b"".join(parts) == b"".join(reached)
    assert first.is_full == second.is_full
    assert all(len(part) <= max(part_bytes, 1000) for part in parts)
    assert first.sent_bytes == sum(map(len, parts))


def test_a_partition_by_key_ranges_looks_at_keys_and_so_at_blocks() -> None:
    assert not StreamCursor(
        ORIGIN, StreamFilter(partition=HashPartition(2, frozenset({0})))
    ).uses_cached_headers
    assert not StreamCursor(
        ORIGIN, StreamFilter(partition=RangePartition(1, 0, 1))
    ).decides_by_headers
    assert StreamCursor(
        ORIGIN, StreamFilter(partition=ModPartition(2, frozenset({0})))
    ).decides_by_headers


def test_a_reader_that_is_overtaken_between_headers_and_rows_stays_where_it_was(
    ring: tuple[RingWriter, RingReader],
) -> None:
    writer, reader = ring
    scn = fill(writer, 1, 0.5)
    cursor = StreamCursor(ORIGIN, StreamFilter(partition=ModPartition(2, frozenset({0}))))
    directory = HeaderCache()
    cached_headers = directory.at(reader, reader.find(ORIGIN))
    assert cached_headers is not None
    assert directory.at(reader, reader.find(ORIGIN)) is cached_headers
    fill(writer, scn, 1.5)
    with pytest.raises(ReaderOvertaken):
        cursor.take_cached(cached_headers, partial(cached_headers.fetch, reader))
    assert (cursor.position, cursor.sent_bytes, cursor.sent_position) == (ORIGIN, 0, None)
    with pytest.raises(ReaderOvertaken):
        directory.at(reader, cached_headers.start)


def test_headers_are_cached_within_bounds(
    ring: tuple[RingWriter, RingReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "CACHE_PART_BYTES", 100_000)
    monkeypatch.setattr(directories, "MAX_HEADERS_BYTES", 30_000)
    writer, reader = ring
    directory, scn = HeaderCache(), 1
    for _ in range(5):
        scn = fill(writer, scn, 1)
        cursor = StreamCursor(reader.snapshot().prev, StreamFilter(ops=frozenset({int(Op.DELETE)})))
        listed(reader, cursor, directory)
        retained = sum(
            cached_headers.headers.nbytes for cached_headers in directory._known.values()
        )
        assert retained == directory._kept_bytes
        assert retained <= 30_000 + 100_000
    assert directory.listed_count > 10


def test_columns_of_the_header_cache_are_those_of_the_frames(
    ring: tuple[RingWriter, RingReader],
) -> None:
    writer, reader = ring
    fill(writer, 1, 0.5)
    at = reader.find(ORIGIN)
    cached_headers = HeaderCache().at(reader, at)
    assert cached_headers is not None
    block, _ = reader.read(at, cached_headers.stop - cached_headers.start)
    scanned_columns = scan(block, verify=False)
    assert len(cached_headers.columns) == len(scanned_columns)
    names = ("length", "op", "flags", "scn", "seq", "source_id", "key_hash", "commit_us")
    for name in (*names, "schema_fp", "key_len", "before_len", "after_len"):
        assert (getattr(cached_headers.columns, name) == getattr(scanned_columns, name)).all()
