"""Rows that REPLACE removes through another unique index, for which SQLite fires no DELETE trigger.

A trigger before each INSERT and UPDATE looks for rows that conflict with the new one, and logs
them as candidates: op ``r``, with the row before.  IGNORE, UPSERT and ABORT remove none of them.
So a poll examines the candidates: a row that its table does not have any more, though the log
has no other reason, was replaced, and its candidate becomes an ordinary ``d``.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from databus.common.errors import UnsupportedChange
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.sqlite.sqlite_log import (
    parse_row,
    quoted,
    set_meta,
    texts_as_bytes,
)

_ROWIDS = ("rowid", "_rowid_", "oid")
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`(?:[^`]|``)*`|\[[^]]*\]|--[^\n]*|/\*.*?(?:\*/|$)|\w+|.""",
    re.DOTALL,
)
_TRIGGERS_OF_A_CONFLICT = 2
_ORDER = re.compile(r"\b(ASC|DESC)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Finds the row that REPLACE would remove because of one unique index, or of the rowid.

    ``condition``: SQL over the columns of the table and those of ``NEW``.  ``guard``: SQL that is
    false without the index, so that no write of the application reads the whole table.  ``rowid``:
    what the table calls its rowid, if the conflict is over that.  ``columns``: those that the
    condition reads.  ``is_computed``: generated ones are among them, of which no UPDATE shows that
    it changes them.  ``constraint``: the index of a constraint with a collation that only the
    application has.  A connection without it can write exactly the other columns.
    """

    condition: str
    guard: str = ""
    rowid: str = ""
    columns: frozenset[str] = frozenset()
    is_computed: bool = False
    constraint: str = ""


Search = Callable[[sqlite3.Connection, str, SourceSchema], tuple[list[Conflict], list[str]]]
"""Such as ``conflicts``."""


def search(*, recursive_triggers: bool) -> Search:
    """How to look for the rows; ``recursive_triggers``: REPLACE fires DELETE triggers for them."""
    return (lambda *_: ([], [])) if recursive_triggers else conflicts


def conflicts(
    connection: sqlite3.Connection, table: str, schema: SourceSchema
) -> tuple[list[Conflict], list[str]]:
    """How to find the rows that REPLACE would remove, and the indexes for which there is no way.

    A conflict over the key itself is none: the new row's event has the same key.
    """
    found: list[Conflict] = []
    unknown: list[str] = []
    new = _new_values(connection, table)
    rowid = _hidden_rowid(connection, table, schema)
    if rowid:
        found.append(Conflict(f"{quoted(table)}.{rowid}=NEW.{rowid}", rowid=rowid))
    for _, index, is_unique, origin, *_ in connection.execute(
        f"PRAGMA index_list({quoted(table)})"
    ).fetchall():
        if not is_unique:
            continue
        definition = connection.execute(
            "SELECT rowid, sql FROM sqlite_master WHERE type = 'index' AND name = ?", (index,)
        ).fetchone()
        if origin == "pk":
            definition = (0, None)  # WITHOUT ROWID, the table itself is the index of its key.
        terms = [
            _Term(row[1], row[2], row[4])
            for row in connection.execute(f"PRAGMA index_xinfo({quoted(index)})")
            if row[5]
        ]
        if definition is None or not terms:
            continue  # It was dropped just now.
        if origin == "pk" and all(term.collation == "BINARY" for term in terms):
            continue
        conflict = _conflict(connection, schema, index, definition, new, terms)
        if conflict is None:
            unknown.append(index)
        else:
            found.append(conflict)
    return found, unknown


def _conflict(
    connection: sqlite3.Connection,
    schema: SourceSchema,
    index: str,
    definition: tuple[int, str | None],
    new: Mapping[str, str],
    terms: Sequence[_Term],
) -> Conflict | None:
    """How to find the row that conflicts over one index; None if there is no way.

    The trigger names what an index uses.  An index of a constraint cannot be dropped, so that a
    connection without its collation cannot insert rows anyway.  It could after DROP INDEX.
    """
    table, text = split_source(schema.source)[1], definition[1]
    stored = {column.name for column in schema.columns}
    condition = _condition(table, new, text, terms)
    columns = _named(new, condition)
    scanned = index if text and _has_one_row(new, text, terms) else ""
    if _is_sought(connection, table, new, condition, scanned) and (
        not text or _is_readable(connection, table, columns)
    ):
        is_computed = not columns <= stored
        return Conflict(condition, _guard(*definition), columns=columns, is_computed=is_computed)
    compared = frozenset(term.name for term in terms if term.name)
    can_name = compared <= stored and not _is_hidden(table)
    if not text and can_name and _is_readable(connection, table):
        return Conflict(condition, columns=compared, constraint=index)
    return None


def obstacle(table: str, unknown: Sequence[str]) -> str:
    """Why a table with these ``unknown`` indexes cannot be captured; "" if it can."""
    if not unknown:
        return ""
    reason = (
        "a trigger cannot name the table"
        if _is_hidden(table)
        else "it has a function or a collation that only the application has, or an expression "
        "for which SQLite would read the whole table"
    )
    return (
        f"REPLACE may remove rows through its unique index {unknown[0]} without a trigger, and the "
        f"relay cannot look for them: {reason}"
    )


CURE = (
    "drop the index; or set PRAGMA recursive_triggers = ON in every connection that writes, and "
    "state this by the option recursive_triggers = true of the database; or leave the table out by "
    "exclude_sources"
)


def raise_obstacle(connection: sqlite3.Connection, schema: SourceSchema, search: Search) -> None:
    """Raise UnsupportedChange if the table cannot be captured."""
    table = split_source(schema.source)[1]
    why = obstacle(table, search(connection, table, schema)[1])
    if why:
        raise UnsupportedChange(f"{schema.source}: {why}; {CURE}", source=schema.source)


class _Term(NamedTuple):
    """A column of an index; an expression has no name."""

    number: int
    name: str | None
    collation: str


def _new_values(connection: sqlite3.Connection, table: str) -> dict[str, str]:
    """The values of a row that is written, by column, generated ones too: REPLACE puts defaults in
    place of nulls."""
    values = {}
    for _, name, _, not_null, default, is_key, _ in connection.execute(
        f"PRAGMA table_xinfo({quoted(table)})"
    ):
        value = f"NEW.{quoted(name)}"
        has_default = not_null and not is_key and default is not None
        values[name] = f"coalesce({value},{default})" if has_default else value
    return values


def _named(names: Iterable[str], text: str) -> frozenset[str]:
    """The columns that an expression names, and maybe others."""
    words = {_unquoted(token).lower() for token in _TOKEN.findall(text)}
    return frozenset(name for name in names if name.lower() in words)


def _unquoted(token: str) -> str:
    mark = token[0]
    return token[1:-1].replace(mark * 2, mark) if mark in '"`[' else token


def _hidden_rowid(connection: sqlite3.Connection, table: str, schema: SourceSchema) -> str | None:
    """The name of the table's rowid, if it has one and this is not its key."""
    origins = [row[3] for row in connection.execute(f"PRAGMA index_list({quoted(table)})")]
    if "pk" not in origins and not schema.nullable_key:
        return None  # INTEGER PRIMARY KEY
    taken = {column.name.lower() for column in schema.columns}
    name = next((name for name in _ROWIDS if name not in taken), None)
    if name is None:
        return None
    try:
        connection.execute(f"SELECT {name} FROM {quoted(table)} LIMIT 0")
    except sqlite3.OperationalError:
        return None  # WITHOUT ROWID
    return name


def _condition(table: str, new: Mapping[str, str], text: str | None, terms: Sequence[_Term]) -> str:
    expressions, predicate = _parts(text) if text else ([], "")
    equal = []
    for at, term in enumerate(terms):
        if term.name is not None:
            left, right = f"{quoted(table)}.{quoted(term.name)}", new[term.name]
        else:
            left = expressions[at]
            named = _named(new, left)
            row = ",".join(f"{new[name]} {quoted(name)}" for name in new if name in named) or "1"
            right = f"(SELECT {left} FROM(SELECT {row}))"
        equal.append(f"({left})={right} COLLATE {quoted(term.collation)}")
    return " AND ".join([*equal, *([f"({predicate})"] if predicate else [])])


def _has_one_row(new: Iterable[str], text: str, terms: Iterable[_Term]) -> bool:
    """Whether all rows of an index have the same values, so that it has one row at the most."""
    names = list(new)
    return not any(term.name for term in terms) and not any(
        _named(names, expression) for expression in _parts(text)[0]
    )


def cover(held: Mapping[str, str], wanted: Iterable[Conflict]) -> bool:
    """Whether triggers with these texts have logged the rows of these conflicts."""
    texts = [text for text in held.values() if ",'r',o " in text]
    return all(
        conflict.rowid
        or sum(conflict.condition in text for text in texts) >= _TRIGGERS_OF_A_CONFLICT
        for conflict in wanted
    )


def _parts(text: str) -> tuple[list[str], str]:
    """The indexed expressions of CREATE INDEX, and the condition of a partial index or ""."""
    depth, parts, rest = 0, [""], None
    for token in _TOKEN.findall(text):
        if token.startswith(("--", "/*")):
            token = " "
        if rest is not None:
            rest += token
            continue
        depth -= token == ")"
        if depth == 0 and token == ")":
            rest = ""
        elif depth == 1 and token == ",":
            parts.append("")
        elif depth:
            parts[-1] += token
        depth += token == "("
    condition = re.sub(r"^\s*WHERE\b", "", rest or "", flags=re.IGNORECASE)
    return [_ORDER.sub("", part.strip()).strip() for part in parts], condition.strip()


def _is_sought(
    connection: sqlite3.Connection, table: str, new: Iterable[str], condition: str, scanned: str
) -> bool:
    """Whether SQLite finds a row by this condition without reading the table: by a search, or by
    reading all of the index ``scanned``."""
    if _is_hidden(table):
        return False
    row = ",".join(f"NULL {quoted(name)}" for name in new)
    try:
        plan = connection.execute(
            f"EXPLAIN QUERY PLAN SELECT(SELECT 1 FROM {quoted(table)} WHERE {condition})"
            f"FROM(SELECT {row} LIMIT 1)NEW"
        ).fetchall()
    except sqlite3.OperationalError:
        return False  # a function or collation of the application
    found = [f"SEARCH {table} USING "]
    if scanned:
        found += [f"SCAN {table} USING {kind}INDEX {scanned}" for kind in ("", "COVERING ")]
    return any(row[3].startswith(tuple(found)) for row in plan)


def _is_hidden(table: str) -> bool:
    """Whether triggers cannot name the table: the name is that of the row."""
    return table.lower() in ("new", "old")


def _is_readable(connection: sqlite3.Connection, table: str, columns: Iterable[str] = ()) -> bool:
    """Whether SQLite can read these columns here: none is generated by a function of the
    application, and the table is not stored in the order of one of its collations."""
    names = ", ".join(map(quoted, columns)) or "1"
    try:
        connection.execute(f"SELECT {names} FROM {quoted(table)} LIMIT 0")
    except sqlite3.OperationalError:
        return False
    return True


def _guard(rowid: int, text: str | None) -> str:
    if text is None:
        return ""  # Part of the table's definition: it cannot be dropped.
    same = f"sql='{text.replace(chr(39), chr(39) * 2)}'"
    # VACUUM may have renumbered the definitions.
    return (
        f"(EXISTS(SELECT 1 FROM sqlite_master WHERE rowid={rowid} AND {same})"
        f"OR EXISTS(SELECT 1 FROM sqlite_master WHERE {same}))AND "
    )


class _Key(NamedTuple):
    """A row of a table: its source, and the exact text of its key's values."""

    source: str
    text: str


class Candidates:
    """The rows of one window that may have been replaced.

    Owner: the thread that reads the log.
    """

    def __init__(
        self, connection: sqlite3.Connection, versions: Mapping[int, SourceSchema]
    ) -> None:
        self._db = connection
        self._versions = versions
        self._ids: dict[_Key, int] = {}
        self._values: dict[_Key, tuple[Any, ...] | None] = {}

    def read(self, after: int, upto: int) -> bool:
        """Read the candidates after one log id and up to another; whether there are any so far."""
        for log_id, version, _, old, _ in self._rows(after, upto, "op = 'r'"):
            key, values = _key_of(self._versions[version], old)
            self._ids[key], self._values[key] = log_id, values
        return bool(self._ids)

    def retain_missing(self) -> None:
        """Keep only the rows that their tables do not have now: within a read transaction."""
        schemas = {schema.source: schema for schema in self._versions.values()}
        self._ids = {
            key: log_id
            for key, log_id in self._ids.items()
            if not _has(self._db, schemas[key.source], self._values[key])
        }

    def replaced(self, upto: int) -> list[int]:
        """The log ids of those that no event up to ``upto`` has removed."""
        if not self._ids:
            return []
        sources = {key.source for key in self._ids}
        numbers = [n for n, schema in self._versions.items() if schema.source in sources]
        left = dict(self._ids)
        condition = f"op IN ('u', 'd', 't') AND version IN ({', '.join(map(str, numbers))})"
        for log_id, version, op, old, new in self._rows(min(left.values()), upto, condition):
            schema = self._versions[version]
            if op == b"t":
                left = {key: at for key, at in left.items() if key.source != schema.source}
                continue
            key = _key_of(schema, old)[0]
            is_gone = op == b"d" or _key_of(schema, new)[0] != key
            if is_gone and left.get(key, log_id) < log_id:
                del left[key]
        return sorted(left.values())

    def _rows(self, after: int, upto: int, condition: str) -> list[Any]:
        with texts_as_bytes(self._db):
            return self._db.execute(
                "SELECT id, version, op, old, new FROM databus_log "
                f"WHERE id > ? AND id <= ? AND {condition} ORDER BY id",
                (after, upto),
            ).fetchall()


def publish(connection: sqlite3.Connection, replaced: Iterable[int], window_end: int) -> None:
    """Make these candidates deletions, in the window that ends here, after a restart too."""
    connection.executemany(
        "UPDATE databus_log SET op = 'd' WHERE id = ?", [(log_id,) for log_id in replaced]
    )
    set_meta(connection, "window_end", window_end)


def _key_of(schema: SourceSchema, line: bytes) -> tuple[_Key, tuple[Any, ...] | None]:
    """A logged row's key, and its values; None: they are no UTF-8."""
    try:
        cells = parse_row(line.decode())
    except UnicodeDecodeError:
        return _Key(schema.source, repr(line)), None
    row = dict(zip((column.name for column in schema.columns), cells, strict=True))
    values = tuple(row[name] for name in schema.key)
    return _Key(schema.source, repr(values)), values


def _has(
    connection: sqlite3.Connection, schema: SourceSchema, values: tuple[Any, ...] | None
) -> bool:
    """Whether the table has a row with exactly this key."""
    if values is None:
        return False  # The table is suspended where such a text comes in the stream.
    table = quoted(split_source(schema.source)[1])
    exact = " AND ".join(
        f"{quoted(name)} IS ?{at} COLLATE BINARY" for at, name in enumerate(schema.key, 1)
    )
    sought = "".join(f"{quoted(name)} IS ?{at} AND " for at, name in enumerate(schema.key, 1))
    try:
        found = connection.execute(f"SELECT 1 FROM {table} WHERE {sought}{exact}", values)
    except sqlite3.OperationalError:  # a collation of the application, or the table is gone
        try:
            found = connection.execute(f"SELECT 1 FROM {table} WHERE {exact}", values)
        except sqlite3.OperationalError:
            return True
    return found.fetchone() is not None
