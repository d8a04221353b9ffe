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
from databus.common.schema.source_names import join_source
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.mysql.protocol.mysql_tls import PREFERRED, Tls, is_loopback, read_tls
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
    """Tells streams of one server apart that have different histories; the database's name."""
    domain_id: _Number | None = None
    """MariaDB's replication domain; the server's own ``gtid_domain_id``."""
    server_id: _Number | None = None
    """The server id of the relay as a replica; made of host, process and database."""
    uuids: Annotated[tuple[str, ...], BeforeValidator(_uuids)] = ()
    """MySQL: the servers that have written, in that order, with commas; the server itself."""
    zero_dates: Literal["error", "null", "text"] = "error"
    """What becomes of 0000-00-00 and its relatives."""


@dataclass(frozen=True, slots=True)
class MySqlSettings:
    """One upstream server and what is captured of it.

    ``hosts`` are the servers that have the same history, ``host`` and ``port`` the one in use.

    ``domain_id`` (MariaDB) None means the server's own ``gtid_domain_id``; ``uuids`` (MySQL) are
    the servers that have written, in that order, and empty means the server itself.
    ``zero_dates`` says what becomes of 0000-00-00 and its relatives: "error" stops the row's table
    and names it, "null" carries them as null, "text" carries all dates as the server's text.
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
        """Whether the server is on this machine, so that no network is between."""
        return is_loopback(self.host)

    def captures(self, schema: str, table: str) -> bool:
        """Whether a table is among the configured sources; the server's own never are."""
        if schema in SYSTEM_SCHEMAS:
            return False
        source = join_source(schema, table)
        return _among(source, self.sources) and not _among(source, self.excluded)


def read_settings(config: DatabaseConfig) -> MySqlSettings:
    """The settings in a ``[[database]]`` section.

    Raises:
        ConfigError: an option is unknown or a value is not of its form.
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

    It stays the same over this process's reconnections, so that the server ends the old
    connection when a new one comes.
    """
    who = f"{socket.gethostname()}:{os.getpid()}:{database}"
    return _OWN_SERVER_IDS + zlib.crc32(who.encode()) % _OWN_SERVER_IDS
