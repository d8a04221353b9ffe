"""What is understood of the statements in a binlog, beyond their first word."""

from __future__ import annotations

import re

_TRUNCATE = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*\n)*TRUNCATE\s+(?:TABLE\s+)?"
    r"(?:`((?:[^`]|``)+)`|([\w$]+))(?:\s*\.\s*(?:`((?:[^`]|``)+)`|([\w$]+)))?",
    re.IGNORECASE | re.DOTALL,
)


def truncated_table(schema: str, statement: str) -> tuple[str, str] | None:
    """Schema and name of the table that a TRUNCATE empties; ``schema`` is the session's."""
    found = _TRUNCATE.match(statement)
    if found is None:
        return None
    first, second = (
        (found[1] or found[2] or "").replace("``", "`"),
        (found[3] or found[4] or "").replace("``", "`"),
    )
    return (first, second) if second else (schema, first)
