"""Passes of a mirror over all tables of a database, and the Spark session that they run in."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from databus.client.exports.export_formats import Lake
from databus.client.exports.lake_files import FileTable, Layout
from databus.client.spark.data_source import register
from databus.client.spark.lake_mirror import MirroredTable, MirrorOptions, MirrorOutcome
from databus.client.tables.table_reader import TableAddress, TableReader
from databus.common.errors import DatabusError

Report = Callable[[str, "MirrorOutcome | Exception"], None]


def start_session(master: str | None, settings: Mapping[str, str]) -> SparkSession:
    """A session with the format ``databus``; ``settings`` are the user's and come last.

    Without ``master`` Spark's own configuration decides, as under ``spark-submit``.
    """
    builder = SparkSession.builder.appName("databus-mirror")
    if master is not None:
        builder = builder.master(master)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            builder = builder.config("spark.ui.enabled", "false")
    ours = {
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.scheduler.mode": "FAIR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    }
    for name, value in {**ours, **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    if "spark.sql.shuffle.partitions" not in settings:
        spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))
    return spark


@dataclass
class MirroredDatabase:
    """All mirrored tables of one database.

    Owner: one thread calls ``run``; its threads advance a table each.
    """

    spark: SparkSession
    lake: Lake
    name: str
    bootstrap: str
    options: MirrorOptions
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    parallel: int = 4
    _tables: dict[str, tuple[TableReader, MirroredTable]] = field(default_factory=dict)

    def run(self, sources: Sequence[str], report: Report) -> int:
        """Bring these tables to one position; returns how many failed.

        A table that fails stays where it is, and the others do not wait for it.
        """
        for source in sources:
            if source not in self._tables:
                self._tables[source] = self._table(source)
        if not sources:
            return 0
        until = self._tables[sources[0]][0].target()

        def one(source: str) -> bool:
            _, table = self._tables[source]
            try:
                with self.lake.writing(self.name, source):
                    report(source, table.advance(until))
            except (DatabusError, PySparkException) as error:
                report(source, error)
                return False
            return True

        with ThreadPoolExecutor(1 if self.lake.is_sequential else self.parallel) as threads:
            return sum(not done for done in threads.map(one, sources))

    def _table(self, source: str) -> tuple[TableReader, MirroredTable]:
        reader = TableReader(TableAddress(self.name, source, (), (self.bootstrap,)))
        reader.schema()
        layout = self.layouts.get(source, Layout())

        def open_files(key: Sequence[str], layout: Layout) -> FileTable:
            return self.lake.files(self.name, source, reader.clock)(key, layout)

        return reader, MirroredTable(self.spark, reader, open_files, layout, self.options)
