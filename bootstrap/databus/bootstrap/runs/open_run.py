"""Reads a run, one file after the other.

A run may have thousands of files, and a reader needs few of them: those that the manifest alone
does not exclude.  A file is opened when its rows are needed and closed when the next one is.  So a
reader has one descriptor, however many files and runs it reads.

What is here does not hold anything in the store: the reader's note does (``open_readers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from databus.bootstrap.runs.parquet_runs import (
    DECODED_BYTES,
    SCN_LIMIT,
    RowGroup,
    Run,
    RunFile,
    bounds,
)
from databus.bootstrap.runs.run_storage import LocalFiles, RunFiles
from databus.client.splits.frame_tables import COLUMNS, FrameBlock, as_block, blocks_of, footer_crc
from databus.common.checkpoint import Position
from databus.common.errors import StoreError
from databus.common.frame.frame_format import FrameColumns, Op, scan

Wanted = Callable[[RunFile], bool]


class FileSlot:
    """The one file that a reader has open: opening another one closes it.

    ``check`` is called before each read; what it raises ends the reading.

    Owner: one reader.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._name: tuple[str, int] | None = None
        self._file: pq.ParquetFile | None = None

    def file(self, name: tuple[str, int], opening: Callable[[], pq.ParquetFile]) -> pq.ParquetFile:
        """The file ``name``, opened unless it is the one that is open."""
        self._check()
        if self._file is None or self._name != name:
            self.close()
            self._file, self._name = opening(), name
        return self._file

    def close(self) -> None:
        """Close the file; another call of ``file`` opens one again."""
        if self._file is not None:
            self._file.close(force=True)
            self._file = None


class OpenRun:
    """A run to be read: all of its files, or those that ``wanted`` chooses by the manifest.

    Invariants:
        I1. Sizes and row counts of an opened file are those of the manifest.
        I2. No file is open before its rows are needed.  Of all runs with the same ``slot`` at most
            one file is open.
        I3. On a local disk the data of the open file cannot be deleted: the descriptor holds it.
            In other storages reading fails when the run is gone.

    Owner: one reader; ``frames`` may be called from another thread, one call at a time.
    Raises: StoreError, naming run and file, if a file is missing, cut, or damaged.
    """

    def __init__(
        self,
        run: Run,
        files: Callable[[str], RunFiles] | Path,
        wanted: Wanted | None = None,
        slot: FileSlot | None = None,
    ) -> None:
        self.run = run
        self._folders = _siblings(files) if isinstance(files, Path) else files
        self._chosen = [number for number, f in enumerate(run.files) if not wanted or wanted(f)]
        self._slot = slot or FileSlot()

    @property
    def rows(self) -> int:
        """Rows of the chosen files."""
        return sum(self.run.files[number].rows for number in self._chosen)

    @property
    def files(self) -> tuple[RunFile, ...]:
        """The chosen files."""
        return tuple(self.run.files[number] for number in self._chosen)

    @property
    def file_count(self) -> int:
        """How many files were chosen."""
        return len(self._chosen)

    @property
    def unopened(self) -> int:
        """How many files were not chosen."""
        return len(self.run.files) - len(self._chosen)

    def _file(self, number: int) -> pq.ParquetFile:
        return self._slot.file((self.run.id, number), lambda: self._open(self.run.files[number]))

    def _storage(self, file: RunFile) -> RunFiles:
        return self._folders(file.folder or self.run.id)

    def _open(self, file: RunFile) -> pq.ParquetFile:
        storage = self._storage(file)
        location = storage.location(file.name)
        try:
            source = storage.open(file.name)
            size = source.size()
            if size != file.file_bytes:
                source.close()
                raise StoreError(
                    f"run {self.run.id}: {location} has {size} bytes, the manifest states "
                    f"{file.file_bytes}; restore the file or rebuild the store from a dump"
                )
            if file.footer_crc and footer_crc(source, size) != file.footer_crc:
                source.close()
                raise StoreError(
                    f"run {self.run.id}: the footer of {location} has another CRC than in the "
                    f"manifest; restore the file or rebuild the store from a dump"
                )
            opened = pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise self._damaged(file, error) from error
        if opened.metadata.num_rows != file.rows or opened.schema_arrow.names != list(COLUMNS):
            opened.close(force=True)
            raise StoreError(
                f"run {self.run.id}: {location} has {opened.metadata.num_rows} rows of "
                f"{opened.schema_arrow.names}, the manifest states {file.rows} of {list(COLUMNS)}"
            )
        return opened

    def _damaged(self, file: RunFile, error: Exception) -> StoreError:
        storage = self._storage(file)
        return storage.refusal(
            f"run {self.run.id} covering ({self.run.start}, {self.run.stop}] cannot be read: "
            f"{storage.location(file.name)}: {error}; restore the file or rebuild the store from a "
            "dump"
        )

    def row_groups(self, from_row: int = 0) -> Iterator[RowGroup]:
        """The row groups of the chosen files, each of which is opened when it is reached.

        Files that end before the run's row ``from_row`` are not opened.
        """
        for number, first_row in self._numbered():
            if first_row + self.run.files[number].rows > from_row:
                yield from self._groups(number, first_row)

    def row_groups_backwards(self) -> Iterator[RowGroup]:
        """The same groups, the last one first."""
        for number, first_row in reversed(list(self._numbered())):
            yield from reversed(list(self._groups(number, first_row)))

    def _numbered(self) -> Iterator[tuple[int, int]]:
        """The chosen files by number, with the run's row at which each begins."""
        first_rows = np.cumsum([0, *(file.rows for file in self.run.files)]).tolist()
        return ((number, first_rows[number]) for number in self._chosen)

    def _groups(self, number: int, first_row: int) -> Iterator[RowGroup]:
        metadata = self._file(number).metadata
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            first, last = bounds(group)
            sources = group.column(COLUMNS.index("source_id")).statistics
            times = group.column(COLUMNS.index("commit_us")).statistics
            ops = group.column(COLUMNS.index("op")).statistics
            hashes = group.column(COLUMNS.index("key_hash")).statistics
            yield RowGroup(
                file=number,
                index=index,
                first_row=first_row,
                rows=group.num_rows,
                first=first,
                last=last,
                source_ids=(sources.min, sources.max),
                ops=(ops.min, ops.max) if ops and ops.has_min_max else (0, 255),
                key_hashes=(hashes.min, hashes.max) if hashes and hashes.has_min_max else None,
                last_commit_us=times.max if times and times.has_min_max else SCN_LIMIT,
            )
            first_row += group.num_rows

    def frames(self, group: RowGroup) -> Iterator[FrameBlock]:
        """The frames of a row group, back to back, in blocks of about DECODED_BYTES."""
        file = self._file(group.file)
        column = file.metadata.row_group(group.index).column(COLUMNS.index("frame"))
        rows = 1 + DECODED_BYTES * group.rows // max(column.total_uncompressed_size, 1)
        found = 0
        try:
            for batch in file.iter_batches(
                rows, row_groups=[group.index], columns=["frame"], use_threads=False
            ):
                found += len(batch)
                yield as_block(batch.column(0))
            # The headers of pages have no CRC.
            if found != group.rows:
                raise pa.ArrowInvalid(f"{found} rows of {group.rows} in a row group")
        except (OSError, pa.ArrowException) as error:
            raise self._read_error(group, error) from error

    def check(self) -> None:
        """Read everything and compare it with itself and with the run's range.

        Raises:
            StoreError, FormatError: at the first row that is wrong.
        """
        last: tuple[Any, ...] = ()
        for group in self.row_groups():
            table = self.table(group, list(COLUMNS)).combine_chunks()
            for block in blocks_of(table):
                columns = scan(block.data)
                for name in ("scn", "seq", "source_id", "op", "flags", "commit_us", "key_hash"):
                    stored = table.column(name).to_numpy()
                    if (getattr(columns, name).astype(stored.dtype) != stored).any():
                        raise StoreError(f"run {self.run.id}: column {name} is not the frames'")
                keys = table.column("key").to_pylist()
                for order in self._order(self.run.files[group.file], columns, keys):
                    if not last < order or not self.run.start < order[-1] <= self.run.stop:
                        raise StoreError(
                            f"run {self.run.id}: a frame at {order[-1]} ({order}) follows {last}, "
                            f"the run covers ({self.run.start}, {self.run.stop}]"
                        )
                    last = order

    def _order(
        self, file: RunFile, columns: FrameColumns, keys: list[bytes]
    ) -> Iterator[tuple[Any, ...]]:
        """What the rows ascend by; its last part is the position.

        Raises:
            StoreError: a row of another source or bucket than the file's.
        """
        positions = map(Position, columns.scn.tolist(), columns.seq.tolist())
        if file.source_id is None:
            yield from zip(positions, strict=True)
            return
        is_row = columns.op != Op.TRUNCATE
        hashes = np.where(is_row, columns.key_hash, 0)
        low, high = (np.uint64(limit) for limit in file.hashes)
        if not ((columns.source_id == file.source_id) & (low <= hashes) & (hashes <= high)).all():
            raise StoreError(
                f"run {self.run.id}: a row of {file.name} is not of source {file.source_id}, "
                f"bucket {file.bucket!r}"
            )
        yield from zip(
            columns.source_id.tolist(),
            hashes.tolist(),
            is_row.tolist(),
            keys,
            positions,
            strict=True,
        )

    def table(self, group: RowGroup, names: list[str]) -> Any:
        """Columns of a row group, by their names, as an Arrow table."""
        file = self._file(group.file)
        try:
            table = file.read_row_group(group.index, columns=names)
            if table.num_rows != group.rows:
                raise pa.ArrowInvalid(f"{table.num_rows} rows of {group.rows} in a row group")
            return table
        except (OSError, pa.ArrowException) as error:
            raise self._read_error(group, error) from error

    def _read_error(self, group: RowGroup, error: Exception) -> StoreError:
        return self._damaged(self.run.files[group.file], error)

    def close(self) -> None:
        """Close the file that is open."""
        self._slot.close()


def _siblings(folder: Path) -> Callable[[str], RunFiles]:
    """The folders of runs, one of which is ``folder``."""
    return lambda run_id: LocalFiles(folder.parent / run_id)
