"""Events that a consumer cannot take: stored, held back by key, and replayed."""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from databus.client import (
    CallbackDeadLetters,
    Consumer,
    DatabaseDeadLetters,
    DataBatch,
    DatabusClient,
    DeadLetter,
    DeadLetterStore,
    Event,
    FileCheckpoints,
    FileDeadLetters,
    Position,
)
from databus.client.testing import Recorder, Step
from databus.common.errors import ConfigError, ConsumerFailed, StoreBusy, StoreError
from tests.client.conftest import StartServer
from tests.client.delivery.test_steering import MODES
from tests.client.shop import ORDERS, orders, window
from tests.client.test_client import make, serving
from tests.support.waiting import eventually

LAST = 12


class Picky(Consumer):
    """Records (key, position) of what it takes; fails at the positions in ``poison``."""

    def __init__(self, *poison: Position) -> None:
        self.poison = set(poison)
        self.taken: list[tuple[int | None, Position]] = []
        self.rollbacks: list[int] = []
        self.starts: list[int] = []

    def onStartConsumption(self) -> None:
        self.starts.append(len(self.taken))

    def onDataEvent(self, event: Event) -> None:
        if event.position in self.poison:
            raise ValueError(f"cannot take {event.position}")
        self.taken.append((event.key.get("id"), event.position))

    def onRollback(self, checkpoint: Any) -> None:
        self.rollbacks.append(len(self.taken))

    def of(self, key: int) -> list[Position]:
        return [position for one, position in self.taken if one == key]


def reached(client: DatabusClient, scn: int) -> bool:
    """Whether a checkpoint covers all up to ``scn``."""
    checkpoint = client.status.checkpoint
    return checkpoint is not None and checkpoint.position.scn >= scn


def file_store(folder: Path) -> DeadLetterStore:
    return FileDeadLetters(folder / "letters")


def table_store(folder: Path) -> DeadLetterStore:
    store = DatabaseDeadLetters("picky", partial(sqlite3.connect, folder / "letters.db"))
    store.create_table()
    return store


def callback_store(folder: Path) -> DeadLetterStore:
    kept: dict[Position, DeadLetter] = {}

    async def put(letters: Sequence[DeadLetter]) -> None:
        kept.update({one.position: one for one in letters})

    def remove(letters: Sequence[DeadLetter]) -> None:
        for one in letters:
            del kept[one.position]

    return CallbackDeadLetters(put, lambda: list(kept.values()), remove)


STORES = [file_store, table_store, callback_store]


@pytest.mark.parametrize("settings", MODES, ids=["serial", "within", "across"])
@pytest.mark.parametrize("new_store", STORES)
async def test_a_dead_letter_holds_back_its_key_alone_until_the_replay(
    scripted: StartServer,
    tmp_path: Path,
    settings: dict[str, Any],
    new_store: Callable[[Path], DeadLetterStore],
) -> None:
    server = await scripted(*[orders(scn, 1, 2, 3) for scn in range(1, LAST + 1)])
    letters, checkpoints = new_store(tmp_path), FileCheckpoints(tmp_path / "cp")
    picky = Picky(Position(4, 1))
    settings = settings | {"dead_letters": letters, "checkpoints": checkpoints, "max_retries": 2}
    client = make(picky, server.url, **settings)
    for stops_at in (6, LAST):
        # A restart holds the key back as well.
        async with serving(client):
            await eventually(lambda at=stops_at: reached(client, at))
    # Across windows, a later event may be on its way when one fails: it is rolled back.
    kept = picky.taken[picky.rollbacks[-1] :]
    assert all(position < Position(4, 1) for key, position in kept if key == 2)
    assert {p.scn for p in picky.of(1)} == set(range(1, LAST + 1))
    assert {p.scn for p in picky.of(3)} == set(range(1, LAST + 1))
    picky.poison.clear()
    picky.taken.clear()
    outcome = await client.replay_dead_letters()
    assert (outcome.delivered, outcome.failed, outcome.behind) == (LAST - 3, 0, 0)
    assert picky.taken == [(2, Position(scn, 1)) for scn in range(4, LAST + 1)]
    assert (await client.replay_dead_letters()).delivered == 0
    server.append(orders(LAST + 1, 1, 2, 3))
    async with serving(client):
        await eventually(lambda: Position(LAST + 1, 1) in picky.of(2))


async def test_a_letter_says_why_and_has_the_whole_event(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 5)])
    store = FileDeadLetters(tmp_path / "letters")
    client = make(Picky(Position(2, 0)), server.url, dead_letters=store, max_retries=3)
    async with serving(client):
        await eventually(lambda: client.status.position == Position(4, 2))
    first, *behind = store.all()
    store.close()
    assert (first.position, first.op, first.attempt_count) == (Position(2, 0), "c", 4)
    assert first.error == "ValueError('cannot take 2:0')"
    assert [(one.position, one.error) for one in behind] == [
        (Position(3, 0), "behind"),
        (Position(4, 0), "behind"),
    ]
    event = first.event()
    assert (event.source, event.key, event.txid) == ("shop.orders", {"id": 1}, "tx2")
    assert event.value == {"id": 1, "state": "s2", "amount": None}


async def test_a_letter_is_durable_before_a_checkpoint_covers_it(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 9)])
    path = tmp_path / "letters"
    durable: list[tuple[Position, bool]] = []

    class Watching(Picky):
        def onCheckpoint(self, checkpoint: Any) -> None:
            lines = path.read_bytes().count(b"\n") if path.exists() else 0
            # From window 3 on, key 1 adds a letter in each window.
            enough = lines >= checkpoint.position.scn - 2
            durable.append((checkpoint.position, enough))

    consumer = Watching(Position(3, 0))
    client = make(consumer, server.url, dead_letters=FileDeadLetters(path), max_retries=0)
    async with serving(client):
        await eventually(lambda: client.status.position == Position(8, 2))
    assert [position for position, _ in durable][-1] == Position(8, 2)
    assert all(enough for _, enough in durable)


async def test_without_a_store_a_failing_event_still_ends_the_client(scripted: StartServer) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 5)])
    with pytest.raises(ConsumerFailed, match="failed 3 times"):
        await make(Picky(Position(2, 0)), server.url, max_retries=2).serve()


async def test_only_events_become_letters(scripted: StartServer, tmp_path: Path) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 5)])

    def trouble(step: Step) -> None:
        if step.call == "onEndDataEventSequence" and step.what == 2:
            raise ValueError("not an event")

    store = FileDeadLetters(tmp_path / "letters")
    client = make(Recorder(trouble), server.url, dead_letters=store, max_retries=2)
    with pytest.raises(ConsumerFailed, match="not an event"):
        await client.serve()
    assert store.all() == []
    store.close()


async def test_more_letters_than_allowed_end_the_client_and_lose_nothing(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 9)])
    letters, store = FileDeadLetters(tmp_path / "letters"), FileCheckpoints(tmp_path / "cp")
    client = make(Picky(Position(2, 0)), server.url, dead_letters=letters, checkpoints=store,
                  max_retries=0, max_dead_letters=3)  # fmt: skip
    with pytest.raises(ConsumerFailed, match="max_dead_letters is 3"):
        await client.serve()
    loaded = store.load()
    assert loaded is not None
    assert loaded.position == Position(4, 1)
    assert [one.scn for one in letters.all()] == [2, 3, 4]
    store.close()
    letters.close()


async def test_a_truncate_ends_what_was_held_back_before_it(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(
        orders(1, 1, 2), orders(2, 1, 2), window(3, ("t", ORDERS, 0, None)), orders(4, 1, 2)
    )
    letters = FileDeadLetters(tmp_path / "letters")
    picky = Picky(Position(1, 0))
    client = make(picky, server.url, dead_letters=letters, max_retries=0)
    async with serving(client):
        await eventually(lambda: client.status.position == Position(4, 2))
    assert picky.of(1) == [Position(4, 0)]
    assert letters.all() == []
    letters.close()


async def test_letters_of_a_key_before_and_after_a_truncate_both_hold(
    scripted: StartServer, tmp_path: Path
) -> None:
    """After a rollback to before the truncate, which comes again."""
    server = await scripted(
        orders(1, 1, 2), window(2, ("t", ORDERS, 0, None)), orders(3, 1, 2), orders(4, 1, 2)
    )
    letters = FileDeadLetters(tmp_path / "letters")
    picky = Picky(Position(1, 0), Position(3, 0), Position(4, 1))
    options = {"dead_letters": letters, "max_retries": 0, "checkpoint_every_s": 3600.0}
    client = make(picky, server.url, **options)
    async with serving(client):
        await eventually(lambda: client.status.position == Position(4, 2))
    assert picky.of(1) == []
    letters.close()


async def test_a_truncate_that_fails_holds_back_its_whole_source(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(orders(1, 1, 2), window(2, ("t", ORDERS, 0, None)), orders(3, 1, 2))
    letters = FileDeadLetters(tmp_path / "letters")
    picky = Picky(Position(2, 0))
    client = make(picky, server.url, dead_letters=letters, max_retries=0)
    async with serving(client):
        await eventually(lambda: client.status.position == Position(3, 2))
    assert {position.scn for _, position in picky.taken} == {1}
    picky.taken.clear()
    assert (await client.replay_dead_letters()).behind == 2
    picky.poison.clear()
    await client.replay_dead_letters()
    assert [position for _, position in picky.taken] == [
        Position(2, 0), Position(3, 0), Position(3, 1),
    ]  # fmt: skip


async def test_a_letter_that_fails_again_keeps_those_behind_it(
    scripted: StartServer, tmp_path: Path
) -> None:
    server = await scripted(*[orders(scn, 1, 2) for scn in range(1, 5)])
    store = FileDeadLetters(tmp_path / "letters")
    picky = Picky(Position(2, 0), Position(3, 1))
    client = make(picky, server.url, dead_letters=store, max_retries=0)
    async with serving(client):
        await eventually(lambda: client.status.position == Position(4, 2))
    picky.poison.discard(Position(3, 1))
    outcome = await client.replay_dead_letters()
    assert (outcome.delivered, outcome.failed, outcome.behind) == (2, 1, 2)
    assert picky.of(2)[-2:] == [Position(3, 1), Position(4, 1)]
    left = store.all()
    store.close()
    assert [(one.position, one.attempt_count) for one in left] == [
        (Position(2, 0), 2), (Position(3, 0), 0), (Position(4, 0), 0),
    ]  # fmt: skip


async def test_batches_cannot_have_dead_letters(scripted: StartServer, tmp_path: Path) -> None:
    class Batches(Consumer):
        def onDataBatch(self, batch: DataBatch) -> None:
            """Nothing."""

    server = await scripted()
    with pytest.raises(ConfigError, match="onDataBatch"):
        await make(Batches(), server.url, dead_letters=FileDeadLetters(tmp_path / "l")).serve()


async def letters_of(scripted: StartServer, path: Path) -> list[DeadLetter]:
    server = await scripted(*[orders(scn, 1) for scn in range(1, 4)])
    store = FileDeadLetters(path)
    client = make(Picky(Position(1, 0)), server.url, dead_letters=store, max_retries=0)
    async with serving(client):
        await eventually(lambda: client.status.position == Position(3, 1))
    found = store.all()
    store.close()
    return found


async def test_a_line_that_was_cut_off_is_ignored_and_a_damaged_one_is_an_error(
    scripted: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "letters"
    found = await letters_of(scripted, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    store = FileDeadLetters(path)
    with pytest.raises(StoreBusy):
        FileDeadLetters(path).put([]) if store.all() == found[:2] else None
    store.put(found[2:])
    assert store.all() == found
    assert path.read_bytes() == whole
    path.write_bytes(whole.replace(b"shop.orders", b"shop.orderz", 1))
    with pytest.raises(StoreError, match="line 1 is damaged"):
        store.all()
    store.close()


def test_a_letter_larger_than_a_column_of_text_is_stored_in_parts(tmp_path: Path) -> None:
    store = table_store(tmp_path)
    letter = DeadLetter(
        database="shop", source="shop.orders", scn=2**64 - 1, seq=3, op="c", mode="online",
        error="x" * 200_000, attempt_count=1, stored_us=1, frames=b"\x00", schema={},
    )  # fmt: skip
    store.put([letter])
    store.put([letter])
    assert store.all() == [letter]
    store.remove([letter])
    assert store.all() == []


@pytest.mark.parametrize("settings", MODES, ids=["serial", "within", "across"])
@pytest.mark.parametrize("seed", range(4))
async def test_nothing_is_lost_and_every_key_keeps_its_order_under_random_trouble(
    scripted: StartServer, tmp_path: Path, seed: int, settings: dict[str, Any]
) -> None:
    """Poison events, random failures and restarts; after the replay each key has all its events."""
    rng = random.Random(seed)
    made = [orders(scn, *rng.sample(range(6), 4)) for scn in range(1, 41)]
    server = await scripted(*made)
    everything = Picky()
    async with serving(make(everything, server.url)):
        await eventually(lambda: len(everything.taken) == 160)
    poison = rng.sample([position for _, position in everything.taken], 5)

    class Unsteady(Picky):
        def onDataEvent(self, event: Event) -> None:
            if self.poison and rng.random() < 0.01:
                raise RuntimeError("trouble")
            super().onDataEvent(event)

    picky = Unsteady(*poison)
    client = make(
        picky, server.url, checkpoints=FileCheckpoints(tmp_path / "cp", sync=False),
        dead_letters=FileDeadLetters(tmp_path / "letters"), max_retries=3, retry_s=0.0001,
        retry_most_s=0.001, checkpoint_every_windows=rng.choice([1, 3]), **settings,
    )  # fmt: skip
    done = 0
    while done < 40:
        done = min(40, done + rng.randrange(5, 25))
        async with serving(client):
            await eventually(lambda at=done: reached(client, at))
    picky.poison.clear()
    before = len(picky.taken)
    await client.replay_dead_letters()
    assert len(picky.taken) > before
    _require_order(picky, everything)


def _require_order(picky: Picky, everything: Picky) -> None:
    expected: dict[int | None, list[Position]] = defaultdict(list)
    for key, position in everything.taken:
        expected[key].append(position)
    assert {position for _, position in picky.taken} == {p for _, p in everything.taken}
    for key, positions in expected.items():
        newest, last = Position(0, 0), 0
        for index, (one, position) in enumerate(picky.taken):
            if one == key:
                rolled_back = any(last < at <= index for at in (*picky.rollbacks, *picky.starts))
                assert position > newest or rolled_back, f"{key}: {position} after {newest}"
                newest, last = position, index
        assert newest == positions[-1]
