"""Sealing: turning the whole windows of the hot log into a segment.

Frames are cut into Arrow columns without parsing single events: the values that LMDB gives
are already the frame column's buffer.  The order is: files, manifest, then the log drops.
A crash between any two leaves frames in both stores, and ``finish`` removes the duplicates.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from databus.bootstrap.log import log_handover
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_recording import record_notes, require_own, switch_recorded
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.parquet_runs import PARQUET, ROW_GROUP_BYTES, Run, RunKind, describe
from databus.bootstrap.runs.run_ids import new_run_id
from databus.client.splits.frame_tables import SCHEMA, as_table
from databus.common.checkpoint import Position
from databus.common.errors import StoreError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Flag, FrameColumns, Op

FILE_NAME = "part-00000.parquet"


def seal(log: HotLog, store: Store, now_us: int) -> Run | None:
    """Move the log's whole windows into a new segment; None if there are none.

    The caller holds the writer's lease.

    Raises:
        StoreError: a file cannot be written, or the manifest lacks what was sealed before; the
            log still has everything.
    """
    state = log.state()
    if not state.frame_bytes or state.window <= state.start:
        return None
    failpoints.reach("seal.begun")
    run = _write_segment(log, store, state.start, state.window, now_us)
    failpoints.reach("seal.file_written")
    if run is None:
        return None

    def with_run(manifest: Manifest) -> Manifest:
        log_handover.require(log, store, manifest)
        return manifest.with_changes(add=run, now_us=now_us)

    switch_recorded(log, store, with_run)
    failpoints.reach("seal.manifest_switched")
    log.drop_until(run.stop, now_us)
    failpoints.reach("seal.log_dropped")
    store.note_dropped(run.stop)
    return run


def finish(log: HotLog, store: Store, now_us: int) -> Manifest:
    """Complete what a crash interrupted; returns the resulting manifest.

    The log may still hold what a segment has: the log drops it.  The chain may still reach back
    over a gap that the log has recorded: the chain is retired, because nothing before a gap can
    be combined with what comes after it.

    Raises:
        StoreError: the manifest lacks what the log has dropped; nothing was deleted.
    """
    manifest = store.read()
    if not log.is_new():
        log_handover.require(log, store, manifest)
        require_own(log, store, manifest)
        stop = manifest.stop
        if stop is not None and log.state().start < stop:
            log.drop_until(stop, now_us)
        store.note_dropped(log_handover.dropped(log, store, manifest))
        if stop is not None and log_handover.begins_here(log):
            manifest = switch_recorded(log, store, lambda found: found.without(found.runs, now_us))
        record_notes(log, store)
    store.sweep("s")
    return manifest


def _write_segment(
    log: HotLog, store: Store, start: Position, stop: Position, now_us: int
) -> Run | None:
    run_id = new_run_id(RunKind.SEGMENT, stop)
    files = store.files(run_id)
    partial_rows = 0
    rows = 0
    last_commit_us = 0
    truncates: dict[int, Position] = {}
    try:
        with files.create(FILE_NAME) as file, _writer(file) as writer:
            at = start
            while at < stop:
                piece = log.read(at, stop, ROW_GROUP_BYTES)
                if piece is None:
                    raise StoreError(f"the log lost frames after {at} while they were sealed")
                if piece.data:
                    columns = frame_format.scan(piece.data)
                    writer.write_table(as_table(piece.data, columns), row_group_size=1 << 40)
                    partial_rows += int(((columns.flags & Flag.PARTIAL) != 0).sum())
                    rows += len(columns)
                    last_commit_us = max(last_commit_us, int(columns.commit_us.max()))
                    _note_truncates(columns, truncates)
                at = piece.stop
        if rows:
            files.settle([FILE_NAME])
    except (OSError, pa.ArrowException, StoreError) as error:
        with contextlib.suppress(StoreError):
            store.storage.delete_run(run_id)
        kind = type(error) if isinstance(error, StoreError) else files.refusal
        raise kind(
            f"segment {run_id} cannot be written to {files.location(FILE_NAME)}: {error}"
        ) from error
    if not rows:
        store.storage.delete_run(run_id)
        return None
    return Run(
        id=run_id,
        kind=RunKind.SEGMENT,
        start=start,
        stop=stop,
        files=(describe(files, FILE_NAME),),
        created_us=now_us,
        partial_rows=partial_rows,
        truncates=tuple(sorted(truncates.items())),
        last_commit_us=last_commit_us,
    )


def _writer(file: object) -> pq.ParquetWriter:
    return pq.ParquetWriter(file, SCHEMA, **PARQUET)


def _note_truncates(columns: FrameColumns, truncates: dict[int, Position]) -> None:
    for index in np.flatnonzero(columns.op == Op.TRUNCATE).tolist():
        source = int(columns.source_id[index])
        truncates[source] = Position(int(columns.scn[index]), int(columns.seq[index]))
