"""A child process as the supervisor sees it: what it runs, and in a cluster its role."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from databus.relay.processes.process_handover import Handover
from databus.relay.processes.worker_channel import SupervisorChannel

if TYPE_CHECKING:
    from databus.relay.cluster.database_role import DatabaseRole

SWITCH_S = 10.0
"""The time that a process has for another role."""


@dataclass(slots=True)
class Child:
    """A child process: its module and the handover of each start."""

    name: str
    module: str
    handover: Callable[[], Handover]
    channel: SupervisorChannel | None = None
    process: asyncio.subprocess.Process | None = None
    again: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    role: DatabaseRole | None = None
    lease_fd: int = -1
    is_busy: bool = False

    def take_role(self, role: DatabaseRole | None, lease_fd: int) -> None:
        """In a cluster: run with this role from now on, or not at all.

        A process that follows takes the new role itself, without a new start.  One that leads ends
        first, as does one that does not take it within ``SWITCH_S``.
        """
        before = self.role
        if self.lease_fd >= 0:
            os.close(self.lease_fd)
        self.role, self.lease_fd = role, lease_fd
        if role is None:
            self.wanted.clear()
        else:
            self.wanted.set()
        if role is None or before is None or before.leads or not self._sent(role):
            self.again.set()

    def _sent(self, role: DatabaseRole) -> bool:
        channel = self.channel
        if channel is None:
            return False
        try:
            channel.take_role(role.to_json(), self.lease_fd)
        except OSError:
            return False
        loop = asyncio.get_running_loop()
        loop.call_later(SWITCH_S, self._require_taken, channel, channel.sent_count)
        return True

    def _require_taken(self, channel: SupervisorChannel, count: int) -> None:
        if self.channel is channel and channel.taken() < count:
            self.again.set()
