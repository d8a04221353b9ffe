"""When waiting events are sent to a reader: a batch ends by time or by size.

By default every commit goes out at once.  A reader can request fewer and larger
pieces, because each costs it a wake-up or because larger pieces compress better.  The request has
the time for which events may be gathered, and how many bytes are enough.
"""

from __future__ import annotations

BATCH_BYTES = 1 << 20
_MIN_POLL_DELAY_S = 0.002
_MAX_POLL_DELAY_S = 0.25
_POLLS_A_BATCH = 8


class PendingBatch:
    """The events gathered for one reader; the bytes stay in the ring.

    Invariants:
        I1. Waiting events are held until they are ``enough_bytes`` of the stream, before any
            filter, or the first of them has waited for ``wait_s``, give or take one poll delay.
        I2. Once a batch has ended, all waiting events go out, in as many pieces as needed.

    Owner: the task that answers the request.
    """

    def __init__(self, wait_s: float, enough_bytes: int) -> None:
        self._wait_s = wait_s
        self._enough_bytes = enough_bytes
        self._ends_s: float | None = None
        self._has_ended = False
        self.is_held = False

    def holds(self, waiting_bytes: int, now_s: float) -> bool:
        """Whether ``waiting_bytes`` of the stream should wait for more."""
        if waiting_bytes and self._ends_s is None:
            self._ends_s = now_s + self._wait_s
        is_late = self._ends_s is not None and now_s >= self._ends_s
        self._has_ended |= is_late or waiting_bytes >= self._enough_bytes
        self.is_held = waiting_bytes > 0 and not self._has_ended
        return self.is_held

    def sent_all(self) -> None:
        """Nothing waits: the next batch begins with the next event."""
        self._ends_s = None
        self._has_ended = self.is_held = False

    def poll_delay_s(self, most_s: float) -> float:
        """How long to sleep before the next check: batching saves a check at every commit."""
        return max(
            0.0,
            min(most_s, _MAX_POLL_DELAY_S, max(_MIN_POLL_DELAY_S, self._wait_s / _POLLS_A_BATCH)),
        )
