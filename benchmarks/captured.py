"""What the capture benchmarks do: drain backlogs beside the database's own reader, then follow.

``capture_mariadb``, ``capture_mysql`` and ``capture_postgres`` are the commands.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence

from benchmarks.commit_latency import (
    PERCENTILES,
    Latencies,
    measured_latencies,
    peer_latencies,
)
from benchmarks.drain import Drained, drain, first_scn
from benchmarks.harness import Report, Run, Sample
from benchmarks.peer_runs import Debezium, Peer, Taken, peers_of
from benchmarks.upstreams import Backlog, Reading, Upstream

COMMITS_PER_S = (100, 1000, 5000)
ROWS_PER_COMMIT = (1, 1000)
LATENCY_REPEATS = 3


def options(parser: argparse.ArgumentParser) -> None:
    """What can be left out, so that a run fits into the time that there is."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each backlog")
    parser.add_argument("--per-commit", type=int, nargs="*", default=ROWS_PER_COMMIT)
    parser.add_argument("--rates", type=int, nargs="*", default=COMMITS_PER_S)
    parser.add_argument("--peers", nargs="*", help="parts of their names; all unless given")


def capture(run: Run, upstream: Upstream) -> None:
    """Measure and report one database."""
    given = run.options
    sizes = {1: 2_000, 1000: 10_000}
    if not run.smoke:
        sizes = dict.fromkeys(given.per_commit, given.rows)
    report = Report(run, f"Capture from {upstream.name}: 10 columns, a backlog", "rows/s")
    rates, seconds = (COMMITS_PER_S[1:2], 1.0) if run.smoke else (given.rates, 10.0)
    report.settings = {"rows": sizes, "commits_per_s": rates}
    with upstream:
        report.settings["server"] = upstream.server.version
        peers = _present(report, upstream)
        for per_commit, rows in sizes.items():
            table = f"rows{per_commit}"
            upstream.create_table(table)
            after_scn = first_scn(upstream.config(table))
            for peer in peers:
                peer.mark(table)
            backlog = upstream.backlog(table, rows, per_commit, after_scn, run.repeats)
            report.output_hash = _drained(report, upstream, backlog, peers)
        for rate in rates:
            _latency(report, upstream, peers, rate, seconds)
        for peer in peers:
            peer.close()
    report.write()


def _present(report: Report, upstream: Upstream) -> list[Peer]:
    """The peers that are installed; the others are named, in a smoke run all of them."""
    present, wanted = [], report.run.options.peers
    for peer in peers_of(upstream):
        if wanted is not None and not any(part in peer.name for part in wanted):
            peer.close()
            continue
        absent = "a smoke run has no peers" if report.run.smoke else peer.absent
        if absent is None:
            present.append(peer)
            continue
        peer.close()
        report.settings.setdefault("absent", {})[peer.name] = absent
        if not report.run.smoke:
            report.note(f"{peer.name}: absent ({absent}); benchmarks/peers/install.sh fetches it")
    return present


def _part_of(sample: Sample, limit: Sample | None, name: str) -> str:
    return "" if limit is None else f"{sample.median / limit.median:.2f} of {name} "


def _drained(report: Report, upstream: Upstream, backlog: Backlog, peers: list[Peer]) -> str:
    """All ways to take one backlog, alternately, so that each has the same conditions."""
    own, streamed, ringed = list[Reading](), list[Drained](), list[Drained]()
    absent = upstream.own_reader_absent
    taken: dict[str, list[Taken]] = {peer.name: [] for peer in peers}
    loads = []
    for number in range(report.run.repeats):
        loads.append(os.getloadavg()[0])
        if absent is None:
            own.append(upstream.read_own(backlog, number))
        streamed.append(drain(backlog, into_ring=False))
        ringed.append(drain(backlog, into_ring=True))
        for peer in peers:
            taken[peer.name].append(peer.take(backlog, number))
    rows, labels = backlog.rows, {"rows_per_commit": backlog.per_commit}
    limit = Sample(tuple(rows / one.seconds for one in own)) if own else None
    if limit is not None:
        report.add(limit, series=upstream.own_reader, **labels)
    else:
        report.note(f"{upstream.own_reader}: absent ({absent})")
    for series, found in (("source.stream()", streamed), ("into the ring", ringed)):
        _reported(
            report, series, backlog, found,
            lambda sample: f"{_part_of(sample, limit, upstream.own_reader)}"
            f"(load average {max(loads):.1f})",
        )  # fmt: skip
    ours = Sample(tuple(rows / one.seconds for one in ringed))
    for name, runs in taken.items():
        _reported(
            report, name, backlog, runs,
            lambda sample: f"into the ring is {ours.median / sample.median:.2f} times as fast",
        )  # fmt: skip
    return ringed[-1].content


def _reported(
    report: Report,
    series: str,
    backlog: Backlog,
    runs: Sequence[Drained | Taken],
    comparison: Callable[[Sample], str],
) -> None:
    """The figures of one way to take a backlog, and what its rate is compared with another."""
    sample = Sample(tuple(one.rows / one.seconds for one in runs))
    cpu_us = Sample(tuple(one.cpu_seconds / one.rows * 1e6 for one in runs))
    peak = max(one.peak_rss_bytes for one in runs) / 1e6
    labels = {"rows_per_commit": backlog.per_commit}
    report.add(sample, series=series, **labels)
    report.settings.setdefault("costs", []).append(
        {"series": series, **labels, "cpu_us_per_row": cpu_us.median, "peak_rss_mb": peak}
    )
    report.note(
        f"{series}, {backlog.per_commit} rows a commit: {sample.median:,.0f} rows/s, "
        f"{cpu_us.median:.2f} us of CPU a row, {peak:.0f} MB at most; {comparison(sample)}"
    )


def _latency(
    report: Report, upstream: Upstream, peers: list[Peer], rate: int, seconds: float
) -> None:
    """Ours and each peer that calls back, alternately, so that each has the same conditions."""
    found: dict[str, list[Latencies]] = {}
    for number in range(min(LATENCY_REPEATS, report.run.repeats)):
        table = f"paced{rate}_{number}"
        upstream.create_table(table)
        measured = measured_latencies(upstream, table, rate, seconds)
        found.setdefault("commit to callback", []).append(measured)
        for peer in peers:
            if isinstance(peer, Debezium) and peer.form == "json":
                table = f"peer{rate}_{number}"
                upstream.create_table(table)
                found.setdefault(peer.name, []).append(peer_latencies(peer, table, rate, seconds))
    for series, runs in found.items():
        _told(report, series, rate, runs)


def _told(report: Report, series: str, rate: int, runs: list[Latencies]) -> None:
    """Of each percentile the median of the runs, and what the runs lie between."""
    summary, texts = {}, []
    for percent in PERCENTILES:
        each = sorted(one.latency_ms(percent) for one in runs)
        summary[f"p{percent}"] = statistics.median(each)
        texts.append(f"p{percent} {summary[f'p{percent}']:.2f} ({each[0]:.2f} to {each[-1]:.2f})")
    report.settings.setdefault("latency_ms", []).append({"series": series, "rate": rate, **summary})
    report.note(
        f"{series} at {statistics.median(one.commits_per_s for one in runs):,.0f} commits/s, "
        f"{len(runs)} times {runs[0].count:,} rows: {', '.join(texts)} ms "
        f"(load average {os.getloadavg()[0]:.1f})"
    )
