"""Filters of a query as filters of the servers.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from databus.common.errors import FormatError
from databus.common.frame.frame_format import key_hash
from databus.common.schema.source_schema import Kind, SourceSchema

MAX_KEYS = 256
"""Most keys that become a request's filter; for more, Spark filters alone."""

_HASH_RANGES = 1 << 29
"""Ranges of hashes: so many that few other keys lie in that of a key."""
_KEY_KINDS = frozenset({Kind.INT, Kind.UINT64, Kind.STRING, Kind.BYTES, Kind.DATE})
_KEY_KINDS_OF_RANGE = frozenset({Kind.INT})


def key_partition(table: SourceSchema, filters: Sequence[Filter]) -> str | None:
    """A partition filter for the servers that includes every key the filters allow, or None."""
    allowed: dict[str, list[Any]] = {}
    bounds: dict[str, list[int | None]] = {}
    for one in filters:
        name = ".".join(getattr(one, "attribute", ()))
        value = getattr(one, "value", None)
        if name not in table.key or value is None:
            continue
        if isinstance(one, EqualTo | In):
            values = list(value) if isinstance(one, In) else [value]
            allowed[name] = [v for v in values if v is not None]
        elif isinstance(value, int):
            low_high = bounds.setdefault(name, [None, None])
            match one:
                case GreaterThan():
                    low_high[0] = value + 1
                case GreaterThanOrEqual():
                    low_high[0] = value
                case LessThan():
                    low_high[1] = value - 1
                case LessThanOrEqual():
                    low_high[1] = value
    return _of_keys(table, allowed) or _of_range(table, bounds)


def _of_keys(table: SourceSchema, allowed: Mapping[str, list[Any]]) -> str | None:
    if set(allowed) != set(table.key):
        return None
    if any(column.kind not in _KEY_KINDS for column in table.key_columns):
        return None
    keys: list[tuple[Any, ...]] = [()]
    for name in table.key:
        keys = [(*key, value) for key in keys for value in allowed[name]]
        if len(keys) > MAX_KEYS:
            return None
    try:
        hashes = {key_hash(table.encode_key(_as_key(table, key))) for key in keys}
    except FormatError:
        return None
    buckets = sorted({one * _HASH_RANGES >> 64 for one in hashes})
    return f"hash:{_HASH_RANGES}:" + ",".join(map(str, buckets))


def _as_key(table: SourceSchema, key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        int(value) if column.kind is Kind.UINT64 else value
        for column, value in zip(table.key_columns, key, strict=True)
    )


def _of_range(table: SourceSchema, bounds: Mapping[str, list[int | None]]) -> str | None:
    first = table.key_columns[0]
    low, high = bounds.get(first.name, [None, None])
    if first.kind not in _KEY_KINDS_OF_RANGE or first.nullable or low is None or high is None:
        return None
    if abs(low) >= 10**17 or abs(high) >= 10**17 or high < low:
        return None
    return f"range:1:{low}-{high}"
