"""Checkpoints in an application's database: the same for each driver, and under kill -9."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from databus.client import (
    AsyncpgCheckpoints,
    BootstrapCheckpoint,
    Checkpoint,
    Consumer,
    DatabaseCheckpoints,
    DatabusClient,
    OnlineCheckpoint,
    Position,
)
from databus.client.checkpoints.checkpoint_table import CheckpointTable, with_marks
from databus.common.errors import CheckpointMoved, ConfigError, StoreError, UsageError
from databus.common.frame.frame_format import Op
from tests.client.checkpoints.conftest import Application, Transaction, settled
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import within
from tests.support.warm_process import WarmProcess, warm_process

BOOT = BootstrapCheckpoint("shop", "c", Position(1), Position(9), "run", 7, Position(1))


def at(scn: int) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", "c", Position(scn, 1))


async def loaded(application: Application) -> Any:
    """A store with its table, which has claimed its row."""
    store = application.store()
    await settled(store.create_table())
    await settled(store.load())
    return store


async def stored(store: Any) -> Checkpoint | None:
    row = await settled(store.stored())
    return row and row.checkpoint


# -- the same for every driver


async def test_a_checkpoint_is_there_with_the_rows_of_its_transaction(
    application: Application,
) -> None:
    store = application.store()
    await settled(store.create_table())
    await settled(store.create_table())
    assert await settled(store.load()) is None
    async with Transaction(application) as transaction:
        await transaction.execute("INSERT INTO applied VALUES (3, 1)")
        await settled(store.put(transaction.connection, at(3)))
        assert await stored(application.store()) is None
        await transaction.commit()
    await settled(store.save(at(3)))
    assert await stored(store) == at(3)
    assert application.execute("SELECT scn FROM applied") == [(3,)]
    assert await settled(application.store().load()) == at(3)


async def test_nothing_of_a_transaction_that_is_not_committed_stays(
    application: Application,
) -> None:
    store = await loaded(application)
    async with Transaction(application) as transaction:
        await transaction.execute("INSERT INTO applied VALUES (3, 1)")
        await settled(store.put(transaction.connection, at(3)))
    assert await stored(store) is None
    assert application.execute("SELECT scn FROM applied") == []
    async with Transaction(application) as transaction:  # the window comes again
        await settled(store.put(transaction.connection, at(3)))
        await transaction.commit()
    await settled(store.save(at(3)))
    assert await stored(store) == at(3)


async def test_the_process_before_cannot_commit_once_another_has_started(
    application: Application,
) -> None:
    first, second = await loaded(application), application.store()
    assert await settled(second.load()) is None
    async with Transaction(application) as transaction:
        with pytest.raises(CheckpointMoved, match="has taken the consumer over"):
            await settled(first.put(transaction.connection, at(3)))
    with pytest.raises(CheckpointMoved, match="has taken"):
        await settled(first.save(at(3)))
    await settled(second.save(at(4)))
    assert await stored(second) == at(4)


async def test_a_commit_that_was_reported_as_failed_is_not_applied_again(
    application: Application,
) -> None:
    store = await loaded(application)
    async with Transaction(application) as transaction:
        await settled(store.put(transaction.connection, at(3)))
        await transaction.commit()  # the application takes it for failed: no save follows
    for scn in (3, 5):  # replayed alone, or together with later windows
        async with Transaction(application) as transaction:
            with pytest.raises(CheckpointMoved, match="committed although"):
                await settled(store.put(transaction.connection, at(scn)))
    assert await settled(store.load()) == at(3), "the next start continues after it"


async def test_a_checkpoint_goes_back_only_by_set(application: Application) -> None:
    store = await loaded(application)
    await settled(store.save(at(9)))
    with pytest.raises(UsageError, match="lies before"):
        await settled(store.save(at(8)))
    await settled(application.store().set(at(2)))
    with pytest.raises(CheckpointMoved, match="set by an operator"):
        await settled(store.save(at(10)))
    assert await settled(store.load()) == at(2)
    await settled(application.store("new").set(BOOT))
    assert await settled(application.store("new").load()) == BOOT


async def test_consumers_of_one_table_are_separate(application: Application) -> None:
    one, other = application.store("one"), application.store("other")
    await settled(one.create_table())
    await settled(one.load())
    assert await settled(other.load()) is None
    await settled(one.save(BOOT))
    await settled(other.save(at(7)))
    assert (await stored(one), await stored(other)) == (BOOT, at(7))
    await settled(one.save(at(9)))
    assert await stored(one) == at(9)


async def test_a_missing_table_is_named_with_what_creates_it(application: Application) -> None:
    with pytest.raises(StoreError, match=r"databus_checkpoints .* call create_table"):
        await settled(application.store().load())


async def test_a_connection_that_commits_each_statement_is_refused(
    application: Application,
) -> None:
    store = await loaded(application)
    async with Transaction(application) as transaction:
        connection = transaction.connection
        await transaction.commit()
        if isinstance(connection, sqlite3.Connection):
            connection.isolation_level = None
        elif application.driver in ("mariadb", "mysql"):
            connection.autocommit(True)
        elif application.driver == "postgres":
            connection.autocommit = True
        with pytest.raises(UsageError, match="open transaction"):
            await settled(store.put(connection, at(3)))


# -- what needs no server


def test_put_needs_a_loaded_store_and_names_are_checked() -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(UsageError, match="outside a client"):
        DatabaseCheckpoints("copy", lambda: connection).put(connection, at(1))
    connection.close()
    for name in ("", "x" * 191):
        with pytest.raises(ConfigError, match="name"):
            DatabaseCheckpoints(name, lambda: connection)
    for table in ("a b", "x;y", "a.b.c", ""):
        with pytest.raises(ConfigError, match="TABLE"):
            CheckpointTable(table)
    with pytest.raises(ConfigError, match="named"):
        with_marks("SELECT ?", "named")
    assert with_marks("? ?", "numeric_dollar") == "$1 $2"


async def test_workers_that_run_ahead_are_refused() -> None:
    for store in (
        DatabaseCheckpoints("copy", lambda: None),
        AsyncpgCheckpoints("copy", lambda: asyncio.sleep(0)),
    ):
        with pytest.raises(ConfigError, match="within_window"):
            DatabusClient(
                database="shop",
                relays=["http://127.0.0.1:1"],
                checkpoints=store,
                dispatch="across_windows",
            )


class Copy(Consumer):
    """Appends events to a table of an SQLite file; counts the tries of a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.store = DatabaseCheckpoints("copy", lambda: sqlite3.connect(path))
        self.store.create_table()
        self.try_count = 0

    def onDataEvent(self, event: Any) -> None:
        self.connection.execute("INSERT INTO applied VALUES (?, ?)", (event.scn, event.seq))

    def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        self.try_count += 1
        self.store.put(self.connection, checkpoint)
        self.connection.commit()

    def onRollback(self, checkpoint: Checkpoint | None) -> None:
        self.connection.rollback()


async def test_a_client_whose_checkpoint_was_taken_stops_at_once(
    relay: LiveRelay, tmp_path: Path
) -> None:
    consumer = Copy(tmp_path / "copy.db")
    consumer.connection.execute("CREATE TABLE applied (scn, seq)")
    client = DatabusClient(
        database="shop",
        relays=[relay.url],
        consumer=consumer,
        checkpoints=consumer.store,
        start="oldest",
    )
    relay.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    serving = asyncio.create_task(client.serve())
    async with within(10):
        while client.status.checkpoint is None:
            await asyncio.sleep(0.01)
        DatabaseCheckpoints("copy", lambda: sqlite3.connect(tmp_path / "copy.db")).load()
        tries = consumer.try_count
        relay.append(window(2, [(Op.INSERT, ORDERS, 2)]))
        with pytest.raises(CheckpointMoved, match="taken the consumer over"):
            await serving
    assert consumer.try_count == tries + 1
    consumer.connection.rollback()
    assert consumer.connection.execute("SELECT scn FROM applied").fetchall() == [(1,)]
    consumer.connection.close()


def read_some(client: DatabusClient, consumer: Copy, count: int) -> None:
    windows = client.windows()
    for number, pulled in enumerate(windows, start=1):
        for event in pulled:
            consumer.onDataEvent(event)
        assert pulled.checkpoint is not None
        consumer.onCheckpoint(pulled.checkpoint)
        pulled.commit()
        if number == count:
            break
    windows.close()


async def test_the_iterator_stores_its_checkpoints_in_the_transaction(
    relay: LiveRelay, tmp_path: Path
) -> None:
    relay.append(*[window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in range(1, 9)])

    def read(count: int) -> list[tuple[int]]:
        consumer = Copy(tmp_path / "copy.db")
        consumer.connection.execute("CREATE TABLE IF NOT EXISTS applied (scn, seq)")
        client = DatabusClient(
            database="shop", relays=[relay.url], checkpoints=consumer.store, start="oldest"
        )
        read_some(client, consumer, count)
        found = consumer.connection.execute("SELECT scn FROM applied").fetchall()
        consumer.connection.close()
        return found

    assert await asyncio.to_thread(read, 3) == [(1,), (2,), (3,)]
    assert await asyncio.to_thread(read, 5) == [(scn,) for scn in range(1, 9)]


# -- kill -9


@pytest.fixture
async def warm() -> AsyncIterator[WarmProcess]:
    async with warm_process("tests.support.checkpoint_process") as process:
        yield process


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [{}, {"checkpoint_every_windows": 3}], ids=["each", "third"])
async def test_kill_9_anywhere_leaves_each_window_exactly_once(
    application: Application, relay: LiveRelay, warm: WarmProcess, options: dict[str, int]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    await settled(application.store().create_table())
    expected: list[tuple[int, int]] = []
    kill_count = 0
    for number in range(1, 13):
        for scn in range(100 * number - 99, 100 * number + 1):
            relay.append(window(scn, [(Op.INSERT, ORDERS, key) for key in range(3)]))
            expected += [(scn, seq) for seq in range(3)]
        settings: dict[str, Any] = {
            "driver": application.driver,
            "url": application.url,
            "relay": relay.url,
            "until_scn": 1200,
            "options": options,
        }
        if number % 2:
            settings["step"] = choice.randrange(1, 200)
        elif number < 12:
            settings["after_s"] = choice.uniform(0, 0.08)
        await warm.start(settings)
        code = await warm.exit_code()
        assert code in (-9, 0)
        kill_count += code == -9
        found = sorted(application.execute("SELECT scn, seq FROM applied"))
        assert found == expected[: len(found)], f"round {number}: events are lost or repeated"
        assert len(found) % 3 == 0, f"round {number}: a window was torn"
        row = await settled(application.store("appender").stored())
        assert (row.checkpoint.position.scn if row.checkpoint else 0) == len(found) // 3
    assert found == expected
    assert kill_count >= 10
