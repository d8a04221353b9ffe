"""The configuration: one TOML file for any mix of the processes.

Each component gets one frozen model.  Unknown keys are refused with the nearest right name,
sizes and durations are written with their units ("256MiB", "30s"), and secrets never print.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, ConfigDict, Field

from databus.common.errors import ConfigError
from databus.common.private import without_passwords

_SIZE_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(value: Any) -> int:
    """A size: a number of bytes, or text such as "256MiB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value))
    if not found or found[2] not in _SIZE_UNITS:
        raise ValueError(f"{value!r} is not a size such as '256MiB' ({', '.join(_SIZE_UNITS)})")
    return int(float(found[1]) * _SIZE_UNITS[found[2]])


def parse_seconds(value: Any) -> float:
    """A duration in seconds: a number, or text such as "30s"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", str(value))
    if not found or found[2] not in _DURATION_UNITS:
        raise ValueError(
            f"{value!r} is not a duration such as '30s' ({', '.join(_DURATION_UNITS)})"
        )
    return float(found[1]) * _DURATION_UNITS[found[2]]


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]


class SourceUrl(str):
    """A database URL that does not show its password when printed or logged."""

    __slots__ = ()

    @property
    def reveal(self) -> str:
        """The URL with its password, for the driver alone."""
        return str.__str__(self)

    def __str__(self) -> str:
        return without_passwords(self.reveal)

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


_SCHEMES = (
    "mariadb",
    "mysql",
    "postgresql",
    "postgres",
    "sqlite",
    "generator",
    "relay+http",
    "relay+https",
)
_LOCAL_SCHEMES = ("sqlite", "generator")
_RELAY_SCHEMES = ("relay+http", "relay+https")


def _source_url(value: Any) -> SourceUrl:
    if isinstance(value, SourceUrl):
        value = value.reveal  # str() of it has lost the password
    scheme = str(value).partition("://")[0]
    if scheme not in _SCHEMES or "://" not in str(value):
        raise ValueError(f"the URL's scheme is {scheme!r}; supported are {', '.join(_SCHEMES)}")
    if scheme not in _LOCAL_SCHEMES:
        _require_plain_authority(str(value))
    return SourceUrl(value)


def _require_plain_authority(url: str) -> None:
    """Refuse a URL whose password ends its authority: it would be cut in the wrong place."""
    rest = url.partition("://")[2]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in rest and "@" not in authority:
        raise ValueError(
            "the URL has /, ? or # in front of its @; if they are in the user or the password, "
            "write %2F, %3F and %23 (and %40 for @, %3A for :, %25 for %)"
        )
    if re.search(r"%(?![0-9A-Fa-f]{2})", authority.rpartition("@")[0]):
        raise ValueError("the URL's user or password has a % that begins no %XX; write %25 for it")


def _relay_url(value: Any) -> str:
    _require_plain_authority(str(value))
    return str(value)


class Secret(str):
    """A text that does not show when printed or logged; ``env:NAME`` stands for a variable."""

    __slots__ = ()

    @property
    def reveal(self) -> str:
        """The secret itself.

        Raises:
            ConfigError: the variable that it names is not set.
        """
        text = str.__str__(self)
        if not text.startswith("env:"):
            return text
        name = text.removeprefix("env:")
        if not os.environ.get(name):
            raise ConfigError(f"the environment variable {name}, which holds a secret, is not set")
        return os.environ[name]

    def __str__(self) -> str:
        return "***" if self else ""

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def _secret(value: Any) -> Secret:
    if not isinstance(value, str):
        raise ValueError("it is not a text")
    return Secret(str.__str__(value))


class _Model(pydantic.BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, hide_input_in_errors=True
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _key_columns(value: Any) -> tuple[str, ...]:
    """The columns of a configured key: "*" is a list of one, and so is a single name."""
    names = [value] if isinstance(value, str) else list(value)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError('a key is a list of columns, or "*" for all of them')
    if len(set(names)) != len(names) or ("*" in names and len(names) > 1):
        raise ValueError(f'the key {names} names a column twice, or more than "*"')
    return tuple(names)


def _address(value: Any) -> str:
    host, colon, port = str(value).rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT")
    return str(value)


Address = Annotated[str, BeforeValidator(_address)]


class RelayConfig(_Model):
    """``[relay]``: the HTTP workers and where the rings lie.

    ``allowed_hosts`` are names, globs allowed, by which clients reach the relay, besides its
    ``listen`` address, addresses in numbers, localhost and the machine's own names: a request
    that changes something and names another host is refused.  ``max_connections`` is each
    worker's.
    """

    listen: Address = "127.0.0.1:8700"
    data_dir: Path = Path("var/relay")
    workers: int = Field(default=1, ge=1, le=64)
    allowed_hosts: tuple[str, ...] = ()
    max_connections: int = Field(default=20_000, ge=1)
    heartbeat: Seconds = 1.0
    max_wait: Seconds = 60.0


class DatabaseConfig(_Model):
    """``[[database]]``: one upstream database, its sources and its ring.

    The rules for columns and operations are told in docs/columns.md; ``keys`` names the key
    columns, "*" for all, of tables that have no key of their own.  ``retention`` is how long a
    window is served after its commit, where ``ring_bytes`` would keep it longer.
    ``resync`` says whether a suspended table is resynchronised automatically, or only after an
    operator has confirmed it.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")
    url: Annotated[SourceUrl, BeforeValidator(_source_url)]
    sources: tuple[str, ...] = ("*",)
    exclude_sources: tuple[str, ...] = ()
    include_columns: tuple[str, ...] = ()
    exclude_columns: tuple[str, ...] = ()
    hash_columns: tuple[str, ...] = ()
    hash_salt: Annotated[Secret, BeforeValidator(_secret)] = Secret("")
    mask_columns: dict[str, str | Annotated[int, Field(strict=True, ge=1, le=1000)]] = Field(
        default_factory=dict
    )
    null_columns: tuple[str, ...] = ()
    truncate_columns: dict[str, Annotated[int, Field(strict=True, ge=1)]] = Field(
        default_factory=dict
    )
    skipped_operations: tuple[Literal["c", "u", "d", "t"], ...] = ()
    keys: dict[str, Annotated[tuple[str, ...], BeforeValidator(_key_columns)]] = Field(
        default_factory=dict
    )
    ring_bytes: Bytes = Field(default=256 << 20, ge=64 << 10)
    retention: Seconds | None = Field(default=None, gt=0)
    resync: Literal["auto", "manual"] = "auto"
    sync_every: Seconds = 0.5
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)

    @property
    def is_relayed(self) -> bool:
        """Whether another relay is read and not a database."""
        return self.url.reveal.partition("://")[0] in _RELAY_SCHEMES

    def require_options(self, *known: str) -> None:
        """Refuse ``options`` that the source does not know.

        Raises:
            ConfigError: there is one; the message has the nearest right name.
        """
        for option in self.options:
            if option not in known:
                near = difflib.get_close_matches(option, known, n=1, cutoff=0.5)
                told = f"known are {', '.join(known)}" if known else "this source knows none"
                advice = f"did you mean {near[0]}?" if near else told
                raise ConfigError(f"database {self.name}: unknown option {option!r}; {advice}")

    def captures(self, source: str) -> bool:
        """Whether ``sources`` takes a table and ``exclude_sources`` does not."""
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
                "consumer releases, while the database keeps its log for the relay; only what "
                "is read from another relay, relay+http://, may block: take block out"
            )
        return self


class S3Options(_Model):
    """``[bootstrap.s3]``: how a ``store`` on S3 is reached.

    What is empty here comes from the environment (``AWS_*``) or the machine's role, for the
    writer and the server here and for Spark's tasks where they run.  ``lease_ttl`` is how
    long a writer or applier that died keeps others waiting.
    """

    endpoint: str = ""
    region: str = ""
    access_key: str = ""
    secret_key: pydantic.SecretStr = pydantic.SecretStr("")
    session_token: pydantic.SecretStr = pydantic.SecretStr("")
    request_timeout: Seconds = Field(default=20.0, gt=0)
    attempts: int = Field(default=8, ge=1, le=100)
    lease_ttl: Seconds = Field(default=30.0, ge=1)


class BootstrapConfig(_Model):
    """``[bootstrap]``: the log writer, the applier and the server over one store.

    ``store`` is where runs lie: ``s3://bucket/prefix``, or empty for ``data_dir``, which has the
    hot log in any case.
    ``retention_bytes`` bounds the runs that readers who come back need, on disk, beside the
    base; ``retention_time`` and ``retention_scns`` bound them by commit time and by distance to
    the end (0: no bound).  None of them goes past what the base and open readers need.
    ``run_grace`` is how long a run is kept after a merge took its place: for readers
    inside it, and as the reach of all changes and of past states.
    """

    listen: Address = "127.0.0.1:8701"
    allowed_hosts: tuple[str, ...] = ()
    max_connections: int = Field(default=20_000, ge=1)
    data_dir: Path = Path("var/bootstrap")
    store: str = Field(default="", pattern=r"^(s3://[^/?#]+[^?#]*)?$")
    s3: S3Options = S3Options()
    relays: tuple[Annotated[str, BeforeValidator(_relay_url)], ...] = ("http://127.0.0.1:8700",)
    databases: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("*",)
    apply_every: Seconds = 30.0
    segment_bytes: Bytes = Field(default=64 << 20, ge=4 << 10)
    segment_every: Seconds = 30.0
    retention_bytes: Bytes = 64 << 30
    retention_time: Seconds = Field(default=0.0, ge=0)
    retention_scns: int = Field(default=0, ge=0)
    run_grace: Seconds = Field(default=600.0, ge=0)
    spark_master: str = "local[*]"
    spark_driver_memory: str = "1g"

    @pydantic.model_validator(mode="after")
    def _retention_holds_segments(self) -> BootstrapConfig:
        if self.retention_bytes < self.segment_bytes:
            raise ValueError(
                f"retention_bytes {self.retention_bytes} is less than one segment of "
                f"segment_bytes {self.segment_bytes}"
            )
        return self


class ExportConfig(_Model):
    """``[export]``: where ``databus export`` keeps tables that do not lie in a folder.

    ``s3`` is how S3 is reached; without it as ``[bootstrap.s3]`` says.  ``catalog`` are the
    properties of an Iceberg catalog of your own, as ``pyiceberg`` takes them; ``env:NAME``
    stands for a variable.
    """

    s3: S3Options | None = None
    catalog: dict[str, Annotated[Secret, BeforeValidator(_secret)]] = Field(default_factory=dict)


class Config(_Model):
    """The whole file; a process uses the parts that are its own."""

    relay: RelayConfig | None = None
    database: tuple[DatabaseConfig, ...] = ()
    bootstrap: BootstrapConfig | None = None
    export: ExportConfig = ExportConfig()

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
    for name in ("relay", "bootstrap"):
        part = getattr(config, name)
        if part is not None:
            changes[name] = part.model_copy(update={"data_dir": folder / part.data_dir})
    return config.model_copy(update=changes)


_MODELS: dict[str, type[_Model]] = {
    "relay": RelayConfig,
    "database": DatabaseConfig,
    "bootstrap": BootstrapConfig,
    "export": ExportConfig,
    "s3": S3Options,
}


def _finding(item: Any) -> str:
    location = [part for part in item["loc"] if isinstance(part, str)]
    where = ".".join(location)
    if item["type"] != "extra_forbidden":
        return f"{where}: {item['msg'].removeprefix('Value error, ')}"
    model = _MODELS.get(location[-2], Config) if len(location) > 1 else Config
    names = list(model.model_fields)
    near = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.5)
    advice = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(names)}"
    return f"unknown key {where}; {advice}"
