"""Keep the number and the sum of orders of each hour, from the changes of the orders alone.

    python examples/spark/hourly_totals.py --database shop --source public.orders --to totals \
        --relays http://127.0.0.1:8700 --bootstraps http://127.0.0.1:8701 --every 10s

An order that is updated, moved to another hour or deleted changes the totals by the difference
between its new and its old values.  The old ones are in the same Delta table, in the partition
``kind = 'order'``, and change in the same commit as the totals in ``kind = 'hour'``.  The driver
gets a row for each changed order and for each hour of theirs, and no others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from batches import Batches, follow, options, session
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),  # order or hour
        ("id", pa.string()),  # of the order, or the hour
        ("hour", pa.string()),
        ("count", pa.int64()),
        ("total", pa.decimal128(28, 2)),
    ]
)
ORDERS = pa.schema([SCHEMA.field(name) for name in ("id", "hour", "count", "total")])
VALUES = ["hour", "count", "total"]
SAME = "t.kind = s.kind AND t.id = s.id"


def totals(spark: SparkSession, given: argparse.Namespace) -> Any:
    """Start the query."""
    batches = Batches(Path(given.to), SCHEMA, ["kind"])

    def apply(changes: DataFrame, batch: int) -> None:
        orders = newest(changes).toArrow().cast(ORDERS)
        before = batches.rows(one_of("order", orders.column("id")))
        moved = pa.concat_tables([orders.select(VALUES), negative(before)])
        hours = summed(moved.filter(pc.is_valid(moved.column("hour"))))
        had = batches.rows(one_of("hour", hours.column("hour")))
        hours = summed(pa.concat_tables([hours, had.select(VALUES).cast(hours.schema)]))
        rows = [
            orders.append_column("kind", pa.repeat("order", orders.num_rows)),
            hours.append_column("kind", pa.repeat("hour", hours.num_rows)).append_column(
                "id", hours.column("hour")
            ),
        ]
        (
            batches.merge(pa.concat_tables([one.select(SCHEMA.names) for one in rows]), SAME, batch)
            .when_matched_delete("s.count = 0")
            .when_matched_update_all()
            .when_not_matched_insert_all("s.count <> 0")
            .execute()
        )

    return follow(spark, given, batches, apply)


def newest(changes: DataFrame) -> DataFrame:
    """What each changed order adds to its hour now; nothing if it was deleted."""
    order = Window.partitionBy("id").orderBy(F.desc("_scn"), F.desc("_seq"))
    last = changes.withColumn("_rank", F.row_number().over(order)).where("_rank = 1")
    is_gone = F.col("_op") == "d"
    return last.select(
        F.col("id").cast("string").alias("id"),
        F.when(~is_gone, F.substring(F.col("placed").cast("string"), 1, 13)).alias("hour"),
        F.when(is_gone, 0).otherwise(1).cast("long").alias("count"),
        F.when(is_gone, 0).otherwise(F.col("total").cast("decimal(28,2)")).alias("total"),
    )


def one_of(kind: str, ids: Any) -> str:
    """The condition for the rows of a kind with these ids, of which none has a quote."""
    listed = ", ".join(f"'{one}'" for one in ["", *ids.to_pylist()])
    return f"kind = '{kind}' AND id IN ({listed})"


def negative(rows: pa.Table) -> pa.Table:
    """What these orders had added to their hours, to be taken away."""
    columns = [
        rows.column("hour"),
        pc.negate(rows.column("count")),
        pc.negate(rows.column("total")),
    ]
    return pa.table(columns, schema=pa.schema([SCHEMA.field(name) for name in VALUES]))


def summed(rows: pa.Table) -> pa.Table:
    """One row for each hour."""
    found = rows.group_by("hour").aggregate([("count", "sum"), ("total", "sum")])
    columns = [found.column(name) for name in ("hour", "count_sum", "total_sum")]
    return pa.table(columns, names=VALUES).cast(pa.schema([SCHEMA.field(name) for name in VALUES]))


if __name__ == "__main__":
    totals(session(), options(__doc__).parse_args()).awaitTermination()
