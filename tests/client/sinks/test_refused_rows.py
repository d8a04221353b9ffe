"""Rows that the target does not take: the sink sets them aside, continues, and replays them."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from databus.client.deadletters.dead_letter import BEHIND
from databus.client.sinks import Sink, SinkBatch, SinkProcess, TroubledSink
from databus.client.sinks.sql.sql_mirror import SqlMirror
from databus.client.sinks.sql.sqlite_target import SqliteTarget
from databus.common.checkpoint import Checkpoint
from databus.common.errors import ConfigError, ConsumerFailed, RowRefused, SinkRefused
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.shop import ITEMS, ORDERS, orders, window
from tests.client.sinks.sink_runs import Watched, sink_config, sqlite_mirror, sqlite_rows
from tests.client.sinks.test_sqlite_mirror import tables_of

SET_ASIDE = {"refused": "set-aside"}
WINDOWS = 25


class Picky(SqliteTarget):
    """A target that checks the values of a row."""

    def connect(self) -> None:
        super().connect()
        self.ask(
            "CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, state TEXT "
            "CHECK (state NOT LIKE '%bad%'), amount TEXT)"
        )
        self.commit()


def picky(path: Path) -> SqlMirror:
    return SqlMirror(Picky(str(path)), adopts_tables=True)


def letters_of(process: SinkProcess) -> list[tuple[int, str]]:
    """(scn, error) of each letter, then unlock the file."""
    found = [(one.scn, one.error) for one in process.dead_letters.all()]
    process.dead_letters.close()
    return found


async def test_the_others_are_written_and_a_replay_completes_them(
    scripted: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "mirror.db"
    server = await scripted(
        window(1, ("c", ORDERS, 1, "a"), ("c", ORDERS, 2, "bad"), ("c", ITEMS, 1, "pen")),
        window(2, ("u", ORDERS, 2, "b"), ("u", ORDERS, 1, "b"), ("c", ORDERS, 3, "very bad")),
        window(3, ("c", ORDERS, 4, "a"), ("d", ORDERS, 3, None)),
    )
    # A batch has the last state of each key: here a batch is a window.
    config = sink_config(server.url, data_dir=str(tmp_path), batch_rows=1, **SET_ASIDE)
    process = Watched(config, picky(path))
    await process.until_scn(3)
    assert sqlite_rows(path, "SELECT id, state FROM orders ORDER BY id") == [(1, "b"), (4, "a")]
    assert tables_of(path)["shop.items"] == {(1,): {"id": 1, "name": "pen"}}
    found = letters_of(process)
    assert [scn for scn, _ in found] == [1, 2, 2, 3]
    assert "CHECK constraint failed" in found[0][1]
    assert "CHECK constraint failed" in found[2][1]
    assert [found[1][1], found[3][1]] == [BEHIND, BEHIND]

    again = await SinkProcess(config, picky(path)).replay()
    assert (again.delivered, again.failed, again.behind) == (0, 2, 2)
    whole = await SinkProcess(config, sqlite_mirror_without_check(path)).replay()
    assert (whole.delivered, whole.failed, whole.behind) == (4, 0, 0)
    assert sqlite_rows(path, "SELECT id, state FROM orders ORDER BY id") == [
        (1, "b"),
        (2, "b"),
        (4, "a"),
    ]


def sqlite_mirror_without_check(path: Path) -> SqlMirror:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE fixed (id INTEGER PRIMARY KEY, state TEXT, amount TEXT, _scn INTEGER, "
            "_seq INTEGER); INSERT INTO fixed SELECT * FROM orders; DROP TABLE orders; "
            "ALTER TABLE fixed RENAME TO orders"
        )
    return sqlite_mirror(path)


class Refusing(Sink):
    """Has the rows that it takes: it refuses those of some keys, and fails at random."""

    stores_checkpoint = True

    def __init__(self, is_bad: Callable[[Any], bool], seed: int) -> None:
        self.rows: dict[Any, Any] = {}
        self.checkpoint: Checkpoint | None = None
        self._next: dict[Any, Any] = {}
        self._is_bad = is_bad
        self._random = random.Random(seed)

    def open(self, context: Any) -> Checkpoint | None:
        self._next = dict(self.rows)
        return self.checkpoint

    def write(self, batch: SinkBatch) -> None:
        for row in batch.rows():
            if self._random.random() < 0.02:
                raise OSError("away")
            if row.op == "t":
                self._next = {key: one for key, one in self._next.items() if key[0] != row.source}
                continue
            if self._is_bad(row):
                raise RowRefused(f"no {row!r}")
            self._next[row.source, *row.key.values()] = row.value

    def commit(self, checkpoint: Checkpoint) -> None:
        self.rows, self.checkpoint = dict(self._next), checkpoint

    def rollback(self) -> None:
        self._next = dict(self.rows)


@pytest.mark.parametrize("seed", range(4))
async def test_rows_of_other_keys_are_those_of_the_source(
    seed: int, scripted: StartServer, tmp_path: Path
) -> None:
    """Under random failures; and with the replay the rows of the bad keys are, too."""
    windows, tables = workload(seed, WINDOWS)
    bad = {3, 7, 11}
    sink = Refusing(lambda row: row.op != "t" and row.key["id"] in bad, seed)
    server = await scripted(*windows)
    config = sink_config(server.url, data_dir=str(tmp_path), batch_rows=20, **SET_ASIDE)
    await Watched(config, sink).until_scn(WINDOWS)
    rows = {key: row for key, row in sink.rows.items() if row is not None}
    expected = {
        (source, *key): row for source, table in tables.items() for key, row in table.items()
    }
    assert rows == {key: row for key, row in expected.items() if key[1] not in bad}
    sink._is_bad = lambda row: False
    while (outcome := await SinkProcess(config, sink).replay()).failed or outcome.behind:
        pass  # The sink was away; that letter comes again.
    assert {key: row for key, row in sink.rows.items() if row is not None} == expected


async def test_without_it_the_first_refusal_stops_the_sink(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1), window(2, ("c", ORDERS, 2, "bad")))
    config = sink_config(server.url, data_dir=str(tmp_path))
    with pytest.raises(RowRefused, match="CHECK constraint failed"):
        await Watched(config, picky(tmp_path / "mirror.db")).until_scn(2)


async def test_too_many_letters_stop_the_sink(scripted: StartServer, tmp_path: Path) -> None:
    bad = window(1, *[("c", ORDERS, number, "bad") for number in range(5)])
    server = await scripted(bad)
    config = sink_config(server.url, data_dir=str(tmp_path), max_dead_letters=4, **SET_ASIDE)
    with pytest.raises(ConsumerFailed, match="max_dead_letters is 4"):
        await Watched(config, picky(tmp_path / "mirror.db")).until_scn(1)


async def test_a_refusal_of_the_commit_is_no_row(scripted: StartServer, tmp_path: Path) -> None:
    class Deferred(Refusing):
        def commit(self, checkpoint: Checkpoint) -> None:
            raise RowRefused("a deferred constraint")

    server = await scripted(orders(1, 1))
    config = sink_config(server.url, data_dir=str(tmp_path), **SET_ASIDE)
    with pytest.raises(SinkRefused, match="at the commit, so the row is not known"):
        await Watched(config, TroubledSink(Deferred(lambda row: False, 0))).until_scn(1)


async def test_a_sink_without_a_method_stops_with_its_name(
    scripted: StartServer, tmp_path: Path
) -> None:
    class WithoutCommit(Sink):
        def write(self, batch: SinkBatch) -> None:
            """It forgets the rows."""

    server = await scripted(orders(1, 1))
    config = sink_config(server.url, data_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"WithoutCommit has no method commit\(checkpoint\)"):
        await Watched(config, WithoutCommit()).until_scn(1)
