"""The ring after its writer was killed, after a power loss, and under readers that race it."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import StoreBusy, StoreError
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check
from databus.relay.ring.ring_format import CONTROL_OFFSETS, DATA_OFFSET, LIVE_OFFSET, PAGE_BYTES
from databus.relay.ring.ring_recovery import BASES, REPAIRS, Base, Repair
from tests.support.ring_processes import MOST_EVENT_BYTES, start, true_frames
from tests.support.waiting import PATIENCE
from tests.support.windows import endless_windows, make_window, split_frames

pytestmark = pytest.mark.faults

RING_BYTES = 16384


def retained(folder: Path) -> list[tuple[Position, bytes]]:
    """Every frame that the ring serves."""
    out: list[tuple[Position, bytes]] = []
    with Ring.open_reader(folder) as reader:
        ring_position = reader.find(reader.snapshot().prev)
        while True:
            block, ring_position = reader.read(ring_position, 1 << 20)
            if not block:
                return out
            out += split_frames(block)


def assert_is_part_of_stream(
    frames: list[tuple[Position, bytes]], prev: Position, seed: int
) -> None:
    """``frames`` are exactly those of the stream from the first after ``prev`` on."""
    stream = itertools.dropwhile(lambda item: item[0] <= prev, true_frames(seed))
    for found, expected in zip(frames, stream, strict=False):
        assert found == expected


@pytest.fixture
def killable_writer(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start("write", tmp_path, RING_BYTES)
    yield process
    process.stdin.close()
    process.wait(timeout=10 * PATIENCE)
    process.stdout.close()


def run_writer(process: subprocess.Popen[str], seed: int, windows: int) -> int:
    """Start a writer in its process; return the process id."""
    process.stdin.write(f"{seed} {windows}\n")
    process.stdin.flush()
    return int(process.stdout.readline())


@pytest.mark.timeout(120)
def test_a_writer_killed_at_any_moment_leaves_a_sound_ring_that_can_be_continued(
    tmp_path: Path, killable_writer: subprocess.Popen[str]
) -> None:
    seed = random.randrange(1000)
    rng = random.Random(seed)
    before = Position(0, 0)
    kills = 0
    while kills < 15 or before <= Position(10, 0):
        kills += 1
        pid = run_writer(killable_writer, seed, 10**9)
        # The random moment itself, waited for nothing; later on a machine where all came too early.
        time.sleep(rng.uniform(0.02, 0.15) * max(1, kills / 15))
        os.kill(pid, signal.SIGKILL)
        assert int(killable_writer.stdout.readline()) == -signal.SIGKILL
        if not (tmp_path / "ring").exists():
            continue
        with Ring.open_reader(tmp_path) as reader:
            seen = reader.snapshot().max
        with Ring.open_writer(tmp_path) as writer:
            assert writer.last >= seen >= before, f"seed {seed}"
            before = writer.last
            prev = writer.state.prev
        assert check(tmp_path) == [], f"seed {seed}"
        frames = retained(tmp_path)
        assert not frames or frames[-1][0] == before
        assert_is_part_of_stream(frames, prev, seed)


def test_a_second_writer_gets_the_name_of_the_first(
    tmp_path: Path, killable_writer: subprocess.Popen[str]
) -> None:
    with Ring.create(tmp_path, RING_BYTES):
        with pytest.raises(StoreBusy, match=str(os.getpid())):
            Ring.open_writer(tmp_path)
        run_writer(killable_writer, 1, 10)
        assert int(killable_writer.stdout.readline()) == 1
    run_writer(killable_writer, 1, 10)
    assert int(killable_writer.stdout.readline()) == 0


@pytest.mark.timeout(120)
def test_readers_that_race_the_writer_see_every_byte_right_or_are_notified_that_they_are_late(
    tmp_path: Path, killable_writer: subprocess.Popen[str]
) -> None:
    seed, windows = random.randrange(1000), 6000
    stream = itertools.islice(endless_windows(seed, most_bytes=MOST_EVENT_BYTES), windows)
    last = split_frames(list(stream)[-1])[-1][0]
    Ring.create(tmp_path, RING_BYTES, clock="test").close()
    readers = [
        start("read", tmp_path, seed, max_bytes, last.scn, last.seq, 60)
        for max_bytes in (1 << 20, 100)
    ]
    run_writer(killable_writer, seed, windows)
    assert int(killable_writer.stdout.readline()) == 0
    reports = []
    for reader in readers:
        out, _ = reader.communicate(timeout=60 * PATIENCE)
        assert reader.returncode == 0, f"seed {seed}: {out}"
        reports.append(json.loads(out))
    for report in reports:
        assert report["end"] == [last.scn, last.seq]
        assert report["frames"] > 0
    assert check(tmp_path) == []


# ---- power loss: pages of the file are those of the last sync, or newer, in any mixture ----


def fill(folder: Path, seed: int, rng: random.Random) -> tuple[bytes, bytes, Position]:
    """Write, sync, write on; return the ring file as it was synced, as it is, and the sync."""
    windows = endless_windows(seed, most_bytes=MOST_EVENT_BYTES)
    writer = Ring.create(folder, RING_BYTES, clock="c")
    for window in itertools.islice(windows, rng.randrange(0, 60)):
        writer.append(window)
    synced = writer.sync()
    if rng.random() < 0.3:
        writer.sync()
    old = (folder / "ring").read_bytes()
    for window in itertools.islice(windows, rng.randrange(0, 40)):
        writer.append(window)
    new = (folder / "ring").read_bytes()
    writer.close()
    return old, new, synced


@pytest.mark.parametrize("seed", [*range(40), 48, 752])
def test_after_a_power_loss_the_ring_resumes_from_its_last_sync_without_a_gap(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    old, new, synced = fill(tmp_path, seed, rng)
    kept_new = rng.random()
    pages = []
    for at in range(0, len(old), PAGE_BYTES):
        page = new if rng.random() < kept_new else old
        pages.append(page[at : at + PAGE_BYTES])
    pages[LIVE_OFFSET // PAGE_BYTES] = rng.randbytes(PAGE_BYTES)
    (tmp_path / "ring").write_bytes(b"".join(pages))
    if rng.random() < 0.5:
        index = (tmp_path / "ring.index").read_bytes()
        (tmp_path / "ring.index").write_bytes(index[:4096] + rng.randbytes(len(index) - 4096))
    with Ring.open_writer(tmp_path) as writer:
        assert writer.last == synced
        assert writer.recovered.base is Base.NEWER
        prev = writer.state.prev
    assert check(tmp_path) == []
    assert_is_part_of_stream(retained(tmp_path), prev, seed)
    with Ring.open_writer(tmp_path) as writer:
        for frame in itertools.islice(
            (frame for position, frame in true_frames(seed) if position > writer.last), 50
        ):
            writer.append(frame)
    assert check(tmp_path) == []


# ---- the decision tables, every row ----


def damage(path: Path, at: int, size: int = 64) -> None:
    """Invert ``size`` bytes of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(size)
        file.seek(at)
        file.write(bytes(byte ^ 0x5A for byte in old))


@pytest.mark.parametrize(("case", "base"), BASES.items())
def test_every_combination_of_state_copies_gives_the_base_of_the_table(
    tmp_path: Path, case: tuple[bool, bool, bool], base: Base
) -> None:
    live, first, second = case
    writer = Ring.create(tmp_path, RING_BYTES, clock="c")
    writer.append(make_window(1, [10]))
    writer.sync()
    writer.append(make_window(2, [10]))
    writer.close()
    for whole, at in (
        (live, LIVE_OFFSET),
        (first, CONTROL_OFFSETS[0]),
        (second, CONTROL_OFFSETS[1]),
    ):
        if not whole:
            damage(tmp_path / "ring", at, 1024)
    if base is Base.REFUSE:
        with pytest.raises(StoreError, match="control copies"):
            Ring.open_writer(tmp_path)
        return
    with Ring.open_writer(tmp_path) as writer:
        assert writer.recovered.base is base
        assert writer.last == (Position(1, 1) if base is Base.B else Position(2, 1))
    assert check(tmp_path) == []


@pytest.mark.parametrize(("case", "repair"), REPAIRS.items())
def test_every_kind_of_damage_gives_the_repair_of_the_table(
    tmp_path: Path, case: tuple[bool, bool], repair: Repair
) -> None:
    whole, suffix = case
    with Ring.create(tmp_path, RING_BYTES, clock="c") as writer:
        for scn in range(1, 11):
            writer.append(make_window(scn, [100, 100]))
        state = writer.state
    window_bytes = state.tail // 10
    damage(tmp_path / "ring", LIVE_OFFSET, 1024)
    if not whole:
        at = window_bytes * 3 + 100 if suffix else state.tail - 8
        damage(tmp_path / "ring", DATA_OFFSET + at, 8)
    if whole and not suffix:
        assert state.head == 0  # frames that lead to the tail from the head lead there from behind
    with Ring.open_writer(tmp_path) as writer:
        assert writer.recovered.repair is repair
        assert writer.last == Position(10, 2)
        expected_prev = {
            Repair.KEEP: Position(0, 0),
            Repair.CUT: Position(4, 2),
            Repair.EMPTY: Position(10, 2),
        }[repair]
        assert writer.state.prev == expected_prev
    assert check(tmp_path) == []


@pytest.mark.parametrize("at", ["entries", "counts", "header", "missing"])
def test_a_damaged_index_is_rebuilt_and_finds_the_same(tmp_path: Path, at: str) -> None:
    with Ring.create(tmp_path, 65536, clock="c") as writer:
        for scn in range(1, 200):
            writer.append(make_window(scn, [300]))
        with Ring.open_reader(tmp_path) as reader:
            ring_positions = [reader.find(Position(scn)) for scn in range(100, 200)]
    path = tmp_path / "ring.index"
    if at == "missing":
        path.unlink()
    else:
        damage(
            path,
            {"entries": 4096 + 32 * 120, "counts": 128, "header": 0}[at],
            512 if at == "entries" else 8,
        )
    with Ring.open_writer(tmp_path) as writer:
        assert writer.index_rebuilt is (at in ("entries", "counts"))
        assert check(tmp_path) == []
        with Ring.open_reader(tmp_path) as reader:
            assert [reader.find(Position(scn)) for scn in range(100, 200)] == ring_positions


def test_windows_behind_the_last_published_one_come_from_the_source_again(tmp_path: Path) -> None:
    writer = Ring.create(tmp_path, RING_BYTES, clock="c")
    writer.append(make_window(1, [10]))
    writer.sync()
    before = (tmp_path / "ring").read_bytes()
    writer.append(make_window(2, [10, 10]) + make_window(3, [10]))
    writer.append(make_window(4, [10])[:-80])
    after = (tmp_path / "ring").read_bytes()
    writer.close()
    (tmp_path / "ring").write_bytes(before[:DATA_OFFSET] + after[DATA_OFFSET:])
    with Ring.open_writer(tmp_path) as writer:
        assert writer.last == Position(1, 1)
        assert writer.state.frames == 2
        writer.append(make_window(2, [10, 10]))
        assert writer.state.frames == 5
    assert check(tmp_path) == []


def test_a_ring_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    Ring.create(tmp_path, RING_BYTES).close()
    os.truncate(tmp_path / "ring", DATA_OFFSET + 8192)
    with pytest.raises(StoreError, match="8192 bytes of data"):
        Ring.open_writer(tmp_path)


def test_leftovers_of_an_interrupted_replacement_are_removed(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer:
        writer.append(make_window(1, [10]))
    (tmp_path / "ring.next").mkdir()
    (tmp_path / "ring.next" / "ring").write_bytes(b"half")
    with Ring.open_writer(tmp_path) as writer:
        assert writer.last == Position(1, 1)
    assert not (tmp_path / "ring.next").exists()
