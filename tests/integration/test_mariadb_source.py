"""The MariaDB source on a real server: windows, restarts, DDL, domains, faults."""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest

from databus.cli.demo.private_servers import MariaDBServer
from databus.common.errors import (
    SourcePositionLost,
    SourceUnavailable,
    UnsupportedChange,
)
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from tests.support.faulty_proxy import Proxies
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import (
    Streamed,
    mariadb_config,
    opened_mariadb,
    read_to_end,
    source_of,
    sql_rows,
)
from tests.support.opened_source import open_source, opened_scn
from tests.support.own_servers import mariadb  # noqa: F401  fixtures
from tests.support.waiting import PATIENCE, eventually_sync


@pytest.fixture
async def source(mariadb_database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    opened = source_of(mariadb_database)
    yield opened
    await opened.close()


# -- windows


async def test_tables_outside_the_configured_sources_only_move_resolved(
    mariadb_database: FreshDatabase,
) -> None:
    name = mariadb_database.name
    mariadb_database.execute("CREATE TABLE wanted (id INT PRIMARY KEY)")
    mariadb_database.execute("CREATE TABLE other (id INT)")
    source = MySqlSource(mariadb_config(mariadb_database.url, f"{name}.wan*"))
    start = await opened_scn(source)
    mariadb_database.execute("INSERT INTO other VALUES (1), (2)")
    streamed = await read_to_end(source, start)
    assert not streamed.data
    assert streamed.resolved == start + 1
    mariadb_database.transaction("INSERT INTO other VALUES (3)", "INSERT INTO wanted VALUES (7)")
    streamed = await read_to_end(source, start + 1)
    assert [event.source for event in streamed.events()] == [f"{name}.wanted"]
    await source.close()


async def test_truncate_comes_as_an_event_of_its_own(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    start = await opened_scn(source)
    mariadb_database.execute("INSERT INTO t VALUES (1), (2)")
    mariadb_database.execute("/* all */ TRUNCATE TABLE `t`")
    mariadb_database.execute("INSERT INTO t VALUES (3)")
    streamed = await read_to_end(source, start)
    assert [Op(view.op) for view in streamed.frames() if not view.is_control] == [
        Op.INSERT,
        Op.INSERT,
        Op.TRUNCATE,
        Op.INSERT,
    ]
    rows = streamed.tables()[f"{mariadb_database.name}.t"]
    assert [row["id"] for row in rows.values()] == [3]


# -- the kernel and the Python decoder


async def _both_ways(
    database: FreshDatabase, start: int, **options: Any
) -> tuple[Streamed, Streamed]:
    found = []
    for use_kernels in (True, False):
        source = MySqlSource(
            mariadb_config(database.url, f"{database.name}.*", options=options),
            use_kernels=use_kernels,
        )
        await source.open()
        found.append(await read_to_end(source, start))
        await source.close()
    return found[0], found[1]


async def test_the_kernel_and_the_python_decoder_give_the_same_bytes(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    start = await opened_scn(source)
    mariadb_database.execute(
        "CREATE TABLE t (id BIGINT UNSIGNED, k VARCHAR(300) CHARACTER SET latin1, d DECIMAL(40,9), "
        "e ENUM('a','ż'), s SET('x','y'), f FLOAT, g DOUBLE, dt DATETIME(3), ts TIMESTAMP(2) NULL, "
        "ti TIME(5), j JSON, b BINARY(9), PRIMARY KEY (k, id))"
    )
    mariadb_database.execute(
        "CREATE TABLE n (id INT PRIMARY KEY, a TINYINT, u UUID, y YEAR, x BIT(9), da DATE, v BLOB)"
    )
    for base in (0, 2**63):
        mariadb_database.execute(
            f"INSERT INTO t SELECT seq + {base}, REPEAT(CHAR(96 + seq % 26), seq % 280), "
            "(n - 250) * POW(10, seq % 24), 1 + seq % 2, seq % 4, (n - 250) / 7, "
            "EXP(n - 250), '2000-01-01' + INTERVAL seq * 86399.217 SECOND, "
            "'1999-01-01' + INTERVAL seq * 99999 SECOND, SEC_TO_TIME((n - 250) * 1234.56789), "
            "JSON_OBJECT('n', seq), CONCAT(CHAR(seq % 256), 'x') "
            "FROM (SELECT seq, CAST(seq AS SIGNED) AS n FROM seq_1_to_500) x"
        )
    mariadb_database.execute(
        "INSERT INTO n SELECT seq, IF(seq % 3, n % 127 - 60, NULL), UUID(), 1901 + seq % 250, "
        "seq % 512, '1970-01-01' + INTERVAL (n - 150) * 37 DAY, "
        "IF(seq % 5, REPEAT('z', seq * seq % 3000), NULL) "
        "FROM (SELECT seq, CAST(seq AS SIGNED) AS n FROM seq_1_to_300) x"
    )
    mariadb_database.execute(
        "CREATE TABLE p (id INT PRIMARY KEY, i INET6, k TEXT CHARACTER SET gbk)"
    )
    mariadb_database.execute("INSERT INTO p VALUES (1, '::1', '中文'), (2, '::2', NULL)")
    mariadb_database.execute("UPDATE p SET id = 3 WHERE id = 1")
    mariadb_database.execute("UPDATE n SET a = a + 1, v = NULL WHERE id % 2")
    mariadb_database.execute("UPDATE t SET id = id + 1000, f = NULL WHERE id % 3 = 0")
    mariadb_database.execute("DELETE FROM n WHERE id % 7 = 0")
    compiled, plain = await _both_ways(mariadb_database, start)
    assert bytes(compiled.data) == bytes(plain.data)
    assert len(compiled.events()) > 2000
    rows = [
        {name: str(value) for name, value in row.items()} for row in sql_rows(mariadb_database, "n")
    ]
    streamed = compiled.tables()[f"{mariadb_database.name}.n"].values()
    assert sorted(row["id"] for row in streamed) == [int(row["id"]) for row in rows]


# -- positions


async def test_another_domain_is_counted_and_suspends_the_table_that_it_changes(
    own_mariadb: MariaDBServer,
) -> None:
    for table in ("t", "u"):
        own_mariadb.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY)", database="shop")
    for number in range(6):
        connection = own_mariadb.connect("shop")
        with connection.cursor() as cursor:
            cursor.execute(f"SET gtid_domain_id = {1 + number % 2}")
            cursor.execute(f"INSERT INTO {'tu'[number % 2]} VALUES ({number})")
        connection.close()
    first = await opened_mariadb(own_mariadb)
    second = await opened_mariadb(own_mariadb, domain_id=2)
    assert (first.clock, second.clock) == ("mariadb:1:shop", "mariadb:2:shop")
    ours = await read_to_end(first, 0)
    theirs = await read_to_end(second, 0)
    assert [event.key["id"] for event in ours.events()] == [0, 2, 4]
    assert [event.key["id"] for event in theirs.events()] == [1, 3, 5]
    assert [event.scn for event in theirs.events()] == [1, 2, 3]
    status = await first.status()
    assert status["stream"]["foreign_groups"] >= 2
    assert status["stopped_tables"].keys() == {"shop.u"}
    await first.close()
    await second.close()


async def test_a_purged_binlog_is_named_with_what_is_left(own_mariadb: MariaDBServer) -> None:
    own_mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY)", database="shop")
    for number in range(3):
        own_mariadb.execute(f"INSERT INTO t VALUES ({number})", database="shop")
        own_mariadb.execute("FLUSH BINARY LOGS")
    source = await opened_mariadb(own_mariadb)
    last = str(own_mariadb.execute("SHOW MASTER STATUS")[0][0])

    def purged() -> bool:
        own_mariadb.execute(f"PURGE BINARY LOGS TO '{last}'")
        return len(own_mariadb.execute("SHOW BINARY LOGS")) == 1

    eventually_sync(purged)
    head = await source.first_scn()
    with pytest.raises(SourcePositionLost, match=rf"sequence 3, .* begins after {head} "):
        await read_to_end(source, 3)
    own_mariadb.execute("INSERT INTO t VALUES (9)", database="shop")
    assert [e.key["id"] for e in (await read_to_end(source, head)).events()] == [9]
    await source.close()


async def test_reset_master_is_named_and_not_read_as_progress(own_mariadb: MariaDBServer) -> None:
    own_mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY)", database="shop")
    source = await opened_mariadb(own_mariadb)
    before = await source.first_scn()
    own_mariadb.execute("RESET MASTER")
    own_mariadb.execute("INSERT INTO t VALUES (1)", database="shop")
    with pytest.raises(SourcePositionLost, match=rf"sequence {before}, .* only reached 1"):
        async for _ in source.stream(before):
            pass
    await source.close()


# -- schemas


async def test_columns_come_and_go_under_load_and_every_row_has_its_own_schema(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY, a INT)")
    start = await opened_scn(source)
    streamed = Streamed()
    stream = source.stream(start)
    statements = [
        "INSERT INTO t VALUES (1, 1)",
        "ALTER TABLE t ADD COLUMN b VARCHAR(10)",
        "INSERT INTO t VALUES (2, 2, 'two')",
        "ALTER TABLE t DROP COLUMN a",
        "INSERT INTO t VALUES (3, 'three')",
        "ALTER TABLE t CHANGE b b VARCHAR(20)",
        "UPDATE t SET b = 'x' WHERE id = 1",
        "CREATE TABLE u (k CHAR(2) PRIMARY KEY)",
        "INSERT INTO u VALUES ('ab')",
    ]
    for statement in statements:
        mariadb_database.execute(statement)
        head = await source.first_scn()
        async with asyncio.timeout(30 * PATIENCE):
            async for batch in stream:
                streamed.data += batch.data
                for schema in batch.schemas:
                    streamed.schemas.add(schema)
                if batch.resolved >= head:
                    break
    await stream.aclose()
    assert [event.after for event in streamed.events()] == [
        {"id": 1, "a": 1},
        {"id": 2, "a": 2, "b": "two"},
        {"id": 3, "b": "three"},
        {"id": 1, "b": "x"},
        {"k": "ab"},
    ]
    changes = [view for view in streamed.frames() if view.op == Op.SCHEMA_CHANGE]
    names = [[column["name"] for column in _json(view.after)["columns"]] for view in changes]
    assert names == [["id", "a", "b"], ["id", "b"], ["id", "b"], ["k"]]
    windows = streamed.windows()
    assert [window[0].scn for window in windows] == sorted(window[0].scn for window in windows)


def _json(data: memoryview | None) -> dict[str, Any]:
    import json

    assert data is not None
    found: dict[str, Any] = json.loads(bytes(data))
    SourceSchema.from_json(found)
    return found


async def test_a_backlog_over_several_definitions_is_read_with_the_definition_of_its_time(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    start = await opened_scn(source)
    for statement in (
        "CREATE TABLE t (id INT PRIMARY KEY, a INT)",
        "INSERT INTO t VALUES (1, -1)",
        "DROP TABLE t",
        "CREATE TABLE t (id INT PRIMARY KEY, a INT UNSIGNED)",
        "INSERT INTO t VALUES (2, 4294967295)",
        "CREATE OR REPLACE TABLE t (id INT, a INT PRIMARY KEY)",
        "INSERT INTO t VALUES (3, 3)",
        "DROP TABLE t",
    ):
        mariadb_database.transaction("SET sql_mode = ''", statement)
    events = (await read_to_end(source, start)).events()
    assert [(e.op, e.key, e.after) for e in events if e.after] == [
        (Op.INSERT, {"id": 1}, {"id": 1, "a": -1}),
        (Op.INSERT, {"id": 2}, {"id": 2, "a": 4294967295}),
        (Op.INSERT, {"a": 3}, {"id": 3, "a": 3}),
    ]


# -- what cannot be captured


async def test_a_table_without_transactions_streams_but_is_not_dumped(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY) ENGINE = MyISAM")
    findings = await source.preflight()
    assert [finding.fatal for finding in findings] == [False]
    start = await opened_scn(source)
    mariadb_database.execute("INSERT INTO t VALUES (1), (2)")
    mariadb_database.execute("DELETE FROM t WHERE id = 1")
    streamed = await read_to_end(source, start)
    assert [event.op for event in streamed.events()] == [Op.INSERT, Op.INSERT, Op.DELETE]
    assert len(streamed.windows()) == 2
    with pytest.raises(UnsupportedChange, match="MyISAM"):
        await source.read_chunk(ChunkRequest(f"{mariadb_database.name}.t", 10))


async def test_rows_that_a_rollback_in_the_binlog_undoes_are_not_delivered(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE inno (id INT PRIMARY KEY)")
    mariadb_database.execute("CREATE TABLE aria (id INT PRIMARY KEY) ENGINE = Aria")
    start = await opened_scn(source)
    mariadb_database.execute("FLUSH BINARY LOGS")
    file = mariadb_database.execute("SHOW MASTER STATUS")[0][0]
    mariadb_database.transaction(
        "INSERT INTO inno VALUES (1)", "INSERT INTO aria VALUES (1)", "ROLLBACK"
    )
    mariadb_database.transaction(
        "CREATE TEMPORARY TABLE brief (id INT)",
        "INSERT INTO inno VALUES (2)",
        "INSERT INTO aria VALUES (2)",
        "DROP TEMPORARY TABLE brief",
        "ROLLBACK",
    )
    mariadb_database.transaction(
        "INSERT INTO inno VALUES (3)",
        "SAVEPOINT s",
        "INSERT INTO aria VALUES (3)",
        "INSERT INTO inno VALUES (4), (5)",
        "ROLLBACK TO s",
        "INSERT INTO inno VALUES (6)",
    )
    statements = [row[5] for row in mariadb_database.execute(f"SHOW BINLOG EVENTS IN '{file}'")]
    assert {"ROLLBACK", "ROLLBACK TO `s`"} <= set(statements), "both follow rows in the binlog"
    streamed = await read_to_end(source, start)
    for table, ids in (("inno", [3, 6]), ("aria", [1, 2, 3])):
        rows = streamed.tables()[f"{mariadb_database.name}.{table}"]
        assert sorted(rows.values(), key=repr) == sql_rows(mariadb_database, table)
        assert [row["id"] for row in sql_rows(mariadb_database, table)] == ids
    assert all(
        [view.seq for view in window] == list(range(len(window))) for window in streamed.windows()
    )
    assert not (await source.status())["stopped_tables"]


# -- size


async def test_a_transaction_of_200_000_rows_passes_in_parts_with_flat_memory(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(200))")
    start = await opened_scn(source)
    mariadb_database.execute("INSERT INTO t SELECT seq, REPEAT('x', 150) FROM seq_1_to_200000")
    stream = source.stream(start)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batch_count = frame_bytes = largest = 0
    last = b""
    async with asyncio.timeout(50 * PATIENCE):
        async for batch in stream:
            batch_count += 1
            frame_bytes += len(batch.data)
            largest = max(largest, len(batch.data))
            last = batch.data or last
            if batch.resolved > start:
                break
    await stream.aclose()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    *_, end = iter_frames(last)
    assert (end.op, end.event_count, end.seq) == (Op.END_OF_WINDOW, 200_000, 200_000)
    assert frame_bytes > 200_000 * 220
    assert largest <= 8 << 20
    assert grown_kib < 64 << 10


async def test_a_row_of_more_than_16_mib_passes(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v LONGBLOB)")
    start = await opened_scn(source)
    mariadb_database.execute("INSERT INTO t VALUES (1, REPEAT('x', 20000000)), (2, 'y')")
    mariadb_database.execute("INSERT INTO t VALUES (3, REPEAT('z', 5000000))")
    streamed = await read_to_end(source, start)
    sizes = [len(event.after["v"]) for event in streamed.events() if event.after]
    assert sizes == [20_000_000, 1, 5_000_000]


# -- faults


@pytest.mark.faults
async def test_a_killed_server_is_detected_at_once_and_the_stream_resumes_after_its_restart(
    own_mariadb: MariaDBServer,
) -> None:
    own_mariadb.execute("CREATE TABLE t (id INT PRIMARY KEY)", database="shop")
    own_mariadb.execute("INSERT INTO t VALUES (1)", database="shop")
    source = await opened_mariadb(own_mariadb)
    resolved = 0
    with pytest.raises(SourceUnavailable):
        async with asyncio.timeout(20 * PATIENCE):
            async for batch in source.stream(0):
                resolved = batch.resolved
                if own_mariadb.running and resolved == 3:
                    own_mariadb.kill9()
    await source.close()
    with pytest.raises(SourceUnavailable):
        await (MySqlSource(mariadb_config(own_mariadb.url("shop"), "shop.*"))).open()
    own_mariadb.start()
    own_mariadb.execute("INSERT INTO t VALUES (2)", database="shop")
    source = await opened_mariadb(own_mariadb)
    streamed = await read_to_end(source, resolved)
    assert [event.key["id"] for event in streamed.events()] == [2]
    await source.close()


@pytest.mark.faults
async def test_a_cut_connection_surfaces_and_a_new_stream_gives_the_rest(
    mariadb_database: FreshDatabase, faulty_proxy: Proxies
) -> None:
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v TEXT)")
    proxy = await faulty_proxy("127.0.0.1", mariadb_database.server.port)
    url = re.sub(r":\d+/", f":{proxy.port}/", mariadb_database.url)
    source = MySqlSource(mariadb_config(url, f"{mariadb_database.name}.*"))
    start = await opened_scn(source)
    for base in range(5):
        mariadb_database.execute(
            f"INSERT INTO t SELECT seq + {base * 1000}, REPEAT('x', 400) FROM seq_1_to_1000"
        )
    streamed = Streamed(resolved=start)
    with pytest.raises(SourceUnavailable):
        async for batch in source.stream(start):
            streamed.data += batch.data
            for schema in batch.schemas:
                streamed.schemas.add(schema)
            streamed.resolved = batch.resolved
            if not proxy._cut_after_bytes and len(streamed.data) < 1_000_000:
                proxy.cut_after(300_000)
    rest_of = await open_source(source_of(mariadb_database))
    rest = await read_to_end(rest_of, streamed.resolved)
    keys = [e.key["id"] for e in streamed.events() if e.scn <= streamed.resolved]
    assert sorted(keys + [e.key["id"] for e in rest.events()]) == list(range(1, 5001))
    await source.close()
    await rest_of.close()
