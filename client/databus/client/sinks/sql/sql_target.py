"""What a kind of database does for a mirror: connections, types, and the statements for rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from databus.client.checkpoints.checkpoint_table import Answer
from databus.client.sinks.sql.net_rows import POSITION
from databus.client.sinks.sql.table_structures import StructureChange, shared_columns
from databus.common.checkpoint import Position
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Column, SourceSchema


@dataclass(frozen=True, slots=True)
class MirrorTable:
    """A table of the target: its name, also in SQL, and its columns besides the position."""

    target: str
    sql_name: str
    schema: SourceSchema

    @property
    def key(self) -> tuple[str, ...]:
        """The columns of the key."""
        return self.schema.key


class SqlTarget(ABC):
    """One connection to a database of one kind.

    A transaction begins with the first statement after ``connect``, ``commit`` or ``rollback``.

    Owner: one thread.
    Raises: what the driver raises; a retry repairs neither ``row_refusals`` (of the values of a
    row) nor ``refusals`` (of a definition).
    """

    has_transactional_ddl: ClassVar[bool] = True
    """Whether a definition can be rolled back; otherwise it commits what was written before."""
    quote: ClassVar[str] = '"'
    same: ClassVar[str] = "IS NOT DISTINCT FROM"
    """The comparison that takes two nulls for equal."""
    text_type: ClassVar[str] = "TEXT"
    """The type of long texts in the table of tables."""
    row_refusals: tuple[type[Exception], ...] = ()
    refusals: tuple[type[Exception], ...] = ()

    @abstractmethod
    def connect(self) -> None:
        """Open the connection."""

    @abstractmethod
    def close(self) -> None:
        """Close it; what was not committed is lost.  Never raises."""

    @abstractmethod
    def commit(self) -> None:
        """Make the transaction durable."""

    @abstractmethod
    def ask(self, sql: str, values: Sequence[Any] = ()) -> Answer:
        """Run a statement with a ? for each value."""

    @abstractmethod
    def type_of(self, column: Column, *, is_key: bool, key_count: int) -> str:
        """The type of a column in a definition."""

    @abstractmethod
    def has_table(self, name: str) -> bool:
        """Whether a table of this name is there."""

    @abstractmethod
    def upsert(self, table: MirrorTable, rows: Any, *, are_new: bool = False) -> None:
        """Write whole rows, unless the target has a newer one.

        ``rows`` is a record batch of columns of the table, then ``_scn`` and ``_seq``; each key is
        there once.  ``are_new``: the target probably has none of them.
        """

    @abstractmethod
    def update(self, table: MirrorTable, names: Sequence[str], rows: Any) -> None:
        """Set the columns ``names`` of rows that are there and not newer."""

    @abstractmethod
    def delete(self, table: MirrorTable, rows: Any) -> None:
        """Delete rows by key, unless they are newer."""

    def empty(self, table: MirrorTable, position: Position) -> None:
        """Delete all rows that are not newer than ``position``."""
        self.ask(
            f"DELETE FROM {table.sql_name} WHERE ({self.names(POSITION)}) <= "
            f"({position.scn}, {position.seq})"
        )

    def quoted(self, name: str) -> str:
        """A name in SQL."""
        return self.quote + name.replace(self.quote, self.quote * 2) + self.quote

    def sql_name(self, target: str) -> str:
        """The name of a target, ``table`` or ``schema.table``, in SQL."""
        head, rest = split_source(target)
        return f"{self.quoted(head)}.{self.quoted(rest)}" if rest else self.quoted(head)

    def prepare_name(self, target: str) -> None:
        """Make the schema of a target, where the kind has schemas."""
        return

    def definition(self, column: Column, schema: SourceSchema) -> str:
        """A column in CREATE TABLE."""
        is_key = column.name in schema.key
        type_name = self.type_of(column, is_key=is_key, key_count=len(schema.key))
        needs = " NOT NULL" if is_key and not schema.nullable_key else ""
        return f"{self.quoted(column.name)} {type_name}{needs}"

    def create(self, table: MirrorTable) -> None:
        """Create the table, with the key as its primary key."""
        self.ask(self.creation(table))

    def creation(self, table: MirrorTable) -> str:
        """The statement of ``create``."""
        schema = table.schema
        parts = [self.definition(column, schema) for column in schema.columns]
        parts += [f"{self.quoted(name)} BIGINT NOT NULL" for name in POSITION]
        if not schema.nullable_key:
            parts.append(f"PRIMARY KEY ({self.names(schema.key)})")
        return f"CREATE TABLE {table.sql_name} ({', '.join(parts)})"

    def rekey(self, before: SourceSchema, table: MirrorTable) -> None:
        """Make the table again with another key, and its rows as far as they have that key."""
        old = self.sql_name(f"{table.target}_databus_old")
        self.ask(f"CREATE TABLE {old} AS SELECT * FROM {table.sql_name}")
        self.ask(f"DROP TABLE {table.sql_name}")
        self.create(table)
        names = shared_columns(before, table.schema)
        if set(table.key) <= set(names):
            listed = self.names([*names, *POSITION])
            whole = " AND ".join(f"{self.quoted(name)} IS NOT NULL" for name in table.key)
            where = "" if table.schema.nullable_key else f" WHERE {whole}"
            self.ask(f"INSERT INTO {table.sql_name} ({listed}) SELECT {listed} FROM {old}{where}")
        self.ask(f"DROP TABLE {old}")

    def adopt(self, table: MirrorTable) -> None:
        """Use a table that is there: give it the columns of the position."""
        for name in POSITION:
            self.ask(
                f"ALTER TABLE {table.sql_name} ADD COLUMN {self.quoted(name)} "
                "BIGINT NOT NULL DEFAULT 0"
            )

    def alter(self, table: MirrorTable, change: StructureChange) -> None:
        """Add, convert and replace columns."""
        for column in change.converted:
            self.convert(table, column)
        for column in change.replaced:
            self.drop_column(table, column)
        for column in (*change.replaced, *change.added):
            self.ask(
                f"ALTER TABLE {table.sql_name} ADD COLUMN {self.definition(column, table.schema)}"
            )

    def convert(self, table: MirrorTable, column: Column) -> None:
        """Give a column another type, with its values."""
        type_name = self.type_of(column, is_key=column.name in table.key, key_count=len(table.key))
        name = self.quoted(column.name)
        self.ask(f"ALTER TABLE {table.sql_name} ALTER COLUMN {name} TYPE {type_name}")

    def drop_column(self, table: MirrorTable, column: Column) -> None:
        """Drop a column."""
        self.ask(f"ALTER TABLE {table.sql_name} DROP COLUMN {self.quoted(column.name)}")

    def names(self, names: Sequence[str]) -> str:
        """Names in a list."""
        return ", ".join(map(self.quoted, names))
