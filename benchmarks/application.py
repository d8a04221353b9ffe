"""An application with the client library, which follows a paced relay: how old its events are.

``followers.py`` measures the relay, by readers at the speed of C; this measures what a user has
of it, callbacks in Python included, beside as many other readers.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.followers import WARM_UP_S, Received, follow, receiving
from benchmarks.relay_process import RelayProcess
from databus.client import Consumer, DatabusClient, Event


def follow_as_application(relay: RelayProcess, count: int, seconds: float) -> Received:
    """What an application gets for so long, one of ``count`` that follow.

    Raises:
        RuntimeError: it was not given every event, or none.
    """
    with receiving(partial(Application, relay.url), seconds) as received:
        if count > 1:
            follow(relay, count - 1, seconds, partitioned=False)
        return received()


class Application(Consumer):
    """Notes how old each event is, and that none is missing: each is a window, numbered by one.

    Owner: the process that reads.
    """

    def __init__(self, url: str) -> None:
        self._client = DatabusClient(database="gen", relays=[url], consumer=self, start="latest")
        self._ages_us: list[int] = []
        self._last_scn = 0
        self._missing = 0

    def onDataEvent(self, event: Event) -> None:
        self._ages_us.append(time.time_ns() // 1000 - event.commit_us)
        scn = event.position.scn
        self._missing += scn != self._last_scn + 1 and self._last_scn > 0
        self._last_scn = scn

    def run(self, seconds: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Follow; what comes in the first ``WARM_UP_S`` or less does not count."""
        warm_up_s = min(WARM_UP_S, seconds / 2)
        begun: list[int] = []
        timers = [
            threading.Timer(warm_up_s, lambda: begun.append(len(self._ages_us))),
            threading.Timer(warm_up_s + seconds, self._client.stop),
        ]
        for timer in timers:
            timer.start()
        self._client.run()
        ages_us = np.array(self._ages_us[begun[0] :], dtype=np.int64)
        if self._missing or not len(ages_us):
            raise RuntimeError(f"{self._missing} events are missing, {len(ages_us)} came")
        return np.array([len(ages_us) / seconds]), ages_us
