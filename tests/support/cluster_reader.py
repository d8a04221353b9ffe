"""A client of all relays of a cluster, which reads in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable

from databus.client import DatabusClient, NoCheckpoints
from tests.support.waiting import eventually_sync


class ClusterReader:
    """A client of all relays in a thread of its own.

    Owner: one test; ``stop`` raises what it met.
    """

    def __init__(self, database: str, urls: list[str]) -> None:
        self.windows: list[tuple[int, int]] = []
        self.rows: dict[int, int] = {}
        self._client = DatabusClient(
            database=database, relays=urls, start="oldest", checkpoints=NoCheckpoints(),
            reconnect_most_s=0.5, silence_timeout_s=3.0, discover=True,
        )  # fmt: skip
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for window in self._client.windows():
                events = list(window)
                values = [event.value or {} for event in events]
                self.rows.update((one["id"], one.get("v", 0)) for one in values)
                if events:
                    self.windows.append((window.scn, len(events)))
        except BaseException as error:
            self._error = error

    def reach(self, scn: int) -> None:
        """Return when it has the window at ``scn`` or a later one."""

        def has() -> bool:
            if self._error is not None:
                raise self._error
            return bool(self.windows) and self.windows[-1][0] >= scn

        eventually_sync(has, 60, f"the client has {scn}; it has {self.windows[-1:]}")

    def end(self) -> None:
        """End the thread; nothing if it has ended."""
        self._client.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def stop(self) -> list[tuple[int, int]]:
        """The windows with events, each as its scn and their number."""
        self.end()
        if self._error is not None:
            raise self._error
        return self.windows


StartClusterReader = Callable[[str, list[str]], ClusterReader]
