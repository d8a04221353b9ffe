"""A consumer that is stuck costs the database nothing: its log is forgotten as without it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from databus.relay.local_relay import LocalRelay
from tests.support.chain import FRAMES, QUICK, get_json, poll, relay_config
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import PATIENCE, eventually

RING_BYTES = 1 << 20
# Ten minutes of writes, a transaction of 100 rows each second, as fast as the server takes them.
# Far beyond the ring and the buffers of a connection: a reader that stops reading is lapped.
SECONDS = 600
ROWS_PER_SECOND = 100
NOTE_BYTES = 480
WRITTEN_BYTES = SECONDS * ROWS_PER_SECOND * NOTE_BYTES
POSTGRES_WRITES = f"""DO $$ BEGIN
    FOR second IN 0 .. {{seconds}} - 1 LOOP
        INSERT INTO items
            SELECT {{first}} + second * {ROWS_PER_SECOND} + n, repeat(md5(n::text), 15)
            FROM generate_series(0, {ROWS_PER_SECOND} - 1) n;
        COMMIT;
    END LOOP;
END $$"""
BINLOG_TABLES = (
    "CREATE TABLE items (id int PRIMARY KEY, note text)",
    "CREATE TABLE numbers (n int PRIMARY KEY)",
    "INSERT INTO numbers VALUES " + ", ".join(f"({n})" for n in range(ROWS_PER_SECOND)),
    f"""CREATE PROCEDURE write_much(first int, seconds int) BEGIN
        DECLARE second int DEFAULT 0;
        WHILE second < seconds DO
            INSERT INTO items
                SELECT first + second * {ROWS_PER_SECOND} + n, repeat(lpad(n, 32, '-'), 15)
                FROM numbers;
            SET second = second + 1;
        END WHILE;
    END""",
)
BINLOG_WRITES = "CALL write_much({first}, {seconds})"
FOLLOW = "/v1/shop/stream?start=oldest&follow=true"
# What a stuck follower has requested: its path and what it accepts.
STUCK = (
    (FOLLOW, FRAMES["Accept"]),
    (FOLLOW, "application/x-ndjson"),
    (FOLLOW, "text/event-stream"),
    (f"{FOLLOW}&where=id%20%3E%200", FRAMES["Accept"]),
)


class Log:
    """How much of the server's log the relay's slot retains, as the server reports."""

    def __init__(self, database: FreshDatabase) -> None:
        self.database = database

    def kept_bytes(self) -> int:
        """WAL from the slot's restart point to now, after the server had a chance to move it."""
        self.database.execute("CHECKPOINT")
        return self._ask("pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)")

    def unconfirmed_bytes(self) -> int:
        """WAL that the relay has not acknowledged."""
        return self._ask("pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)")

    def confirmed(self) -> int:
        return self._ask("confirmed_flush_lsn - '0/0'")

    def _ask(self, expression: str) -> int:
        ((found,),) = self.database.execute(
            f"SELECT ({expression})::bigint FROM pg_replication_slots "
            "WHERE database = current_database()"
        )
        return int(str(found))


@contextlib.asynccontextmanager
async def stuck_readers(url: str) -> AsyncIterator[list[socket.socket]]:
    """Connections that ask for streams without end, are being served, and never read."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        readers = []
        for path, accept in STUCK:
            reader = stack.enter_context(contextlib.closing(socket.socket()))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await loop.sock_connect(reader, (host, int(port)))
            request = f"GET {path} HTTP/1.1\r\nHost: relay\r\nAccept: {accept}\r\n\r\n"
            await loop.sock_sendall(reader, request.encode())
            readers.append(reader)

        async def all_served() -> bool:
            status = await get_json(url, "/v1/status")
            return bool(status["databases"][0]["served"]["readers"] == len(readers))

        await eventually(all_served, 30)
        yield readers


async def write_much(
    database: FreshDatabase, first: int, writes: str = POSTGRES_WRITES, *, seconds: int = SECONDS
) -> None:
    """Commit so many seconds' worth of writes; all of them are far more than the ring holds."""
    await asyncio.to_thread(database.execute, writes.format(first=first, seconds=seconds))


async def is_told(reader: socket.socket) -> None:
    """When the reader reads on, it gets what happened meanwhile, or sees that it was cut off."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    async with asyncio.timeout(60 * PATIENCE):
        while b"reader_overtaken" not in received[-(1 << 17) :]:
            try:
                chunk = await loop.sock_recv(reader, 1 << 16)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                assert not received.endswith(b"0\r\n\r\n"), "the answer has no end"
                break
            received += chunk
    assert received.startswith(b"HTTP/1.1 200")


async def newest_is_served(relay: LocalRelay, database: FreshDatabase, item: int) -> None:
    """Another reader gets what was committed last."""
    await asyncio.to_thread(database.execute, f"INSERT INTO items VALUES ({item}, 'last {item}')")

    async def seen() -> bool:
        served = await poll(relay.url)
        last = f"last {item}".encode()
        return any(last in bytes(view.after or b"") for view in served.frames)

    await eventually(seen, 30)


@pytest.mark.timeout(500)
async def test_a_stuck_consumer_does_not_hold_back_the_databases_log(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    database, log = postgres_database, Log(postgres_database)
    database.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
    config = relay_config(
        tmp_path, {"shop": database.url}, sources=("public.*",), ring_bytes=RING_BYTES
    )
    async with LocalRelay(config, pace=QUICK) as relay:
        await relay.ready(300)
        fetcher = relay.fetchers["shop"]
        await eventually(lambda: fetcher.status.state == "streaming", 60)

        async def settled(limit_bytes: int) -> int:
            """WAL that is retained once it is no more than ``limit_bytes``."""
            retained = 0

            async def is_small() -> bool:
                nonlocal retained
                retained = await asyncio.to_thread(log.kept_bytes)
                return retained <= limit_bytes

            await eventually(is_small, 60, "the server forgets its log", poll_s=0.2)
            return retained

        await write_much(database, 0, seconds=SECONDS // 5)
        alone = await settled(WRITTEN_BYTES // 20)

        async with stuck_readers(relay.url) as readers:
            before = await asyncio.to_thread(log.confirmed)
            tail = fetcher.intake.ring.state.tail if fetcher.intake else 0
            await write_much(database, 1_000_000)
            await newest_is_served(relay, database, 2_000_000)
            beside = await settled(WRITTEN_BYTES // 20)
            assert await asyncio.to_thread(log.confirmed) > before + WRITTEN_BYTES // 2
            assert await asyncio.to_thread(log.unconfirmed_bytes) < WRITTEN_BYTES // 20
            assert fetcher.intake is not None
            laps = (fetcher.intake.ring.state.tail - tail) / RING_BYTES
            assert laps > 10, "the ring turned over many times under the reader"
            assert beside <= alone + WRITTEN_BYTES // 20
            await asyncio.gather(*map(is_told, readers))
        print(
            f"retained alone {alone} bytes, beside stuck readers {beside}; written {WRITTEN_BYTES}"
        )


@pytest.mark.timeout(500)
async def test_a_stuck_consumer_holds_no_binlog_of_mariadb_in_use(
    mariadb_database: FreshDatabase, tmp_path: Path
) -> None:
    await keeps_no_binlog_in_use(mariadb_database, tmp_path)


@pytest.mark.timeout(500)
async def test_a_stuck_consumer_holds_no_binlog_of_mysql_in_use(
    mysql_database: FreshDatabase, tmp_path: Path
) -> None:
    await keeps_no_binlog_in_use(mysql_database, tmp_path)


async def keeps_no_binlog_in_use(database: FreshDatabase, tmp_path: Path) -> None:
    for statement in BINLOG_TABLES:
        database.execute(statement)
    config = relay_config(
        tmp_path, {"shop": database.url}, sources=(f"{database.name}.items",), ring_bytes=RING_BYTES
    )

    def logs() -> list[str]:
        return [str(row[0]) for row in database.execute("SHOW BINARY LOGS")]

    async with LocalRelay(config, pace=QUICK) as relay:
        await relay.ready(300)
        fetcher = relay.fetchers["shop"]
        await eventually(lambda: fetcher.status.state == "streaming", 60)
        await write_much(database, 1, BINLOG_WRITES, seconds=SECONDS // 5)
        # The oldest window that readers ask for is not evicted while they are answered.
        await newest_is_served(relay, database, 900_000)
        async with stuck_readers(relay.url) as readers:
            tail = fetcher.intake.ring.state.tail if fetcher.intake else 0
            before = set(logs())
            await write_much(database, 1_000_000, BINLOG_WRITES)
            database.execute("FLUSH BINARY LOGS")
            await newest_is_served(relay, database, 2_000_000)
            assert fetcher.intake is not None
            assert (fetcher.intake.ring.state.tail - tail) / RING_BYTES > 10

            # The server refuses to purge a file that a reader of its own is still in.
            async def purged() -> bool:
                newest = logs()[-1]
                await asyncio.to_thread(database.execute, f"PURGE BINARY LOGS TO '{newest}'")
                return logs() == [newest] and newest not in before

            await eventually(purged, 30)
            await asyncio.gather(*map(is_told, readers))
