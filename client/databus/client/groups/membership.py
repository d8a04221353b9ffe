"""The thread that makes this process a member of a group and renews its lease."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from databus.client.checkpoints.checkpoint_table import Steps, new_owner
from databus.client.groups.group_leases import GroupLeases
from databus.client.groups.group_table import Claim, GroupState, GroupTable, Holding
from databus.client.groups.owned_partition import MemberLease
from databus.common.errors import ConfigError, DatabusError, InternalError, StoreBusy
from databus.common.processes.own_clock import own_clock_s

log = logging.getLogger("databus.client")
T = TypeVar("T")

_STORED = 0.8
_OWN = 0.7
"""The parts of ``lease_s`` for which a lease is stored, and for which its holder uses it.  What is
left is for differences of clocks, and for the other members to notice its end."""
_LONGEST_BEAT_S = 1.0
_AFTER_END_S = 0.01
_LEAVE_S = 5.0
_FIRST_ATTEMPTS = 5
"""How often the first join may fail, as it does when two members make the group at once."""


@dataclass(frozen=True, slots=True)
class Owned:
    """What this process owns at one time."""

    lease: MemberLease
    wanted: frozenset[int]
    """The partitions that are assigned to this member."""
    claims: dict[int, Claim]
    """The partitions that it has claimed; those that are not wanted must be given up."""
    state: GroupState | None


class Membership:
    """One member of a group, in a thread of its own, so that no callback delays a renewal.

    Invariants:
        I1. The lease in this process ends before the one in the database: it counts from before
            the request that renewed it.
        I2. A partition is released only after ``ended`` was called for it.

    Owner: one ``GroupClient``; the thread writes ``owned``, and replaces it whole.
    """

    def __init__(
        self,
        *,
        leases: GroupLeases,
        group: str,
        member: str,
        count: int,
        lease_s: float,
        on_change: Callable[[], None],
    ) -> None:
        if lease_s < 1:
            raise ConfigError(f"lease_s is {lease_s:g}, which is below 1")
        self.member = member or new_owner()
        self.owned = Owned(MemberLease(new_owner()), frozenset(), {}, None)
        self.error: DatabusError | None = None
        """Why the member cannot stay in the group."""
        self.last_error = ""
        self._leases = leases.kept()
        self._group = group
        self._count = count
        self._lease_s = lease_s
        self._on_change = on_change
        self._is_joined = False
        self._ended: list[tuple[Claim, str]] = []
        self._is_stopping = False
        self._woken = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"databus-group-{group}", daemon=True
        )

    def start(self) -> None:
        """Join, and stay a member until ``leave``."""
        self._thread.start()

    def ended(self, claim: Claim, lease: MemberLease) -> None:
        """Nothing of that ownership runs any more: release the partition."""
        self._ended.append((claim, lease.incarnation))
        self._woken.set()

    async def leave(self) -> None:
        """Give the lease back; the others get the partitions within a second or so.

        Where the database does not answer, the lease ends by itself.
        """
        self._is_stopping = True
        self._woken.set()
        await asyncio.to_thread(self._thread.join, _LEAVE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._beat_until_left())
        except DatabusError as error:
            self._end(error)
        except Exception as error:
            log.exception("group %s: the thread of the membership has failed", self._group)
            self._end(InternalError(f"the thread of the membership ended with {error!r}"))

    def _end(self, error: DatabusError) -> None:
        self.error = error
        self.owned.lease.end()
        self._on_change()

    async def _beats(self) -> None:
        failure_count = 0
        while not self._is_stopping:
            self._woken.clear()
            try:
                pause_s = await self._beat()
                self.last_error = ""
            except StoreBusy:
                raise
            except DatabusError as error:
                failure_count += 1
                if self.owned.state is None and failure_count > _FIRST_ATTEMPTS:
                    raise
                pause_s = self._beat_s
                self.last_error = str(error)
                log.warning("group %s: %s", self._group, error)
            self._woken.wait(pause_s)
        await self._leave()

    async def _beat_until_left(self) -> None:
        try:
            await self._beats()
        finally:
            closing = self._leases.close()
            if closing is not None:
                await closing

    @property
    def _beat_s(self) -> float:
        return min(_LONGEST_BEAT_S, self._lease_s / 10)

    async def _beat(self) -> float:
        """Renew the lease, claim and release; returns the pause until the next time."""
        await self._release()
        state = await self._renewed()
        claims = self._still_owned(state)
        wanted = state.assignment.numbers_of(self.member)
        lease = self.owned.lease
        free = [
            number
            for number in sorted(wanted - claims.keys())
            if state.is_free(number) or state.owners[number].incarnation == lease.incarnation
        ]
        self._publish(Owned(lease, wanted, claims, state))
        if free:
            steps = self._table.claim_all(self._group, free, state, lease.incarnation)
            claimed = {claim.number: claim for claim in await self._do("claim", steps)}
            self._publish(Owned(lease, wanted, claims | claimed, state))
        until_end_s = self._beat_s
        if state.next_end_us is not None:
            until_end_s = state.next_end_us / 1e6 + _AFTER_END_S
        return min(self._beat_s, until_end_s)

    @property
    def _table(self) -> GroupTable:
        return self._leases.table

    async def _renewed(self) -> GroupState:
        began_s = own_clock_s()
        lease, lease_us = self.owned.lease, int(self._lease_s * _STORED * 1e6)
        state: GroupState | None = None
        if self._is_joined:
            steps = self._table.renew(self._group, self.member, lease.incarnation, lease_us)
            state = await self._do("renew", steps)
        if state is None:
            if self._is_joined:
                log.warning("group %s: the lease of %s has ended", self._group, self.member)
                self._is_joined = False
            lease.end()
            lease = MemberLease(new_owner())
            self._publish(Owned(lease, frozenset(), {}, self.owned.state))
            state = await self._do(
                "join",
                self._table.join(
                    self._group, self.member, lease.incarnation, self._count, lease_us
                ),
            )
            self._is_joined = True
            if state.count != self._count:
                log.warning(
                    "the group %s has %d partitions; partitions=%d counts only for a new group",
                    self._group,
                    state.count,
                    self._count,
                )
        lease.extend(began_s + self._lease_s * _OWN)
        return state

    async def _release(self) -> None:
        while self._ended:
            claim, incarnation = self._ended[0]
            await self._do("release", self._table.release(self._group, claim, incarnation))
            claims = dict(self.owned.claims)
            if claims.get(claim.number) is claim:
                del claims[claim.number]
                self._publish(replace(self.owned, claims=claims))
            self._ended.pop(0)

    def _still_owned(self, state: GroupState) -> dict[int, Claim]:
        incarnation = self.owned.lease.incarnation
        return {
            number: claim
            for number, claim in self.owned.claims.items()
            if claim.count == state.count
            and state.owners[number] == Holding(incarnation, claim.fence)
        }

    async def _leave(self) -> None:
        lease = self.owned.lease
        lease.end()
        if not self._is_joined:
            return
        try:
            await self._do("leave", self._table.leave(self._group, self.member, lease.incarnation))
        except DatabusError as error:
            log.warning("group %s: the lease ends by itself: %s", self._group, error)

    async def _do(self, what: str, steps: Steps[T]) -> T:
        found = self._leases.alone(what, steps)
        return await found if inspect.isawaitable(found) else found

    def _publish(self, owned: Owned) -> None:
        is_new = owned != self.owned
        self.owned = owned
        if is_new:
            self._on_change()
