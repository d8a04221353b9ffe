"""SIGKILL at every step of append, seal, merge, manifest switch and collection.

A child process does the work and dies at the step that its environment names; afterwards the
store must be whole, and a resumed run must lead to the state that an undisturbed run leads to.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging import scratch_folders
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.processes.log_restore import restore_logs
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import Run, RunKind
from databus.common.config import BootstrapConfig
from databus.common.frame.frame_format import iter_frames
from tests.bootstrap.model import (
    CLOCK,
    START,
    History,
    State,
    compact,
    frames_of,
    state_of,
    write_run,
)
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SEED = 77
ROOT = Path(__file__).parents[2]
BLOCKS = 8
PART_BYTES = 120


def blocks() -> list[bytes]:
    """What the relay has: the same at each start."""
    history = History(SEED)
    return [history.block(6) for _ in range(BLOCKS)]


def open_log(folder: Path) -> tuple[HotLog, Store]:
    store = Store(folder)
    store.create()
    log = HotLog(folder / "log")
    log.bind("shop", CLOCK, START)
    segments.finish(log, store, 1)
    return log, store


def write(folder: Path) -> None:
    log, store = open_log(folder)
    take_up(log, store)
    log.close()


def take_up(log: HotLog, store: Store) -> None:
    """The log writer: read the stream after the checkpoint, seal every third block."""
    for number, block in enumerate(blocks()):
        last = log.state().last
        rest = b"".join(bytes(one.bytes) for one in iter_frames(block) if one.position > last)
        log.append(rest, 1)
        if number % 3 == 2:
            segments.seal(log, store, 1)


def merge(folder: Path) -> None:
    """The applier, with Spark."""
    from databus.bootstrap.merging.applier import Applier
    from databus.bootstrap.merging.spark_merges import SparkMerges, start_spark

    with scratch_folders.scratch_folder(folder.parent) as aside:
        spark = start_spark("local[1]", "512m", scratch=aside)
        kinds = {path.name.partition("-")[0] for path in aside.iterdir()}
        assert {"blockmgr", "spark"} <= kinds, "Spark's files lie there"
        Applier(Store(folder), SparkMerges(spark), grace_us=0).apply()
        spark.stop()


def merge_here(folder: Path) -> None:
    """The applier without Java."""
    from databus.bootstrap.merging.applier import Applier
    from databus.bootstrap.merging.process_merges import ProcessMerges

    with scratch_folders.scratch_folder(folder.parent) as aside:
        Applier(Store(folder), ProcessMerges(aside), grace_us=0).apply()


def merge_in_parts(folder: Path) -> None:
    """The same, with a bound that leaves a base unfinished."""
    from unittest.mock import patch

    from databus.bootstrap.merging import applier
    from databus.bootstrap.merging.process_merges import ProcessMerges

    with (
        scratch_folders.scratch_folder(folder.parent) as aside,
        patch.object(applier, "FILE_BYTES", PART_BYTES),
    ):
        whole = applier.Applier(Store(folder), ProcessMerges(aside), grace_us=0)
        if Store(folder).read().base is None:
            whole.apply()
            return
        part = applier.Applier(
            Store(folder), ProcessMerges(aside), grace_us=0, apply_bytes=10 * PART_BYTES
        )
        part.apply()


def replace(folder: Path) -> None:
    """What the applier does around Spark: replace other runs by a merged one."""
    store = Store(folder)
    store.sweep("c")
    chain = store.read().chain
    if len(chain) > 1:
        failpoints.reach("merge.begun")
        merged = _merged(store, Merge(chain, RunKind.DELTA))
        store.switch(lambda manifest: manifest.with_changes(add=merged, drop=chain, now_us=1))
    store.collect(0, "cs", now_us=2)


def _merged(store: Store, plan: Merge) -> Run:
    frames = [one for run in plan.inputs for one in frames_of(store, run)]
    rows = compact(frames, base=False)
    return write_run(store, plan.kind, plan.inputs[0].start, plan.inputs[-1].stop, rows)


def restore(folder: Path) -> None:
    """``databus restore`` from a copy of the folder that ``write`` has filled."""
    config = BootstrapConfig(data_dir=folder.parent, databases=("shop",))
    list(restore_logs(config, copy_of(folder)))


def copy_of(folder: Path) -> Path:
    """The copied ``data_dir``."""
    return folder.parent.with_name("copy")


ACTIONS = {
    "write": write,
    "merge": merge,
    "merge_here": merge_here,
    "merge_in_parts": merge_in_parts,
    "replace": replace,
    "restore": restore,
}


def run_child(action: str, folder: Path, step: str | None) -> int:
    """Do ``action`` in a process of its own, dying at ``step``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(failpoints.VARIABLE, None)
    if step is not None:
        environment[failpoints.VARIABLE] = step
    log = folder.parent / "child.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, __file__, action, str(folder)],
            env=environment,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = child.wait(100 * PATIENCE)
    finally:
        # Spark's Java too: it would go in order when it finds itself alone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert code in (0, -signal.SIGKILL), log.read_text()[-3000:]
    return code


def left_behind(folder: Path) -> set[str]:
    """The scratch folders beside the store."""
    return {path.name for path in (folder.parent / scratch_folders.FOLDER).iterdir()} - {
        scratch_folders.LOCK
    }


def assert_whole(folder: Path) -> None:
    """Nothing lost, nothing double, nothing left lying about."""
    assert Store(folder).check() == []
    log, store = open_log(folder)
    try:
        assert_equal(log, store)
    finally:
        log.close()


def assert_equal(log: HotLog, store: Store) -> None:
    """A new reader ends with what the log has taken of the blocks."""
    log.check()
    state, window = state_of(store, log), log.state().window
    truth = State()
    for block in blocks():
        for one in iter_frames(block):
            if one.position <= window:
                truth.apply(one)
    assert state.rows == truth.rows
    assert state.regressions == []


WRITER_STEPS = [
    step for step in failpoints.STEPS if step.split(".")[0] in ("append", "seal", "manifest")
]
MERGE_STEPS = ["merge.rows_written", "merge.files_written", "merge.manifest_switched"]
RESTORE_STEPS = [
    "restore.one_copied",
    "manifest.file_written",
    "manifest.renamed",
    "restore.manifest_switched",
    "append.before_commit",
    "append.committed",
]
PART_STEPS = [*MERGE_STEPS, "manifest.file_written", "manifest.renamed", "merge.begun"]
REPLACE_STEPS = [
    "merge.begun",
    "manifest.file_written",
    "manifest.renamed",
    "collect.manifest_switched",
    "collect.one_deleted",
]


@pytest.mark.parametrize("step", WRITER_STEPS)
def test_a_writer_killed_at_any_step_resumes_without_loss(tmp_path: Path, step: str) -> None:
    folder = tmp_path / "shop"
    assert run_child("write", folder, step) == -signal.SIGKILL, f"{step} was never reached"
    assert_whole(folder)
    write(folder)
    assert_whole(folder)
    log, store = open_log(folder)
    assert log.state().last == list(iter_frames(blocks()[-1]))[-1].position
    log.close()
    known = {run.id for run in store.read().runs}
    assert {path.name for path in store.runs_folder.iterdir()} == known


@pytest.mark.parametrize("step", REPLACE_STEPS)
def test_replacing_runs_killed_at_any_step_leaves_old_or_new(tmp_path: Path, step: str) -> None:
    folder = tmp_path / "shop"
    write(folder)
    assert run_child("replace", folder, step) == -signal.SIGKILL, f"{step} was never reached"
    assert_whole(folder)
    if step == "manifest.file_written":
        orphans = len(list(Store(folder).runs_folder.iterdir()))
        assert run_child("replace", folder, "sweep.one_deleted") == -signal.SIGKILL
        assert len(list(Store(folder).runs_folder.iterdir())) == orphans - 1
        assert_whole(folder)
    replace(folder)
    assert_whole(folder)
    store = Store(folder)
    assert len(store.read().chain) == 1
    assert len(list(store.runs_folder.iterdir())) == 1, "orphans are swept"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "steps"),
    [
        # Behind Spark's rows the steps are the same for both.
        pytest.param("merge", MERGE_STEPS[:2], marks=pytest.mark.spark),
        ("merge_here", MERGE_STEPS),
    ],
    ids=["merge", "merge_here"],
)
def test_an_applier_killed_at_one_step_after_the_other_resumes_without_loss(
    tmp_path: Path, action: str, steps: list[str]
) -> None:
    folder = tmp_path / "shop"
    write(folder)
    before: set[str] = set()
    for step in steps:
        assert run_child(action, folder, step) == -signal.SIGKILL, f"{step} was never reached"
        assert_whole(folder)
        left = left_behind(folder)
        assert len(left) == 1 and not left & before, "it sweeps what the one before has left"
        before = left
    assert run_child(action, folder, None) == 0
    assert left_behind(folder) == set()
    assert_whole(folder)
    store = Store(folder)
    base = store.read().base
    assert base is not None
    assert {path.name for path in store.runs_folder.iterdir()} == {
        run.id for run in store.read().runs
    }


@pytest.mark.parametrize("step", RESTORE_STEPS)
def test_a_restore_killed_at_any_step_is_repeated_and_the_writer_resumes(
    tmp_path: Path, step: str
) -> None:
    folder = tmp_path / "data" / "shop"
    write(folder)
    folder.parent.rename(copy_of(folder))
    shutil.rmtree(copy_of(folder) / "shop" / "log")
    folder.parent.mkdir()
    assert run_child("restore", folder, step) == -signal.SIGKILL, f"{step} was never reached"
    for _ in range(2):
        assert run_child("restore", folder, None) == 0
    assert_whole(folder)
    write(folder)
    assert_whole(folder)
    log, _ = open_log(folder)
    assert log.state().last == list(iter_frames(blocks()[-1]))[-1].position
    log.close()


@pytest.mark.slow
def test_an_applier_killed_in_each_part_of_a_base_resumes_without_loss(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    log, store = open_log(folder)
    taken = blocks()
    for number, block in enumerate(taken):
        log.append(block, 1)
        segments.seal(log, store, 1)
        if number == BLOCKS // 2:
            merge_in_parts(folder)
    log.close()
    killed: dict[str, set[int]] = {step: set() for step in PART_STEPS}
    base = store.read().base
    for step in itertools.islice(itertools.cycle(PART_STEPS), 60):
        before = store.read().unfinished
        code = run_child("merge_in_parts", folder, step)
        assert_whole(folder)
        if code == 0 and store.read().unfinished is None:
            break
        killed[step].add(before.tasks_done if before else 0)
    assert store.read().base != base and store.read().unfinished is None
    assert all(max(done) > 0 for done in killed.values()), "in a later part than the first"
    manifest = store.read()
    named = {(file.folder or run.id, file.name) for run in manifest.runs for file in run.files}
    assert run_child("merge_in_parts", folder, None) == 0
    assert {(path.parent.name, path.name) for path in store.runs_folder.glob("*/*")} == named


def test_every_step_is_killed_at_somewhere_in_this_file() -> None:
    covered = {*WRITER_STEPS, *REPLACE_STEPS, *RESTORE_STEPS, *MERGE_STEPS, "sweep.one_deleted"}
    assert covered == set(failpoints.STEPS)


if __name__ == "__main__":
    ACTIONS[sys.argv[1]](Path(sys.argv[2]))
