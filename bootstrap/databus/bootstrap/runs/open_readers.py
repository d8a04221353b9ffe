"""Which readers are inside the store, so that the applier does not delete what they need.

A server writes a note into the store while it has readers: when the oldest of them began, and the
oldest position of one of them.  A reader opens one file at a time, and the note retains those
that it has not opened yet.  The note of a server that died soon expires.

In a folder the note is there before the reader plans.  On S3 a reader that is shorter than
``EVERY_S`` writes none: the grace of retired runs covers it.
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
SWITCH_S = 5.0
"""A run may retire this long before a manifest without it is there: from when the time is taken to
when the manifest is written, and the clocks of two machines may differ."""
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

    Owner: the server; any thread.  Something calls ``renew`` while a reader is open.
    """

    def __init__(self, storage: Storage, now_s: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._now_s = now_s
        self._name = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}.json"
        self._lock = threading.Lock()
        self._readers: dict[int, tuple[float, Reader]] = {}
        self._written_s = 0.0
        self._noted: Position | None = None

    def __len__(self) -> int:
        return len(self._readers)

    def enter(self, reader: Reader) -> None:
        """A reader begins; to be called before it reads the manifest."""
        with self._lock:
            now_s = self._now_s()
            self._readers[id(reader)] = (now_s, reader)
            is_held = self._noted is not None and self._noted <= reader.position
            if self._storage.folder is not None and not is_held:
                self._write(now_s)

    def retain(self, reader: Reader, retired_us: int) -> None:
        """A reader needs what retired at this time or later, although it began after that."""
        with self._lock:
            began_s, _ = self._readers.get(id(reader), (self._now_s(), reader))
            # ``began_us`` of the note must not be later by a rounding.
            needed_s = retired_us / 1e6 + SWITCH_S - 1e-3
            self._readers[id(reader)] = (min(began_s, needed_s), reader)
            self._write(self._now_s())

    def leave(self, reader: Reader) -> None:
        """A reader has ended, in any way."""
        with self._lock:
            self._readers.pop(id(reader), None)
            if not self._readers and self._noted is not None:
                self._written_s, self._noted = 0.0, None
                with contextlib.suppress(StoreError):
                    self._storage.delete_note(self._name)

    def renew(self) -> None:
        """Write the note if one is due."""
        now_s = self._now_s()
        with self._lock:
            began_s = min((began_s for began_s, _ in self._readers.values()), default=now_s)
            if now_s - max(began_s, self._written_s) >= EVERY_S:
                self._write(now_s)

    def _write(self, now_s: float) -> None:
        position = min(one.position for _, one in self._readers.values())
        began_s = min(began_s for began_s, _ in self._readers.values()) - SWITCH_S
        self._written_s, self._noted = now_s, position
        with contextlib.suppress(StoreError):
            self._storage.write_note(self._name, reader_note(now_s, began_s, position))


def reader_note(now_s: float, began_s: float, position: Position) -> bytes:
    """A note, renewed at ``now_s``, of a reader that began at ``began_s`` and is at a position."""
    document = {
        "at_us": int(now_s * 1e6),
        "began_us": int(began_s * 1e6),
        "position": position.to_json(),
    }
    return json.dumps(document).encode()


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
