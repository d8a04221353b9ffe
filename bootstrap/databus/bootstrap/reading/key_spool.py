"""Rows divided by the hash of their key, in temporary files if they are more than one part.

All rows of a key are in one part, so that each part is processed on its own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from databus.common.errors import StoreError


class KeySpool:
    """Tables of equal columns go in, and come out divided into ``count`` parts.

    Invariants:
        I1. The rows of a part are in the order in which they were added.
        I2. One part is retained in memory; several are in files that have no name.

    Owner: one reader; ``with`` closes the files.
    Raises: StoreError if a temporary file cannot be written or read.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tables: list[pa.Table] = []
        self._files: list[IO[bytes]] = []
        self._writers: list[Any] = []
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, rows: pa.Table, hashes: npt.NDArray[np.uint64]) -> None:
        """Add rows; ``hashes`` are those of their keys."""
        if self._count == 1:
            self._tables.append(rows)
            return
        part = hashes % np.uint64(self._count)
        order = np.argsort(part, kind="stable")
        borders = np.searchsorted(part[order], np.arange(self._count + 1, dtype=np.uint64))
        sorted_rows = rows.take(pa.array(order)).combine_chunks()
        with _refusals():
            if not self._writers:
                self._create(rows.schema)
            for number, writer in enumerate(self._writers):
                first, last = int(borders[number]), int(borders[number + 1])
                if last > first:
                    writer.write_table(sorted_rows.slice(first, last - first))

    def _create(self, schema: pa.Schema) -> None:
        for _ in range(self._count):
            file = tempfile.TemporaryFile()  # noqa: SIM115 - the stack closes it
            self._open.enter_context(file)
            self._files.append(file)
            self._writers.append(pa.ipc.new_stream(file, schema))

    def parts(self) -> Iterator[pa.Table]:
        """The rows of each part that has any."""
        if self._tables:
            yield pa.concat_tables(self._tables)
        for file, writer in zip(self._files, self._writers, strict=True):
            with _refusals():
                writer.close()
                file.seek(0)
                rows = pa.ipc.open_stream(file).read_all()
                file.truncate(0)
            if len(rows):
                yield rows


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise the disk's errors in the block as a StoreError."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"temporary files in {tempfile.gettempdir()} cannot hold the range's keys: {error}"
        ) from error
