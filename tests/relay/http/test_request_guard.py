"""What a web page of a stranger can do through a browser that reaches a relay: nothing."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDict

from databus.common.errors import ForeignHost
from databus.common.http.request_guard import RequestGuard
from tests.support.live_relay import LiveRelay

JSON = {"Content-Type": "application/json"}
PASSED = (503, "server_unavailable")
"""The fetcher, which is not there, would have had it."""


async def answer_to(
    http: aiohttp.ClientSession, url: str, method: str = "POST", body: Any = "{}", **headers: str
) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if "Content-Type" not in named:
        named["Content-Type"] = ""
    async with http.request(method, url, data=body, headers=named) as answer:
        assert answer.content_type == "application/problem+json"
        assert "Access-Control-Allow-Origin" not in answer.headers
        document = await answer.json(content_type=None)
        return answer.status, document["code"]


@pytest.mark.parametrize("path", ["dumps", "chunks", "release"])
async def test_a_body_must_say_that_it_is_json(
    relay: LiveRelay, http: aiohttp.ClientSession, path: str
) -> None:
    """What a form or a page of another origin can send unasked is none."""
    url = f"{relay.url}/v1/shop/{path}"
    refused = (415, "unsupported_media_type")
    for kind in (
        "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "",
        "application/jsonx", "text/plain; application/json", "application/json; charset=utf-7",
    ):  # fmt: skip
        assert await answer_to(http, url, Content_Type=kind) == refused, kind
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert await answer_to(http, url, Content_Type=kind) == PASSED, kind


async def test_a_page_of_another_origin_changes_nothing(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    host = relay.url.removeprefix("http://")
    dumps = f"{relay.url}/v1/shop/dumps"
    for method, url in (
        ("POST", dumps), ("PATCH", f"{dumps}/1"), ("DELETE", f"{dumps}/1"),
        ("POST", f"{relay.url}/v1/shop/chunks"), ("POST", f"{relay.url}/v1/shop/release"),
        ("PUT", dumps), ("POST", f"{relay.url}/v1/nothing"),
    ):  # fmt: skip
        for origin in ("http://evil.example", "null", "http://localhost:3000", "", f"{host}"):
            found = await answer_to(
                http, url, method, None if method == "DELETE" else "{}", **JSON, Origin=origin
            )
            assert found == (403, "foreign_origin"), (method, url, origin)
    assert await answer_to(http, dumps, **JSON, Origin=relay.url) == PASSED
    async with http.options(dumps, headers={"Origin": "http://evil.example"}) as answer:
        assert answer.status == 405
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_a_strangers_name_that_resolves_to_us_changes_nothing(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    """DNS rebinding: the page's origin and the Host are the same, and both are foreign."""
    dumps, port = f"{relay.url}/v1/shop/dumps", relay.url.rpartition(":")[2]
    for name in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "x"):
        host = f"{name}:{port}"
        found = await answer_to(http, dumps, **JSON, Host=host, Origin=f"http://{host}")
        assert found == (403, "foreign_host"), name
        assert await answer_to(http, dumps, **JSON, Host=host) == (403, "foreign_host"), name
    ours = ("localhost", "127.0.0.1", "[::1]", socket.gethostname())
    for name in ours:
        host = f"{name}:{port}"
        assert await answer_to(http, dumps, **JSON, Host=host, Origin=f"http://{host}") == PASSED, (
            name
        )
    async with http.get(f"{relay.url}/v1/databases", headers={"Host": "evil.example"}) as answer:
        assert answer.status == 200


async def test_more_names_are_configured() -> None:
    class Request:
        method, can_read_body = "DELETE", False

        def __init__(self, host: str, origin: str) -> None:
            self.headers = CIMultiDict({"Host": host, "Origin": origin})

    guard: Any = RequestGuard("0.0.0.0:8700", ["*.relays.example", "Behind.example"])
    await guard.check(Request("one.relays.example:8700", "http://one.relays.example:8700"))
    await guard.check(Request("behind.example", "https://behind.example"))
    with pytest.raises(ForeignHost, match="allowed_hosts"):
        await guard.check(Request("relays.example", "http://relays.example"))
