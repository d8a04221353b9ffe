"""The tables of groups: the same for each driver."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import pytest

from databus.client import AsyncpgLeases, DatabaseLeases, OnlineCheckpoint, OwnedPartition, Position
from databus.client.groups.group_table import (
    Claim,
    GroupState,
    GroupTable,
    checked_count,
    checked_group,
)
from databus.client.groups.owned_partition import MemberLease
from databus.common.errors import CheckpointMoved, ConfigError, StoreBusy, StoreError, UsageError
from databus.common.processes.own_clock import own_clock_s
from tests.client.checkpoints.conftest import Application, Transaction, settled

MINUTE_US = 60_000_000


def at(scn: int) -> OnlineCheckpoint:
    return OnlineCheckpoint("shop", "c", Position(scn, 1))


@dataclass
class Group:
    """The group ``search`` of one database, and its members as tables know them."""

    leases: Any
    made: list[OwnedPartition] = field(default_factory=list)

    @classmethod
    async def of(cls, application: Application) -> Group:
        if application.driver == "asyncpg":
            made: Any = AsyncpgLeases(lambda: asyncpg.connect(application.url))
        else:
            made = DatabaseLeases(application.connect)
        await settled(made.create_tables())
        await settled(made.create_tables())
        return cls(made)

    async def run(self, steps: Any) -> Any:
        return await settled(self.leases.alone("test", steps))

    async def join(self, name: str, *, lease_us: int = MINUTE_US, again: str = "") -> GroupState:
        table: GroupTable = self.leases.table
        found: GroupState = await self.run(table.join("search", name, name + again, 4, lease_us))
        return found

    async def renew(self, name: str, *, again: str = "") -> GroupState | None:
        table: GroupTable = self.leases.table
        found: GroupState | None = await self.run(
            table.renew("search", name, name + again, MINUTE_US)
        )
        return found

    async def claims(self, name: str, state: GroupState) -> list[Claim]:
        wanted = sorted(state.assignment.numbers_of(name))
        found: list[Claim] = await self.run(
            self.leases.table.claim_all("search", wanted, state, state.incarnations[name])
        )
        return found

    async def end(self, name: str) -> None:
        await self.run(self.leases.table.leave("search", name, name))

    def owned(self, claim: Claim) -> OwnedPartition:
        lease = MemberLease("of the test")
        lease.extend(own_clock_s() + 60)
        made = OwnedPartition("search", "of the test", claim, lease, self.leases)
        self.made.append(made)
        return made


@pytest.fixture
async def group(application: Application) -> AsyncIterator[Group]:
    """The group, with its tables."""
    made = await Group.of(application)
    yield made
    for one in made.made:
        await one.disconnect()


async def test_two_members_share_and_each_claim_has_a_higher_fence(
    group: Group, application: Application
) -> None:
    alone = await group.join("a")
    assert alone.assignment.owners == ("a",) * 4
    both = await group.join("b")
    assert sorted(both.assignment.owners) == ["a", "a", "b", "b"]
    first = await group.claims("a", both)
    assert [claim.fence for claim in first] == [1, 1]
    assert await group.claims("a", both) == [], "they are not as in that state any more"
    await group.end("a")
    left = await group.renew("b")
    assert left is not None and left.assignment.owners == ("b",) * 4
    assert left.departed == ("a",)
    second = await group.claims("b", left)
    assert {claim.number: claim.fence for claim in second} == {
        number: 2 if number in both.assignment.numbers_of("a") else 1 for number in range(4)
    }
    back = await group.join("a", again="again")
    assert back.assignment == both.assignment, "its place was held"


async def test_an_owner_before_cannot_move_the_checkpoint(
    group: Group, application: Application
) -> None:
    claim = (await group.claims("a", await group.join("a")))[0]
    before = group.owned(claim)
    await before.save(at(3))
    await group.end("a")
    state = await group.join("b")
    after = group.owned((await group.claims("b", state))[0])
    assert after.load() == at(3), "the checkpoint travels with the partition"
    assert after.fence > before.fence
    with pytest.raises(CheckpointMoved, match="taken the consumer over"):
        await before.save(at(9))
    async with Transaction(application) as transaction:
        await transaction.execute("CREATE TABLE scratch (x INT)")
        with pytest.raises(CheckpointMoved, match="taken the consumer over"):
            await settled(before.put(transaction.connection, at(9)))
    async with Transaction(application) as transaction:
        await transaction.execute("SELECT 1")
        await settled(after.put(transaction.connection, at(4)))
        await transaction.commit()
    await after.save(at(4))
    await after.save(at(5))


async def test_put_and_save_end_with_the_own_lease(group: Group, application: Application) -> None:
    claim = (await group.claims("a", await group.join("a")))[0]
    lease = MemberLease("a")
    partition = OwnedPartition("search", "a", claim, lease, group.leases)
    assert not partition.is_owned, "no renewal has been confirmed"
    lease.extend(own_clock_s() + 60)
    assert partition.is_owned
    lease.extend(own_clock_s() - 0.001)
    with pytest.raises(CheckpointMoved, match="has ended"):
        await partition.save(at(1))
    lease.end()
    lease.extend(own_clock_s() + 60)
    assert not partition.is_owned, "an ended lease stays ended"


async def test_a_lease_that_has_ended_is_not_renewed(
    group: Group, application: Application
) -> None:
    await group.join("a", lease_us=1)
    assert await group.renew("a") is None
    await group.join("a", again="again")
    assert await group.renew("a", again="again") is not None
    with pytest.raises(StoreBusy, match="has joined the group search as the member a"):
        await group.renew("a")


async def test_an_open_transaction_holds_its_own_partition_alone(
    group: Group, application: Application
) -> None:
    if application.driver == "sqlite":
        return  # such a transaction holds the whole file, as the manual says
    claims = await group.claims("a", await group.join("a"))
    held = group.owned(claims[2])
    await held.save(at(3))
    async with Transaction(application) as transaction:
        await settled(held.put(transaction.connection, at(4)))
        await group.end("a")
        state = await group.join("b")
        async with asyncio.timeout(30):
            taken = await group.claims("b", state)
        assert [claim.number for claim in taken] == [0, 1, 3]
        await transaction.commit()
    later = await group.renew("b")
    assert later is not None
    assert later.is_free(2)
    claim = await group.run(group.leases.table.claim("search", 2, later, "b"))
    assert claim.row.checkpoint == at(4), "what was committed before the claim counts"


async def test_a_group_gets_another_number_of_partitions(
    group: Group, application: Application
) -> None:
    claims = await group.claims("a", await group.join("a"))
    owned = [group.owned(claim) for claim in claims]
    await owned[0].save(at(10))
    with pytest.raises(UsageError, match=r"\[1, 2, 3\] of 4 have no checkpoint"):
        await settled(group.leases.resize("search", 8))
    for number in (1, 2, 3):
        await owned[number].save(at(10 + number))
    await settled(group.leases.resize("search", 6))
    state = await group.renew("a")
    assert state is not None and state.count == 4
    assert state.assignment.owners == ("",) * 4, "all are to be given up"
    state = await group.renew("a")
    assert state is not None and state.count == 4, "a has not given them up yet"
    await owned[3].save(at(20))
    for claim in claims:
        await group.run(group.leases.table.release("search", claim, "a"))
    state = await group.renew("a")
    assert state is not None and state.count == 6
    assert state.assignment.owners == ("a",) * 6
    new = await group.claims("a", state)
    starts = [claim.row.checkpoint for claim in new]
    assert starts == [at(10), at(11), at(10), at(11), at(10), at(11)]
    assert min(claim.fence for claim in new) > max(claim.fence for claim in claims)
    with pytest.raises(CheckpointMoved, match="its row is gone"):
        await owned[3].save(at(30))
    await settled(group.leases.resize("search", 2))
    for claim in new:
        await group.run(group.leases.table.release("search", claim, "a"))
    for _ in range(2):
        state = await group.renew("a")
    assert state is not None and state.count == 2
    smaller = await group.claims("a", state)
    assert [claim.row.checkpoint for claim in smaller] == [at(10), at(11)]


async def test_missing_tables_and_groups_are_named(application: Application) -> None:
    if application.driver == "asyncpg":
        leases: Any = AsyncpgLeases(lambda: asyncpg.connect(application.url))
    else:
        leases = DatabaseLeases(application.connect)
    with pytest.raises(StoreError, match=r"call create_tables\(\)"):
        await settled(leases.state("search"))
    assert "databus_group_members" in leases.ddl
    await settled(leases.create_tables())
    for asked in (leases.state, lambda name: leases.resize(name, 2)):
        with pytest.raises(UsageError, match="no group 'search'"):
            await settled(asked("search"))


def test_names_counts_and_drivers_are_checked() -> None:
    with pytest.raises(ConfigError, match="group=''"):
        checked_group("")
    for count in (0, 1025):
        with pytest.raises(ConfigError, match=f"partitions={count}"):
            checked_count(count)
    with pytest.raises(ConfigError, match="dialect='oracle'"):
        DatabaseLeases(lambda: None, dialect="oracle")

    class Unknown:
        def close(self) -> None: ...

    with pytest.raises(ConfigError, match="give dialect="):
        DatabaseLeases(Unknown).create_tables()


def test_a_connection_that_commits_each_statement_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "application.db"
    leases = DatabaseLeases(lambda: sqlite3.connect(path, isolation_level=None))
    leases.create_tables()
    with pytest.raises(UsageError, match="commits each statement"):
        leases.alone("join", leases.table.join("search", "a", "a", 2, MINUTE_US))
