"""JSON documents and PostgreSQL's arrays as Python objects, for ``Event.value``.

Frames have both as text.  A text that cannot be parsed stays text.
"""

from __future__ import annotations

import decimal
import json
import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from databus.common.schema.source_schema import Column, Kind, SourceSchema

Convert = Callable[[str], Any]

_ARRAY = re.compile(r"(?P<element>[^\[\]]+)\[\]")
_TOKEN = re.compile(r'\s*(?:([{},])|"((?:[^"\\]|\\.)*)"|((?:[^{},"\\]|\\.)+))', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_DEEPEST = 6
"""Dimensions that PostgreSQL gives an array at most."""


def parse_document(text: str) -> Any:
    """A JSON document: numbers with a point or an exponent as ``Decimal``, all others as int.

    If a key occurs twice, the last value counts, as in PostgreSQL's jsonb.
    """
    try:
        return json.loads(text, parse_float=decimal.Decimal)
    except (ValueError, RecursionError):
        return text


def parse_array(text: str, element: Convert) -> Any:
    """PostgreSQL's ``{1,NULL,{2,3}}`` as nested lists.

    An array with bounds of its own (``[2:3]={1,2}``) stays text: a list would lose them.
    """
    if not text.startswith("{"):
        return text
    try:
        tokens = list(_tokens(text))
        value, after = _list(tokens, 1, element, 1)
        return value if after == len(tokens) else text
    except (ValueError, IndexError, ArithmeticError):
        return text


def _tokens(text: str) -> Iterator[tuple[str, str | None]]:
    """(``{``, ``}``, ``,`` or ``value``, the value or None for NULL) one after another."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(text)
        at = found.end()
        mark, quoted, plain = found.groups()
        if mark is not None:
            yield mark, None
        elif quoted is not None:
            yield "value", _ESCAPE.sub(r"\1", quoted)
        else:
            plain = plain.rstrip()
            yield "value", None if plain.upper() == "NULL" else _ESCAPE.sub(r"\1", plain)


def _list(
    tokens: list[tuple[str, str | None]], at: int, element: Convert, depth: int
) -> tuple[list[Any], int]:
    """The list whose opening brace lies before ``at``, and where it ends."""
    found: list[Any] = []
    if depth > _DEEPEST:
        raise ValueError("too deep")
    if tokens[at][0] == "}":
        return found, at + 1
    while True:
        mark, text = tokens[at]
        if mark == "{":
            value, at = _list(tokens, at + 1, element, depth + 1)
            found.append(value)
        elif mark == "value":
            found.append(None if text is None else element(text))
            at += 1
        else:
            raise ValueError(mark)
        mark, at = tokens[at][0], at + 1
        if mark == "}":
            return found, at
        if mark != ",":
            raise ValueError(mark)


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
