"""The sessions that read PostgreSQL's chunks, when the source is closed under a read."""

from __future__ import annotations

import asyncio
import threading

import pytest

from databus.common.errors import SourceUnavailable
from databus.relay.sources.postgres.chunk_session import SessionLoop
from tests.support.waiting import eventually


async def test_a_read_that_a_close_cuts_off_is_told_of_it_and_is_not_cancelled() -> None:
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


async def test_after_a_close_no_thread_begins_again() -> None:
    sessions, threads = SessionLoop(), threading.active_count()
    sessions.close()
    with pytest.raises(SourceUnavailable, match="closed"):
        await sessions.run(asyncio.sleep(0))
    assert threading.active_count() == threads
