"""A tiny ring laps many readers while its bytes are on their way: what they take is the stream."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash
from aiohttp import web

from databus.common.checkpoint import OnlineCheckpoint, Position, encode
from databus.common.errors import ReaderOvertaken
from databus.common.formats import FRAMES_TYPE
from databus.common.frame import FrameSplitter, Op, iter_frames
from databus.common.spans import SpanSplitter
from databus.relay.direct_send import DirectSender
from databus.relay.ring_reader import RingReader
from tests.support.live_relay import LiveRelay
from tests.support.ring_processes import start, true_frames

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

RING_BYTES = 512 << 10
WINDOWS = 6_000
SEND_BUFFER_BYTES = 1 << 15
CLOCK = "test"


@dataclass
class Truth:
    """The stream that the writer writes: its frames, and where each stands."""

    frames: list[bytes] = field(default_factory=list)
    places: dict[Position, int] = field(default_factory=dict)
    ends: int = 0

    @staticmethod
    def of(seed: int) -> Truth:
        truth = Truth()
        for position, frame in true_frames(seed):
            if truth.ends == WINDOWS:
                break
            truth.places[position] = len(truth.frames)
            truth.frames.append(frame)
            truth.ends += frame[11] == Op.END_OF_WINDOW
        return truth


class LappedReader:
    """Reads over raw HTTP, a little at a time, and checks every frame against the truth.

    Invariants:
        I1. A frame is the one after the last, or, after a refusal, any later one.
        I2. ``digest`` is that of the bytes that were taken, ``wanted`` that of the true ones.
    """

    def __init__(self, port: int, truth: Truth, *, spans: bool, receive_bytes: int) -> None:
        self.port, self.truth, self.spans, self.receive_bytes = port, truth, spans, receive_bytes
        self.digest, self.wanted = xxhash.xxh3_64(), xxhash.xxh3_64()
        self.at: Position | None = None
        self.next = 0
        self.frames = self.cut = self.told = self.refused = self.spotted = self.span_frames = 0

    async def run(self, last: Position) -> None:
        while self.at is None or self.at < last:
            await self._ask()

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        start = "start=oldest"
        if self.at is not None:
            start = "checkpoint=" + encode(OnlineCheckpoint("shop", CLOCK, self.at))
        accept = FRAMES_TYPE + (";spans=1" if self.spans else "")
        with closing(socket.socket()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", self.port))
            path = "/v1/shop/stream?" + start.replace('"', "%22").replace(" ", "")
            await loop.sock_sendall(
                connection,
                f"GET {path} HTTP/1.0\r\nHost: here\r\nAccept: {accept}\r\n\r\n".encode(),
            )
            head = b""
            while b"\r\n\r\n" not in head:
                piece = await loop.sock_recv(connection, 4096)
                assert piece, head
                head += piece
            head, _, rest = head.partition(b"\r\n\r\n")
            if b" 410 " in head.partition(b"\r\n")[0]:
                self.refused, self.at = self.refused + 1, None
                return
            assert b" 200 " in head.partition(b"\r\n")[0], head + rest
            await self._take_body(connection, rest)

    async def _take_body(self, connection: socket.socket, piece: bytes) -> None:
        loop = asyncio.get_running_loop()
        splitter: SpanSplitter | FrameSplitter = SpanSplitter() if self.spans else FrameSplitter()
        try:
            while True:
                blocks = splitter.feed(piece)
                for block in blocks if isinstance(blocks, list) else [blocks]:
                    self._take(block)
                piece = await loop.sock_recv(connection, self.receive_bytes)
                if not piece:
                    self.cut += splitter.pending_bytes > 0
                    return
        except ReaderOvertaken:
            self.spotted += 1
        except ConnectionError:
            self.cut += 1

    def _take(self, block: bytes | memoryview) -> None:
        for frame in iter_frames(block):
            if frame.op == Op.HEARTBEAT:
                continue
            if frame.op == Op.ERROR:
                assert b"reader_overtaken" in bytes(frame.after or b"")
                self.told += 1
                continue
            place = self.truth.places[frame.position]
            assert place == self.next or (self.at is None and place > self.next)
            self.digest.update(frame.bytes)
            self.wanted.update(self.truth.frames[place])
            self.at, self.next = frame.position, place + 1
            self.frames += 1
        assert self.digest.intdigest() == self.wanted.intdigest()


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = start("write", tmp_path / "shop", RING_BYTES)
    yield process
    process.stdin.close()
    process.wait(timeout=60)
    process.stdout.close()


async def test_every_byte_that_a_lapped_reader_takes_is_of_the_stream(
    tmp_path: Path, writing: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = DirectSender.__init__

    def make_narrow(sender: DirectSender, request: web.Request, *, spans: bool) -> None:
        make(sender, request, spans=spans)
        connection = request.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    monkeypatch.setattr(DirectSender, "__init__", make_narrow)
    seed = 11
    truth = Truth.of(seed)
    last = max(truth.places)
    live = LiveRelay(tmp_path, ring_bytes=RING_BYTES, clock=CLOCK)
    assert live.folder.path == tmp_path / "shop"
    live.writer.append(b"".join(itertools.islice(truth.frames, 0, _first_window(truth))))
    live.close()
    async with live.served():
        port = int(live.url.rpartition(":")[2])
        readers = [
            LappedReader(port, truth, spans=spans, receive_bytes=receive_bytes)
            for spans, receive_bytes in itertools.product(
                (True, False), (1 << 12, 1 << 14, 1 << 16)
            )
        ]
        writing.stdin.write(f"{seed} {WINDOWS}\n")
        writing.stdin.flush()
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader.run(last))
        with RingReader(live.folder.path) as ring:
            state = ring.snapshot()
    assert state.max == last
    assert state.tail > 10 * RING_BYTES
    assert all(reader.next == len(truth.frames) for reader in readers)
    assert sum(reader.frames for reader in readers) > 10_000


def _first_window(truth: Truth) -> int:
    for index, frame in enumerate(truth.frames):
        if frame[11] == Op.END_OF_WINDOW:
            return index + 1
    raise AssertionError
