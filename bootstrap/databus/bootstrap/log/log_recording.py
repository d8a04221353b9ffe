"""Switches of the manifest by the log writer: each names the record of the log as it is now.

A record must never be older than the runs in what makes a copy incomplete (gaps, sources that
are not whole), so that it is written before the manifest that names it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.seeding import DUMPING, REPAIRING, SEEDED
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.log_record import (
    PREFIX,
    LogRecord,
    delete_documents,
    read_record,
    write_record,
    write_schemas,
)
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.common.checkpoint import Position, decode_position
from databus.common.errors import FormatError, StoreError

IDENTITY = "log"
NOTES = ("origin", "seeding", "gaps", "suspended", "name")
"""The notes of a log that belong to its record."""


def identity_of(log: HotLog) -> str:
    """The identity of a log, which its record names; it is made at the first call."""
    found = log.note(IDENTITY)
    if found is None:
        found = uuid.uuid4().hex
        log.put_note(IDENTITY, found)
    return str(found)


def require_own(log: HotLog, store: Store, manifest: Manifest) -> LogRecord | None:
    """The record in the store, if it can be read.

    Raises:
        StoreError: it is that of another log: the store was restored elsewhere since.
    """
    if not manifest.record:
        return None
    try:
        record = read_record(store.storage, manifest.record)
    except (StoreError, FormatError):
        if store.storage.read_note(manifest.record) is None:
            return None  # The manifest was put back from a copy; the log has everything.
        raise
    if record.log != identity_of(log):
        raise StoreError(
            f"{store.url} belongs to another log than {log.folder}: it was restored on another "
            "machine. Run one of the two. To continue here, move this folder away and run "
            "`databus restore`"
        )
    return record


def switch_recorded(log: HotLog, store: Store, change: Callable[[Manifest], Manifest]) -> Manifest:
    """Switch the manifest by ``change``, and to the record of the log as it is now.

    The caller holds the writer's lease.

    Raises:
        StoreError: the store refuses, or it belongs to another log.
    """
    before = store.read()
    current = require_own(log, store, before)
    facts = _facts_of(log)
    name, old = before.record, set[str]()
    if current is None or facts != _facts_in(current):
        # Listed before the switch: what a later writer stores is not among them.
        old = set(store.storage.note_names(PREFIX))
        record = LogRecord(*facts[:-1], _schemas_of(log, store, current), facts[-1])
        name = write_record(store.storage, record)
        failpoints.reach("seal.record_written")
        old -= {name, record.schemas}
    manifest = store.switch(lambda found: replace(change(found), record=name))
    delete_documents(store.storage, old)
    return manifest


def record_notes(log: HotLog, store: Store) -> None:
    """Bring the record up to date if the notes changed since; nothing before the first run.

    Raises: StoreError.
    """
    manifest = store.read()
    if manifest.runs:
        current = require_own(log, store, manifest)
        if current is None or _facts_of(log) != _facts_in(current):
            switch_recorded(log, store, lambda found: found)


_Facts = tuple[str, str, str, dict[str, Any], int]
"""Identity, database, clock, notes, number of schemas."""


def _facts_in(record: LogRecord) -> _Facts:
    notes = dict(record.notes)
    return (record.log, record.database, record.clock, notes, record.schema_count)


def _facts_of(log: HotLog) -> _Facts:
    state = log.state()
    notes = {name: note for name in NOTES if (note := log.note(name)) is not None}
    if "seeding" in notes:
        notes["seeding"] = {name: _settled(one) for name, one in notes["seeding"].items()}
    return (identity_of(log), state.database, state.clock, notes, len(log.schemas()))


def _schemas_of(log: HotLog, store: Store, current: LogRecord | None) -> str:
    """The document with the log's schemas; schemas are only ever added."""
    schemas = log.schemas()
    if current is not None and current.schema_count == len(schemas):
        return current.schemas
    return write_schemas(store.storage, schemas)


def _settled(one: Mapping[str, Any]) -> dict[str, Any]:
    """A source's state without the counters that change while it is dumped."""
    left_out = () if one["state"] == SEEDED else ("rows", "tries", "again_us", "error", "had")
    return {key: value for key, value in one.items() if key not in left_out}


def notes_at(stop: Position, notes: Mapping[str, Any]) -> dict[str, Any]:
    """The notes of a log that ends at ``stop``: the frames after that are not in it."""
    gaps = [one for one in notes.get("gaps", []) if decode_position(one["from"]) < stop]
    states = {name: _state_at(stop, one) for name, one in notes.get("seeding", {}).items()}
    if any(one["state"] != SEEDED for one in states.values()):
        # The rows of a repair may be among those that are to come again.
        gaps = [{k: v for k, v in one.items() if k != "repaired_us"} for one in gaps]
    return {**notes, "gaps": gaps, "seeding": states}


def _state_at(stop: Position, one: Mapping[str, Any]) -> dict[str, Any]:
    """A source whose last rows lie after ``stop`` is whole once these have come again."""
    if one["state"] != SEEDED or not one.get("end") or decode_position(one["end"]) <= stop:
        return dict(one)
    if "dump" in one:
        return {"state": DUMPING, "dump": one["dump"], "end": one["end"], "rows": 0}
    return {"state": REPAIRING}
