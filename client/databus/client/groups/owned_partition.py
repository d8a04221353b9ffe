"""A partition that this process owns: its fencing number, its lease, its checkpoint."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from databus.client.application.consumer import Consumer, Result
from databus.client.checkpoints.checkpoint_table import StoredCheckpoint
from databus.client.checkpoints.database_checkpoints import HeldCheckpoint
from databus.client.groups.group_leases import GroupLeases
from databus.client.groups.group_table import Claim
from databus.client.groups.partition_letters import PartitionLetters
from databus.common.checkpoint import Checkpoint
from databus.common.errors import CheckpointMoved, DatabusError, StoreError
from databus.common.processes.own_clock import own_clock_s

_FENCED = (
    "onStartDataEventSequence",
    "onStartSource",
    "onDataEvent",
    "onDataBatch",
    "onEndSource",
    "onEndDataEventSequence",
    "onTableState",
    "onCheckpoint",
)
_UNFENCED = ("onStartConsumption", "onRollback", "onStopConsumption")


class MemberLease:
    """Until when one incarnation of a member may act, by its own clock.

    Invariants:
        I1. It ends before the lease in the database does.
        I2. Once ``end`` was called it stays ended.

    Owner: the thread of the membership writes; any thread reads.
    """

    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self._until_s = float("-inf")
        self._is_ended = False

    @property
    def left_s(self) -> float:
        """Seconds until it ends; 0 or less if it has."""
        return float("-inf") if self._is_ended else self._until_s - own_clock_s()

    def extend(self, until_s: float) -> None:
        """The lease was renewed."""
        self._until_s = until_s

    def end(self) -> None:
        """The lease was lost or given up."""
        self._is_ended = True


class OwnedPartition:
    """One partition while this process owns it.

    ``fence`` grows with each ownership.  A sink that stores it with what it writes, and refuses a
    lower one, cannot be written by an owner before this one.

    Invariants:
        I1. ``put`` succeeds only while this ownership is the newest one, whatever the clocks show.
        I2. No callback begins when ``is_owned`` is false.

    Owner: the thread of the partition; ``is_owned`` may be read in any thread.
    """

    def __init__(
        self, group: str, member: str, claim: Claim, lease: MemberLease, leases: GroupLeases
    ) -> None:
        self.group = group
        self.member = member
        self.number = claim.number
        self.count = claim.count
        self.fence = claim.fence
        self.claim = claim
        self._lease = lease
        self._leases = leases
        self._saving = leases.kept()
        self._held = HeldCheckpoint(claim.row.consumer, leases.table.checkpoints.name)
        self._held.claimed(claim.row)
        self._is_given_up = False
        self.letters = PartitionLetters(self, claim, self._saving)
        """Its dead letters."""

    def __repr__(self) -> str:
        return f"OwnedPartition({self.group}/{self.number}/{self.count}, fence={self.fence})"

    @property
    def filter(self) -> str:
        """The servers' filter for its keys."""
        return f"mod:{self.count}:{self.number}"

    @property
    def is_owned(self) -> bool:
        """Whether the lease holds, by this machine's clock."""
        return not self._is_given_up and self._lease.left_s > 0

    def covers(self, key_hash: int) -> bool:
        """Whether a key (``event.key_hash``) is in this partition."""
        return key_hash % self.count == self.number

    def put(self, connection: Any, checkpoint: Checkpoint) -> Awaitable[None] | None:
        """Write the checkpoint in the open transaction of ``connection``; does not commit.

        The connection is one to the database of the leases.  With ``AsyncpgLeases`` await it.

        Raises:
            CheckpointMoved: another process owns the partition, or may soon; roll back.
            UsageError: the connection commits each statement by itself, or the checkpoint lies
                before the stored one.
        """
        self.require_owned()
        return self._leases.within(connection, self._held.putting(checkpoint))

    def give_up(self) -> None:
        """Own it no more."""
        self._is_given_up = True

    def require_owned(self) -> None:
        """Raise CheckpointMoved unless the lease holds."""
        if not self.is_owned:
            raise self.lost()

    def lost(self) -> CheckpointMoved:
        """The error of an owner whose lease has ended."""
        return CheckpointMoved(
            f"the lease on partition {self.number} of {self.count} of the group {self.group} has "
            f"ended (fence {self.fence}): another member owns the partition, or may soon. Roll the "
            "transaction back."
        )

    # The store of its client's checkpoints.

    def load(self) -> Checkpoint | None:
        """The checkpoint that was stored when the partition was claimed."""
        return self._held.claimed(self._row)

    @property
    def _row(self) -> StoredCheckpoint:
        return self.claim.row

    async def save(self, checkpoint: Checkpoint) -> None:
        """Store the checkpoint, unless ``put`` has.

        Raises:
            CheckpointMoved: another process owns the partition, or may soon.
        """
        if not self._held.confirm(checkpoint):
            self.require_owned()
            saving = self._saving.alone("write", self._held.putting(checkpoint))
            if inspect.isawaitable(saving):
                await saving
            self._held.confirm(checkpoint)

    async def disconnect(self) -> None:
        """Close the connection that ``save`` uses; in the thread of the partition."""
        closing = self._saving.close()
        if closing is not None:
            await closing


class FencedConsumer(Consumer):
    """Calls the application's consumer while its partition is owned, and ends the client after.

    Owner: one client.
    """

    def __init__(self, consumer: Consumer, partition: OwnedPartition) -> None:
        self._consumer = consumer
        self._partition = partition
        for name in (*_FENCED, *_UNFENCED):
            function = getattr(consumer, name)
            if getattr(function, "__func__", None) is not getattr(Consumer, name):
                setattr(self, name, self._fenced(function) if name in _FENCED else function)

    def onError(self, error: DatabusError) -> Any:
        """Not called if the partition is continued, here or by another member."""
        if self._partition.is_owned and not isinstance(error, StoreError):
            return self._consumer.onError(error)
        return None

    def _fenced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_async(*arguments: Any) -> Any:
                return self._refusal(function) or await function(*arguments)

            return call_async

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            # A process that was paused looks here first when it runs again.
            return self._refusal(function) or function(*arguments)

        return call

    def _refusal(self, function: Callable[..., Any]) -> Result | None:
        if self._partition.is_owned:
            return None
        if function.__name__ == "onCheckpoint":
            raise self._partition.lost()
        return Result.ERROR_FATAL
