"""Raw loopback: how fast bytes go through TCP on this machine, and a reader at that speed.

The sender writes 1 MiB pieces of a buffer to its sockets; the readers receive into a buffer
and look at nothing.  Both spend their time in the kernel, so this is the limit for any server.
The same reader measures the relay.
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

PIECE_BYTES = 1 << 20


def send_forever(listener: socket.socket, context: ssl.SSLContext | None) -> None:
    """Serve each connection with the same buffer until the reader closes; never returns."""
    buffer = memoryview(bytearray(PIECE_BYTES))

    def serve(plain: socket.socket) -> None:
        try:
            with context.wrap_socket(plain, server_side=True) if context else plain as connection:
                while True:
                    connection.sendall(buffer)
        except OSError:
            return

    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()


class RawSender:
    """A process that sends as fast as TCP takes it, or with a ``context`` as Python's TLS does."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context

    def __enter__(self) -> RawSender:
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(listener.getsockname()[1])
        self._process = mp.get_context("fork").Process(
            target=send_forever, args=(listener, self._context), daemon=True
        )
        self._process.start()
        listener.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def read_bytes(count: int, seconds: float, read: Callable[..., Any], *arguments: Any) -> float:
    """Bytes a second that ``count`` readers in one further process receive together."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(
        target=_read_all, args=(theirs, count, seconds, read, arguments), daemon=True
    )
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    finally:
        process.join(seconds + 30)
        process.kill()
    if isinstance(result, str):
        raise RuntimeError(f"a reader failed: {result}")
    return float(result)


def _read_all(
    answer: Connection,
    count: int,
    seconds: float,
    read: Callable[..., int],
    arguments: Sequence[Any],
) -> None:
    received = [0] * count
    failures: list[str] = []
    started = time.perf_counter()
    until = started + seconds

    def work(index: int) -> None:
        try:
            received[index] = read(until, index, *arguments)
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    answer.send(failures[0] if failures else sum(received) / elapsed)


def read_raw(until: float, index: int, port: int) -> int:
    """Receive from a raw sender until the time is over; the number of bytes."""
    buffer, total = bytearray(PIECE_BYTES), 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while time.perf_counter() < until:
            total += connection.recv_into(buffer)
    return total


def http_get(
    connection: socket.socket, path: str, buffer: bytearray, until: float, token: str = ""
) -> int:
    """GET frames over a kept-alive connection; the bytes of the answer's body as sent.

    The body's chunks are not taken apart: the end of a chunked body is known by its last five
    bytes, which no frame ends with at a point where the server pauses.  An answer that is not
    200 raises.
    """
    credentials = f"Authorization: Bearer {token}\r\n" if token else ""
    connection.sendall(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{credentials}"
        "Accept: application/vnd.databus.frames;spans=1\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head:
        piece = connection.recv(4096)
        if not piece:
            raise ConnectionError("the server closed before its answer")
        head += piece
    header, _, rest = head.partition(b"\r\n\r\n")
    if not header.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(header.decode(errors="replace"))
    total, tail = len(rest), rest[-5:]
    while tail != b"0\r\n\r\n":
        count = connection.recv_into(buffer)
        if not count:
            break
        total += count
        tail = (tail + bytes(buffer[max(0, count - 5) : count]))[-5:]
        if time.perf_counter() > until + 20:
            raise TimeoutError(f"{path} did not end")
    return total
