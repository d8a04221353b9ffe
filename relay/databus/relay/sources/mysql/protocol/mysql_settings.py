"""The configuration of one MariaDB or MySQL server, checked and typed."""

from __future__ import annotations

import fnmatch
import os
import socket
import uuid
import zlib
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field

from databus.common.config import DatabaseConfig
from databus.common.loopback import is_loopback
from databus.common.schema.source_names import join_source
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.mysql.protocol.mysql_tls import PREFERRED, Tls, read_tls
from databus.relay.sources.server_hosts import Host, read_hosts
from databus.relay.sources.source_options import SourceOptions, read_options

SYSTEM_SCHEMAS = frozenset({"mysql", "information_schema", "performance_schema", "sys"})

_DEFAULT_PORT = 3306
_OWN_SERVER_IDS = 1 << 30


def _uuids(value: object) -> tuple[str, ...]:
    names = [name.strip().lower() for name in str(value).split(",") if name.strip()]
    for name in names:
        try:
            canonical = str(uuid.UUID(name)) == name
        except ValueError:
            canonical = False
        if not canonical or names.count(name) > 1:
            raise ValueError(
                f"{name!r} is "
                + ("listed twice" if canonical else "not a server UUID (SELECT @@server_uuid)")
            )
    return tuple(names)


_Number = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]


class MySqlOptions(SourceOptions):
    """The options of a MariaDB or MySQL source."""

    clock_name: str | None = None
    """The identity of the server's history in the clock; default: the database's name."""
    domain_id: _Number | None = None
    """MariaDB's replication domain; the server's own ``gtid_domain_id``."""
    server_id: _Number | None = None
    """The server id of the relay as a replica; default: derived from host, process and database."""
    uuids: Annotated[tuple[str, ...], BeforeValidator(_uuids)] = ()
    """MySQL: UUIDs of the servers that have written, in order, with commas; default: the server."""
    zero_dates: Literal["error", "null", "text"] = "error"
    """How invalid dates such as 0000-00-00 are captured."""


@dataclass(frozen=True, slots=True)
class MySqlSettings:
    """One upstream server and the tables to capture.

    ``hosts`` are the servers with the same history, ``host`` and ``port`` the one in use.

    ``domain_id`` (MariaDB): None means the server's own ``gtid_domain_id``.  ``uuids`` (MySQL):
    the servers that have written, in that order; empty means the server itself.
    ``zero_dates`` is for invalid dates such as 0000-00-00: "error" suspends the row's table,
    "null" captures them as null, "text" captures all dates as the server's text.
    """

    name: str
    hosts: tuple[Host, ...]
    host: str
    port: int
    user: str
    password: str = field(repr=False)
    schema: str
    sources: tuple[str, ...]
    domain_id: int | None
    server_id: int
    clock_name: str
    zero_dates: str
    uuids: tuple[str, ...] = ()
    tls: Tls = PREFERRED
    excluded: tuple[str, ...] = ()
    keys: ConfiguredKeys = NO_KEYS

    def at(self, host: Host) -> MySqlSettings:
        """The same, with another of the servers."""
        return replace(self, host=host.name, port=host.port)

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        return is_loopback(self.host)

    def captures(self, schema: str, table: str) -> bool:
        """Whether a table is among the configured sources; the server's own tables never are."""
        if schema in SYSTEM_SCHEMAS:
            return False
        source = join_source(schema, table)
        return _among(source, self.sources) and not _among(source, self.excluded)


def read_settings(config: DatabaseConfig) -> MySqlSettings:
    """The settings in a ``[[database]]`` section.

    Raises:
        ConfigError: an option is unknown or a value is invalid.
    """
    parts = urlsplit(config.url.reveal)
    options = read_options(config, MySqlOptions)
    hosts = read_hosts(config.name, parts.netloc, _DEFAULT_PORT)
    schema = unquote(parts.path.lstrip("/"))
    return MySqlSettings(
        name=config.name,
        hosts=hosts,
        host=hosts[0].name,
        port=hosts[0].port,
        user=unquote(parts.username or "root"),
        password=unquote(parts.password or ""),
        schema=schema,
        sources=config.sources,
        domain_id=options.domain_id,
        server_id=_own_server_id(config.name) if options.server_id is None else options.server_id,
        clock_name=config.name if options.clock_name is None else options.clock_name,
        zero_dates=options.zero_dates,
        uuids=options.uuids,
        tls=read_tls(config.name, parts.query),
        excluded=config.exclude_sources,
        keys=ConfiguredKeys(config.keys),
    )


def _among(source: str, patterns: tuple[str, ...]) -> bool:
    return any(source == pattern or fnmatch.fnmatchcase(source, pattern) for pattern in patterns)


def _own_server_id(database: str) -> int:
    """A server id that two readers of one server are unlikely to share.

    It is the same for all connections of this process, so that the server ends the old
    connection when a new one begins.
    """
    who = f"{socket.gethostname()}:{os.getpid()}:{database}"
    return _OWN_SERVER_IDS + zlib.crc32(who.encode()) % _OWN_SERVER_IDS
