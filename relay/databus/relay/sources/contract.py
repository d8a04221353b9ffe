"""The contract between the fetcher and a kind of database: what a source plug-in does.

A source reads one database's committed changes, packs them into frames and hands them on in
commit order; on request it reads chunks of tables at a known point of the same clock.  It
knows nothing of rings, HTTP or consumers.  To support another database, write a module with a
class that fulfils ``Source`` and name its URL scheme in ``source_catalogue.py``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from databus.common.checkpoint import Position
from databus.common.errors import PreflightFailed
from databus.common.schema.source_schema import SourceSchema
from databus.relay.sources.row_buffers import Row as Row
from databus.relay.sources.row_buffers import Rows
from databus.relay.sources.suspended_tables import TableSuspension

MAX_CHUNK_BYTES = 16 << 20

_log = logging.getLogger(__name__)


class ResumeState(Protocol):
    """What a source must know to go on, as it was at one moment; encoded when it is kept."""

    def encode(self) -> str:
        """As text."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole frames in commit order, ready for the ring.

    ``data`` may hold many windows and may end inside one (its rest comes in the next
    batches).  ``schemas`` are those that ``data`` uses and no batch before had.  ``resolved``
    is an scn up to which every commit has been yielded, this batch included; it grows also
    when only tables that are not captured change.  ``resume_state`` is what a ``RememberingSource``
    wants to be told when it is to go on after this batch; with ``keep`` it must be on disk
    before what the next batches have is in the ring.
    """

    data: bytes
    schemas: tuple[SourceSchema, ...] = ()
    resolved: int = 0
    resume_state: ResumeState | None = None
    keep: bool = False


class Snapshot(Protocol):
    """The point at which a chunk was read."""

    @property
    def high(self) -> int:
        """An scn at or after every commit that the chunk shows."""

    def sees(self, scn: int, txid: str) -> bool:
        """Whether the commit with this scn and transaction id shows in the chunk."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one table in key order, read at one point of the source's clock.

    ``last_key`` is what the next chunk's ``after`` must be, JSON-able; ``done`` says that the
    table (or the list of keys) ends here.  ``missing`` are asked-for keys without a row, among the
    first ``key_count`` of the asked-for keys; None: all were looked for.
    """

    schema: SourceSchema
    rows: Rows
    snapshot: Snapshot
    last_key: list[Any] | None
    done: bool
    missing: list[list[Any]] = field(default_factory=list)
    key_count: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """What to read: at most ``limit`` rows of ``source`` after the key ``after``.

    ``upto`` is the largest key when the dump began (rows above it are the log's business),
    ``keys`` an explicit list of keys instead.  Keys are JSON-able values in key order.  With
    ``is_filtered`` the caller uses only some of the rows; with ``is_probe`` the rows are wanted
    only to see whether they can be read.  A source that can ends the chunk, not ``done``, with the
    row that makes it ``max_bytes``.
    """

    source: str
    limit: int
    after: list[Any] | None = None
    upto: list[Any] | None = None
    keys: list[list[Any]] | None = None
    is_filtered: bool = False
    is_probe: bool = False
    max_bytes: int = MAX_CHUNK_BYTES

    @property
    def is_of_whole_table(self) -> bool:
        """Whether this is the first question of a reader of all of the table."""
        is_whole = self.after is None and self.keys is None
        return is_whole and not (self.is_filtered or self.is_probe)


@dataclass(frozen=True, slots=True)
class TableSize:
    """What the database believes of a table: its rows, and the bytes of one; None: no idea.

    ``is_scanned``: no index has the order of its key, so that each chunk reads all of it.
    """

    rows: int | None = None
    row_bytes: int | None = None
    is_scanned: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What the preflight found: the setting, what it is, and the statement that mends it.

    ``table`` is the source that it is about, where that one can be left out and no other is
    the worse for it.
    """

    setting: str
    problem: str
    remedy: str
    fatal: bool = True
    table: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}. To mend it: {self.remedy}"

    @property
    def forbids_all(self) -> bool:
        """Whether no table can be captured."""
        return self.fatal and not self.table


def raise_findings(database: str, findings: Sequence[Finding], *, goes_on: bool = False) -> None:
    """Raise PreflightFailed with every finding that forbids capture, if there is one.

    A database that ``goes_on`` has readers, whom a table that somebody has made meanwhile is no
    reason to keep waiting: it is left out, and named in the log.
    """
    fatal = [finding for finding in findings if finding.fatal]
    if goes_on:
        for finding in fatal:
            if finding.table:
                _log.warning("database %s: %s", database, left_out(finding))
        fatal = [finding for finding in fatal if finding.forbids_all]
    if fatal:
        raise PreflightFailed(
            f"database {database} cannot be captured: " + "; ".join(map(str, fatal)),
            findings=[
                {"setting": f.setting, "problem": f.problem, "remedy": f.remedy} for f in fatal
            ],
        )


def left_out(finding: Finding) -> str:
    """For people: that a table is not captured, and why."""
    return f"{finding.table} cannot be captured: {finding.problem}. To mend it: {finding.remedy}"


class Source(Protocol):
    """One upstream database.

    Windows come with strictly growing scn, and a window that is read again after a restart
    has the same events with the same seqs.  Connection losses surface as SourceUnavailable
    (the fetcher reconnects with back-off by opening the source anew); a log that no longer
    reaches back as SourcePositionLost.

    Owner: one fetcher's event loop.  ``stream`` and ``read_chunk`` run concurrently, over
    connections of their own.
    """

    @property
    def clock(self) -> str:
        """The clock's identity; valid after ``open``."""

    async def preflight(self) -> list[Finding]:
        """Examine the server's settings, privileges and tables; opens what it needs itself."""

    async def open(self) -> None:
        """Connect, run the preflight, learn the tables.

        Raises:
            PreflightFailed: the server is not set up for capture, or a table that is asked for
                cannot be captured and the stream is a brand-new one.
            SourceUnavailable: it does not answer.
        """

    async def first_scn(self) -> int:
        """The scn after which a brand-new stream starts: now.  Creates what that needs
        (a replication slot, the change log's triggers)."""

    def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """All windows with a larger scn, for ever; a batch at least every second, if need be
        an empty one whose ``resolved`` has grown.  Closing it closes its connection.

        Raises:
            SourcePositionLost: the log does not reach back to ``after_scn``.
            SourceUnavailable: the connection is gone.
        """

    async def ack(self, scn: int) -> None:
        """Everything up to ``scn`` is durable downstream; the source may forget it."""

    async def schemas(self) -> list[SourceSchema]:
        """The captured tables as they are now."""

    async def largest_key(self, source: str) -> list[Any] | None:
        """The largest key of a table, JSON-able; None when it is empty."""

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """The key of row number ``limit`` after ``after``, the condition left aside; None if
        there are fewer up to ``upto``.  So several chunks can be read at once."""

    async def table_size(self, source: str) -> TableSize:
        """An estimate that costs nothing, for progress and for the size of chunks."""

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """Read a chunk at a known point of the clock, without locks; several may be asked for
        at once."""

    async def status(self) -> dict[str, Any]:
        """Facts for the status page: server version, current scn, retained log, and the like."""

    async def close(self) -> None:
        """Let go of all connections."""


@runtime_checkable
class RelayingSource(Protocol):
    """What a source offers besides ``Source`` if its windows have been through a relay already.

    Such a stream has dump windows in it, so that an scn alone does not say how far it was read,
    and it is not ours to add windows to: dumps run at its origin.
    """

    async def first_position(self) -> Position:
        """The position after which a brand-new stream starts, instead of ``first_scn``."""

    def stream_from(self, position: Position) -> AsyncGenerator[Batch, None]:
        """Every frame after ``position``, be it inside a window, instead of ``stream``."""

    async def release(self, position: Position) -> None:
        """Everything up to ``position``, be it inside a window, is on disk here."""

    async def forward(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The origin's answer (status, body) to a request such as ``/dumps/1`` or ``/chunks``."""


@runtime_checkable
class WatermarkingSource(Protocol):
    """What a source offers besides ``Source`` if it can write watermarks, as DBLog does."""

    async def write_watermark(self, table: str, token: str) -> None:
        """Commit ``token`` in the row ``id = 1`` of ``table (id, token)``.

        Raises:
            DumpFailed: it cannot be written; the message has the statement that makes the table.
        """


@runtime_checkable
class SuspendingSource(Protocol):
    """What a source offers besides ``Source`` if it can suspend a table and go on with the others.

    ``read_chunk`` and ``largest_key`` of a whole table let the stream read a suspended table
    again, between two transactions and before its first row is read.
    """

    def suspended(self) -> Mapping[str, TableSuspension]:
        """The tables of which the stream now carries nothing, by name; cheap."""


@runtime_checkable
class ForgettingSource(Protocol):
    """What a source offers besides ``SuspendingSource`` if its log has no event of DROP TABLE."""

    async def forget(self, source: str) -> None:
        """End the suspension of a table that is gone (``Stop.is_gone``), between two transactions.

        No row of it comes after that, also if the log still has some.  A table that gets its name
        later is another one, and is suspended until it is read.

        Raises:
            SourceUnavailable: the stream is not connected, or there is a table of this name again;
                the suspension stays.
        """


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction of the source as it lies in the ring."""

    scn: int
    txid: str
    commit_us: int


@runtime_checkable
class RememberingSource(Protocol):
    """What a source offers besides ``Source`` if an scn alone does not tell where it is.

    ``recall`` comes before ``open`` wherever the stream is to go on.  The fetcher keeps the memo
    of the last batch of which all is on disk, and gives it back before the next stream.  The memo
    may be older than where the stream goes on.
    """

    def recall(self, resume_state: str, last: Transaction | None, after_scn: int) -> None:
        """This is the text of the memo that was kept; ``last`` is the transaction at
        ``after_scn``, where the stream will go on, as far as there is one.

        Raises:
            FormatError: it is no memo of this source.
        """
