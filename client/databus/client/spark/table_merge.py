"""Spark's work on one table of a mirror: which files hold changed keys, and their new versions.

It writes new files and names the old ones that they replace; committing is the format's.

The rows of files that hold a changed key are read, joined with the changes, and written again;
all other files stay.  Which files may hold a key is known from the bounds of each file, and which
of those do by reading their key columns alone.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from databus.client.exports.lake_files import FilePlace, LakeFile, NewFile

OWN = ("_op", "_scn", "_seq", "_commit_time", "_absent")
"""The stream's own columns, which no table of the lake has."""
MOST_KEYS = 200_000
"""For more changes than these, the lowest and the highest key choose the files."""
SMALL_FILES = 16
"""So many files with less than a quarter of the rows are merged into one with the next changes."""
_FILE = "_file"
_NEW_FILE = "path string, size_bytes long, row_count long, stats string, partition string"


@dataclass(frozen=True, slots=True)
class MergeSizes:
    """``file_rows``: most rows of a data file; ``tasks``: most tasks of one read."""

    file_rows: int = 1_000_000
    tasks: int = 4


def newest_of_key(changes: DataFrame, key: Sequence[str]) -> DataFrame:
    """The last change of each key by position."""
    order = Window.partitionBy(*key).orderBy(F.desc("_scn"), F.desc("_seq"))
    return changes.withColumn("_rank", F.row_number().over(order)).where("_rank = 1").drop("_rank")


def written(
    rows: DataFrame,
    place: FilePlace,
    order: Sequence[str],
    sizes: MergeSizes,
    row_count: int | None = None,
) -> list[NewFile]:
    """Write rows as new files, ordered by these columns within a partition.

    Files of one write have ranges of their own, so that later changes touch few of them.
    ``row_count`` is about how many rows there are; without it they are counted.
    """
    by = [*place.partition_by, *(name for name in order if name not in place.partition_by)]
    columns = [_col(name) for name in by]
    rows = rows.select([_col(name) for name in place.schema.names])
    is_one = row_count is not None and row_count <= sizes.file_rows
    if not is_one:  # ranges need a look at the rows before they are written
        rows = rows.persist()
        row_count = rows.count()
    parts = max(1, -(-(row_count or 0) // sizes.file_rows))
    placed = rows.coalesce(1) if parts == 1 else rows.repartitionByRange(parts, *columns)

    def write(batches: Iterator[Any]) -> Iterator[Any]:
        for one in place.write(batches, sizes.file_rows):
            values = [one.path, one.size_bytes, one.row_count, one.stats]
            arrays = [pa.array([value]) for value in (*values, json.dumps(one.partition))]
            yield pa.RecordBatch.from_arrays(arrays, names=_NAMES)

    found = placed.sortWithinPartitions(*columns).mapInArrow(write, _NEW_FILE).collect()
    if not is_one:
        rows.unpersist()
    return [
        NewFile(one.path, one.size_bytes, one.row_count, one.stats, json.loads(one.partition))
        for one in found
    ]


_NAMES = [part.split(" ")[0] for part in _NEW_FILE.split(", ")]


@dataclass(frozen=True, slots=True)
class ChangedKeys:
    """What the driver has to know of changes: how many, whether one is a truncate, and which.

    ``values`` of the first key column are sorted and whole up to ``MOST_KEYS``, above that None;
    ``low`` and ``high`` bound them.
    """

    count: int
    has_truncate: bool
    values: list[Any] | None
    low: Any = None
    high: Any = None


def keys_of(changes: DataFrame, first_key: str) -> ChangedKeys:
    """One look at changes, which are small as a rule."""
    column = _col(first_key)
    found = changes.select(column.alias("key"), "_op").limit(MOST_KEYS + 1).toArrow()
    if found.num_rows <= MOST_KEYS:
        values = set(found.column("key").to_pylist()) - {None}
        ops = set(found.column("_op").unique().to_pylist())
        return ChangedKeys(found.num_rows, "t" in ops, sorted(values))
    is_truncate = F.max((F.col("_op") == "t").cast("int"))
    one = changes.agg(F.count("*"), is_truncate, F.min(column), F.max(column)).collect()[0]
    return ChangedKeys(one[0], bool(one[1]), None, one[2], one[3])


def may_hold(files: Sequence[LakeFile], keys: Sequence[Any]) -> list[LakeFile]:
    """The files whose bounds include one of these values of the first key column, sorted."""

    def includes(one: LakeFile) -> bool:
        if one.low is None or one.high is None:
            return True
        try:
            at = bisect.bisect_left(keys, one.low)
            # A bound of a text may be shortened.
            return at < len(keys) and (keys[at] <= one.high or str(keys[at]).startswith(one.high))
        except TypeError:
            return True

    return [one for one in files if includes(one)]


class TableMerge:
    """The changes of one table, merged into its files.

    ``changes`` has the columns of the table and the stream's own, one row for each key.

    Owner: one thread of the driver.
    """

    def __init__(
        self,
        spark: SparkSession,
        changes: DataFrame,
        keys: ChangedKeys,
        key: Sequence[str],
        sizes: MergeSizes,
    ) -> None:
        self._spark = spark
        self._changes = changes
        self._keys = keys
        self._key = list(key)
        self._sizes = sizes

    def touched(self, place: FilePlace, files: Sequence[LakeFile]) -> list[LakeFile]:
        """The files that hold a changed key, and the small ones once there are many."""
        known = self._keys
        if known.values is not None:
            candidates = may_hold(files, known.values)
        else:
            candidates = [one for one in files if _overlaps(one, known.low, known.high)]
        # FileCommit a few rows again costs less than looking for the keys among them.
        few = sum(one.row_count for one in candidates) + known.count <= self._sizes.file_rows // 4
        holding = {one.path for one in candidates}
        if not few and holding:
            holding = self._holding(place, candidates)
        small = [one for one in files if one.row_count * 4 < self._sizes.file_rows]
        if len(small) >= SMALL_FILES:
            holding |= {one.path for one in small}
        return [one for one in files if one.path in holding]

    def _holding(self, place: FilePlace, candidates: Sequence[LakeFile]) -> set[str]:
        rows = self._rows_of(place, candidates, self._key)
        keys = self._changes.select([_col(name) for name in self._key])
        found = rows.join(keys, self._key, "left_semi").select(_FILE).distinct().collect()
        return {one[_FILE] for one in found}

    def rows(self, place: FilePlace, touched: Sequence[LakeFile]) -> DataFrame:
        """The rows of these files after the changes, and the new ones."""
        names = list(place.schema.names)
        had = self._rows_of(place, touched, names).drop(_FILE)
        values = F.struct(*map(_col, names)).alias("_new")
        new = self._changes.select(*map(_col, self._key), values, "_op", "_absent")
        joined = had.join(new, self._key, "full_outer").where("_op IS NULL OR _op <> 'd'")
        return joined.select([_after(name, name in self._key).alias(name) for name in names])

    def _rows_of(
        self, place: FilePlace, files: Sequence[LakeFile], names: Sequence[str]
    ) -> DataFrame:
        """The columns named of all rows of files, with the name of the file."""
        of_tasks = [list(files[at :: self._sizes.tasks]) for at in range(self._sizes.tasks)]
        of_tasks = [some for some in of_tasks if some]
        schema = pa.schema([*(place.schema.field(name) for name in names), (_FILE, pa.string())])

        def read(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    for one in of_tasks[number]:
                        for rows in place.read([one], names):
                            path = pa.repeat(pa.scalar(one.path), rows.num_rows)
                            yield pa.RecordBatch.from_arrays([*rows.columns, path], schema=schema)

        spark_schema = from_arrow_schema(schema, prefer_timestamp_ntz=True)
        numbers = self._spark.range(0, len(of_tasks), 1, max(len(of_tasks), 1))
        return numbers.mapInArrow(read, spark_schema)


def _after(name: str, is_key: bool) -> Column:
    """A column after the changes: as it was where there is none, or where it leaves it out."""
    if is_key:
        return _col(name)
    is_absent = F.coalesce(F.array_contains("_absent", name), F.lit(False))
    return F.when(F.col("_op").isNull() | is_absent, _col(name)).otherwise(
        F.col("_new").getField(name)
    )


def _overlaps(one: LakeFile, low: Any, high: Any) -> bool:
    if one.low is None or one.high is None:
        return True
    try:
        return bool(one.low <= high and low <= one.high) or str(low).startswith(str(one.high))
    except TypeError:
        return True


def _col(name: str) -> Column:
    quoted = name.replace("`", "``")
    return F.col(f"`{quoted}`")
