"""Streams over TLS: the same bytes, and never by the path that writes to the socket itself."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import warnings
from pathlib import Path

import aiohttp
import pytest

from databus.client import DatabusClient
from databus.common.errors import ServerUnavailable
from databus.common.frame.frame_format import Op
from databus.common.http.peer_client import PeerClient
from databus.relay.serving import stream_sender
from databus.relay.serving.socket_writer import SocketWriter
from tests.support.certificates import Authority
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.relay_http import FRAMES, Follower
from tests.support.waiting import PATIENCE

PLAIN = FRAMES | {"Accept-Encoding": "identity"}
EVENTS = 2000


class Forbidden:
    """Stands for ``SocketWriter`` where it must not be used."""

    def __init__(self, *_: object, **__: object) -> None:
        raise AssertionError("the answer goes past TLS")


@pytest.fixture
def relay(tmp_path: Path) -> LiveRelay:
    made = LiveRelay(tmp_path / "relay", ring_bytes=8 << 20)
    events = [(Op.INSERT, ORDERS, number) for number in range(EVENTS)]
    for scn in range(1, 11):
        made.append(window(scn, events, text="x" * 50))
    return made


def context_of(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca))


async def test_a_large_answer_has_the_bytes_that_it_has_without_tls(
    relay: LiveRelay, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "ca")
    made: list[SocketWriter] = []

    class Counted(SocketWriter):
        def __init__(self, request: aiohttp.web.Request, *, spans: bool) -> None:
            super().__init__(request, spans=spans)
            made.append(self)

    monkeypatch.setattr(stream_sender, "SocketWriter", Counted)
    async with relay.served(), http.get(f"{relay.url}/v1/shop/stream", headers=PLAIN) as answer:
        plain = await answer.read()
    assert len(plain) > 1 << 20
    assert made
    monkeypatch.setattr(stream_sender, "SocketWriter", Forbidden)
    async with (
        relay.served(authority.server_tls()),
        http.get(f"{relay.url}/v1/shop/stream", headers=PLAIN, ssl=context_of(authority)) as answer,
    ):
        assert await answer.read() == plain
    relay.close()


async def test_a_follower_gets_what_is_committed_and_a_slow_one_holds_nothing_back(
    relay: LiveRelay, tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "ca")
    monkeypatch.setattr(stream_sender, "SocketWriter", Forbidden)
    query = {"follow": "true"}
    async with relay.served(authority.server_tls()):
        url, context = f"{relay.url}/v1/shop/stream", context_of(authority)
        async with (
            http.get(url, params=query, headers=PLAIN, ssl=context),  # it is not read
            http.get(url, params=query | {"start": "latest"}, headers=PLAIN, ssl=context) as answer,
        ):
            follower = Follower(answer)
            assert await follower.next() is not None  # a heartbeat: the start is fixed
            for scn in range(11, 14):
                relay.append(window(scn, [(Op.INSERT, ORDERS, scn)]))
                frame = await follower.next_but(Op.HEARTBEAT)
                assert frame is not None
                assert (frame.op, frame.scn) == (Op.INSERT, scn)
                end = await follower.next_but(Op.HEARTBEAT)
                assert end is not None
                assert end.op == Op.END_OF_WINDOW
    relay.close()


async def test_bytes_that_are_not_tls_get_no_answer_and_a_silent_peer_holds_nobody_up(
    relay: LiveRelay, tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    authority = Authority(tmp_path / "ca")
    async with relay.served(authority.server_tls()):
        host, port = relay.url.removeprefix("https://").split(":")
        silent, quiet_writer = await asyncio.open_connection(host, int(port))
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        url = f"{relay.url}/healthz"
        async with http.get(url, ssl=context_of(authority)) as answer:
            assert answer.status == 200
        assert not silent.at_eof()
        quiet_writer.close()
    relay.close()


async def test_a_client_accepts_no_certificate_of_another_authority(
    relay: LiveRelay, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    stranger = Authority(tmp_path / "other", "another authority")
    async with relay.served(authority.server_tls()):
        client = DatabusClient(
            database="shop",
            relays=[relay.url],
            start="oldest",
            ca=str(stranger.ca),
            max_pull_failures=1,
            reconnect_s=0.01,
        )
        with pytest.raises(ServerUnavailable, match="certificate verify failed"):
            async for _ in client.awindows():
                pytest.fail("a window came")
    relay.close()


async def test_mutual_tls_refuses_a_client_without_a_certificate(
    relay: LiveRelay, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "ca")
    stranger = Authority(tmp_path / "other", "another authority")
    forged = stranger.issue("app", is_client=True)
    right = authority.issue("app", is_client=True)

    async def first_scn(**given: str) -> int:
        client = DatabusClient(
            database="shop",
            relays=[relay.url],
            start="oldest",
            ca=str(authority.ca),
            max_pull_failures=1,
            reconnect_s=0.01,
            **given,
        )
        windows = client.awindows()
        try:
            return (await anext(windows)).scn
        finally:
            await windows.aclose()

    async with relay.served(authority.server_tls(clients="required")):
        assert await first_scn(certificate=str(right.certificate), key=str(right.key)) == 1
        with pytest.raises(ServerUnavailable):
            await first_scn()
        with pytest.raises(ServerUnavailable):
            await first_scn(certificate=str(forged.certificate), key=str(forged.key))
    relay.close()


def test_a_client_that_leaves_an_answer_does_not_wait_for_a_silent_server(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    tls = authority.server_tls()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    left = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True) as encrypted:
            encrypted.recv(1 << 16)
            encrypted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbegun")
            left.wait(30 * PATIENCE)  # it reads nothing more, not even the end of TLS

    async def leave(url: str) -> None:
        async with (
            PeerClient(credentials=authority.credentials()) as http,
            await http.request("GET", url, "/", silence_s=10) as answer,
        ):
            assert await answer.read() == b"begun"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        gc.collect()
        with warnings.catch_warnings(record=True) as left_open:
            warnings.simplefilter("always")
            loop = asyncio.new_event_loop()
            loop.run_until_complete(leave(f"https://127.0.0.1:{listener.getsockname()[1]}"))
            loop.close()
            gc.collect()
        left.set()
        thread.join()
    assert [str(one.message) for one in left_open] == []
