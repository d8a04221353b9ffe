"""MySQL and MariaDB as the target of a mirror."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pymysql
from pymysql import err
from pymysql.constants import CLIENT

from databus.client.checkpoints.checkpoint_table import Answer, with_marks
from databus.client.sinks.sql.net_rows import POSITION
from databus.client.sinks.sql.sql_target import MirrorTable, SqlTarget
from databus.client.sinks.sql.table_structures import StructureChange
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Column, Kind, SourceSchema

_TYPES = {
    Kind.BOOL: "BOOLEAN",
    Kind.INT: "BIGINT",
    Kind.UINT64: "BIGINT UNSIGNED",
    Kind.FLOAT: "DOUBLE",
    Kind.BYTES: "LONGBLOB",
    Kind.DATE: "DATE",
    Kind.TIME: "TIME(6)",
    Kind.TIME_SPAN: "TIME(6)",
    Kind.TIMESTAMP: "DATETIME(6)",
    Kind.TIMESTAMPTZ: "DATETIME(6)",
    Kind.UUID: "CHAR(36)",
    Kind.JSON: "JSON",
}
_INDEX_BYTES = 3072
_STATEMENT_BYTES = 2 << 20
_PLAIN = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)


class MysqlTarget(SqlTarget):
    """A database of MySQL or MariaDB: rows come in statements of many rows.

    A definition commits what was written before it, so each is repeatable: it looks first at what
    is there.  Text is compared byte by byte, as keys are.
    """

    has_transactional_ddl = False
    quote = "`"
    same = "<=>"
    text_type: ClassVar[str] = "LONGTEXT"
    row_refusals = (err.DataError, err.IntegrityError)
    refusals = (err.ProgrammingError, err.NotSupportedError)

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self._connection: Any = None
        self._options = ""

    def connect(self) -> None:
        """Connect; times are in UTC, and values that do not fit are errors."""
        url = self._url
        self._connection = pymysql.connect(
            host=url.hostname or "127.0.0.1",
            port=url.port or 3306,
            user=unquote(url.username or ""),
            password=unquote(url.password or ""),
            database=unquote(url.path.removeprefix("/")),
            charset="utf8mb4",
            client_flag=CLIENT.FOUND_ROWS,  # An UPDATE counts the rows that it leaves as they are.
            connect_timeout=10,
            read_timeout=600,
            init_command=(
                "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', "
                "time_zone = '+00:00', foreign_key_checks = 0"
            ),
        )
        is_mariadb = "MariaDB" in self.ask("SELECT VERSION()").rows[0][0]
        collation = "utf8mb4_nopad_bin" if is_mariadb else "utf8mb4_0900_bin"
        self._options = f" ENGINE = InnoDB CHARACTER SET utf8mb4 COLLATE {collation}"

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            with contextlib.suppress(err.Error, OSError):
                self._connection.close()
            self._connection = None

    def commit(self) -> None:
        """Commit."""
        self._connection.commit()

    def ask(self, sql: str, values: Sequence[Any] = ()) -> Answer:
        """Run a statement."""
        with self._connection.cursor() as cursor:
            cursor.execute(with_marks(sql, "format") if values else sql, values or None)
            return Answer(cursor.rowcount, list(cursor.fetchall()) if cursor.description else [])

    def type_of(self, column: Column, *, is_key: bool, key_count: int) -> str:
        """The type of the same values; keys have the length that an index allows."""
        if is_key and column.kind in (Kind.STRING, Kind.NUMERIC, Kind.JSON):
            return f"VARCHAR({_INDEX_BYTES // key_count // 4})"
        if is_key and column.kind is Kind.BYTES:
            return f"VARBINARY({_INDEX_BYTES // key_count})"
        if column.kind is Kind.DECIMAL and 0 < column.precision <= 65 and 0 <= column.scale <= 30:
            return f"DECIMAL({column.precision}, {column.scale})"
        return _TYPES.get(column.kind, "LONGTEXT")

    def has_table(self, name: str) -> bool:
        """Whether a table of this name is there."""
        return bool(self._columns_of(name))

    def prepare_name(self, target: str) -> None:
        """Make the database."""
        schema, table = split_source(target)
        if table:
            self.ask(f"CREATE DATABASE IF NOT EXISTS {self.quoted(schema)}")

    def create(self, table: MirrorTable) -> None:
        """Create the table; keys are compared byte by byte."""
        self.ask(self.creation(table) + self._options)

    def alter(self, table: MirrorTable, change: StructureChange) -> None:
        """One statement for all columns."""
        there = self._columns_of(table.target)
        parts = [f"MODIFY COLUMN {self.definition(one, table.schema)}" for one in change.converted]
        for column in change.replaced:
            if column.name in there:
                parts.append(f"DROP COLUMN {self.quoted(column.name)}")
            parts.append(f"ADD COLUMN {self.definition(column, table.schema)}")
        for column in change.added:
            what = "MODIFY" if column.name in there else "ADD"
            parts.append(f"{what} COLUMN {self.definition(column, table.schema)}")
        if parts:
            self.ask(f"ALTER TABLE {table.sql_name} {', '.join(parts)}")

    def drop_column(self, table: MirrorTable, column: Column) -> None:
        """Drop a column, if it is there still."""
        if column.name in self._columns_of(table.target):
            super().drop_column(table, column)

    def rekey(self, before: SourceSchema, table: MirrorTable) -> None:
        """One statement; rows remain if they have the columns of the new key."""
        there = self._columns_of(table.target)
        if not set(table.key) <= there:
            self.ask(f"DELETE FROM {table.sql_name}")
        elif not table.schema.nullable_key:
            lacks = " OR ".join(f"{self.quoted(name)} IS NULL" for name in table.key)
            self.ask(f"DELETE FROM {table.sql_name} WHERE {lacks}")
        parts = [] if before.nullable_key else ["DROP PRIMARY KEY"]
        for column in table.schema.columns:
            what = "MODIFY" if column.name in there else "ADD"
            parts.append(f"{what} COLUMN {self.definition(column, table.schema)}")
        if not table.schema.nullable_key:
            parts.append(f"ADD PRIMARY KEY ({self.names(table.key)})")
        self.ask(f"ALTER TABLE {table.sql_name} {', '.join(parts)}")

    def upsert(self, table: MirrorTable, rows: Any, *, are_new: bool = False) -> None:
        """INSERT ... ON DUPLICATE KEY UPDATE of many rows."""
        names = rows.schema.names
        if table.schema.nullable_key:
            self.delete(table, rows.select([*table.key, *POSITION]))
            listed = self.names(names)
            for derived in self._derived(table, rows):
                self.ask(
                    f"INSERT INTO {table.sql_name} ({listed}) "
                    f"SELECT {listed} FROM ({derived}) AS s WHERE NOT EXISTS "
                    f"(SELECT 1 FROM {table.sql_name} AS t WHERE {self._same_key(table)})"
                )
            return
        scn, seq = map(self.quoted, POSITION)
        is_newer = f"({scn} < VALUES({scn}) OR ({scn} = VALUES({scn}) AND {seq} <= VALUES({seq})))"
        changed = [name for name in names if name not in (*table.key, *POSITION)]
        # Assignments are made from left to right: the position comes last, _seq before _scn.
        sets = [
            f"{name} = IF({is_newer}, VALUES({name}), {name})" for name in map(self.quoted, changed)
        ]
        sets.append(f"{seq} = IF({is_newer}, VALUES({seq}), {seq})")
        sets.append(f"{scn} = GREATEST({scn}, VALUES({scn}))")
        head = f"INSERT INTO {table.sql_name} ({self.names(names)}) VALUES "
        tail = f" ON DUPLICATE KEY UPDATE {', '.join(sets)}"
        for part in self._parts(table, rows):
            tuples = pc.binary_join_element_wise("(", _joined(part, ","), ")", "").to_pylist()
            self.ask(head + ",".join(tuples) + tail)

    def update(self, table: MirrorTable, names: Sequence[str], rows: Any) -> None:
        """UPDATE ... JOIN."""
        sets = ", ".join(f"t.{one} = s.{one}" for one in map(self.quoted, (*names, *POSITION)))
        for derived in self._derived(table, rows.select([*table.key, *names, *POSITION])):
            self.ask(
                f"UPDATE {table.sql_name} AS t JOIN ({derived}) AS s "
                f"ON {self._same_key(table)} AND {self._is_older} SET {sets}"
            )

    def delete(self, table: MirrorTable, rows: Any) -> None:
        """DELETE ... JOIN."""
        for derived in self._derived(table, rows):
            self.ask(
                f"DELETE t FROM {table.sql_name} AS t JOIN ({derived}) AS s "
                f"ON {self._same_key(table)} AND {self._is_older}"
            )

    @property
    def _is_older(self) -> str:
        scn, seq = map(self.quoted, POSITION)
        return f"(t.{scn} < s.{scn} OR (t.{scn} = s.{scn} AND t.{seq} <= s.{seq}))"

    def _same_key(self, table: MirrorTable) -> str:
        equals = self.same if table.schema.nullable_key else "="
        return " AND ".join(f"t.{name} {equals} s.{name}" for name in map(self.quoted, table.key))

    def _derived(self, table: MirrorTable, rows: Any) -> Iterator[str]:
        """The rows as relations of literals."""
        for part in self._parts(table, rows):
            selects = pc.binary_join_element_wise("SELECT ", _joined(part, ","), "").to_pylist()
            named = [
                f"{value} AS {self.quoted(name)}"
                for value, name in zip(
                    (one[0].as_py() for one in part), rows.schema.names, strict=True
                )
            ]
            yield " UNION ALL ".join([f"SELECT {', '.join(named)}", *selects[1:]])

    def _parts(self, table: MirrorTable, rows: Any) -> Iterator[list[Any]]:
        """The rows as literals by column, so many at once as a statement may have."""
        kinds = {column.name: column.kind for column in table.schema.columns}
        most = max(1, int(_STATEMENT_BYTES / max(1, rows.nbytes / rows.num_rows)))
        for begin in range(0, rows.num_rows, most):
            part = rows.slice(begin, most)
            yield [
                _literals(column, kinds.get(name))
                for name, column in zip(part.schema.names, part.columns, strict=True)
            ]

    def _columns_of(self, target: str) -> set[str]:
        schema, table = split_source(target)
        where = "table_schema = ?" if table else "table_schema = DATABASE()"
        answer = self.ask(
            f"SELECT column_name FROM information_schema.columns WHERE {where} AND table_name = ?",
            (schema, table) if table else (schema,),
        )
        return {str(row[0]) for row in answer.rows}


def _joined(columns: list[Any], separator: str) -> Any:
    return pc.binary_join_element_wise(*columns, separator)


def _literals(column: Any, kind: Kind | None) -> Any:
    """A column as SQL; a null is NULL."""
    if kind is Kind.BYTES:
        texts = [None if one is None else f"x'{one.hex()}'" for one in column.to_pylist()]
        return pc.fill_null(pa.array(texts, pa.string()), "NULL")
    if kind is Kind.TIME_SPAN:
        texts = [None if one is None else _time(one) for one in column.to_pylist()]
        return pc.fill_null(pa.array(texts, pa.string()), "NULL")
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    is_plain = any(is_kind(column.type) for is_kind in _PLAIN)
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        column = column.cast(pa.timestamp("us"))
    if not pa.types.is_string(column.type):
        column = column.cast(pa.string())
    elif not is_plain:
        column = pc.replace_substring(column, "\\", "\\\\")
        column = pc.replace_substring(column, "'", "''")
    if not is_plain:
        column = pc.binary_join_element_wise("'", column, "'", "")
    return pc.fill_null(column, "NULL")


def _time(us: int) -> str:
    sign, us = ("-", -us) if us < 0 else ("", us)
    seconds, fraction = divmod(us, 1_000_000)
    return f"'{sign}{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}.{fraction:06}'"
