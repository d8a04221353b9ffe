"""Writes large parts of an answer from the ring's mapping to the socket, without a buffer between.

aiohttp owns the connection and writes everything else; its transport is empty while this module
writes to its descriptor.  The connection has no TLS, which would have to see every byte.  The
kernel copies the bytes during the call, so the ring's writer can spoil them only then, or before.
Both are detected: a check before a call that the head has not passed the bytes, and a check after
it (decision 0018).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

from aiohttp import HttpVersion11, web

from databus.common.errors import InternalError, ReaderOvertaken
from databus.common.frame.frame_format import Buffer
from databus.common.http.tcp_options import limit_sending
from databus.relay.ring.ring_reader import RingReader
from databus.relay.serving.extents import Extent, Head
from databus.relay.serving.send_threads import SendThreads

ON_THE_WAY_BYTES = 256 << 10
SCRATCH_BYTES = 256 << 10
THREAD_BYTES = 256 << 10
"""Less is sent by the event loop itself: passing it to a thread takes longer."""
_CHUNK_END = b"\r\n"
_ABORTIVE = struct.pack("ii", 1, 0)

_threads = SendThreads()


class _Scratch(threading.local):
    """A thread's buffer for bytes that are copied before they are sent."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(SCRATCH_BYTES))


_scratch = _Scratch()


class CutOff(ConnectionError):
    """The writer has overtaken this reader within an extent; its connection is closed."""


class SocketWriter:
    """Sends extents over one connection, between the writes of its response.

    Invariants:
        I1. No byte of the mapping is passed to the kernel that had been overwritten when the
            call began; if one may have been overwritten during the call, the connection is
            reset, and a SPAN frame lets the reader recognise such bytes.
        I2. A reader that has not requested spans only gets bytes from a copy that was
            checked after it was made.
        I3. An extent goes out whole, or the body never ends and the reader sees that it was cut.
        I4. The mapping is held only during a call that does not wait, and in a way that lets
            the ring's reader close its file meanwhile.
    Owner: the task that answers the request, which makes it after the headers and closes it;
    while ``send`` runs, either a thread writes or the task, never both.
    Raises: ReaderOvertaken while nothing of an extent is sent, CutOff later; ConnectionError
    if the reader is gone.
    """

    def __init__(self, request: web.Request, *, spans: bool) -> None:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader has gone")
        if request.secure:
            raise InternalError("bytes would go out beside the connection's encryption")
        self._transport = transport
        # Its own descriptor: the loop does not let other code wait for a transport's descriptor.
        # The transport may also be closed meanwhile, and another connection get its number.
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        limit_sending(self._socket, ON_THE_WAY_BYTES)
        self._spans = spans
        self._is_chunked = request.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        self.write_count = 0
        transport.set_write_buffer_limits(high=0)

    def set_corked(self, corked: bool) -> None:
        """Hold back the head and the end of the body, so that they are no packets of their own."""
        if not self._transport.is_closing():
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, int(corked))

    def close(self) -> None:
        """Close the descriptor; the connection stays open."""
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()
        self._socket.close()

    async def send(self, ring: RingReader, extent: Extent) -> None:
        """Send the frames of an extent."""
        while not self._transport.is_closing() and self._transport.get_write_buffer_size():
            await self._writable()
        step = self._steps(Head(ring, extent.file), extent)
        try:
            if extent.size_bytes >= THREAD_BYTES:
                await _threads.run(self._socket.fileno(), step)
            else:
                while not step():
                    await self._writable()
        except CutOff:
            if not self._transport.is_closing():
                self._transport.abort()
            raise

    def _steps(self, head: Head, extent: Extent) -> Callable[[], bool]:
        """A step that sends as much of an extent as the kernel takes now; True at the end."""
        size = extent.size_bytes
        start: bytes = extent.span if self._spans else b""
        if self._is_chunked:
            start = b"%x\r\n%b" % (size + len(start), start)
        end = _CHUNK_END if self._is_chunked else b""
        total = len(start) + size + len(end)
        sent = 0

        def step() -> bool:
            nonlocal sent
            if not extent.file.hold():
                self._give_up(extent, extent.start, sent)
            try:
                sent += self._send_some(extent, head, start, end, sent)
            finally:
                extent.file.release()
            return sent == total

        return step

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
        scratch = _scratch.view
        scratch[:size] = extent.file.view[offset : offset + size]
        if head.has_passed(at):
            self._give_up(extent, at, sent)
        return self._write((start[sent:], scratch[:size], end if size == left else b""))

    def _write(self, parts: Sequence[Buffer]) -> int:
        """The number of bytes that the kernel has taken; 0 if it has no room."""
        self.write_count += 1
        try:
            if self._transport.is_closing():
                raise ConnectionResetError("the connection is closed")
            return os.writev(self._socket.fileno(), parts)
        except BlockingIOError:
            return 0
        except OSError:
            del parts  # the error outlives this call, views of the mapping must not
            raise

    async def _writable(self) -> None:
        """Wait until the kernel has room."""
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._socket.fileno(), _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._socket.fileno())

    def _reset(self) -> None:
        """Make a close of the socket discard the bytes that wait in it."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORTIVE)

    def _give_up(self, extent: Extent, at: int, sent: int) -> NoReturn:
        what = (
            f"the writer passed ring position {at} while the extent {extent.start} to "
            f"{extent.stop}, up to {extent.last}, was sent"
        )
        raise CutOff(what) if sent else ReaderOvertaken(what)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
