"""MySQL's compressed transactions: the events inside of a TRANSACTION_PAYLOAD_EVENT.

With ``binlog_transaction_compression`` one event contains all events of a transaction after its
GTID, compressed with zstd.  They are decompressed block by block into packets.  The kernel reads
these like the packets of the socket, and memory stays bounded for transactions of any size.

Layout: MySQL's source documentation, "Transaction_payload_event": fields of type, length and
value, each number a length-encoded integer, up to type 0; then the payload.
"""

from __future__ import annotations

import io

import zstandard

from databus.common.errors import FormatError
from databus.relay.sources.mysql.protocol.binlog_events import HEADER_BYTES
from databus.relay.sources.mysql.protocol.packet_buffer import PacketBuffer, packets_of

BLOCK_BYTES = 256 << 10
_END, _SIZE, _COMPRESSION = 0, 1, 2
_ZSTD, _NONE = 0, 255
_WIDTHS = {0xFC: 2, 0xFD: 3, 0xFE: 8}


class Payload:
    """The events of one compressed transaction.

    Invariants:
        I1. ``packets`` holds whole events in order, about ``BLOCK_BYTES`` of them at a time.

    Owner: the decoder that made it.
    Raises: FormatError for an event that is cut off or damaged.
    """

    def __init__(self, body: memoryview, where: str) -> None:
        self.packets = PacketBuffer(where, 1)
        self.where = where
        fields, at = _fields(body, where)
        size = fields.get(_SIZE, len(body) - at)
        data = bytes(body[at : at + size])
        if len(data) != size:
            raise FormatError(
                f"{where}: a compressed transaction has {len(data)} bytes of its {size}"
            )
        compression = fields.get(_COMPRESSION, _NONE)
        if compression not in (_ZSTD, _NONE):
            raise FormatError(
                f"{where}: a transaction has the unknown compression type {compression}"
            )
        plain = io.BytesIO(data)
        self._events = (
            zstandard.ZstdDecompressor().stream_reader(plain) if compression == _ZSTD else plain
        )

    def refill(self) -> bool:
        """Put the next events into ``packets``, which is empty; False if there are no more."""
        block = bytearray()
        while len(block) < BLOCK_BYTES:
            header = self._read(HEADER_BYTES)
            if not header:
                break
            length = int.from_bytes(header[9:13], "little")
            rest = self._read(length - HEADER_BYTES)
            if length < HEADER_BYTES or len(header) + len(rest) != length:
                raise FormatError(f"{self.where}: a compressed transaction is cut off in an event")
            block += packets_of(b"\0", header, rest)
        self.packets.hold(block)
        return len(block) > 0

    def _read(self, size: int) -> bytes:
        try:
            return self._events.read(max(0, size))
        except zstandard.ZstdError as error:
            raise FormatError(
                f"{self.where}: a compressed transaction is damaged: {error}"
            ) from error


def _fields(body: memoryview, where: str) -> tuple[dict[int, int], int]:
    """The header's fields, and the offset of the payload."""
    fields: dict[int, int] = {}
    at = 0
    while True:
        kind, at = _number(body, at, where)
        if kind == _END:
            return fields, at
        length, at = _number(body, at, where)
        fields[kind], _ = _number(body, at, where)
        at += length


def _number(body: memoryview, at: int, where: str) -> tuple[int, int]:
    """A length-encoded integer, and the offset after it."""
    if at >= len(body):
        raise FormatError(f"{where}: the header of a compressed transaction is cut off")
    first = body[at]
    width = _WIDTHS.get(first, 0)
    if not width:
        return first, at + 1
    return int.from_bytes(body[at + 1 : at + 1 + width], "little"), at + 1 + width
