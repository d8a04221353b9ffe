"""A consumer that is stuck costs the database nothing: its log is forgotten as without it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from databus.relay.relay import LocalRelay
from tests.support.chain import QUICK, poll, relay_config
from tests.support.fixtures import FreshDatabase
from tests.support.waiting import eventually

RING_BYTES = 1 << 20
# Ten minutes' worth of writes at this rate, as fast as the server takes them.  Far beyond the
# ring and the buffers of a connection: a reader that stands still is lapped.
ROWS_PER_SECOND = 40
ROUNDS = 12
ROWS = 600 * ROWS_PER_SECOND // ROUNDS
WRITTEN_BYTES = ROUNDS * ROWS * 1_000
POSTGRES_ROWS = (
    "INSERT INTO items SELECT n, repeat(md5(n::text), 30) FROM generate_series({first}, {last}) n"
)
MARIADB_ROWS = "INSERT INTO items SELECT seq, repeat(md5(seq), 30) FROM seq_{first}_to_{last}"


class Log:
    """The server's word on how much of its log the relay's slot keeps."""

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
async def stuck_reader(url: str, path: str) -> AsyncIterator[socket.socket]:
    """A connection that asks for a stream without end and never reads of it."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(reader, (host, int(port)))
        request = f"GET {path} HTTP/1.1\r\nHost: relay\r\nAccept: application/vnd.databus.frames"
        await loop.sock_sendall(reader, f"{request}\r\n\r\n".encode())
        yield reader
    finally:
        reader.close()


async def write_much(database: FreshDatabase, first: int, insert: str = POSTGRES_ROWS) -> None:
    """Commit far more than the ring holds."""
    for number in range(ROUNDS):
        start = first + number * ROWS
        statement = insert.format(first=start, last=start + ROWS - 1)
        await asyncio.to_thread(database.execute, statement)


async def is_told(reader: socket.socket) -> None:
    """When the reader reads on, it is told what happened meanwhile, or sees that it was cut off."""
    loop = asyncio.get_running_loop()
    received = b""
    async with asyncio.timeout(30):
        while b"reader_overtaken" not in received[-4096:]:
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
    await asyncio.to_thread(database.execute, f"INSERT INTO items VALUES ({item}, 'last')")

    async def seen() -> bool:
        served = await poll(relay.url)
        return any(b"last" in bytes(view.after or b"") for view in served.frames)

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
            """WAL that is kept once it is no more than ``limit_bytes``."""
            kept = 0

            async def is_small() -> bool:
                nonlocal kept
                kept = await asyncio.to_thread(log.kept_bytes)
                return kept <= limit_bytes

            await eventually(is_small, 60, "the server forgets its log", poll_s=0.2)
            return kept

        await write_much(database, 0)
        alone = await settled(WRITTEN_BYTES // 20)

        async with stuck_reader(relay.url, "/v1/shop/stream?start=oldest&follow=true") as reader:
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
            await is_told(reader)
        print(f"kept alone {alone} bytes, beside a stuck reader {beside}; written {WRITTEN_BYTES}")


@pytest.mark.timeout(500)
async def test_a_stuck_consumer_keeps_no_binlog_in_use(
    mariadb_database: FreshDatabase, tmp_path: Path
) -> None:
    database = mariadb_database
    database.execute("CREATE TABLE items (id int PRIMARY KEY, note text)")
    config = relay_config(
        tmp_path, {"shop": database.url}, sources=(f"{database.name}.*",), ring_bytes=RING_BYTES
    )

    def logs() -> list[str]:
        return [str(row[0]) for row in database.execute("SHOW BINARY LOGS")]

    async with LocalRelay(config, pace=QUICK) as relay:
        await relay.ready(300)
        fetcher = relay.fetchers["shop"]
        await eventually(lambda: fetcher.status.state == "streaming", 60)
        await write_much(database, 1, MARIADB_ROWS)
        async with stuck_reader(relay.url, "/v1/shop/stream?start=oldest&follow=true") as reader:
            tail = fetcher.intake.ring.state.tail if fetcher.intake else 0
            before = set(logs())
            await write_much(database, 1_000_000, MARIADB_ROWS)
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
            await is_told(reader)
