"""Counts by client: under the names that readers give themselves, and bounded."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.errors import BadRequest
from databus.common.http.request_parameters import CLIENT_HEADER
from databus.relay.serving.counters import counter_file
from databus.relay.serving.counters.client_counters import (
    COUNTED,
    IDLE_S,
    MAX_CLIENTS,
    OTHERS,
    ClientCounters,
    parse_client,
    read_clients,
)
from databus.relay.serving.counters.worker_counters import WorkerCounters, read_counters
from tests.support.live_relay import LiveRelay
from tests.support.relay_http import FRAMES, Follower, frames, insert, problem
from tests.support.waiting import eventually


class Clock:
    """A time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def ask(counters: ClientCounters, name: str, *, database: str = "shop") -> None:
    with counters.answering(database, name) as client:
        client.sent(100, 3, 7, 7_000_000)


def totals(data_dir: Path, workers: int = 1) -> dict[str, int]:
    found = read_clients(data_dir, workers, "shop").values()
    return {name: sum(client.counts[name] for client in found) for name in COUNTED}


# ---- the table ----


def test_a_clients_counts_are_summed_over_the_workers_and_its_position_is_the_furthest(
    tmp_path: Path,
) -> None:
    one, two = (ClientCounters(tmp_path, worker) for worker in (0, 1))
    with one.answering("shop", "index") as first, two.answering("shop", "index") as second:
        first.sent(10, 1, 2**64 - 1, 9_000_000)
        second.sent(20, 2, 5, 5_000_000)
        second.add("overtaken")
        ask(one, "cache")
        ask(one, "index", database="other")
        found = read_clients(tmp_path, 3, "shop")
        assert list(found) == ["cache", "index"]
        assert found["index"].counts == {
            "requests": 2, "too_old": 0, "overtaken": 1, "bytes": 30, "events": 3, "readers": 2,
        }  # fmt: skip
        assert (found["index"].scn, found["index"].lag_us(12_000_000)) == (2**64 - 1, 3_000_000)
        assert found["index"].lag_us(1) == 0
    assert read_clients(tmp_path, 2, "shop")["index"].counts["readers"] == 0
    one.close()
    two.close()
    assert totals(tmp_path, 2)["bytes"] == 130, "what was counted stays to be read"


def test_names_beyond_the_bound_are_counted_together(tmp_path: Path) -> None:
    counters = ClientCounters(tmp_path, 0, now_s=Clock())
    for number in range(MAX_CLIENTS + 50):
        ask(counters, f"c{number}")
        ask(counters, f"c{number}")
    found = read_clients(tmp_path, 1, "shop")
    assert len(found) == MAX_CLIENTS + 1
    assert found["c0"].counts["requests"] == 2
    assert found[OTHERS].counts["requests"] == 100
    ask(counters, "c0", database="other")
    assert list(read_clients(tmp_path, 1, "other")) == ["c0"], "the bound is each database's"
    assert totals(tmp_path)["requests"] == 2 * (MAX_CLIENTS + 50)
    counters.close()


def test_a_name_that_was_idle_for_long_makes_room_and_its_counts_are_retained(
    tmp_path: Path,
) -> None:
    clock = Clock()
    counters = ClientCounters(tmp_path, 0, now_s=clock)
    with counters.answering("shop", "reading") as reading:
        for number in range(MAX_CLIENTS - 1):
            clock.now_s += 1
            ask(counters, f"c{number}")
        clock.now_s += IDLE_S - MAX_CLIENTS
        ask(counters, "early")
        assert OTHERS in read_clients(tmp_path, 1, "shop")
        clock.now_s += MAX_CLIENTS
        before = totals(tmp_path)
        with counters.answering("shop", "late") as late:
            late.sent(1, 1, 1, 1)
            reading.sent(5, 0, 1, 1)
            found = read_clients(tmp_path, 1, "shop")
            assert "c0" not in found, "idle for longest"
            assert {"reading", "c1", "late", OTHERS} <= found.keys()
            assert found["late"].counts["bytes"] == 1
            assert found["reading"].counts["bytes"] == 5
            assert len(found) == MAX_CLIENTS + 1
            after = totals(tmp_path)
    assert after["requests"] == before["requests"] + 1
    assert after["bytes"] == before["bytes"] + 6
    assert totals(tmp_path)["readers"] == 0
    counters.close()


def test_a_worker_restarts_and_leaves_nothing_open(tmp_path: Path) -> None:
    counters = ClientCounters(tmp_path, 0)
    with counters.answering("shop", "index"):
        pass
    counters.close()
    assert read_clients(tmp_path, 1, "shop")["index"].lag_us(5) is None
    ClientCounters(tmp_path, 0).close()
    assert read_clients(tmp_path, 1, "shop") == {}


def test_a_full_disk_stops_neither_answers_nor_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    before = ClientCounters(tmp_path, 0)
    ask(before, "index")
    with monkeypatch.context() as patch:
        patch.setattr(counter_file, "private_opener", refuse)
        ask(before, "cache")
        ask(before, "index")
        since, databases = ClientCounters(tmp_path, 1), WorkerCounters(tmp_path, 1, ["shop"])
        ask(since, "cache")
        databases.add("shop", "requests")
        databases.add_database("other")
    assert list(read_clients(tmp_path, 2, "shop")) == ["index"], "the others see what was written"
    ask(before, "cache")
    for counters in (before, since):
        ask(counters, "late")
    databases.add_database("late")
    found = {n: one.counts["requests"] for n, one in read_clients(tmp_path, 2, "shop").items()}
    assert found == {"index": 2, "cache": 3, "late": 2}
    assert read_counters(tmp_path, 2, "shop")["requests"] == 1
    for counting in (before, since, databases):
        counting.close()


@pytest.mark.parametrize("name", ["a", "search-index", "x@host:1/2", "9.z_"])
def test_a_valid_name_is_taken_unchanged(name: str) -> None:
    assert parse_client(name) == name


@pytest.mark.parametrize("name", ["-a", "a b", "a\n", "ä", "x" * 65, '"'])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="is no name: write up to 64"):
        parse_client(name)


# ---- over HTTP ----


async def status_of(http: aiohttp.ClientSession, relay: LiveRelay) -> dict[str, dict[str, Any]]:
    async with http.get(f"{relay.url}/v1/status") as answer:
        (database,) = (await answer.json())["databases"]
    return {client["name"]: client for client in database["clients"]}


async def test_readers_are_counted_by_the_name_in_header_or_parameter(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    relay.append(insert(1), insert(2))
    url = f"{relay.url}/v1/shop/stream"
    found = await frames(http, url, client="index")
    for name in ("cache", "index"):
        async with http.get(url, headers={**FRAMES, CLIENT_HEADER: name}) as answer:
            assert list(map(bytes, (f.bytes for f in found))) == [
                bytes(f.bytes) for f in await _frames_of(answer)
            ], "the name changes nothing about the answer"
    await frames(http, url, scn="1")
    sent = sum(frame.length for frame in found)
    clients = await status_of(http, relay)
    assert {name: client["requests"] for name, client in clients.items()} == {
        "cache": 1, "index": 2, "unnamed": 1,
    }  # fmt: skip
    assert clients["index"]["bytes"] == 2 * sent
    assert clients["index"]["events"] == 4
    assert (clients["index"]["scn"], clients["index"]["lag_us"]) == (2, 0)
    relay.append(insert(5))
    assert (await status_of(http, relay))["index"]["lag_us"] == 3_000_000
    async with http.get(f"{relay.url}/metrics") as answer:
        text = await answer.text()
    for line in (
        'databus_relay_client_requests_total{client="index",database="shop"} 2.0',
        'databus_relay_client_events_total{client="cache",database="shop"} 2.0',
        f'databus_relay_client_bytes_total{{client="index",database="shop"}} {2.0 * sent}',
        'databus_relay_client_readers{client="index",database="shop"} 0.0',
        'databus_relay_client_lag_seconds{client="index",database="shop"} 3.0',
        'databus_relay_client_scn{client="index",database="shop"} 2.0',
    ):
        assert line in text
    counted = re.findall(r"^databus_relay_client_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert sum(map(float, counted)) == 4
    assert 'databus_relay_requests_total{database="shop"} 4.0' in text


async def _frames_of(answer: aiohttp.ClientResponse) -> list[Any]:
    follower, found = Follower(answer), []
    while (frame := await follower.next()) is not None:
        found.append(frame)
    return found


async def test_a_follower_is_shown_while_it_reads_and_how_far_it_is(
    relay: LiveRelay, http: aiohttp.ClientSession
) -> None:
    query = {"follow": "true", "client": "tail", "sources": "shop.items"}
    async with http.get(f"{relay.url}/v1/shop/stream", params=query) as answer:
        relay.append(insert(4))

        async def shown() -> bool:
            client = (await status_of(http, relay)).get("tail", {})
            # Nothing was chosen for it, and yet it is known to be current.
            return (client.get("readers"), client.get("scn"), client.get("lag_us")) == (1, 4, 0)

        await eventually(shown)
        answer.close()

    async def gone() -> bool:
        return bool((await status_of(http, relay))["tail"]["readers"] == 0)

    await eventually(gone)


async def test_what_went_wrong_is_counted_for_the_client(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    live = LiveRelay(tmp_path, ring_bytes=64 << 10)
    live.append(insert(5))
    assert live.writer.expire(6_000_000)
    async with live.served():
        url = f"{live.url}/v1/shop/stream"
        status, _ = await problem(http, "GET", url, scn="1", client="late")
        assert status == 410
        status, document = await problem(http, "GET", url, client="my index")
        assert (status, document["parameter"]) == (400, "client")
        clients = await status_of(http, live)
    assert (clients["late"]["requests"], clients["late"]["too_old"]) == (1, 1)
    assert list(clients) == ["late"]
    live.close()
