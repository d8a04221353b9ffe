"""Thousands of requests that no client of ours sends, over real sockets to real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import resource
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from databus.bootstrap.http.bootstrap_server import serve_bootstrap
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.manifest import Store
from databus.common.config import BootstrapConfig
from databus.common.frame.frame_format import Op
from databus.common.http import http_connections
from databus.common.http.http_application import serve
from databus.common.http.listening_socket import listening_socket
from databus.relay.http.relay_server import make_relay_app
from databus.relay.processes.wakeup import make_wakeup
from tests.bootstrap.model import CLOCK, START
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually, within

ROUNDS = 1500
PATHS = (
    "/",
    "/v1/databases",
    "/v1/status",
    "/v1/shop/sources",
    "/v1/shop/register",
    "/v1/shop/stream",
    "/v1/shop/dumps",
    "/v1/shop/dumps/1",
    "/v1/shop/chunks",
    "/v1/shop/release",
    "/v1/no/stream",
    "/v1/shop/bootstrap",
    "/v1/shop/changes",
    "/v1/shop/snapshot",
    "/v1/shop/startSCN",
    "/healthz",
    "/metrics",
    "/v1/shop/tables",
    "//",
    "/%",
    "/%ff",
    "/v1/%00/stream",
    "/v1/shop/dumps/" + "x" * 4000,
)
METHODS = (
    "GET",
    "POST",
    "PATCH",
    "DELETE",
    "PUT",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "FOO",
    "get",
    "\x01",
)
NAMES = (
    "sources",
    "scn",
    "checkpoint",
    "where",
    "columns",
    "partition",
    "ops",
    "max_bytes",
    "wait_ms",
    "follow",
    "start",
    "start_time",
    "since",
    "until",
    "mode",
    "format",
    "x",
)
VALUES = (
    "",
    "-1",
    "1",
    "9" * 400,
    "[" * 2000,
    "(" * 3000,
    "*",
    "shop.*",
    "%ff",
    "%00",
    "mod:0:0",
    "mod:4:0",
    "true",
    "1e999",
    "id = 1",
    "NOT " * 900 + "1 = 1",
    "\xff",
    "{}",
    "oldest",
)
HEADERS = (
    b"Accept: \xff",
    b"Accept: */*;q=x",
    b"Accept: application/json;q=1e999",
    b"Accept-Encoding: \xff",
    b"Content-Type: application/json; charset=utf-99",
    b"Content-Type: application/json",
    b"Content-Type: text/plain",
    b"Databus-Client: \xff\xfe",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999",
    b"Content-Length: x",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: foo",
    b"Content-Encoding: gzip",
    b"Content-Encoding: br",
    b"Expect: 100-continue",
    b"Expect: x",
    b"Upgrade: websocket",
    b"Connection: upgrade",
    b"Origin: null",
    b"Host: \xff",
    b"Host: evil.example",
    b"Host:",
    b"Range: bytes=0-1",
    b"Cookie: \xff=\xff",
    b"X: " + b"y" * 9000,
    b"no colon",
    b": empty",
    b"\xff: x",
    b"If-None-Match: *",
    b"Content-Type: \xff",
)
BODIES = (
    b"",
    b"{}",
    b"[" * 20_000,
    b"\xff\xfe",
    b"{" * 5000,
    b'{"sources": ["*"]}',
    b"null",
    b"1e999",
    b'{"sources": ' + b"[" * 20_000,
    b'"' + b"\\ud800" * 9 + b'"',
    b"x" * 70_000,
    b"5\r\nab",
)


def request(rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n"
    query = "&".join(f"{rng.choice(NAMES)}={rng.choice(VALUES)}" for _ in range(rng.randrange(4)))
    target = rng.choice(PATHS) + (f"?{query}" if query else "")
    body = rng.choice(BODIES)
    version = rng.choice(("1.1", "1.1", "1.1", "1.0", "9"))
    lines = [f"{rng.choice(METHODS)} {target} HTTP/{version}".encode("latin-1")]
    if rng.random() < 0.9:
        lines.append(b"Host: 127.0.0.1")
    lines += rng.sample(HEADERS, rng.randrange(4))
    if rng.random() < 0.8:
        lines.append(b"Content-Length: %d" % len(body))
    lines.append(b"Connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def answer_to(port: int, sent: bytes, patience_s: float = 5.0) -> bytes:
    """The head and some of the body; an answer that is followed has no end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        writer.write(sent)
        async with asyncio.timeout(patience_s):
            while len(found) < 64_000:
                part = await reader.read(64_000)
                if not part:
                    break
                found += part
                if b"\r\n\r\n" in found and b"problem+json" not in found:
                    break
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.close()
    return found


def fault(found: bytes) -> str:
    """What is wrong with an answer."""
    if not found:
        return ""  # the request was not whole, and the connection has ended
    head, _, body = found.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status >= 500 and status != 503:
        return f"status {status}"
    if status < 400:
        return ""
    if b"application/problem+json" not in head:
        return f"status {status} without a problem: {head[:200]!r}"
    if b"chunked" in head.lower() or not body:
        return ""
    document = json.loads(body)
    return "" if document["status"] == status and document["code"] else f"a problem of {document}"


@contextlib.asynccontextmanager
async def a_bootstrap(folder: Path) -> AsyncIterator[int]:
    store = Store(folder / "shop")
    store.create()
    log = HotLog(store.folder / "log")
    log.bind("shop", CLOCK, START)
    log.close()
    config = BootstrapConfig(data_dir=folder, listen="127.0.0.1:0", databases=("shop",))
    listener, stop = listening_socket(config.listen), asyncio.Event()
    serving = asyncio.create_task(serve_bootstrap(config, listener, stop))
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        await serving


Server = Callable[[Path], contextlib.AbstractAsyncContextManager[int]]


@contextlib.asynccontextmanager
async def a_relay(folder: Path) -> AsyncIterator[int]:
    live = LiveRelay(folder)
    async with live.served():
        yield int(live.url.rpartition(":")[2])
    live.close()


@pytest.mark.slow
@pytest.mark.parametrize("server", [a_relay, a_bootstrap])
@pytest.mark.parametrize("seed", [20261123])
async def test_no_request_is_a_fault_of_the_server(
    server: Server, seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    caplog.set_level(logging.INFO)
    faults = []
    async with server(tmp_path) as port:
        for _ in range(ROUNDS // 50):
            sent = [request(rng) for _ in range(50)]
            for one, found in zip(
                sent,
                await asyncio.gather(*(answer_to(port, one, 0.5) for one in sent)),
                strict=True,
            ):
                if wrong := fault(found):
                    faults.append((wrong, one[:300]))
        assert faults == []
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://127.0.0.1:{port}/healthz") as one,
        ):
            assert one.status == 200
    for record in caplog.records:
        assert record.exc_info is None, record.getMessage()
        assert "\n" not in record.getMessage()
        assert record.levelno < logging.ERROR, record.getMessage()


async def test_what_is_no_http_is_a_problem_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with a_relay(tmp_path) as port:
        for sent in (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"):
            caplog.clear()
            found = await answer_to(port, sent)
            head, _, body = found.partition(b"\r\n\r\n")
            assert head.split()[1] == b"400" and b"application/problem+json" in head
            assert json.loads(body)["code"] == "bad_request"
            (record,) = caplog.records
            assert record.exc_info is None and record.getMessage().startswith(
                "not an HTTP request from"
            )


async def test_a_silent_connection_is_closed_and_too_many_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("databus.common.http.http_application.SILENCE_S", 0.3)
    live = LiveRelay(tmp_path)
    listener, stop, started = listening_socket("127.0.0.1:0"), asyncio.Event(), asyncio.Event()
    port = listener.getsockname()[1]
    app = make_relay_app(live.config, wakeups={"shop": make_wakeup()})
    serving = asyncio.create_task(
        serve(app, listener, stop, started=started.set, max_connections=3)
    )
    await started.wait()
    silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    silent[0][1].write(b"GET /healthz HTTP/1.1\r\nHo")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    refused = await reader.read()
    assert refused.startswith(
        b"HTTP/1.1 503"
    ) and b'"code":"server_unavailable"' in refused.replace(b" ", b"")
    writer.close()
    for reader, writer in silent:
        async with within(10):
            assert await reader.read() == b""
        writer.close()
    assert b"200 OK" in await answer_to(port, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
    stop.set()
    await serving
    live.close()


@pytest.mark.parametrize("filtered", ["", "&ops=c"], ids=["from the ring", "filtered"])
async def test_a_reader_that_takes_no_byte_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filtered: str
) -> None:
    monkeypatch.setattr(http_connections, "STALLED_S", 1.0)
    live = LiveRelay(tmp_path, ring_bytes=32 << 20)
    for scn in range(1, 301):
        live.append(window(scn, [(Op.INSERT, ORDERS, 1)], text="y" * 60_000))
    async with live.served():
        loop = asyncio.get_running_loop()
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        reader.setblocking(False)
        await loop.sock_connect(reader, ("127.0.0.1", int(live.url.rpartition(":")[2])))
        path = f"/v1/shop/stream?checkpoint=0:0&follow=true{filtered}"
        await loop.sock_sendall(reader, f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())

        def is_let_go() -> bool:
            try:
                reader.send(b"x")
            except OSError:
                return True
            return False

        await eventually(is_let_go, 30, "the server has closed it", poll_s=0.5)
        reader.close()
    live.close()


async def test_a_body_that_does_not_come_is_answered_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("databus.common.http.http_application.BODY_S", 0.3)
    async with a_relay(tmp_path) as port:
        head = b"POST /v1/shop/dumps HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        found = await answer_to(port, head + b"Content-Type: application/json\r\n\r\n{", 10.0)
    assert found.startswith(b"HTTP/1.1 408")
    assert b"application/problem+json" in found


async def test_at_the_descriptor_limit_the_log_names_it_once_and_open_connections_are_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "_RETRY_S", 0.01)
    async with a_relay(tmp_path) as port:
        url = f"http://127.0.0.1:{port}/healthz"
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as http:
            async with http.get(url) as one:
                await one.read()
            waiting = socket.socket()
            waiting.setblocking(False)
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = waiting.fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
            filler = []
            try:
                with contextlib.suppress(OSError):
                    while True:
                        filler.append(socket.socket())
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(("127.0.0.1", port))
                await eventually(lambda: "no connection can be accepted" in caplog.text)
                for _ in range(5):
                    async with http.get(url) as one:
                        assert one.status == 200, "an open connection is served"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for one_socket in filler:
                    one_socket.close()
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(waiting, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
            async with within(10):
                assert b"200 OK" in await loop.sock_recv(waiting, 1 << 16)
            waiting.close()
    assert caplog.text.count("no connection can be accepted") == 1
