"""The MariaDB source on a real server: chunks, status, and the preflight.

Chunks by key on MySQL as well, which sorts by collations of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from databus.cli.demo.private_servers import MariaDBServer
from databus.common.errors import (
    BadRequest,
    PreflightFailed,
    SourceUnavailable,
    UnknownSource,
)
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql import mysql_source as source_module
from databus.relay.sources.mysql.gtid import binlog_positions
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, opened, read_to_end, source_of
from tests.support.opened_source import open_source, opened_scn


@pytest.fixture
async def source(mariadb_database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    opened = source_of(mariadb_database)
    yield opened
    await opened.close()


# -- dumps


async def _dump(source: MySqlSource, table: str, limit: int, **more: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    after = None
    while True:
        chunk = await source.read_chunk(ChunkRequest(table, limit, after=after, **more))
        rows += [chunk.schema.decode_row(row.row) for row in chunk.rows]
        if chunk.done:
            return rows
        after = chunk.last_key


async def _dump_bounded(source: MySqlSource, table: str, upto: Any) -> list[dict[str, Any]]:
    """In chunks whose ends are known before they are read, as they are when read in parallel."""
    rows: list[dict[str, Any]] = []
    after: list[Any] | None = None
    while True:
        bound = await source.chunk_end(ChunkRequest(table, 3, after=after, upto=upto))
        chunk = await source.read_chunk(
            ChunkRequest(table, 9, after=after, upto=upto if bound is None else bound)
        )
        assert chunk.done
        assert len(chunk.rows) <= 3
        rows += [chunk.schema.decode_row(row.row) for row in chunk.rows]
        if bound is None:
            return rows
        after = bound


# Key columns and their values, in terms of seq, which is unsigned, and of n, which is not.
KEYS = [
    ("a BIGINT UNSIGNED", "18446744073709551580 + seq"),
    ("a DECIMAL(30,3)", "(n - 10) / 8"),
    ("a VARCHAR(20) COLLATE utf8mb4_unicode_ci", "CONCAT(CHAR(96 + seq % 5), 'ż', seq)"),
    ("a VARBINARY(9)", "CONCAT(CHAR(seq * 12 % 256), x'00ff', CHAR(seq))"),
    ("a DATETIME(3)", "'2000-01-01' + INTERVAL seq * 1.5 SECOND"),
    ("a ENUM('z','y','x'), b INT", "1 + seq % 3, seq"),
    ("b VARCHAR(9), a INT, c BINARY(2)", "CONCAT('k', seq % 3), seq % 4, CHAR(seq)"),
]
MARIADB_KEYS = [
    *KEYS,
    ("a INT", "n - 10"),
    ("a VARCHAR(20) COLLATE utf8mb4_general_ci", "CONCAT(IF(n % 2, 'A', 'b'), CHAR(64 + seq))"),
    ("a VARCHAR(20) COLLATE utf8mb4_bin", "CONCAT(IF(n % 2, 'A', 'b'), CHAR(64 + seq))"),
    ("a DOUBLE", "(n - 10) / 3"),
    ("a VARCHAR(20) CHARACTER SET latin1", "CONCAT(CHAR(96 + seq % 5), seq)"),
    ("a TIMESTAMP(3)", "'2000-01-01' + INTERVAL seq * 1.5 SECOND"),
    ("a TIME(2)", "SEC_TO_TIME((n - 10) * 1234.5)"),
    ("a DATE, b INT", "'2000-01-01' + INTERVAL seq % 3 DAY, seq"),
    ("a UUID", "CONCAT('00112233-4455-6677-8899-0000000000', HEX(seq + 16))"),
]
MYSQL_KEYS = [
    *KEYS,
    ("a VARCHAR(20) COLLATE utf8mb4_0900_ai_ci", "CONCAT(IF(n % 2, 'A', 'á'), seq, ' ')"),
    ("a VARCHAR(20) COLLATE utf8mb4_0900_as_cs", "CONCAT(IF(n % 2, 'A', 'á'), seq, ' ')"),
]


@pytest.mark.parametrize(
    ("product", "columns", "values"),
    [
        *(("mariadb", *key) for key in MARIADB_KEYS),
        *(("mysql", *key) for key in MYSQL_KEYS),
    ],
)
async def test_a_dump_in_small_chunks_gives_every_row_once_for_every_kind_of_key(
    request: pytest.FixtureRequest, product: str, columns: str, values: str
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    names = ", ".join(part.split()[0] for part in columns.split(", "))
    if columns.startswith("a ENUM"):
        names = "a, b"
    database.execute(f"CREATE TABLE t ({columns}, v INT, PRIMARY KEY ({names}))")
    counted = ", ".join(f"({number}, {number})" for number in range(1, 21))
    database.execute("CREATE TABLE counted (seq BIGINT UNSIGNED PRIMARY KEY, n BIGINT NOT NULL)")
    database.execute(f"INSERT INTO counted VALUES {counted}")
    database.execute(f"INSERT INTO t SELECT {values}, seq FROM counted")
    wanted = [int(str(v)) for (v,) in database.execute(f"SELECT v FROM t ORDER BY {names}")]
    assert len(wanted) == 20
    table = f"{database.name}.t"
    async with opened(mariadb_config(database.url, table)) as source:
        assert [row["v"] for row in await _dump(source, table, 3)] == wanted
        largest = await source.largest_key(table)
        assert [row["v"] for row in await _dump_bounded(source, table, largest)] == wanted
        database.execute("DELETE FROM t WHERE v = 1")
        upto = await _dump(source, table, 4, upto=largest)
        assert [row["v"] for row in upto] == [v for v in wanted if v != 1]


async def test_a_chunk_takes_a_list_of_keys_and_names_the_missing_ones(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    mariadb_database.execute("INSERT INTO t SELECT seq, seq % 10 FROM seq_1_to_100")
    await source.open()
    table = f"{mariadb_database.name}.t"
    chunk = await source.read_chunk(ChunkRequest(table, 10, keys=[[5], [500], [7]]))
    assert [chunk.schema.decode_row(row.row)["id"] for row in chunk.rows] == [5, 7]
    assert (chunk.missing, chunk.done) == ([[500]], True)
    with pytest.raises(BadRequest, match="1 key columns"):
        await source.read_chunk(ChunkRequest(table, 10, keys=[[5, 6]]))
    with pytest.raises(UnknownSource, match="nothing"):
        await source.read_chunk(ChunkRequest(f"{mariadb_database.name}.nothing", 10))
    with pytest.raises(UnknownSource, match="not among"):
        await source.read_chunk(ChunkRequest("mysql.user", 10))


@pytest.mark.parametrize("product", ["mariadb", "mysql"])
async def test_many_keys_take_few_statements_and_each_missing_one_is_named(
    request: pytest.FixtureRequest, product: str
) -> None:
    database: FreshDatabase = request.getfixturevalue(f"{product}_database")
    database.execute("CREATE TABLE t (a VARCHAR(20), b INT, v INT, PRIMARY KEY (a, b))")
    values = ", ".join(f"('Name {number}', {number}, {number})" for number in range(0, 1000, 2))
    database.execute(f"INSERT INTO t VALUES {values}")
    source = await open_source(source_of(database))
    # Another case and a key twice: the collation finds one row for both.
    keys: list[list[Any]] = [[f"Name {number}", number] for number in range(1000)]
    keys += [["NAME 4", 4], ["name 5", 5]]
    sent: list[str] = []
    query = MySqlConnection.query

    def counted(connection: MySqlConnection, sql: str, *rest: Any) -> list[tuple[Any, ...]]:
        sent.append(sql)
        return query(connection, sql, *rest)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MySqlConnection, "query", counted)
            chunk = await source.read_chunk(ChunkRequest(f"{database.name}.t", 2000, keys=keys))
    finally:
        await source.close()
    assert sorted(chunk.schema.decode_row(row.row)["v"] for row in chunk.rows) == list(
        range(0, 1000, 2)
    )
    assert chunk.missing == [key for key in keys if int(key[1]) % 2]
    assert len([sql for sql in sent if f"`{database.name}`.`t`" in sql]) <= 30


async def counted_from(database: FreshDatabase, source: MySqlSource) -> int:
    """The scn at which the row of a new table ``t`` counts 0."""
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    database.execute("INSERT INTO t VALUES (1, 0)")
    await source.open()
    return await source.first_scn()


def count_up(database: FreshDatabase) -> None:
    """The row of ``t`` counts its commits up."""
    connection = database.server.connect(database.name)
    with connection.cursor() as cursor:
        for _ in range(400):
            cursor.execute("UPDATE t SET v = v + 1")
    connection.close()


async def test_a_chunk_names_the_exact_point_of_the_clock_at_which_it_was_read(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    """A writer counts a row up, one commit at a time: value and scn must be of one moment."""
    start = await counted_from(mariadb_database, source)
    table = f"{mariadb_database.name}.t"

    async with asyncio.TaskGroup() as group:
        writer = group.create_task(asyncio.to_thread(count_up, mariadb_database))
        seen: list[tuple[int, int]] = []
        while not writer.done() or not seen:
            try:
                chunk = await source.read_chunk(ChunkRequest(table, 10))
            except SourceUnavailable:
                continue  # Seen once on a busy machine: the server returned no GTID position.
            seen.append((chunk.schema.decode_row(chunk.rows[0].row)["v"], chunk.snapshot.high))
            assert chunk.snapshot.sees(chunk.snapshot.high, "")
            assert not chunk.snapshot.sees(chunk.snapshot.high + 1, "")
    assert [high - value for value, high in seen] == [start] * len(seen)


def test_a_location_without_a_gtid_position_is_asked_for_again(
    mariadb_database: FreshDatabase,
) -> None:
    """Not a lost position: the reader asks again, and lists the binlog's files again."""
    config = mariadb_config(mariadb_database.url, f"{mariadb_database.name}.*")
    connection = MySqlConnection(read_settings(config))
    try:
        with pytest.raises(SourceUnavailable, match=r"no GTID position for .* purged\.000001:4"):
            binlog_positions.scn_at(connection, "purged.000001", 4, 0)
    finally:
        connection.close()


async def test_beside_a_stream_the_server_looks_up_no_locations_and_the_snapshots_are_right(
    mariadb_database: FreshDatabase, source: MySqlSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row counts its commits up, so its value is exactly what the chunk shows."""
    start = await counted_from(mariadb_database, source)
    table = f"{mariadb_database.name}.t"
    resolved = start
    came_on = asyncio.Event()

    async def follow() -> None:
        nonlocal resolved
        async for batch in source.stream(start):
            resolved = batch.resolved
            if resolved > start:
                came_on.set()

    following = asyncio.create_task(follow())
    mariadb_database.execute("UPDATE t SET v = v + 1")
    await came_on.wait()
    # From here on the stream passes every location that a snapshot can have.
    monkeypatch.setattr(source_module, "_STREAM_COMES_BY_S", 60.0)
    looked_up: list[Any] = []
    scn_at = binlog_positions.scn_at

    def looking_up(*location: Any) -> int:
        looked_up.append(location)
        return scn_at(*location)

    monkeypatch.setattr(binlog_positions, "scn_at", looking_up)
    seen: list[int] = []
    async with asyncio.TaskGroup() as group:
        writer = group.create_task(asyncio.to_thread(count_up, mariadb_database))
        while not writer.done() or not seen:
            chunk = await source.read_chunk(ChunkRequest(table, 10))
            shown = start + chunk.schema.decode_row(chunk.rows[0].row)["v"]
            high = chunk.snapshot.high
            seen.append(shown)
            assert not chunk.snapshot.sees(shown + 1, "")
            assert shown <= high <= resolved
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert len(set(seen)) > 1
    assert not looked_up


async def test_status_names_version_positions_and_the_binlogs_size(source: MySqlSource) -> None:
    await source.open()
    facts = await source.status()
    assert "MariaDB" in facts["version"]
    assert facts["scn"] == await source.first_scn()
    assert facts["binlog_files"] >= 1
    assert facts["binlog_bytes"] > 0


# -- the preflight


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("binlog_format", "MIXED"),
        ("binlog_row_image", "MINIMAL"),
    ],
)
async def test_the_preflight_names_a_wrong_setting_and_its_statement_fixes_it(
    own_mariadb: MariaDBServer, setting: str, value: str
) -> None:
    own_mariadb.execute(f"SET GLOBAL {setting} = {value}")
    source = MySqlSource(mariadb_config(own_mariadb.url("shop"), "shop.*"))
    (finding,) = await source.preflight()
    assert (finding.setting, finding.fatal) == (setting, True)
    assert value in finding.problem
    with pytest.raises(PreflightFailed, match=setting):
        await source.open()
    own_mariadb.execute(finding.remedy.partition(";")[0])
    assert await source.preflight() == []
    await source.close()


async def test_the_preflight_names_a_missing_binlog(tmp_path: Path) -> None:
    with MariaDBServer(tmp_path / "own", options=("--skip-log-bin",)) as server:
        server.create_database("shop")
        source = MySqlSource(mariadb_config(server.url("shop"), "shop.*"))
        (finding,) = await source.preflight()
        assert finding.setting == "log_bin"
        assert "log_bin=binlog" in finding.remedy
        await source.close()


async def test_the_preflight_names_each_missing_privilege_and_its_grant_fixes_it(
    mariadb_database: FreshDatabase,
) -> None:
    name = mariadb_database.name
    mariadb_database.execute(f"CREATE USER {name} IDENTIFIED BY 'x'")
    url = mariadb_database.url.replace("databus:databus@", f"{name}:x@")
    mariadb_database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    for named in ("SELECT", "BINLOG MONITOR", "REPLICATION SLAVE"):
        source = MySqlSource(mariadb_config(url, f"{name}.*"))
        finding = {found.setting: found for found in await source.preflight()}[named]
        mariadb_database.execute(finding.remedy)
        await source.close()
    source = MySqlSource(mariadb_config(url, f"{name}.*"))
    start = await opened_scn(source)
    mariadb_database.execute("INSERT INTO t VALUES (1)")
    assert len((await read_to_end(source, start)).events()) == 1
    assert (await source.read_chunk(ChunkRequest(f"{name}.t", 10))).done
    await source.close()
    mariadb_database.execute(f"DROP USER {name}")


async def test_the_preflight_names_a_table_without_a_key_and_the_ways_out(
    mariadb_database: FreshDatabase, source: MySqlSource
) -> None:
    mariadb_database.execute("CREATE TABLE keyless (id INT NOT NULL, UNIQUE KEY (id, v), v INT)")
    mariadb_database.execute("CREATE TABLE unique_one (id INT NOT NULL, v INT, UNIQUE KEY (id))")
    (finding,) = await source.preflight()
    name = mariadb_database.name
    assert f"{name}.keyless" in finding.setting
    assert f"ALTER TABLE {name}.keyless ADD PRIMARY KEY" in finding.remedy
    assert "sources" in finding.remedy
    mariadb_database.execute("DROP TABLE keyless")
    await source.open()
    assert [schema.key for schema in await source.schemas()] == [("id",)]


async def test_a_wrong_password_is_refused_and_a_wrong_domain_is_named(
    mariadb_database: FreshDatabase,
) -> None:
    url = mariadb_database.url.replace("databus:databus@", "databus:wrong@")
    with pytest.raises(PreflightFailed, match="refuses us: error 1045"):
        await MySqlSource(mariadb_config(url, "*")).open()
    source = MySqlSource(
        mariadb_config(
            mariadb_database.url, f"{mariadb_database.name}.*", options={"domain_id": 77}
        )
    )
    with pytest.raises(PreflightFailed, match="domain 77 is configured"):
        await source.open()
    await source.close()
