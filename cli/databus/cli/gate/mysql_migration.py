"""Statements of MariaDB and MySQL: the definitions after them, and what the relay does.

The relay's own functions decide: ``effects_of`` reads the statement as the binlog decoder does, and
``changed_unseen`` names the tables that are suspended.  This module adds the definition after
the statement, which the decoder reads from the catalogue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from databus.cli.gate.migration_files import MigrationStatement
from databus.cli.gate.mysql_columns import DefinedColumn, defined_column
from databus.cli.gate.table_draft import TableDraft, inside
from databus.cli.gate.table_effects import CaptureRules, Reaction, TableEffect
from databus.common.errors import FormatError, UnsupportedChange
from databus.common.schema.source_names import join_source, split_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.mysql.statements import (
    Effects,
    NotUnderstood,
    Statement,
    StatementDialect,
    effects_of,
    names_in,
    tokens_of,
)
from databus.relay.sources.mysql.statements.token_reader import TableName, TokenReader, keywords
from databus.relay.sources.mysql.tables.changed_tables import changed_unseen
from databus.relay.sources.mysql.tables.dropped_columns import DroppedColumns

_ROWS = keywords("INSERT REPLACE UPDATE DELETE LOAD SELECT WITH VALUES DO")
"""Statements whose changes of rows are ordinary events."""
_OPAQUE = keywords("CALL EXECUTE SOURCE SYSTEM DELIMITER")
_READS = {"ansi_quotes", "no_backslash_escapes", "mssql", "ansi", "oracle", "db2", "maxdb"}
_UNLOGGED = {"sql_log_bin", "binlog_format", "sql_replica_skip", "skip_replication"}
_NO_COLUMNS = keywords("INDEX KEY UNIQUE FULLTEXT SPATIAL CHECK FOREIGN PARTITION PERIOD VECTOR")
NO_KEY = "it has no primary key after it, so that its rows cannot be identified"


class MysqlMigration:
    """Reads the statements of one migration.

    Owner: one check.
    """

    def __init__(
        self, schema: str, rules: CaptureRules, captures: Callable[[str], bool], *, is_mysql: bool
    ) -> None:
        """``schema`` is the default one; ``captures``: whether the relay has a table's name."""
        self._schema = schema
        self._rules = rules
        self._captures = captures
        self._dialect = StatementDialect(is_mysql=is_mysql)

    def effects(
        self, statement: MigrationStatement, schemas: Mapping[str, SourceSchema]
    ) -> list[TableEffect]:
        """The effects on tables.

        Raises:
            NotUnderstood: the statement may affect any table.
        """
        if statement.problem:
            raise NotUnderstood(statement.problem)
        tokens = tokens_of(statement.text, 0, is_mysql=self._dialect.is_mysql)
        reader = TokenReader(tokens, self._schema)
        word = reader.keyword()
        if word in _ROWS or reader.sign() == "(":
            return []
        if word in _OPAQUE:
            raise NotUnderstood(f"{word} may run any statement")
        if word == "USE":
            reader.at += 1
            self._schema = reader.identifier()
            return []
        read = Statement(self._schema, statement.text)
        if word == "SET" and reader.keyword(1) != "STATEMENT":
            return self._set(names_in(read))
        captured = [split_source(source) for source in schemas]
        found = effects_of(read, self._dialect, captured)
        captured += [new for _, new in found.moved if new not in captured]
        captured = [name for name in captured if self._captures(join_source(*name))]
        return self._of_tables(
            _Reading(reader, self._rules, self._dialect), found, captured, schemas
        )

    def _set(self, names: frozenset[str]) -> list[TableEffect]:
        if names & _UNLOGGED:
            raise NotUnderstood("what follows may not be in the binlog as rows and statements")
        if "sql_mode" in names and names & _READS:
            raise NotUnderstood("what follows is read with another sql_mode")
        return []

    def _of_tables(
        self,
        reading: _Reading,
        found: Effects,
        captured: list[TableName],
        schemas: Mapping[str, SourceSchema],
    ) -> list[TableEffect]:
        reading.read(schemas)
        drafts = reading.drafts
        left = {
            source: after for source, one in drafts.items() if (after := one.certain()) is not None
        }
        origins = {join_source(*new): join_source(*old) for old, new in found.moved}
        for new, old in origins.items():
            if (moved := left.pop(old, None) or schemas.get(old)) is not None:
                left[new] = replace(moved, source=new)
        keys = {source: schema.key for source, schema in schemas.items()}
        unseen = {
            change.source: change.why
            for change in changed_unseen(found, captured, schemas, keys, left, DroppedColumns())
        }
        gone = {join_source(*name) for name in found.emptied} - origins.keys()
        sources = [join_source(*name) for name in captured]
        sources += [one for one in drafts if one not in sources and self._captures(one)]
        return [
            self._of_table(source, drafts.get(source), schemas, left, unseen, gone, reading)
            for source in sources
            if source in unseen or source in gone or source in drafts
        ]

    def _of_table(
        self,
        source: str,
        draft: _MysqlTable | None,
        schemas: Mapping[str, SourceSchema],
        left: Mapping[str, SourceSchema],
        unseen: Mapping[str, str],
        gone: set[str],
        reading: _Reading,
    ) -> TableEffect:
        before, after = schemas.get(source), left.get(source)
        reaction = Reaction.FOLLOWED
        why = "" if before is not None else "it is new"
        if source in gone:
            reaction, why = Reaction.EMPTIED, "all its rows go"
            after = before if reading.is_truncate else None
        elif source in unseen:
            reaction, why = Reaction.SUSPENDED, unseen[source]
        elif draft is not None and draft.problem:
            reaction, why = Reaction.UNCERTAIN, draft.problem
        elif draft is not None and after is None:
            reaction, why = Reaction.SUSPENDED, draft.unsupported or NO_KEY
        is_gone = source in gone and not reading.is_truncate
        renamed = draft.renamed() if draft is not None else {}
        return TableEffect(source, reaction, why, before, after, renamed, is_gone)


class _MysqlTable(TableDraft):
    """A draft; ``unsupported``: why the relay cannot capture a column; ``problem``: why the
    definition is not certain."""

    unsupported = problem = ""

    def certain(self) -> SourceSchema | None:
        """The definition that the relay announces; None if there is none, or it is not certain."""
        return None if self.unsupported or self.problem else self.schema()


class _Reading:
    """Reads the definitions that a statement changes, into ``drafts``.

    Owner: ``MysqlMigration``.
    """

    def __init__(self, reader: TokenReader, rules: CaptureRules, dialect: StatementDialect) -> None:
        self._reader = reader
        self._rules = rules
        self._dialect = dialect
        self.is_truncate = reader.keyword() == "TRUNCATE"
        self.drafts: dict[str, _MysqlTable] = {}

    def read(self, schemas: Mapping[str, SourceSchema]) -> None:
        """Read the whole statement."""
        reader = self._reader
        while reader.accept("SET", "STATEMENT"):
            while not reader.ended and not reader.accept("FOR"):
                reader.at += 1
        word = reader.accept_any("ALTER", "CREATE")
        reader.skip_all("ONLINE", "OFFLINE", "IGNORE", "OR", "REPLACE")
        if not word or not reader.accept("TABLE"):
            return
        reader.accept("IF", "EXISTS")
        is_optional = reader.accept("IF", "NOT", "EXISTS")
        source = join_source(*reader.table())
        if (word == "ALTER") != (source in schemas) and (word == "ALTER" or is_optional):
            return
        before = schemas[source] if word == "ALTER" else None
        draft = self.drafts[source] = _MysqlTable(source, before, folds=True)
        try:
            (self._alter if word == "ALTER" else self._create)(draft)
            draft.schema()
        except (NotUnderstood, FormatError, IndexError) as error:
            draft.problem = f"the definition after it is not certain: {error}"

    def _alter(self, draft: _MysqlTable) -> None:
        reader = self._reader
        if reader.accept("WAIT"):
            reader.identifier()
        reader.accept("NOWAIT")
        for part in reader.parts():
            if part:
                self._clause(reader.of_part(part), draft)

    def _clause(self, reader: TokenReader, draft: _MysqlTable) -> None:
        word = reader.keyword()
        reader.at += 1
        if word == "ADD":
            self._add(reader, draft)
        elif word in ("MODIFY", "CHANGE"):
            reader.accept("COLUMN")
            reader.accept("IF", "EXISTS")
            old = reader.identifier()
            if word == "MODIFY":
                reader.at -= 1
            self._redefine(old, reader, draft)
        elif word == "DROP":
            if reader.accept("PRIMARY", "KEY"):
                draft.key = []
            elif reader.keyword() not in _NO_COLUMNS | {"CONSTRAINT", "SYSTEM"}:
                reader.accept("COLUMN")
                reader.accept("IF", "EXISTS")
                draft.drop(reader.identifier())
        elif word == "RENAME" and reader.accept("COLUMN"):
            number = draft.number(reader.identifier())
            reader.expect("TO")
            draft.define(number, replace(draft.columns[number], name=reader.identifier()))

    def _redefine(self, old: str, reader: TokenReader, draft: _MysqlTable) -> None:
        number = draft.number(old)
        found = self._column(reader, draft)
        if found is None:
            return
        column = found.column
        if number in draft.key:
            column = replace(column, nullable=draft.nullable_key and column.nullable)
        draft.define(number, column)
        draft.move(number, after=found.after or None, is_first=found.is_first)
        if found.is_primary:
            draft.set_key([column.name])

    def _add(self, reader: TokenReader, draft: _MysqlTable) -> None:
        if self._is_key(reader, draft) or reader.keyword() in _NO_COLUMNS | {"CONSTRAINT"}:
            return
        reader.accept("COLUMN")
        is_optional = reader.accept("IF", "NOT", "EXISTS")
        if reader.sign() == "(":
            for part in inside(reader):
                self._add(reader.of_part(part), draft)
            return
        name = reader.identifier()
        reader.at -= 1
        if is_optional and draft.find(name) is not None:
            return
        found = self._column(reader, draft)
        if found is None:
            return
        draft.add(found.column, after=found.after or None, is_first=found.is_first)
        if found.is_primary:
            draft.set_key([found.column.name])

    def _is_key(self, reader: TokenReader, draft: _MysqlTable) -> bool:
        """Read a primary key, if it comes next."""
        start = reader.at
        if reader.accept("CONSTRAINT") and reader.keyword() not in ("PRIMARY", "CHECK"):
            reader.identifier()
        if not reader.accept("PRIMARY", "KEY"):
            reader.at = start
            return False
        while not reader.ended and reader.sign() != "(":
            reader.at += 1
        draft.set_key(reader.of_part(part).identifier() for part in inside(reader))
        return True

    def _column(self, reader: TokenReader, draft: _MysqlTable) -> DefinedColumn | None:
        try:
            return defined_column(reader, self._rules.zero_dates, is_mysql=self._dialect.is_mysql)
        except UnsupportedChange as error:
            draft.unsupported = error.message
            return None

    def _create(self, draft: _MysqlTable) -> None:
        reader = self._reader
        if reader.keyword() == "LIKE" or reader.keyword(1) in ("LIKE", "SELECT"):
            raise NotUnderstood("it has the columns of another table")
        keys = []
        for part in inside(reader):
            if part and part[0].keyword in ("CONSTRAINT", "PRIMARY"):
                keys.append(part)  # Its columns may come later.
            elif part and part[0].keyword not in _NO_COLUMNS:
                self._add(reader.of_part(part), draft)
        for part in keys:
            self._is_key(reader.of_part(part), draft)
