"""Rows as keys and fields of Redis.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from databus.client.sinks.sink_batch import SinkRow
from databus.common.errors import SinkRefused
from databus.common.schema.column_values import to_json_value

POSITION = ("_scn", "_seq")
"""The fields that hold the position of a hash's last change."""
_GLOB = re.compile(r"([\\*?\[\]])")

Text = str | bytes


def text_of(value: Any) -> Text:
    """A value as a field: that of the relay's NDJSON without quotes; bytes as they are."""
    kind = type(value)
    if kind is str or kind is bytes:
        found: Text = value
        return found
    if kind is int:  # NDJSON has large ones as text; here all are.
        return str(value)
    if kind is bool:
        return "true" if value else "false"
    return str(to_json_value(value))


def hash_key(target: str, key: Iterable[Any]) -> Text:
    r"""``TARGET:VALUE:VALUE``, another text for each key.

    Of a key of several columns ``:`` becomes ``\:``; ``\`` becomes ``\\``; NULL is ``\N``.
    """
    values = [None if one is None else text_of(one) for one in key]
    if len(values) == 1 and isinstance(values[0], str):
        return f"{target}:{_escaped(values[0], is_alone=True)}"
    parts = [b"\\N" if one is None else _escaped_bytes(one, len(values) == 1) for one in values]
    return b":".join([target.encode(), *parts])


def _escaped(text: str, *, is_alone: bool) -> str:
    text = text.replace("\\", "\\\\") if "\\" in text else text
    return text if is_alone else text.replace(":", "\\:")


def _escaped_bytes(value: Text, is_alone: bool) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    data = data.replace(b"\\", b"\\\\")
    return data if is_alone else data.replace(b":", b"\\:")


def keys_pattern(target: str) -> str:
    """The glob of the keys of a target."""
    return _GLOB.sub(r"\\\1", target) + ":*"


def hash_arguments(row: SinkRow) -> list[Text]:
    """What ``ROWS`` takes for a row.

    Raises:
        SinkRefused: a column has the name of a position's field.
    """
    scn, seq = row.position
    value = row.value
    if row.op == "d" or value is None:
        return [str(scn), str(seq), "-1", "0"]
    fields: list[Text] = []
    for name, one in value.items():
        if one is not None:
            fields += (name, one if type(one) is str else text_of(one))
    absent = [name for name in row.event.absent if name not in value] if row.event.absent else []
    if POSITION[0] in value or POSITION[1] in value:
        raise SinkRefused(
            f"{row.source} has a column {' or '.join(POSITION)}, which hashes have for the "
            "position of a row: leave it out with `columns`"
        )
    return [str(scn), str(seq), str(len(fields) // 2), str(len(absent)), *fields, *absent]
