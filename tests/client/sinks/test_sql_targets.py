"""The SQL mirror over every kind of target: equal at its SCN, structures, values, keys."""

from __future__ import annotations

import datetime as dt
import random
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from databus.client.sinks import SinkBatch, SinkContext
from databus.client.sinks.sql.sql_mirror import SqlMirror
from databus.client.sinks.sql.sql_target import MirrorTable
from databus.common.checkpoint import Checkpoint, decode
from databus.common.errors import CheckpointMoved
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.client.conftest import StartServer
from tests.client.delivery.test_dispatch_modes import workload
from tests.client.shop import ORDERS, orders
from tests.client.sinks.mirror_houses import MirrorHouse, file_house, server_house
from tests.client.sinks.sink_runs import Watched, sink_config
from tests.client.sinks.test_sqlite_mirror import COUNTED, REKEYED, WIDE, change, partial

WINDOWS = 15


@pytest.fixture(
    params=[
        "sqlite",
        "duckdb",
        pytest.param("postgres", marks=[pytest.mark.postgres, pytest.mark.processes]),
        pytest.param("mariadb", marks=[pytest.mark.mariadb, pytest.mark.processes]),
        pytest.param("mysql", marks=pytest.mark.processes),
    ]
)
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MirrorHouse]:
    kind = request.param
    if kind in ("sqlite", "duckdb"):
        yield file_house(kind, str(tmp_path / f"mirror.{kind}"))
    else:
        yield server_house(kind, request.getfixturevalue(f"{kind}_database"))


def tables_of(house: MirrorHouse) -> dict[str, dict[Any, Any]]:
    found: dict[str, dict[Any, Any]] = {"shop.orders": {}, "shop.items": {}}
    there = house.tables
    if "orders" in there:
        for key, state, amount in house.ask("SELECT id, state, amount FROM orders"):
            found["shop.orders"][key,] = {"id": key, "state": state, "amount": amount}
    if "items" in there:
        for key, name in house.ask("SELECT id, name FROM items"):
            found["shop.items"][key,] = {"id": key, "name": name}
    return found


def recorded_scn(house: MirrorHouse) -> int:
    ((text,),) = house.ask("SELECT checkpoint FROM databus_checkpoints")
    return decode(text).position.scn


async def test_the_target_equals_the_source_at_its_scn_with_failures(
    scripted: StartServer, house: MirrorHouse
) -> None:
    seed = 3
    server = await scripted(*workload(seed, WINDOWS)[0])
    target = house.target()
    rng = random.Random(seed)
    compared = 0

    class Compared(SqlMirror):
        def write(self, batch: Any) -> None:
            super().write(batch)
            if rng.random() < 0.2:
                raise OSError("trouble")

        def commit(self, checkpoint: Checkpoint) -> None:
            nonlocal compared
            if rng.random() < 0.2:
                raise OSError("trouble")
            super().commit(checkpoint)
            compared += 1
            assert tables_of(house) == workload(seed, recorded_scn(house))[1]
            if rng.random() < 0.2:
                raise OSError("committed, but reported as failed")

    process = Watched(sink_config(server.url, batch_rows=5), Compared(target), buffer_bytes=1000)
    await process.until_scn(WINDOWS)
    assert compared > 2
    assert tables_of(house) == workload(seed, WINDOWS)[1]


async def test_a_creation_that_was_reported_as_failed_is_repeated(
    scripted: StartServer, house: MirrorHouse
) -> None:
    """As after a kill between the table's creation and its record."""
    server = await scripted(orders(1, 1))
    target = house.target()
    create = target.create
    failures = [OSError("the connection was lost")]

    def created(table: MirrorTable) -> None:
        create(table)
        if failures:
            raise failures.pop()

    target.create = created  # type: ignore[method-assign]  # a fault, once
    await Watched(sink_config(server.url), SqlMirror(target)).until_scn(1)
    assert not failures
    assert tables_of(house)["shop.orders"].keys() == {(1,)}


async def test_a_process_that_lost_its_name_leaves_no_table(
    scripted: StartServer, house: MirrorHouse
) -> None:
    server = await scripted(orders(1, 1))

    class TakenOver(SqlMirror):
        def open(self, context: SinkContext) -> Checkpoint | None:
            self.context = context
            return super().open(context)

        def write(self, batch: SinkBatch) -> None:
            other = house.mirror()
            other.open(self.context)
            other.close()
            super().write(batch)

    with pytest.raises(CheckpointMoved):
        await Watched(sink_config(server.url), TakenOver(house.target())).until_scn(1)
    assert "orders" not in house.tables


EVERYTHING = SourceSchema(
    "shop.everything",
    (
        Column("id", Kind.UINT64, nullable=False),
        Column("part", Kind.STRING, nullable=False),
        Column("flag", Kind.BOOL),
        Column("big", Kind.INT),
        Column("real", Kind.FLOAT),
        Column("price", Kind.DECIMAL, precision=20, scale=4),
        Column("any number", Kind.NUMERIC),
        Column("text", Kind.STRING),
        Column("data", Kind.BYTES),
        Column("day", Kind.DATE),
        Column("at", Kind.TIME),
        Column("span", Kind.TIME_SPAN),
        Column("local", Kind.TIMESTAMP),
        Column("utc", Kind.TIMESTAMPTZ),
        Column("uid", Kind.UUID),
        Column("doc", Kind.JSON),
    ),
    ("id", "part"),
)
TEXT = 'it\'s \\ "quoted"\n\t% %s ? {} ,é中😀'
UID = uuid.UUID("12345678-1234-5678-1234-567812345678")
ROW = {
    "id": 2**64 - 1,
    "part": "A ",
    "flag": True,
    "big": -(2**63),
    "real": 0.1,
    "price": Decimal("1234567890123456.7891"),
    "any number": Decimal("12345678901234567890.123456789"),
    "text": TEXT,
    "data": b"\x00\xff'\\",
    "day": dt.date(1999, 12, 31),
    "at": dt.time(23, 59, 59, 123456),
    "span": dt.timedelta(hours=-5, microseconds=250),
    "local": dt.datetime(2024, 2, 29, 12, 30, 1, 5),
    "utc": dt.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=dt.UTC),
    "uid": UID,
    "doc": '{"a": [1, "x"]}',
}


def plain(value: Any) -> Any:
    """A value as it compares over all targets."""
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, dt.datetime):
        return value.replace(tzinfo=None).isoformat(" ", "microseconds")
    if isinstance(value, Decimal | uuid.UUID | dt.date | dt.time):
        return str(value)
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, dict):
        return '{"a": [1, "x"]}'
    return value


async def test_every_value_arrives_exactly(scripted: StartServer, house: MirrorHouse) -> None:
    empty = dict.fromkeys(ROW) | {"id": 1, "part": "a", "text": "", "data": b""}
    other = empty | {"part": "a ", "text": None}
    server = await scripted(
        change(1, Op.INSERT, EVERYTHING, **ROW),
        change(2, Op.INSERT, EVERYTHING, **empty),
        change(3, Op.INSERT, EVERYTHING, **other),
        change(4, Op.UPDATE, EVERYTHING, **ROW),
        change(5, Op.INSERT, EVERYTHING, **other | {"part": "A"}),
        change(6, Op.DELETE, EVERYTHING, **other | {"part": "A"}),
        schemas=[EVERYTHING],
    )
    await Watched(sink_config(server.url), house.mirror()).until_scn(6)
    quote = "`" if house.kind in ("mariadb", "mysql") else '"'
    listed = ", ".join(f"{quote}{name}{quote}" for name in ROW)
    rows = {(int(row[0]), row[1]): row for row in house.ask(f"SELECT {listed} FROM everything")}
    assert set(rows) == {(1, "a"), (1, "a "), (2**64 - 1, "A ")}
    found = dict(zip(ROW, rows[2**64 - 1, "A "], strict=True))
    expected = dict(ROW)
    if house.kind in ("mariadb", "mysql"):
        found["at"] = (dt.datetime.min + found["at"]).time()
    if house.kind == "sqlite":
        expected["span"] = expected["span"] // dt.timedelta(microseconds=1)
    assert {name: plain(value) for name, value in found.items()} == {
        name: plain(value) for name, value in expected.items()
    }
    found = dict(zip(ROW, rows[1, "a"], strict=True))
    assert (found["text"], found["data"]) == ("", b"")
    assert all(found[name] is None for name in set(ROW) - {"id", "part", "text", "data"})
    assert dict(zip(ROW, rows[1, "a "], strict=True))["text"] is None


@pytest.mark.parametrize("at_once", [True, False])
async def test_structures_follow_the_source(
    scripted: StartServer, house: MirrorHouse, at_once: bool
) -> None:
    made = [
        orders(1, 1, 2),
        change(2, Op.INSERT, WIDE, id=3, state="a", note="new"),
        change(3, Op.UPDATE, COUNTED, id=3, state=7, note="new"),
        change(4, Op.UPDATE, WIDE, id=3, state="back", note="new"),
        change(5, Op.DELETE, REKEYED, id=3, state="back", note="new"),
        change(6, Op.INSERT, REKEYED, id=4, state="d", note="k"),
        change(7, Op.UPDATE, REKEYED, id=5, state="d", note="k"),
    ]
    server = await scripted(schemas=[ORDERS, WIDE, COUNTED, REKEYED])
    if at_once:
        server.append(*made)
        await Watched(sink_config(server.url), house.mirror()).until_scn(7)
    else:
        for scn, one in enumerate(made, start=1):
            server.append(one)
            await Watched(sink_config(server.url), house.mirror()).until_scn(scn)
            if scn == 2:
                assert house.columns("orders") == {"id", "state", "note", "_scn", "_seq"}
                assert house.ask("SELECT state FROM orders WHERE id = 1") == [("s1",)]
            elif scn == 4:
                assert house.ask("SELECT id, state FROM orders ORDER BY id") == [
                    (1, None),
                    (2, None),
                    (3, "back"),
                ]
    assert house.columns("orders") == {"id", "state", "note", "_scn", "_seq"}
    assert house.ask("SELECT id, state, note FROM orders") == [(5, "d", "k")]


def with_nulls(scn: int, op: Op, a: int | None, b: str) -> bytes:
    builder = WindowBuilder(scn, 0)
    builder.event(
        op,
        KEYLESS.source_id,
        KEYLESS.fingerprint,
        KEYLESS.encode_key([a]),
        after=None if op is Op.DELETE else KEYLESS.encode_row([a, b]),
    )
    return builder.end(f"tx{scn}")


KEYLESS = SourceSchema(
    "shop.keyless", (Column("a", Kind.INT), Column("b", Kind.STRING)), ("a",), nullable_key=True
)


async def test_a_key_may_be_null(scripted: StartServer, house: MirrorHouse) -> None:
    server = await scripted(
        with_nulls(1, Op.INSERT, None, "x"),
        with_nulls(2, Op.INSERT, 1, "y"),
        with_nulls(3, Op.UPDATE, None, "z"),
        with_nulls(4, Op.INSERT, 2, "w"),
        schemas=[KEYLESS],
    )
    await Watched(sink_config(server.url, batch_rows=1), house.mirror()).until_scn(4)
    server.append(with_nulls(5, Op.UPDATE, None, "v"), with_nulls(6, Op.DELETE, 2, ""))
    await Watched(sink_config(server.url), house.mirror()).until_scn(6)
    assert sorted(house.ask("SELECT b FROM keyless")) == [("v",), ("y",)]


async def test_partial_rows_keep_what_they_lack(scripted: StartServer, house: MirrorHouse) -> None:
    server = await scripted(
        change(1, Op.INSERT, WIDE, id=1, state="a", note="long"),
        change(2, Op.INSERT, WIDE, id=2, state="a", note="short"),
        partial(3, 1, "b"),
        schemas=[WIDE],
    )
    await Watched(sink_config(server.url), house.mirror()).until_scn(3)
    server.append(partial(4, 2, "z"))
    await Watched(sink_config(server.url), house.mirror()).until_scn(4)
    assert house.ask("SELECT id, state, note, _scn FROM orders ORDER BY id") == [
        (1, "b", "long", 3),
        (2, "z", "short", 4),
    ]


async def test_a_truncate_leaves_what_comes_after_it(
    scripted: StartServer, house: MirrorHouse
) -> None:
    builder = WindowBuilder(2, 0)
    builder.event(Op.TRUNCATE, ORDERS.source_id, ORDERS.fingerprint, b"")
    server = await scripted(orders(1, 1, 2), builder.end("tx2"), orders(3, 2))
    await Watched(sink_config(server.url), house.mirror()).until_scn(3)
    assert house.ask("SELECT id, _scn FROM orders") == [(2, 3)]


async def test_a_replay_puts_no_older_state_over_a_newer(
    scripted: StartServer, house: MirrorHouse
) -> None:
    server = await scripted(orders(1, 1), orders(2, 1, op="u"))
    await Watched(sink_config(server.url), house.mirror()).until_scn(2)
    house.ask("UPDATE databus_checkpoints SET checkpoint = NULL")
    states = set()

    class Looking(SqlMirror):
        def commit(self, checkpoint: Checkpoint) -> None:
            super().commit(checkpoint)
            states.update(house.ask("SELECT state, _scn FROM orders"))

    await Watched(sink_config(server.url, batch_rows=1), Looking(house.target())).until_scn(2)
    assert states == {("s2", 2)}
