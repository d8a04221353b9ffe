"""The frames of the last moment, for observers that begin to watch the stream."""

from __future__ import annotations

import time
from collections import deque

RECENT_BYTES = 2 << 20
RECENT_BATCHES = 4096


class RecentBatches:
    """The frames of the last batches: at most ``RECENT_BYTES``, or the last batch alone.

    ``added_s`` is when the last one was added, or an idle window was due.

    Owner: the fetcher.
    """

    def __init__(self) -> None:
        self._batches: deque[bytes] = deque()
        self._bytes = 0
        self.added_s = time.monotonic()

    def add(self, frames: bytes) -> None:
        """These were appended; the oldest are dropped."""
        self.added_s = time.monotonic()
        batches = self._batches
        batches.append(frames)
        self._bytes += len(frames)
        while len(batches) > 1 and (self._bytes > RECENT_BYTES or len(batches) > RECENT_BATCHES):
            self._bytes -= len(batches.popleft())

    def frames(self) -> bytes:
        """All of them, the oldest first."""
        return b"".join(self._batches)
