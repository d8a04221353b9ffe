"""What the configuration says about one MariaDB or MySQL server, checked and typed."""

from __future__ import annotations

import fnmatch
import os
import socket
import uuid
import zlib
from dataclasses import dataclass, field, replace
from urllib.parse import unquote, urlsplit

from databus.common.config import DatabaseConfig
from databus.common.errors import ConfigError
from databus.common.schema.source_names import join_source
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.mysql.protocol.mysql_tls import PREFERRED, Tls, is_loopback, read_tls
from databus.relay.sources.server_hosts import Host, read_hosts

OPTIONS = ("clock_name", "domain_id", "server_id", "uuids", "zero_dates")
ZERO_DATES = ("error", "null", "text")
SYSTEM_SCHEMAS = frozenset({"mysql", "information_schema", "performance_schema", "sys"})

_DEFAULT_PORT = 3306
_OWN_SERVER_IDS = 1 << 30


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
        """Whether the server is on this machine, so that nobody is between."""
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
    options = dict(config.options)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            f"database {config.name}: unknown option {unknown[0]!r}; "
            f"a MariaDB or MySQL source knows {', '.join(OPTIONS)}"
        )
    hosts = read_hosts(config.name, parts.netloc, _DEFAULT_PORT)
    schema = unquote(parts.path.lstrip("/"))
    zero_dates = str(options.get("zero_dates", "error"))
    if zero_dates not in ZERO_DATES:
        raise ConfigError(
            f"database {config.name}: zero_dates is {zero_dates!r}, not one of "
            f"{', '.join(ZERO_DATES)}"
        )
    domain_id = options.get("domain_id")
    return MySqlSettings(
        name=config.name,
        hosts=hosts,
        host=hosts[0].name,
        port=hosts[0].port,
        user=unquote(parts.username or "root"),
        password=unquote(parts.password or ""),
        schema=schema,
        sources=config.sources,
        domain_id=None if domain_id is None else _number(config.name, "domain_id", domain_id),
        server_id=_number(config.name, "server_id", options["server_id"])
        if "server_id" in options
        else _own_server_id(config.name),
        clock_name=str(options.get("clock_name", config.name)),
        zero_dates=zero_dates,
        uuids=_uuids(config.name, options.get("uuids", "")),
        tls=read_tls(config.name, parts.query),
        excluded=config.exclude_sources,
        keys=ConfiguredKeys(config.keys),
    )


def _among(source: str, patterns: tuple[str, ...]) -> bool:
    return any(source == pattern or fnmatch.fnmatchcase(source, pattern) for pattern in patterns)


def _uuids(database: str, value: object) -> tuple[str, ...]:
    names = [name.strip().lower() for name in str(value).split(",") if name.strip()]
    for name in names:
        try:
            canonical = str(uuid.UUID(name)) == name
        except ValueError:
            canonical = False
        if not canonical or names.count(name) > 1:
            raise ConfigError(
                f"database {database}: uuids has {name!r}, which is "
                + ("listed twice" if canonical else "not a server UUID (SELECT @@server_uuid)")
            )
    return tuple(names)


def _number(database: str, option: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ConfigError(
            f"database {database}: {option} is {value!r}, not a number from 0 to {2**32 - 1}"
        )
    return value


def _own_server_id(database: str) -> int:
    """A server id that two readers of one server are unlikely to share.

    It stays the same over this process's reconnections, so that the server ends the old
    connection when a new one comes.
    """
    who = f"{socket.gethostname()}:{os.getpid()}:{database}"
    return _OWN_SERVER_IDS + zlib.crc32(who.encode()) % _OWN_SERVER_IDS
