"""The end of a leader's lease, in memory that the supervisor and a fetcher share.

The supervisor renews the lease, and the fetcher looks at it before each append.  A message would
arrive late at a fetcher that was paused; memory has the end already when it runs again.
"""

from __future__ import annotations

import mmap
import os
from typing import Self

import numpy as np

from databus.common.processes.own_clock import own_clock_s

_BYTES = 16


class LeaseWord:
    """Until when a leader may append, by this machine's clock, and how many relays follow it.

    Invariants:
        I1. Each of the two is one aligned word of 8 bytes: a reader gets an old or a new value.
        I2. After ``end`` the lease stays ended.

    Owner: the thread of the membership writes; any process that has the descriptor reads.
    Raises: OSError if the system gives no memory.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _BYTES)
        self._until_s = np.frombuffer(self._map, dtype=np.float64, count=1)
        self._followers = np.frombuffer(self._map, dtype=np.int64, count=1, offset=8)
        self._is_ended = False

    @classmethod
    def make(cls) -> Self:
        """A lease that has ended, in new memory."""
        fd = os.memfd_create("databus-lease", os.MFD_CLOEXEC)
        os.truncate(fd, _BYTES)
        word = cls(fd)
        word._until_s[0] = float("-inf")
        return word

    @property
    def left_s(self) -> float:
        """Seconds until it ends; 0 or less if it has."""
        return float(self._until_s[0]) - own_clock_s()

    @property
    def follower_count(self) -> int:
        """How many relays are there that follow this leader."""
        return int(self._followers[0])

    def extend(self, until_s: float) -> None:
        """The lease was renewed."""
        if not self._is_ended:
            self._until_s[0] = until_s

    def count(self, followers: int) -> None:
        """So many relays are there that follow."""
        self._followers[0] = followers

    def end(self) -> None:
        """The lease was lost or given up."""
        self._is_ended = True
        self._until_s[0] = float("-inf")

    def close(self) -> None:
        """Close the descriptor and the memory."""
        del self._until_s, self._followers
        self._map.close()
        os.close(self.fd)
