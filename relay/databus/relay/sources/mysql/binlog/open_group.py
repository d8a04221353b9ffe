"""The GTID group that is being read, and its frames."""

from __future__ import annotations

from dataclasses import dataclass

from databus.common.frame.frame_format import Op, pack_frame, source_id
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.mysql.protocol.binlog_events import GtidFlag

PART_BYTES = 1 << 20
"""A window with more packed bytes than this is given out in parts; a smaller one only whole."""

_FIRST_ROOM = 4 << 20


@dataclass(slots=True)
class Group:
    """The GTID group that is being read.

    ``wanted``: of our domain and after our position.  ``is_examined``: it has no scn, and the
    captured tables that it changes are suspended.
    """

    scn: int
    domain_id: int
    server_id: int
    commit_us: int
    flags: int
    wanted: bool
    seq: int = 0
    event_count: int = 0
    is_examined: bool = False

    @property
    def standalone(self) -> bool:
        """Whether it is a single statement without an end event."""
        return bool(self.flags & GtidFlag.STANDALONE)

    @property
    def prepares(self) -> bool:
        """Whether its rows count only when another group commits them."""
        return bool(self.flags & GtidFlag.PREPARED_XA)


def truncation(source: str, schema_fp: int, group: Group) -> bytes:
    """The frame of a table that was emptied, at the group's present position."""
    return pack_frame(
        op=Op.TRUNCATE,
        scn=group.scn,
        seq=group.seq,
        source=source_id(source),
        schema_fp=schema_fp,
        commit_us=group.commit_us,
    )


def row_change(
    op: Op,
    schema: SourceSchema,
    group: Group,
    key: bytes,
    before: bytes | None,
    after: bytes | None,
) -> bytes:
    """The frame of one event, at the group's present position."""
    return pack_frame(
        op=op,
        scn=group.scn,
        seq=group.seq,
        source=schema.source_id,
        schema_fp=schema.fingerprint,
        commit_us=group.commit_us,
        key=key,
        before=before,
        after=after,
    )


class FrameBuffer:
    """Frames to give out: whole windows, and after them the open one.

    Invariants:
        I1. ``data[:window_start]`` are whole windows, ``data[window_start:fill]`` the frames
            of the open one; both are multiples of 8.
        I2. ``is_partly_sent``: ``take`` has returned frames of the open window.

    ``rows_done``: so many rows of the event that is decoded next are packed already.

    Owner: the task that reads the stream.
    """

    def __init__(self) -> None:
        self.data = bytearray(_FIRST_ROOM)
        self.fill = 0
        self.window_start = 0
        self.is_partly_sent = False
        self.rows_done = 0

    def append(self, frames: bytes) -> None:
        """Add frames to the open window."""
        self.make_room(len(frames))
        self.data[self.fill : self.fill + len(frames)] = frames
        self.fill += len(frames)

    def make_room(self, need_bytes: int) -> None:
        """Make space for so many bytes."""
        if len(self.data) - self.fill < need_bytes:
            larger = bytearray(max(2 * len(self.data), -(-(self.fill + need_bytes) // 8) * 8))
            larger[: self.fill] = memoryview(self.data)[: self.fill]
            self.data = larger

    @property
    def open_bytes(self) -> int:
        """The size of the open window's frames."""
        return self.fill - self.window_start

    def end_window(self) -> None:
        """The open window is whole; the next frame begins another one."""
        self.window_start = self.fill
        self.is_partly_sent = False

    def cut_open(self) -> bytes:
        """Remove the open window's frames and return them."""
        taken = bytes(memoryview(self.data)[self.window_start : self.fill])
        self.fill = self.window_start
        return taken

    def take(self, size: int) -> bytes:
        """Remove the first ``size`` bytes."""
        if size > self.window_start:
            self.is_partly_sent = True
        taken = bytes(memoryview(self.data)[:size])
        rest = bytes(memoryview(self.data)[size : self.fill])
        self.data[: len(rest)] = rest
        self.fill -= size
        self.window_start = max(0, self.window_start - size)
        return taken
