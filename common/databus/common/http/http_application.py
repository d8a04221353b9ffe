"""The aiohttp application that the relay's and the bootstrap server's HTTP share.

Every error leaves as a problem document with a stable ``code``, the ones of aiohttp itself
included.  ``serve`` runs an application until its ``stop`` event is set.  Answers that are still
open then see ``STOPPING`` and end by themselves within ``SHUTDOWN_S``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from databus.common.access.listener_tls import ServerTls
from databus.common.errors import (
    BadRequest,
    DatabusError,
    InternalError,
    MethodNotAllowed,
    NotFound,
    RequestTimeout,
    ServerUnavailable,
    to_problem,
)
from databus.common.http.http_connections import (
    MAX_CONNECTIONS,
    SILENCE_S,
    Acceptor,
    bounded_server,
    most_connections,
)
from databus.common.http.peer_answers import read_json
from databus.common.http.request_guard import HARMLESS, RequestGuard
from databus.common.http.request_parameters import check_names
from databus.common.json_text import json_text

PROBLEM_TYPE = "application/problem+json"
SHUTDOWN_S = 1.0
BODY_S = 30.0
MAX_HEADER_BYTES = 8190
PARAMETERS = "databus_parameters"
"""The attribute of a route's handler that has the names of its endpoint's parameters."""
STOPPING: web.AppKey[asyncio.Event] = web.AppKey("stopping", asyncio.Event)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger("databus.http")


def json_response(document: Any, *, status: int = 200) -> web.Response:
    """A JSON answer that no cache stores."""
    return web.Response(
        body=json_text(document).encode(errors="replace"),
        status=status,
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def problem_response(error: DatabusError, headers: Mapping[str, str] | None = None) -> web.Response:
    """The answer to a request that failed with ``error``."""
    return web.Response(
        body=json_text(to_problem(error)).encode(errors="replace"),
        status=error.status,
        headers={
            "Content-Type": PROBLEM_TYPE,
            "Cache-Control": "no-store",
            **_advice(error),
            **(headers or {}),
        },
    )


def _advice(error: DatabusError) -> dict[str, str]:
    """The headers that tell a program what to do."""
    if error.status == 401:
        return {"WWW-Authenticate": "Bearer"}
    if not error.retry:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.details.get("retry_after_s", 1))))}


@web.middleware
async def problem_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every exception with its problem document; unforeseen ones are logged whole."""
    try:
        return await handler(request)
    except DatabusError as error:
        return problem_response(error)
    except web.HTTPException as error:
        return _aiohttp_problem(request, error)
    except ConnectionError:
        raise
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        return problem_response(InternalError(f"{request.method} {request.path} failed"))


def _aiohttp_problem(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        raise error
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return problem_response(
            MethodNotAllowed(f"{request.path} takes {allowed}, not {request.method}"),
            {"Allow": allowed},
        )
    if error.status == 404:
        return problem_response(NotFound(f"there is no {request.path}"))
    if error.status < 500:
        return problem_response(BadRequest(f"{request.method} {request.path}: {error.reason}"))
    return problem_response(ServerUnavailable(f"{request.path}: {error.reason}"))


def query_of(request: web.Request) -> Mapping[str, str]:
    """The request's query.  Each name must be a parameter of the endpoint, and given once.

    Raises:
        BadRequest: a name is unknown, and the message has the nearest known one, or given twice.
    """
    query = request.query
    check_names(query, getattr(request.match_info.handler, PARAMETERS, ()))
    if len(set(query)) < len(query):
        name = next(name for name in query if len(query.getall(name)) > 1)
        raise BadRequest(f"the parameter {name!r} is given twice", parameter=name)
    return query


async def body_of(request: web.Request) -> bytes:
    """The request's whole body.

    Raises:
        BadRequest: it does not match its headers, or is too long.
        RequestTimeout: it does not arrive in time.
    """
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}") from None


async def json_body(request: web.Request) -> dict[str, Any]:
    """The request's body, a JSON object.

    Raises:
        BadRequest: it is something else.
        RequestTimeout: it does not arrive in time.
    """
    document = read_json(await body_of(request), "the body")
    if not isinstance(document, dict):
        raise BadRequest(f"the body is a {type(document).__name__}, not an object")
    return document


def _guarding(guard: RequestGuard) -> Middleware:
    @web.middleware
    async def guard_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in HARMLESS:
            await guard.check(request)
        return await handler(request)

    return guard_middleware


def make_app(
    routes: Iterable[web.AbstractRouteDef], guard: RequestGuard | None = None
) -> web.Application:
    """An application with these routes, problem documents and ``STOPPING``.

    Its ``ADMISSION`` decides about requests, if it is given one.
    """
    middlewares: list[Middleware] = [problem_middleware]
    if guard is not None:
        middlewares.append(_guarding(guard))
    app = web.Application(middlewares=middlewares)
    app.add_routes(routes)

    async def add_stopping(running: web.Application) -> None:
        running[STOPPING] = asyncio.Event()

    async def stop(running: web.Application) -> None:
        running[STOPPING].set()

    app.on_startup.insert(0, add_stopping)
    app.on_shutdown.append(stop)
    return app


async def serve(
    app: web.Application,
    listener: socket.socket,
    stop: asyncio.Event,
    *,
    started: Callable[[], None] = lambda: None,
    max_connections: int = MAX_CONNECTIONS,
    tls: ServerTls | None = None,
) -> None:
    """Run ``app`` on ``listener`` until ``stop`` is set, then end open answers and return.

    ``started`` is called once connections are accepted.  With ``tls`` they are encrypted.
    """
    runner = web.AppRunner(
        app,
        handle_signals=False,
        access_log=None,
        shutdown_timeout=SHUTDOWN_S,
        keepalive_timeout=SILENCE_S,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )
    await runner.setup()
    assert runner.server is not None
    server = bounded_server(runner.server, problem_response)
    refusal = ServerUnavailable("too many connections are open")
    acceptor = Acceptor(
        listener,
        server,
        json_text(to_problem(refusal)).encode(),
        most_connections(max_connections),
        tls,
    )
    try:
        started()
        await stop.wait()
    finally:
        acceptor.close()
        await runner.cleanup()
