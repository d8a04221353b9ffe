"""Figure 14 of the paper: how many updates a second each of N consumers gets, by update rate.

A relay whose source commits 100, 1,000 and 2,000 updates of 2.5 KB a second; every consumer
follows the whole stream.  One that keeps up gets as many as are made.  Beside it, in the same
run and with as many readers: the same source over raw loopback, Redis Streams and NATS
JetStream.  The paper's consumers polled every 10 ms over one gigabit, and fell behind beyond a
knee.
"""

from __future__ import annotations

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

PAPER_KNEE = {100: 200, 1000: 40, 2000: 20}


def main(run: Run) -> None:
    """Measure and report."""
    rates = run.options.rates or ([2000] if run.smoke else [100, 1000, 2000])
    consumers = run.options.consumers or ([5] if run.smoke else [1, 5, 10, 20, 40, 100, 200])
    seconds = 0.5 if run.smoke else run.options.seconds
    report = Report(run, "Consumption by consumers and update rate, 2.5 KB", "events/s/consumer")
    report.settings = {"event_bytes": EVENT_BYTES, "seconds": seconds, "mode": "follow"}
    peers = present(report)
    for rate, count in grid(rates, consumers):
        with paced_relay(rate, run.seed) as relay:
            report.output_hash = content_hash(relay)
            received = [
                follow(relay, count, seconds, partitioned=False) for _ in range(run.repeats)
            ]
        parts = [f"relay {consumed(report, f'{rate} updates/s', rate, count, received)}"]
        for name, theirs in follow_peers(peers, rate, count, seconds, report).items():
            part = consumed(report, f"{rate} updates/s, {name}", rate, count, theirs)
            parts.append(f"{name} {part}")
        report.note(
            f"{count} consumers at {rate}/s, part of the updates (the slowest; p50 of their age): "
            f"{'; '.join(parts)}; the paper: {paper(rate, count)}"
        )
    report.write()


def paper(rate: int, count: int) -> str:
    """What the paper's figure shows of so many consumers."""
    if rate not in PAPER_KNEE:
        return "not published"
    return "keeps up" if count <= PAPER_KNEE[rate] else "falls behind"


def consumed(report: Report, series: str, rate: int, count: int, received: list[Received]) -> str:
    """Report the updates a second that each consumer got; which part of all that is."""
    mean = Sample(tuple(float(one.rates.mean()) for one in received))
    slowest = min(float(one.rates.min()) for one in received)
    report.add(mean, series=series, consumers=count, slowest=round(slowest, 1))
    age = Sample(tuple(one.latency_ms(50) for one in received)).median
    return f"{mean.median / rate:.2f} ({slowest / rate:.2f}; {age:.1f} ms)"


if __name__ == "__main__":
    main(start("fig_14_consumption", __doc__.partition("\n")[0], add_options))
