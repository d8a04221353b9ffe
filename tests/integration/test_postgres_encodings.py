"""Texts that are not in their database's encoding: named with table and column, where they
enter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from databus.common.errors import UnsupportedChange
from databus.relay.sources.contract import ChunkRequest
from tests.integration.test_postgres_publications import following
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import config_of, opened, table_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# As old databases have them: nothing looks at the bytes.
UNCHECKED = "CREATE CAST (bytea AS text) WITHOUT FUNCTION"


@pytest.fixture
def database_in(
    postgres_database: FreshDatabase, request: pytest.FixtureRequest
) -> Callable[[str], FreshDatabase]:
    """A function that makes a database in an encoding."""
    server = postgres_database.server

    def made(encoding: str) -> FreshDatabase:
        name = f"{postgres_database.name}_{encoding.lower()}"
        server.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 "
            "LC_COLLATE 'C' LC_CTYPE 'C'"
        )
        request.addfinalizer(lambda: server.drop_database(name))
        return FreshDatabase(server, name)

    return made


@pytest.mark.parametrize(
    ("encoding", "fine", "bad", "options"),
    [
        ("UTF8", "c3a9", "ff", {}),
        ("UTF8", "f09f9880", "eda080", {}),
        ("SQL_ASCII", "c3a9", "e9", {}),
        ("SQL_ASCII", "e9", "81", {"sql_ascii_encoding": "WIN1252"}),
        ("WIN1252", "e9c3a9", "81", {}),
        ("LATIN1", "e9c3a9", "", {}),
        ("EUC_TW", "c4a1", "", {}),
    ],
)
async def test_a_text_that_is_not_in_its_encoding_suspends_its_table_by_name(
    database_in: Callable[[str], FreshDatabase],
    encoding: str,
    fine: str,
    bad: str,
    options: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "UTF8")  # The test's own sessions.
    db = database_in(encoding)
    codec = {"UTF8": "utf-8", "WIN1252": "cp1252", "LATIN1": "latin-1", "SQL_ASCII": "utf-8"}.get(
        str(options.get("sql_ascii_encoding", encoding))
    )
    text = bytes.fromhex(fine).decode(codec) if codec else "\u4e00"
    db.execute(UNCHECKED)
    for table in ("calm", "odd", "keyed"):
        db.execute(f"CREATE TABLE {table} (id int, k text, v text, j json, PRIMARY KEY (id, k))")

    def put(table: str, number: int, key: str, value: str) -> None:
        db.execute(
            f"INSERT INTO {table} VALUES ({number}, '\\x{key}'::bytea::text, "
            f"'\\x{value}'::bytea::text, ('\"' || '\\x{fine}'::bytea::text || '\"')::json)"
        )

    config = config_of(db, discover_every="1h", **options)
    async with opened(config) as source:
        start = await source.first_scn()
        async with following(source, start) as reader:
            put("calm", 1, fine, fine)
            put("calm", 2, "61", "62")
            await reader.reaches(db)
            assert reader.seen.tables["public.calm"][1, text]["v"] == text
            assert reader.seen.tables["public.calm"] == await table_of(source, "public.calm", 1)
            found = await source.read_chunk(ChunkRequest("public.calm", 5, keys=[[1, text]]))
            assert (len(found.rows), found.missing) == (1, [])
            if not bad:
                return
            put("odd", 1, "61", "62" + bad)
            put("keyed", 1, "61" + bad, "62")
            put("calm", 3, fine, fine)
            assert "public.odd.v (text)" in await reader.why("public.odd")
            assert "public.keyed.k (text)" in await reader.why("public.keyed")
            await reader.reaches(db)
            assert (3, text) in reader.seen.tables["public.calm"]
            assert set(reader.seen.tables) == {"public.calm"}
            for table, column in (("odd", "v"), ("keyed", "k")):
                with pytest.raises(UnsupportedChange, match=f"public.{table}.{column}"):
                    await source.read_chunk(ChunkRequest(f"public.{table}", 10))
            db.execute("UPDATE odd SET v = 'repaired'")
            await reader.equals(db, "public.odd")
