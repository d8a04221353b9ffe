"""The OpenAPI document against what the worker really answers to."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
from aiohttp import web

from databus.common.errors import registry
from databus.common.frame.frame_format import Op
from databus.common.http.http_application import PROBLEM_TYPE
from databus.relay.cluster.routing_table import write_table
from databus.relay.http.relay_endpoints import ENDPOINTS, document
from databus.relay.http.relay_server import make_relay_app
from databus.relay.processes.wakeup import make_wakeup
from databus.relay.serving.stream_request import STREAM_PARAMETERS
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import PATIENCE

SOMETIMES = ("Databus-Epoch", "Databus-Ahead", "Databus-Start", "Content-Encoding")
"""Headers that only some answers have."""


async def test_every_route_is_described_and_nothing_else_is(tmp_path: Path) -> None:
    live = LiveRelay(tmp_path)
    app = make_relay_app(live.config, wakeups={"shop": make_wakeup()})
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == {(e.method, e.path) for e in ENDPOINTS}
    runner = web.AppRunner(app)
    await runner.setup()
    await runner.cleanup()
    live.close()


def test_every_parameter_of_the_stream_is_described_once() -> None:
    described = document()["paths"]["/v1/{db}/stream"]["get"]["parameters"]
    names = [parameter["name"] for parameter in described]
    assert names == ["db", *(parameter.name for parameter in STREAM_PARAMETERS)]
    assert all(p["description"].endswith(".") for p in described if p["in"] == "query")


def test_operations_have_names_of_their_own_and_problems_for_what_is_wrong() -> None:
    operations = [op for path in document()["paths"].values() for op in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for operation in operations:
        for status, response in operation["responses"].items():
            assert response["description"]
            if int(status) >= 400:
                schema = response["content"][PROBLEM_TYPE]["schema"]
                assert schema == {"$ref": "#/components/schemas/Problem"}
    stream = document()["paths"]["/v1/{db}/stream"]["get"]["responses"]
    shared = {"401", "403", "429"}
    assert set(stream) == shared | {"200", "400", "404", "406", "409", "410", "500", "503"}
    assert "scn_too_old" in stream["410"]["description"]
    problem = document()["components"]["schemas"]["Problem"]
    assert problem["properties"]["code"]["enum"] == sorted(registry())


async def test_answers_hold_what_their_schemas_require(tmp_path: Path) -> None:
    live = LiveRelay(tmp_path)
    live.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    write_table(tmp_path, {"cluster": "c", "relays": [], "databases": []})
    async with live.served(), aiohttp.ClientSession() as http:
        async with http.get(f"{live.url}/v1/openapi.json") as answer:
            assert await answer.json() == document()
        fetchers = ("dumps", "tables", "resume_state")  # no fetcher answers here
        described = [
            e for e in ENDPOINTS if e.method == "GET" and not any(n in e.path for n in fetchers)
        ]
        assert len(described) > 8
        for endpoint in described:
            path = re.sub(r"{\w+}", "shop", endpoint.path)
            async with asyncio.timeout(5 * PATIENCE), http.get(live.url + path) as answer:
                assert answer.status == endpoint.status
                assert answer.content_type in endpoint.produces
                if answer.content_type == "application/json":
                    found = await answer.json()
                    assert set(endpoint.answer.get("required", ())) <= set(found), path
                else:
                    assert await answer.read()
            for name in endpoint.headers:
                assert name in answer.headers or name in SOMETIMES, path
    live.close()
