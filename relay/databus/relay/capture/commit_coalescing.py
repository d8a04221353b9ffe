"""A short delay after each read, if commits come too fast to be handled one by one.

A single commit wakes fetcher, worker and client in sequence, which costs a hundred times what
its row does.  At some thousands a second that takes two whole processors, each process waits for
the others, and latency grows without end.  So from ``BUSY_WINDOWS_PER_S`` on the fetcher waits
for a millisecond after a read: the next read brings several commits, and every later step
runs as many times less often (docs/decisions/0034).
"""

from __future__ import annotations

BUSY_WINDOWS_PER_S = 2500.0
CALM_WINDOWS_PER_S = 1800.0
MEASURED_S = 0.1
COALESCING_DELAY_S = 0.001
LARGE_BYTES = 32 << 10
"""A batch of this size needs no delay: there is a backlog, or huge commits."""


class CommitCoalescing:
    """How long to wait after a batch.

    Invariants:
        I1. No commit waits for more than one ``COALESCING_DELAY_S`` here, and none while fewer than
            ``CALM_WINDOWS_PER_S`` come.
        I2. Large batches are not delayed.

    Owner: the fetcher's task that reads the source.
    """

    def __init__(self) -> None:
        self.is_busy = False
        self._since_s = 0.0
        self._window_count = 0

    def coalescing_delay_s(self, window_count: int, size_bytes: int, now_s: float) -> float:
        """Seconds to wait; ``window_count`` is of all windows so far, the size of this batch."""
        spent_s = now_s - self._since_s
        if spent_s >= MEASURED_S:
            limit = CALM_WINDOWS_PER_S if self.is_busy else BUSY_WINDOWS_PER_S
            self.is_busy = (window_count - self._window_count) / spent_s >= limit
            self._since_s, self._window_count = now_s, window_count
        return COALESCING_DELAY_S if self.is_busy and 0 < size_bytes < LARGE_BYTES else 0.0
