"""A parsed predicate as a program for ``predicate_kernels``, for the rows of one schema.

The closures of ``predicate`` define a predicate's meaning; a program gives the same results, or
UNSURE.  If a part of a predicate has no instruction (arithmetic on decimals,
times against dates, ...) the program is UNSURE there, and Python decides the rows that
the other parts do not decide.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlglot import exp

from databus.common.compiled import avro_row_kernels
from databus.common.filters.predicate import Compiler, Name, Predicate, flat, like_tokens
from databus.common.filters.predicate_values import Operand, as_float, unified
from databus.common.schema.column_values import to_avro
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.serving.filter import predicate_kernels as pk
from databus.relay.serving.filter import text_kernels as tk

MAX_DIGITS = 60
_LEAST, _MOST = -(2**63), 2**63 - 1

_CODES: dict[Kind, int] = {
    Kind.BOOL: avro_row_kernels.BOOLEAN,
    Kind.INT: avro_row_kernels.LONG,
    Kind.UINT64: avro_row_kernels.DECIMAL,
    Kind.DECIMAL: avro_row_kernels.DECIMAL,
    Kind.FLOAT: avro_row_kernels.DOUBLE,
    Kind.DATE: avro_row_kernels.LONG,
    Kind.TIME: avro_row_kernels.LONG,
    Kind.TIME_SPAN: avro_row_kernels.LONG,
    Kind.TIMESTAMP: avro_row_kernels.LONG,
    Kind.TIMESTAMPTZ: avro_row_kernels.LONG,
}
"""The form of a kind in a record; the others are bytes."""
_MOMENTS: dict[str, str] = {
    "date": "date",
    "time": "time",
    "span": "time_span",
    "timestamp": "timestamp",
    "timestamptz": "timestamptz",
}
"""Kinds of a predicate whose values are numbers in a record, and their names there."""
_TEXT_KINDS = (Kind.STRING, Kind.JSON, Kind.UUID)
_HOW: dict[type[exp.Expr], int] = {
    exp.EQ: tk.EQUAL,
    exp.NEQ: tk.NOT_EQUAL,
    exp.LT: tk.LESS,
    exp.LTE: tk.LESS_EQUAL,
    exp.GT: tk.GREATER,
    exp.GTE: tk.GREATER_EQUAL,
}
_MIRRORED = {
    tk.LESS: tk.GREATER,
    tk.LESS_EQUAL: tk.GREATER_EQUAL,
    tk.GREATER: tk.LESS,
    tk.GREATER_EQUAL: tk.LESS_EQUAL,
}
_WHOLE: dict[type[exp.Expr], int] = {
    exp.Add: pk.ADD,
    exp.Sub: pk.SUBTRACT,
    exp.Mul: pk.MULTIPLY,
    exp.Mod: pk.REMAINDER,
}
_REAL: dict[type[exp.Expr], int] = {
    exp.Add: pk.ADD_REAL,
    exp.Sub: pk.SUBTRACT_REAL,
    exp.Mul: pk.MULTIPLY_REAL,
    exp.Div: pk.DIVIDE_REAL,
}
_PUSHED_NUMBERS = {
    **dict.fromkeys((pk.PUSH_SLOT, pk.PUSH_NUMBER, pk.PUSH_LENGTH, pk.PUSH_SIZE), 1),
    **dict.fromkeys((*_WHOLE.values(), *_REAL.values()), -1),
    **dict.fromkeys((pk.IN_RANGE, pk.IN_NUMBERS, pk.IS_TRUE_NUMBER, pk.NUMBER_IS_NULL), -1),
    pk.COMPARE: -2,
    pk.COMPARE_REAL: -2,
}
_PUSHED_TRUTHS = {
    **dict.fromkeys((pk.COMPARE, pk.COMPARE_REAL, pk.IN_RANGE, pk.IN_NUMBERS), 1),
    **dict.fromkeys((pk.IS_TRUE_NUMBER, pk.NUMBER_IS_NULL, pk.SLOT_IS_NULL, pk.NULL_SLOT), 1),
    **dict.fromkeys((pk.COMPARE_TEXT, pk.COMPARE_SLOTS, pk.IN_TEXTS, pk.LIKE), 1),
    pk.PUSH_TRUTH: 1,
    pk.AND: -1,
    pk.OR: -1,
}


_UNSURE = (pk.PUSH_TRUTH, tk.UNSURE)


class _NoInstructionError(Exception):
    """Python must decide a part of a predicate."""


class _Text(NamedTuple):
    """The origin of a text: a column in a case, or a constant."""

    column: Column | None
    fold: int
    value: str | None


class Program:
    """What the kernel needs to filter the rows of one schema.

    Owner: the code that compiled it; it is immutable.
    """

    def __init__(
        self,
        schema: SourceSchema,
        columns: Sequence[Column],
        lines: Sequence[tuple[int, ...]],
        constants: Sequence[int],
        texts: bytes | bytearray,
    ) -> None:
        slots = {column.name: slot for slot, column in enumerate(columns)}
        names = [column.name for column in schema.columns]
        self._row = _layout(schema.columns, slots)
        self._key = _layout(schema.key_columns, slots)
        self._slot_columns = np.array([names.index(name) for name in slots], dtype=np.int64)
        self._lines = np.array(lines, dtype=np.int64)
        self._constants = np.array(constants, dtype=np.int64)
        self._texts = np.frombuffer(bytearray(texts), dtype=np.uint8)

    def match(
        self,
        buf: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        chosen: npt.NDArray[np.int64],
        matches: npt.NDArray[np.int8],
    ) -> None:
        """Fill in ``matches[i]`` for the frames at ``offsets[i]``, i in ``chosen``.

        Frames that Python has to decide become ``predicate_kernels.UNDECIDED``.
        """
        if buf.flags.writeable:
            buf = buf[:]
            buf.flags.writeable = False
        pk.match_frames(
            buf,
            offsets,
            chosen,
            self._row,
            self._key,
            self._slot_columns,
            self._lines,
            self._constants,
            self._texts,
            matches,
        )


def _layout(columns: Sequence[Column], slots: dict[str, int]) -> npt.NDArray[np.int64]:
    """The columns of a record up to the last one that has a slot."""
    lines = [
        (
            _CODES.get(column.kind, avro_row_kernels.BYTES),
            column.nullable,
            slots.get(column.name, -1),
        )
        for column in columns
    ]
    while lines and lines[-1][2] < 0:
        lines.pop()
    return np.array(lines, dtype=np.int64).reshape(len(lines), 3)


def compile_program(
    predicate: Predicate, schema: SourceSchema, older: Collection[str] = ()
) -> Program | None:
    """The program with the results of ``compile_predicate``; None if it would decide nothing.

    ``older`` are as for ``compile_predicate``, which has refused values that do not compare.
    """
    writer = _Writer({column.name: column for column in schema.columns}, older)
    writer.condition(predicate.expression)
    if writer.is_all_unsure or writer.depth > pk.MAX_DEPTH:
        return None
    return Program(
        schema,
        list(writer.slots.values()),
        writer.lines,
        writer.constants,
        writer.texts,
    )


class _Writer:
    """Writes the instructions of one program, operands first."""

    def __init__(self, columns: dict[str, Column], older: Collection[str]) -> None:
        self.slots: dict[str, Column] = {}
        self.lines: list[tuple[int, int, int, int, int]] = []
        self.constants: list[int] = []
        self.texts = bytearray()
        self._columns = columns
        self._typing = Compiler(columns, older)

    @property
    def is_all_unsure(self) -> bool:
        """Whether the program never decides anything."""
        joints = (pk.AND, pk.OR, pk.NOT, pk.IS_TRUTH, pk.TRUTH_IS_NULL)
        return all(line[0] in joints or line[:2] == _UNSURE for line in self.lines)

    @property
    def depth(self) -> int:
        """How much of its stacks the program needs."""
        deepest = 0
        for pushed in (_PUSHED_NUMBERS, _PUSHED_TRUTHS):
            depth = 0
            for line in self.lines:
                depth += pushed.get(line[0], 0)
                deepest = max(deepest, depth)
        return deepest

    def condition(self, node: exp.Expr) -> None:
        """Write a node whose value is a truth, UNSURE if there is no instruction for it."""
        mark = len(self.lines)
        try:
            self._condition(node)
        except _NoInstructionError:
            del self.lines[mark:]
            self._write(pk.PUSH_TRUTH, tk.UNSURE)

    def _write(self, code: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
        self.lines.append((code, a, b, c, d))

    def _condition(self, node: exp.Expr) -> None:
        node = node.unnest()
        columns = self._columns_of(node)
        if not columns:
            value = self._typing.condition(node, 0)({})
            self._write(pk.PUSH_TRUTH, tk.NULL if value is None else int(value))
        elif isinstance(node, exp.Column):
            self._write(pk.PUSH_SLOT, self._slot(columns[0]))
            self._write(pk.IS_TRUE_NUMBER)
        elif isinstance(node, exp.And | exp.Or):
            self._joined(pk.AND if isinstance(node, exp.And) else pk.OR, list(flat(node)))
        elif isinstance(node, exp.Not):
            self.condition(node.this)
            self._write(pk.NOT)
        elif type(node) in _HOW:
            self._comparison(_HOW[type(node)], node.this, node.expression)
        elif isinstance(node, exp.Between):
            self._comparison(tk.GREATER_EQUAL, node.this, node.args["low"])
            self._comparison(tk.LESS_EQUAL, node.this, node.args["high"])
            self._write(pk.AND)
        elif isinstance(node, exp.In):
            self._in(node)
        elif isinstance(node, exp.Is):
            self._is(node)
        elif isinstance(node, exp.Escape):
            self._like(node.this, str(node.expression.this))
        elif isinstance(node, exp.Like | exp.ILike):
            self._like(node, "\\")
        else:
            raise _NoInstructionError

    def _joined(self, code: int, parts: Sequence[exp.Expr]) -> None:
        for number, part in enumerate(parts):
            self.condition(part)
            if number:
                self._write(code)

    def _constant(self, text: bytes | bytearray) -> int:
        """The index of a text's edges among the constants."""
        self.constants += (len(self.texts), len(self.texts) + len(text))
        self.texts += text
        return len(self.constants) - 2

    def _columns_of(self, node: exp.Expr) -> list[Column]:
        """The columns of this schema in a node."""
        found = []
        for inner in node.find_all(exp.Column):
            name = Name(str(inner.this.this), bool(inner.this.args.get("quoted")))
            actual = name.among(self._columns)
            if actual is not None:
                found.append(self._columns[actual])
        return found

    def _slot(self, column: Column) -> int:
        self.slots.setdefault(column.name, column)
        return list(self.slots).index(column.name)

    def _operand(self, node: exp.Expr) -> Operand:
        """A node's kind, and its value if it is constant."""
        operand = self._typing.operand(node, 0)
        if operand.is_constant or self._columns_of(node):
            return operand
        return operand._replace(is_constant=True, value=operand.get({}))

    def _comparison(self, how: int, left: exp.Expr, right: exp.Expr) -> None:
        one, other = self._operand(left), self._operand(right)
        if one.is_constant and not other.is_constant:
            left, right, one, other = right, left, other, one
            how = _MIRRORED.get(how, how)
        if other.is_constant and other.value is None:
            self._nulls(left)
            return
        one, other = unified(one, other, left.sql)
        if one.kind == "float" or other.kind == "float":
            self._real(left)
            self._real(right)
            self._write(pk.COMPARE_REAL, how)
        elif one.kind in ("text", "uuid") and one.kind == other.kind:
            self._text_comparison(how, left, right, other)
        elif other.is_constant:
            self._within(how, self._whole(left, one.kind), _number(one.kind, other.value))
        else:
            if self._whole(left, one.kind) != self._whole(right, other.kind):
                raise _NoInstructionError
            self._write(pk.COMPARE, how)

    def _nulls(self, node: exp.Expr) -> None:
        """NULL for every row, unless the row lacks a column."""
        for number, column in enumerate(self._columns_of(node)):
            self._write(pk.NULL_SLOT, self._slot(column))
            if number:
                self._write(pk.AND)

    # ---- numbers ----

    def _whole(self, node: exp.Expr, kind: str) -> int:
        """Write a node whose value is a whole number; returns how many digits are its fraction.

        ``kind`` is what it is compared as.
        """
        node = node.unnest()
        columns = self._columns_of(node)
        if isinstance(node, exp.Column) and columns:
            column = columns[0]
            own = self._operand(node).kind
            if _CODES.get(column.kind) in (None, avro_row_kernels.DOUBLE) or (
                own != kind and {own, kind} - {"bool", "int", "decimal"}
            ):
                raise _NoInstructionError
            self._write(pk.PUSH_SLOT, self._slot(column))
            return column.scale if column.kind is Kind.DECIMAL else 0
        if isinstance(node, exp.Length) and columns:
            self._length(node)
            return 0
        operand = self._operand(node)
        if operand.is_constant:
            self._write(pk.PUSH_NUMBER, _whole_number(_number(kind, operand.value)))
            return 0
        if operand.kind != "int":
            raise _NoInstructionError
        if isinstance(node, exp.Neg):
            self._unscaled(node.this)
            self._write(pk.NEGATE)
        elif type(node) in _WHOLE:
            self._unscaled(node.this)
            self._unscaled(node.expression)
            self._write(_WHOLE[type(node)])
        else:
            raise _NoInstructionError
        return 0

    def _unscaled(self, node: exp.Expr) -> None:
        operand = self._operand(node)
        if operand.kind != "int" or (operand.value is None and operand.is_constant):
            raise _NoInstructionError
        self._whole(node, "int")

    def _real(self, node: exp.Expr) -> None:
        """Write a node as a float."""
        node = node.unnest()
        operand = self._operand(node)
        if operand.is_constant:
            if operand.kind == "literal":
                value = float(operand.value)
            elif operand.kind in ("int", "decimal", "float") and operand.value is not None:
                value = as_float(operand.value)
            else:
                raise _NoInstructionError
            self._write(pk.PUSH_NUMBER, int(np.float64(value).view(np.int64)))
        elif operand.kind == "int":
            self._unscaled(node)
            self._write(pk.TO_REAL)
        elif operand.kind != "float":
            raise _NoInstructionError
        elif isinstance(node, exp.Column):
            self._write(pk.PUSH_SLOT, self._slot(self._columns_of(node)[0]))
        elif isinstance(node, exp.Neg):
            self._real(node.this)
            self._write(pk.NEGATE_REAL)
        elif type(node) in _REAL:
            self._real(node.this)
            self._real(node.expression)
            self._write(_REAL[type(node)])
        else:
            raise _NoInstructionError

    def _within(self, how: int, scale: int, value: Fraction) -> None:
        """Compare the number on the stack with a constant, as a range."""
        value *= 10**scale
        low, high = _LEAST, _MOST
        if how in (tk.EQUAL, tk.NOT_EQUAL):
            low, high = math.ceil(value), math.floor(value)
        elif how == tk.LESS:
            high = math.ceil(value) - 1
        elif how == tk.LESS_EQUAL:
            high = math.floor(value)
        elif how == tk.GREATER:
            low = math.floor(value) + 1
        else:
            low = math.ceil(value)
        if low > _MOST or high < _LEAST or low > high:
            low, high = 1, 0
        low, high = max(low, _LEAST), min(high, _MOST)
        self._write(pk.IN_RANGE, low, high, int(how == tk.NOT_EQUAL))

    # ---- lists, nulls, texts ----

    def _in(self, node: exp.In) -> None:
        left = self._operand(node.this)
        items = [self._operand(item) for item in node.expressions]
        if left.is_constant or not all(
            item.is_constant and item.value is not None for item in items
        ):
            self._alternatives(node)
            return
        pairs = [unified(left, item, node.sql) for item in items]
        kinds = {kind for pair in pairs for kind in (pair[0].kind, pair[1].kind)}
        if kinds in ({"text"}, {"uuid"}):
            text = self._text(node.this)
            if text.column is None:
                raise _NoInstructionError
            indices = [self._constant(str(item.value).encode()) for _, item in pairs]
            self._write(pk.IN_TEXTS, self._slot(text.column), indices[0], len(pairs), text.fold)
        elif "float" in kinds or any(one.kind != left.kind for one, _ in pairs):
            self._alternatives(node)
        else:
            scale = self._whole(node.this, left.kind)
            numbers = {_number(left.kind, item.value) * 10**scale for _, item in pairs}
            whole = sorted(int(n) for n in numbers if n.denominator == 1 and _is_word(n))
            self._write(pk.IN_NUMBERS, len(self.constants), len(whole))
            self.constants += whole

    def _alternatives(self, node: exp.In) -> None:
        for number, item in enumerate(node.expressions):
            self._comparison(tk.EQUAL, node.this, item)
            if number:
                self._write(pk.OR)

    def _is(self, node: exp.Is) -> None:
        inner, wanted = node.this.unnest(), node.expression
        if isinstance(wanted, exp.Boolean):
            self.condition(inner)
            self._write(pk.IS_TRUTH, int(bool(wanted.this)))
            return
        columns = self._columns_of(inner)
        if isinstance(inner, exp.Column | exp.Lower | exp.Upper | exp.Length):
            self._write(pk.SLOT_IS_NULL, self._slot(columns[0]))
            return
        operand = self._operand(inner)
        if operand.kind == "bool":
            self.condition(inner)
            self._write(pk.TRUTH_IS_NULL)
            return
        if operand.kind == "float":
            self._real(inner)
        else:
            self._whole(inner, operand.kind)
        self._write(pk.NUMBER_IS_NULL)

    def _text(self, node: exp.Expr) -> _Text:
        """The origin of a node's text."""
        node = node.unnest()
        columns = self._columns_of(node)
        if not columns:
            value = self._operand(node).value
            return _Text(None, tk.FOLD_NONE, None if value is None else str(value))
        if isinstance(node, exp.Column) and columns[0].kind in _TEXT_KINDS:
            is_uuid = columns[0].kind is Kind.UUID
            return _Text(columns[0], tk.FOLD_UUID if is_uuid else tk.FOLD_NONE, None)
        if isinstance(node, exp.Lower | exp.Upper):
            inner = self._text(node.this)
            if inner.column is not None and inner.fold != tk.FOLD_UUID:
                fold = tk.FOLD_LOWER if isinstance(node, exp.Lower) else tk.FOLD_UPPER
                return inner._replace(fold=fold)
        raise _NoInstructionError

    def _text_comparison(
        self, how: int, left: exp.Expr, right: exp.Expr, constant: Operand
    ) -> None:
        one = self._text(left)
        if one.column is None:
            raise _NoInstructionError
        if constant.is_constant:
            index = self._constant(str(constant.value).encode())
            self._write(pk.COMPARE_TEXT, self._slot(one.column), index, how, one.fold)
            return
        other = self._text(right)
        if other.column is None or tk.FOLD_UUID in (one.fold, other.fold):
            raise _NoInstructionError
        slots = self._slot(one.column), self._slot(other.column)
        self._write(pk.COMPARE_SLOTS, *slots, how, one.fold + 4 * other.fold)

    def _length(self, node: exp.Length) -> None:
        columns = self._columns_of(node)
        inner = node.this.unnest()
        if isinstance(inner, exp.Column) and columns[0].kind is Kind.BYTES:
            self._write(pk.PUSH_SIZE, self._slot(columns[0]))
            return
        text = self._text(inner)
        if text.column is None or text.fold == tk.FOLD_UUID:
            raise _NoInstructionError
        self._write(pk.PUSH_LENGTH, self._slot(text.column), text.fold)

    def _like(self, node: exp.Expr, escape: str) -> None:
        text = self._text(node.this)
        pattern = str(node.expression.this)
        fold = text.fold
        if text.column is None or fold == tk.FOLD_UUID:
            raise _NoInstructionError
        if isinstance(node, exp.ILike):
            if not pattern.isascii():
                raise _NoInstructionError
            fold = tk.FOLD_LOWER
        tokens = bytearray()
        for kind, character in like_tokens(pattern, escape):
            if kind == "%":
                tokens += bytes((tk.ANY_TEXT, 0))
            elif kind == "_":
                tokens += bytes((tk.ANY_CHARACTER, 0))
            else:
                shown = character.lower() if isinstance(node, exp.ILike) else character
                for byte in shown.encode():
                    tokens += bytes((tk.LITERAL, byte))
        self._write(pk.LIKE, self._slot(text.column), self._constant(tokens), 0, fold)
        if node.args.get("negate"):
            self._write(pk.NOT)


def _number(kind: str, value: Any) -> Fraction:
    """A constant as it is compared with a column's number in a record."""
    if kind in _MOMENTS:
        convert: Callable[[Any], Any] | None = to_avro(_MOMENTS[kind], 0)
        assert convert is not None
        return Fraction(int(convert(value)))
    if not isinstance(value, int | decimal.Decimal):
        raise _NoInstructionError
    number = decimal.Decimal(value)
    digits = len(number.as_tuple().digits)
    if not number.is_finite() or digits > MAX_DIGITS or abs(number.adjusted()) > MAX_DIGITS:
        raise _NoInstructionError
    return Fraction(number)


def _whole_number(value: Fraction) -> int:
    if value.denominator != 1 or not _is_word(value):
        raise _NoInstructionError
    return int(value)


def _is_word(value: Fraction) -> bool:
    return _LEAST <= value <= _MOST
