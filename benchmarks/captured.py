"""What both capture benchmarks do: drain backlogs beside the database's own reader.

``capture_mariadb`` and ``capture_postgres`` are the commands.
"""

from __future__ import annotations

import os

from benchmarks.commit_latency import PERCENTILES, measured_latencies
from benchmarks.drain import Drained, drain, first_scn
from benchmarks.harness import Report, Run, Sample
from benchmarks.peer_runs import Peer, Taken, peers_of
from benchmarks.upstreams import Backlog, Upstream

COMMITS_PER_S = (100, 1000, 5000)


def capture(run: Run, upstream: Upstream) -> None:
    """Measure and report one database."""
    sizes = {1: 2_000, 1000: 10_000} if run.smoke else {1: 1_000_000, 1000: 1_000_000}
    report = Report(run, f"Capture from {upstream.name}: 10 columns, a backlog", "rows/s")
    report.settings = {"rows": sizes, "commits_per_s": COMMITS_PER_S}
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
        for peer in peers:
            peer.close()
        _latency(report, upstream)
    report.write()


def _present(report: Report, upstream: Upstream) -> list[Peer]:
    """The peers that are installed; the others are named, in a smoke run all of them."""
    present = []
    for peer in peers_of(upstream):
        absent = "a smoke run has no peers" if report.run.smoke else peer.absent
        if absent is None:
            present.append(peer)
            continue
        peer.close()
        report.settings.setdefault("absent", {})[peer.name] = absent
        if not report.run.smoke:
            report.note(f"{peer.name}: absent ({absent}); benchmarks/peers/install.sh fetches it")
    return present


def _drained(report: Report, upstream: Upstream, backlog: Backlog, peers: list[Peer]) -> str:
    """All ways to take one backlog, in turn, so that each meets the same weather."""
    own, streamed, ringed = [], list[Drained](), list[Drained]()
    taken: dict[str, list[Taken]] = {peer.name: [] for peer in peers}
    loads = []
    for number in range(report.run.repeats):
        loads.append(os.getloadavg()[0])
        own.append(upstream.read_own(backlog, number))
        streamed.append(drain(backlog, into_ring=False))
        ringed.append(drain(backlog, into_ring=True))
        for peer in peers:
            taken[peer.name].append(peer.take(backlog, number))
    rows, place = backlog.rows, {"rows_per_commit": backlog.per_commit}
    limit = Sample(tuple(rows / one.seconds for one in own))
    report.add(limit, series=upstream.own_reader, **place)
    for series, found in (("source.stream()", streamed), ("into the ring", ringed)):
        sample = Sample(tuple(rows / one.seconds for one in found))
        cpu_us = Sample(tuple(one.cpu_seconds / rows * 1e6 for one in found))
        peak = max(one.peak_rss_bytes for one in found) / 1e6
        report.add(sample, series=series, **place)
        report.settings.setdefault("costs", []).append(
            {"series": series, **place, "cpu_us_per_row": cpu_us.median, "peak_rss_mb": peak}
        )
        report.note(
            f"{series}, {backlog.per_commit} rows a commit: {sample.median:,.0f} rows/s, "
            f"{cpu_us.median:.2f} us of CPU a row, {peak:.0f} MB at most; "
            f"{sample.median / limit.median:.2f} of {upstream.own_reader} "
            f"(load average {max(loads):.1f})"
        )
    ours = Sample(tuple(rows / one.seconds for one in ringed))
    for name, runs in taken.items():
        _compared(report, ours, name, backlog, runs)
    return ringed[-1].content


def _compared(report: Report, ours: Sample, name: str, backlog: Backlog, runs: list[Taken]) -> None:
    """A peer's figures, and how many times as fast the ring was filled."""
    place = {"rows_per_commit": backlog.per_commit}
    sample = Sample(tuple(one.rows / one.seconds for one in runs))
    cpu_us = Sample(tuple(one.cpu_seconds / one.rows * 1e6 for one in runs))
    peak = max(one.peak_rss_bytes for one in runs) / 1e6
    report.add(sample, series=name, **place)
    report.settings.setdefault("costs", []).append(
        {"series": name, **place, "cpu_us_per_row": cpu_us.median, "peak_rss_mb": peak}
    )
    report.note(
        f"{name}, {backlog.per_commit} rows a commit: {sample.median:,.0f} rows/s, "
        f"{cpu_us.median:.2f} us of CPU a row, {peak:.0f} MB at most; "
        f"into the ring is {ours.median / sample.median:.2f} times as fast"
    )


def _latency(report: Report, upstream: Upstream) -> None:
    rates, seconds = (COMMITS_PER_S[1:2], 1.0) if report.run.smoke else (COMMITS_PER_S, 10.0)
    for rate in rates:
        table = f"paced{rate}"
        upstream.create_table(table)
        found = measured_latencies(upstream, table, rate, seconds)
        told = ", ".join(f"p{p} {found.latency_ms(p):.2f}" for p in PERCENTILES)
        report.settings.setdefault("latency_ms", {})[str(rate)] = {
            f"p{p}": found.latency_ms(p) for p in PERCENTILES
        }
        report.note(
            f"commit to callback at {found.commits_per_s:,.0f} commits/s: {told} ms "
            f"({found.count:,} rows, load average {os.getloadavg()[0]:.1f})"
        )
