"""What a merge does in each bucket: the tasks, their inputs, what is taken over.  Pure functions.

A bucket is a range of key hashes of one source, named by its leading bits.  The buckets of a source
divide all hashes; they need not be of one size.  A merge retains the buckets of the old run, splits
one that has grown beyond a file, and divides a source again only if most of its files have become
far too small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import google_crc32c

from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs.parquet_runs import Run, RunFile, RunKind
from databus.common.checkpoint import ORIGIN, Position

FILE_BYTES = 128 << 20
"""Bytes of frames in one file, approximately."""

MOST_BITS = 24
"""Leading bits that name a bucket, at most."""

TOO_MANY_FILES = 8
"""A source with this many times the files that it needs is divided again."""


@dataclass(frozen=True, slots=True)
class TaskInput:
    """A clustered file of which a task reads the rows of its bucket after ``after``."""

    run: Run
    file: RunFile
    after: Position


@dataclass(frozen=True, slots=True)
class BucketTask:
    """Merge one bucket of one source: clustered files, and what is shuffled to it.

    If there are no rows but those of ``taken``, that file becomes a file of the new run.
    ``split_bits`` more leading bits name the files that are written.  ``frame_bytes`` is what is
    read, approximately.
    """

    source_id: int
    bucket: str
    inputs: tuple[TaskInput, ...]
    taken: RunFile | None
    cut: Position | None
    split_bits: int
    frame_bytes: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The tasks of a merge by source and hash, and the files that it takes over unread.

    ``unit_bits`` are, by source, the leading bits of which every value has whole buckets: the unit
    that is shuffled to one worker.
    """

    tasks: tuple[BucketTask, ...]
    untouched: tuple[RunFile, ...]
    unit_bits: Mapping[int, int]

    def worker(self, task: BucketTask, count: int) -> int:
        """The number of the worker that does a task, of ``count``."""
        bits = self.unit_bits[task.source_id]
        return (task.source_id + (int(task.bucket[:bits], 2) if bits else 0)) % count

    @property
    def units(self) -> int:
        """How many units there are."""
        return sum(2**bits for bits in self.unit_bits.values())

    @property
    def fingerprint(self) -> str:
        """Equal for plans whose tasks are the same, in the same order."""
        tasks = [
            (t.source_id, t.bucket, t.split_bits, [one.file.name for one in t.inputs])
            for t in self.tasks
        ]
        content = repr((tasks, [file.name for file in self.untouched])).encode()
        return f"{google_crc32c.value(content):08x}"

    def end_of_part(self, begin: int, most_bytes: int | None) -> int:
        """Where the tasks end that begin at ``begin``, one of them at least, and read this much."""
        if most_bytes is None:
            return len(self.tasks)
        total = 0
        for number in range(begin, len(self.tasks)):
            total += self.tasks[number].frame_bytes
            if total > most_bytes and number > begin:
                return number
        return len(self.tasks)


def plan(merge: Merge, plain_bytes: Mapping[int, int], file_bytes: int = FILE_BYTES) -> BucketPlan:
    """The tasks of a merge.

    ``plain_bytes`` are, by source, the frame bytes in inputs that are not clustered, approximately;
    a source that is missing has no row in them.
    """
    first = merge.inputs[0]
    is_same_kind = merge.kind is not RunKind.BASE or first.kind is RunKind.BASE
    old = first if first.is_clustered and is_same_kind else None
    inputs: dict[int, list[TaskInput]] = {}
    for run in merge.inputs:
        after = first.stop if first.kind is RunKind.BASE and run is not first else ORIGIN
        for file in run.files if run.is_clustered else ():
            if file.source_id is not None and file.last > after:
                inputs.setdefault(file.source_id, []).append(TaskInput(run, file, after))
    cuts = truncates(merge.inputs)
    tasks: list[BucketTask] = []
    untouched: list[RunFile] = []
    unit_bits: dict[int, int] = {}
    for source in sorted({*inputs, *plain_bytes}):
        given = inputs.get(source, [])
        is_old = source not in plain_bytes and source not in cuts
        if is_old and all(one.run is old for one in given):
            untouched += [taken_over(one.run, one.file) for one in given]
            continue
        found = _tasks(source, given, old, cuts.get(source), plain_bytes.get(source, 0), file_bytes)
        tasks += found
        unit_bits[source] = min(len(task.bucket) for task in found)
    return BucketPlan(tuple(tasks), tuple(untouched), unit_bits)


def _tasks(
    source: int,
    given: list[TaskInput],
    old: Run | None,
    cut: Position | None,
    plain_bytes: int,
    file_bytes: int,
) -> list[BucketTask]:
    size = plain_bytes + sum(one.file.frame_bytes for one in given)
    bits = bits_for(size, file_bytes)
    olds = {one.file.bucket: one for one in given if one.run is old}
    if not olds or len(olds) > TOO_MANY_FILES * 2**bits:
        buckets = ["".join(digits) for digits in itertools.product("01", repeat=bits)]
        olds = {}
    else:
        buckets = list(_leaves("", sorted(olds)))
    live = [one for one in given if cut is None or one.file.last >= cut]
    tasks = []
    for bucket in buckets:
        inputs = tuple(one for one in live if overlap(one.file.bucket, bucket))
        share = plain_bytes / 2 ** len(bucket)
        for one in inputs:
            share += one.file.frame_bytes / 2 ** max(0, len(bucket) - len(one.file.bucket))
        split_bits = min(bits_for(share / 1.5, file_bytes), MOST_BITS - min(MOST_BITS, len(bucket)))
        before = olds.get(bucket) if cut is None else None
        taken = taken_over(before.run, before.file) if before else None
        tasks.append(BucketTask(source, bucket, inputs, taken, cut, split_bits, int(share)))
    return tasks


def taken_over(run: Run, file: RunFile) -> RunFile:
    """A run's file as a later run names it."""
    return RunFile(
        file.name,
        file.rows,
        file.file_bytes,
        file.frame_bytes,
        file.first,
        file.last,
        file.footer_crc,
        file.source_id,
        file.bucket,
        file.folder or run.id,
    )


def bits_for(frame_bytes: float, file_bytes: int = FILE_BYTES) -> int:
    """The leading bits of buckets of which each has at most ``file_bytes``."""
    if frame_bytes <= file_bytes:
        return 0
    return min(MOST_BITS, math.ceil(math.log2(frame_bytes / file_bytes)))


def overlap(one: str, other: str) -> bool:
    """Whether two buckets have a hash in common: then one is a part of the other."""
    return one.startswith(other) or other.startswith(one)


def _leaves(bucket: str, found: list[str]) -> Iterator[str]:
    """The buckets in ``found``, and the largest ones for the hashes that none of them has."""
    if not found or bucket in found:
        yield bucket
        return
    for digit in "01":
        half = bucket + digit
        yield from _leaves(half, [one for one in found if one.startswith(half)])


def truncates(runs: tuple[Run, ...]) -> dict[int, Position]:
    """The last TRUNCATE of each source in some runs."""
    cuts: dict[int, Position] = {}
    for run in runs:
        for source, position in run.truncates:
            cuts[source] = max(position, cuts.get(source, ORIGIN))
    return cuts
