"""SIGKILL at the steps of seal, manifest switch, merge and collection of a store on S3.

As in ``test_bootstrap_kill``, but what the child leaves behind lies in a bucket: files that
no manifest names, leases that no holder gave up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.merging.run_planner import Merge
from databus.bootstrap.runs import failpoints
from databus.bootstrap.runs.manifest import Store
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common.config import BootstrapConfig, S3Options
from tests.bootstrap.model import CLOCK, START
from tests.bootstrap.runs.test_s3_store import merged, open_store
from tests.faults.test_bootstrap_kill import ROOT, assert_equal, take_up
from tests.support.s3_server import S3Server
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(300)]

VARIABLES = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}


def on_s3(store_url: str) -> Store:
    """The store, its options from the environment."""
    return open_store(store_url, BootstrapConfig(s3=S3Options(region="us-east-1", lease_ttl=60)))


def write(folder: Path, store: Store) -> None:
    """The log writer, under its lease: take up the stream, seal every third block."""
    with store.lease("writer", owner="log-1"):
        log = HotLog(folder / "log")
        log.bind("shop", CLOCK, START)
        segments.finish(log, store, 1)
        take_up(log, store)
        log.close()


def merge(folder: Path, store: Store) -> None:
    """What the applier does around Spark, under its lease."""
    with store.lease("applier", owner="applier-1"):
        store.sweep("c")
        chain = store.read().chain
        if len(chain) > 1:
            failpoints.reach("merge.begun")
            run = merged(store, Merge(chain, RunKind.DELTA))
            failpoints.reach("merge.files_written")
            store.switch(lambda manifest: manifest.with_changes(add=run, drop=chain, now_us=1))
            failpoints.reach("merge.manifest_switched")
        store.collect(0, "cs", now_us=2)


ACTIONS = {"write": write, "merge": merge}


def run_child(server: S3Server, store_url: str, folder: Path, action: str, step: str) -> int:
    """Do ``action`` in a process of its own, dying at ``step``."""
    environment = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)}
    environment["AWS_ENDPOINT_URL"] = server.url
    environment[failpoints.VARIABLE] = step
    child = subprocess.run(
        [sys.executable, __file__, action, str(folder), store_url],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        timeout=100 * PATIENCE,
        check=False,
    )
    assert child.returncode in (0, -signal.SIGKILL), child.stderr.decode()[-3000:]
    return child.returncode


def assert_whole(folder: Path, store: Store) -> None:
    """Nothing lost, nothing double."""
    assert store.check() == []
    log = HotLog(folder / "log")
    try:
        segments.finish(log, store, 1)
        assert_equal(log, store)
    finally:
        log.close()


@pytest.mark.parametrize(
    ("action", "step"),
    [
        ("write", "manifest.file_written"),
        ("write", "seal.file_written"),
        ("write", "seal.manifest_switched"),
        ("write", "seal.log_dropped"),
        ("write", "manifest.renamed"),
        ("merge", "merge.files_written"),
        ("merge", "merge.manifest_switched"),
        ("merge", "collect.manifest_switched"),
        ("merge", "collect.one_deleted"),
    ],
)
def test_killed_at_any_step_it_resumes_without_loss(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, action: str, step: str
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    store_url = s3.empty_prefix()
    store = on_s3(store_url)
    if action == "merge":
        write(tmp_path, store)
    killed = run_child(s3, store_url, tmp_path, action, step)
    assert killed == -signal.SIGKILL, f"{step} was never reached"
    assert_whole(tmp_path, store)
    if step == "merge.files_written":
        orphans = set(store.storage.run_ids())
        assert run_child(s3, store_url, tmp_path, action, "sweep.one_deleted") == -signal.SIGKILL
        assert len(orphans - set(store.storage.run_ids())) == 1
        assert_whole(tmp_path, store)
    ACTIONS[action](tmp_path, on_s3(store_url))
    assert_whole(tmp_path, store)
    assert set(store.storage.run_ids()) == {run.id for run in store.read().runs}


if __name__ == "__main__":
    ACTIONS[sys.argv[1]](Path(sys.argv[2]), on_s3(sys.argv[3]))
