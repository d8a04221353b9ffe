"""Which callers may do what at a relay: every endpoint, and every part of an answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.client import DatabusClient
from databus.common.access.grants import EndpointAction, Scope
from databus.common.checkpoint import Position
from databus.common.errors import Forbidden, Unauthenticated
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.http.openapi_document import Endpoint
from databus.relay.cluster.routing_table import write_table
from databus.relay.http.relay_endpoints import ENDPOINTS
from tests.support.callers import Callers
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window
from tests.support.read_windows import aup_to
from tests.support.recorded_pauses import record_pauses
from tests.support.relay_http import FRAMES, Follower, frames
from tests.support.waiting import eventually, within

ACTIONS = {
    "databases": "read", "sources": "read", "register": "read", "stream": "read",
    "tables": "read", "cluster": "read", "resume_state": "replicate",
    "chunks": "replicate", "release": "replicate", "start_dump": "dump",
    "dumps": "dump", "dump": "dump", "change_dump": "dump", "cancel_dump": "dump",
    "change_table": "admin", "status": "monitor", "status_page": "monitor", "metrics": "monitor",
    "openapi": None, "healthz": None, "readyz": None,
}  # fmt: skip
OPEN = {"healthz", "readyz"}
Session = aiohttp.ClientSession


@pytest.fixture
def callers() -> Callers:
    made = Callers()
    for action in EndpointAction:
        made.add(action, {"actions": [str(action)]})
    made.add("nothing")
    made.add("orders", {"actions": ["read"], "sources": ["shop.orders"]})
    made.add(
        "elsewhere", {"actions": [str(action) for action in EndpointAction], "databases": ["hr"]}
    )
    made.add("ids", {"actions": ["read"], "columns": ["id"]})
    made.add("copier", {"actions": ["replicate", "dump"], "sources": ["shop.o*"]})
    return made


@pytest.fixture
async def relay(tmp_path: Path, callers: Callers) -> AsyncIterator[LiveRelay]:
    live = LiveRelay(tmp_path, auth=callers.auth)
    live.append(window(1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ITEMS, 2)], text="secret"))
    write_table(tmp_path, {"cluster": "c", "relays": [], "databases": []})
    async with live.served():
        yield live
    live.close()


async def answered(
    http: Session, url: str, endpoint: Endpoint, headers: dict[str, str]
) -> tuple[int, dict[str, Any], str]:
    """Status, headers and body of a request to an endpoint of the database shop."""
    path = endpoint.path.replace("{db}", "shop").replace("{id}", "1")
    body = None if endpoint.body is None else {"source": "shop.orders", "sources": ["shop.orders"]}
    async with http.request(endpoint.method, url + path, json=body, headers=headers) as answer:
        return answer.status, dict(answer.headers), await answer.text(errors="replace")


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
async def test_an_endpoint_answers_only_callers_with_its_action(
    endpoint: Endpoint, relay: LiveRelay, callers: Callers, http: Session
) -> None:
    action = ACTIONS[endpoint.name]
    assert endpoint.needs.action == action
    assert (endpoint.needs.scope is Scope.OPEN) == (endpoint.name in OPEN)
    for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic cjpx"}):
        status, headers, body = await answered(http, relay.url, endpoint, wrong)
        if endpoint.name in OPEN:
            assert status in (200, 503)
            continue
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert '"unauthenticated"' in body
    if endpoint.name in OPEN:
        return
    for name in ("nothing", "elsewhere", *map(str, EndpointAction)):
        status, _, body = await answered(http, relay.url, endpoint, callers.headers(name))
        is_listed = endpoint.name in ("databases", "cluster") and name == "elsewhere"
        if action is None or name == action or is_listed:
            assert status not in (401, 403), (name, body)
        else:
            assert (status, '"forbidden"' in body) == (403, True), (name, body)
        assert "shop.items" not in body or name == action


async def test_a_caller_of_some_sources_sees_no_other_anywhere(
    relay: LiveRelay, callers: Callers, http: Session
) -> None:
    headers = callers.headers("orders")
    for endpoint in ENDPOINTS:
        if endpoint.name in OPEN | {"openapi"}:
            continue
        status, _, body = await answered(http, relay.url, endpoint, headers)
        narrowed = endpoint.name in ("databases", "cluster", "sources", "register", "stream")
        assert status == (200 if narrowed else 403), endpoint.name
        assert "items" not in body
        assert endpoint.name in ("databases", "cluster") or not narrowed or "shop.orders" in body
    http.headers.update(headers)
    url = f"{relay.url}/v1/shop/stream"
    for query in ({}, {"sources": "*"}, {"sources": "shop.*"}, {"sources": "shop.orders,shop.it*"}):
        found = await frames(http, url, **query)
        rows = [frame.source_id for frame in found if frame.source_id]
        assert rows == [ORDERS.source_id]
    for path in ("stream", "register"):
        for sources in ("shop.items", "shop.orders,shop.items", "shop.nothing"):
            async with http.get(
                f"{relay.url}/v1/shop/{path}", params={"sources": sources}
            ) as answer:
                assert answer.status == 403
                document = await answer.json(content_type=None)
                assert document["source"] == sources.rpartition(",")[2]
        async with http.get(f"{relay.url}/v1/shop/{path}", params={"sources": "x*"}) as answer:
            assert (answer.status, "items" in await answer.text()) == (404, False)


async def test_a_follower_of_some_sources_gets_no_other_that_is_committed_or_defined_later(
    relay: LiveRelay, callers: Callers, http: Session
) -> None:
    http.headers.update(callers.headers("orders"))
    url, query = f"{relay.url}/v1/shop/stream", {"follow": "true", "start": "latest"}
    async with http.get(url, params=query, headers=FRAMES) as answer:
        follower = Follower(answer)
        assert await follower.next() is not None
        relay.append(window(2, [(Op.INSERT, ITEMS, 3)]), window(3, [(Op.INSERT, ORDERS, 4)]))
        seen = []
        while not seen or seen[-1].scn < 3:
            frame = await follower.next_but(Op.HEARTBEAT)
            assert frame is not None
            seen.append(frame)
        assert {frame.source_id for frame in seen} <= {0, ORDERS.source_id}


async def test_a_caller_of_some_columns_gets_those_and_the_key(
    relay: LiveRelay, callers: Callers, http: Session
) -> None:
    http.headers.update(callers.headers("ids"))
    for query in ({}, {"columns": "id"}, {"format": "ndjson"}, {"format": "sse"}):
        async with within(30):
            params = query | {"follow": "false"}
            async with http.get(f"{relay.url}/v1/shop/stream", params=params) as answer:
                assert answer.status == 200
                assert b"secret" not in await answer.read()
        found = await frames(http, f"{relay.url}/v1/shop/stream", **query | {"format": "frames"})
        assert len([frame for frame in found if frame.source_id]) == 2
        assert all(b"secret" not in frame.bytes for frame in found)
    async with http.get(f"{relay.url}/v1/shop/register") as answer:
        registered = await answer.json()
    names = {field["name"] for one in registered["schemas"] for field in one["schema"]["columns"]}
    assert names == {"id"}
    for query in (
        {"columns": "id,item"},
        {"where": "item = 'secret1'"},
        {"where": "id = 1"},
        {"format": "debezium"},
    ):
        async with http.get(f"{relay.url}/v1/shop/stream", params=query) as answer:
            assert answer.status == 403, query


async def test_a_body_names_only_sources_that_are_granted_as_they_stand(
    relay: LiveRelay, callers: Callers, http: Session
) -> None:
    http.headers.update(callers.headers("copier"))
    for path, body, is_fine in (
        ("chunks", {"source": "shop.orders"}, True),
        ("chunks", {"source": "shop.items"}, False),
        ("chunks", {"source": "shop.orders", "sources": ["shop.items"]}, False),
        ("dumps", {"sources": ["shop.orders", "shop.o*"]}, True),
        ("dumps", {"sources": ["shop.orders", "shop.items"]}, False),
        ("dumps", {"sources": ["*"]}, False),
        ("dumps", {"sources": ["shop.or*"]}, False),
    ):
        async with http.post(f"{relay.url}/v1/shop/{path}", json=body) as answer:
            # No fetcher runs: what is granted gets as far as that.
            assert answer.status == (503 if is_fine else 403), (path, body)
    async with http.post(f"{relay.url}/v1/shop/chunks", json=["x"]) as answer:
        assert answer.status == 503


async def test_a_grant_that_is_taken_away_ends_what_is_open_and_nothing_else(
    relay: LiveRelay, callers: Callers, http: Session
) -> None:
    url, query = f"{relay.url}/v1/shop/stream", {"follow": "true", "start": "latest"}
    assert relay.server is not None
    async with (
        http.get(url, params=query, headers=FRAMES | callers.headers("read")) as kept,
        http.get(url, params=query, headers=FRAMES | callers.headers("orders")) as cut,
    ):
        followers = Follower(kept), Follower(cut)
        for follower in followers:
            assert await follower.next() is not None
        relay.server.set_auth(callers.without("orders"))
        with pytest.raises(aiohttp.ClientError):
            while await followers[1].next() is not None:
                continue
        relay.append(window(5, [(Op.INSERT, ITEMS, 3)]))
        frame = await followers[0].next_but(Op.HEARTBEAT)
        assert frame is not None
        assert frame.scn == 5
    async with http.get(url, headers=callers.headers("orders")) as answer:
        assert answer.status == 401


async def test_a_client_gives_its_token_and_stops_when_it_is_refused(
    relay: LiveRelay, callers: Callers, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(callers.tokens["orders"])

    async def events(**given: Any) -> int:
        client = DatabusClient(database="shop", relays=[relay.url], start="oldest", **given)
        return sum([len(await window.aevents()) async for window in aup_to(1, client)])

    assert await events(token_file=str(file)) == 1
    assert await events(token=callers.tokens["read"]) == 2
    with pytest.raises(Unauthenticated):
        await events()
    with pytest.raises(Forbidden, match=re.escape("'shop.items' is not granted")):
        await events(token_file=str(file), sources=["shop.items"])


async def test_a_caller_over_its_limits_gets_429_and_our_client_pauses_as_it_is_told(
    tmp_path: Path, http: Session
) -> None:
    callers = Callers()
    limited = callers.add("limited", {"actions": ["read"]}, max_streams=1)
    callers.add("slow", {"actions": ["read"]}, max_requests_per_s=2.0)
    live = LiveRelay(tmp_path, auth=callers.auth)
    live.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    query = {"follow": "true"}
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        async with http.get(url, params=query, headers=FRAMES | limited):
            async with http.get(url, params=query, headers=FRAMES | limited) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                document = await answer.json(content_type=None)
                assert (document["code"], document["retry"]) == ("too_many_requests", True)
            async with http.get(f"{live.url}/v1/databases", headers=limited) as answer:
                assert answer.status == 200
        client = DatabusClient(
            database="shop",
            relays=[live.url],
            start="oldest",
            token=callers.tokens["slow"],
            follow=False,
            wait_ms=0,
            reconnect_s=0.001,
            reconnect_most_s=0.001,
        )
        windows = client.awindows(idle_s=None)
        loop = asyncio.get_running_loop()
        began_s, failures = loop.time(), 0
        assert (await anext(windows)).scn == 1
        while client.status.failure_count < 3:
            await asyncio.sleep(0.01)
        failures, took_s = client.status.failure_count, loop.time() - began_s
        assert "too_many_requests" in client.status.last_error
        # Without the pauses there would be a failure every millisecond or so.
        assert took_s > 0.4 * (failures - 1)
        await windows.aclose()
    live.close()


@pytest.mark.parametrize("query", [{}, {"format": "ndjson"}, {"sources": "shop.orders"}])
async def test_every_byte_of_a_stream_counts_for_the_callers_pace(
    tmp_path: Path, http: Session, monkeypatch: pytest.MonkeyPatch, query: dict[str, str]
) -> None:
    callers = Callers()
    limited = callers.add("limited", {"actions": ["read"]}, max_bytes_per_s="1MiB")
    live = LiveRelay(tmp_path, auth=callers.auth)
    for scn in range(1, 200):
        live.append(window(scn, [(Op.INSERT, ORDERS, scn)], text="x" * 4000))
    counted = record_pauses(monkeypatch, 0.001)
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        async with http.get(url, params=query, headers=limited) as answer:
            body = await answer.read()
        assert sum(counted) == len(body) > 500_000
        counted.clear()
        async with http.get(url, params=query, headers=callers.add("free")) as answer:
            assert answer.status == 401, "the server does not know this one"
    assert not counted


async def test_a_server_that_stops_ends_the_pause_of_an_answer(
    tmp_path: Path, http: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers = Callers()
    limited = callers.add("limited", {"actions": ["read"]}, max_bytes_per_s="1MiB")
    live = LiveRelay(tmp_path, auth=callers.auth)
    live.append(window(1, [(Op.INSERT, ORDERS, 1)], text="x" * 200_000))
    counted = record_pauses(monkeypatch, 3600.0)
    async with live.served():
        reading = asyncio.create_task(
            get_body(http, f"{live.url}/v1/shop/stream", FRAMES | limited)
        )
        await eventually(lambda: bool(counted), 20)
        assert not reading.done()
    async with within(20):
        assert next(iter_frames(await reading)).position == Position(1, 0)


async def get_body(http: Session, url: str, headers: dict[str, str]) -> bytes:
    async with http.get(url, headers=headers) as answer:
        return await answer.read()
