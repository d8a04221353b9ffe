"""Servers that our clients ask, and that answer what no server of ours does."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from databus.bootstrap.log.relay_api import RelayApi
from databus.bootstrap.verify.table_copy import HttpPeer
from databus.cli.console import http_client
from databus.client.pulling.transport import Transport
from databus.client.tables.table_reader import TableAddress, TableReader
from databus.common.errors import (
    DatabusError,
    FormatError,
    ServerUnavailable,
    from_answer,
    from_problem,
)
from databus.common.http import peer_answers
from databus.common.http.peer_calls import CallAnswer
from databus.common.http.peer_client import PeerAnswer, PeerClient
from databus.relay.sources.chained.parent_relay import Parent

Ask = Callable[[str], Awaitable[Any]]


async def _client(url: str) -> Any:
    async with Transport() as transport:
        return await transport.get_json(url, "/v1/shop/register", {})


async def _log_writer(url: str) -> Any:
    async with RelayApi([url]) as relays:
        return await relays.sources("shop")


async def _verify(url: str) -> Any:
    async with HttpPeer(url, "shop") as peer:
        return await peer.document("GET", "sources")


async def _child(url: str) -> Any:
    async with PeerClient() as http:
        return await Parent(url, "shop", silence_s=5.0).range(http)


async def _child_forwards(url: str) -> Any:
    async with PeerClient() as http:
        return await Parent(url, "shop", silence_s=5.0).forward(http, "GET", "/dumps", b"")


async def _command(url: str) -> Any:
    return await asyncio.to_thread(http_client.call, f"{url}/v1/shop/dumps")


async def _log_writer_lists(url: str) -> Any:
    async with RelayApi([url]) as relays:
        return await relays.databases()


async def _child_registers(url: str) -> Any:
    async with PeerClient() as http:
        return await Parent(url, "shop", silence_s=5.0).register(http, {})


async def _client_registers(url: str) -> Any:
    async with Transport() as transport:
        return await transport.register(url, "shop", ())


async def _spark_registers(url: str) -> Any:
    reader = TableReader(TableAddress("shop", "shop.orders", (url,), give_up_s=1.0))
    return await asyncio.to_thread(reader.schema_of, 7)


async def _spark(url: str) -> Any:
    reader = TableReader(TableAddress("shop", "shop.orders", (url,), give_up_s=1.0))
    return await asyncio.to_thread(reader.newest)


READERS: list[Ask] = [_client, _log_writer, _verify, _child, _command, _spark]
FORMED: list[Ask] = [
    _client_registers, _log_writer, _log_writer_lists, _verify, _child_registers, _spark,
    _spark_registers,
]  # fmt: skip


@asynccontextmanager
async def answering(head: str, body: bytes, *, endless: bool = False) -> AsyncIterator[str]:
    """A server that gives this answer to each request; counts in ``requests`` by path."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode() + body)
            while endless:
                writer.write(body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


JSON = "200 OK\r\nContent-Type: application/json"


@pytest.mark.parametrize("ask", [*READERS, _child_forwards])
async def test_an_answer_without_end_fills_no_memory(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 1 << 20
    for function in (PeerAnswer.body, CallAnswer.body):
        monkeypatch.setattr(function, "__defaults__", (limit,))
    for module in (
        "databus.relay.sources.chained.parent_relay",
        "databus.bootstrap.verify.table_copy",
    ):
        monkeypatch.setattr(f"{module}.MAX_BODY_BYTES", limit)
    async with answering(JSON, b'["' + b"x" * 65_536, endless=True) as url:
        tracemalloc.start()
        try:
            with pytest.raises(ServerUnavailable, match="more than 1048576 bytes"):
                await ask(url)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("ask", READERS)
async def test_a_content_coding_that_was_not_requested_is_refused(ask: Ask) -> None:
    packed = gzip.compress(b'{"sources": []}')
    async with answering(f"{JSON}\r\nContent-Encoding: gzip", packed) as url:
        with pytest.raises(ServerUnavailable, match="Content-Encoding 'gzip'"):
            await ask(url)


@pytest.mark.parametrize("ask", [*READERS, _child_forwards])
async def test_a_redirect_is_not_followed(ask: Ask) -> None:
    async with answering(JSON, b'{"secret": 1}') as elsewhere:
        head = f"302 Found\r\nLocation: {elsewhere}/v1/databases"
        async with answering(head, b"") as url:
            with pytest.raises(ServerUnavailable, match="redirect"):
                await ask(url)


@pytest.mark.parametrize("ask", READERS)
async def test_deep_json_is_one_clear_error(ask: Ask) -> None:
    async with answering(JSON, b"[" * 200_000) as url:
        with pytest.raises((ServerUnavailable, FormatError), match="nested too deep"):
            await ask(url)


@pytest.mark.parametrize("ask", READERS)
async def test_json_of_many_small_values_is_not_unpacked(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_answers, "MAX_JSON_MARKS", 100_000)
    async with answering(JSON, b"[" + b"[]," * 3_000_000 + b"0]") as url:
        tracemalloc.start()
        try:
            with pytest.raises((ServerUnavailable, FormatError), match="it has 6000001 of"):
                await ask(url)
            assert tracemalloc.get_traced_memory()[1] < 128 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("ask", FORMED)
@pytest.mark.parametrize("body", [b"[]", b"7", b"null", b'{"clock": [], "schemas": 7, "max": 8}'])
async def test_json_of_another_form_is_one_clear_error(ask: Ask, body: bytes) -> None:
    async with answering(JSON, body) as url:
        if body.startswith(b"{") and ask is _verify:
            assert await ask(url)  # An object: the caller takes from it what is needed.
            return
        with pytest.raises(DatabusError, match=r"127\.0\.0\.1"):
            await ask(url)


@pytest.mark.parametrize("ask", READERS)
@pytest.mark.parametrize("message", ["no upstream", 7, None, ["x"], {"a": 1}])
async def test_a_proxys_error_is_not_taken_for_ours(ask: Ask, message: object) -> None:
    """Its ``message`` is an argument's name, and its ``code`` means nothing to us."""
    body = json.dumps({"code": 502, "message": message, "self": 1}).encode()
    async with answering("502 Bad Gateway\r\nContent-Type: application/json", body) as url:
        with pytest.raises(ServerUnavailable) as caught:
            await ask(url)
        assert caught.value.retry


def test_a_problem_with_any_fields_is_an_error() -> None:
    problem = {"code": "scn_too_old", "detail": "gone", "message": 1, "self": 2, "details": 3}
    error = from_problem(problem)
    assert (error.code, error.message) == ("scn_too_old", "gone")
    assert error.details == {"message": 1, "self": 2, "details": 3}
    for body in (b"[" * 200_000, b'{"code": {}}', b"\xff", b"7", b'{"code": ["scn_too_old"]}'):
        assert isinstance(from_answer("http://a", 400, body), DatabusError)
