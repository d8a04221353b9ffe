"""The captured tables as the server's catalogue has them now."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from databus.common.errors import UnknownSource, UnsupportedChange
from databus.common.schema.source_names import join_source, split_source
from databus.common.schema.source_schema import Column, SourceSchema
from databus.relay.sources.configured_keys import ConfiguredKeys
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection
from databus.relay.sources.mysql.protocol.mysql_settings import SYSTEM_SCHEMAS, MySqlSettings
from databus.relay.sources.mysql.rows.column_readers import (
    NO_TEXT_LABEL,
    SPECIAL_NAMES,
    catalogue_type,
    column_of,
)
from databus.relay.sources.mysql.tables.generated_columns import GeneratedColumns
from databus.relay.sources.mysql.tables.merge_tables import merged

TRANSACTIONAL_ENGINES = frozenset({"InnoDB", "RocksDB"})


@dataclass(frozen=True, slots=True)
class MySqlTableColumn:
    """One column of the catalogue; ``charset`` is "" where there is none.

    ``is_short_year``: a YEAR(2) of MariaDB, which SQL shows without its century.
    """

    name: str
    type_name: str
    nullable: bool
    charset: str
    collation: str
    is_short_year: bool = False


@dataclass(frozen=True, slots=True)
class MySqlTable:
    """One base table.  ``key`` is empty when it has neither a primary key nor a unique index
    over columns that cannot be null, and none is configured for it.  ``unlogged`` is the reason why
    the binlog does not give its content."""

    schema: str
    name: str
    engine: str
    columns: tuple[MySqlTableColumn, ...]
    key: tuple[str, ...]
    key_is_configured: bool = False
    unlogged: str = ""

    @property
    def source(self) -> str:
        """The name that consumers know it by."""
        return join_source(self.schema, self.name)

    @property
    def specials(self) -> dict[str, str]:
        """The types that the binlog does not contain, by column."""
        return {c.name: c.type_name for c in self.columns if c.type_name in SPECIAL_NAMES}

    def source_schema(self, zero_dates: str) -> SourceSchema:
        """The table as consumers see it.

        Raises:
            UnsupportedChange: it has no key, or a type that is not supported.
        """
        if self.unlogged:
            raise UnsupportedChange(f"{self.source}: {self.unlogged}")
        if not self.key:
            raise UnsupportedChange(
                f"{self.source} has no primary key and no unique index without nulls; "
                f"ALTER TABLE {self.source} ADD PRIMARY KEY (...), or leave it out of sources"
            )
        columns = self.columns_as_seen(zero_dates)
        return SourceSchema(self.source, columns, self.key, self.key_is_configured)

    def columns_as_seen(self, zero_dates: str) -> tuple[Column, ...]:
        """The columns as consumers see them.

        Raises:
            UnsupportedChange: a type is not supported.
        """
        for column in self.columns:
            if column.charset == "binary" and "?" in column.type_name:
                raise UnsupportedChange(f"{self.source}: column {column.name} {NO_TEXT_LABEL}")
        try:
            return tuple(
                column_of(c.name, c.type_name, c.nullable, zero_dates) for c in self.columns
            )
        except UnsupportedChange as error:
            raise UnsupportedChange(f"{self.source}: {error.message}") from None


Catalogue = dict[str, MySqlTable]
"""Captured tables by source name."""


def visible(connection: MySqlConnection, sources: Collection[str]) -> dict[str, bool]:
    """Those of some names that the account sees, and whether each is a table with rows."""
    names = ", ".join(
        "({}, {})".format(*map(connection.literal, split_source(source))) for source in sources
    )
    found = connection.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME, TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED') "
        f"FROM information_schema.TABLES WHERE (TABLE_SCHEMA, TABLE_NAME) IN ({names})"
    )
    return {
        join_source(str(schema), str(name)): bool(int(is_table)) for schema, name, is_table in found
    }


def carried_schemas(tables: Iterable[MySqlTable], zero_dates: str) -> list[SourceSchema]:
    """The schemas of these tables; one with an unsupported type is left out."""
    found = []
    for table in tables:
        with contextlib.suppress(UnsupportedChange):
            found.append(table.source_schema(zero_dates))
    return found


def require_readable(catalogue: Catalogue, source: str, zero_dates: str) -> None:
    """Check that there is such a table, and that consumers can have its rows.

    Raises:
        UnknownSource: the account cannot see it.
        UnsupportedChange: it has no key, or a type that is not supported.
    """
    if source not in catalogue:
        raise UnknownSource(f"there is no table {source}, or the relay's account cannot see it")
    catalogue[source].source_schema(zero_dates)


def load_catalogue(connection: MySqlConnection, settings: MySqlSettings) -> Catalogue:
    """The captured tables, in a few queries whatever their number."""
    schemas = _schemas(connection, settings)
    if not schemas:
        return {}
    inside = "(" + ", ".join(connection.literal(schema) for schema in schemas) + ")"
    engines = {
        (str(schema), str(name)): str(engine)
        for schema, name, engine in connection.query(
            "SELECT TABLE_SCHEMA, TABLE_NAME, ENGINE FROM information_schema.TABLES "
            "WHERE TABLE_TYPE IN ('BASE TABLE', 'SYSTEM VERSIONED') "
            f"AND TABLE_SCHEMA IN {inside} ORDER BY 1, 2"
        )
        if settings.captures(str(schema), str(name))
    }
    columns, computed = _columns(connection, inside)
    keys = _keys(connection, inside)
    unlogged = computed | merged(connection, engines)
    return {
        join_source(schema, name): _keyed(
            MySqlTable(
                schema,
                name,
                engine,
                tuple(columns.get((schema, name), ())),
                keys.get((schema, name), ()),
                unlogged=unlogged.get((schema, name), ""),
            ),
            settings.keys,
        )
        for (schema, name), engine in engines.items()
    }


def _keyed(table: MySqlTable, keys: ConfiguredKeys) -> MySqlTable:
    """The table with the configured key, if it has none of its own."""
    configured = () if table.key else keys.of(table.source, (c.name for c in table.columns))
    return replace(table, key=configured, key_is_configured=True) if configured else table


def _schemas(connection: MySqlConnection, settings: MySqlSettings) -> list[str]:
    """The schemas that a configured pattern can mean."""
    rows = connection.query("SELECT SCHEMA_NAME FROM information_schema.SCHEMATA ORDER BY 1")
    names = [str(name) for (name,) in rows if name not in SYSTEM_SCHEMAS]
    if any(set("*?[") & set(split_source(pattern)[0]) for pattern in settings.sources):
        return names
    wanted = {split_source(pattern)[0] for pattern in settings.sources}
    return [name for name in names if name in wanted]


def _columns(
    connection: MySqlConnection, inside: str
) -> tuple[dict[tuple[str, str], list[MySqlTableColumn]], dict[tuple[str, str], str]]:
    """The columns of each table, and why the binlog lacks values of one, where it does."""
    checked = _json_checks(connection, inside)
    found: dict[tuple[str, str], list[MySqlTableColumn]] = {}
    generated = GeneratedColumns()
    for schema, table, name, type_, null, charset, collation, extra, expression in connection.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME, COLUMN_NAME, COLUMN_TYPE, IS_NULLABLE, "
        "CHARACTER_SET_NAME, COLLATION_NAME, EXTRA, GENERATION_EXPRESSION "
        f"FROM information_schema.COLUMNS WHERE TABLE_SCHEMA IN {inside} "
        "ORDER BY TABLE_SCHEMA, TABLE_NAME, ORDINAL_POSITION"
    ):
        generated.add((str(schema), str(table)), str(name), str(extra), str(expression))
        type_name = catalogue_type(str(type_))
        clause = "json_valid(`" + str(name).replace("`", "``") + "`)"
        if type_name == "longtext" and (str(schema), str(table), clause) in checked:
            type_name = "json"
        elif connection.is_mysql and type_name.startswith("vector("):
            type_name = "vector"  # MariaDB's lies otherwise in its binlog.
        found.setdefault((str(schema), str(table)), []).append(
            MySqlTableColumn(
                str(name),
                type_name,
                null == "YES",
                str(charset or ""),
                str(collation or ""),
                is_short_year=str(type_).lower().startswith("year(2)"),
            )
        )
    return found, {} if connection.is_mysql else generated.computed_too_early()


def _json_checks(connection: MySqlConnection, inside: str) -> set[tuple[str, str, str]]:
    """MariaDB's JSON is a LONGTEXT with a check; MySQL's is a type of its own."""
    if connection.is_mysql:
        return set()
    return {
        (str(schema), str(table), str(clause))
        for schema, table, clause in connection.query(
            "SELECT CONSTRAINT_SCHEMA, TABLE_NAME, CHECK_CLAUSE "
            "FROM information_schema.CHECK_CONSTRAINTS "
            f"WHERE CONSTRAINT_SCHEMA IN {inside} AND CHECK_CLAUSE LIKE 'json_valid(%'"
        )
    }


def _keys(connection: MySqlConnection, inside: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """The primary key, or else the first unique index without nulls in the order of names."""
    indexes: dict[tuple[str, str], dict[str, list[str]]] = {}
    for schema, table, index, column in connection.query(
        "SELECT TABLE_SCHEMA, TABLE_NAME, INDEX_NAME, IF(NULLABLE = 'YES', NULL, COLUMN_NAME) "
        f"FROM information_schema.STATISTICS WHERE TABLE_SCHEMA IN {inside} AND NON_UNIQUE = 0 "
        "ORDER BY TABLE_SCHEMA, TABLE_NAME, INDEX_NAME = 'PRIMARY' DESC, INDEX_NAME, SEQ_IN_INDEX"
    ):
        columns = indexes.setdefault((str(schema), str(table)), {}).setdefault(str(index), [])
        columns.append("" if column is None else str(column))
    return {
        table: next((tuple(columns) for columns in named.values() if all(columns)), ())
        for table, named in indexes.items()
    }
