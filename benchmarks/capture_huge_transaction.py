"""One transaction of 5 million rows through a ring of 64 MiB, from MariaDB and PostgreSQL.

The transaction is about seven times as large as the ring.  Beside the rows a second it prints what
matters more: the memory of the process at its peak, next to that of one that took a hundredth
of the rows.
"""

from __future__ import annotations

import os

from benchmarks.drain import drain, first_scn
from benchmarks.harness import Report, Run, Sample, start
from benchmarks.upstreams import Backlog, MariaDB, Postgres, Upstream

SMALL_SHARE = 100
NUMBERS = {
    "MariaDB": "SELECT seq, seq % 1000 FROM seq_1_to_{count}",
    "PostgreSQL": "SELECT n, n % 1000 FROM generate_series(1, {count}) n",
}


def measure(run: Run) -> None:
    """Measure and report both databases."""
    rows = 20_000 if run.smoke else 5_000_000
    report = Report(run, "One transaction, two columns, through a ring of 64 MiB", "rows/s")
    report.settings = {"rows": rows}
    for upstream in (MariaDB(), Postgres()):
        with upstream:
            report.settings[upstream.name] = upstream.server.version
            _one(report, upstream, rows)
    report.write()


def _one(report: Report, upstream: Upstream, rows: int) -> None:
    peaks = {}
    for count in (rows // SMALL_SHARE, rows):
        table = f"huge{count}"
        upstream.execute(f"CREATE TABLE {table} (id BIGINT PRIMARY KEY, v INT)")
        after_scn = first_scn(upstream.config(table))
        facts = upstream.before_fill(table, 0)
        upstream.execute(f"INSERT INTO {table} {NUMBERS[upstream.name].format(count=count)}")
        upto_scn = upstream.after_fill(facts)
        backlog = Backlog(table, count, count, upstream.config(table), after_scn, upto_scn)
        found = [drain(backlog, into_ring=True) for _ in range(report.run.repeats)]
        peaks[count] = max(one.peak_rss_bytes for one in found) / 1e6
        report.output_hash = found[-1].content
    sample = Sample(tuple(rows / one.seconds for one in found))
    report.add(sample, series=upstream.name, rows_per_commit=rows)
    report.settings.setdefault("peak_rss_mb", {})[upstream.name] = peaks
    small, large = peaks.values()
    report.note(
        f"{upstream.name}: {sample.median:,.0f} rows/s, {large:.0f} MB at most against "
        f"{small:.0f} MB for {rows // SMALL_SHARE:,} rows: {large / small:.2f} times "
        f"(load average {os.getloadavg()[0]:.1f})"
    )


if __name__ == "__main__":
    measure(start("capture_huge_transaction", __doc__.partition("\n")[0]))
