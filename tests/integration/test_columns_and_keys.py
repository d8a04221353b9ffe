"""Rules for columns and configured keys on real databases, from the source to the ring."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.config import Config, DatabaseConfig, parse
from databus.common.errors import PreflightFailed
from databus.common.frame.frame_format import FrameView, Op
from databus.relay.capture.source_catalogue import create_source
from databus.relay.local_relay import LocalRelay
from databus.relay.ring.schema_registry import RegistryReader
from databus.relay.sources.mysql import MySqlSource
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import read_to_end
from tests.support.opened_source import open_source
from tests.support.relay_process import ring_frames
from tests.support.upstream import Upstream, server_upstream
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SALT = "a salt of the test"
WAIT_S = 90


def configured(upstream: Upstream, folder: Path, rules: str) -> Config:
    return parse(
        f"""
        [relay]
        listen = "127.0.0.1:0"
        data_dir = "{folder}/data"

        [[database]]
        name = "shop"
        url = "{upstream.url}"
        sources = ["{upstream.namespace}.*"]
        ring_bytes = "32MiB"
        {rules}
        """
    )


class Running:
    """A relay in this process, with what its ring holds."""

    def __init__(self, relay: LocalRelay, folder: Path) -> None:
        self.relay = relay
        self.folder = folder / "data" / "shop"

    def frames(self) -> list[FrameView]:
        return [view for view in ring_frames(self.folder) if not view.is_control]

    def rows(self, source: str) -> dict[str, dict[str, Any]]:
        """The table after every frame, by the JSON of its key."""
        registry = RegistryReader(self.folder / "schemas.jsonl")
        registry.refresh()
        rows: dict[str, dict[str, Any]] = {}
        for view in self.frames():
            schema = registry.schemas.by_fingerprint(view.schema_fp)
            if schema.source != source:
                continue
            if view.op == Op.TRUNCATE:
                rows.clear()
                continue
            key = json.dumps(schema.decode_key(view.key), default=str)
            if view.op == Op.DELETE:
                rows.pop(key, None)
            else:
                rows[key] = schema.decode_row(view.after or b"")
        return rows

    async def dump(
        self, session: aiohttp.ClientSession, source: str, **more: Any
    ) -> dict[str, Any]:
        request = {"sources": [source], "chunk_rows": 5, **more}
        async with session.post(f"{self.relay.url}/v1/shop/dumps", json=request) as answer:
            dump = await answer.json()

        async def ended() -> bool:
            async with session.get(f"{self.relay.url}/v1/shop/dumps/{dump['id']}") as answer:
                dump.update(await answer.json())
            return dump["state"] not in ("queued", "running")

        await eventually(ended, WAIT_S, poll_s=0.1)
        return dict(dump)

    def everything(self) -> bytes:
        """The bytes of all files of the data folder."""
        files = [path for path in self.folder.parent.rglob("*") if path.is_file()]
        return b"".join(path.read_bytes() for path in files)


@asynccontextmanager
async def running(config: Config, folder: Path) -> AsyncIterator[Running]:
    async with LocalRelay(config) as relay:
        await relay.ready()
        yield Running(relay, folder)


def digest(text: str) -> str:
    return hmac.new(SALT.encode(), text.encode(), hashlib.sha256).hexdigest()


RULES = """
hash_columns = ["*.people.email"]
hash_salt = "{salt}"
exclude_columns = ["*.ssn*"]
null_columns = ["*.people.pin"]
truncate_columns = {{"*.people.note" = 4}}
mask_columns = {{"*.people.card" = 8}}
"""


async def test_no_byte_of_an_excluded_or_hidden_value_is_in_the_relays_folder(
    upstream: Upstream, tmp_path: Path
) -> None:
    execute, people = upstream.execute, upstream.table("people")
    execute(
        "CREATE TABLE people (email VARCHAR(80) PRIMARY KEY, ssn VARCHAR(40), card VARCHAR(40), "
        "note VARCHAR(40), pin VARCHAR(40), n INTEGER)"
    )
    if upstream.kind == "postgres":
        execute("ALTER TABLE people REPLICA IDENTITY FULL")

    def insert(number: int, more: str = "") -> str:
        return (
            f"INSERT INTO people VALUES ('key{number}@SECRET', 'ssnSECRET', 'cardSECRET', "
            f"'noteSECRET', 'pinSECRET', {number}{more})"
        )

    for number in range(10):
        execute(insert(number))
    config = configured(upstream, tmp_path, RULES.format(salt=SALT))
    async with running(config, tmp_path) as run, aiohttp.ClientSession() as session:
        dump = await run.dump(session, people)
        assert dump["state"] == "completed", dump
        assert "sealed" in json.dumps(dump["tables"])
        execute(insert(10))
        execute("UPDATE people SET ssn = 'newSECRET', note = 'otherSECRET', n = 111 WHERE n = 1")
        execute("UPDATE people SET email = 'moved@SECRET' WHERE n = 2")
        execute("DELETE FROM people WHERE n = 3")
        execute("ALTER TABLE people ADD COLUMN ssn2 VARCHAR(40)")
        execute(insert(11, ", 'ssn2SECRET'"))
        execute("UPDATE people SET ssn2 = 'laterSECRET' WHERE n = 4")
        found = execute("SELECT email, n FROM people")
        wanted = {
            json.dumps({"email": digest(str(email))}): (digest(str(email)), n) for email, n in found
        }

        def now() -> dict[str, tuple[str, int]]:
            return {key: (row["email"], row["n"]) for key, row in run.rows(people).items()}

        await eventually(lambda: now() == wanted, WAIT_S, poll_s=0.2)
        again = await run.dump(session, people)
        assert again["state"] == "completed", again
        assert now() == wanted
        for row in run.rows(people).values():
            assert list(row) == ["email", "card", "note", "pin", "n"]
            assert (row["card"], row["pin"]) == ("********", None)
            assert row["note"] in ("note", "othe")
        updates = [view for view in run.frames() if view.op == Op.UPDATE and view.before]
        assert updates
        refused = await run.dump(session, people, keys=[["key1"]])
        assert refused["state"] == "failed" and "hashed" in json.dumps(refused["error"])
    content = Running(run.relay, tmp_path).everything()
    assert b"SECRET" not in content
    assert SALT.encode() not in content
    assert digest("key5@SECRET").encode() in content


async def test_skipped_operations_and_excluded_tables_do_not_come(
    upstream: Upstream, tmp_path: Path
) -> None:
    execute, retained = upstream.execute, upstream.table("kept")
    for name in ("kept", "kept_tmp"):
        execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, v INTEGER)")
    rules = 'skipped_operations = ["d", "t"]\nexclude_sources = ["*_tmp"]'
    async with running(configured(upstream, tmp_path, rules), tmp_path) as run:
        execute("INSERT INTO kept VALUES (1, 1), (2, 2)")
        execute("INSERT INTO kept_tmp VALUES (1, 777)")
        execute("DELETE FROM kept WHERE id = 1")
        execute("UPDATE kept SET v = 5 WHERE id = 2")
        execute("INSERT INTO kept VALUES (3, 3)")
        await eventually(lambda: len(run.rows(retained)) == 3, WAIT_S, poll_s=0.2)
        assert {view.op for view in run.frames()} == {Op.INSERT, Op.UPDATE}
        assert sorted(row["v"] for row in run.rows(retained).values()) == [1, 3, 5]
        registry = RegistryReader(run.folder / "schemas.jsonl")
        registry.refresh()
        assert registry.schemas.sources == [retained]
    execute("INSERT INTO kept VALUES (4, 4)")
    execute("DELETE FROM kept WHERE id = 3")
    execute("UPDATE kept SET v = 6 WHERE id = 2")
    async with running(configured(upstream, tmp_path, rules), tmp_path) as run:
        await eventually(
            lambda: sorted(row["v"] for row in run.rows(retained).values()) == [1, 3, 4, 6],
            WAIT_S, poll_s=0.2,
        )  # fmt: skip
        positions = [view.position for view in ring_frames(run.folder)]
        assert positions == sorted(set(positions))
        ends = [view for view in ring_frames(run.folder) if view.op == Op.END_OF_WINDOW]
        events = sum(view.event_count for view in ends)
        assert events == len(run.frames()) + 2, "an end counts what the source had"


async def test_a_rule_against_a_key_is_named_by_the_preflight(
    upstream: Upstream, tmp_path: Path
) -> None:
    upstream.execute("CREATE TABLE people (id INTEGER PRIMARY KEY, ssn VARCHAR(40))")
    rules = 'exclude_columns = ["*.people.id"]\nmask_columns = {"*.people.snn" = "x"}'
    source = create_source(configured(upstream, tmp_path, rules).database[0])
    try:
        found = [str(finding) for finding in await source.preflight()]
        assert any("people.id" in text and "exclude_columns" in text for text in found)
        assert any("'*.people.snn' matches no column" in text for text in found)
        with pytest.raises(PreflightFailed, match=r"people\.id"):
            await source.open()
    finally:
        await source.close()
    await asyncio.sleep(0)


# -- tables without a key


def key_of(source_rows: list[tuple[Any, ...]], names: list[str]) -> dict[str, dict[str, Any]]:
    """Rows of the source by the JSON of their key, as ``Running.rows`` has them."""
    found = {}
    for row in source_rows:
        record = dict(zip(["a", "b", "c"], row, strict=True))
        found[json.dumps({name: record[name] for name in names})] = record
    return found


@pytest.mark.parametrize(
    ("key", "names"), [('"*"', ["a", "b", "c"]), ('["b", "a"]', ["b", "a"])], ids=["row", "columns"]
)
async def test_a_table_without_a_key_streams_and_dumps_by_the_configured_one(
    upstream: Upstream, tmp_path: Path, key: str, names: list[str]
) -> None:
    execute, loglines = upstream.execute, upstream.table("loglines")
    execute("CREATE TABLE loglines (a INTEGER, b VARCHAR(20), c VARCHAR(20))")
    if upstream.kind == "postgres":
        execute("ALTER TABLE loglines REPLICA IDENTITY FULL")
    for number in range(12):
        text = "NULL" if number % 4 == 0 else f"'{'xX'[number % 2]}'"
        number_text = "NULL" if number == 5 else str(number // 2)
        execute(f"INSERT INTO loglines VALUES ({number_text}, {text}, 'old{number // 2}')")
    execute("INSERT INTO loglines VALUES (90, 'twin', 'twin'), (90, 'twin', 'twin')")
    config = configured(upstream, tmp_path, f'keys = {{"{loglines}" = {key}}}')
    async with running(config, tmp_path) as run, aiohttp.ClientSession() as session:

        def settled() -> bool:
            rows = [tuple(row) for row in execute("SELECT a, b, c FROM loglines")]
            return run.rows(loglines) == key_of(rows, names)

        dump = await run.dump(session, loglines)
        assert dump["state"] == "completed", dump
        await eventually(settled, WAIT_S, poll_s=0.2)
        execute("UPDATE loglines SET c = 'new' WHERE a = 1")
        execute("UPDATE loglines SET b = NULL WHERE a = 3")
        execute("DELETE FROM loglines WHERE b IS NULL AND a = 4")
        execute("DELETE FROM loglines WHERE a = 90")
        execute("INSERT INTO loglines VALUES (NULL, NULL, 'nulls'), (91, '', 'empty')")
        await eventually(settled, WAIT_S, poll_s=0.2)
        again = await run.dump(session, loglines)
        assert again["state"] == "completed", again
        assert settled()
        reads = [view for view in run.frames() if view.op == Op.READ]
        assert len(reads) >= 12


async def test_a_table_without_a_key_is_refused_and_the_way_out_is_named(
    upstream: Upstream, tmp_path: Path
) -> None:
    upstream.execute("CREATE TABLE loglines (a INTEGER, b VARCHAR(20))")
    loglines = upstream.table("loglines")

    async def check_text(rules: str) -> str:
        source = create_source(configured(upstream, tmp_path, rules).database[0])
        try:
            return "; ".join(str(finding) for finding in await source.preflight() if finding.fatal)
        finally:
            await source.close()

    assert f'keys = {{"{loglines}"' in await check_text("")
    assert "no column 'z'" in await check_text(f'keys = {{"{loglines}" = ["a", "z"]}}')
    whole = await check_text('keys = {"*.loglines" = "*"}')
    if upstream.kind == "postgres":
        assert 'ALTER TABLE "public"."loglines" REPLICA IDENTITY FULL' in whole
    else:
        assert whole == ""


async def test_both_decoders_of_a_binlog_write_the_same_keys_with_nulls(
    mariadb_database: FreshDatabase,
) -> None:
    database = mariadb_database
    database.execute("CREATE TABLE loglines (a INTEGER, b VARCHAR(300), c BLOB)")
    config = DatabaseConfig.model_validate(
        {
            "name": "shop",
            "url": database.url,
            "sources": [f"{database.name}.*"],
            "keys": {"*.loglines": "*"},
        }
    )
    read = []
    for use_kernels in (True, False):
        source = await open_source(MySqlSource(config, use_kernels=use_kernels))
        try:
            if use_kernels:
                start = await source.first_scn()
                database.execute(
                    "INSERT INTO loglines VALUES (1, 'x', NULL), (NULL, NULL, NULL), "
                    "(2, '', ''), (-3, REPEAT('ż', 150), x'00')"
                )
                database.execute("UPDATE loglines SET b = NULL WHERE a = 1")
                database.execute("UPDATE loglines SET a = a")
                database.execute("DELETE FROM loglines")
            read.append(await read_to_end(source, start))
        finally:
            await source.close()
    assert bytes(read[0].data) == bytes(read[1].data)
    keys = [event.key for event in read[0].events()]
    assert keys[1] == {"a": None, "b": None, "c": None}
    assert keys[2] == {"a": 2, "b": "", "c": b""}


async def test_unchanged_toast_values_stay_marked_where_columns_are_hashed_or_left_out(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    upstream = server_upstream("postgres", postgres_database)
    execute = upstream.execute
    execute("CREATE TABLE docs (id int PRIMARY KEY, gone text, body text, plain text, n int)")
    for column in ("gone", "body", "plain"):
        execute(f"ALTER TABLE docs ALTER COLUMN {column} SET STORAGE EXTERNAL")
    rules = (
        f'exclude_columns = ["*.gone"]\nhash_columns = ["*.body", "*.docs.id"]\n'
        f'hash_salt = "{SALT}"\n'
    )
    async with running(configured(upstream, tmp_path, rules), tmp_path) as run:
        execute(
            "INSERT INTO docs VALUES (1, repeat('goneSECRET', 1000), repeat('bodySECRET', 1000), "
            "repeat('plain', 2000), 1)"
        )
        execute("UPDATE docs SET n = 2 WHERE id = 1")
        execute("DELETE FROM docs WHERE id = 1")
        await eventually(lambda: len(run.frames()) == 3, WAIT_S, poll_s=0.2)
        insert, update, delete = run.frames()
        registry = RegistryReader(run.folder / "schemas.jsonl")
        registry.refresh()
        schema = registry.schemas.by_fingerprint(update.schema_fp)
        assert schema.absent_names(update.absent) == ("body", "plain")
        assert schema.decode_row(insert.after or b"")["body"] == digest("bodySECRET" * 1000)
        assert schema.decode_key(delete.key) == {"id": digest("1")}
        assert insert.key == update.key == delete.key
        assert b"SECRET" not in run.everything()
