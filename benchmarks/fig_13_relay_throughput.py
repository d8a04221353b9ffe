"""Figure 13 of the paper: how much a relay sends to N consumers, by poll interval.

A relay with a filled ring of 2.5 KB events; every consumer reads the ring from its oldest
event on, in one long answer or polling at the interval (0: again at once), and restarts at
its end.  Beside it, in the same run and with as many readers: raw loopback, NATS JetStream,
Redis Streams and Apache Kafka with the same events, and the paper's figure for one gigabit.
"""

from __future__ import annotations

import argparse
import hashlib
import socket
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.harness import (
    Report,
    Run,
    Sample,
    measure,
    measure_in_turns,
    numbers,
    ratio,
    start,
)
from benchmarks.kafka_broker import READERS
from benchmarks.loopback import PIECE_BYTES, RawSender, http_get, read_bytes, read_raw
from benchmarks.relay_process import RelayProcess
from databus.common.frame import frame_format

EVENT_BYTES = 2500
EVENTS_PER_WINDOW = 10
POLL_MIB = 4
WHOLE_RING = 1 << 40
FLOOR = 0.7
FLOOR_CONSUMERS = 10
RAW = "raw loopback"
PAPER_MB_PER_S = {5: 110, 10: 120}


def filled_relay(ring_bytes: int, seed: int, workers: int) -> RelayProcess:
    """A relay over a generator that has filled its ring."""
    events = 2 * ring_bytes // EVENT_BYTES
    payload_bytes = EVENT_BYTES - frame_format.HEADER_BYTES - 20
    source = (
        f"generator://?events_per_second=max&payload_bytes={payload_bytes}&keys=100000"
        f"&events_per_window={EVENTS_PER_WINDOW}&events={events}&seed={seed}"
    )
    last = events // EVENTS_PER_WINDOW
    return RelayProcess(source, ring_bytes, until_scn=last, workers=workers)


def poll(
    until: float,
    index: int,
    port: int,
    span: tuple[int, int],
    step: int,
    max_bytes: int,
    wait_s: float,
) -> int:
    """One consumer: poll ``step`` SCNs at a time through the ring, over and over."""
    buffer, total = bytearray(PIECE_BYTES), 0
    oldest, newest = span
    scn = oldest
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while time.perf_counter() < until:
            path = f"/v1/gen/stream?scn={scn}&max_bytes={max_bytes}"
            total += http_get(connection, path, buffer, until)
            scn = scn + step if scn + 2 * step <= newest else oldest
            if wait_s:
                time.sleep(wait_s)
    return total


def verified(relay: RelayProcess, first: int) -> tuple[str, list[memoryview]]:
    """Read the whole ring once with every CRC checked: (hash of it, its events)."""
    url = f"{relay.url}/v1/gen/stream?scn={first}&format=frames&max_bytes={WHOLE_RING}"
    splitter, digest = frame_format.FrameSplitter(), hashlib.sha256()
    events: list[memoryview] = []
    with urllib.request.urlopen(url, timeout=60) as answer:
        while piece := answer.read(PIECE_BYTES):
            block = splitter.feed(piece)
            digest.update(block)
            columns = frame_format.scan(block, verify=False)
            rows = columns.op < frame_format.FIRST_CONTROL_OP
            view = memoryview(block)
            events += [
                view[at : at + length]
                for at, length in zip(
                    columns.offset[rows].tolist(), columns.length[rows].tolist(), strict=True
                )
            ]
    return digest.hexdigest()[:16], events


def main(run: Run) -> None:
    """Measure and report."""
    consumers = run.options.consumers or ([1, 2] if run.smoke else [1, 2, 5, 10, 20, 40])
    workers = run.options.workers or ([1] if run.smoke else [1, 2])
    intervals_ms = [0] if run.smoke else run.options.intervals or [0, 10, 50, 100]
    seconds = 0.3 if run.smoke else run.options.seconds
    ring_bytes = (16 if run.smoke else 256) << 20
    poll_bytes = run.options.poll_mib << 20
    report = Report(run, "Relay throughput, 2.5 KB events, filled ring", "MB/s")
    report.settings = {
        "ring_bytes": ring_bytes,
        "poll_bytes": poll_bytes,
        "seconds": seconds,
        "floor": f"{FLOOR} of raw loopback up to {FLOOR_CONSUMERS} consumers, both brokers",
    }
    sent: dict[int, dict[str, Sample]] = {count: {} for count in consumers}
    events: list[memoryview] = []
    for count_of_workers in workers:
        # More workers are measured where they may matter: not with pauses between the polls.
        intervals = intervals_ms if count_of_workers == workers[0] else [0]
        with filled_relay(ring_bytes, run.seed, count_of_workers) as relay, RawSender() as raw:
            span = relay.range()
            oldest, newest = span["prev"]["scn"], span["max"]["scn"]
            report.output_hash, events = verified(relay, oldest)
            window_bytes = sum(map(len, events)) // len(events) * EVENTS_PER_WINDOW + 100
            report.settings["events"] = len(events)
            report.settings["event_bytes"] = window_bytes // EVENTS_PER_WINDOW
            for count in consumers:
                contenders = {
                    RAW: partial(megabytes, count, seconds, read_raw, raw.port),
                }
                for interval_ms in [-1, *intervals]:
                    max_bytes = WHOLE_RING if interval_ms < 0 else poll_bytes
                    step = max_bytes // window_bytes
                    how = "one answer" if interval_ms < 0 else f"poll every {interval_ms} ms"
                    how += f", {count_of_workers} workers" if count_of_workers > 1 else ""
                    contenders[f"relay, {how}"] = partial(
                        megabytes, count, seconds, poll,
                        relay.port, (oldest, newest), step, max_bytes, max(0, interval_ms) / 1000,
                    )  # fmt: skip
                found = measure_in_turns(run, contenders)
                paper = PAPER_MB_PER_S.get(count)
                beside = f"; the paper, on 1 Gb/s: {paper} MB/s" if paper else ""
                for series, sample in found.items():
                    report.add(sample, series=series, consumers=count)
                    if series != RAW:
                        sent[count][series] = sample
                        part = ratio(sample, found[RAW])
                        report.note(f"{count} consumers, {series}: {part:.2f} of {RAW}{beside}")
    measure_brokers(run, report, events, seconds, sent)
    report.write()


def megabytes(count: int, seconds: float, read: Callable[..., int], *arguments: Any) -> float:
    """Megabytes a second that so many readers get together."""
    return read_bytes(count, seconds, read, *arguments) / 1e6


def measure_brokers(
    run: Run,
    report: Report,
    events: list[memoryview],
    seconds: float,
    sent: dict[int, dict[str, Sample]],
) -> None:
    """The same events out of each broker, beside each of the relay's figures in ``sent``.

    Those are by the number of consumers and the series.
    """
    for broker, read in READERS.items():
        if not broker.is_here():
            report.note(f"{broker.name}: {broker.program} is not here; {broker.source} gets it")
            continue
        with broker(events) as server:
            reader_arguments = (server.port, server.count, server.size)
            for count, figures in sent.items():
                sample = measure(run, partial(megabytes, count, seconds, read, *reader_arguments))
                report.add(sample, series=broker.name, consumers=count)
                for series, ours in figures.items():
                    times = (
                        f"{ours.median / sample.median:.2f} times" if sample.median else "beyond"
                    )
                    report.note(f"{count} consumers, {series}: {times} what {broker.name} sends")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be measured in part, where a machine is not free for all of it."""
    parser.add_argument("--consumers", type=numbers, help="such as 1,5,10")
    parser.add_argument("--workers", type=numbers, help="HTTP workers of the relay, such as 1,2")
    parser.add_argument("--intervals", type=numbers, help="ms between polls, such as 0,10")
    parser.add_argument("--poll-mib", type=int, default=POLL_MIB, help="most that a poll asks for")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")


if __name__ == "__main__":
    main(start("fig_13_relay_throughput", __doc__.partition("\n")[0], add_options))
