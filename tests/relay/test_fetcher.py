"""The fetcher over a scripted source: restarts, losses, acknowledgements, dumps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import AsyncIterator, Callable
from functools import partial
from operator import contains
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common import frame
from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig, SourceUrl
from databus.common.errors import (
    PreflightFailed,
    SourceUnavailable,
    UnsupportedChange,
)
from databus.common.frame import FrameView, Op
from databus.relay.dumps import DumpBook
from databus.relay.fetcher import Fetcher, Pace
from databus.relay.intake import Intake
from databus.relay.layout import SocketName
from databus.relay.registry import RegistryReader
from databus.relay.ring import Ring
from databus.relay.ring_file import RingFile
from databus.relay.sources.source import ChunkRequest
from databus.relay.wakeup import WakeupSender, make_wakeup
from tests.support.scripted_source import ITEMS, ScriptedDatabase
from tests.support.waiting import eventually

PACE = Pace(
    idle_window_s=0.1,
    status_s=0.02,
    source_status_s=0.05,
    backoff_first_s=0.01,
    backoff_most_s=0.05,
    failed_retry_s=0.1,
)
DATABASE = DatabaseConfig(
    name="shop", url=SourceUrl("generator://"), ring_bytes=256 << 10, sync_every=0.02
)


@pytest.fixture
def database() -> ScriptedDatabase:
    return ScriptedDatabase()


@contextlib.asynccontextmanager
async def running(
    database: ScriptedDatabase, folder: Path, **options: Any
) -> AsyncIterator[Fetcher]:
    options = {"pace": PACE, **options}
    fetcher = Fetcher(DATABASE, folder, make_source=database.source, **options)
    task = asyncio.create_task(fetcher.run())
    try:
        yield fetcher
    finally:
        fetcher.stop()
        await task


def frames(folder: Path) -> list[FrameView]:
    with Ring.open_reader(folder / "shop") as reader:
        data, _ = reader.read(reader.snapshot().head, 1 << 30)
        return list(frame.iter_frames(bytes(data)))


def reached(fetcher: Fetcher, scn: int) -> Callable[[], bool]:
    return lambda: fetcher.intake is not None and fetcher.intake.complete.scn >= scn


def opened(fetcher: Fetcher) -> Intake:
    assert fetcher.intake is not None
    return fetcher.intake


async def told(folder: Path, state: str) -> dict[str, Any]:
    """What status.json says once it says this state, which is a moment after it is so."""
    found: dict[str, Any] = {}

    def says() -> bool:
        with contextlib.suppress(FileNotFoundError):
            found.update(json.loads((folder / "shop" / "status.json").read_bytes()))
        return found.get("state") == state

    await eventually(says)
    return found


async def ask(folder: Path, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    with SocketName(folder / "shop" / "fetcher.sock") as name:
        connector = aiohttp.UnixConnector(path=name.path)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with session.request(method, f"http://fetcher{path}", json=body) as answer:
                return answer.status, await answer.json(content_type=None)


async def ended(folder: Path, dump_id: str, *states: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def look() -> bool:
        found.update((await ask(folder, "GET", f"/dumps/{dump_id}"))[1])
        return found["state"] in states

    await eventually(look, message=f"dump {dump_id} is one of {states}")
    return found


def replayed(folder: Path) -> dict[int, str]:
    """The table as a consumer has it who applied every frame in order."""
    rows: dict[int, str] = {}
    for view in frames(folder):
        if view.is_control:
            continue
        key = ITEMS.decode_key(view.key)["id"]
        if view.op == Op.DELETE:
            rows.pop(key, None)
        else:
            assert view.after is not None
            rows[key] = ITEMS.decode_row(view.after)["note"]
    return rows


async def test_windows_reach_the_ring_and_their_schema_the_registry_before(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"), (2, "b"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
        reader = RegistryReader(tmp_path / "shop" / "schemas.jsonl")
        reader.refresh()
        assert ITEMS.fingerprint in reader.schemas
    found = [(view.scn, view.seq, view.op) for view in frames(tmp_path)]
    assert found == [(1, 0, Op.INSERT), (1, 1, Op.INSERT), (1, 2, Op.END_OF_WINDOW)]


async def test_a_restart_goes_on_after_the_last_window_without_repeating_any(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    for number in range(5):
        database.commit((number, "x"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 5))
    database.commit((9, "y"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 6))
    assert [view.scn for view in frames(tmp_path) if view.op == Op.END_OF_WINDOW] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip


async def test_a_lost_connection_in_mid_window_neither_loses_nor_repeats_an_event(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.batch_bytes = 1
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        # Larger than the ring's part_bytes, so that readers see it in parts.
        database.held_after_batches = 120
        database.commit(*((key, "n" * 500) for key in range(200)))
        intake = opened(fetcher)
        await eventually(lambda: intake.ring.last.seq == 119)
        assert intake.ring.state.max.seq > 50
        database.release()
        database.cut(SourceUnavailable("cut by the test"))
        await eventually(reached(fetcher, 1))
        assert fetcher.status.reconnect_count == 1
        assert database.opened == 2
    seqs = [view.seq for view in frames(tmp_path) if view.scn == 1]
    assert seqs == list(range(201))


async def test_a_window_that_was_torn_by_a_restart_is_completed_once(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.batch_bytes = 1
    database.held_after_batches = 120
    database.commit(*((key, "n" * 500) for key in range(200)))
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.intake is not None)
        await eventually(lambda: opened(fetcher).ring.last.seq == 119)
    database.release()
    torn = frames(tmp_path)[-1]
    assert torn.op != Op.END_OF_WINDOW
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
    assert [view.seq for view in frames(tmp_path)] == list(range(201))


async def test_another_clock_is_refused_loudly_and_nothing_of_it_reaches_the_ring(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
    other = ScriptedDatabase("clock-2")
    other.commit((1, "z"), scn=7)
    async with running(other, tmp_path) as fetcher:
        assert (await told(tmp_path, "failed"))["error"]["code"] == "clock_mismatch"
        code, live = await ask(tmp_path, "GET", "/status")
        assert (code, live["state"]) == (200, "failed")
    assert {view.scn for view in frames(tmp_path)} == {1}


async def test_a_database_is_not_read_into_a_child_relays_ring_that_a_reader_could_block(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    Ring.create(tmp_path / "shop", DATABASE.ring_bytes, clock=database.clock, block=True).close()
    database.commit((1, "a"))
    async with running(database, tmp_path):
        error = (await told(tmp_path, "failed"))["error"]
        assert error["code"] == "config_error"
        assert "shop: its ring was made in block mode" in error["detail"]


@pytest.mark.parametrize("error", [PreflightFailed("no"), UnsupportedChange("no")])
async def test_what_cannot_pass_by_itself_is_shown_and_tried_again_slowly(
    database: ScriptedDatabase, tmp_path: Path, error: Exception
) -> None:
    database.open_error = error
    async with running(database, tmp_path) as fetcher:
        assert (await told(tmp_path, "failed"))["error"]["detail"] == "no"
        database.open_error = None
        database.commit((1, "a"))
        await eventually(reached(fetcher, 1))
        assert (await told(tmp_path, "streaming"))["error"] is None


async def test_a_purged_log_is_a_failure_and_not_a_gap(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
    database.commit((2, "b"))
    database.forgotten = 2
    async with running(database, tmp_path) as fetcher:
        assert (await told(tmp_path, "failed"))["error"]["code"] == "source_position_lost"
    assert frames(tmp_path)[-1].scn == 1


async def test_an_unforeseen_fault_of_a_source_is_shown_and_survived(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        database.cut(ZeroDivisionError("a bug in a driver"))
        assert (await told(tmp_path, "failed"))["error"]["code"] == "internal_error"
        database.commit((1, "a"))
        await eventually(reached(fetcher, 1))


async def test_an_idle_source_moves_readers_on_by_an_empty_window(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    async with running(database, tmp_path) as fetcher:
        await eventually(reached(fetcher, 1))
        database.advance(50)
        await eventually(reached(fetcher, 50))
        await eventually(lambda: 50 in database.acks)
        database.commit((2, "b"))
        await eventually(reached(fetcher, 51))
    last = frames(tmp_path)[2:]
    assert [(v.scn, v.seq, v.op) for v in last] == [
        (50, 0, Op.END_OF_WINDOW),
        (51, 0, Op.INSERT),
        (51, 1, Op.END_OF_WINDOW),
    ]
    assert last[0].event_count == 0


async def test_who_has_read_a_chunk_waits_for_no_idle_window(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    never = dataclasses.replace(PACE, idle_window_s=3600.0)
    database.commit((1, "a"))
    async with running(database, tmp_path, pace=never) as fetcher:
        await eventually(reached(fetcher, 1))
        database.advance(50)
        await eventually(lambda: fetcher.intake is not None and fetcher.intake.resolved == 50)
        _, chunk = await fetcher.read_chunk(ChunkRequest("shop.items", 10))
        assert chunk.snapshot.high == 50
        await eventually(reached(fetcher, 50))
        database.advance(60)
        await eventually(lambda: fetcher.intake is not None and fetcher.intake.resolved == 60)
    assert [(v.scn, v.op) for v in frames(tmp_path)[2:]] == [(50, Op.END_OF_WINDOW)]


async def test_only_what_is_on_disk_is_acknowledged_to_the_source(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []

    def on_ack(scn: int) -> None:
        file = RingFile(tmp_path / "shop" / "ring", writable=False)
        try:
            seen.append((scn, file.newest_control().state.max.scn))
        finally:
            file.close()

    database.on_ack = on_ack
    async with running(database, tmp_path) as fetcher:
        for number in range(1, 6):
            database.commit((number, "a"))
            await eventually(reached(fetcher, number))
            await eventually(partial(contains, database.acks, number), message="the ack")
    assert [scn for scn, _ in seen] == sorted(scn for scn, _ in seen)
    assert all(scn <= on_disk for scn, on_disk in seen)


async def test_the_open_part_of_a_large_window_is_not_acknowledged(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    database.batch_bytes = 1
    async with running(database, tmp_path) as fetcher:
        await eventually(lambda: 1 in database.acks)
        scn, whole = database.resolved + 1, len(database.windows)
        database.commit(*((key, "n" * 500) for key in range(300)))
        database.windows[whole] = (scn, database.windows[whole][1][:-80])
        intake = opened(fetcher)
        await eventually(lambda: intake.ring.state.max.scn == scn)
        synced = intake.ring.state.tail
        await eventually(lambda: fetcher._synced_tail >= synced)
        assert max(database.acks) == 1


async def test_a_commit_wakes_the_workers(database: ScriptedDatabase, tmp_path: Path) -> None:
    fd = make_wakeup()
    async with running(database, tmp_path, wakeup=WakeupSender((os.dup(fd),))) as fetcher:
        await eventually(lambda: fetcher.status.state == "streaming")
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(fd)
        database.commit((1, "a"))
        await eventually(reached(fetcher, 1))
        assert os.eventfd_read(fd) == 1
    os.close(fd)


async def test_a_second_fetcher_on_one_ring_waits_with_a_reason(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.commit((1, "a"))
    async with running(database, tmp_path) as first:
        await eventually(reached(first, 1))
        async with running(database, tmp_path) as second:
            await eventually(lambda: second.status.error is not None)
            assert second.status.error is not None
            assert second.status.error.code == "store_busy"
            assert second.status.state == "reconnecting"


# -- dumps --


async def test_a_dump_sends_every_row_once_behind_the_stream_and_tells_its_end(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = {key: f"note {key}" for key in range(10)}
    async with running(database, tmp_path):
        await eventually(lambda: (tmp_path / "shop" / "ring").exists())
        code, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["shop.*"], "chunk_rows": 4})
        assert (code, dump["state"]) in [(202, "queued"), (202, "running")]
        dump = await ended(tmp_path, dump["id"], "completed")
    assert (dump["rows"], dump["chunks"]) == (10, 3)
    found = frames(tmp_path)
    assert [view.op for view in found].count(Op.READ) == 10
    assert dump["end"] == {"scn": found[-1].scn, "seq": found[-1].seq}
    ends = [view for view in found if view.op == Op.END_OF_WINDOW]
    assert all(view.flags & frame.Flag.DUMP for view in ends)
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
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["*"]})
        await ended(tmp_path, dump["id"], "completed")
        stream = b""
        for number in range(3):
            database.commit((10 + number, "a"), (20 + number, "b"))
            stream += database.windows.pop()[1]
        cuts = [0]
        for view in frame.iter_frames(stream):
            cuts.append(view.offset + view.length)
        # Each batch: the end of one window and the beginning of the next.
        for start, stop in ((0, 2), (2, 5), (5, 8), (8, 9)):
            database.windows.append((3, stream[cuts[start] : cuts[stop]]))
        database.advance(3)
        await eventually(reached(fetcher, 3))
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["*"]})
        await ended(tmp_path, dump["id"], "completed")
    assert replayed(tmp_path) == database.rows


async def test_a_failed_chunk_is_loud_and_can_be_resumed(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    database.chunk_error = UnsupportedChange("column 3 cannot be read")
    async with running(database, tmp_path):
        await eventually(lambda: (tmp_path / "shop" / "ring").exists())
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["*"]})
        dump = await ended(tmp_path, dump["id"], "failed")
        assert dump["error"]["detail"] == "column 3 cannot be read"
        code, dump = await ask(tmp_path, "PATCH", f"/dumps/{dump['id']}", {"state": "running"})
        assert code == 200
        dump = await ended(tmp_path, dump["id"], "completed")
        assert dump["error"] is None
    assert replayed(tmp_path) == database.rows


async def test_a_dump_says_what_it_waits_for_while_the_stream_is_off(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with running(database, tmp_path):
        await told(tmp_path, "streaming")
        database.open_error = UnsupportedChange("no such thing")
        database.cut(SourceUnavailable("gone"))
        await told(tmp_path, "failed")
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
    async with running(database, tmp_path):
        await eventually(lambda: (tmp_path / "shop" / "ring").exists())
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["*"]})
        dump = await ended(tmp_path, dump["id"], "completed", "failed")
        assert (dump["state"], dump["reread_chunks"]) == ("completed", 1)


async def test_a_dump_is_paused_slowed_resumed_and_cancelled(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with running(database, tmp_path):
        await eventually(lambda: (tmp_path / "shop" / "ring").exists())
        request = {"sources": ["*"], "chunk_rows": 2, "delay_ms": 3_600_000}
        _, dump = await ask(tmp_path, "POST", "/dumps", request)
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
        _, second = await ask(tmp_path, "POST", "/dumps", request)
        code, second = await ask(tmp_path, "DELETE", f"/dumps/{second['id']}")
        assert (code, second["state"]) == (200, "cancelled")
        _, listed = await ask(tmp_path, "GET", "/v1/shop/dumps")
        assert [one["state"] for one in listed["dumps"]] == ["completed", "cancelled"]


async def test_a_dump_goes_on_after_a_restart_at_the_chunk_after_the_last_durable_one(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with running(database, tmp_path):
        await eventually(lambda: (tmp_path / "shop" / "ring").exists())
        request = {"sources": ["*"], "chunk_rows": 4, "delay_ms": 3_600_000}
        _, dump = await ask(tmp_path, "POST", "/dumps", request)

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
    kept: list[bytes] = []
    keep = DumpBook.keep

    def counted(book: DumpBook, content: bytes) -> None:
        keep(book, content)
        kept.append(content)

    def on_disk() -> dict[str, Any]:
        dump: dict[str, Any] = json.loads(kept[-1])["dumps"][0]
        return dump

    monkeypatch.setattr(DumpBook, "keep", counted)
    async with running(database, tmp_path):
        await eventually(lambda: (tmp_path / "shop" / "ring").exists())
        request = {"sources": ["*"], "chunk_rows": 4, "delay_ms": 3_600_000}
        _, dump = await ask(tmp_path, "POST", "/dumps", request)
        path = f"/dumps/{dump['id']}"
        await eventually(lambda: on_disk()["chunks"] == 1)
        # Whether anybody is waited for is to be known after a crash.
        await ask(tmp_path, "PATCH", path, {"reader": {"scn": 1, "seq": 0}})
        assert on_disk()["reader"] == {"scn": 1, "seq": 0}
        count = len(kept)
        for scn in range(2, 12):
            _, dump = await ask(tmp_path, "PATCH", path, {"reader": {"scn": scn, "seq": 0}})
            assert dump["reader"] == {"scn": scn, "seq": 0}
        assert len(kept) == count
        await ask(tmp_path, "PATCH", path, {"chunk_rows": 5})
        assert (on_disk()["reader"], on_disk()["chunk_rows"]) == ({"scn": 11, "seq": 0}, 5)
        await ask(tmp_path, "PATCH", path, {"reader": None})
        assert on_disk()["reader"] is None


async def test_a_dump_of_keys_names_the_keys_without_a_row(
    database: ScriptedDatabase, tmp_path: Path
) -> None:
    database.rows = dict.fromkeys(range(10), "x")
    async with running(database, tmp_path):
        await eventually(lambda: (tmp_path / "shop" / "ring").exists())
        request = {"sources": ["shop.items"], "keys": [3, [5], 77], "chunk_rows": 2}
        _, dump = await ask(tmp_path, "POST", "/dumps", request)
        dump = await ended(tmp_path, dump["id"], "completed")
    assert (dump["rows"], dump["missing"]) == (2, [[77]])
    assert sorted(replayed(tmp_path)) == [3, 5]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"sources": ["nothing.*"]}, "unknown_source"),
        ({"sources": []}, "bad_request"),
        ({"sources": ["*"], "chunk_row": 1}, "bad_request"),
        ({"sources": ["*"], "chunk_rows": 0}, "bad_request"),
        ({"sources": ["*"], "where": " "}, "bad_request"),
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
        _, dump = await ask(tmp_path, "POST", "/dumps", {"sources": ["*"]})
        await ended(tmp_path, dump["id"], "completed")
    with Ring.open_reader(tmp_path / "shop") as reader:
        assert reader.snapshot().prev == Position(40, 0)
    assert [(view.scn, view.seq) for view in frames(tmp_path)] == [(40, 1), (40, 2)]
