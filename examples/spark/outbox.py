"""Deliver the messages of an outbox table: one Delta table of messages, by topic, each one once.

    python examples/spark/outbox.py --database shop --source public.outbox --to messages \
        --relays http://127.0.0.1:8700 --bootstraps http://127.0.0.1:8701 --every 10s

An application inserts a message (``id``, ``topic``, ``payload`` as JSON) in the transaction that it
is about, and may delete it at once.  So a message exists if and only if its transaction
committed.  Only inserts count here; deletes clean up.  The stream starts at the oldest change
that is retained, as a snapshot would lack the messages that are deleted by now.  A message that
comes again, such as after a resynchronisation of the table, is found by its id.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
from batches import Batches, follow, options, session
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("id", pa.int64()),
        ("kind", pa.string()),
        ("payload", pa.string()),
        ("committed", pa.timestamp("us", "UTC")),
    ]
)


def outbox(spark: SparkSession, given: argparse.Namespace) -> Any:
    """Start the query."""
    batches = Batches(Path(given.to), SCHEMA, ["topic"])

    def apply(changes: DataFrame, batch: int) -> None:
        messages = (
            changes.where("_op IN ('c', 'r')")
            .dropDuplicates(["id"])
            .select(
                "topic",
                F.col("id").cast("long").alias("id"),
                F.get_json_object("payload", "$.kind").alias("kind"),
                "payload",
                F.col("_commit_time").alias("committed"),
            )
        )
        found = messages.toArrow().cast(SCHEMA)
        same = "t.topic = s.topic AND t.id = s.id"
        batches.merge(found, same, batch).when_not_matched_insert_all().execute()

    return follow(spark, given, batches, apply, mode="all", start="oldest")


if __name__ == "__main__":
    outbox(session(), options(__doc__).parse_args()).awaitTermination()
