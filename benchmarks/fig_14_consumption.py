"""Figure 14 of the paper: how many updates a second each of N consumers gets, by update rate.

A relay whose source commits 100, 1,000 and 2,000 updates of 2.5 KB a second; every consumer
follows the whole stream.  One that keeps up gets as many as are made.  The paper's consumers
polled every 10 ms over one gigabit, and fell behind beyond a knee.
"""

from __future__ import annotations

from benchmarks.followers import EVENT_BYTES, add_options, content_hash, follow, paced_relay
from benchmarks.harness import Report, Run, Sample, start

PAPER_KNEE = {100: 200, 1000: 40, 2000: 20}


def main(run: Run) -> None:
    """Measure and report."""
    rates = run.options.rates or ([2000] if run.smoke else [100, 1000, 2000])
    consumers = run.options.consumers or ([1, 5] if run.smoke else [1, 5, 10, 20, 40, 100, 200])
    seconds = 0.8 if run.smoke else run.options.seconds
    report = Report(run, "Consumption by consumers and update rate, 2.5 KB", "events/s/consumer")
    report.settings = {"event_bytes": EVENT_BYTES, "seconds": seconds, "mode": "follow"}
    for rate in rates:
        with paced_relay(rate, run.seed) as relay:
            report.output_hash = content_hash(relay)
            for count in consumers:
                received = [
                    follow(relay, count, seconds, partitioned=False) for _ in range(run.repeats)
                ]
                mean = Sample(tuple(float(one.rates.mean()) for one in received))
                slowest = min(float(one.rates.min()) for one in received)
                report.add(
                    mean, series=f"{rate} updates/s", consumers=count, slowest=round(slowest, 1)
                )
                paper = "keeps up" if count <= PAPER_KNEE[rate] else "falls behind"
                report.note(
                    f"{count} consumers at {rate}/s: {mean.median / rate:.2f} of the updates, "
                    f"the slowest {slowest / rate:.2f}, together "
                    f"{mean.median * count * EVENT_BYTES / 1e6:,.0f} MB/s; the paper: {paper}"
                )
    report.write()


if __name__ == "__main__":
    main(start("fig_14_consumption", __doc__.partition("\n")[0], add_options))
