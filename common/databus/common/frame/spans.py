"""Spans: parts of a body that a server sends without having copied them first.

The writer of a ring may overwrite bytes while they are being sent.  The CRC reveals a torn frame.
The position reveals a whole newer frame at the old one's offset: the SPAN frame before the bytes
is a copy, and states the last position that may follow (FORMAT.md).
"""

from __future__ import annotations

import struct

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, ReaderOvertaken
from databus.common.frame.frame_format import (
    HEADER,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    Buffer,
    FrameColumns,
    FrameView,
    Op,
    pack_frame,
    read_frame,
    scan,
    trusted_frame,
)

_LENGTH = struct.Struct("<Q")


def span_frame(last: Position, size_bytes: int) -> bytes:
    """The frame before ``size_bytes`` of whole frames that end with the one at ``last``."""
    return pack_frame(op=Op.SPAN, scn=last.scn, seq=last.seq, after=_LENGTH.pack(size_bytes))


class SpanSplitter:
    """Cuts a body that may have spans into blocks of whole frames, as ``FrameSplitter`` does.

    Invariants:
        I1. Every byte that was fed comes out exactly once, in order, or is still pending; but
            for SPAN frames, which do not come out.
        I2. A block that comes out holds whole frames only, each with a valid CRC, and those of
            a span are not after its position.

    Owner: one task.
    Raises: ReaderOvertaken at the first frame that cannot be part of its span, FormatError at
    the first damaged one elsewhere; nothing after it is handed out.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._least_bytes = HEADER_BYTES
        self._left = 0
        self._bound = Position(0, 0)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frame that is not whole yet."""
        return len(self._pending)

    def feed(self, chunk: Buffer) -> list[memoryview]:
        """Take ``chunk`` and return the frames that are whole now, back to back, in pieces."""
        return [piece for piece, _ in self.feed_columns(chunk)]

    def feed_columns(self, *chunks: Buffer) -> list[tuple[memoryview, FrameColumns]]:
        """As ``feed`` of all chunks joined, each piece with its headers as columns."""
        if len(self._pending) + sum(map(len, chunks)) < self._least_bytes:
            for chunk in chunks:
                self._pending += chunk
            self._least_bytes = _frame_bytes(self._pending)
            return []
        block = b"".join((self._pending, *chunks))
        try:
            columns = scan(block)
        except FormatError as error:
            if self._is_within_span(block):
                raise self._overtaken(str(error)) from error
            raise
        self._pending = bytearray(block[columns.stop :])
        self._least_bytes = _frame_bytes(self._pending)
        return self._split(memoryview(block), columns)

    def _split(
        self, block: memoryview, columns: FrameColumns
    ) -> list[tuple[memoryview, FrameColumns]]:
        columns = columns.with_headers()
        pieces: list[tuple[memoryview, FrameColumns]] = []
        start = first = 0

        def take(stop: int, behind: int) -> None:
            if stop > start:
                piece = columns.part(first, behind, start, stop)
                self._check(piece)
                pieces.append((block[start:stop], piece))

        for index in (columns.op == Op.SPAN).nonzero()[0].tolist():
            at = int(columns.offset[index])
            take(at, index)
            frame = trusted_frame(block, at)
            if self._left:
                raise self._overtaken(f"a span begins {self._left} bytes before its end")
            self._left = _span_bytes(frame)
            self._bound = frame.position
            start, first = at + frame.length, index + 1
        take(columns.stop, len(columns))
        return pieces

    def _check(self, columns: FrameColumns) -> None:
        """Check frames that lie back to back against the span, as far as it reaches."""
        if not self._left:
            return
        end = min(columns.stop, self._left)
        count = int(columns.offset.searchsorted(end))
        scn, seq = columns.scn[:count], columns.seq[:count]
        after = (scn > self._bound.scn) | ((scn == self._bound.scn) & (seq > self._bound.seq))
        if after.any():
            at = int(after.argmax())
            raise self._overtaken(f"a frame at {Position(int(scn[at]), int(seq[at]))}")
        behind = int(columns.offset[count]) if count < len(columns) else columns.stop
        if behind != end:
            raise self._overtaken("a frame reaches beyond its end")
        self._left -= end

    def _is_within_span(self, block: bytes) -> bool:
        """Whether the first damaged frame of ``block`` is, or may be, one of a span."""
        at, left = 0, self._left
        while at + HEADER_BYTES <= len(block):
            try:
                frame = read_frame(block, at)
            except FormatError:
                break
            at += frame.length
            if not left and frame.op == Op.SPAN:
                left = _span_bytes(frame)
            else:
                left = max(0, left - frame.length)
        return left > 0

    def _overtaken(self, what: str) -> ReaderOvertaken:
        return ReaderOvertaken(
            f"the server was overtaken by its writer while it sent the span up to {self._bound}: "
            f"{what}"
        )


def _frame_bytes(head: bytearray) -> int:
    """How many bytes the frame has that begins with ``head``; those of a header if it is not
    known, or no length of a frame."""
    length = HEADER.unpack_from(head)[1] if len(head) >= HEADER_BYTES else 0
    return int(length) if HEADER_BYTES <= length <= MAX_FRAME_BYTES else HEADER_BYTES


def _span_bytes(frame: FrameView) -> int:
    content = bytes(frame.after or b"")
    if len(content) != _LENGTH.size:
        raise FormatError(
            f"the SPAN frame at {frame.position} has {len(content)} bytes, not {_LENGTH.size}"
        )
    (size_bytes,) = _LENGTH.unpack(content)
    return int(size_bytes)
