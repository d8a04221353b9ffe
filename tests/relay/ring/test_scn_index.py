"""The SCN index against bisect over a plain list of its entries."""

from __future__ import annotations

import itertools
import tempfile
from bisect import bisect_right
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from databus.common.checkpoint import Position
from databus.common.errors import StoreError
from databus.common.frame.frame_format import HEADER, MAGIC, VERSION, read_frame
from databus.relay.ring import ring_file
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_format import MAX_INDEX_ENTRIES, step_bytes
from databus.relay.ring.scn_index import FANOUT, ScnIndex, lane_row_counts
from tests.support.windows import make_window, positions, split_frames

RING_BYTES = 65536
FRAME_BYTES = 256


class FakeRing:
    """A ring that only has headers: a frame of FRAME_BYTES at each multiple of FRAME_BYTES."""

    def __init__(self, folder: Path, step: int) -> None:
        self.bytes = bytearray(RING_BYTES)
        data = np.frombuffer(self.bytes, dtype=np.uint8)
        data.flags.writeable = False
        self.index = ScnIndex(folder / "index", data, 99, step, writable=True)
        self.data = data
        self.entries: list[tuple[Position, int]] = []
        self.head = 0
        self.tail = 0

    def append(self, position: Position) -> None:
        """Write one frame, evict what it overwrites, and index it if it is far enough."""
        self.evict(self.tail + FRAME_BYTES - RING_BYTES)
        HEADER.pack_into(
            self.bytes, self.tail % RING_BYTES, 0, FRAME_BYTES, MAGIC, VERSION, 1, 0, 0,
            position.scn, position.seq, *[0] * 6, FRAME_BYTES - HEADER.size, 0
        )  # fmt: skip
        if self.tail >= self.index.next_point(self.head):
            self.index.add(np.array([self.tail]))
            self.entries.append((position, self.tail))
        self.tail += FRAME_BYTES

    def evict(self, head: int) -> None:
        self.head = max(self.head, head)
        self.index.evict(self.head)
        self.entries = [entry for entry in self.entries if entry[1] >= self.head]

    def truncate(self, tail: int) -> None:
        self.tail = tail
        self.index.truncate(tail)
        self.entries = [entry for entry in self.entries if entry[1] < tail]

    def expected(self, position: Position) -> int:
        number = bisect_right([entry for entry, _ in self.entries], position)
        return self.entries[number - 1][1] if number else -1


@settings(max_examples=60, deadline=None)
@given(
    step=st.sampled_from((256, 512, 2000)),
    gaps=st.lists(st.integers(0, 3), min_size=1, max_size=900),
    cuts=st.lists(st.tuples(st.integers(1, 899), st.integers(0, 40), st.booleans()), max_size=5),
    probes=st.lists(st.tuples(st.floats(0, 1.01), st.integers(0, 6)), min_size=1, max_size=20),
)
def test_a_lookup_gives_what_bisect_gives(
    step: int,
    gaps: list[int],
    cuts: list[tuple[int, int, bool]],
    probes: list[tuple[float, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ring = FakeRing(Path(folder), step)
        position = Position(2**32 - 50, 0)
        for number, gap in enumerate(gaps):
            for at, frames, truncate in cuts:
                retained = (ring.tail - ring.head) // FRAME_BYTES
                if at != number or not retained:
                    continue
                if truncate:
                    ring.truncate(ring.tail - min(frames, retained) * FRAME_BYTES)
                else:
                    ring.evict(ring.head + min(frames, retained) * FRAME_BYTES)
            position = (
                Position(position.scn + gap, 0) if gap else Position(position.scn, position.seq + 1)
            )
            ring.append(position)
        assert ring.index.problem(ring.head, ring.tail) is None
        assert len(ring.index) == len(ring.entries)
        first = Position(2**32 - 50, 0).scn
        for share, seq in probes:
            probe = Position(first + int((position.scn - first) * share), seq)
            assert ring.index.lookup(probe) == ring.expected(probe)
        for entry, at in ring.entries[:: max(1, len(ring.entries) // 10)]:
            assert ring.index.lookup(entry) == at
        ring.index.close()


@pytest.mark.parametrize("ring_bytes", [4096, 8192, 1 << 20, 1 << 28, 1 << 36])
def test_the_index_is_bounded_and_each_lane_is_short_to_walk(ring_bytes: int) -> None:
    step = step_bytes(ring_bytes)
    counts = lane_row_counts(ring_bytes, step)
    assert step % 8 == 0
    assert counts[0] <= MAX_INDEX_ENTRIES + 2
    assert counts[-1] <= FANOUT
    for below, lane in itertools.pairwise(counts):
        assert below / FANOUT + 1 <= lane <= below / FANOUT + 2


def test_a_stale_number_of_entries_is_no_trap_for_a_reader(tmp_path: Path) -> None:
    ring = FakeRing(tmp_path, 256)
    for scn in range(1, 100):
        ring.append(Position(scn, 0))
    with (tmp_path / "index").open("r+b") as file:
        file.seek(128)
        file.write(bytes(8) + b"\xff" * 8)
    assert ring.index.lookup(Position(50, 0)) == -1
    assert "do not fit" in str(ring.index.problem(ring.head, ring.tail))
    assert ring.index.restore(ring.head, ring.tail) is True
    assert ring.index.problem(ring.head, ring.tail) is None
    assert ring.index.lookup(Position(50, 0)) == 49 * FRAME_BYTES
    ring.index.close()


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_false_entry_in_any_lane_is_noticed(tmp_path: Path, lane: int) -> None:
    ring = FakeRing(tmp_path, 256)
    for scn in range(1, 400):
        ring.append(Position(scn, 0))
    every = FANOUT**lane
    number = -(-ring.index.first // every) * every
    row = ring.index.lane_starts[lane] + number // every % ring.index.lane_rows[lane]
    ring.index.rows[row, 1] += 1
    assert f"lane {lane}: entry {number} " in str(ring.index.problem(ring.head, ring.tail))
    ring.index.close()


def test_an_index_of_another_ring_is_refused_by_readers_and_replaced_by_the_writer(
    tmp_path: Path,
) -> None:
    ring = FakeRing(tmp_path, 256)
    ring.append(Position(1, 0))
    ring.index.close()
    data = ring.data
    with pytest.raises(StoreError, match="not the index of this ring"):
        ScnIndex(tmp_path / "index", data, 98, 256, writable=False)
    other = ScnIndex(tmp_path / "index", data, 98, 256, writable=True)
    assert len(other) == 0
    other.close()


def test_a_reader_finds_everything_before_there_is_an_index(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer:
        for scn in range(1, 50):
            writer.append(make_window(scn, [500]))
    (tmp_path / "ring.index").rename(tmp_path / "elsewhere")
    with Ring.open_reader(tmp_path) as reader:
        ring_positions = [reader.find(Position(scn)) for scn in range(49)]
        assert reader.index is None
        (tmp_path / "elsewhere").rename(tmp_path / "ring.index")
        assert [reader.find(Position(scn)) for scn in range(49)] == ring_positions
        assert reader.index is not None


def test_a_lying_index_costs_a_reader_time_and_never_a_wrong_answer(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    with Ring.create(tmp_path, RING_BYTES) as writer:
        for scn in range(1, 200):
            writer.append(make_window(scn, [500]))
        with Ring.open_reader(tmp_path) as reader:
            oldest = reader.snapshot().prev.scn
            ring_positions = [reader.find(Position(scn)) for scn in range(oldest + 1, 200)]
            rows = writer._index.rows
            for _ in range(30):
                rows[:] = rows[rng.permutation(len(rows))]
                rows[rng.integers(len(rows), size=40), 3] += rng.integers(-40, 40, size=40) * 8
                assert [
                    reader.find(Position(scn)) for scn in range(oldest + 1, 200)
                ] == ring_positions
            del rows
            writer._index.clear()
            writer._index.complete(writer.state.head, writer.state.tail)


def test_the_index_begins_where_the_ring_begins_after_every_eviction(tmp_path: Path) -> None:
    longest = max(len(frame) for _, frame in split_frames(make_window(1, [500])))
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        for scn in range(1, 600):
            writer.append(make_window(scn, [scn % 500, 20]))
            if scn % 50 == 0:
                middle = Position((writer.state.prev.scn + scn) // 2)
                block, _ = reader.read(reader.find(middle), 1)
                assert writer.expire(read_frame(block).commit_us)
                assert writer.state.prev == Position(middle.scn, 2)
            head, index = writer.state.head, writer._index
            assert 0 <= index.position(index.first) - head < index.step_bytes + longest
            assert index.lookup(writer.state.prev) in (-1, head)
            assert index.lookup(writer.state.max) > writer.state.tail - index.step_bytes - longest
            assert index.problem(head, writer.state.tail) is None
        assert writer.state.tail > 3 * RING_BYTES


def test_each_of_many_windows_under_one_entry_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 8192
    monkeypatch.setattr(ring_file, "step_bytes", lambda _: step)
    with Ring.create(tmp_path, RING_BYTES) as writer, Ring.open_reader(tmp_path) as reader:
        for scn in range(1, 1500):
            writer.append(make_window(scn, [10]))
        state, index = reader.snapshot(), writer._index
        assert state.windows - state.evicted_windows > 30 * len(index) > 30
        entries = set()
        for scn in range(state.prev.scn, state.max.scn):
            ring_position = reader.find(Position(scn))
            block, _ = reader.read(ring_position, 1)
            assert positions(block)[0] == Position(scn + 1, 0)
            entry = index.lookup(Position(scn))
            assert entry <= ring_position <= max(entry, state.head) + step + 512
            entries.add(entry)
        assert len(entries - {-1}) == len(index), "each entry was begun from"


def test_no_flipped_bit_of_the_index_fails_a_reader_or_the_next_writer(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer:
        for scn in range(1, 200):
            writer.append(make_window(scn, [500]))
        oldest, newest_us = writer.state.prev.scn, writer.state.max_commit_us
    path = tmp_path / "ring.index"
    content = path.read_bytes()
    scns = range(oldest + 1, 200, 11)

    def answers() -> list[object]:
        with Ring.open_reader(tmp_path) as reader:
            found: list[object] = [reader.find(Position(scn)) for scn in scns]
            return [*found, reader.before_time(newest_us)]

    whole = answers()
    flips = [(at, bit) for at in range(144) for bit in range(8 if at >= 128 else 1)]
    flips += [(at, at % 8) for at in range(4096, len(content), 13)]
    for at, bit in flips:
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        assert answers() == whole, (at, bit)
        with Ring.open_writer(tmp_path) as writer:
            assert writer._index.problem(writer.state.head, writer.state.tail) is None, (at, bit)
