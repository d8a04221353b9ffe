"""A Spark of the test process's own, which leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from databus.bootstrap.merging.spark_merges import start_spark
from tests.support.waiting import PATIENCE


@contextlib.contextmanager
def spark_session(scratch: Path) -> Iterator[SparkSession]:
    """A session with two threads for the block; its temporary files lie in ``scratch``.

    PySpark keeps the Java machine for the next session of the process, which would have other
    folders: here it ends with the session.
    """
    session = start_spark("local[2]", "1g", scratch=scratch)
    try:
        yield session
    finally:
        session.stop()
        gateway = SparkContext._gateway
        if gateway is not None:
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(20 * PATIENCE)
            SparkContext._gateway = None
            SparkContext._jvm = None
