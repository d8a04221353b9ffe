"""Reads one split: its files and the changes after them, merged as the server merges them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from databus.client.splits.bucket_merge import merged, places
from databus.client.splits.clustered_files import InputFile, rows_of_file
from databus.client.splits.frame_tables import as_table, blocks_of
from databus.client.splits.split_planning import PlannedSplit
from databus.client.tables.arrow_rows import RowDecoder
from databus.client.tables.partial_updates import combined
from databus.client.tables.table_reader import TableReader
from databus.common.errors import DatabusError, LeaseExpired, StoreError
from databus.common.frame import frame_format
from databus.common.frame.frame_format import Flag, Op

RENEWALS = 4
"""How often a lease is renewed in the time that it holds."""

_log = logging.getLogger("databus.client.splits")


class SplitReader:
    """The rows of one split.

    Invariants:
        I1. They are those that the servers give for ``planned.range``, each once.
        I2. All files are open before the first row is returned.  A file that was replaced or cut is
            found by its size and footer.
        I3. The lease is renewed while rows are read.  Reading does not depend on it: files that are
            still there are right.

    Owner: one thread.
    Raises: StoreError if a file cannot be opened or read; the errors of the tail's request.
    """

    def __init__(self, reader: TableReader, planned: PlannedSplit) -> None:
        self._reader = reader
        self._planned = planned
        self._renewed_s = -float("inf")

    def batches(self, decoder: RowDecoder) -> Iterator[Any]:
        """The rows as record batches."""
        for table in self.tables():
            self._renew()
            yield from _decoded(table, decoder)

    def tables(self) -> Iterator[Any]:
        """The rows as tables of the files' columns; each has all rows of its keys."""
        planned, split = self._planned, self._planned.split
        self._renew()
        try:
            files = _files(planned)
            tail = self._tail()
            inputs: list[Iterable[Any]] = [
                rows_of_file(
                    files,
                    InputFile(
                        one.path,
                        (one.after.scn, one.after.seq),
                        is_part=not one.bucket.startswith(split.bucket),
                        file_bytes=one.file_bytes,
                        footer_crc=one.footer_crc,
                    ),
                    split.bucket,
                )
                for one in split.files
            ]
            cut = max((one for one in (split.cut, planned.cut, _cut(tail)) if one), default=None)
            if tail.num_rows:
                inputs.append([self._own(tail)])
            yield from merged(inputs, base=planned.range.mode == "state", cut=cut)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"a file of {split.source} cannot be read: {error}") from error

    def _tail(self) -> Any:
        """The rows after the files, in the order of a clustered file."""
        data = self._planned.tail
        if data is None:
            with contextlib.closing(self._reader.frames(self._planned.tail_range)) as spool:
                data = b"".join(bytes(block) for block, _, _ in spool.blocks())
        table = as_table(data, frame_format.scan(data, verify=False))
        return table.take(pa.array(np.argsort(places(table), kind="stable")))

    def _own(self, tail: Any) -> Any:
        """Without truncates, which belong to the split with the first hashes."""
        if self._planned.split.is_first:
            return tail
        return tail.filter(pa.array(tail.column("op").to_numpy() != Op.TRUNCATE))

    def _renew(self) -> None:
        now_s = time.monotonic()
        if now_s - self._renewed_s < self._planned.lease_s / RENEWALS:
            return
        self._renewed_s = now_s
        try:
            self._reader.renew(self._planned.lease)
        except LeaseExpired as error:
            _log.warning("%s: the files that are still there are read", error.message)
        except DatabusError as error:
            _log.warning("a lease cannot be renewed now: %s", error.message)


def _files(planned: PlannedSplit) -> Any:
    from pyarrow import fs

    if not planned.storage:
        return fs.LocalFileSystem()
    # The configuration's models take a while to import, and few tasks need them.
    from databus.common.config import S3Options
    from databus.common.storage.bucket import arrow_settings, filesystem

    return filesystem(arrow_settings(S3Options(**planned.storage)))


def _cut(tail: Any) -> Any:
    """The position of the last TRUNCATE in some rows; None without one."""
    is_truncate = tail.column("op").to_numpy() == Op.TRUNCATE
    pairs = (tail.column(name).to_numpy()[is_truncate].tolist() for name in ("scn", "seq"))
    return max(zip(*pairs, strict=True), default=None)


def _decoded(table: Any, decoder: RowDecoder) -> Iterator[Any]:
    """The rows of a table, which has all rows of each of its keys."""
    partial = table.column("flags").to_numpy() & int(Flag.PARTIAL) != 0
    blocks = [
        (block.data, block.columns(), np.arange(len(block.edges) - 1))
        for block in blocks_of(table.select(["frame"]).combine_chunks())
    ]
    if partial.any():
        hashes = np.unique(table.column("key_hash").to_numpy()[partial].view(np.uint64))
        yield from combined(blocks, hashes, decoder)
        return
    for data, columns, rows in blocks:
        yield decoder.batch(data, columns, rows)
