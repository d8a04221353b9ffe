"""The channel on which the supervisor notifies a running child.

A HTTP worker receives added, changed and removed databases; a fetcher in a cluster receives another
role (``fetcher_process``).  The supervisor has one end of a socket pair, the child the other.  A
message is about one database; a descriptor that belongs to it comes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
from typing import Any, Protocol, Self

from databus.common.access_config import AuthConfig
from databus.common.config import DatabaseConfig

MESSAGE_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class Serving(Protocol):
    """The server of the databases."""

    def add(self, database: DatabaseConfig, wakeup_fd: int = -1) -> None:
        """Serve one more database, or, without a wake-up, a known one as configured now."""

    def remove(self, name: str) -> None:
        """Serve a database no longer."""

    def set_auth(self, auth: AuthConfig) -> None:
        """Decide by other callers and grants."""


class SupervisorChannel:
    """The supervisor's end; a new pair for each child process.

    ``sent_count`` counts the roles that were sent.

    Owner: the supervisor's loop.
    Raises: OSError if the child does not take the message: it must be restarted.
    """

    def __init__(self) -> None:
        self.sent_count = 0
        self._taken_count = 0
        self._socket, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    @property
    def worker_fd(self) -> int:
        """The descriptor that the worker inherits."""
        return self._other.fileno()

    def started(self) -> None:
        """The worker has its end."""
        self._other.close()

    def close(self) -> None:
        """The worker has ended."""
        self._socket.close()
        self._other.close()

    def add(self, database: DatabaseConfig, wakeup_fd: int = -1) -> None:
        """Let the worker serve one more database, or a known one as configured now."""
        fds = [wakeup_fd] if wakeup_fd >= 0 else []
        self._send({"add": database.model_dump(mode="json"), "fds": len(fds)}, fds)

    def remove(self, name: str) -> None:
        """Let the worker serve a database no longer."""
        self._send({"remove": name}, [])

    def set_auth(self, auth: AuthConfig) -> None:
        """Let the worker decide by other callers and grants."""
        self._send({"auth": auth.model_dump(mode="json")}, [])

    def take_role(self, role: dict[str, Any], lease_fd: int) -> None:
        """Let a fetcher take another role, with the lease if it leads."""
        self._send(role, [lease_fd] if lease_fd >= 0 else [])
        self.sent_count += 1

    def taken(self) -> int:
        """How many roles the fetcher has taken."""
        with contextlib.suppress(OSError):
            while self._socket.recv(1):
                self._taken_count += 1
        return self._taken_count

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        socket.send_fds(self._socket, [json.dumps(message).encode()], fds)


class WorkerChannel:
    """The worker's end, inside ``with``.

    Owner: the worker's event loop, in which it is entered.
    """

    def __init__(self, fd: int, serving: Serving) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._serving = serving

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._on_readable)
        return self

    def _on_readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            if not data:
                asyncio.get_running_loop().remove_reader(self._socket.fileno())
                return
            try:
                self._apply(json.loads(data), fds)
            except Exception:
                # It would serve the wrong databases: a new worker gets the whole configuration.
                _log.exception("a change of the databases cannot be followed; this worker ends")
                signal.raise_signal(signal.SIGTERM)
            finally:
                for fd in fds:
                    os.close(fd)

    def _apply(self, message: dict[str, Any], fds: list[int]) -> None:
        if "remove" in message:
            self._serving.remove(message["remove"])
            _log.info("%s is no longer served", message["remove"])
            return
        if "auth" in message:
            self._serving.set_auth(AuthConfig.model_validate(message["auth"]))
            return
        if message["fds"] != len(fds):
            raise OSError(errno.EMFILE, "the wake-up did not come: too many open files")
        database = DatabaseConfig.model_validate(message["add"])
        # The descriptor is taken over; the received one is ours to close.
        self._serving.add(database, os.dup(fds[0]) if fds else -1)
        _log.info("%s is served", database.name)

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
