"""Two servers over one store: which of them writes, and what the other one does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.processes import shared_log
from databus.bootstrap.processes.log_writer import LogWriter
from databus.bootstrap.processes.shared_log import SharedLog
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.common.config import BootstrapConfig
from tests.bootstrap.model import CLOCK, START, History
from tests.support.s3_server import S3Server
from tests.support.waiting import eventually


class Writer(LogWriter):
    """A log writer that says what it does, and reads no relay."""

    does = ""

    async def write(self) -> None:
        """Bind a new log, and wait."""
        self.log.bind("shop", CLOCK, START)
        await self._do("writes")

    async def copy(self) -> None:
        await self._do("copies")

    async def _do(self, what: str) -> None:
        self.does = what
        try:
            await asyncio.Event().wait()
        finally:
            self.does = ""


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers look more often than in operation."""
    monkeypatch.setattr(shared_log, "LOOK_S", 0.05)


def on_s3(s3: S3Server) -> dict[str, Any]:
    """The keys of a configuration with a store on S3."""
    return {"store": s3.empty_prefix(), "s3": s3.options(lease_ttl=1)}


@asynccontextmanager
async def server(
    folder: Path, keys: dict[str, Any], logs: OpenLogs, *, leads: bool = True
) -> AsyncIterator[tuple[Writer, asyncio.Task[None]]]:
    """A server's log; the store is in ``folder``, or the folder is its own."""
    config = BootstrapConfig(data_dir=folder, cluster=True, **keys)
    writer = Writer(config, "shop", logs)
    task = asyncio.create_task(SharedLog(writer).run(leads=leads))
    try:
        yield writer, task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def logs() -> Iterator[OpenLogs]:
    """The logs of both servers: LMDB opens each once in a process."""
    logs = OpenLogs(writes=True)
    yield logs
    logs.close()


@pytest.mark.parametrize("kind", ["folder", "s3"])
async def test_one_writes_and_the_other_takes_over_when_it_ends(
    kind: str, tmp_path: Path, s3: S3Server, logs: OpenLogs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = on_s3(s3) if kind == "s3" else {}
    other_folder = tmp_path / ("b" if keys else "a")
    async with server(tmp_path / "a", keys, logs) as (one, one_task):
        await eventually(lambda: one.does == "writes", 20)
        async with server(other_folder, keys, logs) as (other, _):
            await eventually(lambda: "standing by" in caplog.text, 20)
            await asyncio.sleep(0.05)
            assert (one.does, other.does) == ("writes", "")
            one_task.cancel()
            await eventually(lambda: other.does == "writes", 20)
            assert one.does == ""
    assert caplog.text.count("standing by") == 1


async def test_a_standby_copies_once_there_is_a_run_and_a_writer_that_loses_its_lease_stops(
    tmp_path: Path, s3: S3Server, logs: OpenLogs
) -> None:
    keys = on_s3(s3)
    async with (
        server(tmp_path / "a", keys, logs) as (one, _),
        server(tmp_path / "c", keys, logs, leads=False) as (reader, _),
    ):
        await eventually(lambda: one.does == "writes", 20)
        one.log.append(History(1).block(5), 1)
        segments.seal(one.log, one.store, 1)
        await eventually(lambda: reader.does == "copies", 20)
        assert reader.log.state().start == one.store.read().stop
        storage: Any = one.store.storage
        storage.bucket.delete([f"{storage.prefix}writer.lease"])
        await eventually(lambda: one.does != "writes", 20, "its lease is gone")
        await eventually(lambda: one.does == "writes", 20, "it takes it again")
        assert reader.does == "copies", "it never writes"
