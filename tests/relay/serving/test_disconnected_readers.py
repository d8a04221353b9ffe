"""Readers that go away between their question and the head of the answer."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from databus.common.frame.frame_format import Op
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually


async def test_a_reader_that_goes_before_the_head_leaves_neither_error_nor_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = LiveRelay(tmp_path)
    for scn in range(1, 40):
        live.append(window(scn, [(Op.INSERT, ORDERS, scn)], text="x" * 4000))
    prepare, gone = web.StreamResponse.prepare, asyncio.Event()

    async def prepare_late(response: web.StreamResponse, request: web.BaseRequest) -> object:
        if "/stream" in request.path and not gone.is_set():
            assert request.transport is not None
            request.transport.abort()
            gone.set()
            await asyncio.sleep(0)
        return await prepare(response, request)

    monkeypatch.setattr(web.StreamResponse, "prepare", prepare_late)
    caplog.set_level(logging.ERROR)
    async with live.served(), aiohttp.ClientSession() as http:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(live.url.split(":")[2]))
        writer.write(b"GET /v1/shop/stream?start=oldest HTTP/1.1\r\nHost: here\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        assert gone.is_set()

        async def has_gone() -> bool:
            async with http.get(f"{live.url}/v1/status") as answer:
                served = (await answer.json())["databases"][0]["served"]
            return bool(served["readers"] == 0)

        await eventually(has_gone, 60)
        async with http.get(f"{live.url}/v1/shop/stream?start=oldest") as answer:
            assert len(await answer.read()) > 39 * 4000
    live.close()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
