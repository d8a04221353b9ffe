"""Logs of several servers over one store: any of them continues the runs of the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.bootstrap.log import log_gaps, segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_adoption import adopt
from databus.bootstrap.log.log_recording import record_notes
from databus.bootstrap.runs.manifest import Store
from databus.common.checkpoint import Position
from databus.common.errors import ClockMismatch, StoreError
from databus.common.frame.frame_format import iter_frames
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.bootstrap.model import CLOCK, START, History, State, state_of

FIRST = SourceSchema("shop.pages", (Column("id", Kind.INT, nullable=False),), ("id",))
OTHER = SourceSchema(
    "shop.pages", (*FIRST.columns, Column("text", Kind.STRING, nullable=True)), ("id",)
)


class Servers:
    """A store, and logs that read one stream, each up to a given position."""

    def __init__(self, folder: Path, names: str, seed: int = 1) -> None:
        self.store = Store(folder / "store")
        self.store.create()
        self.logs = {name: HotLog(folder / name / "log") for name in names}
        self._history = History(seed)
        self.windows: list[bytes] = []

    def write(self, count: int) -> None:
        """Some windows more in the stream."""
        self.windows += [self._history.window(3) for _ in range(count)]

    def begin(self, name: str) -> None:
        """The first writer's log."""
        self.logs[name].bind("shop", CLOCK, START)
        self.logs[name].put_note("seeding", {"shop.pages": {"state": "seeded"}})

    def read(self, name: str, upto: int | None = None, at_once: int = 4) -> None:
        """A log reads the stream up to a window, some windows to a block."""
        last = self.logs[name].state().last
        for begin in range(0, len(self.windows[:upto]), at_once):
            windows = self.windows[begin : min(begin + at_once, upto or len(self.windows))]
            frames = [bytes(o.bytes) for o in iter_frames(b"".join(windows)) if o.position > last]
            self.logs[name].append(b"".join(frames), 1)

    def seal(self, name: str) -> Position:
        """A writer moves its whole windows into a segment."""
        segments.finish(self.logs[name], self.store, 1)
        segments.seal(self.logs[name], self.store, 1)
        return self.logs[name].state().start

    def adopt(self, name: str) -> None:
        """A standby looks at the store."""
        adopt(self.logs[name], self.store, "shop", 2)
        if not self.logs[name].is_new():
            self.logs[name].check()

    def assert_has_all(self, name: str, upto: int | None = None) -> None:
        """A reader of this server gets the state of the stream."""
        truth = State().apply_all(self.windows[:upto])
        found = state_of(self.store, self.logs[name])
        assert (found.rows, found.regressions) == (truth.rows, [])


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path, "ab")
    servers.begin("a")
    servers.write(10)
    yield servers
    for log in servers.logs.values():
        log.close()
    assert servers.store.check() == []


def test_a_new_log_begins_where_the_runs_end_with_their_record(servers: Servers) -> None:
    servers.adopt("b")
    assert servers.logs["b"].is_new(), "nothing was sealed yet"
    servers.logs["a"].add_schemas([FIRST, OTHER, FIRST])
    servers.read("a", 7)
    stop = servers.seal("a")
    servers.adopt("b")
    log = servers.logs["b"]
    assert (log.state().start, log.state().last) == (stop, stop)
    assert log.schemas() == servers.logs["a"].schemas()
    assert log.note("seeding") == servers.logs["a"].note("seeding")
    servers.read("b")
    servers.assert_has_all("b")


def test_a_log_drops_what_the_runs_have_even_if_they_end_inside_a_block(servers: Servers) -> None:
    servers.read("a", 2)
    servers.seal("a")
    servers.adopt("b")
    servers.read("b", at_once=10)
    servers.read("a", 7)
    stop = servers.seal("a")
    before = servers.logs["b"].state()
    servers.adopt("b")
    state = servers.logs["b"].state()
    assert (state.start, state.window, state.last) == (stop, before.window, before.last)
    assert 0 < state.frame_bytes < before.frame_bytes
    servers.assert_has_all("b")


def test_a_log_that_is_behind_the_runs_continues_at_their_end(servers: Servers) -> None:
    servers.read("a", 2)
    servers.seal("a")
    servers.adopt("b")
    servers.read("b", 4)
    servers.logs["a"].add_schemas([OTHER])
    servers.read("a", 9)
    stop = servers.seal("a")
    servers.adopt("b")
    state = servers.logs["b"].state()
    assert (state.start, state.window, state.last, state.frame_bytes) == (stop, stop, stop, 0)
    assert servers.logs["b"].schemas() == [OTHER], "it has missed the announcement"
    servers.assert_has_all("b", 9)
    servers.read("b")
    servers.assert_has_all("b")


def test_a_source_is_whole_at_a_standby_when_its_log_has_the_end_of_the_dump(
    servers: Servers,
) -> None:
    servers.read("a", 2)
    servers.seal("a")
    servers.adopt("b")
    servers.read("a")
    end = servers.logs["a"].state().window
    seeded = {"state": "seeded", "dump": "d1", "rows": 3, "end": end.to_json()}
    servers.logs["a"].put_note("seeding", {"shop.pages": seeded})
    record_notes(servers.logs["a"], servers.store)
    servers.read("b", 5)
    servers.adopt("b")
    assert servers.logs["b"].note("seeding")["shop.pages"]["state"] == "dumping"
    servers.read("b")
    servers.adopt("b")
    assert servers.logs["b"].note("seeding")["shop.pages"] == seeded


def test_a_gap_of_the_writer_without_a_copy_begins_the_standby_anew(servers: Servers) -> None:
    servers.read("a", 2)
    servers.seal("a")
    servers.adopt("b")
    servers.read("b")
    log = servers.logs["a"]
    oldest = servers.logs["b"].state().window
    log_gaps.restart_behind(log, log.state().last, oldest, 3)
    segments.finish(log, servers.store, 3)
    servers.adopt("b")
    state = servers.logs["b"].state()
    assert (state.start, state.last, state.frame_bytes) == (oldest, oldest, 0)
    assert log_gaps.gaps_of(servers.logs["b"]) == log_gaps.gaps_of(log)
    assert servers.logs["b"].note("origin") == oldest.to_json()
    segments.finish(servers.logs["b"], servers.store, 4)


def test_a_store_of_another_clock_or_database_is_refused(servers: Servers) -> None:
    servers.read("a", 3)
    servers.seal("a")
    with pytest.raises(StoreError, match="holds the database shop, not other"):
        adopt(servers.logs["b"], servers.store, "other", 1)
    servers.logs["b"].bind("shop", "clock-2", START)
    with pytest.raises(ClockMismatch, match="clock-2"):
        servers.adopt("b")


@pytest.mark.parametrize("seed", range(12))
def test_whichever_server_writes_next_its_log_continues_the_runs(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    servers = Servers(tmp_path, "abc", seed)
    servers.begin("a")
    writer = "a"
    for _ in range(25):
        servers.write(rng.randrange(1, 8))
        for name in servers.logs:
            if name != writer:
                servers.adopt(name)
            if not servers.logs[name].is_new() and rng.random() < 0.7:
                upto = len(servers.windows) - rng.choice((0, 0, 1, 3))
                servers.read(name, max(1, upto), rng.randrange(1, 6))
        if rng.random() < 0.6:
            servers.seal(writer)
        if rng.random() < 0.3 and servers.store.read().record:
            writer = rng.choice("abc")
            servers.adopt(writer)
    servers.seal(writer)
    for name, log in servers.logs.items():
        servers.adopt(name)
        servers.read(name)
        servers.assert_has_all(name)
        log.close()
    assert servers.store.check() == []
