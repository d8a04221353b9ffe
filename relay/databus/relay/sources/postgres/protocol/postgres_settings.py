"""The settings of a ``[[database]]`` with a postgresql:// URL, as one frozen record.

The URL's query and the table ``options`` have the same names; ``options`` takes precedence.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import BeforeValidator, model_validator

from databus.common.config import DatabaseConfig
from databus.common.config_values import Bytes, Seconds
from databus.common.errors import ConfigError, SourceUnavailable
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.postgres.protocol import text_encodings
from databus.relay.sources.server_hosts import Host, read_hosts
from databus.relay.sources.source_options import SourceOptions, read_options
from databus.relay.sources.tls_contexts import client_context

AUTH_METHODS = ("none", "password", "md5", "scram-sha-256")
_NAME_LIMIT = 63

SEARCH_PATH = "pg_catalog, pg_temp"
"""The search_path of every session, from its first statement on.

Otherwise any role that may create objects in a schema of the search path could put a function, an
operator or a type with a built-in name there, which would run with this role's rights.  pg_temp
is listed because otherwise it is searched first.
"""
_DEFAULT_PORT = 5432

LOCK_TIMEOUT = "2s"
"""The relay's lock_timeout: the application's statements queue behind a waiting one."""

JIT = "off"
"""Without JIT: the server would compile the catalogue queries, which takes seconds each time."""


def _slot(value: object) -> str:
    if not re.fullmatch(r"[a-z0-9_]{1,63}", str(value)):
        raise ValueError(f"{value!r} is not 1 to 63 of a-z, 0-9 and _")
    return str(value)


def _auth_methods(value: object) -> tuple[str, ...]:
    methods = tuple(method.strip() for method in str(value).split(","))
    for method in methods:
        if method not in AUTH_METHODS:
            raise ValueError(f"it has {method!r}; it takes {', '.join(AUTH_METHODS)}")
    return methods


def _encoding(value: object) -> str:
    if value not in text_encodings.KNOWN:
        raise ValueError(f"it is {value!r}; it takes {', '.join(text_encodings.KNOWN)}")
    return str(value)


class PostgresOptions(SourceOptions):
    """The options of a PostgreSQL source, which can also be in the URL's query."""

    clock_name: str = ""
    """The identity of the cluster's history in the clock; default: the database's name."""
    retained_wal_warning: Bytes = 10 << 30
    """The relay warns if the slot retains more WAL than this."""
    slot: Annotated[str | None, BeforeValidator(_slot)] = None
    """The replication slot; default: ``databus_`` and the database's name."""
    publication: str | None = None
    """The publication; default: the name of the slot."""
    special_values: Literal["error", "null", "text"] = "error"
    """How values that their kind cannot represent are captured."""
    discover_every: Seconds = 10.0
    """The interval at which the relay compares publication and catalogue."""
    sql_ascii_encoding: Annotated[str, BeforeValidator(_encoding)] = "UTF8"
    """The encoding of texts of an SQL_ASCII database."""
    take_over: bool = False
    """Whether the relay ends the connection of another process that reads its slot; a cluster sets
    it for the leader."""
    connect_timeout: Seconds = 10.0
    """The time limit of a connection attempt."""
    sslmode: Literal["disable", "prefer", "require", "verify-ca", "verify-full"] = "prefer"
    """As in libpq."""
    sslrootcert: str = ""
    """As in libpq."""
    sslcert: str = ""
    """As in libpq."""
    sslkey: str = ""
    """As in libpq."""
    require_auth: Annotated[tuple[str, ...], BeforeValidator(_auth_methods)] = (
        "none",
        "md5",
        "scram-sha-256",
    )
    """The authentication methods that the server may use, as in libpq."""

    @model_validator(mode="after")
    def _password_is_not_sent_in_clear(self) -> Self:
        if "password" in self.require_auth and self.sslmode in ("disable", "prefer"):
            raise ValueError(
                "require_auth has password, which needs sslmode=require or stricter: it is sent "
                "in clear"
            )
        return self


@dataclass(frozen=True, slots=True)
class PostgresSettings:
    """The server's address, the credentials, and the names of slot and publication.

    ``special_values`` is for values that their kind cannot represent (an infinite date, a year
    before 1 or after 9999, 24:00, NaN in a numeric(p, s)): ``error`` suspends the table, ``null``
    captures NULL, ``text`` captures every value of such a type in PostgreSQL's text form.
    ``hosts`` are the servers that may be the primary, ``host`` and ``port`` the one in use.
    ``clock_name`` distinguishes streams of one cluster with different histories.
    ``sql_ascii_encoding`` is the encoding of texts of an SQL_ASCII database.  ``require_auth`` are
    the authentication methods that the server may use; ``password``, in clear text, needs TLS.
    """

    name: str
    hosts: tuple[Host, ...]
    host: str
    port: int
    user: str
    database: str
    password: str = field(repr=False)
    slot: str
    publication: str
    special_values: str = "error"
    discover_every_s: float = 10.0
    connect_timeout_s: float = 10.0
    takes_over: bool = False
    sslmode: str = "prefer"
    sslrootcert: str = ""
    sslcert: str = ""
    sslkey: str = ""
    require_auth: tuple[str, ...] = ("none", "md5", "scram-sha-256")
    keys: ConfiguredKeys = NO_KEYS
    clock_name: str = ""
    retained_wal_warning_bytes: int = 10 << 30
    sql_ascii_encoding: str = "UTF8"

    def at(self, host: Host) -> PostgresSettings:
        """The same, with another of the servers."""
        return replace(self, host=host.name, port=host.port)

    @property
    def address(self) -> str:
        """The database for error messages, without the password."""
        return f"{self.user}@{self.host}:{self.port}/{self.database}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context; None if sslmode=disable."""
        if self.sslmode == "disable":
            return None
        context = client_context(
            self.sslrootcert,
            verifies=self.sslmode not in ("prefer", "require"),
            checks_name=self.sslmode == "verify-full",
        )
        if self.sslcert:
            context.load_cert_chain(self.sslcert, self.sslkey or None)
        return context


def require_search_path(settings: PostgresSettings, found: str) -> None:
    """Check that a session has the requested search_path.

    Raises:
        SourceUnavailable: a pooler between the relay and the server has removed it.
    """
    if found != SEARCH_PATH:
        raise SourceUnavailable(
            f"{settings.address}: the session's search_path is {found!r} and not {SEARCH_PATH!r}, "
            "so that others' functions could run with this role's rights; connect to the server "
            "itself, or to a pooler that passes startup parameters on"
        )


def read_settings(config: DatabaseConfig) -> PostgresSettings:
    """The settings of one ``[[database]]``.

    Raises:
        ConfigError: the URL names no user or database, or an option is unknown or wrong.
    """
    parts = urlsplit(config.url.reveal)
    given = {**dict(parse_qsl(parts.query)), **config.options}
    host = given.pop("host", None)
    options = read_options(config, PostgresOptions, given)
    if not parts.username:
        raise ConfigError(f"database {config.name}: the URL names no user")
    database = unquote(parts.path.lstrip("/"))
    if not database:
        raise ConfigError(f"database {config.name}: the URL names no database")
    # Slot names have only these characters; the publication has the same name.
    plain = "databus_" + re.sub(r"[^a-z0-9_]", "_", config.name.lower())[: _NAME_LIMIT - 8]
    hosts = read_hosts(config.name, parts.netloc, _DEFAULT_PORT)
    if host is not None:
        hosts = (Host(str(host), hosts[0].port),)
    return PostgresSettings(
        name=config.name,
        hosts=hosts,
        host=hosts[0].name,
        port=hosts[0].port,
        user=unquote(parts.username),
        database=database,
        password=unquote(parts.password or ""),
        slot=options.slot or plain,
        publication=plain if options.publication is None else options.publication,
        special_values=options.special_values,
        discover_every_s=options.discover_every,
        connect_timeout_s=options.connect_timeout,
        takes_over=options.take_over,
        sslmode=options.sslmode,
        sslrootcert=options.sslrootcert,
        sslcert=options.sslcert,
        sslkey=options.sslkey,
        require_auth=options.require_auth,
        keys=ConfiguredKeys(config.keys),
        clock_name=options.clock_name,
        sql_ascii_encoding=options.sql_ascii_encoding,
        retained_wal_warning_bytes=options.retained_wal_warning,
    )
