"""Statements of PostgreSQL: the definitions after them, and what the relay does.

PostgreSQL logs no statement.  The relay compares a table's definition in the catalogue with the
one before (``change_between``), so this module makes both definitions and asks the same function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from databus.cli.gate.migration_files import MigrationStatement, postgres_tokens
from databus.cli.gate.postgres_columns import PostgresColumn, read_column, read_type, stored_type
from databus.cli.gate.table_draft import TableDraft, inside
from databus.cli.gate.table_effects import CaptureRules, Reaction, TableEffect
from databus.common.errors import FormatError
from databus.common.schema.source_names import join_source, split_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.mysql.statements.lexer import NotUnderstood
from databus.relay.sources.mysql.statements.token_reader import TokenReader, keywords
from databus.relay.sources.postgres.tables.table_definitions import Definition, change_between

_HARMLESS = keywords(
    """
    INSERT UPDATE DELETE MERGE COPY SELECT WITH VALUES TABLE BEGIN START COMMIT END ROLLBACK ABORT
    SAVEPOINT RELEASE COMMENT GRANT REVOKE ANALYZE VACUUM CLUSTER REINDEX LOCK REFRESH NOTIFY LISTEN
    UNLISTEN CHECKPOINT SHOW EXPLAIN DEALLOCATE CLOSE FETCH MOVE DECLARE RESET DISCARD SECURITY
    """
)
"""Statements that change no definition of a table; their changes of rows are ordinary events."""
_OTHER_OBJECTS = keywords(
    """
    INDEX VIEW FUNCTION PROCEDURE ROUTINE TRIGGER SEQUENCE EXTENSION POLICY ROLE USER GROUP
    AGGREGATE CAST COLLATION CONVERSION DATABASE EVENT FOREIGN LANGUAGE MATERIALIZED OPERATOR RULE
    SERVER STATISTICS SUBSCRIPTION TABLESPACE TEXT ACCESS DEFAULT LARGE SYSTEM TRANSFORM UNIQUE
    RECURSIVE CONSTRAINT
    """
)
_KEPT = keywords("OWNER ENABLE DISABLE VALIDATE CLUSTER SET RESET NO FORCE NOT OF REPLICA")
_NO_COLUMNS = keywords("CONSTRAINT PRIMARY UNIQUE CHECK FOREIGN EXCLUDE LIKE")
_WITHOUT_KEY = "it loses its key, so that its rows cannot be identified"
_GONE = "which has no event: consumers keep its rows until the relay resynchronises it"


class PostgresMigration:
    """Reads the statements of one migration.

    Owner: one check.
    """

    def __init__(self, schema: str, rules: CaptureRules, captures: Callable[[str], bool]) -> None:
        """``schema`` is the default one; ``captures``: whether the relay has a table's name."""
        self._schema = schema
        self._rules = rules
        self._captures = captures

    def effects(
        self, statement: MigrationStatement, schemas: Mapping[str, SourceSchema]
    ) -> list[TableEffect]:
        """The effects on tables.

        Raises:
            NotUnderstood: the statement may affect any table.
        """
        if statement.problem:
            raise NotUnderstood(statement.problem)
        reader = TokenReader(postgres_tokens(statement.text), self._schema)
        word = reader.keyword()
        reader.at += 1
        readers: dict[
            str, Callable[[TokenReader, Mapping[str, SourceSchema]], Iterable[TableEffect]]
        ] = {
            "ALTER": self._alter,
            "CREATE": self._create,
            "DROP": self._drop,
            "TRUNCATE": self._truncate,
            "SET": self._set,
        }
        if word in readers:
            return [
                effect for effect in readers[word](reader, schemas) if self._captures(effect.source)
            ]
        if word not in _HARMLESS:
            raise NotUnderstood(f"{word or 'its beginning'} may run any statement")
        return []

    def _set(self, reader: TokenReader, schemas: Mapping[str, SourceSchema]) -> list[TableEffect]:
        reader.skip_all("LOCAL", "SESSION")
        if reader.accept("SEARCH_PATH"):
            reader.accept_any("TO") or reader.accept_sign("=")
            token = reader.rest[0] if reader.rest else None
            self._schema = token.text.strip("'") if token is not None else self._schema
        elif reader.keyword() in ("STANDARD_CONFORMING_STRINGS", "DEFAULT_TABLE_ACCESS_METHOD"):
            raise NotUnderstood("what follows is read in another way")
        return []

    def _truncate(
        self, reader: TokenReader, schemas: Mapping[str, SourceSchema]
    ) -> list[TableEffect]:
        reader.accept("TABLE")
        found = []
        while not reader.ended:
            reader.accept("ONLY")
            source = join_source(*reader.table())
            reader.accept_sign("*")
            if source in schemas:
                schema = schemas[source]
                found.append(
                    TableEffect(source, Reaction.EMPTIED, "all its rows go", schema, schema)
                )
            if reader.accept("CASCADE"):
                raise NotUnderstood("TRUNCATE ... CASCADE may empty any table")
            if not reader.accept_sign(","):
                break
        return found

    def _drop(self, reader: TokenReader, schemas: Mapping[str, SourceSchema]) -> list[TableEffect]:
        if reader.accept("TABLE"):
            reader.accept("IF", "EXISTS")
            return [
                _gone(schemas[source], f"it is dropped, {_GONE}")
                for source in (join_source(*name) for name in reader.tables())
                if source in schemas
            ]
        if reader.accept("SCHEMA"):
            reader.accept("IF", "EXISTS")
            schema = reader.identifier()
            return [
                _gone(one, f"its schema is dropped, {_GONE}")
                for source, one in schemas.items()
                if split_source(source)[0] == schema
            ]
        if reader.keyword() in ("TYPE", "DOMAIN"):
            reader.at += 1
            reader.accept("IF", "EXISTS")
            return self._of_type(reader, schemas, "its type is dropped", Reaction.UNCERTAIN)
        if reader.keyword() not in _OTHER_OBJECTS:
            raise NotUnderstood(f"DROP {reader.keyword() or '...'} may affect any table")
        return []

    def _of_type(
        self,
        reader: TokenReader,
        schemas: Mapping[str, SourceSchema],
        why: str,
        reaction: Reaction,
    ) -> list[TableEffect]:
        """The tables with a column of a type of the user's."""
        name = read_type(reader).name
        found = []
        for source, schema in schemas.items():
            named = [c.name for c in schema.columns if stored_type(c).name == name]
            if named:
                words = f"{why} (column {', '.join(named)})"
                after = schema if reaction is Reaction.SUSPENDED else None
                found.append(TableEffect(source, reaction, words, schema, after))
        return found

    def _alter(self, reader: TokenReader, schemas: Mapping[str, SourceSchema]) -> list[TableEffect]:
        if reader.accept("TABLE"):
            return self._alter_table(reader, schemas)
        if reader.accept("TYPE"):
            start = reader.at
            read_type(reader)
            if reader.accept("ADD", "VALUE") or reader.accept("OWNER"):
                return []
            renames = reader.accept("RENAME", "VALUE")
            reader.at = start
            why = "a label of its enum is renamed" if renames else "its type is altered"
            reaction = Reaction.SUSPENDED if renames else Reaction.UNCERTAIN
            return self._of_type(reader, schemas, why, reaction)
        if reader.accept("DOMAIN"):
            return self._of_type(reader, schemas, "its domain is altered", Reaction.UNCERTAIN)
        if reader.keyword() not in _OTHER_OBJECTS:
            raise NotUnderstood(f"ALTER {reader.keyword() or '...'} may affect any table")
        return []

    def _alter_table(
        self, reader: TokenReader, schemas: Mapping[str, SourceSchema]
    ) -> list[TableEffect]:
        if reader.accept("ALL", "IN", "TABLESPACE"):
            return []
        reader.accept("IF", "EXISTS")
        reader.accept("ONLY")
        schema, table = reader.table()
        reader.accept_sign("*")
        source = join_source(schema, table)
        if source not in schemas:
            return []
        before = schemas[source]
        if reader.accept("RENAME", "TO"):
            return _moved(before, join_source(schema, reader.identifier()))
        if reader.accept("SET", "SCHEMA"):
            return _moved(before, join_source(reader.identifier(), table))
        draft = _PostgresTable(source, before, self._rules)
        try:
            for part in reader.parts():
                _clause(reader.of_part(part), draft)
            return [draft.effect()]
        except (NotUnderstood, FormatError, IndexError) as error:
            why = f"the definition after it is not certain: {error}"
            return [TableEffect(source, Reaction.UNCERTAIN, why, before)]

    def _create(
        self, reader: TokenReader, schemas: Mapping[str, SourceSchema]
    ) -> list[TableEffect]:
        while reader.accept_any(
            "OR", "REPLACE", "TEMPORARY", "TEMP", "GLOBAL", "LOCAL", "UNLOGGED"
        ):
            if reader.keyword(-1) in ("TEMPORARY", "TEMP", "UNLOGGED"):
                return []
        if not reader.accept("TABLE"):
            if reader.keyword() in _OTHER_OBJECTS | {"TYPE", "DOMAIN", "SCHEMA"}:
                return []
            raise NotUnderstood(f"CREATE {reader.keyword() or '...'} may affect any table")
        is_optional = reader.accept("IF", "NOT", "EXISTS")
        source = join_source(*reader.table())
        if is_optional and source in schemas:
            return []
        draft = _PostgresTable(source, None, self._rules)
        try:
            if reader.accept("PARTITION", "OF"):
                return []
            for part in inside(reader):
                if part and part[0].keyword in ("LIKE",):
                    raise NotUnderstood("it has the columns of another table")
                if part and part[0].keyword not in _NO_COLUMNS:
                    draft.add_column(read_column(reader.of_part(part)))
                else:
                    _key_clause(reader.of_part(part), draft)
            if "INHERITS" in {token.keyword for token in reader.rest}:
                raise NotUnderstood("it inherits columns")
            after = draft.schema()
        except (NotUnderstood, FormatError, IndexError) as error:
            return [
                TableEffect(source, Reaction.UNCERTAIN, f"its definition is not certain: {error}")
            ]
        if after is None:
            why = "it is new, has no key, and is left out of the stream until it has one"
            return [TableEffect(source, Reaction.SUSPENDED, why)]
        guesses = tuple(draft.guessed)
        return [TableEffect(source, Reaction.FOLLOWED, "it is new", None, after, guesses=guesses)]


class _PostgresTable(TableDraft):
    """A draft with what the catalogue has besides: which columns are filled, and the file.

    Owner: ``PostgresMigration``.
    """

    def __init__(self, source: str, before: SourceSchema | None, rules: CaptureRules) -> None:
        super().__init__(source, before, folds=False)
        self._rules = rules
        self.altered: set[int] = set()
        self.filled: set[int] = set()
        self.is_rewritten = False
        self.trouble = ""

    def add_column(self, found: PostgresColumn) -> None:
        """Add a column; consumers do not have a generated one."""
        if found.is_generated:
            return
        number = self.add(found.type.column(found.name, not found.not_null, self._special))
        if found.fills:
            self.filled.add(number)
        if found.is_primary:
            self.set_key([found.name])
        if not found.type.is_built_in:
            self._guess(found.name, found.type.name)

    def retype(self, number: int, reader: TokenReader) -> None:
        """``TYPE t [USING ...]``."""
        old = self.columns[number]
        was, now = stored_type(old), read_type(reader)
        uses = "USING" in {token.keyword for token in reader.rest}
        self.define(number, now.column(old.name, old.nullable, self._special))
        self.altered.add(number)
        self.is_rewritten |= uses or not was.retains_file(now)
        if not now.is_built_in:
            self._guess(old.name, now.name)

    def _guess(self, column: str, type_name: str) -> None:
        self.guessed.append(
            f"{self.source}.{column} is taken for text: the type {type_name} is not built in, and "
            "a domain would have the type below it"
        )

    @property
    def _special(self) -> str:
        return self._rules.special_values

    def effect(self) -> TableEffect:
        """What the relay does, as its comparison of definitions decides."""
        before, after = self.before, self.schema()
        assert before is not None
        if self.trouble:
            return TableEffect(
                self.source, Reaction.SUSPENDED, self.trouble, before, after, self.renamed()
            )
        if after is None:
            return TableEffect(
                self.source, Reaction.SUSPENDED, _WITHOUT_KEY, before, None, self.renamed()
            )
        gap = change_between(self._definition(before), self._definition(None))
        reaction = Reaction.FOLLOWED if gap is None else Reaction.SUSPENDED
        return TableEffect(
            self.source, reaction, "" if gap is None else gap.why, before, after, self.renamed(),
            guesses=tuple(self.guessed),
        )  # fmt: skip

    def _definition(self, before: SourceSchema | None) -> Definition:
        """The definition ``before``, or the one after the statement."""
        rows = []
        columns = dict(enumerate(before.columns)) if before else self.columns
        for number, column in sorted(columns.items()):
            version = "1" if before or number not in self.altered else "2"
            is_missing = before is None and number in self.filled
            oid = stored_type(column).oid
            rows.append([number + 1, column.name, oid, version, False, is_missing, None])
        names = {column.name: number + 1 for number, column in columns.items()}
        key = before.key if before else tuple(self.columns[number].name for number in self.key)
        return Definition(
            json.dumps(rows),
            tuple(names[name] for name in key),
            {1: 2 if before is None and self.is_rewritten else 1},
            horizon=0,
            version="" if before else "2",
        )


def _gone(schema: SourceSchema, why: str) -> TableEffect:
    return TableEffect(schema.source, Reaction.SUSPENDED, why, schema, is_gone=True)


def _moved(before: SourceSchema, new: str) -> list[TableEffect]:
    after = replace(before, source=new)
    return [
        _gone(before, f"it is {new} from now on, {_GONE}"),
        TableEffect(
            new, Reaction.SUSPENDED, f"{before.source} with its rows took this name", None, after
        ),
    ]


def _clause(reader: TokenReader, draft: _PostgresTable) -> None:
    word = reader.keyword()
    reader.at += 1
    if word == "ADD":
        _add(reader, draft)
    elif word == "DROP":
        _drop(reader, draft)
    elif word == "ALTER":
        _alter_column(reader, draft)
    elif word == "RENAME":
        if reader.accept("CONSTRAINT"):
            return
        reader.accept("COLUMN")
        number = draft.number(reader.identifier())
        reader.expect("TO")
        draft.define(number, replace(draft.columns[number], name=reader.identifier()))
        draft.altered.add(number)
    elif word == "SET" and reader.accept("UNLOGGED"):
        draft.trouble = "an unlogged table is not in the log that the relay reads"
    elif word == "REPLICA":
        _identity(reader, draft)
    elif word in ("ATTACH", "DETACH"):
        draft.trouble = f"{word} PARTITION: rows come or go without events"
    elif word in ("ENABLE", "FORCE") and reader.accept("ROW", "LEVEL", "SECURITY"):
        raise NotUnderstood("a policy may hide rows from the relay's account")
    elif word not in _KEPT or reader.keyword() == "INHERIT":
        raise NotUnderstood(f"{word or 'a clause'} is not known here")


def _identity(reader: TokenReader, draft: _PostgresTable) -> None:
    reader.expect("IDENTITY")
    if reader.accept("NOTHING"):
        draft.trouble = "with REPLICA IDENTITY NOTHING its updates and deletes have no key"
    elif reader.accept("USING", "INDEX"):
        raise NotUnderstood("the columns of the index become the key")


def _add(reader: TokenReader, draft: _PostgresTable) -> None:
    if reader.keyword() in _NO_COLUMNS:
        _key_clause(reader, draft)
        return
    reader.accept("COLUMN")
    is_optional = reader.accept("IF", "NOT", "EXISTS")
    found = read_column(reader)
    if not (is_optional and draft.find(found.name) is not None):
        draft.add_column(found)


def _key_clause(reader: TokenReader, draft: _PostgresTable) -> None:
    """Read a table constraint; only a primary key matters."""
    if reader.accept("CONSTRAINT"):
        reader.identifier()
    if not reader.accept("PRIMARY", "KEY"):
        return
    if reader.accept("USING"):
        raise NotUnderstood("the columns of the index become the key")
    draft.set_key(reader.of_part(part).identifier() for part in inside(reader))
    if "DEFERRABLE" in {token.keyword for token in reader.rest}:
        draft.trouble = "its key is DEFERRABLE, and then the server refuses updates and deletes"


def _drop(reader: TokenReader, draft: _PostgresTable) -> None:
    if reader.accept("CONSTRAINT"):
        reader.accept("IF", "EXISTS")
        name = reader.identifier()
        table = split_source(draft.source)[1]
        if name == f"{table}_pkey":
            draft.key = []
        elif not name.endswith(("_fkey", "_check", "_key", "_excl", "_not_null")):
            raise NotUnderstood(f"the constraint {name} may be the table's key")
        return
    reader.accept("COLUMN")
    reader.accept("IF", "EXISTS")
    number = draft.find(reader.identifier())
    if number is None:
        return
    if number in draft.key:
        draft.key = []
    draft.drop(draft.columns[number].name)


def _alter_column(reader: TokenReader, draft: _PostgresTable) -> None:
    if reader.accept("CONSTRAINT"):
        return
    reader.accept("COLUMN")
    name = reader.identifier()
    number = draft.find(name)
    if reader.accept("SET", "DATA", "TYPE") or reader.accept("TYPE"):
        draft.retype(draft.number(name), reader)
    elif reader.accept("DROP", "EXPRESSION"):
        raise NotUnderstood(f"consumers get the column {name}, which was generated")
    elif number is None or reader.accept("SET", "EXPRESSION"):
        return
    elif reader.accept("SET", "NOT", "NULL"):
        draft.define(number, replace(draft.columns[number], nullable=False))
    elif reader.accept("DROP", "NOT", "NULL"):
        draft.define(number, replace(draft.columns[number], nullable=True))
