"""A proxy that lets a database send as much as a test grants, and no more."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct

from tests.support.faulty_proxy import FaultyProxy

_BLOCK_BYTES = 16 << 10
_NO_END = 1 << 39
_LOOKS_EVERY_S = 0.002
# sock_diag(7).  /proc/net/tcp has the same, and takes milliseconds for each thousand of sockets.
_SOCK_DIAG, _BY_FAMILY, _ERROR, _REQUEST = 4, 20, 2, 1
_HEADER = struct.Struct("=IHHII")
_ADDRESSES = struct.Struct("!HH16s16sIQ")
_QUEUES_AT = _HEADER.size + 4 + _ADDRESSES.size + 4
_LISTENING = 10

Address = tuple[str, int]


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
        ours, theirs = (writer.get_extra_info(name)[:2] for name in ("sockname", "peername"))
        held = writer.transport.get_write_buffer_size()
        return held > 0 or _queued_bytes(ours, theirs)[1] > 0 or _queued_bytes(theirs, ours)[0] > 0


def _queued_bytes(ours: Address, theirs: Address) -> tuple[int, int]:
    """What the socket of this address has received that is unread, and what it has sent that is
    unacknowledged; nothing if there is no such socket."""
    ends = (socket.inet_aton(host).ljust(16, b"\0") for host, _ in (ours, theirs))
    request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    request += _ADDRESSES.pack(ours[1], theirs[1], *ends, 0, 0xFFFFFFFF_FFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST, 1, 0) + request)
        answer = kernel.recv(1 << 13)
    if _HEADER.unpack_from(answer)[1] == _ERROR:
        (code,) = struct.unpack_from("=i", answer, _HEADER.size)
        if code != -errno.ENOENT:
            raise OSError(-code, os.strerror(-code))
        return 0, 0
    if answer[_HEADER.size + 1] == _LISTENING:
        return 0, 0
    received, to_send = struct.unpack_from("=II", answer, _QUEUES_AT)
    return received, to_send
