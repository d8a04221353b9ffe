"""The configuration: one TOML file for any mix of the processes.

Each section is one frozen model.  The text under a key is its description: the configuration
reference of the manual is generated from these texts, and the line that begins with ``Example:``
is TOML.  An error about an unknown key names the nearest known one.  Sizes and durations have
units ("256MiB", "30s"), and secrets never print.
"""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from databus.common.access_config import (
    AuthConfig,
    CertificateConfig,
    CredentialsConfig,
    GrantConfig,
    HttpConfig,
    OidcConfig,
    RoleConfig,
    TlsConfig,
    TokenConfig,
)
from databus.common.cluster_config import ClusterConfig as ClusterConfig
from databus.common.cluster_config import ZooKeeperAccess as ZooKeeperAccess
from databus.common.config_values import (
    RELAY_SCHEMES,
    Address,
    Bytes,
    HiddenText,
    KeyColumns,
    RelayUrl,
    Seconds,
    Section,
    Url,
)
from databus.common.config_values import Secret as Secret
from databus.common.config_values import SourceUrl as SourceUrl
from databus.common.config_values import parse_bytes as parse_bytes
from databus.common.config_values import parse_seconds as parse_seconds
from databus.common.errors import ConfigError
from databus.common.private import HiddenUrl
from databus.common.s3_config import S3Options as S3Options
from databus.common.sink_config import (
    FilesSinkConfig,
    KafkaSinkConfig,
    NatsSinkConfig,
    RedisSinkConfig,
    RouteConfig,
    SearchSinkConfig,
    SinkConfig,
    SqlSinkConfig,
    WebhookSinkConfig,
)
from databus.common.spelling import spelling_advice


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class RelayConfig(Section):
    """``[relay]``: the HTTP workers, and the folder of the rings."""

    listen: Address = "127.0.0.1:8700"
    """Address and port of the HTTP server.
    Example: listen = "0.0.0.0:8700" """

    data_dir: Path = Path("var/relay")
    """Folder of the rings, the schemas and the state of the sources. A relative path starts at
    the configuration file.
    Example: data_dir = "/var/lib/databus/relay" """

    workers: int = Field(default=1, ge=1, le=64)
    """Number of HTTP worker processes. They share one port.
    Example: workers = 4 """

    allowed_hosts: tuple[str, ...] = ()
    """Further host names of this server, globs allowed. The server refuses a request that changes
    something and has another `Host`. It always accepts its `listen` address, IP addresses,
    localhost and the names of the machine.
    Example: allowed_hosts = ["relay.example.com", "*.internal"] """

    max_connections: int = Field(default=20_000, ge=1)
    """Largest number of open connections of each worker.
    Example: max_connections = 5000 """

    heartbeat: Seconds = 1.0
    """Interval after which a follower without new events gets a heartbeat.
    Example: heartbeat = "500ms" """

    max_wait: Seconds = 60.0
    """Longest time that a long poll waits, whatever its `wait_ms` is.
    Example: max_wait = "30s" """


class DatabaseConfig(Section):
    """``[[database]]``: one upstream database, its sources and its ring."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    """Name of the database in URLs, metrics and folders: 1 to 63 letters, digits, `_`, `.`, `-`.
    Example: name = "shop" """

    url: Url
    """Where the database is. The scheme selects the source: `mariadb`, `mysql`, `postgresql`,
    `sqlite`, `relay+http`, `relay+https` or `generator`. Write `%2F`, `%23`, `%3F`, `%40` and
    `%25` for `/`, `#`, `?`, `@` and `%` in a password.
    Example: url = "postgresql://databus_reader:secret@db.internal:5432/shop" """

    sources: tuple[str, ...] = ("*",)
    """Tables to capture: globs over `schema.table`.
    Example: sources = ["public.*"] """

    exclude_sources: tuple[str, ...] = ()
    """Tables that `sources` selects and that are not captured: globs over `schema.table`.
    Example: exclude_sources = ["public.tmp_*"] """

    include_columns: tuple[str, ...] = ()
    """Of the tables that these patterns name, the relay captures only these columns and the key.
    A pattern is `SCHEMA.TABLE.COLUMN`, globs allowed.
    Example: include_columns = ["public.audit.at", "public.audit.what"] """

    exclude_columns: tuple[str, ...] = ()
    """Columns that never leave the database. Patterns are `SCHEMA.TABLE.COLUMN`.
    Example: exclude_columns = ["*.password"] """

    hash_columns: tuple[str, ...] = ()
    """Columns that are replaced by their HMAC-SHA256, as 64 hexadecimal digits.
    Example: hash_columns = ["*.email"] """

    hash_salt: HiddenText = Secret("")
    """Secret key of `hash_columns`. `env:NAME` reads an environment variable.
    Example: hash_salt = "env:SHOP_SALT" """

    mask_columns: dict[str, str | Annotated[int, Field(strict=True, ge=1, le=1000)]] = Field(
        default_factory=dict
    )
    """Columns that are replaced by a fixed text, or by this many asterisks.
    Example: mask_columns = { "public.customers.card" = 8, "public.customers.phone" = "hidden" } """

    null_columns: tuple[str, ...] = ()
    """Columns that are always null.
    Example: null_columns = ["public.customers.birthday"] """

    truncate_columns: dict[str, Annotated[int, Field(strict=True, ge=1)]] = Field(
        default_factory=dict
    )
    """Text columns, and the number of characters that are captured of their values.
    Example: truncate_columns = { "public.orders.note" = 20 } """

    skipped_operations: tuple[Literal["c", "u", "d", "t"], ...] = ()
    """Operations that are left out of the stream: `c` insert, `u` update, `d` delete, `t` truncate.
    Example: skipped_operations = ["t"] """

    keys: dict[str, KeyColumns] = Field(default_factory=dict)
    """Key columns of tables that have no key of their own. `"*"` makes the whole row the key.
    Example: keys = { "public.log" = ["at", "line"], "public.raw_*" = "*" } """

    ring_bytes: Bytes = Field(default=256 << 20, ge=64 << 10)
    """Size of the ring file. The newest changes stay in it until newer ones need the space.
    Example: ring_bytes = "4GiB" """

    retention: Seconds | None = Field(default=None, gt=0)
    """Time after its commit at which a window leaves the ring, even if there is space left.
    Without it, only `ring_bytes` bounds the ring.
    Example: retention = "24h" """

    resync: Literal["auto", "manual"] = "auto"
    """How a suspended table is resynchronised: `auto` without an operator, `manual` after
    `databus resync`.
    Example: resync = "manual" """

    sync_every: Seconds = 0.5
    """Interval at which the ring is written to disk. The source is acknowledged after that.
    Example: sync_every = "200ms" """

    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Settings of one kind of source. The page of each source lists them.
    Example: options = { zero_dates = "null" } """

    @property
    def is_relayed(self) -> bool:
        """Whether the relay reads another relay and not a database."""
        return self.url.reveal.partition("://")[0] in RELAY_SCHEMES

    def captures(self, source: str) -> bool:
        """Whether ``sources`` selects a table and ``exclude_sources`` does not."""
        return _matches(source, self.sources) and not _matches(source, self.exclude_sources)

    @property
    def column_patterns(self) -> dict[str, tuple[str, ...]]:
        """The patterns of every rule for columns, by the rule's key."""
        return {
            "include_columns": self.include_columns,
            "exclude_columns": self.exclude_columns,
            "hash_columns": self.hash_columns,
            "mask_columns": tuple(self.mask_columns),
            "null_columns": self.null_columns,
            "truncate_columns": tuple(self.truncate_columns),
        }

    @pydantic.model_validator(mode="after")
    def _rules_are_whole(self) -> DatabaseConfig:
        for rule, patterns in self.column_patterns.items():
            for pattern in patterns:
                if "." not in pattern:
                    raise ValueError(
                        f"{rule} has {pattern!r}, which is not SCHEMA.TABLE.COLUMN, globs allowed"
                    )
        if self.hash_columns and not self.hash_salt:
            raise ValueError('hash_columns needs a hash_salt, a text or "env:NAME"')
        if self.hash_salt and not self.hash_columns:
            raise ValueError("hash_salt is given, but no hash_columns")
        return self

    @pydantic.model_validator(mode="after")
    def _no_consumer_holds_a_database_back(self) -> DatabaseConfig:
        if self.options.get("block") and not self.is_relayed:
            raise ValueError(
                f"database {self.name}: block = true would stop reading {self.url} until a "
                "consumer releases, while the database retains its log for the relay. Only a "
                "database that is read from another relay, relay+http://, may block. Remove block"
            )
        return self


class BootstrapConfig(Section):
    """``[bootstrap]``: the log writer, the applier and the server over one store.

    No retention setting removes what the base or an open reader needs.
    """

    listen: Address = "127.0.0.1:8701"
    """Address and port of the HTTP server.
    Example: listen = "0.0.0.0:8701" """

    allowed_hosts: tuple[str, ...] = ()
    """Further host names of this server, as in `[relay]`.
    Example: allowed_hosts = ["bootstrap.example.com"] """

    max_connections: int = Field(default=20_000, ge=1)
    """Largest number of open connections.
    Example: max_connections = 5000 """

    max_readers: int = Field(default=100, ge=1)
    """Largest number of `/bootstrap`, `/changes` and `/snapshot` answers at once. A further one
    gets 429 with `Retry-After`, and the client library waits for that time. Each reader needs five
    of the open files that the system allows (`ulimit -n`); there are fewer readers if it allows
    fewer.
    Example: max_readers = 300 """

    read_threads: int = Field(default=8, ge=1, le=1024)
    """Threads that read the store for these answers. The log writer has others.
    Example: read_threads = 16 """

    data_dir: Path = Path("var/bootstrap")
    """Folder of the hot log, and of the runs where `store` is empty. A relative path starts at
    the configuration file.
    Example: data_dir = "/var/lib/databus/bootstrap" """

    store: str = Field(default="", pattern=r"^(s3://[^/?#]+[^?#]*)?$")
    """Where the runs are: `s3://bucket/prefix`, or empty for `data_dir`.
    Example: store = "s3://bucket/prefix" """

    s3: S3Options = S3Options()
    """How a `store` on S3 is reached.
    Example: s3 = { region = "eu-central-1" } """

    relays: tuple[RelayUrl, ...] = (HiddenUrl("http://127.0.0.1:8700"),)
    """Base URLs of the relays to read. The log writer uses the next one if one fails.
    Example: relays = ["http://relay-a:8700", "http://relay-b:8700"] """

    credentials: CredentialsConfig = CredentialsConfig()
    """What the log writer presents to the relays.
    Example: credentials = { token_file = "writer.token", ca = "ca.pem" } """

    databases: tuple[str, ...] = ()
    """Databases to store. Empty for all databases of the relays.
    Example: databases = ["shop"] """

    sources: tuple[str, ...] = ("*",)
    """Tables to store: globs over `schema.table`.
    Example: sources = ["public.*"] """

    cluster: bool = False
    """Whether several bootstrap servers share the store. One of them has the lease of a database
    and writes its log. The others serve, and one of them takes over when it ends. With `store` on
    S3 each has a `data_dir` of its own. Without it they share `data_dir`, on one machine.
    Example: cluster = true """

    writers: int = Field(default=1, ge=1, le=64)
    """Processes that write logs. With 1, the server's process writes all of them. With more, each
    writes a group of databases, which shares nothing with the others; a database goes to the writer
    that has the fewest.
    Example: writers = 4 """

    apply_every: Seconds = 30.0
    """Interval at which the applier merges.
    Example: apply_every = "5min" """

    apply_bytes: Bytes = Field(default=16 << 30, ge=1 << 20)
    """Bytes of rows that one apply of a store merges, about. A larger merge, such as of a large
    base, is done in parts: each apply does some buckets of it.
    Example: apply_bytes = "64GiB" """

    segment_bytes: Bytes = Field(default=64 << 20, ge=4 << 10)
    """Size at which the hot log is sealed into a Parquet segment.
    Example: segment_bytes = "128MiB" """

    segment_every: Seconds = 30.0
    """Age at which the hot log is sealed into a Parquet segment.
    Example: segment_every = "1min" """

    retention_bytes: Bytes = 64 << 30
    """Largest size on disk of the runs, besides the base, that returning readers need.
    Example: retention_bytes = "500GiB" """

    retention_time: Seconds = Field(default=0.0, ge=0)
    """Age, by commit time, up to which these runs are retained. 0 for no bound.
    Example: retention_time = "7d" """

    retention_scns: int = Field(default=0, ge=0)
    """Distance from the end of the log, in SCNs, up to which these runs are retained. 0 for no
    bound.
    Example: retention_scns = 10000000 """

    run_grace: Seconds = Field(default=600.0, ge=0)
    """Time for which a run is retained after a merge has replaced it. Readers inside it finish;
    `/changes?mode=all` and past states reach back this far.
    Example: run_grace = "1h" """

    merge_with: Literal["auto", "spark", "process"] = "auto"
    """What merges: `spark`, or `process`, the applier's own process, without Java and on one core.
    `auto` is Spark, if Java is installed or `spark_master` names a cluster, and else `process`.
    Example: merge_with = "process" """

    spark_master: str = "local[*]"
    """Master URL of Spark. Executors need PySpark, pyarrow and pandas.
    Example: spark_master = "spark://host:7077" """

    spark_driver_memory: str = "1g"
    """Heap of Spark's driver. The default is enough for tables of any size.
    Example: spark_driver_memory = "2g" """

    @pydantic.model_validator(mode="after")
    def _retention_holds_segments(self) -> BootstrapConfig:
        if self.retention_bytes < self.segment_bytes:
            raise ValueError(
                f"retention_bytes {self.retention_bytes} is less than one segment of "
                f"segment_bytes {self.segment_bytes}"
            )
        return self


class ExportConfig(Section):
    """``[export]``: where ``databus export`` stores tables that are not in a local folder."""

    s3: S3Options | None = None
    """How S3 is reached. Without it, as in `[bootstrap.s3]`.
    Example: s3 = { endpoint = "http://127.0.0.1:9000" } """

    catalog: dict[str, HiddenText] = Field(default_factory=dict)
    """Properties of an Iceberg catalog of your own, as pyiceberg names them. `env:NAME` reads an
    environment variable.
    Example: catalog = { type = "rest", uri = "https://catalog.example" } """


class Config(Section):
    """The whole file. A process uses the sections that are its own."""

    http: HttpConfig = HttpConfig()
    """The listeners."""

    auth: AuthConfig = AuthConfig()
    """The callers and their grants."""

    relay: RelayConfig | None = None
    """The relay."""

    cluster: ClusterConfig | None = None
    """The cluster that the relay is a member of."""

    database: tuple[DatabaseConfig, ...] = ()
    """The upstream databases."""

    bootstrap: BootstrapConfig | None = None
    """The bootstrap server."""

    export: ExportConfig = ExportConfig()
    """`databus export`."""

    sink: SinkConfig | None = None
    """The sink of `databus sink`."""

    @property
    def export_s3(self) -> S3Options:
        """How exports reach S3."""
        return self.export.s3 or (self.bootstrap.s3 if self.bootstrap else S3Options())

    @pydantic.model_validator(mode="after")
    def _names_are_unique(self) -> Config:
        names = [database.name for database in self.database]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two [[database]] have the name {twice[0]!r}")
        if self.database and self.relay is None:
            raise ValueError("[[database]] needs a [relay] section")
        if self.cluster is not None and self.relay is None:
            raise ValueError("[cluster] needs a [relay] section")
        relayed = [database.name for database in self.database if database.is_relayed]
        if self.cluster is not None and relayed:
            raise ValueError(
                f"database {relayed[0]} is read from another relay; the relays of a [cluster] have "
                "the URL of the database itself, and the cluster decides which one uses it"
            )
        return self


def load(path: str | Path) -> Config:
    """The configuration in the file at ``path``; relative folders are taken from there.

    Raises:
        ConfigError: the file cannot be read or a key is wrong; the message names the key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from error
    return parse(text, str(path), Path(path).resolve().parent)


def parse(text: str, origin: str = "configuration", folder: Path | None = None) -> Config:
    """The configuration in ``text``; relative folders are resolved against ``folder``.

    Raises:
        ConfigError: as ``load``.
    """
    try:
        config = Config.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: not TOML: {error}") from None
    except pydantic.ValidationError as error:
        lines = "; ".join(_finding(item) for item in error.errors())
        raise ConfigError(f"{origin}: {lines}") from None
    return _resolved(config, folder) if folder else config


def _resolved(config: Config, folder: Path) -> Config:
    changes: dict[str, Any] = {}
    for name in ("relay", "bootstrap", "sink"):
        part = getattr(config, name)
        if part is not None:
            changes[name] = part.model_copy(update={"data_dir": folder / part.data_dir})
    if config.bootstrap is not None:
        given = {name: str(folder / path) for name, path in config.bootstrap.credentials if path}
        update = {"credentials": config.bootstrap.credentials.model_copy(update=given)}
        changes["bootstrap"] = changes["bootstrap"].model_copy(update=update)
    if config.cluster is not None:
        given = {name: str(folder / path) for name, path in config.cluster.credentials if path}
        access = config.cluster.zookeeper_access
        files = {
            name: str(folder / path)
            for name in ("ca", "certificate", "key")
            if (path := getattr(access, name))
        }
        parts: dict[str, Any] = {
            "credentials": config.cluster.credentials.model_copy(update=given),
            "zookeeper_access": access.model_copy(update=files),
        }
        changes["cluster"] = config.cluster.model_copy(update=parts)
    if (tls := config.http.tls) is not None:
        paths = {name: folder / path for name in _TLS_PATHS if (path := getattr(tls, name))}
        changes["http"] = config.http.model_copy(update={"tls": tls.model_copy(update=paths)})
    return config.model_copy(update=changes)


_TLS_PATHS = ("certificate", "key", "client_ca")
_MODELS: dict[str, type[Section]] = {
    "http": HttpConfig,
    "tls": TlsConfig,
    "auth": AuthConfig,
    "oidc": OidcConfig,
    "roles": RoleConfig,
    "tokens": TokenConfig,
    "certificates": CertificateConfig,
    "grants": GrantConfig,
    "credentials": CredentialsConfig,
    "relay": RelayConfig,
    "database": DatabaseConfig,
    "bootstrap": BootstrapConfig,
    "export": ExportConfig,
    "s3": S3Options,
    "sink": SinkConfig,
    "route": RouteConfig,
    "sql": SqlSinkConfig,
    "kafka": KafkaSinkConfig,
    "redis": RedisSinkConfig,
    "nats": NatsSinkConfig,
    "search": SearchSinkConfig,
    "files": FilesSinkConfig,
    "webhook": WebhookSinkConfig,
}


def _finding(item: Any) -> str:
    location = [part for part in item["loc"] if isinstance(part, str)]
    where = ".".join(location)
    if item["type"] != "extra_forbidden":
        return f"{where}: {item['msg'].removeprefix('Value error, ')}"
    model = _MODELS.get(location[-2], Config) if len(location) > 1 else Config
    names = list(model.model_fields)
    return f"unknown key {where}; {spelling_advice(location[-1], names, 'known keys are')}"
