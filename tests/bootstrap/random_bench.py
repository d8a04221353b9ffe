"""A store whose runs are merged by the plain model, over random histories."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import applier as applier_module
from databus.bootstrap.merging import bucket_tasks, spark_tasks
from databus.bootstrap.merging.applier import Applier
from databus.bootstrap.merging.bucket_runs import (
    WrittenFile,
    finished_files,
    plain_bytes,
    run_of,
    worker_tasks,
)
from databus.bootstrap.merging.process_merges import ProcessMerges
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.reading.bootstrap_stream import BootstrapStream
from databus.bootstrap.runs import failpoints, file_lists
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import PARQUET, Run, RunKind
from databus.bootstrap.runs.run_ids import new_run_id
from databus.bootstrap.runs.run_storage import LocalFiles
from databus.client.splits.clustered_files import Place
from databus.client.splits.frame_tables import as_table
from databus.common.checkpoint import ORIGIN, BootstrapCheckpoint, Checkpoint, Position
from databus.common.filters.stream_filter import StreamFilter, matching_ids
from databus.common.frame import frame_format
from databus.common.frame.frame_format import FrameView
from tests.bootstrap.model import (
    CLOCK,
    SOURCES,
    START,
    History,
    State,
    clustered,
    compact,
    frames_between,
    frames_of,
    write_run,
)


class Killed(BaseException):
    """The process dies here."""


class RandomBench:
    """A store whose runs are compacted by the model instead of Spark, or by bounded applies."""

    def __init__(self, folder: Path, seed: int, steps: int = 0) -> None:
        self.rng = random.Random(seed)
        self.history = History(seed)
        self.store = Store(folder)
        self.store.create()
        self.log = HotLog(folder / "log")
        self.log.bind("shop", CLOCK, START)
        self.blocks: list[bytes] = []
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        draw = self.rng.random()
        if draw < 0.5:
            self.write(self.rng.randrange(1, 5))
        elif draw < 0.75:
            segments.seal(self.log, self.store, 1)
        elif draw < 0.85:
            self.merge()
        elif draw < 0.92:
            self.rebase()
        else:
            self.apply()

    def write(self, windows: int) -> None:
        self.blocks.append(self.history.block(windows))
        self.log.append(self.blocks[-1], 1)

    def merge(self, grace: bool = False) -> None:
        chain = self.store.read().chain
        if len(chain) < 2:
            return
        first = self.rng.randrange(len(chain) - 1)
        last = self.rng.randrange(first + 1, len(chain))
        inputs = chain[first : last + 1]
        frames = [one for run in inputs for one in frames_of(self.store, run)]
        self._replace(Merge(inputs, RunKind.DELTA), compact(frames, base=False), grace)

    def rebase(self, grace: bool = False) -> None:
        manifest = self.store.read()
        newer = [run for run in manifest.chain if run.stop > manifest.snapshot]
        if not newer:
            return
        inputs = (*((manifest.base,) if manifest.base else ()), *newer)
        frames = [one for run in inputs for one in frames_of(self.store, run)]
        unique = {one.position: one for one in frames}
        rows = compact([unique[position] for position in sorted(unique)], base=True)
        self._replace(Merge(tuple(inputs), RunKind.BASE), rows, grace)

    def apply(self) -> None:
        """An apply of the real applier, of bounded work, which may be killed at any step."""
        steps = ("merge.begun", "merge.rows_written", "merge.files_written", "collect.one_deleted")
        dies_at = self.rng.choice((*steps, *("",) * len(steps)))

        def reach(step: str) -> None:
            if step == dies_at:
                raise Killed(step)

        applier = Applier(
            self.store,
            ProcessMerges(),
            grace_us=0,
            apply_bytes=self.rng.choice((1, 500, 2000, 1 << 30)),
        )
        with (
            patch.object(applier_module, "FILE_BYTES", 400),
            patch.object(file_lists, "LISTED_APART", self.rng.choice((1, 256))),
            patch.object(failpoints, "reach", reach),
            contextlib.suppress(Killed),
        ):
            applier.apply()

    def _replace(self, merge: Merge, frames: list[Any], grace: bool) -> None:
        if self.rng.random() < 0.5:
            run = in_process(self.store, merge, self.rng)
            assert frames_as_bytes(frames_of(self.store, run)) == frames_as_bytes(clustered(frames))
        else:
            run = write_run(
                self.store,
                merge.kind,
                merge.inputs[0].start,
                merge.inputs[-1].stop,
                frames,
                random_bytes=self.rng,
                bits=self.rng.choice((None, 0, 1, 2)),
            )
        self.store.switch(lambda m: m.with_changes(add=run, drop=merge.retired, now_us=1))
        if not grace:
            self.store.collect(0, "cs", now_us=2)

    def stream(
        self, checkpoint: Checkpoint | Position, stream_filter: StreamFilter | None = None
    ) -> BootstrapStream:
        resume = checkpoint if isinstance(checkpoint, BootstrapCheckpoint) else None
        if isinstance(checkpoint, Position):
            since = checkpoint
        else:
            since = resume.since if resume else checkpoint.position
        chosen = stream_filter or StreamFilter()
        return BootstrapStream(
            store=self.store,
            log=self.log,
            since=since,
            target=self.log.state().window,
            stream_filter=chosen,
            source_ids=matching_ids(SOURCES, chosen),
            resume=resume,
            piece_bytes=self.rng.choice((1, 300, 2000, 1 << 20)),
        )

    def truth(self, upto: Position, after: Position = ORIGIN) -> State:
        state = State()
        for one in frames_between(self.blocks, after, upto):
            state.apply(one)
        return state

    def close(self) -> None:
        assert self.store.check() == []
        self.log.check()
        self.log.close()


def frames_as_bytes(frames: list[FrameView]) -> list[bytes]:
    return [bytes(one.bytes) for one in frames]


def in_process(store: Store, merge: Merge, rng: random.Random) -> Run:
    """What the applier does, without Spark: the rows of runs that are not clustered are sorted by
    the model, and one worker does all tasks."""
    run_id = new_run_id(merge.kind, merge.inputs[-1].stop, rng.randbytes)
    files = store.files(run_id)
    assert isinstance(files, LocalFiles)
    files.folder.mkdir()
    plan = bucket_tasks.plan(merge, plain_bytes(store, merge), rng.choice((200, 600, 1 << 20)))
    rows: list[FrameView] = []
    for run in merge.inputs:
        after = merge.inputs[0].stop if merge.inputs[0].kind is RunKind.BASE else ORIGIN
        after = ORIGIN if run.kind is RunKind.BASE else after
        plain = [] if run.is_clustered else frames_of(store, run)
        rows += [one for one in plain if not one.is_control and one.position > after]
    data = b"".join(frames_as_bytes(clustered(rows)))
    table = as_table(data, frame_format.scan(data))
    merging = spark_tasks.merger(
        Place(None, 0o077),
        worker_tasks(store, plan, 1),
        spark_tasks.Output(f"{files.folder}/", PARQUET, 300),
        base=merge.kind is RunKind.BASE,
        has_changes=True,
    )
    written = [
        WrittenFile(**one)
        for batch in merging(iter(table.to_batches(max_chunksize=rng.choice((1, 3, 100)))))
        for one in batch.to_pylist()
    ]
    files = [*plan.untouched, *finished_files(store, run_id, plan, written)]
    return run_of(merge, run_id, files, 1)


_SETTINGS = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def over_histories(**draws: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Run a test with the seeds of many histories, and with other values that are drawn."""
    return lambda test: _SETTINGS(given(seed=st.integers(0, 2**32), **draws)(test))
