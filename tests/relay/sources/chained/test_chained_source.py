"""The source that is another relay: positions, moves between parents, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.errors import (
    ClockMismatch,
    ConfigError,
    DumpFailed,
    FormatError,
    ScnTooOld,
    ServerUnavailable,
    SourcePositionLost,
    SourceUnavailable,
    UnknownDatabase,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import heartbeat
from databus.common.http.stream_formats import error_frame
from databus.common.schema.source_schema import SourceSchema
from databus.relay.capture.source_catalogue import create_source
from databus.relay.sources.chained.chained_source import (
    Refusal,
    RelaySource,
    read_settings,
    refused_by_all,
)
from databus.relay.sources.chained.parent_relay import sort_out
from databus.relay.sources.contract import Batch, ChunkRequest, RelayingSource
from tests.support.chain import parent_url
from tests.support.faulty_proxy import Proxies
from tests.support.live_relay import CLOCK, ITEMS, ORDERS, LiveRelay, window
from tests.support.waiting import PATIENCE

WINDOWS = [window(scn, [(Op.INSERT, ORDERS, scn), (Op.INSERT, ITEMS, scn)]) for scn in range(1, 9)]
LARGE = window(20, [(Op.INSERT, ORDERS, number) for number in range(400)], text="x" * 50)


def config(*urls: str, sources: tuple[str, ...] = ("*",), **options: str | float) -> DatabaseConfig:
    return DatabaseConfig.model_validate(
        {"name": "child", "url": parent_url(*urls), "sources": sources, "options": options}
    )


@contextlib.asynccontextmanager
async def opened(*urls: str, **settings: Any) -> AsyncIterator[RelaySource]:
    source = RelaySource(config(*urls, **settings))
    try:
        await source.open()
        yield source
    finally:
        await source.close()


@contextlib.contextmanager
def relay(folder: Path, blocks: Iterable[bytes] = WINDOWS, **options: Any) -> Any:
    live = LiveRelay(folder, **options)
    try:
        live.append(*blocks)
        yield live
    finally:
        live.close()


async def read_until(
    source: RelaySource, after: Position, last: Position
) -> tuple[bytes, list[Batch]]:
    """What comes after a position, up to another one."""
    batches: list[Batch] = []
    async with (
        asyncio.timeout(20 * PATIENCE),
        contextlib.aclosing(source.stream_from(after)) as stream,
    ):
        async for batch in stream:
            batches.append(batch)
            if batch.data and list(frame_format.iter_frames(batch.data))[-1].position >= last:
                break
    return b"".join(batch.data for batch in batches), batches


async def first_batch(source: RelaySource, after: Position) -> Batch:
    async with (
        asyncio.timeout(20 * PATIENCE),
        contextlib.aclosing(source.stream_from(after)) as stream,
    ):
        async for batch in stream:
            return batch
    raise AssertionError("the stream has no batch")


# -- settings and refusals --


def test_the_url_names_several_parents_and_the_database_there() -> None:
    settings = read_settings(config("http://a:8701", "http://b", "http://[::1]:9"))
    assert settings.urls == ("http://a:8701", "http://b:8700", "http://[::1]:9")
    assert (settings.database, settings.start, settings.sources) == ("shop", "oldest", ())
    secure = DatabaseConfig.model_validate({"name": "x", "url": "relay+https://a:1/shop"})
    assert read_settings(secure).urls == ("https://a:1",)
    assert isinstance(create_source(secure), RelaySource)
    assert isinstance(create_source(secure), RelayingSource)


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("relay+http://a:8700", {}, "names no database"),
        ("relay+http://a:8700/x/y", {}, "names no database"),
        ("relay+http://a,,b/shop", {}, "empty host"),
        ("relay+http://me:secret@a/shop", {}, "has a user"),
        ("relay+http://a/shop?start=latest", {}, "write options"),
        ("relay+http://a/shop", {"strat": "latest"}, "did you mean start"),
        ("relay+http://a/shop", {"start": "now"}, "it takes oldest, latest"),
        ("relay+http://a/shop", {"silence_s": 0}, "silence_s is 0: input should be greater than 0"),
    ],
)
def test_a_wrong_url_or_option_is_refused_by_name(
    url: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_settings(
            DatabaseConfig.model_validate({"name": "child", "url": url, "options": options})
        )
    assert "secret" not in str(caught.value)


def test_a_position_counts_as_lost_only_when_no_parent_may_still_have_it() -> None:
    old = Refusal("http://a", ScnTooOld("too old"))
    away = Refusal("http://b", SourceUnavailable("away"))
    other = Refusal("http://c", ClockMismatch("another"))
    assert type(refused_by_all([old, away], "x")) is SourceUnavailable
    assert type(refused_by_all([other, old], "x")) is SourcePositionLost
    assert type(refused_by_all([other], "x")) is ClockMismatch
    assert (
        "http://a: too old (scn_too_old); http://b: away"
        in refused_by_all([old, away], "x").message
    )


def test_heartbeats_and_errors_are_parted_from_the_frames_for_the_ring() -> None:
    block = (
        WINDOWS[0] + heartbeat(Position(1, 2), 5) + WINDOWS[1]
        + error_frame(ScnTooOld("gone", prev={"scn": 9}), Position(2, 2))
    )  # fmt: skip
    received = sort_out(block)
    assert received.data == WINDOWS[0] + WINDOWS[1]
    assert (received.last, received.passed) == (Position(2, 2), Position(1, 2))
    assert received.fingerprints == {ORDERS.fingerprint, ITEMS.fingerprint}
    assert isinstance(received.error, ScnTooOld)
    assert received.error.details == {"prev": {"scn": 9}}
    assert sort_out(heartbeat(Position(7, 1), 5)).data == b""


# -- one parent --


async def test_every_byte_after_any_position_is_passed_on_unchanged(tmp_path: Path) -> None:
    whole = b"".join(WINDOWS)
    views = list(frame_format.iter_frames(whole))
    with relay(tmp_path) as live:
        async with live.served(), opened(live.url) as source:
            assert source.clock == CLOCK
            assert [schema.source for schema in await source.schemas()] == [
                "shop.orders", "shop.items",
            ]  # fmt: skip
            for index in (0, 1, 2, 10, len(views) - 2):
                after = views[index]
                data, _ = await read_until(source, after.position, Position(8, 2))
                assert data == whole[after.offset + after.length :]


async def test_a_new_child_begins_exactly_at_the_parents_oldest_position(tmp_path: Path) -> None:
    with relay(tmp_path, WINDOWS[4:], ring_bytes=64 << 10, start=Position(4, 2)) as live:
        async with live.served(), opened(live.url) as source:
            assert await source.first_position() == Position(4, 2)
            live.append(*(window(scn, [(Op.INSERT, ORDERS, 1)] * 100) for scn in range(30, 50)))
            prev = live.writer.state.prev
            assert prev > Position(30)
        async with live.served(), opened(live.url) as source:
            assert await source.first_position() == prev
            assert await source.first_scn() == prev.scn


async def test_the_oldest_event_is_held_from_the_look_at_the_range_on(tmp_path: Path) -> None:
    with relay(tmp_path, ring_bytes=64 << 10) as live:
        async with live.served(), opened(live.url) as source:
            start = await source.first_position()
            assert start == Position(0, 0)
            live.append(*(window(scn, [(Op.INSERT, ORDERS, 1)] * 100) for scn in range(30, 50)))
            assert live.writer.state.prev > Position(30)
            first = await first_batch(source, start)
            assert next(frame_format.iter_frames(first.data)).position == Position(1, 0)


async def test_a_new_child_may_begin_at_the_latest_position(tmp_path: Path) -> None:
    with relay(tmp_path) as live:
        async with live.served(), opened(live.url, start="latest") as source:
            start = await source.first_position()
            assert start == Position(8, 2)
            live.append(window(9, [(Op.INSERT, ORDERS, 9)]))
            data, _ = await read_until(source, start, Position(9, 1))
            assert data == window(9, [(Op.INSERT, ORDERS, 9)])


async def test_a_schema_is_learned_before_the_first_frame_that_uses_it(tmp_path: Path) -> None:
    grown = SourceSchema("shop.orders", (*ORDERS.columns, *ITEMS.columns[1:]), ("id",))
    late = window(9, [(Op.DELETE, ITEMS, 1)])
    with relay(tmp_path, WINDOWS[:0], schemas=(ORDERS,)) as live:
        async with live.served(), opened(live.url) as source:
            live.append(window(1, [(Op.INSERT, ORDERS, 1)]))
            reading = asyncio.create_task(read_until(source, Position(0, 0), Position(9, 1)))
            live.registry.add([ITEMS, grown])
            live.append(late)
            _, batches = await reading
            assert [schema.source for batch in batches for schema in batch.schemas] == [
                "shop.items", "shop.orders",
            ]  # fmt: skip
            using = next(b for b in batches if late in b.data)
            assert ITEMS in using.schemas


async def test_the_parent_filters_and_positions_stay_raw(tmp_path: Path) -> None:
    with relay(tmp_path) as live:
        live.append(window(9, [(Op.INSERT, ORDERS, 9)]))
        async with live.served(), opened(live.url, sources=("shop.items",)) as source:
            assert [schema.source for schema in await source.schemas()] == ["shop.items"]
            data, _ = await read_until(source, Position(0, 0), Position(8, 2))
            found = [view.position for view in frame_format.iter_frames(data)]
            assert found == [Position(scn, seq) for scn in range(1, 9) for seq in (1, 2)]
            # The window of another table costs nothing, but its scn is reported as passed.
            batch = await first_batch(source, Position(8, 2))
            assert (batch.data, batch.resolved) == (b"", 8)


async def test_an_idle_parent_makes_an_empty_batch_at_least_every_second(tmp_path: Path) -> None:
    with relay(tmp_path) as live:
        async with live.served(), opened(live.url) as source:
            async with asyncio.timeout(5 * PATIENCE):
                batch = await first_batch(source, Position(8, 2))
            assert (batch.data, batch.resolved) == (b"", 7)


# -- what a parent refuses --


async def test_a_position_that_the_parent_has_forgotten_is_lost_and_the_range_named(
    tmp_path: Path,
) -> None:
    with relay(tmp_path, start=Position(0, 7)) as live:
        async with live.served(), opened(live.url) as source:
            with pytest.raises(SourcePositionLost, match=r"after 0:3.*older than.*after 0:7"):
                await first_batch(source, Position(0, 3))


async def test_a_parent_of_another_clock_is_never_read(tmp_path: Path) -> None:
    with relay(tmp_path / "a") as live, relay(tmp_path / "b", clock="other:1") as other:
        async with live.served(), other.served():
            async with opened(live.url, other.url) as source:
                source._leave()
                data, _ = await read_until(source, Position(7, 2), Position(8, 2))
                assert data == WINDOWS[7]
            async with opened(other.url, live.url) as source:
                assert source.clock == "other:1"
                findings = await source.preflight()
                assert len(findings) == 1
                assert "clocks differ" in findings[0].problem
            async with opened(live.url) as source:
                source._clock = "third:1"
                with pytest.raises(ClockMismatch, match="test:1"):
                    await first_batch(source, Position(7, 2))


async def test_an_unknown_database_and_a_silent_address_have_their_errors(
    tmp_path: Path,
) -> None:
    with relay(tmp_path, database="stock") as live:
        async with live.served():
            with pytest.raises(UnknownDatabase, match="no database 'shop'"):
                async with opened(live.url):
                    pass
            with pytest.raises(SourceUnavailable, match="does not answer"):
                async with opened("http://127.0.0.1:9"):
                    pass
            child = RelaySource(config(live.url, "http://127.0.0.1:9"))
            findings = await child.preflight()
            await child.close()
            assert [finding.fatal for finding in findings] == [True, False]


async def test_a_damaged_byte_on_the_way_is_never_passed_on() -> None:
    damaged = bytearray(b"".join(WINDOWS))
    damaged[len(WINDOWS[0]) + 80] ^= 1
    schemas = [{"schema": schema.to_json()} for schema in (ORDERS, ITEMS)]
    register = json.dumps({"clock": CLOCK, "schemas": schemas}).encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        body = register if b"/register" in request else bytes(damaged)
        writer.write(
            b"HTTP/1.1 200 OK\r\nDatabus-Clock: test:1\r\nDatabus-Prev: 0:0\r\n"
            b"Databus-Max: 8:2\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, opened(f"http://127.0.0.1:{port}") as source:
        with pytest.raises(FormatError):
            await first_batch(source, Position(0, 0))


async def test_a_parent_that_falls_silent_is_given_up(
    tmp_path: Path, faulty_proxy: Proxies
) -> None:
    with relay(tmp_path) as live:
        async with live.served():
            proxy = await faulty_proxy("127.0.0.1", int(live.url.rpartition(":")[2]))
            async with opened(proxy.url, silence_s=0.3) as source:
                async with asyncio.timeout(20 * PATIENCE):
                    with pytest.raises(SourceUnavailable, match=proxy.url):
                        async for batch in source.stream_from(Position(0, 0)):
                            assert b"".join(WINDOWS).startswith(batch.data)
                            proxy.stall()


async def test_a_child_that_is_too_slow_is_cut_off_behind_its_last_whole_frame(
    tmp_path: Path,
) -> None:
    with relay(tmp_path, [], ring_bytes=256 << 10) as live:
        async with live.served(), opened(live.url) as source:
            stream = source.stream_from(Position(0, 0))
            large = [(Op.INSERT, ORDERS, number) for number in range(20)]
            live.append(window(1, large, text="x" * 4_000))
            async with asyncio.timeout(30 * PATIENCE), contextlib.aclosing(stream):
                data = (await anext(stream)).data
                # It does not read on, and the parent writes more than all buffers between hold.
                for scn in range(2, 400):
                    live.append(window(scn, large, text="x" * 4_000))
                    for _ in range(5):
                        await asyncio.sleep(0)
                # It is notified, or its connection breaks off where an extent was overtaken.
                with pytest.raises((SourcePositionLost, SourceUnavailable)):
                    async for batch in stream:
                        data += batch.data
                last = list(frame_format.iter_frames(data))[-1].position
                with pytest.raises(SourcePositionLost):
                    async for _ in source.stream_from(last):
                        pytest.fail("what was evicted is served")
            found = [view.position for view in frame_format.iter_frames(data)]
            assert found == [Position(1 + n // 21, n % 21) for n in range(len(found))]
            assert 0 < len(found) < 399 * 21


# -- several parents --


async def test_a_parent_that_dies_inside_a_window_is_replaced_by_the_next(
    tmp_path: Path, faulty_proxy: Proxies
) -> None:
    whole = b"".join([*WINDOWS, LARGE])
    with (
        relay(tmp_path / "a", [*WINDOWS, LARGE]) as a,
        relay(tmp_path / "b", [*WINDOWS, LARGE]) as b,
    ):
        async with a.served(), b.served():
            proxy = await faulty_proxy("127.0.0.1", int(a.url.rpartition(":")[2]))
            async with opened(proxy.url, b.url) as source:
                assert (await source.status())["parent"] == proxy.url
                proxy.cut_after(len(whole) // 2)
                data, batches = await read_until(source, Position(0, 0), Position(20, 400))
                assert data == whole
                assert len(batches) > 1
                status = await source.status()
                assert (status["parent"], status["moves"]) == (b.url, 1)
                assert status["parent_max"] == {"scn": 20, "seq": 400}


async def test_the_next_parent_is_tried_if_the_first_no_longer_has_the_position(
    tmp_path: Path,
) -> None:
    with relay(tmp_path / "a", start=Position(0, 9)) as young, relay(tmp_path / "b") as old:
        async with young.served(), old.served():
            async with opened(young.url, old.url) as source:
                data, _ = await read_until(source, Position(0, 0), Position(8, 2))
                assert data == b"".join(WINDOWS)
            async with opened("http://127.0.0.1:9", old.url) as source:
                assert await source.first_position() == Position(0, 0)


async def test_a_chain_runs_no_dumps_itself_and_names_the_relay_that_does(tmp_path: Path) -> None:
    with relay(tmp_path) as live:
        async with live.served(), opened(live.url) as source:
            with pytest.raises(DumpFailed, match=f"{live.url}/v1/shop/dumps"):
                await source.read_chunk(ChunkRequest("shop.orders", 10))
            with pytest.raises(DumpFailed, match=r"shop\.orders"):
                await source.largest_key("shop.orders")
            # This parent has no fetcher; its own word comes back.
            status, body = await source.forward("GET", "/dumps", b"")
            assert status == 503
            assert json.loads(body)["code"] == "server_unavailable"
            await source.ack(5)


@pytest.mark.parametrize(
    "rule", [{"exclude_sources": ["a.b"]}, {"null_columns": ["a.b.c"]}, {"keys": {"a.b": "*"}}]
)
def test_rules_belong_to_the_relay_that_reads_the_database(rule: dict[str, object]) -> None:
    config = DatabaseConfig.model_validate({"name": "a", "url": "relay+http://h:1/a"} | rule)
    with pytest.raises(ConfigError, match=next(iter(rule))):
        create_source(config)


# -- releasing

PROBLEM = '{"code": "server_unavailable", "title": "the fetcher does not answer"}'


@pytest.mark.parametrize("refusal", [PROBLEM, "<html>502 Bad Gateway</html>", "[]"])
async def test_a_release_that_a_parent_refuses_is_sent_again(refusal: str) -> None:
    answers = [web.Response(status=503, text=refusal), web.json_response({})]
    released: list[object] = []

    async def release(request: web.Request) -> web.Response:
        released.append(await request.json())
        return answers[len(released) - 1]

    app = web.Application()
    app.router.add_post("/v1/shop/release", release)
    async with TestServer(app) as server:
        source = RelaySource(config(str(server.make_url("")).rstrip("/"), release=True))
        with pytest.raises(ServerUnavailable):
            await source.release(Position(7, 1))
        await source.release(Position(7, 1))
        await source.release(Position(7, 1))
        assert released == [{"scn": 7, "seq": 1}] * 2
        await source.close()
