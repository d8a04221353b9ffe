"""What else could bring a paced relay's events to N readers: raw loopback, Redis Streams, NATS.

Each peer has a publisher, a process of its own in which the very source of the relay commits
at the same rate, stamps the same times and has several events due at once every 2 ms; what is
due goes out in one write.  The readers are those of ``followers.py``: one process, epoll, and a
kernel that looks at every frame.  A peer that does not keep up may hold its publisher up, which
then stamps later: the rate shows it, besides the latency.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Protocol, Self

import numpy as np

from benchmarks.brokers import (
    NEW_CONSUMER,
    REDIS_BATCH,
    STREAM,
    Broker,
    Nats,
    NatsConnection,
    Redis,
    push_request,
    resp,
)
from benchmarks.followers import (
    KNOWN,
    LAST_SCN,
    Disconnected,
    Readers,
    Received,
    paced_source,
    receive,
    walk,
)
from benchmarks.harness import Report
from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import free_port
from databus.common.compiled.kernels import I64Array, U8Array, jit
from databus.common.config import DatabaseConfig
from databus.common.frame import frame_format
from databus.relay.sources.generator.generator_source import GeneratorSource

START_S = 60
_PROCESSES = mp.get_context("fork")

BODY, KIND, NUMBER, ARRAYS, ENTRIES, DUE, REFUSED = range(KNOWN, KNOWN + 7)
"""The further state of ``walk_wrapped``: bytes of frames still to come; of the line that it is in,
the first byte and the number at the end; of Redis' answer, the arrays begun and the entries
still to come; whether something is to be sent, and whether an error came."""


class Sender(Protocol):
    """Where a publisher sends to; it is in the publisher's process."""

    def send(self, windows: bytes) -> None:
        """Send what is due, which may be nothing."""


class FanOut:
    """Writes the windows to each reader that has come, and nothing else."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self._listener.setblocking(False)
        self._readers: list[socket.socket] = []

    def send(self, windows: bytes) -> None:
        self._accept()
        gone = []
        for reader in self._readers:
            try:
                reader.sendall(windows)
            except OSError:
                gone.append(reader)
        for reader in gone:
            self._readers.remove(reader)
            reader.close()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except BlockingIOError:
                return
            reader.setblocking(True)
            reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._readers.append(reader)


class RedisWriter:
    """Adds each event to the stream, under its scn.

    Raises:
        RuntimeError: Redis refused an event.
    """

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, windows: bytes) -> None:
        events = events_of(windows)
        self._connection.sendall(
            b"".join(resp(b"XADD", STREAM, b"%d-0" % scn, b"d", event) for scn, event in events)
        )
        try:
            came = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not came or came.startswith(b"-") or b"\n-" in came:
            raise RuntimeError(f"Redis answered {came!r}")


class NatsWriter:
    """Publishes each event to the stream's subject and waits for no acknowledgement."""

    def __init__(self, port: int) -> None:
        self._connection = NatsConnection(port)

    def send(self, windows: bytes) -> None:
        events = [event for _, event in events_of(windows)]
        self._connection.send(b"".join(b"PUB e %d\r\n%b\r\n" % (len(e), e) for e in events))
        self._connection.heed()


def events_of(windows: bytes) -> Iterator[tuple[int, bytes]]:
    """The (scn, frame) of each row in whole frames."""
    at, view = 0, memoryview(windows)
    while at < len(windows):
        found = frame_format.trusted_frame(view, at)
        if found.op < frame_format.FIRST_CONTROL_OP:
            yield found.scn, windows[at : at + found.length]
        at += found.length


class Publisher:
    """A process that commits as the relay's generator does, from ``begin`` on, and sends it.

    Entered, it is connected and waits.

    Owner: the benchmark, as a context manager.
    """

    def __init__(self, source: str, connect: Callable[[], Sender]) -> None:
        self._source = source
        self._connect = connect
        self._begin = _PROCESSES.Event()

    def __enter__(self) -> Self:
        ours, theirs = mp.Pipe()
        arguments = (self._source, self._connect, theirs, self._begin)
        self._process = _PROCESSES.Process(target=_publish, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._guardian = Guardian(self._process.pid)
        try:
            if not ours.poll(START_S):
                raise TimeoutError(f"a publisher is not ready after {START_S} s")
            ours.recv()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._guardian.release()

    def begin(self) -> None:
        """Let it commit; any process may."""
        self._begin.set()

    def check(self) -> None:
        """Raise unless it still sends; what ended it is on the standard error."""
        if not self._process.is_alive():
            raise RuntimeError("a publisher has ended")


def _publish(source: str, connect: Callable[[], Sender], ready: Connection, begin: Event) -> None:
    asyncio.run(_commit(source, lambda windows: bool(windows)))  # Loads the generator's kernels.
    sender = connect()
    ready.send(None)
    begin.wait()
    asyncio.run(_commit(source, sender.send))


async def _commit(source: str, send: Callable[[bytes], bool | None]) -> None:
    """Send what is due until ``send`` returns True."""
    generator = GeneratorSource(DatabaseConfig.model_validate({"name": "gen", "url": source}))
    async for batch in generator.stream(0):
        if send(batch.data):
            return


class RawReaders(Readers):
    """Readers of frames that nothing is around."""

    def connect(self, number: int) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))


class WrappedReaders(Readers):
    """Readers of frames that a broker's lines are around."""

    known = KNOWN + 7

    @abstractmethod
    def reply(self, number: int) -> bytes:
        """What is to be sent after an answer, or to a PING."""

    def walked(self, number: int, size: int, out: I64Array) -> int:
        state, now_us = self.states[number], time.time_ns() // 1000
        found = walk_wrapped(self.buffer, size, state, self.heads[number], now_us, out)
        if state[REFUSED]:
            raise RuntimeError(f"reader {number} was refused: {bytes(self.buffer[:size])[-200:]!r}")
        if state[DUE]:
            state[DUE] = 0
            self.sockets[number].sendall(self.reply(number))
        return found


class RedisReaders(WrappedReaders):
    """Readers that ask for what comes after the last id by XREAD BLOCK, again and again."""

    def connect(self, number: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The stream is still empty; "$" would pass over what comes before this is read.
        connection.sendall(_read_after(b"0-0"))
        return connection

    def reply(self, number: int) -> bytes:
        return _read_after(b"%d-0" % self.states[number, LAST_SCN])


def _read_after(last_id: bytes) -> bytes:
    return resp(
        b"XREAD", b"COUNT", b"%d" % REDIS_BATCH, b"BLOCK", b"0", b"STREAMS", STREAM, last_id
    )


class NatsReaders(WrappedReaders):
    """Readers with a consumer each, without acknowledgements, that pushes what is new."""

    def connect(self, number: int) -> socket.socket:
        subject = f"push.{os.getpid()}.{number}"
        connection = NatsConnection(self.port).subscribed(subject)
        with NatsConnection(self.port) as control:
            made = control.ask(NEW_CONSUMER, push_request(subject, "new"))
        if "error" in made:
            raise RuntimeError(made["error"])
        return connection

    def reply(self, number: int) -> bytes:
        return b"PONG\r\n"


@jit
def walk_wrapped(
    data: U8Array, size: int, state: I64Array, head: U8Array, now_us: int, out: I64Array
) -> int:
    """``walk`` over the frames behind the lines of RESP (``$<bytes>``) or NATS (``MSG ..``).

    What is announced with fewer bytes than a frame's header (keys, ids) passes for a line: none
    of ours begins like one that means something.  Returns the number of events.
    """
    at = 0
    count = 0
    while at < size:
        if state[BODY]:
            step = min(state[BODY], size - at)
            count += walk(data[at : at + step], step, state, head, now_us, out[count:])
            state[BODY] -= step
            at += step
            if state[BODY] == 0 and state[ENTRIES]:
                state[ENTRIES] -= 1
                if state[ENTRIES] == 0:
                    state[ARRAYS] = 0
                    state[DUE] = 1
            continue
        byte = int(data[at])
        at += 1
        if byte == 10:  # the end of a line
            kind = state[KIND]
            if kind in (36, 77) and state[NUMBER] >= 72:  # $, MSG
                state[BODY] = state[NUMBER]
            elif kind == 42:  # *: of the answer, of its stream, of the entries, and of each
                state[ARRAYS] += 1
                if state[ARRAYS] == 3:
                    state[ENTRIES] = state[NUMBER]
            elif kind == 80:  # PING
                state[DUE] = 1
            elif kind == 45:  # -ERR
                state[REFUSED] = 1
            state[KIND] = 0
            state[NUMBER] = 0
        elif state[KIND] == 0:
            if byte != 13:
                state[KIND] = byte
        elif byte == 32:
            state[NUMBER] = 0
        elif 48 <= byte <= 57:
            state[NUMBER] = state[NUMBER] * 10 + byte - 48
    return count


@dataclass(frozen=True, slots=True)
class Peer:
    """A way from a source to its readers; ``broker`` is None where nothing is between them.

    ``writer`` is made with the port that the readers connect to, and so are the ``readers``, with
    their number and what is called when all have connected.
    """

    name: str
    broker: type[Broker] | None
    writer: Callable[[int], Sender]
    readers: Callable[[int, int, Callable[[], object]], Readers]


PEERS = (
    Peer("raw loopback", None, FanOut, RawReaders),
    Peer(Redis.name, Redis, RedisWriter, RedisReaders),
    Peer(Nats.name, Nats, NatsWriter, NatsReaders),
)


def present(report: Report) -> list[Peer]:
    """The peers that are requested and here; those that are not here are named in a note."""
    wanted: list[str] | None = report.run.options.peers
    found = []
    for peer in PEERS:
        if wanted is not None and not any(part.lower() in peer.name.lower() for part in wanted):
            continue
        if peer.broker and not peer.broker.is_here():
            program = peer.broker.program
            report.note(f"{peer.name}: {program} is not here; scripts/brokers.sh gets it")
            continue
        found.append(peer)
    return found


def follow_peers(
    peers: list[Peer], updates_per_second: int, count: int, seconds: float, report: Report
) -> dict[str, list[Received]]:
    """The repetitions of each peer, one peer after the other, by their names.

    One whose readers get nothing at all, or are disconnected, is named in a note instead.
    """
    found, run = {}, report.run
    source = paced_source(updates_per_second, run.seed)
    for peer in peers:
        try:
            received = [follow_peer(peer, source, count, seconds) for _ in range(run.repeats)]
        except Disconnected as error:
            report.note(f"{peer.name}, {count} consumers at {updates_per_second}/s: {error}")
            continue
        if all(len(one.latencies_us) for one in received):
            found[peer.name] = received
        else:
            report.note(f"{peer.name}, {count} consumers at {updates_per_second}/s: nothing came")
    return found


def follow_peer(peer: Peer, source: str, count: int, seconds: float) -> Received:
    """What ``count`` readers get for so long, from a server and a publisher of their own.

    Raises:
        Disconnected: a reader has lost its connection.
        RuntimeError: a reader was refused, an event is missing, or the publisher has ended.
    """
    compile_walk()
    with ExitStack() as stack:
        port = stack.enter_context(peer.broker()).port if peer.broker else free_port()
        publisher = stack.enter_context(Publisher(source, partial(peer.writer, port)))
        found = receive(partial(peer.readers, port, count, publisher.begin), seconds)
        publisher.check()
    return found


def compile_walk() -> None:
    """Compile the kernel before the clock runs."""
    byte, state = (
        np.zeros(frame_format.HEADER_BYTES, dtype=np.uint8),
        np.zeros(KNOWN + 7, dtype=np.int64),
    )
    walk_wrapped(byte, 0, state, byte, 0, np.zeros(1, dtype=np.int64))
