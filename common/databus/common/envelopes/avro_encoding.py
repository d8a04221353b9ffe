"""Typed values as Avro in Confluent's wire format: a zero byte, the schema's id, the record.

The schemas are those that Confluent's Avro converter makes of Connect's types.  The registry that
gives the ids is a function, so that nothing here does I/O.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

import fastavro

from databus.common.envelopes.connect_types import ConnectType
from databus.common.errors import FormatError

Register = Callable[[str, dict[str, Any]], int]
"""The id of a schema under a subject; it may block, and raise."""
_PRIMITIVES = {
    "boolean": "boolean",
    "int16": "int",
    "int32": "int",
    "int64": "long",
    "float32": "float",
    "float64": "double",
    "string": "string",
    "bytes": "bytes",
}
DECIMAL = "org.apache.kafka.connect.data.Decimal"
_WIDEST = 64
"""The precision of a decimal that does not state one."""


class AvroEncoding:
    """Encodes typed values as Avro.

    Owner: one task; it retains the schema of each type.
    Raises: what the registry raises; FormatError for a value that does not fit its type.
    """

    content_type = "application/vnd.confluent.avro"

    def __init__(self, register: Register) -> None:
        self._register = register
        self._known: dict[tuple[str, int], _Writer] = {}

    def encode(self, subject: str, kind: ConnectType, value: Any) -> bytes:
        """The bytes of a value; the schema is registered under the subject before the first."""
        writer = self._known.get((subject, id(kind)))
        if writer is None:
            schema = avro_schema(kind)
            writer = _Writer(kind, schema, self._register(subject, schema))
            self._known[subject, id(kind)] = writer
        return writer.write(value)


class _Writer:
    def __init__(self, kind: ConnectType, schema: Any, schema_id: int) -> None:
        self._kind = kind  # Held, so that its id stays its own.
        self._prefix = b"\0" + struct.pack(">I", schema_id)
        # The values have their plain form already.
        self._schema = fastavro.parse_schema(_without_logical_types(schema))
        self._renamed = _renaming(kind)

    def write(self, value: Any) -> bytes:
        out = io.BytesIO()
        out.write(self._prefix)
        try:
            fastavro.schemaless_writer(
                out, self._schema, value if self._renamed is None else self._renamed(value)
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FormatError(f"{self._kind.name}: a value does not fit: {error!r}") from error
        return out.getvalue()


def avro_schema(kind: ConnectType) -> Any:
    """The Avro schema of a type; a type that occurs twice is named the second time."""
    return _schema(kind, set())


def _schema(kind: ConnectType, named: set[str]) -> Any:
    plain = _plain(kind, named)
    if not kind.optional:
        return plain
    return ["null", plain] if kind.default is None else [plain, "null"]


def _plain(kind: ConnectType, named: set[str]) -> Any:
    if kind.type == "struct":
        return _record(kind, named)
    found: dict[str, Any]
    if kind.items is not None:
        found = {"type": "array", "items": _schema(kind.items, named)}
    elif kind.type in _PRIMITIVES:
        found = {"type": _PRIMITIVES[kind.type]}
    else:
        raise FormatError(f"a value of the type {kind.type} has no Avro form")
    if kind.name == DECIMAL:
        parameters = dict(kind.parameters)
        found["scale"] = int(parameters["scale"])
        found["precision"] = int(parameters.get("connect.decimal.precision", _WIDEST))
        found["logicalType"] = "decimal"
    if kind.type == "int16":
        found["connect.type"] = "int16"
    found |= _of_connect(kind)
    return found["type"] if len(found) == 1 else found


def _record(kind: ConnectType, named: set[str]) -> Any:
    full = ".".join(legal_name(part) for part in kind.name.split("."))
    if full in named:
        return full
    named.add(full)
    namespace, _, name = full.rpartition(".")
    fields = []
    for field, (original, one) in zip(field_names(kind), kind.fields, strict=True):
        made: dict[str, Any] = {"name": field, "type": _schema(one, named)}
        if one.default is not None:
            made["default"] = one.default
        elif one.optional:
            made["default"] = None
        if field != original:
            made["databus.name"] = original
        fields.append(made)
    found: dict[str, Any] = {"type": "record", "name": name, "fields": fields}
    if namespace:
        found["namespace"] = namespace
    return found | _of_connect(kind)


def _of_connect(kind: ConnectType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if kind.doc:
        found["connect.doc"] = kind.doc
    if kind.version is not None:
        found["connect.version"] = kind.version
    if kind.parameters:
        found["connect.parameters"] = dict(kind.parameters)
    if kind.default is not None:
        found["connect.default"] = kind.default
    if kind.name:
        found["connect.name"] = kind.name
    return found


def field_names(kind: ConnectType) -> list[str]:
    """Names that Avro allows, each once, equal to the given ones where those are allowed."""
    return _distinct(legal_name(name) for name, _ in kind.fields)


def _distinct(names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        one, number = name, 2
        while one in found:
            one, number = f"{name}_{number}", number + 1
        found.append(one)
    return found


def legal_name(name: str) -> str:
    """A name that Avro allows, equal to the given one where that is allowed."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if re.match(r"[A-Za-z_]", plain) else f"_{plain}"


def _renaming(kind: ConnectType) -> Callable[[Any], Any] | None:
    """What gives a value the field names of its schema; None if it has them already."""
    if kind.items is not None:
        items = _renaming(kind.items)
        if items is None:
            return None
        return lambda values: [None if one is None else items(one) for one in values]
    if kind.type != "struct":
        return None
    renamed = field_names(kind)
    inner = [
        (name, field, _renaming(one))
        for field, (name, one) in zip(renamed, kind.fields, strict=True)
    ]
    if all(name == field and convert is None for name, field, convert in inner):
        return None

    def rename(value: dict[str, Any]) -> dict[str, Any]:
        return {
            field: value[name] if convert is None or value[name] is None else convert(value[name])
            for name, field, convert in inner
        }

    return rename


def _without_logical_types(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_logical_types(one) for one in schema]
    if isinstance(schema, dict):
        return {
            name: _without_logical_types(one)
            for name, one in schema.items()
            if name != "logicalType"
        }
    return schema
