"""The files of a table in Delta Lake, committed by ``deltalake``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from databus.client.exports.delta_table import DeltaLakeTable
from databus.client.exports.lake_files import (
    FileCommit,
    FilePlace,
    LakeFile,
    Layout,
    NewFile,
    other_rows,
)
from databus.client.exports.table_export import ExportMark
from databus.common.errors import StoreBusy


class DeltaFiles:
    """One Delta table, in a folder or on S3.

    Invariants:
        I1. Files and position change in one Delta commit.  A column that is added appears in a
            commit before it: null in all rows, at the same position.

    Owner: one mirror; Delta refuses the commit of a second one.
    """

    def __init__(
        self,
        location: str,
        key: Sequence[str],
        clock: str,
        layout: Layout,
        options: Mapping[str, str] | None = None,
        s3: Mapping[str, Any] | None = None,
    ) -> None:
        self._table = DeltaLakeTable(location, key, clock, options)
        self._location = location
        self._options = dict(options) if options else None
        self._key = key[0]
        self._layout = layout
        self._s3 = s3

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self._location, storage_options=self._options)
        except TableNotFoundError:
            return None

    def mark(self) -> ExportMark | None:
        """The table's position."""
        found = self._table.mark()
        table = self._open() if found is None else None
        if table is not None and table.count():
            raise other_rows(f"the Delta table {self._location}")
        return found

    def schema(self) -> Any:
        """Its schema."""
        return self._table.schema()

    def files(self) -> list[LakeFile]:
        """The present files."""
        table = self._open()
        if table is None:
            return []
        names = table.metadata().partition_columns
        found = pa.table(table.get_add_actions(flatten=False)).to_pylist()
        return [
            LakeFile(
                one["path"],
                one["num_records"],
                {name: _text((one.get("partition") or {}).get(name)) for name in names},
                (one.get("min") or {}).get(self._key),
                (one.get("max") or {}).get(self._key),
            )
            for one in found
        ]

    def begin(self, schema: Any, *, whole: bool) -> FileCommit:
        """Prepare a commit."""
        if self._s3 is None:
            Path(self._location).mkdir(parents=True, exist_ok=True)
        table = self._open() or DeltaTable.create(
            self._location,
            schema,
            partition_by=list(self._layout.partition_by),
            storage_options=self._options,
        )
        had = pa.schema(table.schema().to_arrow()).names
        if not whole and (added := [one for one in schema if one.name not in had]):
            table.alter.add_columns(Schema.from_arrow(pa.schema(added)).fields)
        partition_by = tuple(table.metadata().partition_columns)
        root = self._location.removeprefix("s3://") if self._s3 is not None else self._location
        place = FilePlace(root, schema, self._s3, partition_by=partition_by, in_file=False)
        return _DeltaCommit(table, place, self._table)


class _DeltaCommit:
    def __init__(self, table: DeltaTable, place: FilePlace, marks: DeltaLakeTable) -> None:
        self.place = place
        self._table = table
        self._marks = marks

    def commit(
        self, removed: Sequence[LakeFile] | None, added: Sequence[NewFile], mark: ExportMark
    ) -> None:
        now_ms = time.time_ns() // 1_000_000
        actions: list[Any] = [
            AddAction(one.path, one.size_bytes, one.partition, now_ms, True, one.stats)
            for one in added
        ]
        actions += [
            RemoveAction(one.path, True, now_ms, partition_values=dict(one.partition) or None)
            for one in removed or ()
        ]
        try:
            self._table.create_write_transaction(
                actions,
                "overwrite" if removed is None else "append",
                self.place.schema,
                partition_by=list(self.place.partition_by),
                commit_properties=self._marks.commit_properties(mark),
            )
        except CommitFailedError as error:
            raise StoreBusy(
                f"another writer has changed {self._table.table_uri} meanwhile: {error}"
            ) from error


def _text(value: Any) -> str | None:
    return None if value is None else str(pa.scalar(value).cast(pa.string()).as_py())
