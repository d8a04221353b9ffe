"""The SQL mirror with SQLite: the target equals the source at the SCN that it records."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from databus.client.sinks import SinkBatch, SinkRow
from databus.client.sinks.sql.sql_mirror import SqlMirror
from databus.client.sinks.sql.sqlite_target import SqliteTarget, _values
from databus.common.checkpoint import Checkpoint, Position
from databus.common.errors import CheckpointMoved, ConfigError, SinkRefused, SinkUnavailable
from databus.common.frame.frame_format import Op, iter_frames, pack_frame
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.common.table_state import CaptureState, TableState
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.scripted_server import Fault
from tests.client.shop import ITEMS, ORDERS, orders, window
from tests.client.sinks.sink_runs import (
    Watched,
    sink_config,
    sqlite_mirror,
    sqlite_rows,
    stored_checkpoint,
)

WINDOWS = 30


def tables_of(path: Path) -> dict[str, dict[Any, Any]]:
    """The mirrored rows in the form of the workload's."""
    found: dict[str, dict[Any, Any]] = {"shop.orders": {}, "shop.items": {}}
    there = {name for (name,) in sqlite_rows(path, "SELECT name FROM sqlite_master")}
    if "orders" in there:
        for key, state, amount in sqlite_rows(path, "SELECT id, state, amount FROM orders"):
            found["shop.orders"][key,] = {"id": key, "state": state, "amount": amount}
    if "items" in there:
        for key, name in sqlite_rows(path, "SELECT id, name FROM items"):
            found["shop.items"][key,] = {"id": key, "name": name}
    return found


class Broken(SqliteTarget):
    """Fails at random calls, before or after they took effect."""

    def __init__(self, path: str, rng: random.Random, rate: float = 0.03) -> None:
        super().__init__(path)
        self.rng, self.rate, self.failures = rng, rate, 0

    def _trouble(self) -> None:
        if self.rng.random() < self.rate:
            self.failures += 1
            raise OSError("trouble")

    def commit(self) -> None:
        self._trouble()
        super().commit()
        self._trouble()

    def upsert(self, table: Any, rows: Any, *, are_new: bool = False) -> None:
        self._trouble()
        super().upsert(table, rows, are_new=are_new)
        self._trouble()

    def delete(self, table: Any, rows: Any) -> None:
        super().delete(table, rows)
        self._trouble()

    def connect(self) -> None:
        self._trouble()
        super().connect()


@pytest.mark.parametrize("seed", range(6))
async def test_the_target_equals_the_source_at_its_scn_under_random_trouble(
    scripted: StartServer, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    made, _ = workload(seed, WINDOWS)
    server = await scripted(*made)
    total = sum(map(len, made))
    server.faults = [Fault(cut_after_bytes=rng.randrange(1, total)) for _ in range(4)]
    path = tmp_path / "mirror.db"
    target = Broken(str(path), rng)
    compared = 0

    class Compared(SqlMirror):
        def commit(self, checkpoint: Checkpoint) -> None:
            nonlocal compared
            super().commit(checkpoint)
            compared += 1
            assert tables_of(path) == workload(seed, stored_checkpoint(path).position.scn)[1]

    process = Watched(
        sink_config(server.url, batch_rows=rng.choice([1, 7, 1000])),
        Compared(target),
        buffer_bytes=rng.choice([300, 4000, 1 << 20]),
    )
    await process.until_scn(WINDOWS)
    assert compared > 1
    assert tables_of(path) == workload(seed, WINDOWS)[1]


async def test_a_window_in_parts_becomes_visible_at_once(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, *range(5000)))
    path = tmp_path / "mirror.db"
    seen = set()

    class Looking(SqlMirror):
        def write(self, batch: SinkBatch) -> None:
            super().write(batch)
            seen.add(len(tables_of(path)["shop.orders"]))

    process = Watched(
        sink_config(server.url, batch_rows=500), Looking(SqliteTarget(str(path))), buffer_bytes=2000
    )
    await process.until_scn(1)
    assert process.consumer.counts.batches > 1
    assert seen == {0}
    assert len(tables_of(path)["shop.orders"]) == 5000


async def test_a_sink_resumes_at_the_checkpoint_of_its_target(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1), orders(2, 2))
    path = tmp_path / "mirror.db"
    await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(2)
    server.append(orders(3, 3))
    again = Watched(sink_config(server.url), sqlite_mirror(path))
    await again.until_scn(3)
    assert again.consumer.counts.rows == 1
    assert set(tables_of(path)["shop.orders"]) == {(1,), (2,), (3,)}


async def test_a_replay_from_an_older_checkpoint_puts_no_older_state_over_a_newer(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1), orders(2, 1, op="u"))
    path = tmp_path / "mirror.db"
    await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(2)
    states = []

    class Slow(SqlMirror):
        def commit(self, checkpoint: Checkpoint) -> None:
            super().commit(checkpoint)
            states.append(sqlite_rows(path, "SELECT state FROM orders"))

    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE databus_checkpoints SET checkpoint = NULL")
    process = Watched(sink_config(server.url, batch_rows=1), Slow(SqliteTarget(str(path))))
    await process.until_scn(2)
    assert states
    assert set(map(tuple, states)) == {(("s2",),)}


WIDE = SourceSchema(
    "shop.orders",
    (
        Column("id", Kind.INT, nullable=False),
        Column("state", Kind.STRING, nullable=True),
        Column("note", Kind.STRING, nullable=True),
    ),
    ("id",),
)
COUNTED = dataclasses.replace(
    WIDE, columns=(WIDE.columns[0], Column("state", Kind.INT), WIDE.columns[2])
)
REKEYED = dataclasses.replace(
    WIDE, columns=(*WIDE.columns[:2], Column("note", Kind.STRING, nullable=False)), key=("note",)
)


def change(scn: int, op: Op, schema: SourceSchema, **row: Any) -> bytes:
    """A window with one change."""
    builder = WindowBuilder(scn, 1_700_000_000_000_000)
    builder.event(
        op,
        schema.source_id,
        schema.fingerprint,
        schema.encode_key(row),
        after=None if op is Op.DELETE else schema.encode_row(row),
    )
    return builder.end(f"tx{scn}")


def announced(scn: int, schema: SourceSchema) -> bytes:
    return schema.change_frame(scn, 0, 0)


def columns_of(path: Path, table: str) -> list[str]:
    return [row[1] for row in sqlite_rows(path, f"PRAGMA table_info({table})")]


@pytest.mark.parametrize("at_once", [True, False])
async def test_columns_are_added_dropped_and_retyped_as_the_source_does(
    scripted: StartServer, tmp_path: Path, at_once: bool
) -> None:
    made = [
        orders(1, 1, 2),
        change(2, Op.INSERT, WIDE, id=3, state="a", note="new"),
        change(3, Op.UPDATE, COUNTED, id=3, state=7, note="new"),
    ]
    server = await scripted(schemas=[ORDERS, WIDE, COUNTED])
    path = tmp_path / "mirror.db"
    if at_once:
        server.append(*made)
        await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(3)
    else:
        for scn, one in enumerate(made, start=1):
            server.append(one)
            await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(scn)
            if scn == 2:
                assert columns_of(path, "orders") == ["id", "state", "_scn", "_seq", "note"]
                assert sqlite_rows(path, "SELECT id, state FROM orders WHERE id = 1") == [(1, "s1")]
    assert set(columns_of(path, "orders")) == {"id", "state", "_scn", "_seq", "note"}
    # The type of `state` has changed: the stream gives the other rows again.
    assert sqlite_rows(path, "SELECT id, state, note FROM orders ORDER BY id") == [
        (1, None, None),
        (2, None, None),
        (3, 7, "new"),
    ]


async def test_another_key_makes_the_table_again(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(
        change(1, Op.INSERT, WIDE, id=1, state="a", note="x"),
        change(2, Op.INSERT, WIDE, id=2, state="b", note="y"),
        change(3, Op.UPDATE, REKEYED, id=1, state="c", note="x"),
        change(4, Op.DELETE, REKEYED, id=2, state="", note="y"),
        schemas=[WIDE, REKEYED],
    )
    path = tmp_path / "mirror.db"
    await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(4)
    assert sqlite_rows(path, "SELECT id, state, note FROM orders") == [(1, "c", "x")]
    with pytest.raises(Exception, match="UNIQUE"):
        sqlite_rows(path, "INSERT INTO orders VALUES (9, 'z', 'x', 1, 1)")


def partial(scn: int, key: int, state: str) -> bytes:
    """An update of WIDE whose note the source left out."""
    builder = WindowBuilder(scn, 0)
    builder.event(
        Op.UPDATE,
        WIDE.source_id,
        WIDE.fingerprint,
        WIDE.encode_key([key]),
        after=WIDE.encode_row([key, state, None]),
        absent=bytes([0b100]),
    )
    return builder.end(f"tx{scn}")


async def test_columns_that_the_source_left_out_keep_their_values(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(
        change(1, Op.INSERT, WIDE, id=1, state="a", note="long"),
        partial(2, 1, "b"),
        change(3, Op.INSERT, WIDE, id=2, state="a", note="short"),
        schemas=[WIDE],
    )
    path = tmp_path / "mirror.db"
    await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(3)
    server.append(partial(4, 2, "z"))
    await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(4)
    assert sqlite_rows(path, "SELECT id, state, note, _scn FROM orders ORDER BY id") == [
        (1, "b", "long", 2),
        (2, "z", "short", 4),
    ]


async def test_the_state_of_a_table_is_beside_its_rows(
    scripted: StartServer, tmp_path: Path
) -> None:
    state = TableState("shop.items", CaptureState.SUSPENDED, 2, "RENAME", "databus resync")
    frame = pack_frame(op=Op.TABLE_STATE, scn=2, seq=0, after=state.encode())
    server = await scripted(orders(1, 1), frame, orders(3, 2))
    path = tmp_path / "mirror.db"
    await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(3)
    assert sqlite_rows(
        path, "SELECT source, state, since_scn, reason FROM databus_tables ORDER BY source"
    ) == [("shop.items", "suspended", 2, "RENAME"), ("shop.orders", "followed", 0, "")]


async def test_a_bootstrap_then_the_stream_give_the_whole_table(
    scripted: StartServer, tmp_path: Path
) -> None:
    relay = await scripted(orders(5, 9), orders(6, 1, op="d"))
    relay.evict_to(4)
    rows = [orders(scn, scn) for scn in (1, 2, 3)]
    store = await scripted()
    store.bootstrap_rows = [bytes(next(iter(iter_frames(one))).bytes) for one in rows]
    store.bootstrap_target = Position(4, 1)
    relay.prev = Position(4, 1)
    path = tmp_path / "mirror.db"
    process = Watched(
        sink_config(relay.url, bootstraps=[store.url], start="bootstrap"), sqlite_mirror(path)
    )
    await process.until_scn(6)
    assert set(tables_of(path)["shop.orders"]) == {(2,), (3,), (9,)}


async def test_a_table_that_the_sink_has_not_made_is_not_touched(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1))
    path = tmp_path / "mirror.db"
    sqlite_rows(path, "CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT, amount TEXT)")
    with pytest.raises(SinkRefused, match="has not made"):
        await Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(1)
    adopting = SqlMirror(SqliteTarget(str(path)), adopts_tables=True)
    await Watched(sink_config(server.url), adopting).until_scn(1)
    assert sqlite_rows(path, "SELECT id, _scn FROM orders") == [(1, 1)]


async def test_the_last_process_that_opens_a_name_has_it(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1))
    path = tmp_path / "mirror.db"
    first = Watched(sink_config(server.url), sqlite_mirror(path))

    task = asyncio.create_task(first.until_scn(99))
    await first.changed.wait()
    owner = sqlite_rows(path, "SELECT owner FROM databus_checkpoints")
    second = asyncio.create_task(Watched(sink_config(server.url), sqlite_mirror(path)).until_scn(2))
    while sqlite_rows(path, "SELECT owner FROM databus_checkpoints") == owner:
        await asyncio.sleep(0.001)
    server.append(orders(2, 2))
    await second
    with pytest.raises(CheckpointMoved, match="taken the consumer over"):
        await task
    assert set(tables_of(path)["shop.orders"]) == {(1,), (2,)}


async def test_rows_go_where_their_routes_say(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(window(1, ("c", ORDERS, 1, "new"), ("c", ITEMS, 1, "pen")))
    path = tmp_path / "mirror.db"
    routes = [{"source": "shop.or*", "target": "copy_{schema}_{table}", "columns": ["state"]}]
    await Watched(sink_config(server.url, route=routes), sqlite_mirror(path)).until_scn(1)
    assert columns_of(path, "copy_shop_orders") == ["id", "state", "_scn", "_seq"]
    assert sqlite_rows(path, "SELECT source FROM databus_tables") == [("shop.orders",)]


async def test_two_sources_of_one_target_are_refused(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(window(1, ("c", ORDERS, 1, "new"), ("c", ITEMS, 1, "pen")))
    routes = [{"source": "*", "target": "all"}]
    process = Watched(sink_config(server.url, route=routes), sqlite_mirror(tmp_path / "mirror.db"))
    with pytest.raises(ConfigError, match="both go to all"):
        await process.until_scn(1)


def shout(row: SinkRow) -> SinkRow | None:
    """A transform: upper case, without the deletes."""
    if row.op == "d":
        return None
    assert row.value is not None
    row.value = row.value | {"state": row.value["state"].upper()}
    return row


def stumble(row: SinkRow) -> SinkRow | None:
    raise KeyError("no such thing")


async def test_a_transform_changes_and_leaves_out_rows(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1, 2), orders(2, 1, op="d"))
    path = tmp_path / "mirror.db"
    config = sink_config(server.url, transform=f"{__name__}:shout")
    await Watched(config, sqlite_mirror(path)).until_scn(2)
    assert sqlite_rows(path, "SELECT id, state FROM orders ORDER BY id") == [(1, "S1"), (2, "S1")]


async def test_a_transform_that_fails_stops_the_sink(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(orders(1, 1))
    config = sink_config(server.url, transform=f"{__name__}:stumble")
    with pytest.raises(SinkRefused, match="no such thing"):
        await Watched(config, sqlite_mirror(tmp_path / "mirror.db")).until_scn(1)


async def test_a_target_that_is_away_is_tried_again(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(orders(1, 1))
    path = tmp_path / "mirror.db"

    class Away(SqliteTarget):
        attempts = 0

        def connect(self) -> None:
            Away.attempts += 1
            if Away.attempts < 4:
                raise OSError("connection refused")
            super().connect()

    await Watched(sink_config(server.url), SqlMirror(Away(str(path)))).until_scn(1)
    assert Away.attempts == 4
    Away.attempts = -10
    limited = Watched(sink_config(server.url, max_retries=2), SqlMirror(Away(str(path))))
    with pytest.raises(SinkUnavailable, match="connection refused"):
        await limited.until_scn(1)


def test_exact_values_stay_exact() -> None:
    big = pa.array([Decimal(2**64 - 1), Decimal(5), None], pa.decimal128(20, 0))
    assert _values(big) == [str(2**64 - 1), 5, None]
