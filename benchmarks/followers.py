"""Followers of a paced relay: how many events each gets, and how old they are on arrival.

One process reads all connections with epoll and walks the frames in a kernel, so that it is
the relay that is measured.  It asks by HTTP/1.0, whose bodies are the frames and nothing else.
``paced_peers.py`` reads what others send of the same events by the same ``Readers``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing as mp
import select
import socket
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import ClassVar, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from benchmarks.harness import numbers
from benchmarks.relay_process import RelayProcess
from databus.common.compiled.kernels import I64Array, U8Array, jit, load_u32
from databus.common.frame import frame_format

EVENT_BYTES = 2500
BUFFER_BYTES = 1 << 20
RING_BYTES = 256 << 20
VERIFIED_EVENTS = 100
WARM_UP_S = 0.5

SKIP, HAVE, EVENTS, LAST_SCN, GAPS = range(5)  # the kernel's state of one connection
KNOWN = 5


@dataclass(frozen=True, slots=True)
class Received:
    """What the followers of one run got.

    ``rates`` are events a second of each follower; ``latencies_us`` of every event from its
    commit to its arrival, in no order.
    """

    rates: npt.NDArray[np.float64]
    latencies_us: npt.NDArray[np.int64]

    def latency_ms(self, percent: float) -> float:
        """A percentile of the latencies; at least one event must have come."""
        return float(np.percentile(self.latencies_us, percent)) / 1000


class Disconnected(RuntimeError):
    """A reader has lost its connection."""


def paced_source(updates_per_second: int, seed: int) -> str:
    """The URL of a source that commits so many updates of 2.5 KB a second, each in a window."""
    payload_bytes = EVENT_BYTES - frame_format.HEADER_BYTES - 20
    return (
        f"generator://?events_per_second={updates_per_second}&payload_bytes={payload_bytes}"
        f"&keys=100000&events_per_window=1&clock=real&seed={seed}"
    )


def paced_relay(updates_per_second: int, seed: int) -> RelayProcess:
    """A relay over such a source."""
    source = paced_source(updates_per_second, seed)
    return RelayProcess(source, RING_BYTES, until_scn=VERIFIED_EVENTS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part, where a machine is not free for all of it."""
    parser.add_argument("--consumers", type=numbers, help="such as 1,40")
    parser.add_argument("--rates", type=numbers, help="updates a second, such as 100,2000")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--peers", nargs="*", help="parts of their names; all unless given")


def content_hash(relay: RelayProcess) -> str:
    """Hash of the first rows that the relay serves: keys and values, not their times."""
    url = f"{relay.url}/v1/gen/stream?start=oldest&format=frames&max_bytes=1000000"
    with urllib.request.urlopen(url, timeout=30) as answer:
        body = answer.read()
    digest, count = hashlib.sha256(), 0
    for found in frame_format.iter_frames(body):
        if not found.is_control and count < VERIFIED_EVENTS:
            digest.update(found.key)
            digest.update(found.after or b"")
            count += 1
    return digest.hexdigest()[:16]


def follow(relay: RelayProcess, count: int, seconds: float, *, partitioned: bool) -> Received:
    """``count`` followers for so long; with ``partitioned`` each takes its part of the keys.

    Raises:
        RuntimeError: a follower was refused, or was not given every event.
    """
    compile_walk()
    return receive(partial(RelayReaders, relay.port, count, partitioned), seconds)


class Runs(Protocol):
    """A reader for so long; ``Received`` is made of what it has got."""

    def run(self, seconds: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]: ...


def receive(readers: Callable[[], Runs], seconds: float) -> Received:
    """What the readers get for so long, in a process of their own.

    Raises:
        Disconnected: a connection was refused, or ended.
        RuntimeError: a reader was refused, or was not given every event.
    """
    with receiving(readers, seconds) as received:
        return received()


@contextlib.contextmanager
def receiving(readers: Callable[[], Runs], seconds: float) -> Iterator[Callable[[], Received]]:
    """As ``receive``, which waits when what is given here is called."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(
        target=_read_all, args=(theirs, readers, seconds), daemon=True
    )
    process.start()
    theirs.close()

    def received() -> Received:
        try:
            result = ours.recv() if ours.poll(seconds + 60) else RuntimeError("no answer")
        except EOFError:
            result = RuntimeError("the readers' process ended")
        if isinstance(result, Exception):
            raise result
        return Received(*result)

    try:
        yield received
    finally:
        process.join(5)
        process.kill()


def _read_all(answer: Connection, readers: Callable[[], Runs], seconds: float) -> None:
    try:
        answer.send(readers().run(seconds))
    except ConnectionError as error:
        answer.send(Disconnected(str(error)))
    except Exception as error:
        answer.send(RuntimeError(f"the readers failed: {error!r}"))


class Readers(ABC):
    """All connections of one process.

    A subclass has the request of a reader, and what is around the frames.
    ``known`` is how many numbers a connection's state has, ``KNOWN`` for ``walk`` at first;
    ``begin`` is called when all have connected.

    Owner: the process that reads.
    """

    known: ClassVar[int] = KNOWN

    def __init__(
        self, port: int, count: int, begin: Callable[[], object], *, sees_all: bool = True
    ) -> None:
        self.port = port
        self.buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
        self.states = np.zeros((count, self.known), dtype=np.int64)
        self.heads = np.zeros((count, frame_format.HEADER_BYTES), dtype=np.uint8)
        self.sockets: list[socket.socket] = []
        self._numbers: dict[int, int] = {}
        self._poll = select.epoll()
        self._ages = np.empty(BUFFER_BYTES // frame_format.HEADER_BYTES + 1, dtype=np.int64)
        self._latencies: list[npt.NDArray[np.int64]] = []
        self._begin = begin
        self._sees_all = sees_all

    @abstractmethod
    def connect(self, number: int) -> socket.socket:
        """A reader's connection, which has requested all that comes from now on."""

    def walked(self, number: int, size: int, out: I64Array) -> int:
        """Look at ``size`` bytes in the buffer, as ``walk`` does."""
        now_us = time.time_ns() // 1000
        return walk(self.buffer, size, self.states[number], self.heads[number], now_us, out)

    def run(self, seconds: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Connect and read; what comes in the first ``WARM_UP_S`` or less does not count."""
        for number in range(len(self.states)):
            self._add(self.connect(number), number)
            self._take(0.0)  # Those that have connected do not wait for the others.
        self._begin()
        self._read_until(time.perf_counter() + min(WARM_UP_S, seconds / 2))
        counted, self._latencies = self.states[:, EVENTS].copy(), []
        started = time.perf_counter()
        self._read_until(started + seconds)
        elapsed = time.perf_counter() - started
        gaps = int(self.states[:, GAPS].sum())
        if gaps and self._sees_all:
            raise RuntimeError(f"{gaps} windows are missing")
        for connection in self.sockets:
            connection.close()
        rates = (self.states[:, EVENTS] - counted) / elapsed
        return rates, np.concatenate([np.empty(0, dtype=np.int64), *self._latencies])

    def _add(self, connection: socket.socket, number: int) -> None:
        connection.setblocking(False)
        self.sockets.append(connection)
        self._numbers[connection.fileno()] = number
        self._poll.register(connection, select.EPOLLIN)

    def _read_until(self, until: float) -> None:
        while (left := until - time.perf_counter()) > 0:
            self._take(left)

    def _take(self, seconds: float) -> None:
        """Read once what has come, or comes within so long."""
        for fd, _ in self._poll.poll(seconds):
            number = self._numbers[fd]
            size = self.sockets[number].recv_into(self.buffer.data)
            if not size:
                raise ConnectionError(f"reader {number} was disconnected")
            found = self.walked(number, size, self._ages)
            if found:
                self._latencies.append(self._ages[:found].copy())


class RelayReaders(Readers):
    """Followers of a relay; the answers' bodies are frames."""

    credentials: ClassVar[str] = ""
    """A header with its line's end."""

    def __init__(self, port: int, count: int, partitioned: bool) -> None:
        super().__init__(port, count, lambda: None, sees_all=not partitioned)
        self._partitioned = partitioned

    def opened(self) -> socket.socket:
        """A connection to the relay."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def connect(self, number: int) -> socket.socket:
        path = "/v1/gen/stream?start=latest&follow=true&format=frames"
        if self._partitioned:
            path += f"&partition={quote(f'mod:{len(self.states)}:{number}')}"
        connection = self.opened()
        headers = f"Host: localhost\r\n{self.credentials}"
        connection.sendall(f"GET {path} HTTP/1.0\r\n{headers}\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = connection.recv(1)
            if not piece:
                raise ConnectionError("the relay closed before its answer")
            head += piece
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(head.decode(errors="replace"))
        return connection


@jit
def walk(
    data: U8Array, size: int, state: I64Array, head: U8Array, now_us: int, out: I64Array
) -> int:
    """Walk over ``size`` further bytes of frames; the age of each event goes to ``out``.

    ``state`` and ``head`` are what is known of the connection; returns the number of events.
    """
    at = 0
    count = 0
    while at < size:
        if state[SKIP]:
            step = min(state[SKIP], size - at)
            state[SKIP] -= step
            at += step
            continue
        step = min(72 - state[HAVE], size - at)
        have = state[HAVE]
        head[have : have + step] = data[at : at + step]
        state[HAVE] = have + step
        at += step
        if state[HAVE] == 72:
            state[HAVE] = 0
            state[SKIP] = load_u32(head, 4) - 72
            if head[11] < 64:
                scn = (load_u32(head, 20) << 32) + load_u32(head, 16)
                if state[LAST_SCN] and scn != state[LAST_SCN] + 1:
                    state[GAPS] += 1
                state[LAST_SCN] = scn
                state[EVENTS] += 1
                out[count] = now_us - ((load_u32(head, 52) << 32) + load_u32(head, 48))
                count += 1
    return count


def compile_walk() -> None:
    """Compile the kernel before the clock runs."""
    byte = np.zeros(72, dtype=np.uint8)
    walk(byte, 0, np.zeros(5, dtype=np.int64), byte, 0, np.zeros(1, dtype=np.int64))
