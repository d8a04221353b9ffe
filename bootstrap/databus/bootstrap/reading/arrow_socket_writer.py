"""Writes the large parts of an answer from Arrow's memory to the socket, without a buffer between.

aiohttp owns the connection and writes everything else; its transport is empty while this module
writes to its own descriptor.  aiohttp would join each chunk with its size in a new buffer, and
copy what the kernel does not take into another.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from aiohttp import HttpVersion11, web

from databus.common.errors import InternalError
from databus.common.frame.frame_format import Buffer
from databus.common.http.tcp_options import limit_sending

ON_THE_WAY_BYTES = 256 << 10
_CHUNK_END = b"\r\n"


class ArrowSocketWriter:
    """Writes parts of one answer's body.

    Invariants:
        I1. A call writes one whole chunk, or the body never ends and the reader sees that it was
            cut.
        I2. Bytes go out after everything that the response has written before.

    Owner: the task that answers the request.  It makes this once the headers are out, and
    closes it.
    Raises: ConnectionError if the reader is gone.
    """

    def __init__(self, request: web.Request) -> None:
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the reader has gone")
        if request.secure:
            raise InternalError("bytes would go out beside the connection's encryption")
        self._transport = transport
        self._is_chunked = request.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        # Its own descriptor: the loop does not let other code wait for a transport's descriptor.
        # The transport may also be closed meanwhile, and another connection get its number.
        connection = transport.get_extra_info("socket")
        limit_sending(connection, ON_THE_WAY_BYTES)
        self._descriptor = os.dup(connection.fileno())

    def close(self) -> None:
        """Close the descriptor; the connection stays open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def write(self, parts: Sequence[Buffer]) -> None:
        """Write some bytes; the caller does not change them until this returns."""
        while not self._transport.is_closing() and self._transport.get_write_buffer_size():
            await self._writable()
        left = [memoryview(part) for part in parts]
        if self._is_chunked:
            size = sum(len(part) for part in left)
            left = [memoryview(b"%x\r\n" % size), *left, memoryview(_CHUNK_END)]
        while left:
            count = self._write(left)
            if not count:
                await self._writable()
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _write(self, parts: Sequence[Buffer]) -> int:
        """The number of bytes that the kernel has taken; 0 if it has no room."""
        if self._transport.is_closing():
            raise ConnectionResetError("the connection is closed")
        try:
            return os.writev(self._descriptor, parts)
        except BlockingIOError:
            return 0

    async def _writable(self) -> None:
        """Wait until the kernel has room."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._descriptor, _set, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self._descriptor)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
