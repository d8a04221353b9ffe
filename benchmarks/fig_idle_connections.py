"""Idle readers of one worker: what a follower and a long poll cost while nothing happens.

A relay whose source commits once a second; N connections of one kind wait.  Followers get that
commit, and the time between the first and the last of them is printed; long polls ask for deletes,
which do not come.  The worker's anonymous memory before and after shows what a connection
costs.  The floor: 5,000 connections at less than 30 KiB each.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import resource
import select
import socket
import time
from multiprocessing.connection import Connection

from benchmarks.harness import Report, Run, Sample, grid, numbers, start
from benchmarks.relay_process import RelayProcess, anonymous_bytes

FLOOR_KIB = 30
RING_BYTES = 16 << 20
OPEN_S = 120
KINDS = {
    "followers": "start=latest&follow=true&format=frames",
    "long polls": "start=latest&wait_ms=120000&ops=d&format=frames",
}


def main(run: Run) -> None:
    """Measure and report."""
    counts = run.options.consumers or ([100] if run.smoke else [1000, 2000, 5000])
    report = Report(run, "Memory of an idle connection", "KiB/connection")
    report.settings = {"floor_kib": FLOOR_KIB, "ring_bytes": RING_BYTES}
    report.output_hash = "none: nothing is read but heartbeats and one event a second"
    kinds = list(KINDS)[:1] if run.smoke else list(KINDS)
    for kind, count in grid(kinds, counts):
        costs, last_ms = [], []
        for _ in range(run.repeats):
            # A process of its own each time: memory that was freed would hide what is taken.
            source = "generator://?events_per_second=1&payload_bytes=100&events_per_window=1"
            with RelayProcess(source, RING_BYTES, until_scn=1) as relay:
                cost, spread_s = _measure(relay, count, kind)
                costs.append(cost / count / 1024)
                last_ms.append(spread_s * 1000)
        sample = Sample(tuple(costs))
        report.add(sample, series=kind, consumers=count)
        last = f"; the last one had an event {max(last_ms):.0f} ms after the first"
        report.note(
            f"{count} {kind}: {sample.median:.1f} KiB each, {sample.median / FLOOR_KIB:.2f} of "
            f"the {FLOOR_KIB} KiB that are allowed{last if kind == 'followers' else ''}"
        )
    report.write()


def _measure(relay: RelayProcess, count: int, kind: str) -> tuple[int, float]:
    """(bytes that the worker has grown by, seconds between the first and the last arrival)."""
    query, worker = KINDS[kind], relay.worker()
    _warm_up(relay, query)
    before = anonymous_bytes(worker)
    ours, theirs = mp.Pipe()
    process = mp.get_context("fork").Process(
        target=_connect_all, args=(theirs, relay.port, count, query), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(OPEN_S):
            raise TimeoutError(f"{count} connections were not open within {OPEN_S} s")
        outcome = ours.recv()
        if isinstance(outcome, str):
            raise RuntimeError(outcome)
        grown = anonymous_bytes(worker) - before
        if kind != "followers":
            return grown, 0.0
        ours.send("continue")
        spread = ours.recv()
        if isinstance(spread, str):
            raise RuntimeError(spread)
        return grown, float(spread)
    finally:
        process.kill()
        process.join()


def _warm_up(relay: RelayProcess, query: str) -> None:
    """Whatever a first answer makes for good is not a connection's cost."""
    for _ in range(20):
        with _ask(relay.port, query) as connection:
            connection.recv(1)  # the answer has begun; closing it ends it


def _ask(port: int, query: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(f"GET /v1/gen/stream?{query} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    return connection


def _connect_all(answer: Connection, port: int, count: int, query: str) -> None:
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        connections: dict[int, socket.socket] = {}
        poll = select.epoll()
        for _ in range(count):
            connection = _ask(port, query)
            connections[connection.fileno()] = connection
        for connection in connections.values():
            head = connection.recv(1 << 16)
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode(errors="replace"))
        for fd, connection in connections.items():
            connection.setblocking(False)
            poll.register(fd, select.EPOLLIN)
        answer.send(len(connections))
        answer.recv()
        answer.send(_spread(poll, connections))
    except Exception as error:
        answer.send(repr(error))


def _spread(poll: select.epoll, connections: dict[int, socket.socket]) -> float:
    """Seconds from the first to the last connection's next bytes."""
    for connection in connections.values():
        try:
            while connection.recv(1 << 16):
                pass
        except BlockingIOError:
            continue
    left, first = set(connections), 0.0
    deadline = time.monotonic() + OPEN_S
    while left and time.monotonic() < deadline:
        for fd, _ in poll.poll(1.0):
            connections[fd].recv(1 << 16)
            first = first or time.monotonic()
            left.discard(fd)
    if left:
        raise TimeoutError(f"{len(left)} connections got nothing")
    return time.monotonic() - first


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part."""
    parser.add_argument("--consumers", type=numbers, help="connections, such as 1000,5000")


if __name__ == "__main__":
    main(start("fig_idle_connections", __doc__.partition("\n")[0], add_options))
