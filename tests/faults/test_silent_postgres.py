"""A PostgreSQL server, or something between, that takes every byte and answers nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from databus.common.errors import SourceUnavailable
from databus.relay.processes.fetcher_status import FetcherState
from databus.relay.sources.postgres.chunks import postgres_chunks
from databus.relay.sources.postgres.protocol import replication_connection
from databus.relay.sources.postgres.protocol.postgres_settings import read_settings
from databus.relay.sources.postgres.protocol.replication_connection import ReplicationConnection
from databus.relay.sources.postgres.stream import postgres_lineage, slot_stream
from databus.relay.sources.postgres.tables import postgres_catalogue
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.faulty_proxy import FaultyProxy
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import config_of, opened, opened_on, table_of
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.postgres, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def db(postgres_database: FreshDatabase) -> FreshDatabase:
    """A database with the table ``public.orders``."""
    postgres_database.execute("CREATE TABLE public.orders (id int PRIMARY KEY)")
    return postgres_database


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_stream, "_REQUEST_REPLY_AFTER_S", 0.5)
    monkeypatch.setattr(slot_stream, "_SILENCE_S", 3.0)
    monkeypatch.setattr(postgres_catalogue, "_ANSWER_S", 3.0)
    monkeypatch.setattr(replication_connection, "_ANSWER_S", 2.0)


@pytest.mark.usefixtures("impatient")
async def test_a_stream_that_hangs_is_given_up_and_restarts(
    db: FreshDatabase, tmp_path: Path
) -> None:
    parts = urlsplit(db.url)
    assert parts.hostname and parts.port
    async with FaultyProxy(parts.hostname, parts.port) as proxy:
        url = db.url.replace(f":{parts.port}/", f":{proxy.port}/")
        config = database_config("shop", url, "public.*", connect_timeout="2s")
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            db.execute("INSERT INTO orders VALUES (1)")
            await eventually(lambda: ring_state(tmp_path / "shop").letters == "c", 30, "it streams")
            proxy.stall()
            db.execute("INSERT INTO orders VALUES (2)")
            await eventually(
                lambda: fetcher.status.state != FetcherState.STREAMING, 30, "it is noticed"
            )
            assert fetcher.status.error is not None
            assert fetcher.status.error.code == "source_unavailable"
            proxy.resume()
            await eventually(lambda: ring_state(tmp_path / "shop").letters == "cc", 60, "it is on")


@pytest.mark.usefixtures("impatient")
async def test_a_quiet_server_is_probed_and_not_given_up(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_stream, "_KEEP_ALIVE_S", 0.2)
    monkeypatch.setattr(slot_stream, "_QUIET_S", 0.2)
    send_status, asked = ReplicationConnection.send_status, []

    def noting(connection: ReplicationConnection, *positions: int, is_answered: bool) -> None:
        asked.append(is_answered)
        send_status(connection, *positions, is_answered=is_answered)

    monkeypatch.setattr(ReplicationConnection, "send_status", noting)
    db.execute(f"ALTER DATABASE {db.name} SET wal_sender_timeout = 0")  # No keepalive of its own.
    async with opened_on(db) as (source, start):
        async with contextlib.aclosing(source.stream(start)) as batches:
            async for _ in batches:
                assert source._stream is not None
                silent_s = source._stream._connection.silent_s
                if any(asked) and silent_s < slot_stream._REQUEST_REPLY_AFTER_S:
                    return  # It has answered: only its bytes end the silence.


async def test_a_sender_that_is_busy_is_waited_for_and_one_that_waits_for_us_is_not(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_on(db) as (source, start):
        async with contextlib.aclosing(source.stream(start)) as batches:
            await anext(batches)
            stream = source._stream
            assert stream is not None
            with pytest.raises(SourceUnavailable, match="waits for us"):
                async with asyncio.timeout(20 * PATIENCE):
                    while True:  # It may still be busy with its start.
                        await stream._require_sender()
                        await asyncio.sleep(0.01)
            own = (await source._catalogue.fetch("SELECT pg_catalog.pg_backend_pid() AS pid"))[0]
            kind = replication_connection.ReplicationConnection
            monkeypatch.setattr(kind, "server_process", own["pid"])
            stream._connection.silent_s = 99.0
            await stream._require_sender()
            assert stream._connection.silent_s == 0.0
            assert f"process {own['pid']} has sent nothing" in stream.warnings()[0]
            assert "99 s" in (await source.status())["warnings"][0]
            monkeypatch.setattr(kind, "server_process", 0)
            with pytest.raises(SourceUnavailable, match="is gone"):
                await stream._require_sender()


@pytest.mark.usefixtures("impatient")
async def test_a_chunk_whose_server_hangs_is_given_up_and_read_again(
    db: FreshDatabase,
) -> None:
    db.execute("INSERT INTO orders VALUES (1)")
    parts = urlsplit(db.url)
    assert parts.hostname and parts.port
    async with FaultyProxy(parts.hostname, parts.port) as proxy:
        url = db.url.replace(f":{parts.port}/", f":{proxy.port}/")
        config = database_config("shop", url, "public.*", connect_timeout="2s")
        async with opened(config) as source:
            table = await source._table("public.orders")
            assert await source._chunks.largest_key(table) == [1]  # Over a session that is open.
            proxy.stall()
            with pytest.raises(SourceUnavailable, match="has sent nothing for 2 s"):
                await source._chunks.largest_key(table)
            with pytest.raises(SourceUnavailable, match="did not answer within"):
                await postgres_lineage.identify(source._settings)
            proxy.resume()
            assert list(await table_of(source, "public.orders")) == [(1,)]


async def test_a_session_whose_server_hangs_just_after_the_sign_in_is_closed(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = urlsplit(db.url)
    assert parts.hostname and parts.port
    sessions: list[asyncpg.Connection] = []
    monkeypatch.setattr(postgres_catalogue, "_ANSWER_S", 0.5)
    async with FaultyProxy(parts.hostname, parts.port) as proxy:
        connect = asyncpg.connect

        async def stalling(**settings: Any) -> asyncpg.Connection:
            sessions.append(await connect(**settings))
            proxy.stall()
            return sessions[0]

        monkeypatch.setattr(asyncpg, "connect", stalling)
        url = db.url.replace(f":{parts.port}/", f":{proxy.port}/")
        settings = read_settings(database_config("shop", url, "public.*"))
        with pytest.raises(SourceUnavailable, match="cannot be queried"):
            await postgres_catalogue.Catalogue(settings).facts()
        assert sessions[0].is_closed()


@pytest.mark.usefixtures("impatient")
async def test_one_process_that_hangs_between_two_statements_is_given_up(
    db: FreshDatabase,
) -> None:
    db.execute("INSERT INTO orders VALUES (1)")
    async with opened(config_of(db)) as source:
        table = await source._table("public.orders")
        assert await source._chunks.largest_key(table) == [1]
        (session,) = source._chunks._idle
        process = session.server_process
        idle = f"SELECT 1 FROM pg_stat_activity WHERE pid = {process} AND wait_event = 'ClientRead'"
        # It reports that it waits just after it has answered.
        await eventually(lambda: asyncio.to_thread(db.execute, idle), 30)
        os.kill(process, signal.SIGSTOP)
        try:
            with pytest.raises(SourceUnavailable, match="its process waits for us"):
                await source._chunks.largest_key(table)
        finally:
            os.kill(process, signal.SIGCONT)
        assert list(await table_of(source, "public.orders")) == [(1,)]


@pytest.mark.usefixtures("impatient")
async def test_a_process_that_is_stopped_while_it_works_is_named_and_given_up(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next read of the same table may take twice as long."""
    monkeypatch.setattr(replication_connection, "_ANSWER_S", 1.0)
    monkeypatch.setattr(postgres_chunks, "_WORK_LIMIT_S", 4.0)
    db.execute("CREATE VIEW public.waiting AS SELECT 1 AS id FROM pg_sleep(90)")
    db.execute("INSERT INTO orders VALUES (1)")
    async with opened(config_of(db)) as source:
        table = await source._table("public.orders")
        slow = replace(table, source="public.waiting", table_name="waiting")
        reading = asyncio.ensure_future(source._chunks.largest_key(slow))
        working = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
        ((process,),) = await eventually(lambda: asyncio.to_thread(db.execute, working), 30)
        os.kill(process, signal.SIGSTOP)
        try:
            warnings = await eventually(source._chunks.warnings, 30, "it is named")
            assert (
                f"process {process} has not answered a statement for public.waiting" in warnings[0]
            )
            assert warnings[0] in (await source.status())["warnings"]
            with pytest.raises(SourceUnavailable, match=f"{process} has not answered .*waiting"):
                await reading
        finally:
            os.kill(process, signal.SIGCONT)
        await eventually(lambda: not source._chunks.warnings(), 30, "it is closed")
        assert list(await table_of(source, "public.orders")) == [(1,)]
        session = source._chunks._session(slow)
        assert session.work_limit_s == 8.0
        source._chunks._idle.append(session)  # It is the source's to close.


@pytest.mark.usefixtures("impatient")
async def test_a_statement_that_takes_long_is_waited_for(
    postgres_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_connection, "_ANSWER_S", 0.5)
    session = ReplicationConnection(read_settings(config_of(postgres_database)))
    await session.connect()
    try:
        rows = await session.query("SELECT 1 FROM pg_sleep(2)")
        assert rows == [(b"1",)]
    finally:
        session.close()
