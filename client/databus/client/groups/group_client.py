"""A member of a group: one client for each partition that it owns."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Unpack

from databus.client.application.consumer import Consumer
from databus.client.application.options import OptionFields, parse_options
from databus.client.application.signal_stops import run_until_signal
from databus.client.client import DatabusClient, Start
from databus.client.delivery.dead_letter_replay import Replayed
from databus.client.groups.group_leases import GroupLeases
from databus.client.groups.group_table import Claim, checked_count, checked_group
from databus.client.groups.membership import Membership, Owned
from databus.client.groups.owned_partition import FencedConsumer, MemberLease, OwnedPartition
from databus.common.errors import (
    CheckpointMoved,
    ConfigError,
    ConsumerFailed,
    StoreError,
    UsageError,
)

log = logging.getLogger("databus.client")

_LOOK_S = 1.0


class PartitionListener:
    """Is notified when this member gets and loses partitions; override what you need.

    Methods may be plain or ``async``; they run in the thread of the partition.
    """

    def onPartitionAssigned(self, partition: OwnedPartition) -> Awaitable[None] | None:
        """The member owns the partition; its consumer is made next."""
        return None

    def onPartitionRevoked(self, partition: OwnedPartition) -> Awaitable[None] | None:
        """No callback of the partition's consumer follows; another member gets it next.

        If ``partition.is_owned`` is false, the lease has ended, and another member may already
        have the partition: discard what is not written.
        """
        return None


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The state of a member of a group."""

    member: str
    """The name of the member."""
    member_count: int
    """The members whose leases have not ended; 0 before this one has joined."""
    partition_count: int
    """The partitions of the group; 0 before this member has joined."""
    owned: tuple[int, ...]
    """The partitions that this member delivers."""
    assigned_count: int
    """Partitions that this member has got since the start."""
    lost_count: int
    """Partitions whose lease ended before the member had given them up."""
    lease_left_s: float
    """Seconds until the lease ends if it is not renewed; 0 if it has ended."""
    last_error: str
    """Why the lease could not be renewed the last time; empty if it could."""


class _Delivering:
    """One partition that this member delivers, in a thread of its own."""

    def __init__(
        self, partition: OwnedPartition, lease: MemberLease, client: DatabusClient
    ) -> None:
        self.partition = partition
        self.lease = lease
        self.client = client
        self.ended = asyncio.get_running_loop().create_future()


class _Replay:
    """The partitions whose dead letters were replayed.

    Owner: the threads of the partitions add, the member's task reads.
    """

    def __init__(self) -> None:
        self.outcome = Replayed()
        self.numbers: set[int] = set()
        self._lock = threading.Lock()

    def add(self, number: int, one: Replayed) -> None:
        """A partition is done."""
        with self._lock:
            self.outcome.delivered += one.delivered
            self.outcome.failed += one.failed
            self.outcome.behind += one.behind
            self.numbers.add(number)

    def is_done(self, owned: Owned) -> bool:
        """Whether all partitions of the group are done.

        Raises:
            UsageError: another member is there.
        """
        state = owned.state
        if state is None:
            return False
        if len(state.incarnations) > 1:
            raise UsageError(
                f"the group has the members {', '.join(sorted(state.incarnations))}: stop all of "
                "them before its dead letters are replayed"
            )
        return len(self.numbers) == state.count


class GroupClient:
    """Delivers the partitions of a stream that this member of ``group`` owns.

    The keys of the stream are in ``partitions`` partitions, by their hashes.  Each partition has
    one owner at a time, and the members that are there share them evenly.  ``consumer`` makes a
    ``Consumer`` for each partition that the member gets.  ``leases`` hold the group in a database:
    ``DatabaseLeases`` or ``AsyncpgLeases``.  ``partitions`` counts when the group is made;
    ``leases.resize`` changes it.

    After a kill the partitions of a member are delivered elsewhere within ``lease_s``.
    ``member`` names this member; a restart under the same name gets its partitions back at once.
    Without it each start is a member of its own.  ``start`` is where a partition without a
    checkpoint begins.  With ``dead_letters``, an event that always fails goes to a table beside the
    leases, and the partition continues; ``replay_dead_letters`` delivers them again.  All other
    arguments are those of ``DatabusClient``.

    Order: for one key, and for one partition, the guarantee of ``Consumer`` holds, over all
    members; a change of the owner is as a restart.  Between partitions there is no order.  A
    truncate comes in every partition: delete only rows that the partition ``covers``.

    Threads: each partition has a thread and an event loop of its own, so that a plain callback,
    or one that waits for a lock, blocks no other partition.  What consumers share must bear it.

    Invariants:
        I1. No callback of a partition begins after the lease has ended by this machine's clock.
        I2. A checkpoint is stored only by the newest owner of its partition.

    Owner: one event loop, or one thread that calls ``run``; ``stop`` may be called from anywhere.
    Raises: ConfigError; from ``serve`` and ``run`` the error of a partition that cannot be
        continued, and StoreBusy if another process joins under the name of this member.
    """

    def __init__(
        self,
        *,
        group: str,
        partitions: int,
        leases: GroupLeases,
        consumer: Callable[[OwnedPartition], Consumer],
        database: str,
        relays: Sequence[str],
        sources: Iterable[str] = (),
        bootstraps: Sequence[str] = (),
        listener: PartitionListener | None = None,
        member: str = "",
        lease_s: float = 10.0,
        start: Start = "bootstrap",
        ops: str | Iterable[str] | None = None,
        dead_letters: bool = False,
        **options: Unpack[OptionFields],
    ) -> None:
        self.options = parse_options(options)
        if self.options.dispatch == "across_windows":
            raise ConfigError(
                "dispatch='across_windows' delivers events after a checkpoint before it is stored; "
                "the partitions of a group are parallel already: use 'within_window' or 'serial'"
            )
        self.group = checked_group(group)
        self._count = checked_count(partitions)
        self._leases = leases
        self._consumer = consumer
        self._listener = listener or PartitionListener()
        self._lease_s = lease_s
        self._has_letters = dead_letters
        self._replay: _Replay | None = None
        self._settings: dict[str, Any] = {
            "database": database,
            "relays": relays,
            "sources": sources if isinstance(sources, str) else tuple(sources),
            "bootstraps": bootstraps,
            "start": start,
            "ops": ops if ops is None or isinstance(ops, str) else tuple(ops),
            **options,
        }
        DatabusClient(**self._settings)  # raises what is wrong with them now
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopping = threading.Event()
        self._delivering: dict[int, _Delivering] = {}
        self._newest_fence: dict[tuple[int, int], int] = {}
        self._failure: BaseException | None = None
        self._assigned_count = self._lost_count = 0
        self._membership = self._new_membership(member)

    @property
    def clients(self) -> Mapping[int, DatabusClient]:
        """The clients of the partitions that this member delivers, by partition."""
        return MappingProxyType({n: one.client for n, one in self._delivering.copy().items()})

    @property
    def status(self) -> GroupStatus:
        """The member's present state."""
        owned = self._membership.owned
        state = owned.state
        return GroupStatus(
            member=self._membership.member,
            member_count=len(state.incarnations) if state else 0,
            partition_count=state.count if state else 0,
            owned=tuple(
                sorted(n for n, d in self._delivering.copy().items() if d.partition.is_owned)
            ),
            assigned_count=self._assigned_count,
            lost_count=self._lost_count,
            lease_left_s=max(0.0, owned.lease.left_s),
            last_error=self._membership.last_error,
        )

    def run(self) -> None:
        """Serve until ``stop``, SIGINT or SIGTERM, and leave the group; blocks."""
        run_until_signal(self.serve, self.stop)

    async def serve(self) -> None:
        """Deliver until ``stop``; then take the last checkpoints and leave the group.

        Raises:
            DatabusError: a partition, or the membership, cannot be continued.
        """
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        self._membership.start()
        try:
            while not self._is_stopping.is_set() and self._failure is None:
                self._changed.clear()
                if self._membership.error is not None:
                    raise self._membership.error
                self._follow(self._membership.owned)
                if self._replay is not None and self._replay.is_done(self._membership.owned):
                    break
                await self._wait()
            if self._failure is not None:
                raise self._failure
        finally:
            await self._stop_all()
            await self._membership.leave()
            self._loop = None
            self._is_stopping.clear()
            self._membership = self._new_membership(self._membership.member)

    async def replay_dead_letters(self) -> Replayed:
        """Call the consumers of all partitions with their dead letters again; those that they take
        are removed.

        This joins the group, so all other members must have left.

        Raises:
            UsageError: another member is there.
            DatabusError: a partition, or the membership, cannot be continued.
        """
        self._replay = _Replay()
        try:
            await self.serve()
            return self._replay.outcome
        finally:
            self._replay = None

    def stop(self) -> None:
        """End ``serve`` in order; from any thread or signal handler."""
        self._is_stopping.set()
        self._wake()

    def _new_membership(self, member: str) -> Membership:
        return Membership(
            leases=self._leases,
            group=self.group,
            member=member,
            count=self._count,
            lease_s=self._lease_s,
            on_change=self._wake,
        )

    def _wake(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._changed.set)

    async def _wait(self) -> None:
        left_s = self._membership.owned.lease.left_s
        timeout_s = min(_LOOK_S, left_s) if left_s > 0 else _LOOK_S
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _follow(self, owned: Owned) -> None:
        """Start and stop clients, so that those run that this member owns."""
        for number, delivering in self._delivering.items():
            claim = owned.claims.get(number)
            if (
                claim is not delivering.partition.claim
                or number not in owned.wanted
                or not delivering.partition.is_owned
            ):
                delivering.client.stop()
        if owned.lease.left_s <= 0:
            return
        for number, claim in owned.claims.items():
            if (
                number in owned.wanted
                and number not in self._delivering
                and claim.fence > self._newest_fence.get((claim.count, number), -1)
                and not (self._replay is not None and number in self._replay.numbers)
            ):
                self._begin(claim, owned.lease)

    def _begin(self, claim: Claim, lease: MemberLease) -> None:
        self._newest_fence[claim.count, claim.number] = claim.fence
        partition = OwnedPartition(self.group, self._membership.member, claim, lease, self._leases)
        name = self.options.client_name or self.group
        settings = self._settings | {"client_name": f"{name}/{claim.number}"}
        client = DatabusClient(
            checkpoints=partition,
            partition=partition.filter,
            dead_letters=partition.letters if self._has_letters else None,
            **settings,
        )
        delivering = _Delivering(partition, lease, client)
        self._delivering[claim.number] = delivering
        self._assigned_count += 1
        threading.Thread(
            target=self._run_partition,
            args=(delivering, asyncio.get_running_loop()),
            name=f"databus-{self.group}-{claim.number}",
            daemon=True,
        ).start()

    def _run_partition(self, delivering: _Delivering, loop: asyncio.AbstractEventLoop) -> None:
        failure: BaseException | None = None
        try:
            asyncio.run(self._deliver(delivering.partition, delivering.client))
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed: no task waits for the end
            loop.call_soon_threadsafe(self._end, delivering, failure)

    async def _deliver(self, partition: OwnedPartition, client: DatabusClient) -> None:
        """Serve one partition until it is revoked or lost, or fails."""
        try:
            await _settled(self._listener.onPartitionAssigned(partition))
            client.consumer = FencedConsumer(self._consumer(partition), partition)
            if self._replay is None:
                await client.serve()
            else:
                self._replay.add(partition.number, await client.replay_dead_letters())
        except (StoreError, ConsumerFailed) as error:
            if isinstance(error, ConsumerFailed) and partition.is_owned:
                raise
            if isinstance(error, CheckpointMoved):
                partition.give_up()
            log.warning("%r is lost: %s", partition, error)
        finally:
            await partition.disconnect()
            await _settled(self._listener.onPartitionRevoked(partition))

    def _end(self, delivering: _Delivering, failure: BaseException | None) -> None:
        """Nothing of the partition runs any more."""
        partition = delivering.partition
        if failure is not None and self._failure is None:
            self._failure = failure
        if not partition.is_owned:
            self._lost_count += 1
        partition.give_up()
        del self._delivering[partition.number]
        self._membership.ended(partition.claim, delivering.lease)
        delivering.ended.set_result(None)
        self._changed.set()

    async def _stop_all(self) -> None:
        ending = [one.ended for one in self._delivering.values()]
        for delivering in self._delivering.values():
            delivering.client.stop()
        if ending:
            await asyncio.wait(ending)


async def _settled(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer
