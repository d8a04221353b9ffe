"""The PostgreSQL source against a server that restarts, crashes, gives up its log, or has TLS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import PostgresServer
from databus.common.errors import SourcePositionLost, SourceUnavailable
from databus.relay.dumps.dump_records import DumpState, new_dump
from databus.relay.sources.postgres import PostgresSource
from databus.relay.sources.postgres.protocol.postgres_settings import read_settings
from databus.relay.sources.postgres.protocol.replication_connection import ReplicationConnection
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import (
    ORDERS,
    Seen,
    config_of,
    follow_to,
    now_scn,
    opened,
    opened_on,
    table_of,
)
from tests.support.waiting import eventually, eventually_sync
from tests.test_nothing_left_open import nothing_left_open

pytestmark = [pytest.mark.postgres, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[FreshDatabase]:
    """A database on a server of the test's own, which retains what it committed."""
    with PostgresServer(
        tmp_path / "server",
        durable=True,
        options=["max_wal_size=64MB", "min_wal_size=32MB", "wal_keep_size=0"],
    ) as server:
        server.create_database("shop")
        yield FreshDatabase(server, "shop")


async def _follow_through(
    db: FreshDatabase, seen: Seen, after_scn: int, done: threading.Event
) -> None:
    """What the fetcher does: stream, acknowledge, and reopen after each failure."""
    resume = after_scn
    while True:
        source = PostgresSource(config_of(db))
        try:
            await source.open()
            seen.resolved = 0
            async with contextlib.aclosing(source.stream(resume)) as batches:
                async for batch in batches:
                    seen.take(batch)
                    if seen.windows and seen.windows[-1][0] == seen.last[0]:
                        resume = seen.last[0]
                    if not batch.data:
                        resume = max(resume, batch.resolved)
                    await source.ack(resume)
                    if done.is_set() and batch.resolved >= await asyncio.to_thread(now_scn, db):
                        return
        except SourceUnavailable:
            await asyncio.sleep(0.05)
        finally:
            await source.close()


@pytest.mark.parametrize("how", ["stop", "kill9"])
async def test_restarts_of_the_server_under_load_need_no_hand(own: FreshDatabase, how: str) -> None:
    db = own
    db.execute(ORDERS)
    async with opened_on(db) as (_, start):
        pass
    seen, done = Seen(), threading.Event()

    def write_and_restart() -> None:
        numbers = itertools.count(1)
        try:
            for _ in range(4):
                for _ in range(40):
                    number = next(numbers)
                    db.transaction(
                        f"INSERT INTO orders VALUES ({number}, 'row', 0)",
                        f"UPDATE orders SET qty = qty + 1 WHERE id = {number // 2}",
                    )
                getattr(db.server, how)()
                db.server.start()
        finally:
            done.set()

    writer = asyncio.create_task(asyncio.to_thread(write_and_restart))
    await _follow_through(db, seen, start, done)
    await writer
    assert len(seen.windows) == 160
    async with opened(config_of(db)) as source:
        assert seen.tables["public.orders"] == await table_of(source, "public.orders")


async def test_a_slot_whose_log_was_given_up_is_a_lost_position(own: FreshDatabase) -> None:
    db = own
    db.execute(ORDERS)
    async with opened_on(db) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'lost', 0)")
        db.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '16MB'")
        db.execute("SELECT pg_reload_conf()")

        def given_up() -> bool:
            db.execute("SELECT pg_switch_wal()")
            db.execute(
                "CREATE TABLE filler AS SELECT repeat('x', 900) FROM generate_series(1, 40000)"
            )
            db.execute("DROP TABLE filler")
            db.execute("CHECKPOINT")
            return db.execute("SELECT wal_status FROM pg_replication_slots") == [("lost",)]

        await asyncio.to_thread(eventually_sync, given_up, 60)
        assert (await source.status())["wal_status"] == "lost"
        with pytest.raises(SourcePositionLost, match="max_slot_wal_keep_size"):
            await follow_to(source, start, 1)


async def test_a_stream_that_ends_under_the_read_of_a_chunk_ends_no_dump(
    db: FreshDatabase, tmp_path: Path
) -> None:
    db.execute(ORDERS)
    db.execute("INSERT INTO orders SELECT n, 'row', 0 FROM generate_series(1, 10) n")
    waiting = (
        "SELECT pid FROM pg_stat_activity WHERE wait_event = 'relation' "
        "AND datname = current_database()"
    )
    async with capturing(database_config("shop", db.url, "public.orders"), tmp_path) as fetcher:
        await streaming(fetcher)
        with contextlib.closing(db.server.connect(db.name)) as holder:
            holder.execute("BEGIN")
            holder.execute("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE")
            dump = new_dump({"sources": ["public.orders"], "keys": list(range(1, 11))})
            fetcher.book.add(dump)
            await fetcher.dumps_changed()
            (first,) = await eventually(lambda: db.execute(waiting), 30, "the chunk is being read")
            db.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                "WHERE database = current_database()"
            )
            await eventually(
                lambda: db.execute(waiting) not in ([], [first]), 30, "it is read again"
            )
        await eventually(lambda: dump.state is DumpState.COMPLETED, 30, "the dump has ended")
    assert len(ring_state(tmp_path / "shop").tables["public.orders"]) == 10


@pytest.fixture
def encrypted(own: FreshDatabase) -> FreshDatabase:
    """The same server with a certificate for localhost, and no connection without TLS."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed; it makes the test's certificate")
    server = own.server
    key, certificate = server.data_dir / "server.key", server.data_dir / "server.crt"
    subprocess.run(
        ["openssl", "req", "-new", "-x509", "-days", "2", "-nodes", "-newkey", "rsa:2048",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    if server.account is not None:
        for path in (key, certificate):
            shutil.chown(path, server.account)
    key.chmod(0o600)
    server.execute("ALTER SYSTEM SET ssl = on")
    (server.data_dir / "pg_hba.conf").write_text("hostssl all,replication all all scram-sha-256\n")
    server.restart()
    return own


async def test_the_stream_and_the_chunks_go_over_tls(encrypted: FreshDatabase) -> None:
    db = encrypted
    db.execute(ORDERS)
    certificate = str(db.server.data_dir / "server.crt")
    for options in (
        {"sslmode": "require"},
        {"sslmode": "prefer"},
        {"sslmode": "verify-full", "sslrootcert": certificate},
    ):
        async with opened_on(db, slot="tls", **options) as (source, start):
            db.execute(
                "INSERT INTO orders SELECT i, repeat('x', 500), 0 FROM generate_series(1, 9000) i"
            )
            seen = await follow_to(source, start, now_scn(db))
            assert seen.windows[0][2] == 9000
            assert seen.tables["public.orders"] == await table_of(source, "public.orders")
            db.execute("TRUNCATE orders")
    refused = PostgresSource(config_of(db, sslmode="disable"))
    finding = (await refused.preflight())[0]
    await refused.close()
    assert finding.setting == "sign-in"
    assert "no encryption" in finding.problem


def test_a_session_over_tls_is_closed_with_its_event_loop(encrypted: FreshDatabase) -> None:
    """Though no task waits for the server's answer that it has ended the session."""
    settings = read_settings(config_of(encrypted, sslmode="require"))

    async def come_and_go() -> None:
        session = ReplicationConnection(settings)
        await session.connect()
        assert session.encrypted
        session.close()
        assert session.is_closed

    with nothing_left_open():
        for _ in range(5):
            asyncio.run(come_and_go())
