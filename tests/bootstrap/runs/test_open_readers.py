"""What open readers hold: runs that retired after they began, and the chain after them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from databus.bootstrap.runs import open_readers
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.open_readers import Held, OpenReaders, held
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.checkpoint import Position
from tests.bootstrap.model import write_run
from tests.bootstrap.runs.test_manifest import make_runs


@dataclass
class At:
    position: Position


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_long_reader_holds_what_retired_after_it_began_until_it_leaves(store: Store) -> None:
    first, second, _ = make_runs(store)
    clock = Clock()
    here = OpenReaders(store.storage, clock)
    reader = At(Position(5, 1))
    here.enter(reader)
    began_us = int((clock.now_s - open_readers.SWITCH_S) * 1e6)
    assert held(store.storage, began_us) == [Held(began_us, Position(5, 1))], "at once"
    reader.position = Position(7, 1)
    clock.now_s += open_readers.EVERY_S
    here.renew()
    (found,) = held(store.storage, int(clock.now_s * 1e6))
    assert found == Held(began_us, Position(7, 1))
    here.enter(behind := At(Position(6, 0)))
    (found,) = held(store.storage, int(clock.now_s * 1e6))
    assert found == Held(began_us, Position(6, 0)), "a reader that is further behind is noted too"
    here.leave(behind)

    both = write_run(store, RunKind.DELTA, first.start, second.stop, [])
    retired_us = int(clock.now_s * 1e6)
    store.switch(lambda m: m.with_changes(add=both, drop=(first, second), now_us=retired_us))
    assert store.collect(0, "cs", now_us=retired_us + 1) == []
    here.leave(reader)
    assert sorted(store.collect(0, "cs", now_us=retired_us + 1)) == sorted([first.id, second.id])


def test_a_reader_that_began_later_holds_nothing_of_it(store: Store) -> None:
    first, second, _ = make_runs(store)
    both = write_run(store, RunKind.DELTA, first.start, second.stop, [])
    store.switch(lambda m: m.with_changes(add=both, drop=(first, second), now_us=10))
    clock = Clock()
    here = OpenReaders(store.storage, clock)
    here.enter(At(Position(1, 1)))
    clock.now_s += open_readers.EVERY_S
    here.renew()
    assert len(store.collect(0, "cs", now_us=int(clock.now_s * 1e6))) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b'{"at_us": "x"}', b"{}"])
def test_the_note_of_a_server_that_died_or_wrote_nonsense_is_swept(
    store: Store, content: bytes
) -> None:
    clock = Clock()
    here = OpenReaders(store.storage, clock)
    here.enter(At(Position(1, 1)))
    clock.now_s += open_readers.EVERY_S
    here.renew()
    store.storage.write_note(f"{open_readers.PREFIX}other.json", content)
    later_us = int((clock.now_s + open_readers.STALE_S) * 1e6)
    assert held(store.storage, later_us) == []
    assert store.storage.note_names(open_readers.PREFIX) == []
