"""A step of your own between changes and the tables of ``databus mirror``.

    cd examples/spark
    databus mirror -c databus.toml --to lake --every 10s --transform mirror_step:without_names

It gets the changes of one table, with the stream's own columns, and the table's name.  What it
gives is merged: the key and the columns that begin with ``_`` must stay, all others are yours.  A
row whose ``_op`` becomes ``d`` is deleted from the lake, or never gets there.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def without_names(changes: DataFrame, source: str) -> DataFrame:
    """Customers by pseudonym, and only those with credit; other tables as they are."""
    if not source.endswith(".customers"):
        return changes
    credit = F.coalesce(F.col("credit").cast("decimal(12,2)"), F.lit(0))
    return (
        changes.withColumn("pseudonym", F.sha2(F.col("name"), 256))
        .withColumn("_op", F.when(credit <= 0, "d").otherwise(F.col("_op")))
        .drop("name", "note")
    )
