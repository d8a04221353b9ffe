"""The ring's files: how they look, are replaced and checked, and which code reads them."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import (
    ClockMismatch,
    FrameTooLarge,
    ReaderOvertaken,
    StoreError,
)
from databus.relay.ring import ring_format, ring_kernels
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check, describe_ring
from databus.relay.ring.ring_recovery import Base
from tests.support.windows import (
    endless_windows,
    make_window,
    read_from,
    split_frames,
)

RING_BYTES = 16384
FORMAT = Path(ring_format.__file__).with_name("FORMAT.md")
TYPES = {"Q": "u64", "q": "i64", "I": "u32", "8s": "bytes[8]", "256s": "bytes[256]"}


# ---- the files ----


@pytest.mark.parametrize(
    "fields",
    [
        ring_format.STATE_FIELDS,
        ring_format.CONTROL_FIELDS,
        ring_format.LIVE_WORDS,
        ring_format.SLOT_FIELDS,
        ring_format.INDEX_FIELDS,
    ],
)
def test_format_md_has_the_table_of_the_code(fields: tuple[ring_format.RingField, ...]) -> None:
    offsets = ring_format.offsets(fields)
    rows = [
        f"| {offsets[field.name]} | {TYPES[field.code]} | {field.name} | {field.meaning} |"
        for field in fields
    ]
    assert "\n".join(rows) in FORMAT.read_text()


def test_everything_shared_is_aligned_and_nothing_overlaps() -> None:
    for fields in (ring_format.STATE_FIELDS, ring_format.SLOT_FIELDS, ring_format.CONTROL_FIELDS):
        assert all(
            offset % 8 == 0
            for field, offset in zip(fields, ring_format.offsets(fields).values(), strict=True)
            if field.code in "Qq"
        )
    assert ring_format.CONTROL.size <= ring_format.PAGE_BYTES
    first, second = ring_format.SLOT_OFFSETS
    assert first - ring_format.LIVE_OFFSET >= 128
    assert second - first >= ring_format.SLOT.size
    assert first % 128 == second % 128 == 0


def test_all_its_blocks_are_on_disk_before_the_first_append(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 1 << 20):
        status = (tmp_path / "ring").stat()
        assert status.st_blocks * 512 >= (1 << 20)
        assert status.st_size == ring_format.DATA_OFFSET + (1 << 20)
    assert (tmp_path / "ring").stat().st_size == ring_format.DATA_OFFSET + (1 << 20)


def test_the_size_is_rounded_up_to_whole_pages_and_a_tiny_one_refused(tmp_path: Path) -> None:
    with Ring.create(tmp_path / "a", 5000) as writer:
        assert writer.ring_bytes == 8192
    with pytest.raises(StoreError, match="ring_bytes=100 is less"):
        Ring.create(tmp_path / "b", 100)


def test_a_ring_is_not_made_over_another_and_not_read_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="start its fetcher"):
        Ring.open_reader(tmp_path)
    with pytest.raises(StoreError, match="give ring_bytes"):
        Ring.open_writer(tmp_path)
    Ring.create(tmp_path, RING_BYTES).close()
    with pytest.raises(StoreError, match="already"):
        Ring.create(tmp_path, RING_BYTES)


def test_another_clock_is_refused_and_the_first_one_stays(tmp_path: Path) -> None:
    Ring.create(tmp_path, RING_BYTES).close()
    Ring.open_writer(tmp_path, clock="mariadb:0").close()
    with pytest.raises(ClockMismatch, match=r"'mariadb:0'.*'mariadb:1'"):
        Ring.open_writer(tmp_path, clock="mariadb:1")
    with Ring.open_reader(tmp_path) as reader:
        assert reader.clock == "mariadb:0"
    Ring.open_writer(tmp_path, clock="mariadb:0").close()


def test_readers_cannot_change_the_files(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer:
        writer.append(make_window(1, [10]))
        with Ring.open_reader(tmp_path) as reader:
            with pytest.raises(TypeError):
                reader.file.view[0:1] = b"x"
            assert not reader.file.data.flags.writeable


# ---- replacement ----


def test_every_ring_file_has_an_identity_of_its_own_for_life(tmp_path: Path) -> None:
    identities = []
    for number in range(20):
        with Ring.create(tmp_path / str(number), 4096, clock="c") as writer:
            identities.append(writer._control.ring_id)
    with Ring.open_writer(tmp_path / "0") as writer:
        assert writer._control.ring_id == identities[0]
        writer.resize(4096)
        identities.append(writer._control.ring_id)
        writer.resize(8192)
        identities.append(writer._control.ring_id)
    assert len(set(identities)) == len(identities)
    assert all(identities)


@pytest.mark.parametrize("new_bytes", [8192, 12288, 65536])
def test_a_resized_ring_retains_the_newest_windows_that_fit(tmp_path: Path, new_bytes: int) -> None:
    windows = list(itertools.islice(endless_windows(5, most_bytes=200), 150))
    with Ring.create(tmp_path, RING_BYTES, clock="c") as writer:
        for window in windows:
            writer.append(window)
        before = writer.state
    with Ring.open_reader(tmp_path) as reader:
        held = read_from(reader, before.prev)
        ring_position = reader.find(before.prev)
        with Ring.open_writer(tmp_path, new_bytes) as writer:
            assert writer.ring_bytes == new_bytes
            assert writer.state.max == before.max
            with pytest.raises(ReaderOvertaken):
                reader.read(ring_position, 100)
            retained = read_from(reader, writer.state.prev)
            assert held.endswith(retained)
            assert retained == held if new_bytes > RING_BYTES else len(retained) > new_bytes // 4
    assert check(tmp_path) == []


def test_a_ring_is_not_shrunk_below_what_its_frames_need(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer:
        writer.append(make_window(1, [3000]))
    with pytest.raises(FrameTooLarge, match="ring_bytes=4096"):
        Ring.open_writer(tmp_path, 4096)
    assert not (tmp_path / "ring.next").exists()
    with Ring.open_writer(tmp_path) as writer:
        assert writer.last == Position(1, 1)
    assert check(tmp_path) == []


# ---- sync, description, check ----


def test_sync_may_run_beside_appends_in_another_thread(tmp_path: Path) -> None:
    stop = threading.Event()
    synced: list[Position] = []
    with Ring.create(tmp_path, RING_BYTES) as writer:
        thread = threading.Thread(
            target=lambda: [synced.append(writer.sync()) for _ in iter(stop.is_set, True)]
        )
        thread.start()
        for window in itertools.islice(endless_windows(1, most_bytes=300), 600):
            writer.append(window)
        stop.set()
        thread.join()
        assert synced == sorted(synced)
        assert writer.sync() == writer.state.max
    assert check(tmp_path) == []


def test_describe_ring_reports_what_is_there(tmp_path: Path) -> None:
    with Ring.create(tmp_path, RING_BYTES, clock="c", start=Position(3, 1)) as writer:
        writer.append(make_window(5, [10, 10]) + make_window(9, []))
        text = describe_ring(tmp_path)
        assert text["writer_pid"] == os.getpid()
    assert text["clock"] == "c"
    assert text["prev"] == {"scn": 3, "seq": 1}
    assert text["min"] == {"scn": 5, "seq": 0}
    assert text["max"] == {"scn": 9, "seq": 0}
    assert (text["frames"], text["windows"]) == (4, 2)
    assert text["used_bytes"] == text["tail"] - text["head"]
    assert text["max_commit_us"] - text["min_commit_us"] == 4
    assert text["index"]["entries"] == 2
    assert describe_ring(tmp_path)["writer_pid"] is None


@pytest.mark.parametrize("field", ["scn", "length", "commit_us", "payload"])
def test_check_names_the_position_of_a_damaged_frame(tmp_path: Path, field: str) -> None:
    with Ring.create(tmp_path, RING_BYTES) as writer:
        for scn in range(1, 6):
            writer.append(make_window(scn, [64]))
        window_bytes = writer.state.tail // 5
    at = 16384 + window_bytes * 2
    spot = at + {"scn": 16, "length": 4, "commit_us": 48, "payload": 100}[field]
    with (tmp_path / "ring").open("r+b") as file:
        file.seek(spot)
        old = file.read(1)
        file.seek(spot)
        file.write(bytes([old[0] ^ 1]))
    problems = check(tmp_path)
    assert len(problems) == 1
    assert f"offset {at} of the file" in problems[0]


# ---- compiled and undecorated kernels ----


def test_the_kernels_do_the_same_undecorated(tmp_path: Path) -> None:
    program = """
import itertools, zlib
from pathlib import Path
from databus.common.checkpoint import Position
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check
from tests.support.windows import endless_windows
import sys
folder = Path(sys.argv[1])
with Ring.create(folder, 8192, clock="c", start=Position(2**63 - 40)) as writer:
    with Ring.open_reader(folder) as reader:
        total, last = 0, Position(2**63 - 40)
        for window in itertools.islice(
            endless_windows(4, most_bytes=900, start_scn=2**63 - 30), 120
        ):
            last = writer.append(window, last)
            state = reader.snapshot()
            at = reader.find(state.prev)
            block, at = reader.read(at, 3000)
            total = zlib.crc32(block, total ^ at)
writer = Ring.open_writer(folder)
print(writer.state._replace(synced=0), total, check(folder))
print(zlib.crc32((folder / "ring").read_bytes()[16384:]))
writer.close()
"""
    root = Path(__file__).resolve().parents[3]
    said = []
    for name, without in (("compiled", ""), ("plain", "1")):
        environment = {**os.environ, "DATABUS_NO_NUMBA": without}
        said.append(
            subprocess.run(
                [sys.executable, "-c", program, tmp_path / name],
                env=environment,
                cwd=root,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert said[0] == said[1]


def test_warming_up_touches_every_kernel() -> None:
    ring_kernels.warm_up()
    cold = {
        name
        for name, kernel in vars(ring_kernels).items()
        if hasattr(kernel, "nopython_signatures")
        and kernel.py_func.__module__ == ring_kernels.__name__  # what it imports, these call
        and not kernel.nopython_signatures
    }
    assert cold <= {"is_after"}


def test_a_ring_of_format_version_1_is_still_read(tmp_path: Path) -> None:
    golden = Path(__file__).resolve().parents[2] / "golden" / "v1" / "ring"
    for name in ("ring", "ring.index"):
        shutil.copy(golden / name, tmp_path / name)
    with Ring.open_writer(tmp_path, clock="golden:1") as writer:
        assert writer.recovered.base is Base.NEWER
        assert not writer.index_rebuilt
        assert writer.last == Position(39, 3)
        assert (writer.state.frames, writer.state.windows) == (77, 30)
        with Ring.open_reader(tmp_path) as reader:
            served = split_frames(read_from(reader, reader.snapshot().prev))
    expected = [
        frame
        for scn in range(10, 40)
        for frame in split_frames(make_window(scn, [scn * 3] * (scn % 4)))
    ]
    assert served == expected[-len(served) :]
    assert len(served) == 27
