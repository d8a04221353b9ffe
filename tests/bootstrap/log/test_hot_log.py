"""The hot log: I1-I5, exactly once, and what survives."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from databus.bootstrap.log import hot_log as log_module
from databus.bootstrap.log import log_blocks
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_check import describe_log
from databus.common.checkpoint import Position
from databus.common.errors import ClockMismatch, FormatError, StoreError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder, heartbeat
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.bootstrap.model import CLOCK, START, History
from tests.support.waiting import PATIENCE


def read_all(log: HotLog, after: Position, upto: Position, max_bytes: int = 1 << 20) -> bytes:
    parts, at = [], after
    while at < upto:
        part = log.read(at, upto, max_bytes)
        assert part is not None
        parts.append(part.data)
        assert part.stop > at
        at = part.stop
    return b"".join(parts)


def test_what_is_appended_is_read_back_in_order(log: HotLog) -> None:
    history = History(1)
    written = [history.block(7) for _ in range(5)]
    for block in written:
        assert log.append(block, 5) == frame_positions(block)[-1]
    state = log.state()
    assert read_all(log, START, state.window) == b"".join(written)
    assert state.window == state.last == history.position
    assert state.frame_bytes == len(b"".join(written))
    assert state.since_us == 5


def test_a_log_is_closed_once_no_thread_reads_it(tmp_path: Path) -> None:
    log = HotLog(tmp_path / "log")
    log.bind("shop", CLOCK, START)
    is_reading, may_end = threading.Event(), threading.Event()

    def read() -> bytes:
        with log._reading() as transaction:
            is_reading.set()
            assert may_end.wait(120 * PATIENCE)
            return bytes(transaction.get(b"clock", db=log._facts))

    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(read)
        assert is_reading.wait(120 * PATIENCE)
        closing = threads.submit(log.close)
        with pytest.raises(TimeoutError):
            closing.result(0.1)
        may_end.set()
        assert reading.result(120)
        closing.result(120)
    with pytest.raises(StoreError):
        log.state()


def frame_positions(block: bytes) -> list[Position]:
    return [one.position for one in iter_frames(block)]


def test_reading_may_begin_at_any_frame(log: HotLog) -> None:
    history = History(2)
    block = history.block(12)
    log.append(block, 1)
    frames = [bytes(one.bytes) for one in iter_frames(block)]
    for index, position in enumerate(frame_positions(block)):
        assert read_all(log, position, log.state().window, 200) == b"".join(frames[index + 1 :])


def test_a_stream_that_is_resumed_is_appended_once(log: HotLog) -> None:
    history = History(3)
    first, second = history.block(4), history.block(4)
    log.append(first, 1)
    log.append(first + second, 1)
    log.append(second, 1)
    assert read_all(log, START, log.state().window) == first + second


def test_a_window_that_comes_in_parts_is_not_whole_before_its_end(log: HotLog) -> None:
    builder = WindowBuilder(40, 1)
    parts = []
    for _ in range(3):
        for number in range(4):
            builder.event(Op.INSERT, 5, 1, b"k%d" % number, after=b"x" * 50)
        parts.append(builder.take())
    parts.append(builder.end("t"))
    for part in parts[:-1]:
        log.append(part, 1)
        assert log.state().window == START
        assert log.state().last > START
    log.check()
    log.append(parts[-1], 1)
    assert log.state().window == Position(40, 12)
    assert read_all(log, START, Position(40, 12)) == b"".join(parts)


def test_a_block_is_cut_at_window_ends_and_at_its_size(
    log: HotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_blocks, "BLOCK_BYTES", 400)
    history = History(4)
    written = history.block(20) + history.window(40)
    log.append(written, 1)
    assert log.check() == len(frame_positions(written))
    assert read_all(log, START, log.state().window, 1) == written


def test_heartbeats_move_the_checkpoint_and_are_not_stored(log: HotLog) -> None:
    history = History(5)
    block = history.block(3)
    beat = Position(history.position.scn + 7, 0)
    log.append(block + heartbeat(beat, 1), 1)
    assert log.state().last == log.state().window == beat
    log.advance(Position(beat.scn + 1, 0))
    log.advance(beat)
    assert log.state().window == Position(beat.scn + 1, 0)
    assert read_all(log, START, log.state().window) == block
    later = Position(beat.scn + 2, 0)
    assert log.append(heartbeat(later, 1), 1) == later


def test_a_heartbeat_inside_a_window_does_not_close_it(log: HotLog) -> None:
    builder = WindowBuilder(40, 1)
    builder.event(Op.INSERT, 5, 1, b"k", after=b"x")
    log.append(builder.take(), 1)
    log.advance(Position(40, 0))
    assert log.state().window == START


def test_frames_out_of_order_are_refused_and_nothing_is_stored(log: HotLog) -> None:
    history = History(6)
    first, second = history.block(3), history.block(3)
    with pytest.raises(FormatError, match="positions must ascend"):
        log.append(second + first, 1)
    with pytest.raises(FormatError, match="ends inside a frame"):
        log.append(first[:-8], 1)
    damaged = bytearray(first)
    damaged[90] ^= 1
    with pytest.raises(FormatError, match="CRC"):
        log.append(bytes(damaged), 1)
    assert log.state().frame_bytes == 0


def test_an_scn_that_runs_cannot_hold_is_refused(log: HotLog) -> None:
    with pytest.raises(FormatError, match="over 9223372036854775807"):
        log.append(WindowBuilder(2**63, 1).end("t"), 1)


def test_another_clock_is_refused(log: HotLog) -> None:
    log.bind("shop", CLOCK, Position(1, 1))
    with pytest.raises(ClockMismatch, match="clock-2"):
        log.bind("shop", "clock-2", START)


def test_a_damage_that_the_check_finds_has_the_name_of_its_file(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = HotLog(folder)
    log.bind("shop", CLOCK, START)
    log.append(History(7).block(5), 1)
    log.close()
    with lmdb.open(str(folder), max_dbs=3) as damaged:
        frames = damaged.open_db(b"frames")
        with damaged.begin(frames, write=True) as transaction:
            (key, value), *_ = transaction.cursor()
            transaction.delete(key)
            transaction.put(bytes([*key[:-1], key[-1] ^ 1]), value)
    with pytest.raises(FormatError, match=f"{folder}.*the block at .* ends elsewhere"):
        describe_log(folder)


def test_everything_is_there_after_opening_again(tmp_path: Path) -> None:
    schema = SourceSchema("shop.a", (Column("id", Kind.INT, nullable=False),), ("id",))
    log = HotLog(tmp_path / "log")
    log.bind("shop", CLOCK, START)
    block = History(7).block(5)
    log.append(block, 1)
    log.add_schemas([schema, schema])
    log.put_note("gaps", [{"from": 1}])
    before = log.state()
    log.close()
    for folder in (tmp_path / "log", tmp_path):
        described = describe_log(folder)
        assert described["frames"] == len(frame_positions(block))
        assert described["gaps"] == [{"from": 1}]
        assert described["schemas"][0]["fingerprint"] == f"{schema.fingerprint:016x}"
    again = HotLog(tmp_path / "log")
    assert again.state() == before
    assert again.schemas() == [schema]
    again.close()


def test_the_map_grows_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "FIRST_MAP_BYTES", 1 << 16)
    log = HotLog(tmp_path / "log")
    log.bind("shop", CLOCK, START)
    history = History(8, payload_bytes=5000)
    written = b"".join(history.window(10) for _ in range(20))
    log.append(written, 1)
    assert log.map_bytes() > 1 << 19
    assert read_all(log, START, log.state().window) == written
    log.check()
    log.close()


def test_dropping_forgets_up_to_a_window_and_retains_the_rest(log: HotLog) -> None:
    history = History(9)
    first = history.block(4)
    middle = history.position
    log.append(first, 1)
    second = history.block(4)
    log.append(second, 2)
    log.drop_until(middle, 3)
    state = log.state()
    assert (state.start, state.since_us, state.frame_bytes) == (middle, 3, len(second))
    assert log.read(START, state.window, 100) is None
    assert read_all(log, middle, state.window) == second
    log.drop_until(middle, 9)
    assert log.state() == state


KILLED_READER = """
import os, signal, sys
from pathlib import Path
from databus.bootstrap.log.hot_log import HotLog
with HotLog(Path(sys.argv[1]), read_only=True)._reading():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_that_was_killed_occupies_no_room(tmp_path: Path) -> None:
    log = HotLog(tmp_path / "log")
    log.bind("shop", CLOCK, START)
    history = History(8, payload_bytes=5000)

    def fill_and_drop(times: int) -> int:
        for _ in range(times):
            log.append(history.block(10), 1)
            log.drop_until(log.state().window, 1)
        return (tmp_path / "log" / "data.mdb").stat().st_size

    before = fill_and_drop(10)
    child = subprocess.run([sys.executable, "-c", KILLED_READER, tmp_path / "log"], check=False)
    assert child.returncode == -signal.SIGKILL
    assert fill_and_drop(30) < 2 * before
    log.check()
    log.close()


def test_a_restart_after_a_gap_stores_its_record_in_the_same_commit(log: HotLog) -> None:
    log.append(History(10).block(5), 1)
    log.restart_at(Position(5000, 2), {"gaps": [{"to": 5000}]})
    state = log.state()
    assert state.start == state.window == state.last == Position(5000, 2)
    assert state.frame_bytes == 0
    assert log.note("gaps") == [{"to": 5000}]


def test_a_bridged_gap_retains_whole_windows_and_drops_the_one_that_lost_its_end(
    log: HotLog,
) -> None:
    history = History(10)
    written, torn = history.block(5), history.window(3)
    whole = list(iter_frames(written))[-1].position
    log.append(written, 1)
    log.append(b"".join(bytes(view.bytes) for view in list(iter_frames(torn))[:2]), 1)
    state = log.state()
    assert state.window == whole < state.last
    log.bridge_to(Position(5000, 2), {"gaps": [{"to": 5000}]})
    state = log.state()
    assert (state.start, state.window, state.last) == (START, Position(5000, 2), Position(5000, 2))
    assert log.note("gaps") == [{"to": 5000}]
    retained = log.read(START, state.window, 1 << 20)
    assert retained is not None
    assert list(iter_frames(retained.data))[-1].position == whole
    log.check()


def test_a_log_that_is_missing_or_empty_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no log yet"):
        HotLog(tmp_path / "nowhere", read_only=True)
    log = HotLog(tmp_path / "log")
    with pytest.raises(StoreError, match="is the log writer running"):
        log.state()
    log.close()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), block_bytes=st.integers(80, 2000))
def test_any_cutting_of_a_stream_gives_the_same_log(
    memory_folder: Callable[[], Path], seed: int, block_bytes: int
) -> None:
    rng = random.Random(seed)
    written = History(seed).block(15)
    edges = [0, *(one.offset for one in iter_frames(written)), len(written)]
    log = HotLog(memory_folder() / "log")
    log.bind("shop", CLOCK, START)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_blocks, "BLOCK_BYTES", block_bytes)
        at = 0
        while at < len(written):
            # Sometimes a part of what has come already comes once more.
            begin = rng.choice([edge for edge in edges if edge <= at][-3:])
            stop = rng.choice([edge for edge in edges if edge > at][:4])
            log.append(written[begin:stop], 1)
            at = stop
    assert log.check() == len(edges) - 2
    assert read_all(log, START, log.state().window, 300) == written
    ends = [one.position for one in iter_frames(written) if one.op == Op.END_OF_WINDOW]
    assert log.state().window == ends[-1]
    log.close()


def test_columns_of_an_empty_block_append_nothing(log: HotLog) -> None:
    assert log.append(b"", 1) == START
    assert len(frame_format.scan(b"")) == 0


def test_a_log_that_could_not_be_opened_again_at_once_is_opened_by_the_next_step(
    log: HotLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_log, failures = log._open, [OSError("no descriptor"), lmdb.DiskError("no disk")]

    def opening() -> None:
        if failures:
            raise failures.pop(0)
        open_log()

    def panic(transaction: object) -> None:
        raise lmdb.PanicError("the disk failed")

    monkeypatch.setattr(log, "_open", opening)
    log.put_note("before", 1)
    with pytest.raises(StoreError, match="the disk failed"):
        log._write(panic)
    with pytest.raises(StoreError, match="no disk"):
        log.put_note("writer", 2)
    with pytest.raises(StoreError):
        log.note("before")
    log.put_note("writer", 3)
    assert (log.note("before"), log.note("writer")) == (1, 3)
