"""A disk that fails one sync: nothing behind it is acknowledged, and nothing is missing after."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import StoreError, SyncFailed
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.dumps.dump_runner import Emission
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_check import check
from databus.relay.ring.ring_file import RingFile
from databus.relay.ring.ring_format import DATA_OFFSET
from databus.relay.ring.schema_registry import Registry, RegistryReader
from tests.faults.test_ring_crash import damage, retained
from tests.support.failing_sync import FailingSync
from tests.support.relay_process import RelayProcess
from tests.support.scripted_fetcher import (
    DATABASE,
    PACE,
    frames,
    opened,
    reached,
    running,
    status_in,
)
from tests.support.scripted_source import ScriptedDatabase
from tests.support.waiting import eventually, eventually_sync
from tests.support.windows import make_window, split_frames

pytestmark = pytest.mark.faults


class OneFailure:
    """Lets one ``fdatasync`` or ``fsync`` of the file at a path fail, and none after it."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.is_armed = False
        self.synced_after = 0
        self._has_failed = False
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(fd: int) -> None:
            if Path(f"/proc/self/fd/{fd}").readlink() == self.path:
                if self.is_armed:
                    self.is_armed, self._has_failed = False, True
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                self.synced_after += self._has_failed
            real(fd)

        return sync


@pytest.mark.parametrize("which", [0, 1], ids=["data", "control page"])
def test_a_ring_whose_sync_failed_syncs_no_more_and_rewrites_what_was_not_synced_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    windows = [make_window(scn, [100, 100]) for scn in range(1, 6)]
    failing = OneFailure(tmp_path / "ring", monkeypatch)
    writer = Ring.create(tmp_path, 16384, clock="c")
    writer.append(b"".join(windows[:3]))
    assert writer.sync() == Position(3, 2)
    writer.append(windows[3])
    calls = itertools.count()
    real = os.fdatasync

    def sync(fd: int) -> None:
        failing.is_armed = next(calls) == which
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    with pytest.raises(SyncFailed, match=r"ring could not be written to disk: Input/output error"):
        writer.sync()
    for act in (writer.sync, lambda: writer.append(windows[4])):
        with pytest.raises(SyncFailed):
            act()
    writer.close()
    assert failing.synced_after == 0, "closed without another sync"
    rewritten: list[tuple[int, int]] = []
    rewrite = RingFile.rewrite

    def watched(file: RingFile, position: int, stop: int) -> None:
        rewritten.append((position, stop))
        rewrite(file, position, stop)

    monkeypatch.setattr(RingFile, "rewrite", watched)
    with Ring.open_writer(tmp_path) as again:
        start, stop = rewritten[0]
        lost = sum(map(len, windows[:3]))
        assert start <= lost < stop == again.state.tail
        again.append(windows[4])
    assert retained(tmp_path) == split_frames(b"".join(windows))


def test_pages_that_a_failed_sync_dropped_come_again_from_the_source_and_no_reader_misses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = [make_window(scn, [100, 100]) for scn in range(1, 8)]
    failing = OneFailure(tmp_path / "ring", monkeypatch)
    writer = Ring.create(tmp_path, 16384, clock="c")
    writer.append(b"".join(windows[:3]))
    writer.sync()
    synced = writer.state.tail
    writer.append(b"".join(windows[3:6]))
    with Ring.open_reader(tmp_path) as reader:
        at = reader.find(Position(5, 2))
        failing.is_armed = True
        with pytest.raises(SyncFailed):
            writer.sync()
        writer.close()
        damage(tmp_path / "ring", DATA_OFFSET + synced + 50, 64)  # what was there before
        with Ring.open_writer(tmp_path) as again:
            assert again.last == Position(3, 2)
            assert again.state.head > at, "positions that a reader has seen are not used again"
            for window in windows[3:]:
                again.append(window)
            data, _ = reader.read(reader.find(Position(5, 2)), 1 << 20)
    assert bytes(data) == b"".join(windows[5:])
    assert check(tmp_path) == []
    assert retained(tmp_path) == split_frames(b"".join(windows))


async def test_nothing_behind_a_failed_sync_is_acknowledged_and_the_state_is_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = ScriptedDatabase()
    failing = OneFailure(tmp_path / "shop" / "ring", monkeypatch)
    fetcher = Fetcher(DATABASE, tmp_path, make_source=database.source, pace=PACE)
    run = asyncio.create_task(fetcher.run())
    database.commit((1, "a"))
    await eventually(lambda: 1 in database.acks)
    failing.is_armed = True
    database.commit((2, "b"))
    with pytest.raises(SyncFailed, match="could not be written to disk"):
        await run
    assert failing.synced_after == 0
    assert max(database.acks) == 1, "what was not on disk was acknowledged"
    status = await status_in(tmp_path, "failed")
    assert status["error"]["code"] == "sync_failed"
    async with running(database, tmp_path) as again:
        await eventually(reached(again, 2))
        await eventually(lambda: 2 in database.acks)
        assert opened(again).ring.state.max.scn >= 2
    assert [view.scn for view in frames(tmp_path) if view.seq == 0][:2] == [1, 2]


async def test_the_last_sync_of_a_fetcher_that_ends_may_fail_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = ScriptedDatabase()
    failing = OneFailure(tmp_path / "shop" / "ring", monkeypatch)
    slow = DATABASE.model_copy(update={"sync_every": 3600.0})
    fetcher = Fetcher(slow, tmp_path, make_source=database.source, pace=PACE)
    run = asyncio.create_task(fetcher.run())
    database.commit((1, "a"))
    await eventually(reached(fetcher, 1))
    failing.is_armed = True
    fetcher.stop()
    with pytest.raises(SyncFailed):
        await run
    assert failing.synced_after == 0
    assert database.acks == []


async def test_a_dumps_progress_that_could_not_be_recorded_is_recorded_before_the_source_may_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = ScriptedDatabase()
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 0))
        outcomes: list[str] = []
        write, settle = fetcher.book.write, fetcher.dumps.settle
        due = [True]

        def refusing(content: bytes) -> None:
            if not outcomes:
                outcomes.append("refused")
                raise StoreError("no space left")
            outcomes.append(f"stored before {max(database.acks, default=0)}")
            write(content)

        def settled(emitted: tuple[Emission, ...]) -> bool:
            settle(emitted)
            return bool(due) and due.pop()

        monkeypatch.setattr(fetcher.book, "write", refusing)
        monkeypatch.setattr(fetcher.dumps, "settle", settled)
        database.commit((1, "a"))
        await eventually(lambda: 1 in database.acks)
        assert outcomes == ["refused", "stored before 0"]


def test_schema_versions_whose_sync_failed_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schemas.jsonl"
    first, second, third = (
        SourceSchema(f"s.{name}", (Column("id", Kind.INT, nullable=False),), ("id",))
        for name in "abc"
    )
    failing = OneFailure(path, monkeypatch)
    registry = Registry(path)
    registry.add([first])
    written: list[bytes] = []
    pwrite = os.pwrite

    def watched(fd: int, data: bytes, offset: int) -> int:
        written.append(bytes(data))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", watched)
    failing.is_armed = True
    with pytest.raises(StoreError, match="Input/output error"):
        registry.add([second])
    reader = RegistryReader(path)
    reader.refresh()
    assert second.fingerprint in reader.schemas, "a reader may have it already"
    registry.add([third])
    assert b"s.b" in written[1] and b"s.c" in written[1] and b"s.a" not in written[1]
    assert reader.refresh() and third.fingerprint in reader.schemas
    registry.close()
    written.clear()
    Registry(path).close()
    assert written == [path.read_bytes()], "a process before may have failed to sync it"


@pytest.mark.slow
def test_the_fetchers_process_ends_with_a_sync_that_failed_and_the_next_one_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingSync(tmp_path, "/gen/ring")
    for name in ("LD_PRELOAD", "FAILING_PATH", "FAILING_AT"):
        monkeypatch.setenv(name, failing.environment[name])
    with RelayProcess.streaming(tmp_path, 2000) as relay:
        fetcher = relay.fetcher()
        failing.arm()
        eventually_sync(lambda: not fetcher.is_running(), 30, "the fetcher ends")
        assert failing.has_failed
        assert "could not be written to disk: Input/output error" in relay.log.read_text()
        assert relay.fetcher().pid != fetcher.pid
        relay.ready()
    assert check(tmp_path / "data" / "gen") == []


LOG = """
import sys
from pathlib import Path
from databus.bootstrap.log.hot_log import HotLog
from databus.common.checkpoint import Position
from databus.common.errors import StoreError
from tests.support.windows import make_window
log = HotLog(Path(sys.argv[1]))
log.bind("shop", "c", Position(0, 0))
log.append(make_window(1, [100]), 1)
Path(sys.argv[2]).touch()
try:
    log.append(make_window(2, [100]), 1)
except StoreError as error:
    print(error.message)
print(log.state().last.scn)
log.append(make_window(2, [100]), 1)
log.append(make_window(3, [100]), 1)
print(log.state().last.scn)
"""


def test_a_commit_of_the_bootstrap_log_whose_sync_failed_is_none(tmp_path: Path) -> None:
    failing = FailingSync(tmp_path, "/log/data.mdb")
    run = subprocess.run(
        [sys.executable, "-c", LOG, tmp_path / "log", failing.armed],
        env=failing.environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    refused, first_scn, reached_scn = run.stdout.splitlines()
    assert "log" in refused and "Input/output error" in refused
    assert (first_scn, reached_scn) == ("1", "3")
