"""Cuts a replication stream into events.

``recv_into`` fills the buffer in large blocks, and events are read in place.  Only an event that
spans packets (16 MiB and more) is copied together.
"""

from __future__ import annotations

import struct

from databus.common.errors import FormatError, SourcePositionLost, SourceUnavailable

_HEADER_BYTES = 4
_LONGEST_PACKET = 0xFFFFFF
_FIRST_ROOM = 1 << 20
SLACK_BYTES = 64
"""The kernel may read so many bytes after the end of a damaged event."""
_ERROR, _END = 0xFF, 0xFE
_FATAL_READING_BINLOG = 1236


class PacketBuffer:
    """Bytes of the stream between the socket and the decoder.

    Invariants:
        I1. ``data[start:stop]`` are the bytes received and not yet consumed, in order.
        I2. The buffer grows only for a single packet that does not fit into it.

    Owner: the task that reads the stream.
    Raises: SourceUnavailable and SourcePositionLost for errors that the server sends instead of
        events; FormatError for packets out of order.
    """

    def __init__(self, where: str, room_bytes: int = _FIRST_ROOM) -> None:
        self.data = bytearray(room_bytes)
        self.start = 0
        self.stop = 0
        self._where = where
        self._long_event: bytearray | None = None

    def room(self) -> memoryview:
        """The space for the next bytes; never empty."""
        if self.start == self.stop:
            self.start = self.stop = 0
        need = self._packet_bytes() if self.stop - self.start >= _HEADER_BYTES else 0
        size = len(self.data) - SLACK_BYTES
        if self.stop == size or self.start + need > size:
            rest = self.data[self.start : self.stop]
            if need > size:
                self.data = bytearray(max(need + (need >> 3), 2 * size) + SLACK_BYTES)
            self.data[: len(rest)] = rest
            self.start, self.stop = 0, len(rest)
        return memoryview(self.data)[self.stop : len(self.data) - SLACK_BYTES]

    def hold(self, packets: bytearray) -> None:
        """Replace the received bytes by whole packets."""
        self.start, self.stop = 0, len(packets)
        self.data = packets + bytes(SLACK_BYTES)

    @property
    def in_long_event(self) -> bool:
        """Whether the next packet continues an event of an earlier packet."""
        return self._long_event is not None

    def received(self, count: int) -> None:
        """``count`` bytes were written to the space of ``room``."""
        self.stop += count

    def next_event(self) -> memoryview | None:
        """The next whole event, or None; valid until ``used`` is called."""
        while self.stop - self.start >= _HEADER_BYTES:
            size = self._packet_bytes()
            if self.stop - self.start < size:
                return None
            begin, end = self.start + _HEADER_BYTES, self.start + size
            long = size == _HEADER_BYTES + _LONGEST_PACKET
            if self._long_event is None and not long:
                self._check_status(begin, end)
                return memoryview(self.data)[begin + 1 : end]
            if self._long_event is None:
                self._check_status(begin, end)
                self._long_event = bytearray()
                begin += 1
            self._long_event += memoryview(self.data)[begin:end]
            if not long:
                return memoryview(self._long_event)
            self.start += size
        return None

    def used(self) -> None:
        """Consume the event that ``next_event`` returned."""
        self.start += self._packet_bytes()
        self._long_event = None

    def _packet_bytes(self) -> int:
        return _HEADER_BYTES + int.from_bytes(self.data[self.start : self.start + 3], "little")

    def _check_status(self, begin: int, end: int) -> None:
        if end == begin:
            raise FormatError(f"{self._where} sent an empty packet")
        status = self.data[begin]
        if status == _ERROR:
            (number,) = struct.unpack_from("<H", self.data, begin + 1)
            text = bytes(self.data[begin + 3 : end]).decode("utf-8", "replace")
            text = text[6:] if text.startswith("#") else text
            if number == _FATAL_READING_BINLOG:
                raise SourcePositionLost(f"{self._where}: error {number}: {text}")
            raise SourceUnavailable(f"{self._where}: error {number}: {text}")
        if status == _END and end - begin < 9:
            raise SourceUnavailable(f"{self._where} ended the stream")
        if status != 0:
            raise FormatError(f"{self._where} sent a packet of status {status:#04x}")


def packets_of(*parts: bytes) -> bytearray:
    """The packets in which a server would send the concatenated parts."""
    content = memoryview(b"".join(parts))
    block = bytearray()
    for start in range(0, len(content) + 1, _LONGEST_PACKET):
        part = content[start : start + _LONGEST_PACKET]
        block += len(part).to_bytes(3, "little") + b"\0"
        block += part
    return block
