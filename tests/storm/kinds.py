"""Which kind of statement a text is, as a server's manual names it: the coverage of a run."""

from __future__ import annotations

import re

_SKIPPED = re.compile(
    r"/\*!\d*|\*/|/\*.*?\*/|--[^\n]*(\n|\Z)|#[^\n]*\n|'(?:[^'\\]|''|\\.)*'|`[^`]*`|\"[^\"]*\"",
    re.DOTALL,
)
_WORD = re.compile(r"[A-Za-z_@]+|;")
_PREFIXES = {
    "OR", "REPLACE", "TEMPORARY", "TEMP", "UNLOGGED", "UNIQUE", "IF", "EXISTS", "NOT", "ONLY",
    "IGNORE", "LOW_PRIORITY", "ALGORITHM", "MERGE", "ABORT", "FAIL", "ROLLBACK", "GLOBAL",
    "SESSION", "VIRTUAL",
}  # fmt: skip
_OBJECTS = {
    "TABLE", "VIEW", "INDEX", "TRIGGER", "FUNCTION", "PROCEDURE", "DATABASE", "SCHEMA", "SEQUENCE",
    "USER", "ROLE", "TYPE", "DOMAIN", "PUBLICATION", "RULE", "MATERIALIZED",
}  # fmt: skip
_CLAUSES = {
    "ADD", "DROP", "CHANGE", "MODIFY", "RENAME", "ALTER", "CONVERT", "ORDER", "ENGINE", "FORCE",
    "PARTITION", "TRUNCATE", "EXCHANGE", "REORGANIZE", "REMOVE", "ATTACH", "DETACH", "INHERIT",
    "NO", "SET", "REPLICA", "ENABLE", "DISABLE", "DISCARD", "COMMENT", "OWNER", "ROW_FORMAT",
    "AUTO_INCREMENT", "CLUSTER",
}  # fmt: skip
_PAIRS = {
    "XA", "SET", "PREPARE", "COMMIT", "ROLLBACK", "FLUSH", "LOAD", "LOCK", "RELEASE", "REFRESH",
    "START", "DISCARD", "EXECUTE", "PURGE", "PRAGMA", "BEGIN", "VACUUM", "COPY", "DROP",
}  # fmt: skip


def kind_of(sql: str) -> str:
    """The statement's first words, and of ALTER the first clause.

    >>> kind_of("alter /* x */ table `a` add column b int")
    'ALTER TABLE ADD'
    """
    words = [word.upper() for word in _WORD.findall(_SKIPPED.sub(" ", sql))]
    if not words:
        return "nothing"
    first, *rest = words
    if first in ("CREATE", "DROP", "ALTER", "COMMENT"):
        named = [word for word in rest if word in _OBJECTS]
        if not named:
            return " ".join([first, *rest[:1]])
        if first == "ALTER":
            after = rest[rest.index(named[0]) + 1 :]
            clause = next((word for word in after if word in _CLAUSES), "")
            return " ".join(filter(None, (first, named[0], clause)))
        is_filled = first == "CREATE" and named[0] == "TABLE" and "SELECT" in rest
        return f"{first} {named[0]}{' SELECT' if is_filled else ''}"
    second = next((word for word in rest if word not in _PREFIXES), "")
    return f"{first} {second}" if first in _PAIRS and second else first
