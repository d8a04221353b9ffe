"""SQLite as a source: polls the trigger-fed log, one poll being one consistent window.

SQLite tells no reader where a transaction ends, so a window here is everything that one read
transaction found new: one or several whole transactions of the database.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import sqlite3
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from databus.common.config import DatabaseConfig
from databus.common.errors import BadRequest, ConfigError, SourcePositionLost, SourceUnavailable
from databus.common.frame import Op
from databus.common.kernels import COMPILED
from databus.common.schema import Kind, SourceSchema
from databus.common.window import WindowBuilder
from databus.relay.sources import sqlite_kernels
from databus.relay.sources import sqlite_log as log
from databus.relay.sources.configured_keys import ConfiguredKeys
from databus.relay.sources.rows import EMPTY, Rows
from databus.relay.sources.source import (
    Batch,
    Chunk,
    ChunkRequest,
    Finding,
    Row,
    TableSize,
    raise_findings,
)
from databus.relay.sources.sqlite_pack import LogBlock, LogPacker, LogRow, read_block

_T = TypeVar("_T")

_PART_BYTES = 1 << 20
_PART_ROWS = 2000
_IDLE_S = 0.5
_PRUNE_ROWS = 5000


@dataclass(frozen=True, slots=True)
class SqliteSnapshot:
    """A chunk read at the log's id ``high``."""

    high: int

    def sees(self, scn: int, txid: str) -> bool:
        """Whether a window lies wholly at or before the point."""
        return scn <= self.high


@dataclass(frozen=True, slots=True)
class _Poll:
    """The first rows of a window that ends with the log id ``upto``, committed at ``at_ms``."""

    block: LogBlock
    at_ms: int
    upto: int


class SqliteSource:
    """The changes of one SQLite file.

    Invariants:
        I1. scn is the largest log id of the window; a window that is handed on in parts has
            its end recorded in the database first, so that it is cut the same way again.
        I2. Log rows are deleted only up to what was acknowledged, and the place is recorded
            in the same transaction.

    Owner: one event loop; SQLite itself runs in two threads, one for the stream and the log,
    one for chunks, each with its own connection.
    Durability: none of its own; the log is as durable as the database.
    Raises: SourceUnavailable, SourcePositionLost, UnsupportedChange, PreflightFailed.
    """

    def __init__(self, config: DatabaseConfig, *, use_kernel: bool = COMPILED) -> None:
        """``use_kernel`` False packs each row in Python, for comparison."""
        self.use_kernel = use_kernel
        self._config = config
        self._keys = ConfiguredKeys(config.keys)
        self._path = _path(config)
        self._poll_s = float(config.options.get("poll_ms", 5)) / 1000
        self._retain = int(config.options.get("retain_rows", 0))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-log")
        self._chunk_thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite-chunk")
        self._connection: sqlite3.Connection | None = None
        self._chunk_connection: sqlite3.Connection | None = None
        self._clock = ""
        self._versions: dict[int, SourceSchema] = {}
        self._changes: list[tuple[int, SourceSchema]] = []
        self._announced: set[int] = set()
        self._packer = LogPacker()
        self._schema_version = -1
        self._position = 0

    @property
    def clock(self) -> str:
        """``sqlite:`` and the uuid that the log got when it was created."""
        return self._clock

    async def preflight(self) -> list[Finding]:
        """See ``Source.preflight``."""

        def examine() -> list[Finding]:
            connection = log.connect(self._path)
            try:
                tables = [t for t in log.user_tables(connection) if self._captures(t)]
                return log.findings(connection, tables, self._keys)
            finally:
                connection.close()

        return await self._run(examine)

    async def open(self) -> None:
        """See ``Source.open``; creates the log and its triggers."""
        raise_findings(self._config.name, await self.preflight())
        if self.use_kernel:
            await asyncio.to_thread(sqlite_kernels.warm_up)
        await self._run(self._open)

    def _open(self) -> None:
        self._connection = log.connect(self._path)
        self._clock = log.install(self._connection)
        self._position = log.last_id(self._connection)
        self._refresh_tables()

    async def first_scn(self) -> int:
        """The log's last id: the log exists from now on."""
        return await self._run(lambda: log.last_id(self._db))

    async def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """See ``Source.stream``."""
        await self._run(partial(self._check_position, after_scn))
        self._position = after_scn
        self._announced.clear()
        self._packer.forget()
        loop = asyncio.get_running_loop()
        idle_since = loop.time()
        data_version = -1
        while True:
            data_version, poll = await self._run(partial(self._poll, data_version))
            if poll is not None:
                async for batch in self._window(poll):
                    yield batch
                idle_since = loop.time()
                continue
            if loop.time() - idle_since >= _IDLE_S:
                idle_since = loop.time()
                yield Batch(b"", resolved=self._position)
            await asyncio.sleep(self._poll_s)

    async def ack(self, scn: int) -> None:
        """Delete the log up to ``scn``, in large steps."""
        await self._run(partial(self._prune, scn))

    async def schemas(self) -> list[SourceSchema]:
        """See ``Source.schemas``; before ``open`` over a connection of its own."""

        def read() -> list[SourceSchema]:
            if self._connection is not None:
                return self._current_schemas()
            self._connection = log.connect(self._path)
            try:
                return self._current_schemas()
            finally:
                self._connection.close()
                self._connection = None

        return await self._run(read)

    async def largest_key(self, source: str) -> list[Any] | None:
        """See ``Source.largest_key``."""

        def read() -> list[Any] | None:
            schema, _ = self._schema(source)
            rows, key = log.chunk_order(schema)
            order = ", ".join(f"{log.quoted(name)} DESC" for name in key)
            names = ", ".join(log.quoted(name) for name in key)
            row = self._chunk_db.execute(
                f"SELECT {names} FROM {rows} ORDER BY {order} LIMIT 1"
            ).fetchone()
            return None if row is None else [_to_json(value) for value in row]

        return await self._run(read, self._chunk_thread)

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """See ``Source.chunk_end``."""
        return await self._run(partial(self._chunk_end, request), self._chunk_thread)

    async def table_size(self, source: str) -> TableSize:
        """The largest rowid, or else the number of rows."""
        return await self._run(partial(self._table_size, source), self._chunk_thread)

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """See ``Source.read_chunk``; the log's last id is read in the same transaction."""
        return await self._run(partial(self._read_chunk, request), self._chunk_thread)

    async def status(self) -> dict[str, Any]:
        """The library's version, the log's last id and how many rows it holds."""

        def read() -> dict[str, Any]:
            count = self._db.execute("SELECT count(*) FROM databus_log").fetchone()[0]
            return {
                "server": f"SQLite {sqlite3.sqlite_version}",
                "scn": log.last_id(self._db),
                "log_rows": count,
                "tables": sorted(log.captured_tables(self._db)),
            }

        return await self._run(read)

    async def close(self) -> None:
        """See ``Source.close``."""
        for thread, connection in (
            (self._thread, self._connection),
            (self._chunk_thread, self._chunk_connection),
        ):
            if connection is not None:
                await asyncio.get_running_loop().run_in_executor(thread, connection.close)
            thread.shutdown(wait=False)
        self._connection = self._chunk_connection = None

    async def _run(self, work: Callable[[], _T], thread: ThreadPoolExecutor | None = None) -> _T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(thread or self._thread, work)
        except sqlite3.Error as error:
            raise SourceUnavailable(f"SQLite database {self._path}: {error}") from error

    @property
    def _db(self) -> sqlite3.Connection:
        if self._connection is None:
            raise SourceUnavailable(f"SQLite database {self._path} is not open")
        return self._connection

    @property
    def _chunk_db(self) -> sqlite3.Connection:
        if self._chunk_connection is None:
            self._chunk_connection = log.connect(self._path)
        return self._chunk_connection

    def _captures(self, table: str) -> bool:
        return self._config.captures(f"main.{table}")

    def _current_schemas(self) -> list[SourceSchema]:
        schemas = (
            log.table_schema(self._db, table, self._keys)
            for table in log.user_tables(self._db)
            if self._captures(table)
        )
        return [schema for schema in schemas if schema is not None]

    def _refresh_tables(self) -> None:
        """Bring the triggers in step with the tables, in one transaction."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            wanted = self._current_schemas()
            for schema in wanted:
                log.register(db, schema, self._position)
            names = {schema.source.partition(".")[2] for schema in wanted}
            for table in log.captured_tables(db):
                if table not in names:
                    log.drop_triggers(db, table)
            self._versions = log.registered(db)
            self._changes = log.schema_changes(db)
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
        self._schema_version = db.execute("PRAGMA schema_version").fetchone()[0]

    def _check_position(self, after_scn: int) -> None:
        pruned, last = log.meta(self._db, "pruned"), log.last_id(self._db)
        if not pruned <= after_scn <= last:
            raise SourcePositionLost(
                f"the change log of {self._path} reaches from {pruned} to {last}; the relay is "
                f"at {after_scn} (database={self._config.name})"
            )

    def _poll(self, seen_version: int) -> tuple[int, _Poll | None]:
        """The rows that are new, or None if nobody has committed since ``seen_version``."""
        db = self._db
        if db.execute("PRAGMA schema_version").fetchone()[0] != self._schema_version:
            self._refresh_tables()
            seen_version = -1
        version = db.execute("PRAGMA data_version").fetchone()[0]
        last = log.last_id(db) if version != seen_version else self._position
        if last <= self._position:
            return version, None
        planned = log.meta(db, "window_end")
        upto = planned if self._position < planned <= last else last
        block = read_block(db, self._position, upto, _PART_ROWS)
        if not block.text:
            return -1, None
        if not block.is_last and planned != upto:
            db.execute("BEGIN IMMEDIATE")
            log.set_meta(db, "window_end", upto)
            db.execute("COMMIT")
        (at_ms,) = db.execute(
            "SELECT at_ms FROM databus_log WHERE id > ? ORDER BY id LIMIT 1", (self._position,)
        ).fetchone()
        return -1, _Poll(block, at_ms, upto)

    async def _window(self, poll: _Poll) -> AsyncIterator[Batch]:
        """Pack a poll into one window, handing it on in parts if it is large."""
        window = WindowBuilder(poll.upto, poll.at_ms * 1000)
        block, after = poll.block, self._position
        while True:
            schemas = await self._run(partial(self._pack, window, block, after))
            if block.is_last:
                self._position = poll.upto
                yield Batch(window.end(str(poll.upto)), schemas, resolved=poll.upto)
                return
            if window.pending_bytes >= _PART_BYTES or schemas:
                yield Batch(window.take(), schemas)
            after = block.last_id
            block = await self._run(partial(read_block, self._db, after, poll.upto, _PART_ROWS))

    def _pack(self, window: WindowBuilder, block: LogBlock, after: int) -> tuple[SourceSchema, ...]:
        """Pack log rows, the first of which follows the log id ``after``."""
        schemas: list[SourceSchema] = []
        packer = self._packer
        packer.begin(block, after, window.scn, window.commit_us)
        more = True
        while more:
            if self.use_kernel:
                changes = (at for at, _ in self._changes if at >= packer.last_id)
                frames, count, more = packer.run(window.seq, min(changes, default=None))
                window.packed(frames, count)
            else:
                more = packer.has_more
            if more:
                self._pack_row(window, packer.last_id, packer.take_row(), schemas)
        return tuple(schemas)

    def _pack_row(
        self, window: WindowBuilder, after: int, row: LogRow, schemas: list[SourceSchema]
    ) -> None:
        """Pack a row that the kernel has left; new ``schemas`` are added."""
        for changed_after, changed in self._changes:
            if after <= changed_after < row.log_id:
                _add_schema_change(window, changed)
        schema = self._versions.get(row.version)
        if schema is None:
            self._versions = log.registered(self._db)
            schema = self._versions[row.version]
        if row.version not in self._announced:
            self._announced.add(row.version)
            self._packer.learn(row.version, schema)
            schemas.append(schema)
        old = None if row.old is None else self._values(schema, row.old)
        new = None if row.new is None else self._values(schema, row.new)
        _add_event(window, schema, row.op, old, new)

    def _values(self, schema: SourceSchema, text: str) -> list[Any]:
        return [
            log.convert(value, column, schema.source)
            for value, column in zip(log.parse_row(text), schema.columns, strict=True)
        ]

    def _prune(self, scn: int) -> None:
        upto = scn - self._retain
        if upto - log.meta(self._db, "pruned") < _PRUNE_ROWS:
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("DELETE FROM databus_log WHERE id <= ?", (upto,))
        log.set_meta(self._db, "pruned", upto)
        self._db.execute("COMMIT")

    def _schema(self, source: str) -> tuple[SourceSchema, str]:
        table = source.partition(".")[2]
        schema = log.table_schema(self._chunk_db, table, self._keys)
        if schema is None:
            raise SourceUnavailable(f"{source} is not there, or has no key any more")
        return schema, table

    def _chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        schema, _ = self._schema(request.source)
        rows, names = log.chunk_order(schema)
        condition, parameters = _condition(names, dataclasses.replace(request, where=None))
        key = ", ".join(log.quoted(name) for name in names)
        row = self._chunk_db.execute(
            f"SELECT {key} FROM {rows} {condition} ORDER BY {key} LIMIT 1 OFFSET ?",
            (*parameters, request.limit - 1),
        ).fetchone()
        return None if row is None else [_to_json(value) for value in row]

    def _table_size(self, source: str) -> TableSize:
        _, table = self._schema(source)
        try:
            query = f"SELECT max(rowid) FROM {log.quoted(table)}"
            (rows,) = self._chunk_db.execute(query).fetchone()
        except sqlite3.OperationalError:  # WITHOUT ROWID
            query = f"SELECT count(*) FROM {log.quoted(table)}"
            (rows,) = self._chunk_db.execute(query).fetchone()
        return TableSize(rows)

    def _read_chunk(self, request: ChunkRequest) -> Chunk:
        db = self._chunk_db
        db.execute("BEGIN")
        try:
            snapshot = SqliteSnapshot(log.last_id(db))
            schema, table = self._schema(request.source)
            if request.keys is not None:
                found, missing = self._rows_of_keys(schema, table, request.keys[: request.limit])
                done = len(request.keys) <= request.limit
                return Chunk(schema, Rows.of(found), snapshot, None, done, missing)
            origin, key = log.chunk_order(schema)
            condition, parameters = _condition(key, request)
            order = ", ".join(log.quoted(name) for name in key)
            names = ", ".join(log.quoted(column.name) for column in schema.columns)
            rows = db.execute(
                f"SELECT {names}, {order} FROM {origin} {condition} ORDER BY {order} LIMIT ?",
                (*parameters, request.limit),
            ).fetchall()
        finally:
            db.execute("COMMIT")
        if not rows:
            return Chunk(schema, EMPTY, snapshot, None, done=True)
        count = len(schema.columns)
        last_key = [_to_json(value) for value in rows[-1][count:]]
        packed = [_chunk_row(schema, row[:count]) for row in rows]
        if schema.nullable_key:
            packed = list({row.key: row for row in packed}.values())
        return Chunk(schema, Rows.of(packed), snapshot, last_key, len(rows) < request.limit)

    def _rows_of_keys(
        self, schema: SourceSchema, table: str, keys: list[list[Any]]
    ) -> tuple[list[Row], list[list[Any]]]:
        names = ", ".join(log.quoted(column.name) for column in schema.columns)
        condition = " AND ".join(f"{log.quoted(name)} IS ?" for name in schema.key)
        found: dict[bytes, Row] = {}
        missing = []
        for key in keys:
            rows = self._chunk_db.execute(
                f"SELECT {names} FROM {log.quoted(table)} WHERE {condition}",
                _key_of_json(schema, key),
            ).fetchall()
            if not rows:
                missing.append(key)
            for row in (_chunk_row(schema, row) for row in rows):
                found[row.key] = row
        return list(found.values()), missing


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


def _path(config: DatabaseConfig) -> str:
    path = unquote(config.url.reveal.removeprefix("sqlite://"))
    if not path.startswith("/") or len(path) < 2:
        raise ConfigError(
            f"{config.url} is not an SQLite URL: write sqlite:///relative/file or "
            "sqlite:////absolute/file"
        )
    return path[1:]


def _add_schema_change(window: WindowBuilder, schema: SourceSchema) -> None:
    window.control(
        Op.SCHEMA_CHANGE,
        source=schema.source_id,
        schema_fp=schema.fingerprint,
        after=json.dumps(schema.to_json()).encode(),
    )


def _add_event(
    window: WindowBuilder,
    schema: SourceSchema,
    op: str,
    before: list[Any] | None,
    after: list[Any] | None,
) -> None:
    """One logged change as one event; an update of the key as a delete and an insert."""
    old_key = None if before is None else _key(schema, before)
    new_key = None if after is None else _key(schema, after)
    source, fingerprint = schema.source_id, schema.fingerprint
    old_row = None if before is None else schema.encode_row(before)
    new_row = None if after is None else schema.encode_row(after)
    if old_key is not None and new_key is not None and old_key == new_key:
        window.event(Op.UPDATE, source, fingerprint, new_key, before=old_row, after=new_row)
        return
    if old_key is not None:
        window.event(Op.DELETE, source, fingerprint, old_key, before=old_row)
    if new_key is not None:
        window.event(Op.INSERT, source, fingerprint, new_key, after=new_row)


def _key(schema: SourceSchema, row: list[Any]) -> bytes:
    values = dict(zip((column.name for column in schema.columns), row, strict=True))
    return schema.encode_key(values)


def _chunk_row(schema: SourceSchema, row: tuple[Any, ...]) -> Row:
    values = [
        log.convert(value, column, schema.source)
        for value, column in zip(row, schema.columns, strict=True)
    ]
    return Row(_key(schema, values), schema.encode_row(values))


def _condition(names: tuple[str, ...], request: ChunkRequest) -> tuple[str, list[Any]]:
    key = ", ".join(log.quoted(name) for name in names)
    marks = ", ".join("?" * len(names))
    parts, parameters = [], []
    for sign, bound in ((">", request.after), ("<=", request.upto)):
        if bound is not None:
            parts.append(f"({key}) {sign} ({marks})")
            parameters += [_from_json(value) for value in bound]
    if request.where:
        parts.append(f"({request.where})")
    return ("WHERE " + " AND ".join(parts) if parts else ""), parameters


def _to_json(value: Any) -> Any:
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _from_json(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
