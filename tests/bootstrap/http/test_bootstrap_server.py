"""The server over HTTP: what it answers, what it refuses, where a reader resumes."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.bootstrap.http import bootstrap_server as server_module
from databus.bootstrap.http.bootstrap_endpoints import ENDPOINTS
from databus.bootstrap.http.bootstrap_server import bootstrap_app, serve_bootstrap
from databus.bootstrap.log import log_gaps
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.reading import answer_sender, bootstrap_stream
from databus.bootstrap.reading.stored_database import OpenLogs, StoredDatabase
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common import checkpoint as checkpoints
from databus.common.checkpoint import (
    BootstrapCheckpoint,
    OnlineCheckpoint,
    Position,
)
from databus.common.config import BootstrapConfig
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.http.listening_socket import listening_socket
from tests.bootstrap.bench import FRAMES, SCHEMA, Bench, checkpoints_in, rows_in
from tests.bootstrap.model import (
    CLOCK,
    SOURCES,
    START,
    State,
    compact,
    frames_between,
    frames_of,
    write_run,
)


async def test_a_new_reader_gets_the_whole_state_and_the_point_to_resume_at(bench: Bench) -> None:
    bench.begin()
    bench.write()
    bench.seal()
    bench.write()
    for query in ({}, {"scn": "0"}, {"sources": "shop.*"}):
        data = await bench.frames(**query)
        assert State().apply_all([data]).rows == bench.truth().rows
        last = checkpoints_in(data)[-1]
        assert last == OnlineCheckpoint("shop", CLOCK, bench.history.position)


async def test_a_reader_that_comes_back_gets_what_changed_since(bench: Bench) -> None:
    since = bench.bind_sealed()
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
    monkeypatch.setattr(answer_sender, "CHECKPOINT_BYTES", 300)
    bench.begin(20)
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


async def test_the_smallest_answers_bring_a_reader_on_as_well(bench: Bench) -> None:
    bench.begin(4)
    bench.write(4)
    state = State()
    query: dict[str, Any] = {"max_bytes": 1}
    for _ in range(100):
        data = await bench.frames(**query)
        state.apply_all([data])
        last = checkpoints_in(data)[-1]
        if isinstance(last, OnlineCheckpoint):
            break
        query["checkpoint"] = checkpoints.encode(last)
    assert last == OnlineCheckpoint("shop", CLOCK, bench.history.position)
    assert state.rows == bench.truth().rows


async def test_a_reader_whose_filter_takes_nothing_is_brought_to_the_end(bench: Bench) -> None:
    bench.begin(20)
    bench.write(20)
    unfiltered = len(await bench.frames())
    for since in ("0", f"{START.scn}:{START.seq}"):
        query: dict[str, Any] = {"scn": since, "partition": "mod:1000003:7", "max_bytes": 8000}
        data = await bench.frames(**query)
        found = {one.op for one in iter_frames(data)}
        assert found <= {Op.CHECKPOINT, Op.TRUNCATE, Op.END_OF_WINDOW}, (
            "a truncate is sent with every filter"
        )
        assert checkpoints_in(data)[-1] == OnlineCheckpoint("shop", CLOCK, bench.history.position)
        assert len(data) < unfiltered / 4


async def test_the_first_checkpoint_shows_whether_the_requested_run_is_still_there(
    bench: Bench,
) -> None:
    bench.begin(20)
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
    monkeypatch.setattr(bootstrap_stream, "PIECE_BYTES", 500)
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


@pytest.mark.parametrize("reaches_back", [False, True])
async def test_a_reader_whose_run_was_merged_away_resumes_behind_the_last_that_it_finished(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, reaches_back: bool
) -> None:
    monkeypatch.setattr(server_module, "CHECKPOINT_BYTES", 300)
    bench.begin(20)
    finished = bench.history.position
    bench.write(20)
    bench.seal()
    delta = bench.merge(finished)
    state, at = State(), None
    query: dict[str, Any] = {"max_bytes": 700}
    while at is None or at.run != delta.id or not at.row:
        data = await bench.frames(**query)
        state.apply_all([data])
        at = checkpoints_in(data)[-1]
        assert isinstance(at, BootstrapCheckpoint), "the delta is larger than an answer"
        query["checkpoint"] = checkpoints.encode(at)
    assert at.position == finished
    assert State().apply_all([data]).newest, "a part of the delta"

    bench.write(20)
    bench.seal()
    merged = bench.merge(START if reaches_back else finished)
    bench.write(5)
    data = await bench.frames(checkpoint=checkpoints.encode(at))
    end = bench.history.position
    expected = compact(frames_between(bench.blocks, finished, merged.stop), base=False)
    if reaches_back:  # Nothing in it that is older is sent.
        assert any(one.position <= finished for one in frames_of(bench.store, merged))
    assert rows_in(data)[: len(expected)] == [bytes(one.bytes) for one in expected]
    assert all(
        one.position > finished or (one.op == Op.CHECKPOINT and one.position == finished)
        for one in iter_frames(data)
    )
    assert checkpoints_in(data)[0].position == finished
    assert checkpoints_in(data)[-1] == OnlineCheckpoint("shop", CLOCK, end)
    assert state.apply_all([data]).rows == bench.truth().rows


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
    assert 'databus_bootstrap_gaps{database="shop"} 0.0' in await bench.metrics()
    lost = bench.history.position, Position(bench.history.position.scn + 5, 0)
    log_gaps.open_gap(bench.log, *lost, 1)
    assert 'databus_bootstrap_gaps{database="shop"} 1.0' in (metrics := await bench.metrics())
    assert f'databus_bootstrap_snapshot_scn{{database="shop"}} {end["scn"]}.0' in metrics
    (database,) = (await bench.get("/v1/status"))[1]["databases"]
    (gap,) = database["gaps"]
    assert (gap["from"], gap["to"]) == tuple(one.to_json() for one in lost)
    assert database["state"] == "seeding", "every source is to be compared"


@pytest.mark.parametrize("retained", ["nothing", "an older one"])
async def test_a_lost_manifest_is_reported_and_no_state_is_made_without_it(
    bench: Bench, retained: str
) -> None:
    bench.bind()
    bench.seed()
    bench.write()
    bench.seal()
    older = bench.store.manifest_path.read_bytes()
    bench.write()
    bench.seal()
    newest = bench.store.manifest_path.read_bytes()
    if retained == "nothing":
        bench.store.manifest_path.unlink()
    else:
        bench.store.manifest_path.write_bytes(older)
    reason = f"the log has dropped everything up to {bench.history.position} "
    for path in ("bootstrap", "snapshot", "changes"):
        query = {"scn": START.scn} if path == "bootstrap" else {}
        for parameters in ({}, query):
            status, problem = await bench.get(f"/v1/shop/{path}", **parameters)
            assert (status, problem["code"]) == (500, "store_error"), path
            assert problem["detail"].startswith(reason)
    _, status = await bench.get("/v1/status")
    _, databases = await bench.get("/v1/databases")
    _, sources = await bench.get("/v1/shop/sources")
    for shown in (*status["databases"], *databases["databases"], sources):
        assert shown["state"] == "failing"
        assert shown["error"].startswith(reason)
    bench.store.manifest_path.write_bytes(newest)
    (shown,) = (await bench.get("/v1/status"))[1]["databases"]
    assert (shown["state"], "error" in shown) == ("seeded", False)
    assert State().apply_all([await bench.frames()]).rows == bench.truth().rows


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


async def test_positions_are_those_of_the_requested_sources(bench: Bench) -> None:
    snapshot = bench.bind_sealed()
    bench.rebase()
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


@pytest.mark.parametrize(
    ("path", "document"),
    [("/v1/databases", "range_document"), ("/v1/status", "status_document")],
)
async def test_a_database_that_begins_while_the_others_are_listed_fails_no_list(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, path: str, document: str
) -> None:
    bench.bind()
    shown = getattr(StoredDatabase, document)

    def showing(database: StoredDatabase) -> Any:
        """In a thread: another request finds a database that has just begun."""
        other = HotLog(bench.data_dir / "other" / "log")
        other.bind("other", CLOCK, START)
        other.close()
        with urllib.request.urlopen(f"{bench.url}/v1/other/targetSCN") as answer:
            assert answer.status == 200
        return shown(database)

    monkeypatch.setattr(StoredDatabase, document, showing)
    status, listed = await bench.get(path)
    assert status == 200, listed
    assert [one["name"] for one in listed["databases"]] == ["shop"]
    monkeypatch.undo()
    _, listed = await bench.get(path)
    assert [one["name"] for one in listed["databases"]] == ["shop", "other"]


async def test_a_log_that_was_cut_is_named_and_hides_nothing_else(bench: Bench) -> None:
    bench.bind()
    bench.seed()
    bench.log.add_schemas([SCHEMA])
    bench.write()
    assert (await bench.get("/v1/databases"))[1]["databases"][0]["name"] == "shop"
    path = bench.log.folder / "data.mdb"
    content = path.read_bytes()
    os.truncate(path, 4096)
    for url in ("/readyz", "/v1/shop/startSCN"):
        status, problem = await bench.get(url)
        assert status == 503 and str(path) in str(problem), (url, problem)
    assert (await bench.get("/v1/databases"))[0] == 200
    status, document = await bench.get("/v1/status")
    assert status == 200 and str(path) in str(document)
    path.write_bytes(content)
    assert (await bench.get("/v1/shop/startSCN"))[0] == 200
