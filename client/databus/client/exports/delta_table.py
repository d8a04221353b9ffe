"""A table in Delta Lake, written by ``deltalake``; the mark is a pair of app transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError

from databus.client.exports.table_export import GONE, ExportMark, TableChanges, among
from databus.common.checkpoint import Position
from databus.common.storage.bucket import Bucket

ERRORS = (OSError, DeltaError)
"""Errors of reading and writing, besides ours."""


def options_of(bucket: Bucket) -> dict[str, str]:
    """A bucket as options of ``deltalake``.

    With ``etag``, a commit fails if its object exists already.
    """
    settings, endpoint = bucket.settings, bucket.endpoint
    given = {
        "aws_conditional_put": "etag",
        "aws_region": settings.get("region", ""),
        "aws_access_key_id": settings.get("access_key", ""),
        "aws_secret_access_key": settings.get("secret_key", ""),
        "aws_session_token": settings.get("session_token", ""),
        "connect_timeout": f"{settings['connect_timeout']:g}s",
        "max_retries": str(settings["attempts"]),
    }
    if endpoint:
        given |= {
            "aws_endpoint_url": endpoint,
            "aws_allow_http": str(endpoint.startswith("http:")).lower(),
            "aws_virtual_hosted_style_request": "false",
        }
    return {name: value for name, value in given.items() if value}


class DeltaLakeTable:
    """One table, in a folder or at an ``s3://`` URL with its options.

    Invariants:
        I1. Rows and position change in one Delta commit.

    Owner: one export at a time; Delta refuses the commit if another one wrote in between.
    """

    def __init__(
        self,
        location: str,
        key: Sequence[str],
        clock: str,
        options: Mapping[str, str] | None = None,
        reached: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._location = location
        self._options = dict(options) if options else None
        self._key = list(key)
        self._clock = clock
        self._reached = reached

    def _table(self) -> DeltaTable:
        return DeltaTable(self._location, storage_options=self._options)

    def commit_properties(self, mark: ExportMark) -> CommitProperties:
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

    def mark(self) -> ExportMark | None:
        """The table's position."""
        try:
            table = self._table()
        except TableNotFoundError:
            return None
        scn = table.transaction_version(f"databus.scn:{self._clock}")
        seq = table.transaction_version(f"databus.seq:{self._clock}")
        if scn is None or seq is None:
            return None
        return ExportMark(self._clock, Position(scn, seq))

    def schema(self) -> Any:
        """Its schema."""
        return pa.schema(self._table().schema().to_arrow())

    def rows_of(self, keys: Any) -> list[Mapping[str, Any]]:
        """The rows with these keys."""
        return list(among(self._table().to_pyarrow_table(), keys).to_pylist())

    def replace(self, schema: Any, batches: Iterator[Any], mark: ExportMark) -> int:
        """One commit that overwrites the table."""
        count = 0

        def counted() -> Iterator[Any]:
            nonlocal count
            for batch in batches:
                count += batch.num_rows
                yield batch
            self._reached("written")

        if self._options is None:
            Path(self._location).mkdir(parents=True, exist_ok=True)
        write_deltalake(
            self._location,
            pa.RecordBatchReader.from_batches(schema, counted()),
            mode="overwrite",
            schema_mode="overwrite",
            storage_options=self._options,
            commit_properties=self.commit_properties(mark),
        )
        return count

    def apply(self, schema: Any, changes: TableChanges, mark: ExportMark) -> None:
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
                commit_properties=self.commit_properties(mark),
            )
            .when_matched_delete(f"s.{GONE}")
            .when_matched_update(columns)
            .when_not_matched_insert(columns, predicate=f"NOT s.{GONE}")
            .execute()
        )


def _flagged(rows: Any, flag: bool) -> Any:
    return rows.append_column(GONE, pa.array([flag] * rows.num_rows, type=pa.bool_()))
