"""What the relay's supervisor passes to a child process, and how the child takes it over.

The text comes through an inherited pipe, so that no secret is in the process list;
the child inherits sockets and eventfds under the numbers that it names.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from typing import Any

from databus.common.config import Config, DatabaseConfig
from databus.common.errors import ConfigError
from databus.relay.cluster.database_role import DatabaseRole, as_configured

HANDOVER_FLAG = "--handover-fd"


@dataclass(frozen=True, slots=True)
class Handover:
    """The configuration with the descriptors that belong to one child.

    A worker gets its own listening socket (bound with SO_REUSEPORT; it belongs to the
    supervisor, so connections wait in it while the worker is restarted), one wake-up for
    each database, and the channel that announces databases that are added or removed.  A fetcher
    gets the name of its database and one wake-up for each worker; in a cluster also its role, and
    the lease of a leader.
    """

    config: Config
    database: str = ""
    worker: int = 0
    listen_fd: int = -1
    wakeups: dict[str, int] = field(default_factory=dict)
    wakeup_fds: tuple[int, ...] = ()
    channel_fd: int = -1
    role: DatabaseRole | None = None
    lease_fd: int = -1

    @property
    def database_config(self) -> DatabaseConfig:
        """The database of a fetcher, in its role."""
        config = next(d for d in self.config.database if d.name == self.database)
        if self.role is None or self.config.cluster is None:
            return config
        return as_configured(self.role, config, self.config.cluster)

    @property
    def term(self) -> tuple[int, str] | None:
        """The epoch and the name of a leader; None if it does not lead."""
        leads = self.role is not None and self.role.leads
        return (self.role.epoch, self.role.leader) if self.role is not None and leads else None

    @property
    def fds(self) -> tuple[int, ...]:
        """All inherited descriptors that it names."""
        own = tuple(fd for fd in (self.listen_fd, self.channel_fd, self.lease_fd) if fd >= 0)
        return (*own, *self.wakeups.values(), *self.wakeup_fds)

    def listening_socket(self) -> socket.socket:
        """The worker's socket, listening already; for aiohttp's SockSite."""
        return socket.socket(fileno=self.listen_fd)

    def to_json(self) -> dict[str, Any]:
        """The text for the pipe; it contains the databases' URLs with their secrets."""
        return {
            "config": self.config.model_dump(mode="json"),
            "database": self.database,
            "worker": self.worker,
            "listen_fd": self.listen_fd,
            "wakeups": self.wakeups,
            "wakeup_fds": list(self.wakeup_fds),
            "channel_fd": self.channel_fd,
            "role": self.role.to_json() if self.role is not None else None,
            "lease_fd": self.lease_fd,
        }

    @staticmethod
    def from_json(document: dict[str, Any]) -> Handover:
        """What ``to_json`` wrote."""
        return Handover(
            config=Config.model_validate(document["config"]),
            database=str(document["database"]),
            worker=int(document["worker"]),
            listen_fd=int(document["listen_fd"]),
            wakeups={str(name): int(fd) for name, fd in document["wakeups"].items()},
            wakeup_fds=tuple(int(fd) for fd in document["wakeup_fds"]),
            channel_fd=int(document["channel_fd"]),
            role=DatabaseRole(**document["role"]) if document["role"] else None,
            lease_fd=int(document["lease_fd"]),
        )


def take_over(arguments: list[str]) -> Handover:
    """Read the handover that ``[--handover-fd, N]`` names.

    Raises:
        ConfigError: started by hand, or the pipe holds something else.
    """
    if len(arguments) != 2 or arguments[0] != HANDOVER_FLAG or not arguments[1].isdigit():
        raise ConfigError("this process is started by the relay: databus relay -c FILE")
    try:
        with os.fdopen(int(arguments[1]), "rb") as pipe:
            text = pipe.read()
        if not text:
            raise SystemExit(0)  # The supervisor died before it sent anything.
        return Handover.from_json(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"the handover cannot be read: {type(error).__name__}") from None
