"""What a bootstrap server lists for readers that open its files themselves.  Pure.

A state, or the net changes between two positions, is divided into splits: each is a source and a
bucket of key hashes, with the files of merged runs that have rows of it.  What is later than all
files, the tail, comes from ``/changes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from databus.client.splits.bucket_merge import bucket_range
from databus.common.checkpoint import Position, decode_position
from databus.common.errors import FormatError


@dataclass(frozen=True, slots=True)
class SplitFile:
    """A file of a merged run; its rows after ``after`` count.  ``bucket`` is the file's own."""

    path: str
    rows: int
    file_bytes: int
    footer_crc: int
    bucket: str
    after: Position

    def to_json(self) -> dict[str, Any]:
        """The file in the answer."""
        return {
            "path": self.path,
            "rows": self.rows,
            "file_bytes": self.file_bytes,
            "footer_crc": self.footer_crc,
            "bucket": self.bucket,
            "after": self.after.to_json(),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> SplitFile:
        """The file that ``to_json`` wrote; KeyError, TypeError or ValueError for anything else."""
        return SplitFile(
            str(document["path"]),
            int(document["rows"]),
            int(document["file_bytes"]),
            int(document["footer_crc"]),
            str(document["bucket"]),
            decode_position(document["after"]),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of a source whose key hashes lie in a bucket.

    ``files`` are those with rows of the bucket, oldest run first.  ``cut`` is the position of the
    source's last TRUNCATE in the files' runs: rows before it do not count.
    """

    source: str
    bucket: str
    files: tuple[SplitFile, ...]
    cut: Position | None

    @property
    def partition(self) -> str | None:
        """The same keys as a filter of the servers."""
        if not self.bucket:
            return None
        return f"hash:{1 << len(self.bucket)}:{int(self.bucket, 2)}"

    @property
    def is_first(self) -> bool:
        """Whether it begins with the least hash: it has the source's TRUNCATE."""
        return bucket_range(self.bucket)[0] == 0

    def to_json(self) -> dict[str, Any]:
        """The split in the answer."""
        return {
            "source": self.source,
            "bucket": self.bucket,
            "files": [file.to_json() for file in self.files],
            "cut": None if self.cut is None else self.cut.to_json(),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Split:
        """The split that ``to_json`` wrote; KeyError, TypeError or ValueError for anything else."""
        cut, bucket = document["cut"], document["bucket"]
        if set(bucket) - {"0", "1"} or len(bucket) > 64:
            raise ValueError(f"{bucket!r} is not a bucket")
        return Split(
            str(document["source"]),
            bucket,
            tuple(map(SplitFile.from_json, document["files"])),
            None if cut is None else decode_position(cut),
        )


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """All splits of a state as of ``until``, or of the net changes in (``since``, ``until``].

    ``files_end``: the files have everything up to there.  ``lease`` retains them and everything
    else that a reader of this state needs, for ``lease_s`` after each renewal; empty if there are
    no files.  ``storage`` is ``{}`` for a folder, or ``endpoint`` and ``region`` of S3.
    """

    clock: str
    since: Position | None
    until: Position
    files_end: Position
    lease: str
    lease_s: float
    storage: Mapping[str, str]
    splits: tuple[Split, ...]

    def to_json(self) -> dict[str, Any]:
        """The answer of ``/splits``."""
        return {
            "clock": self.clock,
            "since": None if self.since is None else self.since.to_json(),
            "until": self.until.to_json(),
            "files_end": self.files_end.to_json(),
            "lease": self.lease,
            "lease_s": self.lease_s,
            "storage": dict(self.storage),
            "splits": [split.to_json() for split in self.splits],
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> SplitPlan:
        """The plan that ``to_json`` wrote.

        Raises:
            FormatError: a part is missing or not of its form.
        """
        try:
            since = document["since"]
            return SplitPlan(
                str(document["clock"]),
                None if since is None else decode_position(since),
                decode_position(document["until"]),
                decode_position(document["files_end"]),
                str(document["lease"]),
                float(document["lease_s"]),
                {str(name): str(value) for name, value in document["storage"].items()},
                tuple(map(Split.from_json, document["splits"])),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"not a plan of splits: {error!r}") from error
