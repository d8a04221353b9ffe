"""Runs: immutable Parquet file sets, each covering a range (start, stop] of the stream.

A *segment* is a sealed piece of the log: every frame, in commit order.  A *delta* holds only the
last state of each key in its range.  The *base* is a delta that begins at
the origin, so that it needs no tombstones.  The files of a delta or base are *clustered*: each
has the rows of one source and one bucket of key hashes.  FORMAT.md is the specification.

This module defines what a run is; ``open_run`` reads one.  The manifest records which runs exist;
``segments`` and ``applier`` write them.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from databus.bootstrap.runs.run_storage import RunFiles
from databus.client.splits.frame_tables import COLUMNS, footer_crc
from databus.common.checkpoint import ORIGIN, SEQ_END, Position
from databus.common.errors import FormatError, StoreError

SCN_LIMIT = 2**63
"""Positions in runs are signed 64-bit numbers, because Spark has only these."""

ROW_GROUP_BYTES = 16 << 20
"""Frame bytes of one row group, approximately: a reader's memory, and the unit of pruning."""

DECODED_BYTES = 2 << 20
"""Frame bytes decoded at once, approximately: they are sent while the next ones are decoded."""

COMPRESSION = "lz4"
PARQUET: Mapping[str, Any] = {
    "compression": COMPRESSION,
    "use_dictionary": ["source_id", "op", "flags"],
    "write_statistics": ["scn", "seq", "source_id", "op", "commit_us", "key_hash"],
    "store_schema": False,
    "write_page_checksum": True,
}
"""How pyarrow writes a file of a run."""


class RunKind(enum.StrEnum):
    """What a run stores of its range."""

    SEGMENT = "segment"
    DELTA = "delta"
    BASE = "base"


@dataclass(frozen=True, slots=True)
class RunFile:
    """One Parquet file of a run; no row lies before ``first`` or after ``last``.

    ``footer_crc`` is the CRC-32C of the footer, whose statistics let readers skip row groups.
    0 in manifests of earlier releases.  A clustered file has a ``source_id``, and ``bucket`` is the
    leading bits of its key hashes as text, empty for all hashes.  ``folder`` is the run that made
    the file, if this is another one.
    """

    name: str
    rows: int
    file_bytes: int
    frame_bytes: int
    first: Position
    last: Position
    footer_crc: int = 0
    source_id: int | None = None
    bucket: str = ""
    folder: str = ""

    @property
    def hashes(self) -> tuple[int, int]:
        """The least and the greatest hash of its bucket."""
        return int(self.bucket.ljust(64, "0"), 2), int(self.bucket.ljust(64, "1"), 2)

    def to_json(self) -> dict[str, Any]:
        """The file as the manifest stores it."""
        document: dict[str, Any] = {
            "name": self.name,
            "rows": self.rows,
            "file_bytes": self.file_bytes,
            "frame_bytes": self.frame_bytes,
            "first": list(self.first),
            "last": list(self.last),
            "footer_crc": self.footer_crc,
        }
        if self.source_id is not None:
            document |= {"source": self.source_id, "bucket": self.bucket}
        return document | ({"folder": self.folder} if self.folder else {})

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> RunFile:
        """The file that ``to_json`` wrote; a part that is missing is a KeyError."""
        source, bucket = document.get("source"), document.get("bucket", "")
        if not isinstance(bucket, str) or set(bucket) - {"0", "1"} or len(bucket) > 64:
            raise ValueError(f"{bucket!r} is not a bucket")
        return RunFile(
            name=_file_name(document["name"]),
            rows=int(document["rows"]),
            file_bytes=int(document["file_bytes"]),
            frame_bytes=int(document["frame_bytes"]),
            first=position_from(document["first"]),
            last=position_from(document["last"]),
            footer_crc=int(document.get("footer_crc", 0)),
            source_id=None if source is None else int(source),
            # Many files share these; there are up to 100,000 files.
            bucket=sys.intern(bucket),
            folder=sys.intern(_file_name(document["folder"])) if "folder" in document else "",
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A file set that covers (start, stop].

    ``files`` are in the order of their rows.  ``partial_rows`` counts frames that do not hold
    a whole row; ``truncates`` are the last TRUNCATE of each source in the range;
    ``last_commit_us`` is the latest commit time in it, 0 if it was not recorded.  ``listing`` is
    the CRC of its file list, if that is a file of its own (``file_lists``).
    """

    id: str
    kind: RunKind
    start: Position
    stop: Position
    files: tuple[RunFile, ...]
    created_us: int
    partial_rows: int = 0
    truncates: tuple[tuple[int, Position], ...] = ()
    last_commit_us: int = 0
    listing: str = field(default="", compare=False)

    @property
    def newest_us(self) -> int:
        """When the newest change in it was committed, as far as that was recorded."""
        return self.last_commit_us or self.created_us

    @property
    def rows(self) -> int:
        """Rows in all files."""
        return sum(file.rows for file in self.files)

    @property
    def file_bytes(self) -> int:
        """Bytes on disk."""
        return sum(file.file_bytes for file in self.files)

    @property
    def frame_bytes(self) -> int:
        """Bytes of the frames as they go over the wire."""
        return sum(file.frame_bytes for file in self.files)

    @property
    def is_compacted(self) -> bool:
        """Whether only the last state of each key is stored."""
        return self.kind is not RunKind.SEGMENT

    @property
    def is_clustered(self) -> bool:
        """Whether its files are by source and bucket; those of format 1 are in commit order."""
        return self.is_compacted and all(file.source_id is not None for file in self.files)

    def summary(self) -> dict[str, Any]:
        """What a status shows of it."""
        return {
            "id": self.id,
            "kind": self.kind.value,
            "start": self.start.to_json(),
            "stop": self.stop.to_json(),
            "rows": self.rows,
            "file_bytes": self.file_bytes,
            "files": len(self.files),
            "created_us": self.created_us,
        }

    def bytes_after(self, position: Position) -> int:
        """Bytes of the frames after ``position``, at most: whole files are counted."""
        return sum(file.frame_bytes for file in self.files if file.last > position)

    def to_json(self) -> dict[str, Any]:
        """The run as the manifest stores it."""
        return {
            "id": self.id,
            "kind": self.kind.value,
            "start": list(self.start),
            "stop": list(self.stop),
            "created_us": self.created_us,
            "partial_rows": self.partial_rows,
            "truncates": [[source, *position] for source, position in self.truncates],
            "last_commit_us": self.last_commit_us,
            **(
                {"listing": self.listing}
                if self.listing
                else {"files": [file.to_json() for file in self.files]}
            ),
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Run:
        """The run that ``to_json`` wrote; without its files, if its list is apart.

        Raises:
            FormatError: a part is missing or not of its form.
        """
        try:
            listing = str(document.get("listing", ""))
            files = () if listing else tuple(map(RunFile.from_json, document["files"]))
            return Run(
                id=_file_name(document["id"]),
                kind=RunKind(document["kind"]),
                start=position_from(document["start"]),
                stop=position_from(document["stop"]),
                files=files,
                created_us=int(document["created_us"]),
                partial_rows=int(document["partial_rows"]),
                truncates=tuple(
                    (int(source), Position(int(scn), int(seq)))
                    for source, scn, seq in document["truncates"]
                ),
                last_commit_us=int(document.get("last_commit_us", 0)),
                listing=listing,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"not a run: {error!r} in {str(document)[:200]}") from error


def position_from(pair: Any) -> Position:
    """The position in ``[scn, seq]``.

    Raises:
        ValueError: it is something else.
    """
    scn, seq = pair
    if not isinstance(scn, int) or not isinstance(seq, int):
        raise ValueError(f"{pair!r} is not [scn, seq]")
    return Position(scn, seq)


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or not value or "/" in value or value.startswith("."):
        raise ValueError(f"{value!r} is not a plain file name")
    return value


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A piece of a run that is read at once: its rows begin at ``first_row`` of the run.

    No row of it lies before ``first`` or after ``last``, none was committed after
    ``last_commit_us``; pairs are the least and the greatest of their column, ``key_hashes`` as
    signed numbers.
    """

    file: int
    index: int
    first_row: int
    rows: int
    first: Position
    last: Position
    source_ids: tuple[int, int]
    ops: tuple[int, int]
    key_hashes: tuple[int, int] | None
    last_commit_us: int


def bounds(group: Any) -> tuple[Position, Position]:
    """Positions between which all rows of a row group lie, from its statistics."""
    scn = group.column(COLUMNS.index("scn")).statistics
    seq = group.column(COLUMNS.index("seq")).statistics
    if scn is None or not scn.has_min_max or seq is None or not seq.has_min_max:
        return ORIGIN, Position(SCN_LIMIT, SEQ_END)
    if scn.min == scn.max:
        return Position(scn.min, seq.min), Position(scn.max, seq.max)
    return Position(scn.min, 0), Position(scn.max, SEQ_END)


def describe(files: RunFiles, name: str, source_id: int | None = None, bucket: str = "") -> RunFile:
    """What the manifest stores about a Parquet file, from its footer, and what it is clustered by.

    Raises:
        StoreError: it is not a Parquet file of a run.
    """
    location = files.location(name)
    try:
        with files.open(name) as source:
            size = source.size()
            crc = footer_crc(source, size)
            with pq.ParquetFile(source) as file:
                metadata = file.metadata
                names = file.schema_arrow.names
    except (OSError, pa.ArrowException) as error:
        raise files.refusal(f"{location} is not a whole Parquet file: {error}") from error
    if names != list(COLUMNS):
        raise StoreError(f"{location} has the columns {names}, a run has {list(COLUMNS)}")
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    limits = [bounds(group) for group in groups if group.num_rows]
    frame_column = COLUMNS.index("frame")
    return RunFile(
        name=name,
        rows=metadata.num_rows,
        file_bytes=size,
        frame_bytes=sum(g.column(frame_column).total_uncompressed_size for g in groups),
        first=min((first for first, _ in limits), default=ORIGIN),
        last=max((last for _, last in limits), default=ORIGIN),
        footer_crc=crc,
        source_id=source_id,
        bucket=bucket,
    )


def in_order(files: list[RunFile]) -> tuple[RunFile, ...]:
    """Files of one run in the order of their rows; files without rows are left out.

    Clustered files are ordered by source and hash.  Others do not overlap, so (first, last) orders
    them: of two files that share an scn at a border, the one that begins or ends at another scn
    lies on that side.
    """
    filled = [file for file in files if file.rows]
    if all(file.source_id is not None for file in filled):
        return tuple(sorted(filled, key=lambda file: (file.source_id or 0, file.hashes)))
    return tuple(sorted(filled, key=lambda file: (file.first.scn, file.last.scn, file.first.seq)))
