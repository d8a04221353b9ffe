"""PostgreSQL's text form of arrays as nested lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_TOKEN = re.compile(r'\s*(?:([{},])|"((?:[^"\\]|\\.)*)"|((?:[^{},"\\]|\\.)+))', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_DEEPEST = 6
"""Dimensions that PostgreSQL gives an array at most."""


def parse_array(text: str, element: Callable[[str], Any]) -> Any:
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
    tokens: list[tuple[str, str | None]], at: int, element: Callable[[str], Any], depth: int
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
