"""A proxy that lets a database send as much as a test grants, and no more."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.faulty_proxy import FaultyProxy

_BLOCK_BYTES = 16 << 10
_NO_END = 1 << 39
_LOOKS_EVERY_S = 0.002
_CONNECTIONS = Path("/proc/net/tcp")
_LOCAL, _REMOTE, _QUEUES = 1, 2, 4


class MeteredProxy(FaultyProxy):
    """Lets only so many bytes of the target's pass, over all connections together.

    Invariants:
        I4. While it counts, no more than a block lies unread in a connection: a connection that is
        held up
            finds no more of what was granted when it resumes, and a stream takes nothing from
            the answer to a question beside it.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._left_bytes = 1 << 40
        self._granted = asyncio.Event()

    @property
    def is_spent(self) -> bool:
        """Whether everything that was granted has passed."""
        return self._left_bytes <= 0

    def close_off(self) -> None:
        """Let nothing more pass until it is granted."""
        self._left_bytes = 0

    def grant(self, count: int) -> None:
        """Let ``count`` bytes more pass; 1 << 40 and more: all of them, uncounted."""
        self._left_bytes += count
        self._granted.set()
        self._granted = asyncio.Event()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        if not counted:
            await super()._pump(reader, writer, counted=False)
            return
        while block := await reader.read(_BLOCK_BYTES):
            while self.is_spent or (self._left_bytes < _NO_END and self._is_unread(writer)):
                if self.is_spent:
                    await self._granted.wait()
                else:
                    await asyncio.sleep(_LOOKS_EVERY_S)
            self._left_bytes -= len(block)
            writer.write(block)
            await writer.drain()

    def _is_unread(self, writer: asyncio.StreamWriter) -> bool:
        """Whether something lies in the buffers of a connection, because no process reads it."""
        if writer.is_closing():
            return False
        ours, theirs = (writer.get_extra_info(name)[1] for name in ("sockname", "peername"))
        held = writer.transport.get_write_buffer_size()
        for line in _CONNECTIONS.read_text().splitlines()[1:]:
            fields = line.split()
            to_send, received = (int(queue, 16) for queue in fields[_QUEUES].split(":"))
            between = _port(fields[_LOCAL]), _port(fields[_REMOTE])
            held += to_send if between == (ours, theirs) else 0
            held += received if between == (theirs, ours) else 0
        return held > 0


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
