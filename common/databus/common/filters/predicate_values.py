"""The values of a predicate: their kinds, their literals, and how two of them compare.

Numbers compare by value, as floats if one of them is a float; text by code point; dates
with times as their midnight, times without a zone as UTC.  A quoted text takes the kind of
the value that it is compared with.  Division is exact, by zero NULL; the remainder has the sign of
the dividend.

``where`` returns the part of the predicate for a message: it takes long to compute,
and only a refusal needs it.
"""

from __future__ import annotations

import datetime as dt
import decimal
import math
import operator
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from databus.common.errors import BadFilter
from databus.common.schema.source_schema import Column, Kind

Row = Mapping[str, Any]
Get = Callable[[Row], Any]

COLUMN_KINDS: Mapping[Kind, str] = {
    Kind.BOOL: "bool",
    Kind.INT: "int",
    Kind.UINT64: "int",
    Kind.FLOAT: "float",
    Kind.DECIMAL: "decimal",
    Kind.NUMERIC: "decimal",
    Kind.STRING: "text",
    Kind.JSON: "text",
    Kind.UUID: "uuid",
    Kind.BYTES: "bytes",
    Kind.DATE: "date",
    Kind.TIME: "time",
    Kind.TIME_SPAN: "span",
    Kind.TIMESTAMP: "timestamp",
    Kind.TIMESTAMPTZ: "timestamptz",
}
_NUMBERS = ("int", "decimal", "float")
_MOMENTS = ("date", "timestamp", "timestamptz")
_CONTEXT = decimal.Context(prec=76)
_SPAN = re.compile(r"(-?)(\d{1,4}):(\d\d):(\d\d)(?:\.(\d{1,6}))?")


class Operand(NamedTuple):
    """A part of a predicate with a value; ``value`` is that of a constant."""

    kind: str
    get: Get
    is_constant: bool = False
    value: Any = None


def constant(kind: str, value: Any) -> Operand:
    """A value that is the same for all rows."""
    return Operand(kind, lambda row: value, True, value)


def column(found: Column) -> Operand:
    """A column's value; KeyError if the row lacks it."""
    return Operand(COLUMN_KINDS[found.kind], operator.itemgetter(found.name))


def text_literal(text: str) -> Operand:
    """A quoted text: it takes the kind of what it is compared with."""
    return constant("literal", text)


def typed_literal(kind: str, text: str) -> Operand:
    """``NUMBER``, or the name of an SQL type before a quoted text.

    Raises:
        BadFilter: the type is unknown, or the text has another form.
    """
    names = {
        "DATE": "date",
        "TIME": "time",
        "TIMESTAMP": "timestamp",
        "DATETIME": "timestamp",
        "TIMESTAMPTZ": "timestamptz",
        "UUID": "uuid",
    }
    if kind == "NUMBER":
        is_whole = text.isdigit()
        return constant("int" if is_whole else "decimal", _read("decimal", text))
    if kind not in names:
        raise BadFilter(f"where: literals of type {kind} are not among {', '.join(names)}")
    return constant(names[kind], _read(names[kind], text))


def _decimal(text: str) -> decimal.Decimal:
    value = decimal.Decimal(text)
    if not value.is_finite():
        raise ValueError("not a finite number")
    return value


def _timestamp(text: str) -> dt.datetime:
    value = dt.datetime.fromisoformat(text)
    return value if value.tzinfo is None else value.astimezone(dt.UTC).replace(tzinfo=None)


def _timestamptz(text: str) -> dt.datetime:
    value = dt.datetime.fromisoformat(text)
    return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value.astimezone(dt.UTC)


def _span(text: str) -> dt.timedelta:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ValueError("not of the form 12:34:56")
    sign, hours, minutes, seconds, fraction = found.groups()
    value = dt.timedelta(
        hours=int(hours),
        minutes=int(minutes),
        seconds=int(seconds),
        microseconds=int((fraction or "0").ljust(6, "0")),
    )
    return -value if sign else value


def _bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


_READERS: Mapping[str, Callable[[str], Any]] = {
    "bool": _bool,
    "int": _decimal,
    "decimal": _decimal,
    "float": float,
    "text": str,
    "literal": str,
    "uuid": uuid.UUID,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "span": _span,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
}


def _read(kind: str, text: str) -> Any:
    try:
        return _READERS[kind](text)
    except (ValueError, KeyError, ArithmeticError):
        raise BadFilter(f"where: {text!r} is no {kind}") from None


def as_text(operand: Operand, where: Callable[[], str]) -> Get:
    """The operand as text.

    Raises:
        BadFilter: it is something else.
    """
    if operand.kind not in ("text", "literal", "null"):
        raise BadFilter(f"where: {where()!r} needs text, not {operand.kind}")
    return operand.get


def _midnight(operand: Operand) -> Operand:
    def promote(value: dt.date) -> dt.datetime:
        return dt.datetime(value.year, value.month, value.day)

    return _converted("timestamp", operand, promote)


def _in_utc(operand: Operand) -> Operand:
    return _converted("timestamptz", operand, lambda value: value.replace(tzinfo=dt.UTC))


def _converted(kind: str, operand: Operand, convert: Callable[[Any], Any]) -> Operand:
    if operand.is_constant:
        return constant(kind, None if operand.value is None else convert(operand.value))
    return Operand(kind, or_null(operand.get, convert))


def or_null(get: Get, convert: Callable[[Any], Any]) -> Get:
    """The converted value; null stays null."""

    def converted(row: Row) -> Any:
        value = get(row)
        return None if value is None else convert(value)

    return converted


def unified(left: Operand, right: Operand, where: Callable[[], str]) -> tuple[Operand, Operand]:
    """Both in a form in which they compare.

    Raises:
        BadFilter: they do not.
    """
    if right.kind == "literal" and left.kind != "null":
        right = constant(left.kind, _adapted(left.kind, right.value, where))
    elif left.kind == "literal" and right.kind != "null":
        left = constant(right.kind, _adapted(right.kind, left.value, where))
    kinds = {left.kind, right.kind}
    if len(kinds) == 1 or "null" in kinds or kinds == {"bool", "int"}:
        return left, right
    if kinds <= set(_NUMBERS):
        if "float" not in kinds:
            return left, right
        return _converted("float", left, as_float), _converted("float", right, as_float)
    if kinds <= set(_MOMENTS):
        left, right = (_midnight(side) if side.kind == "date" else side for side in (left, right))
        if left.kind != right.kind:
            left, right = (
                _in_utc(side) if side.kind == "timestamp" else side for side in (left, right)
            )
        return left, right
    raise BadFilter(f"where: {where()!r} compares {left.kind} with {right.kind}")


def _adapted(kind: str, text: str, where: Callable[[], str]) -> Any:
    if kind not in _READERS:
        raise BadFilter(f"where: {where()!r}: {kind} compares with no literal")
    if kind == "date" and len(text) > len("2026-03-01"):
        raise BadFilter(f"where: {where()!r}: {text!r} is no date; write TIMESTAMP {text!r}")
    return _read(kind, text)


def as_float(value: Any) -> float:
    """The nearest float; infinity beyond the largest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def negated(operand: Operand, where: Callable[[], str]) -> Operand:
    """Unary minus.

    Raises:
        BadFilter: it is no number.
    """
    if operand.kind not in _NUMBERS:
        raise BadFilter(f"where: {where()!r} needs a number, not {operand.kind}")
    return _converted(operand.kind, operand, operator.neg)


def _int_remainder(left: int, right: int) -> int:
    remainder = abs(left) % abs(right)
    return -remainder if left < 0 else remainder


_INT: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _CONTEXT.divide,
    "%": _int_remainder,
}
_DECIMAL: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": _CONTEXT.add,
    "-": _CONTEXT.subtract,
    "*": _CONTEXT.multiply,
    "/": _CONTEXT.divide,
    "%": _CONTEXT.remainder,
}
_FLOAT: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": math.fmod,
}


def arithmetic(sign: str, left: Operand, right: Operand, where: Callable[[], str]) -> Operand:
    """A sum, difference, product, quotient or remainder; NULL if there is none.

    Raises:
        BadFilter: one of them is no number.
    """
    for side in (left, right):
        if side.kind not in (*_NUMBERS, "null"):
            raise BadFilter(f"where: {where()!r} needs numbers, not {side.kind}")
    kinds = {left.kind, right.kind}
    if "null" in kinds:
        return constant("null", None)
    if "float" in kinds:
        kind, function = "float", _FLOAT[sign]
        left, right = _converted("float", left, as_float), _converted("float", right, as_float)
    elif "decimal" in kinds:
        kind, function = "decimal", _DECIMAL[sign]
    else:
        kind, function = ("decimal" if sign == "/" else "int"), _INT[sign]
    get_left, get_right = left.get, right.get

    def computed(row: Row) -> Any:
        first, second = get_left(row), get_right(row)
        if first is None or second is None:
            return None
        try:
            return function(first, second)
        except (ArithmeticError, ValueError):
            return None

    return Operand(kind, computed)
