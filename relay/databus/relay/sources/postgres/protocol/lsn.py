"""Log positions and transaction ids of PostgreSQL, and their mapping to scns.

The scn of a commit is the LSN where its commit record starts (docs/decisions/0011).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

END_SQL = """
SELECT pg_catalog.pg_current_wal_insert_lsn()::text, pg_catalog.current_setting('wal_block_size'),
       (SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_segment_size')
"""
"""For ``end_of_log``."""

_ALIGN = 8
_SHORT_PAGE_HEADER_BYTES = 24
_LONG_PAGE_HEADER_BYTES = 40


def parse_lsn(text: str) -> int:
    """The number of an LSN such as ``16/B374D848``."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: int) -> str:
    """An LSN in PostgreSQL's text form."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def flush_lsn(scn: int) -> int:
    """The LSN to confirm, or to start from, when everything up to ``scn`` is finished.

    The server skips transactions whose commit record starts before it.  Records start at
    multiples of 8 and a commit record is longer than 8, so this skips the commit at ``scn``
    and nothing after it.
    """
    return -(-(scn + 1) // _ALIGN) * _ALIGN


def scn_before(lsn: int) -> int:
    """The scn below every commit whose record starts at ``lsn`` or later.

    ``lsn - 1`` is reserved for the schema changes of a commit at ``lsn``.
    """
    return lsn - 2


def end_of_log(row: Iterable[str | bytes | None]) -> int:
    """The end of the last record, from the row of END_SQL."""
    lsn, page, segment = (each.decode() if isinstance(each, bytes) else each or "" for each in row)
    return written_end(parse_lsn(lsn), int(page), int(segment))


def written_end(insert_lsn: int, page_bytes: int, segment_bytes: int) -> int:
    """The end of the last record before an insert position.

    At the start of a page the insert position is after the page's header.  The server writes that
    header with the next record, so the stream would not report such a position as passed.
    """
    if insert_lsn % segment_bytes == _LONG_PAGE_HEADER_BYTES:
        return insert_lsn - _LONG_PAGE_HEADER_BYTES
    if insert_lsn % page_bytes == _SHORT_PAGE_HEADER_BYTES:
        return insert_lsn - _SHORT_PAGE_HEADER_BYTES
    return insert_lsn


@dataclass(frozen=True, slots=True)
class PostgresSnapshot:
    """An MVCC snapshot: the transactions visible in a chunk, and an scn at or after all of them.

    ``xmin``, ``xmax`` and ``running`` are 64-bit transaction ids of pg_current_snapshot.  The
    stream has 32-bit ids; each means the 64-bit id nearest to ``xmax``.
    """

    high: int
    xmin: int
    xmax: int
    running: frozenset[int]

    def sees(self, scn: int, txid: str) -> bool:
        """Whether the transaction is visible; one without an id counts as invisible."""
        if not txid.isdigit():
            return False
        xid = self._full(int(txid))
        return xid < self.xmin or (xid < self.xmax and xid not in self.running)

    def _full(self, xid: int) -> int:
        near = (self.xmax & ~0xFFFFFFFF) | (xid & 0xFFFFFFFF)
        if near - self.xmax > 1 << 31:
            return near - (1 << 32)
        if self.xmax - near > 1 << 31:
            return near + (1 << 32)
        return near


def parse_snapshot(text: str, high: int) -> PostgresSnapshot:
    """Parse the text of pg_current_snapshot(), ``xmin:xmax:xip,xip,...``."""
    xmin, xmax, running = text.split(":")
    ids = frozenset(int(xid) for xid in running.split(",") if xid)
    return PostgresSnapshot(high, int(xmin), int(xmax), ids)
