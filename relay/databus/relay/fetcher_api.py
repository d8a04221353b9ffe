"""What a running fetcher answers on its unix socket: live status and dumps, as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from databus.common.errors import (
    BadRequest,
    DatabusError,
    InternalError,
    NotFound,
    UnknownSource,
    to_problem,
)
from databus.common.filters import matches
from databus.relay.dumps import FINISHED, Dump, DumpBook, DumpState, change_dump, new_dump
from databus.relay.layout import DatabaseFolder, SocketName

MAX_BODY_BYTES = 16 << 20

_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Fetching(Protocol):
    """What the answers are taken from."""

    @property
    def book(self) -> DumpBook:
        """The dumps."""

    def status_document(self) -> dict[str, Any]:
        """The live status."""

    def known_sources(self) -> list[str]:
        """Names of the captured tables; empty before the source was reached once."""

    async def dumps_changed(self) -> None:
        """Put the dumps' records on disk and let the runner look at them."""


def problem_response(error: DatabusError) -> web.Response:
    """The error as problem+json."""
    return web.json_response(
        to_problem(error), status=error.status, content_type="application/problem+json"
    )


@web.middleware
async def _problems(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except DatabusError as error:
        return problem_response(error)
    except web.HTTPException as error:
        if error.status == 404:
            return problem_response(NotFound(f"{request.method} {request.path} is not served"))
        return problem_response(BadRequest(f"{request.method} {request.path}: {error.reason}"))
    except Exception as error:
        _log.exception("%s %s", request.method, request.path)
        return problem_response(InternalError(f"{type(error).__name__}: {error}"))


class FetcherApi:
    """Serves one fetcher's socket.

    Owner: the fetcher's loop.
    """

    def __init__(self, fetching: Fetching, folder: DatabaseFolder) -> None:
        self._fetching = fetching
        self._folder = folder
        self._name: SocketName | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; a socket that a killed fetcher left is replaced."""
        app = web.Application(middlewares=[_problems], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/status", self._status)
        app.router.add_get("/dumps", self._list)
        app.router.add_post("/dumps", self._create)
        app.router.add_get("/dumps/{id}", self._one)
        app.router.add_patch("/dumps/{id}", self._change)
        app.router.add_delete("/dumps/{id}", self._cancel)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        self._folder.socket.unlink(missing_ok=True)
        self._name = SocketName(self._folder.socket)
        await web.UnixSite(self._runner, self._name.path).start()

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._name is not None:
            self._folder.socket.unlink(missing_ok=True)
            self._name.close()
            self._name = None

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(self._fetching.status_document())

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"dumps": [dump.to_json() for dump in self._fetching.book]})

    async def _one(self, request: web.Request) -> web.Response:
        return web.json_response(self._dump(request).to_json())

    async def _create(self, request: web.Request) -> web.Response:
        dump = new_dump(await _body(request))
        known = self._fetching.known_sources()
        if known and not any(matches(name, dump.sources) for name in known):
            raise UnknownSource(f"no source matches {dump.sources}; there are {', '.join(known)}")
        self._fetching.book.add(dump)
        await self._fetching.dumps_changed()
        return web.json_response(dump.to_json(), status=202)

    async def _change(self, request: web.Request) -> web.Response:
        dump = self._dump(request)
        change_dump(dump, await _body(request))
        await self._fetching.dumps_changed()
        return web.json_response(dump.to_json())

    async def _cancel(self, request: web.Request) -> web.Response:
        dump = self._dump(request)
        if dump.state not in FINISHED:
            dump.state = DumpState.CANCELLED
            await self._fetching.dumps_changed()
        return web.json_response(dump.to_json())

    def _dump(self, request: web.Request) -> Dump:
        return self._fetching.book.get(request.match_info["id"])


async def _body(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
