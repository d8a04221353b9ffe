"""JSON documents and PostgreSQL's arrays as Python objects, for ``Event.value``.

Frames have both as text.  A text that cannot be parsed stays text.
"""

from __future__ import annotations

import decimal
import json
import re
import uuid
from collections.abc import Callable
from typing import Any

from databus.common.schema.postgres_arrays import parse_array
from databus.common.schema.source_schema import Column, Kind, SourceSchema

Convert = Callable[[str], Any]

_ARRAY = re.compile(r"(?P<element>[^\[\]]+)\[\]")


def parse_document(text: str) -> Any:
    """A JSON document: numbers with a point or an exponent as ``Decimal``, all others as int.

    If a key occurs twice, the last value counts, as in PostgreSQL's jsonb.
    """
    try:
        return json.loads(text, parse_float=decimal.Decimal)
    except (ValueError, RecursionError):
        return text


def _boolean(text: str) -> bool:
    return {"t": True, "f": False}[text]


_ELEMENTS: dict[str, Convert] = {
    "smallint": int,
    "integer": int,
    "bigint": int,
    "oid": int,
    "real": float,
    "double precision": float,
    "numeric": decimal.Decimal,
    "boolean": _boolean,
    "json": parse_document,
    "jsonb": parse_document,
    "uuid": uuid.UUID,
}


def _of_column(column: Column) -> Convert | None:
    if column.kind is Kind.JSON:
        return parse_document
    array = _ARRAY.fullmatch(column.type_name) if column.kind is Kind.STRING else None
    if array is None or array["element"] == "box":
        return None
    element = _ELEMENTS.get(array["element"].partition("(")[0], str)
    return lambda text: parse_array(text, element)


def converters(schema: SourceSchema) -> tuple[tuple[str, Convert], ...]:
    """The columns of a schema whose text is parsed into an object, each with its parser."""
    found = ((column.name, _of_column(column)) for column in schema.columns)
    return tuple((name, convert) for name, convert in found if convert is not None)
