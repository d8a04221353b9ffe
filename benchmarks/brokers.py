"""What a user would pick instead, private and on the same events: NATS JetStream, Redis Streams.

``scripts/brokers.sh`` unpacks Debian's packages.  The readers receive into a buffer and look at
nothing, as those of the relay do: the requests make answers of a known length, which
spares them the parsing.  Neither broker stores anything on disk but what it must:
Redis keeps its stream in memory, JetStream in a file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from benchmarks.loopback import PIECE_BYTES
from databus.cli.demo.guardian import Guardian
from databus.cli.demo.private_servers import free_port

START_S = 60
REDIS_BATCH = 500
NATS_BATCH = 500
STREAM = b"events"
NEW_CONSUMER = "$JS.API.CONSUMER.CREATE.EVENTS"


def find(program: str) -> tuple[str, dict[str, str]] | None:
    """The program and the environment that it needs; None where it is not on this machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = Path(os.environ.get("DATABUS_BROKERS", cache / "databus-brokers"))
    for path in (folder / "usr/bin" / program, folder / "usr/sbin" / program):
        if path.exists():
            libraries = ":".join(str(path) for path in (folder / "usr/lib").glob("*-linux-gnu"))
            return str(path), {**os.environ, "LD_LIBRARY_PATH": libraries}
    found = shutil.which(program)
    return (found, dict(os.environ)) if found else None


def started_by(program: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command of a program that ``find`` finds, and its environment."""
    found = find(program)
    assert found is not None
    return [found[0], *arguments], found[1]


class Broker(ABC):
    """A private server with events in one stream, all padded to the length of the longest.

    Without events the stream is empty, for others to write to.

    Owner: the benchmark, as a context manager.
    """

    name: ClassVar[str]
    program: ClassVar[str]
    source: ClassVar[str] = "scripts/brokers.sh"

    def __init__(self, events: Sequence[memoryview] = ()) -> None:
        self._events = events
        self.count = len(events)
        self.size = max(map(len, events), default=0)
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="databus-bench-")

    @property
    def process_id(self) -> int:
        """The process of the server."""
        return self._process.pid

    @classmethod
    def is_here(cls) -> bool:
        return find(cls.program) is not None

    def __enter__(self) -> Self:
        command, environment = self._command(Path(self._folder.name))
        with open(Path(self._folder.name) / "log", "wb") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True,
                cwd=self._folder.name,
            )  # fmt: skip
        self._guardian = Guardian(self._process.pid, group=True)
        try:
            self._wait()
            self._fill()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(20)
        self._guardian.release()
        self._folder.cleanup()

    @abstractmethod
    def _command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command that starts the server in ``folder``, and its environment."""

    @abstractmethod
    def _fill(self) -> None:
        """Write every event into the stream."""

    def payload(self, index: int) -> bytes:
        """An event's bytes."""
        return bytes(self._events[index]).ljust(self.size, b"\0")

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise TimeoutError(f"{self.program} does not listen after {START_S} s")


class Redis(Broker):
    """Redis Streams; readers ask by XREAD COUNT, an answer at a time."""

    name = "Redis Streams"
    program = "redis-server"

    def _command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        return started_by(
            self.program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--appendonly", "no", "--dir", str(folder),
            "--client-output-buffer-limit", "normal 0 0 0",
        )  # fmt: skip

    def _fill(self) -> None:
        buffer = bytearray(PIECE_BYTES)
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            for start in range(0, self.count, REDIS_BATCH):
                stop = min(self.count, start + REDIS_BATCH)
                connection.sendall(
                    b"".join(
                        resp(b"XADD", STREAM, _entry(index), b"d", self.payload(index))
                        for index in range(start, stop)
                    )
                )
                _receive(connection, buffer, (stop - start) * _bulk_length(_entry(0)))


def read_redis(until: float, index: int, port: int, count: int, size: int) -> int:
    """Read the stream again and again until the time is over; the bytes that came."""
    buffer, total, at = bytearray(PIECE_BYTES), 0, 0
    each = len(b"*2\r\n*2\r\n$1\r\nd\r\n") + _bulk_length(_entry(0)) + _bulk_length(bytes(size))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while time.perf_counter() < until:
            found = min(REDIS_BATCH, count - at)
            after = _entry(at - 1) if at else b"0-0"
            connection.sendall(
                resp(b"XREAD", b"COUNT", b"%d" % REDIS_BATCH, b"STREAMS", STREAM, after)
            )
            head = len(b"*1\r\n*2\r\n") + _bulk_length(STREAM) + len(b"*%d\r\n" % found)
            _receive(connection, buffer, head + found * each)
            total += head + found * each
            at = at + found if at + found < count else 0
    return total


def _entry(index: int) -> bytes:
    """An entry's id; all are of one length."""
    return b"%d-0" % (1_000_000_000 + index)


def resp(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in words)


def _bulk_length(word: bytes) -> int:
    return len(b"$%d\r\n" % len(word)) + len(word) + 2


def _receive(connection: socket.socket, buffer: bytearray, count: int) -> None:
    """Receive an answer of a known length; its first bytes show if it is an error."""
    left = count
    view = memoryview(buffer)
    while left:
        got = connection.recv_into(view[: min(left, len(buffer))])
        if not got or (left == count and buffer[:1] == b"-"):
            raise RuntimeError(f"Redis answered {bytes(buffer[:got])!r}")
        left -= got


class Nats(Broker):
    """NATS JetStream; readers have a consumer each, without acknowledgements, that pushes."""

    name = "NATS JetStream"
    program = "nats-server"

    def _command(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        config = folder / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: 8MB\nmax_pending: 512MB\n'
            f'jetstream {{ store_dir: "{folder}/js", max_mem: 4G, max_file: 20G }}\n'
        )
        return started_by(self.program, "-c", str(config))

    def _fill(self) -> None:
        with NatsConnection(self.port) as nats:
            made = nats.ask(
                "$JS.API.STREAM.CREATE.EVENTS",
                {"name": "EVENTS", "subjects": ["e"], "storage": "file", "num_replicas": 1},
            )
            if "error" in made:
                raise RuntimeError(made["error"])
            for start in range(0, self.count, NATS_BATCH):
                stop = min(self.count, start + NATS_BATCH)
                nats.send(
                    b"".join(
                        b"PUB e %d\r\n%b\r\n" % (self.size, self.payload(number))
                        for number in range(start, stop - 1)
                    )
                )
                # The last of a batch is acknowledged, so that the others are in before it.
                nats.ask_bytes(b"e", self.payload(stop - 1))
            state = nats.ask("$JS.API.STREAM.INFO.EVENTS", {})["state"]
            if state["messages"] != self.count:
                raise RuntimeError(f"JetStream has {state['messages']} of {self.count} events")


def push_request(subject: str, deliver_policy: str) -> dict[str, Any]:
    """What makes a consumer that pushes to ``subject`` and needs no acknowledgements."""
    config = {
        "deliver_subject": subject, "deliver_policy": deliver_policy, "ack_policy": "none",
        "replay_policy": "instant", "mem_storage": True, "num_replicas": 1,
    }  # fmt: skip
    return {"stream_name": "EVENTS", "config": config}


class NatsConnection:
    """As much of the protocol as the benchmark needs.

    Owner: one thread, as a context manager.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._inboxes = 0
        self._line()
        options = b'{"verbose":false,"pedantic":false,"headers":false,"echo":false}'
        self.send(b"CONNECT %b\r\nPING\r\n" % options)
        while self._line() != b"PONG":
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes of the protocol."""
        self._socket.sendall(data)

    def ask(self, subject: str, request: dict[str, Any]) -> dict[str, Any]:
        """A request's answer."""
        found: dict[str, Any] = json.loads(
            self.ask_bytes(subject.encode(), json.dumps(request).encode())
        )
        return found

    def ask_bytes(self, subject: bytes, content: bytes) -> bytes:
        """A request's answer as it comes."""
        self._inboxes += 1
        inbox = b"inbox.%d.%d" % (self._socket.getsockname()[1], self._inboxes)
        self.send(
            b"SUB %b %d\r\nUNSUB %d 1\r\nPUB %b %b %d\r\n%b\r\n"
            % (inbox, self._inboxes, self._inboxes, subject, inbox, len(content), content)
        )
        while True:
            line = self._line()
            if line.startswith(b"MSG " + inbox):
                return self._exactly(int(line.rsplit(b" ", 1)[1]) + 2)[:-2]
            if line.startswith(b"-ERR"):
                raise RuntimeError(line.decode())

    def push(self, until: float, buffer: bytearray, size: int) -> int:
        """Have the whole stream pushed once; the bytes that came until the time is over."""
        self._inboxes += 1
        sid = self._inboxes
        inbox = f"push.{self._socket.getsockname()[1]}.{sid}"
        request = json.dumps(push_request(inbox, "all")).encode()
        self.send(
            b"SUB %b %d\r\nPUB %b %d\r\n%b\r\n"
            % (inbox.encode(), sid, NEW_CONSUMER.encode(), len(request), request)
        )
        # The reply subject of a message ends with how many are still to come.
        last, total = b".0 %d\r\n" % size, 0
        self._socket.settimeout(2.0)
        while time.perf_counter() < until:
            try:
                got = self._socket.recv_into(buffer)
            except TimeoutError:
                break
            if not got:
                raise ConnectionError("NATS closed the connection")
            total += got
            if buffer.find(last, 0, got) >= 0:
                break
        self._socket.settimeout(None)
        return total

    def subscribed(self, subject: str) -> socket.socket:
        """Subscribe; the connection, which only messages and the server's PINGs come from."""
        self.send(b"SUB %b 1\r\nPING\r\n" % subject.encode())
        while self._line() != b"PONG":
            pass
        return self._socket

    def heed(self) -> None:
        """Answer a PING if there is one; what the server refuses raises."""
        try:
            came = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not came or b"-ERR" in came:
            raise RuntimeError(f"NATS answered {came!r}")
        if b"PING\r\n" in came:
            self.send(b"PONG\r\n")

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._more()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._more()
        found, self._buffer = self._buffer[:count], self._buffer[count:]
        return found

    def _more(self) -> None:
        piece = self._socket.recv(1 << 16)
        if not piece:
            raise ConnectionError("NATS closed the connection")
        self._buffer += piece


def read_nats(until: float, index: int, port: int, count: int, size: int) -> int:
    """Read the stream again and again until the time is over; the bytes that came."""
    buffer, total = bytearray(PIECE_BYTES), 0
    while time.perf_counter() < until:
        with NatsConnection(port) as nats:
            total += nats.push(until, buffer, size)
    return total
