"""What the thread of a cluster's membership sees of the supervisor, and does to it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import DatabusError
from databus.relay.cluster.database_role import DatabaseRole
from databus.relay.cluster.routing_table import write_table
from databus.relay.ring.data_folder import DatabaseFolder, read_document, read_leader
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_format import RING_NAME

STALE_STATUS_US = 5_000_000

SetRole = Callable[[str, DatabaseRole | None, int], None]


class SupervisedCluster:
    """The supervisor as ``ClusterHost``.

    Owner: the thread of the membership; ``set_role`` is called in the supervisor's loop, with a
    descriptor of a lease that belongs to it from then on.
    """

    def __init__(
        self,
        data_dir: Path,
        names: Callable[[], list[str]],
        is_idle: Callable[[str], bool],
        set_role: SetRole,
    ) -> None:
        self._data_dir = data_dir
        self._names = names
        self._is_idle = is_idle
        self._set_role = set_role
        self._loop = asyncio.get_running_loop()
        self._given: dict[str, DatabaseRole | None] = {}
        self._since_us = time.time_ns() // 1000

    def rings(self) -> Mapping[str, dict[str, Any]]:
        """See ``ClusterHost``."""
        # A fetcher that was killed has left a status, and may have had another role.
        since_us = max(self._since_us, time.time_ns() // 1000 - STALE_STATUS_US)
        return {
            name: _ring(DatabaseFolder.of(self._data_dir, name), since_us) for name in self._names()
        }

    def follow_roles(
        self, roles: Mapping[str, DatabaseRole | None], leases: Mapping[str, int]
    ) -> None:
        """See ``ClusterHost``."""
        for name, role in roles.items():
            if self._given.get(name) == role:
                continue
            self._given[name] = role
            fd = os.dup(leases[name]) if role is not None and role.leads else -1
            self._loop.call_soon_threadsafe(self._set_role, name, role, fd)

    def is_idle(self, database: str) -> bool:
        """See ``ClusterHost``."""
        return self._is_idle(database)

    def publish(self, table: dict[str, Any]) -> None:
        """See ``ClusterHost``."""
        write_table(self._data_dir, table)


def _ring(folder: DatabaseFolder, since_us: int) -> dict[str, Any]:
    status: dict[str, Any] = {}
    end: Position = ORIGIN
    epoch = 0
    try:
        epoch, _ = read_leader(folder)
        status = json.loads(read_document(folder.status) or b"{}")
        status = status if status.get("updated_us", 0) >= since_us else {}
        if (folder.path / RING_NAME).exists():
            with Ring.open_reader(folder.path) as reader:
                end = reader.snapshot().max
    except (DatabusError, OSError, ValueError):
        pass  # Its fetcher reports what is wrong with the folder.
    error = status.get("error") or {}
    return {
        **end.to_json(),
        "state": str(status.get("state", "starting")),
        "error": error.get("code"),
        "lag_us": status.get("lag_us"),
        "epoch": epoch,
    }
