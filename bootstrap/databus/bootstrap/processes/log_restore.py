"""Restoring: a new hot log for runs whose own log was lost with its machine.

The new log begins where the runs end, and has the record that the manifest names: clock, schemas,
seeding, gaps.  Everything after that is the log writer's usual work: it requests the rest from the
relay, or records a gap and repairs the tables.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.hot_log import FOLDER, HotLog
from databus.bootstrap.log.log_recording import IDENTITY, notes_at
from databus.bootstrap.log.seeding import SEEDED
from databus.bootstrap.processes.writer_leases import writer_leases
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.log_record import (
    LogRecord,
    read_record,
    read_schemas,
    write_record,
    write_schemas,
)
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.parquet_runs import Run, RunFile
from databus.bootstrap.runs.run_storage import MANIFEST
from databus.common.checkpoint import Position
from databus.common.config import BootstrapConfig
from databus.common.errors import DatabusError, StoreError


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restored log continues with."""

    database: str
    stop: Position
    schemas: int
    waiting: tuple[str, ...]
    """Sources that are not whole at ``stop``: dumps that had not ended, repairs after a gap."""


def restore_logs(config: BootstrapConfig, copy: Path | None = None) -> Iterator[Restored]:
    """Restore the log of each stored database, or of those that the configuration names.

    With ``copy`` the stores are first copied from that folder, a copy of a ``data_dir``.  A
    database that cannot be restored does not stop the others: its error, the first, is raised
    when all are done.  What was restored before by an interrupted call is left as it is.

    Raises:
        StoreError: there is nothing to restore, or a log has content.
    """
    stores = Stores(config)
    if copy is not None:
        found = [path.parent.name for path in copy.glob(f"*/{MANIFEST}")]
        origins = {name: Store(copy / name) for name in found}
    else:
        origins = stores.stored()
    names = config.databases or tuple(sorted(origins))
    if not names:
        raise StoreError(
            f"{copy or config.store or config.data_dir} holds no database: no {MANIFEST} is there"
        )
    failures = []
    for name in names:
        store, folder = stores.store(name), Path(config.data_dir) / name
        try:
            with writer_leases(folder, store):
                if copy is not None:
                    copy_store(origins.get(name, Store(copy / name)), store, folder)
                restored = restore_log(name, folder, store)
        except DatabusError as error:
            failures.append(error)
        else:
            yield restored
    if failures:
        raise failures[0]


def restore_log(database: str, folder: Path, store: Store) -> Restored:
    """Make a new log in ``folder`` that continues the runs of ``store``.

    The caller holds the writer's leases.  The log appears with all of its content in one commit,
    after the manifest has its identity; an interrupted call is repeated.

    Raises:
        StoreError: the log has content, the store is not whole, or has no record.
    """
    manifest = store.read()
    stop = manifest.stop
    if stop is None:
        raise StoreError(
            f"{store.url} has no runs of {database}: nothing was sealed yet. Start "
            "`databus bootstrap`; it dumps the tables"
        )
    store.require_reach(manifest, store.dropped())
    if not manifest.record:
        raise StoreError(
            f"{store.url}/{MANIFEST} names no record of the log: an earlier release wrote it. "
            "Start `databus bootstrap` once where the log is, or start again with an empty store"
        )
    record = read_record(store.storage, manifest.record)
    schemas = read_schemas(store.storage, record)
    if record.database != database:
        raise StoreError(f"{store.url} holds the database {record.database}, not {database}")
    notes = notes_at(stop, record.notes)
    states = notes.get("seeding", {})
    waiting = tuple(name for name, one in states.items() if one["state"] != SEEDED)
    restored = Restored(database, stop, len(schemas), waiting)
    log = HotLog(folder / FOLDER)
    try:
        if not log.is_new():
            _require_restored(log, record, stop)
            return restored
        _require_files(store, manifest)
        identity = uuid.uuid4().hex
        name = write_record(store.storage, replace(record, log=identity))
        store.switch(lambda found: replace(found, record=name))
        failpoints.reach("restore.manifest_switched")
        notes = {**notes, IDENTITY: identity}
        log.bind(database, record.clock, stop, notes=notes, schemas=schemas)
    finally:
        log.close()
    return restored


def _require_restored(log: HotLog, record: LogRecord, stop: Position) -> None:
    """Refuse a log with content; one that was restored and that no writer has opened has none."""
    state = log.state()
    is_ours = log.note(IDENTITY) == record.log and log.note("writer") is None
    if not is_ours or not state.start == state.last == stop:
        raise StoreError(
            f"the log in {log.folder} has content: {state.database} up to {state.last}. Start "
            f"`databus bootstrap` to continue with it, or move {log.folder.parent} away and "
            "restore again"
        )


def copy_store(source: Store, target: Store, folder: Path) -> None:
    """Copy runs, record and manifest into an empty store, the manifest last.

    A run that has retired is copied if all of its files are there.  An unfinished merge is not: the
    next applier starts it again.

    Raises:
        StoreError: the source is not whole, or the target has other runs.
    """
    if source.url == target.url:
        raise StoreError(f"{source.url} cannot be copied to itself; leave --from out")
    manifest = source.read()
    source.require_reach(manifest, source.dropped())
    retired = tuple(one for one in manifest.retired if not _missing(source, (one.run,)))
    copied = replace(manifest, retired=retired, fences=(), switches=(), unfinished=None)
    found = target.read()
    if found.runs or (folder / FOLDER / "data.mdb").exists():
        if {run.id for run in found.runs} == {run.id for run in copied.runs}:
            return  # An interrupted call has copied them.
        raise StoreError(
            f"{target.url} has runs or a log already; name an empty data_dir and an empty store"
        )
    _require_files(source, manifest)
    for run_folder, files in _files_of((*copied.runs, *(one.run for one in retired))).items():
        _copy_files(source, target, run_folder, files)
        failpoints.reach("restore.one_copied")
    record = ""
    if manifest.record:
        found_record = read_record(source.storage, manifest.record)
        schemas = write_schemas(target.storage, read_schemas(source.storage, found_record))
        record = write_record(target.storage, replace(found_record, schemas=schemas))
    target.switch(
        lambda now: replace(copied, fences=now.fences, version=now.version, record=record)
    )


def _copy_files(source: Store, target: Store, run_folder: str, files: list[RunFile]) -> None:
    readable, writable = source.files(run_folder), target.files(run_folder)
    for file in files:
        try:
            with readable.open(file.name) as reader, writable.create(file.name) as writer:
                shutil.copyfileobj(reader, writer, 1 << 20)
        except OSError as error:
            raise StoreError(
                f"{readable.location(file.name)} cannot be copied to "
                f"{writable.location(file.name)}: {error}"
            ) from error
    writable.settle([file.name for file in files])


def _require_files(store: Store, manifest: Manifest) -> None:
    """Refuse a store of which files are missing."""
    if missing := _missing(store, manifest.runs):
        raise StoreError(
            f"{store.url} lacks {len(missing)} files that {MANIFEST} {manifest.version} names, "
            f"such as {missing[0]}; restore them, or another copy of the store"
        )


def _missing(store: Store, runs: tuple[Run, ...]) -> list[str]:
    found = []
    there = set(store.storage.run_ids())
    for run_folder, files in _files_of(runs).items():
        names = set(store.files(run_folder).names()) if run_folder in there else set()
        found += [f"{run_folder}/{file.name}" for file in files if file.name not in names]
    return found


def _files_of(runs: tuple[Run, ...]) -> dict[str, list[RunFile]]:
    """The files of runs, each once, by the folder in which they lie."""
    found: dict[str, dict[str, RunFile]] = {}
    for run in runs:
        for file in run.files:
            found.setdefault(file.folder or run.id, {})[file.name] = file
    return {folder: list(files.values()) for folder, files in found.items()}
