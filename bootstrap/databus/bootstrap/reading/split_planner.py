"""Plans the splits of a state or of net changes: the files of merged runs that a reader opens.

The plan is that of ``/snapshot`` and ``/changes?mode=net``, a ``FrameRange``.  Its merged runs up
to the first part in commit order are listed as files; what follows is the tail.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from databus.bootstrap.merging.run_planner import PlanPart
from databus.bootstrap.reading.frame_ranges import PLAN_ATTEMPTS, FrameRange
from databus.bootstrap.reading.retained_runs import are_retained
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.open_run import Wanted
from databus.bootstrap.runs.parquet_runs import ROW_GROUP_BYTES, RunFile, RunKind
from databus.bootstrap.runs.read_leases import LEASE_S, ReadLeases
from databus.bootstrap.runs.s3_storage import S3Storage
from databus.client.splits.split_plan import Split, SplitFile, SplitPlan
from databus.common.checkpoint import ORIGIN, Position
from databus.common.errors import StoreError
from databus.common.frame import frame_format

SPLIT_BYTES = 192 << 20
"""Frame bytes of a split, at most: one file of a base, and the deltas after it."""
LEAST_GROUPS = 4
"""Row groups of a split of a part of a file, about: those at its borders are read twice."""
MOST_BITS = 29
"""Longest bucket of a split: more ranges of hashes than that have no filter."""

_Planned = tuple[PlanPart, tuple[RunFile, ...]]
"""A run of the plan, and the files that a reader of the sources opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """A range, of which the sources ``names`` are read in ``least`` splits or more."""

    clock: str
    since: Position | None
    is_state: bool
    names: Sequence[str]
    least: int


def plan_splits(
    store: Store, request: SplitRequest, opening: Callable[[Wanted], FrameRange]
) -> SplitPlan:
    """The splits of a range, under a new lease; without files there are no splits and no lease.

    There are more than ``least`` splits if the files are large, and fewer if they have too few row
    groups.

    Raises:
        LogTooYoung, StoreError.
    """
    leases = ReadLeases(store.storage)
    lease = leases.take(request.since or ORIGIN)
    try:
        parts, start, until = _planned(store, request, opening, leases, lease)
        merged = list(itertools.takewhile(lambda one: one[0].run.is_clustered, parts))
        splits = tuple(_splits(store, request, merged))
    except BaseException:
        leases.end(lease)
        raise
    if not splits:
        leases.end(lease)
    return SplitPlan(
        clock=request.clock,
        since=None if request.is_state else start,
        until=until,
        files_end=merged[-1][0].upto if splits else start,
        lease=lease if splits else "",
        lease_s=LEASE_S,
        storage=_storage(store),
        splits=splits,
    )


def _planned(
    store: Store,
    request: SplitRequest,
    opening: Callable[[Wanted], FrameRange],
    leases: ReadLeases,
    lease: str,
) -> tuple[Sequence[_Planned], Position, Position]:
    """The runs that a reader reads, which the lease holds; where the range begins and ends."""
    ids = {frame_format.source_id(name) for name in request.names}
    for _ in range(PLAN_ATTEMPTS):
        found = opening(lambda file: file.source_id is None or file.source_id in ids)
        try:
            if request.is_state:
                found.cut_at_window()
            parts, start, until = found.parts, found.start, found.until
        finally:
            found.close()
        used = {part.run.id for part, _ in parts}
        # A base is retained by itself, and what is not dropped is what follows it.
        has_base = bool(parts) and parts[0][0].run.kind is RunKind.BASE
        leases.renew(lease, position=parts[0][0].upto if has_base else start)
        if are_retained(store, store.read(), used, functools.partial(leases.renew, lease)):
            manifest = store.read()
            if all(manifest.find(run_id) for run_id in used):
                return parts, start, until
    raise StoreError("runs were deleted faster than they could be planned; try again")


def _splits(store: Store, request: SplitRequest, merged: Sequence[_Planned]) -> Iterator[Split]:
    """The splits of all sources, in the order of the request."""
    if not any(files for _, files in merged):
        return
    total = sum(file.frame_bytes for _, files in merged for file in files)
    most_bytes = max(LEAST_GROUPS * ROW_GROUP_BYTES, min(SPLIT_BYTES, total // request.least + 1))
    for name in request.names:
        number = frame_format.source_id(name)
        files = [
            (part, file) for part, files in merged for file in files if file.source_id == number
        ]
        cuts = (
            position
            for part, _ in merged
            for source, position in part.run.truncates
            if source == number and position > part.after
        )
        cut = max(cuts, default=None)
        for bucket in buckets_of([file for _, file in files], most_bytes):
            within = tuple(
                SplitFile(
                    store.files(file.folder or part.run.id).location(file.name),
                    file.rows,
                    file.file_bytes,
                    file.footer_crc,
                    file.bucket,
                    part.after,
                )
                for part, file in files
                if _overlap(file.bucket, bucket)
            )
            yield Split(name, bucket, within, cut)


def buckets_of(files: Sequence[RunFile], most_bytes: int, bucket: str = "") -> Iterator[str]:
    """Buckets that together have all hashes, each with about ``most_bytes`` of frames at most."""
    size = sum(file.frame_bytes >> max(0, len(bucket) - len(file.bucket)) for file in files)
    if size <= most_bytes or len(bucket) >= MOST_BITS:
        yield bucket
        return
    for half in (f"{bucket}0", f"{bucket}1"):
        yield from buckets_of([f for f in files if _overlap(f.bucket, half)], most_bytes, half)


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _storage(store: Store) -> dict[str, str]:
    """How files are opened; without credentials, which are the reader's own."""
    if not isinstance(store.storage, S3Storage):
        return {}
    options = store.storage.bucket.options
    return {"endpoint": options.endpoint, "region": options.region}
