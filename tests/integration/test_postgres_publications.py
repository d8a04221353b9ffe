"""Publications as administrators make them: what they do not give whole is suspended by name, and
no table is published whose updates the server would then refuse."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psycopg
import pytest

from databus.common.errors import PreflightFailed, SourceUnavailable, UnsupportedChange
from databus.relay.dumps.resync_pace import ResyncPace
from databus.relay.sources.contract import ChunkRequest
from databus.relay.sources.postgres import PostgresSource
from databus.relay.sources.postgres.stream.slot_stream import SlotStream
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from tests.support.capture import PACE, capturing, is_settled, streaming
from tests.support.fixtures import FreshDatabase
from tests.support.opened_source import opened_scn
from tests.support.postgres_follower import Seen, config_of, now_scn, opened, opened_on, table_of
from tests.support.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@dataclass
class Following:
    """A stream that is read beside the test."""

    source: PostgresSource
    seen: Seen = field(default_factory=Seen)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, after_scn: int) -> None:
        """Read on; a stream of an older server ends where the relay has to connect again."""
        while True:
            try:
                async with contextlib.aclosing(self.source.stream(after_scn)) as batches:
                    async for batch in batches:
                        self.seen.take(batch)
                        self.changed.set()
            except SourceUnavailable as error:
                if "the relay connects again" not in error.message:
                    raise
                after_scn = self.seen.resolved

    async def until(self, fulfilled: Callable[[], bool]) -> None:
        async with asyncio.timeout(20 * PATIENCE):
            while not fulfilled():
                self.changed.clear()
                await self.changed.wait()

    async def reaches(self, database: FreshDatabase) -> None:
        scn = now_scn(database)
        await self.until(lambda: self.seen.resolved >= scn)

    async def why(self, source: str) -> str:
        """Why the table is suspended; waits until it is."""
        await self.until(lambda: source in self.source._suspended.suspensions)
        return self.source._suspended.suspensions[source].why

    async def equals(self, database: FreshDatabase, source: str) -> None:
        """After a dump, and what comes then, the copy is the table."""
        async with asyncio.timeout(20 * PATIENCE):
            while True:
                with contextlib.suppress(SourceUnavailable):  # It is just connected again.
                    self.seen.tables[source] = await table_of(self.source, source)
                    break
                await asyncio.sleep(0.02)
        await self.reaches(database)
        assert self.seen.tables[source] == await table_of(self.source, source)
        assert source not in self.source._suspended.suspensions


@contextlib.asynccontextmanager
async def following(source: PostgresSource, after_scn: int) -> AsyncIterator[Following]:
    reader = Following(source)
    task = asyncio.create_task(reader.read(after_scn))
    try:
        yield reader
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_no_table_is_published_whose_updates_the_server_would_refuse(
    db: FreshDatabase,
) -> None:
    for statement in (
        "CREATE TABLE good (id int PRIMARY KEY, v int)",
        "CREATE TABLE lazy (id int PRIMARY KEY DEFERRABLE, v int)",
        "CREATE TABLE lazy_full (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v int)",
        "ALTER TABLE lazy_full REPLICA IDENTITY FULL",
        "CREATE TABLE child () INHERITS (good)",
        "CREATE TABLE days (id int, day int, v int, PRIMARY KEY (id, day)) "
        "PARTITION BY RANGE (day)",
        "CREATE TABLE days_0 PARTITION OF days FOR VALUES FROM (0) TO (10)",
        "ALTER TABLE days_0 REPLICA IDENTITY NOTHING",
        "CREATE TABLE heaps (id int NOT NULL, v int) PARTITION BY RANGE (id)",
        "CREATE UNIQUE INDEX heaps_id ON heaps (id)",
        "ALTER TABLE heaps REPLICA IDENTITY USING INDEX heaps_id",
        "CREATE TABLE heaps_0 PARTITION OF heaps FOR VALUES FROM (0) TO (10)",
    ):
        db.execute(statement)
    changed = ("good", "lazy", "lazy_full", "child", "heaps")

    def application() -> None:
        for table in changed:
            db.execute(f"INSERT INTO {table} (id, v) VALUES (1, 1)")
            db.execute(f"UPDATE ONLY {table} SET v = v + 1" if table != "heaps" else
                       "UPDATE heaps SET v = v + 1")  # fmt: skip
            db.execute(f"DELETE FROM {table} WHERE v = 2")
        db.execute("INSERT INTO days VALUES (1, 1, 1)")
        db.execute("UPDATE days SET v = 2")
        db.execute("DELETE FROM days")

    with pytest.raises(PreflightFailed) as refused:
        async with opened(config_of(db)):
            pass
    named = {f["setting"]: f["remedy"] for f in refused.value.details["findings"]}
    assert set(named) == {
        f"key of public.{name}" for name in ("lazy", "lazy_full", "child", "days", "heaps")
    }
    assert "REPLICA IDENTITY USING INDEX" in named["key of public.lazy"]
    assert "days_0" in named["key of public.days"]
    application()
    source = PostgresSource(config_of(db, discover_every="100ms"))
    source.restore("", None, 0)  # It continues: tables made meanwhile are left out, by name.
    try:
        start = await opened_scn(source)
        application()
        async with following(source, start) as reader:
            await reader.reaches(db)
            # A table of ours that loses its key leaves the publication before long.
            db.execute("ALTER TABLE good DROP CONSTRAINT good_pkey")
            assert "no key" in await reader.why("public.good")
            application()
            db.execute("ALTER TABLE good ADD PRIMARY KEY (id)")
            await reader.until(lambda: "public.good" not in source._unpublished)
            db.execute("INSERT INTO good VALUES (7, 7)")
            await reader.equals(db, "public.good")
            db.execute("UPDATE good SET v = 8")
            await reader.reaches(db)
            assert reader.seen.tables["public.good"] == {(7,): {"id": 7, "v": 8}}
    finally:
        await source.close()


PARTS_SINCE = 15_00_00
"""Row filters and lists of columns."""
ALTERED = [
    ("SET (publish = 'insert')", "leaves out every update", "SET (publish = 'insert, update"),
    ("DROP TABLE t", "lacks it", 'ADD TABLE ONLY "public"."t"'),
    ("SET TABLE t WHERE (id > 5), other, days", "only some of its rows", "DROP TABLE"),
    ("SET TABLE t (id), other, days", "lacks its columns v", "DROP TABLE"),
]


async def test_an_altered_publication_suspends_tables_and_is_not_reverted(
    db: FreshDatabase,
) -> None:
    name = f"databus_{db.name}"
    for statement in (
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "CREATE TABLE days (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE days_0 PARTITION OF days FOR VALUES FROM (0) TO (10)",
    ):
        db.execute(statement)
    whole = f"ALTER PUBLICATION {name} SET TABLE t, other, days"
    async with opened_on(db, discover_every="100ms") as (source, start):
        async with following(source, start) as reader:
            await reader.reaches(db)
            ((version,),) = db.execute("SELECT current_setting('server_version_num')::int")
            known = ALTERED if int(version) >= PARTS_SINCE else ALTERED[:2]
            for number, (altered, why, cure) in enumerate(known):
                db.execute("INSERT INTO t VALUES (%s, 'a')", number)
                db.execute(f"ALTER PUBLICATION {name} {altered}")
                db.execute("UPDATE t SET v = v || 'b'")
                reason = await reader.why("public.t")
                assert why in reason
                assert cure in reason
                assert cure in "; ".join(str(finding) for finding in await source.preflight())
                with pytest.raises(UnsupportedChange, match="ALTER PUBLICATION"):
                    await source.largest_key("public.t")
                ((still,),) = db.execute(
                    "SELECT count(*) FROM pg_publication_tables WHERE pubname = %s "
                    "AND tablename = 't'", name,
                )  # fmt: skip
                assert still == (0 if "DROP" in altered else 1)
                if "SET TABLE" in altered:
                    db.execute(whole)
                elif "DROP" in altered:
                    db.execute(f"ALTER PUBLICATION {name} ADD TABLE t")
                else:
                    db.execute(f"ALTER PUBLICATION {name} SET (publish = "
                               "'insert, update, delete, truncate')")  # fmt: skip
                await reader.until(lambda: not source._unpublished)
                for table in ("public.t", "public.other", "public.days"):
                    if table in source._suspended.suspensions:
                        await reader.equals(db, table)
                db.execute("UPDATE t SET v = v || 'c'")
                await reader.equals(db, "public.t")
            # It was restored before the relay looked: that it was changed is found all the same.
            with psycopg.connect(db.url) as both:
                both.execute(f"ALTER PUBLICATION {name} DROP TABLE other")
                both.execute("INSERT INTO other VALUES (1)")
                both.execute(f"ALTER PUBLICATION {name} ADD TABLE other")
            assert "was altered" in await reader.why("public.other")
            assert "public.t" not in source._suspended.suspensions
            await reader.equals(db, "public.other")
            # Without the root, partitions come under their own names: not as tables of ours.
            db.execute(f"ALTER PUBLICATION {name} SET (publish_via_partition_root = false)")
            db.execute("INSERT INTO days VALUES (1)")
            assert "publish_via_partition_root" in await reader.why("public.days")
            await reader.reaches(db)
            assert "public.days_0" not in reader.seen.tables
            resume_state = reader.seen.resume_state
            start = reader.seen.resolved
        # What was altered and corrected while the relay was away is found too.
        db.execute(f"ALTER PUBLICATION {name} SET (publish = 'delete')")
        db.execute("INSERT INTO other VALUES (2)")
        db.execute(
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate', "
            "publish_via_partition_root = true)"
        )
    resumed = PostgresSource(config_of(db, discover_every="100ms"))
    resumed.restore(resume_state, None, start)
    try:
        await resumed.open()
        async with following(resumed, start) as reader:
            assert "was altered" in await reader.why("public.other")
            for table in ("public.t", "public.other", "public.days"):
                await reader.equals(db, table)
    finally:
        await resumed.close()


@pytest.fixture(params=["server", "old server"])
def sender(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A sender as that of the server, or one that the relay takes for an old one."""
    if request.param == "old server":
        monkeypatch.setattr(Catalogue, "has_fresh_senders", False)
    return str(request.param)


async def test_no_change_is_lost_after_an_alteration_beside_an_open_transaction(
    db: FreshDatabase, sender: str
) -> None:
    """Old servers decode the later transactions with the publication that the open one saw."""
    name = f"databus_{db.name}"
    for table in ("a", "b"):
        db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        db.execute(f"INSERT INTO {table} VALUES (1, 'before')")
    async with opened_on(db, discover_every="100ms") as (source, start):
        async with following(source, start) as reader:
            for table in ("a", "b"):
                await reader.equals(db, f"public.{table}")
            db.execute(f"ALTER PUBLICATION {name} SET (publish = 'insert')")
            with psycopg.connect(db.url) as first:
                first.execute("INSERT INTO a VALUES (2, 'open')")
                every = "insert, update, delete, truncate"
                db.execute(f"ALTER PUBLICATION {name} SET (publish = '{every}')")
                for table in ("a", "b"):
                    assert "was altered" in await reader.why(f"public.{table}")
                with contextlib.suppress(SourceUnavailable):
                    reader.seen.tables["public.b"] = await table_of(source, "public.b")
            for number in range(3):
                db.execute("UPDATE b SET v = %s", f"after {number}")
                db.execute("UPDATE a SET v = %s", f"after {number}")
                for table in ("a", "b"):
                    await reader.equals(db, f"public.{table}")
            db.execute("UPDATE b SET v = 'last'")
            db.execute("DELETE FROM a WHERE id = 1")
            await reader.reaches(db)
            for table in ("public.a", "public.b"):
                assert reader.seen.tables[table] == await table_of(source, table)


async def test_tables_wait_for_open_transactions_without_attempts_and_are_read_at_once_after_them(
    db: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Catalogue, "has_fresh_senders", False)
    config = config_of(db, discover_every="100ms").model_copy(update={"resync": "auto"})
    # A second attempt after a failed one would come too late for the test.
    pace = replace(PACE, resync=ResyncPace(alone_s=0.0, first_pause_s=3600.0))
    db.execute("CREATE TABLE a (id int PRIMARY KEY)")
    db.execute("CREATE TABLE b (id int PRIMARY KEY)")
    async with capturing(config, tmp_path, pace=pace) as fetcher:
        await streaming(fetcher)
        with psycopg.connect(db.url) as first:
            first.execute("INSERT INTO a VALUES (1)")
            db.execute(f"ALTER PUBLICATION databus_{db.name} SET (publish = 'insert')")
            every = "insert, update, delete, truncate"
            db.execute(f"ALTER PUBLICATION databus_{db.name} SET (publish = '{every}')")

            def waits() -> bool:
                return [r.waits_for[:25] for r in fetcher.tables.book] == [
                    "Let the transactions end "
                ] * 2

            await eventually(waits, 30, "both tables wait")
            tries = [record.tries for record in fetcher.tables.book]
            db.execute("INSERT INTO b VALUES (1)")
            await eventually(lambda: fetcher.status.state == "streaming", 30)
            assert [record.tries for record in fetcher.tables.book] == tries
        await eventually(lambda: is_settled(fetcher), 60, "followed again")


async def test_no_change_is_lost_of_a_table_that_joins_beside_its_open_writer(
    db: FreshDatabase, sender: str
) -> None:
    async with opened_on(db, discover_every="100ms") as (source, start):
        async with following(source, start) as reader:
            db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
            with psycopg.connect(db.url) as writer:
                writer.execute("INSERT INTO t VALUES (1, 'open')")
                await reader.why("public.t")
            await reader.equals(db, "public.t")
            db.execute("INSERT INTO t VALUES (2, 'after')")
            db.execute("UPDATE t SET v = 'last'")
            await reader.reaches(db)
            assert reader.seen.tables["public.t"] == await table_of(source, "public.t")


@pytest.mark.parametrize("locked", ["t", "days", "day", "filtered"])
async def test_a_table_that_an_application_has_locked_holds_up_no_other(
    db: FreshDatabase, locked: str
) -> None:
    ((version,),) = db.execute("SELECT current_setting('server_version_num')::int")
    if locked == "filtered" and int(version) < PARTS_SINCE:
        pytest.skip("row filters: since PostgreSQL 15")
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("CREATE TABLE days (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    db.execute("CREATE TABLE day PARTITION OF days FOR VALUES FROM (0) TO (9)")
    async with opened_on(db, discover_every="100ms") as (source, start):
        async with following(source, start) as reader:
            await reader.reaches(db)
            if locked == "filtered":
                db.execute("CREATE TABLE filtered (id int PRIMARY KEY)")
                name = f"databus_{db.name}"
                db.execute(f"ALTER PUBLICATION {name} SET TABLE t, days, filtered WHERE (id > 5)")
                assert "only some of its rows" in await reader.why("public.filtered")
            with psycopg.connect(db.url) as migration:
                migration.execute(f"LOCK TABLE ONLY {locked} IN ACCESS EXCLUSIVE MODE")
                db.execute("CREATE TABLE p (id int PRIMARY KEY)")
                db.execute("INSERT INTO p SELECT generate_series(1, 20)")
                assert "before it joined" in await reader.why("public.p")
                await reader.equals(db, "public.p")
                migration.commit()


async def test_a_schema_that_was_taken_out_of_a_publication_for_a_while_is_noticed(
    db: FreshDatabase,
) -> None:
    ((version,),) = db.execute("SELECT current_setting('server_version_num')::int")
    if int(version) < PARTS_SINCE:
        pytest.skip("schemas in publications: since PostgreSQL 15")
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("CREATE PUBLICATION of_schema FOR TABLES IN SCHEMA public")
    config = config_of(db, publication="of_schema", discover_every="100ms")
    async with opened(config) as source:
        start = await source.first_scn()
        async with following(source, start) as reader:
            db.execute("INSERT INTO t VALUES (1)")
            await reader.reaches(db)
            assert reader.seen.tables["public.t"] == {(1,): {"id": 1}}
            with psycopg.connect(db.url) as both:
                both.execute("ALTER PUBLICATION of_schema DROP TABLES IN SCHEMA public")
                both.execute("INSERT INTO t VALUES (2)")
                both.execute("ALTER PUBLICATION of_schema ADD TABLES IN SCHEMA public")
            assert "was altered" in await reader.why("public.t")
            await reader.equals(db, "public.t")
            # A table that comes later is in it from its beginning.
            db.execute("CREATE TABLE later (id int PRIMARY KEY)")
            db.execute("INSERT INTO later VALUES (1)")
            await reader.until(lambda: "public.later" in (source._published.tables or {}))
            await reader.equals(db, "public.later")


async def test_a_table_that_is_unlogged_or_a_partition_for_a_while_is_suspended(
    db: FreshDatabase,
) -> None:
    """The server refuses SET UNLOGGED where a publication names the table, and only there."""
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("CREATE TABLE part (id int PRIMARY KEY)")
    db.execute("CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    db.execute(
        "CREATE PUBLICATION everything FOR ALL TABLES WITH (publish_via_partition_root = true)"
    )
    config = config_of(db, publication="everything", discover_every="100ms")
    async with opened(config) as source:
        start = await source.first_scn()
        async with following(source, start) as reader:
            for table, changed, restored, why, cure in (
                ("t", "ALTER TABLE t SET UNLOGGED", "ALTER TABLE t SET LOGGED", "is unlogged",
                 'ALTER TABLE "public"."t" SET LOGGED'),
                ("part", "ALTER TABLE root ATTACH PARTITION part FOR VALUES FROM (0) TO (90)",
                 "ALTER TABLE root DETACH PARTITION part", "is a partition", "Detach"),
            ):  # fmt: skip
                db.execute(f"INSERT INTO {table} VALUES (1)")
                await reader.reaches(db)
                assert list(reader.seen.tables[f"public.{table}"]) == [(1,)]
                db.execute(changed)
                assert why in await reader.why(f"public.{table}")
                assert cure in source.suspended()[f"public.{table}"].waits_for
                db.execute(f"INSERT INTO {table} VALUES (2)")
                db.execute(restored)
                name = f"public.{table}"
                waits = functools.partial(lambda name: source.suspended()[name].waits_for, name)
                await reader.until(lambda waits=waits: not waits() and not source._unpublished)
                await reader.equals(db, name)


async def test_a_publication_for_all_tables_without_roots_is_reported_and_suspends_only_the_root(
    db: FreshDatabase,
) -> None:
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    db.execute("CREATE TABLE days (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    db.execute("CREATE TABLE days_0 PARTITION OF days FOR VALUES FROM (0) TO (10)")
    db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    config = config_of(db, publication="everything", discover_every="100ms")
    with pytest.raises(PreflightFailed, match="publish_via_partition_root = true"):
        async with opened(config):
            pass
    source = PostgresSource(config)
    source.restore("", None, 0)
    try:
        start = await opened_scn(source)
        async with following(source, start) as reader:
            db.execute("INSERT INTO days VALUES (1)")
            db.execute("INSERT INTO t VALUES (1)")
            assert "partitions" in await reader.why("public.days")
            await reader.reaches(db)
            assert list(reader.seen.tables) == ["public.t"]
            db.execute("ALTER PUBLICATION everything SET (publish_via_partition_root = true)")
            await reader.until(lambda: not source._unpublished)
            await reader.equals(db, "public.days")
    finally:
        await source.close()


async def test_a_new_table_is_followed_from_its_first_row_or_suspended(db: FreshDatabase) -> None:
    db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with opened_on(db, discover_every="100ms") as (source, start):
        async with following(source, start) as reader:
            db.execute("CREATE TABLE calm (id int PRIMARY KEY)")
            await reader.until(lambda: "public.calm" in (source._published.tables or {}))
            db.execute("INSERT INTO calm VALUES (1)")
            await reader.reaches(db)
            assert reader.seen.tables["public.calm"] == {(1,): {"id": 1}}
            # Filled before the relay could find it: 100 rows without events.
            with psycopg.connect(db.url, autocommit=True) as slow:
                slow.execute(
                    "CREATE TABLE filled (id int PRIMARY KEY); "
                    "INSERT INTO filled SELECT generate_series(1, 100)"
                )
                assert "before it joined" in await reader.why("public.filled")
                db.execute("INSERT INTO filled VALUES (101)")
                await reader.equals(db, "public.filled")
                assert len(reader.seen.tables["public.filled"]) == 101
            # Rows of a transaction that was under way when the table joined.
            db.execute("CREATE TABLE held (id int PRIMARY KEY)")
            with psycopg.connect(db.url) as held:
                held.execute("INSERT INTO held VALUES (1)")
                await reader.why("public.held")
                dumped = asyncio.create_task(reader.equals(db, "public.held"))
                await asyncio.sleep(0.05)
                assert not dumped.done()
                held.commit()
                await dumped
            assert reader.seen.tables["public.held"] == {(1,): {"id": 1}}
            # A table of the same name that is another one.
            db.execute("DROP TABLE calm")
            db.execute("CREATE TABLE calm (id int PRIMARY KEY)")
            assert "created again" in await reader.why("public.calm")
            await reader.equals(db, "public.calm")


@pytest.mark.parametrize("how", ["created again", "exchanged", "without a key"])
async def test_rows_of_the_table_that_had_a_name_before_do_not_come_under_it(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The stream lags: it still has rows of the old table when the new one is dumped."""
    start_now, come_to_now, is_awaited = SlotStream._start, SlotStream.come_to_now, asyncio.Event()

    async def start_late(stream: SlotStream, after_scn: int) -> None:
        await is_awaited.wait()
        await start_now(stream, after_scn)

    async def awaited(stream: SlotStream) -> None:
        is_awaited.set()
        await come_to_now(stream)

    async def read(source: PostgresSource) -> dict[object, object]:
        while not source._suspended._is_streamed:
            await asyncio.sleep(0.01)
        return await table_of(source, "public.t")

    db.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    db.execute("INSERT INTO t SELECT n, n FROM generate_series(1, 3) n")
    async with opened_on(db, discover_every="100ms") as (source, start):
        async with following(source, start) as reader:
            await reader.equals(db, "public.t")
            resume_state, start = reader.seen.resume_state, reader.seen.resolved
    db.execute("INSERT INTO t VALUES (4, 4)")
    db.execute("UPDATE t SET v = 7 WHERE id = 1")
    if how == "exchanged":
        db.execute("CREATE TABLE t_new (LIKE t INCLUDING ALL)")
        db.execute("ALTER TABLE t RENAME TO t_old")
        db.execute("ALTER TABLE t_new RENAME TO t")
    else:
        db.execute("DROP TABLE t")
        key = "" if how == "without a key" else "PRIMARY KEY"
        db.execute(f"CREATE TABLE t (id int {key}, v int)")
    db.execute("INSERT INTO t VALUES (1, 1), (9, 9)")
    resumed = PostgresSource(config_of(db, discover_every="1h"))
    resumed.restore(resume_state, None, start)
    try:
        await resumed.open()
        batches = resumed.stream(start)
        seen = Seen(tables={"public.t": {}})
        seen.take(await anext(batches))
        stop = resumed.suspended()["public.t"]
        if how == "without a key":
            assert "no key" in stop.why
            return
        assert "created again" in stop.why
        monkeypatch.setattr(SlotStream, "_start", start_late)
        monkeypatch.setattr(SlotStream, "come_to_now", awaited)
        scn, reading = now_scn(db), asyncio.create_task(read(resumed))
        async with contextlib.aclosing(batches), asyncio.timeout(20 * PATIENCE):
            async for batch in batches:
                seen.take(batch)
                if seen.resolved >= scn and reading.done():
                    break
        assert seen.tables["public.t"] == {}
        assert sorted(await reading) == [(1,), (9,)]
    finally:
        await resumed.close()


async def test_a_parents_dump_has_none_of_its_childrens_rows_and_a_moved_large_value_is_not_lost(
    db: FreshDatabase,
) -> None:
    db.execute("CREATE TABLE parent (id int PRIMARY KEY, v text)")
    db.execute("CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)")
    db.execute("CREATE TABLE docs (id int PRIMARY KEY, small int, body text)")
    db.execute("ALTER TABLE docs ALTER body SET STORAGE EXTERNAL")
    db.execute("INSERT INTO parent VALUES (1, 'p')")
    db.execute("INSERT INTO child VALUES (1, 'c'), (2, 'c')")
    async with opened_on(db, discover_every="1h") as (source, start):
        async with following(source, start) as reader:
            assert list(await table_of(source, "public.parent", limit=1)) == [(1,)]
            assert await source.largest_key("public.parent") == [1]
            assert list(await table_of(source, "public.child")) == [(1,), (2,)]
            found = await source.read_chunk(ChunkRequest("public.parent", 5, keys=[[1], [2]]))
            assert (len(found.rows), found.missing) == (1, [[2]])
            # The new row comes without its large value, under a key that no reader has a row of.
            db.execute("INSERT INTO docs VALUES (1, 1, repeat('x', 9000)), (2, 2, 'y')")
            db.execute("UPDATE docs SET id = 3 WHERE id = 2")
            db.execute("UPDATE docs SET id = 9 WHERE id = 1")
            assert "public.docs.body: an update changed" in await reader.why("public.docs")
            assert (9,) not in reader.seen.tables["public.docs"]
            await reader.equals(db, "public.docs")
            db.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
            db.execute("UPDATE docs SET id = 10 WHERE id = 9")
            await reader.equals(db, "public.docs")
            assert len(reader.seen.tables["public.docs"][10,]["body"]) == 9000


async def test_rows_that_come_or_go_with_a_partition_suspend_its_root(db: FreshDatabase) -> None:
    root = "public.days"
    db.execute("CREATE TABLE days (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)")
    for number in range(3):
        start, stop = 10 * number, 10 * number + 10
        db.execute(
            f"CREATE TABLE d{number} PARTITION OF days FOR VALUES FROM ({start}) TO ({stop})"
        )
    db.execute("INSERT INTO days VALUES (1, 1), (11, 1), (21, 1)")
    async with opened(config_of(db, discover_every="100ms")) as source:
        scn = await source.first_scn()
        async with following(source, scn) as reader:
            await reader.equals(db, root)

            async def looked_at() -> None:
                files = {
                    int(oid): int(file)
                    for oid, file in db.execute(
                        "SELECT oid, pg_relation_filenode(oid) FROM pg_class "
                        "WHERE relispartition AND relkind = 'r'"
                    )
                }
                await reader.until(lambda: (source._published.tables or {})[root].files == files)

            # These have events.
            db.execute("TRUNCATE days")
            db.execute("CREATE TABLE d3 PARTITION OF days FOR VALUES FROM (30) TO (40)")
            db.execute("INSERT INTO days VALUES (1, 1), (11, 1), (21, 1), (31, 1)")
            db.execute("INSERT INTO d3 VALUES (32, 1)")
            await looked_at()
            await reader.reaches(db)
            assert root not in source._suspended.suspensions
            assert reader.seen.tables[root] == await table_of(source, root)
            # These have none.
            db.execute("TRUNCATE d0")
            assert "d0 was truncated" in await reader.why(root)
            await reader.equals(db, root)
            db.execute("CREATE TABLE d9 PARTITION OF days FOR VALUES FROM (90) TO (99)")
            db.execute("INSERT INTO days VALUES (90, 1); COMMIT; TRUNCATE d9")  # Between two looks.
            assert "d9 was truncated" in await reader.why(root)
            await reader.equals(db, root)
            with psycopg.connect(db.url) as moving:  # As partitions are split by tools.
                moving.execute("DELETE FROM days WHERE id = 32")
                moving.execute("CREATE TABLE d4 (LIKE days INCLUDING ALL)")
                moving.execute("INSERT INTO d4 VALUES (41, 1)")
                moving.execute("ALTER TABLE days ATTACH PARTITION d4 FOR VALUES FROM (40) TO (50)")
            assert "d4 was attached" in await reader.why(root)
            await reader.equals(db, root)
            db.execute("ALTER TABLE days DETACH PARTITION d1")
            assert "detached" in await reader.why(root)
            await reader.equals(db, root)
            assert sorted(reader.seen.tables[root]) == [(21,), (31,), (41,)]
