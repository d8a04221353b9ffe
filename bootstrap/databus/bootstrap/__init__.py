"""The bootstrap room: the log writer, the runs and the server for readers that lag behind.

``applier`` is not imported here, because it brings Spark with it.
"""

from __future__ import annotations

from databus.bootstrap.http.bootstrap_server import bootstrap_app, serve_bootstrap
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.log.log_check import describe_log
from databus.bootstrap.processes.bootstrap_processes import (
    run_applier,
    run_bootstrap,
    run_server,
    run_writer,
)
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind

__all__ = [
    "HotLog",
    "Manifest",
    "Run",
    "RunKind",
    "Store",
    "bootstrap_app",
    "describe_log",
    "run_applier",
    "run_bootstrap",
    "run_server",
    "run_writer",
    "serve_bootstrap",
]
