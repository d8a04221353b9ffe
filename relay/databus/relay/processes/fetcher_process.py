"""The code of a fetcher's process around the fetcher: signals, and in a cluster other roles."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from databus.common.errors import DatabusError
from databus.relay.capture.source_catalogue import source_class
from databus.relay.cluster.database_role import DatabaseRole
from databus.relay.processes.process_handover import Handover
from databus.relay.processes.wakeup import WakeupSender

_MESSAGE_BYTES = 1 << 16


class Running(Protocol):
    """The fetcher."""

    def stop(self) -> None:
        """Make ``run`` return."""

    async def run(self) -> None:
        """Fetch until ``stop``."""

    async def connected(self) -> object:
        """Return once it is streaming."""


class FetcherRoles:
    """The fetcher's end of the supervisor's channel: the roles that follow the first one.

    ``is_due`` is set when there is another role.

    Owner: the process's event loop.
    """

    def __init__(self, fd: int) -> None:
        self.is_due = asyncio.Event()
        self._next: tuple[DatabaseRole, int] | None = None
        self._socket = socket.socket(fileno=fd) if fd >= 0 else None
        if self._socket is not None:
            self._socket.setblocking(False)
            asyncio.get_running_loop().add_reader(fd, self._on_readable, self._socket)

    def _on_readable(self, channel: socket.socket) -> None:
        data, fds = b"", list[int]()
        with contextlib.suppress(ConnectionResetError):
            data, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
        if not data:  # The supervisor has died, and this process with it.
            asyncio.get_running_loop().remove_reader(channel.fileno())
            return
        if self._next is not None:
            if self._next[1] >= 0:
                os.close(self._next[1])
            self._acknowledge()
        role = DatabaseRole(**json.loads(data))
        if role.leads and not fds:
            # The lease did not come: too many open files.  A new process gets both.
            signal.raise_signal(signal.SIGTERM)
            return
        self._next = role, (fds[0] if fds else -1)
        self.is_due.set()

    def close(self) -> None:
        """The process ends."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()

    def _acknowledge(self) -> None:
        if self._next is not None and self._socket is not None:
            self._socket.send(b"\0")
        self._next = None

    def take(self, handover: Handover) -> Handover:
        """The handover with the newest role; the fetcher of the role before has ended."""
        if self._next is None:
            return handover
        role, lease_fd = self._next
        self._acknowledge()
        self.is_due.clear()
        return replace(handover, role=role, lease_fd=lease_fd)


async def serve_roles(
    handover: Handover, make: Callable[[Handover, WakeupSender], Running]
) -> None:
    """Run a fetcher until SIGTERM or SIGHUP.

    At another role the fetcher ends, and the next one starts in this process: a follower that takes
    over is there at once, with all modules and kernels loaded.
    """
    loop, ending = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ending.set)
    with contextlib.closing(FetcherRoles(handover.channel_fd)) as roles:
        while not ending.is_set():
            wakeup = WakeupSender(os.dup(fd) for fd in handover.wakeup_fds)
            await _run(make(handover, wakeup), handover, ending, roles.is_due)
            if not roles.is_due.is_set():
                return
            handover = roles.take(handover)


async def _run(fetcher: Running, handover: Handover, *until: asyncio.Event) -> None:
    """Run one fetcher until one of the events, or its own end."""
    running = asyncio.create_task(fetcher.run())
    beside = [asyncio.create_task(event.wait()) for event in until]
    settling = asyncio.create_task(_settle(fetcher, handover))
    try:
        await asyncio.wait([running, *beside], return_when=asyncio.FIRST_COMPLETED)
        fetcher.stop()
        await running
    finally:
        for task in (settling, *beside):
            task.cancel()


async def _settle(fetcher: Running, handover: Handover) -> None:
    await fetcher.connected()
    if handover.role is not None and not handover.role.leads:
        await asyncio.to_thread(_load_leaders_source, handover)
    await settle_heap(fetcher)


def _load_leaders_source(handover: Handover) -> None:
    """Import what this process needs to lead."""
    for config in handover.config.database:
        if config.name == handover.database:
            try:
                source_class(config)
            except DatabusError:
                return  # The relay reports it when it leads.


async def settle_heap(fetcher: Running) -> None:
    """Exclude the objects of modules and compiled kernels from garbage collection: they live
    forever, and each walk over them would delay the stream for a tenth of a second."""
    await fetcher.connected()
    gc.freeze()  # without a collection before, which would be such a walk
