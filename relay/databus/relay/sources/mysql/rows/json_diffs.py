"""Applies MySQL's partial updates of JSON to the value before the update.

With ``binlog_row_value_options = PARTIAL_JSON`` the after image of an update has, for a JSON
column, a list of differences instead of the value: replace, insert or remove at a path.  They are
applied to the text of the value before; numbers retain their digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from databus.common.errors import FormatError
from databus.relay.sources.mysql.protocol.binlog_events import packed_int
from databus.relay.sources.mysql.rows.binary_json import json_text, quoted

_REPLACE, _INSERT, _REMOVE = 0, 1, 2
_LEG = re.compile(r'\.(?:"((?:[^"\\]|\\.)*)"|([^."\[]+))|\[(\d+)\]', re.DOTALL)


class _Raw(str):
    """A number with its original digits."""

    __slots__ = ()


def applied(text: str, diffs: memoryview) -> str:
    """The JSON text ``text`` after the differences.

    Raises:
        FormatError: they do not fit the text.
    """
    try:
        value = json.loads(text, parse_int=_Raw, parse_float=_Raw)
        for diff in _read(diffs):
            value = _apply(value, diff)
        return "".join(_written(value))
    except (ValueError, LookupError, TypeError) as error:
        raise FormatError(f"a partial update does not fit its JSON value: {error!r}") from None


@dataclass(frozen=True, slots=True)
class _Diff:
    operation: int
    legs: tuple[str | int, ...]
    value: Any


def _read(diffs: memoryview) -> Iterator[_Diff]:
    at = 0
    while at < len(diffs):
        operation = diffs[at]
        length, at = packed_int(diffs, at + 1)
        path = bytes(diffs[at : at + length]).decode()
        at += length
        value = None
        if operation != _REMOVE:
            length, at = packed_int(diffs, at)
            text = json_text(bytes(diffs[at : at + length]))
            value = json.loads(text, parse_int=_Raw, parse_float=_Raw)
            at += length
        yield _Diff(operation, _legs(path), value)


def _legs(path: str) -> tuple[str | int, ...]:
    at = int(path.startswith("$"))
    legs: list[str | int] = []
    while at < len(path):
        found = _LEG.match(path, at)
        if found is None:
            raise ValueError(f"the path {path!r}")
        escaped, name, index = found.groups()
        if index is not None:
            legs.append(int(index))
        else:
            legs.append(name if name is not None else json.loads(f'"{escaped}"'))
        at = found.end()
    return tuple(legs)


def _apply(value: Any, diff: _Diff) -> Any:
    if not diff.legs:
        if diff.operation != _REPLACE:
            raise ValueError(f"operation {diff.operation} on the whole value")
        return diff.value
    parent = value
    for leg in diff.legs[:-1]:
        parent = parent[leg]
    last = diff.legs[-1]
    if diff.operation == _INSERT and isinstance(parent, list) and isinstance(last, int):
        parent.insert(last, diff.value)
    elif diff.operation == _REMOVE:
        del parent[last]
    elif diff.operation in (_REPLACE, _INSERT):
        if (diff.operation == _REPLACE) != _has(parent, last):
            raise ValueError(f"operation {diff.operation} at {diff.legs}")
        parent[last] = diff.value
    else:
        raise ValueError(f"operation {diff.operation} is unknown")
    return value


def _has(parent: Any, leg: str | int) -> bool:
    if isinstance(parent, dict):
        return leg in parent
    return isinstance(leg, int) and leg < len(parent)


def _written(value: Any) -> Iterator[str]:
    """The text in the server's form: members ordered by the length of their name, then by it."""
    if isinstance(value, dict):
        yield "{"
        names = sorted(value, key=lambda name: (len(name.encode()), name.encode()))
        for number, name in enumerate(names):
            yield f"{', ' if number else ''}{quoted(name)}: "
            yield from _written(value[name])
        yield "}"
    elif isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from _written(item)
        yield "]"
    elif isinstance(value, _Raw):
        yield str(value)
    elif isinstance(value, str):
        yield quoted(value)
    else:
        yield {None: "null", True: "true", False: "false"}[value]
