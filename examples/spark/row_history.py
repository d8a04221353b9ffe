"""Keep every version of each row, with the time from and to which it held: dimension type 2.

    python examples/spark/row_history.py --database shop --source public.stock --key sku \
        --columns sku,on_hand --to history \
        --relays http://127.0.0.1:8700 --bootstraps http://127.0.0.1:8701 --every 10s

``table`` is in Delta: the columns, ``valid_from``, ``valid_to`` (null for the present version)
and the position of the change that made the version.  The stream gives every change
(``mode=all``): a version that lasted for a moment has a row too.  If the changes are no longer
retained one by one, the query fails with ``log_too_young`` instead of leaving versions out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
from batches import Batches, follow, options, session
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

OWN = pa.schema(
    [
        ("valid_from", pa.timestamp("us", "UTC")),
        ("valid_to", pa.timestamp("us", "UTC")),
        ("scn", pa.int64()),
        ("seq", pa.int64()),
    ]
)


def history(spark: SparkSession, given: argparse.Namespace) -> Any:
    """Start the query."""
    key, columns = given.key.split(","), given.columns.split(",")
    typed = spark.read.format("databus").options(
        database=given.database, source=given.source, bootstraps=given.bootstraps
    )
    own = to_arrow_schema(typed.load().select(columns).schema, timezone="UTC")
    schema = pa.schema([*own, *OWN])
    batches = Batches(Path(given.to), schema, [])
    same = " AND ".join(f"t.`{name}` = s.`{name}`" for name in (*key, "scn", "seq"))

    def apply(changes: DataFrame, batch: int) -> None:
        present = spark.createDataFrame(batches.rows("valid_to IS NULL"))
        found = versions(changes, present, key, columns).toArrow().cast(schema)
        (
            batches.merge(found, same, batch)
            .when_matched_update({"valid_to": "s.valid_to"})
            .when_not_matched_insert_all()
            .execute()
        )

    return follow(spark, given, batches, apply, mode="all")


def versions(
    changes: DataFrame, present: DataFrame, key: list[str], columns: list[str]
) -> DataFrame:
    """New versions, and present ones of the same rows with the time at which they ended."""
    new = changes.select(
        *columns,
        F.col("_commit_time").alias("valid_from"),
        F.col("_scn").alias("scn"),
        F.col("_seq").alias("seq"),
        (F.col("_op") == "d").alias("_gone"),
    )
    before = present.join(changes.select(key).distinct(), key, "left_semi").drop("valid_to")
    ordered = Window.partitionBy(*key).orderBy("scn", "seq")
    every = new.unionByName(before.withColumn("_gone", F.lit(False)))
    ended = every.withColumn("valid_to", F.lead("valid_from").over(ordered))
    return ended.where("NOT _gone").select(*columns, "valid_from", "valid_to", "scn", "seq")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--key", required=True, help="the key's columns, comma separated")
    parser.add_argument("--columns", required=True, help="the columns to keep, the key included")
    history(session(), parser.parse_args()).awaitTermination()
