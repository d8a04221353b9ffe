"""Figure 15 of the paper: how long an update takes from its commit to N consumers.

A relay whose source stamps the time of each commit; every consumer follows, all of the stream
or its own part of the keys (``partition=mod:N:i``), and compares the stamp with its clock.
Beside it, in the same run and with as many readers: the same source over raw loopback, Redis
Streams and NATS JetStream, all of the stream.  Readers are at the speed of C; one application
with the client library, in the place of one of them, has a series of its own.  The paper's
consumers polled every 10 ms, which alone is 5 ms on average.
"""

from __future__ import annotations

import time

from benchmarks.application import follow_as_application
from benchmarks.followers import (
    EVENT_BYTES,
    Received,
    add_options,
    content_hash,
    follow,
    paced_relay,
)
from benchmarks.harness import Report, Run, Sample, grid, start
from benchmarks.paced_peers import follow_peers, present
from benchmarks.relay_process import RelayProcess

PERCENTILES = (50, 95, 99)
KEEPS_UP = 0.98
PAPER_MS = {100: "10-20 ms", 1000: "15-20 ms up to 40 consumers", 2000: "15-20 ms up to 20"}
PAPER_PARTITIONED_MS = "15-45 ms, partitioned, at 2,000/s"


def main(run: Run) -> None:
    """Measure and report."""
    rates = run.options.rates or ([2000] if run.smoke else [100, 1000, 2000])
    consumers = run.options.consumers or ([4] if run.smoke else [1, 5, 10, 20, 40])
    seconds = 0.5 if run.smoke else run.options.seconds
    report = Report(run, "Latency from commit to consumer, 2.5 KB", "ms")
    report.settings = {"event_bytes": EVENT_BYTES, "seconds": seconds, "mode": "follow"}
    peers = present(report)
    if peers:
        report.note("partitioned: the relay alone, as no peer filters one stream by its keys' hash")
    for rate, count in grid(rates, consumers):
        title = f"{count} consumers at {rate}/s"
        with paced_relay(rate, run.seed) as relay:
            report.output_hash = content_hash(relay)
            received, used_us = follow_relay(relay, count, seconds, run, partitioned=False)
            ours = aged(report, f"{rate}/s", count, received)
            parts, part_us = follow_relay(relay, count, seconds, run, partitioned=True)
            partly = aged(report, f"{rate}/s partitioned", count, parts)
            one = [follow_as_application(relay, count, seconds) for _ in range(run.repeats)]
            its = aged(report, f"{rate}/s application", count, one)
        parts = [
            f"relay {written(ours)}{behind(received, rate)}, {used_us:.0f} us of CPU a delivery",
            f"an application {written(its)}{behind(one, rate)}",
        ]
        for name, theirs in follow_peers(peers, rate, count, seconds, report).items():
            ages = aged(report, f"{rate}/s {name}", count, theirs)
            times = " / ".join(f"{our / age:.1f}" for our, age in zip(ours, ages, strict=True))
            parts.append(f"{name} {written(ages)}{behind(theirs, rate)} (relay: {times} times)")
        report.note(f"{title}: {'; '.join(parts)}; paper: {PAPER_MS.get(rate, 'not published')}")
        report.note(
            f"{title}, partitioned: relay {written(partly)}, {part_us:.0f} us of CPU a delivery; "
            f"paper: {PAPER_PARTITIONED_MS}"
        )
    report.write()


def follow_relay(
    relay: RelayProcess, count: int, seconds: float, run: Run, *, partitioned: bool
) -> tuple[list[Received], float]:
    """The repetitions, and microseconds of the worker's processor for each event received."""
    began_s, used_s = time.perf_counter(), processor_s(relay)
    received = [follow(relay, count, seconds, partitioned=partitioned) for _ in range(run.repeats)]
    used = (processor_s(relay) - used_s) / (time.perf_counter() - began_s)
    return received, used * 1e6 / sum(one.rates.sum() for one in received) * run.repeats


def processor_s(relay: RelayProcess) -> float:
    """What the worker has used of a processor."""
    times = relay.worker().cpu_times()
    return float(times.user + times.system)


def aged(report: Report, name: str, count: int, received: list[Received]) -> list[float]:
    """Report the percentiles of the ages; the median of each, in ms."""
    samples = [Sample(tuple(one.latency_ms(p) for one in received)) for p in PERCENTILES]
    for percent, sample in zip(PERCENTILES, samples, strict=True):
        report.add(sample, series=f"{name} p{percent}", consumers=count)
    return [sample.median for sample in samples]


def written(ages: list[float]) -> str:
    """The percentiles as they are printed in a note."""
    return "p50 / p95 / p99 " + " / ".join(f"{age:.2f}" for age in ages) + " ms"


def behind(received: list[Received], rate: int) -> str:
    """Which part of the updates came, where it is not all of them."""
    part = Sample(tuple(float(one.rates.mean()) for one in received)).median / rate
    return f" with {part:.2f} of the updates" if part < KEEPS_UP else ""


if __name__ == "__main__":
    main(start("fig_15_latency", __doc__.partition("\n")[0], add_options))
