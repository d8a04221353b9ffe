"""From the ring's mapping to the socket: large parts of an answer, without a buffer between.

aiohttp keeps the connection and writes everything else; its transport is empty while this
writes to its descriptor.  The kernel copies what it takes during the call, so
that the ring's writer can spoil bytes only then, or before.  Both are seen: before a call that
the head has not passed the bytes, after it that it did not meanwhile (decision 0018).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn

from aiohttp import HttpVersion11, web

from databus.common.errors import ReaderOvertaken
from databus.common.frame import Buffer
from databus.relay.extents import Extent, Head
from databus.relay.ring_reader import RingReader

SCRATCH_BYTES = 256 << 10
_CHUNK_END = b"\r\n"
_ABORTIVE = struct.pack("ii", 1, 0)

_scratch = memoryview(bytearray(SCRATCH_BYTES))


class CutOff(ConnectionError):
    """The writer has overtaken this reader within an extent; its connection is closed."""


class DirectSender:
    """Sends extents over one connection, between the writes of its response.

    Invariants:
        I1. No byte of the mapping is handed to the kernel that had been overwritten when the
            call began; if one may have been overwritten during the call, the connection is
            reset, and the reader has a SPAN frame to know such bytes by.
        I2. A reader that has not asked for spans is only sent bytes from a copy that was
            checked after it was made.
        I3. An extent goes out whole, or the body never ends: the reader sees that it was cut.
        I4. Nothing of the mapping is held while another task runs.

    Owner: the task that answers the request, which makes it after the headers and closes it.
    Raises: ReaderOvertaken while nothing of an extent is sent, CutOff later; ConnectionError
    where the reader has gone.
    """

    def __init__(self, request: web.Request, *, spans: bool) -> None:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader has gone")
        self._transport = transport
        self._connection = transport.get_extra_info("socket")
        self._spans = spans
        self._is_chunked = request.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self._waiting_fd = -1
        self.write_count = 0
        transport.set_write_buffer_limits(high=0)

    def set_corked(self, corked: bool) -> None:
        """Keep the head and the end of the body from going out as packets of their own."""
        if not self._transport.is_closing():
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, int(corked))

    def close(self) -> None:
        """Let go; the connection stays as it is."""
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()
        if self._waiting_fd >= 0:
            os.close(self._waiting_fd)
            self._waiting_fd = -1

    async def send(self, ring: RingReader, extent: Extent) -> None:
        """Send the frames of an extent."""
        while not self._transport.is_closing() and self._transport.get_write_buffer_size():
            await self._writable()
        size = extent.size_bytes
        start: bytes = extent.span if self._spans else b""
        if self._is_chunked:
            start = b"%x\r\n%b" % (size + len(start), start)
        end = _CHUNK_END if self._is_chunked else b""
        head = Head(ring, extent.file)
        total = len(start) + size + len(end)
        sent = 0
        while sent < total:
            count = self._send_some(extent, head, start, end, sent)
            sent += count
            if not count:
                await self._writable()

    def _send_some(self, extent: Extent, head: Head, start: bytes, end: bytes, sent: int) -> int:
        """Send what the kernel takes now, after the ``sent`` bytes of start, frames and end.

        It does not wait, so that no view of the mapping outlives it.
        """
        at = extent.start + min(extent.size_bytes, max(0, sent - len(start)))
        left = extent.stop - at
        if not left:
            return self._write((end[sent - len(start) - extent.size_bytes :],))
        if head.has_passed(at):
            self._give_up(extent, at, sent)
        offset = extent.file.file_offset(at)
        if self._spans:
            count = self._write((start[sent:], extent.file.view[offset : offset + left], end))
            if count and head.has_passed(at):
                self._reset()
                self._give_up(extent, at, sent + count)
            return count
        size = min(left, SCRATCH_BYTES)
        _scratch[:size] = extent.file.view[offset : offset + size]
        if head.has_passed(at):
            self._give_up(extent, at, sent)
        return self._write((start[sent:], _scratch[:size], end if size == left else b""))

    def _write(self, parts: Sequence[Buffer]) -> int:
        """Bytes that the kernel has taken now; 0 where there is no room.

        As long as the transport is not closing, its descriptor is open and its own.
        """
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        self.write_count += 1
        try:
            return os.writev(self._connection.fileno(), parts)
        except BlockingIOError:
            return 0

    async def _writable(self) -> None:
        """Wait until the kernel has room."""
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        if self._waiting_fd < 0:
            # The loop lets nobody else wait for a descriptor of one of its transports, and
            # the transport may close its own while we wait.
            self._waiting_fd = os.dup(self._connection.fileno())
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._waiting_fd, _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._waiting_fd)

    def _reset(self) -> None:
        """Let what waits in the socket be thrown away when it is closed."""
        with contextlib.suppress(OSError):
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTIVE)

    def _give_up(self, extent: Extent, at: int, sent: int) -> NoReturn:
        what = (
            f"the writer passed ring position {at} while the extent {extent.start} to "
            f"{extent.stop}, up to {extent.last}, was sent"
        )
        if not sent:
            raise ReaderOvertaken(what)
        if not self._transport.is_closing():
            self._transport.abort()
        raise CutOff(what)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
