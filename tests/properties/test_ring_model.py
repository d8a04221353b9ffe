"""The ring against a plain model: a list of frames of which a suffix is retained."""

from __future__ import annotations

import shutil
import tempfile
from bisect import bisect_right
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, ReaderOvertaken, ScnTooOld
from databus.common.frame.frame_format import Op, read_frame
from databus.relay.ring.ring import Ring, RingReader, RingWriter
from databus.relay.ring.ring_check import check
from tests.support.windows import make_window, split_frames

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
RING_SIZES = (4096, 8192, 12288, 65536)


def read_all(reader: RingReader, start: int, max_bytes: int) -> bytes:
    """Everything from ring position ``start`` to the tail."""
    out = bytearray()
    while True:
        frames, start = reader.read(start, max_bytes)
        if not frames:
            return bytes(out)
        assert len(frames) <= max_bytes or len(split_frames(frames)) == 1
        out += frames


class RingMachine(RuleBasedStateMachine):
    """``frames`` is everything ever published, in order; the ring holds a suffix of it."""

    @initialize(size=st.sampled_from(RING_SIZES), start=st.integers(0, 2**64 - 1000))
    def create(self, size: int, start: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ring-model-", dir=MEMORY))
        self.start = Position(start)
        self.writer: RingWriter = Ring.create(self.folder, size, clock="c", start=self.start)
        self.reader: RingReader = Ring.open_reader(self.folder)
        self.size = size
        self.frames: list[tuple[Position, bytes]] = []
        self.open: list[tuple[Position, bytes]] = []
        self.scn = start
        self.cursor: int | None = None
        self.cursor_at = 0

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.reader.close()
            self.writer.close()
            assert check(self.folder) == []
            shutil.rmtree(self.folder)

    # -- the model --

    def first_retained(self) -> int:
        """Index in ``frames`` of the ring's oldest frame, taken from its prev."""
        prev = self.reader.snapshot().prev
        return bisect_right(self.frames, prev, key=itemgetter(0))

    def settle(self) -> None:
        """Move what the ring has published from ``open`` to ``frames``."""
        tail = self.writer.state.max
        while self.open and self.open[0][0] <= tail:
            self.frames.append(self.open.pop(0))

    def append(self, block: bytes) -> None:
        frames = split_frames(block)
        self.writer.append(block)
        self.open += frames
        assert self.writer.last == frames[-1][0]
        self.settle()

    # -- what may happen --

    @rule(
        windows=st.lists(st.lists(st.integers(0, 900), max_size=6), min_size=1, max_size=6),
        gap=st.sampled_from((1, 1, 2, 50)),
    )
    def append_windows(self, windows: list[list[int]], gap: int) -> None:
        block = b""
        for sizes in windows:
            self.scn += gap
            block += make_window(self.scn, sizes)
        self.finish_open()
        self.append(block)
        assert not self.open

    @rule(factor=st.floats(0.05, 2.5), size=st.integers(0, 800), pieces=st.integers(1, 5))
    def append_large_window(self, factor: float, size: int, pieces: int) -> None:
        self.finish_open()
        self.scn += 1
        count = max(1, int(self.size * factor) // (size + 80))
        frames = split_frames(make_window(self.scn, [size] * count))
        step = -(-len(frames) // pieces)
        for at in range(0, len(frames), step):
            self.append(b"".join(frame for _, frame in frames[at : at + step]))
            assert self.writer.open_bytes <= self.writer.part_bytes
        assert not self.open

    @rule(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=8))
    def begin_window(self, sizes: list[int]) -> None:
        self.finish_open()
        self.scn += 1
        frames = split_frames(make_window(self.scn, sizes))[:-1]
        self.append(b"".join(frame for _, frame in frames))

    def finish_open(self) -> None:
        """Drop an open window as a source does that restarts it."""
        self.writer.discard_open()
        self.open.clear()
        assert self.writer.open_bytes == 0
        assert self.writer.last == self.writer.state.max
        self.scn = max(self.scn, self.writer.last.scn)

    @rule()
    def discard(self) -> None:
        self.finish_open()

    @rule()
    def sync(self) -> None:
        assert self.writer.sync() == self.writer.state.max

    @rule(share=st.floats(0, 1), shift_us=st.sampled_from((-1, 0, 1)))
    def expire(self, share: float, shift_us: int) -> None:
        first_retained = self.first_retained()
        retained = self.frames[first_retained:]
        if not retained:
            assert not self.writer.expire(2**62)
            return
        chosen = read_frame(retained[int((len(retained) - 1) * share)][1])
        limit_us = chosen.commit_us + shift_us
        keep_from = first_retained
        for at, (_, frame) in enumerate(retained, first_retained):
            if frame[11] == Op.END_OF_WINDOW:
                if read_frame(frame).commit_us >= limit_us:
                    break
                keep_from = at + 1
        assert self.writer.expire(limit_us) == (keep_from > first_retained)
        assert self.first_retained() == keep_from

    @rule()
    def reopen(self) -> None:
        before = self.writer.state
        self.writer.close()
        self.open.clear()
        self.writer = Ring.open_writer(self.folder, self.size, clock="c")
        assert self.writer.state._replace(synced=0) == before._replace(synced=0)

    @rule(size=st.sampled_from(RING_SIZES))
    def resize(self, size: int) -> None:
        self.open.clear()
        longest = max((len(frame) for _, frame in self.frames[self.first_retained() :]), default=0)
        if longest > size // 4:
            return
        before = self.writer.state
        self.writer.resize(size)
        self.size = size
        self.cursor = None
        assert self.writer.state.max == before.max
        if size > self.reader.ring_bytes * 2:
            assert self.writer.state.prev == before.prev

    @rule(bad=st.integers(0, 3))
    def refuse_what_is_no_growing_stream(self, bad: int) -> None:
        before = self.writer.state, self.writer.last, self.writer.open_bytes
        good = make_window(self.scn + 1, [10])
        if bad == 0:
            block = good[:-8]
        elif bad == 1:
            block = good + b"\0" * 80
        elif bad == 2:
            block = good + good
        else:
            last = self.writer.last
            if last == Position(last.scn):
                return
            block = make_window(last.scn, [10], first_seq=last.seq)
        with pytest.raises(FormatError):
            self.writer.append(block)
        assert (self.writer.state, self.writer.last, self.writer.open_bytes) == before

    @rule(ahead=st.floats(0, 1))
    def place_cursor(self, ahead: float) -> None:
        """A reader stops somewhere and comes back later, perhaps too late."""
        retained = self.first_retained()
        self.cursor_at = retained + int((len(self.frames) - retained) * ahead)
        position = self.frames[self.cursor_at - 1][0] if self.cursor_at else self.start
        self.cursor = self.reader.find(position)

    @rule(max_bytes=st.sampled_from((100, 1000, 1 << 20)))
    def read_on(self, max_bytes: int) -> None:
        if self.cursor is None:
            return
        try:
            out = read_all(self.reader, self.cursor, max_bytes)
        except ReaderOvertaken:
            assert self.cursor < self.writer.state.head
            self.cursor = None
            return
        assert out == b"".join(frame for _, frame in self.frames[self.cursor_at :])

    # -- what always holds --

    @invariant()
    def counters_agree(self) -> None:
        if not hasattr(self, "writer"):
            return
        state = self.reader.snapshot()
        retained = self.frames[self.first_retained() :]
        assert state == self.writer.state
        assert state.frames - state.evicted_frames == len(retained)
        ends = sum(frame[11] == Op.END_OF_WINDOW for _, frame in retained)
        assert state.windows - state.evicted_windows == ends
        newest = self.frames[-1][0] if self.frames else self.start
        assert state.max == newest
        assert state.min == (retained[0][0] if retained else state.prev)
        assert state.head <= state.tail <= state.head + self.size
        if self.frames and len(retained) == len(self.frames):
            assert state.prev == self.start

    @invariant()
    def every_boundary_is_served_exactly(self) -> None:
        if not hasattr(self, "writer"):
            return
        first_retained = self.first_retained()
        step = max(1, (len(self.frames) - first_retained) // 8)
        for at in range(first_retained, len(self.frames) + 1, step):
            position = self.frames[at - 1][0] if at else self.start
            found = self.reader.find(position)
            frames, _ = self.reader.read(found, 1)
            expected = self.frames[at][1] if at < len(self.frames) else b""
            assert bytes(frames) == expected
        if first_retained:
            prev = self.reader.snapshot().prev
            before = Position(prev.scn, prev.seq - 1) if prev.seq else Position(prev.scn - 1)
            with pytest.raises(ScnTooOld, match=str(prev)):
                self.reader.find(before)

    @invariant()
    def small_windows_are_evicted_whole(self) -> None:
        if not hasattr(self, "writer"):
            return
        first_retained = self.first_retained()
        if not 0 < first_retained < len(self.frames):
            return
        scn = self.frames[first_retained][0].scn
        if self.frames[first_retained - 1][0].scn != scn:  # the one before may have no end
            return
        window = [frame for position, frame in self.frames if position.scn == scn]
        # A window that was dropped in its middle is a part of one that was larger.
        if window[-1][11] == Op.END_OF_WINDOW:
            assert sum(map(len, window)) > min(RING_SIZES) // 8

    @invariant()
    def nothing_is_wrong_with_the_files(self) -> None:
        if hasattr(self, "writer"):
            assert check(self.folder) == []


TestRingModel = pytest.mark.slow(pytest.mark.timeout(300)(RingMachine.TestCase))
TestRingModel.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
