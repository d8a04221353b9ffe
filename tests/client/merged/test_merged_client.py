"""Two relays as one stream: order, checkpoints, stalls, callbacks; real rings and real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from databus.client import (
    AsyncMergedWindow,
    Checkpoint,
    Consumer,
    Event,
    FileCheckpoints,
    MergedCheckpoint,
    MergedClient,
    MergeStream,
    OnlineCheckpoint,
    Position,
    Result,
    decode_checkpoint,
    encode_checkpoint,
)
from databus.client.observing.prometheus_metrics import MergeCollector
from databus.client.testing import MergeRecorder
from databus.common.checkpoint import StreamMark
from databus.common.errors import BadCheckpoint, ConfigError, ConsumerFailed
from databus.common.frame.frame_format import Op
from databus.common.frame.window_builder import WindowBuilder
from databus.relay.ring.data_folder import write_document
from tests.support.live_relay import ORDERS, LiveRelay
from tests.support.waiting import eventually

SECOND = 1_000_000


def commit(scn: int, commit_s: float, count: int = 1) -> bytes:
    """A window with a commit time of its own."""
    builder = WindowBuilder(scn, int(commit_s * SECOND))
    for number in range(scn * 100, scn * 100 + count):
        builder.event(
            Op.INSERT,
            ORDERS.source_id,
            ORDERS.fingerprint,
            ORDERS.encode_key((number,)),
            after=ORDERS.encode_row((number, "x" * 20)),
        )
    return builder.end(f"tx{scn}")


class Shops:
    """The relays of two databases."""

    def __init__(self, folder: Path) -> None:
        self.relays = {
            name: LiveRelay(folder / name, database=name, clock=f"test:{name}")
            for name in ("a", "b")
        }

    def resolved(self, name: str, seconds: float) -> None:
        """The relay reports that its database is resolved up to a time."""
        folder = self.relays[name].folder
        document = {"state": "streaming", "resolved_us": int(seconds * SECOND)}
        write_document(folder.status, json.dumps(document).encode(), durable=False)

    @property
    def streams(self) -> list[MergeStream]:
        return [{"database": name, "relays": [relay.url]} for name, relay in self.relays.items()]

    def client(self, **options: Any) -> MergedClient:
        return MergedClient(
            streams=self.streams,
            **{"start": "oldest", "skew_s": 0.0, "idle_checkpoint_s": 0.01, **options},
        )


@pytest.fixture
async def shops(tmp_path: Path) -> AsyncIterator[Shops]:
    shops = Shops(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        for relay in shops.relays.values():
            await stack.enter_async_context(relay.served())
        yield shops
    for relay in shops.relays.values():
        relay.close()


async def take(windows: Any, count: int) -> list[AsyncMergedWindow]:
    return [await anext(windows) for _ in range(count)]


def named(windows: list[AsyncMergedWindow]) -> list[tuple[str, int]]:
    return [(one.stream, one.scn) for one in windows]


async def test_windows_come_in_the_order_of_commit_time(shops: Shops) -> None:
    shops.relays["a"].append(commit(1, 10), commit(2, 30), commit(3, 20), commit(4, 50))
    shops.relays["b"].append(commit(7, 5), commit(8, 30), commit(9, 40), commit(10, 60))
    async with shops.client().awindows() as windows:
        found = await take(windows, 6)
        assert named(found) == [("b", 7), ("a", 1), ("a", 2), ("a", 3), ("b", 8), ("b", 9)]
        # The commit time of scn 3 is before that of scn 2.
        assert [one.merged_us // SECOND for one in found] == [5, 10, 30, 30, 30, 40]
        assert not any(one.is_late for one in found)


async def test_an_idle_database_is_passed_when_its_relay_reports_it_resolved(shops: Shops) -> None:
    shops.relays["a"].append(commit(1, 10), commit(2, 30))
    shops.relays["b"].append(commit(7, 5))
    client = shops.client()
    async with client.awindows() as windows:
        first = await take(windows, 1)
        assert named(first) == [("b", 7)]
        waiting = asyncio.ensure_future(anext(windows))
        await eventually(lambda: client.status.held_by == ("b",))
        shops.resolved("b", 20)
        assert named([await waiting]) == [("a", 1)]
        waiting = asyncio.ensure_future(anext(windows))
        await eventually(lambda: client.status.held_by == ("b",))
        assert client.status.resolved_us == 20 * SECOND
        shops.relays["b"].append(commit(8, 25))
        assert named([await waiting]) == [("b", 8)]


async def test_a_checkpoint_covers_all_streams_and_nothing_behind_it(
    shops: Shops, tmp_path: Path
) -> None:
    shops.relays["a"].append(*(commit(n, n * 10, count=3) for n in range(1, 8)))
    shops.relays["b"].append(*(commit(n, n * 10 + 5) for n in range(1, 8)))
    path = tmp_path / "merged"
    expected = [(name, n) for n in range(1, 8) for name in ("a", "b")]
    found: list[tuple[str, int]] = []
    while len(found) < 12:
        client = shops.client(checkpoints=FileCheckpoints(path, sync=False))
        async with client.awindows() as windows:
            for window in await take(windows, 2):
                found.append((window.stream, window.scn))
                events = await window.aevents()
                assert len(events) == (3 if window.stream == "a" else 1)
                await window.acommit()
                assert client.status.checkpoint == window.checkpoint
            # The next one is taken and not committed: it comes again.
            await take(windows, 1)
    assert found == expected[:12]
    stored = FileCheckpoints(path).load()
    assert isinstance(stored, MergedCheckpoint)
    reached = {one.name: one.checkpoint.position.scn for one in stored.streams if one.checkpoint}
    assert reached == {"a": 6, "b": 6}
    assert stored.position.scn == 65 * SECOND


async def test_the_window_before_can_be_committed_after_the_next_was_taken(shops: Shops) -> None:
    shops.relays["a"].append(commit(1, 10), commit(2, 20), commit(3, 30))
    shops.relays["b"].append(commit(1, 15), commit(2, 99))
    client = shops.client()
    async with client.awindows() as windows:
        first, second, _ = await take(windows, 3)
        await first.acommit()
        checkpoint = client.status.checkpoint
        assert checkpoint is not None
        assert checkpoint.position.scn == 10 * SECOND
        at = {one.name: one.checkpoint for one in checkpoint.streams}
        assert at["a"] is not None
        assert at["a"].position.scn == 1
        await second.acommit()
        assert second.checkpoint == client.status.checkpoint


@pytest.mark.parametrize("on_stall", ["wait", "leave"])
async def test_a_stream_that_stalls_is_named_and_left_behind_by_choice(
    shops: Shops, on_stall: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shops.relays["a"].append(commit(1, 10), commit(2, 20))
    client = shops.client(stall_s=0.2, on_stall=on_stall)
    with caplog.at_level(logging.WARNING, "databus.client"):
        async with client.awindows() as windows:
            waiting = asyncio.ensure_future(anext(windows))
            await eventually(lambda: "stream b has held back the others" in caplog.text)
            assert client.status.stalled == ("b",)
            families = {one.name: one for one in MergeCollector(client).collect()}
            stalled = families["databus_client_merge_stalled"].samples
            assert {one.labels["stream"]: one.value for one in stalled} == {"a": 0, "b": 1}
            if on_stall == "wait":
                shops.relays["b"].append(commit(1, 15))
                rest = [await waiting, *await take(windows, 1)]
                assert named(rest) == [("a", 1), ("b", 1)]
            else:
                rest = [await waiting, *await take(windows, 1)]
                assert named(rest) == [("a", 1), ("a", 2)]
                shops.relays["b"].append(commit(1, 15), commit(2, 25))
                late, next_ = await take(windows, 1), None
                assert [(one.stream, one.is_late, one.merged_us) for one in late] == [
                    ("b", True, 20 * SECOND)
                ]
                shops.relays["a"].append(commit(3, 30))
                (next_,) = await take(windows, 1)
                assert (next_.stream, next_.is_late) == ("b", False)
            await eventually(lambda: client.status.stalled == ())


class Copy(Consumer):
    """Fails at an event, a few times, and holds what was not rolled back."""

    def __init__(self, fails_at: int, failures: int) -> None:
        self.fails_at, self.failures = fails_at, failures
        self.applied: list[tuple[str, int, int]] = []
        self.durable: list[tuple[str, int, int]] = []
        self.checkpoint: Checkpoint | None = None
        self.rollbacks: list[Checkpoint | None] = []
        self.seen = 0
        self.errors: list[str] = []

    def has(self, expected: list[tuple[str, int, int]]) -> bool:
        return self.durable == expected

    def onDataEvent(self, event: Event) -> None:
        self.seen += 1
        if self.failures and len(self.applied) == self.fails_at:
            self.failures -= 1
            raise ValueError("not now")
        self.applied.append((event.database, event.scn, event.seq))

    async def onCheckpoint(self, checkpoint: Checkpoint) -> None:
        self.durable, self.checkpoint = list(self.applied), checkpoint

    def onRollback(self, checkpoint: Checkpoint | None) -> None:
        assert checkpoint == self.checkpoint
        self.rollbacks.append(checkpoint)
        self.applied = list(self.durable)

    def onError(self, error: Any) -> None:
        self.errors.append(error.code)


async def test_a_failing_callback_rolls_back_all_streams(shops: Shops, tmp_path: Path) -> None:
    shops.relays["a"].append(*(commit(n, n * 10, count=2) for n in range(1, 5)))
    shops.relays["b"].append(*(commit(n, n * 10 + 5) for n in range(1, 5)))
    expected = [
        ("a", n, seq) if name == "a" else ("b", n, 0)
        for n in range(1, 5)
        for name, seq in (("a", 0), ("a", 1), ("b", 0))
    ][:-1]  # Nothing follows in a, so the last window of b waits.
    for fails_at in range(len(expected)):
        copy = Copy(fails_at, failures=2)
        client = shops.client(
            consumer=copy, checkpoints=FileCheckpoints(tmp_path / str(fails_at), sync=False),
            retry_s=0.001,
        )  # fmt: skip
        serving = asyncio.ensure_future(client.serve())
        await eventually(partial(copy.has, expected))
        client.stop()
        await serving
        assert len(copy.rollbacks) == 2
        assert copy.seen > len(expected)


async def test_a_consumer_that_never_succeeds_stops_with_its_error(shops: Shops) -> None:
    shops.relays["a"].append(commit(1, 10), commit(2, 20))
    shops.relays["b"].append(commit(1, 15))
    copy = Copy(0, failures=99)
    client = shops.client(consumer=copy, max_retries=2, retry_s=0.001)
    with pytest.raises(ConsumerFailed, match="3 times"):
        await client.serve()
    assert copy.errors == ["consumer_failed"]


async def test_the_conformance_kit_accepts_the_calls_of_a_merge(shops: Shops) -> None:
    shops.relays["a"].append(*(commit(n, n * 10 - n % 3 * 9) for n in range(1, 9)))
    shops.relays["b"].append(*(commit(n, n * 9) for n in range(1, 9)))
    failed: set[int] = set()

    def trouble(call: str, count: int) -> Result | None:
        if count in (9, 24, 40) and count not in failed:
            failed.add(count)
            raise ValueError(call)
        return None

    recorder = MergeRecorder(trouble)
    client = shops.client(consumer=recorder, retry_s=0.001)
    serving = asyncio.ensure_future(client.serve())
    await eventually(lambda: len(recorder.windows) >= 14 and len(failed) == 3)
    client.stop()
    await serving
    recorder.check()


def test_the_conformance_kit_finds_a_wrong_order() -> None:
    recorder = MergeRecorder()
    recorder.windows = [("a", 2, 20, [Position(2, 0)]), ("b", 1, 10, [Position(1, 0)])]
    with pytest.raises(AssertionError, match="after"):
        recorder.check()
    recorder.windows = [("a", 2, 20, [Position(2, 0)]), ("a", 1, 30, [Position(1, 0)])]
    with pytest.raises(AssertionError, match="after"):
        recorder.check()


def test_windows_come_without_an_event_loop_too(tmp_path: Path) -> None:
    asyncio.run(_in_thread(tmp_path))


async def _in_thread(tmp_path: Path) -> None:
    shops = Shops(tmp_path)
    async with shops.relays["a"].served(), shops.relays["b"].served():
        shops.relays["a"].append(commit(1, 10, count=200), commit(2, 20))
        shops.relays["b"].append(commit(1, 15), commit(2, 30))

        def read() -> list[tuple[str, int, int]]:
            found = []
            with shops.client() as client:
                for window in client.windows(idle_s=0.3):
                    found.append((window.stream, window.scn, len(list(window))))
                    window.commit()
            return found

        found = await asyncio.to_thread(read)
    for relay in shops.relays.values():
        relay.close()
    assert found == [("a", 1, 200), ("b", 1, 1), ("a", 2, 1)]


async def test_pause_and_stop(shops: Shops) -> None:
    shops.relays["a"].append(commit(1, 10), commit(2, 20))
    shops.relays["b"].append(commit(1, 15), commit(2, 30))
    client = shops.client()
    async with client.awindows() as windows:
        await take(windows, 1)
        client.pause()
        waiting = asyncio.ensure_future(anext(windows))
        _, pending = await asyncio.wait({waiting}, timeout=0.05)
        assert pending
        client.resume()
        assert named([await waiting]) == [("b", 1)]
        client.stop()
        with pytest.raises(StopAsyncIteration):
            await anext(windows)


async def test_the_stream_that_is_ahead_is_not_read_further(shops: Shops) -> None:
    for n in range(1, 3000):
        shops.relays["a"].append(commit(n, n))
    client = shops.client(buffer_bytes=8 << 10, stall_s=0.1)
    async with client.awindows() as windows:
        waiting = asyncio.ensure_future(anext(windows))
        await eventually(lambda: client.status.stalled == ("b",))
        status = client.status.streams["a"]
        assert status.position is not None
        assert status.position.scn < 300
        assert status.buffered_bytes < 200 << 10  # of 700 KiB
        waiting.cancel()
        await asyncio.wait({waiting})


def test_merged_checkpoints_are_one_line_of_json() -> None:
    inner = OnlineCheckpoint("a", "test:a", Position(4, 2))
    merged = MergedCheckpoint(
        "a+b", "commit time", Position(99), (StreamMark("a", 99, inner), StreamMark("b", 0, None))
    )
    assert decode_checkpoint(encode_checkpoint(merged)) == merged
    for text in ('"streams":3', '"streams":{"a":{}}', '"streams":{"a":{"us":1,"at":{}}}'):
        with pytest.raises(BadCheckpoint):
            decode_checkpoint('{"v":1,"db":"a","clock":"c","mode":"merged","scn":1,' + text + "}")


async def test_wrong_arguments_and_stores_are_refused(shops: Shops, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs streams"):
        MergedClient(streams=[])
    with pytest.raises(ConfigError, match="two streams have the name 'a'"):
        MergedClient(streams=[shops.streams[0], shops.streams[0]])
    with pytest.raises(ConfigError, match="dispatch must be 'serial'"):
        shops.client(dispatch="within_window")
    store = FileCheckpoints(tmp_path / "one", sync=False)
    store.save(OnlineCheckpoint("a", "test:a", Position(1)))
    store.close()
    with pytest.raises(BadCheckpoint, match="not of a merge"):
        await anext(shops.client(checkpoints=store).awindows())
