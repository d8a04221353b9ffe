"""Routes of a table of endpoints: an entry has method, path and parameters, and names its handler.

What is not here: the OpenAPI document of the same table (``openapi_document``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from databus.common.errors import ServerUnavailable
from databus.common.http.admission import ADMISSION
from databus.common.http.http_application import (
    PARAMETERS,
    Handler,
    json_response,
    query_of,
)
from databus.common.http.openapi_document import Endpoint


def routes_of(endpoints: Iterable[Endpoint], *handlers: object) -> Iterator[web.RouteDef]:
    """A route for each endpoint, to the method of the first of ``handlers`` that has one for it."""
    # aiohttp tries routes one after the other: those of streams come first.
    for endpoint in sorted(endpoints, key=lambda one: not one.is_stream):
        name = endpoint.handler or f"answer_{endpoint.name}"
        owner = next((one for one in handlers if hasattr(one, name)), None)
        if owner is None:
            raise TypeError(f"nothing has a method {name} for {endpoint.method} {endpoint.path}")
        answer = _answering(endpoint, getattr(owner, name))
        if endpoint.method == "GET":
            yield web.get(endpoint.path, answer, allow_head=not endpoint.is_stream)
        else:
            yield web.route(endpoint.method, endpoint.path, answer)


def _answering(endpoint: Endpoint, handler: Handler) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        admission = request.app.get(ADMISSION)
        if admission is None:
            return await handler(request)
        return await admission.answer(request, endpoint, handler)

    setattr(answer, PARAMETERS, tuple(one.name for one in endpoint.parameters))
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The handlers of ``openapi_document.operations`` that are the same for every server.

    ``missing`` lists the reasons why the server is not ready, in words; nothing if it is.
    ``page`` is the status page, for browsers.  With ``metrics_in_thread`` the registry's
    collectors may block.

    Owner: the server's event loop.
    """

    registry: CollectorRegistry
    openapi: Mapping[str, Any]
    missing: Callable[[], list[str]]
    page: str
    metrics_in_thread: bool = False

    async def answer_healthz(self, request: web.Request) -> web.Response:
        query_of(request)
        return json_response({"status": "ok"})

    async def answer_readyz(self, request: web.Request) -> web.Response:
        query_of(request)
        reasons = self.missing()
        if reasons:
            raise ServerUnavailable("not ready: " + "; ".join(reasons), reasons=reasons)
        return json_response({"status": "ready"})

    async def answer_metrics(self, _: web.Request) -> web.Response:
        if self.metrics_in_thread:
            body = await asyncio.to_thread(generate_latest, self.registry)
        else:
            body = generate_latest(self.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def answer_openapi(self, request: web.Request) -> web.Response:
        query_of(request)
        return json_response(self.openapi)

    async def answer_status_page(self, request: web.Request) -> web.Response:
        query_of(request)
        return web.Response(text=self.page, content_type="text/html")
