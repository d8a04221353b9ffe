"""The triggers of an SQLite file: what they log, both ways to create them, and older texts."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from databus.relay.sources.configured_keys import NO_KEYS
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite import sqlite_tables
from databus.relay.sources.sqlite import sqlite_triggers as triggers
from databus.relay.sources.sqlite.sqlite_tables import REBUILT, CapturedTables

NOW = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
DECLARED = (
    "",
    "TEXT",
    "VARCHAR(9)",
    "CLOB",
    "POINT",
    "INT",
    "REAL",
    "BLOB",
    "DECIMAL",
    "\u017fTEXT",
)
VALUES = (None, 7, 1.5, 0.1 + 0.2, 1e300, "x", "1.50", b"", b"\x00\xff")
HOSTILE = ('a"b', "it's", "select", "h\u00f6he", "tab\tle", "_")

Database = Callable[[str], sqlite3.Connection]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Opens new databases with a log and these definitions, by file name."""
    with contextlib.ExitStack() as opened:

        def create(name: str, *definitions: str) -> sqlite3.Connection:
            (tmp_path / name).touch()
            db = opened.enter_context(contextlib.closing(log.connect(str(tmp_path / name))))
            log.install(db)
            for definition in definitions:
                db.execute(definition)
            return db

        yield create


def path_of(db: sqlite3.Connection) -> str:
    return str(db.execute("PRAGMA database_list").fetchone()[2])


def bring_in_step(db: sqlite3.Connection, *, position: int = 0) -> CapturedTables:
    tables = CapturedTables(lambda _: True, NO_KEYS)
    tables.resumes = True
    while not tables.refresh(db, position):
        pass
    return tables


def created(db: sqlite3.Connection) -> dict[str, str]:
    return {trigger.name: trigger.text for trigger in triggers.ours(db)}


@pytest.fixture
def written_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_tables, "_MANY", 0)


def test_the_log_has_every_value_exactly_whatever_type_its_column_declares(
    database: Database,
) -> None:
    columns = ", ".join(f"c{at} {declared}" for at, declared in enumerate(DECLARED))
    db = database("shop.db", f"CREATE TABLE t (id INTEGER PRIMARY KEY, {columns})")
    bring_in_step(db)
    for value in VALUES:
        placeholders = ", ".join("?" * len(DECLARED))
        db.execute(f"INSERT INTO t VALUES (NULL, {placeholders})", (value,) * len(DECLARED))
    held = [list(row) for row in db.execute("SELECT * FROM t ORDER BY id")]
    logged = [log.parse_row(new) for (new,) in db.execute("SELECT new FROM databus_log")]
    assert list(map(repr, logged)) == list(map(repr, held))


def test_only_columns_that_sqlite_stores_as_text_are_logged_without_a_case_for_numbers() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        db.execute(f"CREATE TABLE t ({', '.join(f'c{i} {d}' for i, d in enumerate(DECLARED))})")
        db.execute(f"INSERT INTO t VALUES ({', '.join(['1.5'] * len(DECLARED))})")
        retained = db.execute(
            f"SELECT {', '.join(f'typeof(c{i})' for i in range(len(DECLARED)))} FROM t"
        )
        is_text = [kind == "text" for kind in retained.fetchone()]
    assert [log.has_text_affinity(declared) for declared in DECLARED] == is_text


def test_triggers_that_are_written_directly_are_those_that_create_trigger_makes(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    definitions = [
        f"CREATE TABLE {log.quoted(name)} (id INTEGER PRIMARY KEY, {log.quoted(name + '2')} TEXT)"
        for name in HOSTILE
    ]
    created_by = database("create.db", *definitions)
    bring_in_step(created_by)
    monkeypatch.setattr(sqlite_tables, "_MANY", 0)
    directly = database("direct.db", *definitions)
    with contextlib.closing(sqlite3.connect(path_of(directly))) as application:
        write = f"INSERT INTO {log.quoted(HOSTILE[0])} VALUES (?, 'x')"
        with application:
            application.execute(write, (1,))
        bring_in_step(directly)
        with application:
            application.execute(write, (2,))
    rows = "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master WHERE type = 'trigger'"
    assert sorted(directly.execute(rows)) == sorted(created_by.execute(rows))
    assert directly.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    logged = directly.execute("SELECT op, new FROM databus_log").fetchall()
    assert logged == [("c", '[[2,"x"]]')], "an open connection of the application fires them"
    assert not directly.execute("PRAGMA writable_schema").fetchone()[0]


@pytest.mark.usefixtures("written_directly")
def test_a_build_of_sqlite_that_refuses_direct_writes_gets_its_triggers_one_by_one(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def refused(_: sqlite3.Connection) -> Iterator[bool]:
        yield False

    monkeypatch.setattr(triggers, "definitions_writable", refused)
    db = database("shop.db", *(f"CREATE TABLE t{n} (id INTEGER PRIMARY KEY)" for n in range(3)))
    bring_in_step(db)
    assert len(created(db)) == 9


@pytest.mark.usefixtures("written_directly")
def test_a_text_that_sqlite_refuses_is_never_written(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "MISSING", "not hexadecimal")
    db = database("shop.db", "CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)")
    with pytest.raises(sqlite3.OperationalError):
        bring_in_step(db)
    assert created(db) == {}
    db.execute("INSERT INTO t VALUES (1, 'x')")


@pytest.mark.usefixtures("written_directly")
def test_names_that_tables_have_exchanged_take_their_triggers_along(database: Database) -> None:
    db = database("shop.db", *(f"CREATE TABLE {n} (id INTEGER PRIMARY KEY)" for n in "ab"))
    bring_in_step(db)
    for old, new in ("ax", "ba", "xb"):
        db.execute(f"ALTER TABLE {old} RENAME TO {new}")
    bring_in_step(db)
    found = sorted((trigger.name, trigger.table) for trigger in triggers.ours(db))
    assert found == [(f"databus_{op}_{table}", table) for op in "cdu" for table in "ab"]
    db.execute("INSERT INTO a VALUES (5)")
    (version,) = db.execute("SELECT version FROM databus_log WHERE op = 'c'").fetchone()
    assert log.registered(db)[version].source == "main.a"


@pytest.mark.usefixtures("written_directly")
def test_names_that_differ_in_case_are_one_name(database: Database) -> None:
    db = database("shop.db", "CREATE TABLE b (id INTEGER PRIMARY KEY)")
    bring_in_step(db)
    db.execute("ALTER TABLE b RENAME TO a")  # It still has databus_c_b.
    db.execute("CREATE TABLE B (id INTEGER PRIMARY KEY)")
    bring_in_step(db)
    with contextlib.closing(sqlite3.connect(path_of(db))) as application:
        application.execute("INSERT INTO B VALUES (1)")
        application.commit()
    found = sorted((trigger.name, trigger.table) for trigger in triggers.ours(db))
    assert found == [(f"databus_{op}_{table}", table) for op in "cdu" for table in "Ba"]


@pytest.mark.usefixtures("written_directly")
def test_a_name_that_a_trigger_of_the_application_has_is_never_written_twice(
    database: Database,
) -> None:
    db = database(
        "shop.db",
        "CREATE TABLE t (id INTEGER PRIMARY KEY)",
        "CREATE TRIGGER DATABUS_U_T AFTER UPDATE ON t BEGIN SELECT 1; END",
    )
    with pytest.raises(sqlite3.OperationalError, match=r"databus_u_t.* already exists"):
        bring_in_step(db)
    with contextlib.closing(sqlite3.connect(path_of(db))) as application:
        application.execute("INSERT INTO t VALUES (1)")  # The definitions can be read.


def older(version: int) -> list[str]:
    """The triggers of the table ``t`` as relays created them before their texts were shortened."""

    def image(row: str) -> str:
        cells = ", ".join(
            f"CASE typeof({cell}) WHEN 'real' THEN json_array('r', quote({cell})) "
            f"WHEN 'blob' THEN json_array('b', hex({cell})) ELSE {cell} END"
            for cell in (f'{row}."id"', f'{row}."c"')
        )
        mark = f"x'{triggers.MISSING}' AS \"c\""
        return f"(SELECT (SELECT json_array(json_array({cells}))) FROM (SELECT {mark}) AS {row})"

    images = {"c": ("NULL", image("NEW")), "u": (image("OLD"), image("NEW"))}
    images["d"] = (image("OLD"), "NULL")
    events = {"c": "INSERT", "u": "UPDATE", "d": "DELETE"}
    return [
        f'CREATE TRIGGER "databus_{op}_t" AFTER {events[op]} ON "t" BEGIN INSERT INTO databus_log '
        f"(at_ms, version, op, old, new) VALUES ({NOW}, {version}, '{op}', {old}, {new}); END"
        for op, (old, new) in images.items()
    ]


def with_older_triggers(database: Database) -> sqlite3.Connection:
    db = database("shop.db", "CREATE TABLE t (id INTEGER PRIMARY KEY, c TEXT)")
    bring_in_step(db)
    (version,) = log.registered(db)
    for name in created(db):
        db.execute(f'DROP TRIGGER "{name}"')
    for text in older(version):
        db.execute(text)
    log.set_meta(db, "definitions", log.schema_version(db))
    return db


@pytest.mark.parametrize("limit", [0, 100], ids=["written directly", "created"])
def test_older_triggers_are_replaced_and_what_they_logged_is_followed(
    database: Database, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(sqlite_tables, "_MANY", limit)
    db = with_older_triggers(database)
    before = created(db)
    db.execute("INSERT INTO t VALUES (1, x'00')")
    tables = bring_in_step(db)
    db.execute("UPDATE t SET c = 'y'")
    assert tables.unseen(db) == {}
    after = created(db)
    assert after.keys() == before.keys()
    assert all(len(after[name]) < len(before[name]) for name in before)
    rows: list[Any] = db.execute("SELECT version, op, old, new FROM databus_log").fetchall()
    assert rows == [
        (1, "c", None, '[[1,["b","00"]]]'),
        (1, "u", '[[1,["b","00"]]]', '[[1,"y"]]'),
    ]


def test_a_table_that_was_rebuilt_with_its_older_triggers_is_suspended(database: Database) -> None:
    db = with_older_triggers(database)
    db.execute("INSERT INTO t VALUES (1, 'x')")
    last = log.last_id(db)
    retained = list(created(db).values())
    for statement in (
        "CREATE TABLE u (id INTEGER PRIMARY KEY, c TEXT)",
        "INSERT INTO u VALUES (2, 'other')",
        "DROP TABLE t",
        "ALTER TABLE u RENAME TO t",
        *retained,
    ):
        db.execute(statement)
    tables = bring_in_step(db, position=last)
    assert tables.unseen(db)["main.t"].why == REBUILT


@pytest.mark.parametrize(
    ("size", "hold_many_s", "transactions"), [(110, 3600.0, 10), (330, 3600.0, 10), (110, 0.0, 110)]
)
def test_many_tables_take_as_many_transactions_as_few_unless_they_are_too_long(
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    hold_many_s: float,
    transactions: int,
) -> None:
    definitions = [f"CREATE TABLE t{at} (id INTEGER PRIMARY KEY, c TEXT)" for at in range(size)]
    db = database("shop.db", *definitions)
    # Each look at the clock finds that the time is over.
    monkeypatch.setattr(sqlite_tables, "_HOLD_S", 0.0)
    monkeypatch.setattr(sqlite_tables, "_HOLD_MANY_S", hold_many_s)
    monkeypatch.setattr(sqlite_tables, "_PAUSE_S", 0.0)
    before = log.schema_version(db)
    made: list[int] = []

    def counted(*arguments: Any) -> dict[str, str]:
        made.append(db.in_transaction)
        return wanted(*arguments)

    wanted = triggers.wanted
    monkeypatch.setattr(triggers, "wanted", counted)
    bring_in_step(db)
    assert log.schema_version(db) - before == transactions
    assert len(created(db)) == 3 * size
    assert not any(made), "texts are made before a transaction"
    assert len(made) == 2 * size
