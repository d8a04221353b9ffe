"""The fetcher over a scripted source: its dumps, requested over its socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import (
    SourceUnavailable,
    UnsupportedChange,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op
from databus.relay.columns.ruled_source import RuledSource
from databus.relay.dumps.dump_records import DumpBook
from databus.relay.ring.ring import Ring
from tests.support.scripted_fetcher import (
    DATABASE,
    ask,
    ended,
    frames,
    reached,
    replayed,
    running,
    status_in,
)
from tests.support.scripted_source import ITEMS, ScriptedDatabase
from tests.support.waiting import eventually


@pytest.fixture
def database() -> ScriptedDatabase:
    return ScriptedDatabase()


@contextlib.asynccontextmanager
async def with_ring(
    database: ScriptedDatabase, folder: Path, **options: Any
) -> AsyncGenerator[None, None]:
    """A running fetcher whose ring exists, so that dumps can be requested."""
    async with running(database, folder, **options):
        await eventually(lambda: (folder / "shop" / "ring").exists())
        yield


async def slow_dump(folder: Path, chunk_rows: int) -> dict[str, Any]:
    """A dump that pauses for an hour after its first chunk."""
    request = {"sources": ["*"], "chunk_rows": chunk_rows, "delay_ms": 3_600_000}
    dump: dict[str, Any] = (await ask(folder, "POST", "/dumps", request))[1]
    return dump


async def dumped(folder: Path, request: dict[str, Any], *states: str) -> dict[str, Any]:
    """A requested dump, once it is in one of these states."""
    _, dump = await ask(folder, "POST", "/dumps", request)
    return await ended(folder, dump["id"], *states)


async def test_a_dump_sends_every_row_once_behind_the_stream_and_reports_its_end(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = {key: f"note {key}" for key in range(10)}
    async with with_ring(database, tmp_path):
        code, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["shop.*"], "chunk_rows": 4})
        assert (code, dump["state"]) in [(202, "queued"), (202, "running")]
        dump = await ended(tmp_path, dump["id"], "completed")
    assert (dump["rows"], dump["chunks"]) == (10, 3)
    found = frames(tmp_path)
    assert [view.op for view in found].count(Op.READ) == 10
    assert dump["end"] == {"scn": found[-1].scn, "seq": found[-1].seq}
    ends = [view for view in found if view.op == Op.END_OF_WINDOW]
    assert all(view.flags & frame_format.Flag.DUMP for view in ends)
    assert [view.event_count for view in ends] == [4, 4, 2]
    assert replayed(tmp_path) == database.rows


async def test_a_row_that_the_stream_overtook_is_not_sent_from_the_chunk(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = {1: "old", 2: "two", 3: "three"}
    database.resolved = 10
    database.first_scn = 10
    database.chunk_gate = asyncio.Event()
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["shop.items"]})
        await eventually(lambda: database.chunk_reads)
        database.commit((1, "new"))
        database.commit((3, None))
        await eventually(reached(fetcher, 12), message="capture does not wait for the chunk")
        database.chunk_gate.set()
        dump = await ended(tmp_path, dump["id"], "completed")
    assert (dump["rows"], dump["tables"][0]["dropped"]) == (1, 2)
    assert replayed(tmp_path) == {1: "new", 2: "two"}


async def test_a_chunk_goes_out_although_every_batch_ends_inside_a_window(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(3), "x")
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        await dumped(tmp_path, {"sources": ["*"]}, "completed")
        stream = b""
        for number in range(3):
            database.commit((10 + number, "a"), (20 + number, "b"))
            stream += database.windows.pop()[1]
        cuts = [0]
        for view in frame_format.iter_frames(stream):
            cuts.append(view.offset + view.length)
        # Each batch: the end of one window and the beginning of the next.
        for start, stop in ((0, 2), (2, 5), (5, 8), (8, 9)):
            database.windows.append((3, stream[cuts[start] : cuts[stop]]))
        database.advance(3)
        await eventually(reached(fetcher, 3))
        await dumped(tmp_path, {"sources": ["*"]}, "completed")
    assert replayed(tmp_path) == database.rows


async def test_a_failed_chunk_is_loud_and_can_be_resumed(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    database.chunk_error = UnsupportedChange("column 3 cannot be read")
    async with with_ring(database, tmp_path):
        dump = await dumped(tmp_path, {"sources": ["*"]}, "failed")
        assert dump["error"]["detail"] == "column 3 cannot be read"
        code, dump = await ask(tmp_path, "PATCH", f"/dumps/{dump['id']}", {"state": "running"})
        assert code == 200
        dump = await ended(tmp_path, dump["id"], "completed")
        assert dump["error"] is None
    assert replayed(tmp_path) == database.rows


async def test_a_dump_reports_what_it_waits_for_while_the_stream_is_off(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with running(database, tmp_path):
        await status_in(tmp_path, "streaming")
        database.open_error = UnsupportedChange("no such thing")
        database.cut(SourceUnavailable("gone"))
        await status_in(tmp_path, "failed")
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["*"]})
        _, dump = await ask(tmp_path, "GET", f"/dumps/{dump['id']}")
        assert dump["progress"]["waits_for"] == "no such thing"
        database.open_error = database.stream_error = None
        dump = await ended(tmp_path, dump["id"], "completed")
        assert "waits_for" not in dump["progress"]


async def test_a_lost_connection_does_not_fail_a_dump(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    database.chunk_error = SourceUnavailable("gone")
    async with with_ring(database, tmp_path):
        dump = await dumped(tmp_path, {"sources": ["*"]}, "completed", "failed")
        assert (dump["state"], dump["reread_chunks"]) == ("completed", 1)


async def test_a_dump_is_paused_slowed_resumed_and_cancelled(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with with_ring(database, tmp_path):
        dump = await slow_dump(tmp_path, chunk_rows=2)
        path = f"/dumps/{dump['id']}"
        await eventually(lambda: database.chunk_reads)
        _, dump = await ask(tmp_path, "PATCH", path, {"state": "paused"})
        assert dump["state"] == "paused"
        reads = len(database.chunk_reads)
        change = {"state": "running", "delay_ms": 0, "chunk_rows": 3}
        _, dump = await ask(tmp_path, "PATCH", path, change)
        dump = await ended(tmp_path, dump["id"], "completed")
        assert {request.limit for request in database.chunk_reads[reads:]} == {3}
        code, problem = await ask(tmp_path, "PATCH", path, {"state": "running"})
        assert (code, problem["code"]) == (400, "bad_request")
        second = await slow_dump(tmp_path, chunk_rows=2)
        code, second = await ask(tmp_path, "DELETE", f"/dumps/{second['id']}")
        assert (code, second["state"]) == (200, "cancelled")
        _, listed = await ask(tmp_path, "GET", "/v1/shop/dumps")
        assert [one["state"] for one in listed["dumps"]] == ["completed", "cancelled"]


async def test_a_dump_resumes_after_a_restart_at_the_chunk_after_the_last_durable_one(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with with_ring(database, tmp_path):
        dump = await slow_dump(tmp_path, chunk_rows=4)

        async def one_chunk() -> bool:
            return bool((await ask(tmp_path, "GET", f"/dumps/{dump['id']}"))[1]["chunks"] == 1)

        await eventually(one_chunk)
    async with running(database, tmp_path):
        await eventually(lambda: len(database.chunk_reads) > 1)
        await ask(tmp_path, "PATCH", f"/dumps/{dump['id']}", {"delay_ms": 0})
        dump = await ended(tmp_path, dump["id"], "completed")
    assert [request.after for request in database.chunk_reads] == [None, [3], [7]]
    assert dump["rows"] == 10


async def test_how_far_a_dumps_reader_is_costs_no_write(
    database: ScriptedDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    retained: list[bytes] = []
    write = DumpBook.write

    def counted(book: DumpBook, content: bytes) -> None:
        write(book, content)
        retained.append(content)

    def on_disk() -> dict[str, Any]:
        dump: dict[str, Any] = json.loads(retained[-1])["dumps"][0]
        return dump

    monkeypatch.setattr(DumpBook, "write", counted)
    async with with_ring(database, tmp_path):
        dump = await slow_dump(tmp_path, chunk_rows=4)
        path = f"/dumps/{dump['id']}"
        await eventually(lambda: on_disk()["chunks"] == 1)
        # A dump that waits for a reader is recognised after a crash.
        await ask(tmp_path, "PATCH", path, {"reader": {"scn": 1, "seq": 0}})
        assert on_disk()["reader"] == {"scn": 1, "seq": 0}
        count = len(retained)
        for scn in range(2, 12):
            _, dump = await ask(tmp_path, "PATCH", path, {"reader": {"scn": scn, "seq": 0}})
            assert dump["reader"] == {"scn": scn, "seq": 0}
        assert len(retained) == count
        await ask(tmp_path, "PATCH", path, {"chunk_rows": 5})
        assert (on_disk()["reader"], on_disk()["chunk_rows"]) == ({"scn": 11, "seq": 0}, 5)
        await ask(tmp_path, "PATCH", path, {"reader": None})
        assert on_disk()["reader"] is None


async def test_a_dump_of_keys_names_the_keys_without_a_row(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with with_ring(database, tmp_path):
        request = {"sources": ["shop.items"], "keys": [3, [5], 77], "chunk_rows": 2}
        _, dump = await ask(tmp_path, "POST", "/dumps", request)
        dump = await ended(tmp_path, dump["id"], "completed")
    assert (dump["rows"], dump["missing"]) == (2, [[77]])
    assert sorted(replayed(tmp_path)) == [3, 5]


async def test_a_condition_chooses_rows_as_consumers_see_them_and_never_reaches_the_source(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = {key: f"note {key}" for key in range(20)}
    async with with_ring(database, tmp_path):
        some = {"sources": ["shop.items"], "chunk_rows": 4}
        for where, wanted in (
            ("id % 10 = 7 OR note = 'note 2'", [2, 7, 17]), ("id > 100", []), ("id < 2", [0, 1])
        ):  # fmt: skip
            dump = await dumped(tmp_path, {**some, "where": where}, "completed")
            assert dump["rows"] == len(wanted)
            sent = [view for view in frames(tmp_path) if view.op == Op.READ]
            ids = [ITEMS.decode_key(view.key)["id"] for view in sent]
            assert ids[len(ids) - len(wanted) :] == wanted
        dump = await dumped(tmp_path, {**some, "where": "no_such = 1"}, "failed")
        assert dump["error"]["code"] == "bad_filter"
        assert "'no_such'" in dump["error"]["detail"] and "shop.items" in dump["error"]["detail"]
        keys = {"keys": [1, 5, 99], "delete_missing": True, "where": "id = 5"}
        dump = await dumped(tmp_path, {**some, **keys}, "completed")
        assert dump["missing"] == [[99]], "a row that is there is not deleted"
    kinds = {(request.is_filtered, request.is_of_whole_table) for request in database.chunk_reads}
    assert kinds == {(True, False), (False, False)}


async def test_a_dump_begins_after_a_key(database: ScriptedDatabase, tmp_path: Path) -> None:
    database.rows = {key: f"note {key}" for key in range(20)}
    async with with_ring(database, tmp_path):
        some = {"sources": ["shop.*"], "chunk_rows": 4}
        dump = await dumped(tmp_path, {**some, "after": {"shop.items": [12]}}, "completed")
        assert dump["rows"] == 7
        sent = [view for view in frames(tmp_path) if view.op == Op.READ]
        assert [ITEMS.decode_key(view.key)["id"] for view in sent] == list(range(13, 20))
        dump = await dumped(tmp_path, {**some, "after": {"shop.items": [1, 2]}}, "failed")
        assert dump["error"]["detail"] == "the key of shop.items is (id), and after has [1, 2]"


async def test_a_condition_reveals_nothing_of_an_excluded_column(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = {1: "secret"}
    config = DATABASE.model_copy(update={"exclude_columns": ("shop.items.note",)})

    def ruled(_: object) -> RuledSource:
        return RuledSource(database.source(), config)

    async with with_ring(database, tmp_path, make_source=ruled):
        _, dump = await ask(
            tmp_path, "POST", "/dumps", {"sources": ["*"], "where": "note LIKE 's%'"}
        )
        dump = await ended(tmp_path, dump["id"], "failed")
    assert dump["error"]["code"] == "bad_filter"
    assert "known are: id" in dump["error"]["detail"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"sources": ["nothing.*"]}, "unknown_source"),
        ({"sources": []}, "bad_request"),
        ({"sources": ["*"], "chunk_row": 1}, "bad_request"),
        ({"sources": ["*"], "chunk_rows": 0}, "bad_request"),
        ({"sources": ["*"], "where": " "}, "bad_request"),
        ({"sources": ["*"], "after": [1]}, "bad_request"),
        ({"sources": ["*"], "after": {"shop.items": 1}}, "bad_request"),
        ({"sources": ["*"], "after": {"shop.items": [1]}, "keys": [1]}, "bad_request"),
        ({"sources": ["*"], "where": "id IN (SELECT id FROM secrets)"}, "bad_filter"),
        ({"sources": ["*"], "where": "1 = 1) UNION SELECT 1, 2 --"}, "bad_filter"),
        ({"sources": ["*"], "where": "pg_sleep(10) IS NULL"}, "bad_filter"),
        ({"sources": ["*"], "where": "secrets.id = 1"}, "bad_filter"),
        ([], "bad_request"),
    ],
)
async def test_a_wrong_dump_request_is_refused_with_a_problem(
    database: ScriptedDatabase, tmp_path: Path, body: Any, code: str
) -> None:
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        status_code, problem = await ask(tmp_path, "POST", "/dumps", body)
        assert problem["code"] == code
        assert status_code == problem["status"]
        status_code, problem = await ask(tmp_path, "GET", "/dumps/nothing")
        assert (status_code, problem["code"]) == (404, "not_found")


async def test_a_dump_of_a_quiet_database_needs_no_commit_to_come_to_its_end(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = {1: "one"}
    database.first_scn = database.resolved = 40
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        await dumped(tmp_path, {"sources": ["*"]}, "completed")
    with Ring.open_reader(tmp_path / "shop") as reader:
        assert reader.snapshot().prev == Position(40, 0)
    assert [(view.scn, view.seq) for view in frames(tmp_path)] == [(40, 1), (40, 2)]
