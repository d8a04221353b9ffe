"""Decompresses MariaDB's compressed events (``log_bin_compress``).

A statement event has its text compressed, a rows event everything after its column bitmaps.  The
bytes before that are not compressed.  A decompressed event equals the one that the server writes
without compression, except that it has no checksum.  The decoder reads it like any other event.

Layout (MariaDB's sql/log_event.cc, ``binlog_buf_compress``): one byte with the highest bit set,
the algorithm in the next three bits and the width of the length in the lowest three; then the
uncompressed length, most significant byte first; then the zlib stream.
"""

from __future__ import annotations

import zlib

from databus.common.errors import FormatError
from databus.relay.sources.mysql.protocol import binlog_events
from databus.relay.sources.mysql.protocol.binlog_events import EventType, Header
from databus.relay.sources.mysql.protocol.packet_buffer import PacketBuffer, packets_of

PLAIN_ROWS = {
    EventType.WRITE_ROWS_COMPRESSED: EventType.WRITE_ROWS,
    EventType.UPDATE_ROWS_COMPRESSED: EventType.UPDATE_ROWS,
    EventType.DELETE_ROWS_COMPRESSED: EventType.DELETE_ROWS,
    EventType.WRITE_ROWS_COMPRESSED_V2: EventType.WRITE_ROWS_V2,
    EventType.UPDATE_ROWS_COMPRESSED_V2: EventType.UPDATE_ROWS_V2,
    EventType.DELETE_ROWS_COMPRESSED_V2: EventType.DELETE_ROWS_V2,
}
"""The uncompressed type of each compressed rows event."""

LONGEST_BYTES = 1 << 30
"""A replica refuses longer events."""
_ZLIB = 0x80
_WIDTH = 0x07
_LARGEST_RATIO = 1032
"""The largest compression ratio of Deflate."""


def plain_query(body: memoryview, where: str) -> memoryview:
    """The body of a QUERY_COMPRESSED event as that of a QUERY event.

    Raises:
        FormatError: it is cut off or damaged.
    """
    schema_bytes = body[8] if len(body) > 8 else 0
    status_bytes = int.from_bytes(body[11:13], "little")
    return memoryview(_plain(body, 13 + status_bytes + schema_bytes + 1, where))


class PlainRows:
    """A decompressed rows event, as a payload of a single event.

    Invariants:
        I1. ``packets`` holds the event until it is consumed.

    Owner: the decoder that made it.
    Raises: FormatError for an event that is cut off or damaged.
    """

    def __init__(self, header: Header, body: memoryview, where: str) -> None:
        """``header`` is that of the compressed event, of a type in ``PLAIN_ROWS``."""
        kind = PLAIN_ROWS[EventType(header.type)]
        plain = _plain(body, _rows_begin(kind, body, where), where)
        self.where = where
        self.packets = PacketBuffer(where, 1)
        # Its length is not that in the file, so it has no position of its own there.
        self.packets.hold(packets_of(b"\0", header.of_plain(kind, len(plain)), plain))

    def refill(self) -> bool:
        """There is only the one event."""
        return False


def _rows_begin(kind: EventType, body: memoryview, where: str) -> int:
    try:
        ordinary, at = binlog_events.rows_event(kind, body)
        count, at = binlog_events.packed_int(body, at)
    except IndexError:
        raise FormatError(f"{where}: a compressed rows event is cut off in its header") from None
    bitmaps = 2 if ordinary == EventType.UPDATE_ROWS else 1
    return at + bitmaps * ((count + 7) // 8)


def _plain(body: memoryview, at: int, where: str) -> bytes:
    """``body`` with the part from ``at`` on decompressed."""
    if at >= len(body):
        raise FormatError(
            f"{where}: a compressed event has {len(body)} bytes, but its data begin at {at}"
        )
    head = body[at]
    width = head & _WIDTH
    begin = at + 1 + width
    if head & ~_WIDTH != _ZLIB or not 1 <= width <= 4 or begin >= len(body):
        raise FormatError(f"{where}: {head:#04x} does not begin the data of a compressed event")
    size = int.from_bytes(body[at + 1 : begin], "big")
    packed = body[begin:]
    if not 0 < size <= min(LONGEST_BYTES, _LARGEST_RATIO * len(packed)):
        raise FormatError(f"{where}: {len(packed)} compressed bytes cannot be {size} uncompressed")
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(packed, size + 1)
    except zlib.error as error:
        raise FormatError(f"{where}: a compressed event is damaged: {error}") from error
    if len(plain) != size or not inflater.eof or inflater.unused_data:
        raise FormatError(
            f"{where}: a compressed event is damaged: {len(packed)} compressed bytes are not "
            f"{size} uncompressed"
        )
    return b"".join((body[:at], plain))
