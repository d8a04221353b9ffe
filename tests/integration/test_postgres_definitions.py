"""Definitions that give old rows other values: PostgreSQL logs no row of them.

The table is suspended by name and resynchronised, and its consumers end with the source's rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from databus.common.config import DatabaseConfig
from databus.common.frame.frame_format import Op
from databus.common.table_state import CaptureState
from tests.storm.replica import RingReplica, Table, differences
from tests.support.capture import capturing, database_config, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.relay_process import ring_frames
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SOURCE = "public.t"


def config_of(database: FreshDatabase, **options: Any) -> DatabaseConfig:
    config = database_config("shop", database.url, "public.*", **options)
    return config.model_copy(update={"resync": "auto"})


def differing(database: FreshDatabase, replica: RingReplica, source: str = SOURCE) -> list[str]:
    """Where a consumer's copy of a table is not what the source has."""
    return differing_tables(database, replica, [source]).get(source, [])


def differing_tables(
    database: FreshDatabase, replica: RingReplica, sources: Iterable[str]
) -> dict[str, list[str]]:
    """Where copies are not what the source has, by table; all are read in one session."""
    replica.read()
    found = {}
    with contextlib.closing(database.server.connect(database.name)) as session:
        for source in sources:
            # A generated column is in no row of the stream.
            names = [
                name
                for (name,) in session.execute(
                    "SELECT attname::text FROM pg_attribute WHERE attrelid = %s::regclass "
                    "AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum",
                    (source,),
                )
            ]
            rows = session.execute(f"SELECT {', '.join(names)} FROM {source}")
            held = replica.tables.get(source, Table())
            key = held.schema.key if held.schema is not None else ()
            has = [dict(zip(names, row, strict=True)) for row in rows]
            if unlike := differences(names, list(key), has, held):
                found[source] = unlike
    return found


def is_followed(replica: RingReplica, source: str = SOURCE) -> bool:
    replica.read()
    return replica.state(source) is None


@pytest.mark.parametrize("when", ["at a look", "with the next row", "while the relay is down"])
async def test_a_column_with_a_default_reaches_the_rows_that_were_there(
    db: FreshDatabase, tmp_path: Path, when: str
) -> None:
    # With the next row: no look at the catalogue comes to the test's help.
    every = "1h" if when == "with the next row" else "100ms"
    config = config_of(db, discover_every=every)
    db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
        replica = RingReplica(tmp_path / "shop")
        await eventually(lambda: not differing(db, replica), 30, "the rows have come")
        if when != "while the relay is down":
            db.execute("ALTER TABLE t ADD COLUMN d int DEFAULT 7")
            if when == "with the next row":
                db.execute("DELETE FROM t WHERE id = 1")
            await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
    if when == "while the relay is down":
        db.execute("ALTER TABLE t ADD COLUMN d int DEFAULT 7")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
        await eventually(lambda: is_followed(replica), 30, "followed again")
        assert differing(db, replica) == []
    (state,) = replica.suspensions
    assert state.source == SOURCE
    assert "its column d was added" in state.reason
    assert state.state is CaptureState.SUSPENDED
    assert not replica.faults
    replica.close()


# What gives rows that are there other values, or other keys.  Each case has a table of its own,
# with two rows; the second list is what a migration does.
Case = tuple[list[str], list[str]]
PLAIN = "CREATE TABLE {t} (id int PRIMARY KEY, v int)"
PARTED = [
    "CREATE TABLE {t} (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
    "CREATE TABLE {t}_0 PARTITION OF {t} FOR VALUES FROM (0) TO (2)",
    "CREATE TABLE {t}_1 PARTITION OF {t} FOR VALUES FROM (2) TO (90)",
]
ONE_PART = [PARTED[0], "CREATE TABLE {t}_0 PARTITION OF {t} FOR VALUES FROM (0) TO (90)"]
ROWS = "INSERT INTO {t} (id, v) VALUES (1, 10), (2, 20)"
MOODS = [
    "CREATE TYPE mood_{t} AS ENUM ('sad', 'ok')",
    "CREATE TABLE {t} (id int PRIMARY KEY, v int, m mood_{t} DEFAULT 'sad')",
    ROWS,
]
PAIRS = [
    "CREATE TYPE pair_{t} AS (a int, b text)",
    "CREATE TABLE {t} (id int PRIMARY KEY, v int, p pair_{t} DEFAULT ROW(1, 'x'))",
    ROWS,
]
SUSPENDING: dict[str, Case] = {
    "constant": ([PLAIN, ROWS], ["ALTER TABLE {t} ADD d int DEFAULT 7"]),
    "undefaulted": (
        [PLAIN, ROWS],
        ["ALTER TABLE {t} ADD d int DEFAULT 7", "ALTER TABLE {t} ALTER d DROP DEFAULT"],
    ),
    "required": ([PLAIN, ROWS], ["ALTER TABLE {t} ADD d text NOT NULL DEFAULT 'x'"]),
    "volatile": ([PLAIN, ROWS], ["ALTER TABLE {t} ADD d text DEFAULT gen_random_uuid()::text"]),
    "numbered": ([PLAIN, ROWS], ["ALTER TABLE {t} ADD d serial"]),
    "identity": ([PLAIN, ROWS], ["ALTER TABLE {t} ADD d int GENERATED BY DEFAULT AS IDENTITY"]),
    "lucky": (
        [PLAIN, ROWS, "CREATE DOMAIN lucky_{t} AS int DEFAULT 7"],
        ["ALTER TABLE {t} ADD d lucky_{t}"],
    ),
    "ungenerated": (
        ["CREATE TABLE {t} (id int PRIMARY KEY, v int, d int GENERATED ALWAYS AS (v + 1) STORED)",
         ROWS],
        ["ALTER TABLE {t} ALTER d DROP EXPRESSION"],
    ),
    "retyped": ([PLAIN, ROWS], ["ALTER TABLE {t} ALTER v TYPE text"]),
    "computed": ([PLAIN, ROWS], ["ALTER TABLE {t} ALTER v TYPE int USING v * 2"]),
    "computed_twice": (
        [PLAIN, ROWS],
        ["ALTER TABLE {t} ALTER v TYPE int USING v * 2",
         "ALTER TABLE {t} ALTER v TYPE int USING v + 1"],
    ),
    "shortened": (
        ["CREATE TABLE {t} (id int PRIMARY KEY, v numeric(9, 3))", ROWS],
        ["UPDATE {t} SET v = 1.234", "ALTER TABLE {t} ALTER v TYPE numeric(9, 1)"],
    ),
    "unwritten": (  # The same bytes in the same file, read as another type.
        [PLAIN, ROWS, "UPDATE {t} SET v = -1 WHERE id = 1"],
        ["ALTER TABLE {t} ALTER v TYPE oid"],
    ),
    "returned": ([PLAIN, ROWS], ["ALTER TABLE {t} DROP v", "ALTER TABLE {t} ADD v int"]),
    "renamed": ([PLAIN, ROWS], ["ALTER TABLE {t} RENAME v TO w"]),
    "exchanged": (
        ["CREATE TABLE {t} (id int PRIMARY KEY, v int, w int DEFAULT 5)", ROWS],
        ["ALTER TABLE {t} RENAME v TO x", "ALTER TABLE {t} RENAME w TO v",
         "ALTER TABLE {t} RENAME x TO w"],
    ),
    "label": (MOODS, ["ALTER TYPE mood_{t} RENAME VALUE 'sad' TO 'blue'"]),
    "label_for_a_while": (
        MOODS,
        ["ALTER TYPE mood_{t} RENAME VALUE 'sad' TO 'blue'",
         "INSERT INTO {t} VALUES (50, 5, 'blue')",
         "ALTER TYPE mood_{t} RENAME VALUE 'blue' TO 'sad'"],
    ),
    "labels": (
        [*MOODS, "CREATE DOMAIN calm_{t} AS mood_{t}[]", "CREATE TYPE day_{t} AS (m calm_{t})",
         "ALTER TABLE {t} ADD c day_{t}", "UPDATE {t} SET m = 'ok', c = '({{sad}})'"],
        ["ALTER TYPE mood_{t} RENAME VALUE 'sad' TO 'blue'"],
    ),
    "label_of_key": (
        ["CREATE TYPE mood_{t} AS ENUM ('sad', 'ok')",
         "CREATE TABLE {t} (id int, v int, m mood_{t} DEFAULT 'sad', PRIMARY KEY (id, m))", ROWS],
        ["ALTER TYPE mood_{t} RENAME VALUE 'sad' TO 'blue'"],
    ),
    "member_added": (PAIRS, ["ALTER TYPE pair_{t} ADD ATTRIBUTE c int"]),
    "member_gone": (PAIRS, ["ALTER TYPE pair_{t} DROP ATTRIBUTE a"]),
    "parts_constant": ([*PARTED, ROWS], ["ALTER TABLE {t} ADD d int DEFAULT 7"]),
    "parts_undefaulted": (
        [*PARTED, ROWS],
        ["ALTER TABLE {t} ADD d int DEFAULT 7", "ALTER TABLE {t} ALTER d DROP DEFAULT"],
    ),
    "parts_volatile": ([*PARTED, ROWS], ["ALTER TABLE {t} ADD d text DEFAULT random()::text"]),
    "parts_computed": ([*PARTED, ROWS], ["ALTER TABLE {t} ALTER v TYPE int USING v * 2"]),
    "part_computed": (
        [*ONE_PART, ROWS],
        ["DELETE FROM {t} WHERE id = 1", "ALTER TABLE {t} ALTER v TYPE int USING v * 2"],
    ),
    "part_emptied": (  # Of the TRUNCATE of a partition there is no event.
        [*ONE_PART, ROWS],
        ["TRUNCATE {t}_0", "ALTER TABLE {t} ADD d int DEFAULT 7"],
    ),
    "key_retyped": ([PLAIN, ROWS], ["ALTER TABLE {t} ALTER id TYPE text"]),
    "key_computed": ([PLAIN, ROWS], ["ALTER TABLE {t} ALTER id TYPE int USING id + 1"]),
    "key_renamed": ([PLAIN, ROWS], ["ALTER TABLE {t} RENAME id TO number"]),
    "key_moved": (
        [PLAIN, ROWS],
        ["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", "ALTER TABLE {t} ADD PRIMARY KEY (v)"],
    ),
}  # fmt: skip
# What leaves every value as it is: no consumer is to be sent the table again.
HARMLESS: dict[str, Case] = {
    "nullable": ([PLAIN, ROWS], ["ALTER TABLE {t} ADD d int, ADD e int DEFAULT NULL"]),
    "backfilled": (
        [PLAIN, ROWS],
        ["ALTER TABLE {t} ADD d int", "ALTER TABLE {t} ALTER d SET DEFAULT 3",
         "UPDATE {t} SET d = 4", "ALTER TABLE {t} ALTER d SET NOT NULL"],
    ),
    "generated": ([PLAIN, ROWS], ["ALTER TABLE {t} ADD d int GENERATED ALWAYS AS (v * 2) STORED"]),
    "dropped": ([PLAIN, ROWS], ["ALTER TABLE {t} DROP v"]),
    "vacuumed": (
        [PLAIN, ROWS],
        ["VACUUM FULL {t}", "REINDEX TABLE {t}", "CLUSTER {t} USING {t}_pkey"],
    ),
    "missing_vacuumed": (
        [PLAIN, ROWS, "ALTER TABLE {t} ADD d int DEFAULT 7"],
        ["VACUUM FULL {t}"],
    ),
    "emptied": ([PLAIN, ROWS], ["TRUNCATE {t}", "INSERT INTO {t} VALUES (3, 3)"]),
    "widened": (
        ["CREATE TABLE {t} (id int PRIMARY KEY, v numeric(9, 2), w varchar(9) DEFAULT 'w')", ROWS],
        ["ALTER TABLE {t} ALTER v TYPE numeric(12, 2)", "ALTER TABLE {t} ALTER w TYPE varchar(20)",
         "ALTER TABLE {t} ALTER w TYPE text"],
    ),
    "label_added": (MOODS, ["ALTER TYPE mood_{t} ADD VALUE 'glad' BEFORE 'sad'"]),
    "member_renamed": (PAIRS, ["ALTER TYPE pair_{t} RENAME ATTRIBUTE a TO z"]),
    "type_renamed": (PAIRS, ["ALTER TYPE pair_{t} RENAME TO couple_{t}"]),
    "settings": (
        [PLAIN, ROWS],
        ["ALTER TABLE {t} ALTER v SET STATISTICS 10", "ALTER TABLE {t} SET (fillfactor = 70)",
         "ALTER TABLE {t} ADD CHECK (v > 0)", "CREATE INDEX ON {t} (v)", "ANALYZE {t}",
         "COMMENT ON COLUMN {t}.v IS 'v'", "ALTER TABLE {t} ALTER v SET DEFAULT 5"],
    ),
    "parts_nullable": ([*PARTED, ROWS], ["ALTER TABLE {t} ADD d int"]),
}  # fmt: skip


def run(database: FreshDatabase, table: str, statements: list[str]) -> None:
    for statement in statements:
        database.execute(statement.format(t=table))


@pytest.mark.parametrize("when", ["between rows", "while the relay is down"])
async def test_every_definition_that_changes_old_rows_suspends_and_no_other_does(
    db: FreshDatabase, tmp_path: Path, when: str
) -> None:
    is_down = when == "while the relay is down"
    # A look takes its time with so many tables, and the machine has others to run.
    config = config_of(db, discover_every="1s")
    cases = {**SUSPENDING, **HARMLESS}
    for name, (made, _) in cases.items():
        run(db, name, made)

    def unequal() -> dict[str, list[str]]:
        return differing_tables(db, replica, [f"public.{name}" for name in cases])

    async def is_all_equal() -> bool:
        # In a thread: some seconds in which the fetcher, in this loop, has to continue.
        return not await asyncio.to_thread(unequal)

    def named() -> set[str]:
        replica.read()
        return {state.source.removeprefix("public.") for state in replica.suspensions}

    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for name in cases:
            db.execute(f"UPDATE {name} SET v = v")
        replica = RingReplica(tmp_path / "shop")
        await eventually(is_all_equal, 60, "all rows have come", poll_s=0.5)
        assert not named()
        if not is_down:
            for name, (_, altered) in cases.items():
                await asyncio.to_thread(run, db, name, altered)
    if is_down:
        for name, (_, altered) in cases.items():
            run(db, name, altered)
    wanted = set(SUSPENDING)
    if db.execute("SELECT DISTINCT d FROM lucky") == [(None,)]:
        wanted.remove("lucky")  # Servers before 2025 do not apply a domain's default.
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        for name in SUSPENDING.keys() - {"renamed"}:
            db.execute(f"UPDATE {name} SET v = v")

        def left() -> set[str]:
            """Tables to come: they were not suspended yet, or are not followed again."""
            found = {record.source.removeprefix("public.") for record in fetcher.tables.book}
            return found | (wanted - named())

        try:
            await eventually(lambda: not left(), 60, "suspended and followed again", poll_s=0.2)
            await eventually(is_all_equal, 30, "all rows have come again", poll_s=0.5)
        except AssertionError as error:
            raise AssertionError(f"left: {left()}; unequal: {unequal()}") from error
    assert named() == wanted
    assert not replica.faults
    replica.close()


async def test_rows_on_both_sides_of_the_change_in_one_transaction(
    db: FreshDatabase, tmp_path: Path
) -> None:
    config = config_of(db, discover_every="1h")
    db.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t SELECT n, n FROM generate_series(1, 9) n")
        replica = RingReplica(tmp_path / "shop")
        await eventually(lambda: not differing(db, replica), 30, "the rows have come")
        db.transaction(
            "INSERT INTO t VALUES (20, 20)",
            "DELETE FROM t WHERE id = 1",
            "ALTER TABLE t ADD d int DEFAULT 7, ALTER v TYPE int USING v + 100",
            "DELETE FROM t WHERE id = 2",
            "UPDATE t SET d = 8 WHERE id = 3",
            "SAVEPOINT s",
            "ALTER TABLE t DROP d",
            "ROLLBACK TO s",
            "INSERT INTO t VALUES (21, 21, 21)",
        )
        await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
        await eventually(lambda: is_followed(replica), 30, "followed again")
        assert differing(db, replica) == []
    (state,) = replica.suspensions
    assert "column v was altered" in state.reason
    assert "column d was added" in state.reason
    # The state comes directly behind the transaction's window, and none of its rows is missing.
    ops = [(view.scn, Op(view.op)) for view in ring_frames(tmp_path / "shop")]
    start, stop = (ops.index((state.since_scn, op)) for op in (Op.INSERT, Op.END_OF_WINDOW))
    assert [op.name[0] for _, op in ops[start:stop]] == list("IDDUI")
    between = ops[stop + 1 : [op for _, op in ops].index(Op.TABLE_STATE)]
    assert {op for _, op in between} <= {Op.SCHEMA_CHANGE, Op.END_OF_WINDOW}
    assert not replica.faults
    replica.close()


async def with_a_row(db: FreshDatabase, config: DatabaseConfig, folder: Path) -> RingReplica:
    """A copy of the table t with one row; the relay has ended."""
    db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    async with capturing(config, folder) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (1, 'a')")
        replica = RingReplica(folder / "shop")
        await eventually(lambda: not differing(db, replica), 30, "the row has come")
    return replica


async def test_a_truncate_before_a_rename_does_not_end_the_suspension(
    db: FreshDatabase, tmp_path: Path
) -> None:
    """The rows behind the TRUNCATE have the old name, and no later row brings the new one."""
    config = config_of(db)
    replica = await with_a_row(db, config, tmp_path)
    run(
        db,
        "t",
        ["TRUNCATE t", "INSERT INTO t VALUES (2, 'b')", "ALTER TABLE t RENAME v TO w"],
    )
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
        await eventually(lambda: is_followed(replica), 30, "followed again")
        assert differing(db, replica) == []
    replica.close()


async def test_a_renamed_table_that_is_empty_by_now_is_named_before_its_rows_come(
    db: FreshDatabase, tmp_path: Path
) -> None:
    """What it had before the rename has no event under the new name."""
    config = config_of(db)
    replica = await with_a_row(db, config, tmp_path)
    run(
        db,
        "u",
        [
            "ALTER TABLE t RENAME TO {t}",
            "INSERT INTO {t} VALUES (2, 'b')",
            "UPDATE {t} SET v = 'c'",
            "TRUNCATE {t}",
        ],
    )
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
        db.execute("INSERT INTO u VALUES (3, 'd')")
        await eventually(lambda: not differing(db, replica, "public.u"), 30, "u is followed")
    assert "public.u" in [state.source for state in replica.suspensions]
    assert not replica.faults
    replica.close()


async def test_it_stays_named_over_a_restart_until_an_operator_has_it_resynchronised(
    db: FreshDatabase, tmp_path: Path
) -> None:
    config = config_of(db, discover_every="100ms").model_copy(update={"resync": "manual"})
    db.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (1, 1)")
        replica = RingReplica(tmp_path / "shop")
        db.execute("ALTER TABLE t ADD d int DEFAULT 7")
        await eventually(lambda: bool(replica.read() or replica.suspensions), 30, "named")
    async with capturing(config, tmp_path) as fetcher:
        await streaming(fetcher)
        db.execute("INSERT INTO t VALUES (2, 2, 2)")
        old = "row (Decimal('1'),): d = None, not 7 (from before the last definition)"
        await eventually(lambda: differing(db, replica) == [old], 30)
        assert not is_followed(replica)
        fetcher.tables.confirm(SOURCE)
        await eventually(lambda: is_followed(replica), 30, "followed again")
        assert differing(db, replica) == []
    assert len(replica.suspensions) == 1
    replica.close()
