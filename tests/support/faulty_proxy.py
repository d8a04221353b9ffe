"""A TCP proxy that fails on command: cut, stall, refuse, or cut after so many bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Self

_BLOCK_BYTES = 64 * 1024


class FaultyProxy:
    """Forwards connections to one address and breaks them on request.

    Invariants:
        I1. The listening port stays the same from ``start`` to ``close``, over every fault.
        I2. While stalled, no byte passes in either direction and no connection is closed.
        I3. A cut is a reset (RST), as when a machine vanishes, not an orderly end.
    Owner: the event loop of the test.
    """

    def __init__(self, host: str, port: int) -> None:
        self.target_host = host
        self.target_port = port
        self.port = 0
        self.accepted_count = 0
        self.passed_bytes = 0
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._cut_after_bytes: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open_count(self) -> int:
        return len(self._tasks)

    def stall(self) -> None:
        """Hold every byte back until ``resume``."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def refuse(self, refusing: bool = True) -> None:
        """Reset new connections as soon as they come in."""
        self._refusing = refusing

    def cut(self) -> None:
        """Reset every open connection now."""
        for writer in tuple(self._writers):
            _reset(writer)

    def cut_after(self, count_bytes: int) -> None:
        """Reset everything once so many more bytes have come from the target."""
        self._cut_after_bytes = count_bytes

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted_count += 1
        if self._refusing:
            _reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            answers, upstream = await asyncio.open_connection(self.target_host, self.target_port)
            self._writers.add(upstream)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream, counted=False))
                group.create_task(self._pump(answers, writer, counted=True))
        except (OSError, ExceptionGroup):
            # Either end is gone: so is the other, as with a real broken path.
            _reset(writer)
        except asyncio.CancelledError:
            _reset(writer)
        finally:
            ends = [one for one in (writer, upstream) if one is not None]
            for one in ends:
                one.close()
            try:
                for one in ends:
                    with contextlib.suppress(OSError):
                        await one.wait_closed()
            finally:  # Until then ``close`` resets it, and waits for it.
                self._writers.difference_update(ends)
                self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        while block := await reader.read(_BLOCK_BYTES):
            await self._flowing.wait()
            if counted:
                block = self._allowed(block)
            writer.write(block)
            await writer.drain()
            if counted and self._cut_after_bytes == 0:
                self._cut_after_bytes = None
                self.cut()
                return
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()

    def _allowed(self, block: bytes) -> bytes:
        if self._cut_after_bytes is not None:
            block = block[: self._cut_after_bytes]
            self._cut_after_bytes -= len(block)
        self.passed_bytes += len(block)
        return block


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


Proxies = Callable[[str, int], Awaitable[FaultyProxy]]
"""The fixture ``faulty_proxy``: a proxy before a host and port."""
