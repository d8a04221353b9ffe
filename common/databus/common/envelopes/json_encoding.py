"""Typed values as JSON, in the form of Connect's JsonConverter: bytes are base64.

``with_schemas`` puts the type beside the value: ``{"schema":...,"payload":...}``.
"""

from __future__ import annotations

import binascii
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from databus.common.envelopes.connect_types import ConnectType
from databus.common.envelopes.value_columns import ValueColumn, each_present
from databus.common.json_text import json_bytes, json_cells

Convert = Callable[[Any], Any]


class JsonEncoding:
    """Encodes typed values as JSON.

    Owner: one task; it retains what it has derived from each type.
    """

    content_type = "application/json"

    def __init__(self, *, with_schemas: bool = False) -> None:
        self._with_schemas = with_schemas
        self._known: dict[int, tuple[ConnectType, Convert | None, bytes]] = {}

    def text(self, kind: ConnectType, value: Any) -> str:
        """The JSON of a value."""
        return self.encode("", kind, value).decode()

    def encode(self, subject: str, kind: ConnectType, value: Any) -> bytes:
        """The JSON of a value, in UTF-8; JSON needs no subject."""
        known = self._known.get(id(kind))
        if known is None:
            schema = json_bytes(kind.to_json()) if self._with_schemas else b""
            known = self._known[id(kind)] = (kind, jsonable(kind), schema)
        _, convert, schema = known
        data = json_bytes(value if convert is None or value is None else convert(value))
        return b'{"schema":' + schema + b',"payload":' + data + b"}" if schema else data

    def encode_columns(self, kind: ConnectType, value: Any, count: int) -> list[bytes]:
        """The JSON of ``count`` values; each column in ``value`` has a part of every one."""
        pieces = [*_pieces(kind, value)]
        if self._with_schemas:
            schema = json_bytes(kind.to_json())
            pieces = [b'{"schema":' + schema + b',"payload":', *pieces, b"}"]
        columns: list[Any] = []
        for is_shared, run in itertools.groupby(pieces, lambda one: isinstance(one, bytes)):
            if is_shared:
                columns.append(itertools.repeat(b"".join(run), count))  # type: ignore[arg-type]  # bytes alone
            else:
                columns += run
        return list(map(b"".join, zip(*columns, strict=False)))


def _pieces(kind: ConnectType, value: Any) -> Iterator[bytes | list[bytes]]:
    """The JSON of values in parts: one that all share, or one for each."""
    if isinstance(value, ValueColumn):
        convert = jsonable(kind)
        values = (value if convert is None else each_present(convert, value)).values
        is_flat = kind.type not in ("struct", "array")
        yield json_cells(values) if is_flat else [json_bytes(one) for one in values]
    elif isinstance(value, dict):
        kinds = dict(kind.fields)
        mark = b"{"
        for name, one in value.items():
            yield mark + json_bytes(name) + b":"
            yield from _pieces(kinds.get(name, kind), one)
            mark = b","
        yield b"}" if value else b"{}"
    else:
        convert = jsonable(kind)
        yield json_bytes(value if convert is None or value is None else convert(value))


def jsonable(kind: ConnectType) -> Convert | None:
    """What makes a value of the type, other than None, one of JSON; None if it is one already."""
    if kind.type == "bytes":
        return lambda value: binascii.b2a_base64(value, newline=False).decode()
    if kind.type in ("float32", "float64"):
        return _float
    if kind.items is not None:
        return _array(jsonable(kind.items))
    if kind.type != "struct":
        return None
    found = [(name, jsonable(one)) for name, one in kind.fields]
    return _struct([(name, convert) for name, convert in found if convert is not None])


def _array(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda value: [None if one is None else convert(one) for one in value]


def _struct(converts: list[tuple[str, Convert]]) -> Convert | None:
    if not converts:
        return None

    def convert_all(value: dict[str, Any]) -> dict[str, Any]:
        found = dict(value)
        for name, convert in converts:
            if (one := found.get(name)) is not None:
                found[name] = convert(one)
        return found

    return convert_all


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
