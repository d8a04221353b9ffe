"""Transactions on an LMDB map, and changes of its size."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class MapGate:
    """Lets transactions run at the same time, and resizes or closes the map while there is none.

    LMDB forbids to resize or close a map while this process has a transaction on it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passing = 0

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A transaction is open within this block."""
        with self._changed:
            self._passing += 1
        try:
            yield
        finally:
            with self._changed:
                self._passing -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """No transaction is open within this block."""
        with self._changed:
            self._changed.wait_for(lambda: self._passing == 0)
            yield
