"""Members of a group: partitions are shared, and go to others when a member is gone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databus.client import (
    AsyncpgLeases,
    Checkpoint,
    Consumer,
    DatabaseLeases,
    Event,
    GroupClient,
    OwnedPartition,
    PartitionListener,
    Result,
)
from databus.client.observing.prometheus_metrics import GroupCollector
from databus.common.errors import ConfigError, ConsumerFailed, StoreBusy, StoreError
from databus.common.frame.frame_format import Op
from tests.client.checkpoints.conftest import Application
from tests.client.groups.conftest import database_of
from tests.support.fixtures import FreshDatabase
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually

Seen = dict[int, list[tuple[int, int]]]


class Recorder(Consumer):
    def __init__(self, partition: OwnedPartition, seen: Seen) -> None:
        self.partition, self.seen = partition, seen

    def onDataEvent(self, event: Event) -> None:
        assert self.partition.covers(event.key_hash)
        self.seen[self.partition.number].append((event.scn, event.key["id"]))


class Notes(PartitionListener):
    def __init__(self) -> None:
        self.assigned: list[OwnedPartition] = []
        self.revoked: list[tuple[OwnedPartition, bool]] = []

    async def onPartitionAssigned(self, partition: OwnedPartition) -> None:
        self.assigned.append(partition)

    def onPartitionRevoked(self, partition: OwnedPartition) -> None:
        self.revoked.append((partition, partition.is_owned))


def member(relay: LiveRelay, leases: Any, seen: Seen, **settings: Any) -> GroupClient:
    return GroupClient(
        **{
            "group": "search",
            "partitions": 4,
            "leases": leases,
            "consumer": lambda partition: Recorder(partition, seen),
            "database": "shop",
            "relays": [relay.url],
            "start": "oldest",
            "lease_s": 3.0,
            "idle_checkpoint_s": 0.1,
        }
        | settings
    )


@asynccontextmanager
async def serving(*members: GroupClient) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Serve them meanwhile; those that still run leave in order."""
    tasks = [asyncio.create_task(one.serve()) for one in members]
    try:
        yield tasks
    finally:
        for one in members:
            one.stop()
        await asyncio.wait(tasks)


def inserts(first: int, last: int) -> list[bytes]:
    return [window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in range(first, last + 1)]


def count(seen: Seen) -> int:
    return sum(map(len, seen.values()))


@pytest.fixture
def leases(tmp_path: Path, request: pytest.FixtureRequest) -> DatabaseLeases:
    """The tables of groups in an SQLite file."""
    made = DatabaseLeases(database_of("sqlite", tmp_path, request).connect)
    made.create_tables()
    return made


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[LiveRelay]:
    """A relay of the database ``shop``."""
    async with LiveRelay(tmp_path / "relay").served() as live:
        yield live


async def test_two_members_share_and_one_that_is_gone_is_replaced(
    tmp_path: Path, postgres_database: FreshDatabase
) -> None:
    application = Application("postgres", postgres_database.url)
    leases = DatabaseLeases(application.connect)
    leases.create_tables()
    seen: Seen = defaultdict(list)
    relay = LiveRelay(tmp_path / "relay")
    async with relay.served():
        relay.append(*[window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in range(1, 41)])
        first, second = member(relay, leases, seen), member(relay, leases, seen)
        one = asyncio.create_task(first.serve())
        await eventually(lambda: sum(map(len, seen.values())) == 40)
        two = asyncio.create_task(second.serve())
        await eventually(lambda: len(first.status.owned) == len(second.status.owned) == 2)
        relay.append(*[window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in range(41, 61)])
        await eventually(lambda: sum(map(len, seen.values())) >= 60)
        first.stop()
        await one
        await eventually(lambda: len(second.status.owned) == 4)
        relay.append(*[window(scn, [(Op.INSERT, ORDERS, scn)]) for scn in range(61, 81)])
        await eventually(lambda: sum(map(len, seen.values())) >= 80)
        second.stop()
        await two
    ids = sorted(number for events in seen.values() for _, number in events)
    assert ids == list(range(1, 81)), "each event once: members left in order"
    for events in seen.values():
        assert events == sorted(events)


async def test_a_listener_is_notified_and_a_member_that_joins_gets_its_share(
    relay: LiveRelay, leases: DatabaseLeases
) -> None:
    notes, seen = Notes(), defaultdict(list)
    relay.append(*inserts(1, 20))
    first, second = member(relay, leases, seen, listener=notes), member(relay, leases, seen)
    async with serving(first):
        await eventually(lambda: count(seen) == 20)
        async with serving(second):
            await eventually(lambda: len(second.status.owned) == 2)
            assert len(first.status.owned) == 2
            assert first.status.partition_count == 4
            assert [is_owned for _, is_owned in notes.revoked] == [True, True]
            families = {one.name: one for one in GroupCollector(first, second).collect()}
            owned = families["databus_client_group_partitions_owned"].samples
            assert [one.value for one in owned] == [2, 2]
            assert {one.labels["member"] for one in owned} == {
                first.status.member,
                second.status.member,
            }
            lags = families["databus_client_lag_seconds"].samples
            assert {one.labels["client"] for one in lags} <= {f"search/{n}" for n in range(4)}
        await eventually(lambda: len(first.status.owned) == 4)
    assert sorted(one.number for one in notes.assigned[:4]) == [0, 1, 2, 3]
    assert len(notes.assigned) == len(notes.revoked) == 6
    assert not any(one.is_owned for one in notes.assigned)
    assert first.status.assigned_count == 6
    assert first.status.lost_count == 0
    state = leases.state("search")
    assert state.incarnations == {}
    assert all(map(state.is_free, range(4)))


async def test_a_running_group_gets_another_number_of_partitions(
    relay: LiveRelay, leases: DatabaseLeases
) -> None:
    seen: Seen = defaultdict(list)
    relay.append(*inserts(1, 20))
    first, second = member(relay, leases, seen), member(relay, leases, seen)
    async with serving(first, second):
        await eventually(lambda: count(seen) == 20)
        await eventually(lambda: can_be_resized(leases))
        await eventually(
            lambda: len(first.status.owned) == len(second.status.owned) == 3,
            message="six partitions over two members",
        )
        relay.append(*inserts(21, 60))
        await eventually(
            lambda: {key for rows in seen.values() for _, key in rows} >= {*range(61)} - {0}
        )
        assert first.status.partition_count == 6
    new = [scn for rows in seen.values() for scn, _ in rows if scn > 20]
    assert sorted(new) == list(range(21, 61))


def can_be_resized(leases: DatabaseLeases) -> bool:
    """Resize, once each partition has a checkpoint."""
    try:
        leases.resize("search", 6)
    except Exception as error:
        assert "have no checkpoint yet" in str(error)
        return False
    return True


async def test_an_error_of_a_partition_stops_the_member_and_frees_the_others(
    relay: LiveRelay, leases: DatabaseLeases
) -> None:
    class Failing(Recorder):
        def onDataEvent(self, event: Event) -> Any:
            return Result.ERROR_FATAL if event.key["id"] == 7 else super().onDataEvent(event)

    seen: Seen = defaultdict(list)
    relay.append(*inserts(1, 20))
    failing = member(relay, leases, seen, consumer=lambda one: Failing(one, seen))
    async with serving(failing) as tasks:
        with pytest.raises(ConsumerFailed, match="ERROR_FATAL"):
            await tasks[0]
    assert leases.state("search").incarnations == {}
    async with serving(member(relay, leases, seen)):
        await eventually(
            lambda: {key for rows in seen.values() for _, key in rows} == {*range(1, 21)}
        )


async def test_another_process_under_the_name_of_a_member_ends_it(
    relay: LiveRelay, leases: DatabaseLeases
) -> None:
    seen: Seen = defaultdict(list)
    notes = Notes()
    first = member(relay, leases, seen, member="pod-1", listener=notes)
    async with serving(first) as tasks:
        await eventually(lambda: len(first.status.owned) == 4)
        second = member(relay, leases, seen, member="pod-1")
        async with serving(second):
            with pytest.raises(StoreBusy, match="as the member pod-1"):
                await tasks[0]
            await eventually(lambda: len(second.status.owned) == 4)
            assert not any(is_owned for _, is_owned in notes.revoked)
            before = {one.number: one.fence for one in notes.assigned}
            now = leases.state("search").owners
            assert all(now[number].fence > fence for number, fence in before.items())


async def test_without_its_database_a_member_stops_and_continues_when_it_is_back(
    relay: LiveRelay, leases: DatabaseLeases
) -> None:
    notes, seen = Notes(), defaultdict(list)
    relay.append(*inserts(1, 20))
    one = member(relay, leases, seen, lease_s=1.0, listener=notes)
    async with serving(one):
        await eventually(lambda: count(seen) == 20)
        leases.alone("test", renamed("databus_groups", "away"))
        await eventually(lambda: one.status.owned == ())
        assert "no such table" in one.status.last_error
        assert one.status.lease_left_s == 0
        assert not any(is_owned for _, is_owned in notes.revoked)
        relay.append(*inserts(21, 40))
        leases.alone("test", renamed("away", "databus_groups"))
        await eventually(
            lambda: {key for rows in seen.values() for _, key in rows} == {*range(1, 41)}
        )
        assert one.status.lost_count == 4


def renamed(old: str, new: str) -> Any:
    yield f"ALTER TABLE {old} RENAME TO {new}", ()


async def test_a_group_without_tables_is_refused(relay: LiveRelay, tmp_path: Path) -> None:
    leases = DatabaseLeases(Application("sqlite", f"sqlite:///{tmp_path}/new.db").connect)
    with pytest.raises(StoreError, match=r"create_tables\(\)"):
        await member(relay, leases, defaultdict(list), lease_s=1.0).serve()


def test_wrong_settings_are_refused_at_once(leases: DatabaseLeases) -> None:
    relay: Any = LiveRelay.__new__(LiveRelay)
    relay.url = "http://127.0.0.1:1"
    for settings, match in (
        ({"partitions": 0}, "partitions=0"),
        ({"group": ""}, "group=''"),
        ({"lease_s": 0.5}, "lease_s is 0.5"),
        ({"dispatch": "across_windows"}, "across_windows"),
        ({"workerz": 1}, "did you mean workers"),
        ({"relays": ["relay:1"]}, "relays"),
    ):
        with pytest.raises(ConfigError, match=match):
            member(relay, leases, defaultdict(list), **settings)


class AsyncCopy(Consumer):
    """Copies events by asyncpg, in the transaction of the checkpoint."""

    def __init__(self, partition: OwnedPartition, url: str) -> None:
        self.partition, self.url = partition, url

    async def onStartConsumption(self) -> None:
        self.connection = await asyncpg.connect(self.url)

    async def onStartDataEventSequence(self, window: Any) -> None:
        self.transaction = self.connection.transaction()
        await self.transaction.start()

    async def onDataEvent(self, event: Event) -> None:
        number = self.partition.number
        await self.connection.execute("INSERT INTO copied VALUES ($1, $2)", number, event.key["id"])

    async def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        if self.connection.is_in_transaction():
            putting = self.partition.put(self.connection, checkpoint)
            assert putting is not None
            await putting
            await self.transaction.commit()

    async def onStopConsumption(self) -> None:
        await self.connection.close()


async def test_a_member_with_asyncpg_copies_each_row_once(
    relay: LiveRelay, postgres_database: FreshDatabase
) -> None:
    url = postgres_database.url
    application = Application("postgres", url)
    application.execute("CREATE TABLE copied (number BIGINT NOT NULL, id BIGINT NOT NULL)")
    leases = AsyncpgLeases(lambda: asyncpg.connect(url))
    await leases.create_tables()
    relay.append(*inserts(1, 40))

    def new_member() -> GroupClient:
        return member(relay, leases, {}, consumer=lambda one: AsyncCopy(one, url))

    def copied() -> list[tuple[int]]:
        return application.execute("SELECT id FROM copied ORDER BY id")

    first, second = new_member(), new_member()
    async with serving(first):
        await eventually(lambda: len(copied()) == 40)
        async with serving(second):
            await eventually(lambda: len(second.status.owned) == 2)
            relay.append(*inserts(41, 60))
            await eventually(lambda: len(copied()) >= 60)
        relay.append(*inserts(61, 80))
        await eventually(lambda: len(copied()) >= 80)
    assert copied() == [(key,) for key in range(1, 81)]
