"""What MariaDB and MySQL have in common: windows and positions, on a real server of each."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import AsyncIterator

import pytest

from databus.common.frame.frame_format import Op, iter_frames
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.mysql import MySqlSource, mysql_source
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, read_to_end, source_of
from tests.support.opened_source import open_source, opened_scn
from tests.support.system import server_shop


@pytest.fixture(
    params=[
        pytest.param("mariadb", marks=pytest.mark.mariadb),
        "mysql",
    ]
)
def database(request: pytest.FixtureRequest) -> FreshDatabase:
    """An empty database; skipped, with the reason, where there is no such server."""
    found: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.fixture
async def source(database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    opened = source_of(database)
    yield opened
    await opened.close()


def gtid_of(database: FreshDatabase, scn: int) -> str:
    """The server's own name for the transaction."""
    if database.url.startswith("mysql:"):
        return f"{database.execute('SELECT @@server_uuid')[0][0]}:{scn}"
    return f"1-1-{scn}"


async def test_a_transaction_over_several_tables_is_one_window_in_statement_order(
    database: FreshDatabase, source: MySqlSource
) -> None:
    database.execute("CREATE TABLE a (id INT PRIMARY KEY, v TEXT)")
    database.execute("CREATE TABLE b (id INT PRIMARY KEY, v TEXT)")
    start = await opened_scn(source)
    database.transaction(
        "INSERT INTO a VALUES (1, 'ż'), (2, '😀')",
        "INSERT INTO b VALUES (1, NULL)",
        "UPDATE a SET v = 'x' WHERE id = 2",
        "DELETE FROM a WHERE id = 1",
    )
    streamed = await read_to_end(source, start)
    (window,) = streamed.windows()
    name = database.name
    assert [(e.op, e.source, e.key["id"], e.before, e.after) for e in streamed.events()] == [
        (Op.INSERT, f"{name}.a", 1, None, {"id": 1, "v": "ż"}),
        (Op.INSERT, f"{name}.a", 2, None, {"id": 2, "v": "😀"}),
        (Op.INSERT, f"{name}.b", 1, None, {"id": 1, "v": None}),
        (Op.UPDATE, f"{name}.a", 2, {"id": 2, "v": "😀"}, {"id": 2, "v": "x"}),
        (Op.DELETE, f"{name}.a", 1, {"id": 1, "v": "ż"}, None),
    ]
    assert [view.seq for view in window] == [0, 1, 2, 3, 4, 5]
    assert {view.scn for view in window} == {start + 1}
    assert bytes(window[-1].key) == gtid_of(database, start + 1).encode()
    assert window[-1].event_count == 5
    (now,) = database.execute("SELECT UNIX_TIMESTAMP()")[0]
    assert abs(int(str(now)) * 1_000_000 - window[0].commit_us) < 60_000_000


async def test_mysqls_clock_is_the_server_and_its_commits_have_microseconds(
    mysql_database: FreshDatabase,
) -> None:
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    source = source_of(mysql_database)
    start = await opened_scn(source)
    for number in range(5):
        mysql_database.execute(f"INSERT INTO t VALUES ({number})")
    streamed = await read_to_end(source, start)
    server = gtid_of(mysql_database, 0).partition(":")[0]
    assert source.clock == f"mysql:{server}:shop"
    assert any(window[0].commit_us % 1000 for window in streamed.windows())
    await source.close()


async def test_an_update_of_a_key_is_a_delete_and_an_insert_in_one_window(
    database: FreshDatabase, source: MySqlSource
) -> None:
    database.execute("CREATE TABLE t (a INT, b CHAR(3), v INT, PRIMARY KEY (b, a))")
    database.execute("INSERT INTO t VALUES (1, 'x', 10), (2, 'y', 20)")
    start = await opened_scn(source)
    database.execute("UPDATE t SET a = a + 100, v = v + 1 WHERE a = 1")
    streamed = await read_to_end(source, start)
    assert [(e.op, e.key, e.before, e.after) for e in streamed.events()] == [
        (Op.DELETE, {"b": "x", "a": 1}, {"a": 1, "b": "x", "v": 10}, None),
        (Op.INSERT, {"b": "x", "a": 101}, None, {"a": 101, "b": "x", "v": 11}),
    ]
    assert len(streamed.windows()) == 1


async def test_rolled_back_work_and_rolled_back_savepoints_leave_no_event(
    database: FreshDatabase, source: MySqlSource
) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    start = await opened_scn(source)
    database.transaction("INSERT INTO t VALUES (1)", "ROLLBACK")
    database.transaction(
        "INSERT INTO t VALUES (2)",
        "SAVEPOINT s",
        "INSERT INTO t VALUES (3)",
        "ROLLBACK TO s",
        "INSERT INTO t VALUES (4)",
    )
    streamed = await read_to_end(source, start)
    assert [event.key["id"] for event in streamed.events()] == [2, 4]


async def test_a_stream_can_begin_at_every_scn_and_gives_the_same_rest(
    database: FreshDatabase, source: MySqlSource
) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    start = await opened_scn(source)
    for number in range(12):
        database.transaction(
            f"INSERT INTO t VALUES ({number}, 0)", f"UPDATE t SET v = v + 1 WHERE id <= {number}"
        )
        if number % 4 == 3:
            database.execute("FLUSH BINARY LOGS")
    whole = await read_to_end(source, start)
    ends: dict[int, int] = {}
    at = 0
    for view in iter_frames(bytes(whole.data)):
        at += view.length
        ends[view.scn] = at
    assert len(ends) == 12
    for scn in range(start, start + 12):
        rest = await read_to_end(source, scn)
        assert bytes(rest.data) == bytes(whole.data[ends.get(scn, 0) :])


async def test_a_backlog_announces_each_definition_where_it_begins_and_not_todays(
    database: FreshDatabase, source: MySqlSource
) -> None:
    for table in ("t", "still"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, a INT)")
    start = await opened_scn(source)
    database.execute("INSERT INTO t VALUES (1, 1)")
    before = await read_to_end(source, start)
    # The relay does not read meanwhile.
    for statement in (
        "ALTER TABLE t ADD COLUMN b VARCHAR(10)",
        "ALTER TABLE still ADD COLUMN c INT",
        "INSERT INTO t VALUES (2, 2, 'two')",
        "ALTER TABLE t COMMENT = 'soon of other columns'",
        "ALTER TABLE t ADD COLUMN z BIGINT AFTER id, DROP COLUMN a",
        "UPDATE t SET z = 3",
        "ALTER TABLE t COMMENT = 'the same columns'",
        "ALTER TABLE t DROP COLUMN b",
    ):
        database.execute(statement)
    again = await open_source(source_of(database))
    again.restore(before.resume_state, None, before.resolved)
    found = await read_to_end(again, before.resolved)
    await again.close()
    order: list[object] = []
    last_announced: dict[int, int] = {}
    for view in found.frames():
        if view.op == Op.SCHEMA_CHANGE:
            announced = SourceSchema.from_json(json.loads(bytes(view.after or b"")))
            last_announced[view.source_id] = announced.fingerprint
            columns = [f"{column.name} {column.type_name}" for column in announced.columns]
            order.append((announced.source.partition(".")[2], *columns))
        elif not view.is_control:
            assert view.schema_fp == last_announced[view.source_id], view.position
            order.append(Op(view.op))
    assert order == [
        ("t", "id int", "a int", "b varchar(10)"),
        ("still", "id int", "a int", "c int"),
        Op.INSERT,
        ("t", "id int", "z bigint", "b varchar(10)"),
        Op.UPDATE,
        Op.UPDATE,
        ("t", "id int", "z bigint"),
    ]


@pytest.mark.slow
async def test_it_does_not_matter_where_the_server_cuts_what_it_sends(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = "mysql" if database.url.startswith("mysql:") else "mariadb"
    shop, url = server_shop(product, database)
    receive = mysql_source.receive_into
    source = await open_source(MySqlSource(mariadb_config(url, f"{database.name}.*")))
    database.execute("FLUSH BINARY LOGS")  # MariaDB's is read from the beginning of its file.
    start = await source.first_scn()
    with shop.session() as step:
        for _ in range(60):
            step()
    try:
        whole = await read_to_end(source, start)
        assert {e.op for e in whole.events()} == {Op.INSERT, Op.UPDATE, Op.DELETE}
        for most_bytes in (1, 40, 1000):
            draws = random.Random(most_bytes)

            async def some(
                raw: socket.socket,
                room: memoryview,
                draws: random.Random = draws,
                most_bytes: int = most_bytes,
            ) -> int:
                return await receive(raw, room[: draws.randint(1, most_bytes)])

            monkeypatch.setattr(mysql_source, "receive_into", some)
            assert (await read_to_end(source, start)).data == whole.data, most_bytes
    finally:
        await source.close()
