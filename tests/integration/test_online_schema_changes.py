"""Online schema change tools under writers: every copy equals the source, and nobody had to act."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from databus.bootstrap.copies import HttpPeer, LocalCopy
from databus.bootstrap.manifest import Store
from databus.bootstrap.served import OpenLogs, ServedDatabase
from databus.bootstrap.verify import Verifier
from databus.bootstrap.writer import write_logs
from databus.common.config import BootstrapConfig, parse
from databus.common.errors import MissingDependency
from databus.relay.relay import LocalRelay
from tests.relay.test_resync import words
from tests.support.busy_writers import BusyWriters
from tests.support.capture import PACE, upserted
from tests.support.fixtures import FreshDatabase
from tests.support.schema_changers import alter, command_of
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BUSY = "CREATE TABLE busy (id INT PRIMARY KEY, version INT NOT NULL, a INT, b INT, c VARCHAR(30))"
STILL_ROWS = 4000
"""Rows that no writer touches; the writers' own are below."""


@pytest.fixture(params=["mariadb", "mysql"])
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    found: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture(params=["pt-online-schema-change", "gh-ost"])
def tool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        command_of(name)
    except MissingDependency as missing:
        pytest.skip(missing.message)
    return name


@contextlib.asynccontextmanager
async def relay_of(database: FreshDatabase, folder: Path) -> AsyncIterator[LocalRelay]:
    """One database that captures the table alone, and one that captures the tools' tables too."""
    streams = "".join(
        f"""
        [[database]]
        name = "{name}"
        url = "{database.url}"
        sources = ["{database.name}.{tables}"]
        sync_every = "50ms"
        ring_bytes = "64MiB"
        """
        for name, tables in (("narrow", "busy"), ("wide", "*"))
    )
    config = parse(
        f"""
        [relay]
        listen = "127.0.0.1:0"
        data_dir = "{folder / "relay"}"
        {streams}
        """
    )
    async with LocalRelay(config, pace=PACE) as relay:
        yield relay


def in_database(database: FreshDatabase) -> dict[tuple[Any, ...], dict[str, Any]]:
    names = [str(row[0]) for row in database.execute("SHOW COLUMNS FROM busy")]
    rows = database.execute("SELECT * FROM busy")
    return {(row[0],): dict(zip(names, row, strict=True)) for row in rows}


async def ended(writing: asyncio.Task[None], logs: OpenLogs) -> None:
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    logs.close()


async def test_copies_equal_the_source_after_a_tool_has_exchanged_the_table_under_writers(
    database: FreshDatabase, tool: str, tmp_path: Path
) -> None:
    database.execute(BUSY)
    values = ", ".join(f"({1000 + n}, 0, {n}, {n}, 'still')" for n in range(STILL_ROWS))
    database.execute(f"INSERT INTO busy VALUES {values}")
    source, writers = f"{database.name}.busy", BusyWriters(database.name)
    async with contextlib.AsyncExitStack() as ending:
        relay = await ending.enter_async_context(relay_of(database, tmp_path))
        await relay.ready()
        config = BootstrapConfig(
            data_dir=tmp_path / "bootstrap", relays=(relay.url,), databases=("wide",)
        )
        logs = OpenLogs(writes=True)
        writing = asyncio.create_task(write_logs(config, logs, asyncio.Event()))
        ending.push_async_callback(ended, writing, logs)
        log = logs.to_write(tmp_path / "bootstrap" / "wide" / "log")
        rings = {name: tmp_path / "relay" / name for name in ("narrow", "wide")}

        def is_seeded() -> bool:
            seeding = {} if log.is_new() else log.note("seeding") or {}
            return bool(seeding.get(source, {}).get("state") == "seeded")

        def followed(name: str, count: int) -> bool:
            if relay.fetchers[name].tables.book.get(source):
                return False  # and spare the loop a look through the ring
            states = [state for table, state in words(rings[name]) if table == source]
            return states.count("followed") >= count

        def equal(name: str) -> bool:
            return upserted(rings[name], source)[0] == in_database(database)

        await eventually(is_seeded, 60, "the copy is seeded")
        async with HttpPeer(relay.url, "narrow") as peer:
            await peer.document("POST", "dumps", {"sources": [source]})
        await eventually(lambda: equal("narrow"), 60, "it has all rows", poll_s=0.3)
        for count, change in enumerate(("ENGINE=InnoDB", "ADD COLUMN extra INT DEFAULT 7"), 1):
            before = {name: len(upserted(ring, source)[1]) for name, ring in rings.items()}
            with writers.at_work(database.server):
                await asyncio.to_thread(writers.each_commits, 8)
                await asyncio.to_thread(alter, tool, database.server, database.name, "busy", change)
                writers.read_columns_again()
                await asyncio.to_thread(writers.each_commits, 8)
            # They have written since the cut-over; now the machine is left to the copies.
            for name in rings:
                await eventually(
                    partial(followed, name, count), 60, f"{name}: {change}", poll_s=0.3
                )
            for name in rings:
                await eventually(partial(equal, name), 60, f"{name} after {change}", poll_s=0.3)
            _, letters = upserted(rings["wide"], source)
            assert "t" not in letters, "a bootstrap server compares"
            if change == "ENGINE=InnoDB":
                read = letters[before["wide"] :].count("r")
                assert read < STILL_ROWS / 2, "what did not change is not dumped"
        store = Store(tmp_path / "bootstrap" / "wide")
        copy = LocalCopy(ServedDatabase("wide", tmp_path / "bootstrap" / "wide", logs, store))
        async with HttpPeer(relay.url, "wide") as peer:
            report = await Verifier(peer, copy).verify(source)
        assert report.is_equal, report.to_json()
        assert report.rows == len(in_database(database))
