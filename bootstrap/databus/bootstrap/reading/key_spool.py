"""Rows divided by the hash of their key, in a temporary file if they are more than one part.

All rows of a key are in one part, so that each part is processed on its own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from databus.common.errors import StoreError


class KeySpool:
    """Tables of equal columns go in, and come out divided into ``count`` parts.

    Invariants:
        I1. The rows of a part are in the order in which they were added.
        I2. One part is retained in memory; several are in one file, which has no name.

    Owner: one reader; ``with`` closes the file.
    Raises: StoreError if the temporary file cannot be written or read.
    """

    def __init__(self, count: int) -> None:
        self._tables: list[pa.Table] = []
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self._schema: pa.Schema | None = None
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            # What could not be written is of no use any more.
            with contextlib.suppress(OSError):
                self._file.close()

    def add(self, rows: pa.Table, hashes: npt.NDArray[np.uint64]) -> None:
        """Add rows; ``hashes`` are those of their keys."""
        count = len(self._pieces)
        if count == 1:
            self._tables.append(rows)
            return
        part = hashes % np.uint64(count)
        order = np.argsort(part, kind="stable")
        borders = np.searchsorted(part[order], np.arange(count + 1, dtype=np.uint64))
        sorted_rows = rows.take(pa.array(order)).combine_chunks()
        self._schema = rows.schema
        with _refusals():
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - __exit__ closes
            for number, pieces in enumerate(self._pieces):
                first, last = int(borders[number]), int(borders[number + 1])
                for batch in sorted_rows.slice(first, last - first).to_batches():
                    data = batch.serialize()
                    pieces.append((self._file.tell(), data.size))
                    self._file.write(data)

    def parts(self) -> Iterator[pa.Table]:
        """The rows of each part that has any."""
        if self._tables:
            yield pa.concat_tables(self._tables)
        for pieces in self._pieces:
            if pieces:
                with _refusals():
                    rows = pa.Table.from_batches(map(self._batch, pieces), self._schema)
                yield rows

    def _batch(self, piece: tuple[int, int]) -> pa.RecordBatch:
        assert self._file is not None
        offset, size = piece
        self._file.seek(offset)
        return pa.ipc.read_record_batch(pa.py_buffer(self._file.read(size)), self._schema)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise the disk's errors in the block as a StoreError."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"temporary files in {tempfile.gettempdir()} cannot hold the range's keys: {error}"
        ) from error
