"""A session that reads the rows of chunks, in a thread with its own event loop.

The stream's loop must not wait for the conversion of a chunk's rows.  Compiled code converts the
received blocks and does not hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from databus.common.compiled.kernels import COMPILED, I64Array
from databus.common.errors import SourceUnavailable
from databus.common.schema.source_schema import Kind
from databus.relay.sources import row_buffers
from databus.relay.sources.postgres.kernels import binary_value_kernels as binary
from databus.relay.sources.postgres.kernels import postgres_chunk_kernels as k
from databus.relay.sources.postgres.kernels.binary_value_kernels import TEXT
from databus.relay.sources.postgres.protocol.replication_connection import (
    PostgresError,
    ReplicationConnection,
    error_of,
    values_of,
)
from databus.relay.sources.postgres.protocol.text_encodings import UTF8
from databus.relay.sources.postgres.rows.postgres_kernel_tables import PostgresKernelTables
from databus.relay.sources.postgres.rows.row_codec import RowCodec
from databus.relay.sources.postgres.tables.postgres_tables import PostgresTable
from databus.relay.sources.row_buffers import ROW_STOP, Row, RowSpace

_T = TypeVar("_T")

_INT = struct.Struct("!I")
_SHORT = struct.Struct("!H")
_DATA_ROW, _ERROR, _READY, _SUSPENDED = b"DEZs"
STEP = 8
"""The largest factor by which the number of requested rows grows: other rows may be larger."""
FORMS: dict[tuple[int, Kind], int] = {
    (16, Kind.BOOL): binary.BOOL,
    (17, Kind.BYTES): binary.BYTES,
    (19, Kind.STRING): binary.UTF8,
    (20, Kind.INT): binary.INTEGER,
    (21, Kind.INT): binary.INTEGER,
    (23, Kind.INT): binary.INTEGER,
    (25, Kind.STRING): binary.UTF8,
    (26, Kind.INT): binary.UNSIGNED,
    (114, Kind.JSON): binary.UTF8,
    (700, Kind.FLOAT): binary.REAL,
    (701, Kind.FLOAT): binary.DOUBLE,
    (1042, Kind.STRING): binary.UTF8,
    (1043, Kind.STRING): binary.UTF8,
    (1082, Kind.DATE): binary.DATE,
    (1083, Kind.TIME): binary.TIME,
    (1114, Kind.TIMESTAMP): binary.TIMESTAMP,
    (1184, Kind.TIMESTAMPTZ): binary.TIMESTAMP,
    (1700, Kind.DECIMAL): binary.NUMERIC,
    (2950, Kind.UUID): binary.UUID,
    (3802, Kind.JSON): binary.JSONB,
}
"""The binary form of a column, by its base type's oid and its kind; others come as text."""
_CLOSED = "the source was closed during a query"


class ChunkTextNeeded(Exception):
    """A row has a value that can only be read in its text form."""


class SessionLoop:
    """An event loop in its own thread, and the tasks there.

    Owner: the loop that created it; only that one calls ``run`` and ``close``.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.is_closed = False

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` in the thread and return its result; it is cancelled with the caller.

        Raises:
            SourceUnavailable: ``close`` was called, before or during the call.
        """
        if self.is_closed:
            work.close()
            raise SourceUnavailable(_CLOSED)
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name="chunks", daemon=True
            )
            self._thread.start()
        loop = self._loop
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._loop is not loop and task is not None and not task.cancelling():
                # ``close`` has cancelled the work, and not the caller.
                raise SourceUnavailable(_CLOSED) from None
            raise

    def drop(self, session: ReplicationConnection) -> None:
        """Close a session whose work was cancelled, and end its query, without waiting."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_abandon(session), self._loop)

    def close(self) -> None:
        """End the thread; tasks that still run are cancelled."""
        self.is_closed = True
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None


async def _abandon(session: ReplicationConnection) -> None:
    session.close()
    await session.cancel()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@dataclass(slots=True)
class RowBuffer:
    """The received rows of one table, and its columns for the kernel.

    Invariants:
        I1. It takes no row once it has ``max_bytes``; with ``is_cut`` there may be more rows.

    Owner: one chunk.
    """

    codec: RowCodec
    columns: I64Array
    keys: I64Array
    max_bytes: int
    space: RowSpace = field(default_factory=RowSpace)
    last: bytes = b""
    is_cut: bool = False

    @property
    def is_full(self) -> bool:
        """Whether it takes no more rows."""
        return self.space.fill >= self.max_bytes

    @property
    def fitting(self) -> int:
        """The number of rows of this size that it takes; more should not be requested."""
        return self.max_bytes * self.space.count // max(1, self.space.fill)

    @staticmethod
    def of(codec: RowCodec, table: PostgresTable, *, max_bytes: int, in_binary: bool) -> RowBuffer:
        """An empty one.  The key comes as text, because the next chunk needs it as text."""
        tables = PostgresKernelTables(codec.encoding)
        tables.put(1, codec.schema)
        _, _, columns, keys, _ = tables.arrays
        if in_binary and codec.encoding == UTF8:
            for index, (known, column) in enumerate(
                zip(table.columns, codec.schema.columns, strict=True)
            ):
                if column.name not in codec.schema.key:
                    columns[index, k.FORM] = FORMS.get((known.base_oid, column.kind), TEXT)
        return RowBuffer(codec, columns, keys, max_bytes)

    def take(self, block: memoryview) -> int:
        """Pack the rows at the start of a block of whole messages, until it is full; returns their
        number of bytes.

        Raises:
            TextNeeded: a value's binary form lacks information.
        """
        buf = np.frombuffer(block, dtype=np.uint8)
        at, stop = 0, len(buf)
        fields = np.empty((2, len(self.columns)), dtype=np.int64)
        space = self.space
        while at < stop and buf[at] == _DATA_ROW and not self.is_full:
            begin, reason = at, row_buffers.ROW_REFUSED
            if COMPILED and not self.codec.schema.nullable_key:
                at, space.fill, space.count, reason = k.walk_rows(
                    buf, at, stop, space.out, space.fill, space.spans, space.count,
                    self.columns, self.keys, fields,
                )  # fmt: skip
            if at > begin:
                at = self._within(block, begin, at)
                last = k.last_row(buf, begin, at)
                self.last = bytes(block[last : last + _length(block, last)])
            if reason == row_buffers.OUT_FULL:
                space.grow(row_buffers.bytes_of_row(_length(block, at), len(self.columns)))
            elif reason == row_buffers.ROW_REFUSED:
                if (self.columns[:, k.FORM] != TEXT).any():
                    raise ChunkTextNeeded
                end = at + _length(block, at)
                self.last = bytes(block[at:end])
                texts = texts_of(self.last)
                space.put(Row(self.codec.key(texts), self.codec.row(texts)[0]))
                at = end
        return at

    def _within(self, block: memoryview, begin: int, at: int) -> int:
        """Remove the rows after the one that fills it; returns the rows' end in the block."""
        space, ends = self.space, [begin]
        if space.fill < self.max_bytes:
            return at
        while ends[-1] < at:
            ends.append(ends[-1] + _length(block, ends[-1]))
        stops = space.spans[: space.count, ROW_STOP]
        over = space.count - 1 - int(np.searchsorted(stops, self.max_bytes))
        space.count -= over
        space.fill = int(stops[space.count - 1])
        return ends[-1 - over]


def _length(block: memoryview, at: int) -> int:
    return int(_INT.unpack_from(block, at + 1)[0]) + 1


def texts_of(message: bytes) -> tuple[bytes | None, ...]:
    """The values of a DataRow message with its header, unconverted."""
    return values_of(message, 5)


class ChunkSession(ReplicationConnection):
    """An SQL session that passes large results to the kernel block by block.

    Owner: one task of the loop in which it connected.
    """

    async def select_into(
        self, rows: RowBuffer, sql: str, parameters: Sequence[str], step: int
    ) -> None:
        """Run one statement in the open transaction, and pack its rows until the buffer is full.

        The buffer determines the forms of the results.  The first request is for ``step`` rows
        (0: all).

        Raises:
            TextNeeded: as ``RowBuffer.take``; all requested rows were read.
            PostgresError: the server refuses it.
        """
        texts = [self._encoded(parameter) for parameter in parameters]
        self._send(b"P", b"\0" + self._encoded(sql) + b"\0" + _SHORT.pack(0))
        bound = b"".join(_INT.pack(len(text)) + text for text in texts)
        forms = [0 if form == TEXT else 1 for form in rows.columns[:, k.FORM].tolist()]
        self._send(
            b"B",
            b"\0\0" + _SHORT.pack(0) + _SHORT.pack(len(texts)) + bound
            + _SHORT.pack(len(forms)) + b"".join(map(_SHORT.pack, forms)),
        )  # fmt: skip
        while True:
            self._send(b"E", b"\0" + _INT.pack(step))
            self._send(b"S", b"")
            is_suspended = await self._take_rows(rows)
            rows.is_cut |= is_suspended and rows.is_full
            if not is_suspended or rows.is_cut:
                return
            step = max(1, min(STEP * step, rows.fitting - rows.space.count))

    async def _take_rows(self, rows: RowBuffer) -> bool:
        """Read up to ReadyForQuery; returns whether the statement may have more rows."""
        problem: Exception | None = None
        is_suspended = False
        inbox = self._inbox
        while True:
            stop = self._whole_messages()
            if stop == inbox.start:
                await self._answer()
                continue
            block, at = memoryview(inbox.data)[inbox.start : stop], 0
            while at < len(block):
                kind, end = block[at], at + _length(block, at)
                if kind == _DATA_ROW and rows.is_full:
                    rows.is_cut = True
                elif kind == _DATA_ROW and problem is None:
                    try:
                        end = at + rows.take(block[at:])
                    except Exception as error:
                        problem = error
                elif kind == _ERROR:
                    problem = problem or error_of(block[at + 5 : end])
                elif kind == _SUSPENDED:
                    is_suspended = True
                elif kind == _READY:
                    inbox.start = stop
                    if problem is not None:
                        raise problem
                    return is_suspended
                at = end
            inbox.start = stop

    async def begin(self, sql: str) -> None:
        """Connect if necessary, and begin a transaction.

        Raises:
            SourceUnavailable: the server does not answer.
        """
        try:
            if self._inbox.transport is None:
                await self.connect()
        except PostgresError as error:
            raise SourceUnavailable(f"{self._settings.address}: {error}") from error
        await self.query(sql)
