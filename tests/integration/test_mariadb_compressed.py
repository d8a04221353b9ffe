"""MariaDB with log_bin_compress: compressed events mean what they would mean uncompressed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import MariaDBServer
from databus.common.frame.frame_format import Op
from databus.relay.sources.mysql import MySqlSource
from tests.support.fixtures import FreshDatabase, SetRowMetadata
from tests.support.mariadb_stream import (
    Streamed,
    mariadb_config,
    opened_mariadb,
    read_to_end,
    read_up_to,
    sql_rows,
)
from tests.support.opened_source import open_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMPRESSED = {
    "Query_compressed",
    "Write_rows_compressed_v1",
    "Update_rows_compressed_v1",
    "Delete_rows_compressed_v1",
}
TABLE = (
    "CREATE TABLE {} (id INT PRIMARY KEY, s VARCHAR(60), n BIGINT UNSIGNED, d DECIMAL(20,6), "
    "j JSON, big LONGTEXT)"
)
ROWS = (
    "INSERT INTO {} SELECT seq, CONCAT('ż', seq), seq * 12345678901, seq / 7, "
    "JSON_OBJECT('n', seq), IF(seq % 3, REPEAT('long ', seq * 50), NULL) FROM seq_1_to_400",
    "INSERT INTO {} (id) VALUES (1000)",
    "INSERT INTO {} (id, big) VALUES (1001, REPEAT('z', 17000000))",
    "UPDATE {} SET s = NULL, n = n + 1 WHERE id % 2",
    "UPDATE {} SET id = id + 5000 WHERE id % 5 = 0 AND id < 1000",
    "UPDATE {} SET d = -d WHERE id = 1",
    "DELETE FROM {} WHERE id % 7 = 0",
)


@pytest.fixture(params=["CRC32", "NONE"])
def database(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FreshDatabase]:
    """The database ``shop`` of a server that compresses nearly all."""
    options = (
        "--log-bin-compress=ON",
        "--log-bin-compress-min-len=10",
        f"--binlog-checksum={request.param}",
    )
    with MariaDBServer(tmp_path / "own", options=options) as server:
        server.create_database("shop")
        yield FreshDatabase(server, "shop")


def kinds(database: FreshDatabase) -> set[str]:
    """The types of the events in the binlog."""
    files = [str(row[0]) for row in database.execute("SHOW BINARY LOGS")]
    listed = [row for file in files for row in database.execute(f"SHOW BINLOG EVENTS IN '{file}'")]
    return {str(row[2]) for row in listed}


async def followed(source: MySqlSource, database: FreshDatabase, *statements: str) -> Streamed:
    """What the stream brings of statements, each of which it has read before the next one."""
    streamed = Streamed(resolved=await source.first_scn())
    async with contextlib.aclosing(source.stream(streamed.resolved)) as stream:
        for statement in statements:
            database.execute(statement)
            head = await source.first_scn()
            await read_up_to(stream, streamed, head)
    return streamed


def changes(streamed: Streamed, table: str) -> list[tuple[Any, ...]]:
    return [(e.op, e.key, e.before, e.after) for e in streamed.events(f"shop.{table}")]


def held(streamed: Streamed, table: str) -> dict[int, dict[str, Any]]:
    return {row["id"]: row for row in streamed.tables()[f"shop.{table}"].values()}


def is_equal(streamed: Streamed, database: FreshDatabase, table: str) -> bool:
    source = [{k: str(v) for k, v in row.items()} for row in sql_rows(database, table)]
    ours = [{k: str(v) for k, v in row.items()} for _, row in sorted(held(streamed, table).items())]
    return ours == source


async def test_compressed_rows_come_as_they_would_uncompressed(database: FreshDatabase) -> None:
    for table in ("t", "twin"):
        database.execute(TABLE.format(table))
    source = await opened_mariadb(database.server)
    start = await source.first_scn()
    for statement in ROWS:
        database.execute(statement.format("t"))
    assert kinds(database) >= COMPRESSED
    database.execute("SET GLOBAL log_bin_compress = OFF")
    for statement in ROWS:
        database.execute(statement.format("twin"))
    by_kernel = await read_to_end(source, start)
    by_python = await open_source(
        MySqlSource(mariadb_config(database.url, "shop.*"), use_kernels=False)
    )
    assert (await read_to_end(by_python, start)).data == by_kernel.data
    assert len(changes(by_kernel, "t")) > 600
    assert changes(by_kernel, "t") == changes(by_kernel, "twin")
    assert is_equal(by_kernel, database, "t")
    await by_python.close()
    await source.close()


@pytest.mark.parametrize("database", ["CRC32"], indirect=True)
@pytest.mark.parametrize("metadata", ["FULL", "NO_LOG"])
async def test_compressed_statements_change_what_they_would_uncompressed(
    database: FreshDatabase, row_metadata: SetRowMetadata, metadata: str
) -> None:
    row_metadata(database.server, metadata)
    database.execute(TABLE.format("t"))
    source = await opened_mariadb(database.server)
    streamed = await followed(
        source,
        database,
        ROWS[0].format("t"),
        "ALTER TABLE t ADD COLUMN added VARCHAR(20), DROP COLUMN d",
        "UPDATE t SET added = CONCAT('row ', id) WHERE id < 50",
        "CREATE TABLE u (k CHAR(20) PRIMARY KEY, v INT)",
        "INSERT INTO u VALUES ('the first and only', 1)",
        "TRUNCATE TABLE `u` /* all of it */",
        "INSERT INTO u VALUES ('another one', 2)",
        "DELETE FROM t WHERE id BETWEEN 60 AND 70",
    )
    assert kinds(database) >= COMPRESSED
    ops = [view.op for view in streamed.frames()]
    assert (ops.count(Op.SCHEMA_CHANGE), ops.count(Op.TRUNCATE)) == (2, 1)
    assert [row["v"] for row in streamed.tables()["shop.u"].values()] == [2]
    rows = held(streamed, "t")
    assert (len(rows), rows[40]["added"]) == (389, "row 40")
    assert "d" not in rows[40]
    assert not (await source.status())["stopped_tables"]
    await source.close()


@pytest.mark.parametrize("database", ["CRC32"], indirect=True)
async def test_compression_is_switched_in_the_middle_of_the_stream(
    database: FreshDatabase,
) -> None:
    database.execute("SET GLOBAL log_bin_compress = OFF")
    database.execute(TABLE.format("t"))
    source = await opened_mariadb(database.server)
    streamed = await followed(
        source,
        database,
        "INSERT INTO t (id, s) VALUES (1, 'not compressed at all')",
        "SET GLOBAL log_bin_compress = ON",
        "INSERT INTO t (id, s) VALUES (2, 'compressed as far as it goes')",
        "UPDATE t SET s = CONCAT(s, '!')",
        "SET GLOBAL log_bin_compress_min_len = 1000",
        "INSERT INTO t (id, s) VALUES (3, 'too short for it')",
        "INSERT INTO t (id, big) VALUES (4, REPEAT('long', 500))",
        "SET GLOBAL log_bin_compress = OFF",
        "DELETE FROM t WHERE id = 2",
        "FLUSH BINARY LOGS",
        "SET GLOBAL binlog_checksum = NONE",
        "SET GLOBAL log_bin_compress = ON",
        "SET GLOBAL log_bin_compress_min_len = 10",
        "INSERT INTO t (id, s) VALUES (5, 'compressed and without a checksum')",
    )
    assert kinds(database) >= {"Write_rows_v1", "Write_rows_compressed_v1", "Delete_rows_v1"}
    assert [(e.op, e.key["id"]) for e in streamed.events()] == [
        (Op.INSERT, 1),
        (Op.INSERT, 2),
        (Op.UPDATE, 1),
        (Op.UPDATE, 2),
        (Op.INSERT, 3),
        (Op.INSERT, 4),
        (Op.DELETE, 2),
        (Op.INSERT, 5),
    ]
    assert is_equal(streamed, database, "t")
    await source.close()


@pytest.mark.parametrize("database", ["CRC32"], indirect=True)
async def test_a_compressed_change_of_a_table_is_seen_ahead_where_columns_have_no_names(
    database: FreshDatabase, row_metadata: SetRowMetadata
) -> None:
    row_metadata(database.server, "NO_LOG")
    for table in ("calm", "restless"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT, w INT)")
    source = await opened_mariadb(database.server)
    start = await source.first_scn()
    for table in ("calm", "restless"):
        database.execute(f"INSERT INTO {table} VALUES (1, 2, 3)")
    # Of the same types: without the change, v would be taken for w.
    database.execute("ALTER TABLE restless MODIFY v INT AFTER w")
    streamed = await read_to_end(source, start)
    assert [(e.source, e.after) for e in streamed.events()] == [
        ("shop.calm", {"id": 1, "v": 2, "w": 3})
    ]
    assert list((await source.status())["stopped_tables"]) == ["shop.restless"]
    await source.close()


@pytest.mark.parametrize("database", ["CRC32"], indirect=True)
async def test_compressed_changes_by_statement_stop_their_table_and_xa_rows_wait_for_their_commit(
    database: FreshDatabase,
) -> None:
    for table in ("t", "changed"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v VARCHAR(500))")
    database.execute("INSERT INTO changed VALUES (1, 'before')")
    source = await opened_mariadb(database.server)
    start = await source.first_scn()
    with database.session() as cursor:
        for statement in (
            "XA START 'one'",
            "INSERT INTO t SELECT seq, REPEAT('long ', 90) FROM seq_1_to_100",
            "XA END 'one'",
            "XA PREPARE 'one'",
        ):
            cursor.execute(statement)
    database.execute("INSERT INTO t VALUES (0, 'in between')")
    connection = database.server.connect("shop")
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION binlog_format = STATEMENT")
        cursor.execute("UPDATE changed SET v = 'by a statement that is compressed'")
        cursor.execute("XA COMMIT 'one'")
    connection.close()
    streamed = await read_to_end(source, start)
    assert [e.key["id"] for e in streamed.events()] == [*range(101)]
    assert [len(window) for window in streamed.windows()] == [2, 101]
    assert list((await source.status())["stopped_tables"]) == ["shop.changed"]
    await source.close()
