"""Bringing a log to the store that it shares with the logs of other servers.

A log that another server's runs have overtaken drops what they have, and takes over the record of
the server that writes the store.  What the log has after the runs stays: the relays' stream is the
same for all.
"""

from __future__ import annotations

from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_recording import IDENTITY, notes_at
from databus.bootstrap.runs.log_record import LogRecord, read_record, read_schemas
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.common.checkpoint import Position, decode_position
from databus.common.errors import ClockMismatch, StoreError


def adopt(log: HotLog, store: Store, database: str, now_us: int) -> None:
    """Let ``log`` continue the runs of ``store``, with their record; nothing before the first run.

    The caller holds the lease of the log.  An interrupted call is repeated.

    Raises:
        StoreError: the store cannot be read, or is of another database or an earlier release.
        ClockMismatch: the log and the store have different clocks.
    """
    manifest = store.read()
    if not manifest.record:
        return
    record = read_record(store.storage, manifest.record)
    stop = _stop_of(store, manifest, record)
    if record.database != database:
        raise StoreError(f"{store.url} holds the database {record.database}, not {database}")
    if log.is_new():
        notes = {**notes_at(stop, record.notes), IDENTITY: record.log}
        schemas = read_schemas(store.storage, record)
        log.bind(database, record.clock, stop, notes=notes, schemas=schemas)
        return
    state = log.state()
    if state.clock != record.clock:
        raise ClockMismatch(
            f"the log in {log.folder} is of the clock {state.clock}, {store.url} of "
            f"{record.clock}; move the folder away to begin again"
        )
    if state.window < stop:
        # The log skips what it lacks, and with it the announcements of schemas.
        log.add_schemas(read_schemas(store.storage, record))
    notes = {**notes_at(max(state.window, stop), record.notes), IDENTITY: record.log}
    for name, note in notes.items():
        if log.note(name) != note:
            log.put_note(name, note)
    if state.start < stop:
        log.drop_until(stop, now_us)


def _stop_of(store: Store, manifest: Manifest, record: LogRecord) -> Position:
    """Where the runs end; after a gap without a copy there are none, and a new log begins."""
    if manifest.stop is not None:
        return manifest.stop
    if "origin" not in record.notes:
        raise StoreError(f"{store.url} has no runs, and its record has no origin")
    return decode_position(record.notes["origin"])
