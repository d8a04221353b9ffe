"""A reader over a socket that a ring's writer laps, with every frame it takes held to the truth."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash

from databus.common.checkpoint import OnlineCheckpoint, Position, encode
from databus.common.errors import FormatError, ReaderOvertaken
from databus.common.frame.frame_format import FrameSplitter, FrameView, Op, iter_frames, scan
from databus.common.frame.spans import SpanSplitter
from databus.common.http.stream_formats import FRAMES_TYPE
from tests.support.window_ends import as_source_gave


class Truth(Protocol):
    """The stream that the writer writes, its frames numbered."""

    def index(self, position: Position) -> int:
        """The number of the frame there; a KeyError where there is none."""

    def frame(self, index: int) -> bytes:
        """The frame with this number."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How a reader reads: what it asks for, and how much it takes at once.

    ``pause`` comes after the first bytes of each body; ``ends_are_marked`` is for bodies in
    chunks, whose end can be distinguished from a connection that is cut off.  ``where`` has to take
    all rows.
    """

    spans: bool
    follow: bool = False
    wait_ms: int = 0
    receive_bytes: int = 1 << 16
    ends_are_marked: bool = False
    pause: Callable[[], Awaitable[object]] | None = None
    where: str = ""


class _Body:
    """The bytes of an HTTP body, in chunks or as they come."""

    def __init__(self, *, chunked: bool) -> None:
        self.has_ended = False
        self._chunked = chunked
        self._raw = b""
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """What is there of the body now, whole chunks or not."""
        if not self._chunked:
            return data
        raw, found = self._raw + data, []
        while raw:
            if self._left > 2:
                found.append(raw[: self._left - 2])
            if self._left:
                taken = min(self._left, len(raw))
                raw, self._left = raw[taken:], self._left - taken
                continue
            line, newline, rest = raw.partition(b"\r\n")
            if not newline:
                break
            raw, self._left = rest, int(line, 16) + 2
            self.has_ended |= self._left == 2
        self._raw = raw
        return b"".join(found)


class LappedReader:
    """Reads over raw HTTP, a little at a time, and checks every frame against the truth.

    Invariants:
        I1. A frame is the one after the last, or, after a refusal, any later one.
        I2. ``digest`` is that of the bytes that were taken, ``wanted`` that of the true ones.
        I3. ``cut``, ``notified``, ``refused`` and ``spotted`` count how often the writer lapped it;
            ``span_frames`` are the SPANs that its bodies began with or had between frames.
    """

    def __init__(
        self, port: int, truth: Truth, manners: Manners, *, database: str, clock: str
    ) -> None:
        self.port, self.truth, self.manners = port, truth, manners
        self.database, self.clock = database, clock
        self.digest, self.wanted = xxhash.xxh3_64(), xxhash.xxh3_64()
        self.at: Position | None = None
        self.next = 0
        self.frames = self.cut = self.notified = self.refused = self.spotted = self.span_frames = 0
        self.last: Position | None = None

    @property
    def lapped(self) -> int:
        """How often the writer came by and the reader noticed, by whatever sign."""
        return self.cut + self.notified + self.refused + self.spotted

    @property
    def is_done(self) -> bool:
        """Whether it has come to ``last``."""
        return self.last is not None and self.at is not None and self.at >= self.last

    async def run(self) -> None:
        """Read until ``last``, which may be set meanwhile."""
        while not self.is_done:
            await self._ask()

    def _request(self) -> str:
        manners = self.manners
        start = "start=oldest"
        if self.at is not None:
            start = "checkpoint=" + encode(OnlineCheckpoint(self.database, self.clock, self.at))
        path = f"/v1/{self.database}/stream?" + start.replace('"', "%22").replace(" ", "")
        if manners.follow:
            path += "&follow=true"
        elif manners.wait_ms:
            path += f"&wait_ms={manners.wait_ms}"
        if manners.where:
            path += "&where=" + manners.where.replace(" ", "%20")
        accept = FRAMES_TYPE + (";spans=1" if manners.spans else "")
        version = "1.1" if manners.ends_are_marked else "1.0"
        return (
            f"GET {path} HTTP/{version}\r\nHost: here\r\nConnection: close\r\n"
            f"Accept: {accept}\r\n\r\n"
        )

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.closing(socket.socket()) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", self.port))
            await loop.sock_sendall(connection, self._request().encode())
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

    async def _take_body(self, connection: socket.socket, received: bytes) -> None:
        loop = asyncio.get_running_loop()
        manners = self.manners
        body = _Body(chunked=manners.ends_are_marked)
        splitter: SpanSplitter | FrameSplitter = (
            SpanSplitter() if manners.spans else FrameSplitter()
        )
        raw = FrameSplitter()
        pause = manners.pause
        try:
            while True:
                piece = body.feed(received)
                self._count_spans(raw, piece)
                blocks = splitter.feed(piece)
                for block in blocks if isinstance(blocks, list) else [blocks]:
                    self._take(block)
                if body.has_ended:
                    assert not splitter.pending_bytes, (
                        "only a reader that was cut off has half a frame"
                    )
                    return
                if self.is_done:
                    return
                if pause is not None and self.last is None:
                    await pause()
                    pause = None
                received = await loop.sock_recv(connection, manners.receive_bytes)
                if not received:
                    self.cut += manners.ends_are_marked or splitter.pending_bytes > 0
                    return
        except ReaderOvertaken:
            self.spotted += 1
        except ConnectionError:
            self.cut += 1

    def _count_spans(self, raw: FrameSplitter, piece: bytes) -> None:
        """Count the SPANs of a body, which do not come out of a ``SpanSplitter``."""
        with contextlib.suppress(FormatError):  # torn, which is for the splitter to notice
            ops = scan(raw.feed(piece), verify=False).op
            self.span_frames += int(np.count_nonzero(ops == Op.SPAN))

    def _take(self, block: bytes | memoryview) -> None:
        for frame in iter_frames(block):
            if frame.op == Op.HEARTBEAT:
                continue
            if frame.op == Op.ERROR:
                assert b"reader_overtaken" in bytes(frame.after or b"")
                self.notified += 1
                continue
            self._take_frame(frame)
        assert self.digest.intdigest() == self.wanted.intdigest()

    def _take_frame(self, frame: FrameView) -> None:
        index = self.truth.index(frame.position)
        assert index == self.next or (self.at is None and index > self.next)
        self.digest.update(as_source_gave(frame.bytes))
        self.wanted.update(as_source_gave(self.truth.frame(index)))
        self.at, self.next = frame.position, index + 1
        self.frames += 1
