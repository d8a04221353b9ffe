"""Each wrong setting of a real PostgreSQL is found, with the statement that fixes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.cli.demo.private_servers import PostgresServer
from databus.common.errors import PreflightFailed, SourceUnavailable
from databus.relay.sources.contract import Finding
from databus.relay.sources.postgres import PostgresSource
from databus.relay.sources.postgres.protocol.postgres_settings import read_settings
from databus.relay.sources.postgres.protocol.replication_connection import ReplicationConnection
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import config_of, follow_to, now_scn, opened, opened_on


async def findings(db: FreshDatabase, url: str = "", **options: str) -> dict[str, Finding]:
    source = PostgresSource(config_of(db, url=url, **options))
    try:
        return {finding.setting: finding for finding in await source.preflight()}
    finally:
        await source.close()


@pytest.fixture
def limited(db: FreshDatabase) -> Iterator[str]:
    """The URL of a role that may sign in and replicate, and nothing else."""
    role = f"limited_{db.name}"
    db.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'pw'")
    yield db.url.replace("databus:databus@", f"{role}:pw@")
    db.execute(f"DROP OWNED BY {role}")
    db.execute(f"DROP ROLE {role}")


async def test_a_server_that_is_set_up_gives_no_findings(postgres_database: FreshDatabase) -> None:
    postgres_database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    assert await findings(postgres_database) == {}


async def test_the_server_does_not_compile_our_queries(postgres_database: FreshDatabase) -> None:
    # Compiling takes seconds, for a query that takes milliseconds.
    settings = read_settings(config_of(postgres_database))
    catalogue, connection = Catalogue(settings), ReplicationConnection(settings)
    try:
        assert await catalogue.fetch("SHOW jit") == [("off",)]
        await connection.connect()
        assert await connection.query("SHOW jit") == [(b"off",)]
    finally:
        connection.close()
        await catalogue.close()


async def test_a_table_without_a_key_is_named_with_its_statement(db: FreshDatabase) -> None:
    db.execute('CREATE TABLE "no key" (v int)')
    db.execute("CREATE TABLE nothing (id int PRIMARY KEY)")
    db.execute("ALTER TABLE nothing REPLICA IDENTITY NOTHING")
    found = await findings(db)
    assert found["key of public.no key"].remedy.startswith(
        'ALTER TABLE "public"."no key" ADD PRIMARY KEY (...); '
    )
    assert "REPLICA IDENTITY DEFAULT" in found["key of public.nothing"].remedy
    with pytest.raises(PreflightFailed, match="no key"):
        async with opened(config_of(db)):
            pass


async def test_sources_that_match_no_table_are_reported_and_allowed(
    postgres_database: FreshDatabase,
) -> None:
    found = await findings(postgres_database)
    assert not found["sources"].fatal
    async with opened(config_of(postgres_database)) as source:
        assert await source.schemas() == []


async def test_a_role_without_rights_gets_the_statements_it_needs(
    db: FreshDatabase, limited: str
) -> None:
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    found = await findings(db, limited)
    role = f"limited_{db.name}"
    assert found["privilege on public.t"].remedy == f'GRANT SELECT ON "public"."t" TO "{role}"'
    create = found["publication"].remedy
    db.execute(found["privilege on public.t"].remedy)
    db.execute(create)
    assert await findings(db, limited) == {}
    db.execute("CREATE TABLE more (id int PRIMARY KEY)")
    db.execute(f'GRANT SELECT ON more TO "{role}"')
    found = await findings(db, limited)
    assert "lacks public.more" in found["publication"].problem
    db.execute(found["publication"].remedy)
    async with opened_on(db, url=limited) as (source, start):
        db.execute("INSERT INTO more VALUES (1)")
        assert (await follow_to(source, start, now_scn(db))).ops == "c"


async def test_a_role_that_may_not_replicate_is_named(
    postgres_database: FreshDatabase, limited: str
) -> None:
    role = f"limited_{postgres_database.name}"
    postgres_database.execute(f"ALTER ROLE {role} NOREPLICATION")
    found = await findings(postgres_database, limited)
    assert found["role"].remedy == f'ALTER ROLE "{role}" REPLICATION'


@pytest.mark.parametrize("password", ["databus:wrong@", "nobody_such:databus@"])
async def test_a_refused_sign_in_is_a_finding(
    postgres_database: FreshDatabase, password: str
) -> None:
    url = postgres_database.url.replace("databus:databus@", password)
    assert (
        "password authentication failed"
        in (await findings(postgres_database, url))["sign-in"].problem
    )


async def test_an_unknown_database_is_a_finding(postgres_database: FreshDatabase) -> None:
    url = postgres_database.url + "_not"
    assert "does not exist" in (await findings(postgres_database, url))["sign-in"].problem


async def test_a_publication_that_leaves_changes_out_is_found(db: FreshDatabase) -> None:
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("CREATE PUBLICATION half FOR TABLE t WITH (publish = 'insert, update')")
    found = await findings(db, publication="half")
    db.execute(found["publication"].remedy)
    assert await findings(db, publication="half") == {}


async def test_a_slot_of_another_kind_or_database_is_found(db: FreshDatabase) -> None:
    slot = f"other_{db.name}"
    db.execute("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", slot)
    assert "test_decoding" in (await findings(db, slot=slot))["slot"].problem
    elsewhere = db.server.url("postgres")
    db.execute("SELECT pg_drop_replication_slot(%s)", slot)
    db.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", slot)
    assert "belongs to" in (await findings(db, elsewhere, slot=slot))["slot"].problem


async def test_a_server_that_does_not_answer_is_unavailable(
    postgres_database: FreshDatabase,
) -> None:
    url = postgres_database.url.replace(f":{postgres_database.server.port}/", ":1/")
    with pytest.raises(SourceUnavailable, match="cannot be queried"):
        await findings(postgres_database, url)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_settings_of_the_whole_server_are_found(tmp_path: Path) -> None:
    server = PostgresServer(
        tmp_path / "server",
        options=["wal_level=replica", "max_wal_senders=1", "max_replication_slots=1"],
    )
    with server:
        server.create_database("ascii_like")
        server.execute(
            "CREATE DATABASE plain ENCODING 'SQL_ASCII' TEMPLATE template0 "
            "LC_COLLATE 'C' LC_CTYPE 'C'"
        )
        found = await findings(FreshDatabase(server, "plain"))
        assert found["wal_level"].remedy.startswith("ALTER SYSTEM SET wal_level = 'logical'")
        assert "SQL_ASCII" in found["server_encoding"].problem
        server.execute("ALTER SYSTEM SET wal_level = 'logical'")
        server.options = ("max_wal_senders=1", "max_replication_slots=1")
        server.restart()
        server.execute("SELECT pg_create_physical_replication_slot('taken')")
        found = await findings(FreshDatabase(server, "ascii_like"))
        assert "max_replication_slots = 6" in found["max_replication_slots"].remedy
