"""What the pipelines of this folder share: a stream of changes, applied once a batch.

Spark may give a batch twice, after a kill.  So each pipeline writes one commit a batch, which
holds the number of the batch as an app transaction of Delta; a batch that is there is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import DataFrame, SparkSession

from databus.client.spark import register

APP = "batches"


def options(description: str | None) -> argparse.ArgumentParser:
    """The options that every pipeline has."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    for name in ("database", "source", "relays", "bootstraps", "to"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--every", help="such as 10s; without it what there is now, and the end")
    return parser


def session() -> SparkSession:
    """Spark as its configuration, or ``spark-submit``, has it, with the format ``databus``."""
    spark = SparkSession.builder.appName("databus-example").getOrCreate()
    register(spark)
    return spark


class Batches:
    """A Delta table in ``to/table``, and the batches that it has."""

    def __init__(self, to: Path, schema: pa.Schema, partition_by: list[str]) -> None:
        self._schema = schema
        self.path = str(to / "table")
        self.checkpoint = str(to / "checkpoint")
        DeltaTable.create(self.path, schema, mode="ignore", partition_by=partition_by)

    def has(self, batch: int) -> bool:
        """Whether a batch was committed."""
        last = DeltaTable(self.path).transaction_version(APP)
        return last is not None and last >= batch

    def rows(self, condition: str) -> pa.Table:
        """The present rows for which a condition in SQL holds."""
        return pa.table(DeltaTable(self.path).scan(predicate=condition)).cast(self._schema)

    def merge(self, rows: pa.Table, same: str, batch: int) -> Any:
        """One commit: rows ``t`` of the table for which ``same`` holds with a row ``s``."""
        commit = CommitProperties(app_transactions=[Transaction(APP, batch)])
        table = DeltaTable(self.path)
        return table.merge(
            rows, predicate=same, source_alias="s", target_alias="t", commit_properties=commit
        )


def follow(
    spark: SparkSession,
    given: argparse.Namespace,
    batches: Batches,
    apply: Callable[[DataFrame, int], None],
    **more: str,
) -> Any:
    """Start the query: ``apply`` gets each batch of changes that the table does not have."""
    stream = (
        spark.readStream.format("databus")
        .options(database=given.database, source=given.source)
        .options(relays=given.relays, bootstraps=given.bootstraps, metadata="true", **more)
        .load()
    )

    def once(changes: DataFrame, batch: int) -> None:
        if not batches.has(batch):
            apply(changes, batch)

    trigger: dict[str, Any] = {"processingTime": given.every} if given.every else {"once": True}
    writer = stream.writeStream.foreachBatch(once).trigger(**trigger)
    return writer.option("checkpointLocation", batches.checkpoint).start()
