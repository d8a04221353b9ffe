"""Accepts HTTP connections, within bounds, and answers bytes that are not HTTP.

aiohttp and the event loops accept without a bound, and at the descriptor limit they spin or drop
connections in silence.  What is here: how many connections there may be, how long a silent one
may stay, and the answer to a request that aiohttp refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from databus.common.access.listener_tls import ServerTls
from databus.common.errors import (
    BadRequest,
    DatabusError,
    InternalError,
    ServerUnavailable,
)

SILENCE_S = 60.0
"""How long a connection may take for the headers of a request, and may idle before it."""
STALLED_S = 900.0
"""How long a reader may accept no byte before its connection ends.  The client library reads
while its buffer has room, and resumes at its position."""
MAX_CONNECTIONS = 20_000
HANDSHAKE_S = 10.0
"""How long a TLS handshake may take; a connection in one counts among the open ones."""
TLS_END_S = 1.0
"""How long a closed TLS connection waits for the other side's end."""
SPARE_DESCRIPTORS = 64
"""Of the limit, for other files than connections."""
_ACCEPTED_AT_ONCE = 100
_LOG_EVERY_S = 60.0
_RETRY_S = 0.2
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: application/problem+json\r\nContent-Length: %d\r\n\r\n%b"
)
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = logging.getLogger("databus.http")

Respond = Callable[[DatabusError], web.Response]


class Acceptor:
    """Accepts connections at a listening socket and hands them to a protocol.

    Invariants:
        I1. There are at most ``most`` connections; a further one gets a 503, without TLS, and is
            closed.
        I2. At the descriptor limit it waits ``_RETRY_S`` before it tries again, and logs that
            once per ``_LOG_EVERY_S``.
        I3. With ``tls``, the server sees no byte of a connection before its handshake.

    Owner: one event loop.  It closes the listener.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: web.Server,
        refusal: bytes,
        most: int,
        tls: ServerTls | None = None,
    ) -> None:
        self._listener = listener
        self._server = server
        self._refusal = _REFUSAL % (len(refusal), refusal)
        self._most = most
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s: dict[str, float] = {}
        self._listen()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for task in self._connecting:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._pause(error)
                return
            if len(self._server.connections) + len(self._connecting) >= self._most:
                self._refuse(connection)
                continue
            with contextlib.suppress(OSError):
                connection.setblocking(False)
                if connection.family != socket.AF_UNIX:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    # For all writers to the socket: aiohttp, and threads of ours.
                    connection.setsockopt(
                        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALLED_S * 1000)
                    )
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._server, connection)
            else:
                await self._loop.connect_accepted_socket(
                    self._server,
                    connection,
                    ssl=self._tls.context(),
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=TLS_END_S,
                )
        except OSError as error:
            connection.close()
            if error.errno in _NO_ROOM:
                self._warn(f"a connection was dropped: {error.strerror}")
            elif self._tls is not None:
                self._warn(f"a TLS handshake failed: {str(error) or type(error).__name__}")

    def _refuse(self, connection: socket.socket) -> None:
        self._warn(f"there are {self._most} connections, the most allowed; more are refused")
        with contextlib.suppress(OSError), connection:
            connection.setblocking(False)
            if self._tls is None:
                connection.send(self._refusal)

    def _pause(self, error: OSError) -> None:
        """Waiting connections stay in the kernel's queue, and open ones are still served."""
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(_RETRY_S, self._listen)
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._warn(
            f"no connection can be accepted: {error.strerror} (the limit is {limit} descriptors, "
            f"and {len(self._server.connections)} connections are open); raise it with ulimit -n"
        )

    def _warn(self, what: str) -> None:
        now_s, kind = time.monotonic(), what[:20]
        if now_s >= self._logged_s.get(kind, -_LOG_EVERY_S) + _LOG_EVERY_S:
            self._logged_s[kind] = now_s
            _log.warning("%s", what)


def most_connections(configured: int = MAX_CONNECTIONS) -> int:
    """The configured number, but no more than the descriptor limit minus a few for other files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(configured, limit - SPARE_DESCRIPTORS))


def bounded_server(server: web.Server, respond: Respond) -> web.Server:
    """``server``, whose connections are ``_Connection``s; only this uses aiohttp's internals."""
    server.__class__ = _Server
    assert isinstance(server, _Server)
    server.respond = respond
    return server


def lost(request: web.BaseRequest) -> asyncio.Future[None]:
    """Done when the connection of a request is gone; a handler is not cancelled then."""
    connection = request.protocol
    assert isinstance(connection, _Connection)
    return connection.lost


class _Server(web.Server):
    respond: Respond

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(RequestHandler):
    """aiohttp's, but a request that it refuses gives one log line and a problem document."""

    __slots__ = ("_respond", "lost")

    def __init__(self, manager: _Server, **settings: Any) -> None:
        super().__init__(manager, **settings)
        self._respond = manager.respond
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_lost(self, exc: BaseException | None) -> None:
        """The other side has gone, or we have closed the connection."""
        super().connection_lost(exc)
        if not self.lost.done():
            self.lost.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that reached no handler, or whose handler failed."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; there can be no other")
        if status < 500:
            reason = " ".join((message or str(exc)).split())[:200]
            _log.info("not an HTTP request from %s: %r", request.remote, reason)
            response = self._respond(BadRequest(f"this is not an HTTP request: {reason!r}"))
        elif status == 504:
            response = self._respond(ServerUnavailable("the request was not answered in time"))
        else:
            _log.error("%s %s failed: %r", request.method, request.path, exc)
            response = self._respond(InternalError(f"{request.method} {request.path} failed"))
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """A refusal by aiohttp before it calls a handler is a problem document too."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = self._respond(BadRequest(f"{request.method} {request.path}: {resp.reason}"))
            resp.force_close()
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """One line."""
        error = kw.get("exc_info")
        reason = " ".join(str(error).split())[:200]
        _log.warning("a connection ended: %s: %s", type(error).__name__, reason)
