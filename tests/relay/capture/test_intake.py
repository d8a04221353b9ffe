"""From batches into the ring: duplicates, boundaries, what a crash left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.common.checkpoint import Position
from databus.common.errors import FormatError, SourcePositionLost, StoreError, WindowMissing
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameColumns, FrameView, Op
from databus.common.frame.window_builder import WindowBuilder, end_of_window, require_chain
from databus.relay.capture import intake as intake_module
from databus.relay.capture.intake import Intake
from databus.relay.ring.ring import Ring
from databus.relay.ring.schema_registry import Registry
from databus.relay.sources.contract import Batch
from tests.support.scripted_source import ITEMS


@pytest.fixture
def intake(tmp_path: Path) -> Iterator[Intake]:
    made = opened(tmp_path)
    yield made
    made.ring.close()


def opened(folder: Path) -> Intake:
    ring = Ring.open_writer(folder, 64 << 10, clock="c", start=Position(10, 0))
    return Intake(ring, Registry(folder / "schemas.jsonl"))


def window(scn: int, events: int = 1, size: int = 10) -> bytes:
    builder = WindowBuilder(scn, scn)
    for key in range(events):
        builder.event(Op.INSERT, ITEMS.source_id, ITEMS.fingerprint, b"%d" % key, after=b"x" * size)
    return builder.end()


def first_frames(data: bytes, count: int) -> bytes:
    views = list(frame_format.iter_frames(data))[:count]
    return data[: views[-1].offset + views[-1].length]


def frames(intake: Intake) -> list[FrameView]:
    with Ring.open_reader(intake.ring.directory) as reader:
        data, _ = reader.read(reader.snapshot().head, 1 << 30)
        return list(frame_format.iter_frames(bytes(data)))


def positions(intake: Intake) -> list[Position]:
    return [view.position for view in frames(intake)]


def test_a_new_ring_resumes_after_its_start_and_is_in_no_window(intake: Intake) -> None:
    assert intake.resume() == 10
    assert not intake.in_window
    assert intake.complete == Position(10, 0)


def test_what_the_ring_has_is_dropped_from_a_batch_and_the_rest_taken(intake: Intake) -> None:
    assert intake.take(Batch(window(11) + window(12), (ITEMS,), 12))
    assert not intake.take(Batch(window(11) + window(12), (), 12))
    assert intake.take(Batch(window(12) + window(13), (), 13))
    assert [p.scn for p in positions(intake)] == [11, 11, 12, 12, 13, 13]
    assert intake.complete == Position(13, 1)


def test_half_a_window_in_the_batch_that_repeats_it_is_completed(intake: Intake) -> None:
    whole = window(11, events=4)
    assert not intake.take(Batch(first_frames(whole, 2), (ITEMS,), 10))
    assert intake.in_window
    assert intake.take(Batch(whole, (), 11))
    assert [p.seq for p in positions(intake)] == [0, 1, 2, 3, 4]


def test_an_unpublished_window_is_forgotten_and_read_again_on_resume(intake: Intake) -> None:
    intake.take(Batch(window(11) + first_frames(window(12, 3), 2), (ITEMS,), 11))
    assert intake.in_window
    assert intake.resume() == 11
    assert not intake.in_window


def test_a_window_that_readers_saw_a_part_of_is_requested_again(intake: Intake) -> None:
    large = window(12, events=30, size=600)
    intake.take(Batch(window(11) + first_frames(large, 25), (ITEMS,), 11))
    assert intake.ring.state.max.scn == 12
    assert intake.resume() == 11
    assert intake.in_window, "the part that was published stays"
    intake.take(Batch(large, (), 12))
    assert intake.complete == Position(12, 30)


def test_a_reopened_ring_knows_whether_it_ends_inside_a_window(tmp_path: Path) -> None:
    large = window(12, events=30, size=600)
    first = opened(tmp_path)
    first.take(Batch(window(11) + first_frames(large, 25), (ITEMS,), 11))
    first.ring.close()
    again = opened(tmp_path)
    assert again.in_window
    assert again.resume() == 11
    assert again.complete.scn == 11
    again.take(Batch(large, (), 12))
    again.ring.close()
    last = opened(tmp_path)
    assert (last.in_window, last.resume(), last.complete) == (False, 12, Position(12, 30))
    last.ring.close()


@pytest.mark.parametrize("noted", [True, False])
def test_a_torn_window_is_read_again_from_the_end_of_the_one_before_however_far(
    tmp_path: Path, noted: bool
) -> None:
    first = opened(tmp_path)
    first.take(Batch(window(11) + first_frames(window(500, 30, 600), 25), (ITEMS,), 11))
    first.ring.close()
    assert (tmp_path / "window.json").exists()
    if not noted:
        (tmp_path / "window.json").unlink()
    again = opened(tmp_path)
    assert (again.complete, again.resume()) == (Position(11, 1), 11)
    again.ring.close()


def test_a_torn_window_larger_than_the_ring_is_read_again_from_the_one_before(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    first.take(Batch(window(11) + first_frames(window(500, 300, 600), 290), (ITEMS,), 11))
    assert first.ring.state.prev.scn == 500
    first.ring.close()
    again = opened(tmp_path)
    assert (again.complete, again.resume()) == (Position(11, 1), 11)
    again.take(Batch(window(500, 300, 600) + window(501), (), 501))
    assert again.complete == Position(501, 1)
    again.ring.close()


def test_the_windows_before_a_torn_one_are_noted_once_the_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = window(500, 300, 600)
    first = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(intake_module, "write_document", _full)
        with pytest.raises(StoreError):
            first.take(Batch(window(11) + first_frames(whole, 25), (ITEMS,), 11))
    assert first.resume() == 11
    first.take(Batch(first_frames(whole, 290), (), 11))
    assert first.ring.state.prev.scn == 500
    first.ring.close()
    again = opened(tmp_path)
    assert (again.complete, again.resume()) == (Position(11, 1), 11)
    again.ring.close()


def _full(path: Path, content: bytes) -> None:
    raise StoreError(f"{path} cannot be written: No space left on device")


@pytest.mark.parametrize(
    ("again", "resolved", "what"),
    [
        (window(12, 30, 601), 12, "has another change instead of the last one"),
        (window(12, 3, 600), 12, "ends after 3"),
        (b"", 12, "is without any of them"),
        (window(13), 13, "continues at"),
    ],
    ids=["other rows", "shorter", "nothing of ours", "nothing there"],
)
@pytest.mark.parametrize("restarted", [True, False])
def test_a_torn_window_is_not_gone_on_with_where_its_scn_is_of_another_transaction(
    tmp_path: Path, again: bytes, resolved: int, what: str, restarted: bool
) -> None:
    """A primary died while it sent a large transaction, and its replica never had that one."""
    intake = opened(tmp_path)
    intake.take(Batch(window(11) + first_frames(window(12, 30, 600), 25), (ITEMS,), 11))
    if restarted:
        intake.ring.close()
        intake = opened(tmp_path)
    assert intake.resume() == 11
    shown = positions(intake)
    assert shown[-1].scn == 12
    with pytest.raises(SourcePositionLost, match=what):
        intake.take(Batch(again, (), resolved))
    assert intake.resume() == 11
    assert positions(intake) == shown
    intake.take(Batch(window(12, 30, 600), (), 12))
    assert intake.complete == Position(12, 30), "the server that has it came back"
    intake.ring.close()


def test_a_dump_window_that_a_crash_tore_is_closed_at_the_next_start(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.take(Batch(window(11), (ITEMS,), 11))
    builder = WindowBuilder(11, 5, first_seq=2)
    builder.event(Op.READ, ITEMS.source_id, ITEMS.fingerprint, b"k", after=b"x" * 10_000)
    first.ring.append(builder.take())
    assert first.ring.state.max == Position(11, 2)
    first.ring.close()
    again = opened(tmp_path)
    assert again.resume() == 11
    assert (again.complete, again.in_window) == (Position(11, 3), False)
    again.ring.close()


def dump_rows(scn: int, first_seq: int, count: int) -> bytes:
    builder = WindowBuilder(scn, 5, first_seq=first_seq)
    for number in range(count):
        key = ITEMS.encode_key((number,))
        builder.event(Op.READ, ITEMS.source_id, ITEMS.fingerprint, key, after=b"x" * 3_000)
    return builder.take()


def test_a_relayed_dump_window_is_left_open_at_the_next_start_and_resumes_behind_its_last_row(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    first.take(Batch(window(11) + dump_rows(11, 2, 4), (ITEMS,), 10))
    shown = first.ring.state.max
    assert shown > Position(11, 2), "readers have seen a part of the dump window"
    first.ring.close()
    again = opened(tmp_path)
    assert again.resume_position() == shown
    assert again.in_window
    rest = dump_rows(11, shown.seq + 1, 1) + end_of_window(11, shown.seq + 2, 5, 5, "", dump=True)
    again.take(Batch(rest, (), 10))
    assert again.complete == Position(11, shown.seq + 2)
    again.ring.close()


@pytest.mark.parametrize("row_count", [1, 4])
def test_a_dump_window_whose_rest_no_parent_has_is_closed_or_dropped(
    intake: Intake, row_count: int
) -> None:
    intake.take(Batch(window(11) + dump_rows(11, 2, row_count), (ITEMS,), 10))
    intake.take(Batch(window(12), (), 10))
    found = positions(intake)
    assert found[-2:] == [Position(12, 0), Position(12, 1)]
    assert intake.complete == Position(12, 1)
    ends = [view.position for view in frames(intake) if view.op == Op.END_OF_WINDOW]
    if row_count == 1:
        assert ends == [Position(11, 1), Position(12, 1)], "no reader had seen the row"
    else:
        assert [end.scn for end in ends] == [11, 11, 12]


@pytest.mark.parametrize("events", [1, 3])
@pytest.mark.parametrize("in_one_batch", [False, True])
def test_a_larger_scn_without_the_end_before_it_is_refused_and_what_is_whole_stays(
    intake: Intake, events: int, in_one_batch: bool
) -> None:
    intake.take(Batch(window(11), (ITEMS,), 11))
    torn = first_frames(window(12, events), events)
    batches = [torn + window(13, events)] if in_one_batch else [torn, window(13, events)]
    with pytest.raises(FormatError, match="has not ended"):
        for data in batches:
            intake.take(Batch(data, (), 11))
    assert intake.resume() == 11
    assert intake.take(Batch(window(12, events) + window(13, events), (), 13))
    ends = [view.position for view in frames(intake) if view.op == Op.END_OF_WINDOW]
    assert ends == [Position(11, 1), Position(12, events), Position(13, events)]


def test_ends_of_windows_in_a_row_are_taken_each_once(intake: Intake) -> None:
    """Of one scn, and of scns that hold nothing; a source that repeats them changes nothing."""
    ends = b"".join(
        end_of_window(scn, seq, 1, 0) for scn, seq in [(11, 1), (11, 2), (12, 0), (13, 0), (13, 1)]
    )
    data = window(11)[: -len(end_of_window(11, 1, 11, 1))] + ends + window(14)
    assert intake.take(Batch(data, (ITEMS,), 14))
    expected = [(11, 0), (11, 1), (11, 2), (12, 0), (13, 0), (13, 1), (14, 0), (14, 1)]
    assert positions(intake) == [Position(*one) for one in expected]
    assert not intake.take(Batch(data, (), 14))
    assert not intake.take(Batch(ends, (), 14))
    assert positions(intake) == [Position(*one) for one in expected]
    assert intake.complete == Position(14, 1)


def test_the_parts_of_a_batch_are_whole_frames_that_block_mode_can_take(intake: Intake) -> None:
    data = window(11, 30, 500) + window(12, 1, 12_000) + window(13)
    parts = list(intake.parts(Batch(data, (ITEMS,), 13)))
    assert b"".join(part.data for part in parts) == data
    assert [part.schemas for part in parts if part.schemas] == [(ITEMS,)]
    assert parts[0].schemas == (ITEMS,)
    assert [part.resolved for part in parts] == [0] * (len(parts) - 1) + [13]
    sizes = [len(part.data) for part in parts if len(list(frame_format.iter_frames(part.data))) > 1]
    assert max(sizes) <= intake.ring.part_bytes < max(len(part.data) for part in parts)


def test_an_idle_window_is_only_appended_ahead_of_the_ring_and_outside_windows(
    intake: Intake,
) -> None:
    intake.take(Batch(window(11), (ITEMS,), 11))
    assert not intake.append_idle_window(5)
    intake.take(Batch(b"", (), 20))
    assert intake.append_idle_window(5)
    assert positions(intake)[-1] == Position(20, 0)
    intake.take(Batch(first_frames(window(21, 2), 1), (), 30))
    assert not intake.append_idle_window(5), "a window is open"


class Watcher:
    """Notes where windows end, and may append one of its own there."""

    def __init__(self, intake: Intake) -> None:
        self.intake = intake
        self.seen: list[Position] = []
        self.ends: list[Position] = []

    def observe(self, columns: FrameColumns, data: memoryview) -> None:
        self.seen += [view.position for view in frame_format.iter_frames(data)]

    def at_window_end(self) -> None:
        self.ends.append(self.intake.complete)


def test_an_observer_sees_each_new_frame_once_and_every_chance_for_a_window_of_its_own(
    intake: Intake,
) -> None:
    watcher = intake.observer = Watcher(intake)
    batch = window(11) + window(12) + first_frames(window(13, 2), 1)
    intake.take(Batch(batch, (ITEMS,), 12))
    assert watcher.ends == [Position(12, 1)]
    intake.take(Batch(window(12) + window(13, 2), (), 13))
    assert watcher.ends[-1] == Position(13, 2)
    assert watcher.seen == positions(intake)


def test_each_end_of_a_window_states_the_end_before_it_also_after_a_restart(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path)
    large = window(13, events=30, size=600)
    first.take(Batch(window(11) + window(12) + first_frames(large, 25), (ITEMS,), 12))
    first.ring.close()
    again = opened(tmp_path)
    again.resume()
    again.take(Batch(large, (), 14))
    again.append_idle_window(1)
    again.append_dump_window(dump_rows(14, 1, 2) + end_of_window(14, 3, 5, 2, "", dump=True))
    found = frames(again)
    ends = [view for view in found if view.op == Op.END_OF_WINDOW]
    assert [Position(view.key_hash, view.schema_fp) for view in ends] == [
        Position(10, 0), *(view.position for view in ends[:-1])
    ]  # fmt: skip
    data = b"".join(view.bytes for view in found)
    require_chain(frame_format.scan(data), Position(10, 0))
    start = found.index(ends[0])
    for gone in range(len(ends)):
        # A window that is missing is seen wherever it was; without the first one, by its successor.
        of_it = [view for view in found if _window_of(view, ends) == gone]
        rest = b"".join(view.bytes for view in found if view not in of_it)
        if gone == len(ends) - 1:
            require_chain(frame_format.scan(rest), Position(10, 0))
            continue
        with pytest.raises(WindowMissing, match=f"at {ends[gone].position}"):
            require_chain(frame_format.scan(rest), Position(10, 0))
    require_chain(frame_format.scan(data[found[start + 1].offset :]), ends[0].position)
    again.ring.close()


def _window_of(view: FrameView, ends: list[FrameView]) -> int:
    return next(number for number, end in enumerate(ends) if view.position <= end.position)
