"""Statements in the binlog: read as the server reads them, and their effects on tables.

In reading order: ``lexer``, ``token_reader``, ``alter_table``, ``statement_reach`` and
``statement_effects``, all of them pure; ``logged_statements`` reads a statement from its event,
``routine_catalogue`` reads views, triggers and routines from the server.
"""

from databus.relay.sources.mysql.statements.lexer import (
    STRICT,
    NotUnderstood,
    sql_mode_of,
    tokens_of,
)
from databus.relay.sources.mysql.statements.statement_effects import (
    Effects,
    Statement,
    StatementDialect,
    effects_of,
    names_in,
)
from databus.relay.sources.mysql.statements.statement_reach import Knowledge, RoutineBody

__all__ = [
    "STRICT",
    "Effects",
    "Knowledge",
    "NotUnderstood",
    "RoutineBody",
    "Statement",
    "StatementDialect",
    "effects_of",
    "names_in",
    "sql_mode_of",
    "tokens_of",
]
