"""The MySQL source on a real server; skipped, with the reason, where there is none."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from databus.common.errors import PreflightFailed, SourcePositionLost
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op, iter_frames
from databus.relay.dumps.chunk_window import ChunkWindow, Ready, Waiting
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.gtid.mysql_lineage import MySqlResumeState
from databus.relay.sources.mysql.mysql_preflight import choose_numbering
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import read_settings
from tests.support.fixtures import FreshDatabase
from tests.support.gtids import purge_all_but_last, run_under
from tests.support.mariadb_stream import (
    Streamed,
    mariadb_config,
    read_to_end,
    read_up_to,
    source_of,
)
from tests.support.mysql_server import require
from tests.support.opened_source import opened_scn
from tests.support.own_servers import mysql  # noqa: F401  fixtures
from tests.support.waiting import PATIENCE


@pytest.fixture
async def source(mysql_database: FreshDatabase) -> AsyncIterator[MySqlSource]:
    opened = source_of(mysql_database)
    yield opened
    await opened.close()


def _own_uuid(database: FreshDatabase) -> str:
    return str(database.execute("SELECT @@server_uuid")[0][0])


def _pairs(database: FreshDatabase, sql: str) -> dict[Any, Any]:
    return {row[0]: row[1] for row in database.execute(sql)}


# -- windows


async def test_definitions_change_and_tables_are_emptied_in_the_order_of_the_log(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    start = await opened_scn(source)
    in_one = mysql_database.server.is_at_least(8, 0, 21)
    for statement in (
        "CREATE TABLE t (id INT PRIMARY KEY, a INT)",
        "INSERT INTO t VALUES (1, -1)",
        "ALTER TABLE t ADD COLUMN b VARCHAR(9)",
        "UPDATE t SET a = 2",
        "TRUNCATE TABLE t",
        *(
            ["CREATE TABLE copied (PRIMARY KEY (id)) SELECT 7 AS id"]
            if in_one
            else ["CREATE TABLE copied (id INT PRIMARY KEY)", "INSERT INTO copied VALUES (7)"]
        ),
        "INSERT INTO t VALUES (3, 3, 'x')",
    ):
        mysql_database.execute(statement)
    streamed = await read_to_end(source, start)
    assert [(e.op, e.after) for e in streamed.events()] == [
        (Op.INSERT, {"id": 1, "a": -1}),
        (Op.UPDATE, {"id": 1, "a": 2, "b": None}),
        (Op.INSERT, {"id": 7}),
        (Op.INSERT, {"id": 3, "a": 3, "b": "x"}),
    ]
    assert sum(view.op == Op.TRUNCATE for view in streamed.frames()) == 1


async def test_compressed_transactions_come_as_they_would_uncompressed(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    require(mysql_database.server, "binlog_transaction_compression", 8, 0, 20)
    name = mysql_database.name
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v MEDIUMTEXT)")
    mysql_database.execute("CREATE TABLE twin LIKE t")
    start = await opened_scn(source)
    for compressed in ("ON", "OFF"):
        table = "t" if compressed == "ON" else "twin"
        connection = mysql_database.server.connect(name)
        cursor = connection.cursor()
        cursor.execute(f"SET binlog_transaction_compression = {compressed}")
        cursor.execute(f"INSERT INTO {table} VALUES (1, 'a'), (2, REPEAT('é', 300000))")
        cursor.execute("BEGIN")
        for first in range(10, 4000, 500):
            rows = ", ".join(f"({n}, REPEAT('{n} ', 60))" for n in range(first, first + 500))
            cursor.execute(f"INSERT INTO {table} VALUES {rows}")
        cursor.execute(f"UPDATE {table} SET v = 'b' WHERE id < 100")
        cursor.execute("COMMIT")
        cursor.execute(f"ALTER TABLE {table} ADD COLUMN w INT")
        cursor.execute(f"DELETE FROM {table} WHERE id > 50")
        connection.close()
    mysql_database.execute("UPDATE t SET v = 'c' WHERE id = 1")
    for use_kernels in (True, False):
        source.use_kernels = use_kernels
        streamed = await read_to_end(source, start)
        by_table: dict[str, list[tuple[Any, ...]]] = {"t": [], "twin": []}
        for event in streamed.events():
            by_table[event.source.partition(".")[2]].append((event.op, event.key, event.after))
        assert len(by_table["twin"]) > 8000
        assert by_table["t"][:-1] == by_table["twin"]
        assert by_table["t"][-1] == (Op.UPDATE, {"id": 1}, {"id": 1, "v": "c", "w": None})
        sizes = [len(window) for window in streamed.windows()]
        assert sizes[0] == sizes[len(sizes) // 2]


async def test_partial_updates_of_json_come_as_whole_values(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    long = json.dumps({"a": 1, "b": "x" * 3000, "c": [1, [2.50, "ż"]], 'q"': {}, "long": [9] * 9})
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY, j JSON, v INT, k JSON)")
    mysql_database.execute("INSERT INTO t VALUES (1, %s, 0, %s), (2, NULL, 0, %s)", *[long] * 3)
    start = await opened_scn(source)
    changes = (
        "j = JSON_SET(j, '$.a', 2)",
        "j = JSON_SET(j, '$.a', 3, '$.new', JSON_OBJECT('k', CAST(1.10 AS DECIMAL(9,2))))",
        "j = JSON_REPLACE(j, '$.c[1][0]', CAST('2024-02-29' AS DATE)), v = v + 1",
        "j = JSON_REMOVE(j, '$.c[0]'), k = JSON_SET(k, '$.\"q\\\\\"\"', 'quoted')",
        "j = JSON_ARRAY_INSERT(j, '$.c[0]', 'first')",
        "j = JSON_SET(j, '$.\"two words\"', TRUE), k = JSON_REMOVE(k, '$.b')",
        "k = JSON_SET(k, '$.long[8]', NULL), v = 5",
        "j = JSON_SET(j, '$.c', 0)",
    )
    expected = []
    connection = mysql_database.server.connect(mysql_database.name)
    cursor = connection.cursor()
    cursor.execute("SET binlog_row_value_options = 'PARTIAL_JSON'")
    for change in changes:
        cursor.execute(f"UPDATE t SET {change}".replace("%", "%%"))
        cursor.execute("COMMIT")
        cursor.execute("SELECT CAST(j AS CHAR), v, CAST(k AS CHAR) FROM t WHERE id = 1")
        expected.append(tuple(cursor.fetchone()))
    file = mysql_database.execute("SHOW BINARY LOG STATUS")[0][0]
    cursor.execute(f"SHOW BINLOG EVENTS IN '{file}'")
    kinds = [row[2] for row in cursor.fetchall()]
    connection.close()
    assert kinds.count("Update_rows_partial") >= len(changes)
    assert len(set(expected)) == len(changes), "every statement changes the row"
    streamed = await read_to_end(source, start)
    rows = [e.after for e in streamed.events() if e.key["id"] == 1 and e.after is not None]
    assert [(row["j"], row["v"], row["k"]) for row in rows] == expected
    source.use_kernels = False
    assert bytes((await read_to_end(source, start)).data) == bytes(streamed.data)


# -- values

_TYPES = """CREATE TABLE types (
    id BIGINT UNSIGNED PRIMARY KEY, t TINYINT, s SMALLINT UNSIGNED, m MEDIUMINT, b BIGINT,
    f FLOAT, d DOUBLE, n DECIMAL(30,10), y YEAR, bits BIT(10), all_bits BIT(64),
    da DATE, dt DATETIME, dt6 DATETIME(6), ts TIMESTAMP(3) NULL, ti TIME(2),
    c CHAR(10), v VARCHAR(300), l VARCHAR(20) CHARACTER SET latin1,
    bi BINARY(4), vb VARBINARY(300), tx MEDIUMTEXT, bl BLOB,
    e ENUM('a','ß','it''s'), se SET('x','y','z'), g POINT, j JSON)"""
_ROWS = (
    "(18446744073709551615, -128, 65535, -8388608, -9223372036854775808, 1.5, -2.25e-10, "
    "-12345678901234567890.0123456789, 1999, b'1000000001', 0xffffffffffffffff, '2024-02-29', "
    "'1000-01-01 00:00:00', '9999-12-31 23:59:59.999999', '2038-01-01 00:00:00.123', "
    "'-838:59:59', 'ż😀', REPEAT('é', 300), 'äöü', 'ab', x'00ff', REPEAT('q', 70000), x'', 'ß', "
    """'x,z', POINT(1, -2), '{"k": [1, 2.5, null, true, "ż"]}')""",
    "(1, " + ", ".join(["NULL"] * 26) + ")",
    "(0, 0, 0, 0, 0, 0, 0, 0, 2155, 0, 0, '1000-01-01', '2000-01-01 12:00:00', "
    "'2000-01-01 00:00:00.000001', '1970-01-02 00:00:01', '00:00:00.01', '', '', '', '', '', "
    "'', '', 'a', '', POINT(0, 0), '[]')",
)


async def test_every_type_has_the_same_value_in_the_stream_by_both_readers_and_in_a_chunk(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    start = await opened_scn(source)
    mysql_database.execute(_TYPES)
    mysql_database.execute(f"INSERT INTO types VALUES {', '.join(_ROWS)}")
    streamed = await read_to_end(source, start)
    source.use_kernels = False
    slowly = await read_to_end(source, start)
    assert bytes(slowly.data) == bytes(streamed.data)
    name = f"{mysql_database.name}.types"
    chunk = await source.read_chunk(ChunkRequest(name, 100))
    (table,) = streamed.tables().values()
    assert chunk.schema.fingerprint in {schema.fingerprint for schema in streamed.schemas}
    assert {row.key: chunk.schema.decode_row(row.row) for row in chunk.rows} == table
    first = next(row for row in table.values() if row["id"] == 2**64 - 1)
    assert (first["c"], first["e"], first["se"], first["all_bits"]) == (
        "ż😀",
        "ß",
        "x,z",
        2**64 - 1,
    )


_JSON = (
    "null", "true", "0", "-1", "32767", "32768", "-32769", "65536", "4294967296",
    "18446744073709551615", "-9223372036854775808", "1.0", "-0.0", "1.5", "1e100", "1e15",
    "1e14", "123456789012345.6", "1234567890123456.7", "0.1", "0.00001", "1.5e-7", "1e-14",
    "1e-15", "1e-16", "2.2250738585072014e-308", "1.7976931348623157e308", "5e-324",
    '""', '"ż😀 \\u0001\\u001f\\u007f\\\\ \\" / \\b\\f\\n\\r\\t"', "[]", "{}", "[[[]], {}]",
    '{"b": 1, "a": {"c": [1, 70000, -70000, "x"]}, "": null, "long key": false}',
)  # fmt: skip
_JSON_SQL = (
    "CAST(1.50 AS JSON)", "CAST(-99999999999999999999.25 AS JSON)",
    "CAST(DATE'2024-02-29' AS JSON)", "CAST(TIMESTAMP'2024-02-29 23:59:58.000001' AS JSON)",
    "CAST(TIME'-838:59:59' AS JSON)", "CAST(x'00ff' AS JSON)", "CAST(b'101' AS JSON)",
    "JSON_ARRAY(0.1e0, 3e0, 1.5e0)",
    "CAST(CAST('2024-01-01' AS DATETIME(3)) AS JSON)", "JSON_OBJECT('k', REPEAT('x', 70000))",
    "JSON_OBJECT('a', 40000, 'b', JSON_ARRAY(3000000000, -3), 'c', REPEAT('ä', 40000))",
)  # fmt: skip


@pytest.mark.timeout(240)
async def test_json_is_the_text_that_the_server_writes_in_the_stream_and_in_chunks(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    mysql_database.execute("CREATE TABLE j (id INT PRIMARY KEY AUTO_INCREMENT, v JSON)")
    start = await opened_scn(source)
    rng = random.Random(7)
    doubles = [repr(rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30)) for _ in range(300)]
    for text in (*_JSON, *doubles):
        mysql_database.execute("INSERT INTO j (v) VALUES (%s)", text)
    for sql in _JSON_SQL:
        mysql_database.execute(f"INSERT INTO j (v) VALUES ({sql})")
    written = _pairs(mysql_database, "SELECT id, CAST(v AS CHAR) FROM j")
    streamed = await read_to_end(source, start)
    assert {e.key["id"]: e.after["v"] for e in streamed.events() if e.after} == written
    chunk = await source.read_chunk(ChunkRequest(f"{mysql_database.name}.j", 10_000))
    rows = [chunk.schema.decode_row(row.row) for row in chunk.rows]
    assert {row["id"]: row["v"] for row in rows} == written
    assert all(json.loads(str(text)) is not ... for text in written.values())


# -- positions


async def test_servers_before_and_after_a_failover_are_generations_of_one_clock(
    mysql_database: FreshDatabase,
) -> None:
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    old, new, stranger = (str(uuid.uuid4()) for _ in range(3))
    for number, gtid in enumerate((f"{old}:1", f"{old}:2", f"{stranger}:1", f"{new}:1")):
        run_under(mysql_database, gtid, f"INSERT INTO t VALUES ({number})")
    options: dict[str, Any] = {"uuids": f"{old},{new}"}
    sources = f"{mysql_database.name}.*"
    source = MySqlSource(mariadb_config(mysql_database.url, sources, options=options))
    findings = await source.preflight()
    assert [(f.setting, f.fatal) for f in findings] == [("uuids", False)]
    await source.open()
    assert source.clock == f"mysql:{old}:shop"
    streamed = await read_to_end(source, 0)
    assert [(e.scn, e.key["id"]) for e in streamed.events()] == [(1, 0), (2, 1), ((1 << 48) + 1, 3)]
    assert [e.key["id"] for e in (await read_to_end(source, 2)).events()] == [3]
    run_under(mysql_database, f"{old}:3", "INSERT INTO t VALUES (4)")
    with pytest.raises(SourcePositionLost, match="order in which the servers have written"):
        await asyncio.wait_for(_endless(source, 0), 20 * PATIENCE)
    await source.close()


async def _endless(source: MySqlSource, after_scn: int) -> None:
    async for _ in source.stream(after_scn):
        pass


async def test_a_purged_binlog_and_a_future_scn_are_named(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY)")
    start = await opened_scn(source)
    mysql_database.execute("INSERT INTO t VALUES (1)")
    mysql_database.execute("FLUSH BINARY LOGS")
    purge_all_but_last(mysql_database)
    head = await source.first_scn()
    with pytest.raises(SourcePositionLost, match=f"purged its binlog up to .*:{head}"):
        await read_to_end(source, start)
    with pytest.raises(SourcePositionLost, match="has only reached"):
        await _endless(source, head + 1)
    mysql_database.execute("INSERT INTO t VALUES (2)")
    assert [e.key["id"] for e in (await read_to_end(source, head)).events()] == [2]


async def test_a_commit_that_was_streamed_before_the_server_counts_it_is_gone_on_from(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    mysql_database.execute("INSERT INTO t VALUES (1, 0)")
    scn = await opened_scn(source)
    writers = [_Writer(mysql_database, seed) for seed in range(3)]
    settings = read_settings(mariadb_config(mysql_database.url, f"{mysql_database.name}.*"))
    connection = MySqlConnection(settings)
    numbering, _ = choose_numbering(connection, settings)
    stream = source.stream(scn)
    try:
        async with asyncio.timeout(60 * PATIENCE):
            for _ in range(300):
                batch = await anext(stream)
                start = numbering.dump_after(connection, settings, MySqlResumeState(batch.resolved))
                assert start.after_scn == batch.resolved
    finally:
        await stream.aclose()
        connection.close()
        for writer in writers:
            writer.stop()


# -- dumps


async def test_chunks_under_load_end_in_the_tables_state(
    mysql_database: FreshDatabase, source: MySqlSource
) -> None:
    mysql_database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    values = ", ".join(f"({number}, 0)" for number in range(300))
    mysql_database.execute(f"INSERT INTO t VALUES {values}")
    start = await opened_scn(source)
    name = f"{mysql_database.name}.t"
    writers = [_Writer(mysql_database, seed) for seed in range(3)]
    copy: dict[bytes, dict[str, Any]] = {}
    row_filter = ChunkWindow(frame_format.source_id(name))
    state = _Follower(source, start, row_filter, copy)
    task = asyncio.create_task(state.follow())
    after: list[Any] | None = None
    spliced_rows = dropped = 0
    for _ in range(4):
        after = None
        while True:
            waiting = row_filter.begin()
            chunk = await source.read_chunk(ChunkRequest(name, 40, after=after))
            row_filter.arrived(waiting, chunk)
            outcome = await state.outcome(waiting)
            row_filter.leave(waiting)
            if not isinstance(outcome, Ready):
                continue
            for index in outcome.left.tolist():
                row = chunk.rows[index]
                copy[row.key] = chunk.schema.decode_row(row.row)
            spliced_rows += len(outcome.left)
            dropped += outcome.dropped_count
            after = chunk.last_key
            if chunk.done:
                break
    for writer in writers:
        writer.stop()
    await state.reach(await source.first_scn())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert {row["id"]: row["v"] for row in copy.values()} == _pairs(
        mysql_database, "SELECT id, v FROM t"
    )
    assert spliced_rows > 300


class _Writer:
    """Changes rows of ``t`` in a thread until stopped."""

    def __init__(self, database: FreshDatabase, seed: int) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(database, seed), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(20 * PATIENCE)

    def _work(self, database: FreshDatabase, seed: int) -> None:
        rng = random.Random(seed)
        connection = database.server.connect(database.name)
        cursor = connection.cursor()
        while not self._ended.wait(0.001):
            key = rng.randrange(100) * 3 + seed
            if rng.random() < 0.3:
                cursor.execute(f"DELETE FROM t WHERE id = {key}")
            else:
                cursor.execute(f"INSERT INTO t VALUES ({key}, 1) ON DUPLICATE KEY UPDATE v = v + 1")
        connection.close()


class _Follower:
    """Applies the stream to a copy and shows it to the chunk window."""

    def __init__(
        self, source: MySqlSource, start: int, row_filter: ChunkWindow, copy: dict[bytes, Any]
    ) -> None:
        self._source = source
        self._start = start
        self._window = row_filter
        self._copy = copy
        self._schemas = Streamed().schemas
        self._moved = asyncio.Event()
        self.resolved = start

    async def follow(self) -> None:
        async for batch in self._source.stream(self._start):
            for schema in batch.schemas:
                self._schemas.add(schema)
            self._window.observe(frame_format.scan(batch.data), memoryview(batch.data))
            for view in iter_frames(batch.data):
                if view.op == Op.END_OF_WINDOW:
                    continue
                if view.op == Op.DELETE:
                    self._copy.pop(bytes(view.key), None)
                elif view.after is not None:
                    schema = self._schemas.by_fingerprint(view.schema_fp)
                    self._copy[bytes(view.key)] = schema.decode_row(view.after)
            self.resolved = batch.resolved
            self._moved.set()

    async def outcome(self, waiting: Waiting) -> object:
        async with asyncio.timeout(20 * PATIENCE):
            while True:
                outcome = self._window.outcome(waiting, self.resolved)
                if outcome is not None:
                    return outcome
                self._moved.clear()
                await self._moved.wait()

    async def reach(self, scn: int) -> None:
        async with asyncio.timeout(20 * PATIENCE):
            while self.resolved < scn:
                self._moved.clear()
                await self._moved.wait()


# -- what cannot be captured


@pytest.mark.parametrize(
    ("name", "other", "usual", "statement"),
    [
        ("binlog_row_image", "MINIMAL", "DEFAULT", "SET GLOBAL binlog_row_image"),
        ("gtid_mode", "ON_PERMISSIVE", "ON", "SET GLOBAL gtid_mode = ON;"),
    ],
)
async def test_a_server_with_other_settings_is_refused_with_the_statement_that_fixes_it(
    mysql_database: FreshDatabase,
    source: MySqlSource,
    name: str,
    other: str,
    usual: str,
    statement: str,
) -> None:
    mysql_database.execute(f"SET GLOBAL {name} = {other}")
    try:
        with pytest.raises(PreflightFailed, match=f"(?s){name}.*{other}.*{statement}"):
            await source.open()
    finally:
        mysql_database.execute(f"SET GLOBAL {name} = {usual}")
    await source.open()


# -- tagged GTIDs


@pytest.mark.parametrize("use_kernels", [True, False])
async def test_transactions_of_foreign_servers_suspend_what_they_change_with_and_without_a_tag(
    mysql_database: FreshDatabase, source: MySqlSource, use_kernels: bool
) -> None:
    require(mysql_database.server, "tags of GTIDs", 8, 3)
    for table in ("t", "calm"):
        mysql_database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    await source.open()
    source.use_kernels = use_kernels
    other = str(uuid.uuid4())
    start = await source.first_scn()
    run_under(mysql_database, f"{other}:early:1", "BEGIN", "COMMIT")
    run_under(mysql_database, f"{other}:early:2", "INSERT INTO t VALUES (1, 1)")
    mysql_database.execute("INSERT INTO calm VALUES (10, 0)")
    streamed = Streamed(resolved=start)
    stream = source.stream(start)
    try:
        await read_up_to(stream, streamed, await source.first_scn())
        before = (await source.status())["stream"]["foreign_groups"]
        run_under(mysql_database, f"{other}:tag:3", "BEGIN", "COMMIT")
        run_under(mysql_database, f"{other}:1", "INSERT INTO t VALUES (2, 2)")
        run_under(mysql_database, f"{other}:tag:4", "INSERT INTO t VALUES (3, 3)")
        compressed = "SET binlog_transaction_compression = ON"
        run_under(mysql_database, f"{other}:tag:70000", compressed, "DELETE FROM t WHERE id = 3")
        run_under(mysql_database, f"{other}:tag:5", "CREATE TABLE u (id INT PRIMARY KEY)")
        run_under(mysql_database, f"{other}:tag:6", "TRUNCATE t")
        mysql_database.execute("INSERT INTO calm VALUES (11, 0)")
        await read_up_to(stream, streamed, await source.first_scn())
        status = await source.status()
        assert status["stream"]["foreign_groups"] == before + 6
        assert status["stopped_tables"].keys() == {f"{mysql_database.name}.t"}
    finally:
        await stream.aclose()
    assert [event.key["id"] for event in streamed.events()] == [10, 11]
    assert not any(view.op == Op.TRUNCATE for view in streamed.frames())


@pytest.mark.parametrize("use_kernels", [True, False])
async def test_a_tagged_gtid_of_our_own_that_changes_nothing_captured_is_passed_over(
    mysql_database: FreshDatabase, use_kernels: bool
) -> None:
    require(mysql_database.server, "tags of GTIDs", 8, 3)
    for name in ("t", "private"):
        mysql_database.execute(f"CREATE TABLE {name} (id INT PRIMARY KEY, v INT)")
    user = mysql_database.name
    config = mariadb_config(mysql_database.url, f"{mysql_database.name}.t")
    source = MySqlSource(config, use_kernels=use_kernels)
    start = await opened_scn(source)
    automatic = "AUTOMATIC:tag"
    for number in (1, 2):
        run_under(
            mysql_database,
            automatic,
            f"CREATE USER {user}",
            f"INSERT INTO private VALUES ({number}, 1)",
            "SET binlog_transaction_compression = ON",
            f"UPDATE private SET v = 2 WHERE id = {number}",
            f"DROP USER {user}",
        )
        mysql_database.execute(f"INSERT INTO t VALUES ({number}, 0)")
    streamed = await read_to_end(source, start)
    assert [event.key["id"] for event in streamed.events()] == [1, 2]
    assert streamed.resolved == start + 2
    # They are sent again at a restart behind them, and change as little.
    assert [e.key["id"] for e in (await read_to_end(source, start + 1)).events()] == [2]
    # A number under a tag that a session owns is none of the clock's, to a snapshot either.
    connection = mysql_database.server.connect(mysql_database.name)
    with connection.cursor() as cursor:
        cursor.execute(f"SET gtid_next = '{_own_uuid(mysql_database)}:tag:{start + 1_000_000}'")
        chunk = await source.read_chunk(ChunkRequest(f"{mysql_database.name}.t", 10))
        assert chunk.snapshot.high == start + 2
        cursor.execute("ROLLBACK")
        cursor.execute("SET gtid_next = AUTOMATIC")
    connection.close()
    await source.close()
