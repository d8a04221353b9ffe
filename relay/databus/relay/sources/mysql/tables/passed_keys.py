"""The foreign keys with actions after a statement of the binlog.

The catalogue has the keys of the moment at which it is read.  Between that moment and the stream's
position a table may be renamed or a key dropped.  So the keys of the stream's position are those of
an earlier position, changed by every statement since.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from databus.relay.sources.mysql.statements import (
    NotUnderstood,
    Statement,
    StatementDialect,
    effects_of,
    names_in,
    tokens_of,
)
from databus.relay.sources.mysql.statements.token_reader import TableName, TokenReader
from databus.relay.sources.mysql.tables.cascades import Cascades, ForeignKey, read_actions

_WORDS = frozenset({"references", "rename", "drop", "replace"})


def passed_by(cascades: Cascades, statement: Statement, dialect: StatementDialect) -> Cascades:
    """The keys after a statement; some that it dropped may be left.

    A session without ``foreign_key_checks`` can rename a parent and leave the key to the old name,
    so the old name stays a parent too.
    """
    if statement.changes_nothing or not _WORDS & names_in(statement):
        return cascades
    found = effects_of(statement, dialect, ())
    if not found.defined:
        return cascades
    keys = set(cascades.keys)
    try:
        tokens = tokens_of(statement.text, statement.sql_mode, is_mysql=dialect.is_mysql)
        reader = TokenReader(tokens, statement.schema, folds=dialect.folds_names)
        if reader.keyword() in ("DROP", "CREATE"):
            keys = {key for key in keys if key.child not in found.emptied}
        if not found.moved or reader.keyword() != "RENAME":
            child = _table(reader)
            keys -= set(_dropped(keys, child, reader.of_part(reader.rest)))
            keys |= set(
                _added(child, TokenReader(reader.rest, child[0], folds=dialect.folds_names))
            )
    except NotUnderstood:
        pass  # It defines no table.
    for old, new in found.moved:
        keys = {replace(key, child=new) if key.child == old else key for key in keys}
        keys |= {replace(key, parent=new) for key in keys if key.parent == old}
    return Cascades(keys) if keys != cascades.keys else cascades


def _table(reader: TokenReader) -> TableName:
    while not reader.accept("TABLE"):
        reader.require(not reader.ended, "TABLE")
        reader.at += 1
    reader.skip_all("IF", "NOT", "EXISTS")
    return reader.table()


def _dropped(keys: set[ForeignKey], child: TableName, reader: TokenReader) -> Iterator[ForeignKey]:
    names = set()
    while not reader.ended:
        if reader.accept("DROP", "FOREIGN", "KEY") or reader.accept("DROP", "CONSTRAINT"):
            reader.skip_all("IF", "EXISTS")
            names.add(reader.identifier().lower())
        else:
            reader.at += 1
    dropped = [key for key in keys if key.child == child and key.name.lower() in names]
    for key in dropped:
        yield key
        yield replace(key, name="")  # As the statement had it that made the key.


def _added(child: TableName, reader: TokenReader) -> Iterator[ForeignKey]:
    name = ""
    while not reader.ended:
        if reader.accept_sign(","):
            name = ""
        elif reader.accept("CONSTRAINT"):
            is_named = reader.keyword() not in ("FOREIGN", "CHECK", "UNIQUE", "PRIMARY")
            name = reader.identifier() if is_named else ""
        elif reader.accept("REFERENCES"):
            key = _reference(child, name, reader)
            name = ""
            if key.deletes or key.updates:
                yield key
        else:
            reader.at += 1


def _reference(child: TableName, name: str, reader: TokenReader) -> ForeignKey:
    parent, columns = reader.table(), []
    if reader.accept_sign("("):
        while not reader.accept_sign(")"):
            if not reader.accept_sign(","):
                columns.append(reader.identifier())
    if reader.accept("MATCH"):
        reader.at += 1
    return ForeignKey(name, parent, child, tuple(columns), *read_actions(reader))
