"""The HTTP client of all rooms; what hostile servers do to it is in test_hostile_servers.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import databus
from databus.client.sinks import webhook_sink
from databus.client.sinks.kafka import registry_client
from databus.client.sinks.search import search_client
from databus.common.errors import ServerUnavailable
from databus.common.http import peer_calls, peer_client
from databus.common.http.http_application import make_app
from databus.common.http.peer_client import PeerClient
from databus.common.private import HiddenUrl

_REQUESTS = re.compile(r"ClientSession|urllib\.request|http\.client|HTTPConnection")


def test_no_other_module_makes_requests() -> None:
    """The targets of sinks are no servers of ours, with errors and checkpoints of ours."""
    ours = {peer_client.__file__, peer_calls.__file__}
    ours |= {webhook_sink.__file__, registry_client.__file__, search_client.__file__}
    found = [
        str(path)
        for folder in map(Path, databus.__path__)
        for path in folder.rglob("*.py")
        if str(path) not in ours and _REQUESTS.search(path.read_text())
    ]
    assert found == []


async def test_a_client_sends_no_request_before_it_is_open_nor_after() -> None:
    client = PeerClient()
    with pytest.raises(ServerUnavailable, match="closed"):
        await client.request("GET", "http://127.0.0.1:9", "/")
    await client.close()


async def test_a_password_of_a_server_goes_to_the_server_and_into_no_message() -> None:
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        raise web.HTTPServiceUnavailable

    async with TestServer(make_app([web.get("/v1", answer)])) as server, PeerClient() as client:
        url = HiddenUrl(f"http://reader:hunter2@{server.host}:{server.port}")
        with pytest.raises(ServerUnavailable) as refused:
            await client.request("GET", url, "/v1")
    assert seen == ["Basic cmVhZGVyOmh1bnRlcjI="]
    assert "hunter2" not in refused.value.message
