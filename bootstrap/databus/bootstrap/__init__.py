"""The bootstrap room: the log writer, the runs and the server for readers that lag behind.

``applier`` is not imported here, because it brings Spark with it.
"""

from __future__ import annotations

from databus.bootstrap.log import HotLog
from databus.bootstrap.log_check import describe_log
from databus.bootstrap.manifest import Manifest, Store
from databus.bootstrap.process import run_applier, run_bootstrap, run_server, run_writer
from databus.bootstrap.runs import Run, RunKind
from databus.bootstrap.server import bootstrap_app, serve_bootstrap

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
