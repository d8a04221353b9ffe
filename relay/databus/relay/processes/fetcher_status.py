"""The fetcher's status: its state, counters and rates, as one document."""

from __future__ import annotations

import enum
import json
import os
import time
from collections import deque
from typing import Any

from databus.common.config import DatabaseConfig
from databus.common.errors import DatabusError, to_problem
from databus.relay.capture.intake import Intake
from databus.relay.ring.data_folder import DatabaseFolder, write_document
from databus.relay.sources.contract import Source

RATE_WINDOW_S = 5.0


class FetcherState(enum.StrEnum):
    """What the fetcher is doing."""

    STARTING = "starting"
    STREAMING = "streaming"
    BLOCKED = "blocked"
    RECONNECTING = "reconnecting"
    FAILED = "failed"
    STOPPED = "stopped"


class FetcherStatus:
    """Collects the facts, and writes status.json.

    Owner: the fetcher's loop.
    Durability: none; the file is replaced atomically but not synced.
    """

    def __init__(self, config: DatabaseConfig, folder: DatabaseFolder) -> None:
        self.state = FetcherState.STARTING
        self.error: DatabusError | None = None
        self.source: dict[str, Any] = {}
        self.reconnect_count = 0
        self.batch_count = 0
        self.retry_at_us = 0
        self.caught_up = False
        self._config = config
        self._folder = folder
        self._started_us = time.time_ns() // 1000
        self._marks: deque[tuple[float, int]] = deque()
        # What the source had at a time, until the ring covers it; the last such time.
        self._asked: tuple[int, int] | None = None
        self._resolved_us: int | None = None

    async def ask(self, source: Source) -> None:
        """Query the source's status, and note what it had committed when it was asked."""
        began_us = time.time_ns() // 1000
        facts = await source.status()
        self.source = facts
        scn, at_us = facts.get("scn", facts.get("current_scn")), facts.get("resolved_us", began_us)
        if scn is not None and at_us is not None:
            self._asked = int(scn), int(at_us)

    async def ask_committed(self, source: Source) -> None:
        """Query what the source has committed, unless the ring lacks what the last answer was."""
        if self._asked is not None:
            return
        began_us = time.time_ns() // 1000
        scn = await source.committed_scn()
        if scn is not None:
            self._asked = scn, began_us

    def enter(self, state: FetcherState, error: DatabusError | None = None) -> None:
        """Change the state; the error stays until the next success."""
        self.state, self.error = state, error

    def document(self, intake: Intake | None, dumps: dict[str, Any]) -> dict[str, Any]:
        """All facts; positions are null before there is a ring."""
        now_us = time.time_ns() // 1000
        document: dict[str, Any] = {
            "database": self._config.name,
            "url": str(self._config.url),
            "state": str(self.state),
            "error": to_problem(self.error) if self.error is not None else None,
            "pid": os.getpid(),
            "started_us": self._started_us,
            "updated_us": now_us,
            "retry_at_us": self.retry_at_us,
            "reconnects": self.reconnect_count,
            "batches": self.batch_count,
            "source": self.source,
            "dumps": dumps,
        }
        if intake is not None:
            document.update(self._ring_facts(intake, now_us))
        return document

    def _ring_facts(self, intake: Intake, now_us: int) -> dict[str, Any]:
        state = intake.ring.state
        events = state.frames - state.windows
        behind_us = max(0, now_us - state.max_commit_us) if state.max_commit_us else 0
        source_scn = max(intake.resolved, intake.ring.last.scn)
        if self._asked is not None and self._asked[0] <= source_scn:
            self._resolved_us, self._asked = self._asked[1], None
        return {
            "clock": intake.ring.clock,
            "source_scn": source_scn,
            "resolved_us": self._resolved_us,
            "last": {"scn": state.max.scn, "seq": state.max.seq},
            "in_window": intake.in_window,
            "lag_us": 0 if self.caught_up else behind_us,
            "events": events,
            "windows": state.windows,
            "events_per_s": round(self._rate(events), 1),
            "ring_bytes": intake.ring.ring_bytes,
            "bytes": state.tail,
            "synced_bytes": state.synced,
            "schemas": len(intake.registry.schemas),
        }

    def _rate(self, events: int) -> float:
        now_s = time.monotonic()
        self._marks.append((now_s, events))
        while now_s - self._marks[0][0] > RATE_WINDOW_S and len(self._marks) > 2:
            self._marks.popleft()
        first_s, first = self._marks[0]
        passed_s = now_s - first_s
        return (events - first) / passed_s if passed_s > 0 else 0.0

    def write(self, document: dict[str, Any]) -> None:
        """Replace status.json."""
        write_document(self._folder.status, json.dumps(document).encode(), durable=False)
