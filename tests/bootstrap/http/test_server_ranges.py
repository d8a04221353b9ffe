"""Ranges over HTTP: net changes, all changes, states as of a position."""

from __future__ import annotations

import datetime as dt
import json

import pytest

from databus.bootstrap.http import bootstrap_server as server_module
from databus.common.checkpoint import OnlineCheckpoint
from databus.common.frame.frame_format import Op, iter_frames, source_id
from databus.common.frame.window_builder import WindowBuilder
from tests.bootstrap import model
from tests.bootstrap.bench import SCHEMA, Bench, checkpoints_in, rows_in


async def test_changes_are_answered_net_or_all_between_positions_and_times(bench: Bench) -> None:
    since = bench.bind_sealed()
    bench.write()
    until = bench.history.position
    bench.write()
    between = model.frames_between(bench.blocks, since, until)
    span = {"since": f"{since.scn}:{since.seq}", "until": f"{until.scn}:{until.seq}"}
    data = await bench.frames("changes", **span, mode="all")
    assert rows_in(data) == [bytes(one.bytes) for one in between]
    net = await bench.frames("changes", **span)
    assert rows_in(net) == [bytes(one.bytes) for one in model.compact(between, base=False)]
    for answer in (data, net):
        assert checkpoints_in(answer) == [OnlineCheckpoint("shop", model.CLOCK, until)]

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
    bench.log.put_note("origin", model.START.to_json())
    bench.write()
    bench.seal()
    past = bench.history.position
    bench.write()
    bench.rebase()
    data = await bench.frames("snapshot", scn=f"{past.scn}:{past.seq}")
    frames = model.frames_between(bench.blocks, model.START, past)
    assert rows_in(data) == [bytes(one.bytes) for one in model.compact(frames, base=True)]
    assert checkpoints_in(data) == [OnlineCheckpoint("shop", model.CLOCK, past)]
    now = await bench.frames("snapshot")
    assert model.State().apply_all([now]).rows == bench.truth().rows
    one = await bench.frames("snapshot", sources=model.SOURCES[1])
    assert {frame.source_id for frame in iter_frames(one)} == {0, source_id(model.SOURCES[1])}
    assert await bench.frames("snapshot", source=model.SOURCES[1]) == one
    changed = await bench.frames("changes", source=model.SOURCES[1])
    assert changed == await bench.frames("changes", sources=model.SOURCES[1])
    _, problem = await bench.get("/v1/shop/snapshot", source=model.SOURCES[1], sources="*")
    assert "one of source and sources, not both" in problem["detail"]


async def test_a_snapshot_before_a_table_was_whole_is_refused(bench: Bench) -> None:
    bench.bind()
    bench.log.put_note("origin", model.START.to_json())
    bench.write()
    early = bench.history.position
    bench.write()
    end = bench.history.position.to_json()
    states = {name: {"state": "seeded"} for name in model.SOURCES}
    bench.log.put_note("seeding", {**states, model.SOURCES[0]: {"state": "seeded", "end": end}})
    query = {"scn": f"{early.scn}:{early.seq}"}
    status, problem = await bench.get("/v1/shop/snapshot", **query)
    assert (status, problem["code"], problem["oldest"]) == (410, "log_too_young", end)
    assert rows_in(await bench.frames("snapshot", sources=model.SOURCES[1], **query))


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
        ("snapshot", {"source": model.SOURCES[0], "sources": model.SOURCES[0]}, 400, "bad_request"),
        ("snapshot", {"source": "shop.*"}, 400, "bad_request"),
        ("snapshot", {"source": " "}, 400, "bad_request"),
        ("changes", {"source": f"{model.SOURCES[0]},{model.SOURCES[1]}"}, 400, "bad_request"),
        ("changes", {"source": "shop.unknown"}, 404, "unknown_source"),
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


async def test_filters_that_relays_alone_have_are_refused_with_the_server_to_use(
    bench: Bench,
) -> None:
    bench.bind()
    bench.seed()
    for endpoint in ("bootstrap", "changes", "snapshot"):
        for name, text in (("where", "id > 3"), ("columns", "id")):
            status, problem = await bench.get(f"/v1/shop/{endpoint}", **{name: text})
            assert (status, problem["code"]) == (400, "bad_request")
            assert problem["parameter"] == name
            assert f"no {name}=, a relay's /stream has it" in problem["detail"]


async def test_a_snapshot_needs_tables_that_are_whole(bench: Bench) -> None:
    bench.bind()
    bench.log.put_note("seeding", {model.SOURCES[0]: {"state": "dumping"}})
    bench.write()
    status, problem = await bench.get("/v1/shop/snapshot")
    assert (status, problem["code"]) == (503, "not_seeded")
