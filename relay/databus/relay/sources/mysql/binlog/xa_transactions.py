"""XA transactions: rows arrive at XA PREPARE and take effect at XA COMMIT.

The binlog has an XA transaction in two groups: its rows under the GTID of XA PREPARE, and,
perhaps days later, XA COMMIT or XA ROLLBACK under another one.  The frames wait here, in a file
if they are many, and get the position of the commit.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Set
from dataclasses import dataclass
from typing import IO

import google_crc32c

from databus.common.frame.frame_format import trusted_frame

SPOOL_IN_MEMORY_BYTES = 4 << 20

_COMPLETION = re.compile(
    r"\s*XA\s+(COMMIT|ROLLBACK)\s+X'([0-9A-F]*)'\s*,\s*X'([0-9A-F]*)'\s*,\s*(\d+)", re.IGNORECASE
)
_PREPARE = struct.Struct("<BIII")
_CRC, _LENGTH, _POSITION, _TIME = (
    struct.Struct("<I"),
    struct.Struct("<I"),
    struct.Struct("<QI"),
    struct.Struct("<q"),
)
_AFTER_CRC, _POSITION_AT, _TIME_AT = 4, 16, 48

Xid = tuple[int, str, str]
"""Format id, global id and branch, the latter two in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Completion:
    """XA COMMIT or XA ROLLBACK of a prepared transaction."""

    xid: Xid
    commits: bool


def read_completion(statement: str) -> Completion | None:
    """The XA transaction that a statement in the binlog completes; None for other statements."""
    found = _COMPLETION.match(statement)
    if found is None:
        return None
    xid = (int(found[4]), found[2].lower(), found[3].lower())
    return Completion(xid, found[1].upper() == "COMMIT")


def read_prepare(body: memoryview) -> Xid | None:
    """The transaction that an XA_PREPARE event prepares; None if it commits in one phase."""
    one_phase, format_id, global_bytes, branch_bytes = _PREPARE.unpack_from(body)
    if one_phase:
        return None
    data = bytes(body[_PREPARE.size : _PREPARE.size + global_bytes + branch_bytes])
    return format_id, data[:global_bytes].hex(), data[global_bytes:].hex()


def xid_text(xid: Xid) -> str:
    """An xid as the server writes it in XA statements."""
    format_id, global_id, branch = xid
    return f"X'{global_id}',X'{branch}',{format_id}"


def moved(frame: bytearray, scn: int, seq: int, commit_us: int) -> bytes:
    """A frame at another position of the stream."""
    _POSITION.pack_into(frame, _POSITION_AT, scn, seq)
    _TIME.pack_into(frame, _TIME_AT, commit_us)
    _CRC.pack_into(frame, 0, google_crc32c.value(bytes(memoryview(frame)[_AFTER_CRC:])))
    return bytes(frame)


class TransactionSpool:
    """The frames of one transaction that has not been committed yet.

    ``lacks_rows_of``: the tables that it may have changed and of which it has no rows.

    Invariants:
        I1. It holds whole frames, in order.

    Owner: the decoder.
    Durability: none; after a restart the binlog is read again from the oldest prepared one.
    """

    def __init__(self, scn: int) -> None:
        self.scn = scn
        self.lacks_rows_of: frozenset[str] = frozenset()
        self._reads = False
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(SPOOL_IN_MEMORY_BYTES)  # noqa: SIM115 - closed by close()

    def put(self, frames: bytes) -> None:
        """Add frames."""
        self._file.write(frames)

    def next_frame(self) -> bytearray | None:
        """The next frame; None after the last.  No frame may be added after this."""
        if not self._reads:
            self._reads = True
            self._file.seek(0)
        head = self._file.read(_AFTER_CRC + _LENGTH.size)
        if not head:
            return None
        (length,) = _LENGTH.unpack_from(head, _AFTER_CRC)
        return bytearray(head) + self._file.read(length - len(head))

    def close(self) -> None:
        """Free the space."""
        self._file.close()


class PreparedTransactions:
    """The prepared transactions that are not completed yet, and the open one.

    Invariants:
        I1. At most one spool is open: it is being filled, or read.

    ``is_replayed``: the frames of the open one are being added to the window of its commit.

    Owner: the decoder.
    """

    def __init__(self) -> None:
        self._waiting: dict[Xid, TransactionSpool] = {}
        self._open: TransactionSpool | None = None
        self.is_replayed = False

    @property
    def oldest_scn(self) -> int | None:
        """The scn at which the oldest was prepared: a restart reads the binlog from there."""
        return min((spool.scn for spool in self._waiting.values()), default=None)

    def holds(self, xid: Xid) -> bool:
        """Whether the transaction is prepared."""
        return xid in self._waiting

    def put(self, scn: int, frames: bytes) -> None:
        """Add frames to the transaction that is being prepared under ``scn``."""
        if self._open is None:
            self._open = TransactionSpool(scn)
        self._open.put(frames)

    def store(self, xid: Xid, left_out: Set[str]) -> None:
        """The open one is prepared; it may lack rows of the suspended tables."""
        self.drop(xid)
        if self._open is not None:
            self._open.lacks_rows_of = frozenset(left_out)
            self._waiting[xid] = self._open
        self._open = None

    def store_without_rows(self, xid: Xid, scn: int, changed: frozenset[str]) -> None:
        """A transaction is prepared whose rows are not read; it changes these tables."""
        self.drop(xid)
        spool = self._waiting[xid] = TransactionSpool(scn)
        spool.lacks_rows_of = changed

    def source_ids(self, xid: Xid) -> set[int]:
        """The tables of which a waiting transaction has frames; they are read, and then gone."""
        found: set[int] = set()
        while (frame := self._waiting[xid].next_frame()) is not None:
            found.add(trusted_frame(memoryview(frame), 0).source_id)
        return found

    def forget_open(self) -> None:
        """Drop the open one: it was not prepared."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def lacks_rows_of(self, xid: Xid) -> frozenset[str]:
        """The tables that it may have changed and of which it has no rows."""
        found = self._waiting.get(xid)
        return found.lacks_rows_of if found is not None else frozenset()

    def reopen(self, xid: Xid) -> bool:
        """It was committed: ``next_frame`` gives its frames; False if they are not here."""
        self._open = self._waiting.pop(xid, None)
        return self._open is not None

    def next_frame(self, scn: int, seq: int, commit_us: int) -> bytes | None:
        """The next frame of the open one, at its position in the stream; None after the last."""
        assert self._open is not None
        found = self._open.next_frame()
        if found is None:
            self.forget_open()
            return None
        return moved(found, scn, seq, commit_us)

    def drop(self, xid: Xid) -> None:
        """It was rolled back, or committed before the stream's position."""
        spool = self._waiting.pop(xid, None)
        if spool is not None:
            spool.close()

    def close(self) -> None:
        """Forget all of them."""
        self.forget_open()
        for xid in tuple(self._waiting):
            self.drop(xid)
