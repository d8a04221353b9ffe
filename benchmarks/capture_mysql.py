"""Capture from MySQL: rows a second off a backlog, CPU, memory, commit-to-callback latency.

Backlogs of ten columns in transactions of 1 and of 1,000 rows, drained through the source
alone and into a ring; beside them, in the same run, the database's own reader as the limit.
"""

from __future__ import annotations

from benchmarks.captured import capture, options
from benchmarks.harness import start
from benchmarks.upstreams import MySQL

if __name__ == "__main__":
    capture(start("capture_mysql", __doc__.partition("\n")[0], options), MySQL())
