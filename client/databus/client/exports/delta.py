"""A table in Delta Lake, written by ``deltalake``; the mark is a pair of app transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from databus.client.exports.export import GONE, Changes, Mark, among
from databus.common.checkpoint import Position


class DeltaLakeTable:
    """One table.

    Invariants:
        I1. Rows and position change in one Delta commit.

    Owner: one export at a time; Delta refuses a second that wrote in between.
    """

    def __init__(
        self,
        folder: Path,
        key: Sequence[str],
        clock: str,
        reached: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._folder = folder
        self._key = list(key)
        self._clock = clock
        self._reached = reached

    def _table(self) -> DeltaTable:
        return DeltaTable(str(self._folder))

    def _commit(self, mark: Mark) -> CommitProperties:
        scn, seq = mark.position
        return CommitProperties(
            custom_metadata={
                "databus.clock": mark.clock,
                "databus.scn": str(scn),
                "databus.seq": str(seq),
            },
            app_transactions=[
                Transaction(f"databus.scn:{mark.clock}", scn),
                Transaction(f"databus.seq:{mark.clock}", seq),
            ],
        )

    def mark(self) -> Mark | None:
        """Where the table stands."""
        if not DeltaTable.is_deltatable(str(self._folder)):
            return None
        table = self._table()
        scn = table.transaction_version(f"databus.scn:{self._clock}")
        seq = table.transaction_version(f"databus.seq:{self._clock}")
        if scn is None or seq is None:
            return None
        return Mark(self._clock, Position(scn, seq))

    def schema(self) -> Any:
        """Its schema."""
        return pa.schema(self._table().schema().to_arrow())

    def rows_of(self, keys: Any) -> list[Mapping[str, Any]]:
        """The rows with these keys."""
        return list(among(self._table().to_pyarrow_table(), keys).to_pylist())

    def replace(self, schema: Any, batches: Iterator[Any], mark: Mark) -> int:
        """One commit that overwrites the table."""
        count = 0

        def counted() -> Iterator[Any]:
            nonlocal count
            for batch in batches:
                count += batch.num_rows
                yield batch
            self._reached("written")

        self._folder.mkdir(parents=True, exist_ok=True)
        write_deltalake(
            str(self._folder),
            pa.RecordBatchReader.from_batches(schema, counted()),
            mode="overwrite",
            schema_mode="overwrite",
            commit_properties=self._commit(mark),
        )
        return count

    def apply(self, schema: Any, changes: Changes, mark: Mark) -> None:
        """One merge."""
        gone = changes.gone
        for field in schema:
            if field.name not in gone.column_names:
                gone = gone.append_column(field, pa.nulls(gone.num_rows, field.type))
        rows = pa.concat_tables(
            [
                _flagged(changes.rows.select(schema.names), False),
                _flagged(gone.select(schema.names), True),
            ]
        )
        columns = {f"`{name}`": f"s.`{name}`" for name in schema.names}
        self._reached("written")
        (
            self._table()
            .merge(
                rows,
                predicate=" AND ".join(f"t.`{name}` = s.`{name}`" for name in self._key),
                source_alias="s",
                target_alias="t",
                merge_schema=True,
                commit_properties=self._commit(mark),
            )
            .when_matched_delete(f"s.{GONE}")
            .when_matched_update(columns)
            .when_not_matched_insert(columns, predicate=f"NOT s.{GONE}")
            .execute()
        )


def _flagged(rows: Any, flag: bool) -> Any:
    return rows.append_column(GONE, pa.array([flag] * rows.num_rows, type=pa.bool_()))
