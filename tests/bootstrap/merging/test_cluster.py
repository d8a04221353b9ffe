"""The applier on a Spark cluster whose workers share nothing with it but the store on S3."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from databus.bootstrap.log import segments
from databus.bootstrap.log.configured_stores import Stores
from databus.bootstrap.log.hot_log import HotLog
from databus.bootstrap.runs.parquet_runs import RunKind
from databus.common import config as configuration
from databus.common.checkpoint import Position
from databus.common.frame.frame_format import Op, iter_frames
from databus.common.frame.window_builder import WindowBuilder
from databus.common.schema.source_schema import Column, Kind, SourceSchema
from tests.bootstrap.model import CLOCK, START, History, State, state_of
from tests.support.s3_server import Faults, S3Server
from tests.support.spark_cluster import SparkCluster
from tests.support.waiting import PATIENCE

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(500)]

ID, BODY = Column("id", Kind.INT, nullable=False), Column("body", Kind.STRING)
PROGRAM = "from databus.cli.main import app; app()"
CONFIG = """
[bootstrap]
data_dir = "{folder}/data"
store = "{store_url}"
segment_bytes = "4KiB"
retention_bytes = "1GiB"
spark_master = "{master}"
spark_driver_memory = "640m"
run_grace = "0s"

[bootstrap.s3]
endpoint = "{endpoint}"
region = "us-east-1"
access_key = "test"
secret_key = "not-a-secret"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    """A cluster for one test."""
    cluster = SparkCluster(tmp_path / "cluster")
    yield cluster
    cluster.close()


def test_workers_that_see_only_the_store_on_s3_merge_what_the_log_had(
    tmp_path: Path, cluster: SparkCluster, s3: S3Server
) -> None:
    store_url = s3.empty_prefix()
    file = tmp_path / "databus.toml"
    text = CONFIG.format(folder=tmp_path, store_url=store_url, master=cluster.url, endpoint=s3.url)
    file.write_text(text)
    section = configuration.load(file).bootstrap
    assert section is not None
    store = Stores(section).store("shop")
    log = HotLog(tmp_path / "data" / "shop" / "log")
    log.bind("shop", CLOCK, START)
    history = History(3, keys=40)
    blocks = [history.block(40) for _ in range(5)]
    schema = SourceSchema("shop.pages", (ID, BODY, Column("n", Kind.INT)), ("id",))
    log.add_schemas([schema])
    history.position = Position(history.position.scn + 1, 0)
    builder = WindowBuilder(history.position.scn, 1)
    for number in range(20):
        row = {"id": 1, "body": "" if number else "large", "n": number}
        builder.event(
            Op.UPDATE,
            schema.source_id,
            schema.fingerprint,
            schema.encode_key(row),
            after=schema.encode_row(row),
            absent=b"\x02" if number else b"",
        )
    pages = builder.end("pages")
    for block in (*blocks[:-1], blocks[-1] + pages):
        log.append(block, 1)
        segments.seal(log, store, 1)

    s3.faults = Faults(refused=0.005, lost=0.005)
    environment = {**os.environ, "SPARK_EXECUTOR_MEMORY": "512m"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "apply", "-c", str(file), "--once"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110 * PATIENCE,
        check=False,
    )
    s3.faults = Faults()
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"

    manifest = store.read()
    assert [run.kind for run in manifest.runs] == [RunKind.BASE, RunKind.DELTA]
    assert [record["kind"] for record in manifest.applies] == ["base", "delta"]
    assert sorted(store.storage.run_ids()) == sorted(run.id for run in manifest.runs)
    assert store.check() == []
    (key,) = {bytes(one.key) for one in iter_frames(pages) if one.op == Op.UPDATE}
    rows = state_of(store, log).rows
    (page,) = rows.pop((schema.source_id, key))
    assert schema.decode_row(page) == {"id": 1, "body": "large", "n": 19}, "of 20 frames one"
    assert rows == State().apply_all(blocks).rows
    log.close()
    assert all(count >= 1 for count in cluster.executors()), "both workers had an executor"
    pythons = cluster.pythons()
    assert pythons and set(pythons) == {"None"}, "no worker could import this project"
