"""Checkpoint stores: durable at every step, and never silently a new consumer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from databus.client import (
    ApplicationCheckpoints,
    BootstrapCheckpoint,
    FileCheckpoints,
    LmdbCheckpoints,
    OnlineCheckpoint,
    Position,
    encode_checkpoint,
)
from databus.common.errors import BadCheckpoint, StoreBusy, StoreError


def at(scn: int) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", "c", Position(scn, 1))


BOOT = BootstrapCheckpoint("shop", "c", Position(1), Position(9), "run", 7, Position(1))


@pytest.mark.parametrize("checkpoint", [at(3), BOOT])
def test_what_was_saved_is_loaded(tmp_path: Path, checkpoint: OnlineCheckpoint) -> None:
    FileCheckpoints(tmp_path / "new folder" / "cp").save(checkpoint)
    assert FileCheckpoints(tmp_path / "new folder" / "cp").load() == checkpoint


def test_no_file_is_a_new_consumer(tmp_path: Path) -> None:
    assert FileCheckpoints(tmp_path / "cp").load() is None


def test_the_file_holds_a_bounded_history(tmp_path: Path) -> None:
    store = FileCheckpoints(tmp_path / "cp", history=3)
    for scn in range(1, 50):
        store.save(at(scn))
    assert len((tmp_path / "cp").read_text().splitlines()) == 3


def test_a_damaged_newest_line_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileCheckpoints(tmp_path / "cp")
    store.save(at(1))
    store.save(at(2))
    store.close()
    data = bytearray((tmp_path / "cp").read_bytes())
    data[-10] ^= 1
    (tmp_path / "cp").write_bytes(data)
    assert store.load() == at(1)
    assert "damaged" in caplog.text
    store.save(at(5))
    assert len((tmp_path / "cp").read_text().splitlines()) == 2


def test_no_cut_of_the_file_gives_a_checkpoint_that_was_not_saved(tmp_path: Path) -> None:
    store = FileCheckpoints(tmp_path / "cp")
    store.save(at(1))
    store.save(at(2))
    store.close()
    data = (tmp_path / "cp").read_bytes()
    for length in range(len(data)):
        (tmp_path / "cp").write_bytes(data[:length])
        try:
            assert store.load() in (at(1), at(2))
        except BadCheckpoint as error:
            assert "delete it to start as a new consumer" in str(error)
        store.close()


@pytest.mark.parametrize("data", [b"", b"\n", b"\0" * 200, b"00000000 {}\n", b"\xff\xfe\n"])
def test_a_file_without_a_checkpoint_raises_and_is_not_a_new_consumer(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "cp").write_bytes(data)
    with pytest.raises(BadCheckpoint):
        FileCheckpoints(tmp_path / "cp").load()


def test_two_consumers_cannot_have_one_file(tmp_path: Path) -> None:
    first = FileCheckpoints(tmp_path / "cp")
    first.load()
    with pytest.raises(StoreBusy, match="another consumer"):
        FileCheckpoints(tmp_path / "cp").load()
    first.close()
    assert FileCheckpoints(tmp_path / "cp").load() is None


def test_a_file_that_cannot_be_replaced_raises(tmp_path: Path) -> None:
    store = FileCheckpoints(tmp_path / "cp")
    store.load()
    (tmp_path / "cp").mkdir()
    with pytest.raises(StoreError, match="cannot be written"):
        store.save(at(1))


def test_a_short_write_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileCheckpoints(tmp_path / "cp")
    store.save(at(1))
    write, written = os.write, []

    def on_a_full_disk(descriptor: int, data: memoryview) -> int:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(write(descriptor, data[:-5]))
        return written[0]

    monkeypatch.setattr(os, "write", on_a_full_disk)
    with pytest.raises(StoreError, match="No space left"):
        store.save(at(2))
    assert written
    monkeypatch.undo()
    store.close()
    assert store.load() == at(1)


_KILLED = """
import os, sys
from databus.client import FileCheckpoints, OnlineCheckpoint, Position
def at(scn): return OnlineCheckpoint("shop", "c", Position(scn, 1))
calls = 0
def step(number):
    global calls
    calls += 1
    if calls == number:
        os.kill(os.getpid(), 9)
def guarded(name, function, number):
    def call(*arguments, **named):
        step(number)
        if name == "write":
            function(arguments[0], arguments[1][:40])
            step(number)
            return 40 + function(arguments[0], arguments[1][40:])
        return function(*arguments, **named)
    return call
for number in range(1, 30):
    child = os.fork()
    if not child:
        store = FileCheckpoints(f"{sys.argv[1]}/cp{number}")
        for scn in range(1, 4):
            store.save(at(scn))
        for name in ("open", "write", "fsync", "close", "replace", "rename"):
            setattr(os, name, guarded(name, getattr(os, name), number))
        store.save(at(4))
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.faults
def test_kill_9_at_any_step_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)], check=True, capture_output=True, text=True
    )
    codes = [int(line) for line in run.stdout.split()]
    found = []
    for number, code in enumerate(codes, start=1):
        store = FileCheckpoints(tmp_path / f"cp{number}")
        loaded = store.load()
        assert code in (-9, 7)
        assert loaded == at(4) if code == 7 else loaded in (at(3), at(4))
        found.append(loaded)
        store.save(at(9))
        store.close()
        assert store.load() == at(9), "a consumer resumes after it"
        store.close()
    assert codes.count(-9) >= 8
    assert at(3) in found
    assert 7 in codes, "the save was never completed"


def test_lmdb_separates_many_consumers(tmp_path: Path) -> None:
    one, other = LmdbCheckpoints(tmp_path, "one"), None
    one.save(at(1))
    one.close()
    other = LmdbCheckpoints(tmp_path, "other")
    assert other.load() is None
    other.save(BOOT)
    other.close()
    again = LmdbCheckpoints(tmp_path, "one")
    assert again.load() == at(1)
    again.close()


def test_lmdb_opens_again_after_its_client_has_closed_it(tmp_path: Path) -> None:
    store = LmdbCheckpoints(tmp_path, "one")
    store.save(at(1))
    store.close()
    store.close()
    assert store.load() == at(1)
    store.close()
    store.save(at(2))
    assert store.load() == at(2)
    store.close()


@pytest.mark.parametrize("stored", [None, at(3), encode_checkpoint(at(3))])
async def test_the_application_gives_back_what_it_stored(stored: str | None) -> None:
    expected = at(3) if stored else None
    assert await ApplicationCheckpoints(lambda: stored).load() == expected


def test_the_lock_does_not_outlive_its_store(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        FileCheckpoints(tmp_path / "cp").load()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
