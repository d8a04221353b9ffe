"""A database as one HTTP worker sees it: its ring, its schemas and its fetcher's state.

Everything here is read from the database's folder; the fetcher writes it.  The folder may be
empty when the worker starts; the view looks for missing files again when it needs them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.common.access.grants import EVERYTHING, Access
from databus.common.checkpoint import Position
from databus.common.config import DatabaseConfig
from databus.common.errors import (
    BadRequest,
    DatabusError,
    FormatError,
    SourceUnavailable,
    StoreError,
    UnknownDatabase,
)
from databus.common.filters.stream_filter import (
    StreamFilter,
    matches,
    matching_ids,
    require_sources,
)
from databus.common.frame.frame_format import source_id
from databus.common.schema.source_schema import SchemaSet, SourceSchema
from databus.common.spelling import nearest
from databus.common.table_state import CaptureState, table_state_of
from databus.relay.columns.projection import Projections
from databus.relay.dumps.dump_records import DumpBook
from databus.relay.processes.wakeup import WakeupReceiver
from databus.relay.ring.data_folder import DatabaseFolder, read_document, read_leader
from databus.relay.ring.ring import Ring
from databus.relay.ring.ring_format import RING_NAME, RingState
from databus.relay.ring.ring_reader import RingReader
from databus.relay.ring.schema_registry import RegistryReader
from databus.relay.serving.extents import Extents
from databus.relay.serving.header_cache import HeaderCache
from databus.relay.serving.row_filter import RowFilters
from databus.relay.serving.shared_reads import SharedReads

STALE_FETCHER_S = 10.0
SHOWN_DUMPS = 20
LOOK_EVERY_S = 0.5

_log = logging.getLogger("databus.relay.serving.database_view")


@dataclass(frozen=True, slots=True)
class FetcherReport:
    """The content of ``status.json``; ``age_s`` is how long ago it was written."""

    document: dict[str, Any]
    age_s: float

    @property
    def name(self) -> str:
        """The fetcher's state as reported, or ``down`` if it stopped reporting."""
        if self.age_s > STALE_FETCHER_S:
            return "down"
        return str(self.document.get("state", "starting"))


class DatabaseView:
    """What a worker needs to serve one database.

    Invariants:
        I1. A schema is known here before a frame that uses it can have been read from the
            ring, as long as ``refresh_schemas`` is called after the read.
        I2. A ring that was moved away, replaced or cut is noticed within ``LOOK_EVERY_S`` of the
            next access; nothing of it is served from then on.
        I3. After ``retire`` no reader is served, and the ring's files are closed once the last
            open answer has ended.

    Owner: one worker's event loop.
    Raises: SourceUnavailable while the fetcher has not made the ring yet; UnknownDatabase
    after ``retire``.
    """

    def __init__(self, config: DatabaseConfig, folder: DatabaseFolder, wakeup: WakeupReceiver):
        self.config = config
        self.name = config.name
        self.folder = folder
        self._leader = folder.leader
        self.wakeup = wakeup
        self._ring: RingReader | None = None
        self._look_at_s = 0.0
        self._is_retired = False
        self._answer_count = 0
        self._start_over()

    @property
    def ring(self) -> RingReader:
        """The ring, mapped when it is there."""
        if self._is_retired:
            raise UnknownDatabase(f"{self.name} is no longer served here", database=self.name)
        if self._ring is not None and time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_EVERY_S
            try:
                self._ring.require_in_place()
            except StoreError as error:
                _log.error("%s: %s", self.name, error.message)
                self._start_over()
                raise SourceUnavailable(error.message, database=self.name) from error
        if self._ring is None:
            try:
                ring = Ring.open_reader(self.folder.path)
            except (StoreError, FormatError) as error:
                if not (self.folder.path / RING_NAME).exists():
                    raise self._not_ready() from error
                raise SourceUnavailable(error.message, database=self.name) from error
            # A ring of an earlier boot may be torn: its writer repairs it first.
            if not ring.clock or not ring.is_live:
                ring.close()
                raise self._not_ready()
            self._ring = ring
        return self._ring

    def _start_over(self) -> None:
        """Close the folder's files: others may replace them."""
        self._close_ring()
        self._registry = RegistryReader(self.folder.registry)
        self._fetcher: tuple[int, dict[str, Any]] = (0, {})
        self._epoch = (0, 0)
        self._range: tuple[RingState, dict[str, str]] | None = None
        self.row_filters = RowFilters(self._registry.schemas)
        self.reads = SharedReads()
        self.extents = Extents()
        self.header_cache = HeaderCache()
        self.projections = Projections()

    @property
    def epoch(self) -> int:
        """In a cluster: the fencing number of the newest leader of whom the ring has frames."""
        try:
            changed_ns = self._leader.stat().st_mtime_ns
        except OSError:
            return 0
        if changed_ns != self._epoch[0]:
            self._epoch = (changed_ns, read_leader(self.folder)[0])
        return self._epoch[1]

    def _close_ring(self) -> None:
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _not_ready(self) -> SourceUnavailable:
        state = self.fetcher_state()
        cause = state.document.get("error")
        said = cause.get("detail") if isinstance(cause, dict) else cause
        return SourceUnavailable(
            f"the fetcher of {self.name} has not opened its source yet (state {state.name})"
            + (f": {said}" if said else ""),
            database=self.name,
        )

    @property
    def is_ready(self) -> bool:
        """Whether the ring can be served."""
        try:
            return self.ring is not None
        except SourceUnavailable:
            return False

    def close(self) -> None:
        """Close the ring and wake all tasks that wait for it."""
        self.wakeup.close()
        self._close_ring()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Around an answer that reads the ring more than once."""
        self._answer_count += 1
        try:
            yield
        finally:
            self._answer_count -= 1
            if self._is_retired and not self._answer_count:
                self.close()

    def retire(self) -> None:
        """Serve no reader any more: open answers are woken, and end."""
        self._is_retired = True
        self.wakeup.close()
        if not self._answer_count:
            self.close()

    # -- schemas --

    @property
    def schemas(self) -> SchemaSet:
        """All versions as of the last refresh."""
        return self._registry.schemas

    def refresh_schemas(self) -> int:
        """Read what the fetcher has added; returns a number that grows with each addition."""
        self._registry.refresh()
        return len(self._registry.schemas)

    def schema_of(self, fingerprint: int) -> SourceSchema:
        """The schema of a frame, or UnknownSchema."""
        return self.schemas.by_fingerprint(fingerprint)

    def source_ids(self, stream_filter: StreamFilter) -> npt.NDArray[np.uint32]:
        """The numbers of the known sources that the filter selects."""
        return matching_ids(self.schemas.sources, stream_filter)

    def require_sources(
        self, patterns: tuple[str, ...], granted: tuple[str, ...] | None = None
    ) -> list[str]:
        """The known sources that match, or UnknownSource; see ``stream_filter.require_sources``."""
        return require_sources(self.name, self.schemas.sources, patterns, granted)

    def require_columns(self, names: frozenset[str], sources: list[str]) -> None:
        """Make sure that each name is a column of one of the sources, in any version.

        Raises:
            BadRequest: one is not; the message lists the columns.
        """
        chosen = set(sources)
        known = {c.name for s in self.schemas if s.source in chosen for c in s.columns}
        for name in sorted(names - known) if known else ():
            raise BadRequest(
                f"columns: unknown column {name!r}{nearest(name, known)}; known are: "
                f"{', '.join(sorted(known))}",
                parameter="columns",
            )

    # -- documents --

    def fetcher_state(self) -> FetcherReport:
        """The fetcher's last report."""
        try:
            status = self.folder.status.stat()
            if status.st_mtime_ns != self._fetcher[0]:
                document = json.loads(read_document(self.folder.status) or b"")
                self._fetcher = status.st_mtime_ns, document if isinstance(document, dict) else {}
        except (FileNotFoundError, ValueError, FormatError):
            # It is not synced: a power loss may have torn it.
            return FetcherReport({}, 0.0)
        return FetcherReport(self._fetcher[1], time.time() - self._fetcher[0] / 1e9)

    def range_document(self) -> dict[str, Any]:
        """Name, clock and servable range, as in /v1/databases."""
        state = self.ring.snapshot()
        fetcher = self.fetcher_state()
        return {
            "name": self.name,
            "clock": self.ring.clock,
            "prev": state.prev.to_json(),
            "min": state.min.to_json(),
            "max": state.max.to_json(),
            "min_commit_us": state.min_commit_us,
            "max_commit_us": state.max_commit_us,
            "state": fetcher.name,
            "lag_us": fetcher.document.get("lag_us"),
            "resolved_us": fetcher.document.get("resolved_us"),
        }

    def range_headers(self) -> dict[str, str]:
        """The headers with the clock and the servable range, made once for each state."""
        state = self.ring.snapshot()
        if self._range is None or self._range[0] is not state:
            self._range = state, _range_headers(state, self.ring.clock)
        return dict(self._range[1])

    def dumps_document(self) -> list[dict[str, Any]]:
        """The newest dumps as last recorded, without the requested keys.

        None if the record is damaged: its fetcher reports that, and the others are shown.
        """
        names = ("id", "state", "sources", "rows", "chunks", "error", "end")
        try:
            newest = list(DumpBook(self.folder.dumps))[-SHOWN_DUMPS:]
        except DatabusError:
            return []
        documents = [dump.to_json() for dump in reversed(newest)]
        return [{name: document[name] for name in names} for document in documents]

    def sources_document(self) -> list[dict[str, Any]]:
        """Each source with its number and newest schema."""
        self.refresh_schemas()
        states = self.table_states()
        found = []
        for name in self.schemas.sources:
            latest = self.schemas.latest(name)
            if latest is not None:
                found.append(
                    {
                        "name": name,
                        "source_id": source_id(name),
                        "fingerprint": f"{latest.fingerprint:016x}",
                        "version": self.schemas.version(latest),
                        "state": states.get(name, str(CaptureState.FOLLOWED)),
                    }
                )
        return found

    def table_states(self) -> dict[str, str]:
        """The states of the tables that are not followed, by name."""
        return {one["source"]: one["state"] for one in self.tables_not_followed(())}

    def tables_not_followed(self, patterns: tuple[str, ...]) -> list[dict[str, Any]]:
        """The tables that are not followed and match, all without patterns, with the reasons."""
        tables = self.fetcher_state().document.get("tables") or ()
        return [
            table_state_of(one).to_json()
            for one in tables
            if not patterns or matches(one["source"], patterns)
        ]

    def register_document(
        self,
        patterns: tuple[str, ...],
        columns: frozenset[str] | None = None,
        access: Access = EVERYTHING,
    ) -> dict[str, Any]:
        """All schema versions of the sources that match, as readers of ``columns`` see them.

        Versions that are the same in these columns are one, under the first one's number.
        """
        self.refresh_schemas()
        sources = self.require_sources(patterns, access.sources)
        wanted = set(sources)
        found = [schema for schema in self.schemas if schema.source in wanted]
        seen = found
        if columns is not None:
            self.require_columns(columns, sources)
        shown_columns = access.columns if columns is None else columns
        if shown_columns is not None:
            seen = self.projections.of(shown_columns).learn_all(found)
        versions: dict[int, tuple[SourceSchema, int]] = {}
        for schema, shown in zip(found, seen, strict=True):
            first = versions.pop(shown.fingerprint, (shown, self.schemas.version(schema)))
            versions[shown.fingerprint] = first  # The current version comes last, as in the whole.
        return {
            "database": self.name,
            "clock": self.ring.clock,
            "tables": [
                one
                for one in self.tables_not_followed(patterns)
                if access.has_source(one["source"])
            ],
            "schemas": [
                {
                    "source": schema.source,
                    "source_id": schema.source_id,
                    "fingerprint": f"{schema.fingerprint:016x}",
                    "version": version,
                    "schema": schema.to_json(),
                }
                for schema, version in versions.values()
            ],
        }


def _range_headers(state: RingState, clock: str) -> dict[str, str]:

    def text(position: Position) -> str:
        return f"{position.scn}:{position.seq}"

    return {
        "Databus-Clock": clock,
        "Databus-Prev": text(state.prev),
        "Databus-Min": text(state.min),
        "Databus-Max": text(state.max),
    }
