"""A relay whose callers have tokens of an identity provider: keys that change, tokens that end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.access import identity_keys
from databus.common.access.identity_keys import IdentityKeys
from databus.common.frame.frame_format import Op
from databus.common.http.admission import Admission, key_set_of
from databus.relay.http.relay_server import RelayServer
from tests.support.callers import Callers
from tests.support.identity_provider import READ, IdentityProvider
from tests.support.live_relay import ITEMS, ORDERS, LiveRelay, window
from tests.support.relay_http import FRAMES
from tests.support.waiting import within

ORDERS_ALONE = {"actions": ["read"], "sources": ["shop.orders"]}
ROLES = (
    {"name": "analysts", "grants": [READ]},
    {"name": "orders", "grants": [ORDERS_ALONE]},
    {"name": "operators", "grants": [{"actions": ["monitor"]}]},
)


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    with IdentityProvider() as made:
        made.add("one")
        yield made


@pytest.fixture
def callers() -> Callers:
    made = Callers()
    made.add("ours", READ)
    return made


@pytest.fixture
async def relay(
    tmp_path: Path, provider: IdentityProvider, callers: Callers
) -> AsyncIterator[LiveRelay]:
    auth = callers.auth.model_copy(update={"oidc": provider.config(*ROLES)})
    live = LiveRelay(tmp_path, auth=auth)
    live.append(window(1, [(Op.INSERT, ORDERS, 1), (Op.INSERT, ITEMS, 2)], text="secret"))
    async with live.served():
        yield live
    live.close()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def server_of(relay: LiveRelay) -> RelayServer:
    assert relay.server is not None
    return relay.server


def admission_of(relay: LiveRelay) -> Admission:
    return server_of(relay).admission


def with_clock(relay: LiveRelay, provider: IdentityProvider) -> Clock:
    """Let the relay's keys be as old as this clock says."""
    clock = Clock()
    admission_of(relay)._identities = IdentityKeys(provider.config(*ROLES), key_set_of, clock)
    return clock


async def answered(
    http: aiohttp.ClientSession, relay: LiveRelay, token: str, path: str = "/v1/shop/sources"
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    async with http.get(relay.url + path, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_the_roles_of_a_token_decide_what_its_caller_may_do(
    relay: LiveRelay, provider: IdentityProvider, callers: Callers, http: aiohttp.ClientSession
) -> None:
    status, document = await answered(http, relay, provider.token())
    assert status == 200
    assert [one["name"] for one in document["sources"]] == ["shop.items", "shop.orders"]
    status, document = await answered(http, relay, provider.token("one", "orders"))
    assert [one["name"] for one in document["sources"]] == ["shop.orders"]
    status, problem = await answered(http, relay, provider.token("one", "operators"))
    assert (status, problem["code"]) == (403, "forbidden")
    assert "ada" in problem["detail"]
    status, problem = await answered(http, relay, provider.token("one", "strangers"))
    assert (status, problem["code"]) == (401, "unauthenticated")
    status, _ = await answered(http, relay, provider.token("one", "operators"), "/v1/status")
    assert status == 200
    assert (await answered(http, relay, callers.tokens["ours"]))[0] == 200, "ours work as before"
    assert len(provider.requests) == 1, "the keys are loaded once"
    status, problem = await answered(http, relay, provider.token(exp=int(time.time()) - 60))
    assert (status, problem["code"]) == (401, "unauthenticated")
    assert "expired" in problem["detail"]


async def test_keys_are_exchanged_without_a_restart(
    relay: LiveRelay, provider: IdentityProvider, http: aiohttp.ClientSession
) -> None:
    clock = with_clock(relay, provider)
    old = provider.token()
    assert (await answered(http, relay, old))[0] == 200
    provider.add("two", "ES256")
    new = provider.token("two")
    assert (await answered(http, relay, new))[0] == 401, "the keys were loaded a moment ago"
    clock.now_s += identity_keys.LEAST_S
    assert (await answered(http, relay, new))[0] == 200, "an unknown key is looked for"
    assert (await answered(http, relay, old))[0] == 200
    del provider.keys["one"]
    assert (await answered(http, relay, old))[0] == 200
    clock.now_s += provider.config().refresh
    status, problem = await answered(http, relay, old)
    assert status == 401, "a key that was withdrawn is not accepted after the next load"
    assert "'one'" in problem["detail"]


async def test_tokens_of_strangers_do_not_make_the_relay_load_keys_each_time(
    relay: LiveRelay, provider: IdentityProvider, http: aiohttp.ClientSession
) -> None:
    clock = with_clock(relay, provider)
    assert (await answered(http, relay, provider.token()))[0] == 200
    stranger = IdentityProvider()
    stranger.add("strange")
    for _ in range(20):
        clock.now_s += identity_keys.LEAST_S / 10
        assert (await answered(http, relay, stranger.token("strange")))[0] == 401
    assert len(provider.requests) <= 3


async def test_while_the_provider_is_away_its_known_keys_are_used(
    relay: LiveRelay, provider: IdentityProvider, http: aiohttp.ClientSession
) -> None:
    clock = with_clock(relay, provider)
    for answer, status in ((b"", 503), (b"no json", 200), (b'{"keys": []}', 200)):
        provider.answer, provider.status = answer, status
        clock.now_s += identity_keys.LEAST_S
        found, problem = await answered(http, relay, provider.token())
        assert (found, problem["code"]) == (503, "server_unavailable"), "no key was ever loaded"
    provider.answer, provider.status = None, 200
    clock.now_s += identity_keys.LEAST_S
    assert (await answered(http, relay, provider.token()))[0] == 200
    provider.answer, provider.status = b"", 500
    clock.now_s += 10 * provider.config().refresh
    assert (await answered(http, relay, provider.token()))[0] == 200


async def until_closed(answer: aiohttp.ClientResponse) -> None:
    """The stream breaks off."""
    async with within(20):
        with pytest.raises(aiohttp.ClientError):
            while await answer.content.readany():
                pass


async def test_a_stream_ends_with_its_token(
    relay: LiveRelay, provider: IdentityProvider, http: aiohttp.ClientSession
) -> None:
    admission_of(relay)._identities = IdentityKeys(provider.config(*ROLES, leeway=0), key_set_of)
    token = provider.token(exp=int(time.time()) + 2)
    headers = {**FRAMES, "Authorization": f"Bearer {token}"}
    query = {"start": "oldest", "follow": "true"}
    async with http.get(f"{relay.url}/v1/shop/stream", params=query, headers=headers) as answer:
        assert answer.status == 200
        await until_closed(answer)


async def test_a_role_that_is_taken_away_closes_the_streams_of_its_callers(
    relay: LiveRelay, provider: IdentityProvider, callers: Callers, http: aiohttp.ClientSession
) -> None:
    headers = {**FRAMES, "Authorization": f"Bearer {provider.token()}"}
    query = {"start": "oldest", "follow": "true"}
    async with http.get(f"{relay.url}/v1/shop/stream", params=query, headers=headers) as answer:
        async with within(10):
            assert await answer.content.readany()
        server_of(relay).set_auth(callers.auth)
        await until_closed(answer)


async def test_our_own_token_is_not_sent_to_the_provider(
    relay: LiveRelay,
    provider: IdentityProvider,
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABUS_TOKEN", "databus_canary")
    assert (await answered(http, relay, provider.token()))[0] == 200
    (headers,) = provider.requests
    assert "canary" not in str(headers)
    assert "Authorization" not in headers
