"""Seeding over a real relay and a real table that cannot be read: the others do not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.bootstrap.log import seeding
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.seeding import DUMPING, REPAIRING, SEEDED, UNSEEDED, Seeder
from databus.bootstrap.processes.log_writers import write_logs
from databus.bootstrap.reading.stored_database import OpenLogs
from databus.common.checkpoint import Position
from databus.common.config import BootstrapConfig, parse
from databus.common.errors import DumpFailed, ServerUnavailable
from databus.relay.local_relay import LocalRelay
from tests.bootstrap.model import CLOCK, START
from tests.support.config_text import relay_text
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

TABLES = ("bad", "good", "later")


@contextlib.asynccontextmanager
async def relay_over(folder: Path) -> AsyncIterator[LocalRelay]:
    """A relay over three tables, of which the first holds text where numbers are declared."""
    with contextlib.closing(sqlite3.connect(folder / "shop.db")) as db:
        for table in TABLES:
            db.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, n INT)")
            db.execute(f"INSERT INTO {table} VALUES (1, 1)")
        db.execute("INSERT INTO bad VALUES (2, 'many')")
        db.commit()
    text = relay_text(f"sqlite:///{folder / 'shop.db'}", "main.*", data_dir=folder / "relay")
    async with LocalRelay(parse(text)) as relay:
        yield relay


@pytest.mark.slow
async def test_a_table_that_cannot_be_read_prevents_no_other_from_becoming_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "AGAIN_S", 0.2)
    async with relay_over(tmp_path) as relay:
        config = BootstrapConfig(data_dir=tmp_path / "bootstrap", relays=(relay.url,))
        logs, stop = OpenLogs(writes=True), asyncio.Event()
        task = asyncio.create_task(write_logs(config, logs, stop))
        log = logs.to_write(tmp_path / "bootstrap" / "shop" / "log")

        def states() -> dict[str, Any]:
            noted = {} if log.is_new() else log.note("seeding") or {}
            return {name.partition(".")[2]: one for name, one in noted.items()}

        def is_seeded(*names: str) -> bool:
            return all(states().get(name, {}).get("state") == SEEDED for name in names)

        await eventually(lambda: is_seeded("good", "later"), 60.0, "the others are whole")
        await eventually(lambda: states()["bad"].get("tries", 0) >= 3, 60.0, "it is tried again")
        assert states()["bad"]["state"] != SEEDED
        assert """typeof("n") = 'text' finds""" in states()["bad"]["error"]
        assert is_seeded("good", "later")
        correct(tmp_path / "shop.db")
        await eventually(lambda: is_seeded(*TABLES), 200.0, "what was corrected is whole too")
        assert "error" not in states()["bad"]
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"{relay.url}/v1/shop/dumps")
            dumps = (await answer.json())["dumps"]
        assert all(dump["reader"]["scn"] > 0 for dump in dumps), "they knew how far the log was"
        stop.set()
        await task
        logs.close()


def correct(path: Path) -> None:
    """Make the row readable; the change itself is not, so that the stream passes it over."""
    with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as db:
        db.execute("UPDATE bad SET n = 3 WHERE id = 2")


class Relay:
    """What a seeder requests of a relay whose stream is at 9000."""

    def __init__(self) -> None:
        self.newest = 9000
        self.requested: list[list[str]] = []
        self.readers: list[Position] = []
        self.answers: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self.after: list[dict[str, Any]] = []

    async def sources(self, database: str) -> dict[str, Any]:
        names = [{"name": f"shop.{table}"} for table in TABLES]
        return {"sources": names, "max": {"scn": self.newest, "seq": 0}}

    async def start_dump(
        self, database: str, sources: list[str], reader: Position, after: dict[str, Any]
    ) -> dict[str, Any]:
        self.requested.append(list(sources))
        self.after.append(after)
        self.readers.append(reader)
        return {"id": str(len(self.requested))}

    async def dump(
        self, database: str, dump: str, reader: Position, *, resume: bool = False
    ) -> dict[str, Any]:
        self.readers.append(reader)
        if resume:
            return {"state": "queued", "error": None, "rows": 5}
        return self.answers.pop(0) if self.answers else {"state": "cancelled", "error": None}

    async def cancel_dump(self, database: str, dump: str) -> None:
        self.cancelled.append(dump)


def noted(log: HotLog, state: str) -> None:
    log.bind("shop", CLOCK, START)
    log.put_note("seeding", {f"shop.{table}": {"state": state} for table in TABLES})


async def test_a_repair_that_fails_stops_no_other_and_waits_before_it_is_retried(
    log: HotLog,
) -> None:
    noted(log, REPAIRING)
    tried: list[str] = []

    async def repair(name: str) -> Position | None:
        tried.append(name)
        if name == "shop.bad":
            raise DumpFailed("the rows cannot be read")
        if name == "shop.later" and len(tried) < 5:
            raise ServerUnavailable("the relay is away")
        return Position(7, 1)

    relay: Any = Relay()
    seeder = Seeder(log, relay, "shop", (), repair)
    for _ in range(3):
        assert not await seeder.step()
    states = seeder.states()
    assert states["shop.good"] == {"state": SEEDED, "end": {"scn": 7, "seq": 1}}
    assert states["shop.later"]["state"] == SEEDED, "what only has to wait is tried at each step"
    assert (states["shop.bad"]["state"], states["shop.bad"]["tries"]) == (REPAIRING, 2)
    assert states["shop.bad"]["error"] == "the rows cannot be read"
    assert tried.count("shop.bad") == 2, "at once, then after a pause"


def seeder_of(log: HotLog) -> tuple[Seeder, Any]:
    """A seeder that finds nothing to repair, and the relay that it asks."""
    relay: Any = Relay()

    async def repair(name: str) -> Position | None:
        raise AssertionError(name)

    return Seeder(log, relay, "shop", (), repair), relay


async def test_no_dump_is_requested_before_the_log_has_come_to_where_the_stream_was(
    log: HotLog,
) -> None:
    noted(log, UNSEEDED)
    seeder, relay = seeder_of(log)
    for _ in range(3):
        assert not await seeder.step()
    assert relay.requested == []
    log.advance(Position(8999, 3))
    await seeder.step()
    assert relay.requested == []
    log.advance(Position(9000, 0))
    await seeder.step()
    assert relay.requested == [[f"shop.{table}" for table in TABLES]]


async def test_sources_are_dumped_together_and_by_themselves_after_a_failure(log: HotLog) -> None:
    noted(log, UNSEEDED)
    log.advance(Position(9000, 0))
    seeder, relay = seeder_of(log)
    for _ in range(4):
        await seeder.step()
    every = [f"shop.{table}" for table in TABLES]
    assert relay.requested == [every, *([name] for name in every)]
    assert {one["tries"] for one in seeder.states().values()} == {2}


async def test_a_dump_reads_how_far_the_log_is_and_continues_when_it_had_to_wait_too_long(
    log: HotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "ROWS_EVERY_S", 0.0)
    noted(log, UNSEEDED)
    seeder, relay = seeder_of(log)
    waited = {"detail": "its reader is idle", "reader": {"scn": 9000, "seq": 0}}
    relay.answers = [
        {"state": "running", "error": None, "rows": 3},
        {"state": "failed", "error": waited, "rows": 5},
    ]
    at = [Position(9000 + step, 0) for step in range(3)]
    for position in at:
        log.advance(position)
        await seeder.step()
    assert relay.readers == [*at, at[-1]], (
        "its reader is sent with the request, with each look, and to continue"
    )
    assert len(relay.requested) == 1
    assert {(one["state"], one["rows"]) for one in seeder.states().values()} == {(DUMPING, 5)}
    await seeder.give_up()
    assert relay.cancelled == ["1"]


async def test_the_rows_of_a_running_dump_are_stored_at_intervals(log: HotLog) -> None:
    noted(log, UNSEEDED)
    seeder, relay = seeder_of(log)
    relay.answers = [{"state": "running", "error": None, "rows": rows} for rows in range(1, 9)]
    log.advance(Position(9000, 0))
    await seeder.step()
    stored = log.note_revision
    for _ in range(4):
        await seeder.step()
    assert log.note_revision == stored, "the states of all sources are not written at each look"
    assert {one["state"] for one in seeder.states().values()} == {DUMPING}


def _running(*tables: tuple[str, list[int] | None, bool]) -> dict[str, Any]:
    """A dump's answer: by table, its last key, and whether it is done."""
    listed = [
        {"source": f"shop.{name}", "rows": 3, "last_key": key, "done": done}
        for name, key, done in tables
    ]
    return {"state": "running", "error": None, "rows": 6, "tables": listed}


@pytest.mark.parametrize("is_behind", [False, True])
async def test_after_the_loss_of_a_dump_the_rows_that_the_log_has_are_not_read_again(
    log: HotLog, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    monkeypatch.setattr(seeding, "ROWS_EVERY_S", 0.0)
    noted(log, UNSEEDED)
    log.advance(Position(9000, 0))
    seeder, relay = seeder_of(log)
    tables = ("bad", [7], True), ("good", [40], False), ("later", None, False)
    further = ("bad", [7], True), ("good", [60], False), ("later", None, False)
    relay.answers = [_running(*tables), _running(*further)]
    await seeder.step()
    await seeder.step()
    if is_behind:
        relay.newest = 9999
    await seeder.step()
    states = {name.partition(".")[2]: one["state"] for name, one in seeder.states().items()}
    whole = DUMPING if is_behind else SEEDED
    assert states == {"bad": whole, "good": DUMPING, "later": DUMPING}
    relay.newest = 9000
    await seeder.step()  # It is gone: the relay that made it, too.
    await seeder.step()
    again = [one for after in relay.after[1:] for one in after.items()]
    if is_behind:
        assert again == [], "what was seen last may not be in the log"
    else:
        assert again == [("shop.good", [40])], "[60] was seen only once"
        assert seeder.states()["shop.bad"]["state"] == SEEDED
        assert ["shop.bad"] not in relay.requested[1:]


async def test_a_dump_that_has_failed_by_itself_begins_at_the_first_key(
    log: HotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "ROWS_EVERY_S", 0.0)
    noted(log, UNSEEDED)
    log.advance(Position(9000, 0))
    seeder, relay = seeder_of(log)
    looks = [_running(*[(name, [5], False) for name in TABLES]) for _ in range(2)]
    relay.answers = [*looks, {"state": "failed", "error": {"detail": "no such key"}}]
    for _ in range(4):
        await seeder.step()
    assert len(relay.requested) > 1
    assert relay.after == [{}] * len(relay.requested)


async def test_all_tables_that_a_dump_could_not_read_are_retried_by_themselves(
    log: HotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeding, "AGAIN_S", 0.0)
    noted(log, UNSEEDED)
    log.advance(Position(9000, 0))
    seeder, relay = seeder_of(log)
    unread = {f"shop.{table}": f"{table} is held" for table in TABLES[1:]}
    error = {"detail": "; ".join(unread.values()), "unread": unread}
    relay.answers = [
        {"state": "failed", "error": {**error, "failed_at": {"source": "shop.good"}}, "tables": []}
    ]
    for _ in range(2):
        await seeder.step()
    every = [f"shop.{table}" for table in TABLES]
    assert relay.requested == [every, ["shop.bad"], ["shop.good"], ["shop.later"]]
    states = seeder.states()
    assert [states[name]["error"] for name in unread] == list(unread.values())


@pytest.mark.parametrize(("rows", "longest_s"), [(0, 30.0), (5, 300.0)])
async def test_a_table_of_which_no_row_was_read_is_retried_sooner(
    log: HotLog, rows: int, longest_s: float
) -> None:
    log.bind("shop", CLOCK, START)
    one = {"state": DUMPING, "dump": "1", "tries": 15}
    log.put_note("seeding", {**{f"shop.{t}": {"state": SEEDED} for t in TABLES}, "shop.bad": one})
    log.advance(Position(9000, 0))
    seeder, relay = seeder_of(log)
    tables = [{"source": "shop.bad", "rows": rows}]
    relay.answers = [{"state": "failed", "error": {"detail": "no"}, "tables": tables}]
    began_us = time.time_ns() // 1000
    await seeder.step()
    pause_us = seeder.states()["shop.bad"]["again_us"] - began_us
    assert 0 <= pause_us - longest_s * 1e6 < longest_s * 1e6 / 2
