"""One flipped bit in the ring's walk from frame to frame: an error that names the place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from databus.common.errors import FormatError
from databus.relay import kernels
from databus.relay.directory import Directory
from databus.relay.extents import Extents
from databus.relay.ring import Ring
from databus.relay.ring_format import DATA_OFFSET
from tests.support.windows import make_window, read_from

RING_BYTES = 1 << 18
SIZES = [900, 0, 300, 700]


@pytest.fixture(scope="module")
def two_laps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring with a pad between its head and its tail."""
    folder = tmp_path_factory.mktemp("ring")
    with Ring.create(folder, RING_BYTES) as writer:
        scn = 0
        while writer.state.tail < RING_BYTES + RING_BYTES // 2:
            scn += 1
            writer.append(make_window(scn, SIZES))
    return folder


def words(folder: Path) -> tuple[list[int], int]:
    """The file offsets of the retained frames, and that of the pad."""
    found, pad = [], -1
    with Ring.open_reader(folder) as ring:
        state = ring.snapshot()
        at = state.head
        while at < state.tail:
            offset = ring.file.file_offset(at)
            length = int.from_bytes(ring.file.copy(at, 8)[4:], "little")
            if length & 1:
                pad, length = offset, length & ~1
            else:
                found.append(offset)
            at += length
    assert pad > 0
    return found, pad


def walk_all(folder: Path) -> bytes:
    """Everything, by each reader of the ring in turn; the bytes that were copied."""
    with Ring.open_reader(folder) as ring:
        state = ring.snapshot()
        copied = read_from(ring, state.prev)
        directory, extents = Directory(), Extents()
        for walk in (directory.at, lambda ring, at: extents.at(ring, at, None)):
            at = state.head
            while True:
                found = walk(ring, at)
                part = found[0] if isinstance(found, tuple) else found
                if part is None:
                    # Little is left, or the walk has met something else: a copy says what.
                    block, after = ring.read(at, 1 << 16)
                    if not block:
                        break
                    at = after
                else:
                    at = part.after
        ring.before_time(state.max_commit_us)
        return copied


def test_no_flipped_bit_of_a_length_or_pad_passes_a_reader(two_laps: Path, tmp_path: Path) -> None:
    frames, pad = words(two_laps)
    with Ring.open_reader(two_laps) as ring:
        whole = read_from(ring, ring.snapshot().prev)
    assert walk_all(two_laps) == whole
    shutil.copytree(two_laps, tmp_path / "ring")
    path = tmp_path / "ring" / "ring"
    cases = [(offset, bit) for offset in (frames[3], frames[len(frames) // 2]) for bit in range(32)]
    for offset, bit in [*((at + 4, bit) for at, bit in cases), *((pad, b) for b in range(64))]:
        with path.open("r+b") as file:
            file.seek(offset + bit // 8)
            was = file.read(1)[0]
            file.seek(offset + bit // 8)
            file.write(bytes([was ^ 1 << bit % 8]))
        with pytest.raises(FormatError) as error:
            walk_all(tmp_path / "ring")
        assert str(path) in error.value.message
        assert "expected a frame" in error.value.message and "got " in error.value.message
        place = offset - 4 if offset != pad else pad
        assert f"offset {place} of the file" in error.value.message
        with path.open("r+b") as file:
            file.seek(offset + bit // 8)
            file.write(bytes([was]))
    assert walk_all(tmp_path / "ring") == whole


def test_kernels_agree_about_a_pad(two_laps: Path) -> None:
    with Ring.open_reader(two_laps) as ring:
        data = ring.file.data.copy()
    _, pad = words(two_laps)
    at = pad - DATA_OFFSET
    rest = len(data) - at
    assert kernels.is_pad(data, at, rest) and not kernels.is_pad(data, at, rest - 8)
    for walk in (
        lambda: kernels.seek(data, at, len(data) + 1, 2**32 - 1, 0, 0) == ~at,
        lambda: kernels.seek_time(data, at, len(data) + 1, 2**62)[0] == ~at,
        lambda: kernels.evict(data, at, at + 1, at + 1, len(data) + 1)[0] == -1,
        lambda: kernels.measure(data, at, len(data))[1] == kernels.WALK_MALFORMED,
        lambda: kernels.cut_frames(data[at:], rest)[1] == kernels.WALK_MALFORMED,
    ):
        assert not walk()
        data[at + 1] ^= 4
        assert walk()
        data[at + 1] ^= 4
