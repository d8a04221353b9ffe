"""JSON in its shortest form, for the wire and for lines: by orjson where it is installed.

orjson is several times as fast as Python's own encoder.  The extras ``relay``, ``bootstrap`` and
those of some sinks have it.  Both give the same JSON, but may spell the exponents of floats
differently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

_PLAIN = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_fast: Callable[..., bytes] | None

try:
    import orjson

    _fast = orjson.dumps
    _LINES = orjson.OPT_INDENT_2
except ImportError:
    _fast = None


def json_bytes(value: Any) -> bytes:
    """The value in UTF-8."""
    if _fast is not None:
        try:
            return _fast(value)
        except TypeError:  # A number of more than 64 bits, or half of a surrogate pair.
            pass
    return _PLAIN.encode(value).encode()


def json_text(value: Any) -> str:
    """The value on one line, without the line's end."""
    if _fast is not None:
        try:
            return _fast(value).decode()
        except TypeError:
            pass
    return _PLAIN.encode(value)


def json_cells(values: Sequence[Any]) -> list[bytes]:
    """``json_bytes`` of each value: a number, a text, a boolean or None."""
    if _fast is not None and values:
        try:
            # One value a line, as JSON has no line ends in a text.
            return _fast(values, option=_LINES)[4:-2].split(b",\n  ")
        except TypeError:
            pass
    return [json_bytes(one) for one in values]
