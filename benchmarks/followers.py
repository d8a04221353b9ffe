"""Followers of a paced relay: how many events each gets, and how old they are on arrival.

One process reads all connections with epoll and walks the frames in a kernel, so that it is
the relay that is measured.  It asks by HTTP/1.0, whose bodies are the frames and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing as mp
import select
import socket
import time
import urllib.request
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from benchmarks.harness import numbers
from benchmarks.relay_process import RelayProcess
from databus.common import frame
from databus.common.kernels import I64Array, U8Array, jit, load_u32

EVENT_BYTES = 2500
BUFFER_BYTES = 1 << 20
RING_BYTES = 256 << 20
VERIFIED_EVENTS = 100
WARM_UP_S = 0.5

SKIP, HAVE, EVENTS, LAST_SCN, GAPS = range(5)  # what the kernel knows of one connection


@dataclass(frozen=True, slots=True)
class Received:
    """What the followers of one run got.

    ``rates`` are events a second of each follower; ``latencies_us`` of every event from its
    commit to its arrival, in no order.
    """

    rates: npt.NDArray[np.float64]
    latencies_us: npt.NDArray[np.int64]

    def latency_ms(self, percent: float) -> float:
        """A percentile of the latencies."""
        return float(np.percentile(self.latencies_us, percent)) / 1000


def paced_relay(updates_per_second: int, seed: int) -> RelayProcess:
    """A relay whose source commits so many updates of 2.5 KB a second, one in each window."""
    payload_bytes = EVENT_BYTES - frame.HEADER_BYTES - 20
    source = (
        f"generator://?events_per_second={updates_per_second}&payload_bytes={payload_bytes}"
        f"&keys=100000&events_per_window=1&clock=real&seed={seed}"
    )
    return RelayProcess(source, RING_BYTES, until_scn=VERIFIED_EVENTS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part, where a machine is not free for all of it."""
    parser.add_argument("--consumers", type=numbers, help="such as 1,40")
    parser.add_argument("--rates", type=numbers, help="updates a second, such as 100,2000")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")


def content_hash(relay: RelayProcess) -> str:
    """Hash of the first rows that the relay serves: keys and values, not their times."""
    url = f"{relay.url}/v1/gen/stream?start=oldest&format=frames&max_bytes=1000000"
    with urllib.request.urlopen(url, timeout=30) as answer:
        body = answer.read()
    digest, count = hashlib.sha256(), 0
    for found in frame.iter_frames(body):
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
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(
        target=_follow_all, args=(theirs, relay.port, count, seconds, partitioned), daemon=True
    )
    _walk_nothing()
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(seconds + 60) else "no answer"
    except EOFError:
        result = "the process ended"
    finally:
        process.join(5)
        process.kill()
    if isinstance(result, str):
        raise RuntimeError(f"the followers failed: {result}")
    return Received(*result)


def _follow_all(
    answer: Connection, port: int, count: int, seconds: float, partitioned: bool
) -> None:
    try:
        rates, latencies = _Readers(port, count, partitioned).run(seconds)
        answer.send((rates, latencies))
    except Exception as error:
        answer.send(repr(error))


class _Readers:
    """All connections of one process."""

    def __init__(self, port: int, count: int, partitioned: bool) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.epoll()
        self._states = np.zeros((count, 5), dtype=np.int64)
        self._heads = np.zeros((count, frame.HEADER_BYTES), dtype=np.uint8)
        self._numbers: dict[int, int] = {}
        self._buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
        self._latencies: list[npt.NDArray[np.int64]] = []
        self._partitioned = partitioned
        for number in range(count):
            partition = f"mod:{count}:{number}" if partitioned else ""
            self._connect(port, number, partition)

    def _connect(self, port: int, number: int, partition: str) -> None:
        path = "/v1/gen/stream?start=latest&follow=true&format=frames"
        path += f"&partition={quote(partition)}" if partition else ""
        connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            piece = connection.recv(1)
            if not piece:
                raise ConnectionError("the relay closed before its answer")
            head += piece
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(head.decode(errors="replace"))
        connection.setblocking(False)
        self._sockets[connection.fileno()] = connection
        self._numbers[connection.fileno()] = number
        self._poll.register(connection, select.EPOLLIN)

    def run(self, seconds: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Read; what comes in the first ``WARM_UP_S`` or less does not count."""
        self._read_until(time.perf_counter() + min(WARM_UP_S, seconds / 2))
        counted, self._latencies = self._states[:, EVENTS].copy(), []
        started = time.perf_counter()
        self._read_until(started + seconds)
        elapsed = time.perf_counter() - started
        gaps = int(self._states[:, GAPS].sum())
        if gaps and not self._partitioned:
            raise RuntimeError(f"{gaps} windows are missing")
        for connection in self._sockets.values():
            connection.close()
        rates = (self._states[:, EVENTS] - counted) / elapsed
        return rates, np.concatenate([np.empty(0, dtype=np.int64), *self._latencies])

    def _read_until(self, until: float) -> None:
        out = np.empty(BUFFER_BYTES // frame.HEADER_BYTES + 1, dtype=np.int64)
        view = self._buffer.data
        while (left := until - time.perf_counter()) > 0:
            for fd, _ in self._poll.poll(left):
                size = self._sockets[fd].recv_into(view)
                if not size:
                    raise ConnectionError("the relay closed a follower's answer")
                number = self._numbers[fd]
                found = walk(
                    self._buffer,
                    size,
                    self._states[number],
                    self._heads[number],
                    time.time_ns() // 1000,
                    out,
                )
                if found:
                    self._latencies.append(out[:found].copy())


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


def _walk_nothing() -> None:
    """Compile the kernel before the clock runs."""
    byte = np.zeros(72, dtype=np.uint8)
    walk(byte, 0, np.zeros(5, dtype=np.int64), byte, 0, np.zeros(1, dtype=np.int64))
