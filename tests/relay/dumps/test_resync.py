"""Tables that are suspended are resynchronised: by the relay itself, or by the server that claims
them."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from databus.common.config import DatabaseConfig
from databus.common.errors import BadRequest, DatabusError, UnsupportedChange, to_problem
from databus.common.table_state import CaptureState
from databus.relay.dumps.dump_records import Dump, DumpState, new_dump
from databus.relay.dumps.dump_runner import unread_tables
from databus.relay.dumps.resync import Resync
from databus.relay.dumps.resync_pace import MOST_IDLE_PAUSE_S, ResyncPace
from databus.relay.dumps.resync_requests import change_table
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.contract import Chunk, ChunkRequest
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from databus.relay.sources.suspended_tables import TableSuspension
from tests.support.capture import (
    PACE,
    capturing,
    database_config,
    ring_state,
    streaming,
    upserted,
)
from tests.support.relay_process import table_states
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(120)

_PASSING = shutil.ignore_patterns("*.sock", "*.new")
"""Files that may be gone before they are copied."""


def words(folder: Path) -> list[tuple[str, str]]:
    """The same, without the reasons."""
    return [(one.source, str(one.state)) for one in table_states(folder)]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    connection.execute("CREATE TABLE calm (id INTEGER PRIMARY KEY, item TEXT)")
    connection.execute("INSERT INTO orders VALUES (1, 'one'), (2, 'two')")
    yield connection
    connection.close()


def config_of(tmp_path: Path, resync: str) -> DatabaseConfig:
    found = database_config("shop", f"sqlite:///{tmp_path}/shop.db", "*")
    return found.model_copy(update={"resync": resync})


def rebuild(shop: sqlite3.Connection) -> None:
    """As SQLite has tables altered: the triggers are gone with the old one."""
    shop.executescript(
        "CREATE TABLE anew (id INTEGER PRIMARY KEY, item TEXT);"
        "INSERT INTO anew VALUES (2, 'changed'), (3, 'three');"
        "DROP TABLE orders; ALTER TABLE anew RENAME TO orders;"
    )


def rows(shop: sqlite3.Connection) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(n,): {"id": n, "item": item} for n, item in shop.execute("SELECT * FROM orders")}


def held(tmp_path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return ring_state(tmp_path / "data" / "shop").tables.get("main.orders", {})


async def test_a_suspended_table_is_emptied_and_dumped_without_a_request(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "shop"
    async with capturing(config_of(tmp_path, "auto"), tmp_path / "data") as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO orders VALUES (4, 'four')")
        await eventually(lambda: (4,) in held(tmp_path))
        rebuild(shop)
        shop.execute("INSERT INTO calm VALUES (1, 'calm')")
        await eventually(lambda: len(words(folder)) == 3, 20, "followed again")
        assert words(folder) == [
            ("main.orders", "suspended"),
            ("main.orders", "resynchronising"),
            ("main.orders", "followed"),
        ]
        assert "triggers" in table_states(folder)[0].reason
        assert table_states(folder)[0].since_scn > 0
        await eventually(lambda: held(tmp_path) == rows(shop))
        shop.execute("UPDATE orders SET item = item || '!'")
        await eventually(lambda: held(tmp_path) == rows(shop))
        assert fetcher.status_document()["tables"] == []
        await fetcher.make_durable()
        assert b'"tables": []' in fetcher.folder.tables.read_bytes()


async def test_with_manual_a_restart_keeps_the_table_suspended_until_an_operator_confirms(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    folder, config = tmp_path / "data" / "shop", config_of(tmp_path, "manual")
    async with capturing(config, tmp_path / "data") as fetcher:
        await streaming(fetcher)
        rebuild(shop)
        await eventually(lambda: words(folder) == [("main.orders", "suspended")])
    async with capturing(config, tmp_path / "data") as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO calm VALUES (1, 'calm')")
        await eventually(lambda: "main.calm" in ring_state(folder).tables)
        (table,) = fetcher.status_document()["tables"]
        assert (table["state"], table["by"]) == ("suspended", "")
        assert "databus resync RELAY_URL/shop main.orders" in table["cure"]
        assert words(folder) == [("main.orders", "suspended")], "and reports nothing twice"
        assert not fetcher.tables.claim("main.orders", "bootstrap"), "no other server may either"
        change_table(fetcher.tables, {"action": "resync", "source": "main.orders"})
        await eventually(lambda: len(words(folder)) == 3, 20, "followed again")
        assert held(tmp_path) == rows(shop)
    with pytest.raises(BadRequest, match="is followed"):
        change_table(fetcher.tables, {"action": "resync", "source": "main.orders"})


async def test_a_claim_excludes_the_relay_until_it_is_released(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "shop"
    async with capturing(config_of(tmp_path, "auto"), tmp_path / "data") as fetcher:
        await streaming(fetcher)
        tables = fetcher.tables
        tables.present("bootstrap", ["main.*"])
        rebuild(shop)
        await eventually(lambda: words(folder) == [("main.orders", "suspended")])
        assert tables.claim("main.orders", "bootstrap")
        assert not tables.claim("main.orders", "another")
        assert not tables.done("main.orders", "bootstrap"), "the stream does not read it yet"
        tables.give_up("main.orders", "bootstrap", "too many rows differ", for_good=True)
        assert not tables.claim("main.orders", "bootstrap"), "it is the relay's now"
        await eventually(lambda: words(folder)[-1:] == [("main.orders", "followed")], 20)
        assert ring_state(folder).letters.count("t") == 1
        assert held(tmp_path) == rows(shop)
    reasons = [state.reason for state in table_states(folder)]
    assert any("too many rows differ" in reason for reason in reasons)


@pytest.mark.parametrize(("rows_before", "longest_s"), [(0, MOST_IDLE_PAUSE_S), (1, 200)])
async def test_an_attempt_that_read_no_row_is_repeated_soon(
    shop: sqlite3.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_before: int,
    longest_s: float,
) -> None:
    read_chunk = SqliteSource.read_chunk

    async def failing(source: SqliteSource, request: ChunkRequest) -> Chunk:
        if rows_before and request.after is None:
            return replace(await read_chunk(source, replace(request, limit=1)), done=False)
        raise UnsupportedChange("another session uses it", source=request.source)

    monkeypatch.setattr(SqliteSource, "read_chunk", failing)
    pace = replace(PACE, resync=replace(PACE.resync, first_pause_s=200.0))
    data = tmp_path / "data"
    async with capturing(config_of(tmp_path, "auto"), data, pace=pace) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO orders VALUES (4, 'four')")
        await eventually(lambda: (4,) in held(tmp_path))
        rebuild(shop)
        shop.execute("INSERT INTO calm VALUES (1, 'calm')")
        await eventually(lambda: any(one.tries for one in fetcher.tables.book), 20, "it failed")
        (record,) = fetcher.tables.book
        assert "another session uses it" in record.error
        pause_s = record.again_us / 1e6 - time.time()
        assert longest_s - 30 < pause_s <= longest_s


@pytest.mark.parametrize("rows_remain", [True, False])
@pytest.mark.parametrize("by", ["the relay", "bootstrap"])
async def test_a_second_definition_while_a_table_is_read_suspends_it_again(
    tmp_path: Path, by: str, rows_remain: bool
) -> None:
    """For a table that still has its rows, the source ends the suspension itself, before it is
    read.

    Of another one the read ends it, and the second one can come before that has been noticed.
    """

    class Host:
        intake: Any = None
        book: Any = ()
        stops: ClassVar[dict[str, TableSuspension]] = {}

        def suspended(self) -> dict[str, TableSuspension]:
            return self.stops

        async def start_dump(self, dump: Dump) -> None:
            started.append(dump)

    started: list[Dump] = []
    host: Any = Host()
    pace = ResyncPace(alone_s=0.0)
    tables = Resync(config_of(tmp_path, "auto"), tmp_path / "tables.json", host, pace)
    first = TableSuspension(5, "its column d was added", rows_remain=rows_remain)
    host.stops = {"main.t": first}
    tables.notice()
    if rows_remain:
        host.stops = {}
    if by == "bootstrap":
        assert tables.claim("main.t", by)
    else:
        await tables._step()
        (dump,) = started
        record = tables.book.get("main.t")
        assert record is not None
        record.state = CaptureState.RESYNCHRONISING
        tables._take_up("main.t")
    # The rows of these keys may have been read before.
    host.stops = {"main.t": TableSuspension(9, "its column e was added", rows_remain=True)}
    tables.notice()
    host.stops = {}
    if by == "bootstrap":
        assert not tables.done("main.t", by)
    else:
        dump.state = DumpState.COMPLETED
        tables.dump_ended(dump)
    (record,) = tables.book
    assert (record.state, record.reason) == (CaptureState.SUSPENDED, "its column e was added")


async def test_a_table_is_emptied_behind_the_windows_that_came_before_its_suspension(
    tmp_path: Path,
) -> None:
    """A source names a suspension before it hands out the rows of the transactions before."""

    class Intake:
        is_closed = True
        resolved = 5

        def changed_key(self, schema: Any) -> str:
            return ""

    class Host:
        intake = Intake()
        book: Any = ()
        stops: ClassVar[dict[str, TableSuspension]] = {"main.t": TableSuspension(9, "truncated")}

        def suspended(self) -> dict[str, TableSuspension]:
            return self.stops

        async def start_dump(self, dump: Dump) -> None:
            started.append(dump)

        async def make_durable(self) -> None:
            pass

    class Reader:
        async def read_chunk(self, request: Any) -> None:
            reads.append(request)

    class Table:
        source = "main.t"

    started: list[Dump] = []
    reads: list[Any] = []
    emptied: list[int] = []
    host: Any = Host()
    reader: Any = Reader()
    schema: Any = Table()
    config = config_of(tmp_path, "auto")
    tables: Any = Resync(config, tmp_path / "tables.json", host, ResyncPace(alone_s=0.0))
    tables._append = lambda *_: emptied.append(host.intake.resolved)
    tables.notice()
    await tables._step()
    (dump,) = started
    begins = asyncio.create_task(tables.before_dump(dump, reader, schema))
    while not reads:
        await asyncio.sleep(0)
    for resolved in (6, 8, 9):
        for _ in range(5):
            await asyncio.sleep(0)
        assert emptied == []
        host.intake.resolved = resolved
        tables._closed.set()
    await begins
    assert emptied == [9]


async def test_a_kill_between_any_two_steps_leaves_the_table_named_or_followed(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    """What is on disk at each write is taken as what a killed fetcher leaves."""
    small = {"ring_bytes": 1 << 20}
    folder = tmp_path / "data" / "shop"
    config = config_of(tmp_path, "auto").model_copy(update=small)
    copies: list[Path] = []

    class Watched(Fetcher):
        async def make_durable(self, *, acknowledges: bool = True) -> None:
            await super().make_durable(acknowledges=acknowledges)
            copies.append(tmp_path / f"copy-{len(copies)}")
            shutil.copytree(folder, copies[-1] / "shop", ignore=_PASSING)

    shop.execute("INSERT INTO orders VALUES (9, 'nine')")
    fetcher = Watched(config, tmp_path / "data", pace=PACE)
    running = asyncio.create_task(fetcher.run())
    await streaming(fetcher)
    first = len(copies)
    rebuild(shop)
    await eventually(lambda: words(folder)[-1:] == [("main.orders", "followed")], 20)
    fetcher.stop()
    await running
    moments = {tuple(words(copy / "shop")): copy for copy in copies[first:]}
    assert len(moments) >= 3, "the steps were on disk one by one"
    for said, copy in moments.items():
        async with capturing(config, copy) as again:
            await streaming(again)
            await eventually(lambda a=again: not a.tables.book, 20, f"followed after {said}")
            if said:
                found, _ = upserted(copy / "shop", "main.orders")
                assert found == rows(shop), said


async def test_each_table_of_a_dump_has_its_own_reason_for_the_failure(tmp_path: Path) -> None:
    sources = ("main.a", "main.b")

    class Host:
        intake = None
        book: Any = ()

        def suspended(self) -> dict[str, TableSuspension]:
            return {source: TableSuspension(1, "rebuilt") for source in sources}

    host: Any = Host()
    tables = Resync(config_of(tmp_path, "manual"), tmp_path / "tables.json", host, ResyncPace())
    tables.notice()
    unread: dict[str, DatabusError] = {
        source: UnsupportedChange(f"{source} is locked") for source in sources
    }
    dump = new_dump({"sources": list(sources)})
    dump.state, dump.error = DumpState.FAILED, to_problem(unread_tables(unread))
    for source in sources:
        record = tables.book.get(source)
        assert record is not None
        record.dump = dump.id
    tables.dump_ended(dump)
    assert [record.error for record in tables.book] == ["main.a is locked", "main.b is locked"]
    assert dump.error["detail"] == "main.a is locked; main.b is locked"
