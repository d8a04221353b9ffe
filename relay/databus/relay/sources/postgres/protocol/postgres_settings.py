"""What a ``[[database]]`` with a postgresql:// URL says, as one frozen record.

The URL's query and the table ``options`` take the same names; ``options`` wins.
"""

from __future__ import annotations

import difflib
import re
import ssl
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from databus.common.config import DatabaseConfig, parse_bytes, parse_seconds
from databus.common.errors import ConfigError, SourceUnavailable
from databus.relay.sources.configured_keys import NO_KEYS, ConfiguredKeys
from databus.relay.sources.postgres.protocol import text_encodings
from databus.relay.sources.server_hosts import Host, read_hosts

_OPTIONS = (
    "clock_name",
    "retained_wal_warning",
    "slot",
    "publication",
    "special_values",
    "binary",
    "discover_every",
    "sql_ascii_encoding",
    "connect_timeout",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "require_auth",
)
AUTH_METHODS = ("none", "password", "md5", "scram-sha-256")
_SSL_MODES = ("disable", "prefer", "require", "verify-ca", "verify-full")
_NAME_LIMIT = 63

SEARCH_PATH = "pg_catalog, pg_temp"
"""The search_path of every session, from its first statement on.

Whoever may create in a schema of the search path could otherwise put a function, an operator or
a type of the server's own name there, and it would run with this role's rights.  pg_temp is
named so that it does not come first.
"""
_DEFAULT_PORT = 5432

LOCK_TIMEOUT = "2s"
"""How long a statement of ours waits for a table's lock: an application's wait behind it."""

JIT = "off"
"""The server would compile the queries of the catalogue, which takes it seconds each time."""


@dataclass(frozen=True, slots=True)
class PostgresSettings:
    """Where the server is, how we sign in, and what our slot and publication are called.

    ``special_values`` says what becomes of a value that its kind cannot hold (an infinite
    date, a year before 1 or after 9999, 24:00, NaN in a numeric(p, s)): ``error`` stops the
    table and names it, ``null`` carries NULL, ``text`` carries every value of such a type in
    PostgreSQL's text form.  ``hosts`` are the servers that may be the
    primary, ``host`` and ``port`` the one in use.  ``clock_name`` tells streams of one cluster
    apart that have different histories.  ``binary`` asks for values in binary where all types
    of the captured tables are known in that form.  ``sql_ascii_encoding`` is what the texts of a
    database are taken for that has no encoding.  ``require_auth`` are the ways in which the
    server may ask for the password; ``password``, in clear, is for TLS alone.
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
    sslmode: str = "prefer"
    sslrootcert: str = ""
    sslcert: str = ""
    sslkey: str = ""
    require_auth: tuple[str, ...] = ("none", "md5", "scram-sha-256")
    keys: ConfiguredKeys = NO_KEYS
    clock_name: str = ""
    binary: bool = False
    retained_wal_warning_bytes: int = 10 << 30
    sql_ascii_encoding: str = "UTF8"

    def at(self, host: Host) -> PostgresSettings:
        """The same, with another of the servers."""
        return replace(self, host=host.name, port=host.port)

    @property
    def address(self) -> str:
        """The database as errors name it, without the password."""
        return f"{self.user}@{self.host}:{self.port}/{self.database}"

    def ssl_context(self) -> ssl.SSLContext | None:
        """The context of an encrypted connection; None where sslmode=disable."""
        if self.sslmode == "disable":
            return None
        context = ssl.create_default_context(cafile=self.sslrootcert or None)
        context.check_hostname = self.sslmode == "verify-full"
        if self.sslmode in ("prefer", "require"):
            context.verify_mode = ssl.CERT_NONE
        if self.sslcert:
            context.load_cert_chain(self.sslcert, self.sslkey or None)
        return context


def require_search_path(settings: PostgresSettings, found: str) -> None:
    """See to it that a session has the search_path that it asked for.

    Raises:
        SourceUnavailable: something between us and the server has left it out.
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
    options: dict[str, Any] = {**dict(parse_qsl(parts.query)), **config.options}
    for key in options:
        if key not in (*_OPTIONS, "host"):
            near = difflib.get_close_matches(key, _OPTIONS, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(_OPTIONS)}"
            raise ConfigError(f"database {config.name}: unknown option {key!r}; {advice}")
    if not parts.username:
        raise ConfigError(f"database {config.name}: the URL names no user")
    database = unquote(parts.path.lstrip("/"))
    if not database:
        raise ConfigError(f"database {config.name}: the URL names no database")
    # Slots take only these letters; a publication is quoted, but one form is easier to find.
    plain = "databus_" + re.sub(r"[^a-z0-9_]", "_", config.name.lower())[: _NAME_LIMIT - 8]
    slot = str(options.get("slot", plain))
    if not re.fullmatch(r"[a-z0-9_]{1,63}", slot):
        raise ConfigError(f"database {config.name}: slot {slot!r} is not 1 to 63 of a-z, 0-9 and _")
    hosts = read_hosts(config.name, parts.netloc, _DEFAULT_PORT)
    if "host" in options:
        hosts = (Host(str(options["host"]), hosts[0].port),)
    return PostgresSettings(
        name=config.name,
        hosts=hosts,
        host=hosts[0].name,
        port=hosts[0].port,
        user=unquote(parts.username),
        database=database,
        password=unquote(parts.password or ""),
        slot=slot,
        publication=str(options.get("publication", plain)),
        special_values=_one_of(config.name, options, "special_values", ("error", "null", "text")),
        discover_every_s=_seconds(config.name, options, "discover_every", 10.0),
        connect_timeout_s=_seconds(config.name, options, "connect_timeout", 10.0),
        sslmode=_one_of(config.name, options, "sslmode", _SSL_MODES, "prefer"),
        sslrootcert=str(options.get("sslrootcert", "")),
        sslcert=str(options.get("sslcert", "")),
        sslkey=str(options.get("sslkey", "")),
        require_auth=_auth_methods(config.name, options),
        keys=ConfiguredKeys(config.keys),
        binary=_one_of(config.name, options, "binary", ("false", "true")) == "true",
        clock_name=str(options.get("clock_name", "")),
        sql_ascii_encoding=_one_of(
            config.name, options, "sql_ascii_encoding", text_encodings.KNOWN
        ),
        retained_wal_warning_bytes=_bytes(config.name, options, "retained_wal_warning", "10GiB"),
    )


def _one_of(
    name: str, options: dict[str, Any], key: str, allowed: tuple[str, ...], default: str = ""
) -> str:
    value = options.get(key, default or allowed[0])
    value = str(value).lower() if isinstance(value, bool) else str(value)
    if value not in allowed:
        raise ConfigError(f"database {name}: {key} is {value!r}; it takes {', '.join(allowed)}")
    return value


def _auth_methods(name: str, options: dict[str, Any]) -> tuple[str, ...]:
    """Ways in which a server may ask for the password, as libpq's parameter of this name."""
    text = str(options.get("require_auth", "none,md5,scram-sha-256"))
    methods = tuple(method.strip() for method in text.split(","))
    for method in methods:
        if method not in AUTH_METHODS:
            raise ConfigError(
                f"database {name}: require_auth has {method!r}; it takes {', '.join(AUTH_METHODS)}"
            )
    mode = options.get("sslmode", "prefer")
    if "password" in methods and mode in ("disable", "prefer"):
        raise ConfigError(
            f"database {name}: require_auth has password, which needs sslmode=require or stricter: "
            f"it goes out in clear"
        )
    return methods


def _bytes(name: str, options: dict[str, Any], key: str, default: str) -> int:
    try:
        return parse_bytes(options.get(key, default))
    except ValueError as error:
        raise ConfigError(f"database {name}: {key}: {error}") from None


def _seconds(name: str, options: dict[str, Any], key: str, default: float) -> float:
    try:
        return parse_seconds(options.get(key, default))
    except ValueError as error:
        raise ConfigError(f"database {name}: {key}: {error}") from None
