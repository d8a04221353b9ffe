"""What a relay reports about itself: metrics, status, the status page."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from tests.support.live_relay import LiveRelay
from tests.support.relay_http import (
    frames,
    insert,
    problem,
)


async def test_metrics_and_status_count_what_was_served(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2))
    url = f"{relay.url}/v1/shop/stream"
    found = await frames(http, url)
    await problem(http, "GET", url, scn="x")
    async with http.get(f"{relay.url}/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = await answer.text()
    sent = sum(frame.length for frame in found)
    for line in (
        'databus_relay_requests_total{database="shop"} 2.0',
        'databus_relay_errors_total{database="shop"} 1.0',
        'databus_relay_events_total{database="shop"} 2.0',
        f'databus_relay_bytes_total{{database="shop"}} {float(sent)}',
        'databus_relay_readers{database="shop"} 0.0',
        'databus_relay_ring_scn{database="shop",edge="max"} 2.0',
        'databus_relay_ring_windows_total{database="shop"} 2.0',
    ):
        assert line in text
    async with http.get(f"{relay.url}/v1/status") as answer:
        document = await answer.json()
    (database,) = document["databases"]
    assert database["served"]["events"] == 2
    assert database["ring"]["windows"] == 2
    assert database["ring"]["used_bytes"] == sent
    assert document["workers"] == 1


async def test_the_status_never_shows_a_password(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, url="mariadb://user:hunter2@127.0.0.1:1/shop")
    async with live.served(), http.get(f"{live.url}/v1/status") as answer:
        text = await answer.text()
    assert "user:***@" in text
    assert "hunter2" not in text
    live.close()


async def test_the_status_page_needs_nothing_from_elsewhere(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{relay.url}/status") as answer:
        assert answer.content_type == "text/html"
        page = await answer.text()
    assert "/v1/status" in page
    for foreign in ('src="', "@import", "url(", "<link"):
        assert foreign not in page
