"""The header of a frame: its fields, and all code that depends on their offsets.

FORMAT.md beside this file is the specification, and ``FIELDS`` is its table in code.  Structs,
offsets, numpy types and the compiled writer of headers are made from ``FIELDS``.  Kernels of all
rooms pack frames with ``seal`` and ``seal_window_end``, and read headers with the functions below.
What is not here: the content of frames, and walks over many of them.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from databus.common.checkpoint import Position
from databus.common.compiled import kernels
from databus.common.compiled.kernels import U8Array, i64, load_i64, load_u16, load_u32
from databus.common.errors import FormatError

MAGIC = 0xDB05
VERSION = 1
ALIGNMENT = 8
MAX_FRAME_BYTES = 1 << 30

Buffer: TypeAlias = "bytes | bytearray | memoryview"


class Op(enum.IntEnum):
    """The type of a frame.  Below 64 it is a row change; from 64 on it controls the stream."""

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


class Flag(enum.IntFlag):
    """Bits of a frame's flags."""

    HAS_BEFORE = 1
    HAS_AFTER = 2
    PARTIAL = 4
    DUMP = 8


# The same numbers for kernels, which cannot use enums.
INSERT, UPDATE, DELETE, READ, TRUNCATE = 1, 2, 3, 4, 5
END_OF_WINDOW = FIRST_CONTROL_OP = 64
HAS_BEFORE, HAS_AFTER, PARTIAL = 1, 2, 4
KNOWN_FLAGS = 15


class FrameField(NamedTuple):
    """One field of the header.  Its offset is the sum of the fields before it."""

    name: str
    code: str
    meaning: str


FIELDS: tuple[FrameField, ...] = (
    FrameField("crc", "I", "CRC-32C of bytes [4, length)"),
    FrameField("length", "I", "bytes of the whole frame, a multiple of 8"),
    FrameField("magic", "H", "0xDB05"),
    FrameField("version", "B", "1"),
    FrameField("op", "B", "type of the frame"),
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
DTYPES: dict[str, np.dtype[Any]] = {field.name: np.dtype("<" + field.code) for field in FIELDS}
_BITS = tuple(8 * struct.calcsize(field.code) for field in FIELDS)
_SHIFTS = {name: dtype.itemsize.bit_length() - 1 for name, dtype in DTYPES.items()}
CRC_BYTES = DTYPES["crc"].itemsize
"""The CRC is the first field; it is of all bytes after it."""

EVENT_COUNT = struct.Struct("<I")
WINDOW_END_BYTES = HEADER_BYTES + EVENT_COUNT.size + ALIGNMENT
"""Room for the frame that closes a window, beside the bytes of its transaction id."""

_LENGTH, _MAGIC, _VERSION, _OP = (OFFSETS[n] for n in ("length", "magic", "version", "op"))
_FLAGS, _SCN, _SEQ, _SOURCE = (OFFSETS[n] for n in ("flags", "scn", "seq", "source_id"))
_HASH, _SCHEMA, _COMMIT_US = (OFFSETS[n] for n in ("key_hash", "schema_fp", "commit_us"))
_KEY_LEN, _BEFORE_LEN, _AFTER_LEN, _ABSENT_LEN = (
    OFFSETS[n] for n in ("key_len", "before_len", "after_len", "absent_len")
)
_IS_KNOWN_OP = np.isin(np.arange(256), [int(op) for op in Op])
_KNOWN_OPS = frozenset(int(op) for op in Op)


def packed_header(
    *, length: int, op: int, flags: int, scn: int, seq: int, source: int, key_hash: int,
    schema_fp: int, commit_us: int, key_len: int, before_len: int, after_len: int, absent_len: int,
) -> bytes:  # fmt: skip
    """A header whose CRC is 0."""
    return HEADER.pack(
        0, length, MAGIC, VERSION, op, flags, 0, scn, seq, source, key_hash, schema_fp, commit_us,
        key_len, before_len, after_len, absent_len,
    )  # fmt: skip


def header_problem(header: tuple[Any, ...], room: int) -> str | None:
    """What is wrong with an unpacked header, of a frame that has ``room`` bytes."""
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


class FrameView:
    """A view of a frame: names for the bytes of ``buf`` from ``offset`` on.

    Invariants:
        I1. The header was checked, so every part lies inside the buffer.
        I2. Parts are views: they are valid as long as the buffer under them is unchanged.

    Owner: the code that made it; it is never changed.
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
        """Whether the frame controls the stream and holds no row."""
        return bool(self.op >= FIRST_CONTROL_OP)

    @property
    def position(self) -> Position:
        """The frame's position in the stream."""
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
        """The row before the change, or None if the source does not give it."""
        if not self.flags & HAS_BEFORE:
            return None
        return self._part(self.key_len, self.before_len)

    @property
    def after(self) -> memoryview | None:
        """The row after the change, or a control frame's content; None after a delete."""
        if not self.flags & HAS_AFTER:
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


# ---- many headers at once: arrays of one field ----


def gathered(
    words: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64], name: str
) -> npt.NDArray[Any]:
    """The field ``name`` of the headers at ``offsets`` of a buffer, which is given as words."""
    found: npt.NDArray[Any] = words.view(DTYPES[name])[(offsets + OFFSETS[name]) >> _SHIFTS[name]]
    return found


def strided(words: npt.NDArray[np.uint64], name: str) -> npt.NDArray[Any]:
    """The field ``name`` of headers that lie back to back."""
    dtype = DTYPES[name]
    found: npt.NDArray[Any] = words.view(dtype)[
        OFFSETS[name] >> _SHIFTS[name] :: HEADER_BYTES // dtype.itemsize
    ]
    return found


_WORDS = HEADER_BYTES // 8


def back_to_back(
    words: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """A copy of the headers at ``offsets``, as ``strided`` reads them."""
    if not len(offsets):
        return words[:0]
    at_each_word = np.lib.stride_tricks.as_strided(
        words, (len(words) - _WORDS + 1, _WORDS), (8, 8), writeable=False
    )
    found: npt.NDArray[np.uint64] = at_each_word[offsets >> 3].reshape(-1)
    return found


def part_of(headers: npt.NDArray[np.uint64], first: int, behind: int) -> npt.NDArray[np.uint64]:
    """The headers ``first`` .. ``behind`` - 1 of a copy."""
    return headers[first * _WORDS : behind * _WORDS]


# ---- kernels: one header in a buffer ----

_put_header = kernels.record_writer(_BITS)
_put_half = kernels.record_writer((32,))
_put_word = kernels.record_writer((64,))


@kernels.jit_uncounted
def length_of(buf: U8Array, at: int) -> int:
    """Bytes of the frame at ``at``; an odd number marks the pad of a ring's lap."""
    return load_u32(buf, at + _LENGTH)


@kernels.jit_uncounted
def op_of(buf: U8Array, at: int) -> int:
    """The op of the frame at ``at``."""
    return i64(buf[at + _OP])


@kernels.jit_uncounted
def flags_of(buf: U8Array, at: int) -> int:
    """The flags of the frame at ``at``."""
    return load_u16(buf, at + _FLAGS)


@kernels.jit_uncounted
def position_of(buf: U8Array, at: int) -> tuple[int, int, int]:
    """The position of the frame at ``at``: upper and lower half of the scn, and the seq."""
    return load_u32(buf, at + _SCN + 4), load_u32(buf, at + _SCN), load_u32(buf, at + _SEQ)


@kernels.jit_uncounted
def source_of(buf: U8Array, at: int) -> int:
    """The source's number in the frame at ``at``."""
    return load_u32(buf, at + _SOURCE)


@kernels.jit_uncounted
def key_hash_of(buf: U8Array, at: int) -> int:
    """The hash of the key in the frame at ``at``, as two's complement."""
    return load_i64(buf, at + _HASH)


@kernels.jit_uncounted
def schema_of(buf: U8Array, at: int) -> int:
    """The schema's fingerprint in the frame at ``at``, as two's complement."""
    return load_i64(buf, at + _SCHEMA)


@kernels.jit_uncounted
def commit_us_of(buf: U8Array, at: int) -> int:
    """The commit time of the frame at ``at``."""
    return load_i64(buf, at + _COMMIT_US)


@kernels.jit_uncounted
def parts_of(buf: U8Array, at: int) -> tuple[int, int, int, int]:
    """How many bytes the frame's key, row before, row after and bitmap have."""
    return (
        load_u32(buf, at + _KEY_LEN),
        load_u32(buf, at + _BEFORE_LEN),
        load_u32(buf, at + _AFTER_LEN),
        load_u32(buf, at + _ABSENT_LEN),
    )


@kernels.jit_uncounted
def is_start(buf: U8Array, at: int) -> bool:
    """Whether the bytes at ``at`` have a frame's magic and a length that can be walked over."""
    found = length_of(buf, at)
    return load_u16(buf, at + _MAGIC) == MAGIC and found >= HEADER_BYTES and found & 7 == 0


@kernels.jit_uncounted
def has_parts(buf: U8Array, at: int) -> bool:
    """Whether a frame at ``at`` is of our version, and as long as its parts."""
    key_len, before_len, after_len, absent_len = parts_of(buf, at)
    parts = key_len + before_len + after_len + absent_len
    is_as_long = length_of(buf, at) == (HEADER_BYTES + parts + 7) & ~7
    return is_as_long and i64(buf[at + _VERSION]) == VERSION


@kernels.jit_uncounted
def is_header(buf: U8Array, at: int) -> bool:
    """Whether the header's bytes at ``at`` can be a frame's header."""
    return is_start(buf, at) and has_parts(buf, at)


@kernels.jit_uncounted
def is_known(buf: U8Array, at: int) -> bool:
    """Whether the header at ``at``, which is one, has an op and flags of this version."""
    return _IS_KNOWN_OP[buf[at + _OP]] and load_u32(buf, at + _FLAGS) & ~KNOWN_FLAGS == 0


@kernels.jit_uncounted
def has_crc(buf: U8Array, at: int, frame_bytes: int) -> bool:
    """Whether the frame of ``frame_bytes`` at ``at`` is as it was packed; all of it is there."""
    return kernels.crc32c(buf, at + CRC_BYTES, at + frame_bytes) == load_u32(buf, at)


@kernels.jit_uncounted
def is_frame(buf: U8Array, at: int) -> bool:
    """Whether a whole, undamaged frame lies at ``at``."""
    if at + HEADER_BYTES > len(buf) or not is_header(buf, at):
        return False
    found = length_of(buf, at)
    return at + found <= len(buf) and has_crc(buf, at, found)


@kernels.jit_uncounted
def seal(
    out: U8Array, start: int, stop: int, op: int, flags: int, scn: int, seq: int, source: int,
    key_hash: int | np.uint64, schema_fp: int | np.uint64, commit_us: int, key_len: int,
    before_len: int, after_len: int, absent_len: int,
) -> int:  # fmt: skip
    """Pad the frame at ``start``, whose parts end at ``stop``, and write its header.

    Returns where the frame ends.
    """
    while stop & 7:
        out[stop] = 0
        stop += 1
    _put_header(
        out, start,
        (
            i64(0), i64(stop - start), i64(MAGIC), i64(VERSION), i64(op), i64(flags), i64(0),
            i64(scn), i64(seq), i64(source), i64(key_hash), i64(schema_fp), i64(commit_us),
            i64(key_len), i64(before_len), i64(after_len), i64(absent_len),
        ),
    )  # fmt: skip
    _put_half(out, start, (i64(kernels.crc32c(out, start + CRC_BYTES, stop)),))
    return stop


@kernels.jit_uncounted
def seal_window_end(
    out: U8Array, start: int, txid_stop: int, scn: int, seq: int, commit_us: int, event_count: int
) -> int:
    """Write the frame that closes a window.  Its transaction id is already after the header's
    room."""
    _put_half(out, txid_stop, (i64(event_count),))
    return seal(
        out, start, txid_stop + 4, END_OF_WINDOW, HAS_AFTER, scn, seq, 0, 0, 0, commit_us,
        txid_stop - start - HEADER_BYTES, 0, 4, 0,
    )  # fmt: skip


@kernels.jit_uncounted
def put_window_before(out: U8Array, at: int, hi: int, lo: int, seq: int) -> None:
    """Write into the end of a window at ``at`` where the window before it ended."""
    _put_word(out, at + _HASH, (i64(hi) << 32 | i64(lo),))
    _put_word(out, at + _SCHEMA, (i64(seq),))
    _put_half(out, at, (i64(kernels.crc32c(out, at + CRC_BYTES, at + length_of(out, at))),))
