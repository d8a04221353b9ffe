"""What is sent in threads ends when it is sent, fails, or is cancelled, and holds up no other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.common.checkpoint import ORIGIN
from databus.relay.ring.ring import Ring
from databus.relay.serving.send_threads import MAX_THREADS, SendThreads
from tests.support.waiting import PATIENCE, eventually
from tests.support.windows import endless_windows

SIZE = 8 << 20


class Stream:
    """One side sends ``SIZE`` bytes, the other reads when the test lets it."""

    def __init__(self) -> None:
        self.sender, self.reader = socket.socketpair()
        self.sender.setblocking(False)
        self.data = memoryview(os.urandom(SIZE))
        self.sent = 0
        self.steps = 0
        self.threads: set[int] = set()

    def step(self) -> bool:
        self.steps += 1
        self.threads.add(threading.get_ident())
        with contextlib.suppress(BlockingIOError):
            self.sent += self.sender.send(self.data[self.sent :])
        return self.sent == SIZE

    def close(self) -> None:
        self.sender.close()
        self.reader.close()

    def read_all(self) -> bytes:
        found = bytearray()
        while len(found) < SIZE and (piece := self.reader.recv(1 << 20)):
            found += piece
        return bytes(found)


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    found = [Stream() for _ in range(MAX_THREADS * 3)]
    yield found
    for one in found:
        one.close()


async def test_more_answers_than_threads_go_out_whole_though_one_reader_is_stuck(
    streams: list[Stream],
) -> None:
    threads = SendThreads()
    running = [asyncio.create_task(threads.run(one.sender.fileno(), one.step)) for one in streams]
    stuck, *others = streams
    got = await asyncio.gather(*(asyncio.to_thread(one.read_all) for one in others))
    await asyncio.gather(*running[1:])
    assert [bytes(one.data) for one in others] == got
    assert not running[0].done()
    used = set().union(*(one.threads for one in streams))
    assert threading.get_ident() not in used
    assert len(used) <= MAX_THREADS
    assert await asyncio.to_thread(stuck.read_all) == stuck.data
    await running[0]


async def test_a_step_that_fails_fails_the_sending(streams: list[Stream]) -> None:
    threads, stream = SendThreads(), streams[0]
    running = asyncio.create_task(threads.run(stream.sender.fileno(), stream.step))
    await eventually(lambda: stream.steps, 60)
    stream.reader.close()
    with pytest.raises(ConnectionError):
        await running


async def test_after_a_cancellation_no_thread_comes_back_to_the_descriptor(
    streams: list[Stream],
) -> None:
    threads, stream = SendThreads(), streams[0]
    running = asyncio.create_task(threads.run(stream.sender.fileno(), stream.step))
    await eventually(lambda: stream.steps, 60)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    steps = stream.steps
    assert stream.reader.recv(1 << 20)
    # The same thread has served another one since.
    stream.reader.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while stream.reader.recv(1 << 20):
            pass
    for one in streams[1:]:
        task = asyncio.create_task(threads.run(one.sender.fileno(), one.step))
        assert await asyncio.to_thread(one.read_all) == one.data
        await task
    assert stream.steps == steps


def test_a_file_that_is_held_is_unmapped_when_it_is_let_go(tmp_path: Path) -> None:
    with Ring.create(tmp_path, 1 << 20) as writer:
        writer.append(next(endless_windows(1, most_bytes=5000)))
        reader = Ring.open_reader(tmp_path)
        file, at = reader.file, reader.find(ORIGIN)
        assert file.hold()
        view = file.view[file.file_offset(at) :][:100]
        first = bytes(view)
        reader.close()
        assert not file.hold()
        assert bytes(view) == first
        del view
        assert not file.map.closed
        file.release()
        assert file.map.closed


async def test_a_failed_wait_is_an_error_and_the_thread_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = SendThreads()
    monkeypatch.setattr(threads, "_most", 1)
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(PermissionError):
        await asyncio.wait_for(threads.run(file.fileno(), lambda: False), 10 * PATIENCE)
    stream = Stream()
    await asyncio.wait_for(threads.run(stream.sender.fileno(), lambda: True), 10 * PATIENCE)
    stream.sender.close()
    stream.reader.close()
