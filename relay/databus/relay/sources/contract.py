"""The contract between the fetcher and a kind of database: what a source plug-in does.

A source reads one database's committed changes, packs them into frames and yields them in
commit order.  On request it reads chunks of tables at a known point of the same clock.  It
does not depend on rings, HTTP or consumers.  To support another database, write a module with a
class that implements ``Source`` and add its URL scheme to ``source_catalogue.py``.
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
    """What a source needs to resume, as of one batch; encoded when it is stored."""

    def encode(self) -> str:
        """As text."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole frames in commit order, ready for the ring.

    ``data`` may hold many windows and may end inside one (its rest comes in the next
    batches).  ``schemas`` are those that ``data`` uses and no batch before had.  ``resolved``
    is an scn up to which every commit has been yielded, this batch included; it grows also
    when only tables that are not captured change.  A ``ResumableSource`` needs
    ``resume_state`` to resume after this batch.  With ``persist_first``, the fetcher must write it
    to disk before it writes the next batches to the ring.
    """

    data: bytes
    schemas: tuple[SourceSchema, ...] = ()
    resolved: int = 0
    resume_state: ResumeState | None = None
    persist_first: bool = False


class Snapshot(Protocol):
    """The point at which a chunk was read."""

    @property
    def high(self) -> int:
        """An scn at or after every commit that the chunk shows."""

    def sees(self, scn: int, txid: str) -> bool:
        """Whether the commit with this scn and transaction id is visible in the chunk."""


@dataclass(frozen=True, slots=True)
class ScnSnapshot:
    """The snapshot just after the commit at ``high``."""

    high: int

    def sees(self, scn: int, txid: str) -> bool:
        """See ``Snapshot``."""
        return scn <= self.high


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of one table in key order, read at one point of the source's clock.

    ``last_key`` is the ``after`` of the next chunk, JSON-able; with ``done`` the table (or the
    list of keys) ends here.  The source looked for the first ``key_count`` of the requested keys
    (None: for all); ``missing`` are those of them without a row.
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

    ``upto`` is the largest key when the dump began (rows above it come from the log),
    ``keys`` an explicit list of keys instead.  Keys are JSON-able values in key order.  With
    ``is_filtered`` the caller uses only some of the rows; with ``is_probe`` it only tests whether
    the rows can be read.  Where the source supports it, a chunk that reaches ``max_bytes`` ends
    with that row and is not ``done``.
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
        """Whether this is the first request of a reader of the whole table."""
        is_whole = self.after is None and self.keys is None
        return is_whole and not (self.is_filtered or self.is_probe)


@dataclass(frozen=True, slots=True)
class TableSize:
    """The database's estimate of a table: its rows, and the bytes of one row; None: unknown.

    ``is_scanned``: no index has the order of its key, so each chunk scans the whole table.
    """

    rows: int | None = None
    row_bytes: int | None = None
    is_scanned: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """What the preflight found: the setting, its problem, and the statement that fixes it.

    ``table`` is set if the finding concerns this source alone, so that all others can be captured
    without it.
    """

    setting: str
    problem: str
    remedy: str
    fatal: bool = True
    table: str = ""

    def __str__(self) -> str:
        return f"{self.setting}: {self.problem}. To fix it: {self.remedy}"

    @property
    def forbids_all(self) -> bool:
        """Whether no table can be captured."""
        return self.fatal and not self.table


def raise_findings(database: str, findings: Sequence[Finding], *, resumes: bool = False) -> None:
    """Raise PreflightFailed with every finding that forbids capture, if there is one.

    A stream that ``resumes`` has readers.  A table that cannot be captured, such as one created
    meanwhile, does not hold them up: it is left out, and a warning is logged.
    """
    fatal = [finding for finding in findings if finding.fatal]
    if resumes:
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
    """The message that a table is not captured, and why."""
    return f"{finding.table} cannot be captured: {finding.problem}. To fix it: {finding.remedy}"


class Source(Protocol):
    """One upstream database.

    Windows come with strictly growing scn, and a window that is read again after a restart
    has the same events with the same seqs.  A lost connection raises SourceUnavailable: the
    fetcher opens the source again, with back-off.  A log that no longer reaches back to the
    position raises SourcePositionLost.

    Owner: one fetcher's event loop.  ``stream`` and ``read_chunk`` run concurrently, over
    connections of their own.
    """

    @property
    def clock(self) -> str:
        """The clock's identity; valid after ``open``."""

    async def preflight(self) -> list[Finding]:
        """Examine the server's settings, privileges and tables; opens its own connections."""

    async def open(self) -> None:
        """Connect, run the preflight, load the tables.

        Raises:
            PreflightFailed: the server is not set up for capture, or a configured table cannot
                be captured and the stream is brand-new.
            SourceUnavailable: the server does not answer.
        """

    async def first_scn(self) -> int:
        """The scn after which a brand-new stream starts: now.  Creates what the stream needs
        (a replication slot, the change log's triggers)."""

    def stream(self, after_scn: int) -> AsyncGenerator[Batch, None]:
        """All windows with a larger scn, without end; a batch at least every second, even an
        empty one whose ``resolved`` has grown.  Closing the generator closes its connection.

        Raises:
            SourcePositionLost: the log does not reach back to ``after_scn``.
            SourceUnavailable: the connection is gone.
        """

    async def ack(self, scn: int) -> None:
        """Everything up to ``scn`` is durable downstream; the source may discard it."""

    async def schemas(self) -> list[SourceSchema]:
        """The captured tables as they are now."""

    async def largest_key(self, source: str) -> list[Any] | None:
        """The largest key of a table, JSON-able; None when it is empty."""

    async def chunk_end(self, request: ChunkRequest) -> list[Any] | None:
        """The key of row number ``limit`` after ``after``, without the condition; None if
        there are fewer up to ``upto``.  With it several chunks can be read at once."""

    async def table_size(self, source: str) -> TableSize:
        """An estimate that costs nothing, for progress and for the size of chunks."""

    async def read_chunk(self, request: ChunkRequest) -> Chunk:
        """Read a chunk at a known point of the clock, without locks; calls may run
        concurrently."""

    async def committed_scn(self) -> int | None:
        """The scn of the last transaction that the database has committed; None if the source
        cannot tell.  It costs little: it is asked every second."""

    async def status(self) -> dict[str, Any]:
        """Facts for the status page: server version, current scn, retained log, and so on."""

    async def close(self) -> None:
        """Close all connections."""


@runtime_checkable
class RelayingSource(Protocol):
    """What a source offers besides ``Source`` if its windows come from another relay.

    Such a stream contains dump windows, so an scn alone does not identify a position in it.
    This relay must not add windows to it: dumps run at its origin.
    """

    async def first_position(self) -> Position:
        """The position after which a brand-new stream starts, instead of ``first_scn``."""

    def stream_from(self, position: Position) -> AsyncGenerator[Batch, None]:
        """Every frame after ``position``, even inside a window, instead of ``stream``."""

    async def release(self, position: Position) -> None:
        """Everything up to ``position``, even inside a window, is on disk here."""

    async def forward(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The origin's answer (status, body) to a request such as ``/dumps/1`` or ``/chunks``."""


@runtime_checkable
class WatermarkingSource(Protocol):
    """What a source offers besides ``Source`` if it can write watermarks, as DBLog does."""

    async def write_watermark(self, table: str, token: str) -> None:
        """Commit ``token`` in the row ``id = 1`` of ``table (id, token)``.

        Raises:
            DumpFailed: it cannot be written; the message has the statement that creates the table.
        """


@runtime_checkable
class SuspendingSource(Protocol):
    """What a source offers besides ``Source`` if it can suspend a table and stream the others.

    ``read_chunk`` and ``largest_key`` of a whole table resume a suspended table: the stream
    includes it again between two transactions, before its first row is read.
    """

    def suspended(self) -> Mapping[str, TableSuspension]:
        """The suspended tables by name; cheap."""


@runtime_checkable
class DropConfirmingSource(Protocol):
    """What a source offers besides ``SuspendingSource`` if its log has no event of DROP TABLE."""

    async def confirm_drop(self, source: str) -> None:
        """End the suspension of a dropped table (``TableSuspension.is_gone``), between two
        transactions.

        The stream gives no row of it after that, even if the log still has some.  A new table of
        the same name is suspended until it is read.

        Raises:
            SourceUnavailable: the stream is not connected, or a table of this name exists again;
                the suspension stays.
        """


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction of the source as it is in the ring."""

    scn: int
    txid: str
    commit_us: int


@runtime_checkable
class ResumableSource(Protocol):
    """What a source offers besides ``Source`` if it needs more than an scn to resume.

    The fetcher stores the resume state of the last batch that is wholly on disk.  Before ``open``
    of a stream that resumes it calls ``restore``.  The resume state may be older than the
    position at which the stream resumes.
    """

    def restore(self, resume_state: str, last: Transaction | None, after_scn: int) -> None:
        """Load the stored resume state.  ``last`` is the transaction at ``after_scn``, where the
        stream will resume, if there is one.

        Raises:
            FormatError: the text is no resume state of this source.
        """
