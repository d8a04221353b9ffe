"""Pieces that go to the socket without a copy: whole, in order, and to no reader that has gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from databus.bootstrap.reading.arrow_socket_writer import ArrowSocketWriter
from tests.support.waiting import PATIENCE

PART = os.urandom(3 << 20)
COUNT = 4


class Answering:
    """A server whose one answer is written in both ways; ``error`` is what ended it."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self.port = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        writer = ArrowSocketWriter(request)
        try:
            for _ in range(COUNT):
                await writer.write([PART, b"between"])
                await response.write(b"small")
        except ConnectionError as error:
            self.error = error
            return response
        finally:
            writer.close()
            self.ended.set()
        await response.write_eof()
        return response


@pytest.fixture
async def answering() -> AsyncIterator[Answering]:
    handler = Answering()
    app = web.Application()
    app.router.add_get("/", handler.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    handler.port = runner.addresses[0][1]
    yield handler
    await runner.cleanup()


async def ask(port: int, version: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(f"GET / HTTP/{version}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def unchunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    return body


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_reader_gets_all_parts_in_order(answering: Answering, version: str) -> None:
    reader, writer = await ask(answering.port, version)
    body = await (reader.read(-1) if version == "1.0" else unchunked(reader))
    writer.close()
    assert body == b"first" + (PART + b"between" + b"small") * COUNT
    assert answering.error is None


async def test_an_answer_to_a_reader_that_has_gone_ends(answering: Answering) -> None:
    reader, writer = await ask(answering.port, "1.1")
    await reader.readexactly(1 << 20)
    writer.transport.abort()
    await asyncio.wait_for(answering.ended.wait(), 60 * PATIENCE)
    assert isinstance(answering.error, ConnectionError)
