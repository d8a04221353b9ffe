"""A tiny ring laps many readers while its bytes are on their way: what they take is the stream."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op
from databus.relay.ring.ring_reader import RingReader
from databus.relay.serving.socket_writer import SocketWriter
from tests.support.lapped_reader import LappedReader, Manners
from tests.support.live_relay import LiveRelay
from tests.support.ring_processes import start, true_frames
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

RING_BYTES = 512 << 10
WINDOWS = 6_000
SEND_BUFFER_BYTES = 1 << 15
CLOCK = "test"


@dataclass
class TrueStream:
    """The windows that the writer has to write."""

    frames: list[bytes] = field(default_factory=list)
    indexes: dict[Position, int] = field(default_factory=dict)

    @staticmethod
    def of(seed: int) -> TrueStream:
        truth, ends = TrueStream(), 0
        for position, frame in true_frames(seed):
            if ends == WINDOWS:
                break
            truth.indexes[position] = len(truth.frames)
            truth.frames.append(frame)
            ends += frame[11] == Op.END_OF_WINDOW
        return truth

    def index(self, position: Position) -> int:
        return self.indexes[position]

    def frame(self, index: int) -> bytes:
        return self.frames[index]


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start("write", tmp_path / "shop", RING_BYTES)
    yield process
    process.stdin.close()
    process.wait(timeout=60 * PATIENCE)
    process.stdout.close()


async def test_every_byte_that_a_lapped_reader_takes_is_of_the_stream(
    tmp_path: Path, writing: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = SocketWriter.__init__

    def make_narrow(sender: SocketWriter, request: web.Request, *, spans: bool) -> None:
        make(sender, request, spans=spans)
        connection = request.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    monkeypatch.setattr(SocketWriter, "__init__", make_narrow)
    seed = 11
    truth = TrueStream.of(seed)
    last = max(truth.indexes)
    live = LiveRelay(tmp_path, ring_bytes=RING_BYTES, clock=CLOCK)
    assert live.folder.path == tmp_path / "shop"
    live.writer.append(b"".join(itertools.islice(truth.frames, 0, _first_window(truth))))
    live.close()
    async with live.served():
        port = int(live.url.rpartition(":")[2])
        readers = [
            LappedReader(
                port,
                truth,
                Manners(spans=spans, receive_bytes=receive_bytes),
                database="shop",
                clock=CLOCK,
            )
            for spans, receive_bytes in itertools.product(
                (True, False), (1 << 12, 1 << 14, 1 << 16)
            )
        ]
        for reader in readers:
            reader.last = last
        writing.stdin.write(f"{seed} {WINDOWS}\n")
        writing.stdin.flush()
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader.run())
        with RingReader(live.folder.path) as ring:
            state = ring.snapshot()
    assert state.max == last
    assert state.tail > 10 * RING_BYTES
    assert all(reader.next == len(truth.frames) for reader in readers)
    assert sum(reader.frames for reader in readers) > 10_000
    for reader in readers:
        assert reader.lapped, "none of it means anything if the writer never came by"
        assert (reader.span_frames > 0) == reader.manners.spans, (
            "extents went out, to the readers that requested them"
        )
    for spans in (True, False):
        cut = sum(reader.cut for reader in readers if reader.manners.spans == spans)
        assert cut, "in mid-frame, too"


def _first_window(truth: TrueStream) -> int:
    for index, frame in enumerate(truth.frames):
        if frame[11] == Op.END_OF_WINDOW:
            return index + 1
    raise AssertionError
