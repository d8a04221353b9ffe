"""MySQL's packed decimals: groups of nine digits in four bytes."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

Decoder = Callable[[memoryview, int], tuple[Any, int]]
"""From (bytes, offset) to (value, next offset)."""

DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


def packed_decimal(precision: int, scale: int) -> Decoder:
    """Groups of nine digits in four bytes, big-endian, with the first bit inverted."""
    whole, whole_rest = divmod(precision - scale, 9)
    part, part_rest = divmod(scale, 9)
    groups = (
        ([(DIGIT_BYTES[whole_rest], whole_rest)] if whole_rest else [])
        + [(4, 9)] * (whole + part)
        + ([(DIGIT_BYTES[part_rest], part_rest)] if part_rest else [])
    )
    width = sum(size for size, _ in groups)

    def decode(data: memoryview, at: int) -> tuple[Any, int]:
        raw = bytearray(data[at : at + width])
        negative = not raw[0] & 0x80
        raw[0] ^= 0x80
        value = offset = 0
        for size, digits in groups:
            group = int.from_bytes(raw[offset : offset + size], "big")
            if negative:
                group ^= (1 << 8 * size) - 1
            value = value * 10**digits + group
            offset += size
        number = decimal.Decimal(-value if negative else value)
        return number.scaleb(-scale, _WIDE), at + width

    return decode


_WIDE = decimal.Context(prec=100)
