"""Tables whose stream contains less than a select returns: TOAST, generated columns, partitions."""

from __future__ import annotations

import pytest

from databus.common.errors import PreflightFailed
from databus.relay.sources.contract import ChunkRequest
from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import follow_to, now_scn, opened_on, table_of

LARGE = {
    "b": ("bytea", "decode(repeat('00ff', 4000), 'hex')"),
    "j": ("jsonb", "(SELECT jsonb_agg(i) FROM generate_series(1, 2000) i)"),
    "a": ("int[]", "ARRAY(SELECT generate_series(1, 2000))"),
    "n": ("numeric", "repeat('12345', 2000)::numeric"),
    "h": ("json", "(SELECT json_agg(i) FROM generate_series(1, 2000) i)"),
}


async def test_unchanged_toast_of_any_type_is_absent_and_never_null(db: FreshDatabase) -> None:
    typed = ", ".join(f"{name} {type_name} NOT NULL" for name, (type_name, _) in LARGE.items())
    db.execute(f"CREATE TABLE docs (id int PRIMARY KEY, small int, {typed})")
    for name in LARGE:
        db.execute(f"ALTER TABLE docs ALTER {name} SET STORAGE EXTERNAL")
    async with opened_on(db) as (source, start):
        db.execute(f"INSERT INTO docs VALUES (1, 1, {', '.join(sql for _, sql in LARGE.values())})")
        db.execute("UPDATE docs SET small = 2")
        db.execute("UPDATE docs SET j = '[]', small = 3")
        seen = await follow_to(source, start, now_scn(db))
        others = tuple(name for name in LARGE if name != "j")
        assert [e.absent for e in seen.events] == [(), tuple(LARGE), others]
        assert seen.tables["public.docs"] == await table_of(source, "public.docs")


async def test_generated_columns_are_neither_in_the_stream_nor_in_dumps_nor_in_keys(
    db: FreshDatabase,
) -> None:
    twice = "twice int GENERATED ALWAYS AS (a * 2) STORED"
    db.execute(f"CREATE TABLE made (id int PRIMARY KEY, a int, {twice}, b text)")
    async with opened_on(db) as (source, start):
        db.execute("INSERT INTO made (id, a, b) VALUES (1, 1, 'x'), (2, 2, 'y')")
        db.execute("UPDATE made SET a = 5 WHERE id = 1")
        # Half of its key is in no row of the stream: these two would be taken for one.
        db.execute(f"CREATE TABLE keyed (id int, a int, {twice}, PRIMARY KEY (id, twice))")
        db.execute(f"ALTER PUBLICATION databus_{db.name} ADD TABLE keyed")
        db.execute("INSERT INTO keyed (id, a) VALUES (1, 1), (1, 2)")
        seen = await follow_to(source, start, now_scn(db))
        assert seen.tables == {"public.made": await table_of(source, "public.made")}
        assert seen.tables["public.made"][1,] == {"id": 1, "a": 5, "b": "x"}
        chunk = await source.read_chunk(ChunkRequest("public.made", 10))
        assert {e.schema_fp for e in seen.events} == {chunk.schema.fingerprint}
    with pytest.raises(PreflightFailed, match=r"public\.keyed.*no generated column"):
        async with opened_on(db):
            pass


async def test_partitions_are_captured_and_dumped_as_their_root(db: FreshDatabase) -> None:
    root = "public.days"
    db.execute(
        "CREATE TABLE days (id int, day int, v text, PRIMARY KEY (id, day)) "
        "PARTITION BY RANGE (day)"
    )
    db.execute("CREATE TABLE days_0 PARTITION OF days FOR VALUES FROM (0) TO (10)")
    async with opened_on(db) as (source, start):
        db.execute("INSERT INTO days VALUES (1, 1, 'a'), (2, 2, 'b')")
        db.execute("CREATE TABLE days_1 PARTITION OF days FOR VALUES FROM (10) TO (20)")
        db.execute("INSERT INTO days VALUES (3, 11, 'c')")
        # Columns in another order than the root's, as an attached table may have them.
        db.execute("CREATE TABLE days_2 (v text, day int NOT NULL, id int NOT NULL)")
        db.execute("ALTER TABLE days ATTACH PARTITION days_2 FOR VALUES FROM (20) TO (30)")
        db.execute("INSERT INTO days_2 VALUES ('d', 21, 4)")
        db.execute("UPDATE days SET day = day + 10 WHERE id = 2")  # It moves.
        db.execute("UPDATE days SET v = v || v")
        db.execute("DELETE FROM days WHERE id = 3")
        seen = await follow_to(source, start, now_scn(db))
        assert list(seen.tables) == [root]
        assert seen.tables[root] == await table_of(source, root)
        assert len(seen.tables[root]) == 3
        assert (await source.schemas())[0].fingerprint in {e.schema_fp for e in seen.events}
        # What leaves with a partition leaves without events, as docs/types-postgres.md says.
        db.execute("ALTER TABLE days DETACH PARTITION days_0")
        db.execute("UPDATE days SET v = 'z' WHERE id = 4")
        seen = await follow_to(source, seen.last[0], now_scn(db), seen)
        rest = await table_of(source, root)
        assert sorted(rest) == [(2, 12), (4, 21)]
        assert {key: seen.tables[root][key] for key in rest} == rest
