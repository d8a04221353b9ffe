"""The demo's consumer: maintains a copy of every table, and counts rows that went back."""

from __future__ import annotations

import time
from typing import Any

from databus.cli.demo.shop import Rows
from databus.client import Consumer
from databus.client.application.events import Event, Window
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position

_RATE_S = 2.5


class ShopMirror(Consumer):
    """A materialised copy of the source's tables.

    Invariants:
        I1. ``tables`` is the result of the events so far on empty tables.
        I2. ``regressions`` counts rows that went back to an older state, except in a replay
            after ``onRollback`` or a restart.

    Owner: the client's event loop; other threads may read numbers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tables: dict[str, Rows] = {}
        self.events = 0
        self.windows = 0
        self.rollbacks = 0
        self.regressions = 0
        self.moves: list[str] = []
        self.mode = "waiting"
        self.position = Position(0, 0)
        self._newest: dict[tuple[str, tuple[Any, ...]], Position] = {}
        self._rate = _Rate()

    @property
    def rate(self) -> float:
        """Events a second over the last seconds."""
        return self._rate.value(self.events)

    def onStartDataEventSequence(self, window: Window) -> None:
        mode = "relay" if window.mode == "online" else "bootstrap"
        if mode != self.mode:
            self._moved(mode, window.scn)

    def onDataEvent(self, event: Event) -> None:
        key = tuple(event.key.values())
        rows = self.tables.setdefault(event.source, {})
        row = (event.source, key)
        if event.position < self._newest.get(row, event.position):
            self.regressions += 1
        self._newest[row] = event.position
        if event.op == "t":
            rows.clear()
        elif event.op == "d":
            rows.pop(key, None)
        else:
            rows[key] = {**(rows.get(key, {}) if event.absent else {}), **(event.value or {})}
        self.events += 1

    def onEndDataEventSequence(self, window: Window) -> None:
        self.windows += 1

    def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        self.position = checkpoint.position
        if isinstance(checkpoint, OnlineCheckpoint) and self.mode == "bootstrap":
            self._moved("relay", checkpoint.position.scn)

    def onRollback(self, checkpoint: Checkpoint | None) -> None:
        self.rollbacks += 1
        self._newest.clear()

    def sleeping(self) -> None:
        """The application sleeps from now on; events after its checkpoint will come again."""
        self._newest.clear()
        self._moved("asleep", self.position.scn)

    def _moved(self, mode: str, scn: int) -> None:
        self.mode = mode
        if not self.moves or self.moves[-1].split("@")[0] != mode:
            self.moves.append(f"{mode}@{scn:,}")


class _Rate:
    """Rate of a counter over the last few seconds, or since the last call."""

    def __init__(self) -> None:
        self._samples = [(time.monotonic(), 0)]

    def value(self, count: int) -> float:
        now = time.monotonic()
        recent = [sample for sample in self._samples if now - sample[0] < _RATE_S]
        self._samples = (recent or self._samples[-1:]) + [(now, count)]
        (first, low), (last, high) = self._samples[0], self._samples[-1]
        return (high - low) / (last - first) if last > first else 0.0
