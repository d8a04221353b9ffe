"""Writes an answer of many frames to the socket."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Generator
from typing import Any, Protocol

from aiohttp import web

from databus.bootstrap.reading.arrow_socket_writer import ArrowSocketWriter
from databus.bootstrap.reading.bootstrap_stream import IDLE, Piece
from databus.bootstrap.reading.read_pool import ReadPool
from databus.bootstrap.reading.stored_database import StoredDatabase
from databus.common.checkpoint import Position
from databus.common.errors import DatabusError, InternalError
from databus.common.http.admission import pace_of, paced
from databus.common.http.http_application import STOPPING
from databus.common.http.http_connections import lost
from databus.common.http.stream_formats import Format, error_frame
from databus.common.processes.completion import completed

CHECKPOINT_BYTES = 1 << 10

DIRECT_BYTES = 64 << 10
"""A piece of at least this size goes to the socket without a copy."""

PIECES_AHEAD = 4
"""Some pieces between decoding and sending: their speeds vary, and neither waits."""

_log = logging.getLogger("databus.bootstrap.http.bootstrap_server")


class PieceStream(Protocol):
    """What is sent: ``BootstrapStream`` or ``RangeStream``."""

    clock: str
    target: Position
    position: Position
    groups_read: int
    groups_skipped: int

    def pieces(self) -> Generator[Piece, None, None]:
        """All of it, in order."""


async def answer(
    request: web.Request,
    database: StoredDatabase,
    stream: PieceStream,
    form: Format,
    pool: ReadPool,
    max_bytes: int | None = None,
) -> web.StreamResponse:
    """Send all pieces of ``stream``, the first of which is awaited before the headers.

    Raises:
        DatabusError: the request is refused before anything is sent.
        ConnectionError: the reader has gone before that.
    """
    sender = Sender(database, stream, form, max_bytes, pool, lost(request))
    start = stream.position
    database.requests += 1
    try:
        first = await sender.read()
    except BaseException:
        await sender.close()
        raise
    response = web.StreamResponse(
        headers={
            "Content-Type": form.content_type,
            "Cache-Control": "no-store",
            "Databus-Clock": stream.clock,
            "Databus-Max": f"{stream.target.scn}:{stream.target.seq}",
            "Databus-Start": f"{start.scn}:{start.seq}",
        }
    )
    database.readers += 1
    try:
        await response.prepare(request)
        await sender.send(response, first, request)
    except ConnectionError:
        response.force_close()
    finally:
        database.readers -= 1
        await sender.close()
    return response


class Sender:
    """Writes one answer, reading the next pieces while the last one is being sent.

    Invariants:
        I1. At most ``PIECES_AHEAD`` pieces are waiting, one is being sent, and one is being read.
        I2. When the reader has gone, no further step begins, and one that waits for a thread does
            not begin.

    Owner: the task that answers the request.
    """

    def __init__(
        self,
        database: StoredDatabase,
        stream: PieceStream,
        form: Format,
        max_bytes: int | None,
        pool: ReadPool,
        gone: asyncio.Future[None],
    ) -> None:
        self._pool = pool
        self._gone = gone
        self._step: concurrent.futures.Future[Piece | None] | None = None
        self._reading: asyncio.Future[Piece | None] | None = None
        self._database = database
        self._stream = stream
        self._pieces = stream.pieces()
        self._format = form
        self._max_bytes = max_bytes
        self._sent_bytes = self._read_rows = 0
        self._direct: ArrowSocketWriter | None = None
        self._is_entered = self._is_closed = False

    async def read(self) -> Piece | None:
        """The next piece that is not empty; None at the end.

        Raises:
            ConnectionError: the reader has gone.
        """
        while (piece := await self._read()) is IDLE:
            continue
        return piece

    async def _read(self) -> Piece | None:
        self._step = self._pool.submit(self._next)
        self._reading = asyncio.wrap_future(self._step)
        either: set[asyncio.Future[Any]] = {self._reading, self._gone}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done():
            raise ConnectionResetError("the reader has gone")
        return self._reading.result()

    def _next(self) -> Piece | None:
        readers = self._database.open_readers
        readers.enter(self._stream) if not self._is_entered else readers.renew()
        self._is_entered = True
        return next(self._pieces, None)

    async def close(self) -> None:
        """End reading; a step that runs, of one row group at most, has ended when this returns."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._step is not None and self._reading is not None:
            self._step.cancel()
            await completed(asyncio.wait({self._reading}))
            if not self._reading.cancelled():
                self._reading.exception()  # The reader was sent it, or has gone.
        await self._pool.aside(self._end)

    def _end(self) -> None:
        self._pieces.close()
        self._database.open_readers.leave(self._stream)
        self._database.groups_read += self._stream.groups_read
        self._database.groups_skipped += self._stream.groups_skipped

    async def send(
        self, response: web.StreamResponse, piece: Piece | None, request: web.Request
    ) -> None:
        """Send ``piece`` and all that follow; an error becomes the last frame."""
        try:
            await self._send(response, piece, request)
        except ConnectionError:
            raise
        except DatabusError as error:
            await self._fail(response, error)
        except Exception:
            _log.exception("an answer about %s failed", self._database.name)
            await self._fail(response, InternalError("the answer failed"))
        finally:
            if self._direct is not None:
                self._direct.close()
            await self.close()
        await response.write_eof()

    async def _send(
        self, response: web.StreamResponse, piece: Piece | None, request: web.Request
    ) -> None:
        stopping, pace = request.app[STOPPING], pace_of(request)
        ahead: asyncio.Queue[Piece | Exception | None] = asyncio.Queue(self._ahead)
        reading = asyncio.create_task(self._read_into(ahead))
        try:
            while piece is not None:
                sent_bytes = await self._write(response, piece, request)
                await paced(request, pace, sent_bytes)
                if piece.checkpoint is not None and (self._is_full or stopping.is_set()):
                    return
                found = await ahead.get()
                if isinstance(found, Exception):
                    raise found
                piece = found
        finally:
            # A step that runs cannot be interrupted; ``close`` waits for it.
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    @property
    def _ahead(self) -> int:
        """How many pieces are read in advance; with a limit, no more than the answer needs."""
        return PIECES_AHEAD if self._max_bytes is None else 1

    async def _read_into(self, ahead: asyncio.Queue[Piece | Exception | None]) -> None:
        """Read pieces to the end or to the first error, which comes last."""
        while True:
            found: Piece | Exception | None
            try:
                found = await self.read()
            except Exception as error:
                found = error
            await ahead.put(found)
            if not isinstance(found, Piece):
                return

    @property
    def _is_full(self) -> bool:
        if self._max_bytes is None or not self._read_rows:
            return False  # Without a row read, the answer would not advance its reader.
        return self._sent_bytes + CHECKPOINT_BYTES >= self._max_bytes

    async def _write(self, response: web.StreamResponse, piece: Piece, request: web.Request) -> int:
        parts = [part for part in (piece.frames, piece.checkpoint_frame) if len(part)]
        rendered = [self._format.render(part) for part in parts]
        size = sum(len(part) for part in rendered)
        # The headers go out with the first bytes that the response itself writes.
        # TLS has to see every byte.
        if size >= DIRECT_BYTES and self._sent_bytes and not request.secure:
            self._direct = self._direct or ArrowSocketWriter(request)
            await self._direct.write(rendered)
        else:
            for part in rendered:
                await response.write(part)
        self._sent_bytes += size
        self._database.bytes_served += size
        self._database.rows_served += piece.rows
        self._read_rows += piece.rows
        return size

    async def _fail(self, response: web.StreamResponse, error: DatabusError) -> None:
        await response.write(self._format.render(error_frame(error, self._stream.position)))
        response.force_close()
