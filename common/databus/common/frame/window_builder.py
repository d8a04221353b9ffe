"""Windows: the frames of one source transaction, built event by event, and what closes them."""

from __future__ import annotations

import numpy as np

from databus.common.checkpoint import Position
from databus.common.errors import WindowMissing
from databus.common.frame.frame_format import EVENT_COUNT, Flag, FrameColumns, Op, pack_frame
from databus.common.frame.header_layout import END_OF_WINDOW


def require_chain(columns: FrameColumns, before: Position) -> None:
    """Check that no window is missing among all frames of a stream after ``before``.

    For a reader without a filter.  An end of a window that does not state the one before it
    (frames of earlier releases) is accepted.

    Raises:
        WindowMissing: the end of a window refers to one that has not arrived.
    """
    ends = (columns.op == END_OF_WINDOW).nonzero()[0]
    if not len(ends):
        return
    stated_scn, stated_seq = columns.key_hash[ends], columns.schema_fp[ends]
    scn, seq = columns.scn[ends], columns.seq[ends].astype(np.uint64)
    known_scn = np.concatenate([np.array([before.scn], dtype=np.uint64), scn[:-1]])
    known_seq = np.concatenate([np.array([before.seq], dtype=np.uint64), seq[:-1]])
    missing = (stated_scn > known_scn) | ((stated_scn == known_scn) & (stated_seq > known_seq))
    if missing.any():
        at = int(np.argmax(missing))
        stated = Position(int(stated_scn[at]), int(stated_seq[at]))
        known = Position(int(known_scn[at]), int(known_seq[at]))
        end = Position(int(scn[at]), int(seq[at]))
        raise WindowMissing(
            f"the window that ends at {end} follows one that ended at {stated}, but everything "
            f"after {known} up to there is missing",
            after=known.to_json(),
            stated=stated.to_json(),
        )


class WindowBuilder:
    """Packs the events of one source transaction into a window of frames.

    Invariants:
        I1. Frames have the seqs first_seq, first_seq + 1, ...; the end of window has the last.
        I2. ``take`` never returns part of a frame.

    Owner: the source that reads the transaction.
    """

    def __init__(self, scn: int, commit_us: int, first_seq: int = 0) -> None:
        self.scn = scn
        self.commit_us = commit_us
        self.seq = first_seq
        self.event_count = 0
        self._out = bytearray()

    @property
    def pending_bytes(self) -> int:
        """Bytes that ``take`` would return."""
        return len(self._out)

    def event(
        self,
        op: Op,
        source: int,
        schema_fp: int,
        key: bytes,
        *,
        before: bytes | None = None,
        after: bytes | None = None,
        absent: bytes = b"",
    ) -> None:
        """Add one row change; the parts are Avro bytes of the schema ``schema_fp``."""
        self._out += pack_frame(
            op=op,
            scn=self.scn,
            seq=self.seq,
            source=source,
            schema_fp=schema_fp,
            commit_us=self.commit_us,
            key=key,
            before=before,
            after=after,
            absent=absent,
        )
        self.seq += 1
        self.event_count += 1

    def packed(self, frames: bytes, event_count: int) -> None:
        """Add row changes that were packed elsewhere, with the seqs from ``seq`` on."""
        self._out += frames
        self.seq += event_count
        self.event_count += event_count

    def control(self, op: Op, *, source: int = 0, schema_fp: int = 0, after: bytes) -> None:
        """Add a control frame among the window's events."""
        self.event(op, source, schema_fp, b"", after=after)
        self.event_count -= 1

    def take(self) -> bytes:
        """The frames so far, to be sent on before the window has ended."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def end(self, txid: str = "", *, dump: bool = False) -> bytes:
        """The remaining frames, and the end of window after them."""
        self._out += end_of_window(
            self.scn, self.seq, self.commit_us, self.event_count, txid, dump=dump
        )
        self.seq += 1
        return self.take()


def end_of_window(
    scn: int, seq: int, commit_us: int, event_count: int, txid: str = "", *, dump: bool = False
) -> bytes:
    """The frame that closes a window of ``event_count`` events."""
    return pack_frame(
        op=Op.END_OF_WINDOW,
        scn=scn,
        seq=seq,
        commit_us=commit_us,
        key=txid.encode(),
        after=EVENT_COUNT.pack(event_count),
        extra_flags=Flag.DUMP if dump else 0,
    )


def heartbeat(position: Position, commit_us: int) -> bytes:
    """The promise that nothing at or before ``position`` is still to come."""
    return pack_frame(op=Op.HEARTBEAT, scn=position.scn, seq=position.seq, commit_us=commit_us)
