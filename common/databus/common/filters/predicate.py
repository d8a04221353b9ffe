"""``where=``: a SQL predicate over one row, parsed by sqlglot and compiled to closures.

The text is data: it is parsed, each node is checked against the tables below, and closures are
built from them; nothing is evaluated as code.  It supports comparisons, AND, OR,
NOT, IN (list), BETWEEN, LIKE and ILIKE (with ESCAPE), IS NULL, IS TRUE, + - * / %, lower,
upper, length, literals, with the three-valued logic of SQL.  ``predicate_values`` compares two
values; ``row_filter`` chooses the image of a row that a predicate is applied to.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.errors import SqlglotError

from databus.common.errors import BadFilter
from databus.common.filters.predicate_values import (
    Operand,
    Row,
    arithmetic,
    as_text,
    column,
    constant,
    negated,
    or_null,
    text_literal,
    typed_literal,
    unified,
)
from databus.common.schema.source_schema import Column
from databus.common.spelling import nearest

MAX_TEXT_CHARS = 4096
MAX_DEPTH = 60
FUNCTIONS = ("length", "lower", "upper")

Test = Callable[[Row], bool | None]
"""True, False, or None for SQL's unknown; KeyError if the row lacks a column that matters."""

COMPARISONS: dict[type[exp.Expr], Callable[[Any, Any], bool]] = {
    exp.EQ: operator.eq,
    exp.NEQ: operator.ne,
    exp.GT: operator.gt,
    exp.GTE: operator.ge,
    exp.LT: operator.lt,
    exp.LTE: operator.le,
}
_ARITHMETIC: dict[type[exp.Expr], str] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
}
_CALLS: dict[type[exp.Expr], str] = {
    exp.Lower: "lower",
    exp.Upper: "upper",
    exp.Length: "length",
}
_SHAPES: dict[type[exp.Expr], frozenset[str]] = {
    # node: the supported arguments; any other argument is refused
    **{kind: frozenset({"this", "expression"}) for kind in (*COMPARISONS, *_ARITHMETIC)},
    **{kind: frozenset({"this"}) for kind in (*_CALLS, exp.Not, exp.Neg, exp.Paren)},
    exp.And: frozenset({"this", "expression"}),
    exp.Or: frozenset({"this", "expression"}),
    exp.Is: frozenset({"this", "expression"}),
    exp.In: frozenset({"this", "expressions"}),
    exp.Between: frozenset({"this", "low", "high"}),
    exp.Like: frozenset({"this", "expression", "negate"}),
    exp.ILike: frozenset({"this", "expression", "negate"}),
    exp.Escape: frozenset({"this", "expression"}),
    exp.Column: frozenset({"this"}),
    exp.Identifier: frozenset({"this", "quoted"}),
    exp.Literal: frozenset({"this", "is_string"}),
    exp.Boolean: frozenset({"this"}),
    exp.Null: frozenset(),
    exp.Cast: frozenset({"this", "to"}),
    exp.DataType: frozenset({"this", "nested"}),
}
_HARMLESS: dict[type[exp.Expr], set[str]] = {exp.Div: {"typed", "safe"}}


@dataclass(frozen=True, slots=True)
class Name:
    """A column's name as written; an unquoted name also finds another case."""

    text: str
    quoted: bool

    def among(self, names: Collection[str]) -> str | None:
        """The column with this name, or None."""
        if self.text in names:
            return self.text
        if self.quoted:
            return None
        found = [name for name in names if name.lower() == self.text.lower()]
        return found[0] if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class Predicate:
    """A parsed predicate; equal ones have the same ``text``, whatever their spacing."""

    text: str
    names: tuple[Name, ...] = field(compare=False)
    expression: exp.Expr = field(compare=False, repr=False)


@functools.lru_cache(maxsize=256)
def parse_where(text: str) -> Predicate:
    """The predicate in a text.

    Raises:
        BadFilter: it is no predicate, too long, or has an unsupported part.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise BadFilter(f"where: {len(text)} characters are over the limit of {MAX_TEXT_CHARS}")
    try:
        tree = sqlglot.parse_one(text, into=exp.Condition)
        nodes = list(tree.walk())
        canonical = tree.sql(comments=False)
    except RecursionError:
        raise _too_deep() from None
    except SqlglotError as error:
        raise BadFilter(
            f"where: {text!r} is no SQL predicate: {_first_line(error)} (names that are SQL "
            "words go in double quotes)"
        ) from None
    for node in nodes:
        _check_node(node)
    names = {
        Name(str(node.this.this), bool(node.this.args.get("quoted")))
        for node in nodes
        if isinstance(node, exp.Column)
    }
    return Predicate(canonical, tuple(sorted(names, key=lambda name: name.text)), tree)


def _first_line(error: Exception) -> str:
    return re.sub(r"\x1b\[\d+m", "", str(error)).partition("\n")[0][:200]


def _too_deep() -> BadFilter:
    return BadFilter(f"where: nested more than {MAX_DEPTH} deep; write it flatter")


def _check_node(node: exp.Expr) -> None:
    if isinstance(node, exp.Column) and node.args.get("table"):
        raise BadFilter(
            f"where: {node.sql()!r}: write the column alone; choose tables with sources="
        )
    if isinstance(node, exp.Anonymous):
        raise _unknown_function(str(node.this))
    allowed = _SHAPES.get(type(node))
    if allowed is None:
        if isinstance(node, exp.Func):
            raise _unknown_function(node.sql_name())
        raise BadFilter(f"where: {node.sql()!r} ({type(node).__name__}) is not understood here")
    given = {name for name, value in node.args.items() if value not in (None, False, [])}
    extra = given - allowed - _HARMLESS.get(type(node), set())
    if extra:
        raise BadFilter(f"where: {node.sql()!r}: {', '.join(sorted(extra))} is not understood")


def _unknown_function(name: str) -> BadFilter:
    return BadFilter(
        f"where: unknown function {name.lower()!r}{nearest(name.lower(), FUNCTIONS)}; "
        f"known are: {', '.join(FUNCTIONS)}"
    )


def compile_predicate(
    predicate: Predicate, columns: Sequence[Column], older: Collection[str] = ()
) -> Test:
    """The predicate over rows with these columns, given by name.

    ``older`` are names that other versions of the table have; here they are NULL.

    Raises:
        BadFilter: a column is unknown, or two values do not compare.
    """
    compiler = Compiler({column.name: column for column in columns}, older)
    return compiler.condition(predicate.expression, 0)


class Compiler:
    """Builds the closures for one schema."""

    def __init__(self, columns: dict[str, Column], older: Collection[str]) -> None:
        self._columns = columns
        self._older = older

    def condition(self, node: exp.Expr, depth: int) -> Test:
        """A node whose value is a truth."""
        operand = self.operand(node, depth)
        if operand.kind not in ("bool", "null"):
            raise BadFilter(
                f"where: {node.sql()!r} is {operand.kind}, not a condition; compare it with "
                "something"
            )
        return operand.get

    def operand(self, node: exp.Expr, depth: int) -> Operand:
        """Any node."""
        if depth > MAX_DEPTH:
            raise _too_deep()
        if isinstance(node, exp.Paren):
            return self.operand(node.this, depth + 1)
        if isinstance(node, exp.Column):
            return self._column(node)
        if isinstance(node, exp.Literal | exp.Boolean | exp.Null | exp.Cast):
            return _literal(node)
        if isinstance(node, exp.Neg):
            return negated(self.operand(node.this, depth + 1), node.sql)
        if type(node) in _ARITHMETIC:
            left = self.operand(node.this, depth + 1)
            right = self.operand(node.expression, depth + 1)
            return arithmetic(_ARITHMETIC[type(node)], left, right, node.sql)
        if type(node) in _CALLS:
            return self._call(node, depth)
        return Operand("bool", self._truth(node, depth))

    def _column(self, node: exp.Column) -> Operand:
        name = Name(str(node.this.this), bool(node.this.args.get("quoted")))
        found = name.among(self._columns)
        if found is not None:
            return column(self._columns[found])
        if name.among(self._older) is not None:
            return constant("null", None)
        raise unknown_column(name, self._columns)

    def _call(self, node: exp.Expr, depth: int) -> Operand:
        given = self.operand(node.this, depth + 1)
        name = _CALLS[type(node)]
        if given.kind == "bytes" and name == "length":
            return Operand("int", or_null(given.get, len))
        get = as_text(given, node.sql)
        if name == "length":
            return Operand("int", or_null(get, len))
        return Operand("text", or_null(get, str.lower if name == "lower" else str.upper))

    def _truth(self, node: exp.Expr, depth: int) -> Test:
        if isinstance(node, exp.And | exp.Or):
            parts = [self.condition(part, depth + 1) for part in flat(node)]
            return _all(parts) if isinstance(node, exp.And) else _any(parts)
        if isinstance(node, exp.Not):
            return _not(self.condition(node.this, depth + 1))
        if type(node) in COMPARISONS:
            left = self.operand(node.this, depth + 1)
            right = self.operand(node.expression, depth + 1)
            return _compared(COMPARISONS[type(node)], *unified(left, right, node.sql))
        if isinstance(node, exp.Between):
            left = self.operand(node.this, depth + 1)
            low, high = (self.operand(node.args[end], depth + 1) for end in ("low", "high"))
            return _all(
                [
                    _compared(operator.ge, *unified(left, low, node.sql)),
                    _compared(operator.le, *unified(left, high, node.sql)),
                ]
            )
        if isinstance(node, exp.In):
            return self._in(node, depth)
        if isinstance(node, exp.Is):
            return self._is(node, depth)
        if isinstance(node, exp.Escape) and isinstance(node.this, exp.Like | exp.ILike):
            return self._like(node.this, str(node.expression.this), depth)
        if isinstance(node, exp.Like | exp.ILike):
            return self._like(node, "\\", depth)
        raise BadFilter(f"where: {node.sql()!r} is not understood here")

    def _in(self, node: exp.In, depth: int) -> Test:
        if not node.expressions:
            raise BadFilter(f"where: {node.sql()!r}: IN takes a list of values in brackets")
        left = self.operand(node.this, depth + 1)
        pairs = [
            unified(left, self.operand(item, depth + 1), node.sql) for item in node.expressions
        ]
        get = pairs[0][0].get
        if all(
            one.get is get and item.is_constant and item.value is not None for one, item in pairs
        ):
            return or_null(get, frozenset(right.value for _, right in pairs).__contains__)
        return _any([_compared(operator.eq, *pair) for pair in pairs])

    def _is(self, node: exp.Is, depth: int) -> Test:
        wanted = node.expression
        if isinstance(wanted, exp.Null):
            get = self.operand(node.this, depth + 1).get
            return lambda row: get(row) is None
        if isinstance(wanted, exp.Boolean):
            test, truth = self.condition(node.this, depth + 1), bool(wanted.this)
            return lambda row: test(row) is truth
        raise BadFilter(f"where: {node.sql()!r}: IS takes NULL, TRUE or FALSE")

    def _like(self, node: exp.Expr, escape: str, depth: int) -> Test:
        pattern = node.expression
        if not isinstance(pattern, exp.Literal) or not pattern.is_string or len(escape) > 1:
            raise BadFilter(
                f"where: {node.sql()!r}: LIKE takes a pattern in quotes, ESCAPE one character"
            )
        get = as_text(self.operand(node.this, depth + 1), node.sql)
        flags = re.IGNORECASE if isinstance(node, exp.ILike) else 0
        test = or_null(get, like_matcher(str(pattern.this), escape, flags))
        return _not(test) if node.args.get("negate") else test


def unknown_column(name: Name, known: Collection[str]) -> BadFilter:
    """The refusal of a column that no source has."""
    return BadFilter(
        f"where: unknown column {name.text!r}{nearest(name.text, known)}; known are: "
        f"{', '.join(sorted(known))}"
    )


def flat(node: exp.Expr) -> Iterator[exp.Expr]:
    """The parts of a chain of ANDs, or of ORs, so that long ones are not deep."""
    kind, pending = type(node), [node]
    while pending:
        part = pending.pop()
        inner = part.unnest() if isinstance(part, exp.Paren) else part
        if type(inner) is kind:
            pending += [inner.expression, inner.this]
        else:
            yield part


def _literal(node: exp.Expr) -> Operand:
    if isinstance(node, exp.Null):
        return constant("null", None)
    if isinstance(node, exp.Boolean):
        return constant("bool", bool(node.this))
    if isinstance(node, exp.Cast):
        text = node.this
        if not isinstance(text, exp.Literal) or not text.is_string:
            raise BadFilter(f"where: {node.sql()!r}: only literals have a type in front")
        return typed_literal(node.args["to"].sql(), str(text.this))
    if node.args.get("is_string"):
        return text_literal(str(node.this))
    return typed_literal("NUMBER", str(node.this))


def _compared(compare: Callable[[Any, Any], bool], left: Operand, right: Operand) -> Test:
    get_left, get_right = left.get, right.get

    def test(row: Row) -> bool | None:
        first, second = get_left(row), get_right(row)
        if first is None or second is None:
            return None
        try:
            return compare(first, second)
        except ArithmeticError:  # a NaN among decimals
            return None

    return test


def _not(test: Test) -> Test:
    def inverted(row: Row) -> bool | None:
        value = test(row)
        return None if value is None else not value

    return inverted


def _all(parts: Sequence[Test]) -> Test:
    return _decided_by(False, parts)


def _any(parts: Sequence[Test]) -> Test:
    return _decided_by(True, parts)


def _decided_by(decisive: bool, parts: Sequence[Test]) -> Test:
    """AND (decided by one False) and OR (by one True), even if another part lacks a column."""

    def test(row: Row) -> bool | None:
        result: bool | None = not decisive
        lacking: KeyError | None = None
        for part in parts:
            try:
                value = part(row)
            except KeyError as error:
                lacking = error
                continue
            if value is decisive:
                return decisive
            if value is None:
                result = None
        if lacking is not None:
            raise lacking
        return result

    return test


def like_tokens(pattern: str, escape: str) -> Iterator[tuple[str, str]]:
    """A LIKE pattern as ("%", ""), ("_", "") and ("=", a literal character)."""
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            yield "=", next(characters, escape)
        elif character in "%_":
            yield character, ""
        else:
            yield "=", character


def like_matcher(pattern: str, escape: str, flags: int = 0) -> Callable[[str], bool]:
    """Whether a text matches a LIKE pattern, in time linear in the text for each ``%``."""
    pieces: list[list[str]] = [[]]
    for kind, character in like_tokens(pattern, escape):
        if kind == "%":
            pieces.append([])
        else:
            pieces[-1].append("." if kind == "_" else re.escape(character))
    compiled = [re.compile("".join(piece), re.DOTALL | flags) for piece in pieces]
    first, *middle = compiled
    if not middle:
        return lambda text: first.fullmatch(text) is not None
    *middle, last = middle
    least_chars = len(pieces[-1])

    def matches(text: str) -> bool:
        found = first.match(text)
        for piece in middle:
            if found is None:
                return False
            found = piece.search(text, found.end())
        if found is None:
            return False
        start = len(text) - least_chars
        return start >= found.end() and last.fullmatch(text, start) is not None

    return matches
