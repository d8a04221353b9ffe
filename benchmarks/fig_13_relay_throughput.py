"""Figure 13 of the paper: how much a relay sends to N consumers, by poll interval.

A relay with a filled ring of 2.5 KB events; every consumer reads the ring from its oldest
event on, polling at the interval (0: again at once), and begins anew at its end.  Beside it,
in the same run: raw loopback to as many readers, and the paper's figure for one gigabit.
"""

from __future__ import annotations

import hashlib
import socket
import time
import urllib.request

from benchmarks.harness import Report, Run, grid, measure, start
from benchmarks.loopback import PIECE_BYTES, RawSender, http_get, read_bytes, read_raw
from benchmarks.relay_process import RelayProcess
from databus.common import frame

EVENT_BYTES = 2500
EVENTS_PER_WINDOW = 10
POLL_BYTES = 4 << 20
PAPER_MB_PER_S = {5: 110, 10: 120}


def filled_relay(ring_bytes: int, seed: int) -> RelayProcess:
    """A relay over a generator that has filled its ring."""
    events = 2 * ring_bytes // EVENT_BYTES
    payload_bytes = EVENT_BYTES - frame.HEADER_BYTES - 20
    source = (
        f"generator://?events_per_second=max&payload_bytes={payload_bytes}&keys=100000"
        f"&events_per_window={EVENTS_PER_WINDOW}&events={events}&seed={seed}"
    )
    return RelayProcess(source, ring_bytes, until_scn=events // EVENTS_PER_WINDOW)


def poll(
    until: float, index: int, port: int, span: tuple[int, int], step: int, wait_s: float
) -> int:
    """One consumer: poll ``step`` SCNs at a time through the ring, over and over."""
    buffer, total = bytearray(PIECE_BYTES), 0
    oldest, newest = span
    scn = oldest
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while time.perf_counter() < until:
            path = f"/v1/gen/stream?scn={scn}&max_bytes={POLL_BYTES}"
            total += http_get(connection, path, buffer, until)
            scn = scn + step if scn + 2 * step <= newest else oldest
            if wait_s:
                time.sleep(wait_s)
    return total


def verified(relay: RelayProcess, first: int) -> tuple[str, int, int]:
    """Read the whole ring once with every CRC checked: (hash of it, events, bytes a window)."""
    url = f"{relay.url}/v1/gen/stream?scn={first}&format=frames&max_bytes={1 << 40}"
    splitter, digest, events, length = frame.FrameSplitter(), hashlib.sha256(), 0, 0
    with urllib.request.urlopen(url, timeout=60) as answer:
        while piece := answer.read(PIECE_BYTES):
            block = splitter.feed(piece)
            digest.update(block)
            events += int((frame.scan(block, verify=False).op < frame.FIRST_CONTROL_OP).sum())
            length += len(block)
    return digest.hexdigest()[:16], events, length * EVENTS_PER_WINDOW // events


def main(run: Run) -> None:
    """Measure and report."""
    consumers = [1, 2] if run.smoke else [1, 5, 10, 20, 40]
    intervals_ms = [0] if run.smoke else [0, 10, 50, 100]
    seconds = 0.5 if run.smoke else 3.0
    ring_bytes = (16 if run.smoke else 256) << 20
    report = Report(run, "Relay throughput, 2.5 KB events, filled ring", "MB/s")
    with filled_relay(ring_bytes, run.seed) as relay, RawSender() as raw:
        span = relay.range()
        oldest, newest = span["prev"]["scn"], span["max"]["scn"]
        report.output_hash, events, window_bytes = verified(relay, oldest)
        step = POLL_BYTES // window_bytes
        report.settings = {
            "ring_bytes": ring_bytes,
            "events": events,
            "event_bytes": window_bytes // EVENTS_PER_WINDOW,
            "poll_bytes": POLL_BYTES,
            "seconds": seconds,
        }
        limits: dict[int, float] = {}
        for count in consumers:
            limit = measure(run, lambda n=count: read_bytes(n, seconds, read_raw, raw.port) / 1e6)
            limits[count] = limit.median
            report.add(limit, series="raw loopback", consumers=count)
        for interval_ms, count in grid(intervals_ms, consumers):
            arguments = (relay.port, (oldest, newest), step, interval_ms / 1000)
            sample = measure(
                run, lambda n=count, a=arguments: read_bytes(n, seconds, poll, *a) / 1e6
            )
            report.add(sample, series=f"relay, poll every {interval_ms} ms", consumers=count)
            if interval_ms == 0:
                paper = PAPER_MB_PER_S.get(count)
                beside = f"; the paper, on 1 Gb/s: {paper} MB/s" if paper else ""
                report.note(
                    f"{count} consumers: {sample.median / limits[count]:.2f} of raw "
                    f"loopback{beside}"
                )
    report.write()


if __name__ == "__main__":
    main(start("fig_13_relay_throughput", __doc__.partition("\n")[0]))
