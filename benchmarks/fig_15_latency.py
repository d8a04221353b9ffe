"""Figure 15 of the paper: how long an update takes from its commit to N consumers.

A relay whose source stamps the time of each commit; every consumer follows, all of the stream
or its own part of the keys (``partition=mod:N:i``), and compares the stamp with its clock.
The paper's consumers polled every 10 ms, which alone is 5 ms on average.
"""

from __future__ import annotations

import time

from benchmarks.followers import EVENT_BYTES, add_options, content_hash, follow, paced_relay
from benchmarks.harness import Report, Run, Sample, grid, start
from benchmarks.relay_process import RelayProcess

PERCENTILES = (50, 95, 99)
PAPER_MS = {100: "10-20 ms", 1000: "15-20 ms up to 40 consumers", 2000: "15-20 ms up to 20"}
PAPER_PARTITIONED_MS = "15-45 ms, partitioned, at 2,000/s"


def _processor_s(relay: RelayProcess) -> float:
    """What the worker has used of a processor."""
    times = relay.worker().cpu_times()
    return float(times.user + times.system)


def main(run: Run) -> None:
    """Measure and report."""
    rates = run.options.rates or ([2000] if run.smoke else [100, 1000, 2000])
    consumers = run.options.consumers or ([4] if run.smoke else [1, 5, 10, 20, 40])
    seconds = 0.5 if run.smoke else run.options.seconds
    report = Report(run, "Latency from commit to consumer, 2.5 KB", "ms")
    report.settings = {"event_bytes": EVENT_BYTES, "seconds": seconds, "mode": "follow"}
    for rate in rates:
        with paced_relay(rate, run.seed) as relay:
            report.output_hash = content_hash(relay)
            for partitioned, count in grid([False, True], consumers):
                began_s, used_s = time.perf_counter(), _processor_s(relay)
                received = [
                    follow(relay, count, seconds, partitioned=partitioned)
                    for _ in range(run.repeats)
                ]
                used = (_processor_s(relay) - used_s) / (time.perf_counter() - began_s)
                name = f"{rate}/s partitioned" if partitioned else f"{rate}/s"
                told = []
                for percent in PERCENTILES:
                    sample = Sample(tuple(one.latency_ms(percent) for one in received))
                    report.add(sample, series=f"{name} p{percent}", consumers=count)
                    told.append(f"p{percent} {sample.median:.2f}")
                paper = PAPER_PARTITIONED_MS if partitioned else PAPER_MS[rate]
                each_us = used * 1e6 / sum(one.rates.sum() for one in received) * run.repeats
                report.note(
                    f"{count} consumers at {name}: {', '.join(told)} ms, {each_us:.0f} us of the "
                    f"worker's processor a delivery; paper: {paper}"
                )
    report.write()


if __name__ == "__main__":
    main(start("fig_15_latency", __doc__.partition("\n")[0], add_options))
