"""What the relay's supervisor tells a child process, and how the child takes it over.

The text comes through an inherited pipe, so that no secret stands in the process list;
sockets and eventfds are inherited under the numbers that it names.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from databus.common.config import Config
from databus.common.errors import ConfigError

HANDOVER_FLAG = "--handover-fd"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Handover:
    """The configuration with the descriptors that belong to one child.

    A worker gets its own listening socket (bound with SO_REUSEPORT; it belongs to the
    supervisor, so connections wait in it while the worker is restarted) and one wake-up for
    each database, and the channel on which it is told of databases that come and go.  A fetcher
    gets the name of its database and one wake-up for each worker.
    """

    config: Config
    parent_pid: int
    database: str = ""
    worker: int = 0
    listen_fd: int = -1
    wakeups: dict[str, int] = field(default_factory=dict)
    wakeup_fds: tuple[int, ...] = ()
    channel_fd: int = -1

    @property
    def fds(self) -> tuple[int, ...]:
        """All inherited descriptors that it names."""
        own = tuple(fd for fd in (self.listen_fd, self.channel_fd) if fd >= 0)
        return (*own, *self.wakeups.values(), *self.wakeup_fds)

    def listening_socket(self) -> socket.socket:
        """The worker's socket, listening already; for aiohttp's SockSite."""
        return socket.socket(fileno=self.listen_fd)

    def to_json(self) -> dict[str, Any]:
        """The text for the pipe; the databases' URLs are in it as they are."""
        return {
            "config": self.config.model_dump(mode="json"),
            "parent_pid": self.parent_pid,
            "database": self.database,
            "worker": self.worker,
            "listen_fd": self.listen_fd,
            "wakeups": self.wakeups,
            "wakeup_fds": list(self.wakeup_fds),
            "channel_fd": self.channel_fd,
        }

    @staticmethod
    def from_json(document: dict[str, Any]) -> Handover:
        """What ``to_json`` wrote."""
        return Handover(
            config=Config.model_validate(document["config"]),
            parent_pid=int(document["parent_pid"]),
            database=str(document["database"]),
            worker=int(document["worker"]),
            listen_fd=int(document["listen_fd"]),
            wakeups={str(name): int(fd) for name, fd in document["wakeups"].items()},
            wakeup_fds=tuple(int(fd) for fd in document["wakeup_fds"]),
            channel_fd=int(document["channel_fd"]),
        )


def take_over(arguments: list[str]) -> Handover:
    """Read the handover that ``[--handover-fd, N]`` names, and bind our life to the parent's.

    Afterwards the process dies with its parent, and leaves ctrl-C to it.

    Raises:
        ConfigError: started by hand, or the pipe holds something else.
    """
    if len(arguments) != 2 or arguments[0] != HANDOVER_FLAG or not arguments[1].isdigit():
        raise ConfigError("this process is started by the relay: databus relay -c FILE")
    try:
        with os.fdopen(int(arguments[1]), "rb") as pipe:
            handover = Handover.from_json(json.load(pipe))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the handover cannot be read: {type(error).__name__}") from None
    follow_parent(handover.parent_pid)
    return handover


def follow_parent(parent_pid: int) -> None:
    """Die with the parent; end at once if it is dead already.

    By SIGKILL, which everything here survives: so a relay that was killed can be started
    again at once, and finds neither its port nor a ring taken.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(0)
