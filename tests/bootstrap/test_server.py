"""The server over HTTP: what it answers, what it refuses, where a reader goes on."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.bootstrap import segments, sending, stream
from databus.bootstrap import server as server_module
from databus.bootstrap.log import HotLog
from databus.bootstrap.manifest import Store
from databus.bootstrap.openapi import ENDPOINTS
from databus.bootstrap.runs import RunKind
from databus.bootstrap.served import OpenLogs
from databus.bootstrap.server import bootstrap_app, serve_bootstrap
from databus.common import checkpoint as checkpoints
from databus.common.checkpoint import (
    BootstrapCheckpoint,
    OnlineCheckpoint,
    Position,
)
from databus.common.config import BootstrapConfig
from databus.common.frame import Op, iter_frames, source_id
from databus.common.listening import listening_socket
from databus.common.schema import Column, Kind, SourceSchema
from databus.common.window import WindowBuilder
from tests.bootstrap.model import (
    CLOCK,
    SOURCES,
    START,
    History,
    State,
    compact,
    frames_between,
    write_run,
)

FRAMES = {"Accept": "application/vnd.databus.frames"}
SCHEMA = SourceSchema("shop.orders", (Column("id", Kind.INT, nullable=False),), ("id",))


class Bench:
    """A server over a store of our own making."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.logs = OpenLogs()
        self.store = Store(data_dir / "shop")
        self.store.create()
        self.log: HotLog = self.logs.to_write(data_dir / "shop" / "log")
        self.history = History(21)
        self.blocks: list[bytes] = []
        self.url = ""
        self.session: aiohttp.ClientSession

    def bind(self) -> None:
        self.log.bind("shop", CLOCK, START)

    def seed(self) -> None:
        self.log.put_note("seeding", {name: {"state": "seeded"} for name in SOURCES})

    def write(self, windows: int = 10) -> None:
        self.blocks.append(self.history.block(windows))
        self.log.append(self.blocks[-1], 1)

    def seal(self) -> None:
        segments.seal(self.log, self.store, 1)

    def rebase(self) -> None:
        chain = self.store.read().chain
        frames = frames_between(self.blocks, START, chain[-1].stop)
        run = write_run(self.store, RunKind.BASE, START, chain[-1].stop, compact(frames, base=True))
        old = self.store.read().base
        drop = (old,) if old else ()
        self.store.switch(lambda m: m.with_changes(add=run, drop=drop, now_us=1))

    def truth(self) -> State:
        return State().apply_all(self.blocks)

    async def get(self, path: str, **query: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, params=query) as answer:
            return answer.status, await answer.json(content_type=None)

    async def frames(self, endpoint: str = "bootstrap", **query: Any) -> bytes:
        url = f"{self.url}/v1/shop/{endpoint}"
        async with self.session.get(url, params=query, headers=FRAMES) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()


def checkpoints_in(data: bytes) -> list[Any]:
    return [
        checkpoints.decode(bytes(one.after or b""))
        for one in iter_frames(data)
        if one.op == Op.CHECKPOINT
    ]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A running server over a new, empty log."""
    bench = Bench(tmp_path)
    config = BootstrapConfig(data_dir=tmp_path, listen="127.0.0.1:0", databases=("shop",))
    listener = listening_socket(config.listen)
    bench.url = "http://{}:{}".format(*listener.getsockname()[:2])
    stop = asyncio.Event()
    serving = asyncio.create_task(serve_bootstrap(config, listener, stop, bench.logs))
    async with aiohttp.ClientSession() as session:
        bench.session = session
        yield bench
    stop.set()
    await serving
    assert bench.store.check() == []
    bench.logs.close()


async def test_a_new_reader_gets_the_whole_state_and_the_point_to_go_on_at(bench: Bench) -> None:
    bench.bind()
    bench.seed()
    bench.write()
    bench.seal()
    bench.rebase()
    bench.write()
    bench.seal()
    bench.write()
    for query in ({}, {"scn": "0"}, {"sources": "shop.*"}):
        data = await bench.frames(**query)
        assert State().apply_all([data]).rows == bench.truth().rows
        last = checkpoints_in(data)[-1]
        assert last == OnlineCheckpoint("shop", CLOCK, bench.history.position)


async def test_a_reader_that_comes_back_gets_what_changed_since(bench: Bench) -> None:
    bench.bind()
    bench.write()
    bench.seal()
    since = bench.history.position
    bench.write()
    checkpoint = checkpoints.encode(OnlineCheckpoint("shop", CLOCK, since))
    data = await bench.frames(checkpoint=checkpoint)
    rows = [one for one in iter_frames(data) if one.op != Op.CHECKPOINT]
    assert b"".join(bytes(one.bytes) for one in rows) == bench.blocks[-1]
    assert await bench.frames(scn=f"{since.scn}:{since.seq}") == data


async def test_answers_bounded_in_size_join_to_the_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CHECKPOINT_BYTES", 300)
    monkeypatch.setattr(sending, "CHECKPOINT_BYTES", 300)
    bench.bind()
    bench.seed()
    bench.write(20)
    bench.seal()
    bench.rebase()
    bench.write(20)
    state = State()
    query: dict[str, Any] = {"max_bytes": 2000}
    answers = 0
    while True:
        data = await bench.frames(**query)
        assert len(data) < 6000
        state.apply_all([data])
        answers += 1
        last = checkpoints_in(data)[-1]
        if isinstance(last, OnlineCheckpoint):
            break
        query["checkpoint"] = checkpoints.encode(last)
    assert answers > 3
    assert state.rows == bench.truth().rows
    assert state.regressions == []


async def test_the_first_checkpoint_tells_whether_the_run_asked_for_is_still_there(
    bench: Bench,
) -> None:
    bench.bind()
    bench.seed()
    bench.write(20)
    bench.seal()
    bench.rebase()
    whole = await bench.frames()
    middle = next(one for one in checkpoints_in(whole) if one.row > 2)
    again = checkpoints_in(await bench.frames(checkpoint=checkpoints.encode(middle)))
    assert (again[0].run, again[0].row) == (middle.run, middle.row)
    bench.write(20)
    bench.seal()
    bench.rebase()
    bench.store.collect(0, "cs", now_us=2)
    data = await bench.frames(checkpoint=checkpoints.encode(middle))
    first = next(one for one in checkpoints_in(data) if one.run != middle.run)
    assert (first.run, first.row) == (getattr(bench.store.read().base, "id", ""), 0)


async def test_a_table_that_is_not_whole_yet_is_not_served_from_nothing(bench: Bench) -> None:
    bench.bind()
    bench.write()
    states = {name: {"state": "seeded"} for name in SOURCES[:2]}
    bench.log.put_note("seeding", {**states, SOURCES[2]: {"state": "dumping"}})
    async with bench.session.get(f"{bench.url}/v1/shop/bootstrap") as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"]
        problem = await answer.json(content_type=None)
    assert problem["code"] == "not_seeded"
    assert problem["sources"] == [SOURCES[2]]
    assert await bench.frames(sources=SOURCES[0])
    assert await bench.frames(scn=f"{START.scn}:{START.seq}"), "a reader with a state is served"


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ({"scn": "3"}, 410, "log_too_young"),
        ({"scn": "x"}, 400, "bad_request"),
        ({"partition": "mod:0"}, 400, "bad_filter"),
        ({"checkpoint": "{}"}, 400, "bad_checkpoint"),
        ({"sauces": "a"}, 400, "bad_request"),
        ({"sources": "shop.unknown"}, 404, "unknown_source"),
        (
            {
                "checkpoint": checkpoints.encode(
                    OnlineCheckpoint("shop", "another", Position(50, 0))
                )
            },
            409,
            "clock_mismatch",
        ),
    ],
)
async def test_what_cannot_be_answered_is_refused_by_code(
    bench: Bench, query: dict[str, str], status: int, code: str
) -> None:
    bench.bind()
    bench.seed()
    bench.write()
    found, problem = await bench.get("/v1/shop/bootstrap", **query)
    assert (found, problem["code"]) == (status, code)


async def test_a_reader_ahead_of_the_log_is_sent_away_after_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "AHEAD_WAIT_S", 0.05)
    bench.bind()
    bench.seed()
    status, problem = await bench.get("/v1/shop/bootstrap", scn="999999999")
    assert (status, problem["code"]) == (503, "server_unavailable")


async def test_a_vanished_file_ends_the_answer_with_an_error_frame(bench: Bench) -> None:
    bench.bind()
    bench.seed()
    bench.write(10)
    bench.seal()
    bench.write(10)
    bench.seal()
    first, second = bench.store.read().chain
    path = bench.store.run_folder(second) / second.files[0].name
    whole = path.read_bytes()
    path.unlink()
    data = await bench.frames()
    *_, last = iter_frames(data)
    assert last.op == Op.ERROR
    problem = json.loads(bytes(last.after or b""))
    assert problem["code"] == "store_error"
    assert second.id in problem["detail"]
    *_, reached = checkpoints_in(data)
    assert isinstance(reached, BootstrapCheckpoint)
    assert reached.position == first.stop
    path.write_bytes(whole)


async def test_runs_merged_away_under_a_reader_are_not_missed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", 500)
    bench.bind()
    bench.seed()
    for _ in range(3):
        bench.write(10)
        bench.seal()
    chain = bench.store.read().chain
    url = f"{bench.url}/v1/shop/bootstrap"
    async with bench.session.get(url, headers=FRAMES) as answer:
        head = await answer.content.readany()
        frames = frames_between(bench.blocks, START, chain[-1].stop)
        merged = write_run(
            bench.store, RunKind.DELTA, START, chain[-1].stop, compact(frames, base=False)
        )
        bench.store.switch(lambda m: m.with_changes(add=merged, drop=chain, now_us=1))
        bench.store.collect(0, "cs", now_us=2)
        bench.write(5)
        rest = await answer.read()
    state = State().apply_all([head + rest])
    last = checkpoints_in(head + rest)[-1]
    expected = State().apply_all(
        bytes(one.bytes) for one in frames_between(bench.blocks, START, last.position)
    )
    assert state.rows == expected.rows


async def test_the_other_endpoints_say_what_is_there(bench: Bench) -> None:
    status, problem = await bench.get("/readyz")
    assert (status, problem["reasons"]) == (503, ["the log of shop has not begun"])
    assert (await bench.get("/v1/shop/startSCN"))[0] == 503
    assert (await bench.get("/v1/none/startSCN"))[1]["code"] == "unknown_database"
    bench.bind()
    bench.seed()
    bench.log.add_schemas([SCHEMA])
    bench.write()
    assert await bench.get("/v1/shop/startSCN") == (200, {"scn": 0, "seq": 0})
    bench.seal()
    bench.rebase()
    end = bench.history.position.to_json()
    assert await bench.get("/v1/shop/startSCN") == (200, end)
    assert await bench.get("/v1/shop/targetSCN") == (200, end)
    assert (await bench.get("/readyz"))[0] == (await bench.get("/healthz"))[0] == 200
    _, registered = await bench.get("/v1/shop/register", sources="shop.orders")
    assert registered["clock"] == CLOCK
    assert registered["schemas"][0]["fingerprint"] == f"{SCHEMA.fingerprint:016x}"
    _, listed = await bench.get("/v1/databases")
    assert listed["databases"][0]["snapshot"] == end
    assert listed["databases"][0]["state"] == "seeded"
    _, sources = await bench.get("/v1/shop/sources")
    assert {item["name"] for item in sources["sources"]} == set(SOURCES)
    _, whole = await bench.get("/v1/status")
    (database,) = whole["databases"]
    assert [run["kind"] for run in database["runs"]] == ["base", "segment"]
    assert database["gaps"] == []
    _, described = await bench.get("/v1/openapi.json")
    assert "/v1/{db}/bootstrap" in described["paths"]
    async with bench.session.get(f"{bench.url}/metrics") as answer:
        metrics = await answer.text()
    assert f'databus_bootstrap_snapshot_scn{{database="shop"}} {end["scn"]}.0' in metrics


async def test_before_the_writer_has_read_a_relay_no_database_is_called_unknown(
    tmp_path: Path,
) -> None:
    logs, stop = OpenLogs(writes=True), asyncio.Event()
    config = BootstrapConfig(data_dir=tmp_path, listen="127.0.0.1:0")
    listener = listening_socket(config.listen)
    url = "http://{}:{}/v1/shop/register".format(*listener.getsockname()[:2])
    serving = asyncio.create_task(serve_bootstrap(config, listener, stop, logs))
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        problem = await answer.json(content_type=None)
    stop.set()
    await serving
    logs.close()
    assert (answer.status, problem["code"]) == (503, "server_unavailable")
    assert problem["retry"]


def rows_in(data: bytes) -> list[bytes]:
    return [bytes(one.bytes) for one in iter_frames(data) if one.op != Op.CHECKPOINT]


async def test_changes_are_answered_net_or_all_between_positions_and_times(bench: Bench) -> None:
    bench.bind()
    bench.write()
    bench.seal()
    since = bench.history.position
    bench.write()
    until = bench.history.position
    bench.write()
    between = frames_between(bench.blocks, since, until)
    span = {"since": f"{since.scn}:{since.seq}", "until": f"{until.scn}:{until.seq}"}
    data = await bench.frames("changes", **span, mode="all")
    assert rows_in(data) == [bytes(one.bytes) for one in between]
    net = await bench.frames("changes", **span)
    assert rows_in(net) == [bytes(one.bytes) for one in compact(between, base=False)]
    for answer in (data, net):
        assert checkpoints_in(answer) == [OnlineCheckpoint("shop", CLOCK, until)]

    first = dt.datetime.fromtimestamp(1_700_000_000, dt.UTC)
    times = {
        "since": (first + dt.timedelta(microseconds=since.scn)).isoformat(),
        "until": (first + dt.timedelta(microseconds=until.scn)).isoformat(),
    }
    by_time = await bench.frames("changes", **times, mode="all")
    by_scn = await bench.frames("changes", since=since.scn, until=until.scn, mode="all")
    assert rows_in(by_time) == rows_in(by_scn)
    whole = await bench.frames("changes", mode="all")
    assert rows_in(whole) == [
        bytes(one.bytes) for block in bench.blocks for one in iter_frames(block)
    ]


async def test_changes_and_snapshots_come_as_lines_and_as_events(bench: Bench) -> None:
    bench.bind()
    bench.seed()
    bench.log.add_schemas([SCHEMA])
    builder = WindowBuilder(500, 7)
    key = SCHEMA.encode_key({"id": 3})
    row = SCHEMA.encode_row({"id": 3})
    builder.event(Op.INSERT, SCHEMA.source_id, SCHEMA.fingerprint, key, after=row)
    bench.log.append(builder.end("t1"), 1)
    for endpoint in ("changes", "snapshot"):
        url = f"{bench.url}/v1/shop/{endpoint}"
        async with bench.session.get(url, params={"format": "ndjson"}) as answer:
            lines = [json.loads(line) for line in (await answer.text()).splitlines()]
        assert [line.get("op") or line["control"] for line in lines] == ["c", "checkpoint"]
        assert lines[0]["after"] == {"id": 3}
        async with bench.session.get(url, headers={"Accept": "text/event-stream"}) as answer:
            assert answer.headers["Databus-Max"] == "500:1"
            text = await answer.text()
        assert [line for line in text.splitlines() if line.startswith("event:")] == [
            "event: change",
            "event: checkpoint",
        ]


async def test_a_snapshot_is_the_state_of_all_tables_as_of_a_position(bench: Bench) -> None:
    bench.bind()
    bench.seed()
    bench.log.put_note("origin", START.to_json())
    bench.write()
    bench.seal()
    past = bench.history.position
    bench.write()
    bench.rebase()
    data = await bench.frames("snapshot", scn=f"{past.scn}:{past.seq}")
    frames = frames_between(bench.blocks, START, past)
    assert rows_in(data) == [bytes(one.bytes) for one in compact(frames, base=True)]
    assert checkpoints_in(data) == [OnlineCheckpoint("shop", CLOCK, past)]
    now = await bench.frames("snapshot")
    assert State().apply_all([now]).rows == bench.truth().rows
    one = await bench.frames("snapshot", sources=SOURCES[1])
    assert {frame.source_id for frame in iter_frames(one)} <= {0, source_id(SOURCES[1])}


async def test_a_snapshot_before_a_table_was_whole_is_refused(bench: Bench) -> None:
    bench.bind()
    bench.log.put_note("origin", START.to_json())
    bench.write()
    early = bench.history.position
    bench.write()
    end = bench.history.position.to_json()
    states = {name: {"state": "seeded"} for name in SOURCES}
    bench.log.put_note("seeding", {**states, SOURCES[0]: {"state": "seeded", "end": end}})
    query = {"scn": f"{early.scn}:{early.seq}"}
    status, problem = await bench.get("/v1/shop/snapshot", **query)
    assert (status, problem["code"], problem["oldest"]) == (410, "log_too_young", end)
    assert rows_in(await bench.frames("snapshot", sources=SOURCES[1], **query))


@pytest.mark.parametrize(
    ("endpoint", "query", "status", "code"),
    [
        ("changes", {"since": "3"}, 410, "log_too_young"),
        ("changes", {"since": "3", "mode": "all"}, 410, "log_too_young"),
        ("changes", {"since": "2001-01-01"}, 410, "log_too_young"),
        ("changes", {"since": "12", "until": "11"}, 400, "bad_request"),
        ("changes", {"since": "soon"}, 400, "bad_request"),
        ("changes", {"until": "7:x"}, 400, "bad_request"),
        ("changes", {"mode": "some"}, 400, "bad_request"),
        ("changes", {"scn": "12"}, 400, "bad_request"),
        ("changes", {"sources": "shop.unknown"}, 404, "unknown_source"),
        ("changes", {"until": "99999999999"}, 503, "server_unavailable"),
        ("changes", {"format": "csv"}, 400, "bad_request"),
        ("snapshot", {"scn": "3"}, 410, "log_too_young"),
        ("snapshot", {"since": "3"}, 400, "bad_request"),
    ],
)
async def test_ranges_that_cannot_be_answered_are_refused_by_code(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str,
    query: dict[str, str],
    status: int,
    code: str,
) -> None:
    monkeypatch.setattr(server_module, "AHEAD_WAIT_S", 0.05)
    bench.bind()
    bench.seed()
    bench.write()
    found, problem = await bench.get(f"/v1/shop/{endpoint}", **query)
    assert (found, problem["code"]) == (status, code), problem


async def test_a_snapshot_needs_tables_that_are_whole(bench: Bench) -> None:
    bench.bind()
    bench.log.put_note("seeding", {SOURCES[0]: {"state": "dumping"}})
    bench.write()
    status, problem = await bench.get("/v1/shop/snapshot")
    assert (status, problem["code"]) == (503, "not_seeded")


async def test_positions_are_those_of_the_sources_asked_for(bench: Bench) -> None:
    bench.bind()
    bench.write()
    bench.seal()
    bench.rebase()
    snapshot = bench.history.position
    bench.write()
    end = bench.history.position
    late = {"state": "seeded", "end": end.to_json()}
    states = {name: {"state": "seeded"} for name in SOURCES[:1]}
    bench.log.put_note("seeding", {**states, SOURCES[1]: late, SOURCES[2]: {"state": "dumping"}})
    answers = {
        name: (await bench.get("/v1/shop/startSCN", sources=name))[1] for name in (*SOURCES, "*")
    }
    nothing = {"scn": 0, "seq": 0}
    assert answers == {
        SOURCES[0]: snapshot.to_json(),
        SOURCES[1]: nothing,
        SOURCES[2]: nothing,
        "*": nothing,
    }
    assert await bench.get("/v1/shop/targetSCN", sources=SOURCES[0]) == (200, end.to_json())
    strange = checkpoints.encode(OnlineCheckpoint("shop", "another", snapshot))
    for endpoint in ("startSCN", "targetSCN"):
        status, problem = await bench.get(f"/v1/shop/{endpoint}", sources="shop.unknown")
        assert (status, problem["code"]) == (404, "unknown_source")
        status, problem = await bench.get(f"/v1/shop/{endpoint}", checkpoint=strange)
        assert (status, problem["code"]) == (409, "clock_mismatch")


def test_every_route_is_described_and_nothing_else_is(tmp_path: Path) -> None:
    app = bootstrap_app(BootstrapConfig(data_dir=tmp_path))
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == {(one.method, one.path) for one in ENDPOINTS}
