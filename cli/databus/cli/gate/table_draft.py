"""The definition of a table while a statement changes it, clause by clause."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from databus.common.schema.source_schema import Column, SourceSchema
from databus.relay.sources.mysql.statements.lexer import NotUnderstood, Token
from databus.relay.sources.mysql.statements.token_reader import TokenReader


class TableDraft:
    """Columns in order, each with the number that it keeps when it is renamed, and the key.

    Invariants:
        I1. A column's number is in ``before`` and after it the same column; a new one is higher.

    ``guessed``: what is assumed about columns whose type this module does not know.

    Owner: the function that reads one statement.
    """

    def __init__(self, source: str, before: SourceSchema | None, *, folds: bool) -> None:
        """``folds``: names of columns are compared without their case."""
        self.source = source
        self.before = before
        self.columns: dict[int, Column] = dict(enumerate(before.columns if before else ()))
        self._order = list(self.columns)
        self._next = len(self._order)
        self._folds = folds
        self.key: list[int] = [self.number(name) for name in before.key] if before else []
        self.nullable_key = before is not None and before.nullable_key
        self.guessed: list[str] = []

    @property
    def numbers(self) -> list[int]:
        """The numbers of the columns, in their order."""
        return list(self._order)

    def find(self, name: str) -> int | None:
        """The number of a column; None if consumers have no such column."""
        for number, column in self.columns.items():
            if column.name == name or (self._folds and column.name.lower() == name.lower()):
                return number
        return None

    def number(self, name: str) -> int:
        """The number of a column.

        Raises:
            NotUnderstood: there is none.
        """
        found = self.find(name)
        if found is None:
            raise NotUnderstood(f"{self.source} has no column {name} that consumers have")
        return found

    def add(self, column: Column, *, after: str | None = None, is_first: bool = False) -> int:
        """Add a column at the end, or at another place."""
        number, self._next = self._next, self._next + 1
        at = 0 if is_first else len(self._order)
        if after is not None and (before := self.find(after)) is not None:
            at = self._order.index(before) + 1
        self._order.insert(at, number)
        self.columns[number] = column
        return number

    def move(self, number: int, *, after: str | None = None, is_first: bool = False) -> None:
        """Give a column another place."""
        if is_first or after is not None:
            self._order.remove(number)
            at = 0 if after is None else self._order.index(self.number(after)) + 1
            self._order.insert(at, number)

    def drop(self, name: str) -> None:
        """Drop a column, and its part of the key; one that consumers do not have is left."""
        number = self.find(name)
        if number is None:
            return
        del self.columns[number]
        self._order.remove(number)
        self.key = [one for one in self.key if one != number]

    def define(self, number: int, column: Column) -> None:
        """Give a column another definition, or another name."""
        self.columns[number] = column

    def set_key(self, names: Iterable[str]) -> None:
        """The primary key; its columns cannot be null."""
        self.key = [self.number(name) for name in names]
        self.nullable_key = False
        for number in self.key:
            self.columns[number] = replace(self.columns[number], nullable=False)

    def renamed(self) -> dict[str, str]:
        """Old and new names of the columns that have another name."""
        old = self.before.columns if self.before else ()
        return {
            column.name: self.columns[number].name
            for number, column in enumerate(old)
            if number in self.columns and self.columns[number].name != column.name
        }

    def schema(self, source: str = "") -> SourceSchema | None:
        """The definition; None without a key.

        Raises:
            FormatError: two columns have one name.
        """
        if not self.key:
            return None
        return SourceSchema(
            source or self.source,
            tuple(self.columns[number] for number in self._order),
            tuple(self.columns[number].name for number in self.key),
            self.nullable_key,
        )


def inside(reader: TokenReader) -> list[list[Token]]:
    """The parts between the parentheses that come next.

    Raises:
        NotUnderstood: none come next, or they have no end.
    """
    reader.require(reader.accept_sign("("), "(")
    depth, start = 1, reader.at
    while depth:
        reader.require(not reader.ended, ")")
        depth += (reader.sign() == "(") - (reader.sign() == ")")
        reader.at += 1
    length = reader.at - 1 - start
    reader.at = start
    inner = reader.of_part(list(reader.rest)[:length])
    reader.at = start + length + 1
    return inner.parts()
