"""Leases of readers that open the store's files themselves, or come back for another part.

A lease is a note of an open reader (``open_readers``) that the reader renews over any server.  So
appliers need not know leases, and no server has a state.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable

from databus.bootstrap.runs.open_readers import PREFIX, STALE_S, SWITCH_S, reader_note
from databus.bootstrap.runs.run_storage import Storage
from databus.common.checkpoint import Position, decode_position
from databus.common.errors import BadCheckpoint, LeaseExpired, StoreError

LEASE_S = STALE_S
"""How long a lease holds after it was taken or renewed."""
MOST_LEASES = 1000
"""Most leases of a database: each is a small file that every applier reads."""
_ID = re.compile(r"[0-9a-f]{32}")


class ReadLeases:
    """The leases of one database.

    Invariants:
        I1. While a lease holds, no run is deleted that retired after the lease began, and no run is
            dropped that lies after its position.

    Owner: any process; any thread.
    Raises: StoreError for what the storage refuses.
    """

    def __init__(self, storage: Storage, now_s: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._now_s = now_s

    def take(self, position: Position) -> str:
        """A new lease, to be taken before the manifest is read; its id.

        Raises:
            StoreError: there are ``MOST_LEASES``.
        """
        if len(self._storage.note_names(f"{PREFIX}lease-")) >= MOST_LEASES:
            # Not TooManyRequests: a reader can read over HTTP, and need not wait.
            raise StoreError(
                f"{self._storage.url} has {MOST_LEASES} leases of readers, the most that are held "
                "at once; read over HTTP, or try again in some minutes"
            )
        lease, now_s = uuid.uuid4().hex, self._now_s()
        self._storage.write_note(_name(lease), reader_note(now_s, now_s - SWITCH_S, position))
        return lease

    def renew(
        self, lease: str, retired_us: int | None = None, position: Position | None = None
    ) -> None:
        """Let a lease hold for another ``LEASE_S``.

        With ``retired_us`` it begins then or earlier, with ``position`` it lies there from now on.

        Raises:
            LeaseExpired: there is no such lease, or it has not been renewed in time.
        """
        content = self._storage.read_note(_name(lease)) if _ID.fullmatch(lease) else None
        began_us, now_s = 0, self._now_s()
        try:
            document = json.loads(content or b"{}")
            age_s = now_s - int(document["at_us"]) / 1e6
            began_us = int(document["began_us"])
            position = position or decode_position(document["position"])
        except (ValueError, KeyError, TypeError, BadCheckpoint):
            age_s = LEASE_S
        if age_s >= LEASE_S - SWITCH_S:
            raise LeaseExpired(
                f"there is no lease {lease[:40]!r}: a lease ends if it is not renewed for "
                f"{LEASE_S:.0f} s; request the splits again",
                lease=lease[:40],
            )
        if retired_us is not None:
            began_us = min(began_us, retired_us)
        assert position is not None
        self._storage.write_note(_name(lease), reader_note(now_s, began_us / 1e6, position))

    def end(self, lease: str) -> None:
        """End a lease."""
        self._storage.delete_note(_name(lease))


def _name(lease: str) -> str:
    return f"{PREFIX}lease-{lease}.json"
