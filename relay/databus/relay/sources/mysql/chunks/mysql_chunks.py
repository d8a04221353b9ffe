"""Reads chunks of tables, each in a snapshot with a known binlog position.

``START TRANSACTION WITH CONSISTENT SNAPSHOT`` makes MariaDB record the binlog position of the
snapshot, and ``BINLOG_GTID_POS`` converts that to a GTID: the chunk shows every commit up to
it and none after it.  A read locks nothing and writes nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import decimal
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from databus.common.compiled.kernels import COMPILED
from databus.common.errors import (
    BadRequest,
    DumpFailed,
    FormatError,
    UnknownSource,
    UnsupportedChange,
)
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from databus.relay.sources.configured_keys import ORDER_NAME
from databus.relay.sources.contract import Chunk, ChunkRequest, Snapshot, TableSize
from databus.relay.sources.mysql.binlog.gtid_numbering import Numbering, transaction
from databus.relay.sources.mysql.chunks.mysql_chunk_rows import RowTextNeeded, key_value, read_rows
from databus.relay.sources.mysql.protocol.mysql_connection import MySqlConnection, ServerError
from databus.relay.sources.mysql.protocol.mysql_settings import MySqlSettings
from databus.relay.sources.mysql.rows.column_readers import ZERO_DATES_ADVICE
from databus.relay.sources.mysql.tables.mysql_tables import (
    TRANSACTIONAL_ENGINES,
    MySqlTable,
    load_catalogue,
)
from databus.relay.sources.row_buffers import Row, Rows

_TABLE_CHANGED = 1412
_NO_SUCH_TABLE = 1146
_LOCK_WAIT_IS_OVER = 1205
LOCK_WAIT_S, PROBE_WAIT_S = 30, 2
"""How long a chunk waits for a table that another session has locked, and a probe before a
resynchronisation, which is repeated: other dumps wait meanwhile."""
_ATTEMPTS = 5
_DATES = ("date", "timestamp")
# The server looks up so many equality conditions; with more it estimates, and may scan the table.
_KEYS_AT_ONCE = 100
_SAME_KEY_ROWS = 1000


def read_chunk(
    connection: MySqlConnection,
    settings: MySqlSettings,
    numbering: Numbering,
    request: ChunkRequest,
) -> Chunk:
    """The next rows of a table in key order, or those with the requested keys.

    Raises:
        UnknownSource: there is no such table.
        BadRequest: a key is invalid.
        UnsupportedChange: the table's engine has no snapshots, or its definition changed during
            every attempt.
    """
    for _ in range(_ATTEMPTS):
        try:
            with numbering.snapshot(connection) as snapshot:
                table = _locked_table(
                    connection, settings, request.source, is_probe=request.is_probe
                )
                return _Reader(connection, table, settings).chunk(request, snapshot)
        except ServerError as error:
            if error.number != _TABLE_CHANGED:
                raise BadRequest(f"{request.source}: {error}") from error
    raise UnsupportedChange(
        f"the definition of {request.source} changed during each of {_ATTEMPTS} attempts to read it"
    )


def snapshot_now(connection: MySqlConnection, numbering: Numbering) -> Snapshot:
    """The snapshot of a transaction that begins now."""
    with numbering.snapshot(connection) as snapshot:
        return snapshot


def largest_key(
    connection: MySqlConnection, settings: MySqlSettings, source: str
) -> list[Any] | None:
    """The largest key of a table, None when it is empty."""
    with transaction(connection, "START TRANSACTION READ ONLY"):
        table = _locked_table(connection, settings, source)
        return _Reader(connection, table, settings).largest()


def chunk_end(
    connection: MySqlConnection, settings: MySqlSettings, request: ChunkRequest
) -> list[Any] | None:
    """The key of row number ``limit``, None if there are fewer."""
    with transaction(connection, "START TRANSACTION READ ONLY"):
        table = _locked_table(connection, settings, request.source)
        return _Reader(connection, table, settings).end(request)


def table_size(connection: MySqlConnection, source: str) -> TableSize:
    """The estimate of the engine's statistics."""
    schema, name = split_source(source)
    found = connection.query(
        "SELECT TABLE_ROWS, AVG_ROW_LENGTH FROM information_schema.TABLES "
        f"WHERE TABLE_SCHEMA = {connection.literal(schema)} "
        f"AND TABLE_NAME = {connection.literal(name)}"
    )
    if not found or found[0][0] is None:
        return TableSize()
    return TableSize(int(found[0][0]), int(found[0][1] or 0) or None)


def write_watermark(connection: MySqlConnection, table: str, token: str) -> None:
    """Commit a token in the row with the id 1."""
    schema, name = split_source(table)
    text = connection.literal(token)
    target = f"{quoted(schema)}.{quoted(name)}"
    try:
        connection.query(
            f"INSERT INTO {target} (id, token) VALUES (1, {text}) "
            f"ON DUPLICATE KEY UPDATE token = {text}"
        )
    except ServerError as error:
        raise DumpFailed(
            f"the watermark cannot be written: {error}; CREATE TABLE {target} (id INT PRIMARY KEY, "
            f"token VARCHAR(200) NOT NULL), and GRANT SELECT, INSERT, UPDATE ON {target}"
        ) from error


def _locked_table(
    connection: MySqlConnection, settings: MySqlSettings, source: str, *, is_probe: bool = False
) -> MySqlTable:
    """The table's definition, which cannot change before the transaction ends."""
    schema, name = split_source(source)
    wait_s = PROBE_WAIT_S if is_probe else LOCK_WAIT_S
    # For this statement alone: where information_schema stops waiting, it leaves tables out.
    connection.query(f"SET lock_wait_timeout = {wait_s}")
    try:
        connection.query(f"SELECT 1 FROM {quoted(schema)}.{quoted(name)} LIMIT 0")
    except ServerError as error:
        if error.number == _NO_SUCH_TABLE:
            raise UnknownSource(f"there is no table {source}") from None
        if error.number == _LOCK_WAIT_IS_OVER:
            raise UnsupportedChange(
                f"{source} was locked by another session for {wait_s} s: SHOW PROCESSLIST has "
                "it; let it end LOCK TABLES or ALTER TABLE"
            ) from None
        raise
    finally:
        if connection.is_open:
            connection.query("SET lock_wait_timeout = DEFAULT")
    only = dataclasses.replace(settings, sources=(source,))
    table = load_catalogue(connection, only).get(source)
    if table is None:
        raise UnknownSource(f"{source} is not a table that can be captured")
    if table.engine not in TRANSACTIONAL_ENGINES:
        raise UnsupportedChange(
            f"{source} is a table of {table.engine}, which has no snapshots to dump it from; "
            f"ALTER TABLE {source} ENGINE = InnoDB"
        )
    return table


def quoted(name: str) -> str:
    """A name as an SQL identifier."""
    return "`" + name.replace("`", "``") + "`"


class _Reader:
    """The statements and conversions for one table.

    Owner: one chunk.
    """

    def __init__(
        self, connection: MySqlConnection, table: MySqlTable, settings: MySqlSettings
    ) -> None:
        self._connection = connection
        self._table = table
        self._schema: SourceSchema = table.source_schema(settings.zero_dates)
        names = [column.name for column in self._schema.columns]
        self._key_indices = [names.index(name) for name in self._schema.key]
        self._key = [self._schema.columns[index] for index in self._key_indices]
        self._convert = [
            _from_text(column, settings.zero_dates, table.source) for column in self._schema.columns
        ]
        self._null_zero = settings.zero_dates == "null"
        self._short_years = {column.name for column in table.columns if column.is_short_year}
        self._from = f"{quoted(table.schema)}.{quoted(table.name)}"
        self._requested = self._key
        if self._schema.nullable_key:
            # It can have nulls, duplicates and values that are equal only for SQL: what orders
            # the rows is a digest of the key's exact values.
            digests = (f"IFNULL(SHA2({_exactly(c)}, 256), '-')" for c in self._key)
            order = f"SHA2(CONCAT({', '.join(digests)}), 256)"
            self._from = f"(SELECT t.*, {order} AS {quoted(ORDER_NAME)} FROM {self._from} t) t"
            self._key = [Column(ORDER_NAME, Kind.STRING, nullable=False)]

    def chunk(self, request: ChunkRequest, snapshot: Snapshot) -> Chunk:
        if request.keys is not None:
            return self._by_keys(request, request.keys, snapshot)
        rows, last_key, has_more = self._rows(request)
        return Chunk(
            self._schema, rows, snapshot, last_key or request.after, done=not has_more
        )  # fmt: skip

    def _rows(self, request: ChunkRequest) -> tuple[Rows, list[Any] | None, bool]:
        """The rows, the last one's key, and whether more may follow; by the kernel or by row."""
        schema, conditions, limit = self._schema, self._bounds(request), request.limit
        if (
            COMPILED
            and not schema.nullable_key
            and schema.fingerprint not in self._connection.as_text
        ):
            sql = self._statement(self._expressions(), conditions, limit)
            try:
                space, last, is_cut = read_rows(
                    self._connection, sql, schema.columns, self._key_indices,
                    null_zero=self._null_zero, max_bytes=request.max_bytes,
                )  # fmt: skip
                has_more = is_cut or space.count == limit
                return space.rows(), last and self._position(last, key_value), has_more
            except RowTextNeeded:
                self._connection.as_text.add(schema.fingerprint)
        found, is_cut = self._select(conditions, limit, request.max_bytes, closes=True)
        has_more = is_cut or len(found) == limit
        if not schema.nullable_key:
            last_key = self._position(found[-1], _to_json) if found else None
            return Rows.of(map(self._row, found)), last_key, has_more
        # One row for each configured key: consumers see rows with equal keys as one row.
        rows = {row.key: row for row in map(self._row, found)}
        return Rows.of(rows.values()), [str(found[-1][-1])] if found else None, has_more

    def end(self, request: ChunkRequest) -> list[Any] | None:
        order = ", ".join(quoted(column.name) for column in self._key)
        rows = self._connection.query(
            f"SELECT {self._key_expressions()} FROM {self._from} "
            f"{_where(self._bounds(request))}ORDER BY {order} LIMIT {request.limit - 1}, 1"
        )
        return self._key_position(rows[0]) if rows else None

    def largest(self) -> list[Any] | None:
        order = ", ".join(f"{quoted(column.name)} DESC" for column in self._key)
        rows = self._connection.query(
            f"SELECT {self._key_expressions()} FROM {self._from} ORDER BY {order} LIMIT 1"
        )
        return self._key_position(rows[0]) if rows else None

    def _bounds(self, request: ChunkRequest) -> list[str]:
        conditions = []
        if request.after is not None:
            conditions.append(self._compared(request.after, ">"))
        if request.upto is not None:
            conditions.append(self._compared(request.upto, "<", or_same=True))
        return conditions

    def _by_keys(self, request: ChunkRequest, keys: list[list[Any]], snapshot: Snapshot) -> Chunk:
        """The rows with these keys; several rows can have the same configured key."""
        nullable = self._schema.nullable_key
        at_once, limit = (1, _SAME_KEY_ROWS) if nullable else (_KEYS_AT_ONCE, _KEYS_AT_ONCE)
        rows: dict[bytes, Row] = {}
        missing = []
        looked_up, left_bytes = 0, request.max_bytes
        while looked_up < len(keys) and left_bytes > 0:
            part = keys[looked_up : looked_up + at_once]
            equal = [self._equal(key) for key in part]
            condition = f"({' OR '.join(equal)})"
            found, is_cut = self._select([condition], limit, request.max_bytes, closes=False)
            if is_cut and len(part) > 1:
                at_once = 1  # A part of the rows does not show which keys have none.
                continue
            packed = list(map(self._row, found))
            rows.update((row.key, row) for row in packed)
            left_bytes -= sum(len(row.row) for row in packed)
            looked_up += len(part)
            if len(found) < len(part):
                present = self._present(equal) if found else set()
                missing += [key for number, key in enumerate(part) if number not in present]
        done = looked_up == len(keys)
        return Chunk(self._schema, Rows.of(rows.values()), snapshot, None, done, missing, looked_up)

    def _equal(self, key: list[Any]) -> str:
        equal = " AND ".join(
            f"{quoted(column.name)} <=> {self._literal(column, value)}"
            for column, value in zip(
                self._requested, self._checked(key, self._requested), strict=True
            )
        )
        return f"({equal})"

    def _present(self, conditions: list[str]) -> set[int]:
        """The numbers of the conditions that a row satisfies."""
        looked_up = (
            f"(SELECT {number} FROM {self._from} WHERE {condition} LIMIT 1)"
            for number, condition in enumerate(conditions)
        )
        return {int(number) for (number,) in self._connection.query(" UNION ALL ".join(looked_up))}

    def _select(
        self, conditions: list[str], limit: int, max_bytes: int, *, closes: bool
    ) -> tuple[list[tuple[Any, ...]], bool]:
        sql = self._statement(self._expressions(), conditions, limit)
        try:
            return self._connection.query_within(sql, max_bytes, closes=closes)
        except UnicodeDecodeError as error:
            column = self._no_text(conditions, limit, max_bytes)
            raise UnsupportedChange(
                f"{self._table.source}: {column} holds "
                f"x'{error.object[:40].hex()}', which is no text; correct the row"
            ) from None

    def _no_text(self, conditions: list[str], limit: int, max_bytes: int) -> str:
        """The column with invalid text; reads the rows again."""
        for column in self._schema.columns:
            if column.kind in (Kind.STRING, Kind.JSON):
                sql = self._statement(_expression(column), conditions, limit)
                try:
                    self._connection.query_within(sql, max_bytes, closes=False)
                except UnicodeDecodeError:
                    return f"column {column.name}"
        return "a column"

    def _statement(self, expressions: str, conditions: list[str], limit: int) -> str:
        order = ", ".join(quoted(column.name) for column in self._key)
        where = _where(conditions)
        return f"SELECT {expressions} FROM {self._from} {where}ORDER BY {order} LIMIT {limit}"

    def _key_expressions(self) -> str:
        return ", ".join(
            f"{quoted(column.name)} + 0" if _is_list(column) else _expression(column)
            for column in self._key
        )

    def _key_position(self, row: tuple[Any, ...]) -> list[Any]:
        return [
            int(value) if _is_list(column) else _to_json(column, value)
            for column, value in zip(self._key, row, strict=True)
        ]

    def _expressions(self) -> str:
        plain = [self._shown(column) for column in self._schema.columns]
        ordered = [f"{quoted(c.name)} + 0" for c in self._key if _is_list(c)]
        if self._schema.nullable_key:
            ordered = [quoted(ORDER_NAME)]
        return ", ".join(plain + ordered)

    def _shown(self, column: Column) -> str:
        """Only YEAR() has the century of a YEAR(2); it gives 1900 for 0000."""
        if column.name in self._short_years:
            year = f"YEAR({quoted(column.name)})"
            return f"IF({year} = 1900, 0, {year})"
        return _expression(column)

    def _row(self, row: tuple[Any, ...]) -> Row:
        values = [
            None if value is None else convert(value)
            for value, convert in zip(row, self._convert, strict=False)
        ]
        key = self._schema.encode_key([values[index] for index in self._key_indices])
        return Row(key, self._schema.encode_row(values))

    def _position(self, row: Sequence[Any], to_json: Callable[[Column, Any], Any]) -> list[Any]:
        """The key of a row as JSON; ENUM and SET by number, which is how they are ordered."""
        numbers = iter(row[len(self._schema.columns) :])
        return [
            int(next(numbers)) if _is_list(column) else to_json(column, row[index])
            for column, index in zip(self._key, self._key_indices, strict=True)
        ]

    def _checked(self, key: list[Any], columns: list[Column]) -> list[Any]:
        if len(key) != len(columns):
            raise BadRequest(
                f"{self._table.source} has {len(columns)} key columns "
                f"({', '.join(c.name for c in columns)}), but the key {key!r} has {len(key)}"
            )
        return key

    def _compared(self, key: list[Any], sign: str, *, or_same: bool = False) -> str:
        """Whether a row's key comes after (or before) ``key``, in a form that uses the index."""
        terms = []
        same: list[str] = []
        first = ""
        for column, value in zip(self._key, self._checked(key, self._key), strict=True):
            name = quoted(column.name) + (" + 0" if _is_list(column) else "")
            literal = str(int(value)) if _is_list(column) else self._literal(column, value)
            terms.append(" AND ".join([*same, f"{name} {sign} {literal}"]))
            first = first or f"{name} {sign}= {literal} AND "
            same.append(f"{name} = {literal}")
        if or_same:
            terms.append(" AND ".join(same))
        return f"({first}({' OR '.join(f'({term})' for term in terms)}))"

    def _literal(self, column: Column, value: Any) -> str:
        if value is None and self._schema.nullable_key:
            return "NULL"
        try:
            if column.kind is Kind.BYTES:
                return f"x'{base64.b64decode(str(value), validate=True).hex()}'"
            if column.kind in (Kind.INT, Kind.UINT64):
                return str(int(value))
            if column.kind is Kind.DECIMAL:
                return format(decimal.Decimal(str(value)), "f")
            if column.kind is Kind.FLOAT:
                return repr(float(value))
        except (ValueError, ArithmeticError) as error:
            raise BadRequest(
                f"{value!r} is no value for {self._table.source}.{column.name}: {error}"
            ) from None
        return self._connection.literal(str(value))


def _where(conditions: list[str]) -> str:
    return f"WHERE {' AND '.join(conditions)} " if conditions else ""


def _exactly(column: Column) -> str:
    """An expression whose text or bytes differ for all different values of a column."""
    return (
        _expression(column) if column.kind is Kind.BYTES else f"CAST({_expression(column)} AS CHAR)"
    )


def _is_list(column: Column) -> bool:
    return column.type_name.startswith(("enum(", "set("))


def _expression(column: Column) -> str:
    """The expression that selects a column with its full precision."""
    name = quoted(column.name)
    if column.type_name.startswith("float"):
        return f"{name} * 1e0"  # CAST(... AS DOUBLE), which MySQL before 8.0.17 lacks
    if column.type_name.startswith("bit"):
        return f"{name} + 0"
    if column.kind is Kind.STRING and column.type_name.startswith(_DATES):
        return f"CAST({name} AS CHAR)"
    return name


def _to_json(column: Column, text: Any) -> Any:
    if column.kind is Kind.BYTES:
        return base64.b64encode(text).decode()
    if column.kind in (Kind.INT, Kind.UINT64):
        return int(text)
    if column.kind is Kind.FLOAT:
        return float(text)
    return str(text)


def _from_text(column: Column, zero_dates: str, source: str) -> Callable[[Any], Any]:
    def zero(text: str) -> None:
        if zero_dates == "null":
            return
        raise UnsupportedChange(
            f"{source}: column {column.name} holds the date {text}, which no calendar has; correct "
            f"the row, or set the database's option {ZERO_DATES_ADVICE}"
        )

    def dated(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
        def convert(text: str) -> Any:
            try:
                return parse(text)
            except ValueError:
                return zero(text)

        return convert

    converters: dict[Kind, Callable[[Any], Any]] = {
        Kind.INT: int,
        Kind.UINT64: int,
        Kind.FLOAT: float,
        Kind.DECIMAL: decimal.Decimal,
        Kind.BYTES: bytes,
        Kind.DATE: dated(dt.date.fromisoformat),
        Kind.TIMESTAMP: dated(dt.datetime.fromisoformat),
        Kind.TIMESTAMPTZ: dated(lambda text: dt.datetime.fromisoformat(text + "+00:00")),
        Kind.TIME_SPAN: time_span,
        Kind.UUID: uuid.UUID,
    }
    return converters.get(column.kind, _text)


def _text(value: Any) -> str:
    """A text; an ENUM or SET with CHARACTER SET binary comes as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


_TIME = re.compile(r"(-?)(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?")


def time_span(text: str) -> dt.timedelta:
    """A TIME value such as ``-838:59:59.000001``."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise FormatError(f"{text!r} is not a TIME value")
    span = dt.timedelta(
        hours=int(found[2]),
        minutes=int(found[3]),
        seconds=int(found[4]),
        microseconds=int((found[5] or "").ljust(6, "0")),
    )
    return -span if found[1] else span
