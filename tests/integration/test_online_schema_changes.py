"""Online schema change tools under writers: every copy equals the source, without an operator."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.reading.stored_database import OpenLogs, StoredDatabase
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.verify.table_copy import HttpPeer, LocalCopy
from databus.bootstrap.verify.table_verifier import Verifier
from databus.cli.main import cli
from databus.common.config import BootstrapConfig, parse
from databus.common.errors import MissingDependency
from databus.common.http.listening_socket import listening_socket
from databus.relay.local_relay import LocalRelay
from tests.relay.dumps.test_resync import words
from tests.support.busy_writers import BusyWriters
from tests.support.capture import PACE, upserted
from tests.support.fixtures import FreshDatabase
from tests.support.schema_changers import alter, command_of, require_server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BUSY = "CREATE TABLE busy (id INT PRIMARY KEY, version INT NOT NULL, a INT, b INT, c VARCHAR(30))"
STILL_ROWS = 4000
"""Rows that no writer touches; the writers' own are below."""


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


@contextlib.asynccontextmanager
async def served(config: BootstrapConfig, logs: OpenLogs) -> AsyncIterator[str]:
    listener, stop = listening_socket("127.0.0.1:0"), asyncio.Event()
    serving = asyncio.create_task(serve_bootstrap(config, listener, stop, logs))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        await serving


async def exported(url: str, source: str, folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """A Delta table by the same command each time, which brings it up to date."""
    config, lake = folder / "export.toml", folder / "lake"
    config.write_text('[bootstrap]\ndata_dir = "bootstrap"\n')
    arguments = ["export", "-c", str(config), "--format", "delta", "--source", source]
    arguments += ["--to", str(lake), "--bootstrap", url]
    done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
    assert done.exit_code == 0, done.output
    rows = DeltaTable(str(lake / "wide" / source)).to_pyarrow_table().to_pylist()
    found = {(row["id"],): row for row in rows}
    assert len(found) == len(rows), "a key came twice"
    return found


async def ended(writing: asyncio.Task[None], logs: OpenLogs) -> None:
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    logs.close()


async def test_copies_equal_the_source_after_a_tool_has_exchanged_the_table_under_writers(
    database: FreshDatabase, tool: str, tmp_path: Path
) -> None:
    require_server(tool, database.server)
    database.execute(BUSY)
    values = ", ".join(f"({1000 + n}, 0, {n}, {n}, 'still')" for n in range(STILL_ROWS))
    database.execute(f"INSERT INTO busy VALUES {values}")
    source = f"{database.name}.busy"
    # gh-ost applies the writers' changes in one thread: it must get ahead of them.
    writers = BusyWriters(database.name, pause_s=0.05 if tool == "gh-ost" else 0.0)
    async with contextlib.AsyncExitStack() as ending:
        relay = await ending.enter_async_context(relay_of(database, tmp_path))
        await relay.ready()
        config = BootstrapConfig(
            data_dir=tmp_path / "bootstrap", relays=(relay.url,), databases=("wide",)
        )
        logs = OpenLogs(writes=True)
        writing = asyncio.create_task(write_logs(config, logs, asyncio.Event()))
        ending.push_async_callback(ended, writing, logs)
        url = await ending.enter_async_context(served(config, logs))
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
        await exported(url, source, tmp_path)
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
            if tool == "gh-ost":  # In two steps: for a moment there is no table of this name.
                assert letters[before["wide"] :].count("t") == 1
            else:
                assert "t" not in letters, "a bootstrap server compares"
                read = letters[before["wide"] :].count("r")
                is_same = change == "ENGINE=InnoDB"
                assert not is_same or read < STILL_ROWS / 2, "what did not change is not dumped"

            async def is_exported() -> bool:
                return await exported(url, source, tmp_path) == in_database(database)

            await eventually(is_exported, 60, f"an export after {change}", poll_s=0.5)
        store = Store(tmp_path / "bootstrap" / "wide")
        copy = LocalCopy(StoredDatabase("wide", tmp_path / "bootstrap" / "wide", logs, store))
        async with HttpPeer(relay.url, "wide") as peer:
            report = await Verifier(peer, copy).verify(source)
        assert report.is_equal, report.to_json()
        assert report.rows == len(in_database(database))
