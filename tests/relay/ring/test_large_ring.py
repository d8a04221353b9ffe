"""Rings larger than memory, and larger than the disk."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import ScnTooOld, StoreError
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check
from databus.relay.ring.ring_file import make_ring
from databus.relay.ring.ring_format import EMPTY_STATE, MODE_OVERWRITE
from tests.support.windows import endless_windows, make_window, split_frames

RING_BYTES = 64 << 30


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have holes instead of blocks: the tests need no disk of that size."""
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, _, size: os.ftruncate(fd, size))


@pytest.mark.usefixtures("sparse")
@pytest.mark.parametrize("before_end", [20_000, 10, 1 << 33])
def test_a_ring_of_64_gib_serves_what_lies_anywhere_in_it(tmp_path: Path, before_end: int) -> None:
    # Ring positions of the third lap; it wraps after ``before_end`` bytes.
    base = 3 * RING_BYTES - before_end & ~7
    state = EMPTY_STATE._replace(head=base, tail=base)
    make_ring(tmp_path / "ring", RING_BYTES, "c", MODE_OVERWRITE, state)
    windows = list(itertools.islice(endless_windows(8, most_bytes=700), 120))
    true = [frame for window in windows for frame in split_frames(window)]
    with Ring.open_writer(tmp_path) as writer, Ring.open_reader(tmp_path) as reader:
        for window in windows:
            writer.append(window)
        writer.sync()
        for at in range(0, len(true), 17):
            block, _ = reader.read(reader.find(true[at][0]), 1)
            assert bytes(block) == (true[at + 1][1] if at + 1 < len(true) else b"")
        assert writer.state.prev == Position(0, 0)
        assert writer.expire(2**62)
        with pytest.raises(ScnTooOld):
            reader.find(Position(0, 0))
    with Ring.open_writer(tmp_path) as writer:
        assert writer.last == true[-1][0]
        writer.append(make_window(10**6, [100]))
    assert check(tmp_path) == []
    assert (tmp_path / "ring").stat().st_blocks * 512 < 16 << 20, "the holes are still holes"
    assert (tmp_path / "ring.index").stat().st_size < 2 << 20


def test_a_ring_that_the_disk_cannot_hold_is_refused_before_anything_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, _: int, size: int) -> None:
        os.ftruncate(fd, size // 2)  # ext4, too, leaves behind what it could get
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Ring.create(tmp_path / "a", 1 << 16, clock="c") as writer:
        writer.append(make_window(1, [100]))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"cannot get \d+ bytes on disk: No space left.*free are"):
        Ring.create(tmp_path / "b", 1 << 16)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["ring.lock"]
    with pytest.raises(StoreError, match="lower ring_bytes"):
        Ring.open_writer(tmp_path / "a", 1 << 20)
    assert not (tmp_path / "a" / "ring.next").exists()
    with Ring.open_writer(tmp_path / "a", 1 << 16) as writer, Ring.open_reader(tmp_path / "a") as r:
        assert writer.last == Position(1, 1)
        writer.append(make_window(2, [100]))
        assert r.find(Position(1, 1)) < writer.state.tail


@pytest.mark.parametrize("slack", [-1, 0, 1])
def test_a_ring_made_smaller_retains_the_windows_that_fit_to_the_byte(
    tmp_path: Path, slack: int
) -> None:
    size = 4096
    count = size // len(make_window(1, [300]))
    with Ring.create(tmp_path, 1 << 16) as writer:
        for scn in range(1, count + slack + 1):
            writer.append(make_window(scn, [300]))
        held = writer.state
    with Ring.open_writer(tmp_path, size) as writer:
        retained = writer.state.windows - writer.state.evicted_windows
        assert writer.state.max == held.max
        assert retained <= count
        assert retained >= min(count - 1, held.windows), "at most one more than needed has gone"
        if held.windows <= count:
            assert retained == held.windows
            assert writer.state.prev == held.prev
    assert check(tmp_path) == []
