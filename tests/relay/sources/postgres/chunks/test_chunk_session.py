"""Sessions with PostgreSQL: closed under a read of theirs, or with a server that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import SourceUnavailable
from databus.relay.sources.postgres.chunks.chunk_session import SessionLoop
from databus.relay.sources.postgres.protocol import replication_connection
from databus.relay.sources.postgres.protocol.postgres_settings import read_settings
from databus.relay.sources.postgres.protocol.replication_connection import ReplicationConnection
from tests.support.waiting import eventually

READY = b"Z\0\0\0\x05I"
# Then the answer to SHOW search_path.
SIGNED_IN = b"R\0\0\0\x08\0\0\0\0" + READY
SIGNED_IN += b"D\0\0\0\x1d\0\1\0\0\0\x13pg_catalog, pg_temp" + READY


async def test_a_read_that_a_close_ends_gets_an_error_and_is_not_cancelled() -> None:
    sessions, begun = SessionLoop(), threading.Event()

    async def read() -> None:
        begun.set()
        await asyncio.Event().wait()

    reading = asyncio.create_task(sessions.run(read()))
    await eventually(begun.is_set)
    sessions.close()
    with pytest.raises(SourceUnavailable, match="closed"):
        await reading


async def test_a_reader_that_gives_up_cancels_its_read() -> None:
    sessions, begun, ended = SessionLoop(), threading.Event(), threading.Event()

    async def read() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    reading = asyncio.create_task(sessions.run(read()))
    await eventually(begun.is_set)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await eventually(ended.is_set)
    sessions.close()


async def test_after_a_close_no_thread_restarts() -> None:
    sessions, threads = SessionLoop(), threading.active_count()
    sessions.close()
    with pytest.raises(SourceUnavailable, match="closed"):
        await sessions.run(asyncio.sleep(0))
    assert threading.active_count() == threads


async def test_a_server_that_acknowledges_nothing_any_more_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replication_connection, "_GONE_MS", 200)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        url = f"postgresql://u@127.0.0.1:{server.getsockname()[1]}/shop?sslmode=disable"
        session = ReplicationConnection(
            read_settings(DatabaseConfig.model_validate({"name": "shop", "url": url}))
        )
        connecting = asyncio.create_task(session.connect())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer, _ = await asyncio.to_thread(server.accept)
        with contextlib.closing(peer):
            peer.sendall(SIGNED_IN)
            await connecting
            # What it has no room for is acknowledged as little as what it never gets.
            sent = session._transport
            while not (sent.get_write_buffer_size() or sent.is_closing()):
                session.send_status(1, 1)
            with pytest.raises(SourceUnavailable, match="timed out"):
                await session.receive(60.0)
        session.close()
