"""Keep the classes that Spark loads at every start in an archive, which halves that start.

Java maps the archive instead of reading and checking some ten thousand classes from jars
(application class-data sharing).  ``spark-submit`` takes the option from SPARK_SUBMIT_OPTS; an
archive of another Java or Spark is passed over.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def main(archive: Path) -> None:
    os.environ["SPARK_SUBMIT_OPTS"] = f"-XX:ArchiveClassesAtExit={archive} -Xlog:disable"
    from databus.bootstrap.merging.spark_merges import start_spark

    spark = start_spark("local[1]", "512m")
    with tempfile.TemporaryDirectory() as folder:
        rows = spark.range(1000).selectExpr("id % 10 AS k", "id AS v", "hex(id) AS t")
        rows.write.parquet(f"{folder}/rows")
        read = spark.read.parquet(f"{folder}/rows")
        read.join(rows.groupBy("k").count(), "k").orderBy("v").toArrow()
        read.mapInArrow(lambda batches: batches, read.schema).collect()
    java = spark.sparkContext._gateway.proc
    spark.stop()
    # It ends when its stdin is closed, and writes the archive before.
    java.stdin.close()
    java.wait(300)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
