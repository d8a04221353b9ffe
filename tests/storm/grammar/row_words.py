"""The parts of INSERT, UPDATE and DELETE that MySQL and PostgreSQL spell alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from tests.storm.generator import Grammar
from tests.storm.site import Column, TableFacts
from tests.storm.spelling import quoted


class RowWords(Grammar):
    """Parts of statements about rows; names are in backticks, as the spelling expects them."""

    integers: ClassVar[tuple[str, ...]]
    """The catalogue's names of types whose values have a remainder."""

    @abstractmethod
    def full(self, table: TableFacts) -> str:
        """A table's name, with its schema where that is needed."""

    @abstractmethod
    def value(self, column: Column) -> str:
        """A value for a column."""

    @abstractmethod
    def values(self, columns: Iterable[Column], number: int) -> str:
        """A row; its key is ``number`` where the type allows that."""

    def listed(self, columns: Iterable[Column]) -> str:
        return ", ".join(quoted(column.name) for column in columns)

    def assignments(self, table: TableFacts) -> str:
        columns = self.columns(table, key=False) or self.columns(table)
        chosen = self.rng.sample(columns, min(len(columns), self.rng.randint(1, 2)))
        return ", ".join(f"{quoted(one.name)} = {self.value(one)}" for one in chosen)

    def condition(self, table: TableFacts) -> str:
        column = self.rng.choice(table.columns)
        if column.type in self.integers:
            return f"{quoted(column.name)} % 3 = {self.rng.randint(0, 2)}"
        return f"{quoted(column.name)} {self.pick('IS NOT NULL', 'IS NULL')}"

    def inserted(self, table: TableFacts, rows: int) -> str:
        """What follows INSERT INTO."""
        columns = self.columns(table)
        first = self.rng.randint(1, 60)
        values = ", ".join(self.values(columns, first + at) for at in range(rows))
        return f"{self.full(table)} ({self.listed(columns)}) VALUES {values}"

    @abstractmethod
    def inserted_or_ignored(self, table: TableFacts) -> str:
        """An INSERT that duplicate keys do not fail."""

    def any_dml(self, table: TableFacts) -> str:
        kind = self.rng.randrange(4)
        if kind == 0:
            return f"UPDATE {self.full(table)} SET {self.assignments(table)}"
        if kind == 1:
            return f"DELETE FROM {self.full(table)} WHERE {self.condition(table)}"
        return self.inserted_or_ignored(table)
