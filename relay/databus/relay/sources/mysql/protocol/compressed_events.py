"""MariaDB's compressed events (``log_bin_compress``), made into the ordinary ones.

Of a statement its text is packed, of rows what lies behind the bitmaps of their columns; all
before that is as it would be.  So an event comes out as it would have been written without
compression, only without a checksum, and takes the way of all others.

Layout (MariaDB's sql/log_event.cc, ``binlog_buf_compress``): a byte with its highest bit set,
the algorithm in the three bits below and in the lowest three the width of the length; the length
of what was packed, its highest byte first; then zlib's form of it.
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
"""What the compressed rows events are without their compression."""

LONGEST_BYTES = 1 << 30
"""A replica takes no longer event."""
_ZLIB = 0x80
_WIDTH = 0x07
_LARGEST_RATIO = 1032
"""Deflate cannot make more of a byte."""


def plain_query(body: memoryview, where: str) -> memoryview:
    """The body of the QUERY event that a QUERY_COMPRESSED event was.

    Raises:
        FormatError: it is torn or damaged.
    """
    schema_bytes = body[8] if len(body) > 8 else 0
    status_bytes = int.from_bytes(body[11:13], "little")
    return memoryview(_plain(body, 13 + status_bytes + schema_bytes + 1, where))


class PlainRows:
    """The rows event that a compressed one was, as a payload of a single event.

    Invariants:
        I1. ``packets`` holds the event, until it has been used.

    Owner: the decoder that met it.
    Raises: FormatError for what is torn or damaged.
    """

    def __init__(self, header: Header, body: memoryview, where: str) -> None:
        """``header`` is that of the compressed event, of a type in ``PLAIN_ROWS``."""
        kind = PLAIN_ROWS[EventType(header.type)]
        plain = _plain(body, _rows_begin(kind, body, where), where)
        self.where = where
        self.packets = PacketBuffer(where, 1)
        # Its end is not where its own length says, so it has no place of its own in the file.
        self.packets.hold(packets_of(b"\0", header.of_plain(kind, len(plain)), plain))

    def refill(self) -> bool:
        """There is only the one event."""
        return False


def _rows_begin(kind: EventType, body: memoryview, where: str) -> int:
    try:
        ordinary, at = binlog_events.rows_event(kind, body)
        count, at = binlog_events.packed_int(body, at)
    except IndexError:
        raise FormatError(f"{where}: a compressed rows event breaks off in its head") from None
    bitmaps = 2 if ordinary == EventType.UPDATE_ROWS else 1
    return at + bitmaps * ((count + 7) // 8)


def _plain(body: memoryview, at: int, where: str) -> bytes:
    """``body`` with what is packed from ``at`` on unpacked."""
    if at >= len(body):
        raise FormatError(
            f"{where}: a compressed event has {len(body)} bytes, but what is packed begins at {at}"
        )
    head = body[at]
    width = head & _WIDTH
    begin = at + 1 + width
    if head & ~_WIDTH != _ZLIB or not 1 <= width <= 4 or begin >= len(body):
        raise FormatError(f"{where}: {head:#04x} does not begin what is packed in an event")
    size = int.from_bytes(body[at + 1 : begin], "big")
    packed = body[begin:]
    if not 0 < size <= min(LONGEST_BYTES, _LARGEST_RATIO * len(packed)):
        raise FormatError(f"{where}: {len(packed)} compressed bytes cannot have been {size}")
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(packed, size + 1)
    except zlib.error as error:
        raise FormatError(f"{where}: a compressed event is damaged: {error}") from error
    if len(plain) != size or not inflater.eof or inflater.unused_data:
        raise FormatError(
            f"{where}: a compressed event is damaged: {len(packed)} bytes are not those of {size}"
        )
    return b"".join((body[:at], plain))
