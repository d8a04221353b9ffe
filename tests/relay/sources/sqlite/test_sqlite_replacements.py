"""Rows that REPLACE removes through a second unique index, for which no trigger fires."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from databus.common.errors import PreflightFailed, UnsupportedChange
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from tests.support.opened_source import open_source
from tests.support.sqlite_source import Reader, config

TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b INT, c REAL);"
SHAPES = {
    "a column": TABLE.replace("TEXT", "TEXT UNIQUE"),
    "two indexes": TABLE
    + "CREATE UNIQUE INDEX ta ON t (a); CREATE UNIQUE INDEX tb ON t (b DESC, c)",
    "not case": TABLE.replace("TEXT", "TEXT COLLATE NOCASE UNIQUE"),
    "another collation": TABLE + "CREATE UNIQUE INDEX ta ON t (a COLLATE NOCASE)",
    "exact": TABLE.replace("TEXT", "TEXT COLLATE NOCASE")
    + "CREATE UNIQUE INDEX ta ON t (a COLLATE BINARY)",
    "partial": TABLE
    + "CREATE UNIQUE INDEX ta ON t (a) /* ) */ where (t.b > 2 or c is null) AND a <> ')'",
    "expression": TABLE
    + "CREATE UNIQUE INDEX ta ON t (substr(a || ',', 1, 1) desc, ((b % 3)) -- , (\n)",
    "key of texts": TABLE.replace("id INTEGER", "id TEXT").replace("a TEXT", "a TEXT UNIQUE"),
    "hidden rowid": TABLE.replace("id INTEGER", "id TEXT"),
    "key without case": TABLE.replace("id INTEGER", "id TEXT COLLATE NOCASE"),
    "without rowid": "CREATE TABLE t (id TEXT, a TEXT UNIQUE, b INT, c REAL, PRIMARY KEY (id, b))"
    "WITHOUT ROWID",
    "key without case and rowid": "CREATE TABLE t (id TEXT COLLATE NOCASE PRIMARY KEY, a TEXT, "
    "b INT, c REAL) WITHOUT ROWID",
    "defaults": TABLE.replace("TEXT", "TEXT NOT NULL DEFAULT 'A' UNIQUE"),
    "conflicts replace": TABLE.replace("TEXT", "TEXT UNIQUE ON CONFLICT REPLACE").replace(
        "INT,", "INT UNIQUE ON CONFLICT IGNORE,"
    ),
    "names": TABLE.replace("REAL", 'REAL, "NEW" INT, "t" INT')
    + """CREATE UNIQUE INDEX "t'a" ON "t" (a, coalesce("t", 1))""",
    "generated": TABLE.replace(
        "REAL", "REAL, g TEXT AS (substr(a, 1, 1)) STORED UNIQUE, h AS (b + 1)"
    )
    + "CREATE UNIQUE INDEX th ON t (h + 1) WHERE h > 3",
    "one row of some": TABLE + "CREATE UNIQUE INDEX ta ON t ((1)) WHERE b = 3",
    "one row": TABLE + "CREATE UNIQUE INDEX ta ON t ((1))",
    "own collation": TABLE.replace("TEXT, b INT", "TEXT COLLATE own UNIQUE, b INT UNIQUE"),
    "own collation of the key": TABLE.replace("id INTEGER", "id TEXT COLLATE own"),
    "own collation without rowid": "CREATE TABLE t (id TEXT, a TEXT COLLATE own UNIQUE, b INT, "
    "c REAL, PRIMARY KEY (id, b)) WITHOUT ROWID",
    "its own triggers": TABLE.replace("TEXT", "TEXT UNIQUE")
    + "CREATE TRIGGER more AFTER INSERT ON t WHEN NEW.b = 1 BEGIN "
    "INSERT OR REPLACE INTO t (id, a, b) VALUES (NEW.id + 1, 'B', 2); END",
}
STATEMENTS = (
    "INSERT OR REPLACE INTO t (id, a, b, c) VALUES ({id}, {a}, {b}, {c})",
    "REPLACE INTO t (id, a, b, c) VALUES ({id}, {a}, {b}, {c}), ({id}, {a}, {b}, {c})",
    "INSERT OR IGNORE INTO t (id, a, b, c) VALUES ({id}, {a}, {b}, {c}), ({id}, {a}, {b}, {c})",
    "INSERT INTO t (id, a, b, c) VALUES ({id}, {a}, {b}, {c})",
    "INSERT OR FAIL INTO t (id, a, b, c) VALUES ({id}, {a}, {b}, {c}), ({id}, {a}, {b}, {c})",
    "INSERT INTO t (id, a, b, c) VALUES ({id}, {a}, {b}, {c}) ON CONFLICT DO NOTHING",
    "INSERT INTO t (id, a, b, c) VALUES ({id}, {a}, {b}, {c}) ON CONFLICT DO UPDATE SET c = {c}",
    "UPDATE OR REPLACE t SET a = {a} WHERE b = {b}",
    "UPDATE OR REPLACE t SET b = {b}, c = {c}",
    "UPDATE OR REPLACE t SET id = {id}, a = {a} WHERE a = {a}",
    "UPDATE OR IGNORE t SET a = {a}",
    "UPDATE t SET c = {c} WHERE b = {b}",
    "DELETE FROM t WHERE a = {a}",
)
ROWIDS = (
    "INSERT OR REPLACE INTO t (rowid, id, a, b) VALUES ({b}, {id}, {a}, {b})",
    "UPDATE OR REPLACE t SET oid = {b} WHERE a = {a}",
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.db"


@pytest.fixture
def writer(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        define(connection)
        yield connection


def define(db: sqlite3.Connection) -> None:
    """What only the application has: a function and a collation."""
    db.create_function("fold", 1, lambda x: x and str(x).lower(), deterministic=True)
    db.create_collation("own", lambda a, b: (a.lower() > b.lower()) - (a.lower() < b.lower()))


def statement(random_: random.Random, forms: tuple[str, ...], is_text: bool) -> str:
    def value(_: str) -> str:
        number = random_.randrange(7)
        return random_.choice((f"'{'aAbBcC)'[number]}'", f"'{'aAbBcC)'[number]}'", "NULL"))

    def put(name: str) -> str:
        if name == "a" or (name == "id" and is_text):
            found = value(name)
            return "'a'" if name == "id" and found == "NULL" else found
        return str(random_.choice((*range(6), *range(6), "NULL" if name == "c" else 1)))

    form = random_.choice(forms)
    for name in ("id", "a", "b", "c"):
        while f"{{{name}}}" in form:
            form = form.replace(f"{{{name}}}", put(name), 1)
    return form


def applied(copy: dict[str, Any], events: list[tuple[Any, ...]]) -> None:
    """Apply events to a copy; each delete and update finds its row."""
    for op, _, key, before, after in events:
        if op == "c":
            copy[repr(key)] = after
            continue
        assert repr(key) in copy, (op, key, before, after)
        if op == "d":
            del copy[repr(key)]
        else:
            copy[repr(key)] = after


def rows(db: sqlite3.Connection) -> list[str]:
    names = [row[1] for row in db.execute("PRAGMA table_info(t)")]
    found = db.execute(f"SELECT {', '.join(map(log.quoted, names))} FROM t")
    return sorted(repr(list(zip(names, row, strict=True))) for row in found)


@pytest.mark.parametrize("is_recursive", [False, True], ids=["", "recursive"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_what_replace_removes_through_any_unique_index_is_deleted(
    path: Path, writer: sqlite3.Connection, shape: str, is_recursive: bool
) -> None:
    writer.executescript(SHAPES[shape])
    writer.execute(f"PRAGMA recursive_triggers = {is_recursive}")
    source = await open_source(SqliteSource(config(path)))
    reader = Reader(source, 1)
    copy: dict[str, Any] = {}
    random_ = random.Random(f"{shape} {is_recursive}")
    is_text = "id TEXT" in SHAPES[shape]
    forms = (*STATEMENTS, *(ROWIDS if is_text and "WITHOUT" not in SHAPES[shape] else ()))
    deleted = 0
    for _ in range(12):
        for _ in range(random_.randrange(1, 12)):
            is_grouped = random_.random() < 0.2
            if is_grouped:
                writer.execute("BEGIN")
            for _ in range(random_.randrange(1, 4) if is_grouped else 1):
                try:
                    writer.execute(statement(random_, forms, is_text))
                except sqlite3.IntegrityError:
                    continue
            if is_grouped:
                writer.execute(random_.choice(("COMMIT", "COMMIT", "ROLLBACK")))
        done = len(reader.frames)
        await reader.until(log.last_id(writer))
        events = [reader._event(view) for view in reader.frames[done:] if not view.is_control]
        applied(copy, events)
        deleted += sum(event[0] == "d" for event in events)
        held = sorted(repr(list(row.items())) for row in copy.values())
        assert held == rows(writer)
    assert deleted
    assert source.suspended() == {}
    await source.close()


@pytest.mark.parametrize(
    "migration",
    [
        "DROP INDEX th; ALTER TABLE t DROP COLUMN h; REPLACE INTO t VALUES (7, 'a', 7, 7)",
        "DROP INDEX ta; ALTER TABLE t DROP COLUMN a; INSERT INTO t VALUES (7, 7, 7)",
        "ALTER TABLE t RENAME COLUMN a TO d; INSERT OR REPLACE INTO t VALUES (7, 'a', 7, 7)",
        "ALTER TABLE t RENAME TO u; INSERT OR REPLACE INTO u VALUES (7, 'a', 7, 7);"
        "ALTER TABLE u RENAME TO t",
        "DROP INDEX ta; INSERT INTO t VALUES (7, 'a', 7, 7); UPDATE t SET a = id; "
        "CREATE UNIQUE INDEX tb ON t (b)",
        "ALTER TABLE t ADD COLUMN d; INSERT OR REPLACE INTO t VALUES (7, 'a', 7, 7, 7)",
    ],
)
@pytest.mark.parametrize("is_one", [True, False], ids=["in one transaction", ""])
async def test_migrations_of_an_indexed_table_never_fail(
    path: Path, writer: sqlite3.Connection, migration: str, is_one: bool
) -> None:
    definition = SHAPES["partial"].replace("where (t.b > 2 or c is null) AND", "where")
    writer.executescript(
        definition.replace("REAL", "REAL, h AS (b + 1)") + "\n; CREATE UNIQUE INDEX th ON t (h)"
        if "th;" in migration
        else definition
    )
    source = await open_source(SqliteSource(config(path)))
    await source.close()
    writer.execute("INSERT INTO t VALUES (1, 'a', 1, 1)")
    writer.executescript(f"BEGIN; {migration}; COMMIT" if is_one else migration)
    assert writer.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def candidates(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT count(*) FROM databus_log WHERE op = 'r'").fetchone()[0])


async def test_without_the_index_no_write_reads_the_table(
    path: Path, writer: sqlite3.Connection
) -> None:
    """The condition of a lookup is false, so that SQLite does not begin to look for rows."""
    writer.executescript(SHAPES["another collation"])
    source = await open_source(SqliteSource(config(path)))
    await source.close()
    writer.execute("INSERT INTO t VALUES (1, 'a', 1, 1)")
    writer.execute("INSERT OR IGNORE INTO t VALUES (2, 'A', 1, 1)")
    assert candidates(writer) == 1
    writer.execute("VACUUM")  # numbers the definitions again
    writer.execute("INSERT OR IGNORE INTO t VALUES (2, 'A', 1, 1)")
    assert candidates(writer) == 2
    writer.execute("DROP INDEX ta")
    writer.execute("INSERT OR IGNORE INTO t VALUES (2, 'A', 1, 1)")
    assert candidates(writer) == 2


@pytest.mark.parametrize(
    ("meanwhile", "is_suspended"),
    [
        ("CREATE UNIQUE INDEX ta ON t (a); REPLACE INTO t VALUES (3, 'a', 3, 3)", True),
        ("CREATE UNIQUE INDEX ta ON t (a)", False),
        (
            "BEGIN; CREATE UNIQUE INDEX ta ON t (a); REPLACE INTO t VALUES (3, 'a', 3, 3);"
            "DROP INDEX ta; COMMIT",
            True,
        ),
        (
            "BEGIN; CREATE UNIQUE INDEX ta ON t (a); REPLACE INTO t VALUES (3, 'a', 3, 3);"
            "DROP INDEX ta; ALTER TABLE t RENAME COLUMN a TO d; COMMIT",
            True,
        ),
        (
            "BEGIN; CREATE INDEX ta ON t (a); ALTER TABLE u ADD COLUMN b; "
            "REPLACE INTO t VALUES (3, 'a', 3, 3); COMMIT",
            False,
        ),
        (
            "BEGIN; CREATE TABLE v (id INTEGER PRIMARY KEY, c INT); INSERT INTO v VALUES (9, 9); "
            "DROP TABLE u; ALTER TABLE v RENAME TO u; CREATE INDEX ui ON u (c); "
            "INSERT INTO t VALUES (3, 'c', 3, 3); COMMIT",
            False,
        ),
    ],
)
async def test_a_unique_index_that_was_made_meanwhile_suspends_the_table_if_it_was_written(
    path: Path, writer: sqlite3.Connection, meanwhile: str, is_suspended: bool
) -> None:
    writer.executescript(TABLE + "CREATE TABLE u (id INTEGER PRIMARY KEY, c INT);")
    writer.executescript("CREATE INDEX ui ON u (c); INSERT INTO t VALUES (1, 'a', 1, 1)")
    source = await open_source(SqliteSource(config(path)))
    writer.execute("INSERT INTO t VALUES (2, 'b', 2, 2)")
    await Reader(source, 1).until(log.last_id(writer))
    await source.close()
    writer.executescript(meanwhile)
    writer.execute("DELETE FROM t WHERE id = 2")
    again = SqliteSource(config(path))
    again.restore("", None, 2)
    await again.open()
    await Reader(again, 2).until(log.last_id(writer))
    assert ("main.t" in again.suspended()) is is_suspended
    assert not any(stop.rows_remain for stop in again.suspended().values())
    await again.close()


@pytest.mark.parametrize(
    "beside",
    [
        "CREATE TABLE gone (id INTEGER PRIMARY KEY, d INT, e INT)",
        "ALTER TABLE u DROP COLUMN c; ALTER TABLE u ADD COLUMN c INT",
        "DROP TABLE u; CREATE TABLE u (id INTEGER PRIMARY KEY, c INT); CREATE INDEX uj ON u (c)",
        "DROP TABLE u; ALTER TABLE w RENAME TO u",
        "DROP TABLE words",
        "ALTER TABLE words RENAME TO other_words",
    ],
)
async def test_a_brief_unique_index_is_not_hidden_by_other_definitions_that_changed(
    path: Path, writer: sqlite3.Connection, beside: str
) -> None:
    writer.executescript(
        TABLE + "CREATE TABLE u (id INTEGER PRIMARY KEY, c INT, d INT, e INT);"
        "CREATE TABLE gone (id INTEGER PRIMARY KEY, b INT, c INT);"
        "CREATE TABLE w (id INTEGER PRIMARY KEY, c INT);"
        "CREATE VIRTUAL TABLE words USING fts5(word);"
        "INSERT INTO u VALUES (1, 1, 1, 1); INSERT INTO t VALUES (1, 'a', 1, 1);"
    )
    source = await open_source(SqliteSource(config(path)))
    writer.execute("INSERT INTO t VALUES (2, 'b', 2, 2)")
    reader = Reader(source, 1)
    await reader.until(log.last_id(writer))
    writer.executescript("DROP TABLE gone; INSERT INTO t VALUES (4, 'd', 4, 4)")
    await reader.until(position := log.last_id(writer))
    await source.close()
    writer.executescript(
        "CREATE UNIQUE INDEX ta ON t (a); REPLACE INTO t VALUES (3, 'a', 3, 3); DROP INDEX ta;"
        + beside
    )
    again = SqliteSource(config(path))
    again.restore("", None, position)
    await again.open()
    await Reader(again, position).until(log.last_id(writer))
    assert not again.suspended()["main.t"].rows_remain
    await again.close()


async def test_replaced_rows_of_a_large_window_are_the_same_after_a_restart(
    path: Path, writer: sqlite3.Connection
) -> None:
    writer.executescript(SHAPES["a column"])
    source = await open_source(SqliteSource(config(path)))
    await Reader(source, 1).until(1)
    writer.execute("BEGIN")
    writer.execute("INSERT INTO t VALUES (0, 'first', 0, 0)")
    writer.execute("INSERT OR REPLACE INTO t VALUES (1, 'first', 0, 0)")
    for number in range(2, 9000):
        writer.execute("INSERT INTO t VALUES (?, ?, 0, 0)", (number, f"{number:0>300}"))
    writer.execute("COMMIT")
    last = log.last_id(writer)
    first = await anext(source.stream(1))
    writer.execute("INSERT INTO t VALUES (0, 'again', 0, 0)")
    await source.close()
    again = await open_source(SqliteSource(config(path)))
    reader = Reader(again, 1)
    copy: dict[str, Any] = {}
    applied(copy, await reader.until(last))
    assert copy.keys() == {repr({"id": number}) for number in range(1, 9000)}
    assert b"".join(bytes(view.bytes) for view in reader.frames).startswith(first.data)
    await again.close()


async def test_rows_of_a_statement_that_ended_early_come_at_once_and_their_ids_stay_theirs(
    path: Path, writer: sqlite3.Connection
) -> None:
    """SQLite has not recorded the id of the last one in ``sqlite_sequence`` then."""
    writer.executescript(TABLE)
    source = await open_source(SqliteSource(config(path)))
    with pytest.raises(sqlite3.IntegrityError):
        writer.execute("INSERT OR FAIL INTO t VALUES (1, 'a', 1, 1), (1, 'b', 2, 2)")
    reader = Reader(source, 1)
    assert [event[2] for event in await reader.until(2)] == [{"id": 1}]
    writer.execute("DELETE FROM databus_log")
    log.delete_upto(writer, 2)
    writer.execute("INSERT INTO t VALUES (2, 'b', 2, 2)")
    assert [event[2] for event in await reader.until(3)] == [{"id": 1}, {"id": 2}]
    await source.close()


UNREADABLE = {
    "function": TABLE + "CREATE UNIQUE INDEX ta ON t (fold(a))",
    "function in a condition": TABLE + "CREATE UNIQUE INDEX ta ON t (b) WHERE fold(a) = 'a'",
    "collation": TABLE + "CREATE UNIQUE INDEX ta ON t (a COLLATE own)",
    "column's collation": TABLE.replace("TEXT", "TEXT COLLATE own")
    + "CREATE UNIQUE INDEX ta ON t (a)",
    "key without rowid": TABLE.replace("id INTEGER", "id TEXT COLLATE own").replace(
        ");", ") WITHOUT ROWID;"
    ),
    "generated": TABLE.replace("REAL", "REAL, g AS (fold(a))") + "CREATE UNIQUE INDEX ta ON t (g)",
}
PLAIN = (
    "INSERT INTO t (id, a, b, c) VALUES (7, 'g', 7, 7)",
    "UPDATE t SET c = 4 WHERE b = 1",
    "UPDATE t SET b = 4 WHERE c = 4",
    "UPDATE t SET a = 'd' WHERE b = 4",
    "UPDATE t SET id = 4 WHERE b = 4",
    "ALTER TABLE t RENAME COLUMN b TO e",
    "ALTER TABLE u RENAME TO v",
    "DROP INDEX ta",
    "INSERT INTO t (id, a) VALUES (8, 'A')",
    "UPDATE t SET a = 'e' WHERE c = 4",
    "INSERT OR REPLACE INTO t (id, a, c) VALUES (9, 'f', 9)",
    "ALTER TABLE t DROP COLUMN c",
    "DELETE FROM t WHERE id = 2",
    "ALTER TABLE t RENAME TO w",
    "VACUUM",
)


def outcomes(path: Path) -> list[str]:
    """What a connection without the function and the collation can do."""
    found = []
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for text in PLAIN:
            try:
                db.execute(text)
                found.append(f"{text}: done")
            except sqlite3.OperationalError as error:
                found.append(f"{text}: {error}")
    return found


@pytest.mark.parametrize(
    "shape", [*UNREADABLE, *(name for name in SHAPES if name.startswith("own"))]
)
async def test_a_connection_without_the_function_or_collation_can_do_what_it_could(
    path: Path, shape: str
) -> None:
    found = []
    for name, is_captured in (("alone.db", False), ("captured.db", True)):
        path = path.with_name(name)
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:
            define(writer)
            writer.executescript((UNREADABLE | SHAPES)[shape])
            writer.executescript("; CREATE TABLE u (id INTEGER PRIMARY KEY)")
            writer.execute("INSERT INTO t (id, a, b, c) VALUES (1, 'a', 1, 1), (2, 'b', 2, 2)")
        if is_captured:
            source = SqliteSource(config(path))
            source.restore("", None, 1)
            await source.open()
            await source.close()
        found.append(outcomes(path))
    assert found[0] == found[1]
    assert any("done" in outcome for outcome in found[0])


@pytest.mark.parametrize("shape", UNREADABLE)
async def test_a_table_with_an_index_that_the_relay_cannot_read_is_named_and_left_out(
    path: Path, writer: sqlite3.Connection, shape: str
) -> None:
    writer.executescript(UNREADABLE[shape])
    (found,) = await SqliteSource(config(path)).preflight()
    assert (found.table, found.fatal) == ("main.t", True)
    assert "only the application has" in found.problem
    with pytest.raises(PreflightFailed, match="recursive_triggers = true"):
        await SqliteSource(config(path)).open()
    source = SqliteSource(config(path))
    source.restore("", None, 1)
    await source.open()
    assert await source.schemas() == []
    assert "only the application has" in str((await source.status())["warnings"])
    with pytest.raises(UnsupportedChange, match="only the application has"):
        await source.read_chunk(ChunkRequest("main.t", 10))
    await source.close()


async def test_if_every_writer_sets_recursive_triggers_a_brief_index_suspends_nothing(
    path: Path, writer: sqlite3.Connection
) -> None:
    writer.executescript(TABLE + "PRAGMA recursive_triggers = ON")
    source = await open_source(SqliteSource(config(path, recursive_triggers=True)))
    await source.close()
    writer.executescript("CREATE UNIQUE INDEX ta ON t (a); INSERT INTO t VALUES (1, 'a', 1, 1)")
    writer.executescript("REPLACE INTO t VALUES (2, 'a', 2, 2); DROP INDEX ta")
    source = SqliteSource(config(path, recursive_triggers=True))
    source.restore("", None, 1)
    await source.open()
    copy: dict[str, Any] = {}
    applied(copy, await Reader(source, 1).until(log.last_id(writer)))
    assert copy.keys() == {repr({"id": 2})}
    await source.close()


@pytest.mark.parametrize("shape", [name for name in UNREADABLE if "key" not in name])
async def test_if_every_writer_sets_recursive_triggers_any_index_is_followed(
    path: Path, writer: sqlite3.Connection, shape: str
) -> None:
    writer.executescript(UNREADABLE[shape])
    writer.execute("PRAGMA recursive_triggers = ON")
    source = SqliteSource(config(path, recursive_triggers=True))
    assert await source.preflight() == []
    await source.open()
    writer.execute("INSERT INTO t (id, a, b) VALUES (1, 'a', 1)")
    writer.execute("REPLACE INTO t (id, a, b) VALUES (2, 'A', 1)")
    assert candidates(writer) == 0
    copy: dict[str, Any] = {}
    applied(copy, await Reader(source, 1).until(log.last_id(writer)))
    assert copy.keys() == {repr({"id": 2})}
    await source.close()


async def test_if_every_writer_sets_recursive_triggers_a_legacy_rename_fails_no_write(
    path: Path, writer: sqlite3.Connection
) -> None:
    writer.executescript(SHAPES["a column"])
    source = await open_source(SqliteSource(config(path, recursive_triggers=True)))
    await source.close()
    writer.executescript("PRAGMA legacy_alter_table = ON; ALTER TABLE t RENAME TO u")
    writer.execute("REPLACE INTO u VALUES (1, 'a', 1, 1)")
    writer.execute("UPDATE u SET a = 'b'")


@pytest.mark.parametrize("end", ["", "WITHOUT ROWID"])
async def test_a_collation_of_the_application_holds_up_no_stream_when_definitions_change(
    path: Path, writer: sqlite3.Connection, end: str
) -> None:
    """Definitions that appear and disappear have the relay look at the last column's values."""
    columns = "id INTEGER PRIMARY KEY, b TEXT, a TEXT COLLATE own UNIQUE"
    writer.execute(f"CREATE TABLE t ({columns}) {end}")
    source = await open_source(SqliteSource(config(path)))
    writer.execute("INSERT INTO t VALUES (1, 'b', 'a')")
    await source.close()
    writer.executescript("CREATE VIEW v AS SELECT 1; DROP VIEW v")
    source = SqliteSource(config(path))
    source.restore("", None, 2)
    await source.open()
    writer.execute("INSERT INTO t VALUES (2, 'b', 'b')")
    assert len(await Reader(source, 2).until(log.last_id(writer))) == 1
    assert source.suspended() == {}
    assert (await source.table_size("main.t")).rows == 2
    assert len(list((await source.read_chunk(ChunkRequest("main.t", 9))).rows)) == 2
    await source.close()


async def test_a_table_whose_key_has_a_collation_of_the_application_is_dumped(
    path: Path, writer: sqlite3.Connection
) -> None:
    writer.executescript(SHAPES["own collation of the key"])
    source = await open_source(SqliteSource(config(path)))
    keys = ["B", "a", "c", "D"]
    for key in keys:
        writer.execute("INSERT INTO t (id) VALUES (?)", (key,))
    found: list[str] = []
    chunk = await source.read_chunk(ChunkRequest("main.t", 2))
    while True:
        found += [chunk.schema.decode_row(row.row)["id"] for row in chunk.rows]
        if chunk.done:
            break
        chunk = await source.read_chunk(ChunkRequest("main.t", 2, after=chunk.last_key))
    assert sorted(found) == sorted(keys)
    some = await source.read_chunk(ChunkRequest("main.t", 9, keys=[["a"], ["A"]]))
    assert (len(list(some.rows)), some.missing) == (1, [["A"]])
    assert await source.largest_key("main.t") is not None
    await source.close()
