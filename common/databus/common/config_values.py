"""The values of the configuration: sizes, durations, addresses, URLs and secrets.

Each parser takes what TOML gives and returns a checked value.  A URL and a secret never show
their password when they are printed.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

import pydantic
from pydantic import BeforeValidator, ConfigDict

from databus.common.errors import ConfigError
from databus.common.private import HiddenUrl


class Section(pydantic.BaseModel):
    """A section of the file: frozen, without unknown keys, described by its docstrings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )


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


class SourceUrl(HiddenUrl):
    """A database URL that does not show its password when printed or logged."""

    __slots__ = ()


SCHEMES = (
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
RELAY_SCHEMES = ("relay+http", "relay+https")


def _source_url(value: Any) -> SourceUrl:
    url = SourceUrl(value)
    scheme = url.reveal.partition("://")[0]
    if scheme not in SCHEMES or "://" not in url.reveal:
        raise ValueError(f"the URL's scheme is {scheme!r}; supported are {', '.join(SCHEMES)}")
    if scheme not in _LOCAL_SCHEMES:
        require_plain_authority(url.reveal)
    return url


def require_plain_authority(url: str) -> None:
    """Refuse a URL whose password ends its authority: it would be split at the wrong character."""
    rest = url.partition("://")[2]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if "@" in rest and "@" not in authority:
        raise ValueError(
            "the URL has /, ? or # in front of its @; if they are in the user or the password, "
            "write %2F, %3F and %23 (and %40 for @, %3A for :, %25 for %)"
        )
    if re.search(r"%(?![0-9A-Fa-f]{2})", authority.rpartition("@")[0]):
        raise ValueError("the URL's user or password has a % without two hex digits; write %25")


def _relay_url(value: Any) -> HiddenUrl:
    url = HiddenUrl(value)
    require_plain_authority(url.reveal)
    return url


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


def _key_columns(value: Any) -> tuple[str, ...]:
    """The columns of a configured key; "*" or a single name is a list of one."""
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
Url = Annotated[SourceUrl, BeforeValidator(_source_url)]
RelayUrl = Annotated[HiddenUrl, BeforeValidator(_relay_url)]
HiddenText = Annotated[Secret, BeforeValidator(_secret)]
KeyColumns = Annotated[tuple[str, ...], BeforeValidator(_key_columns)]
