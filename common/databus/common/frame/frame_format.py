"""The frame: the one form that an event has from the fetcher to the consumer.

A frame is packed once, where the change is read, and never re-encoded: the same bytes lie in
the ring, travel over HTTP, and lie in the bootstrap's log and runs.  FORMAT.md beside this
file is the specification; ``FIELDS`` is its table in code.

Reading is total: any bytes give frames or a ``FormatError`` that says where and why.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from databus.common.checkpoint import Position
from databus.common.compiled import kernels
from databus.common.errors import FormatError

MAGIC = 0xDB05
VERSION = 1
ALIGNMENT = 8

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class Op(enum.IntEnum):
    """What a frame says.  Below 64 it is a row; from 64 on it steers the stream."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3
    READ = 4
    TRUNCATE = 5
    END_OF_WINDOW = 64
    HEARTBEAT = 65
    SCHEMA_CHANGE = 66
    CHECKPOINT = 67
    ERROR = 68
    SPAN = 69
    TABLE_STATE = 70


FIRST_CONTROL_OP = 64

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


class Flag(enum.IntFlag):
    """Bits of a frame's flags."""

    HAS_BEFORE = 1
    HAS_AFTER = 2
    PARTIAL = 4
    DUMP = 8


KNOWN_FLAGS = 15
_HAS_BEFORE, _HAS_AFTER = int(Flag.HAS_BEFORE), int(Flag.HAS_AFTER)  # & of enums is slow


class FrameField(NamedTuple):
    """One field of the header: its place is the sum of those before it."""

    name: str
    code: str
    meaning: str


FIELDS: tuple[FrameField, ...] = (
    FrameField("crc", "I", "CRC-32C of bytes [4, length)"),
    FrameField("length", "I", "bytes of the whole frame, a multiple of 8"),
    FrameField("magic", "H", "0xDB05"),
    FrameField("version", "B", "1"),
    FrameField("op", "B", "what the frame says"),
    FrameField("flags", "H", "HAS_BEFORE 1, HAS_AFTER 2, PARTIAL 4, DUMP 8"),
    FrameField("reserved", "H", "0"),
    FrameField("scn", "Q", "commit clock of the source"),
    FrameField("seq", "I", "raw index within the scn"),
    FrameField("source_id", "I", "xxh32 of the source's name, 0 in control frames"),
    FrameField("key_hash", "Q", "xxh3_64 of the key bytes"),
    FrameField("schema_fp", "Q", "fingerprint of the source's schema"),
    FrameField("commit_us", "q", "commit time, microseconds since the epoch, UTC"),
    FrameField("key_len", "I", "bytes of the key"),
    FrameField("before_len", "I", "bytes of the row before"),
    FrameField("after_len", "I", "bytes of the row after"),
    FrameField("absent_len", "I", "bytes of the bitmap of absent columns"),
)
HEADER = struct.Struct("<" + "".join(field.code for field in FIELDS))
HEADER_BYTES = HEADER.size
OFFSETS: dict[str, int] = {
    field.name: struct.calcsize("<" + "".join(f.code for f in FIELDS[:index]))
    for index, field in enumerate(FIELDS)
}
MAX_FRAME_BYTES = 1 << 30

_CRC = struct.Struct("<I")
EVENT_COUNT = struct.Struct("<I")
_AFTER_CRC = 4


def source_id(name: str) -> int:
    """The number of a source on the wire, the same on every relay: xxh32 of its name, not 0."""
    return xxhash.xxh32_intdigest(name.encode()) or 1


def key_hash(key: Buffer) -> int:
    """xxh3_64 of the key bytes, what partitions are cut by."""
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
    """One frame.  ``before`` and ``after`` of None are absent, which b"" is not.

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
    header = HEADER.pack(
        0,
        length,
        MAGIC,
        VERSION,
        op,
        flags,
        0,
        scn,
        seq,
        source,
        xxhash.xxh3_64_intdigest(key) if source else 0,
        schema_fp,
        commit_us,
        len(key),
        len(before_bytes),
        len(after_bytes),
        len(absent),
    )
    rest = b"".join(
        (header[_AFTER_CRC:], key, before_bytes, after_bytes, absent, bytes(length - size))
    )
    return _CRC.pack(google_crc32c.value(rest)) + rest


class FrameView:
    """A frame where it lies: names for the bytes of ``buf`` from ``offset`` on.

    Invariants:
        I1. The header was checked, so every part lies inside the buffer.
        I2. Parts are views: they are valid as long as the buffer under them is unchanged.

    Owner: whoever made it; it is never changed.
    """

    __slots__ = (
        "_buf",
        "absent_len",
        "after_len",
        "before_len",
        "commit_us",
        "flags",
        "key_hash",
        "key_len",
        "length",
        "offset",
        "op",
        "schema_fp",
        "scn",
        "seq",
        "source_id",
    )

    def __init__(self, buf: memoryview, offset: int, header: tuple[Any, ...]) -> None:
        self._buf = buf
        self.offset = offset
        (
            _,
            self.length,
            _,
            _,
            self.op,
            self.flags,
            _,
            self.scn,
            self.seq,
            self.source_id,
            self.key_hash,
            self.schema_fp,
            self.commit_us,
            self.key_len,
            self.before_len,
            self.after_len,
            self.absent_len,
        ) = header

    @property
    def is_control(self) -> bool:
        """Whether the frame steers the stream and holds no row."""
        return bool(self.op >= FIRST_CONTROL_OP)

    @property
    def position(self) -> Position:
        """Where the frame stands in the stream."""
        return Position(self.scn, self.seq)

    @property
    def bytes(self) -> memoryview:
        """The whole frame."""
        return self._buf[self.offset : self.offset + self.length]

    @property
    def key(self) -> memoryview:
        """The key's bytes; the transaction id in an end-of-window frame."""
        return self._part(0, self.key_len)

    @property
    def before(self) -> memoryview | None:
        """The row before the change, or None where the source does not give it."""
        if not self.flags & _HAS_BEFORE:
            return None
        return self._part(self.key_len, self.before_len)

    @property
    def after(self) -> memoryview | None:
        """The row after the change, or a control frame's content; None after a delete."""
        if not self.flags & _HAS_AFTER:
            return None
        return self._part(self.key_len + self.before_len, self.after_len)

    @property
    def absent(self) -> memoryview:
        """Bitmap of the columns that ``after`` does not really hold."""
        return self._part(self.key_len + self.before_len + self.after_len, self.absent_len)

    @property
    def event_count(self) -> int:
        """How many events the window had at the source, filtered or not (end of window)."""
        after = self.after
        if self.op != Op.END_OF_WINDOW or after is None or len(after) != EVENT_COUNT.size:
            raise FormatError(f"the frame at {self.position} (op {self.op}) has no event count")
        return int(EVENT_COUNT.unpack(after)[0])

    def _part(self, start: int, length: int) -> memoryview:
        at = self.offset + HEADER_BYTES + start
        return self._buf[at : at + length]


def read_frame(buf: Buffer, offset: int = 0) -> FrameView:
    """The frame at ``offset``, fully checked.

    Raises:
        FormatError: the bytes there are not a whole, undamaged frame.
    """
    view = memoryview(buf)
    room = len(view) - offset
    if room < HEADER_BYTES:
        raise FormatError(f"{room} bytes at offset {offset} are no frame of {HEADER_BYTES} or more")
    header = HEADER.unpack_from(view, offset)
    problem = _header_problem(header, room)
    if problem:
        raise FormatError(f"frame at offset {offset}: {problem}")
    length = header[1]
    found = google_crc32c.value(bytes(view[offset + _AFTER_CRC : offset + length]))
    if found != header[0]:
        raise FormatError(
            f"frame at offset {offset}: CRC is {found:#010x}, expected {header[0]:#010x}"
        )
    return FrameView(view, offset, header)


def _header_problem(header: tuple[Any, ...], room: int) -> str | None:
    _, length, magic, version, op, flags, reserved, *_ = header
    parts = HEADER_BYTES + sum(header[-4:])
    if magic != MAGIC:
        return f"magic is {magic:#06x}, expected {MAGIC:#06x}"
    if version != VERSION:
        return f"version is {version}, this program reads {VERSION}"
    if length % ALIGNMENT or not HEADER_BYTES <= length <= MAX_FRAME_BYTES:
        return f"length {length} is not a multiple of {ALIGNMENT} in range"
    if not parts <= length < parts + ALIGNMENT:
        return f"length is {length}, but its parts need {parts}"
    if length > room:
        return f"length is {length}, but only {room} bytes are there"
    if op not in _KNOWN_OPS:
        return f"op {op} is unknown"
    if flags & ~KNOWN_FLAGS or reserved:
        return f"flags {flags:#x} or reserved {reserved:#x} are not of version {VERSION}"
    return None


_KNOWN_OPS = frozenset(int(op) for op in Op)
_IS_KNOWN_OP = np.isin(np.arange(256), list(_KNOWN_OPS))


def trusted_frame(buf: memoryview, offset: int) -> FrameView:
    """The frame at ``offset`` of bytes that ``scan`` has already checked."""
    return FrameView(buf, offset, HEADER.unpack_from(buf, offset))


def iter_frames(buf: Buffer) -> Iterator[FrameView]:
    """All frames of a buffer that holds whole frames only.

    Raises:
        FormatError: there is something else in it.
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

    ``offset`` is int64, in bytes from the block's start; the fields are gathered when asked
    for, as numpy arrays of their own width.  ``stop`` is where the last whole frame ends.
    """

    words: npt.NDArray[np.uint64]
    offset: npt.NDArray[np.int64]
    stop: int

    def __len__(self) -> int:
        return len(self.offset)

    def _word(self, name: str) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = self.words[(self.offset + OFFSETS[name]) >> 3]
        return words

    def _half(self, name: str) -> npt.NDArray[np.uint32]:
        halves: npt.NDArray[np.uint32] = self.words.view(np.uint32)[
            (self.offset + OFFSETS[name]) >> 2
        ]
        return halves

    @property
    def length(self) -> npt.NDArray[np.uint32]:
        return self._half("length")

    @property
    def op(self) -> npt.NDArray[np.uint8]:
        ops: npt.NDArray[np.uint8] = self.words.view(np.uint8)[self.offset + OFFSETS["op"]]
        return ops

    @property
    def flags(self) -> npt.NDArray[np.uint16]:
        flags: npt.NDArray[np.uint16] = self.words.view(np.uint16)[
            (self.offset + OFFSETS["flags"]) >> 1
        ]
        return flags

    @property
    def scn(self) -> npt.NDArray[np.uint64]:
        return self._word("scn")

    @property
    def seq(self) -> npt.NDArray[np.uint32]:
        return self._half("seq")

    @property
    def source_id(self) -> npt.NDArray[np.uint32]:
        return self._half("source_id")

    @property
    def key_hash(self) -> npt.NDArray[np.uint64]:
        return self._word("key_hash")

    @property
    def schema_fp(self) -> npt.NDArray[np.uint64]:
        return self._word("schema_fp")

    @property
    def commit_us(self) -> npt.NDArray[np.int64]:
        return self._word("commit_us").view(np.int64)

    @property
    def key_len(self) -> npt.NDArray[np.uint32]:
        return self._half("key_len")

    @property
    def before_len(self) -> npt.NDArray[np.uint32]:
        return self._half("before_len")

    @property
    def after_len(self) -> npt.NDArray[np.uint32]:
        return self._half("after_len")


@kernels.jit
def _walk(buf: kernels.U8Array, start: int, stop: int, out: kernels.I64Array) -> tuple[int, int]:
    """Write the offsets of the whole frames in ``buf[start:stop]`` to ``out``.

    Returns (frames found, offset where it stopped).  It stops at a frame that is cut off, at
    bytes that cannot be a frame's header, and when ``out`` is full.
    """
    count = 0
    at = start
    while count < len(out) and at + 72 <= stop:
        length = kernels.load_u32(buf, at + 4)
        if kernels.load_u16(buf, at + 8) != 0xDB05 or length < 72 or length & 7:
            break
        if at + length > stop:
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
        length = kernels.load_u32(buf, at + 4)
        parts = 72
        for field in range(at + 56, at + 72, 4):
            parts += kernels.load_u32(buf, field)
        if not parts <= length < parts + 8:
            return index
        if buf[at + 10] != 1 or not _IS_KNOWN_OP[buf[at + 11]]:
            return index
        if kernels.load_u32(buf, at + 12) & ~15:
            return index
        if kernels.crc32c(buf, at + 4, at + length) != kernels.load_u32(buf, at):
            return index
    return -1


def scan(buf: Buffer | npt.NDArray[np.uint8], *, verify: bool = True) -> FrameColumns:
    """The columns of all whole frames at the start of ``buf``; a cut-off last one is left.

    ``buf`` must begin with a frame.  With ``verify`` every frame is checked as ``read_frame``
    does; without, only what is needed to walk from one to the next.

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


def _check_cut(raw: npt.NDArray[np.uint8], stop: int) -> None:
    """Raise unless the bytes at ``stop`` are the beginning of a frame that is merely cut."""
    header = HEADER.unpack_from(raw.data, stop)
    problem = _header_problem(header, MAX_FRAME_BYTES)
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
        # Frames are scanned where they arrived, and copied once: to where they are handed out.
        stop = missing + (scan(view[missing:]).stop if len(view) > missing else 0)
        block = b"".join((self._pending, view[:stop]))
        if self._pending:
            read_frame(block)
        self._pending = bytearray(view[stop:])
        return block

    def _missing(self, view: memoryview) -> int:
        """How many bytes of ``view`` belong to the frame that was cut off: more than there are
        if it stays so."""
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
