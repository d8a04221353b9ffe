"""A disk that refuses one operation, whichever: seal, manifest switch, replacement, collection.

Every operation on the store's files that one of these does, from the first to the last, is refused
once (no space left), in a run of its own.  The refusal must come out as a StoreError, the store
must be whole, and a resumed run must lead to the state that an undisturbed run leads to.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs import run_storage
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.errors import StoreError
from databus.common.frame.frame_format import iter_frames
from tests.bootstrap.model import CLOCK, START
from tests.bootstrap.runs.test_s3_store import merged
from tests.faults.test_bootstrap_kill import assert_whole, blocks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"}


class Disk:
    """Counts the operations on a folder's files, and refuses one of them.

    Python's audit events report each file that is opened, renamed or deleted; syncing and
    what Arrow does are counted where the storage calls them.
    """

    def __init__(self) -> None:
        self.folder = ""
        self.seen = 0
        self.refused_at = 0
        self.refused = ""

    def watch(self, folder: Path, refused_at: int) -> None:
        """From now on refuse the operation of this number, counted from 1."""
        self.folder, self.refused_at = str(folder), refused_at
        self.seen, self.refused = 0, ""

    def rest(self) -> None:
        """Refuse nothing more."""
        self.folder = ""

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """The hook; it stays for as long as the process runs."""
        if self.folder and event in _EVENTS and isinstance(arguments[0], str | os.PathLike):
            self.reach(event, str(arguments[0]))

    def reach(self, what: str, path: str) -> None:
        """One operation begins."""
        if not self.folder or not path.startswith(self.folder) or "/log/" in path:
            return
        self.seen += 1
        if self.seen == self.refused_at:
            self.refused = f"{what} {path.removeprefix(self.folder)} ({self.seen})"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class Written:
    """A file that Arrow writes through Python, so that each write may be refused."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk, self._path = disk, path
        self._file = Path(path).open("wb")  # noqa: SIM115 - closed by close()

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> int:
        self._disk.reach("write", self._path)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._file.tell()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()


_DISK = Disk()
sys.addaudithook(_DISK.audit)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The disk beneath all stores, at rest."""
    real_fsync, real_file = os.fsync, run_storage.pa.OSFile

    def fsync(descriptor: int) -> None:
        _DISK.reach("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real_fsync(descriptor)

    def open_file(path: str, mode: str = "rb") -> Any:
        if mode == "wb":
            return run_storage.pa.PythonFile(Written(_DISK, path), "w")
        _DISK.reach("open", path)
        return real_file(path, mode=mode)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(run_storage.pa, "OSFile", open_file)
    yield _DISK
    _DISK.rest()


def write(folder: Path) -> None:
    """The log writer: take up the stream after the checkpoint, seal every third block."""
    store = Store(folder)
    store.create()
    log = HotLog(folder / "log")
    try:
        log.bind("shop", CLOCK, START)
        with store.lease("writer"):
            segments.finish(log, store, 1)
            for number, block in enumerate(blocks()):
                last = log.state().last
                rest = [bytes(one.bytes) for one in iter_frames(block) if one.position > last]
                log.append(b"".join(rest), 1)
                if number % 3 == 2:
                    segments.seal(log, store, 1)
    finally:
        log.close()


def collect(folder: Path) -> None:
    """The applier without Spark: it replaces other runs by a merged one and deletes them."""
    store = Store(folder)
    with store.lease("applier"):
        store.sweep("c")
        chain = store.read().chain
        if len(chain) > 1:
            try:
                run = merged(store, Merge(chain, RunKind.DELTA))
            except (OSError, pa.ArrowException) as error:
                raise StoreError(f"a merge failed: {error}") from error
            store.files(run).settle([file.name for file in run.files])
            store.switch(lambda manifest: manifest.with_changes(add=run, drop=chain, now_us=1))
        store.collect(0, "cs", now_us=2)


@pytest.mark.parametrize("action", [write, collect])
def test_whatever_operation_the_disk_refuses_nothing_is_lost_or_double(
    tmp_path: Path, disk: Disk, action: Callable[[Path], None]
) -> None:
    begun = tmp_path / "begun"
    if action is collect:
        write(begun)
    refusals: dict[str, str] = {}
    for number in range(1, 1000):
        folder = tmp_path / f"try-{number}" / "shop"
        if begun.exists():
            shutil.copytree(begun, folder)
        disk.watch(folder, number)
        error = ""
        try:
            action(folder)
        except StoreError as raised:
            error = raised.message
        disk.rest()
        if not disk.refused:
            break
        refusals[disk.refused] = error
        assert not error or "No space left" in error
        if (folder / "log" / "data.mdb").exists():
            assert_whole(folder)
        action(folder)
        assert_whole(folder)
        store = Store(folder)
        known = {run.id for run in store.read().runs}
        assert {path.name for path in store.runs_folder.iterdir()} == known, disk.refused
        if action is collect:
            assert len(known) == 1
        shutil.rmtree(folder.parent)
    kinds = {operation.split(" ")[0] for operation in refusals}
    assert kinds >= {"open", "fsync", "os.rename", "write"}
    assert action is write or "os.rmdir" in kinds
    assert sum(bool(error) for error in refusals.values()) > 10
