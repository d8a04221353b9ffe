"""The ring on a disk that loses power: whatever was not synced is dropped, or torn by sectors."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, StoreError, SyncFailed
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check
from databus.relay.ring.ring_format import CONTROL_OFFSETS, DATA_OFFSET, LIVE_OFFSET
from databus.relay.ring.ring_recovery import BASES, REPAIRS, Base, Repair
from tests.faults.test_ring_crash import assert_is_part_of_stream, damage, retained
from tests.support.ring_processes import MOST_EVENT_BYTES, true_frames
from tests.support.torn_storage import TornStorage
from tests.support.windows import endless_windows, make_window, read_from, split_frames

pytestmark = pytest.mark.faults

RING_BYTES = 16384


@pytest.mark.parametrize("seed", range(60))
def test_what_was_synced_is_there_after_a_power_loss_at_any_moment_of_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    windows = endless_windows(seed, most_bytes=MOST_EVENT_BYTES)
    writer = Ring.create(tmp_path, RING_BYTES, clock="c")
    promised = Position(0, 0)
    with TornStorage(tmp_path / "ring", monkeypatch) as storage:
        if seed % 4:
            storage.cut_power_in_flush(rng.randrange(12), rng)
        for window in itertools.islice(windows, rng.randrange(30, 120)):
            writer.append(window)
            if rng.random() < 0.2:
                reached = writer.sync()
                if storage.is_cut:
                    break
                promised = reached
        left = storage.crash(rng)
    writer.close()
    image = bytearray(left)
    image[LIVE_OFFSET : LIVE_OFFSET + 4096] = bytes(4096)  # the boot that it names is over
    (tmp_path / "ring").write_bytes(image)
    index = (tmp_path / "ring.index").read_bytes()
    if seed % 3 == 0:
        (tmp_path / "ring.index").unlink()
    elif seed % 3 == 1:
        (tmp_path / "ring.index").write_bytes(index[:4096] + rng.randbytes(len(index) - 4096))
    with Ring.open_writer(tmp_path) as writer:
        assert writer.last >= promised, "the source was notified that it may forget up to there"
        prev = writer.state.prev
    assert check(tmp_path) == []
    assert_is_part_of_stream(retained(tmp_path), prev, seed)
    with Ring.open_writer(tmp_path) as writer:
        behind = (frame for position, frame in true_frames(seed) if position > writer.last)
        for frame in itertools.islice(behind, 80):
            writer.append(frame)
        prev = writer.state.prev
    assert check(tmp_path) == []
    assert_is_part_of_stream(retained(tmp_path), prev, seed)


CASES = list(
    itertools.product(
        (True, False),  # the live state is of this boot
        (True, False),  # control copy A is whole
        (True, False),  # control copy B is whole
        ("whole", "middle torn", "tail torn", "garbage behind the tail"),
        ("whole", "entries", "missing"),  # the index
    )
)
# With a live base the page cache is what the writer left: what it had synced is not read again.
TRUSTED = [
    case for case in CASES if case[3] == "middle torn" and BASES[case[:3]] is Base.LIVE
]  # fmt: skip
WINDOWS = [make_window(scn, [100, 100]) for scn in range(1, 11)]
MIDDLE = len(WINDOWS[0]) * 3 + 100  # in the fourth window


def left_by_a_writer(folder: Path, copies: tuple[bool, bool, bool], data: str, index: str) -> None:
    """The ring of a writer of ``WINDOWS``, eight of them synced, with this damage."""
    with Ring.create(folder, RING_BYTES, clock="c") as writer:
        for number, made in enumerate(WINDOWS, 1):
            writer.append(made)
            if number == 8:
                writer.sync()
        tail = writer.state.tail
    ring = folder / "ring"
    where = {"middle torn": MIDDLE, "tail torn": tail - 8}
    if data in where:
        damage(ring, DATA_OFFSET + where[data], 8)
    elif data == "garbage behind the tail":
        damage(ring, DATA_OFFSET + tail, 400)
    for whole, at in zip(copies, (LIVE_OFFSET, *CONTROL_OFFSETS), strict=True):
        if not whole:
            damage(ring, at, 1024)
    if index == "entries":
        damage(folder / "ring.index", 4096, 512)
    elif index == "missing":
        (folder / "ring.index").unlink()


@pytest.mark.parametrize(
    ("live", "first", "second", "data", "index"), [case for case in CASES if case not in TRUSTED]
)
def test_every_row_of_the_crash_table_serves_a_part_of_the_stream_without_a_gap_or_refuses(
    tmp_path: Path, live: bool, first: bool, second: bool, data: str, index: str
) -> None:
    left_by_a_writer(tmp_path, (live, first, second), data, index)
    base = BASES[(live, first, second)]
    if base is Base.REFUSE:
        with pytest.raises(StoreError, match="control copies"):
            Ring.open_writer(tmp_path)
        return
    # Only copy B is left, of the sync by hand, and what came after that is damaged: it was never
    # acknowledged as far as can be known, and comes again from the source.
    goes_back = (live, first, second, data) == (True, False, True, "tail torn")
    with Ring.open_writer(tmp_path) as writer:
        assert goes_back or writer.recovered.base is base
        repair = writer.recovered.repair
        newest = writer.last
        prev = writer.state.prev
        assert writer._index.problem(writer.state.head, writer.state.tail) is None
    # The sync by hand is in copy B, the one at the end in A.
    assert newest == (Position(8, 2) if base is Base.B or goes_back else Position(10, 2))
    if data == "middle torn":
        assert (repair, prev) == (Repair.CUT, Position(4, 2))
    elif data == "tail torn" and newest == Position(10, 2):
        assert (repair, prev) == (Repair.EMPTY, newest)
    else:
        assert (repair, prev) == (Repair.KEEP, Position(0, 0))
    assert check(tmp_path) == []
    wanted = b"".join(WINDOWS[prev.scn : newest.scn])
    assert retained(tmp_path) == split_frames(wanted)
    with Ring.open_writer(tmp_path) as writer:
        writer.append(make_window(20, [10]))
        assert writer.last == Position(20, 1)
    assert retained(tmp_path) == split_frames(wanted + make_window(20, [10]))


@pytest.mark.parametrize(("live", "first", "second", "data", "index"), TRUSTED)
def test_synced_bytes_are_not_read_again_after_a_kill_and_damage_in_them_shows_to_their_reader(
    tmp_path: Path, live: bool, first: bool, second: bool, data: str, index: str
) -> None:
    left_by_a_writer(tmp_path, (live, first, second), data, index)
    with Ring.open_writer(tmp_path) as writer:
        assert (writer.recovered.base, writer.recovered.repair) == (Base.LIVE, Repair.KEEP)
        assert (writer.state.prev, writer.last) == (Position(0, 0), Position(10, 2))
    true = b"".join(WINDOWS)
    assert len(check(tmp_path)) == 1
    # Neither a gap nor a repetition: what comes next follows.
    with Ring.open_writer(tmp_path) as writer:
        writer.append(make_window(20, [10]))
    with Ring.open_reader(tmp_path) as reader:
        state = reader.snapshot()
        at, served = state.head, b""
        with pytest.raises(FormatError, match=f"{tmp_path / 'ring'} is damaged at ring position"):
            while at < state.tail:
                block, at = reader.read(at, 1 << 20)
                served += block
        # What comes before the damage is served, and what comes behind it.
        assert len(served) <= MIDDLE and true.startswith(served)
        behind = read_from(reader, Position(10, 1))
    new = make_window(20, [10])
    assert behind.endswith(new) and true.endswith(behind.removesuffix(new))


@pytest.mark.parametrize("appended", [0, 1, 5])
def test_what_a_power_loss_left_behind_the_tail_is_never_taken_for_the_stream(
    tmp_path: Path, appended: int
) -> None:
    writer = Ring.create(tmp_path, RING_BYTES, clock="c")
    for made in WINDOWS[:8]:
        writer.append(made)
    promised = writer.sync()
    # More than a lap without a sync: behind the tail lie whole frames of the next lap, which
    # are as long, and so begin where the ring continues.
    scn = len(WINDOWS)
    while writer.state.tail < RING_BYTES + 20 * len(WINDOWS[0]):
        scn += 1
        writer.append(make_window(scn, [100, 100]))
    image = bytearray((tmp_path / "ring").read_bytes())
    writer.close()
    image[LIVE_OFFSET : LIVE_OFFSET + 4096] = bytes(4096)  # the boot that it names is over
    (tmp_path / "ring").write_bytes(image)
    with Ring.open_writer(tmp_path) as writer:
        assert (writer.recovered.repair, writer.last) == (Repair.EMPTY, promised)
        for number in range(9, 9 + appended):
            writer.append(make_window(number, [100, 100]))
        last = writer.last
    # Its state is live now, as after a kill.
    with Ring.open_writer(tmp_path) as writer:
        assert (writer.recovered.base, writer.last) == (Base.LIVE, last)
    wanted = b"".join(make_window(number, [100, 100]) for number in range(9, 9 + appended))
    assert retained(tmp_path) == split_frames(wanted)
    assert check(tmp_path) == []


def test_the_tables_have_every_case() -> None:
    assert set(BASES) == set(itertools.product((True, False), repeat=3))
    assert set(REPAIRS) == set(itertools.product((True, False), repeat=2))


@pytest.mark.parametrize("step", range(4))
def test_a_replacement_that_ends_at_any_rename_leaves_the_old_ring_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    class Killed(BaseException):
        """The process is gone."""

    writer = Ring.create(tmp_path, RING_BYTES, clock="c")
    for scn in range(1, 30):
        writer.append(make_window(scn, [200]))
    writer.sync()
    before = writer.state
    renames = 0
    replace = Path.replace

    def killed_at_step(path: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames > step:
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "replace", killed_at_step)
        writer.resize(RING_BYTES * 2)
        raise Killed  # there are no more renames: killed right after
    with contextlib.suppress(SyncFailed):  # it may have been replaced
        writer.close()
    with Ring.open_writer(tmp_path) as writer:
        after = writer.state
        assert (after.prev, after.max) == (before.prev, before.max)
        assert check(tmp_path) == []
        writer.append(make_window(600, [10]))
    assert not (tmp_path / "ring.next").exists()
