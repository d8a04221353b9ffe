"""A database in the bootstrap server: its log, its runs, its schemas, its seeding.

Everything is read from the database's folder; writer and applier write it, in this process or
in others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from databus.bootstrap.log import log_handover
from databus.bootstrap.log.hot_log import FOLDER as LOG_FOLDER
from databus.bootstrap.log.hot_log import HotLog, LogState
from databus.bootstrap.log.seeding import GONE, SEEDED, is_whole
from databus.bootstrap.reading.frame_ranges import at_time, before_time
from databus.bootstrap.runs.apply_progress import applier_document
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.open_readers import OpenReaders
from databus.bootstrap.runs.open_run import FileSlot
from databus.common.checkpoint import ORIGIN, AtTime, Position, decode_position
from databus.common.errors import FormatError, LogTooYoung, NotSeeded, StoreError
from databus.common.filters.stream_filter import StreamFilter, matching_ids, require_sources
from databus.common.schema.source_schema import SchemaSet, SourceSchema

STALE_WRITER_S = 30.0


class OpenLogs:
    """The logs that this process has open: LMDB allows each to be opened once.

    Owner: the process; any thread may ask for a log.  Two that opened one at once would wait for
    each other inside LMDB for ever.  With ``writes`` its writer may open a log that a reader has
    opened before, so every log is opened for both from the start.
    """

    def __init__(self, *, writes: bool = False) -> None:
        self._writes = writes
        self._lock = threading.Lock()
        self._logs: dict[Path, HotLog] = {}
        self.words: dict[Path, dict[str, Any]] = {}
        """By log folder, the state that a writer in this process could not store."""

    def to_write(self, folder: Path) -> HotLog:
        """The log in ``folder``, made if there is none."""
        with self._lock:
            if folder not in self._logs:
                self._logs[folder] = HotLog(folder)
            return self._logs[folder]

    def to_read(self, folder: Path) -> HotLog:
        """The log in ``folder``.

        Raises:
            StoreError: there is none yet.
        """
        with self._lock:
            if folder not in self._logs:
                is_there = (folder / "data.mdb").exists()
                self._logs[folder] = HotLog(folder, read_only=not (self._writes and is_there))
            return self._logs[folder]

    def close(self) -> None:
        """Close all of them."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()


class StoredDatabase:
    """What the server needs to serve one database.

    Owner: one event loop.
    Raises: StoreError while there is no log yet.
    """

    def __init__(self, name: str, folder: Path, logs: OpenLogs, store: Store | None = None) -> None:
        self.name = name
        self.store = store or Store(folder)
        self.groups_read = 0
        self.groups_skipped = 0
        self.open_readers = OpenReaders(self.store.storage)
        self._log_folder = folder / LOG_FOLDER
        self._logs = logs
        self._schemas = SchemaSet()
        self._announced = 0
        self._names: tuple[int, Mapping[str, Any], list[str]] = (-1, {}, [])
        self.rows_served = 0
        self.bytes_served = 0
        self.requests = 0
        self.readers = 0

    @property
    def log(self) -> HotLog:
        """The hot log."""
        return self._logs.to_read(self._log_folder)

    @property
    def is_ready(self) -> bool:
        """Whether there is a log with a clock."""
        return self.unready_reason() is None

    def unready_reason(self) -> str | None:
        """Why there is no log with a clock: it does not exist yet, or its file is damaged."""
        try:
            if not self.log.is_new():
                return None
        except FormatError as error:
            return error.message
        except StoreError:
            pass
        return f"the log of {self.name} has not begun"

    def state(self) -> LogState:
        """The log's state."""
        return self.log.state()

    def schemas(self) -> SchemaSet:
        """All versions that the log has by now."""
        announced = self.log.schemas()
        for schema in announced[self._announced :]:
            self._schemas.announce(schema)
        self._announced = len(announced)
        return self._schemas

    def schema_of(self, fingerprint: int) -> SourceSchema:
        """The schema of a frame, or UnknownSchema."""
        if fingerprint not in self._schemas:
            self.schemas()
        return self._schemas.by_fingerprint(fingerprint)

    def seeding(self) -> Mapping[str, Mapping[str, Any]]:
        """By source: its state and dump."""
        return self.log.note("seeding") or {}

    def source_names(self) -> list[str]:
        """All sources that are known by a schema or are being seeded."""
        schemas, seeding = self.schemas(), self.seeding()
        revision, known, names = self._names
        if revision != schemas.revision or known is not seeding:
            names = sorted({*schemas.sources, *seeding})
            self._names = schemas.revision, seeding, names
        return names

    def source_ids(self, stream_filter: StreamFilter) -> npt.NDArray[np.uint32]:
        """The numbers of the sources that the filter takes."""
        return matching_ids(self.source_names(), stream_filter)

    def require_sources(
        self, patterns: tuple[str, ...], granted: tuple[str, ...] | None = None
    ) -> list[str]:
        """The known sources that match, or UnknownSource; see ``stream_filter.require_sources``."""
        return require_sources(self.name, self.source_names(), patterns, granted)

    def require_seeded(
        self, patterns: tuple[str, ...], granted: tuple[str, ...] | None = None
    ) -> None:
        """Refuse a reader that needs whole tables while one of them is not there yet.

        Raises:
            NotSeeded: with the sources that are missing.
        """
        wanted = self.require_sources(patterns, granted)
        seeding = self.seeding()
        states = {name: seeding.get(name, {}).get("state") for name in wanted}
        # A glob does not request tables that cannot be read any more; their names do.
        gone = {name for name, state in states.items() if state == GONE and name not in patterns}
        missing = [n for n, state in states.items() if state != SEEDED and n not in gone]
        if missing or not wanted:
            raise NotSeeded(
                f"{self.name}: {len(missing)} of {len(wanted)} requested sources are not whole "
                f"yet: {', '.join(missing[:5]) or 'none is known'}",
                database=self.name,
                sources=missing,
            )

    def require_whole(self, names: list[str], at: Position) -> None:
        """Refuse the state at a position before a source's rows had all been read.

        Raises:
            LogTooYoung: with the position from which on the sources are whole.
        """
        whole = self._whole_from(names)
        if at < whole:
            raise LogTooYoung(
                f"{self.name}: the requested sources are whole from {whole} on, not at {at}",
                oldest=whole.to_json(),
            )

    def _whole_from(self, names: list[str]) -> Position:
        """Where the dumps that seeded these sources ended."""
        seeding = self.seeding()
        ends = [seeding.get(name, {}).get("end") for name in names]
        return max((decode_position(end) for end in ends if end), default=ORIGIN)

    def origin(self) -> Position | None:
        """Where the log began, or restarted after a gap; None if that was not recorded."""
        noted = self.log.note("origin")
        return decode_position(noted) if noted else None

    def resolved(self, point: AtTime, exact: bool, slot: FileSlot) -> Position:
        """The position of a commit time: everything committed up to it is at or before.

        Raises:
            LogTooYoung: see ``frame_ranges.at_time``.
        """
        with contextlib.closing(slot):
            return at_time(self.store, self.log, point.commit_us, exact=exact, slot=slot)

    def before_time(self, commit_us: int, slot: FileSlot) -> Position:
        """Where a reader begins that requests all windows committed then or later.

        Raises:
            LogTooYoung: see ``frame_ranges.before_time``.
        """
        with contextlib.closing(slot):
            return before_time(self.store, self.log, commit_us, slot)

    # -- documents ----------------------------------------------------------------------

    def register_document(
        self, patterns: tuple[str, ...], granted: tuple[str, ...] | None = None
    ) -> dict[str, Any]:
        """All schema versions of the sources that match; see ``require_sources``."""
        wanted = set(self.require_sources(patterns, granted))
        schemas = self.schemas()
        return {
            "database": self.name,
            "clock": self.state().clock,
            "schemas": [
                {
                    "source": schema.source,
                    "source_id": schema.source_id,
                    "fingerprint": f"{schema.fingerprint:016x}",
                    "version": schemas.version(schema),
                    "schema": schema.to_json(),
                }
                for schema in schemas
                if schema.source in wanted
            ],
        }

    def range_document(self) -> dict[str, Any]:
        """Name, clock and range, as in /v1/databases."""
        return self._range_document(*self._manifest())

    def _manifest(self) -> tuple[Manifest, str | None]:
        """The manifest, and the error if it lacks what the log has dropped."""
        try:
            return log_handover.read(self.log, self.store)[1], None
        except StoreError as error:
            return self.store.read(), error.message

    def _range_document(self, manifest: Manifest, error: str | None) -> dict[str, Any]:
        state = self.state()
        chain = manifest.chain
        return {
            "name": self.name,
            "clock": state.clock,
            "prev": (chain[0].start if chain else state.start).to_json(),
            "max": state.window.to_json(),
            "snapshot": manifest.snapshot.to_json() if manifest.base else None,
            "state": self.seeding_state() if error is None else "failing",
            **({} if error is None else {"error": error}),
        }

    def seeding_state(self) -> str:
        """``seeded`` when every known source is whole, ``seeding`` before."""
        seeding = self.seeding()
        return SEEDED if is_whole(seeding) else "seeding"

    def status_document(self) -> dict[str, Any]:
        """The whole status of the database at this server."""
        if not self.is_ready:
            return {"name": self.name, "state": "starting", "writer": self.writer_document()}
        manifest, error = self._manifest()
        state = self.state()
        return {
            **self._range_document(manifest, error),
            "log": {
                "start": state.start.to_json(),
                "window": state.window.to_json(),
                "checkpoint": state.last.to_json(),
                "frame_bytes": state.frame_bytes,
                "map_bytes": self.log.map_bytes(),
                "appends": self.log.append_count,
                "appended_windows": self.log.window_count,
            },
            "manifest": manifest.version,
            "runs": [run.summary() for run in manifest.runs],
            "retired_runs": len(manifest.retired),
            "unfinished": manifest.unfinished.summary() if manifest.unfinished else None,
            "applies": list(manifest.applies[-10:]),
            "applier": applier_document(self.store.storage),
            "store": self.store.url,
            "seeding": dict(self.seeding()),
            "suspended": self.log.note("suspended") or {},
            "gaps": self.log.note("gaps") or [],
            "writer": self.writer_document(),
            "served": {
                "requests": self.requests,
                "readers": self.readers,
                "rows": self.rows_served,
                "row_groups_read": self.groups_read,
                "row_groups_skipped": self.groups_skipped,
                "bytes": self.bytes_served,
            },
        }

    def writer_document(self) -> dict[str, Any]:
        """The state that the log writer reported last."""
        if reported := self._logs.words.get(self._log_folder):
            return dict(reported)
        try:
            document = dict(self.log.note("writer") or {})
        except FormatError as error:
            return {"state": "failing", "error": error.message}
        except StoreError:
            return {"state": "down"}
        age_s = time.time() - document.get("at_us", 0) / 1e6
        if age_s > STALE_WRITER_S:
            document["state"] = "down"
        return document

    def start_position(self, names: list[str]) -> Position:
        """The snapshot's position; the origin while it does not hold these sources whole."""
        snapshot = self.store.read().snapshot
        seeding = self.seeding()
        seeded = all(seeding.get(name, {}).get("state") == SEEDED for name in names)
        return snapshot if seeded and self._whole_from(names) <= snapshot else ORIGIN

    def target_position(self) -> Position:
        """Where a bootstrap ends that starts now."""
        return self.state().window


def is_origin(position: Position) -> bool:
    """Whether a start point means "I have nothing": scn 0 with any seq."""
    return position.scn == ORIGIN.scn
