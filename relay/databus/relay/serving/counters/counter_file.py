"""Numbers that one HTTP worker counts and every worker can read: rows of words under names."""

from __future__ import annotations

import json
import logging
import mmap
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from databus.common.private import make_folder, private_opener

FOLDER = "workers"
_WORD_BYTES = 8

_log = logging.getLogger(__name__)


def counter_path(data_dir: Path, worker: int, kind: str) -> Path:
    """The path of a worker's file of one kind."""
    return data_dir / FOLDER / f"{worker}.{kind}"


class CounterFile:
    """A row of ``column_count`` numbers for each name, in a mapped file.

    The file is a word with the size of what follows, a JSON list of the names, and the rows.

    Invariants:
        I1. Every number is one aligned 64-bit word: readers see the old or the new one.
        I2. The names of a file do not change: other names are another file that replaces it.
        I3. Counting never fails: if the disk refuses a file, other workers do not see the
            counts until the next file is made.

    Owner: one worker process; all others read.
    Durability: none; a worker begins at zero.
    """

    def __init__(self, path: Path, column_count: int) -> None:
        self.path = path
        self.column_count = column_count
        self.numbers: memoryview[int] = memoryview(array("q"))
        self._map: mmap.mmap | None = None

    def replace(self, names: Sequence[str], numbers: Sequence[int]) -> None:
        """Replace the file by one with these names and their numbers, row after row."""
        text = json.dumps(list(names)).encode()
        text += b" " * (-len(text) % _WORD_BYTES)
        words = array("q", numbers)
        size = len(text).to_bytes(_WORD_BYTES, "little")
        try:
            new_map = self._put(size + text + words.tobytes())
        except OSError as error:
            _log.warning("%s is not written: %s", self.path, error.strerror)
            self.close()
            self.numbers = memoryview(words)
            return
        self.close()
        self._map = new_map
        self.numbers = memoryview(new_map).cast("q")[1 + len(text) // _WORD_BYTES :]

    def _put(self, content: bytes) -> mmap.mmap:
        make_folder(self.path.parent)
        beside = self.path.with_name(self.path.name + ".new")
        with open(beside, "wb", opener=private_opener) as file:
            file.write(content)
        with beside.open("r+b") as file:
            new_map = mmap.mmap(file.fileno(), 0)
        beside.replace(self.path)
        return new_map

    def close(self) -> None:
        """Unmap the file; it stays to be read."""
        self.numbers.release()
        if self._map is not None:
            self._map.close()
            self._map = None


def read_rows(path: Path, column_count: int) -> Iterator[tuple[str, list[int]]]:
    """(name, numbers) of each row as they are now; nothing if there is no file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    start = _WORD_BYTES + int.from_bytes(content[:_WORD_BYTES], "little")
    numbers = array("q", content[start:])
    for row, name in enumerate(json.loads(content[_WORD_BYTES:start])):
        yield name, numbers[row * column_count : (row + 1) * column_count].tolist()
