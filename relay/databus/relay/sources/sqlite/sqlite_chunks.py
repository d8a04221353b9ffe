"""Chunks of an SQLite file's tables, each read at a known point of the change log."""

from __future__ import annotations

import base64
import contextlib
import re
import sqlite3
from typing import Any

from databus.common.errors import BadRequest, UnknownSource, UnsupportedChange
from databus.common.schema.source_names import split_source
from databus.common.schema.source_schema import Kind, SourceSchema
from databus.relay.sources.configured_keys import ORDER_NAME, ConfiguredKeys
from databus.relay.sources.contract import Chunk, ChunkRequest, Row, ScnSnapshot, TableSize
from databus.relay.sources.row_buffers import EMPTY, Rows
from databus.relay.sources.sqlite import sqlite_log as log
from databus.relay.sources.sqlite.sqlite_replacements import Search, conflicts, raise_obstacle


class SqliteChunkReader:
    """Reads tables over its own connection, which it opens at the first use.

    Owner: one thread.
    Raises: sqlite3.Error if the file cannot be read; otherwise as the contract states.
    """

    def __init__(self, path: str, keys: ConfiguredKeys, search: Search = conflicts) -> None:
        self._path = path
        self._search = search
        self._keys = keys
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def interrupt(self) -> None:
        """End the query that is running; may be called in any thread."""
        if self._connection is not None:
            self._connection.interrupt()

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = log.connect(self._path)
        return self._connection

    def _schema(self, source: str) -> tuple[SourceSchema, str]:
        table = split_source(source)[1]
        schema = log.table_schema(self._db, table, self._keys)
        if schema is None:
            raise UnknownSource(f"{source} does not exist, or has no key any more")
        raise_obstacle(self._db, schema, self._search)
        return schema, table

    def examine(self, source: str) -> None:
        """Raise UnsupportedChange or UnknownSource if the table cannot be captured now."""
        self._schema(source)

    def largest_key(self, source: str) -> list[Any] | None:
        """The largest key of a table, JSON-able; None when it is empty."""
        schema, _ = self._schema(source)
        rows, key = _order(self._db, schema)
        order = ", ".join(f"{log.quoted(name)} DESC" for name in key)
        names = ", ".join(log.quoted(name) for name in key)
        try:
            row = self._db.execute(
                f"SELECT {names} FROM {rows} ORDER BY {order} LIMIT 1"
            ).fetchone()
        except sqlite3.OperationalError as error:
            raise _error_of(error, source) from None
        return None if row is None else [_to_json(value) for value in row]

    def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """The key of row number ``limit``; None if there are fewer."""
        schema, _ = self._schema(request.source)
        rows, names = _order(self._db, schema)
        condition, parameters = _condition(names, request)
        key = ", ".join(log.quoted(name) for name in names)
        row = self._db.execute(
            f"SELECT {key} FROM {rows} {condition} ORDER BY {key} LIMIT 1 OFFSET ?",
            (*parameters, request.limit - 1),
        ).fetchone()
        return None if row is None else [_to_json(value) for value in row]

    def size(self, source: str) -> TableSize:
        """The largest rowid, or else the number of rows."""
        _, table = self._schema(source)
        try:
            query = f"SELECT max(rowid) FROM {log.quoted(table)}"
            (rows,) = self._db.execute(query).fetchone()
        except sqlite3.OperationalError:  # WITHOUT ROWID; an index may have another collation
            query = f"SELECT count(*) FROM {log.quoted(table)} NOT INDEXED"
            (rows,) = self._db.execute(query).fetchone()
        return TableSize(rows)

    def read(self, request: ChunkRequest) -> Chunk:
        """One chunk; the log's last id is read in the same transaction."""
        db = self._db
        db.execute("BEGIN")
        try:
            snapshot = ScnSnapshot(log.last_id(db))
            schema, table = self._schema(request.source)
            if request.keys is not None:
                found, missing, count = self._rows_of_keys(schema, table, request)
                done = count == len(request.keys)
                return Chunk(schema, Rows.of(found), snapshot, None, done, missing, count)
            origin, key = _order(self._db, schema)
            condition, parameters = _condition(key, request)
            order = ", ".join(log.quoted(name) for name in key)
            names = ", ".join(log.quoted(column.name) for column in schema.columns)
            query = f"SELECT {names}, {order} FROM {origin} {condition} ORDER BY {order} LIMIT ?"
            # A query left open, as after invalid UTF-8, would hold its snapshot for the next one.
            with contextlib.closing(db.execute(query, (*parameters, request.limit))) as cursor:
                rows, is_cut = _within(cursor, request.max_bytes)
        except (sqlite3.OperationalError, sqlite3.ProgrammingError) as error:
            raised = _error_of(error, request.source)
            if isinstance(raised, UnsupportedChange):
                raise raised from None
            raise
        finally:
            db.execute("COMMIT")
        if not rows:
            return Chunk(schema, EMPTY, snapshot, None, done=True)
        count = len(schema.columns)
        last_key = [_to_json(value) for value in rows[-1][count:]]
        packed = [_chunk_row(schema, row[:count]) for row in rows]
        if schema.nullable_key:
            packed = list({row.key: row for row in packed}.values())
        done = len(rows) < request.limit and not is_cut
        return Chunk(schema, Rows.of(packed), snapshot, last_key, done)

    def _rows_of_keys(
        self, schema: SourceSchema, table: str, request: ChunkRequest
    ) -> tuple[list[Row], list[list[Any]], int]:
        """The rows, the keys without a row, and how many keys were looked up."""
        names = ", ".join(log.quoted(column.name) for column in schema.columns)
        condition = log.has_key(self._db, schema)
        found: dict[bytes, Row] = {}
        missing = []
        count = size_bytes = 0
        for key in (request.keys or [])[: request.limit]:
            if size_bytes >= request.max_bytes:
                break
            count += 1
            rows = self._db.execute(
                f"SELECT {names} FROM {log.quoted(table)} WHERE {condition}",
                _key_of_json(schema, key),
            ).fetchall()
            if not rows:
                missing.append(key)
            for row in (_chunk_row(schema, row) for row in rows):
                found[row.key] = row
                size_bytes += len(row.row)
        return list(found.values()), missing, count


def _order(connection: sqlite3.Connection, schema: SourceSchema) -> tuple[str, tuple[str, ...]]:
    """The FROM clause of a dump, and the columns that it orders by.

    A configured key may hold nulls, and values that differ but compare as equal in SQL; another
    key may have a collation that only the application has.  Then the exact text of the key is the
    order.
    """
    table = log.quoted(split_source(schema.source)[1])
    if not schema.nullable_key and log.has_order(connection, schema):
        return table, schema.key
    names = (log.quoted(column.name) for column in schema.columns)
    columns = ",".join(f"{name} COLLATE BINARY {name}" for name in names)
    order = f"{log.row_expression(schema.key)} AS {log.quoted(ORDER_NAME)}"
    return f"(SELECT {columns}, {order} FROM {table})", (ORDER_NAME,)


def _within(cursor: sqlite3.Cursor, max_bytes: int) -> tuple[list[tuple[Any, ...]], bool]:
    """The rows up to the one that reaches ``max_bytes``, and whether more may follow."""
    rows, size_bytes = [], 0
    for row in cursor:
        rows.append(row)
        size_bytes += sum(len(value) for value in row if isinstance(value, str | bytes))
        if size_bytes >= max_bytes:
            return rows, True
    return rows, False


def _error_of(error: sqlite3.Error, source: str) -> Exception:
    """The error to raise; one about invalid UTF-8 without the text, which may be secret."""
    found = re.match(r"Could not decode to UTF-8 column '(.*)' with text '", str(error), re.DOTALL)
    return log.not_text(source, found[1]) if found else error


def _chunk_row(schema: SourceSchema, row: tuple[Any, ...]) -> Row:
    values = log.converted(schema, row)
    return Row(log.key_of(schema, values), schema.encode_row(values))


def _key_of_json(schema: SourceSchema, key: list[Any]) -> list[Any]:
    """A key's values, bytes as base64, as everywhere in JSON."""
    if len(key) != len(schema.key):
        raise BadRequest(
            f"the key {key!r} has {len(key)} values; {schema.source} is keyed by "
            f"{', '.join(schema.key)}"
        )
    try:
        return [
            base64.b64decode(value, validate=True)
            if column.kind is Kind.BYTES and isinstance(value, str)
            else _from_json(value)
            for column, value in zip(schema.key_columns, key, strict=True)
        ]
    except ValueError as error:
        raise BadRequest(f"the key {key!r} of {schema.source}: {error}") from None


def _condition(names: tuple[str, ...], request: ChunkRequest) -> tuple[str, list[Any]]:
    key = ", ".join(log.quoted(name) for name in names)
    marks = ", ".join("?" * len(names))
    parts, parameters = [], []
    for sign, bound in ((">", request.after), ("<=", request.upto)):
        if bound is not None:
            parts.append(f"({key}) {sign} ({marks})")
            parameters += [_from_json(value) for value in bound]
    return ("WHERE " + " AND ".join(parts) if parts else ""), parameters


def _to_json(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
