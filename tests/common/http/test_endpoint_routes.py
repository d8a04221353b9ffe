"""Routes of a table of endpoints."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from databus.common.access.grants import OPEN
from databus.common.http.endpoint_routes import routes_of
from databus.common.http.http_application import json_response, make_app, query_of
from databus.common.http.openapi_document import Endpoint
from databus.common.http.request_parameters import SOURCES
from databus.common.http.stream_formats import FRAMES_TYPE

LISTED = Endpoint("GET", "/listed", "listed", "A list.", parameters=(SOURCES,), needs=OPEN)
FOLLOWED = Endpoint(
    "GET", "/followed", "followed", "A stream.", produces=(FRAMES_TYPE,), needs=OPEN
)
CHANGED = Endpoint("POST", "/listed", "changed", "A change.", handler="answer_listed", needs=OPEN)


class Handlers:
    """Two methods for three endpoints."""

    async def answer_listed(self, request: web.Request) -> web.Response:
        return json_response({"method": request.method, **query_of(request)})

    async def answer_followed(self, request: web.Request) -> web.Response:
        return json_response(dict(query_of(request)))


async def test_an_entry_of_the_table_and_its_method_make_an_endpoint() -> None:
    app = make_app(routes_of((LISTED, FOLLOWED, CHANGED), object(), Handlers()))
    async with TestClient(TestServer(app)) as client:
        answer = await client.get("/listed?sources=shop.*")
        assert await answer.json() == {"method": "GET", "sources": "shop.*"}
        assert await (await client.post("/listed")).json() == {"method": "POST"}
        assert (await client.head("/listed")).status == 200
        assert (await client.head("/followed")).status == 405
        for path, method in (("/listed?where=x", "get"), ("/listed?sources=a", "post")):
            refused = await client.request(method, path)
            assert (refused.status, (await refused.json())["code"]) == (400, "bad_request")


def test_an_entry_without_a_method_is_found_when_the_server_starts() -> None:
    with pytest.raises(TypeError, match="answer_followed for GET /followed"):
        list(routes_of((FOLLOWED,), object()))
