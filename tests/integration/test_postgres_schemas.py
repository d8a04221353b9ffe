"""Definitions that change while a real PostgreSQL is streamed, or while the relay is away."""

from __future__ import annotations

from tests.support.fixtures import FreshDatabase
from tests.support.postgres_follower import (
    ITEMS,
    ORDERS,
    Seen,
    config_of,
    follow,
    follow_to,
    now_scn,
    opened,
    opened_on,
)


async def test_ddl_under_load_keeps_every_row_readable(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        statements = [
            "INSERT INTO orders VALUES (1, 'a', 1)",
            "ALTER TABLE orders ADD COLUMN note text DEFAULT 'none'",
            "INSERT INTO orders VALUES (2, 'b', 2, 'noted')",
            "ALTER TABLE orders RENAME COLUMN qty TO amount",
            "UPDATE orders SET amount = 7 WHERE id = 1",
            "ALTER TABLE orders DROP COLUMN name",
            "INSERT INTO orders VALUES (3, 3, 'x')",
            "ALTER TABLE orders ALTER COLUMN amount TYPE numeric(12, 2)",
            "INSERT INTO orders VALUES (4, 4.25, 'y')",
        ]
        for statement in statements:
            db.execute(statement)
        seen = await follow_to(source, start, now_scn(db))
        after = [e.after for e in seen.events]
        assert after[0] == {"id": 1, "name": "a", "qty": 1}
        assert after[1] == {"id": 2, "name": "b", "qty": 2, "note": "noted"}
        assert after[2] == {"id": 1, "name": "a", "amount": 7, "note": "none"}
        assert after[3] == {"id": 3, "amount": 3, "note": "x"}
        assert str((after[4] or {})["amount"]) == "4.25"
        assert len(seen.schema_changes) == 4
        # Each change is announced just before the window that first uses it.
        assert [scn + 1 for scn, _ in seen.schema_changes] == [e.scn for e in seen.events[1:]]


async def test_ddl_inside_a_transaction_splits_its_rows_by_schema(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.transaction(
            "INSERT INTO orders VALUES (1, 'a', 1)",
            "ALTER TABLE orders ADD COLUMN extra int NOT NULL DEFAULT 9",
            "INSERT INTO orders VALUES (2, 'b', 2)",
        )
        seen = await follow_to(source, start, now_scn(db))
        assert [e.after for e in seen.events] == [
            {"id": 1, "name": "a", "qty": 1},
            {"id": 2, "name": "b", "qty": 2, "extra": 9},
        ]
        again = await follow_to(source, start, now_scn(db))
        events = [(e.scn, e.seq, e.key) for e in again.events]
        assert events == [(e.scn, e.seq, e.key) for e in seen.events]


async def test_a_schema_change_that_no_stream_saw_is_announced(db: FreshDatabase) -> None:
    altered = False
    db.transaction(ORDERS, ITEMS)

    def enough(seen: Seen) -> bool:
        nonlocal altered
        if not altered:
            # The stream is on, and has not announced the table yet.
            db.execute("ALTER TABLE orders ADD COLUMN early int")
            db.execute("INSERT INTO orders VALUES (1, 'one', 1, 1)")
            altered = True
        return bool(seen.events)

    async with opened(config_of(db)) as source:
        seen = await follow(source, await source.first_scn(), enough)
        assert seen.schema_changes == [(seen.events[0].scn - 1, "public.orders")]
    # Both change while the relay is away; no row of one was ever seen.
    db.execute("ALTER TABLE orders ADD COLUMN late int")
    db.execute("ALTER TABLE items ADD COLUMN late int")
    db.execute("INSERT INTO orders VALUES (2, 'two', 2, 2, 2)")
    db.execute("INSERT INTO items VALUES (1, 'a', 'v', 1)")
    async with opened(config_of(db)) as source:
        source.restore(seen.resume_state, None, seen.last[0])
        seen = await follow_to(source, seen.last[0], now_scn(db), seen)
        announced = [
            (seen.events[1].scn - 1, "public.orders"),
            (seen.events[2].scn - 1, "public.items"),
        ]
        assert seen.schema_changes[1:] == announced
    # Nothing is announced where nothing has changed.
    db.execute("INSERT INTO orders VALUES (3, 'three', 3, 3, 3)")
    async with opened(config_of(db)) as source:
        source.restore(seen.resume_state, None, seen.last[0])
        seen = await follow_to(source, seen.last[0], now_scn(db), seen)
        assert (seen.ops, seen.schema_changes[1:]) == ("cccc", announced)


async def test_a_row_older_than_its_not_null_is_carried_with_a_wider_schema(
    db: FreshDatabase,
) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, NULL, 1)")
        db.execute("UPDATE orders SET name = 'a'")
        # No new column or type: only the present catalogue has it.
        db.execute("ALTER TABLE orders ALTER COLUMN name SET NOT NULL")
        seen = await follow_to(source, start, now_scn(db))
        assert [(e.after or {})["name"] for e in seen.events] == [None, "a"]


async def test_a_table_dropped_before_it_was_read_is_read_from_the_stream_alone(
    db: FreshDatabase,
) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        db.execute("DROP TABLE orders")
        seen = await follow_to(source, start, now_scn(db))
        assert [e.after for e in seen.events] == [{"id": 1, "name": "a", "qty": 1}]


async def test_a_new_table_joins_while_the_stream_runs(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS, discover_every=0.05) as (source, start):
        db.transaction(ITEMS, "CREATE TABLE keyless (v int)")
        inserted = False

        def enough(seen: Seen) -> bool:
            nonlocal inserted
            if not inserted and '"public.items"' in seen.resume_state:
                db.execute("INSERT INTO keyless VALUES (1)")
                db.execute("UPDATE keyless SET v = 2")
                db.execute("INSERT INTO items VALUES (1, 'x', 'v')")
                inserted = True
            return bool(seen.windows)

        seen = await follow(source, start, enough)
        assert [e.source for e in seen.events] == ["public.items"]
        assert "public.keyless" in (await source.status())["refused_tables"]
