"""What statements do to captured tables, on real servers: an event, or the table is suspended."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pymysql
import pytest

from databus.cli.demo.private_servers import PASSWORD, USER, MariaDBServer
from databus.common.frame.frame_format import Op
from databus.relay.processes.fetcher import Fetcher
from databus.relay.sources.contract import Chunk, ChunkRequest
from databus.relay.sources.mysql import MySqlSource
from databus.relay.sources.mysql.binlog.ddl_lookahead import DdlLookahead
from databus.relay.sources.mysql.binlog.gtid_numbering import DomainNumbering, LocatedSnapshot
from databus.relay.sources.mysql.chunks import mysql_chunks
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings, read_settings
from databus.relay.sources.mysql.tables.inferred_columns import LookaheadResult
from tests.integration.test_least_privileges import USER as READER
from tests.integration.test_least_privileges import statements as page_rights
from tests.integration.test_suspended_tables import dump, in_database, rows_of
from tests.support.capture import capturing, database_config, ring_state, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.relay_process import ring_frames
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Session:
    """One session of the application."""

    def __init__(self, database: FreshDatabase) -> None:
        self._connection = database.server.connect(database.name)

    def run(self, *statements: str) -> None:
        with self._connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def session(database: FreshDatabase) -> Iterator[Session]:
    opened = Session(database)
    yield opened
    opened.close()


def suspensions(fetcher: Fetcher) -> dict[str, Any]:
    return dict(fetcher.status.source.get("stopped_tables") or {})


async def caught_up(folder: Path, database: FreshDatabase, number: int) -> None:
    """The ring has a row that was written behind everything else."""
    database.execute(f"INSERT INTO fence VALUES ({number}, 0)")
    await eventually(
        lambda: (number,) in rows_of(folder, f"{database.name}.fence"), 60, "the fence"
    )


def differing(folder: Path, database: FreshDatabase, tables: list[str]) -> list[str]:
    return [
        table
        for table in tables
        if rows_of(folder, f"{database.name}.{table}") != in_database(database, f"`{table}`")
    ]


TRUNCATIONS = {
    "no space": "TRUNCATE TABLE`{t}`",
    "no word": "TRUNCATE`{t}`",
    "block comment": "TRUNCATE /* x */ TABLE {t}",
    "comments around": "/* a */ # b\n-- c\nTRUNCATE/**/TABLE/*d*/{t} -- e",
    "executed comment": "/*!40000 TRUNCATE TABLE {t} */",
    "executed in part": "TRUNCATE /*!50000 TABLE */ {t}",
    "dotted": "TRUNCATE TABLE {schema} . `{t}`",
    "lower case": "truncate\ttable\n{t}",
}
MARIADB_TRUNCATIONS = {
    "set statement": "SET STATEMENT max_statement_time = 60 FOR TRUNCATE TABLE {t}",
    "mariadb comment": "/*M! TRUNCATE */ /*M!100100 TABLE {t} */",
    "wait": "TRUNCATE TABLE {t} WAIT 3",
    "immediate": "EXECUTE IMMEDIATE 'TRUNCATE TABLE {t}'",
}


async def test_every_spelling_of_truncate_is_an_event(
    database: FreshDatabase, session: Session, tmp_path: Path
) -> None:
    spellings = dict(TRUNCATIONS)
    if database.server.product == "mariadb":
        spellings |= MARIADB_TRUNCATIONS
    names = [f"t{number}" for number, _ in enumerate(spellings)]
    others = ["fence", "ansi", "odd`-", "in_procedure", "dropped", "renamed", "calm"]
    for table in [*names, *others]:
        quoted = table.replace("`", "``")
        database.execute(f"CREATE TABLE `{quoted}` (id INT PRIMARY KEY, v INT)")
        database.execute(f"INSERT INTO `{quoted}` VALUES (1, 1)")
    database.execute("CREATE PROCEDURE p() TRUNCATE TABLE in_procedure")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder = tmp_path / "shop"
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for table in [*names, *others]:
            quoted = table.replace("`", "``")
            database.execute(f"INSERT INTO `{quoted}` VALUES (2, 2)")
        # Only the statement decides: the relay reads it after the tables are gone.
        for table, spelling in zip(names, spellings.values(), strict=True):
            session.run(spelling.format(t=table, schema=database.name))
        session.run("TRUNCATE TABLE `odd``-`", "CALL p()")
        session.run("SET sql_mode = 'ANSI_QUOTES'", 'TRUNCATE TABLE "ansi"')
        session.run("TRUNCATE TABLE dropped", "DROP TABLE dropped")
        session.run("TRUNCATE TABLE renamed", "RENAME TABLE renamed TO renamed_2")
        await caught_up(folder, database, 9)
        emptied = [source for op, source in ring_state(folder).ops if op == "t"]
        wanted = [*names, "odd`-", "in_procedure", "ansi", "dropped", "renamed"]
        assert set(emptied) == {f"{database.name}.{table}" for table in wanted}
        assert [name for name in names if rows_of(folder, f"{database.name}.{name}")] == []
        assert rows_of(folder, f"{database.name}.calm")


async def test_exchanged_contents_suspend_their_table_by_name_and_drops_are_events(
    database: FreshDatabase, session: Session, tmp_path: Path
) -> None:
    """As online schema change tools end, and what else puts other rows under a name."""
    away = f"{database.name}_away"
    database.server.create_database(away)
    definition = "(id INT PRIMARY KEY, v INT)"
    parted = f"{definition} PARTITION BY HASH (id) PARTITIONS 2"
    tables = ["p", "swapped", "fetched", "gone", "again", "same", "calm", "fence", "widened"]
    for table in tables:
        database.execute(f"CREATE TABLE {table} {definition}")
        database.execute(f"INSERT INTO {table} VALUES (1, 1)")
    for table in ("exchanged", "cut", "dropped_part"):
        database.execute(f"CREATE TABLE {table} {parted}".replace("HASH (id) PARTITIONS 2", RANGE))
        database.execute(f"INSERT INTO {table} VALUES (1, 1), (101, 1)")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder = tmp_path / "shop"
    try:
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            for table in tables:
                session.run(f"UPDATE {table} SET id = 3, v = 3")
            session.run(
                "CREATE TABLE p_new LIKE p",
                "INSERT INTO p_new SELECT id, 7 FROM p",
                "RENAME TABLE p TO p_old, p_new TO p",
                f"CREATE TABLE {away}.fetched {definition}",
                f"INSERT INTO {away}.fetched VALUES (3, 8)",
                f"RENAME TABLE swapped TO {away}.swapped, {away}.fetched TO swapped",
                "DROP TABLE gone",
                "DROP TABLE again",
                f"CREATE TABLE again {definition}",
                "INSERT INTO again VALUES (5, 5)",
                "CREATE TABLE twin LIKE same",
                "RENAME TABLE same TO other, other TO same",
                f"CREATE TABLE part {definition}",
                "ALTER TABLE exchanged EXCHANGE PARTITION p0 WITH TABLE part",
                "ALTER TABLE cut TRUNCATE PARTITION p0",
                "ALTER TABLE dropped_part DROP PARTITION p0",
                "ALTER TABLE fetched ADD COLUMN w INT DEFAULT 7",
                "ALTER TABLE widened MODIFY v BIGINT, ADD INDEX (v), ADD COLUMN w INT",
            )
            await caught_up(folder, database, 9)
            suspended = {"p", "p_old", "swapped", "exchanged", "part", "cut", "dropped_part"}

            def suspended_now() -> set[str]:
                return {source.partition(".")[2] for source in suspensions(fetcher)}

            await eventually(lambda: suspended_now() == suspended, 30)
            not_followed = {table["source"] for table in fetcher.tables.document()}
            assert not_followed == {f"{database.name}.{name}" for name in {*suspended, "fetched"}}
            assert "took this name" in suspensions(fetcher)[f"{database.name}.p"]["why"]
            assert rows_of(folder, f"{database.name}.gone") == {}
            assert not differing(folder, database, ["again", "same", "calm"])
            assert (3,) in rows_of(folder, f"{database.name}.widened")
    finally:
        database.server.drop_database(away)


async def test_values_that_a_definition_gave_to_rows_are_dumped_and_nothing_is_emptied(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(9))")
    database.execute("INSERT INTO t VALUES (1, '1'), (2, '2')")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder, source = tmp_path / "shop", f"{database.name}.t"
    async with capturing(config.model_copy(update={"resync": "auto"}), tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("UPDATE t SET v = '10'")
        for change in (
            "ALTER TABLE t ADD COLUMN w INT NOT NULL DEFAULT 7",
            "ALTER TABLE t CHANGE w x INT NOT NULL",
            "ALTER TABLE t MODIFY v INT",
        ):
            database.execute(change)
            # The stream resumes at once: nothing that follows is lost.
            database.execute("DELETE FROM t WHERE id = 2")

            def equal() -> bool:
                names = [name for name, *_ in database.execute("SHOW COLUMNS FROM t")]
                rows = database.execute("SELECT * FROM t")
                wanted = {(row[0],): dict(zip(names, row, strict=True)) for row in rows}
                return rows_of(folder, source) == wanted and not fetcher.tables.document()

            await eventually(equal, 60, change)
    assert Op.TRUNCATE not in {view.op for view in ring_frames(folder)}


RANGE = "RANGE (id) (PARTITION p0 VALUES LESS THAN (100), PARTITION p1 VALUES LESS THAN MAXVALUE)"


async def test_statements_logged_instead_of_rows_suspend_what_they_reach_and_nothing_else(
    database: FreshDatabase, session: Session, tmp_path: Path
) -> None:
    other = f"{database.name}_other"
    database.server.create_database(other)
    reached = ["based", "triggered", "audit", "parent", "child", "called", "`odd-name`", "loaded"]
    untouched = ["same", "read_only", "calm", "fence"]
    for table in [*reached, *untouched, f"{other}.same"]:
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    database.execute(
        "ALTER TABLE child ADD FOREIGN KEY (v) REFERENCES parent (id) ON DELETE CASCADE"
    )
    database.execute("CREATE VIEW seen AS SELECT id, v FROM based WHERE id > 0")
    database.execute(
        "CREATE TRIGGER tr AFTER INSERT ON triggered FOR EACH ROW "
        "INSERT INTO audit VALUES (NEW.id, NEW.v)"
    )
    database.execute(
        "CREATE FUNCTION f() RETURNS INT DETERMINISTIC MODIFIES SQL DATA BEGIN "
        "INSERT INTO called VALUES (1, 1); RETURN 1; END"
    )
    for table in ("read_only", "parent", "based"):
        database.execute(f"INSERT INTO {table} VALUES (1, 1)")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder = tmp_path / "shop"
    rows = tmp_path / "rows.csv"
    rows.write_text("1\t1\n2\t2\n")
    try:
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            if database.server.product == "mariadb":
                session.run("CREATE TABLE copied (PRIMARY KEY (id)) SELECT * FROM read_only")
                session.run("CREATE SEQUENCE q", "SELECT NEXTVAL(q)")  # no table
            session.run("INSERT INTO calm VALUES (1, 1)")
            database.execute("SET GLOBAL local_infile = ON")
            loading = pymysql.connect(
                host="127.0.0.1", port=database.server.port, user=USER, password=PASSWORD,
                database=database.name, local_infile=True, autocommit=True,
            )  # fmt: skip
            with loading.cursor() as cursor:
                cursor.execute("SET binlog_format = STATEMENT")
                cursor.execute(f"LOAD DATA LOCAL INFILE '{rows}' INTO TABLE {other}.same")
                cursor.execute(f"LOAD DATA LOCAL INFILE '{rows}' INTO TABLE loaded")
            loading.close()
            session.run(
                "SET binlog_format = STATEMENT",
                f"INSERT INTO {other}.same SELECT * FROM read_only WHERE id > 5",
                "UPDATE seen SET v = 5",
                "INSERT INTO triggered VALUES (1, 1)",
                "DELETE FROM parent WHERE id = 1",
                "INSERT INTO `odd-name` VALUES (1, 1)",
                "SELECT f()",
            )
            await caught_up(folder, database, 9)
            suspended = {name.strip("`") for name in reached}
            await eventually(lambda: len(suspensions(fetcher)) >= len(suspended), 30)
            assert {source.partition(".")[2] for source in suspensions(fetcher)} == suspended
            assert not differing(folder, database, ["same", "calm"])
            if database.server.product == "mariadb":
                assert not differing(folder, database, ["copied"])
    finally:
        database.server.drop_database(other)


@pytest.mark.parametrize("rights", ["all rights", "the rights of docs/managed-servers.md"])
async def test_children_of_a_foreign_key_with_an_action_never_differ_unnamed(
    database: FreshDatabase, session: Session, tmp_path: Path, rights: str
) -> None:
    away = f"{database.name}_away"
    database.server.create_database(away)
    keys = {
        "deleted": "par (id) ON DELETE CASCADE",
        "moved": "par (id) ON UPDATE CASCADE",
        "nulled": "par2 (id) ON DELETE SET NULL",
        "of_away": f"{away}.par (id) ON DELETE CASCADE",
        "unchecked": "par3 (id) ON DELETE CASCADE",
        "restricted": "par2 (id)",
    }
    parents = ["par", "par2", "par3", f"{away}.par"]
    for table in [*parents, "fence"]:
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    for table, key in keys.items():
        database.execute(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT, FOREIGN KEY (v) REFERENCES {key})"
        )
    url = database.url
    if rights != "all rights":
        for statement in page_rights(database.server.product, database.name):
            database.execute(statement)
        url = re.sub(r"//[^@]*@", f"//{READER}:secret@", url)
    config = database_config("shop", url, f"{database.name}.*")
    folder = tmp_path / "shop"
    tables = [*keys, "par", "par2", "par3", "late"]
    try:
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            session.run(
                *(f"INSERT INTO {table} VALUES (1, 1), (2, 2), (3, 3)" for table in parents),
                *(f"INSERT INTO {table} VALUES (1, 1)" for table in keys if table != "restricted"),
                "UPDATE par SET v = 7",  # what nothing refers to
                "SET foreign_key_checks = 0",
                "DELETE FROM par3 WHERE id = 1",
                "SET foreign_key_checks = 1",
            )
            await caught_up(folder, database, 1)
            assert suspensions(fetcher) == {}
            assert not differing(folder, database, tables[:-1])
            session.run(
                "DELETE FROM par WHERE id = 2",
                "DELETE FROM deleted",
                "UPDATE par SET id = 5 WHERE id = 1",
                "DELETE FROM par2 WHERE id = 1",
                f"DELETE FROM {away}.par WHERE id = 1",
                "CREATE TABLE late (id INT PRIMARY KEY, v INT)",
                "INSERT INTO late VALUES (3, 3)",
                "ALTER TABLE late ADD FOREIGN KEY (v) REFERENCES par3 (id) ON DELETE CASCADE",
                "DELETE FROM par3 WHERE id = 3",
            )
            await caught_up(folder, database, 2)
            named = {source.partition(".")[2] for source in suspensions(fetcher)}
            if database.server.product == "mariadb":
                # MySQL 9.6 and later has the children's changes in its binlog.
                await eventually(lambda: len(suspensions(fetcher)) >= 5, 30)
                named = {source.partition(".")[2] for source in suspensions(fetcher)}
                assert named == {*keys, "late"} - {"restricted"}
            assert set(differing(folder, database, tables)) <= named
        source = MySqlSource(config)
        warned = [f for f in await source.preflight() if f.setting.startswith("foreign key")]
        await source.close()
        expected = {"deleted", "moved", "nulled", "of_away", "unchecked", "late"}
        found = {finding.table.partition(".")[2] for finding in warned}
        assert found == (expected if database.server.product == "mariadb" else set())
        assert not any(finding.fatal for finding in warned)
    finally:
        database.execute(f"DROP USER IF EXISTS {READER}")
        for table in ("of_away",):
            database.execute(f"DROP TABLE {table}")
        database.server.drop_database(away)


PARENTS = ["renamed", "dropped", "other"]
CHILDREN = ["child", "free", "calm", "plain_child"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once all statements were run: every catalogue that is read is a later one."""

    def late(self: DdlLookahead, *args: Any, **wanted: Any) -> LookaheadResult:
        assert ran.wait(60 * PATIENCE)
        return look(self, *args, **wanted)

    look, ran = DdlLookahead.look, threading.Event()
    monkeypatch.setattr(DdlLookahead, "look", late)
    return ran


THROUGH = "INSERT INTO triggered VALUES (2, 2)"
MOVES = {
    "a trigger's table is renamed": (THROUGH, "RENAME TABLE triggered TO moved"),
    "a trigger's table is altered": (THROUGH, "ALTER TABLE triggered RENAME TO moved"),
    "a trigger's table is dropped": (THROUGH, "DROP TABLE triggered"),
    "a view is renamed": ("UPDATE seen SET v = 5", "RENAME TABLE seen TO looked"),
    "another table is dropped": (THROUGH, "DROP TABLE other"),
}


@pytest.mark.parametrize(("change", "move"), MOVES.values(), ids=MOVES.keys())
async def test_what_a_table_reached_is_not_looked_up_under_its_later_name(
    database: FreshDatabase, session: Session, tmp_path: Path, ran: threading.Event,
    change: str, move: str,
) -> None:  # fmt: skip
    tables = ["triggered", "audit", "calm", "other", "fence"]
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    database.execute("INSERT INTO audit VALUES (1, 1)")
    config = database_config("shop", database.url, f"{database.name}.*")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        session.run(
            "CREATE TRIGGER tr AFTER INSERT ON triggered FOR EACH ROW "
            "INSERT INTO audit VALUES (NEW.id, NEW.v)",
            "CREATE VIEW seen AS SELECT id, v FROM audit",
            "SET binlog_format = STATEMENT",
            change,
            "SET binlog_format = ROW",
            move,
        )
        ran.set()
        await eventually(lambda: f"{database.name}.audit" in suspensions(fetcher), 30)
        if move == "DROP TABLE other":
            await caught_up(tmp_path / "shop", database, 1)
            named = {source.partition(".")[2] for source in suspensions(fetcher)}
            assert named == {"audit", "triggered"}


async def test_children_are_named_by_the_names_that_their_parents_had(
    database: FreshDatabase, session: Session, tmp_path: Path, ran: threading.Event
) -> None:
    away = f"{database.name}_away"
    database.server.create_database(away)
    for table in ("fence", f"{away}.plain", "plain_child"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder = tmp_path / "shop"
    reference = "(id INT PRIMARY KEY, v INT, FOREIGN KEY (v) REFERENCES"
    try:
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            session.run(
                "CREATE TABLE renamed (id INT PRIMARY KEY, v INT)",
                "CREATE TABLE dropped (id INT PRIMARY KEY, v INT)",
                "CREATE TABLE other (id INT PRIMARY KEY, v INT)",
                f"CREATE TABLE child {reference} renamed (id) ON DELETE SET NULL)",
                "CREATE TABLE free (id INT PRIMARY KEY, v INT, "
                "CONSTRAINT k FOREIGN KEY (v) REFERENCES dropped (id) ON DELETE SET NULL)",
                f"CREATE TABLE calm {reference} other (id) ON DELETE SET NULL)",
                *(f"INSERT INTO {name} VALUES (1, 1), (2, 2)" for name in PARENTS),
                *(f"INSERT INTO {name} VALUES (1, 1), (2, 2)" for name in CHILDREN),
                "DELETE FROM renamed WHERE id = 1",
                "DELETE FROM dropped WHERE id = 2",
                f"RENAME TABLE renamed TO {away}.renamed, {away}.plain TO renamed",
                "ALTER TABLE free DROP FOREIGN KEY k",
            )
            ran.set()
            await caught_up(folder, database, 1)
            if database.server.product == "mariadb":
                # MySQL 9.6 and later has the children's changes in its binlog.
                await eventually(lambda: len(suspensions(fetcher)) >= 3, 30)
                named = {source.partition(".")[2] for source in suspensions(fetcher)}
                assert named == {"renamed", "child", "free"}
            named = {source.partition(".")[2] for source in suspensions(fetcher)}
            assert set(differing(folder, database, CHILDREN)) <= named
    finally:
        database.execute("DROP TABLE IF EXISTS child")
        database.server.drop_database(away)


async def test_the_keys_of_the_position_outlive_a_restart(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """While the relay is down, a parent's rows go and its name is taken by another table."""
    tables = ["renamed", "dropped", "plain", "fence"]
    for table in tables:
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    for child, parent in (("child", "renamed"), ("free", "dropped")):
        database.execute(
            f"CREATE TABLE {child} (id INT PRIMARY KEY, v INT, CONSTRAINT {child}_k "
            f"FOREIGN KEY (v) REFERENCES {parent} (id) ON DELETE SET NULL)"
        )
        database.execute(f"INSERT INTO {parent} VALUES (1, 1), (2, 2)")
    config = database_config("shop", database.url, f"{database.name}.*")
    folder = tmp_path / "shop"
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for child in ("child", "free"):
            database.execute(f"INSERT INTO {child} VALUES (1, 1), (2, 2)")
        await caught_up(folder, database, 1)
    for statement in (
        "DELETE FROM renamed WHERE id = 1",
        "DELETE FROM dropped WHERE id = 2",
        "RENAME TABLE renamed TO away, plain TO renamed",
        "ALTER TABLE free DROP FOREIGN KEY free_k",
    ):
        database.execute(statement)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await caught_up(folder, database, 2)
        if database.server.product == "mariadb":
            # MySQL 9.6 and later has the children's changes in its binlog.
            children = {f"{database.name}.child", f"{database.name}.free"}
            await eventually(lambda: suspensions(fetcher).keys() >= children, 30, "named")
        else:
            assert not differing(folder, database, ["child", "free"])


async def test_names_in_any_case_are_one_table_where_the_server_folds_them(tmp_path: Path) -> None:
    options = ("--lower-case-table-names=1",)
    with MariaDBServer(tmp_path / "own", options=options) as server:
        server.create_database("shop")
        database = FreshDatabase(server, "shop")
        names = ["orders", "parts", "swapped", "seen", "fence"]
        for table in names:
            database.execute(f"CREATE TABLE {table.title()} (id INT PRIMARY KEY, v INT)")
        database.execute("CREATE VIEW Shown AS SELECT * FROM SEEN")
        folder = tmp_path / "shop"
        config = database_config("shop", database.url, "shop.*")
        session = Session(database)
        async with capturing(config, tmp_path) as fetcher:
            await streaming(fetcher)
            for table in names:
                database.execute(f"INSERT INTO {table.upper()} VALUES (1, 1)")
            session.run(
                "TRUNCATE TABLE ORDERS",
                "TRUNCATE SHOP.`Parts`",
                "RENAME TABLE SWAPPED TO Other, OTHER TO Swapped",
                "CREATE TABLE New_Rows LIKE swapped",
                "INSERT INTO New_Rows VALUES (9, 9)",
                "RENAME TABLE Swapped TO Old_Rows, NEW_ROWS TO SWAPPED",
                "SET binlog_format = STATEMENT",
                "INSERT INTO SHOWN VALUES (7, 7)",
            )
            session.close()
            await caught_up(folder, database, 9)
            emptied = [source for op, source in ring_state(folder).ops if op == "t"]
            assert sorted(emptied) == ["shop.new_rows", "shop.orders", "shop.parts"]
            await eventually(
                lambda: {"shop.swapped", "shop.seen"} <= set(suspensions(fetcher)),
                30,
                "suspended",
            )
            assert {"shop.fence", "shop.orders", "shop.parts"}.isdisjoint(suspensions(fetcher))


async def test_a_chunk_that_does_not_show_a_cascade_yet_is_read_again(
    mariadb_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server logs a transaction before its engine shows it."""
    database, folder = mariadb_database, tmp_path / "shop"
    for table in ("parent", "fence"):
        database.execute(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)")
    database.execute(
        "CREATE TABLE child (id INT PRIMARY KEY, v INT, "
        "FOREIGN KEY (v) REFERENCES parent (id) ON DELETE CASCADE)"
    )
    config = database_config("shop", database.url, f"{database.name}.*")
    read_chunk, largest_key = mysql_chunks.read_chunk, mysql_chunks.largest_key
    snapshot = DomainNumbering.snapshot
    early: list[tuple[MySqlConnection, LocatedSnapshot]] = []

    def early_chunk(
        connection: MySqlConnection, settings: MySqlSettings, numbering: Any, request: ChunkRequest
    ) -> Chunk:
        if not early:
            return read_chunk(connection, settings, numbering, request)
        before, location = early[0]
        numbering = SimpleNamespace(snapshot=lambda _: contextlib.nullcontext(location))
        return read_chunk(before, settings, numbering, request)

    def early_key(
        connection: MySqlConnection, settings: MySqlSettings, source: str
    ) -> list[Any] | None:
        return [2] if early else largest_key(connection, settings, source)

    def early_snapshot(self: DomainNumbering, connection: MySqlConnection) -> Any:
        if not early:
            return snapshot(self, connection)
        return contextlib.nullcontext(early.pop()[1])  # From now on the engine shows it.

    monkeypatch.setattr(mysql_chunks, "read_chunk", early_chunk)
    monkeypatch.setattr(mysql_chunks, "largest_key", early_key)
    monkeypatch.setattr(DomainNumbering, "snapshot", early_snapshot)
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        database.execute("INSERT INTO parent VALUES (1, 1), (2, 2)")
        database.execute("INSERT INTO child VALUES (1, 1), (2, 2)")
        await caught_up(folder, database, 1)
        connection = MySqlConnection(read_settings(config))
        connection.query("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.query("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        location = dict(connection.query("SHOW STATUS LIKE 'binlog_snapshot_%'"))
        located = LocatedSnapshot(
            str(location["Binlog_snapshot_file"]), int(location["Binlog_snapshot_position"])
        )
        early.append((connection, located))
        database.execute("DELETE FROM parent WHERE id = 1")
        await caught_up(folder, database, 2)
        await eventually(lambda: f"{database.name}.child" in suspensions(fetcher), 30)
        await dump(folder, f"{database.name}.child")
        connection.close()
        assert not differing(folder, database, ["child", "parent"])
