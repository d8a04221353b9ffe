"""SQLite tables whose definitions change what they hold."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import FrameView, Op, source_id
from databus.common.table_state import decode_table_state
from databus.relay.dumps.dump_records import new_dump
from databus.relay.ring.schema_registry import RegistryReader
from databus.relay.sources.sqlite.sqlite_source import SqliteSource
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.opened_source import open_source
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually

WAIT_S = 20.0


def rows(data_dir: Path, table: str) -> list[dict[str, object]]:
    """A table as a consumer has it."""
    reader = RegistryReader(data_dir / "shop" / "schemas.jsonl")
    found: dict[bytes, dict[str, object]] = {}
    reader.refresh()
    latest = reader.schemas.latest(f"main.{table}")
    names = [column.name for column in latest.columns] if latest else []
    for view in ring_frames(data_dir / "shop"):
        if view.source_id != source_id(f"main.{table}") or view.is_control:
            continue
        if view.op == Op.TRUNCATE:
            found.clear()
        elif view.op == Op.DELETE:
            found.pop(bytes(view.key), None)
        elif view.after is not None:
            row = reader.schemas.by_fingerprint(view.schema_fp).decode_row(view.after)
            found[bytes(view.key)] = {name: row.get(name) for name in names}
    return sorted(found.values(), key=repr)


def states(data_dir: Path, table: str) -> list[str]:
    """What the stream has announced of a table that it did not follow: states and reasons."""
    found = []
    for view in ring_frames(data_dir / "shop"):
        if view.op == Op.TABLE_STATE and view.source_id == source_id(f"main.{table}"):
            state = decode_table_state(bytes(view.after or b""))
            found.append(f"{state.state}: {state.reason}")
    return found


def ops(data_dir: Path, table: str) -> list[Op]:
    """The operations of a table's events."""
    return [
        Op(view.op)
        for view in ring_frames(data_dir / "shop")
        if view.source_id == source_id(f"main.{table}") and not view.is_control
    ]


def held(shop: sqlite3.Connection, table: str) -> list[dict[str, object]]:
    """A table as the source has it; nothing where there is none."""
    try:
        cursor = shop.execute(f"SELECT * FROM {table}")
    except sqlite3.OperationalError:
        return []
    names = [column[0] for column in cursor.description]
    return sorted((dict(zip(names, row, strict=True)) for row in cursor), key=repr)


def configured(path: Path) -> DatabaseConfig:
    found = database_config("shop", f"sqlite:///{path}", "main.*")
    return found.model_copy(update={"resync": "auto"})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A database of one table."""
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a INT NOT NULL, b BLOB, c TEXT)"
        )
        yield connection


DROPPED = "ALTER TABLE t DROP COLUMN a; INSERT INTO t VALUES (4, x'00', 'x');"
EXACT = {
    "a column without values": "ALTER TABLE t ADD COLUMN d TEXT;"
    "INSERT INTO t VALUES (4, 1, x'00', 'x', 'y'); UPDATE t SET d = 'z' WHERE id = 2",
    "a dropped column": f"{DROPPED} UPDATE t SET c = 'y' WHERE id = 1; DELETE FROM t WHERE id = 2",
    "a dropped blob": "ALTER TABLE t DROP COLUMN b; UPDATE t SET c = 'y' WHERE id = 1;"
    "INSERT INTO t VALUES (4, 1, 'x')",
    "two dropped columns": f"{DROPPED} ALTER TABLE t DROP COLUMN b; UPDATE t SET c = 'y'",
    "one transaction": f"BEGIN; UPDATE t SET a = 5; {DROPPED} DELETE FROM t WHERE id = 1; COMMIT",
    "a default and no rows": "DELETE FROM t; ALTER TABLE t ADD COLUMN d INT DEFAULT 7",
}
VALUES = {
    "a default": ("ALTER TABLE t ADD COLUMN d INT DEFAULT 7", "ADD COLUMN d gave its rows"),
    "a default after other changes": (
        "DELETE FROM t; INSERT INTO t (id, a) VALUES (4, 1); ALTER TABLE t ADD d INT DEFAULT 7",
        "ADD COLUMN d gave its rows",
    ),
    "a default, not null": (
        "ALTER TABLE t ADD COLUMN d INT NOT NULL DEFAULT 7; INSERT INTO t (id, a) VALUES (4, 1);"
        "UPDATE t SET d = 8 WHERE id = 1",
        "ADD COLUMN d gave its rows",
    ),
    "a renamed column": (
        "ALTER TABLE t RENAME COLUMN c TO d; INSERT INTO t VALUES (4, 1, x'00', 'new')",
        "columns were renamed",
    ),
    "dropped and added again": (
        "ALTER TABLE t DROP COLUMN c; ALTER TABLE t ADD COLUMN c TEXT",
        "column c may have been dropped and added again",
    ),
    "exchanged columns": (
        "ALTER TABLE t RENAME COLUMN a TO z; ALTER TABLE t RENAME COLUMN c TO a;"
        "ALTER TABLE t RENAME COLUMN z TO c; UPDATE t SET a = 'y' WHERE id = 1",
        "columns were renamed",
    ),
}
EMPTIED = {
    "dropped": "UPDATE t SET a = 6; DROP TABLE t",
    "dropped and made again": "DROP TABLE t; CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT)",
    "renamed": "ALTER TABLE t RENAME TO away; INSERT INTO away VALUES (4, 1, x'00', 'x')",
    "dropped, a view": "DROP TABLE t; CREATE VIEW t AS SELECT 1 AS id WHERE 0",
}
OTHER_ROWS = {
    "rebuilt, with our triggers": (
        "BEGIN; CREATE TABLE u (id INTEGER PRIMARY KEY, a INT NOT NULL, b BLOB, c TEXT);"
        "INSERT INTO u SELECT id, a + 1, b, c FROM t WHERE id > 1; DROP TABLE t;"
        "ALTER TABLE u RENAME TO t; TRIGGERS; COMMIT",
        "it was rebuilt, its triggers included",
    ),
    "a renamed key": ("ALTER TABLE t RENAME COLUMN id TO number", "its key was (id)"),
    "dropped and added": (
        f"{DROPPED} ALTER TABLE t DROP COLUMN c; ALTER TABLE t ADD COLUMN d INT DEFAULT 1",
        "a column was dropped while rows were written",
    ),
    "dropped and added again, and written": (
        "ALTER TABLE t DROP COLUMN c; ALTER TABLE t ADD COLUMN c TEXT;"
        "UPDATE t SET c = 'new' WHERE id = 2",
        "may have created a unique index and dropped it",
    ),
    "dropped, written, added again": (
        "ALTER TABLE t DROP COLUMN c; INSERT INTO t VALUES (4, 1, x'00');"
        "ALTER TABLE t ADD COLUMN c TEXT",
        "a column was dropped while rows were written",
    ),
    "rebuilt": (
        "BEGIN; CREATE TABLE u (id INTEGER PRIMARY KEY, a INT NOT NULL, b BLOB, c TEXT);"
        "INSERT INTO u SELECT id, a + 1, b, c FROM t WHERE id > 1; DROP TABLE t;"
        "ALTER TABLE u RENAME TO t; COMMIT; INSERT INTO t VALUES (4, 1, x'00', 'x')",
        "it had no triggers",
    ),
}


async def _altered(
    shop: sqlite3.Connection, tmp_path: Path, script: str, *, is_running: bool
) -> None:
    """Run a script beside the relay, or while it is down; wait for equality."""
    config = configured(tmp_path / "shop.db")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for number in (1, 2, 3):
            shop.execute("INSERT INTO t VALUES (?, 5, x'07', 'old')", (number,))
        await eventually(lambda: rows(tmp_path, "t") == held(shop, "t"), WAIT_S)
        if "TRIGGERS" in script:
            ours = shop.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
            script = script.replace("TRIGGERS", ";".join(text for (text,) in ours))
        if is_running:
            shop.executescript(script)
            await _equal(shop, tmp_path)
    if not is_running:
        shop.executescript(script)
        async with capturing(config, tmp_path):
            await _equal(shop, tmp_path)


async def _equal(shop: sqlite3.Connection, tmp_path: Path) -> None:
    shop.executescript("DROP TABLE IF EXISTS fence; CREATE TABLE fence (id INTEGER PRIMARY KEY)")
    made = "SELECT 1 FROM sqlite_master WHERE name = 'databus_c_fence'"
    await eventually(lambda: shop.execute(made).fetchone(), WAIT_S)
    shop.execute("INSERT INTO fence VALUES (1)")
    await eventually(lambda: rows(tmp_path, "fence") == [{"id": 1}], WAIT_S)

    def is_equal() -> bool:
        announced = states(tmp_path, "t")
        return rows(tmp_path, "t") == held(shop, "t") and announced[-1:] in ([], ["followed: "])

    await eventually(is_equal, WAIT_S)


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("name", EXACT)
async def test_definitions_that_the_log_shows_exactly_suspend_nothing(
    shop: sqlite3.Connection, tmp_path: Path, name: str, is_running: bool
) -> None:
    await _altered(shop, tmp_path, EXACT[name], is_running=is_running)
    assert states(tmp_path, "t") == []


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("name", VALUES)
async def test_values_that_a_definition_gave_to_rows_are_dumped_and_nothing_is_emptied(
    shop: sqlite3.Connection, tmp_path: Path, name: str, is_running: bool
) -> None:
    script, why = VALUES[name]
    await _altered(shop, tmp_path, f"BEGIN; {script}; COMMIT", is_running=is_running)
    assert why in states(tmp_path, "t")[0]
    assert Op.READ in ops(tmp_path, "t") and Op.TRUNCATE not in ops(tmp_path, "t")


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("name", OTHER_ROWS)
async def test_rows_that_a_definition_exchanged_are_emptied_and_dumped(
    shop: sqlite3.Connection, tmp_path: Path, name: str, is_running: bool
) -> None:
    script, why = OTHER_ROWS[name]
    await _altered(shop, tmp_path, f"BEGIN; {script}; COMMIT" if "BEGIN" not in script else script,
                   is_running=is_running)  # fmt: skip
    assert why in states(tmp_path, "t")[0]
    assert Op.TRUNCATE in ops(tmp_path, "t")


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("name", EMPTIED)
async def test_tables_that_are_dropped_or_renamed_are_emptied_and_nothing_is_suspended(
    shop: sqlite3.Connection, tmp_path: Path, name: str, is_running: bool
) -> None:
    await _altered(shop, tmp_path, f"BEGIN; {EMPTIED[name]}; COMMIT", is_running=is_running)
    assert states(tmp_path, "t") == []
    assert ops(tmp_path, "t")[-1] == Op.TRUNCATE


@pytest.mark.parametrize("is_running", [True, False])
async def test_tables_that_exchange_their_names_are_suspended_both(
    shop: sqlite3.Connection, tmp_path: Path, is_running: bool
) -> None:
    shop.execute("CREATE TABLE other (id INTEGER PRIMARY KEY, a INT NOT NULL, b BLOB, c TEXT)")
    script = (
        "INSERT INTO other VALUES (1, 9, NULL, 'other'); ALTER TABLE t RENAME TO u;"
        "INSERT INTO u VALUES (7, 7, NULL, 'seven'); ALTER TABLE other RENAME TO t;"
        "ALTER TABLE u RENAME TO other; INSERT INTO t VALUES (8, 8, NULL, 'eight')"
    )
    await _altered(shop, tmp_path, f"BEGIN; {script}; COMMIT", is_running=is_running)
    await eventually(lambda: rows(tmp_path, "other") == held(shop, "other"), WAIT_S)
    for table in ("t", "other"):
        assert "it had no triggers" in states(tmp_path, table)[0]


async def test_a_suspended_table_that_is_dropped_is_emptied_and_not_suspended_any_more(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    config = configured(tmp_path / "shop.db").model_copy(update={"resync": "manual"})
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO t VALUES (1, 5, x'07', 'old')")
        await eventually(lambda: len(rows(tmp_path, "t")) == 1, WAIT_S)
        shop.execute("INSERT INTO t VALUES (2, 'none', x'07', 'old')")
        await eventually(lambda: len(states(tmp_path, "t")) == 1, WAIT_S)
        shop.execute("INSERT INTO t VALUES (3, 5, x'07', 'passed over')")
        shop.execute("DROP TABLE t")
        await eventually(lambda: states(tmp_path, "t")[1:] == ["followed: "], WAIT_S)
        assert rows(tmp_path, "t") == []
        shop.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a INT)")
        await _equal(shop, tmp_path)
        shop.execute("INSERT INTO t VALUES (1, 1)")
        await _equal(shop, tmp_path)


async def test_a_table_that_loses_its_key_is_suspended_until_it_has_one(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    async with capturing(configured(tmp_path / "shop.db"), tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO t VALUES (1, 5, x'07', 'old')")
        await eventually(lambda: len(rows(tmp_path, "t")) == 1, WAIT_S)
        shop.executescript(
            "BEGIN; CREATE TABLE u AS SELECT * FROM t; DROP TABLE t; ALTER TABLE u RENAME TO t;"
            "INSERT INTO t VALUES (2, 2, NULL, NULL); COMMIT"
        )
        await eventually(lambda: "it has no key" in str(states(tmp_path, "t")), WAIT_S)
        shop.executescript(
            "BEGIN; CREATE TABLE u (id INTEGER PRIMARY KEY, a INT); INSERT INTO u VALUES (9, 9);"
            "DROP TABLE t; ALTER TABLE u RENAME TO t; COMMIT"
        )
        await _equal(shop, tmp_path)


@pytest.mark.parametrize("is_running", [True, False])
async def test_a_table_that_gets_an_index_that_the_relay_cannot_read_is_suspended_until_it_is_gone(
    shop: sqlite3.Connection, tmp_path: Path, is_running: bool
) -> None:
    shop.create_function("fold", 1, lambda text: text.lower(), deterministic=True)
    config = configured(tmp_path / "shop.db")
    index = "CREATE UNIQUE INDEX tc ON t (fold(c)); REPLACE INTO t VALUES (2, 2, NULL, 'A')"
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO t VALUES (1, 1, NULL, 'a')")
        await eventually(lambda: len(rows(tmp_path, "t")) == 1, WAIT_S)
        if is_running:
            shop.executescript(index)
            await eventually(lambda: states(tmp_path, "t"), WAIT_S)
    if not is_running:
        shop.executescript(index)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: states(tmp_path, "t"), WAIT_S)
        assert "only the application has" in states(tmp_path, "t")[0]
        shop.execute("REPLACE INTO t VALUES (3, 3, NULL, 'a')")
        shop.execute("DROP INDEX tc")
        await _equal(shop, tmp_path)


async def test_tables_that_appear_with_rows_are_resynchronised(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as shop:
        shop.execute("CREATE TABLE old (id INTEGER PRIMARY KEY, c INT)")
        async with capturing(configured(path), tmp_path) as fetcher:
            await streaming(fetcher)
            shop.execute("INSERT INTO old VALUES (1, 1)")
            await eventually(lambda: len(rows(tmp_path, "old")) == 1, 60)
            shop.executescript(
                "BEGIN; CREATE TABLE filled (id INTEGER PRIMARY KEY); "
                "INSERT INTO filled VALUES (1), (2); COMMIT; ALTER TABLE old RENAME TO new"
            )
            shop.execute("INSERT INTO new VALUES (2, 2)")
            wanted = {
                "filled": [{"id": 1}, {"id": 2}],
                "new": [{"id": 1, "c": 1}, {"id": 2, "c": 2}],
            }
            for table, content in wanted.items():
                await eventually(lambda t=table, c=content: rows(tmp_path, t) == c, 60, table)
            shop.execute("INSERT INTO new VALUES (3, 3)")
            await eventually(lambda: len(rows(tmp_path, "new")) == 3, 60)
            assert {"id": 3, "c": 3} not in rows(tmp_path, "old")


async def test_what_changes_no_row_suspends_nothing(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    """Statements of which nothing is to be seen, many at once, and all pages moved."""
    shop.execute("CREATE TABLE empty (id INTEGER PRIMARY KEY, c TEXT)")
    shop.execute("CREATE TABLE first (id INTEGER PRIMARY KEY, c TEXT)")
    shop.executescript("DROP TABLE first; CREATE INDEX i ON t (a)")
    changes = (
        "VACUUM",
        "BEGIN; DROP INDEX i; CREATE INDEX i ON t (a); DROP INDEX i; CREATE INDEX i ON t (c);"
        "COMMIT",
        "BEGIN; CREATE VIEW v AS SELECT 1; DROP VIEW v; CREATE TABLE w (x INT PRIMARY KEY); COMMIT",
        "ALTER TABLE w RENAME TO z; ANALYZE; REINDEX",
        "CREATE TRIGGER own AFTER INSERT ON z BEGIN UPDATE t SET a = a + 1; END",
        "INSERT INTO z VALUES (1)",
    )
    for is_running in (True, False):
        for script in changes if is_running else changes[:2]:
            await _altered(shop, tmp_path, script, is_running=is_running)
            shop.execute("DELETE FROM t")
    assert states(tmp_path, "t") == states(tmp_path, "empty") == []


async def test_what_a_definition_did_is_not_forgotten_by_a_relay_that_dies_at_once(
    shop: sqlite3.Connection, tmp_path: Path
) -> None:
    config = configured(tmp_path / "shop.db")
    first = await open_source(SqliteSource(config))
    shop.execute("INSERT INTO t VALUES (1, 1, x'00', 'x')")
    scn = await first.first_scn()
    await first.close()
    shop.execute("ALTER TABLE t ADD COLUMN d INT DEFAULT 7")
    for _ in range(2):  # The second one finds all triggers in step.
        again = SqliteSource(config)
        again.restore("", None, scn)
        await again.open()
        stream = again.stream(scn)
        if _:
            await anext(stream)
            assert "ADD COLUMN d" in again.suspended()["main.t"].why
        await stream.aclose()
        await again.close()


async def test_a_table_that_is_dropped_while_it_is_dumped_ends_its_part_of_the_dump_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as shop:
        for table in ("dropped", "kept"):
            shop.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY)")
            shop.executemany(f"INSERT INTO {table} VALUES (?)", [(n,) for n in range(50)])
        async with capturing(configured(path), tmp_path) as fetcher:
            await streaming(fetcher)
            dump = new_dump({"sources": ["main.*"], "chunk_rows": 10, "delay_ms": 60_000})
            await fetcher.start_dump(dump)
            await eventually(lambda: len(rows(tmp_path, "dropped")) == 10, WAIT_S)
            shop.execute("DROP TABLE dropped")
            dump.delay_ms = 0
            fetcher.dumps.poke()
            await eventually(lambda: dump.state == "failed", WAIT_S)
            assert dump.error is not None and dump.error["code"] == "unknown_source"
            assert dump.error["failed_at"]["source"] == "main.dropped"
            assert len(rows(tmp_path, "kept")) == 50


async def test_a_definition_is_registered_before_the_frame_that_announces_it_though_no_row_follows(
    tmp_path: Path,
) -> None:
    shop = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
    shop.execute("CREATE TABLE other (id INTEGER PRIMARY KEY)")
    config = database_config(
        "shop", f"sqlite:///{tmp_path / 'shop.db'}", "main.orders", "main.other"
    )
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        shop.execute("INSERT INTO orders VALUES (1, 'one')")
        folder = fetcher.folder.path
        await eventually(lambda: ring_state(folder).letters == "c", 30)
        shop.executescript(
            "CREATE TABLE rebuilt (id INTEGER PRIMARY KEY, item TEXT, c TEXT);"
            "INSERT INTO rebuilt VALUES (1, 'one', 'c'), (2, 'two', 'c');"
            "DROP TABLE orders; ALTER TABLE rebuilt RENAME TO orders"
        )
        # It is suspended, so that its rows are passed over.
        await eventually(lambda: fetcher.tables.document(), 30, "suspended")
        shop.execute("INSERT INTO other VALUES (1)")

        def announced() -> list[FrameView]:
            return [view for view in ring_frames(folder) if view.op == Op.SCHEMA_CHANGE]

        await eventually(lambda: announced(), 30, "announced")
        registry = RegistryReader(fetcher.folder.registry)
        registry.refresh()
        latest = registry.schemas.latest("main.orders")
        assert latest is not None
        assert [column.name for column in latest.columns] == ["id", "item", "c"]
        assert latest.fingerprint == announced()[-1].schema_fp
    shop.close()
