"""Keep a Parquet mirror of one table with Spark: its state at first, then every change.

    python examples/spark_mirror.py --database shop --source main.orders --key id \
        --relays http://127.0.0.1:8700 --bootstraps http://127.0.0.1:8701 --to mirror

The mirror is ``DIR/current``, a link to the newest version, for any reader of Parquet.  Every
batch merges by key and by position, so a batch that Spark gives twice changes nothing: the
mirror without its rows of ``_op = 'd'`` is what the source was at the end of the last batch.
Run it again to resume; with ``--every 10s`` it stays.  For a Delta table replace ``merge`` by
``DeltaTable.merge``.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from databus.client.spark import register


class Mirror:
    """The newest row of each key; deleted keys are remembered, so that nothing comes back."""

    def __init__(self, folder: Path, key: list[str]) -> None:
        self._folder = folder
        self._key = key

    def merge(self, changes: DataFrame, batch: int) -> None:
        """Put a batch in: the last row of each key by position, and the old ones of other keys."""
        spark = changes.sparkSession
        link, version = self._folder / "current", self._folder / f"v-{batch}"
        rows = changes
        before = link.resolve() if link.exists() else None
        if before == version.resolve():
            return  # this batch was merged before Spark noted that
        if before is not None:
            rows = spark.read.parquet(str(before)).unionByName(rows, allowMissingColumns=True)
        order = Window.partitionBy(*self._key).orderBy(F.desc("_scn"), F.desc("_seq"))
        last = rows.withColumn("_rank", F.row_number().over(order)).where("_rank = 1")
        last.drop("_rank").write.mode("overwrite").parquet(str(version))
        self._switch(link, version)
        for old in self._folder.glob("v-*"):
            if old.resolve() not in (version.resolve(), before):
                shutil.rmtree(old)

    def _switch(self, link: Path, version: Path) -> None:
        new = self._folder / "current.new"
        new.unlink(missing_ok=True)
        new.symlink_to(version.name)
        new.rename(link)


def follow(spark: SparkSession, given: argparse.Namespace) -> Any:
    """Start the query."""
    folder = Path(given.to)
    folder.mkdir(parents=True, exist_ok=True)
    stream = (
        spark.readStream.format("databus")
        .option("database", given.database)
        .option("source", given.source)
        .option("relays", given.relays)
        .option("bootstraps", given.bootstraps)
        .option("metadata", "true")
        .load()
    )
    trigger = {"processingTime": given.every} if given.every else {"once": True}
    mirror = Mirror(folder, given.key.split(","))
    return (
        stream.writeStream.foreachBatch(mirror.merge)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(**trigger)
        .start()
    )


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("database", "source", "key", "relays", "bootstraps", "to"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--every", help="such as 10s; without it one batch and the end")
    given = parser.parse_args()
    spark = SparkSession.builder.appName("databus-mirror").getOrCreate()
    register(spark)
    follow(spark, given).awaitTermination()


if __name__ == "__main__":
    main()
