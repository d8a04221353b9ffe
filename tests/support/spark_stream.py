"""A streaming query that maintains a copy of a table: here, or in a process that may be killed.

``python -m tests.support.spark_stream SETTINGS`` runs one for each table that is named, all from
the same Spark, until it is killed.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from databus.client.spark import register
from databus.common.checkpoint import Position
from tests.support.spark_session import spark_session

KeyedRows = dict[tuple[Any, ...], dict[str, Any]]


class KeyedSink:
    """Replaces the row of the same key by each new one; a repeated row changes nothing.

    In the batch ``stalls_in`` it has put half of the rows in when it waits to be killed.
    """

    def __init__(self, folder: Path, key: tuple[str, ...], stalls_in: int | None = None) -> None:
        self._folder = folder
        self._key = key
        self._stalls_in = stalls_in
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, frame: Any, batch: int) -> None:
        found = frame.toArrow()
        pq.write_table(found, self._folder / f"batch-{batch}.parquet")
        rows = sorted(found.to_pylist(), key=position_of)
        if batch == self._stalls_in:
            rows = rows[: len(rows) // 2]
        self._put(rows, found.schema)
        if batch == self._stalls_in:
            (self._folder / "stalled").touch()
            threading.Event().wait()

    def _put(self, rows: list[dict[str, Any]], schema: Any) -> None:
        state = self.rows()
        for row in rows:
            key = tuple(row[name] for name in self._key)
            if row["_op"] == "d":
                state.pop(key, None)
            else:
                state[key] = row
        written = self._folder / "rows.new"
        pq.write_table(pa.Table.from_pylist(list(state.values()), schema=schema), written)
        written.rename(self._folder / "rows.parquet")

    def rows(self) -> KeyedRows:
        """What the copy holds."""
        checkpoint_folder = self._folder / "rows.parquet"
        found = pq.read_table(checkpoint_folder).to_pylist() if checkpoint_folder.exists() else []
        return {tuple(row[name] for name in self._key): row for row in found}

    def batch(self, number: int) -> list[Position]:
        """The positions of the rows that a batch had the last time it came."""
        found = pq.read_table(self._folder / f"batch-{number}.parquet").to_pylist()
        return sorted(position_of(row) for row in found)

    @property
    def is_stalled(self) -> bool:
        """Whether it waits to be killed."""
        return (self._folder / "stalled").exists()


def position_of(row: Mapping[str, Any]) -> Position:
    """Where in the stream a row is."""
    return Position(row["_scn"], row["_seq"])


def query_to(
    spark: Any, sink: KeyedSink, options: Mapping[str, str], checkpoint_folder: Path, **trigger: Any
) -> Any:
    """A query that begins where its checkpoint stands."""
    stream = spark.readStream.format("databus").options(**options)
    writer = stream.load().writeStream.foreachBatch(sink)
    return writer.option("checkpointLocation", str(checkpoint_folder)).trigger(**trigger).start()


def main() -> None:
    """A query for each of the settings' tables."""
    settings = json.loads(sys.argv[1])
    with spark_session(Path(settings["scratch"])) as spark:
        register(spark)
        for one in settings["tables"]:
            folder = Path(one["folder"])
            sink = KeyedSink(folder / "sink", tuple(one["key"]), one["stalls_in"])
            checkpoint_folder = folder / "checkpoint"
            query_to(
                spark, sink, one["options"], checkpoint_folder, processingTime="100 milliseconds"
            )
        spark.streams.awaitAnyTermination()


if __name__ == "__main__":
    main()
