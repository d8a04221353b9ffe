"""Values in PostgreSQL's binary form: written as their Avro, or refused."""

from __future__ import annotations

import datetime as dt
import math
import struct
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.postgres.kernels import binary_value_kernels as forms
from databus.relay.sources.postgres.kernels.binary_value_kernels import put_binary

REFUSED = object()
UTC = dt.UTC
EDGES: list[tuple[int, Kind, str, list[tuple[Any, Any]]]] = [
    (forms.BOOL, Kind.BOOL, "?", [(True, True), (False, False)]),
    (forms.INTEGER, Kind.INT, "h", [(-32768, -32768), (32767, 32767)]),
    (forms.INTEGER, Kind.INT, "i", [(-(2**31), -(2**31)), (2**31 - 1, 2**31 - 1)]),
    (forms.INTEGER, Kind.INT, "q", [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1)]),
    (forms.UNSIGNED, Kind.INT, "I", [(2**32 - 1, 2**32 - 1)]),
    (forms.REAL, Kind.FLOAT, "f", [(0.1, 0.1), (-0.0, -0.0), (0.5, 0.5), (37668624.0, 37668624.0)]),
    (forms.REAL, Kind.FLOAT, "f", [(1e-45, REFUSED), (math.nan, REFUSED), (-math.inf, REFUSED)]),
    (forms.DOUBLE, Kind.FLOAT, "d", [(0.1, 0.1), (-0.0, -0.0), (5e-324, 5e-324)]),
    (forms.DATE, Kind.DATE, "i", [(0, dt.date(2000, 1, 1)), (-730_119, dt.date(1, 1, 1))]),
    (forms.DATE, Kind.DATE, "i", [(2_921_939, dt.date(9999, 12, 31)), (-730_120, REFUSED)]),
    (forms.DATE, Kind.DATE, "i", [(2_921_940, REFUSED), (2**31 - 1, REFUSED)]),
    (forms.TIME, Kind.TIME, "q", [(0, dt.time()), (86_399_999_999, dt.time.max)]),
    (forms.TIME, Kind.TIME, "q", [(86_400_000_000, REFUSED), (-1, REFUSED)]),
    (forms.TIMESTAMP, Kind.TIMESTAMP, "q", [(0, dt.datetime(2000, 1, 1))]),
    (forms.TIMESTAMP, Kind.TIMESTAMP, "q", [(252455615999999999, dt.datetime.max)]),
    (forms.TIMESTAMP, Kind.TIMESTAMP, "q", [(252455616000000000, REFUSED), (2**63 - 1, REFUSED)]),
    (forms.TIMESTAMP, Kind.TIMESTAMPTZ, "q", [(1, dt.datetime(2000, 1, 1, 0, 0, 0, 1, UTC))]),
    (forms.UUID, Kind.UUID, "16s", [(bytes(range(16)), uuid.UUID(bytes=bytes(range(16))))]),
    (forms.JSONB, Kind.JSON, "4s", [(b"\x01{} ", "{} "), (b"\x02{} ", REFUSED)]),
    (forms.UTF8, Kind.STRING, "3s", [(b"abc", "abc"), (b"\xff\xfe\xfd", REFUSED)]),
    (forms.NUMERIC, Kind.DECIMAL, "hhHHhh", [((2, 0, 0x4000, 2, 12, 3400), Decimal("-12.34"))]),
    (forms.NUMERIC, Kind.DECIMAL, "hhHHh", [((1, -1, 0, 2, 2500), Decimal("0.25"))]),
    (forms.NUMERIC, Kind.DECIMAL, "hhHHh", [((1, -1, 0, 3, 2500), REFUSED)]),
    (forms.NUMERIC, Kind.DECIMAL, "hhHH", [((0, 0, 0, 2), Decimal("0.00"))]),
    (forms.NUMERIC, Kind.DECIMAL, "hhHH", [((0, 0, 0xC000, 0), REFUSED)]),
]
SIZED = (forms.BOOL, forms.REAL, forms.DOUBLE, forms.DATE, forms.TIME, forms.TIMESTAMP, forms.UUID)


@pytest.mark.parametrize(("form", "kind", "layout", "values"), EDGES)
def test_edges_are_written_exactly_or_refused_and_no_bytes_are_misread(
    form: int, kind: Kind, layout: str, values: list[tuple[Any, Any]]
) -> None:
    column = Column("v", kind, nullable=False, type_name="t", precision=12, scale=2)
    schema = SourceSchema("public.t", (column,), ("v",))
    for value, expected in values:
        data = struct.pack(f"!{layout}", *(value if isinstance(value, tuple) else (value,)))
        assert written(data, form) == (
            None if expected is REFUSED else schema.encode_row({"v": expected})
        ), value
        if form in (*SIZED, forms.NUMERIC):
            for damaged in (data[:-1], data + b"\0"):
                assert written(damaged, form) is None, damaged


def written(data: bytes, form: int) -> bytes | None:
    buf, out = np.frombuffer(data + bytes(8), dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    end = put_binary(buf, 0, len(data), form, 2, out, 0)
    return None if end < 0 else out[:end].tobytes()
