"""Inferred column names: definitions of tables whose columns the binlog does not name.

With ``binlog_row_metadata`` other than FULL a table map has only storage types.  Names, signs,
character sets, labels and the key are in the server's catalogue, which describes the present.
It is used for a table that no statement can have changed between the stream's position and the
position at which the catalogue was read, and after that until a statement in the stream names the
table.  Statements are only searched for names: their result is read from the catalogue.
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
from databus.relay.sources.mysql.tables.cascades import Cascades
from databus.relay.sources.mysql.tables.mysql_tables import Catalogue, MySqlTable, MySqlTableColumn

NOT_READ = Knowledge(unseen="the views and triggers of the catalogue were not read")


@dataclass(frozen=True, slots=True)
class LookaheadResult:
    """The catalogue, and every statement between a stream position and where it was read.

    ``shown`` are table maps with names that come after that position and before any statement
    that can have changed their table.  If they were looked for, ``ahead`` ends as soon as they,
    or such statements, were found.  ``is_present`` means that there is no statement at all.
    """

    catalogue: Catalogue
    ahead: tuple[Statement, ...]
    shown: Mapping[str, bytes] = field(default_factory=dict)
    knowledge: Knowledge = NOT_READ
    cascades: Cascades | None = None
    is_present: bool = False

    def changes(self, source: str) -> list[Statement]:
        """The statements that can have changed a table."""
        schema, name = split_source(source)
        return [statement for statement in self.ahead if statement.may_change(schema, name)]


class InferredColumns:
    """The certain definitions of tables whose columns the binlog does not name.

    Invariants:
        I1. No statement can have changed a table of ``get`` between the position at which it was
            learned and the one at which the catalogue was read, nor between the former and the
            stream's position.
        I2. Statements up to ``since_scn`` remove no table: the stored ones are as of then.

    ``is_needed`` is set by the first table map without names, and by stored definitions of an
    earlier stream; before that no definitions are inferred.

    Owner: the task that reads the stream.
    """

    def __init__(self, since_scn: int = 0, stored: str = "") -> None:
        self.since_scn = since_scn
        self._tables = _decoded(stored) if stored else {}
        self.is_needed = bool(self._tables)
        self._encoded: str | None = stored

    def get(self, source: str) -> MySqlTable | None:
        """The table at the stream's position, if that is certain."""
        return self._tables.get(source)

    @property
    def tables(self) -> Mapping[str, MySqlTable]:
        """All tables that are certain."""
        return self._tables

    def forget(self, statement: Statement) -> bool:
        """Note a statement of the stream; returns whether it may change a certain table."""
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
        """Take a table's definition from the catalogue that was just read.

        Raises:
            TableUncertain: a statement between the stream's position and there can have changed it.
        """
        table = lookahead.catalogue.get(source)
        changes = lookahead.changes(source)
        if table is None or changes:
            since = f"{changes[0]} changed it" if changes else "it was dropped"
            raise TableUncertain(
                f"the binlog does not name the columns of {source} (binlog_row_metadata is not "
                f"FULL), and {since} before its definition could be read"
            )
        self._tables[source] = table
        self._encoded = None
        return table

    def learn_named(self, statement: Statement, lookahead: LookaheadResult) -> None:
        """The same for every table that a statement names and that is certain."""
        for source, table in lookahead.catalogue.items():
            named = statement.may_change(table.schema, table.name)
            if named and not lookahead.changes(source):
                self._tables[source] = table
                self._encoded = None

    def encode(self) -> str:
        """As JSON, to be stored; "" if there are none."""
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
    """A table map without names, completed from the catalogue.

    Signs and character sets come from the binlog if it has them.

    Raises:
        TableUncertain: they have different numbers of columns.
        UnsupportedChange: the server does not list a character set of the table.
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
            _collation(code, announced, column, charsets)
            for code, announced, column in zip(
                found.types, found.collations, table.columns, strict=True
            )
        ),
        names=tuple(column.name for column in table.columns),
        members=tuple(tuple(label.encode() for label in labels) for labels in lists),
    )


def _collation(code: int, announced: int, column: MySqlTableColumn, charsets: Charsets) -> int:
    if code in (ENUM, SET):
        return charsets.collation_of("utf8mb4")  # The encoding of the catalogue's labels.
    return announced or charsets.collation_of(column.charset or "binary")


def _labels(type_name: str) -> list[str]:
    if not type_name.startswith(("enum(", "set(")):
        return []
    return [label.replace("''", "'") for label in re.findall(r"'((?:[^']|'')*)'", type_name)]
