"""A dot in a name of a schema or table: each table is a source, streamed and dumped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.common.frame.frame_format import Op
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, opened, read_to_end
from tests.support.opened_source import open_source
from tests.support.sqlite_source import config, read
from tests.support.waiting import eventually


@pytest.fixture(params=["mariadb", "mysql"])
def dotted(request: pytest.FixtureRequest) -> Iterator[tuple[FreshDatabase, FreshDatabase]]:
    """A database, and one whose name is the same with ``.eu`` behind it."""
    plain: FreshDatabase = request.getfixturevalue(f"{request.param}_database")
    other = FreshDatabase(plain.server, f"{plain.name}.eu")
    other.server.create_database(other.name)
    yield plain, other
    other.server.drop_database(other.name)


async def test_two_tables_whose_names_differ_in_where_the_dot_belongs_are_two_sources(
    dotted: tuple[FreshDatabase, FreshDatabase],
) -> None:
    plain, other = dotted
    name = plain.name
    plain.execute("CREATE TABLE `eu.t` (id INT PRIMARY KEY, v INT)")
    other.execute("CREATE TABLE t (id INT PRIMARY KEY, w VARCHAR(9))")
    plain.execute("CREATE TABLE u (id INT PRIMARY KEY)")
    names = [f'{name}."eu.t"', f'"{name}.eu".t', f"{name}.u"]
    async with opened(mariadb_config(plain.url, f"{name}.*", f'"{name}.eu".*')) as source:
        assert {schema.source for schema in await source.schemas()} == set(names)
        start = await source.first_scn()
        plain.execute("INSERT INTO `eu.t` VALUES (1, 10)")
        other.execute("INSERT INTO t VALUES (1, 'ten')")
        plain.execute("INSERT INTO u VALUES (1)")
        other.execute("ALTER TABLE t ADD COLUMN x INT")
        other.execute("INSERT INTO t VALUES (2, 'two', 3)")
        plain.execute("TRUNCATE TABLE `eu.t`")
        streamed = await read_to_end(source, start)
        assert [(event.source, event.after) for event in streamed.events()] == [
            (names[0], {"id": 1, "v": 10}),
            (names[1], {"id": 1, "w": "ten"}),
            (names[2], {"id": 1}),
            (names[1], {"id": 2, "w": "two", "x": 3}),
        ]
        assert sum(view.op == Op.TRUNCATE for view in streamed.frames()) == 1
        chunks = {one: await source.read_chunk(ChunkRequest(one, 10)) for one in names}
        assert {one: len(list(chunk.rows)) for one, chunk in chunks.items()} == dict(
            zip(names, (0, 2, 1), strict=True)
        )
        assert (await source.table_size(names[1])).rows is not None
    # A pattern without quotes means the schema alone, not the one with a dot in its name.
    only = await open_source(MySqlSource(mariadb_config(plain.url, f"{name}.*")))
    assert {schema.source for schema in await only.schemas()} == {names[0], names[2]}
    await only.close()


@pytest.mark.postgres
async def test_a_postgresql_schema_with_a_dot_is_streamed_and_found_in_the_publication(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    for statement in (
        'CREATE SCHEMA "shop.eu"',
        "CREATE SCHEMA shop",
        'CREATE TABLE "shop.eu".t (id INT PRIMARY KEY, v INT)',
        'CREATE TABLE shop."eu.t" (id INT PRIMARY KEY, w TEXT)',
    ):
        postgres_database.execute(statement)
    names = {'"shop.eu".t', 'shop."eu.t"'}
    settings = database_config("shop", postgres_database.url, *names)
    folder = tmp_path / "relay" / "shop"
    for number in range(2):  # The second start finds both in the publication.
        async with capturing(settings, tmp_path / "relay") as fetcher:
            await streaming(fetcher)
            postgres_database.execute(f'INSERT INTO "shop.eu".t VALUES ({number}, 5)')
            postgres_database.execute(f"INSERT INTO shop.\"eu.t\" VALUES ({number}, 'x')")
            wanted = 2 * (number + 1)
            await eventually(lambda n=wanted: len(ring_state(folder).windows) == n, 60)
    tables = ring_state(folder).tables
    assert {name: next(iter(rows.values())) for name, rows in tables.items()} == {
        '"shop.eu".t': {"id": 0, "v": 5},
        'shop."eu.t"': {"id": 0, "w": "x"},
    }


async def test_a_sqlite_table_with_a_dot_is_streamed_and_dumped(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute('CREATE TABLE "a.b" (id INTEGER PRIMARY KEY, v TEXT)')
    source = await open_source(SqliteSource(config(path, "main.*")))
    try:
        with sqlite3.connect(path) as connection:
            connection.execute("INSERT INTO \"a.b\" VALUES (1, 'x')")
        assert [event[1] for event in await read(source)] == ['main."a.b"']
        chunk = await source.read_chunk(ChunkRequest('main."a.b"', 10))
        assert [chunk.schema.decode_row(row.row) for row in chunk.rows] == [{"id": 1, "v": "x"}]
    finally:
        await source.close()
