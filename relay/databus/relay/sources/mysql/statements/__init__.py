"""Statements in the binlog: lexed as the server lexes them, and what they do to tables.

Reading order: ``lexer``, ``reader``, ``altering``, ``reach``, ``effects``.  All of it is pure.
"""

from databus.relay.sources.mysql.statements.effects import (
    Dialect,
    Effects,
    Statement,
    effects_of,
    names_in,
)
from databus.relay.sources.mysql.statements.lexer import (
    STRICT,
    NotUnderstood,
    sql_mode_of,
    tokens_of,
)
from databus.relay.sources.mysql.statements.reach import Body, Knowledge

__all__ = [
    "STRICT",
    "Body",
    "Dialect",
    "Effects",
    "Knowledge",
    "NotUnderstood",
    "Statement",
    "effects_of",
    "names_in",
    "sql_mode_of",
    "tokens_of",
]
