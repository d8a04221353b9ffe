"""Sealing: every frame moves from the log to a segment, and stays in exactly one of them."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs import parquet_runs, run_storage
from databus.bootstrap.runs.log_record import read_record, recorded_schemas, write_record
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.open_run import OpenRun
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.checkpoint import Position
from databus.common.errors import FormatError, StoreError
from databus.common.frame.frame_format import Flag, Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.bootstrap.model import START, History, frames_of


def test_a_segment_holds_the_frames_of_the_log_byte_by_byte(log: HotLog, store: Store) -> None:
    history = History(1)
    written = history.block(40)
    log.append(written, 1)
    run = segments.seal(log, store, 7)
    assert run is not None
    assert (run.kind, run.start, run.stop) == (RunKind.SEGMENT, START, history.position)
    assert b"".join(bytes(one.bytes) for one in frames_of(store, run)) == written
    assert store.read().runs == (run,)
    assert log.state().start == run.stop
    assert log.state().frame_bytes == 0
    assert segments.seal(log, store, 8) is None


def test_the_columns_say_what_the_frames_say(log: HotLog, store: Store) -> None:
    log.append(History(2).block(30), 1)
    run = segments.seal(log, store, 7)
    assert run is not None
    table = pq.read_table(store.run_folder(run) / run.files[0].name)
    assert table.schema.names == list(parquet_runs.COLUMNS)
    for row in table.to_pylist():
        (one,) = iter_frames(row["frame"])
        assert (row["scn"], row["seq"], row["op"], row["flags"]) == (
            one.scn,
            one.seq,
            one.op,
            one.flags,
        )
        assert row["source_id"] == one.source_id
        assert row["commit_us"] == one.commit_us
        assert row["key_hash"] % 2**64 == one.key_hash
        assert row["key"] == (b"" if one.is_control else bytes(one.key))


def test_partial_rows_and_truncates_are_counted_for_the_applier(log: HotLog, store: Store) -> None:
    builder = WindowBuilder(40, 1)
    builder.event(Op.TRUNCATE, 5, 1, b"")
    builder.event(Op.UPDATE, 5, 1, b"k", after=b"x", absent=b"\x01")
    builder.event(Op.TRUNCATE, 5, 1, b"")
    builder.event(Op.TRUNCATE, 6, 1, b"")
    log.append(builder.end("t"), 1)
    run = segments.seal(log, store, 7)
    assert run is not None
    assert run.partial_rows == 1
    assert run.truncates == ((5, Position(40, 2)), (6, Position(40, 3)))
    assert [bool(one.flags & Flag.PARTIAL) for one in frames_of(store, run)].count(True) == 1


def test_the_schemas_are_recorded_with_each_seal_for_the_applier_and_a_restored_log(
    log: HotLog, store: Store
) -> None:
    first = SourceSchema("shop.pages", (Column("id", Kind.INT, nullable=False),), ("id",))
    second = SourceSchema("shop.more", (Column("id", Kind.INT, nullable=False),), ("id",))

    def seal(scn: int) -> set[str]:
        builder = WindowBuilder(scn, 1)
        builder.event(Op.UPDATE, 5, 1, b"k", after=b"x")
        log.append(builder.end("t"), 1)
        assert segments.seal(log, store, 7) is not None
        return set(store.storage.note_names("record-"))

    log.add_schemas([first])
    written = seal(40)
    assert recorded_schemas(store.storage, store.read()) == [first]
    assert seal(41) == written, "nothing is written when nothing has changed"
    log.add_schemas([first, second])
    assert len(seal(42)) == 2 and not seal(43) & written, "earlier documents are deleted"
    assert recorded_schemas(store.storage, store.read()) == [first, second]
    record = store.read().record
    content = store.storage.read_note(record)
    assert content is not None
    for torn in (b"", b"[{", b"{}", content[:-1], content.replace(b"shop", b"sho_")):
        store.storage.write_note(record, torn)
        assert recorded_schemas(store.storage, store.read()) == []
        with pytest.raises(FormatError, match="its CRC is not that of its name"):
            segments.finish(log, store, 8)
    store.storage.delete_note(record)
    segments.finish(log, store, 8)
    assert recorded_schemas(store.storage, store.read()) == [first, second], "the log has all of it"


def test_a_log_whose_store_was_restored_elsewhere_is_refused(log: HotLog, store: Store) -> None:
    log.append(History(6).block(5), 1)
    segments.seal(log, store, 1)
    record = read_record(store.storage, store.read().record)
    name = write_record(store.storage, replace(record, log="another"))
    store.switch(lambda manifest: replace(manifest, record=name))
    log.append(History(6).block(6), 1)
    for step in (segments.seal, segments.finish):
        with pytest.raises(StoreError, match="restored on another machine"):
            step(log, store, 2)


def test_an_open_window_stays_in_the_log(log: HotLog, store: Store) -> None:
    builder = WindowBuilder(40, 1)
    builder.event(Op.INSERT, 5, 1, b"k", after=b"x")
    log.append(builder.take(), 1)
    assert segments.seal(log, store, 7) is None
    whole = History(3).block(3)
    assert store.read().runs == ()
    del whole
    builder.event(Op.INSERT, 5, 1, b"l", after=b"x")
    log.append(builder.end("t"), 1)
    run = segments.seal(log, store, 8)
    assert run is not None
    assert run.stop == Position(40, 2)


def test_row_groups_are_bounded_and_their_statistics_prune(
    log: HotLog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "ROW_GROUP_BYTES", 2000)
    history = History(4, payload_bytes=300)
    for _ in range(30):
        log.append(history.block(2), 1)
    run = segments.seal(log, store, 7)
    assert run is not None
    opened = OpenRun(run, store.run_folder(run))
    groups = list(opened.row_groups())
    assert len(groups) > 5
    for group in groups:
        for block in opened.frames(group):
            columns = block.columns()
            found = zip(columns.scn.tolist(), columns.seq.tolist(), strict=True)
            assert all(group.first <= position <= group.last for position in found)
    opened.close()


def test_a_crash_between_manifest_and_log_is_finished(log: HotLog, store: Store) -> None:
    history = History(5)
    log.append(history.block(5), 1)
    run = segments._write_segment(log, store, START, history.position, 1)
    assert run is not None
    store.switch(lambda manifest: manifest.with_changes(add=run, now_us=1))
    later = history.block(2)
    log.append(later, 1)
    segments.finish(log, store, 9)
    assert log.state().start == run.stop
    assert log.state().frame_bytes == len(later)


def test_a_crash_between_a_gap_and_the_manifest_is_finished(log: HotLog, store: Store) -> None:
    log.append(History(6).block(5), 1)
    segments.seal(log, store, 1)
    log.restart_at(Position(10**6, 0), {})
    assert segments.finish(log, store, 9).runs == ()
    assert len(store.read().retired) == 1


def test_files_of_a_seal_that_never_ended_are_swept(log: HotLog, store: Store) -> None:
    history = History(7)
    log.append(history.block(5), 1)
    orphan = segments._write_segment(log, store, START, history.position, 1)
    assert orphan is not None
    segments.finish(log, store, 9)
    assert not store.run_folder(orphan).exists()
    assert segments.seal(log, store, 10) is not None


def test_a_disk_that_refuses_leaves_the_log_as_it_was(
    log: HotLog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    log.append(History(8).block(5), 1)
    before = log.state()
    monkeypatch.setattr(run_storage, "sync_folder", refuse)
    with pytest.raises(StoreError, match="No space left"):
        segments.seal(log, store, 7)
    assert log.state() == before
    assert list(store.runs_folder.iterdir()) == []
