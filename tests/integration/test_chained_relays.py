"""Relays that read relays: the same bytes at every level, whichever process dies."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.checkpoint import Position
from databus.common.errors import BadRequest, ScnTooOld
from databus.common.frame.frame_format import Flag, Op
from databus.relay.local_relay import LocalRelay
from databus.relay.processes.fetcher import Fetcher
from tests.support.chain import QUICK, Served, get_json, parent_url, poll, relay_config
from tests.support.waiting import eventually

GENERATOR = "generator://?events=3000&events_per_window=7&payload_bytes=200&seed=5"
LAST_SCN = 429
END = Position(LAST_SCN, 4)


def running(folder: Path, url: str, **options: Any) -> LocalRelay:
    return LocalRelay(relay_config(folder, {"shop": url}, **options), pace=QUICK)


@contextlib.asynccontextmanager
async def ready(folder: Path, url: str, **options: Any) -> AsyncIterator[LocalRelay]:
    async with running(folder, url, **options) as relay:
        await relay.ready()
        yield relay


def shop(relay: LocalRelay) -> Fetcher:
    return relay.fetchers["shop"]


def complete(relay: LocalRelay) -> Position:
    intake = shop(relay).intake
    return intake.complete if intake is not None else Position(0, 0)


def newest_of(relay: LocalRelay) -> Position:
    intake = shop(relay).intake
    return intake.ring.state.max if intake is not None else Position(0, 0)


async def reached(relay: LocalRelay, scn: int, timeout_s: float = 20.0) -> None:
    await eventually(lambda: complete(relay).scn >= scn, timeout_s, f"scn {scn} is there")


def assert_same(parent: Served, child: Served, *, all_of: bool = True) -> None:
    """Frame for frame the same bytes, where both have the position."""
    above, below = parent.bytes_by_position(), child.bytes_by_position()
    assert parent.clock == child.clock
    assert parent.newest == child.newest
    if all_of:
        assert above == below
    common = above.keys() & below.keys()
    assert common
    assert all(above[position] == below[position] for position in common)
    # Where both begin and end, neither has a position that the other lacks.
    first = max(min(above), min(below))
    assert {p for p in above if p >= first} == {p for p in below if p >= first}


async def test_three_levels_serve_the_same_bytes(tmp_path: Path) -> None:
    async with (
        ready(tmp_path / "a", GENERATOR) as a,
        ready(tmp_path / "b", parent_url(a.url)) as b,
        ready(tmp_path / "c", parent_url(b.url)) as c,
    ):
        await reached(c, LAST_SCN)
        top, middle, bottom = [await poll(relay.url) for relay in (a, b, c)]
        assert len(top.frames) == 3000 + LAST_SCN
        assert top.prev == middle.prev == bottom.prev == "0:0"
        assert_same(top, middle)
        assert_same(top, bottom)
        for path in ("/v1/shop/register", "/v1/shop/sources"):
            above, below = await get_json(a.url, path), await get_json(c.url, path)
            for name in ("clock", "schemas", "sources", "prev", "min", "max"):
                assert above.get(name) == below.get(name)
        (status,) = (await get_json(c.url, "/v1/status"))["databases"]
        assert status["url"] == parent_url(b.url)
        (status,) = (await get_json(b.url, "/v1/status"))["databases"]
        (child,) = (client for client in status["clients"] if client["name"] == "relay")
        assert (child["readers"], child["scn"], child["lag_us"]) == (1, LAST_SCN, 0)


async def test_a_child_with_a_smaller_ring_forgets_earlier_and_is_the_same_behind(
    tmp_path: Path,
) -> None:
    async with (
        ready(tmp_path / "a", GENERATOR) as a,
        ready(tmp_path / "b", parent_url(a.url), ring_bytes=128 << 10) as b,
    ):
        await reached(b, LAST_SCN)
        top, bottom = await poll(a.url), await poll(b.url)
        assert len(bottom.frames) < len(top.frames)
        assert_same(top, bottom, all_of=False)
        last_gone = max(p for p in top.positions if p < bottom.positions[0])
        assert bottom.prev == f"{last_gone.scn}:{last_gone.seq}", "prev is exact"


async def test_a_child_that_starts_late_begins_where_its_parent_begins(tmp_path: Path) -> None:
    async with ready(tmp_path / "a", GENERATOR, ring_bytes=128 << 10) as a:
        await reached(a, LAST_SCN)
        top = await poll(a.url)
        assert top.prev != "0:0"
        async with ready(tmp_path / "b", parent_url(a.url)) as b:
            await reached(b, LAST_SCN)
            bottom = await poll(b.url)
            assert bottom.prev == top.prev
            assert_same(top, bottom)
        async with ready(tmp_path / "c", parent_url(a.url), options={"start": "latest"}) as c:
            assert (await poll(c.url)).prev == top.newest


async def test_dumps_are_requested_anywhere_and_run_where_the_database_is_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
        rows = [(number, f"item {number}") for number in range(500)]
        connection.executemany("INSERT INTO items VALUES (?, ?)", rows)
        connection.commit()
        async with (
            ready(tmp_path / "a", f"sqlite:///{path}") as a,
            ready(tmp_path / "b", parent_url(a.url)) as b,
            aiohttp.ClientSession() as session,
        ):
            async with ready(tmp_path / "c", parent_url(b.url)) as c:
                await eventually(lambda: shop(c).status.state == "streaming")
                await eventually(lambda: shop(b).status.state == "streaming")
                body = {"sources": ["main.items"], "chunk_rows": 40}
                address = f"{c.url}/v1/shop/dumps"
                async with session.post(address, json=body) as answer:
                    assert answer.status == 202
                    dump = await answer.json()
                async with session.get(f"{a.url}/v1/shop/dumps/{dump['id']}") as answer:
                    assert answer.status == 200, "it is the head's dump"
                connection.execute("UPDATE items SET name = 'changed' WHERE id = 7")
                connection.commit()

                async def done() -> bool:
                    async with session.get(f"{address}/{dump['id']}") as answer:
                        return bool((await answer.json())["state"] == "completed")

                await eventually(done)
                async with session.get(f"{address}/no-such-dump") as answer:
                    assert answer.status == 404
                    assert (await answer.json())["code"]
                async with session.post(address, json={"sources": ["nothing.*"]}) as answer:
                    assert (await answer.json())["code"] == "unknown_source"
                # Dump windows share the scn of the commit before, so scn alone is no position.
                await eventually(lambda: complete(c) == complete(a))
                top, bottom = await poll(a.url), await poll(c.url)
                assert_same(top, bottom)
                assert sum(view.op == Op.READ for view in bottom.frames) >= 499
                assert any(view.flags & Flag.DUMP for view in bottom.frames)
                before = complete(c)
            async with ready(tmp_path / "c", parent_url(b.url)) as c:
                connection.execute("DELETE FROM items WHERE id = 8")
                connection.commit()
                await eventually(lambda: complete(c) > before)
                await eventually(lambda: complete(c) == complete(a))
                assert_same(await poll(a.url), await poll(c.url))


async def test_a_child_moves_to_another_parent_in_the_middle_of_a_window(tmp_path: Path) -> None:
    url = "generator://?events=40000&events_per_window=20000&events_per_second=15000&seed=7"
    async with (
        contextlib.AsyncExitStack() as dying,
        ready(tmp_path / "b", url) as b,
    ):
        a = await dying.enter_async_context(ready(tmp_path / "a", url))
        async with ready(tmp_path / "child", parent_url(a.url, b.url)) as child:
            intake = shop(child).intake
            assert intake is not None
            await eventually(lambda: intake.in_window and intake.ring.last.scn > 0, poll_s=0.001)
            await dying.aclose()
            await reached(child, 2, 30)
            assert_same(await poll(b.url), await poll(child.url))
            assert shop(child).status.reconnect_count == 0, "the source itself moved"
            await eventually(lambda: shop(child).status.source.get("parent") == b.url)
            assert shop(child).status.source["moves"] == 1


async def test_a_child_waits_for_its_only_parent_and_serves_meanwhile(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as dying:
        a = await dying.enter_async_context(ready(tmp_path / "a", GENERATOR))
        async with ready(tmp_path / "b", parent_url(a.url)) as b:
            await reached(b, LAST_SCN)
            await dying.aclose()
            await eventually(lambda: shop(b).status.state == "reconnecting")
            error = shop(b).status.error
            assert error is not None
            assert error.code == "source_unavailable"
            assert a.url in error.message
            assert len((await poll(b.url)).frames) == 3000 + LAST_SCN
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{b.url}/v1/shop/dumps") as answer:
                    assert answer.status == 503
                    assert a.url.removeprefix("http://") in (await answer.json())["detail"]
            more = GENERATOR.replace("events=3000", "events=3500")
            listen = a.url.removeprefix("http://")
            async with ready(tmp_path / "a", more, listen=listen) as again:
                await reached(b, 500)
                assert_same(await poll(again.url), await poll(b.url), all_of=False)


async def test_a_child_that_falls_off_its_parents_ring_reports_it_and_holds_up_no_other(
    tmp_path: Path,
) -> None:
    small = GENERATOR + "&events_per_second=1000000"
    async with ready(tmp_path / "a", small, ring_bytes=128 << 10) as a:
        listen = a.url.removeprefix("http://")
        async with ready(tmp_path / "b", parent_url(a.url)) as b:
            await reached(b, LAST_SCN)
    more = small.replace("events=3000", "events=9000")
    async with ready(tmp_path / "a", more, ring_bytes=128 << 10, listen=listen) as a:
        await reached(a, 1286)
        # Beside the child that was away too long, the same relay reads one that was not.
        databases = {"shop": parent_url(a.url), "other": GENERATOR}
        config = relay_config(tmp_path / "b", databases)
        async with LocalRelay(config, pace=QUICK) as b:
            await b.ready()
            other = b.fetchers["other"]
            await eventually(lambda: shop(b).status.state == "failed")
            await eventually(lambda: other.intake is not None and other.intake.complete == END)
            error = shop(b).status.error
            assert error is not None
            assert error.code == "source_position_lost"
            assert "position 429:4 is older than what the ring serves" in error.message
            assert complete(b) == END
            assert (await poll(b.url)).positions[-1] == END

            async def is_reported() -> bool:
                document = await get_json(b.url, "/v1/databases")
                states = {d["name"]: d["state"] for d in document["databases"]}
                return states == {"shop": "failed", "other": "streaming"}

            await eventually(is_reported)


async def test_a_child_of_another_stream_is_refused(tmp_path: Path) -> None:
    async with ready(tmp_path / "a", GENERATOR) as a:
        async with ready(tmp_path / "b", parent_url(a.url)) as b:
            await reached(b, LAST_SCN)
    async with ready(tmp_path / "other", GENERATOR.replace("seed=5", "seed=6")) as other:
        async with running(tmp_path / "b", parent_url(other.url)) as b:
            await eventually(lambda: shop(b).status.state == "failed")
            error = shop(b).status.error
            assert error is not None
            assert error.code == "clock_mismatch"
            assert complete(b).scn == LAST_SCN


async def test_a_child_of_a_quiet_table_stays_current(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE busy (id INTEGER PRIMARY KEY, name TEXT)")
        connection.execute("CREATE TABLE quiet (id INTEGER PRIMARY KEY, name TEXT)")
        connection.commit()

        def work(count: int) -> None:
            for _ in range(count):
                connection.execute("INSERT INTO busy (name) VALUES (?)", ("x" * 500,))
                connection.commit()

        async with ready(tmp_path / "a", f"sqlite:///{path}", ring_bytes=64 << 10) as a:
            settings = {"sources": ("main.quiet",)}
            async with ready(tmp_path / "b", parent_url(a.url), **settings) as b:
                connection.execute("INSERT INTO quiet VALUES (1, 'one')")
                connection.commit()
                await reached(b, 1)
                work(20)
                await eventually(lambda: complete(b).scn + 1 >= complete(a).scn > 20)
                before = complete(b)
            work(60)
            await eventually(lambda: complete(a).scn >= 81)
            assert (await poll(a.url)).positions[0] > Position(1, 1), "the quiet row is gone there"
            async with ready(tmp_path / "b", parent_url(a.url), **settings) as b:
                connection.execute("INSERT INTO quiet VALUES (2, 'two')")
                connection.commit()
                await reached(b, 82)
                assert shop(b).status.error is None
                served = await poll(b.url)
                rows = [view for view in served.frames if not view.is_control]
                assert len(rows) == 2
                assert all(view.scn > before.scn for view in rows[1:])


async def test_a_child_in_block_mode_forgets_nothing_that_its_reader_has_not_released(
    tmp_path: Path,
) -> None:
    url = GENERATOR.replace("events_per_window=7", "events_per_window=700")
    settings = {"ring_bytes": 128 << 10, "options": {"block": True}}
    async with (
        ready(tmp_path / "a", url) as a,
        ready(tmp_path / "b", parent_url(a.url), **settings) as b,
    ):
        received: dict[Position, bytes] = {}
        blocked_count = 0
        await reached(a, 5)
        end = (await poll(a.url)).positions[-1]
        while end not in received:
            await eventually(lambda: shop(b).status.state == "blocked" or complete(b).scn == 5)
            blocked_count += shop(b).status.state == "blocked"
            served = await poll(b.url)
            assert served.prev == "0:0" or Position(*map(int, served.prev.split(":"))) in received
            fresh = served.bytes_by_position()
            newest = max(fresh)
            assert newest not in received
            received |= fresh
            shop(b).release(newest)
            await eventually(lambda newest=newest: newest_of(b) > newest or newest == end)
        assert blocked_count > 5, "the ring was full many times"
        assert received == (await poll(a.url)).bytes_by_position()
        with pytest.raises(ScnTooOld):
            shop(b).release(Position(0, 0))
        with pytest.raises(BadRequest, match="never served"):
            shop(b).release(Position(6, 0))
        with pytest.raises(BadRequest, match="not in block mode"):
            shop(a).release(Position(1, 0))


async def test_a_parent_in_block_mode_waits_for_the_child_that_releases_and_loses_it_nothing(
    tmp_path: Path,
) -> None:
    url = GENERATOR.replace("events_per_window=7", "events_per_window=700")
    blocking = {"ring_bytes": 128 << 10, "options": {"block": True}}
    releasing = {"ring_bytes": 128 << 10, "options": {"block": True, "release": True}}
    async with ready(tmp_path / "a", url) as a:
        await reached(a, 5)
        everything = (await poll(a.url)).bytes_by_position()
        end = max(everything)
        received: dict[Position, bytes] = {}
        async with contextlib.AsyncExitStack() as until_b_dies:
            b = await until_b_dies.enter_async_context(
                ready(tmp_path / "b", parent_url(a.url), **blocking)
            )
            await eventually(lambda: shop(b).status.state == "blocked", 60)
            waiting = newest_of(b)
            assert waiting < end, "it waits for a reader, and shows it"
            parents = parent_url(b.url, a.url)
            async with ready(tmp_path / "c", parents, **releasing) as c, client(c.url) as http:
                while end not in received:
                    newest = max(received, default=Position(0, 0))
                    await eventually(lambda newest=newest: newest_of(c) > newest, 60)
                    served = await poll(c.url)
                    received |= served.bytes_by_position()
                    body = max(received).to_json()
                    async with http.post("/v1/shop/release", json=body) as answer:
                        assert answer.status == 200, await answer.text()
                    if newest > waiting:
                        # Enough has come through it; the next parent needs no release.
                        await until_b_dies.aclose()
    assert received == everything


def client(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url)


async def test_a_release_over_http_is_checked(tmp_path: Path) -> None:
    async with (
        ready(tmp_path / "a", GENERATOR, options={}) as a,
        client(a.url) as session,
    ):
        for body, code in (
            ({"scn": 1}, "bad_request"),
            ({"scn": "1"}, "bad_request"),
            ({"scn": 1, "seq": 0, "more": 1}, "bad_request"),
            ([], "bad_request"),
        ):
            async with session.post("/v1/shop/release", json=body) as answer:
                assert answer.status == 400
                assert (await answer.json(content_type=None))["code"] == code
