"""Reads chunks of tables, each in one MVCC snapshot, without locks that block others."""

from __future__ import annotations

import base64
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from databus.common.errors import BadRequest, DumpFailed, SourceUnavailable, UnsupportedChange
from databus.common.schema.source_schema import Kind
from databus.relay.sources.contract import Chunk, ChunkRequest, TableSize
from databus.relay.sources.postgres.chunks.chunk_session import (
    STEP,
    ChunkSession,
    ChunkTextNeeded,
    RowBuffer,
    SessionLoop,
    texts_of,
)
from databus.relay.sources.postgres.protocol.lsn import (
    END_SQL,
    end_of_log,
    parse_snapshot,
    scn_before,
)
from databus.relay.sources.postgres.protocol.postgres_settings import PostgresSettings
from databus.relay.sources.postgres.protocol.replication_connection import PostgresError
from databus.relay.sources.postgres.rows.row_codec import RowCodec
from databus.relay.sources.postgres.tables.postgres_catalogue import Catalogue
from databus.relay.sources.postgres.tables.postgres_tables import (
    BUILT_IN,
    PostgresTable,
    PostgresTableColumn,
    literal,
    quote,
)
from databus.relay.sources.row_buffers import Rows

_SCHEMA_TRIES = 5
_FIRST_ROWS = 16
"""The rows that a chunk requests first, before their size is known."""
_BYTEA = 17
_WORK_LIMIT_S = 600.0
"""How long the server may work on a chunk without sending a byte: its process can be suspended."""
LOCK_WAIT_S = 30.0
"""How long a chunk waits for a table that another session has locked."""
_LOCKED = "55P03"
_UNDEFINED = ("42703", "42P01", "0A000")
_BEGIN = "START TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
# In key order by the key's index, even if a table has no statistics yet: a plan that sorts the
# rest of the table would read all of it for each chunk.
_BY_INDEX = "; ".join(f"SET LOCAL enable_{way} = off" for way in ("sort", "seqscan", "bitmapscan"))
_SNAPSHOT = "SELECT pg_catalog.pg_current_snapshot()"

_TextRow = tuple[bytes | None, ...]


class PostgresChunkReader:
    """Reads chunks over its own sessions, one for each concurrent call.

    Invariants:
        I1. A chunk's rows, snapshot and schema are consistent: the table's definition is compared
            while the chunk's transaction still locks the table.
        I2. After a read that the server worked on for too long, the next one of the same table may
            take twice as long.

    Owner: one event loop; the sessions have their own loop and thread, so that the stream does
        not wait for the conversion of rows.
    Raises: SourceUnavailable; BadRequest for a key or a condition that the server refuses;
        DumpFailed if the table's definition changes during every attempt.
    """

    def __init__(self, settings: PostgresSettings, catalogue: Catalogue) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._loop = SessionLoop()
        self._idle: list[ChunkSession] = []
        self._sessions = weakref.WeakSet[ChunkSession]()
        self._as_text: set[int] = set()
        self._steps: dict[int, int] = {}
        self._work_limits_s: dict[int, float] = {}

    async def close(self) -> None:
        """End the sessions and their thread; an active read fails."""
        if self._sessions and not self._loop.is_closed:
            await self._loop.run(_close(list(self._sessions)))
        self._idle.clear()
        self._loop.close()

    def warnings(self) -> list[str]:
        """The reads that the server has not answered for a minute or longer."""
        return [session.overdue for session in list(self._sessions) if session.overdue]

    async def largest_key(self, table: PostgresTable) -> list[Any] | None:
        """The last key in the order of the key's index; None if the table is empty."""
        order = ", ".join(f"{quote(name)} DESC" for name in table.chunk_key)
        return await self._one_key(table, f" ORDER BY {order} LIMIT 1", [])

    async def chunk_end(self, table: PostgresTable, request: ChunkRequest) -> list[Any] | None:
        """The key of row number ``limit``; None if there are fewer."""
        names = ", ".join(quote(name) for name in table.chunk_key)
        parameters: list[str] = []
        where = _where(_bounds(table, request, parameters))
        order = f" ORDER BY {names} OFFSET {request.limit - 1} LIMIT 1"
        return await self._one_key(table, where + order, parameters)

    async def _one_key(
        self, table: PostgresTable, which: str, parameters: Sequence[str]
    ) -> list[Any] | None:
        names = ", ".join(quote(name) for name in table.chunk_key)
        # The statement locks the table that has this name, so the oid is that of the row's table.
        oid = f"{literal(table.quoted)}::pg_catalog.regclass::pg_catalog.oid"
        sql = f"SELECT {names}, {oid} FROM {table.chunk_from}{which}"
        session = self._session(table)
        try:
            rows = await self._loop.run(_read_only(session, sql, parameters))
        except PostgresError as error:
            await self._loop.run(_close([session]))
            if error.sqlstate == _LOCKED:
                raise await self._locked(table) from error
            raise SourceUnavailable(f"a key of {table.source}: {error}") from error
        except BaseException:
            self._drop(session, table)
            raise
        self._idle.append(session)
        if not rows:
            return None
        *key, read_oid = rows[0]
        if int(read_oid or 0) != table.oid:
            raise _renamed(table)
        return self._key_values(table, tuple(key), session.encoding)

    async def size(self, table: PostgresTable) -> TableSize:
        """The estimate of the server's statistics; empty before the first ANALYZE or VACUUM."""
        (row,) = await self._catalogue.fetch(
            "SELECT sum(reltuples)::bigint AS rows, "
            "sum(pg_catalog.pg_table_size(c.oid))::bigint AS bytes, "
            "min(reltuples) >= 0 AS known FROM pg_catalog.pg_class c "
            "WHERE c.relkind = 'r' AND c.oid IN (SELECT $1::bigint::oid UNION ALL "
            "SELECT relid FROM pg_catalog.pg_partition_tree($1::bigint::oid))",
            table.oid,
        )
        if not row["known"] or not row["rows"]:
            return TableSize(is_scanned=table.key_is_configured)
        row_bytes = max(1, row["bytes"] // row["rows"])
        return TableSize(row["rows"], row_bytes, table.key_is_configured)

    async def write_watermark(self, table: PostgresTable, token: str) -> None:
        """Commit a token in the row with the id 1."""
        session = self._session(table)
        text = literal(token)
        try:
            await self._loop.run(
                session.begin(
                    f"INSERT INTO {table.quoted} (id, token) VALUES (1, {text}) "
                    f"ON CONFLICT (id) DO UPDATE SET token = {text}"
                )
            )
        except PostgresError as error:
            await self._loop.run(_close([session]))
            raise DumpFailed(
                f"the watermark cannot be written: {error}; CREATE TABLE {table.quoted} "
                f"(id int PRIMARY KEY, token text NOT NULL), and GRANT INSERT, UPDATE, SELECT on it"
            ) from error
        except BaseException:
            self._drop(session, table)
            raise
        self._idle.append(session)

    async def read(self, table: PostgresTable, request: ChunkRequest) -> Chunk:
        """One chunk; it is read again if the table is altered during the read.

        Raises:
            UnsupportedChange: another session has locked the table; it is named.
        """
        deadline_s, tries = time.monotonic() + LOCK_WAIT_S, 0
        while tries < _SCHEMA_TRIES:
            session = self._session(table)
            try:
                chunk = await self._loop.run(self._read(session, table, request))
                # The transaction still locks the table, so the catalogue cannot change.
                now = await self._catalogue.table(table.oid)
                await self._loop.run(_commit(session))
            except PostgresError as error:
                await self._loop.run(_close([session]))
                if error.sqlstate == _LOCKED:
                    if request.is_probe or time.monotonic() > deadline_s:
                        raise await self._locked(table) from error
                    continue
                if error.sqlstate not in _UNDEFINED:
                    raise _refused(table, error) from error
                now, chunk = await self._catalogue.table(table.oid), None
                if now == table:
                    raise _refused(table, error) from error
            except BaseException:
                self._drop(session, table)
                raise
            else:
                self._idle.append(session)
            if now is None:
                raise DumpFailed(f"{table.source} was dropped while it was read")
            if now.source != table.source:
                raise _renamed(table)
            if chunk is not None and now == table:
                return chunk
            table, tries = now, tries + 1
        raise DumpFailed(
            f"{table.source} was altered {_SCHEMA_TRIES} times while one chunk was read"
        )

    async def _locked(self, table: PostgresTable) -> UnsupportedChange:
        who = await self._catalogue.lockers(table)
        return UnsupportedChange(
            f"{table.source} is locked by {who}; let that end", source=table.source, held_by=who
        )

    async def _read(
        self, session: ChunkSession, table: PostgresTable, request: ChunkRequest
    ) -> Chunk:
        """Read the rows; runs in the sessions' loop."""
        in_order = request.keys is None
        await session.begin(f"{_BEGIN}; {_BY_INDEX}" if in_order else _BEGIN)
        snapshot_text = (await session.query(_SNAPSHOT))[0][0] or b""
        rows, requested = await self._rows(session, table, request)
        missing: list[list[Any]] = []
        if request.keys is not None and request.after is None:
            missing = await self._missing(session, table, request.keys[:requested])
        written = end_of_log((await session.query(END_SQL))[0])
        last = None
        if rows.space.count and request.keys is None:
            texts = texts_of(rows.last)
            if table.key_is_configured:
                sql, parameters = _select(table, request, last_of=rows.space.count)
                texts = (await session.select(sql, parameters))[0]
            else:
                texts = tuple(texts[index] for index in rows.codec.key_indexes)
            last = self._key_values(table, texts, session.encoding)
        return Chunk(
            schema=rows.codec.schema,
            rows=_distinct(rows.space.rows()) if table.key_is_configured else rows.space.rows(),
            snapshot=parse_snapshot(snapshot_text.decode(), scn_before(written)),
            last_key=last,
            done=(rows.space.count < request.limit and not rows.is_cut)
            if request.keys is None
            else requested == len(request.keys),
            missing=missing,
            key_count=None if request.keys is None else requested,
        )

    async def _rows(
        self, session: ChunkSession, table: PostgresTable, request: ChunkRequest
    ) -> tuple[RowBuffer, int]:
        """The rows, in forms and with a schema that fit all of them, and the number of requested
        keys that were looked up."""
        special_values = self._settings.special_values
        schema = table.schema(special_values)
        known = schema.fingerprint
        while True:
            rows = RowBuffer.of(
                RowCodec(schema, special_values, session.encoding),
                table,
                max_bytes=request.max_bytes,
                in_binary=known not in self._as_text and not schema.nullable_key,
            )
            try:
                requested = await self._fill(session, table, request, rows)
            except ChunkTextNeeded:
                self._as_text.add(known)
                continue
            if rows.codec.schema == schema:
                break
            schema = rows.codec.schema
        if rows.space.count:
            self._steps[table.oid] = max(1, rows.fitting // STEP)
        return rows, requested

    async def _fill(
        self, session: ChunkSession, table: PostgresTable, request: ChunkRequest, rows: RowBuffer
    ) -> int:
        step = self._steps.get(table.oid, _FIRST_ROWS)
        if request.keys is None:
            await session.select_into(rows, *_select(table, request), step)
            return 0
        keys, requested, space = request.keys[: request.limit], 0, rows.space
        while requested < len(keys) and not rows.is_full:
            part = keys[requested : requested + step]
            before = space.count, space.fill
            await session.select_into(rows, *_select(table, replace(request, keys=part)), 0)
            if rows.is_cut and len(part) > 1:
                # A part of the rows does not show which of these keys have none.
                (space.count, space.fill), rows.is_cut, step = before, False, 1
                continue
            requested += len(part)
            step = max(1, min(STEP * step, rows.fitting - space.count))
        return requested

    async def _missing(
        self, session: ChunkSession, table: PostgresTable, keys: Sequence[list[Any]]
    ) -> list[list[Any]]:
        parameters: list[str] = []
        query = " UNION ALL ".join(
            f"SELECT {number} FROM {table.only} WHERE {_same_key(table, key, parameters)}"
            for number, key in enumerate(keys)
        )
        rows = await session.select(query, parameters) if keys else []
        found = {int(row[0] or 0) for row in rows}
        return [key for number, key in enumerate(keys) if number not in found]

    def _key_values(self, table: PostgresTable, texts: _TextRow, encoding: str) -> list[Any]:
        """The key as JSON values: integers as numbers, other values in PostgreSQL's text form.

        Raises:
            UnsupportedChange: a text is not valid in the encoding.
        """
        try:
            return self._key_texts(table, texts, encoding)
        except UnicodeDecodeError as error:
            raise UnsupportedChange(
                f"{table.source}: a text in its key ({', '.join(table.key)}): {error}",
                source=table.source,
            ) from None

    def _key_texts(self, table: PostgresTable, texts: _TextRow, encoding: str) -> list[Any]:
        if table.key_is_configured:
            return [(text or b"").decode(encoding) for text in texts]
        schema = table.schema(self._settings.special_values)
        return [
            int(text or 0) if column.kind is Kind.INT else (text or b"").decode(encoding)
            for column, text in zip(schema.key_columns, texts, strict=True)
        ]

    def _session(self, table: PostgresTable) -> ChunkSession:
        session = self._idle_session() or ChunkSession(self._settings)
        self._sessions.add(session)
        session.purpose = f"a statement for {table.source}"
        session.work_limit_s = self._work_limits_s.get(table.oid, _WORK_LIMIT_S)
        return session

    def _idle_session(self) -> ChunkSession | None:
        while self._idle:
            session = self._idle.pop()
            if not session.is_closed:
                return session
        return None

    def _drop(self, session: ChunkSession, table: PostgresTable) -> None:
        if session.silent_s >= session.work_limit_s:
            self._work_limits_s[table.oid] = 2 * session.work_limit_s
        self._loop.drop(session)


async def _read_only(session: ChunkSession, sql: str, parameters: Sequence[str]) -> list[_TextRow]:
    await session.begin(f"START TRANSACTION READ ONLY; {_BY_INDEX}")
    rows = await session.select(sql, parameters)
    await _commit(session)
    return rows


async def _commit(session: ChunkSession) -> None:
    await session.query("COMMIT")


async def _close(sessions: list[ChunkSession]) -> None:
    while sessions:
        sessions.pop().close()


def _select(table: PostgresTable, request: ChunkRequest, last_of: int = 0) -> tuple[str, list[str]]:
    """The chunk's statement and its parameters; with ``last_of``, for the key of that row."""
    parameters: list[str] = []
    conditions = _bounds(table, request, parameters)
    if request.keys is not None:
        wanted = [_same_key(table, key, parameters) for key in request.keys]
        conditions.append(f"({' OR '.join(wanted)})" if wanted else "false")
    order = ", ".join(quote(name) for name in table.chunk_key)
    columns = order if last_of else ", ".join(quote(column.name) for column in table.columns)
    wanted_rows = f"OFFSET {last_of - 1} LIMIT 1" if last_of else f"LIMIT {request.limit}"
    return (
        f"SELECT {columns} FROM {table.chunk_from}{_where(conditions)} ORDER BY {order} "
        f"{wanted_rows}",
        parameters,
    )


def _bounds(table: PostgresTable, request: ChunkRequest, parameters: list[str]) -> list[str]:
    conditions = []
    if request.after is not None:
        conditions.append(_compare(table, _GREATER, request.after, parameters))
    if request.upto is not None:
        conditions.append(_compare(table, _AT_MOST, request.upto, parameters))
    return conditions


def _where(conditions: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""


# The index in ``PostgresTableColumn.operators``: btree's strategy numbers, after the schema.
_LESS, _AT_MOST, _EQUAL, _AT_LEAST, _GREATER = 1, 2, 3, 4, 5


def _compare(table: PostgresTable, operator: int, key: Sequence[Any], parameters: list[str]) -> str:
    """A row-value comparison in the database's own order; the key's texts are parameters.

    Each operator is qualified by its schema, and each parameter has the base type of its column.
    So the operator is unambiguous, and neither a cast nor a domain's constraint runs.
    """
    markers = []
    for value in key:
        parameters.append(_text(table, value))
        markers.append(f"${len(parameters)}")
    names = [quote(name) for name in _checked(table, key, table.chunk_key)]
    if table.key_is_configured:
        typed = [_Compared(name, f"{marker}::pg_catalog.text", BUILT_IN)
                 for name, marker in zip(names, markers, strict=True)]  # fmt: skip
    else:
        typed = [
            _compared(_column_of(table, name), marker)
            for name, marker in zip(table.chunk_key, markers, strict=True)
        ]
    if len({each.operators for each in typed}) == 1:
        left = ", ".join(each.left for each in typed)
        right = ", ".join(each.right for each in typed)
        return f"({left}) {typed[0].operator(operator)} ({right})"
    if operator == _EQUAL:
        return "(" + " AND ".join(each.sql(_EQUAL) for each in typed) + ")"
    return _nested(typed, operator)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A comparison of a column with a value, in SQL."""

    left: str
    right: str
    operators: tuple[str, ...]

    def operator(self, operator: int) -> str:
        """The operator with its schema."""
        return f"OPERATOR({quote(self.operators[0])}.{self.operators[operator]})"

    def sql(self, operator: int) -> str:
        """The comparison."""
        return f"{self.left} {self.operator(operator)} {self.right}"


def _nested(typed: Sequence[_Compared], operator: int) -> str:
    """A row-value comparison as single ones, for operators with different names."""
    first, rest = typed[0], typed[1:]
    if not rest:
        return first.sql(operator)
    bound, beyond = (_AT_LEAST, _GREATER) if operator == _GREATER else (_AT_MOST, _LESS)
    # The first condition can use the key's index.
    return f"({first.sql(bound)} AND ({first.sql(beyond)} OR {_nested(rest, operator)}))"


def _compared(column: PostgresTableColumn, marker: str) -> _Compared:
    return _Compared(
        f"{quote(column.name)}::{column.sql_type}"
        if column.operators is not BUILT_IN
        else quote(column.name),
        f"{marker}::{column.sql_type}",
        column.operators,
    )


def _column_of(table: PostgresTable, name: str) -> PostgresTableColumn:
    return next(column for column in table.columns if column.name == name)


def _same_key(table: PostgresTable, key: Sequence[Any], parameters: list[str]) -> str:
    """The condition that a row has this key; a value of a configured key can be null."""
    _checked(table, key, table.key)
    key = _with_bytes(table, key)
    if not table.key_is_configured:
        return _compare(table, _EQUAL, key, parameters)
    parts = []
    for name, value in zip(_checked(table, key, table.key), key, strict=True):
        if value is None:
            parts.append(f"{quote(name)} IS NULL")
        else:
            parameters.append(_text(table, value))
            marker = f"${len(parameters)}"
            parts.append(_compared(_column_of(table, name), marker).sql(_EQUAL))
    return f"({' AND '.join(parts)})"


def _with_bytes(table: PostgresTable, key: Sequence[Any]) -> list[Any]:
    """The key with its bytes, which are base64 in JSON, in PostgreSQL's form."""
    oids = {column.name: column.base_oid for column in table.columns}
    return [
        _hex(table, value) if oids.get(name) == _BYTEA and value is not None else value
        for name, value in zip(table.key, key, strict=True)
    ]


def _hex(table: PostgresTable, value: Any) -> str:
    if str(value).startswith("\\x"):
        return str(value)
    try:
        return "\\x" + base64.b64decode(str(value), validate=True).hex()
    except ValueError:
        raise BadRequest(f"{value!r} in a key of {table.source} is not base64") from None


def _checked(table: PostgresTable, key: Sequence[Any], columns: tuple[str, ...]) -> tuple[str, ...]:
    if len(key) != len(columns):
        raise BadRequest(
            f"the key {list(key)!r} has {len(key)} values; {table.source} is keyed by "
            f"{', '.join(columns)}"
        )
    return columns


def _distinct(rows: Rows) -> Rows:
    """One row for each key: consumers see rows with equal configured keys as one row."""
    return Rows.of({row.key: row for row in rows}.values())


def _text(table: PostgresTable, value: Any) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, int | float | str):
        return str(value)
    raise BadRequest(f"{value!r} cannot be part of a key of {table.source}")


def _renamed(table: PostgresTable) -> SourceUnavailable:
    return SourceUnavailable(f"{table.source} was renamed while it was read; read it again")


def _refused(table: PostgresTable, error: PostgresError) -> BadRequest | SourceUnavailable:
    """The error of a chunk: classes 22 and 42 concern values and statement, others the server."""
    if error.sqlstate[:2] in ("22", "42"):
        return BadRequest(f"the server refuses the chunk of {table.source}: {error}")
    return SourceUnavailable(f"the chunk of {table.source}: {error}")
