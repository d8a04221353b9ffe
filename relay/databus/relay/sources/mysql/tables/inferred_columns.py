"""Tables of a binlog that does not name their columns: what is certain of them where the stream is.

With ``binlog_row_metadata`` other than FULL a table map has storage types alone.  Names, signs,
character sets, labels and the key are in the server's catalogue, which is of now and not of then.
It is believed for a table that no statement can have changed between the stream's place and the
place at which it was read, and from there on until a statement in the stream names the table.
Statements are not understood, only searched for names: what they made is read, not derived.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from databus.common.schema.source_names import split_source
from databus.relay.sources.mysql.protocol.binlog_events import ENUM, SET, TableMap
from databus.relay.sources.mysql.rows.charsets import Charsets
from databus.relay.sources.mysql.rows.uncertain_table import TableUncertain
from databus.relay.sources.mysql.statements import Knowledge, Statement
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue, MySqlTable, MySqlTableColumn

NOT_ASKED = Knowledge(unseen="the catalogue was not asked for views and triggers")


@dataclass(frozen=True, slots=True)
class LookaheadResult:
    """The catalogue, and every statement from a place of the stream up to where it was read.

    ``shown`` are table maps with names that come behind that place before any statement that can
    have changed their table; where they were looked for, ``ahead`` ends as soon as they, or such
    statements, were found.
    """

    catalogue: Catalogue
    ahead: tuple[Statement, ...]
    shown: Mapping[str, bytes] = field(default_factory=dict)
    knowledge: Knowledge = NOT_ASKED

    def changes(self, source: str) -> list[Statement]:
        """The statements that can have changed a table."""
        schema, name = split_source(source)
        return [statement for statement in self.ahead if statement.may_change(schema, name)]


class InferredColumns:
    """What is certain of tables that the binlog does not name the columns of.

    Invariants:
        I1. A table that ``get`` gives was in the catalogue at a place up to which, counted from
            the place at which it was learned, no statement can have changed it; nor has one
            from there to where the stream is.
        I2. Up to ``since_scn`` nothing is forgotten: what was kept is as of then.

    ``is_needed`` is set by the first table map without names, and by what was kept of an earlier
    stream; while it is not, nothing is tracked.

    Owner: the task that reads the stream.
    """

    def __init__(self, since_scn: int = 0, kept: str = "") -> None:
        self.since_scn = since_scn
        self._tables = _decoded(kept) if kept else {}
        self.is_needed = bool(self._tables)
        self._encoded: str | None = kept

    def get(self, source: str) -> MySqlTable | None:
        """The table as it is now in the stream, if that is certain."""
        return self._tables.get(source)

    @property
    def tables(self) -> Mapping[str, MySqlTable]:
        """All tables that are certain."""
        return self._tables

    def forget(self, statement: Statement) -> bool:
        """A statement has come by; returns whether a table that was certain may be changed."""
        changed = [
            source
            for source, table in self._tables.items()
            if statement.may_change(table.schema, table.name)
        ]
        for source in changed:
            del self._tables[source]
        if changed:
            self._encoded = None
        return bool(changed)

    def learn(self, source: str, lookahead: LookaheadResult) -> MySqlTable:
        """Believe the catalogue, read just now, about a table from here on.

        Raises:
            TableUncertain: a statement between here and there can have changed it.
        """
        table = lookahead.catalogue.get(source)
        changes = lookahead.changes(source)
        if table is None or changes:
            since = f"{changes[0]} changed it" if changes else "it is gone"
            raise TableUncertain(
                f"the binlog does not name the columns of {source} (binlog_row_metadata is not "
                f"FULL), and {since} before its definition could be read"
            )
        self._tables[source] = table
        self._encoded = None
        return table

    def learn_named(self, statement: Statement, lookahead: LookaheadResult) -> None:
        """The same for every table that a statement names, where it is certain."""
        for source, table in lookahead.catalogue.items():
            named = statement.may_change(table.schema, table.name)
            if named and not lookahead.changes(source):
                self._tables[source] = table
                self._encoded = None

    def encode(self) -> str:
        """As JSON, to be kept; "" if there is nothing."""
        if self._encoded is None:
            self._encoded = (
                json.dumps([asdict(table) for table in self._tables.values()])
                if self._tables
                else ""
            )
        return self._encoded


def _decoded(text: str) -> dict[str, MySqlTable]:
    tables = {}
    for document in json.loads(text):
        columns = tuple(MySqlTableColumn(**column) for column in document.pop("columns"))
        table = MySqlTable(**{**document, "columns": columns, "key": tuple(document["key"])})
        tables[table.source] = table
    return tables


def completed(found: TableMap, table: MySqlTable, charsets: Charsets) -> TableMap:
    """A table map without names, with what the catalogue adds to it.

    Of signs and character sets the binlog is believed where it has them.

    Raises:
        TableUncertain: they have not the same number of columns.
        UnsupportedChange: the server does not know a character set of its own.
    """
    if len(table.columns) != len(found.types):
        raise TableUncertain(
            f"the binlog has {len(found.types)} columns of {table.source} without their names, "
            f"its definition {len(table.columns)}"
        )
    lists = [_labels(column.type_name) for column in table.columns]
    return replace(
        found,
        unsigned=found.unsigned or tuple(" unsigned" in c.type_name for c in table.columns),
        collations=tuple(
            _collation(code, told, column, charsets)
            for code, told, column in zip(found.types, found.collations, table.columns, strict=True)
        ),
        names=tuple(column.name for column in table.columns),
        members=tuple(tuple(label.encode() for label in labels) for labels in lists),
    )


def _collation(code: int, told: int, column: MySqlTableColumn, charsets: Charsets) -> int:
    if code in (ENUM, SET):
        return charsets.collation_of("utf8mb4")  # Of the labels as they stand in the catalogue.
    return told or charsets.collation_of(column.charset or "binary")


def _labels(type_name: str) -> list[str]:
    if not type_name.startswith(("enum(", "set(")):
        return []
    return [label.replace("''", "'") for label in re.findall(r"'((?:[^']|'')*)'", type_name)]
