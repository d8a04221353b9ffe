"""Tables in the catalogue, and the schema of a table in the stream.

The stream's Relation message defines the columns, their types and their order at its position.
The catalogue, which has the present table, adds what the message lacks (NOT NULL, the key's order,
the base types of domains) where the two agree.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from databus.common.errors import UnsupportedChange
from databus.common.schema.source_names import join_source
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.configured_keys import NO_KEYS, ORDER_NAME, ConfiguredKeys
from databus.relay.sources.postgres.protocol.pgoutput_messages import Relation
from databus.relay.sources.postgres.tables import postgres_types

BELOW = """(
    WITH RECURSIVE below(relid) AS (
        SELECT b.inhrelid FROM pg_catalog.pg_inherits b WHERE b.inhparent = c.oid
        UNION ALL
        SELECT b.inhrelid FROM below u JOIN pg_catalog.pg_inherits b ON b.inhparent = u.relid)
    SELECT relid FROM below)"""
"""The partitions of ``c``, of all levels.  pg_partition_tree would lock them: a partition that an
application has locked would block the query for all tables."""

# Names are qualified, and the session's search_path is fixed (see ``settings.SEARCH_PATH``).
# A deferrable index does not identify rows: the server then refuses the application's updates and
# deletes of a published table.  Each partition has its own replica identity, which the server uses.
CATALOGUE_SQL = (
    r"""
SELECT c.oid::bigint AS oid, n.nspname AS schema_name, c.relname AS table_name,
       c.relkind = 'p' AS is_partitioned,
       c.relreplident::text AS identity, a.attname AS column_name, a.attnotnull AS not_null,
       a.atttypid::bigint AS type_oid, a.atttypmod AS modifier,
       pg_catalog.format_type(a.atttypid, a.atttypmod) AS type_name,
       pg_catalog.format_type(a.atttypid, -1) AS sql_type,
       pg_catalog.array_position((pk.indkey::int2[])[0:pk.indnkeyatts - 1], a.attnum) AS pk_index,
       pg_catalog.array_position(
           (ri.indkey::int2[])[0:ri.indnkeyatts - 1], a.attnum) AS identity_index,
       pk.indnkeyatts AS pk_width, ri.indnkeyatts AS identity_width,
       EXISTS (SELECT FROM pg_catalog.pg_index d WHERE d.indrelid = c.oid
               AND (d.indisprimary OR d.indisreplident) AND NOT d.indimmediate) AS is_deferrable,
       CASE WHEN c.relkind = 'p' THEN (
           SELECT min(pg_catalog.format('%I.%I', ln.nspname, l.relname))
           FROM """
    + BELOW
    + r""" t
           JOIN pg_catalog.pg_class l ON l.oid = t.relid
           JOIN pg_catalog.pg_namespace ln ON ln.oid = l.relnamespace
           WHERE l.relkind <> 'p' AND NOT (l.relkind = 'r' AND l.relpersistence = 'p' AND (
               l.relreplident = 'f' OR EXISTS (
                   SELECT FROM pg_catalog.pg_index i
                   WHERE i.indrelid = l.oid AND i.indisvalid AND i.indimmediate
                   AND CASE l.relreplident WHEN 'd' THEN i.indisprimary
                       WHEN 'i' THEN i.indisreplident ELSE false END)))
       ) END AS unfit_partition,
       pg_catalog.pg_has_role(c.relowner, 'USAGE') AS is_owner,
       pg_catalog.has_table_privilege(c.oid, 'SELECT') AS may_select,
       pg_catalog.row_security_active(c.oid) AS is_row_secured
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
     AND NOT a.attisdropped AND a.attgenerated = ''
LEFT JOIN pg_catalog.pg_index pk ON pk.indrelid = c.oid AND pk.indisprimary AND pk.indisvalid
     AND pk.indimmediate
LEFT JOIN pg_catalog.pg_index ri ON ri.indrelid = c.oid AND ri.indisreplident AND ri.indisvalid
     AND ri.indimmediate
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\_toast%'
  AND ($1::bigint IS NULL OR c.oid = $1::bigint::oid)
ORDER BY c.oid, a.attnum
"""
)

# Domains with their base types, and types whose order is not in pg_catalog.  The operators of an
# extension's type must be qualified by their schema, since the names are not unique.
TYPES_SQL = """
SELECT t.oid::bigint AS oid, NULLIF(t.typbasetype, 0)::bigint AS base, t.typtypmod AS modifier,
       pg_catalog.format_type(t.typbasetype, -1) AS sql_type,
       o.operator_schema, o.operators
FROM pg_catalog.pg_type t
LEFT JOIN (
    SELECT k.opcintype, min(n.nspname) AS operator_schema,
           array_agg(p.oprname::text ORDER BY m.amopstrategy) AS operators
    FROM pg_catalog.pg_opclass k
    JOIN pg_catalog.pg_am a ON a.oid = k.opcmethod AND a.amname = 'btree'
    JOIN pg_catalog.pg_amop m ON m.amopfamily = k.opcfamily
         AND m.amoplefttype = k.opcintype AND m.amoprighttype = k.opcintype
    JOIN pg_catalog.pg_operator p ON p.oid = m.amopopr
    JOIN pg_catalog.pg_namespace n ON n.oid = p.oprnamespace AND n.nspname <> 'pg_catalog'
    WHERE k.opcdefault GROUP BY k.opcintype HAVING count(*) = 5
) o ON o.opcintype = t.oid
WHERE t.typtype = 'd' OR o.opcintype IS NOT NULL
"""


BUILT_IN = ("pg_catalog", "<", "<=", "=", ">=", ">")


@dataclass(frozen=True, slots=True)
class PostgresTableColumn:
    """A column in the catalogue, with the base type of a domain.

    ``sql_type`` is the SQL name of the base type.  ``operators`` are the schema of that type's
    operators, and the operators by which an index orders it: ``<  <=  =  >=  >``.
    """

    name: str
    type_oid: int
    modifier: int
    base_oid: int
    base_modifier: int
    not_null: bool
    type_name: str
    sql_type: str = ""
    operators: tuple[str, ...] = BUILT_IN


@dataclass(frozen=True, slots=True)
class PostgresTable:
    """A table in the present catalogue.

    ``primary_key`` and ``identity_key`` (REPLICA IDENTITY USING INDEX) are in index order.  A key
    with a generated column does not count, because no row of the stream has that column.
    ``configured_key`` is the key in the configuration, for a table without the others.
    """

    oid: int
    source: str
    schema_name: str
    table_name: str
    identity: str
    columns: tuple[PostgresTableColumn, ...]
    primary_key: tuple[str, ...]
    identity_key: tuple[str, ...]
    is_owner: bool
    may_select: bool
    configured_key: tuple[str, ...] = ()
    key_is_generated: bool = False
    is_partitioned: bool = False
    key_is_deferrable: bool = False
    unfit_partition: str | None = None
    is_row_secured: bool = False

    @property
    def quoted(self) -> str:
        """The table's name in SQL."""
        return f"{quote(self.schema_name)}.{quote(self.table_name)}"

    @property
    def only(self) -> str:
        """The same without inheriting tables; partitions are included."""
        return self.quoted if self.is_partitioned else f"ONLY {self.quoted}"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row for consumers; empty if there are none.

        The stream's message of an update or delete must contain them.  They are the index of the
        replica identity if one is set, otherwise the primary key.
        """
        if self.is_partitioned and (self.unfit_partition or not self.primary_key):
            return ()
        if self.identity == "i":
            return self.identity_key
        if self.identity == "n" or self.key_is_deferrable:
            return ()
        return self.primary_key or (self.configured_key if self.identity == "f" else ())

    @property
    def key_is_configured(self) -> bool:
        """Whether the key is a configured one, which can have null and equal values."""
        return bool(self.key) and self.identity == "f" and not self.primary_key

    @property
    def chunk_key(self) -> tuple[str, ...]:
        """The columns of ``chunk_from`` by which a dump orders the rows."""
        return (ORDER_NAME,) if self.key_is_configured else self.key

    @property
    def chunk_from(self) -> str:
        """The FROM clause of a dump.

        A configured key can have nulls, values without an order, and values that are equal only
        for SQL, so the order is that of a digest of its text.
        """
        if not self.key_is_configured:
            return self.only
        text = f"ROW({', '.join(quote(name) for name in self.key)})::pg_catalog.text"
        digest = f"pg_catalog.sha256(pg_catalog.textsend({text}))"
        order = f"pg_catalog.encode({digest}, 'hex') COLLATE pg_catalog.\"C\""
        return f"(SELECT *, {order} AS {quote(ORDER_NAME)} FROM {self.only}) AS t"

    def schema(self, special_values: str) -> SourceSchema:
        """The schema of the table's present rows.

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
    """A string constant in SQL, for any value of standard_conforming_strings."""
    escaped = text.replace("'", "''")
    if "\\" in escaped:
        return "E'" + escaped.replace("\\", "\\\\") + "'"
    return f"'{escaped}'"


def key_remedy(table: PostgresTable) -> str:
    """The statement that gives the table a key."""
    if table.key_is_generated:
        return "no generated column may be in its key: they are in no row of the stream"
    if table.unfit_partition:
        return (
            f"see to its partition {table.unfit_partition}: each one must be a table that is "
            "logged, with a primary key and REPLICA IDENTITY DEFAULT"
        )
    if table.key_is_deferrable:
        return (
            "its key is DEFERRABLE, and then the server refuses updates and deletes of a "
            f"published table; CREATE UNIQUE INDEX name ON {table.quoted} (...) for columns that "
            f"are NOT NULL, then ALTER TABLE {table.quoted} REPLICA IDENTITY USING INDEX name"
        )
    if table.primary_key:
        return f"ALTER TABLE {table.quoted} REPLICA IDENTITY DEFAULT"
    if table.configured_key and not table.is_partitioned:
        return f"ALTER TABLE {table.quoted} REPLICA IDENTITY FULL"
    return f"ALTER TABLE {table.quoted} ADD PRIMARY KEY (...)"


def matches(source: str, globs: Sequence[str]) -> bool:
    """Whether the configuration includes a table; "!GLOB" excludes tables."""
    return any(fnmatch.fnmatchcase(source, glob) for glob in globs) and not any(
        fnmatch.fnmatchcase(source, glob[1:]) for glob in globs if glob.startswith("!")
    )


def tables_of(
    rows: Iterable[Any], types: Iterable[Any], keys: ConfiguredKeys = NO_KEYS
) -> dict[int, PostgresTable]:
    """The tables of CATALOGUE_SQL's and TYPES_SQL's rows, by oid."""
    known = {row["oid"]: row for row in types}
    grouped: dict[int, list[Any]] = {}
    for row in rows:
        grouped.setdefault(row["oid"], []).append(row)
    return {oid: _table(group, known, keys) for oid, group in grouped.items()}


def _table(rows: list[Any], types: Mapping[int, Any], keys: ConfiguredKeys) -> PostgresTable:
    first = rows[0]
    source = join_source(first["schema_name"], first["table_name"])
    return PostgresTable(
        oid=first["oid"],
        source=source,
        schema_name=first["schema_name"],
        table_name=first["table_name"],
        identity=first["identity"],
        columns=tuple(_table_column(row, types) for row in rows),
        primary_key=_by_index(rows, "pk_index", "pk_width"),
        identity_key=_by_index(rows, "identity_index", "identity_width"),
        is_owner=first["is_owner"],
        may_select=first["may_select"],
        configured_key=keys.of(source, (row["column_name"] for row in rows)),
        key_is_generated=any(
            len([row for row in rows if row[column] is not None]) < (first[width] or 0)
            for column, width in (("pk_index", "pk_width"), ("identity_index", "identity_width"))
        ),
        is_partitioned=first["is_partitioned"],
        key_is_deferrable=first["is_deferrable"] and first["identity"] != "i",
        unfit_partition=first["unfit_partition"],
        is_row_secured=first["is_row_secured"],
    )


def _by_index(rows: list[Any], column: str, width: str) -> tuple[str, ...]:
    indexed = [row for row in rows if row[column] is not None]
    if len(indexed) < (rows[0][width] or 0):
        return ()
    return tuple(row["column_name"] for row in sorted(indexed, key=lambda row: row[column]))


def _table_column(row: Any, types: Mapping[int, Any]) -> PostgresTableColumn:
    oid, modifier, sql_type = row["type_oid"], row["modifier"], row["sql_type"]
    while oid in types and types[oid]["base"] is not None:
        domain = types[oid]
        oid, sql_type = domain["base"], domain["sql_type"]
        # The outermost domain with a modifier counts, as in the server.
        modifier = modifier if modifier >= 0 else domain["modifier"]
    operators = BUILT_IN
    if oid in types:
        found = types[oid]
        operators = (found["operator_schema"], *found["operators"])
    return PostgresTableColumn(
        name=row["column_name"],
        type_oid=row["type_oid"],
        modifier=row["modifier"],
        base_oid=oid,
        base_modifier=modifier,
        not_null=row["not_null"],
        # Its unqualified name, which the catalogue does not return in our sessions.
        type_name=row["type_name"].removeprefix("public."),
        sql_type=sql_type,
        operators=operators,
    )


def _column(
    column: PostgresTableColumn, nullable: bool, is_key: bool, special_values: str
) -> Column:
    made = postgres_types.column_of(
        column.name, column.base_oid, column.base_modifier, nullable, column.type_name
    )
    if made.kind not in postgres_types.SPECIAL_KINDS:
        return made
    if special_values == "text":
        return replace(made, kind=Kind.STRING, precision=0, scale=0)
    if special_values == "null" and not is_key:
        return replace(made, nullable=True)
    return made


def schema_of(
    relation: Relation,
    table: PostgresTable | None,
    special_values: str,
    keys: ConfiguredKeys = NO_KEYS,
) -> SourceSchema:
    """The schema of a table at this point of the stream.

    ``table`` is the table in the present catalogue, None if it was dropped.  Columns that differ
    in the catalogue, or are not in it, are taken from the message alone: as nullable, and a domain
    (whose base type only the catalogue has) as text.

    Raises:
        UnsupportedChange: the table has no key.
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
        name = postgres_types.NAMES.get(found.type_oid, f"type {found.type_oid}")
        bare = PostgresTableColumn(
            found.name, found.type_oid, found.modifier, found.type_oid, found.modifier, False, name
        )
        is_key = found.name in strict
        columns.append(_column(bare, not is_key, is_key, special_values))
    return SourceSchema(relation.source, tuple(columns), key, configured)


def _stream_key(
    relation: Relation, table: PostgresTable | None, keys: ConfiguredKeys
) -> tuple[tuple[str, ...], bool]:
    """The key, and whether it is a configured one."""
    names = {column.name for column in relation.columns}
    if table and not table.key and (table.key_is_generated or table.key_is_deferrable):
        raise UnsupportedChange(f"{relation.source} has no key: {key_remedy(table)}")
    flagged = tuple(column.name for column in relation.columns if column.is_key)
    if relation.identity == "f":
        # All columns are marked: the message has the whole row, so the primary key identifies it.
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
    """The schema with these columns nullable, for rows with nulls from before their NOT NULL."""
    columns = tuple(
        replace(column, nullable=True) if column.name in names else column
        for column in schema.columns
    )
    return replace(schema, columns=columns)
