"""The frame: the one form that an event has from the fetcher to the consumer.

A frame is packed once, where the change is read, and never re-encoded: the same bytes lie in
the ring, travel over HTTP, and lie in the bootstrap's log and runs.  FORMAT.md beside this
file is the specification; ``header_layout`` has its table of header fields in code.

Reading is total: any bytes give frames or a ``FormatError`` with the offset and the cause.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from databus.common.compiled import kernels
from databus.common.errors import FormatError
from databus.common.frame import header_layout
from databus.common.frame.header_layout import (
    ALIGNMENT,
    CRC_BYTES,
    EVENT_COUNT,
    FIELDS,
    FIRST_CONTROL_OP,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    OFFSETS,
    VERSION,
    Buffer,
    Flag,
    FrameView,
    Op,
    header_problem,
    packed_header,
)

__all__ = [
    "ALIGNMENT",
    "CONTROL_NAMES",
    "EVENT_COUNT",
    "FIELDS",
    "FIRST_CONTROL_OP",
    "HEADER",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_FRAME_BYTES",
    "OFFSETS",
    "OPS_BY_LETTER",
    "OP_LETTERS",
    "VERSION",
    "Buffer",
    "Flag",
    "FrameColumns",
    "FrameSplitter",
    "FrameView",
    "Op",
    "iter_frames",
    "key_hash",
    "pack_bitmap",
    "pack_frame",
    "read_frame",
    "scan",
    "source_id",
    "trusted_frame",
    "unpack_bitmap",
]

OP_LETTERS: dict[int, str] = {
    Op.INSERT: "c",
    Op.UPDATE: "u",
    Op.DELETE: "d",
    Op.READ: "r",
    Op.TRUNCATE: "t",
}
OPS_BY_LETTER: dict[str, Op] = {letter: Op(op) for op, letter in OP_LETTERS.items()}
CONTROL_NAMES: dict[int, str] = {
    Op.END_OF_WINDOW: "end_of_window",
    Op.HEARTBEAT: "heartbeat",
    Op.SCHEMA_CHANGE: "schema_change",
    Op.CHECKPOINT: "checkpoint",
    Op.ERROR: "error",
    Op.SPAN: "span",
    Op.TABLE_STATE: "table_state",
}


def source_id(name: str) -> int:
    """The number of a source on the wire, the same on every relay: xxh32 of its name, not 0."""
    return xxhash.xxh32_intdigest(name.encode()) or 1


def key_hash(key: Buffer) -> int:
    """xxh3_64 of the key bytes; partitions are defined by it."""
    return xxhash.xxh3_64_intdigest(bytes(key))


def pack_frame(
    *,
    op: Op | int,
    scn: int,
    seq: int,
    source: int = 0,
    schema_fp: int = 0,
    commit_us: int = 0,
    key: bytes = b"",
    before: bytes | None = None,
    after: bytes | None = None,
    absent: bytes = b"",
    extra_flags: int = 0,
) -> bytes:
    """One frame.  None for ``before`` or ``after`` means absent, b"" means present and empty.

    ``absent`` is the bitmap of columns that ``after`` does not really hold, bit i of byte
    i // 8 for column i.

    Raises:
        FormatError: the frame would be longer than 1 GiB.
    """
    before_bytes, after_bytes = before or b"", after or b""
    size = HEADER_BYTES + len(key) + len(before_bytes) + len(after_bytes) + len(absent)
    length = -(-size // ALIGNMENT) * ALIGNMENT
    if length > MAX_FRAME_BYTES:
        raise FormatError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    flags = extra_flags
    if before is not None:
        flags |= Flag.HAS_BEFORE
    if after is not None:
        flags |= Flag.HAS_AFTER
    if absent:
        flags |= Flag.PARTIAL
    header = packed_header(
        length=length,
        op=op,
        flags=flags,
        scn=scn,
        seq=seq,
        source=source,
        key_hash=xxhash.xxh3_64_intdigest(key) if source else 0,
        schema_fp=schema_fp,
        commit_us=commit_us,
        key_len=len(key),
        before_len=len(before_bytes),
        after_len=len(after_bytes),
        absent_len=len(absent),
    )
    rest = b"".join(
        (header[CRC_BYTES:], key, before_bytes, after_bytes, absent, bytes(length - size))
    )
    return int(google_crc32c.value(rest)).to_bytes(CRC_BYTES, "little") + rest


def read_frame(buf: Buffer, offset: int = 0) -> FrameView:
    """The frame at ``offset``, fully checked.

    Raises:
        FormatError: the bytes there are not a whole, undamaged frame.
    """
    view = memoryview(buf)
    room = len(view) - offset
    if room < HEADER_BYTES:
        raise FormatError(
            f"{room} bytes at offset {offset} are not a frame of {HEADER_BYTES} or more"
        )
    header = HEADER.unpack_from(view, offset)
    problem = header_problem(header, room)
    if problem:
        raise FormatError(f"frame at offset {offset}: {problem}")
    length = header[1]
    found = google_crc32c.value(bytes(view[offset + CRC_BYTES : offset + length]))
    if found != header[0]:
        raise FormatError(
            f"frame at offset {offset}: CRC is {found:#010x}, expected {header[0]:#010x}"
        )
    return FrameView(view, offset, header)


def trusted_frame(buf: memoryview, offset: int) -> FrameView:
    """The frame at ``offset`` of bytes that ``scan`` has already checked."""
    return FrameView(buf, offset, HEADER.unpack_from(buf, offset))


def iter_frames(buf: Buffer) -> Iterator[FrameView]:
    """All frames of a buffer that holds whole frames only.

    Raises:
        FormatError: it holds anything else.
    """
    view = memoryview(buf)
    offset = 0
    while offset < len(view):
        frame = read_frame(view, offset)
        yield frame
        offset += frame.length


@dataclass(frozen=True, slots=True)
class FrameColumns:
    """The headers of a block of frames as columns, one entry a frame.

    ``offset`` is int64, in bytes from the block's start.  Each access gathers a field, as a numpy
    array of the field's width.  ``stop`` is where the last whole frame ends.  ``headers``, if
    given, is a copy of all headers back to back: then no access gathers, and fields are views.
    """

    words: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.int64]
    stop: int
    headers: npt.NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.offset)

    def field(self, name: str) -> npt.NDArray[Any]:
        """The header field ``name`` of each frame, in the field's own type."""
        if self.headers is not None:
            return header_layout.strided(self.headers, name)
        return header_layout.gathered(self.words, self.offset, name)

    def with_headers(self) -> FrameColumns:
        """The same with ``headers``, for a reader of many fields."""
        headers = header_layout.back_to_back(self.words, self.offset)
        return FrameColumns(self.words, self.offset, self.stop, headers)

    def header(self, index: int) -> FrameView:
        """One frame's header, where few of the block are asked for."""
        return trusted_frame(self.words.view(np.uint8).data, int(self.offset[index]))

    def part(self, first: int, behind: int, start: int, stop: int) -> FrameColumns:
        """The frames ``first`` .. ``behind`` - 1, as columns of the bytes from ``start`` to
        ``stop``, which they are."""
        return FrameColumns(
            self.words[start >> 3 : stop >> 3],
            self.offset[first:behind] - start,
            stop - start,
            None if self.headers is None else header_layout.part_of(self.headers, first, behind),
        )

    @property
    def length(self) -> npt.NDArray[np.uint32]:
        return self.field("length")

    @property
    def op(self) -> npt.NDArray[np.uint8]:
        return self.field("op")

    @property
    def flags(self) -> npt.NDArray[np.uint16]:
        return self.field("flags")

    @property
    def scn(self) -> npt.NDArray[np.uint64]:
        return self.field("scn")

    @property
    def seq(self) -> npt.NDArray[np.uint32]:
        return self.field("seq")

    @property
    def source_id(self) -> npt.NDArray[np.uint32]:
        return self.field("source_id")

    @property
    def key_hash(self) -> npt.NDArray[np.uint64]:
        return self.field("key_hash")

    @property
    def schema_fp(self) -> npt.NDArray[np.uint64]:
        return self.field("schema_fp")

    @property
    def commit_us(self) -> npt.NDArray[np.int64]:
        return self.field("commit_us")

    @property
    def key_len(self) -> npt.NDArray[np.uint32]:
        return self.field("key_len")

    @property
    def before_len(self) -> npt.NDArray[np.uint32]:
        return self.field("before_len")

    @property
    def after_len(self) -> npt.NDArray[np.uint32]:
        return self.field("after_len")


@kernels.jit
def _walk(buf: kernels.U8Array, start: int, stop: int, out: kernels.I64Array) -> tuple[int, int]:
    """Write the offsets of the whole frames in ``buf[start:stop]`` to ``out``.

    Returns (frames found, offset where it stopped).  It stops at a frame that is cut off, at
    bytes that cannot be a frame's header, and when ``out`` is full.
    """
    count = 0
    at = start
    while count < len(out) and at + HEADER_BYTES <= stop:
        length = header_layout.length_of(buf, at)
        if not header_layout.is_start(buf, at) or at + length > stop:
            break
        out[count] = at
        count += 1
        at += length
    return count, at


@kernels.jit
def _first_bad(buf: kernels.U8Array, offsets: kernels.I64Array) -> int:
    """Index of the first frame that ``read_frame`` refuses, or -1; one pass over the bytes."""
    for index in range(len(offsets)):
        at = offsets[index]
        if not header_layout.has_parts(buf, at) or not header_layout.is_known(buf, at):
            return index
        if not header_layout.has_crc(buf, at, header_layout.length_of(buf, at)):
            return index
    return -1


def scan(buf: Buffer | npt.NDArray[np.uint8], *, verify: bool = True) -> FrameColumns:
    """The columns of all whole frames at the start of ``buf``, without a cut-off last one.

    ``buf`` must begin with a frame.  With ``verify`` every frame is checked as by ``read_frame``.
    Without it, only the fields that lead from one frame to the next are checked.

    Raises:
        FormatError: the bytes are not frames.
    """
    raw = buf if isinstance(buf, np.ndarray) else np.frombuffer(buf, dtype=np.uint8)
    offsets = np.empty(len(raw) // HEADER_BYTES, dtype=np.int64)
    count, stop = _walk(raw, 0, len(raw), offsets)
    offsets = offsets[:count]
    if stop + HEADER_BYTES <= len(raw):
        _check_cut(raw, stop)
    columns = FrameColumns(raw[: stop & ~7].view(np.uint64), offsets, stop)
    if verify:
        _verify(raw, columns)
    return columns


def with_txids(buf: Buffer, *, verify: bool = True) -> Iterator[tuple[FrameView, str | None]]:
    """Each whole frame with the transaction id of its window, from the window's end.

    The id is None for a control frame, and for an event whose window ends in another block.
    """
    columns = scan(buf, verify=verify)
    view = memoryview(buf)
    offsets = columns.offset.tolist()
    ends = np.flatnonzero(columns.op == Op.END_OF_WINDOW).tolist()
    txids = [bytes(trusted_frame(view, offsets[end]).key).decode() for end in ends]
    for index, offset in enumerate(offsets):
        frame = trusted_frame(view, offset)
        window = len(ends) if frame.is_control else bisect_left(ends, index)
        yield frame, txids[window] if window < len(ends) else None


def _check_cut(raw: npt.NDArray[np.uint8], stop: int) -> None:
    """Raise unless the bytes at ``stop`` are the beginning of a frame that is merely cut."""
    header = HEADER.unpack_from(raw.data, stop)
    problem = header_problem(header, MAX_FRAME_BYTES)
    if problem:
        raise FormatError(f"frame at offset {stop}: {problem}")


def _verify(raw: npt.NDArray[np.uint8], columns: FrameColumns) -> None:
    suspects = columns.offset
    if kernels.COMPILED:
        bad = _first_bad(raw, columns.offset)
        suspects = columns.offset[bad : bad + 1] if bad >= 0 else columns.offset[:0]
    for offset in suspects.tolist():
        read_frame(raw.data, offset)


class FrameSplitter:
    """Cuts a byte stream that arrives in arbitrary pieces into blocks of whole frames.

    Invariants:
        I1. Every byte that was fed comes out exactly once, in order, or is still pending.
        I2. A block that comes out holds whole frames only, each with a valid CRC.

    Owner: one task.
    Raises: FormatError at the first damaged frame; nothing after it is handed out.
    """

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the frame that is not whole yet."""
        return len(self._pending)

    def feed(self, chunk: Buffer) -> bytes:
        """Take ``chunk`` and return the frames that are whole now, b"" if there are none."""
        view = memoryview(chunk).toreadonly()
        missing = self._missing(view)
        if missing > len(view):
            self._pending += view
            return b""
        # Frames are scanned in the received chunk, and copied once, into the returned block.
        stop = missing + (scan(view[missing:]).stop if len(view) > missing else 0)
        block = b"".join((self._pending, view[:stop]))
        if self._pending:
            read_frame(block)
        self._pending = bytearray(view[stop:])
        return block

    def _missing(self, view: memoryview) -> int:
        """How many bytes of ``view`` belong to the frame that was cut off; more than ``view`` has
        if that is still not whole."""
        have = len(self._pending)
        if not have:
            return 0
        if have + len(view) < HEADER_BYTES:
            return HEADER_BYTES - have
        header = bytes(self._pending[:HEADER_BYTES]) + bytes(view[: max(0, HEADER_BYTES - have)])
        length: int = HEADER.unpack_from(header)[1]
        if not HEADER_BYTES <= length <= MAX_FRAME_BYTES:
            read_frame(header)
        return length - have


def pack_bitmap(indices: list[int], column_count: int) -> bytes:
    """The bitmap with the bits ``indices`` set, (column_count + 7) // 8 bytes."""
    bits = bytearray((column_count + 7) // 8)
    for index in indices:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def unpack_bitmap(bits: Buffer) -> list[int]:
    """The indices of the bits that are set."""
    return [at * 8 + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1]
