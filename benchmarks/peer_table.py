"""The table of the README: what Databus does beside each peer, ratios first, out of the results.

It measures nothing: ``make bench-peers`` runs the benchmarks before it.  Every ratio is of one run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS

_DATABASES = {"mariadb": "MariaDB", "mysql": "MySQL", "postgres": "PostgreSQL"}
_LIMITS = ("mariadb-binlog", "mysqlbinlog", "pg_recvlogical", "raw loopback", "source.stream()")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of ours, in ``unit``, and those of the peers in the same run, by name."""

    what: str
    unit: str
    ours: float
    peers: dict[str, float]

    def line(self) -> str:
        """A line of the table; the peers that come nearest first."""
        is_time = self.unit == "ms"
        ratios = sorted(
            ((self.ours / theirs, name) for name, theirs in self.peers.items() if theirs),
            reverse=is_time,
        )
        beside = "; ".join(f"{_written(ratio)} {name}" for ratio, name in ratios)
        return f"| {self.what} | {beside} | {_amount(self.ours)} {self.unit} |"


def _written(ratio: float) -> str:
    return f"**{ratio:.2g} times**" if ratio < 10 else f"**{ratio:.0f} times**"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def figures(folder: Path, suffix: str = "") -> Iterator[Figure]:
    """The figures of the results that are in ``folder``, in files with this end of their names."""
    for short, database in _DATABASES.items():
        if document := _document(folder / f"capture_{short}{suffix}.json"):
            yield from _captured(document, database)
    if document := _document(folder / f"fig_13_relay_throughput{suffix}.json"):
        yield from _sent(document)
    if document := _document(folder / f"fig_15_latency{suffix}.json"):
        yield from _followed(document)


def _document(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _captured(document: dict[str, Any], database: str) -> Iterator[Figure]:
    for per_commit in sorted({point["rows_per_commit"] for point in document["points"]}):
        rates = {
            point["series"]: point["median"]
            for point in document["points"]
            if point["rows_per_commit"] == per_commit
        }
        ours = rates.pop("into the ring")
        peers = {name: rate for name, rate in rates.items() if not name.startswith(_LIMITS)}
        rows = "1 row" if per_commit == 1 else f"{per_commit:,} rows"
        yield Figure(f"capture from {database}, {rows} a commit", "rows/s", ours, peers)
    latencies = document["settings"].get("latency_ms", [])
    for rate in sorted({one["rate"] for one in latencies}):
        for percentile in ("p50", "p99"):
            ages = {one["series"]: one[percentile] for one in latencies if one["rate"] == rate}
            ours = ages.pop("commit to callback")
            what = f"{database}, commit to callback at {rate:,}/s, {percentile}"
            yield Figure(what, "ms", ours, ages)


def _sent(document: dict[str, Any]) -> Iterator[Figure]:
    for count in sorted({point["consumers"] for point in document["points"]}):
        rates = {
            point["series"]: point["median"]
            for point in document["points"]
            if point["consumers"] == count
        }
        ways = {name: rates.pop(name) for name in list(rates) if name.startswith("relay, ")}
        for way, rate in ways.items():
            readers = "1 reader" if count == 1 else f"{count} readers"
            how = way.removeprefix("relay, ").replace("poll every 0 ms", "polls of 4 MiB")
            yield Figure(f"relay to {readers}, {how}", "MB/s", rate, rates)


def _followed(document: dict[str, Any]) -> Iterator[Figure]:
    groups: dict[tuple[int, str, str], dict[str, float]] = {}
    for point in document["points"]:
        name, _, percentile = point["series"].rpartition(" ")
        rate, _, peer = name.partition(" ")
        if percentile in ("p50", "p99") and peer not in ("partitioned", "application"):
            groups.setdefault((point["consumers"], rate, percentile), {})[peer] = point["median"]
    for (count, rate, percentile), ages in groups.items():
        followers = "1 follower" if count == 1 else f"{count} followers"
        ours = ages.pop("")
        yield Figure(f"commit to {followers} at {rate}, {percentile}", "ms", ours, ages)


def table(folder: Path, suffix: str = "") -> str:
    """The table in Markdown.

    Raises:
        SystemExit: the folder has no results.
    """
    lines = [figure.line() for figure in figures(folder, suffix)]
    if not lines:
        raise SystemExit(f"{folder} has no results; run: make bench-peers")
    head = "| | what the peer of the same run does, times | Databus |\n|---|---|---|"
    return "\n".join([head, *lines])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_table", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="of the smoke runs, which say nothing")
    given = parser.parse_args()
    print(table(given.results, "-smoke" if given.smoke else ""))
