"""The search sink against a real OpenSearch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from databus.client.sinks import SinkProcess, TroubledSink
from databus.client.sinks.search.bulk_requests import (
    SearchDocument,
    bodies,
    check_answer,
    checked_index,
    document_id,
)
from databus.client.sinks.search.search_sink import SearchSink
from databus.client.sinks.sink_kinds import sink_of
from databus.common.errors import ConfigError, RowRefused, SinkRefused, SinkUnavailable
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.sink_config import SearchSinkConfig, SinkConfig
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.shop import ITEMS, ORDERS, orders, window
from tests.client.sinks.sink_runs import Watched, sink_config
from tests.support.search_server import SearchServer
from tests.support.search_server import search_server as search_server  # a fixture
from tests.support.waiting import eventually

SOURCES = ("shop.orders", "shop.items")


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "search_server" in request.fixturenames:
        request.getfixturevalue("search_server").empty()


def config_of(server: SearchServer, *relays: str, **settings: Any) -> SinkConfig:
    search = {"url": server.url} | settings.pop("search", {})
    return sink_config(*relays, sql=None, search=search, **settings)


def tables_in(server: SearchServer) -> dict[str, dict[Any, Any]]:
    """The documents as the tables of a workload."""
    return {
        source: {(int(id_),): one for id_, one in server.documents(source).items()}
        for source in SOURCES
    }


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_failure_at_any_call_loses_nothing(
    scripted: StartServer, search_server: SearchServer, tmp_path: Path, after: bool
) -> None:
    made, tables = workload(11, 6)
    server = await scripted(*made)
    for fails_at in range(40):
        search_server.empty()
        folder = tmp_path / str(fails_at)
        config = config_of(search_server, server.url, batch_rows=4, data_dir=folder)
        sink = TroubledSink(sink_of(config), fails_at, after=after)
        await Watched(config, sink, buffer_bytes=400).until_scn(6)
        sink.check()
        assert tables_in(search_server) == tables
        if sink.call_count <= fails_at:
            break
    assert 6 <= fails_at < 39


async def test_a_restart_at_any_commit_leaves_the_index_equal_to_the_source(
    scripted: StartServer, search_server: SearchServer, tmp_path: Path
) -> None:
    made, tables = workload(5, 8)
    server = await scripted()
    for scn, one in enumerate(made, start=1):
        server.append(one)
        config = config_of(search_server, server.url, data_dir=tmp_path)
        await Watched(config, sink_of(config)).until_scn(scn)
    assert tables_in(search_server) == tables
    # Everything comes again, to an index that has it: nothing changes on the way.
    config = config_of(search_server, server.url, data_dir=tmp_path / "again")
    sink = sink_of(config)
    assert isinstance(sink, SearchSink)
    await Watched(config, sink).until_scn(8)
    assert tables_in(search_server) == tables


def _has_committed(process: Watched) -> bool:
    return bool(process.committed)


@pytest.mark.faults
@pytest.mark.slow
async def test_kill_9_of_the_server_leaves_the_index_equal_to_the_source(
    scripted: StartServer, tmp_path: Path
) -> None:
    target = SearchServer(tmp_path / "node")
    try:
        made, tables = workload(7, 60)
        server = await scripted()
        for last in (20, 40, 60):
            for one in made[last - 20 : last]:
                server.append(one)
            config = config_of(target, server.url, data_dir=tmp_path, retry_most=0.2, batch_rows=3)
            process = Watched(config, sink_of(config))
            running = asyncio.ensure_future(process.until_scn(last))
            await eventually(partial(_has_committed, process))
            target.kill9()
            await asyncio.to_thread(target.start)
            await running
        assert tables_in(target) == tables
    finally:
        target.close()


async def test_an_older_row_replaces_no_newer_one(
    scripted: StartServer, search_server: SearchServer, tmp_path: Path
) -> None:
    newer = {"id": 1, "state": "newer", "amount": None}
    search_server.ask(
        "PUT", "/shop.orders/_doc/1?version=9&version_type=external&refresh=true", newer
    )
    server = await scripted(window(3, ("c", ORDERS, 1, "older"), ("c", ORDERS, 2, "x")))
    config = config_of(search_server, server.url, data_dir=tmp_path)
    await Watched(config, sink_of(config)).until_scn(3)
    assert search_server.documents("shop.orders")["1"] == newer
    server.append(window(4, ("t", ORDERS, 0, None)))
    await Watched(config, sink_of(config)).until_scn(4)
    assert search_server.documents("shop.orders") == {"1": newer}
    server.append(window(12, ("d", ORDERS, 1, None)))
    await Watched(config, sink_of(config)).until_scn(12)
    assert search_server.documents("shop.orders") == {}


async def test_routes_name_indexes_and_choose_columns_and_rows(
    scripted: StartServer, search_server: SearchServer, tmp_path: Path
) -> None:
    server = await scripted(
        window(1, ("c", ORDERS, 1, "paid"), ("c", ORDERS, 2, "open"), ("c", ITEMS, 1, "pen"))
    )
    route = [
        {
            "source": "shop.orders", "target": "Paid-{table}", "columns": ["state"],
            "where": "state = 'paid'",
        }
    ]  # fmt: skip
    config = config_of(
        search_server, server.url, data_dir=tmp_path, route=route, search={"refresh": True}
    )
    await Watched(config, sink_of(config)).until_scn(1)
    assert search_server.documents("paid-orders") == {"1": {"id": 1, "state": "paid"}}
    assert search_server.ask("GET", "/shop.items") is None


def toast_update(scn: int, state: str, before: dict[str, Any] | None = None) -> bytes:
    """An update without the column ``amount``, as PostgreSQL sends it."""
    builder = WindowBuilder(scn, scn * 1_000_000)
    builder.event(
        Op.UPDATE,
        ORDERS.source_id,
        ORDERS.fingerprint,
        ORDERS.encode_key([1]),
        before=None if before is None else ORDERS.encode_row(before),
        after=ORDERS.encode_row({"id": 1, "state": state, "amount": None}),
        absent=b"\x04",
    )
    return builder.end(f"tx{scn}")


async def test_columns_that_did_not_change_stay_in_the_document(
    scripted: StartServer, search_server: SearchServer, tmp_path: Path
) -> None:
    first = ORDERS.encode_row({"id": 1, "state": "a", "amount": Decimal("7.50")})
    builder = WindowBuilder(1, 1_000_000)
    builder.event(
        Op.INSERT, ORDERS.source_id, ORDERS.fingerprint, ORDERS.encode_key([1]), after=first
    )
    server = await scripted(builder.end("tx1"))
    config = config_of(search_server, server.url, data_dir=tmp_path)
    await Watched(config, sink_of(config)).until_scn(1)
    server.append(toast_update(2, "b"))
    await Watched(config, sink_of(config)).until_scn(2)
    assert search_server.documents("shop.orders")["1"] == {
        "id": 1, "state": "b", "amount": "7.50",
    }  # fmt: skip
    search_server.empty()
    server.append(toast_update(3, "c"))
    with pytest.raises(RowRefused, match="came without amount"):
        await Watched(config, sink_of(config)).until_scn(3)


async def test_a_document_that_is_refused_is_set_aside(
    scripted: StartServer, search_server: SearchServer, tmp_path: Path
) -> None:
    mapping = {"mappings": {"properties": {"state": {"type": "integer"}}}}
    search_server.ask("PUT", "/shop.orders", mapping)
    server = await scripted(
        window(1, ("c", ORDERS, 1, "5"), ("c", ORDERS, 2, "no number"), ("c", ORDERS, 3, "6")),
        window(2, ("c", ORDERS, 4, "7")),
    )
    config = config_of(search_server, server.url, data_dir=tmp_path)
    with pytest.raises(RowRefused, match=r"shop\.orders/2: 400"):
        await Watched(config, sink_of(config)).until_scn(2)
    config = config_of(search_server, server.url, data_dir=tmp_path, refused="set-aside")
    await Watched(config, sink_of(config)).until_scn(2)
    assert set(search_server.documents("shop.orders")) == {"1", "3", "4"}
    outcome = await SinkProcess(config, sink_of(config)).replay()
    assert (outcome.delivered, outcome.failed) == (0, 1)


async def test_a_truncate_of_many_documents(
    scripted: StartServer, search_server: SearchServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, *range(2500)), window(2, ("t", ORDERS, 0, None)))
    config = config_of(search_server, server.url, data_dir=tmp_path, search={"bulk_bytes": 4096})
    await Watched(config, sink_of(config)).until_scn(2)
    assert search_server.documents("shop.orders") == {}


async def test_answers_are_retried_or_stop_the_sink() -> None:
    statuses: list[int] = []
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        return web.json_response({}, status=statuses.pop(0))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    wanted: list[tuple[int, type[Exception]]] = [
        (503, SinkUnavailable), (429, SinkUnavailable), (401, SinkRefused), (413, RowRefused),
    ]  # fmt: skip
    try:
        for status, error in wanted:
            statuses.append(status)
            config = SearchSinkConfig.model_validate({"url": f"http://u:p%40@{host}:{port}"})
            sink = SearchSink(config)
            with pytest.raises(error) as found:
                await sink._client.open()
            assert "p%40" not in str(found.value)
            await sink.close()
        assert seen[0].startswith("Basic ")
    finally:
        await runner.cleanup()
    with pytest.raises(SinkUnavailable, match="does not answer"):
        await sink._client.open()
    await sink.close()
    with pytest.raises(ConfigError, match="no http"):
        SearchSink(SearchSinkConfig.model_validate({"url": "redis://h"}))


def test_bodies_ids_and_names() -> None:
    documents = [SearchDocument("i", str(n), 5, {"n": n} if n % 2 else None) for n in range(9)]
    found = list(bodies(documents, 200))
    assert sum(count for _, count in found) == 9
    assert len(found) > 1
    lines = b"".join(body for body, _ in found).splitlines()
    action = {"_index": "i", "_id": "1", "version": 5, "version_type": "external_gte"}
    assert [json.loads(line) for line in lines[:3]] == [
        {"delete": {**action, "_id": "0"}}, {"index": action}, {"n": 1},
    ]  # fmt: skip
    ids = [{"a": "x", "b": "y"}, {"a": "x,", "b": "y"}, {"a": None, "b": "y"}, {"a": '["x","y"]'}]
    assert len({document_id("t", one) for one in ids}) == len(ids)
    assert document_id("t", {"a": 7}) == "7"
    with pytest.raises(RowRefused, match="600 bytes"):
        document_id("t", {"a": "x" * 600})
    for name in ("a b", "_x", "a/b", "", "x" * 300):
        with pytest.raises(SinkRefused, match="no name of an index"):
            checked_index(name)


def test_each_item_of_an_answer_counts() -> None:
    def item(action: str, status: int) -> dict[str, Any]:
        return {action: {"_index": "i", "_id": "1", "status": status}}

    check_answer({"items": [item("index", 201), item("index", 409), item("delete", 404)]}, 3)
    with pytest.raises(SinkUnavailable):
        check_answer({"items": [item("index", 400), item("index", 429)]}, 2)
    with pytest.raises(RowRefused):
        check_answer({"items": [item("index", 404)]}, 1)
    with pytest.raises(SinkUnavailable, match="has not 2 items"):
        check_answer({"items": [item("index", 200)]}, 2)
