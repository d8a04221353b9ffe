"""Converts MySQL's binary JSON to the server's own text form.

The form is documented in MySQL's ``json_binary.h``: a type byte, then a tree whose containers
hold offsets from their own beginning.
"""

from __future__ import annotations

import decimal
import struct
from base64 import b64encode

from databus.common.errors import FormatError
from databus.relay.sources.mysql.rows.packed_decimals import packed_decimal

_LITERALS = {0: "null", 1: "true", 2: "false"}
_OBJECTS = {0: 2, 1: 4}
_ARRAYS = {2: 2, 3: 4}
_LITERAL, _DOUBLE, _STRING, _OPAQUE = 4, 11, 12, 15
_NUMBERS = {
    5: struct.Struct("<h"),
    6: struct.Struct("<H"),
    7: struct.Struct("<i"),
    8: struct.Struct("<I"),
    9: struct.Struct("<q"),
    10: struct.Struct("<Q"),
}
_INLINE = {2: frozenset({_LITERAL, 5, 6}), 4: frozenset({_LITERAL, 5, 6, 7, 8})}
_ESCAPES = {
    **{code: f"\\u{code:04x}" for code in range(32)},
    **str.maketrans(
        {"\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    ),
}
_DECIMAL, _DATE, _TIME, _TEMPORAL = 246, 10, 11, frozenset({7, 10, 11, 12})
_LARGEST_PLAIN_EXPONENT = 15


def json_text(data: bytes) -> str:
    """The text of a JSON value.

    Raises:
        FormatError: the bytes are no JSON value.
    """
    try:
        # A JSON null of an UPDATE IGNORE or of some defaults has no bytes.
        return _value(data[0], data, 1) if data else "null"
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, RecursionError) as error:
        raise FormatError(f"a JSON value of {len(data)} bytes is damaged: {error!r}") from None


def _value(kind: int, data: bytes, at: int) -> str:
    if kind in _OBJECTS:
        return _object(data[at:], _OBJECTS[kind])
    if kind in _ARRAYS:
        return _array(data[at:], _ARRAYS[kind])
    if kind == _LITERAL:
        return _LITERALS[data[at]]
    if kind in _NUMBERS:
        return str(_NUMBERS[kind].unpack_from(data, at)[0])
    if kind == _DOUBLE:
        return double_text(struct.unpack_from("<d", data, at)[0])
    if kind == _STRING:
        length, at = _length(data, at)
        return quoted(data[at : at + length].decode())
    if kind == _OPAQUE:
        length, start = _length(data, at + 1)
        return _opaque(data[at], data[start : start + length])
    raise FormatError(f"JSON has no type {kind}")


def _number(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise IndexError(at)
    return int.from_bytes(data[at : at + width], "little")


def _object(data: bytes, width: int) -> str:
    count = _number(data, 0, width)
    keys = 2 * width
    entry = width + 2
    values = keys + count * entry
    members = []
    for index in range(count):
        name_at = _number(data, keys + index * entry, width)
        length = _number(data, keys + index * entry + width, 2)
        name = data[name_at : name_at + length].decode()
        members.append(f"{quoted(name)}: {_entry(data, values + index * (width + 1), width)}")
    return "{" + ", ".join(members) + "}"


def _array(data: bytes, width: int) -> str:
    count = _number(data, 0, width)
    entries = (_entry(data, 2 * width + index * (width + 1), width) for index in range(count))
    return "[" + ", ".join(entries) + "]"


def _entry(data: bytes, at: int, width: int) -> str:
    """A container's value; the entry itself has small ones."""
    kind = data[at]
    if kind in _INLINE[width]:
        return _value(kind, data, at + 1)
    return _value(kind, data, _number(data, at + 1, width))


def _length(data: bytes, at: int) -> tuple[int, int]:
    """A number with seven bits in each byte, the lowest first."""
    length = shift = 0
    while True:
        byte = data[at]
        at += 1
        length |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    if at + length > len(data):
        raise IndexError(at + length)
    return length, at


def quoted(text: str) -> str:
    """A string as the server writes it in JSON."""
    return '"' + text.translate(_ESCAPES) + '"'


def double_text(value: float) -> str:
    """The shortest decimal for this double, in MySQL's form."""
    sign, digit_tuple, exponent = decimal.Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    minus = "-" if sign else ""
    digits = "".join(map(str, digit_tuple))
    point = len(digits) + exponent
    if digits == "0":
        return f"{minus}0.0"
    if -_LARGEST_PLAIN_EXPONENT < point <= 0:
        return f"{minus}0.{'0' * -point}{digits}"
    if 0 < point <= _LARGEST_PLAIN_EXPONENT or 0 < point < len(digits):
        whole = digits[:point].ljust(point, "0")
        return f"{minus}{whole}.{digits[point:] or '0'}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{minus}{digits[0]}{fraction}e{point - 1}"


def _opaque(kind: int, data: bytes) -> str:
    if kind == _DECIMAL:
        return _decimal_text(data[0], data[1], data[2:])
    if kind in _TEMPORAL:
        return f'"{_temporal(kind, int.from_bytes(data, "little", signed=True))}"'
    return f'"base64:type{kind}:{b64encode(data).decode()}"'


def _decimal_text(precision: int, scale: int, data: bytes) -> str:
    value, _ = packed_decimal(precision, scale)(memoryview(data), 0)
    return format(value, "f")


def _temporal(kind: int, packed: int) -> str:
    """A packed number: date, time of day, and 24 bits of microseconds."""
    size = abs(packed)
    us, whole = size & 0xFFFFFF, size >> 24
    hour = whole >> 12
    clock = f"{whole >> 6 & 63:02d}:{whole & 63:02d}.{us:06d}"
    if kind == _TIME:
        return f"{'-' if packed < 0 else ''}{hour & 0x3FF:02d}:{clock}"
    year_month, day = whole >> 22, whole >> 17 & 31
    date = f"{year_month // 13:04d}-{year_month % 13:02d}-{day:02d}"
    return date if kind == _DATE else f"{date} {hour & 31:02d}:{clock}"
