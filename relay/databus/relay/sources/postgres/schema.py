"""Tables: what the catalogue knows of them, and the schema of a table in the stream.

The stream's Relation message is the authority for columns, types and their order at its
position; the catalogue, which is of today, adds what the message lacks (NOT NULL, the key's
order, domains' base types) where the two agree.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from databus.common.errors import UnsupportedChange
from databus.common.schema import Column, Kind, SourceSchema
from databus.relay.sources.configured_keys import NO_KEYS, ORDER_NAME, ConfiguredKeys
from databus.relay.sources.postgres import values
from databus.relay.sources.postgres.pgoutput import Relation

CATALOGUE_SQL = """
SELECT c.oid::bigint AS oid, n.nspname || '.' || c.relname AS source,
       n.nspname AS schema_name, c.relname AS table_name,
       c.relreplident::text AS identity, a.attname AS column_name, a.attnotnull AS not_null,
       a.atttypid::bigint AS type_oid, a.atttypmod AS modifier,
       format_type(a.atttypid, a.atttypmod) AS type_name,
       array_position((pk.indkey::int2[])[0:pk.indnkeyatts - 1], a.attnum) AS pk_place,
       array_position((ri.indkey::int2[])[0:ri.indnkeyatts - 1], a.attnum) AS identity_place,
       pk.indnkeyatts AS pk_width, ri.indnkeyatts AS identity_width,
       pg_has_role(c.relowner, 'USAGE') AS is_owner,
       has_table_privilege(c.oid, 'SELECT') AS may_select
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
     AND NOT a.attisdropped AND a.attgenerated = ''
LEFT JOIN pg_index pk ON pk.indrelid = c.oid AND pk.indisprimary AND pk.indisvalid
LEFT JOIN pg_index ri ON ri.indrelid = c.oid AND ri.indisreplident AND ri.indisvalid
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_toast%'
  AND ($1::bigint IS NULL OR c.oid = $1::bigint::oid)
ORDER BY c.oid, a.attnum
"""

DOMAINS_SQL = """
SELECT oid::bigint AS oid, typbasetype::bigint AS base, typtypmod AS modifier
FROM pg_type WHERE typtype = 'd'
"""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column as the catalogue has it; a domain's base type stands beside it."""

    name: str
    type_oid: int
    modifier: int
    base_oid: int
    base_modifier: int
    not_null: bool
    type_name: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the catalogue has it today.

    ``primary_key`` and ``identity_key`` (REPLICA IDENTITY USING INDEX) are in index order; one
    that has a generated column, which is in no row of the stream, does not count.
    ``configured_key`` is what the configuration names for a table without them.
    """

    oid: int
    source: str
    schema_name: str
    table_name: str
    identity: str
    columns: tuple[TableColumn, ...]
    primary_key: tuple[str, ...]
    identity_key: tuple[str, ...]
    is_owner: bool
    may_select: bool
    configured_key: tuple[str, ...] = ()
    key_is_generated: bool = False

    @property
    def quoted(self) -> str:
        """The table's name in SQL."""
        return f"{quote(self.schema_name)}.{quote(self.table_name)}"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row to consumers; empty if there are none.

        What the stream gives for an update or delete must hold them: the index of the
        replica identity if one is set, otherwise the primary key.
        """
        if self.identity == "i":
            return self.identity_key
        if self.identity == "n":
            return ()
        return self.primary_key or (self.configured_key if self.identity == "f" else ())

    @property
    def key_is_configured(self) -> bool:
        """Whether the key is not the table's own: null and equal values may be in it."""
        return bool(self.key) and self.identity == "f" and not self.primary_key

    @property
    def chunk_key(self) -> tuple[str, ...]:
        """The columns of ``chunk_from`` by which a dump orders the rows."""
        return (ORDER_NAME,) if self.key_is_configured else self.key

    @property
    def chunk_from(self) -> str:
        """What a dump selects from.

        A configured key may hold nulls, values without an order, and some that are equal only
        for SQL, so a digest of its text is the order.
        """
        if not self.key_is_configured:
            return self.quoted
        text = f"ROW({', '.join(quote(name) for name in self.key)})::text"
        order = f"encode(sha256(convert_to({text}, 'UTF8')), 'hex') COLLATE \"C\""
        return f"(SELECT *, {order} AS {quote(ORDER_NAME)} FROM {self.quoted}) AS t"

    def schema(self, special_values: str) -> SourceSchema:
        """The schema of the table's rows now.

        Raises:
            UnsupportedChange: the table has no key.
        """
        if not self.key:
            raise UnsupportedChange(
                f"{self.source} has no key that identifies its rows (replica identity "
                f"{self.identity}); {key_remedy(self)}"
            )
        nullable = self.key_is_configured
        columns = tuple(
            _column(c, not c.not_null, c.name in self.key and not nullable, special_values)
            for c in self.columns
        )
        return SourceSchema(self.source, columns, self.key, nullable)


def quote(name: str) -> str:
    """An identifier in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A string constant in SQL, whatever standard_conforming_strings says."""
    escaped = text.replace("'", "''")
    if "\\" in escaped:
        return "E'" + escaped.replace("\\", "\\\\") + "'"
    return f"'{escaped}'"


def key_remedy(table: Table) -> str:
    """The statement that gives the table a key."""
    if table.key_is_generated:
        return "no generated column may be in its key: they are in no row of the stream"
    if table.primary_key:
        return f"ALTER TABLE {table.quoted} REPLICA IDENTITY DEFAULT"
    if table.configured_key:
        return f"ALTER TABLE {table.quoted} REPLICA IDENTITY FULL"
    return f"ALTER TABLE {table.quoted} ADD PRIMARY KEY (...)"


def matches(source: str, globs: Sequence[str]) -> bool:
    """Whether a table is among those that the configuration names; "!GLOB" leaves tables out."""
    return any(fnmatch.fnmatchcase(source, glob) for glob in globs) and not any(
        fnmatch.fnmatchcase(source, glob[1:]) for glob in globs if glob.startswith("!")
    )


def tables_of(
    rows: Iterable[Any], domains: Iterable[Any], keys: ConfiguredKeys = NO_KEYS
) -> dict[int, Table]:
    """The tables of CATALOGUE_SQL's and DOMAINS_SQL's rows, by oid."""
    bases = {row["oid"]: (row["base"], row["modifier"]) for row in domains}
    grouped: dict[int, list[Any]] = {}
    for row in rows:
        grouped.setdefault(row["oid"], []).append(row)
    return {oid: _table(group, bases, keys) for oid, group in grouped.items()}


def _table(rows: list[Any], bases: dict[int, tuple[int, int]], keys: ConfiguredKeys) -> Table:
    first = rows[0]
    return Table(
        oid=first["oid"],
        source=first["source"],
        schema_name=first["schema_name"],
        table_name=first["table_name"],
        identity=first["identity"],
        columns=tuple(_table_column(row, bases) for row in rows),
        primary_key=_in_place(rows, "pk_place", "pk_width"),
        identity_key=_in_place(rows, "identity_place", "identity_width"),
        is_owner=first["is_owner"],
        may_select=first["may_select"],
        configured_key=keys.of(first["source"], (row["column_name"] for row in rows)),
        key_is_generated=any(
            len([row for row in rows if row[place] is not None]) < (first[width] or 0)
            for place, width in (("pk_place", "pk_width"), ("identity_place", "identity_width"))
        ),
    )


def _in_place(rows: list[Any], place: str, width: str) -> tuple[str, ...]:
    indexed = [row for row in rows if row[place] is not None]
    if len(indexed) < (rows[0][width] or 0):
        return ()
    return tuple(row["column_name"] for row in sorted(indexed, key=lambda row: row[place]))


def _table_column(row: Any, bases: dict[int, tuple[int, int]]) -> TableColumn:
    base_oid, base_modifier = row["type_oid"], row["modifier"]
    while base_oid in bases:
        base_oid, inner = bases[base_oid]
        # The outermost domain with a modifier decides, as it does in the server.
        base_modifier = base_modifier if base_modifier >= 0 else inner
    return TableColumn(
        name=row["column_name"],
        type_oid=row["type_oid"],
        modifier=row["modifier"],
        base_oid=base_oid,
        base_modifier=base_modifier,
        not_null=row["not_null"],
        type_name=row["type_name"],
    )


def _column(column: TableColumn, nullable: bool, is_key: bool, special_values: str) -> Column:
    made = values.column_of(
        column.name, column.base_oid, column.base_modifier, nullable, column.type_name
    )
    if made.kind not in values.SPECIAL_KINDS:
        return made
    if special_values == "text":
        return replace(made, kind=Kind.STRING, precision=0, scale=0)
    if special_values == "null" and not is_key:
        return replace(made, nullable=True)
    return made


def schema_of(
    relation: Relation, table: Table | None, special_values: str, keys: ConfiguredKeys = NO_KEYS
) -> SourceSchema:
    """The schema of a table at this point of the stream.

    ``table`` is the catalogue's view of it now, None if it is gone.  Columns that the
    catalogue has no longer, or has otherwise, are taken from the message alone: nullable,
    and a domain (whose base only the catalogue knows) as text.

    Raises:
        UnsupportedChange: nothing identifies the table's rows.
    """
    today = {column.name: column for column in table.columns} if table else {}
    key, configured = _stream_key(relation, table, keys)
    strict = () if configured else key
    columns = []
    for found in relation.columns:
        known = today.get(found.name)
        if known and (known.type_oid, known.modifier) == (found.type_oid, found.modifier):
            nullable = not known.not_null and found.name not in strict
            columns.append(_column(known, nullable, found.name in strict, special_values))
            continue
        name = values.NAMES.get(found.type_oid, f"type {found.type_oid}")
        bare = TableColumn(
            found.name, found.type_oid, found.modifier, found.type_oid, found.modifier, False, name
        )
        is_key = found.name in strict
        columns.append(_column(bare, not is_key, is_key, special_values))
    return SourceSchema(relation.source, tuple(columns), key, configured)


def base_oids(relation: Relation, table: Table | None) -> tuple[int, ...]:
    """The oids of the columns' types, of domains that of the base type as far as it is known."""
    today = {column.name: column for column in table.columns} if table else {}
    found = []
    for column in relation.columns:
        known = today.get(column.name)
        same = known and (known.type_oid, known.modifier) == (column.type_oid, column.modifier)
        found.append(known.base_oid if known and same else column.type_oid)
    return tuple(found)


def _stream_key(
    relation: Relation, table: Table | None, keys: ConfiguredKeys
) -> tuple[tuple[str, ...], bool]:
    """The key, and whether it is a configured one."""
    names = {column.name for column in relation.columns}
    if table and table.key_is_generated and not table.key:
        raise UnsupportedChange(f"{relation.source} has no key: {key_remedy(table)}")
    flagged = tuple(column.name for column in relation.columns if column.is_key)
    if relation.identity == "f":
        # Every column is flagged: the whole row comes, so the primary key will do.
        if table and table.primary_key and names.issuperset(table.primary_key):
            return table.primary_key, False
        configured = keys.of(relation.source, (column.name for column in relation.columns))
        if configured and not (table and table.primary_key):
            return configured, True
        raise UnsupportedChange(
            f"{relation.source} has replica identity FULL and no primary key that its rows "
            "in the stream hold; add one, and dump the table, or name a key in `keys`"
        )
    if not flagged:
        raise UnsupportedChange(
            f"{relation.source} has no primary key and no replica identity index; "
            f"ALTER TABLE {relation.source} ADD PRIMARY KEY (...)"
        )
    if table:
        for ordered in (table.identity_key, table.primary_key):
            if set(ordered) == set(flagged):
                return ordered, False
    return flagged, False


def widened(schema: SourceSchema, names: set[str]) -> SourceSchema:
    """The schema with these columns nullable: rows older than their NOT NULL hold nulls."""
    columns = tuple(
        replace(column, nullable=True) if column.name in names else column
        for column in schema.columns
    )
    return replace(schema, columns=columns)
