"""The PostgreSQL source on a real server: transactions, restarts, acknowledgement, chunks."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from typing import Any

import pytest

from databus.common.errors import SourcePositionLost, SourceUnavailable
from databus.common.frame.frame_format import Op
from databus.relay.sources.contract import Batch, ChunkRequest
from databus.relay.sources.postgres.protocol.lsn import flush_lsn, parse_lsn
from databus.relay.sources.postgres.stream.postgres_lineage import PostgresResumeState
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
    table_of,
)
from tests.support.waiting import PATIENCE, eventually


async def test_a_transaction_over_several_tables_is_one_window(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS, ITEMS) as (source, start):
        db.transaction(
            "INSERT INTO orders VALUES (1, 'één', 5), (2, NULL, NULL)",
            "INSERT INTO items VALUES (1, 'x', '𝄞 \"quoted\"')",
            "UPDATE orders SET qty = 6 WHERE id = 1",
            "DELETE FROM orders WHERE id = 2",
        )
        seen = await follow_to(source, start, now_scn(db))
        assert seen.ops == "cccud"
        assert len(seen.windows) == 1
        scn, txid, count = seen.windows[0]
        assert count == 5
        assert txid.isdigit()
        assert scn > start
        assert [event.key for event in seen.events] == [(1,), (2,), ("x", 1), (1,), (2,)]
        assert seen.events[-1].before is None
        assert seen.tables == {
            "public.orders": {(1,): {"id": 1, "name": "één", "qty": 6}},
            "public.items": {("x", 1): {"a": 1, "b": "x", "v": '𝄞 "quoted"'}},
        }


async def test_what_the_publication_gives_is_stored_before_the_first_window(
    db: FreshDatabase,
) -> None:
    """A relay that connects again before it had stored it could not notice that it was altered."""
    async with opened_on(db, ORDERS) as (source, start):
        async with contextlib.aclosing(source.stream(start)) as batches:
            first = await anext(batches)
        assert first.persist_first
        assert isinstance(first.resume_state, PostgresResumeState)
        assert set(first.resume_state.published.tables or ()) == {"public.orders"}


async def test_a_changed_key_comes_as_delete_and_insert(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'a', 1), (2, 'b', 2)")
        db.execute("UPDATE orders SET id = id + 10")
        seen = await follow_to(source, start, now_scn(db))
        assert seen.ops == "ccdcdc"
        assert [e.key[0] for e in seen.events] == [1, 2, 1, 11, 2, 12]
        assert seen.tables["public.orders"] == await table_of(source, "public.orders")


async def test_rolled_back_work_never_shows(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.transaction(
            "INSERT INTO orders VALUES (1, 'kept', 1)",
            "SAVEPOINT s",
            "INSERT INTO orders VALUES (2, 'undone', 2)",
            "ROLLBACK TO s",
            "INSERT INTO orders VALUES (3, 'kept', 3)",
        )
        db.transaction("INSERT INTO orders VALUES (4, 'gone', 4)", "ROLLBACK", "BEGIN")
        seen = await follow_to(source, start, now_scn(db))
        assert [e.key for e in seen.events] == [(1,), (3,)]


async def test_replica_identity_full_gives_the_row_before(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS, "ALTER TABLE orders REPLICA IDENTITY FULL") as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        db.execute("UPDATE orders SET qty = 2")
        db.execute("UPDATE orders SET id = 5")
        db.execute("DELETE FROM orders")
        seen = await follow_to(source, start, now_scn(db))
        assert seen.ops == "cudcd"
        assert [e.before for e in seen.events] == [
            None,
            {"id": 1, "name": "a", "qty": 1},
            {"id": 1, "name": "a", "qty": 2},
            None,
            {"id": 5, "name": "a", "qty": 2},
        ]
        assert {e.key for e in seen.events} == {(1,), (5,)}


async def test_a_replica_identity_index_is_the_key(db: FreshDatabase) -> None:
    db.transaction(
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL UNIQUE, v int)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_code_key",
    )
    async with opened_on(db) as (source, start):
        db.execute("INSERT INTO t VALUES (1, 'one', 1)")
        db.execute("DELETE FROM t")
        seen = await follow_to(source, start, now_scn(db))
        assert [e.key for e in seen.events] == [("one",), ("one",)]


async def test_an_unchanged_toast_value_is_absent_and_never_null(db: FreshDatabase) -> None:
    db.execute("CREATE TABLE docs (id int PRIMARY KEY, small text, big text NOT NULL)")
    big = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 1000) i)"
    async with opened_on(db) as (source, start):
        db.execute(f"INSERT INTO docs VALUES (1, 'a', {big})")
        db.execute("UPDATE docs SET small = 'b'")
        db.execute("ALTER TABLE docs REPLICA IDENTITY FULL")
        db.execute("UPDATE docs SET id = 2")
        db.execute("UPDATE docs SET small = 'c'")
        seen = await follow_to(source, start, now_scn(db))
        assert seen.ops == "cudcu"
        assert [e.absent for e in seen.events] == [(), ("big",), (), (), ()]
        last = seen.events[-1]
        assert last.before is not None
        assert last.after is not None
        assert len(last.after["big"]) == len(last.before["big"]) == 32_000
        assert last.after["small"] == "c"


async def test_truncate_is_an_event_of_each_table(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS, ITEMS) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        db.execute("TRUNCATE orders, items")
        seen = await follow_to(source, start, now_scn(db))
        assert seen.ops == "ctt"
        assert {e.source for e in seen.events[1:]} == {"public.orders", "public.items"}
        assert seen.events[1].key == ()
        assert seen.tables["public.orders"] == {}


async def test_a_stream_can_begin_after_every_scn_and_gives_the_same_frames(
    db: FreshDatabase,
) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        for number in range(12):
            db.transaction(
                f"INSERT INTO orders VALUES ({number}, 'n', 0)",
                f"UPDATE orders SET qty = {number} WHERE id = {number}",
            )
        end = now_scn(db)
        whole = await follow_to(source, start, end)
        assert len(whole.windows) == 12
        for index, (scn, _, _) in enumerate(whole.windows):
            rest = await follow_to(source, scn, end)
            assert rest.windows == whole.windows[index + 1 :]
            assert rest.frames == whole.frames[3 * (index + 1) :]
            again = await follow_to(source, scn - 1, end)
            assert again.windows == whole.windows[index:]


async def test_acknowledging_an_scn_releases_that_commit_and_no_later_one(
    db: FreshDatabase,
) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        for number in range(3):
            db.execute(f"INSERT INTO orders VALUES ({number}, 'n', 0)")
        end = now_scn(db)
        whole = await follow_to(source, start, end)
        middle = whole.windows[1][0]

        async def confirmed() -> int:
            ((lsn,),) = db.execute(
                "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = %s",
                db.name,
            )
            return parse_lsn(str(lsn))

        async with contextlib.aclosing(source.stream(start)) as batches:
            await anext(batches)
            await source.ack(middle)

            async def released() -> bool:
                return await confirmed() == flush_lsn(middle)

            await eventually(released)
        rest = await follow_to(source, middle, end)
        assert [w[0] for w in rest.windows] == [whole.windows[2][0]]
        with pytest.raises(SourcePositionLost, match="missed"):
            await follow_to(source, start, end)


async def test_an_idle_captured_table_does_not_hold_the_log_back(db: FreshDatabase) -> None:
    db.transaction(ORDERS, "CREATE TABLE other (id int PRIMARY KEY)")
    async with opened_on(db, sources=("public.orders",)) as (source, start):
        db.execute("INSERT INTO other SELECT generate_series(1, 20000)")
        end = now_scn(db)
        async with contextlib.aclosing(source.stream(start)) as batches:
            async with asyncio.timeout(20 * PATIENCE):
                async for batch in batches:
                    assert batch.data == b""
                    await source.ack(batch.resolved)
                    if batch.resolved >= end:
                        break

            async def released() -> bool:
                # The server moves the slot's start when it next logs its running transactions.
                db.execute("CHECKPOINT")
                await source.ack((await anext(batches)).resolved)
                return (await source.status())["retained_bytes"] < 1 << 20

            await eventually(released, 20)


async def test_one_large_transaction_comes_in_parts_and_again_from_its_middle(
    db: FreshDatabase,
) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.execute("COPY orders FROM PROGRAM 'seq -f \"%g,row,7\" 1 100000' WITH (FORMAT csv)")
        end = now_scn(db)
        seen, largest = Seen(), 0
        async with contextlib.aclosing(source.stream(start)) as batches:
            async for batch in batches:
                largest = max(largest, len(batch.data))
                seen.take(batch)
                if len(seen.events) > 40_000:
                    break
        assert seen.windows == []
        assert largest < 4 << 20
        assert seen.resolved < seen.last[0]
        # The fetcher resumes below the window that it has only half of.
        await follow_to(source, seen.last[0] - 1, end, seen)
        assert seen.windows[0][2] == 100_000
        assert [e.key[0] for e in seen.events] == list(range(1, 100_001))


async def test_the_stream_resumes_after_its_server_process_was_killed(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        seen = Seen()
        with pytest.raises(SourceUnavailable):
            async with contextlib.aclosing(source.stream(start)) as batches:
                async for batch in batches:
                    seen.take(batch)
                    if seen.windows:
                        db.execute(
                            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                            "WHERE database = %s",
                            db.name,
                        )
        db.execute("INSERT INTO orders VALUES (2, 'b', 2)")
        await follow_to(source, seen.last[0], now_scn(db), seen)
        assert seen.ops == "cc"


async def test_a_slot_in_use_names_the_process_that_has_it(
    db: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    db.execute(ORDERS)
    monkeypatch.setattr("databus.relay.sources.postgres.stream.slot_stream._BUSY_TRIES", 2)
    async with opened(config_of(db)) as first, opened(config_of(db)) as second:
        start = await first.first_scn()
        async with contextlib.aclosing(first.stream(start)) as batches:
            await anext(batches)
            with pytest.raises(SourceUnavailable, match=r"is active for PID \d+"):
                await follow_to(second, start, 1)


async def test_a_dropped_slot_is_a_lost_position(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.execute("SELECT pg_drop_replication_slot(%s)", f"databus_{db.name}")
        with pytest.raises(SourcePositionLost, match="does not exist"):
            await follow_to(source, start, 1)


async def test_a_recreated_slot_is_a_lost_position(db: FreshDatabase) -> None:
    async with opened_on(db, ORDERS) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'lost', 1)")
        await source.first_scn()
        with pytest.raises(SourcePositionLost, match="was recreated or advanced"):
            await follow_to(source, start, 1)


async def test_a_suspension_is_reported_before_the_end_of_its_transaction(
    db: FreshDatabase,
) -> None:
    async with opened_on(db, "CREATE TABLE t (id int PRIMARY KEY, day date)") as (source, start):
        db.transaction(
            "INSERT INTO t VALUES (1, '2024-01-01')", "INSERT INTO t VALUES (2, '-infinity')"
        )
        batches, upto = list[Batch](), now_scn(db)
        async with contextlib.aclosing(source.stream(start)) as stream:
            async for batch in stream:
                batches.append(batch)
                if batch.resolved >= upto:
                    break
    seen = Seen()
    retained = [
        number
        for number, batch in enumerate(batches)
        if batch.persist_first
        and isinstance(batch.resume_state, PostgresResumeState)
        and batch.resume_state.suspended
    ]
    assert len(retained) == 1
    for batch in batches[: retained[0] + 1]:
        seen.take(batch)
    assert (seen.ops, seen.windows) == ("c", [])  # The fetcher puts it on disk before more comes.
    resume_state, last_resume_state = batches[retained[0]].resume_state, batches[-1].resume_state
    assert isinstance(resume_state, PostgresResumeState)
    assert last_resume_state is not None
    suspension = resume_state.suspended["public.t"]
    assert re.search(r"public\.t\.day.*-infinity", suspension.why)
    for after_scn, special_values, ops in (
        (start, "error", "c"), (suspension.since_scn, "error", ""), (start, "null", "cc"),
    ):  # fmt: skip
        async with opened(config_of(db, special_values=special_values)) as source:
            source.restore(last_resume_state.encode(), None, after_scn)
            assert (await follow_to(source, after_scn, now_scn(db))).ops == ops


async def test_the_server_gets_status_updates_while_no_batch_is_taken(db: FreshDatabase) -> None:
    db.execute(ORDERS)
    db.execute(f"ALTER ROLE databus IN DATABASE \"{db.name}\" SET wal_sender_timeout = '3s'")
    async with opened_on(db) as (source, start):
        db.execute(
            "INSERT INTO orders SELECT i, repeat('x', 1000), i FROM generate_series(1, 50000) i"
        )
        async with contextlib.aclosing(source.stream(start)) as batches:
            seen = Seen()
            seen.take(await anext(batches))
            loop = asyncio.get_running_loop()
            until_s = loop.time() + 5.0
            await eventually(lambda: loop.time() > until_s, 10)
            async for batch in batches:
                seen.take(batch)
                if seen.windows:
                    break
        assert seen.windows[0][2] == 50_000


async def test_chunks_and_stream_meet_exactly_under_concurrent_writers(db: FreshDatabase) -> None:
    db.execute(ORDERS)
    db.execute("INSERT INTO orders SELECT i, 'old', 0 FROM generate_series(1, 300) i")
    stop = threading.Event()

    def write() -> None:
        connection = db.server.connect(db.name)
        try:
            number = 0
            while not stop.is_set():
                number += 1
                key = number * 7 % 300 + 1
                with connection.transaction():
                    connection.execute("UPDATE orders SET qty = %s WHERE id = %s", [number, key])
        finally:
            connection.close()

    async with opened_on(db) as (source, start):
        writers = [threading.Thread(target=write) for _ in range(2)]
        for writer in writers:
            writer.start()
        try:
            chunks = [
                await source.read_chunk(ChunkRequest("public.orders", 100, after=[low]))
                for low in (0, 100, 200)
            ]
        finally:
            stop.set()
            for writer in writers:
                await asyncio.to_thread(writer.join)
        seen = await follow_to(source, start, now_scn(db))
        txids = {scn: txid for scn, txid, _ in seen.windows}
        for chunk in chunks:
            # The stream up to the snapshot, laid over the first state, is the chunk.
            state = {(i,): 0 for i in range(1, 301)}
            for event in seen.events:
                if chunk.snapshot.sees(event.scn, txids[event.scn]):
                    assert event.scn <= chunk.snapshot.high
                    state[event.key] = (event.after or {})["qty"]
            for row in chunk.rows:
                found = chunk.schema.decode_row(row.row)
                assert found["qty"] == state[found["id"],]


async def test_chunks_page_by_composite_keys_in_the_databases_order(db: FreshDatabase) -> None:
    db.execute(ITEMS)
    db.execute(
        "INSERT INTO items SELECT i % 7, chr(97 + i % 26) || i, 'v' FROM generate_series(1, 100) i"
    )
    async with opened(config_of(db)) as source:
        upto = await source.largest_key("public.items")
        db.execute("INSERT INTO items VALUES (1, 'zzz', 'later')")
        keys: list[tuple[Any, ...]] = []
        after, done = None, False
        while not done:
            chunk = await source.read_chunk(ChunkRequest("public.items", 9, after=after, upto=upto))
            keys += [tuple(chunk.schema.decode_key(row.key).values()) for row in chunk.rows]
            after, done = chunk.last_key, chunk.done
        expected = db.execute("SELECT b, a FROM items WHERE v = 'v' ORDER BY b, a")
        assert keys == expected


async def test_requested_keys_are_read_and_missing_ones_are_named(db: FreshDatabase) -> None:
    db.execute(ITEMS)
    db.execute("INSERT INTO items VALUES (1, 'x', 'one'), (2, 'y', 'two'), (3, 'z', 'three')")
    async with opened(config_of(db)) as source:
        chunk = await source.read_chunk(
            ChunkRequest("public.items", 10, keys=[["z", 3], ["x", 1], ["x", 2], ["it's", 0]])
        )
        assert [chunk.schema.decode_row(row.row)["v"] for row in chunk.rows] == ["one", "three"]
        assert chunk.missing == [["x", 2], ["it's", 0]]
        assert chunk.done


async def test_the_stream_works_over_an_interrupted_network(
    db: FreshDatabase, faulty_proxy: Any
) -> None:
    db.execute(ORDERS)
    proxy = await faulty_proxy("127.0.0.1", db.server.port)
    url = db.url.replace(f":{db.server.port}/", f":{proxy.port}/")
    seen = Seen()
    async with opened_on(db, url=url) as (source, start):
        db.execute("INSERT INTO orders VALUES (1, 'a', 1)")
        await follow(source, start, lambda now: bool(now.windows), seen)
        with pytest.raises(SourceUnavailable):
            async with contextlib.aclosing(source.stream(seen.last[0])) as batches:
                async for _ in batches:
                    await proxy.close()
    assert seen.events[0].op is Op.INSERT
