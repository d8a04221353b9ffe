"""The applier: merges the runs of a store, one merge after the other.

A merge goes bucket by bucket (``bucket_tasks``).  Nothing of the old run is shuffled or sorted, and
a file of a bucket in which nothing changed is taken over by name.  Runs of format 1 are in commit
order: their rows are sorted as changes are.  ``Merges`` does the tasks: Spark (``spark_merges``),
or this process (``process_merges``).

The work of one apply is bounded.  A merge that exceeds the bound is done in parts: each part leaves
the files of some buckets in the manifest, as an ``UnfinishedMerge``, and the next apply continues.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from databus.bootstrap.merging import bucket_tasks, run_planner
from databus.bootstrap.merging.bucket_runs import (
    WrittenFile,
    are_there,
    finished_files,
    plain_bytes,
    run_of,
)
from databus.bootstrap.merging.bucket_tasks import FILE_BYTES, BucketPlan
from databus.bootstrap.merging.run_planner import Merge, Retention
from databus.bootstrap.merging.spark_tasks import Output
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.apply_progress import ApplyProgress
from databus.bootstrap.runs.log_record import recorded_schemas
from databus.bootstrap.runs.manifest import Manifest, Store
from databus.bootstrap.runs.open_readers import held
from databus.bootstrap.runs.parquet_runs import PARQUET, ROW_GROUP_BYTES, Run, RunFile, RunKind
from databus.bootstrap.runs.run_ids import new_run_id
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.bootstrap.runs.unfinished_merge import UnfinishedMerge
from databus.client.splits import partial_rows
from databus.common.checkpoint import ORIGIN
from databus.common.errors import BucketError, StoreError

_LOG = logging.getLogger("databus.bootstrap.merging.applier")

GRACE_US = 600 * 10**6
"""How long a replaced run stays on disk, for readers inside it."""

APPLY_BYTES = 16 << 30
"""Frame bytes that one apply reads, approximately."""


def _now_us() -> int:
    return time.time_ns() // 1000


class Merges(Protocol):
    """Does the tasks of merges."""

    def write(
        self, store: Store, merge: Merge, plan: BucketPlan, output: Output, run_id: str
    ) -> list[WrittenFile]:
        """Do the tasks of a merge; its files, which need not be durable yet."""

    def finished(self, run_id: str) -> tuple[int, int]:
        """The finished tasks of a merge, and all of them, as far as they are known."""


class Applier:
    """Brings one store's runs up to date, merge by merge.

    Invariants:
        I1. A merge's files are complete and durable before the manifest names them.
        I2. A replaced run is deleted at the earliest ``grace_us`` after the merge.
        I3. A base or delta is in the manifest when all of its buckets are done, and not before.

    Owner: the process that holds the store's applier lease while ``apply`` runs.
    Durability: every merge that ``apply`` reports is on disk.
    Raises: StoreBusy if another applier is at work; StoreError if files are damaged.
    """

    def __init__(
        self,
        store: Store,
        merges: Merges,
        *,
        name: str = "",
        retention_bytes: int = 64 << 30,
        retention_us: int | None = None,
        retention_scns: int | None = None,
        grace_us: int = GRACE_US,
        apply_bytes: int = APPLY_BYTES,
        now_us: Callable[[], int] = _now_us,
    ) -> None:
        self.store = store
        self._now_us = now_us
        self._merges = merges
        self._progress = ApplyProgress(name or store.url, store.storage)
        self.retention_bytes = retention_bytes
        self.retention_us = retention_us
        self.retention_scns = retention_scns
        self.grace_us = grace_us
        self.apply_bytes = apply_bytes

    def apply(self, *, full: bool = False) -> list[Mapping[str, Any]]:
        """Do every merge that pays; returns their records.  ``full`` always renews the base.

        Only the runs that exist at the start are merged: segments may arrive as fast as they are
        merged, and the work after the merges must be done too.  Merges that would read more than
        ``apply_bytes`` in all, but for one bucket, are left to the next apply.  ``full`` has no
        such bound.
        """
        records: list[Mapping[str, Any]] = []
        with self.store.lease("applier"):
            self.store.sweep("c")
            largest_bytes = max(self.retention_bytes // 4, FILE_BYTES)
            left_bytes = None if full else self.apply_bytes
            upto = self.store.read().stop or ORIGIN
            while merge := run_planner.next_merge(
                self.store.read(),
                largest_bytes,
                full=full,
                upto=upto,
                most_bytes=None if full else self.apply_bytes,
            ):
                if records and left_bytes is not None and merge.least_bytes > left_bytes:
                    break
                record, left_bytes = self._merge(merge, left_bytes)
                records.append(record)
                if left_bytes is not None and left_bytes <= 0:
                    break
            readers = held(self.store.storage, self._now_us())
            at = min((one.position for one in readers), default=None)
            self._retire(run_planner.droppable(self.store.read(), self._retention(), at))
            self.store.collect(self.grace_us, "cs", self._now_us())
        return records

    def _retention(self) -> Retention:
        since_us = self._now_us() - self.retention_us if self.retention_us is not None else None
        return Retention(self.retention_bytes, since_us, self.retention_scns)

    def _retire(self, runs: tuple[Run, ...]) -> None:
        if runs:
            self.store.switch(lambda manifest: manifest.without(runs, self._now_us()))

    def _part(self, merge: Merge, most_bytes: int | None) -> _Part:
        """All that is left of a merge, or as many buckets as ``most_bytes`` allow."""
        plan = bucket_tasks.plan(merge, plain_bytes(self.store, merge), FILE_BYTES)
        manifest = self.store.read()
        before = manifest.unfinished
        if before is not None and (
            run_planner.unfinished_merge(manifest) != merge
            or before.plan != plan.fingerprint
            or not are_there(self.store, before.files)
        ):
            before = None
        begin = before.tasks_done if before else 0
        end = plan.end_of_part(begin, most_bytes if merge.is_divisible else None)
        return _Part(merge, plan, begin, end, before.files if before else ())

    def _merge(self, merge: Merge, most_bytes: int | None) -> tuple[Mapping[str, Any], int | None]:
        """Do a merge, or a part, and put what it made into the manifest.

        Returns its record, and what is left of ``most_bytes``: nothing after a part.
        """
        failpoints.reach("merge.begun")
        began_s = time.monotonic()
        # A folder for each part: an applier that lost its lease deletes nothing of another one's.
        run_id = new_run_id(merge.kind, merge.inputs[-1].stop)
        files = self.store.files(run_id)
        what = {
            "kind": merge.kind.value,
            "runs": len(merge.inputs),
            "rows_in": sum(run.rows for run in merge.inputs),
            "bytes_in": sum(run.file_bytes for run in merge.inputs),
        }
        try:
            finished = self._merges.finished
            with self._progress.merging(what, lambda: finished(run_id)), _naming_runs(merge):
                part = self._part(merge, most_bytes)
                if isinstance(files, LocalFiles):
                    files.folder.mkdir()
                written = self._write(part, run_id)
        except StoreError:
            self._drop(run_id)
            raise
        failpoints.reach("merge.rows_written")
        done = [*part.before, *finished_files(self.store, run_id, part.chosen, written)]
        failpoints.reach("merge.files_written")
        if part.is_last:
            done += part.plan.untouched
        run = run_of(merge, run_id, done, self._now_us())
        record = _record(part, run, time.monotonic() - began_s)
        self.store.switch(lambda manifest: _switched(manifest, part, run).with_apply(record))
        failpoints.reach("merge.manifest_switched")
        _LOG.info("merged %s", record)
        if most_bytes is None:
            return record, None
        return record, most_bytes - part.frame_bytes if part.is_last else 0

    def _drop(self, run_id: str) -> None:
        """Delete the files of a merge that failed; the next sweep removes what this cannot."""
        with contextlib.suppress(StoreError):
            self.store.storage.delete_run(run_id)

    def _write(self, part: _Part, run_id: str) -> list[WrittenFile]:
        """Do the tasks of a part; the files of it."""
        if part.begin == part.end:
            return []
        prefix = f"{self.store.files(run_id).location('').rstrip('/')}/"
        output = Output(prefix, PARQUET, ROW_GROUP_BYTES, self._layouts(part.merge))
        return self._merges.write(self.store, part.merge, part.chosen, output, run_id)

    def _layouts(self, merge: Merge) -> partial_rows.Layouts:
        """The layouts of rows, where PARTIAL ones may be folded."""
        if merge.kind is not RunKind.BASE or not any(run.partial_rows for run in merge.inputs):
            return {}
        return partial_rows.layouts_of(recorded_schemas(self.store.storage, self.store.read()))


@dataclass(frozen=True, slots=True)
class _Part:
    """The tasks ``begin`` to ``end`` of a merge; ``before`` are the files of those before them."""

    merge: Merge
    plan: BucketPlan
    begin: int
    end: int
    before: tuple[RunFile, ...]

    @property
    def chosen(self) -> BucketPlan:
        """The plan with these tasks alone."""
        return replace(self.plan, tasks=self.plan.tasks[self.begin : self.end])

    @property
    def frame_bytes(self) -> int:
        """What the tasks read, approximately."""
        return sum(task.frame_bytes for task in self.chosen.tasks)

    @property
    def is_last(self) -> bool:
        """Whether the merge is finished with it."""
        return self.end == len(self.plan.tasks)


def _switched(manifest: Manifest, part: _Part, run: Run) -> Manifest:
    """The manifest with the run of a merge, or with its files if it is not finished."""
    merge = part.merge
    if part.is_last:
        return manifest.with_changes(
            add=run, drop=merge.retired, made_of=merge.inputs, now_us=run.created_us
        )
    return manifest.with_unfinished(
        UnfinishedMerge(
            kind=merge.kind,
            inputs=tuple(one.id for one in merge.inputs),
            plan=part.plan.fingerprint,
            tasks_done=part.end,
            tasks=len(part.plan.tasks),
            files=tuple(bucket_tasks.taken_over(run, file) for file in run.files),
        )
    )


def _record(part: _Part, run: Run, seconds: float) -> Mapping[str, Any]:
    inputs = part.merge.inputs
    is_whole = part.is_last and not part.begin
    return {
        "run": run.id,
        "kind": run.kind.value,
        "tier": len(inputs),
        "start": run.start.to_json(),
        "stop": run.stop.to_json(),
        "rows_in": sum(one.rows for one in inputs),
        "rows_out": run.rows,
        "bytes_in": sum(one.file_bytes for one in inputs),
        "bytes_out": run.file_bytes,
        "seconds": round(seconds, 3),
        "finished_us": run.created_us,
        **({} if is_whole else {"tasks_done": part.end, "tasks": len(part.plan.tasks)}),
    }


@contextlib.contextmanager
def _naming_runs(merge: Merge) -> Iterator[None]:
    """Raise any error in the block as one that names the runs and the reason."""
    try:
        yield
    except Exception as error:
        # Tasks reach S3 through Arrow, whose errors are recognised only by their text.
        is_s3 = isinstance(error, BucketError) or "AWS Error" in str(error)
        raise (BucketError if is_s3 else StoreError)(
            f"merging {[run.id for run in merge.inputs]} failed: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of an error; for Java, where it names only the call, the first cause; for a
    Python worker, the last line of its traceback."""
    lines = str(error).strip().splitlines() or [repr(error)]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Invalid): ", line)]
    if raised and any(line.endswith("from the Python worker:") for line in lines):
        return raised[-1][:500]
    causes = [line.partition(":")[2].strip() for line in lines if line.startswith("Caused by:")]
    return (causes[-1] if causes else lines[0])[:500]
