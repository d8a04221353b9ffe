"""What TLS costs: bytes/s of one answer and the age of commits on arrival, with it and without.

Two relays with the same events, one of which wants TLS and a token.  Raw loopback, plain and by
Python's TLS, is the limit of both in the same run.
"""

from __future__ import annotations

import argparse
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.followers import RelayReaders, Runs, compile_walk, paced_source, receive
from benchmarks.harness import Report, Run, Sample, measure_in_turns, numbers, ratio, start
from benchmarks.loopback import PIECE_BYTES, RawSender, http_get, read_bytes, read_raw
from benchmarks.relay_process import TOKEN, RelayProcess
from tests.support.certificates import Authority

RING_BYTES = 64 << 20
WHOLE_RING = 1 << 40
Connect = Callable[[int], socket.socket]


class EncryptedReaders(RelayReaders):
    """Followers over TLS."""

    credentials = f"Authorization: Bearer {TOKEN}\r\n"

    def __init__(self, connect: Connect, port: int, count: int) -> None:
        super().__init__(port, count, partitioned=False)
        self._connect = connect

    def opened(self) -> socket.socket:
        return self._connect(self.port)

    def _take(self, seconds: float) -> None:
        for fd, _ in self._poll.poll(seconds):
            number = self._numbers[fd]
            try:
                # What TLS has taken from the socket does not wake the poll again.
                while size := self.sockets[number].recv_into(self.buffer.data):
                    found = self.walked(number, size, self._ages)
                    if found:
                        self._latencies.append(self._ages[:found].copy())
                raise ConnectionError(f"reader {number} was disconnected")
            except ssl.SSLWantReadError:
                continue


def read_encrypted(until: float, index: int, connect: Connect, port: int) -> int:
    """Receive from a sender until the time is over; the number of bytes."""
    buffer, total = bytearray(PIECE_BYTES), 0
    with connect(port) as connection:
        while time.perf_counter() < until:
            total += connection.recv_into(buffer)
    return total


def read_ring(until: float, index: int, connect: Connect, port: int, token: str) -> int:
    """Read the ring in one answer after the other; the number of bytes."""
    buffer, total = bytearray(PIECE_BYTES), 0
    path = f"/v1/gen/stream?start=oldest&max_bytes={WHOLE_RING}"
    with connect(port) as connection:
        while time.perf_counter() < until:
            total += http_get(connection, path, buffer, until, token)
    return total


def plainly(port: int) -> socket.socket:
    """A connection without TLS."""
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def encrypted(context: ssl.SSLContext, port: int) -> socket.socket:
    """A connection with TLS."""
    return context.wrap_socket(plainly(port), server_hostname="localhost")


def main(run: Run) -> None:
    """Measure and report."""
    counts = run.options.consumers or ([1] if run.smoke else [1, 10])
    seconds = 0.3 if run.smoke else run.options.seconds
    ring_bytes = (8 << 20) if run.smoke else RING_BYTES
    report = Report(run, "What TLS costs", "")
    report.settings = {"ring_bytes": ring_bytes, "seconds": seconds, "version": ssl.OPENSSL_VERSION}
    report.output_hash = "none: bytes are counted, and the frames of followers walked"
    with tempfile.TemporaryDirectory(prefix="databus-bench-") as folder:
        authority = Authority(Path(folder))
        context = authority.credentials().context("https://localhost")
        assert context is not None
        connect = partial(encrypted, context)
        throughput(run, report, authority, connect, counts, seconds, ring_bytes)
        latency(run, report, authority, connect, counts, max(1.0, seconds))
    report.write()


def throughput(
    run: Run,
    report: Report,
    authority: Authority,
    connect: Connect,
    counts: list[int],
    seconds: float,
    ring_bytes: int,
) -> None:
    """Bytes a second of a filled ring in one answer after the other."""
    files, events = authority.issue("sender"), 2 * ring_bytes // 2500
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(files.certificate, files.key)
    source = f"generator://?events={events}&payload_bytes=2400&events_per_window=40&seed={run.seed}"
    until_scn = events // 40
    with (
        RelayProcess(source, ring_bytes, until_scn=until_scn) as plain,
        RelayProcess(source, ring_bytes, until_scn=until_scn, tls=authority) as relay,
        RawSender() as raw,
        RawSender(serving) as sender,
    ):
        for count in counts:
            read = partial(read_bytes, count, seconds)
            found = measure_in_turns(
                run,
                {
                    "raw loopback": partial(read, read_raw, raw.port),
                    "raw loopback, TLS": partial(read, read_encrypted, connect, sender.port),
                    "relay": partial(read, read_ring, plainly, plain.port, ""),
                    "relay, TLS": partial(read, read_ring, connect, relay.port, TOKEN),
                },
            )
            for series, sample in found.items():
                scaled = Sample(tuple(value / 1e6 for value in sample.values))
                report.add(scaled, series=f"{series}, MB/s", consumers=count)
            report.note(
                f"{count} readers: TLS {ratio(found['relay, TLS'], found['relay']):.2f} of the "
                "bytes without it, and "
                f"{ratio(found['relay, TLS'], found['raw loopback, TLS']):.2f} of raw loopback by "
                "Python's TLS"
            )


def latency(
    run: Run,
    report: Report,
    authority: Authority,
    connect: Connect,
    counts: list[int],
    seconds: float,
) -> None:
    """The age of each of 1,000 commits a second on its arrival."""
    compile_walk()
    source = paced_source(1000, run.seed)
    with (
        RelayProcess(source, RING_BYTES, until_scn=100) as plain,
        RelayProcess(source, RING_BYTES, until_scn=100, tls=authority) as relay,
    ):
        for count in counts:
            kinds: dict[str, Callable[[], Runs]] = {
                "followers": partial(RelayReaders, plain.port, count, partitioned=False),
                "followers, TLS": partial(EncryptedReaders, connect, relay.port, count),
            }
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
            for _ in range(run.repeats):
                for name, readers in kinds.items():
                    received = receive(readers, seconds)
                    found[name].append((received.latency_ms(50), received.latency_ms(99)))
            for name, rounds in found.items():
                for percent, values in zip((50, 99), zip(*rounds, strict=True), strict=True):
                    series = f"{name}, p{percent} in ms"
                    report.add(Sample(tuple(values)), series=series, consumers=count)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part, where a machine is not free for all of it."""
    parser.add_argument("--consumers", type=numbers, help="such as 1,10")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")


if __name__ == "__main__":
    main(start("fig_tls", __doc__.partition("\n")[0], add_options))
