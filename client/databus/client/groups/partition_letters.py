"""The dead letters of a partition, in the database of the leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from databus.client.checkpoints.checkpoint_table import Statement, Steps
from databus.client.deadletters.dead_letter import DeadLetter
from databus.client.deadletters.held_events import settled
from databus.client.groups.group_leases import GroupLeases
from databus.client.groups.group_table import Claim

if TYPE_CHECKING:
    from databus.client.groups.owned_partition import OwnedPartition


class PartitionLetters:
    """A store of dead letters that only the newest owner of a partition can change.

    Invariants:
        I1. A change and the check of the fence are one transaction: a process that was paused and
            wakes stores and removes no letter.
        I2. The letters go with the partition, also into other numbers of partitions.

    Owner: the thread of the partition.
    Durability: each call is one transaction.
    Raises: CheckpointMoved if another member owns the partition; StoreError.
    """

    def __init__(self, partition: OwnedPartition, claim: Claim, leases: GroupLeases) -> None:
        self._partition = partition
        self._claim = claim
        self._leases = leases
        self._table = leases.table.letters

    async def put(self, letters: Sequence[DeadLetter]) -> None:
        """Store letters."""
        await self._change(self._table.putting(self._consumer, letters))

    async def all(self) -> list[DeadLetter]:
        """All letters of the partition."""
        steps = self._leases.table.letters_of(self._consumer)
        found: list[DeadLetter] = await settled(self._leases.alone("read", steps))
        return found

    async def remove(self, letters: Sequence[DeadLetter]) -> None:
        """Remove letters."""
        await self._change(self._table.removing(self._consumer, letters))

    @property
    def _consumer(self) -> str:
        return self._claim.row.consumer

    async def _change(self, statements: list[Statement]) -> None:
        self._partition.require_owned()
        await settled(self._leases.alone("write", self._fenced(statements)))

    def _fenced(self, statements: list[Statement]) -> Steps[None]:
        for statement in statements:
            _ = yield statement
        is_newest = yield from self._leases.table.is_newest(self._partition.group, self._claim)
        if not is_newest:
            raise self._partition.lost()
