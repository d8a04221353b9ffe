"""A budget that concurrent merges share: the driver's memory for the keys of broadcasts.

The plan of a merge limits that merge (``applier.BROADCAST_ROWS``, ``BROADCAST_KEY_BYTES``); the
budget limits the sum of all running merges.  It does not depend on Spark.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Budget:
    """Shares of one whole.

    Invariants:
        I1. The shares held at one time add up to 1 at most; a caller that requests more than is
            left waits, and gets it once other holders have finished.

    Owner: the process; any thread.
    """

    def __init__(self) -> None:
        self._held = 0.0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def share(self, wanted: float) -> Iterator[None]:
        """Hold a share within the block; more than 1 counts as the whole, 0 never waits."""
        wanted = min(max(wanted, 0.0), 1.0)
        with self._changed:
            self._changed.wait_for(lambda: not wanted or self._held + wanted <= 1.0 + 1e-9)
            self._held += wanted
        try:
            yield
        finally:
            with self._changed:
                self._held -= wanted
                self._changed.notify_all()
