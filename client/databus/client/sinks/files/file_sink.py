"""Changes as files by date, with marks that say up to where they are complete."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from databus.client.sinks.files.file_formats import FilePart
from databus.client.sinks.files.file_store import FileStore
from databus.client.sinks.sink import Sink, SinkContext
from databus.client.sinks.sink_batch import BEGINNING, SinkBatch
from databus.common.checkpoint import Checkpoint, OnlineCheckpoint, Position, decode, encode
from databus.common.errors import SinkRefused, SinkUnavailable
from databus.common.schema.source_schema import SourceSchema

_MOST_PARTS = 200_000


class FileFormat(Protocol):
    """How changes become the bytes of a file."""

    extension: str

    def parts(self, batch: SinkBatch) -> Any:
        """The changes of a batch as ``FilePart``."""

    def encode(self, schema: SourceSchema, contents: Any) -> bytes:
        """The bytes of a file with these contents."""


class FileSink(Sink):
    """Writes each commit as files: ``DATE/SCN-COMMIT-NUMBER-TARGET-VERSION.ndjson``.

    The names sort in commit order.  ``DATE/SCN.RESOLVED`` states that every change at or below the
    SCN lies in files whose names sort before it.  The object ``_databus/NAME.json`` has the
    checkpoint and the number of the commit.

    Delivery: exactly once for a reader that reads up to the newest resolved mark.  If the answer to
    a commit in a bootstrap is lost, its rows are there twice.

    Invariants:
        I1. A commit takes effect by replacing ``_databus/NAME.json``.  Before the first file of a
            commit is written, that object names the commit's files as pending.
        I2. ``open`` and ``rollback`` delete the pending files: none of an unfinished commit stays.
        I3. A resolved mark is written last, so it is never early.

    Owner: the sink's thread; one process for each name.
    Raises: SinkUnavailable, SinkRefused.
    """

    stores_checkpoint: ClassVar[bool] = True
    default_target: ClassVar[str] = "{source}"

    def __init__(
        self,
        store: FileStore,
        form: FileFormat,
        *,
        resolved_every_s: float = 10.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resolved_every_s = resolved_every_s
        self._now_s = now_s
        self._marked_s = float("-inf")
        self._store = store
        self._form = form
        self._state_path = ""
        self._state: dict[str, Any] = {}
        self._open_files: dict[tuple[str, int], list[FilePart]] = {}
        self._pending: list[str] = []
        self._part_count = 0
        # Up to where rows that come again are there already.
        self._committed: Position | None = None
        self._opened_at = BEGINNING

    def open(self, context: SinkContext) -> Checkpoint | None:
        """Read the state, and remove what an unfinished commit left."""
        self._state_path = f"_databus/{context.name}.json"
        self._open_files.clear()
        self._committed = None
        self._read_state()
        stored = self._state["checkpoint"]
        checkpoint = None if stored is None else decode(json.dumps(stored))
        self._opened_at = checkpoint.position if checkpoint else BEGINNING
        return checkpoint

    def write(self, batch: SinkBatch) -> None:
        """Gather the changes by file."""
        if self._committed is not None:
            batch = batch.after(self._committed, self._opened_at)
        for part in self._form.parts(batch):
            self._open_files.setdefault((part.target, part.schema.fingerprint), []).append(part)
            self._part_count += 1
        if self._part_count >= _MOST_PARTS:
            self._write_files()

    def commit(self, checkpoint: Checkpoint) -> None:
        """Write the files, then the state, then the mark."""
        self._write_files()
        has_files = bool(self._pending)
        document = json.loads(encode(checkpoint))
        if self._pending or document != self._state["checkpoint"]:
            number = self._state["commit"] + bool(self._pending)
            self._put_state({"commit": number, "checkpoint": document})
        self._pending = []
        is_due = has_files or self._now_s() - self._marked_s >= self._resolved_every_s
        if isinstance(checkpoint, OnlineCheckpoint) and is_due:
            self._marked_s = self._now_s()
            date = self._state.get("date", "1970-01-01")
            mark = f"{date}/{checkpoint.position.scn:020}.RESOLVED"
            self._store.put(mark, json.dumps({"resolved": document}).encode())

    def rollback(self) -> None:
        """Delete what the commit has written so far, unless it took effect."""
        self._open_files.clear()
        self._part_count = 0
        self._read_state()
        stored = self._state["checkpoint"]
        checkpoint = None if stored is None else decode(json.dumps(stored))
        if isinstance(checkpoint, OnlineCheckpoint):
            self._committed = checkpoint.position

    def close(self) -> None:
        """Forget what is not committed."""
        self._open_files.clear()

    def _read_state(self) -> None:
        try:
            data = self._store.get(self._state_path)
            self._state = json.loads(data) if data else {"commit": 0, "checkpoint": None}
            self._remove_pending()
        except OSError as error:
            raise SinkUnavailable(f"{self._state_path} cannot be read: {error}") from error
        except ValueError as error:
            raise SinkRefused(f"{self._state_path} is not a state of this sink: {error}") from error

    def _write_files(self) -> None:
        if not self._open_files:
            return
        files: list[tuple[str, list[FilePart]]] = []
        for parts in self._open_files.values():
            path = self._path_of(parts[0], len(self._pending) + len(files))
            files.append((path, parts))
        self._put_state(self._state | {"pending": [*self._pending, *(path for path, _ in files)]})
        self._pending = list(self._state["pending"])
        for path, parts in files:
            self._store.put(
                path, self._form.encode(parts[0].schema, [part.content for part in parts])
            )
        self._open_files.clear()
        self._part_count = 0

    def _path_of(self, first: FilePart, number: int) -> str:
        committed = dt.datetime.fromtimestamp(first.commit_us / 1_000_000, dt.UTC)
        # The date never goes back, so that paths sort as positions do.
        date = max(committed.date().isoformat(), self._state.get("date", ""))
        self._state["date"] = date
        name = f"{first.first_scn:020}-{self._state['commit'] + 1:08}-{number:04}"
        target = quote(first.target, safe="._")
        version = f"{first.schema.fingerprint:016x}"
        return f"{date}/{name}-{target}-{version}.{self._form.extension}"

    def _put_state(self, state: dict[str, Any]) -> None:
        date = self._state.get("date")
        state = state | ({"date": date} if date else {})
        self._store.put(self._state_path, json.dumps(state).encode())
        self._state = state

    def _remove_pending(self) -> None:
        pending = self._state.get("pending", [])
        for path in pending:
            self._store.delete(path)
        if pending:
            self._put_state({key: one for key, one in self._state.items() if key != "pending"})
        self._pending = []
