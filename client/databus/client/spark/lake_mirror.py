"""Makes tables of the lake equal to their sources, with Spark: what ``databus mirror`` runs.

A pass brings every table of a database up to one position: the bootstrap server's newest.  A
table's own commit holds the position that it stands at, and the next pass reads the changes from
there.  So nothing else has to survive a kill, and any process may resume.

Which rows changed, Spark's tasks read with the format ``databus``; which files change,
``table_merge`` finds; the format's library commits them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from databus.client.exports.lake_files import FileCommit, FileTable, LakeFile, Layout, NewFile
from databus.client.exports.table_export import ExportMark
from databus.client.spark.data_source import DatabusDataSource
from databus.client.spark.table_merge import (
    OWN,
    MergeSizes,
    TableMerge,
    keys_of,
    newest_of_key,
    written,
)
from databus.client.tables.table_reader import TableReader
from databus.common.checkpoint import Position
from databus.common.errors import BadRequest, LogTooYoung, UnsupportedChange

MARK_EVERY_S = 600.0
"""So often a table without changes gets the position in a commit of its own."""

Transform = Callable[[DataFrame, str], DataFrame]
"""From changes of a table, with the stream's own columns, and its name to others like them."""
OpenFiles = Callable[[Sequence[str], Layout], FileTable]


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """What is equal for all tables of a mirror; ``order``: see ``Layout``."""

    sizes: MergeSizes = field(default_factory=MergeSizes)
    transform: Transform | None = None
    reached: Callable[[str], None] = lambda step: None


@dataclass(frozen=True, slots=True)
class MirrorOutcome:
    """What a pass did to a table: ``whole``, ``changes``, ``nothing``; files, rows, position."""

    kind: str
    position: Position
    rows: int = 0
    files_added: int = 0
    files_removed: int = 0


class MirroredTable:
    """One table and its source.

    Invariants:
        I1. At each commit the table equals its source (after the transform) at its position.
        I2. The position never moves back, but to that of another clock.

    Owner: one thread at a time.
    Durability: what ``advance`` reports is committed.
    """

    def __init__(
        self,
        spark: SparkSession,
        reader: TableReader,
        open_files: OpenFiles,
        layout: Layout,
        options: MirrorOptions,
    ) -> None:
        self._spark = spark
        self._reader = reader
        self._open_files = open_files
        self._layout = layout
        self._options = options
        self._seen: Position | None = None
        self._marked_s = time.monotonic()

    def advance(self, until: Position) -> MirrorOutcome:
        """Bring the table up to ``until``.

        Raises:
            UnsupportedChange: the source has no key, or the layout names columns it does not have.
            StoreBusy: another writer has changed the table meanwhile; nothing has changed here.
        """
        source = self._reader.schema()
        if source.nullable_key:
            raise UnsupportedChange(
                f"{source.source} has no key of its own, so its rows cannot be found again; "
                "leave it out with --source, or give it a primary key"
            )
        table = self._open_files(source.key, self._layout)
        mark = table.mark()
        if mark is None or mark.clock != self._reader.clock:
            return self._replace(table, until)
        since = max(mark.position, self._seen or mark.position)
        if since >= until:
            return MirrorOutcome("nothing", mark.position)
        if not self._has_changes(since, until):
            return self._note(table, mark, until)
        try:
            found = self._merge(table, mark, until)
        except LogTooYoung:
            found = None
        except PySparkException as error:
            if "LogTooYoung" not in str(error):
                raise
            found = None
        return self._replace(table, until) if found is None else found

    # -- one commit each -----------------------------------------------------------------

    def _note(self, table: FileTable, mark: ExportMark, until: Position) -> MirrorOutcome:
        """Without changes: remember the position, and write it down now and then."""
        self._seen = until
        if time.monotonic() - self._marked_s >= MARK_EVERY_S:
            self._marked_s = time.monotonic()
            new_mark = ExportMark(self._reader.clock, until)
            table.begin(table.schema(), whole=False).commit([], [], new_mark)
            return MirrorOutcome("nothing", until)
        return MirrorOutcome("nothing", mark.position)

    def _replace(self, table: FileTable, until: Position) -> MirrorOutcome:
        """Write the whole state."""
        rows = self._load(scn=str(until))
        if self._options.transform is not None:
            rows = self._checked(self._transformed(rows)).where("_op <> 'd'")
        writing = self._begin(table, rows, whole=True)
        added = self._written(rows, writing)
        return self._commit(writing, None, added, until)

    def _merge(self, table: FileTable, mark: ExportMark, until: Position) -> MirrorOutcome | None:
        """Merge the changes; None if only the whole state will do."""
        key = self._reader.schema().key
        loaded = self._load(since=str(mark.position), until=str(until))
        changes = loaded
        if self._options.transform is not None:
            if loaded.where("_op = 't'").limit(1).count():
                return None
            changes = newest_of_key(self._checked(self._transformed(loaded)), key)
        if not _fits(table.schema(), self._schema_of(changes)):
            return None
        changes = changes.persist()
        try:
            keys = keys_of(changes, key[0])
            if keys.has_truncate:
                return None
            writing = self._begin(table, changes, whole=False)
            merge = TableMerge(self._spark, changes, keys, key, self._options.sizes)
            removed = merge.touched(writing.place, table.files())
            count = keys.count + sum(one.row_count for one in removed)
            added = self._written(merge.rows(writing.place, removed), writing, count)
            return self._commit(writing, removed, added, until)
        finally:
            changes.unpersist()

    def _begin(self, table: FileTable, rows: DataFrame, *, whole: bool) -> FileCommit:
        schema = self._schema_of(rows)
        self._layout.check(self._reader.address.source, schema.names)
        return table.begin(schema, whole=whole)

    def _written(
        self, rows: DataFrame, writing: FileCommit, row_count: int | None = None
    ) -> list[NewFile]:
        order = self._layout.cluster_by or self._reader.schema().key
        return written(rows, writing.place, order, self._options.sizes, row_count)

    def _commit(
        self,
        writing: FileCommit,
        removed: list[LakeFile] | None,
        added: list[NewFile],
        until: Position,
    ) -> MirrorOutcome:
        self._options.reached("written")
        writing.commit(removed, added, ExportMark(self._reader.clock, until))
        self._options.reached("committed")
        self._seen, self._marked_s = until, time.monotonic()
        kind = "whole" if removed is None else "changes"
        count = sum(one.row_count for one in added)
        return MirrorOutcome(kind, until, count, len(added), len(removed or ()))

    # -- rows ----------------------------------------------------------------------------

    def _load(self, **position: str) -> DataFrame:
        """A state or net changes, with the stream's own columns.

        The data source is planned here and not by Spark, which would start up to three
        processes of Python for each table.
        """
        address = self._reader.address
        options = {
            "database": address.database,
            "source": address.source,
            "bootstraps": ",".join(address.bootstraps),
            "metadata": "true",
            "partitions": str(self._options.sizes.tasks),
            "give_up_s": str(address.give_up_s),
            **position,
        }
        source = DatabusDataSource(options)
        schema = source.schema()
        reader = source.reader(schema)
        parts = list(reader.partitions())

        def read(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from reader.read(parts[number])

        numbers = self._spark.range(0, len(parts), 1, max(len(parts), 1))
        return numbers.mapInArrow(read, schema)

    def _transformed(self, rows: DataFrame) -> DataFrame:
        transform = self._options.transform
        return rows if transform is None else transform(rows, self._reader.address.source)

    def _checked(self, rows: DataFrame) -> DataFrame:
        """Raises BadRequest if the transform has lost a column that a merge needs."""
        needed = {*self._reader.schema().key, *OWN} - {"_commit_time"}
        if missing := sorted(needed - set(rows.columns)):
            raise BadRequest(
                f"the transform of {self._reader.address.source} gave a DataFrame without "
                f"{missing}: keep the key and the columns {sorted(OWN)}"
            )
        return rows

    def _schema_of(self, rows: DataFrame) -> Any:
        """The columns of the lake's table, in Arrow's types."""
        names = [name for name in rows.columns if name not in OWN]
        return to_arrow_schema(rows.select(names).schema, timezone="UTC")

    def _has_changes(self, since: Position, until: Position) -> bool:
        try:
            return self._reader.has_changes(since, until)
        except LogTooYoung:
            return True


def _fits(ours: Any, theirs: Any) -> bool:
    """Whether only columns were added."""
    return all(one.name in theirs.names and theirs.field(one.name).type == one.type for one in ours)
