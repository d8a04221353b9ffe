"""Reads views, triggers and routines that a change of rows reaches from the server's catalogue."""

from __future__ import annotations

import re
from collections import defaultdict

from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection, ServerError
from databus.relay.sources.mysql.protocol.mysql_settings import SYSTEM_SCHEMAS
from databus.relay.sources.mysql.statements import (
    Knowledge,
    NotUnderstood,
    RoutineBody,
    StatementDialect,
    sql_mode_of,
    tokens_of,
)
from databus.relay.sources.mysql.statements.token_reader import TableName, TokenReader

_SEES_ALL = frozenset({"SELECT", "TRIGGER", "SHOW VIEW"})
_NOT_SYSTEM = "NOT IN ('" + "', '".join(sorted(SYSTEM_SCHEMAS)) + "')"
_ACTIONS = "IN ('CASCADE', 'SET NULL', 'SET DEFAULT')"


def read_dialect(connection: MySqlConnection) -> StatementDialect:
    """The server's settings that determine how its statements are read."""
    (folds,) = connection.row("SELECT @@global.lower_case_table_names")
    return StatementDialect(connection.is_mysql, str(folds) != "0")


def global_privileges(connection: MySqlConnection) -> frozenset[str]:
    """The global privileges of the account."""
    found: set[str] = set()
    for (grant,) in connection.query("SHOW GRANTS"):
        match = re.match(r"GRANT (.*?) ON \*\.\* TO", str(grant))
        if match:
            found |= {name.strip() for name in match[1].split(",")}
    return frozenset(found)


def load_knowledge(connection: MySqlConnection) -> Knowledge:
    """Views, triggers, foreign keys with actions, routines and MERGE tables of all schemas."""
    rights = global_privileges(connection)
    missing = sorted(_SEES_ALL - rights) if "ALL PRIVILEGES" not in rights else []
    unseen = (
        f"the account may not see what triggers, views and routines do: GRANT {', '.join(missing)}"
        " ON *.* to it"
    )
    dialect = read_dialect(connection)
    return Knowledge(
        _views(connection),
        _triggers(connection),
        _children(connection),
        _routines(connection),
        _merged(connection, dialect),
        unseen if missing else "",
        is_mysql=dialect.is_mysql,
        folds_names=dialect.folds_names,
    )


def _views(connection: MySqlConnection) -> dict[TableName, RoutineBody]:
    return {
        (str(schema), str(name)): RoutineBody(str(schema), str(text) if text else None)
        for schema, name, text in connection.query(
            "SELECT TABLE_SCHEMA, TABLE_NAME, VIEW_DEFINITION FROM information_schema.VIEWS "
            f"WHERE TABLE_SCHEMA {_NOT_SYSTEM}"
        )
    }


def _triggers(connection: MySqlConnection) -> dict[TableName, list[RoutineBody]]:
    found: dict[TableName, list[RoutineBody]] = defaultdict(list)
    for schema, table, owner, text, mode in connection.query(
        "SELECT EVENT_OBJECT_SCHEMA, EVENT_OBJECT_TABLE, TRIGGER_SCHEMA, ACTION_STATEMENT, "
        "SQL_MODE "
        f"FROM information_schema.TRIGGERS WHERE TRIGGER_SCHEMA {_NOT_SYSTEM}"
    ):
        body = RoutineBody(str(owner), None if text is None else str(text), sql_mode_of(str(mode)))
        found[str(schema), str(table)].append(body)
    return dict(found)


def _children(connection: MySqlConnection) -> dict[TableName, frozenset[TableName]]:
    found: dict[TableName, set[TableName]] = defaultdict(set)
    for parent_schema, parent, schema, child in connection.query(
        "SELECT UNIQUE_CONSTRAINT_SCHEMA, REFERENCED_TABLE_NAME, CONSTRAINT_SCHEMA, TABLE_NAME "
        "FROM information_schema.REFERENTIAL_CONSTRAINTS "
        f"WHERE UPDATE_RULE {_ACTIONS} OR DELETE_RULE {_ACTIONS}"
    ):
        found[str(parent_schema), str(parent)].add((str(schema), str(child)))
    return {name: frozenset(children) for name, children in found.items()}


def _routines(connection: MySqlConnection) -> dict[TableName, RoutineBody]:
    return {
        (str(schema), str(name)): RoutineBody(
            str(schema), None if text is None else str(text), sql_mode_of(str(mode))
        )
        for schema, name, text, mode in connection.query(
            "SELECT ROUTINE_SCHEMA, ROUTINE_NAME, ROUTINE_DEFINITION, SQL_MODE "
            f"FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA {_NOT_SYSTEM}"
        )
    }


def _merged(
    connection: MySqlConnection, dialect: StatementDialect
) -> dict[TableName, frozenset[TableName]]:
    """By MERGE table its tables; by each of these the MERGE table and the other ones."""
    found: dict[TableName, set[TableName]] = defaultdict(set)
    for schema, name in connection.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME FROM information_schema.TABLES "
        f"WHERE ENGINE = 'MRG_MyISAM' AND TABLE_SCHEMA {_NOT_SYSTEM}"
    ):
        whole = (str(schema), str(name))
        for part in union_of(connection, whole, dialect):
            found[whole].add(part)
            found[part].add(whole)
    return {name: frozenset(others) for name, others in found.items()}


def union_of(
    connection: MySqlConnection, merge: TableName, dialect: StatementDialect
) -> list[TableName]:
    """The tables of a MERGE table.

    None if the server cannot open it, for example because its tables do not exist.  Then no
    statement can write through it either.
    """
    quoted = ".".join("`" + part.replace("`", "``") + "`" for part in merge)
    try:
        text = str(connection.row(f"SHOW CREATE TABLE {quoted}")[1])
        tokens = tokens_of(text, 0, is_mysql=dialect.is_mysql)
    except (ServerError, NotUnderstood):
        return []
    reader = TokenReader(tokens, merge[0], folds=dialect.folds_names)
    while not reader.ended:
        if reader.accept("UNION"):
            reader.accept_sign("=")
            return reader.tables() if reader.accept_sign("(") else []
        reader.at += 1
    return []
