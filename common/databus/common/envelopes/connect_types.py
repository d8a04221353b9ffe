"""The types of an envelope's fields, as Kafka Connect names them.

An envelope gives a value together with its ``ConnectType``; the encodings (JSON, Avro) write the
value from the type.  A value is None, bool, int, float, str, bytes, a list (array) or a dict
(struct).  Nothing here depends on a column or a database.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, eq=False, slots=True)
class ConnectType:
    """One type: ``type`` is Connect's literal, ``name`` the meaning of the value.

    Compared by identity: each is made once for a version of a table.
    """

    type: str
    name: str = ""
    version: int | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, ConnectType], ...] = ()
    items: ConnectType | None = None
    optional: bool = False
    default: Any = None
    doc: str = ""

    def as_optional(self, optional: bool = True) -> ConnectType:
        """The same type, with or without null."""
        return self if self.optional == optional else replace(self, optional=optional)

    def to_json(self, field: str | None = None) -> dict[str, Any]:
        """The schema part of Connect's JSON."""
        found: dict[str, Any] = {"type": _JSON_NAMES.get(self.type, self.type)}
        if self.type == "struct":
            found["fields"] = [kind.to_json(name) for name, kind in self.fields]
        if self.items is not None:
            found["items"] = self.items.to_json()
        found["optional"] = self.optional
        if self.name:
            found["name"] = self.name
        if self.version is not None:
            found["version"] = self.version
        if self.doc:
            found["doc"] = self.doc
        if self.parameters:
            found["parameters"] = dict(self.parameters)
        if self.default is not None:
            found["default"] = self.default
        if field is not None:
            found["field"] = field
        return found

    def zero(self) -> Any:
        """What a row without the value has: null, or the type's zero where null is not allowed."""
        if self.optional:
            return None
        if self.type == "struct":
            return {name: kind.zero() for name, kind in self.fields}
        return {"string": "", "bytes": b"", "boolean": False, "array": []}.get(self.type, 0)


_JSON_NAMES = {"float32": "float", "float64": "double"}

BOOLEAN = ConnectType("boolean")
INT16 = ConnectType("int16")
INT32 = ConnectType("int32")
INT64 = ConnectType("int64")
FLOAT32 = ConnectType("float32")
FLOAT64 = ConnectType("float64")
STRING = ConnectType("string")
BYTES = ConnectType("bytes")
OPTIONAL_STRING = STRING.as_optional()
OPTIONAL_INT64 = INT64.as_optional()


def named(kind: ConnectType, name: str, **parameters: str) -> ConnectType:
    """A type with a meaning, of version 1."""
    return replace(kind, name=name, version=1, parameters=tuple(parameters.items()))


def array(items: ConnectType) -> ConnectType:
    """An array whose elements may be null."""
    return ConnectType("array", items=items.as_optional())


def struct(
    name: str, *fields: tuple[str, ConnectType], version: int | None = None, doc: str = ""
) -> ConnectType:
    """A record."""
    return ConnectType("struct", name=name, version=version, fields=fields, doc=doc)
