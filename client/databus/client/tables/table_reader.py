"""Reads one table over HTTP into Arrow batches: its state as of a position, or its changes.

Spark tasks and the exports use it.  It reads a range at a relay that has it, otherwise at a
bootstrap server, and combines partial updates with the rows that they change.  It spools an
answer to a temporary file and checks that it is whole before it returns the first row.  So after
a broken connection it can request the answer again, and no caller sees half of one.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from databus.client.pulling.transport import FRAMES_TYPE
from databus.client.tables.arrow_rows import RowDecoder
from databus.client.tables.batch_limits import BatchEnd, BatchLimit
from databus.client.tables.partial_updates import combined
from databus.common.checkpoint import (
    ORIGIN,
    OnlineCheckpoint,
    Position,
    decode_position,
    encode,
)
from databus.common.errors import (
    BadCheckpoint,
    BadRequest,
    ClockMismatch,
    DatabusError,
    FormatError,
    LogTooYoung,
    ScnTooOld,
    ServerUnavailable,
    StoreError,
    TooManyRequests,
    UnknownSource,
    from_error_frame,
    requested_pause_s,
)
from databus.common.frame import frame_format
from databus.common.frame.frame_format import (
    FIRST_CONTROL_OP,
    Flag,
    FrameColumns,
    FrameSplitter,
    Op,
)
from databus.common.http.peer_calls import CallAnswer, peer_call
from databus.common.http.request_parameters import parse_position
from databus.common.schema.source_schema import SchemaSet, SourceSchema

READ_BYTES = 4 << 20
RETRY_PAUSE_S = 0.5
_POSITION = re.compile(r"\d+(:.*)?", re.ASCII)
_YEAR = re.compile(r"\d{4}-")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TableAddress:
    """A table and its servers; ``give_up_s`` is the longest time without an answer."""

    database: str
    source: str
    relays: tuple[str, ...] = ()
    bootstraps: tuple[str, ...] = ()
    give_up_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Range:
    """What to read: the state at ``until``, or with ``since`` the changes up to it.

    ``mode``: ``state``; ``net``, the last state of each key; ``all``, every change; ``auto``,
    every change if they are retained, otherwise net changes.  ``since`` of None is the oldest
    retained change.

    ``partition`` and ``ops`` are the servers' filters.  ``later``: if a merge has removed states
    at ``until``, the remaining ones are returned.  A row that changed again after it is left out,
    and comes with the next range.
    """

    mode: str
    since: Position | None
    until: Position
    clock: str
    partition: str | None = None
    ops: str | None = None
    later: bool = False
    truncates: bool = True
    """Whether truncates are returned.  They concern the keys of every partition, and the servers
    send them with each."""


class TableReader:
    """Reads one table.

    Invariants:
        I1. Rows come in the order of their positions, or as a server's merged runs have them, by
            key; but those of keys with partial updates
            come last; in ``net`` and ``state`` each key comes once.
        I2. No row of an answer is returned before the answer has arrived whole.

    Owner: one thread.
    Raises: the errors of the tree; ServerUnavailable when no server answered for ``give_up_s``,
        StoreError at once if the spool's disk is full.
    """

    def __init__(self, address: TableAddress) -> None:
        self.address = address
        self.schemas = SchemaSet()
        self.clock = ""
        self._progress_s = 0.0

    # -- schemas and positions ----------------------------------------------------------

    def schema(self) -> SourceSchema:
        """The newest version of the table's schema.

        Raises:
            UnknownSource: no server has the table.
        """
        found = self._register()
        if found is None:
            raise UnknownSource(
                f"{self.address.database} has no source {self.address.source!r}",
                source=self.address.source,
            )
        return found

    def tables(self) -> list[SourceSchema]:
        """The newest versions of all tables that ``source`` names, which may be globs here.

        Raises:
            UnknownSource: no server has such a table.
        """
        self._register()
        names = dict.fromkeys(schema.source for schema in self.schemas)
        found = [self.schemas.latest(name) for name in names]
        if not names:
            raise UnknownSource(
                f"{self.address.database} has no source {self.address.source!r}",
                source=self.address.source,
            )
        return [schema for schema in found if schema is not None]

    def schema_of(self, fingerprint: int) -> SourceSchema:
        """The schema of a frame."""
        if fingerprint not in self.schemas:
            self._register()
        return self.schemas.by_fingerprint(fingerprint)

    def _register(self) -> SourceSchema | None:
        query = {"sources": self.address.source}
        servers = self.address.bootstraps or self.address.relays

        def once(server: str) -> tuple[str, list[SourceSchema]]:
            document = self._json(server, "register", query)
            try:
                found = [SourceSchema.from_json(item["schema"]) for item in document["schemas"]]
                return str(document["clock"]), found
            except (KeyError, TypeError) as error:
                raise FormatError(f"{server} gave a registration without {error}") from error

        self.clock, schemas = self._from_any(servers, once)
        for schema in schemas:
            self.schemas.announce(schema)
        return self.schemas.latest(self.address.source)

    def target(self) -> Position:
        """The position up to which a bootstrap server has the stream."""
        return self._from_any(self.address.bootstraps, lambda s: self._position(s, "targetSCN"))

    def newest(self) -> Position:
        """The newest position that a relay has; without relays that of a bootstrap server."""
        if not self.address.relays:
            return self.target()
        return self._from_any(self.address.relays, lambda s: self._position(s, "sources", "max"))

    def oldest(self) -> Position:
        """The oldest position that a relay, or without relays a bootstrap server, serves from."""
        servers = self.address.relays or self.address.bootstraps
        return self._from_any(servers, lambda s: self._position(s, "sources", "prev"))

    def position_of(self, text: str) -> Position:
        """``SCN``, ``SCN:SEQ``, or a commit time, which a bootstrap server resolves."""
        if _POSITION.fullmatch(text) and not _YEAR.match(text):
            return parse_position(text)
        # An answer with truncates only: its header has the position of the time.
        query = {"sources": self.address.source, "until": text, "mode": "net", "ops": "t"}

        def once(server: str) -> Position:
            with self._open(server, "changes", query) as answer:
                return parse_position(answer.headers["Databus-Max"])

        return self._from_any(self.address.bootstraps, once)

    def has_changes(self, since: Position, until: Position) -> bool:
        """Whether a row changed in (since, until]; the answer is left at the first one.

        Raises:
            LogTooYoung: the changes are no longer retained one by one.
        """
        query = {"sources": self.address.source, "mode": "all"}
        query |= {"since": str(since), "until": str(until)}

        def once(server: str) -> bool:
            with self._open(server, "changes", query) as answer:
                return any(
                    bool((columns.op < FIRST_CONTROL_OP).any() | (columns.op == Op.TRUNCATE).any())
                    for _, columns in _blocks(answer, server)
                )

        return self._from_any(self.address.bootstraps, once)

    # -- rows ---------------------------------------------------------------------------

    def batches(self, requested: Range, decoder: RowDecoder) -> Iterator[Any]:
        """The rows as record batches."""
        with contextlib.closing(self.frames(requested)) as spool:
            if spool.folds:
                yield from combined(spool.blocks(), spool.partial_hashes, decoder)
                return
            for data, columns, rows in spool.blocks():
                yield decoder.batch(data, columns, rows)

    def frames(self, requested: Range) -> BatchSpool:
        """All frames of a range, from a relay or a bootstrap server; the caller closes them."""
        spool = BatchSpool(
            frame_format.source_id(self.address.source),
            folds=requested.mode in ("net", "state"),
            truncates=requested.truncates,
        )
        try:
            if requested.mode in ("auto", "all"):
                self._read_changes(requested, spool)
            else:
                self._read_merged(requested, spool)
        except BaseException:
            spool.close()
            raise
        return spool

    def _read_changes(self, requested: Range, spool: BatchSpool) -> None:
        since = requested.since
        if self.address.relays and since is not None and since != ORIGIN:
            try:
                self._from_relay(requested, since, spool)
                return
            except ScnTooOld:
                if not self.address.bootstraps:
                    raise
                spool.restart()
        try:
            self._whole("changes", self._query(requested, "all", requested.until), requested, spool)
        except LogTooYoung:
            if requested.mode == "all":
                raise
            spool.restart(folds=True)
            self._read_merged(requested, spool)

    def _read_merged(self, requested: Range, spool: BatchSpool) -> None:
        path = "snapshot" if requested.mode == "state" else "changes"
        try:
            self._whole(path, self._query(requested, "net", requested.until), requested, spool)
        except LogTooYoung as error:
            if not requested.later or "after" not in error.details:
                raise
            after = decode_position(error.details["after"])
            spool.restart(upto=requested.until)
            self._whole(path, self._query(requested, "net", after), requested, spool)

    def _query(self, requested: Range, mode: str, until: Position) -> dict[str, str]:
        query = {"sources": self.address.source}
        if requested.mode == "state":
            query["scn"] = str(until)
        else:
            query |= {"mode": mode, "until": str(until)}
            if requested.since is not None:
                query["since"] = str(requested.since)
        return query | _filters(requested)

    def _whole(
        self, path: str, query: Mapping[str, str], requested: Range, spool: BatchSpool
    ) -> None:
        """One answer of a bootstrap server, from its first frame to its checkpoint."""

        most_bytes = 0

        def once(server: str) -> None:
            nonlocal most_bytes
            spool.restart()
            with self._open(server, path, query) as answer:
                _check_clock(answer.headers.get("Databus-Clock"), requested.clock)
                ended, got_bytes = False, 0
                for data, columns in _blocks(answer, server):
                    got_bytes += len(data)
                    if got_bytes > most_bytes:  # an answer that breaks off earlier is no progress
                        most_bytes, self._progress_s = got_bytes, time.monotonic()
                    spool.write(data, columns)
                    ended = bool((columns.op == Op.CHECKPOINT).any())
                if not ended:
                    raise ServerUnavailable(f"{server} ended its answer in the middle")

        self._from_any(self.address.bootstraps, once)

    def _from_relay(self, requested: Range, since: Position, spool: BatchSpool) -> None:
        """Read relays until ``until`` is reached."""

        def take(data: bytes, columns: FrameColumns, at: Position) -> bool:
            spool.write(data, columns, after=at, upto=requested.until)
            return False

        self._relay_frames(requested, since, take)

    def _relay_frames(
        self,
        requested: Range,
        since: Position,
        take: Callable[[bytes, FrameColumns, Position], bool],
    ) -> None:
        """Call ``take`` with the frames of relays, each block with the position before it.

        It ends when ``until`` is reached, or when ``take`` returns True.
        """
        at = since
        is_taken = False

        def once(server: str) -> None:
            nonlocal at, is_taken
            checkpoint = encode(OnlineCheckpoint(self.address.database, requested.clock, at))
            query = {"sources": self.address.source, "checkpoint": checkpoint, "wait_ms": "1000"}
            with self._open(server, "stream", query | _filters(requested)) as answer:
                for data, columns in _blocks(answer, server):
                    self._progress_s = time.monotonic()
                    is_taken = take(data, columns, at)
                    at = max(at, _position(columns, len(columns) - 1))
                    if is_taken or at >= requested.until:
                        return

        while at < requested.until and not is_taken:
            self._from_any(self.address.relays, once)

    # -- limits of a batch ----------------------------------------------------------------

    def end_within(self, requested: Range, limit: BatchLimit) -> Position:
        """Where a batch of changes after ``since`` ends that has ``limit`` at most.

        That is a window's end, and ``until`` at most.  A window that is larger than the limit is a
        batch.  So are changes that have been merged: their windows are gone.  The frames are read
        for this, and not decoded.
        """
        since = requested.since or ORIGIN
        if self.address.relays and since != ORIGIN:
            found = BatchEnd(limit)
            try:
                self._relay_frames(requested, since, lambda _, columns, __: found.take(columns))
                return min(found.end if found.is_over else requested.until, requested.until)
            except ScnTooOld:
                if not self.address.bootstraps:
                    raise
        try:
            return self._from_any(
                self.address.bootstraps, lambda server: self._logged_end(server, requested, limit)
            )
        except LogTooYoung as error:
            merged = decode_position(error.details.get("oldest"))
            return min(merged, requested.until) if merged > since else requested.until

    def _logged_end(self, server: str, requested: Range, limit: BatchLimit) -> Position:
        """The same from a bootstrap server's log."""
        found = BatchEnd(limit)
        query = self._query(requested, "all", requested.until)
        with self._open(server, "changes", query) as answer:
            _check_clock(answer.headers.get("Databus-Clock"), requested.clock)
            for _, columns in _blocks(answer, server):
                self._progress_s = time.monotonic()
                if found.take(columns):
                    return min(found.end, requested.until)
                if (columns.op == Op.CHECKPOINT).any():
                    return requested.until
        raise ServerUnavailable(f"{server} ended its answer in the middle")

    # -- the wire -----------------------------------------------------------------------

    def _from_any(self, servers: Sequence[str], call: Callable[[str], _T]) -> _T:
        """The result of the first server that answers, tried one after the other until
        ``give_up_s`` after the last progress."""
        if not servers:
            raise BadRequest("no server for this request is given; give relays or bootstraps")
        self._progress_s = time.monotonic()
        while True:
            pauses_s: list[float] = []
            is_full = False
            for server in servers:
                try:
                    return call(server)
                except DatabusError as error:
                    pauses_s.append(requested_pause_s(error))
                    is_full = is_full or isinstance(error, TooManyRequests)
                    silent_s = time.monotonic() - self._progress_s
                    if not error.retry or (silent_s >= self.address.give_up_s and not is_full):
                        raise
            time.sleep(max(RETRY_PAUSE_S, min(pauses_s)))
            if is_full:  # A server that is full answers: it is not silent.
                self._progress_s = time.monotonic()

    def document(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """A JSON answer of a bootstrap server about the database."""
        return self._from_any(self.address.bootstraps, lambda s: self._json(s, path, query))

    def renew(self, lease: str) -> None:
        """Renew a lease at the first server that answers now.

        Raises:
            LeaseExpired: it has ended.
            DatabusError: no server has renewed it.
        """
        problem: DatabusError = ServerUnavailable("there is no bootstrap server")
        for server in self.address.bootstraps:
            try:
                self._json(server, "splits", {"lease": lease})
                return
            except DatabusError as error:
                problem = error
        raise problem

    def _position(self, server: str, path: str, name: str = "") -> Position:
        """The position in an answer: the whole document, or its member ``name``."""
        document = self._json(server, path, {})
        try:
            return decode_position(document.get(name) if name else document)
        except BadCheckpoint as error:
            raise FormatError(f"the answer of {server} has no position: {error.message}") from None

    def _json(self, server: str, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        with self._open(server, path, query) as answer:
            return answer.json_object(FormatError)

    def _open(
        self, server: str, path: str, query: Mapping[str, str]
    ) -> contextlib.AbstractContextManager[CallAnswer]:
        return peer_call(
            "GET",
            server.rstrip("/"),
            f"/v1/{self.address.database}/{path}",
            query=query,
            headers={"Accept": f"{FRAMES_TYPE}, application/json"},
            silence_s=self.address.give_up_s,
        )


class BatchSpool:
    """Frames of one table in a temporary file, in the order of arrival.

    ``folds``: partial updates are combined with the rows that they change.

    Raises: StoreError if the disk cannot store them.
    """

    def __init__(self, source_id: int, *, folds: bool, truncates: bool = True) -> None:
        # Without a buffer: no write is pending when it is read or closed.
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise StoreError(f"no temporary file can be made: {error}") from error
        self._source_id = source_id
        self._lengths: list[int] = []
        self._upto: Position | None = None
        self._folds = folds
        self._truncates = truncates
        self._partial: set[int] = set()

    @property
    def size(self) -> int:
        """Bytes of all frames."""
        return sum(self._lengths)

    @property
    def folds(self) -> bool:
        """Whether there are partial updates to combine."""
        return self._folds and bool(self._partial)

    @property
    def partial_hashes(self) -> npt.NDArray[np.uint64]:
        """Hashes of the keys that partial updates belong to."""
        return np.fromiter(self._partial, dtype=np.uint64)

    def restart(self, *, upto: Position | None = None, folds: bool | None = None) -> None:
        """Discard all frames; rows after ``upto`` will be left out."""
        self._file.seek(0)
        self._file.truncate()
        self._lengths.clear()
        self._partial.clear()
        self._upto = upto or self._upto
        self._folds = self._folds if folds is None else folds

    def write(
        self,
        data: bytes,
        columns: FrameColumns,
        after: Position | None = None,
        upto: Position | None = None,
    ) -> None:
        """Store the table's rows among some frames, those in (``after``, ``upto``]."""
        upto = self._upto if upto is None else upto
        taken = (columns.op < FIRST_CONTROL_OP) & (columns.source_id == self._source_id)
        if not self._truncates:
            taken &= columns.op != Op.TRUNCATE
        if after is not None:
            taken &= _is_after(columns, after)
        if upto is not None:
            taken &= ~_is_after(columns, upto)
        partial = taken & ((columns.flags & Flag.PARTIAL) != 0)
        self._partial.update(columns.key_hash[partial].tolist())
        if taken.all():
            self._add(data)
        elif taken.any():
            view, offset = memoryview(data), columns.offset[taken].tolist()
            lengths = columns.length[taken].tolist()
            pairs = zip(offset, lengths, strict=True)
            self._add(b"".join(view[at : at + length] for at, length in pairs))

    def _add(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # An OSError would count as one of the connection, and the request would be repeated.
            raise StoreError(
                f"{tempfile.gettempdir()} cannot store the {len(data)} bytes of an answer: {error}"
            ) from error
        self._lengths.append(len(data))

    def blocks(
        self,
    ) -> Iterator[tuple[npt.NDArray[np.uint8], FrameColumns, npt.NDArray[np.int64]]]:
        """All stored frames."""
        self._file.seek(0)
        for length in self._lengths:
            data = np.frombuffer(self._file.read(length), dtype=np.uint8)
            columns = frame_format.scan(data, verify=False)
            yield data, columns, np.arange(len(columns))

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


def _filters(requested: Range) -> dict[str, str]:
    found = {"partition": requested.partition, "ops": requested.ops}
    return {name: value for name, value in found.items() if value}


def _is_after(columns: FrameColumns, position: Position) -> npt.NDArray[np.bool_]:
    scn, seq = columns.scn, columns.seq
    later: npt.NDArray[np.bool_] = (scn > position.scn) | (
        (scn == position.scn) & (seq > position.seq)
    )
    return later


def _position(columns: FrameColumns, index: int) -> Position:
    return Position(int(columns.scn[index]), int(columns.seq[index]))


def _blocks(answer: CallAnswer, server: str) -> Iterator[tuple[bytes, FrameColumns]]:
    """The whole frames of an answer as they come; an error frame is raised.

    Raises:
        ServerUnavailable: it broke off.
    """
    splitter = FrameSplitter()
    while True:
        chunk = answer.read(READ_BYTES)
        if not chunk:
            break
        data = splitter.feed(chunk)
        if data:
            columns = frame_format.scan(data, verify=False)
            for at in np.flatnonzero(columns.op == Op.ERROR).tolist():
                one = frame_format.trusted_frame(memoryview(data), int(columns.offset[at]))
                raise from_error_frame(bytes(one.after or b""))
            yield data, columns
    if splitter.pending_bytes:
        raise ServerUnavailable(f"{server} ended its answer within a frame")


def _check_clock(theirs: str | None, ours: str) -> None:
    if theirs is not None and theirs != ours:
        raise ClockMismatch(f"the range belongs to the clock {ours}, the server's is {theirs}")
