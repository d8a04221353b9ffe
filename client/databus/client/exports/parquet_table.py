"""A table as Parquet files; every export makes a new version.

In a folder the newest is ``<table>/current/*.parquet``; on S3 ``<table>/current/files.txt`` has
the URLs of its files, one a line.  A version reuses the files whose rows have not changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from databus.client.exports.parquet_versions import NewVersion, Versions
from databus.client.exports.table_export import ExportMark, TableChanges, among, without
from databus.common.checkpoint import decode_position

FILE_ROWS = 1_000_000
SMALL_ROWS = 50_000
MOST_SMALL_FILES = 16

ERRORS = (OSError,)
"""Errors of reading and writing, besides ours."""


class ParquetTable:
    """One table.

    Invariants:
        I1. A version that was the current one is never changed.
        I2. All files of a version have one schema.

    Owner: one export at a time.
    Durability: when ``replace`` or ``apply`` returns, the version survives a power loss.
    """

    def __init__(
        self,
        versions: Versions,
        key: Sequence[str],
        reached: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._versions = versions
        self._key = list(key)
        self._reached = reached

    def mark(self) -> ExportMark | None:
        """The table's position."""
        note = self._versions.current().note
        # Exports of earlier releases have the column names themselves in the note.
        if note is None or note["key"] not in (_digest(self._key), self._key):
            return None
        return ExportMark(note["clock"], decode_position(note))

    def schema(self) -> Any:
        """The schema of its files."""
        files = self._files()
        return self._metadata(files[0]).schema.to_arrow_schema() if files else pa.schema([])

    def rows_of(self, keys: Any) -> list[Mapping[str, Any]]:
        """The rows with these keys."""
        found: list[Mapping[str, Any]] = []
        for path in self._files():
            found += among(self._read(path), keys).to_pylist()
        return found

    def replace(self, schema: Any, batches: Iterator[Any], mark: ExportMark) -> int:
        """A version with these rows."""
        version = self._versions.begin()
        count = rows = 0
        writer: pq.ParquetWriter | None = None
        for batch in batches:
            if writer is None or rows >= FILE_ROWS:
                if writer is not None:
                    writer.close()
                writer, rows = self._writer(version, count, schema), 0
            writer.write_batch(batch)
            count += batch.num_rows
            rows += batch.num_rows
        if writer is None:
            writer = self._writer(version, 0, schema)
        writer.close()
        self._switch(version, mark)
        return count

    def apply(self, schema: Any, changes: TableChanges, mark: ExportMark) -> None:
        """A version with the unchanged files, rewritten files that lose rows, and the new rows."""
        version = self._versions.begin()
        keys = changes.keys
        fresh = [changes.rows.select(schema.names)]
        files = {path: self._metadata(path) for path in self._files()}
        small = [path for path, found in files.items() if found.num_rows < SMALL_ROWS]
        is_empty = True
        for number, (path, found) in enumerate(files.items()):
            touched = among(self._read(path, self._key), keys).num_rows
            is_merged = len(small) > MOST_SMALL_FILES and path in small
            if not touched and not is_merged and found.schema.to_arrow_schema().equals(schema):
                version.reuse(path)
                is_empty = False
                continue
            rows = _as(without(self._read(path), keys) if touched else self._read(path), schema)
            if is_merged:
                fresh.append(rows)
            elif rows.num_rows:
                self._write(rows, version, f"{_stem(path)}-{version.label}-{number}.parquet")
                is_empty = False
        added = pa.concat_tables([rows.cast(schema) for rows in fresh])
        if added.num_rows or is_empty:
            self._write(added, version, f"part-{version.label}-changes.parquet")
        self._switch(version, mark)

    def _files(self) -> tuple[str, ...]:
        return self._versions.current().files

    def _metadata(self, path: str) -> Any:
        return pq.read_metadata(path, filesystem=self._versions.filesystem)

    def _read(self, path: str, columns: Sequence[str] | None = None) -> Any:
        return pq.read_table(
            path, columns=columns, filesystem=self._versions.filesystem, partitioning=None
        )

    def _write(self, rows: Any, version: NewVersion, name: str) -> None:
        pq.write_table(rows, version.path(name), filesystem=self._versions.filesystem)

    def _writer(self, version: NewVersion, first_row: int, schema: Any) -> pq.ParquetWriter:
        path = version.path(f"part-{version.label}-{first_row:012d}.parquet")
        return pq.ParquetWriter(path, schema, filesystem=self._versions.filesystem)

    def _switch(self, version: NewVersion, mark: ExportMark) -> None:
        version.settle({"clock": mark.clock, "key": _digest(self._key), **mark.position.to_json()})
        self._reached("written")
        version.commit()


def _digest(key: list[str]) -> str:
    """A short hash of the key's columns: a note has little room."""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _stem(path: str) -> str:
    """The name without its version labels."""
    return "-".join(Path(path).stem.split("-")[:1])


def _as(rows: Any, schema: Any) -> Any:
    """The rows with the columns that were added since, null."""
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.select(schema.names).cast(schema)
