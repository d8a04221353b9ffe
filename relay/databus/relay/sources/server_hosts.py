"""The servers that a database URL names: one, or several in the order of preference."""

from __future__ import annotations

from dataclasses import dataclass

from databus.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Host:
    """Where a server listens."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


def read_hosts(database: str, netloc: str, default_port: int) -> tuple[Host, ...]:
    """The hosts of a URL's ``user:password@host:port,host:port``; at least one.

    Raises:
        ConfigError: a host or a port is not of its form, or a host is listed twice.
    """
    hosts: list[Host] = []
    for part in netloc.rpartition("@")[2].split(","):
        text = part.strip()
        name, _, port = text.rpartition(":") if _has_port(text) else (text, "", "")
        if port and not (port.isdigit() and 0 < int(port) < 1 << 16):
            raise ConfigError(f"database {database}: the URL's port is wrong: {port!r}")
        name = name.removeprefix("[").removesuffix("]")
        host = Host(name or "127.0.0.1", int(port or default_port))
        if host in hosts:
            raise ConfigError(f"database {database}: the URL names {host} twice")
        hosts.append(host)
    return tuple(hosts)


def _has_port(text: str) -> bool:
    """Whether a port follows; the colons of an IPv6 address in brackets do not count."""
    return ":" in text.rpartition("]")[2]
