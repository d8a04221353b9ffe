"""The configuration reference: every key of every section, from the pydantic models."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import annotated_types
import pydantic
from pydantic.fields import FieldInfo

from databus.common import access_config, config, sink_config
from databus.common.config_values import parse_bytes, parse_seconds

SECTIONS: dict[str, type[pydantic.BaseModel]] = {
    "[http]": access_config.HttpConfig,
    "[http.tls]": access_config.TlsConfig,
    "[relay]": config.RelayConfig,
    "[cluster]": config.ClusterConfig,
    "[cluster.zookeeper_access]": config.ZooKeeperAccess,
    "[cluster.s3]": config.S3Options,
    "[[database]]": config.DatabaseConfig,
    "[auth]": access_config.AuthConfig,
    "[[auth.tokens]]": access_config.TokenConfig,
    "[[auth.certificates]]": access_config.CertificateConfig,
    "[auth.oidc]": access_config.OidcConfig,
    "[[auth.oidc.roles]]": access_config.RoleConfig,
    "[[auth.tokens.grants]]": access_config.GrantConfig,
    "[bootstrap]": config.BootstrapConfig,
    "[bootstrap.credentials]": access_config.CredentialsConfig,
    "[bootstrap.s3]": config.S3Options,
    "[export]": config.ExportConfig,
    "[sink]": sink_config.SinkConfig,
    "[[sink.route]]": sink_config.RouteConfig,
    "[sink.sql]": sink_config.SqlSinkConfig,
    "[sink.kafka]": sink_config.KafkaSinkConfig,
    "[sink.redis]": sink_config.RedisSinkConfig,
    "[sink.nats]": sink_config.NatsSinkConfig,
    "[sink.search]": sink_config.SearchSinkConfig,
    "[sink.files]": sink_config.FilesSinkConfig,
    "[sink.webhook]": sink_config.WebhookSinkConfig,
}
_INTRODUCTION = """# Configuration

All processes read one TOML file. Each process uses the sections that are its own: a relay reads
`[relay]` and `[[database]]`, a bootstrap server reads `[bootstrap]`. Unknown keys are errors.
`databus check CONFIG` examines the file and the databases in it.

* A **size** is a number of bytes, or text with a unit: `B`, `KiB`, `MiB`, `GiB`, `TiB`, `KB`,
  `MB`, `GB`, `TB`.
* A **duration** is a number of seconds, or text with a unit: `ms`, `s`, `m` or `min`, `h`, `d`.
* A **glob** has `*`, `?` and `[...]`; `*` also matches dots.

This page is made from the models that check the file.
"""


class MissingDescription(Exception):
    """A key of a model has no description, no example, or an example that is not TOML."""


@dataclass(frozen=True)
class Key:
    """One key of a section, as the reference shows it."""

    section: str
    name: str
    description: str
    example: str
    unit: str
    default: str
    bounds: str

    @property
    def anchor(self) -> str:
        """The key's name in links to this page."""
        return f"{self.section.strip('[]').replace('.', '-')}-{self.name}"


def keys(section: str, model: type[pydantic.BaseModel]) -> Iterator[Key]:
    """The keys of one section.

    Raises:
        MissingDescription: a key is not described.
    """
    for name, field in model.model_fields.items():
        description, _, example = (field.description or "").partition("Example:")
        if not description.strip() or not example.strip():
            raise MissingDescription(
                f"{model.__name__}.{name} has no description or no example; write them under the "
                'key: """What it is.\\n    Example: key = "value" """'
            )
        if set(tomllib.loads(example)) != {name}:
            raise MissingDescription(f"{model.__name__}.{name}: the example is not of this key")
        yield Key(
            section,
            name,
            " ".join(description.split()),
            example.strip(),
            _unit(field),
            _default(field),
            _bounds(field),
        )


def page() -> str:
    """The page in Markdown."""
    parts = [_INTRODUCTION]
    for section, model in SECTIONS.items():
        parts.append(f"## `{section}`\n\n{_first_paragraph(model)}\n")
        parts.extend(_entry(key) for key in keys(section, model))
    return "\n".join(parts)


def _entry(key: Key) -> str:
    facts = [f"**Default:** {key.default}"]
    facts += [f"**Unit:** {key.unit}"] if key.unit else []
    facts += [f"**Values:** {key.bounds}"] if key.bounds else []
    return (
        f"### `{key.name}` {{ #{key.anchor} }}\n\n{key.description}\n\n{' · '.join(facts)}\n\n"
        f"```toml title='{key.section}'\n{key.example}\n```\n"
    )


def _first_paragraph(model: type[pydantic.BaseModel]) -> str:
    text = " ".join((model.__doc__ or "").split()).replace("``", "`")
    _, _, said = text.partition(": ")
    return said[:1].upper() + said[1:]


def _validators(annotation: Any) -> Iterator[Any]:
    yield from getattr(annotation, "__metadata__", ())
    for inner in get_args(annotation):
        yield from _validators(inner)


def _parser(field: FieldInfo) -> Any:
    found = [*field.metadata, *_validators(field.annotation)]
    functions = [getattr(one, "func", None) for one in found]
    return next((one for one in functions if one in (parse_bytes, parse_seconds)), None)


def _unit(field: FieldInfo) -> str:
    return {parse_bytes: "size", parse_seconds: "duration"}.get(_parser(field), "")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if _parser(field) is parse_bytes:
        return f'`"{_size(value)}"`'
    if _parser(field) is parse_seconds:
        return f'`"{_duration(value)}"`'
    if isinstance(value, pydantic.BaseModel):
        return "the defaults of its keys"
    if isinstance(value, pydantic.SecretStr):
        value = value.get_secret_value()
    if isinstance(value, tuple | dict) and not value:
        return "`[]`" if isinstance(value, tuple) else "`{}`"
    if isinstance(value, tuple):
        return "`[" + ", ".join(f'"{one}"' for one in value) + "]`"
    return f'`"{value}"`' if isinstance(value, str | Path) else f"`{value}`"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count}B"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s" if seconds >= 1 or not seconds else f"{seconds * 1000:g}ms"


def _bounds(field: FieldInfo) -> str:
    shows: dict[Any, Callable[[Any], str]] = {parse_bytes: _size, parse_seconds: _duration}
    show = shows.get(_parser(field), str)
    found = []
    for one in field.metadata:
        if isinstance(one, annotated_types.Ge):
            found.append(f"{show(one.ge)} or more")
        if isinstance(one, annotated_types.Gt):
            found.append(f"more than {show(one.gt)}")
        if isinstance(one, annotated_types.Le):
            found.append(f"{show(one.le)} at most")
    return ", ".join(found) + _choices(field.annotation)


def _choices(annotation: Any) -> str:
    names = [one for one in get_args(annotation) if isinstance(one, str)]
    return ", ".join(f"`{one}`" for one in names)
