"""The effects of a statement in the binlog on the captured tables: a pure function.

A statement that this module does not understand affects every captured table that it names, or
all of them if it names none.  It never counts as a statement without effects.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from databus.relay.sources.mysql.statements.alter_table import alterations, stores_own_rows
from databus.relay.sources.mysql.statements.lexer import (
    NotUnderstood,
    Token,
    TokenKind,
    tokens_of,
)
from databus.relay.sources.mysql.statements.statement_reach import NOTHING_KNOWN, Knowledge, reached
from databus.relay.sources.mysql.statements.token_reader import (
    TableName,
    TokenReader,
    keywords,
    outer_words,
)


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the binlog and the settings of its session.

    ``schema`` is the session's default schema.  ``is_of_session``: the statement used an object of
    its session, for example a temporary table.
    """

    schema: str
    text: str
    sql_mode: int = 0
    is_of_session: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Whether it leaves every definition unchanged."""
        return self.text.lstrip()[:20].upper().startswith(_LEAVE_DEFINITIONS)

    def may_change(self, schema: str, table: str) -> bool:
        """Whether it can have changed a table's definition: it names the table or drops its schema.

        A name counts anywhere in the statement and in any schema, so this can be a false positive.
        """
        names = names_in(self)
        if _UNREADABLE in self.text or table.lower() in names:
            return True
        drops = "drop" in names and ("database" in names or "schema" in names)
        return drops and schema.lower() in names

    def __str__(self) -> str:
        return repr(self.text[:_SHOWN_CHARACTERS])


_LEAVE_DEFINITIONS = (
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT",
    "RELEASE SAVEPOINT",
    "XA ",
    "TRUNCATE",
)
_SHOWN_CHARACTERS = 80
_UNREADABLE = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class StatementDialect:
    """The server's settings that determine how statements are read.

    ``folds_names``: ``lower_case_table_names`` is not 0.
    """

    is_mysql: bool = False
    folds_names: bool = False


@dataclass(slots=True)
class Effects:
    """The effects of a statement on tables, captured or not.

    ``emptied`` tables have no rows after it.  The content of ``replaced`` tables is unknown; each
    has the reason.  ``revalued`` tables still have all their rows, with other values.
    ``converted`` tables have the same rows; the values are the same only if both the old and the
    new types of their columns can represent them.  ``dropped`` names columns that were dropped or
    renamed.  ``defined``: definitions may have changed.  ``moved`` are old and new names, in order.
    ``needs_knowledge``: the result is valid only with the knowledge of views and triggers.
    """

    emptied: set[TableName] = field(default_factory=set)
    replaced: dict[TableName, str] = field(default_factory=dict)
    revalued: dict[TableName, str] = field(default_factory=dict)
    converted: dict[TableName, str] = field(default_factory=dict)
    defined: bool = False
    needs_knowledge: bool = False
    dropped: dict[TableName, list[str]] = field(default_factory=dict)
    moved: list[tuple[TableName, TableName]] = field(default_factory=list)


def effects_of(
    statement: Statement,
    dialect: StatementDialect,
    captured: Iterable[TableName],
    knowledge: Knowledge | None = None,
) -> Effects:
    """The effects of a statement.

    ``captured`` are the tables that a statement may affect if it is not understood.
    ``knowledge`` are the views, triggers, foreign keys and routines; if it is missing, the effects
    of a change of rows have ``needs_knowledge``.
    """
    tables = list(captured)
    try:
        tokens = _tokens(statement, dialect)
        reader = TokenReader(tokens, statement.schema, folds=dialect.folds_names)
        _skip_prefix(reader)
        found = _Grammar(reader, statement, tables, knowledge).read()
    except NotUnderstood as error:
        found = _not_understood(statement, tables, str(error))
    return _folded(found, dialect, tables)


@functools.lru_cache(maxsize=64)
def names_in(statement: Statement) -> frozenset[str]:
    """Every possible name, word and string of a statement, in lower case."""
    try:
        tokens = tokens_of(statement.text, statement.sql_mode, is_mysql=False)
    except NotUnderstood:
        return frozenset(_words(statement.text))
    found = {token.text.lower() for token in tokens if token.kind is not TokenKind.SIGN}
    if "sql_mode" in found:
        found |= _words(statement.text)
    return frozenset(found)


def _words(text: str) -> set[str]:
    """Possible names in a text whose quoting is not certain."""
    lower = text.lower()
    found = set(re.findall(r"[\w$]+", lower))
    for quote in "`\"'":
        parts = lower.split(quote)
        found.update(parts)
    return found


@functools.lru_cache(maxsize=64)
def _tokens(statement: Statement, dialect: StatementDialect) -> tuple[Token, ...]:
    return tokens_of(statement.text, statement.sql_mode, is_mysql=dialect.is_mysql)


def _skip_prefix(reader: TokenReader) -> None:
    """Skip SET STATEMENT ... FOR, EXPLAIN's ANALYZE, and parentheses before a SELECT."""
    while reader.accept("SET", "STATEMENT"):
        depth = 0
        while reader.keyword() != "FOR" or depth:
            reader.require(not reader.ended, "FOR")
            if reader.keyword() == "SQL_MODE":
                raise NotUnderstood("it is run with another sql_mode than it was read with")
            depth += (reader.sign() == "(") - (reader.sign() == ")")
            reader.at += 1
        reader.accept("FOR")
    if reader.keyword() == "ANALYZE":
        if reader.keyword(1) == "FORMAT":
            reader.at += 3  # FORMAT = JSON
        if reader.keyword(1) in _CHANGES_OF_ROWS - {"TABLE"}:
            reader.at += 1


_CHANGES_OF_ROWS = keywords(
    """
    INSERT REPLACE UPDATE DELETE LOAD SELECT WITH VALUES TABLE DO SET CALL
    """
)
_CHANGES_NOTHING = keywords(
    """
    BEGIN COMMIT ROLLBACK SAVEPOINT RELEASE XA START STOP GRANT REVOKE FLUSH RESET PURGE
    KILL ANALYZE OPTIMIZE CHECK CHECKSUM LOCK UNLOCK USE SHOW DESCRIBE DESC EXPLAIN HELP
    INSTALL UNINSTALL CACHE CHANGE SHUTDOWN RESTART BACKUP BINLOG DEALLOCATE PREPARE
    HANDLER
    """
)
_MODIFIERS = keywords(
    """
    OR REPLACE DEFINER SQL SECURITY ALGORITHM UNDEFINED MERGE TEMPTABLE INVOKER AGGREGATE
    UNIQUE FULLTEXT SPATIAL VECTOR ONLINE OFFLINE IGNORE UNDO
    """
)
_OTHER_OBJECTS = keywords(
    """
    USER ROLE VIEW TRIGGER PROCEDURE FUNCTION PACKAGE EVENT SERVER LOGFILE TABLESPACE
    SEQUENCE RESOURCE INSTANCE LIBRARY
    """
)


class _Grammar:
    """Derives the effects of one statement.

    Owner: ``effects_of``.
    """

    def __init__(
        self,
        reader: TokenReader,
        statement: Statement,
        captured: list[TableName],
        knowledge: Knowledge | None,
    ) -> None:
        self._reader = reader
        self._statement = statement
        self._captured = captured
        self._knowledge = knowledge
        self._effects = Effects()

    def read(self) -> Effects:
        """The effects of the whole statement.

        Raises:
            NotUnderstood: the statement is unknown.
        """
        reader = self._reader
        if reader.ended:
            return self._effects
        readers: dict[str, Callable[[], None]] = {
            "TRUNCATE": self._truncate,
            "DROP": self._drop,
            "CREATE": self._create,
            "ALTER": self._alter,
            "RENAME": self._rename,
            "REPAIR": self._repair,
        }
        word = reader.keyword()
        if word in readers:
            reader.at += 1
            readers[word]()
        elif word in _CHANGES_OF_ROWS or reader.sign() == "(":
            self._change_rows()
        elif word == "BEGIN":
            reader.at += 1
            reader.accept("WORK")
            reader.require(reader.ended, "the end of BEGIN")
        elif word not in _CHANGES_NOTHING:
            raise NotUnderstood(f"{word or 'its beginning'} is not known")
        return self._effects

    # -- definitions

    def _truncate(self) -> None:
        reader = self._reader
        reader.accept("TABLE")
        table = reader.table()
        reader.skip_all("WAIT", "NOWAIT", "DROP", "REUSE", "STORAGE")
        reader.require(len(reader.rest) <= 1, "the end of TRUNCATE")  # WAIT n
        if self._statement.is_of_session:
            why = "TRUNCATE may have meant a temporary table of its session"
            self._effects.replaced[table] = why
        else:
            self._effects.emptied.add(table)

    def _drop(self) -> None:
        reader = self._reader
        if reader.accept("TEMPORARY"):
            return
        if reader.accept_any("TABLE", "TABLES"):
            reader.accept("IF", "EXISTS")
            # The server logs DROP TEMPORARY TABLE if it was a temporary table.
            self._effects.emptied.update(reader.tables())
            self._effects.defined = True
        elif reader.accept_any("DATABASE", "SCHEMA"):
            reader.accept("IF", "EXISTS")
            schema = reader.schema()
            inside = [name for name in self._captured if reader.folded(name)[0] == schema]
            self._effects.emptied.update(inside)
            self._effects.defined = True
        elif reader.keyword() in ("INDEX", "ONLINE", "OFFLINE"):
            self._effects.defined = True
        else:
            self._other_object()

    def _other_object(self) -> None:
        """An object other than a table: its definition has no rows."""
        reader = self._reader
        for _ in range(len(reader.rest)):
            word = reader.keyword()
            if word in _OTHER_OBJECTS or reader.accept("SPATIAL", "REFERENCE"):
                return
            if word in ("INDEX", "DATABASE", "SCHEMA"):
                self._effects.defined = word == "INDEX"
                return
            if word and word not in _MODIFIERS and word not in ("IF", "NOT", "EXISTS"):
                break
            reader.at += 1
            # SQL SECURITY DEFINER names no account.
            if word == "DEFINER" and reader.accept_sign("="):
                self._skip_account()
        raise NotUnderstood(f"{reader.keyword() or 'a word'} is no object that is known")

    def _skip_account(self) -> None:
        reader = self._reader
        reader.at += 1
        if reader.accept_sign("("):
            reader.require(reader.accept_sign(")"), ")")
        if reader.accept_sign("@"):
            reader.at += 1

    def _create(self) -> None:
        reader = self._reader
        start = reader.at
        is_or_replace = reader.accept("OR", "REPLACE")
        if reader.accept("TEMPORARY"):
            return
        if not reader.accept("TABLE"):
            reader.at = start
            return self._other_object()
        is_optional = reader.accept("IF", "NOT", "EXISTS")
        table = reader.table()
        self._effects.defined = True
        if is_or_replace:
            self._effects.emptied.add(table)
        words = outer_words(reader.rest)
        if _selects(words) or self._selects_in_parentheses():
            self._effects.replaced[table] = "CREATE TABLE ... SELECT is logged without its rows"
        elif not stores_own_rows(reader.rest) or "UNION" in words:
            self._effects.replaced[table] = "a table of its engine is created with rows"
        if is_optional:
            self._effects.emptied.discard(table)
        self._replace_union(table)
        return None

    def _replace_union(self, merge: TableName) -> None:
        """A write through a MERGE table changes the tables of its UNION without row events."""
        reader = self._reader
        for index, token in enumerate(reader.rest):
            if token.keyword != "UNION":
                continue
            union = reader.of_part(reader.rest[index + 1 :])
            union.accept_sign("=")
            if union.accept_sign("(") and union.sign() not in ("(", ")"):
                members = union.tables()
                if union.accept_sign(")"):
                    why = f"it is in the union of the MERGE table {merge[0]}.{merge[1]}"
                    self._effects.replaced.update(dict.fromkeys(members, why))

    def _selects_in_parentheses(self) -> bool:
        reader = self._reader
        for index, token in enumerate(reader.rest[:-1]):
            opens = token.kind is TokenKind.SIGN and token.text == "("
            if opens and reader.rest[index + 1].keyword in ("SELECT", "WITH", "VALUES"):
                return True
        return False

    def _alter(self) -> None:
        reader = self._reader
        start = reader.at
        reader.accept_any("ONLINE", "OFFLINE")
        ignores = reader.accept("IGNORE")
        if not reader.accept("TABLE"):
            reader.at = start
            return self._other_object()
        is_optional = reader.accept("IF", "EXISTS")
        table = reader.table()
        self._replace_union(table)
        found = alterations(reader)
        effects = self._effects
        effects.defined = True
        if ignores:
            effects.replaced[table] = "ALTER IGNORE TABLE can delete rows and change values"
        elif found.rows:
            effects.replaced[table] = f"ALTER TABLE: {found.rows}"
        elif found.values:
            effects.revalued[table] = f"ALTER TABLE: {found.values}"
        elif found.types:
            effects.converted[table] = f"ALTER TABLE: {found.types}"
        for name in found.replaced:
            effects.replaced[name] = f"ALTER TABLE exchanges its rows with those of {table[1]}"
        effects.emptied.update(found.emptied)
        effects.dropped[table] = found.dropped
        if found.renamed_to is not None and found.renamed_to != table:
            self._move([(table, found.renamed_to)], is_certain=not is_optional)
        return None

    def _rename(self) -> None:
        reader = self._reader
        if reader.keyword() in ("USER", "ROLE"):
            return
        reader.expect("TABLE", "TABLES")
        is_optional = reader.accept("IF", "EXISTS")
        pairs = []
        while True:
            old = reader.table()
            if reader.accept("WAIT"):
                reader.identifier()
            reader.accept("NOWAIT")
            reader.expect("TO")
            pairs.append((old, reader.table()))
            if not reader.accept_sign(","):
                break
        reader.require(reader.ended, "the end of RENAME")
        self._effects.defined = True
        self._move(pairs, is_certain=not is_optional)

    def _move(self, pairs: list[tuple[TableName, TableName]], *, is_certain: bool) -> None:
        """Tables are renamed, one after the other."""
        self._effects.moved = pairs
        if not is_certain or self._statement.is_of_session:
            names = [name for pair in pairs for name in pair]
            self._effects.replaced.update(dict.fromkeys(names, "it may have been renamed"))
            return
        now: dict[TableName, TableName | None] = {}
        for old, new in pairs:
            now[new] = now.get(old, old)
            now[old] = None
        for name, origin in now.items():
            if origin is None:
                self._effects.replaced.pop(name, None)
                self._effects.revalued.pop(name, None)
                self._effects.converted.pop(name, None)
                self._effects.emptied.add(name)
            elif origin != name:
                self._effects.replaced[name] = (
                    f"{origin[0]}.{origin[1]} with its rows took this name"
                )

    def _repair(self) -> None:
        reader = self._reader
        reader.skip_all("NO_WRITE_TO_BINLOG", "LOCAL")
        reader.expect("TABLE", "TABLES")
        names = reader.tables()
        self._effects.replaced.update(dict.fromkeys(names, "REPAIR TABLE can lose rows"))

    # -- rows

    def _change_rows(self) -> None:
        """A statement changes rows, and the binlog has it instead of row events."""
        knowledge = self._knowledge
        if knowledge is None:
            self._effects.needs_knowledge = True
            knowledge = NOTHING_KNOWN
        reader = self._reader
        start = reader.at
        if reader.keyword() == "SET" and reader.keyword(1) in ("PASSWORD", "DEFAULT", "ROLE"):
            self._effects.needs_knowledge = False
            return
        why = (
            "it is changed by a statement instead of rows, for a session wrote with binlog_format"
            " other than ROW"
        )
        try:
            targets = _targets(reader)
        except NotUnderstood as error:
            why = f"{why}, and not understood: {error}"
            reader.at = start
            targets = reader.possible_tables()
        if knowledge.unseen:
            why = f"{why}; it may reach any table, for {knowledge.unseen}"
        found = reached(targets, reader.rest, knowledge, self._captured)
        if "understood" in why and not found & set(self._captured):
            found |= set(self._captured)
        self._effects.replaced.update(dict.fromkeys(found, why))


def _selects(words: list[str]) -> bool:
    """Whether a SELECT, or an equivalent of one, follows the definition."""
    return bool({"SELECT", "VALUES", "TABLE"} & set(words)) or any(
        word == "WITH" and words[index + 1 : index + 2] != ["SYSTEM"]
        for index, word in enumerate(words)
    )


def _targets(reader: TokenReader) -> list[TableName]:
    """The target tables of a change of rows; the rest of the statement is not read."""
    word = reader.accept_any(*_CHANGES_OF_ROWS)
    reader.skip_all("LOW_PRIORITY", "HIGH_PRIORITY", "DELAYED", "CONCURRENT", "QUICK", "IGNORE")
    if word in ("INSERT", "REPLACE"):
        reader.accept("INTO")
        return [reader.table()]
    if word == "LOAD":
        return [_loaded(reader)]
    if word in ("UPDATE", "DELETE"):
        reader.accept("HISTORY")
        return _changed(reader, is_update=word == "UPDATE")
    if word in ("SELECT", "DO", "SET", "VALUES", "TABLE"):
        return []  # Only a function in it can change rows.
    raise NotUnderstood(f"{word or 'a parenthesis'} may change any table")


def _loaded(reader: TokenReader) -> TableName:
    reader.expect("DATA", "XML")
    while not reader.accept("INTO", "TABLE"):
        reader.require(not reader.ended, "INTO TABLE")
        reader.at += 1
    return reader.table()


def _changed(reader: TokenReader, *, is_update: bool) -> list[TableName]:
    """The tables of UPDATE and DELETE.  Of several tables all count: which of them change depends
    on expressions."""
    if not is_update and reader.accept("FROM"):
        start = reader.at
        table = reader.table()
        if reader.ended or reader.keyword() in _BEHIND_ONE or _is_alias(reader):
            return [table]
        reader.at = start
    if is_update:
        start = reader.at
        table = reader.table()
        if reader.keyword() == "SET":
            return [table]
        reader.at = start
    found = []
    while not reader.ended and reader.keyword() not in ("SET", "WHERE", "ORDER", "LIMIT"):
        start = reader.at
        try:
            found.append(reader.table())
        except NotUnderstood:
            reader.at = start + 1
        if reader.accept_sign("."):
            reader.accept_sign("*")
    reader.require(bool(found), "tables")
    return found


_BEHIND_ONE = keywords(
    """
    WHERE ORDER LIMIT RETURNING PARTITION FOR
    """
)


def _is_alias(reader: TokenReader) -> bool:
    start = reader.at
    reader.accept("AS")
    try:
        reader.identifier()
        return reader.ended or reader.keyword() in _BEHIND_ONE
    except NotUnderstood:
        return False
    finally:
        reader.at = start


# -- what is not understood


def _not_understood(statement: Statement, captured: list[TableName], why: str) -> Effects:
    """The captured tables that the statement names, or all of them if it names none."""
    reason = f"the statement is not understood: {why}"
    names = names_in(statement) | _words(statement.text)
    named = [name for name in captured if name[1].lower() in names]
    if _UNREADABLE in statement.text or not named:
        named = captured
    return Effects(replaced=dict.fromkeys(named, reason), defined=True)


def _folded(found: Effects, dialect: StatementDialect, captured: list[TableName]) -> Effects:
    """The effects with the captured tables' stored names, if names are not case-sensitive."""
    if not dialect.folds_names:
        return found
    stored = {(schema.lower(), table.lower()): (schema, table) for schema, table in captured}

    def one(name: TableName) -> TableName:
        return stored.get((name[0].lower(), name[1].lower()), name)

    def all_of(names: Mapping[TableName, str]) -> dict[TableName, str]:
        return {one(name): why for name, why in names.items()}

    return Effects(
        {one(name) for name in found.emptied},
        all_of(found.replaced),
        all_of(found.revalued),
        all_of(found.converted),
        found.defined,
        found.needs_knowledge,
        {one(name): columns for name, columns in found.dropped.items()},
        [(one(old), one(new)) for old, new in found.moved],
    )
