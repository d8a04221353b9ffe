"""YEAR(2), labels in bytes, MERGE tables: followed with the right values, or suspended by name."""

from __future__ import annotations

import pytest

from databus.common.errors import PreflightFailed
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, opened_on, read_to_end
from tests.support.opened_source import open_source
from tests.support.waiting import within


async def test_a_year_of_two_digits_is_the_same_in_the_stream_and_in_a_dump(
    mariadb_database: FreshDatabase,
) -> None:
    database = mariadb_database
    database.execute("CREATE TABLE y (id INT PRIMARY KEY, y YEAR(2))")
    async with opened_on(database) as (source, start):
        values = "(1, 0), (2, '0000'), (3, 69), (4, 70), (5, NULL), (6, 2055)"
        database.execute(f"INSERT INTO y VALUES {values}")
        streamed = [event.after for event in (await read_to_end(source, start)).events()]
        chunk = await source.read_chunk(ChunkRequest(f"{database.name}.y", 100))
    assert [row["y"] for row in streamed if row] == [2000, 0, 2069, 1970, None, 2055]
    assert [chunk.schema.decode_row(row.row) for row in chunk.rows] == streamed


async def test_labels_in_bytes_are_carried_as_text_or_their_table_is_suspended_by_column(
    mariadb_database: FreshDatabase,
) -> None:
    database, name = mariadb_database, mariadb_database.name
    async with opened_on(database) as (source, start):
        columns = "id INT PRIMARY KEY, e ENUM('a', 0xC3A9) CHARACTER SET binary"
        database.execute(f"CREATE TABLE readable ({columns})")
        database.execute(f"CREATE TABLE other ({columns.replace('0xC3A9', '0xFFFF')})")
        database.execute("INSERT INTO readable VALUES (1, 'a'), (2, 0xC3A9)")
        database.execute("INSERT INTO other VALUES (1, 0xFFFF)")
        database.execute("INSERT INTO readable VALUES (3, NULL)")
        streamed = (await read_to_end(source, start)).events()
        assert [event.after["e"] for event in streamed if event.after] == ["a", "é", None]
        assert {event.source for event in streamed} == {f"{name}.readable"}
        assert list(source.suspended()) == [f"{name}.other"]
        assert f"{name}.other.e " in source.suspended()[f"{name}.other"].why
        chunk = await source.read_chunk(ChunkRequest(f"{name}.readable", 100))
        rows = [chunk.schema.decode_row(row.row) for row in chunk.rows]
        assert rows == [event.after for event in streamed]


async def test_a_merge_table_and_the_tables_of_its_union_are_refused_or_suspended_by_name(
    mariadb_database: FreshDatabase,
) -> None:
    database, name = mariadb_database, mariadb_database.name
    database.execute("CREATE TABLE good (id INT PRIMARY KEY, v INT)")
    database.execute("CREATE TABLE part (id INT PRIMARY KEY, v INT) ENGINE = MyISAM")
    async with opened_on(database) as (source, start):
        database.execute("INSERT INTO part VALUES (1, 1)")
        database.execute(
            "CREATE TABLE whole (id INT PRIMARY KEY, v INT) ENGINE = MERGE UNION = (part) "
            "INSERT_METHOD = LAST"
        )
        database.execute("UPDATE whole SET v = 2")
        database.execute("INSERT INTO good VALUES (1, 1)")
        await read_to_end(source, start)
        assert set(source.suspended()) == {f"{name}.part", f"{name}.whole"}
        assert f"{name}.whole" in source.suspended()[f"{name}.part"].why
    # A starting relay is warned by the preflight, and follows the other tables without them.
    refused = MySqlSource(mariadb_config(database.url, f"{name}.*"))
    with pytest.raises(PreflightFailed, match=rf"{name}\.part.*union of the MERGE table"):
        await refused.open()
    async with within(10):
        await refused.close()


async def test_a_merge_table_that_the_server_cannot_open_suspends_no_other_table(
    mariadb_database: FreshDatabase,
) -> None:
    database, name = mariadb_database, mariadb_database.name
    database.execute("CREATE TABLE good (id INT PRIMARY KEY, v INT)")
    async with opened_on(database) as (source, start):
        database.execute("CREATE TABLE part (id INT, v INT) ENGINE = MyISAM")
        database.execute("CREATE TABLE whole (id INT, v INT) ENGINE = MERGE UNION = (part)")
        database.execute("DROP TABLE part")
        database.execute("CREATE TABLE after (id INT PRIMARY KEY)")
        database.execute("INSERT INTO good VALUES (1, 1)")
        streamed = await read_to_end(source, start)
        rows = list(streamed.tables()[f"{name}.good"].values())
        assert rows == [{"id": 1, "v": 1}]
        assert f"{name}.good" not in source.suspended()


async def test_a_merge_table_that_is_gone_again_has_suspended_the_tables_of_its_union(
    mariadb_database: FreshDatabase,
) -> None:
    """It was in another schema, and the catalogue has nothing of it any more."""
    database, name = mariadb_database, mariadb_database.name
    columns = "(id INT PRIMARY KEY, v INT) ENGINE ="
    for table in ("good", "part", "other"):
        database.execute(f"CREATE TABLE {table} {columns} MyISAM")
    source = await open_source(MySqlSource(mariadb_config(database.url, f"{name}.*")))
    elsewhere = f"{name}_x"
    try:
        start = await source.first_scn()
        database.execute("INSERT INTO part VALUES (1, 1)")
        database.execute(f"CREATE DATABASE {elsewhere}")
        whole = f"{elsewhere}.whole"
        database.execute(f"CREATE TABLE {whole} {columns} MERGE UNION = ({name}.part)")
        database.execute(f"UPDATE {whole} SET v = 2")
        database.execute(f"ALTER TABLE {whole} UNION = ({name}.other)")
        database.execute(f"DROP TABLE {whole}")
        database.execute("INSERT INTO good VALUES (1, 1)")
        await read_to_end(source, start)
        assert set(source.suspended()) == {f"{name}.part", f"{name}.other"}
        assert whole in source.suspended()[f"{name}.part"].why
    finally:
        database.execute(f"DROP DATABASE IF EXISTS {elsewhere}")
        await source.close()


async def test_a_virtual_column_of_the_automatic_number_is_refused_or_suspends_its_table(
    mariadb_database: FreshDatabase,
) -> None:
    """The server logs the row before it has the number: the column has another value there."""
    database, name = mariadb_database, mariadb_database.name
    number = "id INT AUTO_INCREMENT PRIMARY KEY"
    database.execute(f"CREATE TABLE good ({number}, v INT, g INT AS (v + 1) VIRTUAL)")
    async with opened_on(database) as (source, start):
        computed = (
            "`2g` INT AS (v + 1) VIRTUAL, h INT AS (Id * 2) VIRTUAL, i INT AS (h + v) VIRTUAL"
        )
        database.execute(f"CREATE TABLE early ({number}, v INT, {computed})")
        database.execute("INSERT INTO early (v) VALUES (1)")
        database.execute("INSERT INTO good (v) VALUES (1)")
        await read_to_end(source, start)
        assert set(source.suspended()) == {f"{name}.early"}
        assert "virtual column h" in source.suspended()[f"{name}.early"].why
    source = MySqlSource(mariadb_config(database.url, f"{name}.*"))
    with pytest.raises(PreflightFailed, match="virtual column h"):
        await source.open()
    await source.close()
