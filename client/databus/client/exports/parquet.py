"""A table as a folder of Parquet files: ``<table>/current/*.parquet``.

A version is a folder; ``current`` is a symbolic link to the newest, which a rename replaces.
Files that no change touches are hard links into the version before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from databus.client.exports.export import Changes, Mark, among, without
from databus.common.checkpoint import decode_position

FILE_ROWS = 1_000_000
SMALL_ROWS = 50_000
MOST_SMALL_FILES = 16
MARK_NAME = "_databus.json"


class ParquetTable:
    """One table.

    Invariants:
        I1. A version that ``current`` has named is never changed.
        I2. All files of a version have one schema.

    Owner: one export at a time.
    Durability: when ``replace`` or ``apply`` returns, the version survives a power loss.
    """

    def __init__(
        self,
        folder: Path,
        key: Sequence[str],
        reached: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._folder = folder
        self._key = list(key)
        self._reached = reached
        self._link = folder / "current"

    def mark(self) -> Mark | None:
        """Where the table stands."""
        try:
            document = json.loads((self._link / MARK_NAME).read_text())
        except FileNotFoundError:
            return None
        if document["key"] != self._key:
            return None
        return Mark(document["clock"], decode_position(document))

    def schema(self) -> Any:
        """The schema of its files."""
        files = self._files()
        return pq.read_schema(files[0]) if files else pa.schema([])

    def rows_of(self, keys: Any) -> list[Mapping[str, Any]]:
        """The rows with these keys."""
        found: list[Mapping[str, Any]] = []
        for path in self._files():
            found += among(pq.read_table(path), keys).to_pylist()
        return found

    def replace(self, schema: Any, batches: Iterator[Any], mark: Mark) -> int:
        """A version with these rows."""
        version = self._new_version()
        count = rows = 0
        writer: pq.ParquetWriter | None = None
        for batch in batches:
            if writer is None or rows >= FILE_ROWS:
                if writer is not None:
                    writer.close()
                writer, rows = pq.ParquetWriter(_file(version, count), schema), 0
            writer.write_batch(batch)
            count += batch.num_rows
            rows += batch.num_rows
        if writer is None:
            writer = pq.ParquetWriter(_file(version, 0), schema)
        writer.close()
        self._switch(version, mark)
        return count

    def apply(self, schema: Any, changes: Changes, mark: Mark) -> None:
        """A version with the files that stay, those that lose rows anew, and the new rows."""
        version = self._new_version()
        keys = changes.keys
        fresh = [changes.rows.select(schema.names)]
        small = [path for path in self._files() if _row_count(path) < SMALL_ROWS]
        for number, path in enumerate(self._files()):
            touched = among(pq.read_table(path, columns=self._key), keys).num_rows
            is_merged = len(small) > MOST_SMALL_FILES and path in small
            if not touched and not is_merged and pq.read_schema(path).equals(schema):
                os.link(path, version / path.name)
                continue
            rows = _as(
                without(pq.read_table(path), keys) if touched else pq.read_table(path), schema
            )
            if is_merged:
                fresh.append(rows)
            elif rows.num_rows:
                pq.write_table(rows, version / f"{_stem(path)}-{version.name}-{number}.parquet")
        added = pa.concat_tables([rows.cast(schema) for rows in fresh])
        if added.num_rows or not list(version.glob("*.parquet")):
            pq.write_table(added, version / f"part-{version.name}.parquet")
        self._switch(version, mark)

    def _files(self) -> list[Path]:
        return sorted(self._link.glob("*.parquet"))

    def _new_version(self) -> Path:
        """An empty folder; what an export that was killed left behind goes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        current = self._link.readlink().name if self._link.is_symlink() else "v-0"
        number = int(current.removeprefix("v-"))
        for path in self._folder.glob("v-*"):
            if int(path.name.removeprefix("v-")) not in (number, number - 1):
                shutil.rmtree(path)
        version = self._folder / f"v-{number + 1}"
        version.mkdir()
        return version

    def _switch(self, version: Path, mark: Mark) -> None:
        document = {"clock": mark.clock, "key": self._key, **mark.position.to_json()}
        (version / MARK_NAME).write_text(json.dumps(document))
        for path in [*version.iterdir(), version]:
            _sync(path)
        self._reached("written")
        link = self._folder / "current.new"
        link.unlink(missing_ok=True)
        link.symlink_to(version.name)
        link.rename(self._link)
        _sync(self._folder)


def _file(version: Path, first_row: int) -> Path:
    return version / f"part-{version.name}-{first_row:012d}.parquet"


def _stem(path: Path) -> str:
    """The name without the versions that it went through."""
    return "-".join(path.stem.split("-")[:1])


def _row_count(path: Path) -> int:
    return int(pq.read_metadata(path).num_rows)


def _as(rows: Any, schema: Any) -> Any:
    """The rows with the columns that were added since, null."""
    for field in schema:
        if field.name not in rows.column_names:
            rows = rows.append_column(field, pa.nulls(rows.num_rows, field.type))
    return rows.select(schema.names).cast(schema)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
