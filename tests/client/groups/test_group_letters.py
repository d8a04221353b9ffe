"""Dead letters of a group: they go with their partition, and only its owner changes them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from databus.client import (
    AsyncpgLeases,
    Consumer,
    DatabaseLeases,
    Event,
    GroupClient,
    OwnedPartition,
)
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.groups.group_table import checkpoint_name
from databus.common.errors import CheckpointMoved, UsageError
from databus.common.frame.frame_format import Op
from tests.client.checkpoints.conftest import DRIVERS
from tests.client.groups.conftest import database_of
from tests.support.fixtures import FreshDatabase
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually

SEEN = dict[int, list[int]]


class Shy(Consumer):
    """Takes no event of the keys in ``bad``."""

    def __init__(self, seen: SEEN, bad: set[int]) -> None:
        self.seen, self.bad = seen, bad

    def onDataEvent(self, event: Event) -> None:
        if event.key["id"] in self.bad:
            raise ValueError("no")
        self.seen[event.key["id"]].append(event.scn)


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[LiveRelay]:
    """A relay of the database ``shop``."""
    async with LiveRelay(tmp_path / "relay").served() as live:
        yield live


@pytest.fixture(params=[driver for driver in DRIVERS if driver != "asyncpg"])
def leases(request: pytest.FixtureRequest, tmp_path: Path) -> DatabaseLeases:
    """The tables of groups, by each driver of the DB-API."""
    made = DatabaseLeases(database_of(request.param, tmp_path, request).connect)
    made.create_tables()
    return made


def member(relay: LiveRelay, leases: Any, seen: SEEN, bad: set[int]) -> GroupClient:
    return GroupClient(
        group="search", partitions=4, leases=leases, database="shop", relays=[relay.url],
        consumer=lambda partition: Shy(seen, bad), start="oldest", lease_s=3.0,
        idle_checkpoint_s=0.05, dead_letters=True, max_retries=0, retry_s=0.001,
    )  # fmt: skip


def letters(leases: Any, count: int) -> dict[int, list[DeadLetter]]:
    found = {}
    for number in range(count):
        steps = leases.table.letters_of(checkpoint_name("search", number, count))
        if one := leases.alone("read", steps):
            found[number] = one
    return found


def positions(found: dict[int, list[DeadLetter]]) -> list[int]:
    return sorted(one.scn for rows in found.values() for one in rows)


async def served(client: GroupClient, until: Any) -> None:
    serving = asyncio.ensure_future(client.serve())
    try:
        await eventually(lambda: serving.done() or until(), 60)
    finally:
        client.stop()
        await serving


async def test_letters_hold_back_their_key_at_every_owner_and_move_with_it(
    relay: LiveRelay, leases: Any
) -> None:
    seen: SEEN = defaultdict(list)
    bad = {3, 8}
    for scn in range(1, 21):
        relay.append(window(scn, [(Op.INSERT if scn < 11 else Op.UPDATE, ORDERS, scn % 10)]))
    await served(
        member(relay, leases, seen, bad),
        lambda: sum(map(len, seen.values())) >= 16 and len(positions(letters(leases, 4))) == 4,
    )
    assert positions(letters(leases, 4)) == [3, 8, 13, 18]
    # Another member, whose consumer would take these keys: the order of a key holds all the same.
    relay.append(window(21, [(Op.UPDATE, ORDERS, 3)]), window(22, [(Op.UPDATE, ORDERS, 4)]))
    await served(
        member(relay, leases, seen, set()),
        lambda: 22 in seen[4] and 21 in positions(letters(leases, 4)),
    )
    assert seen[3] == seen[8] == []
    leases.resize("search", 6)
    await served(member(relay, leases, seen, set()), lambda: leases.state("search").count == 6)
    found = letters(leases, 6)
    assert positions(found) == [3, 8, 13, 18, 21]
    for number, rows in found.items():
        assert {one.key_hash % 6 for one in rows} == {number}
    assert not letters(leases, 4)
    again = await member(relay, leases, seen, {8}).replay_dead_letters()
    assert (again.delivered, again.failed, again.behind) == (3, 1, 1)
    assert seen[3] == [3, 13, 21]
    assert positions(letters(leases, 6)) == [8, 18]
    last = await member(relay, leases, seen, set()).replay_dead_letters()
    assert (last.delivered, last.failed, last.behind) == (2, 0, 0)
    assert seen[8] == [8, 18]
    assert not letters(leases, 6)


async def test_a_member_that_lost_its_partition_stores_no_letter(
    relay: LiveRelay, leases: Any
) -> None:
    seen: SEEN = defaultdict(list)
    owned: dict[int, OwnedPartition] = {}

    def consumer(partition: OwnedPartition) -> Consumer:
        owned.setdefault(partition.number, partition)
        return Shy(seen, {1})

    first = member(relay, leases, seen, {1})
    first._consumer = consumer
    relay.append(window(1, [(Op.INSERT, ORDERS, 1)]))
    await served(first, lambda: positions(letters(leases, 4)) == [1])
    (number,) = letters(leases, 4)
    stale, letter = owned[number], letters(leases, 4)[number][0]
    await served(member(relay, leases, seen, set()), lambda: leases.state("search").incarnations)
    await eventually(lambda: leases.state("search").owners[number].fence > stale.fence)
    for change in (stale.letters.put, stale.letters.remove):
        with pytest.raises(CheckpointMoved):
            await change([letter])
    # Even if its own clock shows that it still owns the partition.
    stale._is_given_up = False
    stale._lease._is_ended = False
    stale._lease.extend(float("inf"))
    assert stale.is_owned
    for change in (stale.letters.put, stale.letters.remove):
        with pytest.raises(CheckpointMoved, match="another member owns"):
            await change([letter])
    await stale.disconnect()
    assert positions(letters(leases, 4)) == [1]


async def test_letters_are_stored_through_asyncpg(
    relay: LiveRelay, postgres_database: FreshDatabase
) -> None:
    leases = AsyncpgLeases(lambda: asyncpg.connect(postgres_database.url))
    await leases.create_tables()
    seen: SEEN = defaultdict(list)
    relay.append(window(1, [(Op.INSERT, ORDERS, 1)]), window(2, [(Op.UPDATE, ORDERS, 1)]))

    async def stored() -> bool:
        rows = await asyncpg.connect(postgres_database.url)
        try:
            return int(await rows.fetchval("SELECT count(*) FROM databus_group_dead_letters")) == 2
        finally:
            await rows.close()

    client = member(relay, leases, seen, {1})
    serving = asyncio.ensure_future(client.serve())
    await eventually(stored, 60)
    client.stop()
    await serving
    again = await member(relay, leases, seen, set()).replay_dead_letters()
    assert (again.delivered, seen[1]) == (2, [1, 2])


async def test_a_replay_beside_a_member_is_refused(relay: LiveRelay, leases: Any) -> None:
    seen: SEEN = defaultdict(list)
    running = member(relay, leases, seen, set())
    serving = asyncio.ensure_future(running.serve())
    try:
        await eventually(lambda: len(running.status.owned) == 4, 60)
        with pytest.raises(UsageError, match="stop all of them"):
            await member(relay, leases, seen, set()).replay_dead_letters()
    finally:
        running.stop()
        await serving
