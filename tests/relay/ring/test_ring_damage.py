"""One flipped bit in the ring's walk from frame to frame: an error that names the offset."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from databus.common.errors import FormatError, ScnTooOld
from databus.common.frame.frame_format import HEADER_BYTES, OFFSETS, iter_frames
from databus.relay.ring import ring_kernels
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check
from databus.relay.ring.ring_format import DATA_OFFSET, LIVE_OFFSET, SLOT, SLOT_OFFSETS
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.ring_recovery import frame_at
from databus.relay.serving.extents import Extents
from databus.relay.serving.header_cache import HeaderCache
from tests.support.windows import make_window, read_from

RING_BYTES = 1 << 18
SIZES = [900, 0, 300, 700]


@pytest.fixture(scope="module")
def two_laps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring with a pad between its head and its tail."""
    return make_two_laps(tmp_path_factory.mktemp("ring"))


def make_two_laps(folder: Path) -> Path:
    """Made here and not copied, its live page counts when it is opened again."""
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
    """Everything, by one reader of the ring after the other; the bytes that were copied."""
    with Ring.open_reader(folder) as ring:
        state = ring.snapshot()
        copied = read_from(ring, state.prev)
        directory, extents = HeaderCache(), Extents()
        for walk in (directory.at, lambda ring, at: extents.at(ring, at, None)):
            at = state.head
            while True:
                found = walk(ring, at)
                part = found[0] if isinstance(found, tuple) else found
                if part is None:
                    # Little is left, or the walk has met something else: a copy shows what.
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
        damaged = offset - 4 if offset != pad else pad
        assert f"offset {damaged} of the file" in error.value.message
        with path.open("r+b") as file:
            file.seek(offset + bit // 8)
            file.write(bytes([was]))
    assert walk_all(tmp_path / "ring") == whole


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        was = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([was ^ 1 << bit]))


def readers(ring: RingReader) -> dict[str, Callable[[int], object]]:
    """Each way from the mapping to a reader, from a ring position on."""
    return {
        "copied": lambda at: ring.read(at, 1 << 20),
        "listed": lambda at: HeaderCache().at(ring, at) or ring.read(at, 1 << 20),
        "sent as it lies": lambda at: Extents().at(ring, at, None) or ring.read(at, 1 << 20),
    }


@pytest.mark.parametrize("part", ["source", "key hash", "scn", "op", "row", "crc"])
def test_a_flipped_bit_anywhere_in_a_frame_is_named_on_every_way_to_a_reader(
    two_laps: Path, tmp_path: Path, part: str
) -> None:
    offset = {
        "source": OFFSETS["source_id"], "key hash": OFFSETS["key_hash"], "scn": OFFSETS["scn"],
        "op": OFFSETS["op"], "row": HEADER_BYTES + 40, "crc": 1,
    }[part]  # fmt: skip
    frames, _ = words(two_laps)
    shutil.copytree(two_laps, tmp_path / "ring")
    path = tmp_path / "ring" / "ring"
    with Ring.open_reader(tmp_path / "ring") as ring:
        at = ring.snapshot().head + ring.ring_bytes // 3
        at = next(p for p in positions(ring) if p >= at and len(ring.read(p, 1)[0]) > 300)
        assert ring.file.file_offset(at) in frames
        for bit in range(8):
            flip(path, ring.file.file_offset(at) + offset, bit)
            for name, read in readers(ring).items():
                with pytest.raises(FormatError) as error:
                    read(at)
                assert str(path) in error.value.message, name
                assert f"ring position {at}," in error.value.message, name
            assert check(tmp_path / "ring")
            flip(path, ring.file.file_offset(at) + offset, bit)
        for read in readers(ring).values():
            assert read(at)


def positions(ring: RingReader) -> list[int]:
    """Ring positions of all frames."""
    state = ring.snapshot()
    at, found = state.head, []
    while at < state.tail:
        length = int.from_bytes(ring.file.copy(at, 8)[4:], "little")
        if not length & 1:
            found.append(at)
        at += length & ~1
    return found


def test_a_search_does_not_pass_over_a_frame_whose_position_was_damaged(
    two_laps: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_laps, tmp_path / "ring")
    path = tmp_path / "ring" / "ring"
    with Ring.open_reader(tmp_path / "ring") as ring:
        at = positions(ring)[200]
        found, commit_us = frame_at(ring.file, at)
        before = frame_at(ring.file, positions(ring)[199])[0]
        assert ring.find(before) == at
        # Lower than it is: a reader that comes from the frame before would begin behind this one.
        bit = next(bit for bit in range(8) if found.scn >> bit & 1)
        flip(path, ring.file.file_offset(at) + OFFSETS["scn"], bit)
        with pytest.raises(FormatError, match=f"ring position {at},"):
            ring.read(ring.find(before), 1)
        flip(path, ring.file.file_offset(at) + OFFSETS["scn"], bit)
        bit = next(bit for bit in range(8) if commit_us >> bit & 1)
        flip(path, ring.file.file_offset(at) + OFFSETS["commit_us"], bit)
        with pytest.raises(FormatError, match=f"ring position {at},"):
            ring.before_time(commit_us)


def test_the_writer_passes_over_damage_and_readers_before_it_are_too_old(tmp_path: Path) -> None:
    folder = make_two_laps(tmp_path / "ring")
    with Ring.open_writer(folder) as writer, Ring.open_reader(folder) as reader:
        at = positions(reader)[40]
        first, damaged = (frame_at(reader.file, one)[0] for one in (positions(reader)[0], at))
        flip(folder / "ring", reader.file.file_offset(at) + 4, 4)
        with pytest.raises(FormatError, match=f"ring position {at},"):
            read_from(reader, writer.state.prev)
        scn = writer.last.scn
        while writer.state.prev < damaged:
            scn += 1
            writer.append(make_window(scn, SIZES))
        assert reader.snapshot().prev > damaged
        with pytest.raises(ScnTooOld):
            reader.find(first)
        rest = [view.scn for view in iter_frames(read_from(reader, writer.state.prev))]
        assert rest[-1] == scn and sorted(set(rest)) == list(range(rest[0], scn + 1))
    assert check(folder) == []


def test_a_ring_with_damage_is_made_larger_with_what_comes_behind_it(tmp_path: Path) -> None:
    folder = make_two_laps(tmp_path / "ring")
    with Ring.open_writer(folder) as writer, Ring.open_reader(folder) as reader:
        at = positions(reader)[40]
        damaged = frame_at(reader.file, at)[0]
        flip(folder / "ring", reader.file.file_offset(at) + HEADER_BYTES, 0)
        writer.resize(2 * RING_BYTES)
        assert damaged < writer.state.prev < writer.last
        assert reader.snapshot().prev == writer.state.prev
    assert check(folder) == []


def test_every_flipped_bit_of_the_live_page_is_named_or_makes_no_difference(
    two_laps: Path, tmp_path: Path
) -> None:
    with Ring.open_reader(two_laps) as ring:
        state, whole = ring.snapshot(), read_from(ring, ring.snapshot().prev)
    folder = tmp_path / "ring"
    refused = 0
    slots = [*range(SLOT_OFFSETS[0], SLOT_OFFSETS[0] + SLOT.size)]
    slots += range(SLOT_OFFSETS[1], SLOT_OFFSETS[1] + SLOT.size)
    shutil.copytree(two_laps, folder)
    with Ring.open_reader(folder) as ring:
        for offset in [*range(LIVE_OFFSET, LIVE_OFFSET + 8), *slots]:
            for bit in (0, 5, 7):
                flip(folder / "ring", offset, bit)
                try:
                    found = ring.snapshot()
                    # The one before the last is as good: what is missing of it comes again.
                    assert found == state or found.tail < state.tail
                    assert whole.startswith(read_from(ring, found.prev)) or found.tail < state.tail
                except FormatError as error:
                    assert f"{folder / 'ring'} is damaged in its live page" in error.message
                    refused += 1
                flip(folder / "ring", offset, bit)
    assert refused > 300
    # The fetcher begins at the last sync, at positions that no reader has seen.
    with Ring.open_writer(folder) as writer:
        writer.append(make_window(writer.last.scn + 1, SIZES))
        writer.sync()
        newest, tail = writer.last, writer.state.tail
        epoch = writer._file.epoch
    flip(folder / "ring", SLOT_OFFSETS[epoch & 1] + 9, 3)
    with Ring.open_writer(folder) as writer:
        assert writer.last == newest and writer.state.head > tail
    assert check(folder) == []


def test_kernels_agree_about_a_pad(two_laps: Path) -> None:
    with Ring.open_reader(two_laps) as ring:
        data = ring.file.data.copy()
    _, pad = words(two_laps)
    at = pad - DATA_OFFSET
    rest = len(data) - at
    assert ring_kernels.is_pad(data, at, rest) and not ring_kernels.is_pad(data, at, rest - 8)
    for walk in (
        lambda: ring_kernels.seek(data, at, len(data) + 1, 2**32 - 1, 0, 0) == ~at,
        lambda: ring_kernels.seek_time(data, at, len(data) + 1, 2**62)[0] == ~at,
        lambda: ring_kernels.evict(data, at, at + 1, at + 1, len(data) + 1)[0] == -1,
        lambda: ring_kernels.measure(data, at, len(data))[1] == ring_kernels.WALK_MALFORMED,
        lambda: ring_kernels.cut_frames(data[at:], rest)[1] == ring_kernels.WALK_MALFORMED,
    ):
        assert not walk()
        data[at + 1] ^= 4
        assert walk()
        data[at + 1] ^= 4
