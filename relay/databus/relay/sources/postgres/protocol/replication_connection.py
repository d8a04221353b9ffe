"""A connection to PostgreSQL that returns the received messages in large blocks.

It implements the part of the frontend/backend protocol (version 3) that capture needs:
authentication, queries with every value in its text form, and START_REPLICATION's COPY BOTH.  It
does not interpret the replication messages.  docs/decisions/0012 explains why it is not libpq.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import struct
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast

import numpy as np

from databus.common.errors import BadRequest, SourceUnavailable
from databus.common.http.tcp_options import is_near
from databus.relay.sources.postgres.kernels.pgoutput_kernels import last_whole
from databus.relay.sources.postgres.protocol import text_encodings
from databus.relay.sources.postgres.protocol.postgres_settings import (
    JIT,
    LOCK_TIMEOUT,
    SEARCH_PATH,
    PostgresSettings,
    require_search_path,
)
from databus.relay.sources.postgres.protocol.scram import Challenge

_HEADER = struct.Struct("!cI")
_INT = struct.Struct("!I")
_SHORT = struct.Struct("!H")
_STATUS = struct.Struct("!cIcQQQqB")
_PROTOCOL = 196608
_CANCEL = 80877102
MAX_SIGN_IN_BYTES = 64 << 10
MAX_MESSAGE_BYTES = 2 << 30
"""A row has at most 1 GiB, and twice that in text form."""
_SSL_REQUEST = struct.pack("!II", 8, 80877103)
_BUFFER_BYTES = 1 << 20
# Faster than 3 MB/s is a backlog; five thousand small transactions a second are below it.
_BACKLOG_BYTES = 6 << 10
_BACKLOG_S = 0.002
_CLOSE_POLL_S = 0.004
# A receive window that fills in about one coalescing delay.  Meanwhile the sender's kernel joins
# many small messages, which costs it far less than a delivery of each.  A smaller window fills too
# early, and the sender waits for space repeatedly.  Only for connections with a short round trip.
_WINDOW_BYTES = 512 << 10
# A machine or a network path that fails sends nothing.  The kernel detects it by missing
# acknowledgements: of the status each second or, during a query, of the kernel's own probes.
_GONE_MS = 20_000
_PROBED_AFTER_S, _PROBED_EVERY_S = 10, 5
# A server that hangs acknowledges packets and sends no answer.
_ANSWER_S = 60.0
_LATE_S = 1.0
WORK_SQL = """
SELECT a.wait_event_type AS waits FROM pg_catalog.pg_stat_activity a WHERE a.pid = {process}::int
"""
WAITING = ("Client", "Activity")
"""The wait event type of a server process that waits for its client."""
_POSTGRES_EPOCH_US = 946_684_800_000_000
# Values have the same text form in the stream and in a SELECT, on every server.
_SESSION = {
    # Texts as they are stored: see ``text_encodings``.
    "client_encoding": "SQL_ASCII",
    "DateStyle": "ISO, YMD",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "options": "-c bytea_output=hex -c xmloption=content",
    "application_name": "databus",
    "search_path": SEARCH_PATH,
    "lock_timeout": LOCK_TIMEOUT,
    # Rows that a policy hides are an error; they must not count as deleted.
    "row_security": "off",
    "jit": JIT,
    # A relay that hangs during a chunk must not lock the table for ever.
    "idle_in_transaction_session_timeout": "5min",
}

_log = logging.getLogger(__name__)


class PostgresError(Exception):
    """The server's error: SQLSTATE and message."""

    def __init__(self, fields: dict[str, str]) -> None:
        super().__init__(f"{fields.get('M', 'unknown error')} (SQLSTATE {fields.get('C', '?')})")
        self.sqlstate = fields.get("C", "")
        self.message = fields.get("M", "")


class _Inbox(asyncio.BufferedProtocol):
    """Received bytes in one growing buffer; reading pauses after every receive.

    Invariants:
        I1. Bytes [start, end) are received and not consumed; nothing is received while paused.

    Owner: the connection.
    """

    def __init__(self) -> None:
        self.data = bytearray(_BUFFER_BYTES)
        self.start = 0
        self.end = 0
        self.received: asyncio.Future[None] | None = None
        self.lost: str | None = None
        self.transport: asyncio.Transport | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.pause_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.end == len(self.data):
            self.make_room(len(self.data) - (self.end - self.start) + 1)
        return memoryview(self.data)[self.end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.end += nbytes
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
        self.wake()

    def eof_received(self) -> bool:
        self.lost = self.lost or "the server closed the connection"
        self.wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = self.lost or (str(exc) if exc else "the connection is closed")
        self.writable.set()
        self.wake()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def make_room(self, need_bytes: int) -> None:
        """Move the rest to the front of a buffer with space for ``need_bytes`` more."""
        left = self.end - self.start
        size = _BUFFER_BYTES
        while size < left + need_bytes:
            size *= 2
        if size != len(self.data):
            larger = bytearray(size)
            larger[:left] = memoryview(self.data)[self.start : self.end]
            self.data = larger
        elif self.start:
            view = memoryview(self.data)
            view[:left] = view[self.start : self.end]
        self.start, self.end = 0, left

    def wake(self) -> None:
        """End the wait for bytes."""
        if self.received is not None and not self.received.done():
            self.received.set_result(None)


class ReplicationConnection:
    """One session with the server, for SQL or (``replication``) for a stream.

    Invariants:
        I1. A block has only whole protocol messages; each byte is returned once, in order.
        I2. Only ``receive`` reads from the socket.  Otherwise the server waits, and memory does
            not grow.
        I3. With a backlog, reads are four milliseconds apart, so that the server's sender does
            not wake the reader for every message; at the tail there is no delay.

    ``silent_s`` is the total time that ``receive`` has waited since the server last sent a byte;
    the reader may set it to 0.  ``purpose`` is what a report calls its statements.
    ``work_limit_s`` is how long the server may work on an answer without sending a byte.

    Owner: one task reads; others of the same loop may call ``send_status`` and
        ``interrupt``.
    Raises: SourceUnavailable if the connection fails; PostgresError for requests that the server
        refuses.
    """

    def __init__(self, settings: PostgresSettings, *, replication: bool = False) -> None:
        self._settings = settings
        self._replication = replication
        self._inbox = _Inbox()
        self._recent_bytes = 0
        self._recent_since_s = 0.0
        self._is_interrupted = False
        self.encrypted = False
        self.silent_s = 0.0
        self.purpose = "a statement"
        self.work_limit_s = math.inf
        self._cancel_key = b""
        self.encoding = text_encodings.UTF8
        self._is_converted = False

    # -- life

    async def connect(self) -> None:
        """Connect and authenticate."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.connect_timeout_s):
                await self._dial()
                await self._startup()
                if self._is_converted:
                    await self.query("SET client_encoding = 'UTF8'")
                ((found,),) = await self.query("SHOW search_path")
                require_search_path(settings, (found or b"").decode())
        except TimeoutError:
            self.close()
            raise SourceUnavailable(
                f"{settings.address} did not answer within {settings.connect_timeout_s:g} s"
            ) from None
        except OSError as error:
            self.close()
            raise SourceUnavailable(f"cannot connect to {settings.address}: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session; unread messages are dropped."""
        transport = self._inbox.transport
        if transport is not None and not transport.is_closing():
            with contextlib.suppress(OSError, RuntimeError):
                transport.write(_HEADER.pack(b"X", 4))
                # Not close(): that waits for the end of TLS, and for a server
                # that reads nothing any more; the event loop may have ended before.
                transport.abort()

    async def cancel(self) -> None:
        """Cancel this session's query on the server, over another connection.

        Closing the connection does not: the server notices it only at its next write.
        """
        if not self._cancel_key:
            return
        other = ReplicationConnection(self._settings)
        with contextlib.suppress(OSError, TimeoutError, SourceUnavailable):
            try:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await other._dial()
                    size = 8 + len(self._cancel_key)
                    other._transport.write(struct.pack("!II", size, _CANCEL) + self._cancel_key)
                    await other._more(None)  # the server closes after it has read it
            finally:
                other.close()

    @property
    def server_process(self) -> int:
        """The server process of this session."""
        return int(_INT.unpack_from(self._cancel_key)[0]) if self._cancel_key else 0

    @property
    def overdue(self) -> str:
        """The statement that the server has not answered for a minute or longer; "" if none."""
        if self.silent_s < _ANSWER_S or self.is_closed:
            return ""
        return (
            f"server process {self.server_process} has not answered {self.purpose} for "
            f"{self.silent_s:.0f} s; pg_stat_activity shows what it waits for"
        )

    @property
    def is_closed(self) -> bool:
        """Whether either side has closed the connection."""
        transport = self._inbox.transport
        return self._inbox.lost is not None or transport is None or transport.is_closing()

    async def _dial(self) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        if settings.host.startswith("/"):
            path = f"{settings.host}/.s.PGSQL.{settings.port}"
            await loop.create_unix_connection(lambda: self._inbox, path)
            return
        await loop.create_connection(lambda: self._inbox, settings.host, settings.port)
        transport = self._transport
        raw: socket.socket = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBED_AFTER_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBED_EVERY_S)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)
        context = settings.ssl_context()
        if context is None:
            return
        transport.write(_SSL_REQUEST)
        answer = await self._exactly(1)
        early = self._inbox.end - self._inbox.start
        if early:
            # They would count as part of the encrypted stream (CVE-2021-23222).
            raise SourceUnavailable(
                f"{settings.address} sends {early} bytes in clear before TLS has begun; someone "
                f"may be between"
            )
        if answer == b"S":
            secured = await loop.start_tls(
                transport, self._inbox, context, server_hostname=settings.host
            )
            if secured is None:
                raise SourceUnavailable(f"{settings.address} closed the connection in TLS")
            self._inbox.connection_made(secured)
            self.encrypted = True
        elif settings.sslmode != "prefer":
            raise SourceUnavailable(
                f"{settings.address} offers no TLS, but sslmode={settings.sslmode}"
            )

    async def _startup(self) -> None:
        parameters = {"user": self._settings.user, "database": self._settings.database, **_SESSION}
        if self._replication:
            parameters["replication"] = "database"
        body = b"".join(f"{key}\0{value}\0".encode() for key, value in parameters.items()) + b"\0"
        self._transport.write(struct.pack("!II", len(body) + 8, _PROTOCOL) + body)
        challenge = Challenge(self._settings, encrypted=self.encrypted)
        while True:
            kind, payload = await self._message(MAX_SIGN_IN_BYTES)
            if kind == b"R":
                self._answer_challenge(challenge, payload)
            elif kind == b"K":
                self._cancel_key = payload
            elif kind == b"S" and payload.startswith(b"server_encoding\0"):
                name = payload.split(b"\0")[1].decode()
                codec = text_encodings.codec_of(name, self._settings.sql_ascii_encoding)
                self.encoding, self._is_converted = codec or text_encodings.UTF8, codec is None
            elif kind == b"Z":
                return

    def _answer_challenge(self, challenge: Challenge, payload: bytes) -> None:
        answer = challenge.answer(_INT.unpack_from(payload)[0], payload[4:])
        if answer is not None:
            self._send(b"p", answer)

    # -- queries

    async def query(self, sql: str) -> list[tuple[bytes | None, ...]]:
        """Run SQL with the simple protocol; returns the rows, every value in its text form."""
        self._send(b"Q", self._encoded(sql) + b"\0")
        return [values_of(payload) async for payload in self._rows()]

    async def select(self, sql: str, parameters: Sequence[str]) -> list[tuple[bytes | None, ...]]:
        """Run one statement with the extended protocol; values and parameters in text form.

        The server derives a parameter's type from its context, and refuses more than one statement.
        """
        texts = [self._encoded(parameter) for parameter in parameters]
        self._send(b"P", b"\0" + self._encoded(sql) + b"\0" + _SHORT.pack(0))
        bound = b"".join(_INT.pack(len(text)) + text for text in texts)
        # No names; all parameters as text; the parameters; all results as text.
        self._send(b"B", b"\0\0" + _SHORT.pack(0) + _SHORT.pack(len(texts)) + bound + b"\0\0")
        self._send(b"E", b"\0" + _INT.pack(0))
        self._send(b"S", b"")
        return [values_of(payload) async for payload in self._rows()]

    def _encoded(self, text: str) -> bytes:
        """A text in the server's encoding.

        Raises:
            BadRequest: a character is not in the server's encoding.
        """
        try:
            return text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise BadRequest(f"{self._settings.address} has no such text: {error}") from None

    async def _rows(self) -> AsyncIterator[bytes]:
        """The DataRow payloads of the query, as they arrive."""
        refused: PostgresError | None = None
        while True:
            try:
                kind, payload = await self._message()
            except PostgresError as error:
                refused = error
                continue
            except SourceUnavailable:
                # The connection ends after a fatal error; the first error is the cause.
                if refused is None:
                    raise
                break
            if kind == b"D":
                yield payload
            elif kind == b"Z":
                break
        if refused is not None:
            raise refused

    # -- the stream

    async def start_copy(self, command: str) -> None:
        """Run START_REPLICATION; from here on ``receive`` and ``send_status`` are valid."""
        self._narrow_window()
        self._send(b"Q", command.encode() + b"\0")
        while True:
            kind, _ = await self._message()
            if kind == b"W":
                return

    def _narrow_window(self) -> None:
        raw: socket.socket | None = self._transport.get_extra_info("socket")
        if raw is not None and is_near(raw):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_BYTES)

    async def receive(self, timeout_s: float, *, is_behind: bool = True) -> memoryview | None:
        """All received whole messages as one block; waits at most ``timeout_s``.

        ``is_behind``: the last messages are old, so that a burst is a backlog and not the tail.
        None if nothing arrived, or after ``interrupt``.  The block is valid until ``consumed`` is
        called with it.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        if is_behind and self._recent_bytes >= _BACKLOG_BYTES:
            await asyncio.sleep(_CLOSE_POLL_S)
            self._recent_bytes = 0
        while True:
            stop = self._whole_messages()
            if stop > self._inbox.start:
                now_s = loop.time()
                if now_s - self._recent_since_s > _BACKLOG_S:
                    self._recent_since_s, self._recent_bytes = now_s, 0
                self._recent_bytes += stop - self._inbox.start
                return memoryview(self._inbox.data)[self._inbox.start : stop]
            remaining_s = deadline_s - loop.time()
            if self._is_interrupted or remaining_s <= 0 or not await self._more(remaining_s):
                self._is_interrupted = False
                return None

    def interrupt(self) -> None:
        """Have ``receive`` return at once if nothing has arrived."""
        self._is_interrupted = True
        self._inbox.wake()

    def consumed(self, block: memoryview) -> None:
        """Release the block; its bytes may be overwritten."""
        self._inbox.start += len(block)
        block.release()

    def send_status(self, received: int, flushed: int, *, is_answered: bool = False) -> None:
        """Send a standby status update: the received LSN, and the LSN that is durable downstream.

        ``is_answered``: request a keepalive from the server.
        """
        if self.is_closed:
            return
        now = time.time_ns() // 1000 - _POSTGRES_EPOCH_US
        body = _STATUS.pack(b"d", 38, b"r", received, flushed, flushed, now, is_answered)
        self._transport.write(body)

    def _whole_messages(self) -> int:
        """The end of the last whole message in the buffer."""
        inbox = self._inbox
        return int(last_whole(np.frombuffer(inbox.data, dtype=np.uint8), inbox.start, inbox.end))

    # -- messages

    async def _answer(self, missing: int = 0) -> None:
        """Receive once.  The server can take long for its answer.

        Raises:
            SourceUnavailable: it has sent nothing for a minute and is not running a query, or it
                has sent nothing for ``work_limit_s``.
        """
        while not await self._more(_ANSWER_S, missing):
            # Until the session has a key, the time limit of ``connect`` applies.
            idle = await self._is_idle() if self._cancel_key else ""
            if not idle:
                if self.silent_s < 2 * _ANSWER_S:
                    _log.warning("%s: %s", self._settings.address, self.overdue)
                if self.silent_s >= self.work_limit_s:
                    raise SourceUnavailable(f"{self._settings.address}: {self.overdue}")
                continue
            if await self._more(_LATE_S, missing):  # The answer has arrived.
                return
            raise SourceUnavailable(
                f"{self._settings.address} has sent nothing for {_ANSWER_S:g} s: {idle}"
            )

    async def _is_idle(self) -> str:
        """Why no answer can come; "" if the server runs the query.  Asks over another
        connection."""
        other = ReplicationConnection(self._settings)
        try:
            async with asyncio.timeout(_ANSWER_S):
                await other.connect()
                rows = await other.query(WORK_SQL.format(process=self.server_process))
        except PostgresError:
            return ""  # It refuses the query, so it is running.
        except (TimeoutError, SourceUnavailable) as error:
            return str(error) or "it does not answer over another connection either"
        finally:
            other.close()
        if rows and (rows[0][0] or b"").decode() not in WAITING:
            return ""
        state = "waits for us" if rows else "is gone"
        return f"its process {state}, and the connection is broken somewhere between"

    @property
    def _transport(self) -> asyncio.Transport:
        if self._inbox.transport is None:
            raise SourceUnavailable(f"{self._settings.address} is not connected")
        return self._inbox.transport

    def _send(self, kind: bytes, body: bytes) -> None:
        self._transport.write(_HEADER.pack(kind, len(body) + 4) + body)

    async def _message(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> tuple[bytes, bytes]:
        """The next message; an ErrorResponse is raised."""
        kind, length = _HEADER.unpack(await self._exactly(5))
        if not 4 <= length <= limit_bytes:
            raise SourceUnavailable(
                f"{self._settings.address} announces a message {kind!r} of {length} bytes, where "
                f"there can be {limit_bytes}; is it a PostgreSQL server?"
            )
        payload = await self._exactly(length - 4)
        if kind == b"E":
            raise error_of(payload)
        return kind, payload

    async def _exactly(self, count: int) -> bytes:
        inbox = self._inbox
        while (missing := count - (inbox.end - inbox.start)) > 0:
            await self._answer(missing)
        taken = bytes(memoryview(inbox.data)[inbox.start : inbox.start + count])
        inbox.start += count
        return taken

    async def _more(self, timeout_s: float | None, missing: int = 0) -> bool:
        """Receive once; False if nothing arrived in time.

        ``missing`` is the number of bytes that the message lacks; 0: the header is next.
        """
        inbox = self._inbox
        if inbox.lost is not None:
            raise SourceUnavailable(f"{self._settings.address}: {inbox.lost}")
        if not missing:
            missing = 1
            if inbox.end - inbox.start >= 5:
                missing = min(
                    _INT.unpack_from(inbox.data, inbox.start + 1)[0] + 1, MAX_MESSAGE_BYTES
                )
        inbox.make_room(missing)
        before, loop = inbox.end, asyncio.get_running_loop()
        began_s = loop.time()
        inbox.received = loop.create_future()
        self._transport.resume_reading()
        try:
            async with asyncio.timeout(timeout_s):
                await inbox.received
        except TimeoutError:
            self.silent_s += loop.time() - began_s
            if inbox.end == before:
                return False
        finally:
            inbox.received = None
            if inbox.transport is not None and not inbox.transport.is_closing():
                inbox.transport.pause_reading()
        self.silent_s = 0.0
        return True


def error_of(payload: bytes | memoryview) -> PostgresError:
    """The exception for an ErrorResponse's payload."""
    fields = {}
    for part in bytes(payload).split(b"\0"):
        if part:
            fields[chr(part[0])] = part[1:].decode(errors="replace")
    return PostgresError(fields)


def values_of(message: bytes, at: int = 0) -> tuple[bytes | None, ...]:
    """The values of a DataRow whose content begins at ``at``, unconverted."""
    (count,) = _SHORT.unpack_from(message, at)
    at, values = at + 2, list[bytes | None]()
    for _ in range(count):
        (length,) = _INT.unpack_from(message, at)
        at += 4
        if length == 0xFFFFFFFF:
            values.append(None)
        else:
            values.append(message[at : at + length])
            at += length
    return tuple(values)
