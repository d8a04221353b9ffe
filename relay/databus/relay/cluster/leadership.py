"""A leader's right to append and to acknowledge, as its fetcher looks at it."""

from __future__ import annotations

import time

from databus.common.checkpoint import Position
from databus.common.errors import LeadershipLost
from databus.relay.cluster.lease_word import LeaseWord

REPORT_S = 10.0
"""How long the report of a follower counts."""


class Leadership:
    """One term of a leader.

    Invariants:
        I1. ``require`` returns only while the lease holds by this machine's clock, and the lease
            ends there before ZooKeeper gives it to another relay.
        I2. ``ackable`` never passes what a follower has on disk while the cluster has followers.

    Owner: the fetcher's event loop.
    """

    def __init__(self, epoch: int, relay: str, lease: LeaseWord) -> None:
        self.epoch = epoch
        self.relay = relay
        self._lease = lease
        self._followers: dict[str, tuple[Position, float]] = {}

    @property
    def holds(self) -> bool:
        """Whether the lease holds by this machine's clock."""
        return self._lease.left_s > 0

    def require(self) -> None:
        """Refuse if the lease has ended.

        Raises:
            LeadershipLost: another relay leads, or may soon.
        """
        left_s = self._lease.left_s
        if left_s <= 0:
            since = "was given up" if left_s == float("-inf") else f"ended {-left_s:.3f} s ago"
            raise LeadershipLost(
                f"the lease of {self.relay} with the epoch {self.epoch} {since}: nothing is "
                "appended or acknowledged",
                epoch=self.epoch,
            )

    def followed(self, follower: str, position: Position) -> None:
        """A follower reports what it has on disk."""
        self._followers[follower] = (position, time.monotonic())

    def ackable(self, complete: Position) -> int:
        """The scn up to which the source may discard its log, if the ring on disk ends with the
        window at ``complete``; -1 if it may discard nothing.

        While the cluster has followers, at least one of them has it on disk too.
        """
        if not self._lease.follower_count:
            return complete.scn
        since_s = time.monotonic() - REPORT_S
        positions = [at for at, heard_s in self._followers.values() if heard_s >= since_s]
        # A follower may have a part of the window that it ends in.
        scns = (complete.scn if at >= complete else at.scn - 1 for at in positions)
        return max(scns, default=-1)

    def followers(self) -> dict[str, dict[str, int]]:
        """What each follower has reported, for the status."""
        return {name: at.to_json() for name, (at, _) in sorted(self._followers.items())}
