"""An application beside the source of its SQLite database: none of its statements fails by ours."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from databus.relay.sources.sqlite import sqlite_log
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from databus.relay.sources.sqlite.sqlite_tables import CapturedTables
from tests.support.opened_source import open_source
from tests.support.sqlite_source import Reader, config
from tests.support.waiting import eventually

pytestmark = pytest.mark.faults

TABLES = 1000
BUSY_S = 2.0
"""How long the application waits for a lock: less than the 5 s of Python's sqlite3.  On a quiet
machine 0.25 s are enough; beside other tests a sync of the disk alone takes longer."""


def make_tables(path: Path, count: int) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            for number in range(count):
                connection.execute(
                    f"CREATE TABLE t{number} (id INTEGER PRIMARY KEY, name TEXT, p REAL, b BLOB)"
                )


def version_of(path: Path) -> int:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return sqlite_log.schema_version(connection)


class Application:
    """Writes as fast as it can, until the block ends; ``errors`` has what failed."""

    def __init__(self, path: Path, *, tables: int = TABLES, busy_s: float = BUSY_S) -> None:
        self.path = path
        self.errors: list[str] = []
        self.written = 0
        self.longest_s = 0.0
        self._tables, self._busy_s = tables, busy_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        with contextlib.closing(sqlite3.connect(self.path, timeout=self._busy_s)) as connection:
            while not self._ended.is_set():
                began_s, table = time.monotonic(), self.written % self._tables
                try:
                    with connection:
                        connection.execute(
                            f"INSERT INTO t{table} VALUES (?, 'x', 1.5, NULL)",
                            (self.written,),
                        )
                    self.written += 1
                except sqlite3.Error as error:
                    self.errors.append(str(error))
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    def __enter__(self) -> Application:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_no_write_of_the_application_fails_while_a_thousand_tables_get_their_triggers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"
    make_tables(path, TABLES)
    defined = version_of(path)
    source = SqliteSource(config(path))
    with Application(path) as application:
        await source.open()
        during = application.written
        begun = await source.first_scn()
        reader = Reader(source, begun)
    written = application.written
    assert application.errors == []
    assert during > 20
    # A connection reads the definitions again after each.
    assert version_of(path) - defined < TABLES
    with contextlib.closing(sqlite3.connect(path)) as connection:
        last = sqlite_log.last_id(connection)
        rows = connection.execute(
            "SELECT count(*) FROM databus_log WHERE id > ?", (begun,)
        ).fetchone()[0]
    events = await reader.until(last)
    ids = [after["id"] for _, _, _, _, after in events]
    assert ids == list(range(written - rows, written)), "each change after the start, in order"
    await source.close()
    version = version_of(path)
    again = await open_source(SqliteSource(config(path)))
    await again.close()
    assert version_of(path) == version, "a restart changes nothing"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_among_3000_tables_each_transaction_of_ours_takes_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shop.db"
    make_tables(path, 3000)
    held: list[tuple[int, float]] = []
    bring_in_step = CapturedTables._bring_in_step

    def measured(*arguments: Any) -> tuple[int, float]:
        held.append(bring_in_step(*arguments))
        return held[-1]

    monkeypatch.setattr(CapturedTables, "_bring_in_step", measured)
    source = SqliteSource(config(path))
    with Application(path, tables=3000, busy_s=5.0) as application:
        opening = asyncio.create_task(source.open())
        await eventually(lambda: len(held) >= 4, 60.0, "4 transactions; the others are like them")
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
    await source.close()
    assert application.errors == []
    assert application.written > 20
    assert max(count for count, _ in held) >= 20, "as many tables as fit"
    # 20 ms, and what one table takes; a machine that others use takes several times as long.
    assert min(seconds for _, seconds in held) < 0.1
    assert application.longest_s < 5.0


async def test_the_log_is_pruned_in_steps_that_let_the_application_write(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t0 (id INTEGER PRIMARY KEY, name TEXT)")
    source = await open_source(SqliteSource(config(path)))
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany(
            "INSERT INTO t0 VALUES (?, 'x')", ((number,) for number in range(20_000))
        )
    held: list[int] = []
    await source._run(lambda: source._db.set_trace_callback(
        lambda sql: held.append(int(sql.rpartition(" ")[2])) if sql.startswith("DELETE") else None
    ))  # fmt: skip
    await source.ack(await source.first_scn())
    assert held == [5000, 10_000, 15_000, 20_000, 20_001]
    await source.close()
