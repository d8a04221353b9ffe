"""Large parts of an answer go from the mapping to the socket: whole, or cut where it shows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from databus.common.checkpoint import ORIGIN, SEQ_END, OnlineCheckpoint, Position, encode
from databus.common.errors import ReaderOvertaken
from databus.common.frame.frame_format import Buffer, FrameSplitter, Op, iter_frames
from databus.common.frame.spans import SpanSplitter
from databus.common.http.stream_formats import FRAMES_TYPE
from databus.relay.ring.ring_reader import RingReader
from databus.relay.serving import extents, socket_writer
from databus.relay.serving.extents import Extent, Extents, Head
from databus.relay.serving.socket_writer import SocketWriter
from tests.support.live_relay import CLOCK, ORDERS, LiveRelay, window
from tests.support.waiting import eventually
from tests.support.windows import endless_windows, positions, split_frames

SPANS = {"Accept": f"{FRAMES_TYPE};spans=1", "Accept-Encoding": "identity"}
PLAIN = {"Accept": FRAMES_TYPE, "Accept-Encoding": "identity"}
BOTH = pytest.mark.parametrize("headers", [SPANS, PLAIN], ids=["spans", "plain"])


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=55)) as session:
        yield session


def alike(scn: int) -> bytes:
    """A window that is as long as any other, so that those of two laps lie on each other."""
    return window(scn, [(Op.INSERT, ORDERS, 7)], text="z" * 3000, txid=f"{scn:09}")


class Lapped:
    """A ring of windows that are all alike, and its writer's next lap."""

    def __init__(self, folder: Path, ring_bytes: int = 1 << 20) -> None:
        self.live = LiveRelay(folder, ring_bytes=ring_bytes)
        self.per_lap = ring_bytes // len(alike(1))
        self.scn = 0
        self.write_lap()
        self.truth = b"".join(alike(scn + 1) for scn in range(self.per_lap))

    def write_lap(self) -> None:
        for _ in range(self.per_lap):
            self.scn += 1
            self.live.append(alike(self.scn))


async def received(answer: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """The bytes of a body, and whether it came to its end."""
    body = bytearray()
    try:
        async for piece in answer.content.iter_any():
            body += piece
    except (aiohttp.ClientError, ConnectionError):
        return bytes(body), False
    return bytes(body), True


def understood(body: bytes, headers: dict[str, str]) -> bytes:
    """The frames that a reader takes from a body, up to where it notices something."""
    if headers is PLAIN:
        return FrameSplitter().feed(body)
    splitter, found = SpanSplitter(), b""
    with contextlib.suppress(ReaderOvertaken):
        for start in range(0, len(body), 4096):
            found += b"".join(splitter.feed(body[start : start + 4096]))
    return found


# ---- the bytes ----


@BOTH
@pytest.mark.parametrize("max_bytes", [70_000, 300_001, None])
async def test_polls_of_any_size_give_the_stream_without_gap_or_repetition(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    headers: dict[str, str],
    max_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extents, "EXTENT_BYTES", 256 << 10)
    live = LiveRelay(tmp_path, ring_bytes=1 << 20)
    windows = endless_windows(5, most_bytes=9000)
    while live.writer.state.tail < 3 << 20:
        live.append(next(windows))
    found, at, spans = b"", live.writer.state.prev, 0
    true = b"".join(frame for position, frame in stream_up_to(live.writer.last) if position > at)
    async with live.served():
        while at < live.writer.last:
            query = {"checkpoint": checkpoint(at)}
            if max_bytes is not None:
                query["max_bytes"] = str(max_bytes)
            async with http.get(f"{live.url}/v1/shop/stream", params=query, headers=headers) as got:
                body, is_whole = await received(got)
            assert is_whole
            sent = b"".join(SpanSplitter().feed(body))
            assert headers is SPANS or sent == body
            spans += sum(frame.op == Op.SPAN for frame in iter_frames(body))
            sent = b"".join(bytes(f.bytes) for f in iter_frames(sent) if f.op != Op.HEARTBEAT)
            assert sent
            assert max_bytes is None or len(sent) <= max_bytes or len(split_frames(sent)) == 1
            found += sent
            at = positions(sent)[-1]
    assert found == true
    assert (spans > 0) == (headers is SPANS)
    live.close()


@BOTH
async def test_only_a_reader_that_requested_spans_gets_the_mappings_bytes_without_a_copy(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    headers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that the kernel is handed by these writes is looked at, not only what arrives."""
    writev, owners = os.writev, []

    def note(fd: int, parts: Sequence[Buffer]) -> int:
        owners.append([type(part.obj) for part in parts if isinstance(part, memoryview)])
        return writev(fd, parts)

    monkeypatch.setattr(socket_writer.os, "writev", note)
    lapped = Lapped(tmp_path)
    async with lapped.live.served():
        async with http.get(f"{lapped.live.url}/v1/shop/stream", headers=headers) as answer:
            body, is_whole = await received(answer)
    assert is_whole
    assert understood(body, headers) == lapped.truth
    frames = [found for found in owners if found]
    assert frames, "frames went out by these writes"
    assert all(found == [mmap if headers is SPANS else bytearray] for found in frames)
    lapped.live.close()


def stream_up_to(last: Position) -> list[tuple[Position, bytes]]:
    found: list[tuple[Position, bytes]] = []
    for block in endless_windows(5, most_bytes=9000):
        found += split_frames(block)
        if found[-1][0] >= last:
            return found
    raise AssertionError


def checkpoint(at: Position) -> str:
    return encode(OnlineCheckpoint("shop", CLOCK, at))


def test_readers_share_what_was_walked_until_the_writer_comes_by(tmp_path: Path) -> None:
    lapped = Lapped(tmp_path)
    with RingReader(lapped.live.folder.path) as ring:
        known = Extents()
        start = ring.find(ORIGIN)
        first = known.at(ring, start, None)
        assert first is not None
        assert known.at(ring, start, None) == first
        assert known.walk_count == 1
        assert first[0].last == Position(lapped.per_lap, 1)
        assert first[0].row_count == lapped.per_lap
        assert known.at(ring, first[0].after, None) is None
        head = Head(ring, ring.file)
        assert not head.has_passed(first[0].start)
        lapped.write_lap()
        assert head.has_passed(first[0].start)
        with pytest.raises(ReaderOvertaken):
            known.at(ring, start, None)
    lapped.live.close()


def test_what_fits_into_one_extent_is_one_from_any_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "EXTENT_BYTES", grid := 256 << 10)
    lapped = Lapped(tmp_path)
    with RingReader(lapped.live.folder.path) as ring:
        known = Extents()
        start = ring.find(Position(5, SEQ_END))
        limited, is_limited = known.at(ring, start, grid) or pytest.fail("it is copied")
        assert is_limited
        assert grid - len(alike(1)) < limited.size_bytes <= grid
        cut, _ = known.at(ring, start, None) or pytest.fail("it is copied")
        assert cut.stop <= grid < limited.stop
    lapped.live.close()


def test_extents_that_were_evicted_are_forgotten(tmp_path: Path) -> None:
    lapped = Lapped(tmp_path)
    with RingReader(lapped.live.folder.path) as ring:
        known, first = Extents(), ring.snapshot().prev
        for _ in range(20):
            at = ring.find(first)
            while at < ring.snapshot().tail:
                found = known.at(ring, at, 100_000)
                at = found[0].after if found else ring.read(at, 100_000)[1]
            lapped.write_lap()
            first = ring.snapshot().prev
        assert known.walk_count > 20 * 4
        assert len(known._known) <= 20
    lapped.live.close()


# ---- the writer comes by ----


def interfering(
    monkeypatch: pytest.MonkeyPatch, lap: Callable[[], None], *, at_write: int, take: int
) -> None:
    """Let the writer overwrite the ring between a sender's check and the kernel's copy.

    It happens at the write with this number; all writes before take ``take`` bytes at most.
    """
    write = SocketWriter._write
    count = 0

    def interfere(sender: SocketWriter, parts: Sequence[Buffer]) -> int:
        nonlocal count
        count += 1
        if count == at_write:
            lap()
        if count < at_write and len(parts) == 3:
            parts = (parts[0], parts[1][:take], b"")
        return write(sender, parts)

    monkeypatch.setattr(SocketWriter, "_write", interfere)


@BOTH
@pytest.mark.parametrize("at_write", [1, 2, 5])
async def test_what_the_writer_puts_there_during_a_send_is_not_taken_for_data(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    headers: dict[str, str],
    at_write: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lapped = Lapped(tmp_path)
    # A multiple of the windows' length: what is torn consists of whole frames with a good CRC.
    take = 11 * len(alike(1))
    interfering(monkeypatch, lapped.write_lap, at_write=at_write, take=take)
    async with lapped.live.served():
        url = f"{lapped.live.url}/v1/shop/stream"
        async with http.get(url, params={"start": "oldest"}, headers=headers) as answer:
            body, is_whole = await received(answer)
        assert not is_whole
        assert lapped.truth.startswith(understood(body, headers))
        async with http.get(f"{lapped.live.url}/v1/status") as answer:
            served = (await answer.json())["databases"][0]["served"]
        assert (served["overtaken"], served["readers"]) == (1, 0)
        async with http.get(url, params={"scn": "1"}, headers=headers) as answer:
            assert answer.status == 410
            assert (await answer.json(content_type=None))["code"] == "scn_too_old"
    lapped.live.close()


@BOTH
async def test_a_reader_that_is_overtaken_between_two_extents_is_notified(
    tmp_path: Path,
    http: aiohttp.ClientSession,
    headers: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extents, "EXTENT_BYTES", 128 << 10)
    lapped = Lapped(tmp_path)
    send, count = SocketWriter.send, 0

    async def interfere(sender: SocketWriter, ring: RingReader, extent: Extent) -> None:
        nonlocal count
        count += 1
        if count == 3:
            lapped.write_lap()
        await send(sender, ring, extent)

    monkeypatch.setattr(SocketWriter, "send", interfere)
    async with lapped.live.served():
        url = f"{lapped.live.url}/v1/shop/stream"
        async with http.get(url, params={"start": "oldest"}, headers=headers) as answer:
            body, is_whole = await received(answer)
    assert is_whole
    frames = list(iter_frames(understood(body, headers)))
    assert frames[-1].op == Op.ERROR
    assert json.loads(bytes(frames[-1].after or b""))["code"] == "reader_overtaken"
    data = b"".join(bytes(frame.bytes) for frame in frames[:-1])
    assert lapped.truth.startswith(data)
    assert len(data) > 2 * (64 << 10)
    assert frames[-1].position == frames[-2].position
    lapped.live.close()


def port_of(live: LiveRelay) -> int:
    return int(live.url.rpartition(":")[2])


class Stuck:
    """A reader that takes the head of its answer, and then nothing until the test lets it."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self._socket.connect(("127.0.0.1", port))
        self._socket.sendall(
            b"GET /v1/shop/stream?start=oldest HTTP/1.0\r\nHost: here\r\nAccept: %s\r\n\r\n"
            % SPANS["Accept"].encode()
        )
        self._socket.setblocking(False)

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def has_begun(self) -> bool:
        """Whether a thread has sent some of an extent; the loop sends the head alone."""
        try:
            return len(self._socket.recv(1 << 14, socket.MSG_PEEK)) > 1 << 12
        except BlockingIOError:
            return False

    async def rest(self) -> bytes:
        """Everything to the end or the reset, without the answer's head."""
        loop, found = asyncio.get_running_loop(), bytearray()
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(self._socket, 1 << 16):
                found += piece
        head, _, body = bytes(found).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
        return body


@pytest.fixture
def cleaner() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


async def test_a_reader_that_is_stuck_holds_up_neither_the_writer_nor_the_tail(
    tmp_path: Path, http: aiohttp.ClientSession, cleaner: contextlib.ExitStack
) -> None:
    lapped = Lapped(tmp_path, 16 << 20)
    live = lapped.live
    async with live.served():
        stuck = [cleaner.enter_context(Stuck(port_of(live))) for _ in range(3)]
        url = f"{live.url}/v1/shop/stream"
        await eventually(lambda: all(reader.has_begun() for reader in stuck), 60)
        query = {"start": "latest", "follow": "true"}
        async with http.get(url, params=query, headers=SPANS) as answer:
            splitter, seen = SpanSplitter(), lapped.scn
            while seen < 4 * lapped.per_lap:
                for _ in range(100):
                    lapped.scn += 1
                    live.append(alike(lapped.scn))
                while seen < lapped.scn:
                    for block in splitter.feed(await answer.content.readany()):
                        for frame in iter_frames(block):
                            if frame.op == Op.INSERT:
                                assert frame.scn == seen + 1
                                seen = frame.scn
        for reader in stuck:
            body = await reader.rest()
            got = understood(body, SPANS)
            assert lapped.truth.startswith(got)
            assert len(got) < len(lapped.truth)

        async def overtaken() -> bool:
            async with http.get(f"{live.url}/v1/status") as status:
                served = (await status.json())["databases"][0]["served"]
            return bool(served["overtaken"] == 3 and served["readers"] == 0)

        await eventually(overtaken, 60)
    live.close()


async def test_a_ring_that_is_replaced_ends_what_was_being_sent_of_it(
    tmp_path: Path, cleaner: contextlib.ExitStack
) -> None:
    lapped = Lapped(tmp_path, 16 << 20)
    live = lapped.live
    async with live.served():
        stuck = cleaner.enter_context(Stuck(port_of(live)))
        async with aiohttp.ClientSession() as http:

            async def sent() -> bool:
                async with http.get(f"{live.url}/v1/status") as status:
                    return bool((await status.json())["databases"][0]["served"]["readers"])

            await eventually(stuck.has_begun, 60)
            live.writer.resize(16 << 20)
            await sent()  # the worker has looked, and unmapped the old file
            got = understood(await stuck.rest(), SPANS)
            assert lapped.truth.startswith(got)
            assert len(got) < len(lapped.truth)
    live.close()


async def test_nothing_is_written_for_a_reader_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleaner: contextlib.ExitStack
) -> None:
    lapped = Lapped(tmp_path, 8 << 20)
    senders: list[SocketWriter] = []
    make = SocketWriter.__init__

    def remember(sender: SocketWriter, *arguments: Any, **named: Any) -> None:
        make(sender, *arguments, **named)
        senders.append(sender)

    monkeypatch.setattr(SocketWriter, "__init__", remember)
    async with lapped.live.served():
        stuck = cleaner.enter_context(Stuck(port_of(lapped.live)))
        await eventually(lambda: senders and senders[0].write_count, 60)
        async with aiohttp.ClientSession() as http:
            counts = []
            for _ in range(20):
                async with http.get(f"{lapped.live.url}/healthz") as answer:
                    assert answer.status == 200
                counts.append(senders[0].write_count)
            assert counts[-1] == counts[10]
            got = understood(await stuck.rest(), SPANS)
        assert lapped.truth == got[: len(lapped.truth)]
        # Each wait for room is for a good part of the send buffer, not for a page.
        assert senders[0].write_count < 16 * len(got) // (64 << 10)
    lapped.live.close()


def test_on_the_workers_own_loop_readers_come_go_and_are_cut_off(
    tmp_path: Path, cleaner: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    lapped = Lapped(tmp_path, 8 << 20)

    async def served(http: aiohttp.ClientSession) -> dict[str, int]:
        async with http.get(f"{lapped.live.url}/v1/status") as answer:
            counts: dict[str, int] = (await answer.json())["databases"][0]["served"]
        return counts

    async def scenario() -> None:
        async with lapped.live.served(), aiohttp.ClientSession() as http:
            url = f"{lapped.live.url}/v1/shop/stream"
            async with http.get(url, headers=SPANS) as answer:
                body, is_whole = await received(answer)
            assert is_whole
            assert understood(body, SPANS) == lapped.truth
            gone, overtaken = (cleaner.enter_context(Stuck(port_of(lapped.live))) for _ in "ab")

            async def readers(count: int) -> bool:
                return (await served(http))["readers"] == count

            await eventually(lambda: readers(2), 60)
            gone.__exit__()
            await eventually(lambda: readers(1), 60)
            await eventually(overtaken.has_begun, 60)
            lapped.write_lap()
            assert lapped.truth.startswith(understood(await overtaken.rest(), SPANS))
            await eventually(lambda: readers(0), 60)
            assert (await served(http))["overtaken"] == 1

    uvloop.run(scenario())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    lapped.live.close()
