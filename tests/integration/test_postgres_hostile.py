"""No statement of ours runs what a database's users have made, whatever they have made."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import psycopg
import pytest

import databus.relay.sources.postgres as package
from databus.common.errors import BadRequest
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.postgres import PostgresSource
from databus.relay.sources.postgres.protocol import replication_connection
from databus.relay.sources.postgres.protocol.lsn import flush_lsn, parse_lsn
from databus.relay.sources.postgres.stream import postgres_lineage
from tests.support.fixtures import FreshDatabase
from tests.support.hostile_schema import MARK, occupy
from tests.support.postgres_follower import config_of, follow_to, now_scn, opened, table_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TABLES = [
    "CREATE TABLE public.plain (id int PRIMARY KEY, v text)",
    "CREATE TABLE public.moods (m public.mood, id int, PRIMARY KEY (m, id))",
    "CREATE TYPE public.size AS ENUM ('small', 'large')",
    "CREATE TABLE public.sizes (s public.size, n public.number, PRIMARY KEY (s, n))",
    "INSERT INTO public.sizes VALUES ('large', 2), ('small', 1), ('large', 1)",
    "CREATE EXTENSION citext SCHEMA public",
    "CREATE DOMAIN public.mail AS public.citext CHECK (public.accept(1))",
    "CREATE TABLE public.mails (id int, m public.mail, c public.citext, PRIMARY KEY (id, m, c))",
    "INSERT INTO public.mails VALUES (1, 'b', 'A'), (1, 'B', 'b'), (1, 'a', 'z'), (2, 'A', 'a')",
    "CREATE TABLE public.numbers (n public.number PRIMARY KEY, m public.mood)",
    "CREATE TABLE public.words (w varchar(20), b char(3), t timestamptz, PRIMARY KEY (w, b, t))",
    "CREATE TABLE public.keyless (a int, b text, m public.mood)",
    "ALTER TABLE public.keyless REPLICA IDENTITY FULL",
    "CREATE TABLE public.marks (id int PRIMARY KEY, token text NOT NULL)",
    "CREATE TABLE public.days (id int, day int, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
    "CREATE TABLE public.days_0 PARTITION OF public.days FOR VALUES FROM (0) TO (10)",
    "INSERT INTO public.plain VALUES (1, 'a'), (2, 'b'), (3, 'c')",
    "INSERT INTO public.moods VALUES ('sad', 1), ('ok', 1), ('glad', 2)",
    "INSERT INTO public.numbers VALUES (1, 'sad'), (2, 'ok'), (3, 'glad')",
    "INSERT INTO public.words VALUES ('a', 'b', now()), ('c', 'd', now()), ('e', 'f', now())",
    "INSERT INTO public.keyless VALUES (1, 'a', 'ok'), (2, 'b', 'sad'), (2, 'b', 'sad')",
    "INSERT INTO public.days VALUES (1, 1), (2, 2)",
]
OURS = [
    "plain", "sizes", "mails", "moods", "numbers", "words", "keyless", "days", "marks",
]  # fmt: skip


def calls(database: FreshDatabase, since: int) -> list[str]:
    log = database.server.log_path.read_text(errors="replace")[since:]
    return [line for line in log.splitlines() if MARK in line and "statement:" not in line]


def log_end(database: FreshDatabase) -> int:
    return len(database.server.log_path.read_text(errors="replace"))


STATEMENT = re.compile(
    r"(SELECT|WITH|INSERT|UPDATE|DELETE|ALTER|CREATE|DROP|TRUNCATE|START|SET|SHOW|COMMIT|IDENTIFY|"
    r"TIMELINE|GRANT|COPY|LOCK|DO|CALL|EXPLAIN|DECLARE|FETCH)(_|\b)"
)
# What these begin is for people, in errors and findings, or the end of a longer text.
ADVICE = (
    "ALTER TABLE",
    "ALTER ROLE",
    "ALTER SYSTEM",
    "GRANT SELECT",
    "SET (",
    "SET LOGGED",
    "WITH (publish",
)
# Sent only where a database has an encoding that is not known here, or a server another history.
ELSEWHERE = {"SET client_encoding = 'UTF8'", "TIMELINE_HISTORY"}


def statements() -> set[str]:
    """How the statements in the source's code begin, each up to its first name or value
    that is put in."""
    found = set()
    for path in Path(package.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = " ".join(re.split("[{;]", node.value)[0].split())
                if STATEMENT.match(text) and not text.startswith(ADVICE):
                    found.add(text)
    return found - ELSEWHERE


async def test_every_statement_runs_the_servers_own_functions_only(db: FreshDatabase) -> None:
    ((version,),) = db.execute("SELECT current_setting('server_version_num')::int")
    has_inspector = int(str(version)) >= 15_00_00
    inspector = ["CREATE EXTENSION pg_walinspect SCHEMA public"] if has_inspector else []
    url = occupy(db, *TABLES, *inspector)
    since = log_end(db)
    with psycopg.connect(url, autocommit=True) as trusting:  # They do call, if they are found.
        trusting.execute("SELECT array_position(ARRAY[1::int2], 1::int2), format_type(23::oid, 4)")
        trusting.execute("SELECT relname FROM pg_class WHERE relname = 'plain'")
        trusting.execute("SELECT * FROM public.moods WHERE m > $$ok$$::pg_catalog.text")
    for called in ("array_position", "format_type", "view pg_class", "operator =", "a cast"):
        assert any(called in line for line in calls(db, since)), called
    since = log_end(db)
    tables = [f"public.{name}" for name in OURS]
    config = config_of(db, *tables, url=url)
    config = config.model_copy(update={"keys": {"public.keyless": ("a", "b")}})
    examined = PostgresSource(config)
    assert await examined.preflight() == []  # databus check
    await examined.close()
    async with opened(config) as source:
        start = await source.first_scn()
        for name in tables:
            last = await source.largest_key(name)
            await source.table_size(name)
            request = ChunkRequest(name, 2, upto=last)
            if name == "public.moods":
                # Any role that may cast could be meant by ">": that is refused, and not guessed.
                with pytest.raises(BadRequest, match="operator is not unique"):
                    await source.read_chunk(request)
                continue
            first = await source.read_chunk(request)
            if len(first.rows):
                assert last is not None
                end = await source.chunk_end(request)
                assert end == first.last_key or name == "public.keyless"
                rest = await source.read_chunk(
                    ChunkRequest(name, 9, after=first.last_key, upto=last)
                )
                keys = 1 if name == "public.keyless" else len(first.rows) + len(rest.rows)
                whole = await table_of(source, name, limit=1)
                assert len(whole) >= keys, name
                key = list(next(iter(whole)))
                if name != "public.words":  # whose time is not text in JSON's way
                    found = await source.read_chunk(ChunkRequest(name, 5, keys=[key]))
                    assert (len(found.rows), found.missing) == (1, []), name
        await source.write_watermark("public.marks", "a token")
        db.execute("INSERT INTO public.plain (id, v) VALUES (4, 'd')")
        db.execute("CREATE TABLE public.later (id int PRIMARY KEY)")
        seen = await follow_to(source, start, now_scn(db))
        assert (4,) in seen.tables["public.plain"]
        await source.status()
        await source.schemas()
        known = source._catalogue
        ((partition,),) = db.execute("SELECT 'public.days_0'::pg_catalog.regclass::int8")
        assert await known.root_of(int(str(partition))) == "public.days"
        plain = await known.table_named("public.plain")
        assert plain is not None
        assert not await known.is_empty(plain)
        assert "ended" in await known.lockers(plain)  # None holds it.
        assert await known.eventless([plain.oid]) == {}
        assert await known.fetch(replication_connection.WORK_SQL.format(process=0)) == []
        assert await known.has_rows_before(plain.oid, 3) is False  # No transaction is older.
        assert await known.truncated_by([plain.oid], 3) == set()
        assert await known.written_scn() >= start
        assert await known.have_ended(3)
        # PostgreSQL 15 refuses an LSN that it has not flushed.
        ((flushed,),) = db.execute("SELECT pg_catalog.pg_current_wal_flush_lsn()::text")
        found = await postgres_lineage.commits_between(
            known, flush_lsn(start), parse_lsn(str(flushed))
        )
        assert found or not has_inspector
        db.execute("ALTER TABLE public.plain DROP CONSTRAINT plain_pkey")
        await source._publish()
        await known.end_reader()
        await known.drop_slot()
    log = " ".join(db.server.log_path.read_text(errors="replace")[since:].split())
    unsent = {text for text in statements() if text not in log}
    since_15 = {"SELECT count(*) AS commits FROM"} | {
        text for text in unsent if "pg_publication_namespace" in text
    }
    assert unsent == (set() if has_inspector else since_15)
    assert calls(db, since) == []
