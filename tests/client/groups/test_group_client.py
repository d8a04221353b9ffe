"""Members of a group: partitions are shared, and go to others when a member is gone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

from databus.client import Consumer, DatabaseLeases, Event, GroupClient, OwnedPartition
from databus.common.frame.frame_format import Op
from tests.client.checkpoints.conftest import Application
from tests.support.fixtures import FreshDatabase
from tests.support.live_relay import ORDERS, LiveRelay, window
from tests.support.waiting import eventually


class Recorder(Consumer):
    def __init__(self, partition: OwnedPartition, seen: dict[int, list[Any]]) -> None:
        self.partition, self.seen = partition, seen

    def onDataEvent(self, event: Event) -> None:
        assert self.partition.covers(event.key_hash)
        self.seen[self.partition.number].append((event.scn, event.value["id"]))


def member(
    relay: LiveRelay, leases: Any, seen: dict[int, list[Any]], **settings: Any
) -> GroupClient:
    return GroupClient(
        **{
            "group": "search",
            "partitions": 4,
            "leases": leases,
            "consumer": lambda partition: Recorder(partition, seen),
            "database": "shop",
            "relays": [relay.url],
            "start": "oldest",
            "lease_s": 2.0,
            "idle_checkpoint_s": 0.1,
        }
        | settings
    )


async def test_two_members_share_and_one_that_is_gone_is_replaced(
    tmp_path: Path, postgres_database: FreshDatabase
) -> None:
    application = Application("postgres", postgres_database.url)
    leases = DatabaseLeases(application.connect)
    leases.create_tables()
    seen: dict[int, list[Any]] = defaultdict(list)
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
