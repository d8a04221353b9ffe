"""Which readers are inside the store, so that the applier does not delete what they need.

A server writes a note into the store while it has readers: when the oldest of them began, and the
oldest position of one of them.  Files that are open on a local disk outlive their deletion.  For
other storages, and for the runs that a reader has not opened yet, this note retains them.  The
note of a server that died soon expires.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from databus.bootstrap.runs.run_storage import Storage
from databus.common.checkpoint import Position
from databus.common.errors import StoreError

PREFIX = "readers-"
EVERY_S = 10.0
STALE_S = 300.0


class Reader(Protocol):
    """A reader with its position."""

    position: Position


@dataclass(frozen=True, slots=True)
class Held:
    """What open readers need: runs that retired after ``began_us``, and all after ``position``."""

    began_us: int
    position: Position


class OpenReaders:
    """The readers of one database at one server.

    Owner: the server; any thread.  Readers call ``renew`` as they advance.
    """

    def __init__(self, storage: Storage, now_s: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._now_s = now_s
        self._name = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}.json"
        self._lock = threading.Lock()
        self._readers: dict[int, tuple[float, Reader]] = {}
        self._written_s = 0.0

    def __len__(self) -> int:
        return len(self._readers)

    def enter(self, reader: Reader) -> None:
        """A reader begins.  The grace of retired runs covers it for longer than EVERY_S."""
        with self._lock:
            self._readers[id(reader)] = (self._now_s(), reader)

    def leave(self, reader: Reader) -> None:
        """A reader has ended, in any way."""
        with self._lock:
            self._readers.pop(id(reader), None)
            if not self._readers and self._written_s:
                self._written_s = 0.0
                with contextlib.suppress(StoreError):
                    self._storage.delete_note(self._name)

    def renew(self) -> None:
        """Write the note if one is due; short readers write none."""
        now_s = self._now_s()
        with self._lock:
            began_s = min((began_s for began_s, _ in self._readers.values()), default=now_s)
            if now_s - max(began_s, self._written_s) < EVERY_S:
                return
            self._written_s = now_s
            document = {
                "at_us": int(now_s * 1e6),
                "began_us": int(began_s * 1e6),
                "position": min(one.position for _, one in self._readers.values()).to_json(),
            }
            with contextlib.suppress(StoreError):
                self._storage.write_note(self._name, json.dumps(document).encode())


def held(storage: Storage, now_us: int) -> list[Held]:
    """What the readers of all servers need; notes that are no longer renewed are deleted."""
    found = []
    for name in storage.note_names(PREFIX):
        content = storage.read_note(name)
        if content is None:
            continue
        try:
            document = json.loads(content)
            is_alive = now_us - int(document["at_us"]) < STALE_S * 1e6
            position = Position(int(document["position"]["scn"]), int(document["position"]["seq"]))
            one = Held(int(document["began_us"]), position)
        except (ValueError, KeyError, TypeError):
            is_alive = False
        if is_alive:
            found.append(one)
        else:
            storage.delete_note(name)
    return found
