"""A table whose changes cannot be known is suspended alone, by name, and resynchronised."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import Op, iter_frames
from databus.relay.processes.fetcher import Fetcher
from databus.relay.ring.data_folder import SocketName
from databus.relay.sources.contract import Transaction
from databus.relay.sources.mysql import MySqlSource
from tests.support.capture import (
    capturing,
    database_config,
    failed_with,
    stored_resume_state,
    streaming,
    upserted,
)
from tests.support.fixtures import FreshDatabase
from tests.support.mariadb_stream import mariadb_config, read_to_end
from tests.support.opened_source import opened_scn
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HIDING = [
    ("SET binlog_row_image = MINIMAL", "binlog_row_image other than FULL"),
    ("SET binlog_format = STATEMENT", "by a statement instead of rows"),
]

# Types that are not supported, and the reason of the suspension.
UNREAD = {
    "mariadb": ("VARCHAR(100) COMPRESSED", "w has the binlog type 141 (VARCHAR COMPRESSED)"),
    "mysql": ("VARCHAR(100) CHARACTER SET gb18030", "the character set gb18030 cannot be decoded"),
}


def session(database: FreshDatabase, *statements: str) -> None:
    connection = database.server.connect(database.name)
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
    finally:
        connection.close()


def rows_of(folder: Path, source: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """A table as a consumer has it that takes the last event of each row."""
    return upserted(folder, source)[0]


def in_database(database: FreshDatabase, table: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (number,): {"id": number, "v": v}
        for number, v in database.execute(f"SELECT id, v FROM {table}")
    }


def equality(database: FreshDatabase, folder: Path) -> Callable[[str], bool]:
    """A function that checks whether the ring has of a table what the database has."""
    namespace = "public" if database.server.product == "postgres" else database.name

    def equal(table: str) -> bool:
        return rows_of(folder, f"{namespace}.{table}") == in_database(database, table)

    return equal


async def streamed_again(fetcher: Fetcher, is_equal: Callable[[], bool]) -> None:
    """Return when a table's changes are in the ring, and the status warns of no table."""
    await eventually(is_equal, 60, "its changes are streamed again")
    await eventually(lambda: not fetcher.status.source.get("warnings"), 60)


def create(database: FreshDatabase, *tables: str) -> None:
    """Tables of a key and a value."""
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")


def relay_of(
    database: FreshDatabase, tmp_path: Path
) -> tuple[DatabaseConfig, Path, Callable[[str], bool]]:
    """The configuration of a relay of the database, its folder, and the ``equality`` of both."""
    folder = tmp_path / "shop"
    config = database_config("shop", database.url, f"{database.name}.*")
    return config, folder, equality(database, folder)


def make_unreadable(database: FreshDatabase) -> None:
    """Rows in ``calm``, in ``odd`` before and after it cannot be read, and in one without a key."""
    unread, _ = UNREAD[database.server.product]
    database.execute("CREATE TABLE keyless (id INT NOT NULL, v INT)")
    database.execute("INSERT INTO keyless VALUES (1, 1)")
    database.execute("INSERT INTO odd VALUES (1, 1)")
    database.execute(f"ALTER TABLE odd ADD COLUMN w {unread}")
    database.execute("INSERT INTO odd VALUES (2, 2, 'w')")
    database.execute("INSERT INTO calm VALUES (1, 1)")


async def both_are_named(database: FreshDatabase, fetcher: Fetcher, folder: Path) -> None:
    """``make_unreadable`` is found: the status has both reasons, the ring what came before."""
    keyless, odd = (f"{database.name}.{table}" for table in ("keyless", "odd"))
    _, why = UNREAD[database.server.product]
    await eventually(lambda: "no primary key" in warned_of(fetcher, keyless), 60)
    await eventually(lambda: why in warned_of(fetcher, odd), 60)
    assert list(rows_of(folder, odd)) == [(1,)]


async def dump(folder: Path, source: str, *, ends: str = "completed") -> None:
    with SocketName(folder / "fetcher.sock") as name:
        connector = aiohttp.UnixConnector(path=name.path)
        async with aiohttp.ClientSession(connector=connector) as http:
            async with http.post("http://fetcher/dumps", json={"sources": [source]}) as answer:
                document = await answer.json(content_type=None)
                assert answer.status == 202, document
                number = document["id"]

            async def ended() -> bool:
                async with http.get(f"http://fetcher/dumps/{number}") as answer:
                    document = await answer.json(content_type=None)
                assert document["state"] in (ends, "pending", "running"), document["error"]
                return bool(document["state"] == ends)

            await eventually(ended, 60, f"the dump is {ends}")


def warned_of(fetcher: Fetcher, source: str, what: str = "is suspended") -> str:
    """The warning in the status about a table."""
    warnings = fetcher.status.source.get("warnings") or []
    return next((text for text in warnings if text.startswith(f"{source} {what}")), "")


async def test_a_suspended_table_that_cannot_be_read_any_more_is_named_with_that_reason(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v INT)")
    source = f"{database.name}.t"
    config = database_config("shop", database.url, f"{database.name}.*")
    config = config.model_copy(update={"resync": "auto"})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        hidden = HIDING[1][0], "INSERT INTO t VALUES (1, 1)"
        session(database, *hidden, "ALTER TABLE t DROP PRIMARY KEY", "INSERT INTO t VALUES (2, 2)")

        async def is_named() -> bool:
            reasons = {one["source"]: one["reason"] for one in fetcher.tables.document()}
            return "failed: " in reasons.get(source, "") and "has no primary key" in reasons[source]

        await eventually(is_named, 60, "the reason")


@pytest.mark.parametrize(("setting", "named"), HIDING)
async def test_a_table_whose_changes_were_hidden_is_suspended_alone_and_a_dump_resumes_it(
    database: FreshDatabase, tmp_path: Path, setting: str, named: str
) -> None:
    create(database, "calm", "hidden")
    config, folder, equal = relay_of(database, tmp_path)
    calm, hidden = (f"{database.name}.{table}" for table in ("calm", "hidden"))

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO hidden VALUES (1, 1), (2, 2)")
        session(database, setting, "UPDATE hidden SET v = 5 WHERE id = 1")
        database.execute("INSERT INTO hidden VALUES (3, 3)")
        database.execute("INSERT INTO calm VALUES (1, 1)")
        await eventually(lambda: equal("calm"), 60, "the other table continues")
        assert rows_of(folder, hidden) == {(1,): {"id": 1, "v": 1}, (2,): {"id": 2, "v": 2}}
        await eventually(lambda: named in warned_of(fetcher, hidden), 60)
        assert not warned_of(fetcher, calm)
        await eventually(lambda: hidden in stored_resume_state(fetcher), 60)
    # It is not forgotten over a restart, and delays no other table.
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO hidden VALUES (4, 4)")
        database.execute("INSERT INTO calm VALUES (2, 2)")
        await eventually(lambda: equal("calm"), 60, "the other table continues")
        await eventually(lambda: named in warned_of(fetcher, hidden), 60)
        assert (4,) not in rows_of(folder, hidden)
        await dump(folder, hidden)
        await eventually(lambda: equal("hidden"), 60, "the dump has brought its rows")
        database.execute("UPDATE hidden SET v = v + 10")
        await streamed_again(fetcher, lambda: equal("hidden"))


async def test_a_suspension_outlives_a_kill_right_behind_the_window_that_it_was_found_in(
    database: FreshDatabase,
) -> None:
    create(database, "calm", "hidden")
    config, hidden = mariadb_config(database.url, f"{database.name}.*"), f"{database.name}.hidden"
    source = MySqlSource(config)
    first = await opened_scn(source)
    session(
        database, "SET binlog_format = STATEMENT", "INSERT INTO hidden VALUES (1, 1)",
        "SET binlog_format = ROW", "INSERT INTO calm VALUES (1, 1)",
    )  # fmt: skip
    stored_state, ring = "", b""
    async with contextlib.aclosing(source.stream(first)) as stream:
        async for batch in stream:
            ring += batch.data
            if ring:
                break  # Killed: of the resume state only what was stored outlives it.
            if batch.persist_first and batch.resume_state is not None:
                stored_state = batch.resume_state.encode()
    await source.close()
    (end,) = [view for view in iter_frames(ring) if view.op == Op.END_OF_WINDOW]
    last = Transaction(end.scn, bytes(end.key).decode(), end.commit_us)
    again = MySqlSource(config)
    again.restore(stored_state, last, end.scn)
    await again.open()
    session(database, "INSERT INTO hidden VALUES (2, 2)", "INSERT INTO calm VALUES (2, 2)")
    streamed = await read_to_end(again, end.scn)
    assert {event.source for event in streamed.events()} == {f"{database.name}.calm"}
    assert hidden in (await again.status())["stopped_tables"]
    await again.close()


async def test_a_table_that_becomes_unreadable_is_suspended_alone(
    database: FreshDatabase, tmp_path: Path
) -> None:
    create(database, "calm", "odd")
    config, folder, equal = relay_of(database, tmp_path)
    keyless, odd = (f"{database.name}.{table}" for table in ("keyless", "odd"))

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        make_unreadable(database)
        await eventually(lambda: equal("calm"), 60, "the other table continues")
        await both_are_named(database, fetcher, folder)
        await eventually(
            lambda: keyless in stored_resume_state(fetcher) and odd in stored_resume_state(fetcher),
            60,
        )
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)  # Its preflight names the tables, and refuses nothing.
        database.execute("ALTER TABLE keyless ADD PRIMARY KEY (id)")
        database.execute("INSERT INTO keyless VALUES (2, 2)")
        await eventually(
            lambda: keyless in fetcher.known_sources(), 60, "its new form is announced"
        )
        await dump(folder, keyless)
        await eventually(lambda: equal("keyless"), 60, "the dump has brought its rows")
        database.execute("DELETE FROM keyless WHERE id = 1")
        await eventually(lambda: equal("keyless"), 60, "its changes are streamed")
        database.execute("ALTER TABLE odd DROP COLUMN w")
        await dump(folder, odd)
        database.execute("UPDATE odd SET v = v + 10")
        await eventually(lambda: equal("odd"), 60, "its changes are streamed")


async def test_a_table_that_became_unreadable_while_the_relay_was_away_suspends_no_other(
    database: FreshDatabase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create(database, "calm", "odd")
    config, folder, equal = relay_of(database, tmp_path)
    keyless, odd, blank = (f"{database.name}.{table}" for table in ("keyless", "odd", "blank"))

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
    database.execute("CREATE TABLE blank (id INT NOT NULL, v INT)")
    make_unreadable(database)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: equal("calm"), 60, "the other table continues")
        await both_are_named(database, fetcher, folder)
        # Of a table without rows there is nothing to stop, but it is named all the same.
        assert "ADD PRIMARY KEY" in warned_of(fetcher, blank, "cannot be captured")
        assert f"ALTER TABLE {blank} ADD PRIMARY KEY" in caplog.text
        database.execute("ALTER TABLE keyless ADD PRIMARY KEY (id)")
        database.execute("ALTER TABLE blank ADD PRIMARY KEY (id)")
        database.execute("INSERT INTO blank VALUES (1, 1)")
        await eventually(lambda: equal("blank"), 60, "it joins without a restart")
        await dump(folder, keyless)
        await eventually(lambda: equal("keyless"), 60, "the dump has brought its rows")
        refused = "cannot be captured"
        await eventually(lambda: not warned_of(fetcher, blank, refused), 60, "it is fixed")
    # A first start with such tables is refused as ever: no reader has been notified of them.
    async with capturing(config, tmp_path / "other") as fetcher:
        message = await failed_with(fetcher, "preflight_failed")
        assert odd in message


async def test_a_table_without_a_key_made_while_the_relay_was_away_suspends_no_other_on_postgresql(
    postgres_database: FreshDatabase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    db, folder = postgres_database, tmp_path / "shop"
    create(db, "calm", "odd")
    config = database_config("shop", db.url, "public.*", discover_every=0.05)
    equal = equality(db, folder)

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
    db.execute("CREATE TABLE keyless (id int NOT NULL, v int)")
    db.execute("INSERT INTO keyless VALUES (1, 1)")
    db.execute("INSERT INTO odd VALUES (1, 1)")
    db.execute("ALTER TABLE odd DROP CONSTRAINT odd_pkey")
    db.execute("INSERT INTO odd VALUES (2, 2)")
    db.execute("INSERT INTO calm VALUES (1, 1)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: equal("calm"), 60, "the other table continues")
        await eventually(lambda: "no key" in warned_of(fetcher, "public.odd"), 60)
        assert rows_of(folder, "public.odd") == {}, "suspended at the start"
        warning = warned_of(fetcher, "public.keyless", "cannot be captured")
        assert 'ALTER TABLE "public"."keyless" ADD PRIMARY KEY' in warning
        assert 'ALTER TABLE "public"."keyless" ADD PRIMARY KEY' in caplog.text
        # Dumping does not help while nothing distinguishes its rows.
        await dump(folder, "public.odd", ends="failed")
        db.execute("ALTER TABLE odd ADD PRIMARY KEY (id)")
        db.execute("ALTER TABLE keyless ADD PRIMARY KEY (id)")
        await eventually(lambda: '"public.keyless"' in stored_resume_state(fetcher), 60, "a look")
        # What was passed over is not forgotten only because the table has a key again.
        db.execute("INSERT INTO odd VALUES (3, 3)")
        db.execute("INSERT INTO keyless VALUES (2, 2)")
        # It had rows when it joined.
        await eventually(lambda: "public.keyless" in fetcher.known_sources(), 60, "it is known")
        await dump(folder, "public.keyless")
        await eventually(lambda: equal("keyless"), 60)
        assert rows_of(folder, "public.odd") == {}, "suspended at the start"
        await dump(folder, "public.odd")
        db.execute("UPDATE odd SET v = v + 10")
        await streamed_again(fetcher, lambda: equal("odd"))


async def test_a_value_that_cannot_be_captured_suspends_its_table_alone_on_sqlite(
    tmp_path: Path,
) -> None:
    path, folder = tmp_path / "shop.db", tmp_path / "shop"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for table in ("calm", "odd"):
            db.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, v TEXT)")
        config = database_config("shop", f"sqlite:///{path}", "main.*")
        odd, broken = "main.odd", "CAST(x'61ff' AS TEXT)"

        def equal(table: str) -> bool:
            rows = db.execute(f"SELECT id, v FROM {table}").fetchall()
            found = rows_of(folder, f"main.{table}")
            return found == {(id_,): {"id": id_, "v": v} for id_, v in rows}

        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            db.execute("INSERT INTO odd VALUES (1, 'a')")
            await eventually(lambda: equal("odd"), 60)
            db.execute(f"INSERT INTO odd VALUES (2, {broken})")
            db.execute("INSERT INTO odd VALUES (3, 'c')")
            db.execute("INSERT INTO calm VALUES (1, 'a')")
            await eventually(lambda: equal("calm"), 60, "the other table continues")
            await eventually(lambda: "column 'v' is not UTF-8" in warned_of(fetcher, odd), 60)
            await eventually(lambda: odd in stored_resume_state(fetcher), 60)
            since = json.loads(stored_resume_state(fetcher))["stopped"][odd][0]
        db.execute("CREATE TABLE keyless (v INT)")
        db.execute("INSERT INTO odd VALUES (4, 'd')")
        db.execute("INSERT INTO calm VALUES (2, 'b')")
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            await eventually(lambda: equal("calm"), 60, "the other table continues")
            await eventually(lambda: "column 'v' is not UTF-8" in warned_of(fetcher, odd), 60)
            assert "PRIMARY KEY" in warned_of(fetcher, "main.keyless", "cannot be captured")
            await dump(folder, odd, ends="failed")
            db.execute("INSERT INTO odd VALUES (5, 'e')")
            db.execute("INSERT INTO calm VALUES (3, 'c')")
            await eventually(lambda: equal("calm"), 60, "the other table continues")
            assert list(rows_of(folder, odd)) == [(1,)]
            # It has not been whole since it was suspended first, whatever was tried.
            assert json.loads(stored_resume_state(fetcher))["stopped"][odd][0] == since
            db.execute("UPDATE odd SET v = 'b' WHERE id = 2")
            await dump(folder, odd)
            await eventually(lambda: equal("odd"), 60, "the dump has brought its rows")
            db.execute("DROP TABLE keyless")
            db.execute("UPDATE odd SET v = v || 'x'")
            await streamed_again(fetcher, lambda: equal("odd"))


async def test_a_value_that_cannot_be_captured_suspends_its_table_alone_on_postgresql(
    postgres_database: FreshDatabase, tmp_path: Path
) -> None:
    db, folder = postgres_database, tmp_path / "shop"
    for table in ("calm", "days", "late"):
        db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v date)")
    config = database_config("shop", db.url, "public.calm", "public.days")
    published = "SELECT count(*) FROM pg_publication_tables WHERE tablename = 'late'"
    equal = equality(db, folder)

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.transaction(
            "INSERT INTO days VALUES (1, '2024-01-01')",
            "INSERT INTO calm VALUES (1, '2024-01-01')",
            "INSERT INTO days VALUES (2, 'infinity'), (3, '2024-01-03')",
            "INSERT INTO calm VALUES (2, '2024-01-02')",
        )
        db.execute("TRUNCATE days, calm")
        db.execute("INSERT INTO days VALUES (2, 'infinity')")
        db.execute("INSERT INTO calm VALUES (3, '2024-01-03')")
        await eventually(lambda: (3,) in rows_of(folder, "public.calm"), 60, "the other continues")
        assert list(rows_of(folder, "public.days")) == [(1,)]
        await eventually(lambda: "public.days.v (date)" in warned_of(fetcher, "public.days"), 60)
        assert fetcher.status.source["stopped_tables"].keys() == {"public.days"}
        assert "public.days" in stored_resume_state(fetcher)
        assert db.execute(published) == [(0,)]
    # What a reload does: another fetcher continues, with one table more, which it publishes.
    config = database_config("shop", db.url, "public.*")
    # The suspended one is not forgotten, and is followed again only once all of it can be read.
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO late VALUES (1, '2024-01-01')")
        await eventually(lambda: equal("late"), 60, "the new table joins")
        db.execute("INSERT INTO days VALUES (4, '2024-01-04')")
        db.execute("INSERT INTO calm VALUES (4, '2024-01-04')")
        await eventually(lambda: (4,) in rows_of(folder, "public.calm"), 60, "the other continues")
        await dump(folder, "public.days", ends="failed")
        db.execute("INSERT INTO days VALUES (5, '2024-01-05')")
        db.execute("INSERT INTO calm VALUES (5, '2024-01-05')")
        await eventually(lambda: (5,) in rows_of(folder, "public.calm"), 60, "the other continues")
        assert list(rows_of(folder, "public.days")) == [(1,)]
        await eventually(lambda: "infinity" in warned_of(fetcher, "public.days"), 60)
        db.execute("UPDATE days SET v = '2024-01-02' WHERE id = 2")
        db.execute("INSERT INTO days VALUES (1, '2024-01-01')")
        await dump(folder, "public.days")
        await eventually(lambda: equal("days"), 60, "the dump has brought its rows")
        db.execute("UPDATE days SET v = v + 10")
        await streamed_again(fetcher, lambda: equal("days"))
